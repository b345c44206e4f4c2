"""Accumulators: how the outputs of microbatches become one result.

`AccumulationType` names the four that come with curvax, `Accumulator` is how users write one of
their own, and either, or any pytree prefix of them, says what to do with the outputs of a
function. `Reduction` turns that into the reducers that the loop runs: one for each way to treat an
output leaf.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import Enum, auto
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from curvax import _jax, _slicing
from curvax._errors import where
from curvax._tree import broadcast_prefix
from curvax._types import (
    Array,
    Carry,
    PyTree,
    Size,
    TreeDef,
    at_least_single,
    promote_weak,
)
from curvax.maps.arguments import normal_axis
from curvax.maps.chunk_plan import Chunk, ChunkPlan
from curvax.maps.sharding import BatchSharding


class AccumulationType(Enum):
    """The accumulators that come with curvax.

    Each is exact for microbatches of unequal sizes too: the means are over examples, not over
    microbatches. Half-precision outputs are accumulated in float32 and returned in their own
    dtype; integers are summed as by `jnp.sum`.
    """

    MEAN = auto()
    """The mean over examples, as a sum that is divided at the end."""

    SUM = auto()
    """The sum over microbatches; in `micro_vmap` and `micro_grad`, over examples."""

    RUNNING_MEAN = auto()
    """The mean over examples, kept as a mean throughout: no sum grows with the batch."""

    CONCAT = auto()
    """All outputs, one row for each example, in the order in which the examples were given."""


@dataclass(frozen=True)
class Accumulator:
    """A way of your own to combine the outputs of microbatches.

    Each function gets the part of the outputs for which the accumulator stands, a pytree. The
    result of a function over microbatches 0, 1, …, M-1 is

        carry = init(shapes of a value)
        for index in range(M):
            carry = update(carry, value of microbatch index, index)
        result = finalize(carry)

    In `micro_vmap` and `micro_grad` a value is `aggregate(per-example values)`, where these have
    a leading axis of examples. On a mesh, each device has a carry and counts its own microbatches;
    the result is `finalize(combine(combine(carry 0, carry 1), carry 2) …)`.

    Arguments:
        init: makes the first carry of `jax.ShapeDtypeStruct`s like a value.
        update: the next carry; it must have the shapes and dtypes of the one before. The index
            is traced.
        finalize: makes the result of the last carry.
        aggregate: reduces per-example values over their leading axis.
        uneven: whether `update` and `aggregate` are right when microbatches differ in size. A
            maximum is; a mean of microbatch means is not. If False, a batch that the microbatch
            size does not divide is refused.
        combine: the carry of all microbatches that two carries have been made of; needed on a mesh
            of several devices. For a sum or a maximum it is that of the carries.

    Examples:
        >>> import jax.numpy as jnp
        >>> from curvax import Accumulator, micro_vmap
        >>> largest = Accumulator(
        ...     init=lambda like: jnp.full(like.shape, -jnp.inf, like.dtype),
        ...     update=lambda carry, value, index: jnp.maximum(carry, value),
        ...     finalize=lambda carry: carry,
        ...     aggregate=lambda values: values.max(axis=0),
        ...     uneven=True,
        ...     combine=jnp.maximum,
        ... )
        >>> micro_vmap(jnp.sin, microbatch_size=2, accumulator=largest)(jnp.arange(5.0))
        Array(0.9092974, dtype=float32)
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], Any]
    finalize: Callable[[Any], Any]
    aggregate: Callable[[Any], Any]
    _: KW_ONLY
    uneven: bool = False
    combine: Callable[[Any, Any], Any] | None = None


# Reducers: what becomes of the values of successive chunks.
#
# A reducer takes the value of each chunk in turn into a carry and makes the result of it. Reducers
# are made for values of known shape. With `per_example=True` these have a leading axis of examples,
# which is reduced too. Sums of half-precision numbers are kept in float32.


