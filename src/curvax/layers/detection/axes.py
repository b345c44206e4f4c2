"""`Axes`: where the axes of an array go when it is transposed, reshaped and broadcast.

Each axis of the original array is an `Atom` or, where a reshape split it, several. Each axis of the
current array is a sequence of atoms, as einops writes `(b t) d`. A broadcast axis is an atom
without an origin.

Given `Axes`, an array laid out like the current one can be brought into any order of the atoms, and
back (`Arrangement`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Atom:
    """A factor of an axis: the digit of given `stride` and `size` in an index along axis `origin`.

    An index along an original axis is the sum of `stride * digit` over its atoms. `origin` is None
    for an axis that was broadcast.

    Examples:
        An axis of 6 elements, reshaped to (2, 3): index 5 is 3 * 1 + 1 * 2.

        >>> Atom(origin=0, stride=1, size=6).split(2)
        (Atom(origin=0, stride=3, size=2), Atom(origin=0, stride=1, size=3))
    """

    origin: int | None
    stride: int
    size: int

    def split(self, major: int) -> tuple["Atom", "Atom"]:
        """Split into two atoms, the first (more significant) one of the given size."""
        minor = self.size // major
        return (
            Atom(self.origin, self.stride * minor, major),
            Atom(self.origin, self.stride, minor),
        )


Dims = tuple[tuple[Atom, ...], ...]
"""The atoms of each axis of an array."""


def refined(one: Sequence[Atom], other: Sequence[Atom]) -> list[tuple[Atom, Atom]] | None:
    """Refine two factorisations of one axis until their atoms have the same sizes.

    Returns:
        Pairs of atoms, one of each factorisation; None if the sizes do not divide each other.
    """
    left, right = list(one), list(other)
    pairs: list[tuple[Atom, Atom]] = []
    while left and right:
        a, b = left.pop(0), right.pop(0)
        size = min(a.size, b.size)
        if not size or a.size % size or b.size % size:
            return None
        # The more significant parts have the same size; the rest is matched in the next round.
        if a.size > size:
            a, rest = a.split(size)
            left.insert(0, rest)
        if b.size > size:
            b, rest = b.split(size)
            right.insert(0, rest)
        pairs.append((a, b))
    return None if left or right else pairs


@dataclass(frozen=True)
class Axes:
    """Where the axes of an array of shape `origin` have gone.

    Attributes:
        origin: Shape of the original array.
        dims: Atoms of each axis of the current array. Axes of size one have no atoms.
        looped: For each loop around the current array, outermost first, the atoms of the axis that
            the loop scans over; () if all steps share the array.

    Examples:
        Time-major sequences, with time and batch merged into one axis:

        >>> axes = Axes.of((2, 3, 4)).transpose((1, 0, 2)).reshape((6, 4))
        >>> [[atom.origin for atom in dim] for dim in axes.dims]
        [[1, 0], [2]]
    """

    origin: tuple[int, ...]
    dims: Dims
    looped: Dims = ()

    @classmethod
    def of(cls, shape: Sequence[int]) -> "Axes":
        """Return the axes of an original array."""
        dims = tuple((Atom(axis, 1, size),) if size != 1 else () for axis, size in enumerate(shape))
        return cls(tuple(shape), dims)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the current array."""
        return tuple(math.prod(atom.size for atom in dim) for dim in self.dims)

    @property
    def atoms(self) -> tuple[Atom, ...]:
        """The atoms of the current array, in the order of its axes."""
        return joined(self.dims)

    def atoms_of(self, origins: Sequence[int]) -> tuple[Atom, ...]:
        """Return the atoms that belong to some original axes, in the order of these."""
        found = [atom for atom in self.atoms if atom.origin in origins]
        order = lambda atom: (origins.index(atom.origin), -atom.stride)
        return tuple(sorted(found, key=order))

    def origin_dims(self) -> Dims:
        """Return the atoms of each axis of the original array."""
        atoms = [*self.atoms, *(atom for dim in self.looped for atom in dim)]
        return tuple(
            tuple(sorted((a for a in atoms if a.origin == axis), key=lambda a: -a.stride))
            for axis in range(len(self.origin))
        )

    def transpose(self, permutation: Sequence[int]) -> "Axes":
        return replace(self, dims=tuple(self.dims[axis] for axis in permutation))

    def squeeze(self, axes: Sequence[int]) -> "Axes":
        kept = [dim for axis, dim in enumerate(self.dims) if axis not in axes]
        return replace(self, dims=tuple(kept))

    def expand(self, axes: Sequence[int]) -> "Axes":
        """Insert axes of size one, at these positions of the result."""
        old = iter(self.dims)
        count = len(self.dims) + len(axes)
        return replace(self, dims=tuple(() if i in axes else next(old) for i in range(count)))

    def broadcast(self, shape: Sequence[int], axes: Sequence[int]) -> "Axes":
        """Broadcast as `lax.broadcast_in_dim` does: axis k becomes axis `axes[k]` of `shape`."""
        dims: list[tuple[Atom, ...]] = []
        old = dict(zip(axes, self.dims, strict=True))
        for axis, size in enumerate(shape):
            dim = old.get(axis, ())
            dims.append(dim or ((Atom(None, 1, size),) if size != 1 else ()))
        return replace(self, dims=tuple(dims))

    def reshape(self, shape: Sequence[int]) -> "Axes | None":
        """Reshape; None if an axis of the result would not be a product of atoms."""
        if 0 in shape or 0 in self.shape:
            return None
        atoms = [atom for dim in self.dims for atom in dim]
        dims: list[tuple[Atom, ...]] = []
        for size in shape:
            dim: list[Atom] = []
            while size > 1:
                if not atoms:
                    return None
                atom = atoms.pop(0)
                if atom.size > size:
                    if atom.size % size:
                        return None
                    atom, rest = atom.split(size)
                    atoms.insert(0, rest)
                if size % atom.size:
                    return None
                size //= atom.size
                dim.append(atom)
            dims.append(tuple(dim))
        return None if atoms else replace(self, dims=tuple(dims))

    def slice(
        self, axis: int, start: int, stop: int
    ) -> "tuple[Axes, tuple[int, int, int] | None] | None":
        """Take the elements from `start` to `stop` along an axis.

        Returns:
            The axes of the slice, and `(axis, start, stop)` of the same slice of the original
            array, which is None if the sliced axis was broadcast. None instead of both if the
            elements are not one contiguous slice of the original array.
        """
        if start >= stop or not self.dims[axis]:
            return None
        first, *rest = self.dims[axis]
        minor = math.prod(atom.size for atom in rest)
        if start % minor or stop % minor:
            return None
        start, stop = start // minor, stop // minor
        origin, stride, size = first.origin, first.stride, stop - start
        if origin is not None and stride * first.size != self.origin[origin]:
            return None
        kept = [Atom(origin, stride, size)] if size > 1 else []
        shorter = replace(self, dims=(*self.dims[:axis], (*kept, *rest), *self.dims[axis + 1 :]))
        if origin is None:
            return shorter, None
        sizes = (*self.origin[:origin], size * stride, *self.origin[origin + 1 :])
        return replace(shorter, origin=sizes), (origin, start * stride, stop * stride)

    def inside_loop(self, element: bool) -> "Axes":
        """Enter a loop, each step of which takes one `element` of the first axis, or the array."""
        if not element:
            return replace(self, looped=(*self.looped, ()))
        return replace(self, dims=self.dims[1:], looped=(*self.looped, self.dims[0]))


