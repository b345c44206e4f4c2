"""Accumulators: how the outputs of microbatches are combined into one result.

`AccumulationType` lists the built-in accumulators and `Accumulator` holds a user-supplied one. A
map takes either, or a pytree of them that is a prefix of the function's outputs. `Reduction` turns
that prefix into the reducers that the loop runs, one for each output leaf or user-supplied
accumulator.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import Enum, auto
from typing import Protocol, runtime_checkable

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
from curvax.maps.arguments import canonicalize_axis
from curvax.maps.chunk_plan import Chunk, ChunkPlan
from curvax.maps.sharding import BatchSharding


class AccumulationType(Enum):
    """The built-in accumulators.

    All are exact for microbatches of unequal sizes: means are over examples, not over
    microbatches. Half-precision outputs are accumulated in float32 and returned in their own
    dtype. Integers are summed as by `jnp.sum`.

    Attributes:
        MEAN: Mean over examples, accumulated as a sum and divided once at the end.
        SUM: Sum over microbatches; over examples in `micro_vmap` and `micro_grad`.
        RUNNING_MEAN: Mean over examples, kept as a mean at every step so that no sum grows with the
            batch.
        CONCAT: One row for each example, in the order of the examples in the batch.

    Examples:
        >>> import jax.numpy as jnp
        >>> from curvax import AccumulationType, micro_vmap
        >>> kinds = {"total": AccumulationType.SUM, "squares": AccumulationType.CONCAT}
        >>> fun = lambda x: {"total": x, "squares": x**2}
        >>> result = micro_vmap(fun, microbatch_size=2, accumulator=kinds)(jnp.arange(4.0))
        >>> print(result["total"], result["squares"])
        6.0 [0. 1. 4. 9.]
    """

    MEAN = auto()
    SUM = auto()
    RUNNING_MEAN = auto()
    CONCAT = auto()


@dataclass(frozen=True)
class Accumulator:
    """A user-supplied way to combine the outputs of microbatches.

    A value is the part of the outputs that the accumulator stands for, a pytree. Over microbatches
    0, 1, …, M-1 the result is

        carry = init(shapes of a value)
        for index in range(M):
            carry = update(carry, value of microbatch index, index)
        result = finalize(carry)

    In `micro_vmap` and `micro_grad` a value is `aggregate(per-example values)`, where per-example
    values have examples along their leading axis. On a mesh, each device has its own carry and
    counts its own microbatches; the result is
    `finalize(combine(combine(carry 0, carry 1), carry 2) …)`.

    Arguments:
        init: Return the initial carry, given the `jax.ShapeDtypeStruct`s of a value.
        update: Return the next carry, given the carry, a value and the (traced) index of the
            microbatch. The carry must keep its shapes and dtypes.
        finalize: Return the result, given the final carry.
        aggregate: Reduce per-example values over their leading axis.
        uneven: Whether `update` and `aggregate` are correct for microbatches of different sizes.
            A maximum is; a mean of microbatch means is not. If False, a batch that the microbatch
            size does not divide is rejected.
        combine: Merge two carries into the carry of all the microbatches behind them; required on
            a mesh of several devices. For a sum, add the carries.

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

    init: Callable[[PyTree], Carry]
    update: Callable[[Carry, PyTree, Array], Carry]
    finalize: Callable[[Carry], PyTree]
    aggregate: Callable[[PyTree], PyTree]
    _: KW_ONLY
    uneven: bool = False
    combine: Callable[[Carry, Carry], Carry] | None = None


# Reducers fold the values of successive chunks into a carry. A reducer is built for values of known
# shape (`like`). With `per_example=True` values have examples along their leading axis, which is
# also reduced. Half-precision sums are accumulated in float32.


@runtime_checkable
class Reducer(Protocol):
    """A fold over the values of successive chunks."""

    def init(self) -> Carry:
        """Return the carry before the first chunk."""
        ...

    def update(self, carry: Carry, value: PyTree, chunk: Chunk) -> Carry:
        """Return the carry after `chunk`, whose value is `value`."""
        ...

    def finalize(self, carry: Carry, examples: Size, sharding: BatchSharding | None) -> PyTree:
        """Return the result over `examples` examples.

        With a `sharding`, under `shard_map`, `examples` counts the local ones and the result is
        over those of all devices.
        """
        ...


@runtime_checkable
class ShardedReducer(Reducer, Protocol):
    """A reducer whose result may be sharded."""

    def specs(self, sharding: BatchSharding) -> PyTree:
        """Return the partition specs of the result, as a pytree prefix of it."""
        ...