@runtime_checkable
class Reducer(Protocol):
    """Combines the values of chunks one by one."""

    def init(self) -> Carry:
        """Return the carry before the first chunk."""
        ...

    def update(self, carry: Carry, value: PyTree, chunk: Chunk) -> Carry:
        """Return the carry after that chunk."""
        ...

    def finalize(self, carry: Carry, examples: Size, sharding: BatchSharding | None) -> PyTree:
        """Return the result of `examples` examples.

        With a `sharding`, under `shard_map`, these are the local ones, and the result is that of
        all devices.
        """
        ...


@runtime_checkable
class ShardedReducer(Reducer, Protocol):
    """A reducer whose result may be sharded."""

    def specs(self, sharding: BatchSharding) -> PyTree:
        """Return how the result is sharded: partition specs, for a prefix of it."""
        ...


@dataclass(frozen=True)
class Collect:
    """Each example's output in the place of the example, along `axis` of the result.

    The values have their examples along axis 0. Examples that are not run are zero.
    """

    like: jax.ShapeDtypeStruct
    plan: ChunkPlan
    axis: int

    def init(self) -> Array:
        rows_like = jax.eval_shape(self._rows_of, self.like)
        return self.plan.lay_out(
            _slicing.allocate(self.plan.length, rows_like, self.axis), self.axis
        )

    def update(self, carry: Array, value: Array, chunk: Chunk) -> Array:
        _check(self.like, value, chunk, rows=True)
        return _slicing.write(carry, self._rows_of(value), chunk.rows, self.axis)

    def finalize(self, carry: Array, examples: Size, sharding: BatchSharding | None) -> Array:
        del examples
        rows = self.plan.put_back(carry, self.axis)
        rows = rows if sharding is None else sharding.rows(rows, self.axis)
        return _jax.wrap_keys(rows, self.like)

    def specs(self, sharding: BatchSharding) -> PartitionSpec:
        return sharding.spec(self.axis)

    def _rows_of(self, value: Array) -> Array:
        moved = value if self.axis == 0 else jnp.moveaxis(value, 0, self.axis)
        return _jax.unwrap_keys(moved)


class _Replicated:
    """The base of reducers whose results have no axis of examples."""

    def specs(self, sharding: BatchSharding) -> PartitionSpec:
        return sharding.spec(None)


@dataclass(frozen=True)
class Unbatched(_Replicated):
    """An output that is the same for every chunk."""

    like: jax.ShapeDtypeStruct

    def init(self) -> Array:
        return _jax.filled_like(jax.eval_shape(_jax.unwrap_keys, self.like))

    def update(self, carry: Array, value: Array, chunk: Chunk) -> Array:
        del carry, chunk
        return _jax.unwrap_keys(value)

    def finalize(self, carry: Array, examples: Size, sharding: BatchSharding | None) -> Array:
        del examples
        if sharding is not None and not sharding.partition.each:
            carry = sharding.stacked(carry)[0]  # Devices without examples do not know it.
        return _jax.wrap_keys(carry, self.like)


@dataclass(frozen=True)
class Sum(_Replicated):
    """The sum over chunks, or with `per_example` over all examples."""

    like: jax.ShapeDtypeStruct
    per_example: bool

    def init(self) -> Array:
        return _jax.filled_like(jax.eval_shape(self._term, self.like))

    def update(self, carry: Array, value: Array, chunk: Chunk) -> Array:
        _check(self.like, value, chunk, rows=self.per_example)
        return carry + self._term(value)

    def finalize(self, carry: Array, examples: Size, sharding: BatchSharding | None) -> Array:
        del examples
        total = carry if sharding is None else sharding.axis.psum(carry)
        return total.astype(jax.eval_shape(jnp.sum, self.like).dtype)

    def _term(self, value: Array) -> Array:
        dtype = at_least_single(jax.eval_shape(jnp.sum, self.like).dtype)
        return jnp.sum(value, axis=0, dtype=dtype) if self.per_example else value.astype(dtype)


