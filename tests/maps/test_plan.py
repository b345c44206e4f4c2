"""A chunk plan deals out every example once, in the order it promises."""

from itertools import chain

import pytest
from hypothesis import given, strategies as st

from curvax._slicing import Column
from curvax.maps.chunk_plan import Chunk, ChunkPlan

plans = st.builds(
    ChunkPlan,
    length=st.integers(0, 60),
    size=st.integers(1, 70),
    order=st.sampled_from(["contiguous", "strided"]),
)


def examples(plan: ChunkPlan, limit: int | None = None) -> list[list[int]]:
    """What each chunk holds, by its own account."""
    held = []
    for run in plan.runs(limit):
        for index in range(run.first, run.first + run.count):
            rows = Chunk(plan, run, index).rows
            if isinstance(rows, Column):
                held.append(list(range(plan.length))[rows.index :: plan.num_chunks])
            else:
                held.append([rows.start + rows.stride * i for i in range(rows.size)])
    return held


@given(plans)
def test_every_example_is_in_one_chunk(plan):
    assert sorted(chain.from_iterable(examples(plan))) == list(range(plan.length))


@given(plans)
def test_no_chunk_is_larger_than_asked_for(plan):
    assert all(len(chunk) <= plan.size for chunk in examples(plan))
    assert len(examples(plan)) == plan.num_chunks


@given(st.integers(0, 60), st.integers(1, 70))
def test_strided_chunk_i_holds_every_mth_example_from_i(length, size):
    plan = ChunkPlan(length, size, "strided")
    everything = list(range(length))
    assert examples(plan) == [everything[i :: plan.num_chunks] for i in range(plan.num_chunks)]


@given(st.integers(1, 60), st.integers(1, 70))
def test_contiguous_chunks_are_slices(length, size):
    plan = ChunkPlan(length, size)
    assert examples(plan) == [list(range(length))[i : i + size] for i in range(0, length, size)]


@given(plans)
def test_balanced_has_as_many_chunks_and_none_larger(plan):
    balanced = plan.balanced()
    assert balanced.num_chunks == plan.num_chunks
    assert balanced.size <= max(1, plan.size)
    assert balanced.num_chunks * balanced.size - balanced.length < balanced.num_chunks or (
        balanced.length == 0
    )


def test_balanced_avoids_a_short_chunk_where_it_can():
    assert [run.size for run in ChunkPlan(1000, 300).balanced().runs()] == [250]


@given(plans, st.integers(0, 70))
def test_a_limit_takes_the_first_chunks(plan, limit):
    assert examples(plan, limit) == examples(plan)[:limit]


@given(plans)
def test_chunks_know_how_many_examples_came_before(plan):
    seen = 0
    for run in plan.runs():
        for index in range(run.first, run.first + run.count):
            chunk = Chunk(plan, run, index)
            assert chunk.examples_before == seen
            seen += chunk.size


@given(st.integers(0, 60), st.one_of(st.none(), st.integers(1, 70)))
def test_no_size_or_too_large_a_size_means_one_chunk(length, size):
    plan = ChunkPlan.of(length, size)
    if size is None or size >= length:
        assert plan.num_chunks == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((-1, 2), "never negative, got -1"),
        ((3, 0), "at least one example, got size 0"),
    ],
)
def test_an_invalid_plan_is_rejected(arguments, words):
    with pytest.raises(ValueError, match=words):
        ChunkPlan(*arguments)
