"""Tasks that are shared out among the devices of a mapped axis, so that all have about as much.

All devices run one program, with a branch for each share; every task is in one of them. So the
program grows with the tasks and not with the devices. What a device computes is laid end to end in
one buffer for each dtype, and what all have computed is put together by one operation for each.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from curvax import _compat
from curvax._types import Array, PyTree
from curvax.parallel._whole import with_whole_arrays

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

    Equal to `[task() for task in tasks]`, which is also what is done without an axis.

    Arguments:
        tasks: functions without arguments, of the same values on all devices.
        work: how much there is to do for each, in any unit.
        axis_name: the name of the axis.

    Returns:
        The results, in order.
    """
    if axis_name is None or not tasks:
        return [task() for task in tasks]
    count, asking = lax.axis_size(axis_name), lax.axis_index(axis_name)
    owners = shares(work, count)
    shapes = [jax.eval_shape(task) for task in tasks]
    leaves, structure = jax.tree.flatten(shapes)
    owner_of = [who for who, own in zip(owners, shapes, strict=True) for _ in jax.tree.leaves(own)]
    # Of what is gathered the type says that it may differ between devices, which some check.
    may_gather = not _compat.is_varying(asking)
    dtypes = dict.fromkeys(x.dtype for x in leaves)
    layouts = [_Layout.of(leaves, owner_of, dtype, count, may_gather) for dtype in dtypes]

    tasks = [with_whole_arrays(task) for task in tasks]

    def share_of(device: int) -> list[Array]:
        mine = [task() for task, who in zip(tasks, owners, strict=True) if who == device]
        filled = [layout.filled(jax.tree.leaves(mine), device) for layout in layouts]
        return [_compat.undivided(_compat.varying_like(x, *leaves, asking)) for x in filled]

    # Those who have nothing to do have one branch together, that of the last.
    branch_owners = sorted({*owners, count - 1})
    branches = [lambda who=who: share_of(who) for who in branch_owners]
    branch_of = [branch_owners.index(who if who in owners else count - 1) for who in range(count)]
    own = lax.switch(jnp.asarray(branch_of, jnp.int32)[asking], branches)
    own = [_compat.undivided(x) for x in own]
    found: list[Any] = [None] * len(leaves)
    for layout, buffer in zip(layouts, own, strict=True):
        for place, x in layout.of_all(buffer, axis_name):
            found[place] = x.reshape(leaves[place].shape).astype(leaves[place].dtype)
    return jax.tree.unflatten(structure, found)


@dataclass(frozen=True)
class _Layout:
    """Where results of one dtype are in a buffer of each device, and in that of all together.

    Buffers are gathered, each as long as the longest. Where most of that would be zeros, as with
    many devices and few tasks, each device has its results in a buffer for those of all, and these
    are added up instead, which sends everything twice.
    """

    dtype: Any
    places: Sequence[int]
    """Which of all results these are."""
    begins: Sequence[int]
    """Where each begins in the buffer of all."""
    sizes: Sequence[int]
    offsets: Sequence[int]
    """Where the results of each device begin in its own buffer."""
    length: int
    """The length of the buffer of a device."""
    is_gathered: bool

    @classmethod
    def of(
        cls,
        leaves: Sequence[Any],
        owner_of: Sequence[int],
        dtype: Any,
        count: int,
        may_gather: bool,
    ) -> "_Layout":
        """The layout of all leaves of a dtype."""
        places = [k for k, x in enumerate(leaves) if x.dtype == dtype]
        sizes = [math.prod(leaves[k].shape) for k in places]
        within, filled = [], [0] * count
        for k, size in zip(places, sizes, strict=True):
            within.append(filled[owner_of[k]])
            filled[owner_of[k]] += size
        total, longest = sum(filled), max(filled)
        is_gathered = may_gather and count * longest <= 2 * total
        firsts = [longest * who if is_gathered else sum(filled[:who]) for who in range(count)]
        begins = [firsts[owner_of[k]] + start for k, start in zip(places, within, strict=True)]
        offsets, length = ([0] * count, longest) if is_gathered else (firsts, total)
        return cls(dtype, places, begins, sizes, offsets, length, is_gathered)

    def filled(self, results: Sequence[Array], device: int) -> Array:
        """The buffer of a device that has these results, with zeros around them."""
        mine = [x.reshape(-1) for x in results if x.dtype == self.dtype]
        before = self.offsets[device]
        after = self.length - before - sum(x.size for x in mine)
        zeros = lambda size: jnp.zeros(size, self.dtype)
        flat = jnp.concatenate([zeros(before), *mine, zeros(after)])
        # A sum of truth values is a number.
        return flat.astype(jnp.uint8) if self.dtype == bool else flat

    def of_all(self, own: Array, axis_name: str) -> list[tuple[int, Array]]:
        """The places and values of all results, from the buffer of each device."""
        if self.is_gathered:
            buffer = lax.all_gather(own, axis_name, tiled=True)
        else:
            buffer = lax.psum(own, axis_name)
        return [
            (place, lax.slice(buffer, (begin,), (begin + size,)))
            for place, begin, size in zip(self.places, self.begins, self.sizes, strict=True)
        ]