@dataclass(frozen=True)
class Mean(_Replicated):
    """The mean over examples: a sum, divided at the end.

    With `per_example` it is the sum over examples. Otherwise each value is the mean of its chunk
    and is weighted by the size of that, in units of the first so that even chunks just add up.
    """

    like: jax.ShapeDtypeStruct
    per_example: bool
    plan: ChunkPlan

    def init(self) -> Array:
        return _jax.filled_like(jax.eval_shape(self._term, self.like))

    def update(self, carry: Array, value: Array, chunk: Chunk) -> Array:
        _check(self.like, value, chunk, rows=self.per_example)
        term, weight = self._term(value), chunk.size / self._unit
        return carry + (term if self.per_example or weight == 1 else weight * term)

    def finalize(self, carry: Array, examples: Size, sharding: BatchSharding | None) -> Array:
        if sharding is not None:
            carry, examples = sharding.axis.psum(carry), sharding.total(examples)
        weight = _real(examples, carry) / self._unit
        return (carry / weight.astype(carry.dtype)).astype(self.like.dtype)

    @property
    def _unit(self) -> int:
        return 1 if self.per_example else max(1, self.plan.runs()[0].size)

    def _term(self, value: Array) -> Array:
        dtype = at_least_single(value.dtype)
        return jnp.sum(value, axis=0, dtype=dtype) if self.per_example else value.astype(dtype)


@dataclass(frozen=True)
class RunningMean(_Replicated):
    """The mean over examples, a mean at every step.

    No sum is ever formed that is larger than the values, so none overflows.
    """

    like: jax.ShapeDtypeStruct
    per_example: bool

    def init(self) -> Array:
        return _jax.filled_like(jax.eval_shape(self._term, self.like))

    def update(self, carry: Array, value: Array, chunk: Chunk) -> Array:
        _check(self.like, value, chunk, rows=self.per_example)
        seen = _real(jnp.maximum(chunk.examples_before + chunk.size, 1), carry)
        weight = (chunk.size / seen).astype(carry.dtype)
        return (1 - weight) * carry + weight * self._term(value)

    def finalize(self, carry: Array, examples: Size, sharding: BatchSharding | None) -> Array:
        if sharding is not None:
            total = sharding.total(examples)
            fraction = _real(examples, carry) / _real(jnp.maximum(total, 1), carry)
            carry = sharding.axis.psum(fraction.astype(carry.dtype) * carry)
            examples = total
        return jnp.where(jnp.asarray(examples > 0), carry, jnp.nan).astype(self.like.dtype)

    def _term(self, value: Array) -> Array:
        value = value.astype(at_least_single(value.dtype))
        if not self.per_example:
            return value
        # Divided before they are summed, because the sum may overflow where the mean does not.
        return jnp.sum(value / max(1, value.shape[0]), axis=0)