@dataclass(frozen=True)
class Collect:
    """Per-example outputs, concatenated along `axis` of the result in the order of the examples.

    Values have examples along axis 0. The rows of examples that are not run are zero.
    """

    like: jax.ShapeDtypeStruct
    plan: ChunkPlan
    axis: int

    def init(self) -> Array:
        rows_like = jax.eval_shape(self._as_rows, self.like)
        return self.plan.lay_out(
            _slicing.allocate(self.plan.length, rows_like, self.axis), self.axis
        )

    def update(self, carry: Array, value: Array, chunk: Chunk) -> Array:
        _check(self.like, value, chunk, rows=True)
        return _slicing.write(carry, self._as_rows(value), chunk.rows, self.axis)

    def finalize(self, carry: Array, examples: Size, sharding: BatchSharding | None) -> Array:
        del examples
        rows = self.plan.put_back(carry, self.axis)
        rows = rows if sharding is None else sharding.collect(rows, self.axis)
        return _jax.wrap_keys(rows, self.like)

    def specs(self, sharding: BatchSharding) -> PartitionSpec:
        return sharding.spec(self.axis)

    def _as_rows(self, value: Array) -> Array:
        moved = value if self.axis == 0 else jnp.moveaxis(value, 0, self.axis)
        return _jax.unwrap_keys(moved)


class _Replicated:
    """Base of reducers whose results have no example axis and are replicated."""

    def specs(self, sharding: BatchSharding) -> PartitionSpec:
        return sharding.spec(None)


@dataclass(frozen=True)
class Unbatched(_Replicated):
    """An output that is the same for every chunk (`out_axes=None`)."""

    like: jax.ShapeDtypeStruct

    def init(self) -> Array:
        return _jax.filled_like(jax.eval_shape(_jax.unwrap_keys, self.like))

    def update(self, carry: Array, value: Array, chunk: Chunk) -> Array:
        del carry, chunk
        return _jax.unwrap_keys(value)

    def finalize(self, carry: Array, examples: Size, sharding: BatchSharding | None) -> Array:
        del examples
        if sharding is not None and not sharding.partition.each:
            carry = sharding.stack_devices(carry)[0]  # Devices without examples have only zeros.
        return _jax.wrap_keys(carry, self.like)


@dataclass(frozen=True)
class Sum(_Replicated):
    """Sum over chunks; with `per_example`, over examples."""

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
    """Mean over examples, accumulated as a sum and divided once at the end.

    With `per_example` the sum is over examples. Otherwise each value is the mean of its chunk and
    is weighted by the chunk's size relative to the first chunk, so that equal chunks are added
    unweighted.
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
    """Mean over examples, kept as a mean at every step.

    The carry never exceeds the values in magnitude, so it does not overflow unless they do.
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
        # Divide before summing: the sum may overflow where the mean does not.
        return jnp.sum(value / max(1, value.shape[0]), axis=0)


