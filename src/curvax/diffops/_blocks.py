"""Blocks of columns for the disk: one program, called for one block after the other.

It computes from what was prepared, which stays where it is. On several devices it computes one
block on each: which blocks there are does not depend on how many devices there are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from curvax._types import Array, Fun, PyTree
from curvax.diffops._disk import ArraySpec
from curvax.diffops._problem import BlockProblem, Part
from curvax.memory import (
    BudgetRequest,
    MemoryBudgetError,
    memory_usage,
    parse_memory,
    plan_batch_size,
    record,
)
from curvax.parallel import MeshAxis

__all__ = ["BlockPrograms"]

BLOCK_BYTES = 64 * 2**20
"""About how large a block is on disk where nothing was said."""

WHOLE = PartitionSpec()


@dataclass(frozen=True)
class BlockPrograms:
    """The compiled programs that compute blocks, by size."""

    part: Part
    prepared: Any
    axis: MeshAxis | None
    programs: dict[int, Any] = field(default_factory=dict[int, Any])

    @classmethod
    def of(
        cls, problem: BlockProblem, x: PyTree, axis: MeshAxis | None
    ) -> tuple["BlockPrograms", PyTree]:
        """Prepare a problem with one part at a point; and its auxiliary value."""
        prepare = jax.jit if axis is None else lambda fun: axis.on_all(fun, (WHOLE,), WHOLE)
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
        where = request.where
        starts = jax.ShapeDtypeStruct((self.at_once,), jnp.int32, sharding=self._split)
        if recorded is not None:
            needs = held + memory_usage(self._function(recorded), self.prepared, starts).added_bytes
            if needs > budget:
                raise MemoryBudgetError(
                    budget,
                    needs,
                    where,
                    f"The store was begun in blocks of {recorded}, which do not fit. Give it that "
                    f"much, or start again with overwrite=True and batch_size.",
                )
            return recorded
        smallest = held + memory_usage(self._function(1), self.prepared, starts).added_bytes
        if smallest > budget:
            raise MemoryBudgetError(budget, smallest, where, "What else helps: checkpoint=True.")
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
        return self.axis.on_all(block, (WHOLE, stacked), stacked)


def _bytes_on_device(array: Array) -> int:
    """What an array takes on each of the devices on which it lies."""
    return array.addressable_shards[0].data.nbytes
