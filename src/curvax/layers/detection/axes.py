"""Axes that keep their identity while an array is re-arranged.

Transposing, reshaping, broadcasting and squeezing an array move its axes about, merge and split
them. `Axes` follows them: each axis of the array as it started is an `Atom` or, where a reshape
split it, several; each axis of the array as it is now is a sequence of atoms. What was
broadcast is an atom without an origin.

Given both, any array that is laid out like the second can be brought into any order of the atoms,
and back (`Arrangement`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Atom:
    """A part of an axis: of axis `origin`, or of none; the `stride`-th part of `size` of it.

    Within its axis, atoms with larger strides come first, as the digits of a number.
    """

    origin: int | None
    stride: int
    size: int

    def split(self, major: int) -> tuple["Atom", "Atom"]:
        """Two atoms in place of this, the first of the given size."""
        minor = self.size // major
        return (
            Atom(self.origin, self.stride * minor, major),
            Atom(self.origin, self.stride, minor),
        )


Dims = tuple[tuple[Atom, ...], ...]
"""The atoms of each axis of an array."""


def refined(one: Sequence[Atom], other: Sequence[Atom]) -> list[tuple[Atom, Atom]] | None:
    """Split the atoms of two factorisations of one axis until they are of the same sizes.

    Returns pairs of atoms, one of each factorisation, or None if the sizes do not divide.
    """
    left, right = list(one), list(other)
    pairs: list[tuple[Atom, Atom]] = []
    while left and right:
        a, b = left.pop(0), right.pop(0)
        size = min(a.size, b.size)
        if not size or a.size % size or b.size % size:
            return None
        # The minor part is split further: the major part of both is of the same size.
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
    """Where the axes of an array of shape `origin` have gone: the atoms of each axis it has now.

    Axes and atoms of size one have nothing to keep track of. `looped` has an entry for each loop
    around, outermost first: the axis along which it takes one element after the other, or nothing
    if it takes the array as it is.
    """

    origin: tuple[int, ...]
    dims: Dims
    looped: Dims = ()

    @classmethod
    def of(cls, shape: Sequence[int]) -> "Axes":
        """The axes of an array that was not re-arranged yet."""
        dims = tuple((Atom(axis, 1, size),) if size != 1 else () for axis, size in enumerate(shape))
        return cls(tuple(shape), dims)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array as it is now."""
        return tuple(math.prod(atom.size for atom in dim) for dim in self.dims)

    @property
    def atoms(self) -> tuple[Atom, ...]:
        """All atoms, in the order in which they are now."""
        return tuple(atom for dim in self.dims for atom in dim)

    def origin_dims(self) -> Dims:
        """The atoms of each axis of the array as it started."""
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
        """With new axes of size one, at these places of the result."""
        old = iter(self.dims)
        count = len(self.dims) + len(axes)
        return replace(self, dims=tuple(() if i in axes else next(old) for i in range(count)))

    def broadcast(self, shape: Sequence[int], axes: Sequence[int]) -> "Axes":
        """As `lax.broadcast_in_dim` does: old axis k becomes axis `axes[k]` of the shape."""
        dims: list[tuple[Atom, ...]] = []
        old = dict(zip(axes, self.dims, strict=True))
        for axis, size in enumerate(shape):
            dim = old.get(axis, ())
            dims.append(dim or ((Atom(None, 1, size),) if size != 1 else ()))
        return replace(self, dims=tuple(dims))

    def reshape(self, shape: Sequence[int]) -> "Axes | None":
        """In another shape; None if that mixes axes so that they cannot be told apart."""
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

    def cut(
        self, axis: int, start: int, stop: int
    ) -> "tuple[Axes, tuple[int, int, int] | None] | None":
        """What is from `start` to `stop` along an axis, and which part of which axis that was.

        The latter is None if the array was only repeated there. None if it is not one piece of the
        array as it started.
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
        """As a loop takes it: one element along the first axis, or all of it in each step."""
        if not element:
            return replace(self, looped=(*self.looped, ()))
        return replace(self, dims=self.dims[1:], looped=(*self.looped, self.dims[0]))


@dataclass(frozen=True)
class Arrangement:
    """How to bring an array into an order of its axes, merged into groups, and back.

    The array of the given `shape` is reshaped to `parts`, transposed, and reshaped to the sizes of
    the groups.
    """

    shape: tuple[int, ...]
    parts: tuple[int, ...]
    permutation: tuple[int, ...]
    groups: tuple[int, ...]

    @classmethod
    def of(cls, dims: Dims, groups: Sequence[Sequence[Atom]]) -> "Arrangement":
        """To the atoms of each group, in order. Together these are all atoms of the axes."""
        shape = tuple(math.prod(atom.size for atom in dim) for dim in dims)
        atoms = [atom for dim in dims for atom in dim]
        order = [atoms.index(atom) for group in groups for atom in group]
        if sorted(order) != list(range(len(atoms))):
            raise ValueError(f"{groups} are not the axes {dims}")
        sizes = tuple(math.prod(atom.size for atom in group) for group in groups)
        return cls(shape, tuple(atom.size for atom in atoms), tuple(order), sizes)

    @property
    def is_trivial(self) -> bool:
        """Whether there is nothing to do."""
        in_order = self.permutation == tuple(range(len(self.permutation)))
        return in_order and self.shape == self.groups

    def apply(self, x: Any) -> Any:
        """The array in the new order."""
        if self.is_trivial:
            return x
        return x.reshape(self.parts).transpose(self.permutation).reshape(self.groups)

    def undo(self, x: Any) -> Any:
        """Inverse of `apply`."""
        if self.is_trivial:
            return x
        moved = tuple(self.parts[axis] for axis in self.permutation)
        back = tuple(self.permutation.index(axis) for axis in range(len(self.parts)))
        return x.reshape(moved).transpose(back).reshape(self.shape)

    def with_axes(self, before: Sequence[int] = (), after: Sequence[int] = ()) -> "Arrangement":
        """The same for arrays that have further axes of these sizes, which stay where they are."""
        first, last = tuple(before), tuple(after)
        skip, end = len(first), len(first) + len(self.parts)
        moved = (skip + axis for axis in self.permutation)
        return Arrangement(
            (*first, *self.shape, *last),
            (*first, *self.parts, *last),
            (*range(skip), *moved, *range(end, end + len(last))),
            (*first, *self.groups, *last),
        )


# Operations that only move the elements of an array about, and what they do to its axes.


def _ints(numbers: Any) -> tuple[int, ...]:
    """Plain integers; some transformations leave NumPy's in the parameters of an operation."""
    return tuple(map(int, numbers))


_same: Callable[[Axes, dict[str, Any]], Axes] = lambda axes, _: axes

REARRANGED: dict[str, Callable[[Axes, dict[str, Any]], Axes | None]] = {
    "transpose": lambda axes, params: axes.transpose(_ints(params["permutation"])),
    "reshape": lambda axes, params: (
        None if params.get("dimensions") is not None else axes.reshape(_ints(params["new_sizes"]))
    ),
    "broadcast_in_dim": lambda axes, params: axes.broadcast(
        _ints(params["shape"]), _ints(params["broadcast_dimensions"])
    ),
    "squeeze": lambda axes, params: axes.squeeze(_ints(params["dimensions"])),
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
"""Operations that only move elements about, and what they do to axes."""
