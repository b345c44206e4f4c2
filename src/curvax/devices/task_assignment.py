"""Assignment of tasks to the devices of a mapped axis, balanced by their work.

The program is SPMD, with a branch for each device that has tasks; every task is in one branch. So
the program grows with the number of tasks, not of devices. Each device concatenates its results to
one buffer for each dtype, and the buffers of all devices are gathered or summed by one collective
for each dtype.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from curvax import _jax
from curvax._types import Array, PyTree

T = TypeVar("T")


def with_replicated_arrays(fun: Callable[..., T], *args: PyTree) -> Callable[..., T]:
    """Return `fun` without collectives: the arrays it closes over are gathered outside.

    Along `Auto` axes of a mesh the compiler may shard any array, and inserts collectives where
    needed. In a branch that some devices do not run, a collective would wait forever.

    Arguments:
        fun: A function of replicated arrays, if any.
        args: Such arguments, or their shapes, to trace it for.

    Returns:
        A function equal to `fun`.
    """
    if not _jax.has_automatic_axes():
        return fun
    program, shapes = _jax.trace_with_constants(fun, *args)
    traced = _jax.with_constants(program)
    arrays = [_jax.kept_replicated(x) for x in program.consts]

    def replicated(*args: PyTree) -> T:
        # Also constrain them inside; otherwise the use of a result could shard them there.
        results = traced(*map(_jax.kept_replicated, arrays), *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), map(_jax.kept_replicated, results))

    return replicated


def assign(work: Sequence[float], count: int) -> list[int]:
    """Assign tasks to `count` devices, the largest first, each to the least loaded device.

    This is the longest-processing-time rule (Graham 1969, "Bounds on Multiprocessing Timing
    Anomalies").

    Arguments:
        work: Work of each task, in any unit.
        count: Number of devices.

    Returns:
        The index of the device of each task.
    """
    loads = [0.0] * count
    devices = [0] * len(work)
    for task in sorted(range(len(work)), key=lambda k: -work[k]):
        device = min(range(count), key=lambda k: loads[k])
        devices[task] = device
        loads[device] += work[task]
    return devices


def run_assigned(
    tasks: Sequence[Callable[[], PyTree]], work: Sequence[float], axis_name: str | None
) -> list[PyTree]:
    """Run each task on one device of a mapped axis, and return all results on every device.

    Equal to `[task() for task in tasks]`, which is also what runs without an axis.

    Arguments:
        tasks: Functions without arguments that return the same values on all devices.
        work: Work of each task, in any unit.
        axis_name: Name of the mapped axis, or None.

    Returns:
        The results, in the order of the tasks.
    """
    if axis_name is None or not tasks:
        return [task() for task in tasks]
    count, device_index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    device_of_task = assign(work, count)
    shapes = [jax.eval_shape(task) for task in tasks]
    leaves, structure = jax.tree.flatten(shapes)
    device_of_leaf = [
        device
        for device, shape in zip(device_of_task, shapes, strict=True)
        for _ in jax.tree.leaves(shape)
    ]
    # By its type, a gathered array varies over the axis, which `check_vma` rejects.
    may_gather = not _jax.is_varying(device_index)
    dtypes = dict.fromkeys(x.dtype for x in leaves)
    layouts = [_Layout.of(leaves, device_of_leaf, dtype, count, may_gather) for dtype in dtypes]

    tasks = [with_replicated_arrays(task) for task in tasks]

    def run_tasks_of(device: int) -> list[Array]:
        pairs = zip(tasks, device_of_task, strict=True)
        results = jax.tree.leaves([task() for task, owner in pairs if owner == device])
        buffers = [layout.fill(results, device) for layout in layouts]
        return [_jax.kept_replicated(_jax.varying_like(x, *leaves, device_index)) for x in buffers]

    # All devices without tasks share one branch, that of the last device.
    branch_devices = sorted({*device_of_task, count - 1})
    branches = [lambda device=device: run_tasks_of(device) for device in branch_devices]
    branch_of_device = [
        branch_devices.index(device if device in device_of_task else count - 1)
        for device in range(count)
    ]
    local_buffers = lax.switch(jnp.asarray(branch_of_device, jnp.int32)[device_index], branches)
    results: dict[int, Array] = {}
    for layout, buffer in zip(layouts, local_buffers, strict=True):
        results |= layout.gather(_jax.kept_replicated(buffer), axis_name)
    return jax.tree.unflatten(
        structure,
        [results[i].reshape(x.shape).astype(x.dtype) for i, x in enumerate(leaves)],
    )


@dataclass(frozen=True)
class _Layout:
    """Where the results of one dtype are in the local buffer of each device, and in the global one.

    Local buffers, all as long as the longest, are all-gathered. If more than half of that would be
    padding, as with many devices and few tasks, each device instead writes its results into a
    buffer for all results, and these are summed, which communicates twice as much.
    """

    dtype: np.dtype
    indices: Sequence[int]
    """Indices of these results among all results."""
    begins: Sequence[int]
    """Where each of them begins in the global buffer."""
    sizes: Sequence[int]
    """Number of elements of each of them."""
    offsets: Sequence[int]
    """Where the results of each device begin in its local buffer."""
    length: int
    """Length of a local buffer."""
    is_gathered: bool
    """Whether local buffers are all-gathered, not summed."""

    @classmethod
    def of(
        cls,
        leaves: Sequence[jax.ShapeDtypeStruct],
        device_of_leaf: Sequence[int],
        dtype: np.dtype,
        count: int,
        may_gather: bool,
    ) -> "_Layout":
        """Return the layout of all leaves of a dtype, on `count` devices."""
        indices = [i for i, x in enumerate(leaves) if x.dtype == dtype]
        sizes = [math.prod(leaves[i].shape) for i in indices]
        within, filled = [], [0] * count
        for i, size in zip(indices, sizes, strict=True):
            within.append(filled[device_of_leaf[i]])
            filled[device_of_leaf[i]] += size
        total, longest = sum(filled), max(filled)
        is_gathered = may_gather and count * longest <= 2 * total
        firsts = [longest * d if is_gathered else sum(filled[:d]) for d in range(count)]
        begins = [
            firsts[device_of_leaf[i]] + start for i, start in zip(indices, within, strict=True)
        ]
        offsets, length = ([0] * count, longest) if is_gathered else (firsts, total)
        return cls(dtype, indices, begins, sizes, offsets, length, is_gathered)

    def fill(self, results: Sequence[Array], device: int) -> Array:
        """Return the local buffer of a device with these results, padded with zeros."""
        flat_results = [x.reshape(-1) for x in results if x.dtype == self.dtype]
        before = self.offsets[device]
        after = self.length - before - sum(x.size for x in flat_results)
        zeros = lambda size: jnp.zeros(size, self.dtype)
        buffer = jnp.concatenate([zeros(before), *flat_results, zeros(after)])
        # A sum of booleans is an integer.
        return buffer.astype(jnp.uint8) if self.dtype == bool else buffer

    def gather(self, local_buffer: Array, axis_name: str) -> dict[int, Array]:
        """Return the results of all devices, flat, by their indices."""
        if self.is_gathered:
            buffer = lax.all_gather(local_buffer, axis_name, tiled=True)
        else:
            buffer = lax.psum(local_buffer, axis_name)
        return {
            index: lax.slice(buffer, (begin,), (begin + size,))
            for index, begin, size in zip(self.indices, self.begins, self.sizes, strict=True)
        }


def own_rows(
    each: Callable[[Array], PyTree], indices: Sequence[Sequence[int]], device: Array, into: PyTree
) -> PyTree:
    """Return `into` with `each(index)` written into the rows that are assigned to a device.

    Devices run one loop, each for as many steps as it has rows. The program does not grow with the
    number of devices, and has no reverse-mode derivative.

    Arguments:
        each: Compute a row, given its index.
        indices: For each device, the indices of its rows.
        device: Index of this device; it may be traced.
        into: Pytree of arrays with rows like those that are computed.

    Returns:
        A pytree like `into`.
    """
    longest = max(map(len, indices), default=0)
    if not longest:
        return into
    lengths = jnp.asarray([len(rows) for rows in indices], jnp.int32)
    padded = jnp.asarray([[*rows, *[0] * (longest - len(rows))] for rows in indices], jnp.int32)

    def body(step: Array, rows: PyTree) -> PyTree:
        index = padded[device, step]
        write = lambda x, row: lax.dynamic_update_index_in_dim(x, row, index, 0)
        return jax.tree.map(write, rows, each(index))

    each = with_replicated_arrays(each, padded[device, 0])
    into = jax.tree.map(lambda x: _jax.kept_replicated(_jax.varying_like(x, device)), into)
    rows = lax.fori_loop(0, lengths[device], body, into)
    return jax.tree.map(_jax.kept_replicated, rows)
