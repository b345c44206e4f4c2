"""Matrices streamed to disk: each block is computed, written, and freed.

The function is linearised once, and a compiled program computes one block after the other from that
(`BlockPrograms`). `BlockStore` records which blocks are done. The remaining ones are assigned to
the processes of a `ProcessGroup`, each of which has its devices.
"""

import errno
import math
import os
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from curvax import _jax
from curvax._errors import where
from curvax._tree import leaf_name
from curvax._types import Array, Fun, PyTree
from curvax.derivatives.arguments import Options
from curvax.derivatives.columns import BlockProblem, Part, Progress, check_closed_over
from curvax.derivatives.disk.fingerprint import callbacks, fingerprint
from curvax.derivatives.disk.processes import ProcessGroup
from curvax.derivatives.disk.store import (
    ArraySpec,
    BlockStore,
    CommonAxis,
    ZarrArray,
    check_path,
)
from curvax.devices.agreement import check_agreement, describe
from curvax.devices.mesh_axis import MeshAxis
from curvax.memory.budget import MemoryBudgetError, parse_memory
from curvax.memory.compiled import BudgetRequest, record
from curvax.memory.plan import plan_batch_size
from curvax.memory.usage import memory_usage

BLOCK_BYTES = 64 * 2**20
"""Approximate size of a block on disk, if the user does not choose one."""

REPLICATED = PartitionSpec()


