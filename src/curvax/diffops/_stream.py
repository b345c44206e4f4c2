"""A problem solved on disk: each block is computed, written, and let go.

The point is prepared once (the function linearised), and a compiled program computes one block
after the other from that (`_blocks`). `BlockStore` keeps track of what is done. What is left to do
is dealt out among the processes that there are (`_team`), each of which has its devices.
"""

import errno
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np

from curvax import _compat
from curvax._tree import leaf_name
from curvax._types import PyTree
from curvax.diffops._agreement import check_agreement, shapes_in_words
from curvax.diffops._blocks import BlockPrograms
from curvax.diffops._disk import ArraySpec, BlockStore, check_path
from curvax.diffops._fingerprint import callbacks, fingerprint
from curvax.diffops._options import BlockOptions
from curvax.diffops._problem import BlockProblem, Part
from curvax.diffops._progress import Progress
from curvax.diffops._team import Team

__all__ = ["disk_errors", "stream"]

SEEN_WITHIN = 30.0
"""Seconds within which a process must see what another one has written to the file system."""


def stream(
    problem: BlockProblem,
    x: PyTree,
    options: BlockOptions,
    out: str | PathLike[str],
    overwrite: bool,
    verify: bool,
    progress: bool,
) -> tuple[list[Any], PyTree]:
    """The arrays of a problem with one part, on disk at `out`, and its auxiliary value."""
    where = options.where
    if not options.jit or (options.budget is not None and options.budget.objective == "time"):
        raise ValueError(
            f"{where}: blocks for the disk are always compiled, and as large as the budget allows: "
            f"out= does not go with jit=False or objective='time'."
        )
    if any(map(_compat.is_tracer, jax.tree.leaves(x))):
        raise ValueError(f"{where}: {_NOT_TRACED.format(out)}")
    options.devices.check_closed_over(problem.prepare, x, where)
    team = Team.of(options.devices, where)
    x = team.own(x)
    with team.by_itself():
        wanted = team.all_or_none(
            lambda: _Wanted.of(problem, x, check_path(out, where), overwrite, options),
            "checking the arguments",
        )
        if team.count > 1:
            check_agreement(wanted.in_words(x), where)
        blocks, aux = team.all_or_none(
            lambda: BlockPrograms.of(problem, x, team.axis), "linearising the function"
        )
        with disk_errors(where, wanted.path):
            store = _opened(wanted, blocks, options, team, verify)
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
        cls, problem: BlockProblem, x: PyTree, path: Path, overwrite: bool, options: BlockOptions
    ) -> "_Wanted":
        (part,) = problem.parts
        first = lambda x: part.column(problem.prepare(x)[0], 0)
        program, shapes = _traced(first, x, path, options)
        computation = {
            "axis": "first" if part.axis == 0 else "last",
            "length": part.length,
            "fingerprint": fingerprint(program, (), jax.tree.leaves(x)),
            "overwrite": overwrite,
            "where": options.where,
        }
        return cls(path, tuple(_specs(shapes, part)), computation, tuple(callbacks(program)))

    def in_words(self, x: PyTree) -> list[str]:
        """What all processes must have alike, a line for each."""
        text = self.computation["fingerprint"][:12]
        told = f"the fingerprint of function, constants and inputs is {text}"
        return [*shapes_in_words("x", x), told]

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
            f"{self.computation['where']}: f calls back to Python ({', '.join(self.callbacks)}), "
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
                    f"{self.computation['where']}: process 0 has opened the store {self.path}, but "
                    f"process {number} does not see it. It must be in a file system that all "
                    f"processes share."
                )
            time.sleep(0.1)
        return BlockStore(self.path, self.specs, axis, length, block_size)


def _traced(fun: Any, x: PyTree, path: Path, options: BlockOptions) -> tuple[Any, PyTree]:
    """The program of a column and its shape, the same whatever devices it will run on."""
    where = options.where
    if options.devices.axis is None and jax.process_count() == 1:
        program, shapes = jax.make_jaxpr(fun, return_shape=True)(x)
    else:
        with _compat.no_mesh():
            plain = jax.tree.map(_compat.unplaced, x)
            program, shapes = jax.make_jaxpr(fun, return_shape=True)(plain)
    if any(map(_compat.is_tracer, program.consts)):
        raise ValueError(f"{where}: {_NOT_TRACED.format(path)}")
    for const in program.consts:
        if isinstance(const, jax.Array) and not const.is_fully_addressable:
            raise ValueError(
                f"{where}: f closes over an array {const.dtype}{list(const.shape)} that is spread "
                f"over several processes, but each of them computes its blocks for the disk by "
                f"itself. Let it close over what jax.experimental.multihost_utils."
                f"process_allgather(array, tiled=True) returns."
            )
    return program, shapes


def _opened(
    wanted: _Wanted, blocks: BlockPrograms, options: BlockOptions, team: Team, verify: bool
) -> BlockStore:
    """The store, opened by the first process, which says how large blocks are."""

    def open_first() -> BlockStore:
        recorded = wanted.resumed_block_size()
        # So that there is something to do for every device.
        most = -(-options.length // (blocks.at_once * team.count))
        if options.budget is not None:
            size = blocks.planned_size(options.budget, recorded, most)
        elif options.is_given:
            size = options.size
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
    bar = Progress(team.where.partition(".")[2], store.num_blocks, store.num_blocks - left)

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
def disk_errors(where: str, path: Path) -> Generator[None]:
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
            f"{where}: cannot write to {path}: {os.strerror(error.errno)}. "
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
