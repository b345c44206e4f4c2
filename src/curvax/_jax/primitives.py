"""Primitives of our own, which return some of their operands: tags, and probes of statistics."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir

from curvax._jax.arrays import varying_like

# The class itself is in `jax.extend.core`, which takes a while to load.
Primitive: Any = type(lax.sin_p)


class Tag(Primitive):
    """An operation that does nothing but be found: it returns its first `num_kept` operands.

    In a traced program it says what the others have to do with these. It can be differentiated (its
    tangents are those of what it returns), vectorised, and compiled, to nothing.

    `jax.vmap` adds a leading axis to the operands that it maps over, and a tag stays one tag: its
    parameter `stacked` says, for each axis that was added, outermost first, which operands have it.
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

    def bind(self, *args: Any, **params: Any) -> Any:
        """Tag the operands. Return the first of them, in a list if there may be several."""
        return super().bind(*args, **{"stacked": (), **params})

    def _first(self, args: Sequence[Any]) -> Any:
        return list(args[: self._num_kept]) if self.multiple_results else args[0]

    def _jvp(self, primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
        return self.bind(*primals, **params), self._first(tangents)

    def _transpose(self, cotangents: Any, *args: Any, **_: Any) -> list[Any]:
        kept = cotangents if self.multiple_results else [cotangents]
        others = args[self._num_kept :]
        zeros = [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in others]
        pairs = zip([*kept, *zeros], map(ad.is_undefined_primal, args), strict=True)
        return [g if is_linear else None for g, is_linear in pairs]

    def _batch(
        self, args: Sequence[Any], axes: Sequence[int | None], *, stacked: Any, **params: Any
    ) -> tuple[Any, Any]:
        pairs = zip(args, axes, strict=True)
        moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in pairs]
        mapped = tuple(axis is not None for axis in axes)
        kept = self.bind(*moved, stacked=(mapped, *stacked), **params)
        out_axes = [0 if is_mapped else None for is_mapped in mapped[: self._num_kept]]
        return (kept, out_axes) if self.multiple_results else (kept, out_axes[0])


def define_linear_identity(
    primitive: Any, batch: Callable[..., Any], pull_back: Callable[..., Sequence[Any]]
) -> None:
    """Let a primitive return its first operands, and be transposed in a way of its own.

    Its operands are `num_kept` arrays that it returns, then `num_known`, then others. It is linear
    in the first and the last: these others count for nothing, but they have cotangents,
    `pull_back(cotangents of the first, known, **params)`, which need not be linear in anything, and
    may vary over fewer manual axes of a `shard_map` than the others do.
    `batch(args, axes, **params)` is what `jax.vmap` makes of it.
    """

    def jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
        num_kept, end = params["num_kept"], params["num_kept"] + params["num_known"]
        outputs = primitive.bind(*primals, **params)
        moved, others = tangents[:num_kept], tangents[end:]
        if all(isinstance(x, ad.Zero) for x in others):
            return outputs, list(moved)
        moved, others = map(ad.instantiate_zeros, moved), map(ad.instantiate_zeros, others)
        return outputs, primitive.bind(*moved, *primals[num_kept:end], *others, **params)

    def transpose(cotangents: Any, *args: Any, **params: Any) -> list[Any]:
        num_kept, end = params["num_kept"], params["num_kept"] + params["num_known"]
        linear = [ad.is_undefined_primal(x) for x in args]
        if all(isinstance(x, ad.Zero) for x in cotangents):
            return [
                ad.Zero(x.aval) if is_linear else None
                for x, is_linear in zip(args, linear, strict=True)
            ]
        cotangents = list(map(ad.instantiate_zeros, cotangents))
        others = [
            varying_like(x, other.aval) if ad.is_undefined_primal(other) else x
            for x, other in zip(
                pull_back(cotangents, args[num_kept:end], **params), args[end:], strict=True
            )
        ]
        found = [*cotangents, *[None] * params["num_known"], *others]
        return [x if is_linear else None for x, is_linear in zip(found, linear, strict=True)]

    first = lambda args, params: list(args[: params["num_kept"]])
    primitive.multiple_results = True
    primitive.def_impl(lambda *args, **params: first([jnp.asarray(x) for x in args], params))
    primitive.def_abstract_eval(lambda *avals, **params: first(avals, params))
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, lambda _, *args, **params: first(args, params))