@dataclass(frozen=True)
class Arrangement:
    """A reshape, a transpose and a reshape, which can be undone.

    Attributes:
        shape: Shape of the array to arrange.
        parts: Shape to reshape it to: the sizes of its atoms.
        permutation: How to transpose that.
        groups: Shape of the result: the atoms of a group are merged into one axis.

    Examples:
        >>> import numpy as np
        >>> b, t, d = Axes.of((2, 3, 4)).dims
        >>> arrangement = Arrangement.of((b, t, d), [(*t, *b), d])
        >>> x = np.zeros((2, 3, 4))
        >>> arrangement.apply(x).shape, arrangement.undo(arrangement.apply(x)).shape
        ((6, 4), (2, 3, 4))
    """

    shape: tuple[int, ...]
    parts: tuple[int, ...]
    permutation: tuple[int, ...]
    groups: tuple[int, ...]

    @classmethod
    def of(cls, dims: Dims, groups: Sequence[Sequence[Atom]]) -> "Arrangement":
        """Arrange an array of axes `dims` into `groups` of atoms, which together are all atoms."""
        shape = tuple(math.prod(atom.size for atom in dim) for dim in dims)
        atoms = [atom for dim in dims for atom in dim]
        order = [atoms.index(atom) for group in groups for atom in group]
        if sorted(order) != list(range(len(atoms))):
            raise ValueError(f"{groups} are not the axes {dims}")
        sizes = tuple(math.prod(atom.size for atom in group) for group in groups)
        return cls(shape, tuple(atom.size for atom in atoms), tuple(order), sizes)

    @property
    def is_trivial(self) -> bool:
        """Whether `apply` is the identity."""
        in_order = self.permutation == tuple(range(len(self.permutation)))
        return in_order and self.shape == self.groups

    def apply(self, x: Any) -> Any:
        """Return the array in the new order."""
        if self.is_trivial:
            return x
        return x.reshape(self.parts).transpose(self.permutation).reshape(self.groups)

    def undo(self, x: Any) -> Any:
        """Invert `apply`."""
        if self.is_trivial:
            return x
        moved = tuple(self.parts[axis] for axis in self.permutation)
        back = tuple(self.permutation.index(axis) for axis in range(len(self.parts)))
        return x.reshape(moved).transpose(back).reshape(self.shape)

    def with_axes(self, before: Sequence[int] = (), after: Sequence[int] = ()) -> "Arrangement":
        """Return the same arrangement for arrays with further leading and trailing axes."""
        first, last = tuple(before), tuple(after)
        skip, end = len(first), len(first) + len(self.parts)
        moved = (skip + axis for axis in self.permutation)
        return Arrangement(
            (*first, *self.shape, *last),
            (*first, *self.parts, *last),
            (*range(skip), *moved, *range(end, end + len(last))),
            (*first, *self.groups, *last),
        )


