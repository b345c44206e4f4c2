"""A problem solved on disk: each block is computed, written, and let go.

The point is prepared once (the function linearised), and a compiled program computes one block
after the other from that. `BlockStore` keeps track of what is done.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curvax import _compat
from curvax._tree import leaf_name
from curvax._types import Fun, PyTree, Size
from curvax.diffops._disk import ArraySpec, BlockStore, check_path
from curvax.diffops._fingerprint import fingerprint
from curvax.diffops._options import BlockOptions
from curvax.diffops._problem import BlockProblem, Part
from curvax.diffops._progress import Progress
from curvax.memory import (
    BudgetRequest,
    MemoryBudgetError,
    memory_usage,
    parse_memory,
    plan_batch_size,
    record,
)

__all__ = ["stream"]

BLOCK_BYTES = 64 * 2**20
"""About how large a block is on disk where nothing was said."""


def stream(
    problem: BlockProblem,
    x: PyTree,
    options: BlockOptions,
    out: str | PathLike[str],
    overwrite: bool,
    progress: bool,
) -> tuple[list[Any], PyTree]:
    """The arrays of a problem with one part, on disk at `out`, and its auxiliary value."""
    where = options.where
    path = check_path(out, where)
    if not options.jit or (options.budget is not None and options.budget.objective == "time"):
        raise ValueError(
            f"{where}: blocks for the disk are always compiled, and as large as the budget allows: "
            f"out= does not go with jit=False or objective='time'."
        )
    (part,) = problem.parts
    if any(map(_compat.is_tracer, jax.tree.leaves(x))):
        raise ValueError(f"{where}: {_NOT_TRACED.format(path)}")
    first = lambda x: part.column(problem.prepare(x)[0], 0)
    program, shapes = jax.make_jaxpr(first, return_shape=True)(x)
    if any(map(_compat.is_tracer, program.consts)):
        raise ValueError(f"{where}: {_NOT_TRACED.format(path)}")
    specs = _specs(shapes, part)
    store_of: Any = {
        "axis": "first" if part.axis == 0 else "last",
        "length": part.length,
        "fingerprint": fingerprint(program, (), jax.tree.leaves(x)),
        "overwrite": overwrite,
        "where": where,
    }
    recorded = BlockStore.recorded_block_size(path, specs, **store_of)
    prepared, aux = jax.jit(problem.prepare)(x)
    blocks = _Blocks(part, prepared, options, {})
    size = options.size if options.is_given else recorded or blocks.default_size(specs)
    if options.budget is not None:
        size = blocks.planned_size(options.budget, recorded)
    store = BlockStore.open(path, specs, block_size=size, **store_of)
    unfinished = store.unfinished()
    done = store.num_blocks - len(unfinished)
    bar = Progress(where.partition(".")[2], store.num_blocks, done)
    for index in unfinished:
        values = blocks.compute(store.rows(index))
        store.write(index, [np.asarray(value) for value in jax.tree.leaves(values)])
        del values  # Before the next is computed.
        if progress:
            bar.advance()
    return list(store.arrays()), aux


_NOT_TRACED = (
    "out={!s} writes to disk, which cannot be done under a transformation such as jit. Call it "
    "outside, or leave out=None."
)


@dataclass(frozen=True)
class _Blocks:
    """The compiled programs that compute blocks, by size."""

    part: Part
    prepared: Any
    options: BlockOptions
    programs: dict[int, Any]

    def compute(self, rows: slice) -> PyTree:
        """The columns in that range."""
        size = rows.stop - rows.start
        start = jnp.asarray(rows.start, jnp.int32)
        if size not in self.programs:
            self.programs[size] = jax.jit(self._function(size))
        return self.programs[size](self.prepared, start)

    def default_size(self, specs: Sequence[ArraySpec]) -> int:
        """Blocks of a size that is good to write and read."""
        total = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
        return max(1, min(self.part.length, BLOCK_BYTES * self.part.length // max(1, total)))

    def planned_size(self, request: BudgetRequest, recorded: int | None) -> int:
        """The largest block that fits the budget, beside what was prepared.

        A store that was begun keeps its block size, if that fits.
        """
        budget = parse_memory(request.budget)
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(self.prepared))
        where = request.where
        start = jax.ShapeDtypeStruct((), jnp.int32)
        if recorded is not None:
            needs = held + memory_usage(self._function(recorded), self.prepared, start).added_bytes
            if needs > budget:
                raise MemoryBudgetError(
                    budget,
                    needs,
                    where,
                    f"The store was begun in blocks of {recorded}, which do not fit. Give it that "
                    f"much, or start again with overwrite=True and batch_size.",
                )
            return recorded
        smallest = held + memory_usage(self._function(1), self.prepared, start).added_bytes
        if smallest > budget:
            raise MemoryBudgetError(budget, smallest, where, "What else helps: checkpoint=True.")
        plan = plan_batch_size(
            self._function,
            (self.prepared, start),
            max_size=max(1, self.part.length),
            memory_budget=budget - held,
        )
        record(plan)
        self.programs[plan.batch_size] = plan
        return plan.batch_size

    def _function(self, size: int) -> Fun:
        def compute(prepared: Any, start: Size) -> PyTree:
            indices = start + jnp.arange(size, dtype=jnp.int32)
            column = lambda index: self.part.column(prepared, index)
            return jax.vmap(column, out_axes=self.part.axis)(indices)

        return compute


def _specs(shapes: PyTree, part: Part) -> list[ArraySpec]:
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    specs = []
    for path, leaf in leaves:
        name = "" if len(leaves) == 1 else leaf_name("", path)
        first = part.axis == 0
        shape = (part.length, *leaf.shape) if first else (*leaf.shape, part.length)
        specs.append(ArraySpec(name, shape, np.dtype(leaf.dtype)))
    return specs
