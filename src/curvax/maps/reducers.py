"""What becomes of the outputs of successive chunks.

A reducer takes the value of each chunk in turn into a carry and makes the result of it. There is
one for each way a map may treat an output leaf: collected row by row, kept because it is always
the same, summed, or averaged in two ways. `Prefix` puts reducers together for the parts of a
pytree.

Reducers are made for outputs of known shape. With `per_example=True` the values carry a leading
axis of examples, which is reduced too. Sums of half-precision numbers are kept in float32.

Where each of several devices has reduced its shard of the examples, `finalize_sharded` makes one
result of all their carries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from curvax import _jax, _slicing
from curvax._dtypes import at_least_single
from curvax._errors import where
from curvax._types import Array, Carry, PyTree, Size, TreeDef
from curvax.maps.chunk_plan import Chunk, ChunkPlan
from curvax.maps.sharding import BatchSharding

__all__ = ["Collect", "Mean", "Prefix", "Reducer", "RunningMean", "Same", "ShardedReducer", "Sum"]


Shape = jax.ShapeDtypeStruct


@runtime_checkable
class Reducer(Protocol):
    """Takes in the values of chunks one by one."""

    def init(self) -> Carry:
        """The carry before the first chunk."""
        ...

    def update(self, carry: Carry, value: PyTree, chunk: Chunk) -> Carry:
        """The carry after that chunk."""
        ...

    def finalize(self, carry: Carry, examples: Size) -> PyTree:
        """The result, once `examples` examples have been taken in."""
        ...


@runtime_checkable
class ShardedReducer(Reducer, Protocol):
    """A reducer of which each device has a carry."""

    def finalize_sharded(self, carry: Carry, examples: Size, sharding: BatchSharding) -> PyTree:
        """The result of all devices, when this one has taken in `examples` examples."""
        ...

    def specs(self, sharding: BatchSharding) -> PyTree:
        """How that result is split among them: partition specs, for a prefix of it."""
        ...


@dataclass(frozen=True)
class Collect:
    """Each example's output in the place of the example, along `axis` of the result.

    The values have their examples along axis 0. Examples that are not run are zero.
    """

    like: Shape
    plan: ChunkPlan
    axis: int

    def init(self) -> Array:
        rows_like = jax.eval_shape(self._rows_of, self.like)
        return self.plan.lay_out(
            _slicing.allocate(self.plan.length, rows_like, self.axis), self.axis
        )

    def update(self, carry: Array, value: Array, chunk: Chunk) -> Array:
        _check(self, value, chunk, rows=True)
        return _slicing.write(carry, self._rows_of(value), chunk.rows, self.axis)

    def finalize(self, carry: Array, examples: Size) -> Array:
        del examples
        return _jax.wrap_keys(self.plan.put_back(carry, self.axis), self.like)

    def finalize_sharded(self, carry: Array, examples: Size, sharding: BatchSharding) -> Array:
        del examples
        rows = sharding.rows(self.plan.put_back(carry, self.axis), self.axis)
        return _jax.wrap_keys(rows, self.like)

    def specs(self, sharding: BatchSharding) -> PartitionSpec:
        return sharding.spec(self.axis)

    def _rows_of(self, value: Array) -> Array:
        moved = value if self.axis == 0 else jnp.moveaxis(value, 0, self.axis)
        return _jax.unwrap_keys(moved)


class _Whole:
    """The results have no axis of examples, and every device has all of them."""

    def specs(self, sharding: BatchSharding) -> PartitionSpec:
        return sharding.spec(None)


@dataclass(frozen=True)
class Same(_Whole):
    """An output that every chunk gives alike."""

    like: Shape

    def init(self) -> Array:
        return _jax.filled_like(jax.eval_shape(_jax.unwrap_keys, self.like))

    def update(self, carry: Array, value: Array, chunk: Chunk) -> Array:
        del carry, chunk
        return _jax.unwrap_keys(value)

    def finalize(self, carry: Array, examples: Size) -> Array:
        del examples
        return _jax.wrap_keys(carry, self.like)

    def finalize_sharded(self, carry: Array, examples: Size, sharding: BatchSharding) -> Array:
        # Devices without examples do not know it.
        known = carry if sharding.partition.each else sharding.stacked(carry)[0]
        return self.finalize(known, examples)


@dataclass(frozen=True)
class Sum(_Whole):
    """The sum over chunks, or with `per_example` over all examples."""

    like: Shape
    per_example: bool

    def init(self) -> Array:
        return _jax.filled_like(jax.eval_shape(self._term, self.like))

    def update(self, carry: Array, value: Array, chunk: Chunk) -> Array:
        _check(self, value, chunk, rows=self.per_example)
        return carry + self._term(value)

    def finalize(self, carry: Array, examples: Size) -> Array:
        del examples
        return carry.astype(jax.eval_shape(jnp.sum, self.like).dtype)

    def finalize_sharded(self, carry: Array, examples: Size, sharding: BatchSharding) -> Array:
        return self.finalize(sharding.axis.psum(carry), examples)

    def _term(self, value: Array) -> Array:
        dtype = at_least_single(jax.eval_shape(jnp.sum, self.like).dtype)
        return jnp.sum(value, axis=0, dtype=dtype) if self.per_example else value.astype(dtype)


@dataclass(frozen=True)
class Mean(_Whole):
    """The mean over examples: a sum, divided at the end.

    With `per_example` it is the sum over examples. Otherwise each value is the mean of its chunk
    and is weighted by the size of that, in units of the first so that even chunks just add up.
    """

    like: Shape
    per_example: bool
    plan: ChunkPlan

    def init(self) -> Array:
        return _jax.filled_like(jax.eval_shape(self._term, self.like))

    def update(self, carry: Array, value: Array, chunk: Chunk) -> Array:
        _check(self, value, chunk, rows=self.per_example)
        term, weight = self._term(value), chunk.size / self._unit
        return carry + (term if self.per_example or weight == 1 else weight * term)

    def finalize(self, carry: Array, examples: Size) -> Array:
        weight = _real(examples, carry) / self._unit
        return (carry / weight.astype(carry.dtype)).astype(self.like.dtype)

    def finalize_sharded(self, carry: Array, examples: Size, sharding: BatchSharding) -> Array:
        return self.finalize(sharding.axis.psum(carry), sharding.total(examples))

    @property
    def _unit(self) -> int:
        return 1 if self.per_example else max(1, self.plan.runs()[0].size)

    def _term(self, value: Array) -> Array:
        dtype = at_least_single(value.dtype)
        return jnp.sum(value, axis=0, dtype=dtype) if self.per_example else value.astype(dtype)


@dataclass(frozen=True)
class RunningMean(_Whole):
    """The mean over examples, a mean at every step.

    No sum is ever formed that is larger than the values, so none overflows.
    """

    like: Shape
    per_example: bool

    def init(self) -> Array:
        return _jax.filled_like(jax.eval_shape(self._term, self.like))

    def update(self, carry: Array, value: Array, chunk: Chunk) -> Array:
        _check(self, value, chunk, rows=self.per_example)
        seen = _real(jnp.maximum(chunk.examples_before + chunk.size, 1), carry)
        weight = (chunk.size / seen).astype(carry.dtype)
        return (1 - weight) * carry + weight * self._term(value)

    def finalize(self, carry: Array, examples: Size) -> Array:
        return jnp.where(jnp.asarray(examples > 0), carry, jnp.nan).astype(self.like.dtype)

    def finalize_sharded(self, carry: Array, examples: Size, sharding: BatchSharding) -> Array:
        total = sharding.total(examples)
        part = _real(examples, carry) / _real(jnp.maximum(total, 1), carry)
        return self.finalize(sharding.axis.psum(part.astype(carry.dtype) * carry), total)

    def _term(self, value: Array) -> Array:
        value = value.astype(at_least_single(value.dtype))
        if not self.per_example:
            return value
        # Divided before they are summed, because the sum may overflow where the mean does not.
        return jnp.sum(value / max(1, value.shape[0]), axis=0)


@dataclass(frozen=True)
class Prefix:
    """One reducer for each part of a pytree, where `structure` is a prefix of it."""

    structure: TreeDef
    reducers: Sequence[ShardedReducer]

    def init(self) -> Carry:
        return [reducer.init() for reducer in self.reducers]

    def update(self, carry: Carry, value: PyTree, chunk: Chunk) -> Carry:
        parts = self.structure.flatten_up_to(value)
        steps = zip(self.reducers, carry, parts, strict=True)
        return [reducer.update(state, part, chunk) for reducer, state, part in steps]

    def finalize(self, carry: Carry, examples: Size) -> PyTree:
        parts = zip(self.reducers, carry, strict=True)
        return self.structure.unflatten([r.finalize(state, examples) for r, state in parts])

    def finalize_sharded(self, carry: Carry, examples: Size, sharding: BatchSharding) -> PyTree:
        parts = zip(self.reducers, carry, strict=True)
        results = [reducer.finalize_sharded(state, examples, sharding) for reducer, state in parts]
        return self.structure.unflatten(results)

    def specs(self, sharding: BatchSharding) -> PyTree:
        return self.structure.unflatten([reducer.specs(sharding) for reducer in self.reducers])


def _real(count: Size, like: Array) -> Array:
    """A count as a real number of the precision of `like`."""
    return jnp.asarray(count, jnp.finfo(like.dtype).dtype)


def _check(
    reducer: Collect | Sum | Mean | RunningMean, value: Array, chunk: Chunk, rows: bool
) -> None:
    """Values can only be combined if they are alike but, with `rows`, for the size of the chunk."""
    like = reducer.like
    expected = (chunk.size, *like.shape[1:]) if rows else like.shape
    if value.shape != expected or value.dtype != like.dtype:
        raise ValueError(
            f"{where()}: the function returned {like.dtype}{list(like.shape)} for a "
            f"microbatch of {chunk.plan.runs()[0].size} examples and "
            f"{value.dtype}{list(value.shape)} for one of {chunk.size}: these cannot be combined. "
            f"Collect per-example outputs with AccumulationType.CONCAT, reduce them inside the "
            f"function, or choose a microbatch size that divides {chunk.plan.length}."
        )