def joined(dims: Sequence[Sequence[Atom]]) -> tuple[Atom, ...]:
    """Return the atoms of several axes as those of one axis."""
    return tuple(atom for dim in dims for atom in dim)


# Operations that only rearrange the elements of an array, and what they do to its axes.


def ints(numbers: Any) -> tuple[int, ...]:
    """Return Python integers; some transformations leave NumPy integers in an equation."""
    return tuple(map(int, numbers))


_same: Callable[[Axes, dict[str, Any]], Axes] = lambda axes, _: axes

REARRANGED: dict[str, Callable[[Axes, dict[str, Any]], Axes | None]] = {
    "transpose": lambda axes, params: axes.transpose(ints(params["permutation"])),
    "reshape": lambda axes, params: (
        None if params.get("dimensions") is not None else axes.reshape(ints(params["new_sizes"]))
    ),
    "broadcast_in_dim": lambda axes, params: axes.broadcast(
        ints(params["shape"]), ints(params["broadcast_dimensions"])
    ),
    "squeeze": lambda axes, params: axes.squeeze(ints(params["dimensions"])),
    "convert_element_type": _same,
    "copy": _same,
    "copy_p": _same,
    "device_put": _same,
    "sharding_constraint": _same,
    "reduce_precision": _same,
    "optimization_barrier": _same,
    "name": _same,
    "CheckpointName": _same,
    "pvary": _same,
    "pcast": _same,
    "reshard": _same,
    "mesh_cast": _same,
}
"""Operations that only rearrange elements, and what they do to axes; None if that is unknown."""