@dataclass(frozen=True)
class _UserSupplied(_Replicated):
    """The reducer of a user-supplied `Accumulator`."""

    accumulator: Accumulator
    like: PyTree
    per_example: bool

    def init(self) -> Carry:
        value = jax.eval_shape(self._value, self.like)
        carry = jax.tree.map(jnp.asarray, self.accumulator.init(value))
        index = jax.ShapeDtypeStruct((), jnp.int32)
        after = jax.eval_shape(self.accumulator.update, carry, value, index)
        if jax.tree.structure(carry) != jax.tree.structure(after):
            return carry  # `update` raises the error.
        adopt = lambda given, returned: _jax.varying_like(promote_weak(given, returned), returned)
        return jax.tree.map(adopt, carry, after)

    def update(self, carry: Carry, value: PyTree, chunk: Chunk) -> Carry:
        index = jnp.asarray(chunk.index, jnp.int32)
        returned = self.accumulator.update(carry, self._value(value), index)
        return self._check_carry(carry, returned, "update")

    def finalize(self, carry: Carry, examples: Size, sharding: BatchSharding | None) -> PyTree:
        del examples
        if sharding is not None and sharding.partition.count > 1:
            carry = self._combine_devices(carry, sharding)
        return self.accumulator.finalize(carry)

    def _combine_devices(self, carry: Carry, sharding: BatchSharding) -> Carry:
        """Fold the carries of all devices into one."""
        combine = self.accumulator.combine
        assert combine is not None

        def step(carry: Carry, other: Carry) -> tuple[Carry, None]:
            return self._check_carry(carry, combine(carry, other), "combine"), None

        carries = jax.tree.map(sharding.stack_devices, carry)
        first = jax.tree.map(lambda x: x[0], carries)
        others = jax.tree.map(lambda x: x[1:], carries)
        return lax.scan(step, first, others)[0]

    def _check_carry(self, carry: Carry, returned: Carry, method: str) -> Carry:
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
    """One reducer for each subtree of a pytree that has `structure` as a prefix."""

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
    """How a map combines its outputs: everything that is known before the function is traced.

    Attributes:
        accumulator: Pytree prefix of the outputs, of `AccumulationType` and `Accumulator`.
        out_axes: Pytree prefix of the outputs: where CONCAT puts the example axis; None for
            outputs without one.
        plan: The chunks of the (local) examples.
        per_example: Whether all values have examples along axis 0. Otherwise those under CONCAT do.
        limit: Number of chunks to run, None for all.
        sharding: How examples are sharded, None without a mesh.
    """

    accumulator: PyTree
    out_axes: PyTree
    plan: ChunkPlan
    per_example: bool
    limit: Size | None
    sharding: BatchSharding | None = None

    def reducer(self, outputs: PyTree) -> ShardedReducer:
        """Return the reducer for outputs of these shapes."""
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

    def _for_part(self, kind: object, part: PyTree, axes: list[int | None]) -> ShardedReducer:
        if isinstance(kind, Accumulator):
            if None in axes:
                raise self._unbatched_error(kind)
            return self._for_accumulator(kind, part)
        if not isinstance(kind, AccumulationType):
            raise TypeError(
                f"{where()}: an accumulator must be an AccumulationType or an Accumulator, or a "
                f"pytree of these; got {type(kind).__name__} {kind!r}."
            )
        leaves, structure = jax.tree.flatten(part)
        pairs = zip(leaves, axes, strict=True)
        return Prefix(structure, [self._for_leaf(kind, like, axis) for like, axis in pairs])

    def _for_leaf(
        self, kind: AccumulationType, like: jax.ShapeDtypeStruct, axis: int | None
    ) -> ShardedReducer:
        if kind is AccumulationType.CONCAT:
            return self._for_concat(like, axis)
        if axis is None:
            raise self._unbatched_error(kind)
        if _jax.is_key(like):
            raise TypeError(f"{where()}: {kind} of random keys has no meaning; use CONCAT.")
        if kind is AccumulationType.SUM:
            return Sum(like, self.per_example)
        if not jnp.issubdtype(like.dtype, jnp.inexact):
            raise TypeError(
                f"{where()}: {kind} of an output of dtype {like.dtype} has no exact result in "
                f"that dtype. Return floating-point values, or use SUM."
            )
        if kind is AccumulationType.MEAN:
            return Mean(like, self.per_example, self.plan)
        return RunningMean(like, self.per_example)

    def _unbatched_error(self, kind: AccumulationType | Accumulator) -> ValueError:
        return ValueError(
            f"{where()}: out_axes=None says that an output is the same for every example, "
            f"so {kind} cannot reduce it over examples; use CONCAT, or an integer axis."
        )

    def _for_concat(self, like: jax.ShapeDtypeStruct, axis: int | None) -> ShardedReducer:
        if axis is None:
            return Unbatched(like)
        size = self.plan.runs()[0].size
        if not self.per_example and (like.ndim == 0 or like.shape[0] != size):
            raise ValueError(
                f"{where()}: CONCAT collects one row for each example, so the function must "
                f"return arrays whose leading axis is the batch axis; for a microbatch of "
                f"{size} it returned shape {like.shape}. Use SUM, MEAN or RUNNING_MEAN for "
                f"outputs that are not per example."
            )
        axis = canonicalize_axis(axis, like.ndim, f"an output of shape {like.shape}")
        return Collect(like, self.plan, axis)

    def _for_accumulator(self, accumulator: Accumulator, part: PyTree) -> ShardedReducer:
        if not accumulator.uneven:
            self._check_even()
        count = 1 if self.sharding is None else self.sharding.partition.count
        if accumulator.combine is None and count > 1:
            raise ValueError(
                f"{where()}: the examples are sharded among {count} devices, "
                f"and this Accumulator does not say how to combine their carries. Construct it "
                f"with combine=, a function of two carries."
            )
        return _UserSupplied(accumulator, part, self.per_example)

    def _check_even(self) -> None:
        sizes = [run.size for run in self.plan.runs(self.limit)]
        cannot = (
            "and this Accumulator does not say that it supports that. Construct it with "
            "uneven=True if its update and aggregate are correct for microbatches of any size, or"
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
    """Return a count as a real scalar of the precision of `like`."""
    return jnp.asarray(count, jnp.finfo(like.dtype).dtype)


def _check(like: jax.ShapeDtypeStruct, value: Array, chunk: Chunk, rows: bool) -> None:
    """Check that a value has the shape and dtype of the first.

    With `rows`, its leading axis is that of the examples and has the size of the chunk.
    """
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
