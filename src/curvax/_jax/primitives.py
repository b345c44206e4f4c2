"""Primitives that return some of their operands: tags, and probes of statistics."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from curvax._jax.arrays import varying_like
from curvax._jax.core import Primitive, Value
from curvax._types import Array, ArrayLike

Tangent: TypeAlias = Value | ad.Zero
"""A tangent or cotangent; `ad.Zero` is a zero that is never allocated."""

Operand: TypeAlias = Value | ad.UndefinedPrimal
"""An operand of a primitive to be transposed, undefined if it is linear in it."""


class Tag(Primitive):
    """A primitive that marks operands in a jaxpr: it returns its first `num_kept` operands.

    It says how the other operands are related to these. It can be differentiated (its tangents are
    those of the operands that it returns), vectorised, and compiled, to nothing.

    `jax.vmap` adds a leading axis to the operands that it maps over, and the tag stays one tag. Its
    parameter `stacked` has an entry for each axis added, outermost first: the operands that have
    it, as a tuple of bools.
    """

    def __init__(self, name: str, num_kept: int, *, multiple_results: bool) -> None:
        super().__init__(name)
        self.multiple_results = multiple_results
        self._num_kept = num_kept
        self.def_impl(lambda *args, **_: self._first([jnp.asarray(x) for x in args]))
        self.def_abstract_eval(lambda *avals, **_: self._first(avals))
        ad.primitive_jvps[self] = self._jvp
        ad.primitive_transposes[self] = self._transpose
        batching.primitive_batchers[self] = self._batch
        mlir.register_lowering(self, lambda _, *args, **__: list(args[:num_kept]))

    def bind(self, *args: Value, **params: Any) -> Any:
        """Tag the operands. Return the first, or a list of the first with `multiple_results`."""
        return super().bind(*args, **{"stacked": (), **params})

    def _first(self, args: Sequence[Any]) -> Any:
        return list(args[: self._num_kept]) if self.multiple_results else args[0]

    def _jvp(
        self, primals: Sequence[Value], tangents: Sequence[Tangent], **params: Any
    ) -> tuple[Any, Any]:
        return self.bind(*primals, **params), self._first(tangents)

    def _transpose(self, cotangents: Any, *args: Operand, **_: Any) -> list[Tangent | None]:
        kept = cotangents if self.multiple_results else [cotangents]
        others = args[self._num_kept :]
        zeros = [ad.Zero(x.aval) if isinstance(x, ad.UndefinedPrimal) else None for x in others]
        pairs = zip([*kept, *zeros], map(ad.is_undefined_primal, args), strict=True)
        return [g if is_linear else None for g, is_linear in pairs]

    def _batch(
        self,
        args: Sequence[ArrayLike],
        axes: Sequence[int | None],
        *,
        stacked: tuple[tuple[bool, ...], ...],
        **params: Any,
    ) -> tuple[Any, int | list[int | None] | None]:
        pairs = zip(args, axes, strict=True)
        batched = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in pairs]
        mapped = tuple(axis is not None for axis in axes)
        kept = self.bind(*batched, stacked=(mapped, *stacked), **params)
        out_axes = [0 if is_mapped else None for is_mapped in mapped[: self._num_kept]]
        return (kept, out_axes) if self.multiple_results else (kept, out_axes[0])


def define_linear_identity(
    primitive: Primitive,
    batch: Callable[..., tuple[Sequence[Value], Sequence[int | None]]],
    pull_back: Callable[..., Sequence[Array]],
) -> None:
    """Define a primitive that returns its first operands, with a user-supplied transpose.

    Its operands are `num_kept` arrays that it returns, `num_known` known arrays, and others. It is
    linear in the first and the last. The last do not contribute to the result, but they have
    cotangents: `pull_back(cotangents of the first, known, **params)`. These need not be linear in
    anything, and may vary over fewer manual axes of a `shard_map` than the operands do.

    Arguments:
        primitive: The primitive, which takes `num_kept` and `num_known` as parameters.
        batch: The batching rule: `batch(args, axes, **params)` returns outputs and their axes.
        pull_back: The function that returns the cotangents of the last operands.
    """

    def jvp(
        primals: Sequence[Value], tangents: Sequence[Tangent], **params: Any
    ) -> tuple[list[Value], list[Tangent]]:
        num_kept, end = params["num_kept"], params["num_kept"] + params["num_known"]
        outputs = primitive.bind(*primals, **params)
        kept, others = tangents[:num_kept], tangents[end:]
        if all(isinstance(x, ad.Zero) for x in others):
            return outputs, list(kept)
        kept, others = map(ad.instantiate_zeros, kept), map(ad.instantiate_zeros, others)
        return outputs, primitive.bind(*kept, *primals[num_kept:end], *others, **params)

    def transpose(
        cotangents: Sequence[Tangent], *args: Operand, **params: Any
    ) -> list[Tangent | None]:
        num_kept, end = params["num_kept"], params["num_kept"] + params["num_known"]
        if all(isinstance(x, ad.Zero) for x in cotangents):
            return [ad.Zero(x.aval) if isinstance(x, ad.UndefinedPrimal) else None for x in args]
        kept = list(map(ad.instantiate_zeros, cotangents))
        others = [
            varying_like(x, other.aval) if isinstance(other, ad.UndefinedPrimal) else x
            for x, other in zip(
                pull_back(kept, args[num_kept:end], **params), args[end:], strict=True
            )
        ]
        found = [*kept, *[None] * params["num_known"], *others]
        pairs = zip(found, map(ad.is_undefined_primal, args), strict=True)
        return [x if is_linear else None for x, is_linear in pairs]

    first = lambda args, params: list(args[: params["num_kept"]])
    primitive.multiple_results = True
    primitive.def_impl(lambda *args, **params: first([jnp.asarray(x) for x in args], params))
    primitive.def_abstract_eval(lambda *avals, **params: first(avals, params))
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, lambda _, *args, **params: first(args, params))
