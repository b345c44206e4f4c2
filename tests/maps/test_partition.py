"""Examples are dealt out to devices as evenly as can be, each to one of them."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from curvax.maps.chunk_plan import Chunk, ChunkPlan
from curvax.maps.sharding import Partition

NUMBERS = {"length": st.integers(1, 50), "count": st.integers(1, 9)}


@given(**NUMBERS)
def test_each_example_is_in_one_chunk_of_one_device(length, count):
    partition = Partition(length, count)
    examples = partition.example_of_slot()
    assert examples.shape[0] == count
    assert examples.min() >= 0
    assert examples.max() < length
    assert examples.ravel()[partition.slot_of_example()].tolist() == list(range(length))


@given(**NUMBERS)
def test_the_first_devices_have_one_example_more(length, count):
    partition = Partition(length, count)
    most = partition.example_of_slot().shape[1]
    owned = np.bincount(partition.slot_of_example() // most, minlength=count)
    assert owned.tolist() == [
        partition.each + (device < partition.remainder) for device in range(count)
    ]
    assert most == owned.max()
    # Where a device has less, it is its last place that is not its own.
    for device in range(count):
        inside = partition.slot_of_example()[partition.slot_of_example() // most == device] % most
        assert inside.tolist() == list(range(owned[device]))


def test_without_examples_there_are_no_chunks():
    assert Partition(0, 3).is_even
    assert Partition(0, 3).example_of_slot().shape == (3, 0)
    assert Partition(0, 3).slot_of_example().size == 0


@given(length=st.integers(0, 20), size=st.integers(1, 8))
def test_an_optional_example_is_a_chunk_of_its_own(length, size):
    plan = ChunkPlan.of(length, size).with_optional()
    *others, last = plan.runs()
    assert last.count == last.size == 1
    assert last.before == length
    assert plan.num_chunks == sum(run.count for run in plan.runs())
    assert tuple(others) == (ChunkPlan.of(length, size).runs() if length else ())
    starts = [
        Chunk(plan, run, run.first + i).rows.start for run in plan.runs() for i in range(run.count)
    ]
    sizes = [run.size for run in plan.runs() for _ in range(run.count)]
    assert starts == list(np.cumsum([0, *sizes[:-1]]))
    assert sum(sizes) == length + 1


def test_only_a_contiguous_plan_has_an_optional_example():
    with pytest.raises(ValueError, match="contiguous"):
        ChunkPlan(3, 2, "strided", optional_last=True)
