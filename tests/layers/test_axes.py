"""Axes are followed as NumPy moves the elements: each is a number that says where it came from."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from curvax.layers.detection.axes import Arrangement, Axes


def rearranged(draw):
    """An array of all different numbers, re-arranged at random, and its axes."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3))
    x = np.arange(math.prod(shape)).reshape(shape)
    axes = Axes.of(shape)
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["transpose", "reshape", "squeeze", "expand"]))
        if kind == "transpose":
            order = draw(st.permutations(range(x.ndim)))
            x, axes = x.transpose(order), axes.transpose(order)
        elif kind == "reshape":
            new = draw(st.sampled_from(shapes_of_size(x.size)))
            moved = axes.reshape(new)
            if moved is not None:
                x, axes = x.reshape(new), moved
        elif kind == "squeeze":
            ones = [i for i, size in enumerate(x.shape) if size == 1]
            x, axes = np.squeeze(x, tuple(ones)), axes.squeeze(ones)
        else:
            place = draw(st.integers(0, x.ndim))
            x, axes = np.expand_dims(x, place), axes.expand([place])
    return shape, x, axes


def shapes_of_size(size):
    found = [(size,)]
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    found += [(a, size // a) for a in divisors]
    pairs = itertools.product(divisors, divisors)
    return found + [(a, b, size // a // b) for a, b in pairs if size % (a * b) == 0]


@given(st.data())
def test_each_element_is_where_its_atoms_say(data):
    shape, x, axes = rearranged(data.draw)
    assert axes.shape == x.shape
    digits = lambda index, dim: np.unravel_index(index, [atom.size for atom in dim] or [1])
    for place in np.ndindex(*x.shape):
        origin = [0] * len(shape)
        for index, dim in zip(place, axes.dims, strict=True):
            for digit, atom in zip(digits(index, dim), dim, strict=False):
                origin[atom.origin] += int(digit) * atom.stride
        assert x[place] == np.ravel_multi_index(origin, shape)


@given(st.data())
def test_an_arrangement_can_be_undone(data):
    _, x, axes = rearranged(data.draw)
    atoms = data.draw(st.permutations([atom for dim in axes.dims for atom in dim]))
    cut = data.draw(st.integers(0, len(atoms)))
    arrangement = Arrangement.of(axes.dims, [atoms[:cut], atoms[cut:]])
    moved = arrangement.apply(x)
    assert moved.shape == tuple(
        math.prod(a.size for a in part) for part in (atoms[:cut], atoms[cut:])
    )
    np.testing.assert_array_equal(arrangement.undo(moved), x)


@given(st.data())
def test_the_array_as_it_started_has_the_same_atoms(data):
    shape, x, axes = rearranged(data.draw)
    start = Arrangement.of(axes.origin_dims(), [[atom] for dim in axes.dims for atom in dim])
    moved = start.apply(np.arange(x.size).reshape(shape))
    np.testing.assert_array_equal(moved.reshape(x.shape), x)


def test_a_broadcast_axis_has_no_origin():
    axes = Axes.of((2, 3)).broadcast((4, 2, 1, 3), (1, 3))
    assert axes.shape == (4, 2, 1, 3)
    assert [[atom.origin for atom in dim] for dim in axes.dims] == [[None], [0], [], [1]]


@pytest.mark.parametrize(("shape", "new"), [((2, 3), (3, 2)), ((6, 5), (10, 3)), ((0,), (0, 1))])
def test_axes_that_are_mixed_are_given_up(shape, new):
    assert Axes.of(shape).reshape(new) is None


def test_groups_must_be_all_of_the_axes():
    axes = Axes.of((2, 3))
    with pytest.raises(ValueError, match="are not the axes"):
        Arrangement.of(axes.dims, [axes.dims[0]])
