"""Tasks that are shared out among the devices of a mapped axis, so that all have about as much."""

from collections.abc import Callable, Sequence

import jax
from jax import lax

from curvax._compat import filled_like
from curvax._types import PyTree

__all__ = ["share_out", "shares"]


def shares(work: Sequence[float], count: int) -> list[int]:
    """Who does which task, of `count`: the largest first, each to who has the least so far."""
    loads = [0.0] * count
    owners = [0] * len(work)
    for task in sorted(range(len(work)), key=lambda k: -work[k]):
        owner = min(range(count), key=lambda k: loads[k])
        owners[task] = owner
        loads[owner] += work[task]
    return owners


def share_out(
    tasks: Sequence[Callable[[], PyTree]], work: Sequence[float], axis_name: str | None
) -> list[PyTree]:
    """What all tasks return, each computed on one device of a mapped axis and sent to all.

    Without an axis they are all computed here.

    Arguments:
        tasks: functions without arguments, of the same values on all devices.
        work: how much there is to do for each, in any unit.
        axis_name: the name of the axis.

    Returns:
        The results, in order.
    """
    if axis_name is None:
        return [task() for task in tasks]
    count = lax.axis_size(axis_name)
    owners = shares(work, count)
    shapes = [jax.eval_shape(task) for task in tasks]

    def share_of(device: int) -> list[PyTree]:
        return [
            task() if owner == device else jax.tree.map(filled_like, shape)
            for task, owner, shape in zip(tasks, owners, shapes, strict=True)
        ]

    branches = [lambda _, d=device: share_of(d) for device in range(count)]
    own = lax.switch(lax.axis_index(axis_name), branches, None)
    # A sum of truth values is a number.
    return jax.tree.map(lambda x, s: x.astype(s.dtype), lax.psum(own, axis_name), shapes)