@dataclass(frozen=True)
class _User(_Replicated):
    """The reducer of an `Accumulator`."""

    accumulator: Accumulator
    like: PyTree
    per_example: bool

    def init(self) -> Carry:
        value = jax.eval_shape(self._value, self.like)
        carry = jax.tree.map(jnp.asarray, self.accumulator.init(value))
        index = jax.ShapeDtypeStruct((), jnp.int32)
        after = jax.eval_shape(self.accumulator.update, carry, value, index)
        same = jax.tree.structure(carry) == jax.tree.structure(after)
        if not same:
            return carry
        adopt = lambda given, returned: _jax.varying_like(promote_weak(given, returned), returned)
        return jax.tree.map(adopt, carry, after)

    def update(self, carry: Carry, value: PyTree, chunk: Chunk) -> Carry:
        index = jnp.asarray(chunk.index, jnp.int32)
        return self._like(
            carry, self.accumulator.update(carry, self._value(value), index), "update"
        )

    def finalize(self, carry: Carry, examples: Size, sharding: BatchSharding | None) -> PyTree:
        del examples
        if sharding is not None and sharding.partition.count > 1:
            carry = self._combined(carry, sharding)
        return self.accumulator.finalize(carry)

    def _combined(self, carry: Carry, sharding: BatchSharding) -> Carry:
        """Return one carry of those of all devices."""
        combine = self.accumulator.combine
        assert combine is not None

        def step(carry: Carry, other: Carry) -> tuple[Carry, None]:
            return self._like(carry, combine(carry, other), "combine"), None

        carries = jax.tree.map(sharding.stacked, carry)
        first = jax.tree.map(lambda x: x[0], carries)
        others = jax.tree.map(lambda x: x[1:], carries)
        return lax.scan(step, first, others)[0]

    def _like(self, carry: Carry, returned: Carry, method: str) -> Carry:
        new = jax.tree.map(jnp.asarray, returned)
        before, after = (jax.tree.map(_shape_and_dtype, tree) for tree in (carry, new))
        if before != after:
            raise TypeError(
                f"{where()}: Accumulator.{method} must return a carry like the one it was "
                f"given; it was given {before} and returned {after}. Make init return such a carry."
            )
        return new

    def _value(self, value: PyTree) -> PyTree:
        return self.accumulator.aggregate(value) if self.per_example else value


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

    def finalize(self, carry: Carry, examples: Size, sharding: BatchSharding | None) -> PyTree:
        parts = zip(self.reducers, carry, strict=True)
        results = [reducer.finalize(state, examples, sharding) for reducer, state in parts]
        return self.structure.unflatten(results)

    def specs(self, sharding: BatchSharding) -> PyTree:
        return self.structure.unflatten([reducer.specs(sharding) for reducer in self.reducers])


