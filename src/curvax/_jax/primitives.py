"""Primitives of our own: operations that every transformation of JAX has to know."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir

from curvax._jax.arrays import varying_like

__all__ = ["Primitive", "define_identity", "define_linear_identity"]


# The class itself is in `jax.extend.core`, which takes a while to load.
Primitive: Any = type(lax.sin_p)


def define_identity(primitive: Any, num_kept: int, batch: Callable[..., Any]) -> None:
    """Let a primitive return its first `num_kept` operands, under every transformation.

    `batch(args, axes, **params)` is what `jax.vmap` makes of it.
    """
    several = primitive.multiple_results
    first = lambda args: list(args[:num_kept]) if several else args[0]

    def jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
        return primitive.bind(*primals, **params), first(tangents)

    def transpose(cotangents: Any, *args: Any, **_: Any) -> list[Any]:
        kept = cotangents if several else [cotangents]
        others = [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in args[num_kept:]]
        linear = map(ad.is_undefined_primal, args)
        return [
            g if is_linear else None for g, is_linear in zip([*kept, *others], linear, strict=True)
        ]

    primitive.def_impl(lambda *args, **_: first([jnp.asarray(x) for x in args]))
    primitive.def_abstract_eval(lambda *avals, **_: first(avals))
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, lambda _, *args, **__: list(args[:num_kept]))


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
