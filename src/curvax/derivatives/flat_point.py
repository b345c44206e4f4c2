"""The point at which derivatives are taken: a pytree of floats, and the vector it stands for.

Coordinates are numbered as the leaves are, each leaf in row-major order. Leaves may be of several
dtypes: they are never put into one vector to be differentiated, so each keeps its precision. Only
results that are vectors over all coordinates are of a common dtype.
"""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

from curvax._tree import leaf_name
from curvax._types import Array, PyTree, Size, TreeDef

__all__ = ["Point", "as_arrays"]


def as_arrays(x: PyTree) -> PyTree:
    """`x` with numbers as arrays: other numbers are then other data, not another program."""
    return jax.tree.map(jnp.asarray, x)


@dataclass(frozen=True)
class Point:
    """The structure of a pytree of floats, with its `size` coordinates in order."""

    structure: TreeDef
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]

    @classmethod
    def of(cls, x: PyTree, where: str, name: str = "x") -> "Point":
        """Check that `x` can be differentiated by: real floating-point arrays and numbers."""
        leaves = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(x):
            array = _as_array(leaf)
            if array is None or not jnp.issubdtype(array.dtype, jnp.floating):
                kind = type(leaf).__name__ if array is None else array.dtype
                raise TypeError(
                    f"{where}: {leaf_name(name, path)} is of type {kind}, but derivatives are "
                    f"taken of and with respect to real floating-point numbers. Convert it, or let "
                    f"the function close over it; split a complex number into its two parts."
                )
            leaves.append(array)
        shapes, dtypes = tuple(a.shape for a in leaves), tuple(a.dtype for a in leaves)
        return cls(jax.tree.structure(x), shapes, dtypes)

    @property
    def sizes(self) -> list[int]:
        """The number of coordinates of each leaf."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def size(self) -> int:
        """The number of coordinates."""
        return sum(self.sizes)

    @property
    def dtype(self) -> Any:
        """The dtype of vectors over all coordinates."""
        widest = jnp.finfo(jnp.float32).dtype if not self.dtypes else self.dtypes[0]
        # Strict promotion is for what users compute; a vector over all leaves has one dtype.
        with jax.numpy_dtype_promotion("standard"):
            for dtype in self.dtypes:
                widest = jnp.promote_types(widest, dtype)
        return widest

    @property
    def offsets(self) -> list[int]:
        """The first coordinate of each leaf."""
        return [0, *accumulate(self.sizes)][:-1]

    def part(self, leaves: range) -> "Point":
        """Some of the leaves, as a list."""
        structure = jax.tree.structure([0] * len(leaves))
        return Point(
            structure,
            self.shapes[leaves.start : leaves.stop],
            self.dtypes[leaves.start : leaves.stop],
        )

    def unflatten(self, vector: Array) -> PyTree:
        """A vector over all coordinates as a pytree like the point, in the dtypes of its leaves."""
        vector = jnp.asarray(vector)
        if vector.shape != (self.size,):
            raise ValueError(
                f"curvax: a vector over the {self.size} coordinates has the shape ({self.size},), "
                f"got {vector.shape}."
            )
        parts = [
            vector[start : start + size].reshape(shape).astype(dtype)
            for start, size, shape, dtype in zip(
                self.offsets, self.sizes, self.shapes, self.dtypes, strict=True
            )
        ]
        return jax.tree.unflatten(self.structure, parts)

    def flatten(self, tree: PyTree) -> Array:
        """A pytree like the point as a vector over all coordinates."""
        leaves = [leaf.reshape(-1).astype(self.dtype) for leaf in jax.tree.leaves(tree)]
        return jnp.concatenate(leaves) if leaves else jnp.zeros((0,), self.dtype)

    def direction(self, index: Size) -> PyTree:
        """The unit tangent along a coordinate."""
        parts = []
        for start, shape, dtype in zip(self.offsets, self.shapes, self.dtypes, strict=True):
            numbers = start + jnp.arange(math.prod(shape), dtype=jnp.int32)
            parts.append((numbers == index).astype(dtype).reshape(shape))
        return jax.tree.unflatten(self.structure, parts)


def _as_array(leaf: Any) -> Any:
    """What has the shape and the dtype of a leaf; None if it is nothing like an array."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if isinstance(leaf, str | bytes):  # JAX would take it for the name of a dtype.
        return None
    try:
        return jnp.asarray(leaf)
    except TypeError:
        return None
