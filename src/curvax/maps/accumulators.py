"""Accumulators: how the outputs of microbatches become one result.

`AccumulationType` names the four that come with curvax, `Accumulator` is how users write one of
their own, and either, or any pytree prefix of them, says what to do with the outputs of a
function. `Reduction` turns that into the reducer that the loop runs.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from enum import Enum, auto
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from curvax import _jax
from curvax._dtypes import promote_weak
from curvax._errors import where
from curvax._tree import broadcast_prefix
from curvax._types import Array, Carry, PyTree, Size
from curvax.maps.arguments import normal_axis
from curvax.maps.chunk_plan import Chunk, ChunkPlan
from curvax.maps.reducers import Collect, Mean, Prefix, RunningMean, Same, ShardedReducer, Sum
from curvax.maps.sharding import BatchSharding

__all__ = ["AccumulationType", "Accumulator", "Reduction"]


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


@dataclass(frozen=True)
class Reduction:
    """What a map asks of its outputs: all that is known before the function has been traced.

    `accumulator` and `out_axes` are pytree prefixes of the outputs. Values have their examples
    along axis 0 (`per_example`, or under CONCAT); `out_axes` says where CONCAT shall put them, and
    None that an output has none. `limit` is how many chunks are run, if not all. `where` names
    the public function in errors. `sharding` is there if the examples are sharded.
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
            return Same(like)
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


@dataclass(frozen=True)
class _User:
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

    def finalize(self, carry: Carry, examples: Size) -> PyTree:
        del examples
        return self.accumulator.finalize(carry)

    def finalize_sharded(self, carry: Carry, examples: Size, sharding: BatchSharding) -> PyTree:
        if sharding.partition.count == 1:
            return self.finalize(carry, examples)
        combine = self.accumulator.combine
        assert combine is not None

        def combined(carry: Carry, other: Carry) -> tuple[Carry, None]:
            return self._like(carry, combine(carry, other), "combine"), None

        carries = jax.tree.map(sharding.stacked, carry)
        first = jax.tree.map(lambda x: x[0], carries)
        others = jax.tree.map(lambda x: x[1:], carries)
        return self.finalize(lax.scan(combined, first, others)[0], examples)

    def specs(self, sharding: BatchSharding) -> PartitionSpec:
        return sharding.spec(None)

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


def _shape_and_dtype(x: Array) -> str:
    return f"{x.dtype}{list(x.shape)}"