@dataclass(frozen=True)
class Reduction:
    """What a map asks of its outputs: all that is known before the function has been traced.

    `accumulator` and `out_axes` are pytree prefixes of the outputs. Values have their examples
    along axis 0 (`per_example`, or under CONCAT); `out_axes` says where CONCAT shall put them, and
    None that an output has none. `limit` is how many chunks are run, if not all. `sharding`
    is there if the examples are sharded.
    """

    accumulator: PyTree
    out_axes: PyTree
    plan: ChunkPlan
    per_example: bool
    limit: Size | None
    sharding: BatchSharding | None = None

    def reducer(self, outputs: PyTree) -> ShardedReducer:
        """The reducer for outputs of these shapes."""
        structure = jax.tree.structure(self.accumulator)
        try:
            parts = structure.flatten_up_to(outputs)
            axes = iter(broadcast_prefix(self.out_axes, outputs))
        except ValueError as error:
            raise ValueError(
                f"{where()}: the accumulator and out_axes must be pytree prefixes of the "
                f"outputs, which have the structure {jax.tree.structure(outputs)}: {error}"
            ) from None
        reducers = [
            self._for_part(kind, part, [next(axes) for _ in jax.tree.leaves(part)])
            for kind, part in zip(jax.tree.leaves(self.accumulator), parts, strict=True)
        ]
        return Prefix(structure, reducers)

    def _for_part(self, kind: Any, part: PyTree, axes: list[Any]) -> ShardedReducer:
        if isinstance(kind, Accumulator):
            if None in axes:
                raise self._same_for_all(kind)
            return self._for_user(kind, part)
        if not isinstance(kind, AccumulationType):
            raise TypeError(
                f"{where()}: an accumulator must be an AccumulationType or an Accumulator, or a "
                f"pytree of these; got {type(kind).__name__} {kind!r}."
            )
        leaves, structure = jax.tree.flatten(part)
        pairs = zip(leaves, axes, strict=True)
        return Prefix(structure, [self._for_leaf(kind, like, axis) for like, axis in pairs])

    def _for_leaf(
        self, kind: AccumulationType, like: jax.ShapeDtypeStruct, axis: Any
    ) -> ShardedReducer:
        if kind is AccumulationType.CONCAT:
            return self._for_rows(like, axis)
        if axis is None:
            raise self._same_for_all(kind)
        if _jax.is_key(like):
            raise TypeError(f"{where()}: {kind} of random keys has no meaning; use CONCAT.")
        if kind is AccumulationType.SUM:
            return Sum(like, self.per_example)
        if not jnp.issubdtype(like.dtype, jnp.inexact):
            raise TypeError(
                f"{where()}: {kind} of an output of dtype {like.dtype} has no exact result in "
                f"that dtype. Return floating-point numbers, or use SUM."
            )
        if kind is AccumulationType.MEAN:
            return Mean(like, self.per_example, self.plan)
        return RunningMean(like, self.per_example)

    def _same_for_all(self, kind: Any) -> ValueError:
        return ValueError(
            f"{where()}: out_axes=None says that an output is the same for every example, "
            f"so {kind} over examples is not asked for; use CONCAT, or an axis."
        )

    def _for_rows(self, like: jax.ShapeDtypeStruct, axis: Any) -> ShardedReducer:
        if axis is None:
            return Unbatched(like)
        size = self.plan.runs()[0].size
        if not self.per_example and (like.ndim == 0 or like.shape[0] != size):
            raise ValueError(
                f"{where()}: CONCAT collects one row for each example, so the function must "
                f"return arrays whose leading axis is that of the microbatch; for a microbatch of "
                f"{size} it returned shape {like.shape}. Use SUM, MEAN or RUNNING_MEAN for "
                f"outputs that belong to the microbatch as a whole."
            )
        axis = normal_axis(axis, like.ndim, f"an output of shape {like.shape}")
        return Collect(like, self.plan, axis)

    def _for_user(self, accumulator: Accumulator, part: PyTree) -> ShardedReducer:
        if not accumulator.uneven:
            self._check_even()
        count = 1 if self.sharding is None else self.sharding.partition.count
        if accumulator.combine is None and count > 1:
            raise ValueError(
                f"{where()}: the mesh splits examples among {count} devices, "
                f"and this Accumulator does not say how to make one carry of theirs. Construct it "
                f"with combine=, a function of two carries."
            )
        return _User(accumulator, part, self.per_example)

    def _check_even(self) -> None:
        sizes = [run.size for run in self.plan.runs(self.limit)]
        cannot = (
            "and this Accumulator does not say that it can take that. Construct it with "
            "uneven=True if its update and aggregate are right for microbatches of any size, or"
        )
        if self.sharding is not None and not self.sharding.partition.is_even:
            partition = self.sharding.partition
            raise ValueError(
                f"{where()}: {partition.length} examples on {partition.count} devices come out "
                f"uneven, {cannot} choose a number of examples that {partition.count} divides."
            )
        if len(sizes) > 1:
            raise ValueError(
                f"{where()}: {self.plan.length} examples in microbatches of at most "
                f"{self.plan.size} come out uneven (sizes {sizes[0]} and {sizes[1]}), {cannot} "
                f"choose a microbatch size that divides {self.plan.length}."
            )


def _real(count: Size, like: Array) -> Array:
    """Return a count as a real number of the precision of `like`."""
    return jnp.asarray(count, jnp.finfo(like.dtype).dtype)


def _check(like: jax.ShapeDtypeStruct, value: Array, chunk: Chunk, rows: bool) -> None:
    """Check that a value is like the first, except, with `rows`, for the size of its chunk."""
    expected = (chunk.size, *like.shape[1:]) if rows else like.shape
    if value.shape != expected or value.dtype != like.dtype:
        raise ValueError(
            f"{where()}: the function returned {like.dtype}{list(like.shape)} for a "
            f"microbatch of {chunk.plan.runs()[0].size} examples and "
            f"{value.dtype}{list(value.shape)} for one of {chunk.size}: these cannot be combined. "
            f"Collect per-example outputs with AccumulationType.CONCAT, reduce them inside the "
            f"function, or choose a microbatch size that divides {chunk.plan.length}."
        )


def _shape_and_dtype(x: Array) -> str:
    return f"{x.dtype}{list(x.shape)}"
