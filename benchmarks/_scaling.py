"""The computation, communication and memory of each device in a step of K-FAC, from shapes alone.

The blocks are those that curvax constructs for the model, and curvax's own functions distribute the
work; only sums are computed here. `_scaling_side.py` compares them with compiled programs.

- FLOPs: the gradient, and the statistics of layers (a second backward pass, without gradients of
  parameters, and the moments of inputs and outputs), are counted for one example and divided by the
  number of devices. An inverse of n rows takes n³ operations. The device with the most work counts.
- Bytes: the collectives of a step, with the size of the operand of each device. The bytes that it
  sends are those of ring algorithms.
- Memory: parameters, gradient, momentum, averages of factors, their inverses, and the statistics of
  one batch, which each device has in full before they are summed. Activations depend on how the
  model is checkpointed and are left out.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _flops import flops
from _scaling_models import Model

from curvax.curvature.block_diagonal import BlockDiagonalCurvature
from curvax.curvature.linalg.kronecker import DenseSide
from curvax.curvature.state_sharding import ShardedCurvature
from curvax.devices.task_assignment import assign

__all__ = ["PLANS", "Collective", "Passes", "Plan", "Step"]

SOME_EXAMPLES = 4
"""Number of examples with which models are traced."""


@dataclass(frozen=True)
class Plan:
    """What is distributed over devices, with the options of the optimizer that do so."""

    title: str
    shares_work: bool
    splits_state: bool = False


PLANS = {
    "replicated": Plan("distributed_inverses, distributed_precon_apply = False", False),
    "shared": Plan("the default", True),
    "split": Plan("shard_state=True", True, True),
}


@dataclass(frozen=True)
class Collective:
    """A collective, and the bytes of its operand on each device."""

    phase: str
    kind: str
    operand: int

    def sent(self, count: int) -> float:
        """Return the bytes that a device sends in a ring of `count` devices."""
        per_byte = {
            "all-reduce": 2 * (count - 1) / count,
            "reduce-scatter": (count - 1) / count,
            "all-gather": count - 1,
        }
        return per_byte[self.kind] * self.operand


@dataclass(frozen=True)
class Passes:
    """The number of operations for one example."""

    gradient: float
    statistics: float

    @classmethod
    def of(cls, model: Model) -> "Passes":
        """Count them in the traced programs of the model and of its blocks' statistics."""
        batch = model.batch(SOME_EXAMPLES)
        estimator = BlockDiagonalCurvature(model.loss)
        state = jax.eval_shape(
            lambda: estimator.init(jax.random.key(0), (model.params, batch), None, -1)
        )
        layers, moments = 0, 0
        for block, own in zip(estimator.blocks or (), state.blocks_states, strict=True):
            for use in block.uses:
                params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in use.slice_shapes]
                steps = math.prod(use.lengths)
                layers += steps * flops(use.compute, use.input, params)
                for statistic in block.statistics(use, block.uses, own).values():
                    of_rows = lambda x, g, s=statistic: s.compute((x,), (g,))
                    moments += steps * flops(of_rows, use.input, use.output)
        forward = flops(model.loss, model.params, batch)
        gradient = flops(jax.grad(model.loss), model.params, batch)
        # The gradient with respect to a layer's parameters costs as much as the layer.
        backward = gradient - forward - layers
        return cls(gradient / SOME_EXAMPLES, (backward + moments) / SOME_EXAMPLES)


