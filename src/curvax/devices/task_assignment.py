"""Assignment of tasks to the devices of a mapped axis, so that all have about as much work.

All devices run one program (SPMD), with a branch for each device that has tasks; every task is in
one of them. So the program grows with the tasks and not with the devices. What a device computes is
concatenated to one buffer for each dtype, and the buffers of all devices are gathered or summed by
one operation for each dtype.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from curvax import _jax
from curvax._types import Array, PyTree


def with_replicated_arrays(fun: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Return `fun` without collectives inside: the arrays it closes over are gathered outside.

    Along `Auto` axes of a mesh the compiler shards arrays as it likes, and inserts collectives
    where they are needed. In a function that some devices do not run, these would wait forever.

    Arguments:
        fun: a function of replicated arrays, if any.
        args: such arguments, or their shapes. It is traced for these.
    """
    if not _jax.has_automatic_axes():
        return fun
    program, shapes = _jax.trace_with_constants(fun, *args)
    traced = _jax.with_constants(program)
    arrays = [_jax.kept_replicated(x) for x in program.consts]

    def with_these(*args: Any) -> Any:
        # Constrained again inside, or how the result is used could shard them there.
        found = traced(*map(_jax.kept_replicated, arrays), *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), map(_jax.kept_replicated, found))

    return with_these


def assign(work: Sequence[float], count: int) -> list[int]:
    """Return the device of each task, of `count`: largest first, each to the least loaded."""
    loads = [0.0] * count
    owners = [0] * len(work)
    for task in sorted(range(len(work)), key=lambda k: -work[k]):
        owner = min(range(count), key=lambda k: loads[k])
        owners[task] = owner
        loads[owner] += work[task]
    return owners


def run_assigned(
    tasks: Sequence[Callable[[], PyTree]], work: Sequence[float], axis_name: str | None
) -> list[PyTree]:
    """Run each task on one device of a mapped axis, and return all results on every device.

    Equal to `[task() for task in tasks]`, which is also what is run without an axis.

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
    owners = assign(work, count)
    shapes = [jax.eval_shape(task) for task in tasks]
    leaves, structure = jax.tree.flatten(shapes)
    owner_of = [who for who, own in zip(owners, shapes, strict=True) for _ in jax.tree.leaves(own)]
    # The type of what is gathered says that it varies over the axis, which `check_vma` rejects.
    may_gather = not _jax.is_varying(asking)
    dtypes = dict.fromkeys(x.dtype for x in leaves)
    layouts = [_Layout.of(leaves, owner_of, dtype, count, may_gather) for dtype in dtypes]

    tasks = [with_replicated_arrays(task) for task in tasks]

    def run_tasks_of(device: int) -> list[Array]:
        mine = [task() for task, who in zip(tasks, owners, strict=True) if who == device]
        filled = [layout.filled(jax.tree.leaves(mine), device) for layout in layouts]
        return [_jax.kept_replicated(_jax.varying_like(x, *leaves, asking)) for x in filled]

    # Devices without tasks have one branch together, that of the last.
    branch_owners = sorted({*owners, count - 1})
    branches = [lambda who=who: run_tasks_of(who) for who in branch_owners]
    branch_of = [branch_owners.index(who if who in owners else count - 1) for who in range(count)]
    own = lax.switch(jnp.asarray(branch_of, jnp.int32)[asking], branches)
    own = [_jax.kept_replicated(x) for x in own]
    found: list[Any] = [None] * len(leaves)
    for layout, buffer in zip(layouts, own, strict=True):
        for place, x in layout.of_all(buffer, axis_name):
            found[place] = x.reshape(leaves[place].shape).astype(leaves[place].dtype)
    return jax.tree.unflatten(structure, found)


@dataclass(frozen=True)
class _Layout:
    """Where the results of one dtype are in the buffer of each device, and in the gathered one.

    The buffers, each as long as the longest, are all-gathered. Where most of that would be padding,
    as with many devices and few tasks, each device writes its results into a buffer for those of
    all, and these are summed instead, which communicates twice as much.
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
        """Return the buffer of a device that has these results, padded with zeros."""
        mine = [x.reshape(-1) for x in results if x.dtype == self.dtype]
        before = self.offsets[device]
        after = self.length - before - sum(x.size for x in mine)
        zeros = lambda size: jnp.zeros(size, self.dtype)
        flat = jnp.concatenate([zeros(before), *mine, zeros(after)])
        # A sum of booleans is an integer.
        return flat.astype(jnp.uint8) if self.dtype == bool else flat

    def of_all(self, own: Array, axis_name: str) -> list[tuple[int, Array]]:
        """Return the positions and values of all results, from the buffer of each device."""
        if self.is_gathered:
            buffer = lax.all_gather(own, axis_name, tiled=True)
        else:
            buffer = lax.psum(own, axis_name)
        return [
            (place, lax.slice(buffer, (begin,), (begin + size,)))
            for place, begin, size in zip(self.places, self.begins, self.sizes, strict=True)
        ]


def own_rows(
    each: Callable[[Array], PyTree], numbers: Sequence[Sequence[int]], device: Array, into: PyTree
) -> PyTree:
    """Return `into` with `each(number)` in those rows that are assigned to a device.

    Devices run one loop, each for as many steps as it has rows. The program does not grow with the
    number of devices, and has no reverse derivative.

    Arguments:
        each: computes a row from its index.
        numbers: for each device the indices of its rows.
        device: the index of this device; it may be traced.
        into: arrays with rows like those that are computed.
    """
    longest = max(map(len, numbers), default=0)
    if not longest:
        return into
    lengths = jnp.asarray([len(own) for own in numbers], jnp.int32)
    table = jnp.asarray([[*own, *[0] * (longest - len(own))] for own in numbers], jnp.int32)

    def body(turn: Array, rows: PyTree) -> PyTree:
        number = table[device, turn]
        write = lambda x, row: lax.dynamic_update_index_in_dim(x, row, number, 0)
        return jax.tree.map(write, rows, each(number))

    each = with_replicated_arrays(each, table[device, 0])
    into = jax.tree.map(lambda x: _jax.kept_replicated(_jax.varying_like(x, device)), into)
    found = lax.fori_loop(0, lengths[device], body, into)
    return jax.tree.map(_jax.kept_replicated, found)
