"""The largest size that fits is found with few questions, whatever the needs look like.

In plain Python: a program is its needs as a function of the size, and a question is a call of it.
"""

import math
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from curvax.memory.plan import CACHE_BYTES, LARGEST, SMALLEST, fast_size, largest_that_fits


class Needs:
    """A function of sizes that records what it was asked, and refuses to be asked forever."""

    def __init__(self, fun, most_questions=40):
        self.fun, self.asked, self.most_questions = fun, [], most_questions

    def __call__(self, size):
        assert size not in self.asked, f"{size} was asked before: {self.asked}"
        assert len(self.asked) < self.most_questions, f"too many questions: {self.asked}"
        self.asked.append(size)
        return self.fun(size)


def search(fun, sizes, budget):
    """The size that was found, and the questions; checked for what always holds."""
    needs = Needs(fun)
    found = largest_that_fits(needs, sizes, budget)
    assert all(size in sizes for size in needs.asked)
    fitting = [size for size in needs.asked if fun(size) <= budget]
    assert found == max(fitting, default=None)
    if found is None:
        assert sizes[0] in needs.asked
    return found, needs.asked


most_sizes = st.integers(1, 20) | st.integers(1, 1000) | st.integers(1, 10**7)


@st.composite
def affine(draw):
    """Needs `fixed + slope * size`, most of it in the slope or most of it fixed."""
    slope = draw(st.integers(1, 100) | st.integers(1, 10**9))
    fixed = draw(st.integers(0, 10) | st.integers(0, 10**6) | st.integers(0, 10**12))
    return lambda size: fixed + slope * size


@st.composite
def affine_cases(draw):
    """Affine needs, the largest size, and a budget that some size meets."""
    needs, last = draw(affine()), draw(most_sizes)
    largest = draw(st.integers(1, last) | st.integers(1, 2 * last))
    step = needs(2) - needs(1)
    return needs, last, needs(largest) + draw(st.integers(0, step - 1))


@settings(max_examples=500)
@given(affine_cases())
def test_affine_needs_take_four_questions_at_most(case):
    needs, last, budget = case
    found, asked = search(needs, range(1, last + 1), budget)
    largest = min(last, (budget - needs(0)) // (needs(2) - needs(1)))
    assert largest / 1.05 <= found <= largest
    above = math.ceil(1.1 * found)
    assert above > last or needs(above) > budget
    assert len(asked) <= 4, asked


@settings(max_examples=200)
@given(affine(), most_sizes, st.integers(0, 10**6))
def test_when_nothing_fits_the_smallest_has_been_asked(needs, last, missing):
    found, asked = search(needs, range(1, last + 1), needs(1) - 1 - missing)
    assert found is None
    assert 1 in asked
    assert len(asked) <= 4 + math.log2(last + 1)


@given(affine(), most_sizes)
def test_the_needs_of_the_smallest_are_a_budget_that_does(needs, last):
    assert search(needs, range(1, last + 1), needs(1))[0] == 1


@settings(max_examples=200)
@given(affine_cases(), st.randoms(use_true_random=False))
def test_needs_that_are_affine_to_a_percent(case, noise):
    """As compiled programs are. A tenth more does not fit, unless the noise alone decides."""
    needs, last, budget = case
    table = {}
    noisy = lambda size: table.setdefault(size, int(needs(size) * noise.uniform(0.995, 1.005)))
    found, asked = search(noisy, range(1, last + 1), int(1.01 * budget))
    assert found is not None
    assert len(asked) <= 12
    if needs(0) < needs(last) / 100:  # Otherwise a percent of all is more than a tenth in size.
        above = math.ceil(1.15 * found)
        assert above > last or 0.995 * needs(above) > 1.005 * budget


def steps(size):
    """Buffers in powers of two."""
    return 1 << (size - 1).bit_length()


SHAPES = {
    "steps": lambda size: 1000 * steps(size),
    "wide steps": lambda size: 10**6 * (1 + size // 97),
    "convex": lambda size: 50 * size**2,
    "very convex": lambda size: 5 + size**6,
    "concave": lambda size: int(10**5 * math.sqrt(size)),
    "very concave": lambda size: int(10**6 * math.log(size + 1)),
    "constant": lambda size: 4096,
    "nothing": lambda size: 0,
    "decreasing": lambda size: 10**9 // size,
    "valley": lambda size: 10**7 // size + 100 * size,
    "a jump": lambda size: 10 if size < 77 else 10**9,
    "one is special": lambda size: 10**6 if size == 1 else 100 * size,
    "by parity": lambda size: 1000 * size + 10**5 * (size % 2),
    "random": lambda size: random.Random(size).randrange(10**6),
}
SMOOTH = ["convex", "very convex", "concave", "very concave", "constant", "nothing", "a jump"]


@settings(max_examples=100)
@given(most_sizes, st.integers(0, 10**4) | st.integers(0, 10**12))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_whatever_the_needs_the_answer_fits_and_comes_soon(shape, last, budget):
    search(shape, range(1, last + 1), budget)  # The checks are there.


@settings(max_examples=100)
@given(most_sizes, st.integers(0, 10**4) | st.integers(0, 10**12))
@pytest.mark.parametrize("name", SMOOTH)
def test_needs_that_bend_are_not_missed_by_a_tenth(name, last, budget):
    shape = SHAPES[name]
    found, _ = search(shape, range(1, last + 1), budget)
    above = 1 if found is None else math.ceil(1.1 * found)
    assert above > last or shape(above) > budget


@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=40, unique=True).map(sorted),
    affine(),
    st.data(),
)
def test_sizes_need_not_be_a_range(sizes, needs, data):
    """They may be the divisors of something, or powers of two."""
    budget = needs(data.draw(st.integers(0, 10**6)))
    found, _ = search(needs, sizes, budget)
    fitting = [size for size in sizes if needs(size) <= budget]
    if found is None:
        assert not fitting
    else:
        assert found >= max(fitting) / 1.05


@pytest.mark.parametrize("budget", [99, 100, 101])
def test_a_single_size_is_asked_once(budget):
    found, asked = search(lambda size: 100, [8], budget)
    assert asked == [8]
    assert found == (8 if budget >= 100 else None)


class TestTheFastSize:
    """A power of two whose temporaries fill the cache, found from two sizes at most."""

    def found(self, temporaries, sizes=range(1, 1001)):
        needs = Needs(temporaries, most_questions=2)
        size = fast_size(needs, sizes)
        assert size in sizes
        assert all(asked in sizes for asked in needs.asked)
        return size

    @pytest.mark.parametrize("size", [8, 16, 32, 64, 128])
    @pytest.mark.parametrize("fixed", [0, 10**9])
    def test_temporaries_fill_the_cache(self, size, fixed):
        assert self.found(lambda n: fixed + n * CACHE_BYTES // size) == size

    @given(each=st.integers(1, 10**12))
    def test_it_is_a_power_of_two_between_two_bounds(self, each):
        size = self.found(lambda n: n * each)
        assert SMALLEST <= size <= LARGEST
        assert math.log2(size).is_integer()

    def test_programs_that_do_not_grow_may_be_large(self):
        assert self.found(lambda n: 1000) == self.found(lambda n: 1000 - n) == LARGEST

    @given(
        sizes=st.sets(st.integers(1, 500), min_size=1).map(sorted),
        each=st.integers(1, CACHE_BYTES),
    )
    def test_it_is_one_of_the_sizes(self, sizes, each):
        size = self.found(lambda n: n * each, sizes)
        assert size <= LARGEST or size == sizes[0]
