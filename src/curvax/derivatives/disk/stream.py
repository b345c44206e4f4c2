"""A problem solved on disk: each block is computed, written, and let go.

The point is prepared once (the function linearised), and a compiled program computes one block
after the other from that (`BlockPrograms`). `BlockStore` keeps track of what is done. What is left
to do is dealt out among the processes that there are (`Team`), each of which has its devices.
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
from typing import Any

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
from curvax.derivatives.disk.processes import Team
from curvax.derivatives.disk.store import ArraySpec, BlockStore, check_path
from curvax.devices.agreement import check_agreement, describe
from curvax.devices.mesh_axis import MeshAxis
from curvax.memory.budget import MemoryBudgetError, parse_memory
from curvax.memory.compiled import BudgetRequest, record
from curvax.memory.plan import plan_batch_size
from curvax.memory.usage import memory_usage

BLOCK_BYTES = 64 * 2**20
"""About how large a block is on disk where nothing was said."""

WHOLE = PartitionSpec()


@dataclass(frozen=True)
class BlockPrograms:
    """The compiled programs that compute blocks, by size.

    They compute from what was prepared, which stays where it is. On several devices they compute
    one block on each: which blocks there are does not depend on how many devices there are.
    """

    part: Part
    prepared: Any
    axis: MeshAxis | None
    programs: dict[int, Any] = field(default_factory=dict[int, Any])

    @classmethod
    def of(
        cls, problem: BlockProblem, x: PyTree, axis: MeshAxis | None
    ) -> tuple["BlockPrograms", PyTree]:
        """Prepare a problem with one part at a point; and its auxiliary value."""
        prepare = jax.jit if axis is None else lambda fun: axis.shard_map(fun, (WHOLE,), WHOLE)
        prepared, aux = prepare(problem.prepare)(x)
        (part,) = problem.parts
        return cls(part, prepared, axis), aux

    @property
    def at_once(self) -> int:
        """How many blocks are computed at a time: one on each device."""
        return 1 if self.axis is None else self.axis.count

    def compute(self, rows: Sequence[slice]) -> list[list[NDArray[Any]]]:
        """For each of these ranges the arrays with the columns in it."""
        sizes = [each.stop - each.start for each in rows]
        starts = np.array([each.start for each in rows], np.int32)
        starts = np.pad(starts, (0, self.at_once - len(rows)), "edge")
        largest = max(sizes)
        if largest not in self.programs:
            self.programs[largest] = jax.jit(self._function(largest))
        blocks = self.programs[largest](self.prepared, jax.device_put(starts, self._split))
        stacks = [np.asarray(leaf) for leaf in jax.tree.leaves(blocks)]
        cut = lambda block, size: block[:size] if self.part.axis == 0 else block[..., :size]
        return [[cut(stack[k], size) for stack in stacks] for k, size in enumerate(sizes)]

    def default_size(self, specs: Sequence[ArraySpec], most: int) -> int:
        """Blocks of a size that is good to write and read, and at most so large."""
        total = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
        return max(1, min(most, BLOCK_BYTES * self.part.length // max(1, total)))

    def planned_size(self, request: BudgetRequest, recorded: int | None, most: int) -> int:
        """The largest block that fits the budget of a device, beside what was prepared.

        It is at most so large. A store that was begun keeps its block size, if that fits.
        """
        budget = parse_memory(request.budget)
        held = sum(map(_bytes_on_device, jax.tree.leaves(self.prepared)))
        starts = jax.ShapeDtypeStruct((self.at_once,), jnp.int32, sharding=self._split)
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
    def _split(self) -> NamedSharding | None:
        """Where numbers are of which each device has one."""
        return None if self.axis is None else self.axis.sharding(0)

    def _function(self, size: int) -> Fun:
        """From what was prepared and the first column of each block, the blocks, stacked."""
        part = self.part

        def block(prepared: Any, starts: Array) -> PyTree:
            # Those that are beyond the last are cut off by whoever asked.
            last = jnp.int32(part.length - 1)
            indices = jnp.minimum(starts[0] + jnp.arange(size, dtype=jnp.int32), last)
            column = lambda index: part.column(prepared, index)
            columns = jax.vmap(column, out_axes=part.axis)(indices)
            return jax.tree.map(lambda array: array[None], columns)

        if self.axis is None:
            return block
        stacked = self.axis.spec(0)
        return self.axis.shard_map(block, (WHOLE, stacked), stacked)


def _bytes_on_device(array: Array) -> int:
    """What an array takes on each of the devices on which it lies."""
    return array.addressable_shards[0].data.nbytes


SEEN_WITHIN = 30.0
"""Seconds within which a process must see what another one has written to the file system."""


def stream(
    problem: BlockProblem,
    x: PyTree,
    options: Options,
    block_size: int,
    out: str | PathLike[str],
    overwrite: bool,
    verify: bool,
    progress: bool,
) -> tuple[list[Any], PyTree]:
    """The arrays of a problem with one part, on disk at `out`, and its auxiliary value."""
    if not options.jit or (options.budget is not None and options.budget.objective == "time"):
        raise ValueError(
            f"{where()}: blocks for the disk are always compiled, and as large as the budget "
            f"allows: out= does not go with jit=False or objective='time'."
        )
    if any(map(_jax.is_tracer, jax.tree.leaves(x))):
        raise ValueError(f"{where()}: {_NOT_TRACED.format(out)}")
    check_closed_over(problem.prepare, x, options)
    team = Team.of(options.axis)
    x = team.own(x)
    with team.by_itself():
        wanted = team.all_or_none(
            lambda: _Wanted.of(problem, x, check_path(out), overwrite, options),
            "checking the arguments",
        )
        if team.count > 1:
            check_agreement(wanted.in_words(x))
        blocks, aux = team.all_or_none(
            lambda: BlockPrograms.of(problem, x, team.axis), "linearising the function"
        )
        with disk_errors(wanted.path):
            store = _opened(wanted, blocks, options, block_size, team, verify)
            _write_unfinished(store, blocks, team, progress)
    return list(store.arrays()), aux


@dataclass(frozen=True)
class _Wanted:
    """Which store is wanted: where, with which arrays, for which computation."""

    path: Path
    specs: tuple[ArraySpec, ...]
    computation: Any
    """What `BlockStore` takes beside these."""
    callbacks: tuple[str, ...]
    """The Python functions that the program calls, which no fingerprint covers."""

    @classmethod
    def of(
        cls, problem: BlockProblem, x: PyTree, path: Path, overwrite: bool, options: Options
    ) -> "_Wanted":
        (part,) = problem.parts
        first = lambda x: part.column(problem.prepare(x)[0], 0)
        program, shapes = _traced(first, x, path, options)
        computation = {
            "axis": "first" if part.axis == 0 else "last",
            "length": part.length,
            "fingerprint": fingerprint(program, (), jax.tree.leaves(x)),
            "overwrite": overwrite,
        }
        return cls(path, tuple(_specs(shapes, part)), computation, tuple(callbacks(program)))

    def in_words(self, x: PyTree) -> list[str]:
        """What all processes must have alike, a line for each."""
        text = self.computation["fingerprint"][:12]
        told = f"the fingerprint of function, constants and inputs is {text}"
        return [*describe("x", x), told]

    def recorded_block_size(self) -> int | None:
        """That of the store, if it was begun."""
        return BlockStore.recorded_block_size(self.path, self.specs, **self.computation)

    def opened(self, block_size: int, verify: bool) -> BlockStore:
        """The store, made or continued; with callbacks, made."""
        return BlockStore.open(
            self.path,
            self.specs,
            block_size=block_size,
            resume=not self.callbacks,
            verify=verify,
            **self.computation,
        )

    def resumed_block_size(self) -> int | None:
        """That of the store, if it was begun and can be continued.

        Raises:
            ValueError: it was begun, but by a program that calls Python functions, and is not to be
                overwritten: these may have computed something else then.
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

    def joined(self, block_size: int, number: int) -> BlockStore:
        """The store that another process has opened, which is process `number`'s to find."""
        axis, length = self.computation["axis"], self.computation["length"]
        deadline = time.monotonic() + SEEN_WITHIN
        while self.recorded_block_size() != block_size:
            if time.monotonic() > deadline:
                raise FileNotFoundError(
                    f"{where()}: process 0 has opened the store {self.path}, but "
                    f"process {number} does not see it. It must be in a file system that all "
                    f"processes share."
                )
            time.sleep(0.1)
        return BlockStore(self.path, self.specs, axis, length, block_size)


