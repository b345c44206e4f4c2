"""Operations that only move the elements of an array about, and what they do to its axes."""

from collections.abc import Callable
from typing import Any

from curvax.graph._axes import Axes

__all__ = ["REARRANGED"]


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