@dataclass(frozen=True)
class BlockPrograms:
    """Compiled programs that compute blocks, by block size.

    The linear maps (`prepared`) stay on the devices. On several devices a program computes one
    block on each, so that the division into blocks does not depend on the number of devices.
    """

    part: Part
    prepared: PyTree
    axis: MeshAxis | None
    programs: dict[int, Fun] = field(default_factory=dict[int, Fun])

    @classmethod
    def of(
        cls, problem: BlockProblem, x: PyTree, axis: MeshAxis | None
    ) -> tuple["BlockPrograms", PyTree]:
        """Prepare a problem with one part at a point. Return its programs and `aux`."""
        if axis is None:
            prepare = jax.jit(problem.prepare)
        else:
            prepare = axis.shard_map(problem.prepare, (REPLICATED,), REPLICATED)
        prepared, aux = prepare(x)
        (part,) = problem.parts
        return cls(part, prepared, axis), aux

    @property
    def at_once(self) -> int:
        """Number of blocks that are computed at a time: one on each device."""
        return 1 if self.axis is None else self.axis.count

    def compute(self, rows: Sequence[slice]) -> list[list[NDArray[Any]]]:
        """Return, for each of these ranges of columns, the arrays of its block."""
        sizes = [block.stop - block.start for block in rows]
        starts = np.array([block.start for block in rows], np.int32)
        starts = np.pad(starts, (0, self.at_once - len(rows)), "edge")
        largest = max(sizes)
        if largest not in self.programs:
            self.programs[largest] = jax.jit(self._function(largest))
        blocks = self.programs[largest](self.prepared, jax.device_put(starts, self._one_each))
        stacks = [np.asarray(leaf) for leaf in jax.tree.leaves(blocks)]
        crop = lambda block, size: block[:size] if self.part.axis == 0 else block[..., :size]
        return [[crop(stack[k], size) for stack in stacks] for k, size in enumerate(sizes)]

    def default_size(self, specs: Sequence[ArraySpec], most: int) -> int:
        """Return a block size of about `BLOCK_BYTES`, but at most `most` columns."""
        total = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
        return max(1, min(most, BLOCK_BYTES * self.part.length // max(1, total)))

    def planned_size(self, request: BudgetRequest, recorded: int | None, most: int) -> int:
        """Return the size of the largest block that fits a device's budget, next to `prepared`.

        It is at most `most`. A store that is resumed keeps its block size (`recorded`), which must
        fit.
        """
        budget = parse_memory(request.budget)
        held = sum(map(_bytes_on_device, jax.tree.leaves(self.prepared)))
        starts = jax.ShapeDtypeStruct((self.at_once,), jnp.int32, sharding=self._one_each)
        if recorded is not None:
            needs = held + memory_usage(self._function(recorded), self.prepared, starts).added_bytes
            if needs > budget:
                raise MemoryBudgetError(
                    budget,
                    needs,
                    where(),
                    f"The store was begun in blocks of {recorded}, which do not fit. Give it that "
                    f"much, or start again with overwrite=True and batch_size.",
                )
            return recorded
        smallest = held + memory_usage(self._function(1), self.prepared, starts).added_bytes
        if smallest > budget:
            raise MemoryBudgetError(budget, smallest, where(), "What else helps: checkpoint=True.")
        plan = plan_batch_size(
            self._function,
            (self.prepared, starts),
            max_size=max(1, most),
            memory_budget=budget - held,
        )
        record(plan)
        self.programs[plan.batch_size] = plan
        return plan.batch_size

    @property
    def _one_each(self) -> NamedSharding | None:
        """Sharding of a vector with one element for each device."""
        return None if self.axis is None else self.axis.sharding(0)

    def _function(self, size: int) -> Fun:
        """Return a function of `prepared` and the first column of each block to stacked blocks."""
        part = self.part

        def block(prepared: PyTree, starts: Array) -> PyTree:
            # Columns beyond the last are copies of it, which `compute` crops.
            last = jnp.int32(part.length - 1)
            indices = jnp.minimum(starts[0] + jnp.arange(size, dtype=jnp.int32), last)
            column = lambda index: part.column(prepared, index)
            columns = jax.vmap(column, out_axes=part.axis)(indices)
            return jax.tree.map(lambda array: array[None], columns)

        if self.axis is None:
            return block
        stacked = self.axis.spec(0)
        return self.axis.shard_map(block, (REPLICATED, stacked), stacked)


def _bytes_on_device(array: Array) -> int:
    """Return the memory that an array takes on each of its devices."""
    return array.addressable_shards[0].data.nbytes


SEEN_WITHIN = 30.0
"""Seconds within which a process must see a store that another process has created."""


def stream(
    problem: BlockProblem,
    x: PyTree,
    options: Options,
    block_size: int,
    out: str | PathLike[str],
    overwrite: bool,
    verify: bool,
    progress: bool,
) -> tuple[list[ZarrArray], PyTree]:
    """Compute a problem with one part, on disk at `out`. Return its arrays and `aux`."""
    if not options.jit or (options.budget is not None and options.budget.objective == "time"):
        raise ValueError(
            f"{where()}: blocks for the disk are always compiled, and as large as the budget "
            f"allows: out= does not go with jit=False or objective='time'."
        )
    if any(map(_jax.is_tracer, jax.tree.leaves(x))):
        raise ValueError(f"{where()}: {_NOT_TRACED.format(out)}")
    check_closed_over(problem.prepare, x, options)
    processes = ProcessGroup.of(options.axis)
    x = processes.replicate_locally(x)
    with processes.local_mesh():
        wanted = processes.all_or_none(
            lambda: _Wanted.of(problem, x, check_path(out), overwrite, options),
            "checking the arguments",
        )
        if processes.count > 1:
            check_agreement(wanted.described(x))
        blocks, aux = processes.all_or_none(
            lambda: BlockPrograms.of(problem, x, processes.axis), "linearising the function"
        )
        with disk_errors(wanted.path):
            store = _opened(wanted, blocks, options, block_size, processes, verify)
            _write_unfinished(store, blocks, processes, progress)
    return store.arrays(), aux


class _Computation(TypedDict):
    """The keyword arguments of `BlockStore.recorded_block_size`."""

    axis: CommonAxis
    length: int
    fingerprint: str
    overwrite: bool


@dataclass(frozen=True)
class _Wanted:
    """The store that is wanted: its path, its arrays, and the computation."""

    path: Path
    specs: tuple[ArraySpec, ...]
    computation: _Computation
    callbacks: tuple[str, ...]
    """The Python functions that the program calls, which the fingerprint does not cover."""

    @classmethod
    def of(
        cls, problem: BlockProblem, x: PyTree, path: Path, overwrite: bool, options: Options
    ) -> "_Wanted":
        """Trace a column of the problem, and return the store for it."""
        (part,) = problem.parts
        first = lambda x: part.column(problem.prepare(x)[0], 0)
        program, shapes = _traced(first, x, path, options)
        computation: _Computation = {
            "axis": "first" if part.axis == 0 else "last",
            "length": part.length,
            "fingerprint": fingerprint(program, (), jax.tree.leaves(x)),
            "overwrite": overwrite,
        }
        return cls(path, tuple(_specs(shapes, part)), computation, tuple(callbacks(program)))

    def described(self, x: PyTree) -> list[str]:
        """Return lines that describe what all processes must agree on."""
        digits = self.computation["fingerprint"][:12]
        return [
            *describe("x", x),
            f"the fingerprint of function, constants and inputs is {digits}",
        ]

    def recorded_block_size(self) -> int | None:
        """Return the block size of the store, if it exists."""
        return BlockStore.recorded_block_size(self.path, self.specs, **self.computation)

    def opened(self, block_size: int, verify: bool) -> BlockStore:
        """Create or resume the store. With callbacks, always create it."""
        return BlockStore.open(
            self.path,
            self.specs,
            block_size=block_size,
            resume=not self.callbacks,
            verify=verify,
            **self.computation,
        )

    def resumed_block_size(self) -> int | None:
        """Return the block size of the store, if it exists and can be resumed.

        Raises:
            ValueError: If it exists and may not be overwritten, but the program calls Python
                functions: these may have returned other values when it was written.
        """
        recorded = self.recorded_block_size()
        if recorded is None or not self.callbacks:
            return recorded
        if self.computation["overwrite"]:
            return None
        raise ValueError(
            f"{where()}: f calls back to Python ({', '.join(self.callbacks)}), "
            f"and whether such a function still computes what it did when {self.path} was written "
            f"cannot be known. So it is neither continued nor returned. Pass overwrite=True to "
            f"compute it again, choose another path, or read it with zarr.open."
        )

    def joined(self, block_size: int, process: int) -> BlockStore:
        """Return the store that process 0 has opened, for another process."""
        axis, length = self.computation["axis"], self.computation["length"]
        deadline = time.monotonic() + SEEN_WITHIN
        while self.recorded_block_size() != block_size:
            if time.monotonic() > deadline:
                raise FileNotFoundError(
                    f"{where()}: process 0 has opened the store {self.path}, but "
                    f"process {process} does not see it. It must be in a file system that all "
                    f"processes share."
                )
            time.sleep(0.1)
        return BlockStore(self.path, self.specs, axis, length, block_size)


def _traced(fun: Fun, x: PyTree, path: Path, options: Options) -> tuple[_jax.ClosedJaxpr, PyTree]:
    """Trace a column. Return its jaxpr, which does not depend on devices, and its shapes."""
    if options.axis is None and jax.process_count() == 1:
        program, shapes = jax.make_jaxpr(fun, return_shape=True)(x)
    else:
        with _jax.no_mesh():
            plain = jax.tree.map(_jax.without_sharding, x)
            program, shapes = jax.make_jaxpr(fun, return_shape=True)(plain)
    if any(map(_jax.is_tracer, program.consts)):
        raise ValueError(f"{where()}: {_NOT_TRACED.format(path)}")
    for const in program.consts:
        if isinstance(const, jax.Array) and not const.is_fully_addressable:
            raise ValueError(
                f"{where()}: f closes over an array {const.dtype}{list(const.shape)} that is "
                f"spread over several processes, but each of them computes its blocks for the disk "
                f"by itself. Let it close over what jax.experimental.multihost_utils."
                f"process_allgather(array, tiled=True) returns."
            )
    return program, shapes


def _opened(
    wanted: _Wanted,
    blocks: BlockPrograms,
    options: Options,
    block_size: int,
    processes: ProcessGroup,
    verify: bool,
) -> BlockStore:
    """Open the store in the first process, which chooses the block size, then in the others."""

    def open_first() -> BlockStore:
        recorded = wanted.resumed_block_size()
        # At least one block for every device.
        most = -(-blocks.part.length // (blocks.at_once * processes.count))
        if options.budget is not None:
            size = blocks.planned_size(options.budget, recorded, most)
        elif options.has_size:
            size = block_size
        else:
            size = recorded or blocks.default_size(wanted.specs, most)
        return wanted.opened(size, verify)

    store = processes.all_or_none(
        lambda: open_first() if processes.is_first else None, "opening the store"
    )
    chosen = np.array(0 if store is None else store.block_size, np.int32)
    size = int(processes.broadcast_from_first(chosen))
    return processes.all_or_none(
        lambda: store or wanted.joined(size, processes.index), "opening the store"
    )


def _write_unfinished(
    store: BlockStore, blocks: BlockPrograms, processes: ProcessGroup, progress: bool
) -> None:
    """Compute and write the unfinished blocks, which are assigned to processes round-robin."""
    if not store.num_blocks:
        return
    missing = np.zeros(store.num_blocks, np.uint8)
    missing[store.unfinished()] = 1
    unfinished = np.flatnonzero(processes.broadcast_from_first(missing)).tolist()
    assigned, left = unfinished[processes.index :: processes.count], len(unfinished)
    bar = Progress(where().partition(".")[2], store.num_blocks, store.num_blocks - left)

    def is_done() -> bool:
        nonlocal left
        before, left = left, len(store.unfinished())
        if progress:
            bar.advance(before - left)
        return not left

    for begin in range(0, len(assigned), blocks.at_once):
        indices = assigned[begin : begin + blocks.at_once]
        computed = blocks.compute([store.rows(index) for index in indices])
        for index, arrays in zip(indices, computed, strict=True):
            store.write(index, arrays)
        del computed  # Free it before the next blocks are computed.
        if progress:
            is_done()
    processes.wait_until(is_done)


@contextmanager
def disk_errors(path: Path) -> Generator[None]:
    """Add advice to errors of writing: the disk is full, or read-only."""
    advice = {
        errno.ENOSPC: "Make room, or choose a path on another disk.",
        errno.EDQUOT: "Make room, or choose a path on another disk.",
        errno.EROFS: "Choose a path that can be written.",
        errno.EACCES: "Choose a path that can be written.",
        errno.EPERM: "Choose a path that can be written.",
    }
    try:
        yield
    except OSError as error:
        if error.errno not in advice:
            raise
        raise OSError(
            error.errno,
            f"{where()}: cannot write to {path}: {os.strerror(error.errno)}. "
            f"{advice[error.errno]} Blocks that are done are kept: the same call goes on there",
        ) from error


_NOT_TRACED = (
    "out={!s} writes to disk, which cannot be done under a transformation such as jit. Call it "
    "outside, or do not pass out."
)


def _specs(shapes: PyTree, part: Part) -> list[ArraySpec]:
    """Return the arrays that columns of these shapes are stacked to."""
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    specs: list[ArraySpec] = []
    for path, leaf in leaves:
        name = "" if len(leaves) == 1 else leaf_name("", path)
        is_first = part.axis == 0
        shape = (part.length, *leaf.shape) if is_first else (*leaf.shape, part.length)
        specs.append(ArraySpec(name, shape, np.dtype(leaf.dtype)))
    return specs
