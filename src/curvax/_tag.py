"""A tag: an operation that does nothing but be found.

A tag takes some arrays and returns the first few of them as they are. In a traced program it says
what the others have to do with these. It can be differentiated (its tangents are those of what it
returns), vectorised, and compiled, to nothing.

`jax.vmap` puts an axis in front of the operands that it maps over, and a tag stays one tag: its
parameter `stacked` says, for each axis that was added, outermost first, which operands have it.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from curvax import _jax

__all__ = ["Tag"]


class Tag(_jax.Primitive):
    """A primitive that returns its first `num_kept` operands."""

    def __init__(self, name: str, num_kept: int, *, multiple_results: bool) -> None:
        super().__init__(name)
        self.multiple_results = multiple_results
        self._num_kept = num_kept
        _jax.define_identity(self, num_kept, self._batch)

    def bind(self, *args: Any, **params: Any) -> Any:
        """Tag the operands. Returns the first of them, in a list if there may be several."""
        return super().bind(*args, **{"stacked": (), **params})

    def _batch(
        self, args: Sequence[Any], axes: Sequence[int | None], *, stacked: Any, **params: Any
    ) -> tuple[Any, Any]:
        pairs = zip(args, axes, strict=True)
        moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in pairs]
        mapped = tuple(axis is not None for axis in axes)
        kept = self.bind(*moved, stacked=(mapped, *stacked), **params)
        out_axes = [0 if is_mapped else None for is_mapped in mapped[: self._num_kept]]
        return (kept, out_axes) if self.multiple_results else (kept, out_axes[0])