@dataclass(frozen=True)
class Step:
    """A step of K-FAC on `count` devices, in which inverses are computed."""

    model: Model
    plan: Plan
    count: int
    estimator: Any
    state: Any
    """The global shapes of the estimator's state."""

    @classmethod
    def of(cls, model: Model, plan: Plan, count: int) -> "Step":
        """Trace the model with curvax."""
        batch = model.batch(SOME_EXAMPLES)
        options: dict[str, Any] = {
            "distributed_multiplies": plan.shares_work,
            "distributed_cache_updates": plan.shares_work,
        }
        if plan.splits_state:
            estimator = ShardedCurvature(model.loss, num_devices=count, **options)
        else:
            estimator = BlockDiagonalCurvature(model.loss, **options)
        init = lambda: estimator.init(jax.random.key(0), (model.params, batch), None, -1)
        return cls(model, plan, count, estimator, jax.eval_shape(init))

    @property
    def shards(self) -> Any:
        """The blocks that are sharded over devices."""
        return self.estimator.shards if self.plan.splits_state else ()

    @property
    def whole(self) -> list[tuple[Any, Any]]:
        """The blocks that are replicated, with their states."""
        pairs = zip(self.estimator.blocks, self.state.blocks_states, strict=True)
        return [(block, own) for block, own in pairs if own is not None]

    def flops(self, passes: Passes, batch_size: int) -> dict[str, float]:
        """Return the operations of the device with the most work, in each phase."""
        examples = batch_size / self.count
        return {
            "gradient": passes.gradient * examples,
            "statistics": passes.statistics * examples,
            "inverses": self._inverses(),
            "preconditioning": self._preconditioning(),
        }

    def collectives(self) -> list[Collective]:
        """Return the collectives, if there are several devices."""
        return [] if self.count == 1 else [c for c in self._collectives() if c.operand]

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of averages and of inverses that each device holds."""
        whole = [(block.averages(own), own.cache) for block, own in self.whole]
        split = [(own.factors, own.cache) for own in self.state.shards] if self.shards else []
        kinds = {
            kind: size([own[k] for own in whole]) + size([own[k] for own in split]) // self.count
            for k, kind in enumerate(("averages", "inverses"))
        }
        weights = [(own.weight, own.refused) for own in self.state.shards] if self.shards else []
        return kinds | {"averages": kinds["averages"] + size(weights)}

    def memory(self) -> dict[str, int]:
        """Return the bytes that each device needs, by purpose."""
        params = size(self.model.params)
        kinds = ("parameters", "gradient", "momentum")
        passing = {"statistics": self._statistics()}
        return dict.fromkeys(kinds, params) | passing | self.state_bytes()

    def _statistics(self) -> int:
        """Return the bytes of a device's sums over its batch."""
        of_shards = [
            side.dtype.itemsize * math.prod(side.shape)
            for shard in self.shards
            for block in shard.blocks
            for side in _arrays_of(block)
        ]
        return size([block.averages(own) for block, own in self.whole]) + sum(of_shards)

    def _inverses(self) -> float:
        loads = np.zeros(self.count)
        for shard in self.shards:
            work = sum(side.work for side in shard.sides)
            loads += [work * len(own) for own in shard.units_of_device]
        tasks = [float(rows) ** 3 for rows, number, _ in self._matrices() for _ in range(number)]
        owners = assign(tasks, self.count) if self.plan.shares_work else None
        return float(np.max(loads + _loads(tasks, owners, self.count)))

    def _preconditioning(self) -> float:
        """Return the operations of products with inverses; rows of padding count, too."""
        of_rows = sum(
            shard.rows * _of_product(shard.kronecker, math.prod(s.size for s in shard.sides))
            for shard in self.shards
        )
        blocks = [block for block, _ in self.whole]
        kroneckers = [getattr(block, "kronecker", None) for block in blocks]
        tasks = [
            float(_of_product(kronecker, block.dim)) if kronecker else float(block.dim)
            for block, kronecker in zip(blocks, kroneckers, strict=True)
        ]
        return of_rows + float(np.max(_loads(tasks, self._owners(), self.count), initial=0))

    def _owners(self) -> list[int] | None:
        """Return the device of each product with a replicated block, if these are distributed."""
        work = [block.multiply_work for block, _ in self.whole]
        return assign(work, self.count) if self.plan.shares_work else None

    def _matrices(self) -> Iterator[tuple[int, int, int]]:
        """Yield rows, number and bytes of the replicated matrices that are inverted.

        They are padded to a few sizes.
        """
        for block, _ in self.whole:
            for side in _dense_sides(block):
                more = -side.size % (32 if side.size > 512 else 16)
                rows = side.size + more
                yield rows, math.prod(side.stack), rows**2 * jnp.dtype(block.dtype).itemsize

    def _collectives(self) -> Iterator[Collective]:
        repeated = size(self.model.repeated)
        yield Collective("gradient", "all-reduce", size(self.model.params) - repeated)
        whole = size([x.raw_value for block, own in self.whole for x in block.averages(own)])
        if not self.plan.splits_state:  # Otherwise factors are part of the sharded state.
            repeated += size(self.model.repeated_inputs)
        yield Collective("statistics", "all-reduce", whole - repeated)
        flags = [jax.ShapeDtypeStruct((len(shard.blocks),), jnp.int32) for shard in self.shards]
        yield Collective("statistics", "all-reduce", size(flags))  # Which blocks are finite.
        for shard, own in zip(self.shards, self.state.shards if self.shards else (), strict=True):
            units, rows = sum(shard.lengths), shard.num_rows
            bytes_each = jnp.dtype(shard.dtype).itemsize * math.prod(s.size for s in shard.sides)
            if shard.is_sparse:  # Most rows are padding: all units are summed instead.
                yield Collective("statistics", "all-reduce", size(own.factors) // rows * units)
                yield Collective("preconditioning", "all-reduce", units * bytes_each)
            else:
                yield Collective("statistics", "reduce-scatter", size(own.factors))
                yield Collective("preconditioning", "all-gather", shard.rows * bytes_each)
        if not self.plan.shares_work:
            return
        inverses = sum(number * each for _, number, each in self._matrices())
        yield Collective("inverses", "all-reduce", inverses)
        yield self._products()

    def _products(self) -> Collective:
        """Return the collective of products with replicated blocks.

        An all-gather, or an all-reduce where most gathered elements would be padding.
        """
        sizes = [block.dim * jnp.dtype(block.dtype).itemsize for block, _ in self.whole]
        longest = int(np.max(_loads(sizes, self._owners(), self.count), initial=0))
        if self.count * longest <= 2 * sum(sizes):
            return Collective("preconditioning", "all-gather", longest)
        return Collective("preconditioning", "all-reduce", sum(sizes))


def size(tree: Any) -> int:
    """Return the bytes of arrays or shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _dense_sides(block: Any) -> list[DenseSide]:
    kronecker = getattr(block, "kronecker", None)
    sides = (kronecker.inputs, kronecker.outputs) if kronecker else ()
    return [side for side in sides if isinstance(side, DenseSide)]


def _arrays_of(block: Any) -> list[jax.ShapeDtypeStruct]:
    sides = block.kronecker.inputs, block.kronecker.outputs
    return [jax.ShapeDtypeStruct(side.shape, block.dtype) for side in sides]


def _of_product(kronecker: Any, numbers: int) -> int:
    """Return the operations of a product with both factors."""
    sides = kronecker.inputs, kronecker.outputs
    return numbers * sum(2 * s.size if isinstance(s, DenseSide) else 1 for s in sides)


def _loads(tasks: list[Any], owners: list[int] | None, count: int) -> np.ndarray:
    """Return the work of each device; without an assignment each device does all of it."""
    if owners is None:
        return np.full(count, sum(tasks))
    return np.bincount(owners, weights=tasks, minlength=count)