def _traced(fun: Any, x: PyTree, path: Path, options: Options) -> tuple[Any, PyTree]:
    """The program of a column and its shape, the same whatever devices it will run on."""
    if options.axis is None and jax.process_count() == 1:
        program, shapes = jax.make_jaxpr(fun, return_shape=True)(x)
    else:
        with _jax.no_mesh():
            plain = jax.tree.map(_jax.unplaced, x)
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
    team: Team,
    verify: bool,
) -> BlockStore:
    """The store, opened by the first process, which says how large blocks are."""

    def open_first() -> BlockStore:
        recorded = wanted.resumed_block_size()
        # So that there is something to do for every device.
        most = -(-blocks.part.length // (blocks.at_once * team.count))
        if options.budget is not None:
            size = blocks.planned_size(options.budget, recorded, most)
        elif options.has_size:
            size = block_size
        else:
            size = recorded or blocks.default_size(wanted.specs, most)
        return wanted.opened(size, verify)

    store = team.all_or_none(lambda: open_first() if team.is_first else None, "opening the store")
    size = int(team.sent_by_first(np.int32(0 if store is None else store.block_size)))
    return team.all_or_none(lambda: store or wanted.joined(size, team.number), "opening the store")


def _write_unfinished(store: BlockStore, blocks: BlockPrograms, team: Team, progress: bool) -> None:
    """Compute and write the blocks that are missing, each process its share of them."""
    if not store.num_blocks:
        return
    missing = np.zeros(store.num_blocks, np.uint8)
    missing[store.unfinished()] = 1
    unfinished = np.flatnonzero(team.sent_by_first(missing)).tolist()
    own, left = unfinished[team.number :: team.count], len(unfinished)
    bar = Progress(where().partition(".")[2], store.num_blocks, store.num_blocks - left)

    def is_done() -> bool:
        nonlocal left
        before, left = left, len(store.unfinished())
        if progress:
            bar.advance(before - left)
        return not left

    for begin in range(0, len(own), blocks.at_once):
        indices = own[begin : begin + blocks.at_once]
        computed = blocks.compute([store.rows(index) for index in indices])
        for index, arrays in zip(indices, computed, strict=True):
            store.write(index, arrays)
        del computed  # Before the next are computed.
        if progress:
            is_done()
    team.wait_until(is_done)


@contextmanager
def disk_errors(path: Path) -> Generator[None]:
    """Say what to do where the system refuses to write: a full disk, or one that is read-only."""
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
    "outside, or leave out=None."
)


def _specs(shapes: PyTree, part: Part) -> list[ArraySpec]:
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    specs = []
    for path, leaf in leaves:
        name = "" if len(leaves) == 1 else leaf_name("", path)
        first = part.axis == 0
        shape = (part.length, *leaf.shape) if first else (*leaf.shape, part.length)
        specs.append(ArraySpec(name, shape, np.dtype(leaf.dtype)))
    return specs
