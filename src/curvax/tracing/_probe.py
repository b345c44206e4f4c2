"""A probe: does nothing to a layer's outputs, and computes statistics when it is differentiated.

A probe returns the outputs as they are. It is also given zeros, one array for each statistic, that
count for nothing. But it is linear in them, and their cotangents are the statistics: whatever a
rule makes of the layer's inputs and of the cotangents of its outputs, which need not be linear. So
the backward pass that brings the cotangents computes the statistics on the way; where many probes
share the same zeros, at several places or in each step of a loop, it adds them up; and what
is differentiated with a checkpoint, it does so after the forward pass was done again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from curvax import _compat
from curvax._types import Array

__all__ = ["Rule", "probe"]

Rule = Callable[[Sequence[Array], Sequence[Array]], Sequence[Array]]
"""From inputs and cotangents of outputs to statistics."""

_probe_p = _compat.Primitive("probe")


def probe(
    outputs: Sequence[Array], inputs: Sequence[Array], zeros: Sequence[Array], rule: Rule
) -> list[Array]:
    """The outputs. The cotangents of `zeros` are `rule(inputs, cotangents of the outputs)`."""
    counts = {"num_kept": len(outputs), "num_known": len(inputs)}
    return _probe_p.bind(*outputs, *inputs, *zeros, rule=rule, mapped=(), **counts)


def _batch(
    args: Sequence[Array], axes: Sequence[int | None], *, mapped: Any, **params: Any
) -> tuple[list[Array], list[int]]:
    num_kept = params["num_kept"]
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    moved = [
        x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(args, axes, strict=True)
    ]
    has_axis = [axis is not None for axis in axes]
    for k in range(num_kept):  # Otherwise their cotangents could not differ from one to the next.
        if not has_axis[k]:
            moved[k] = jnp.broadcast_to(moved[k], (size, *moved[k].shape))
    known = tuple(has_axis[num_kept : num_kept + params["num_known"]])
    zeros = tuple(has_axis[num_kept + params["num_known"] :])
    outputs = _probe_p.bind(*moved, mapped=((known, zeros), *mapped), **params)
    return outputs, [0] * num_kept


def _pull_back(
    cotangents: Sequence[Array], inputs: Sequence[Array], *, rule: Rule, mapped: Any, **_: Any
) -> Sequence[Array]:
    """The statistics. `mapped` says, for each axis that vmap added, outermost first, who has it."""
    for known, zeros in reversed(mapped):
        rule = _vectorised(rule, known, zeros)
    return rule(inputs, cotangents)


def _vectorised(rule: Rule, known: Sequence[bool], zeros: Sequence[bool]) -> Rule:
    def vectorised(inputs: Sequence[Array], cotangents: Sequence[Array]) -> Sequence[Array]:
        axes = [0 if has_axis else None for has_axis in known]
        found = jax.vmap(rule, (axes, 0))(list(inputs), list(cotangents))
        pairs = zip(found, zeros, strict=True)
        return [x if has_axis else jnp.sum(x, 0) for x, has_axis in pairs]

    return vectorised


_compat.define_linear_identity(_probe_p, _batch, _pull_back)
