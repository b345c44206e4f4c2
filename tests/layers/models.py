"""Layers in many spellings, and what they are to be found as: a new line joins every test.

Each case is a function of parameters and an input, the parameters, the input, and for each
parameter the tag it must get.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Spelling(NamedTuple):
    name: str
    f: Callable[[Any, Any], Any]
    params: Any
    x: Any
    tags: dict[str, str]
    layers: int = 1


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


W, B = normal(1, 3, 4), normal(2, 4)
X, SEQUENCE = normal(0, 5, 3), normal(0, 5, 7, 3)
DENSE = {"w": "dense_tag", "b": "dense_tag"}
SHIFTED = {"w": "dense_tag", "b": "scale_and_shift_tag"}
SCALE = {"s": "scale_and_shift_tag", "t": "scale_and_shift_tag"}
CONV = {"w": "conv2d_tag", "b": "conv2d_tag"}
GENERAL = {"w": "conv_tag", "b": "conv_tag"}


def row(b: Any, y: Any) -> Any:
    """A bias broadcast by hand, since the tests allow no implicit promotion of ranks."""
    return jnp.broadcast_to(b, y.shape)


def biased(y: Any, b: Any) -> Any:
    return y + row(b, y)


def layer_norm_of_haiku(p: Any, x: Any) -> Any:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    inverse = row(p["s"], x) * lax.rsqrt(variance + 1e-5)
    return biased(inverse * (x - mean), p["t"])


def batch_norm_of_flax(p: Any, x: Any) -> Any:
    mean, variance = x.mean(0, keepdims=True), x.var(0, keepdims=True)
    factor = lax.rsqrt(variance + 1e-5) * p["s"].reshape(1, -1)
    return (x - mean) * factor + p["t"].reshape(1, -1)


def group_norm(p: Any, x: Any) -> Any:
    groups = x.reshape(5, 2, 2)
    groups = (groups - groups.mean(2, keepdims=True)) * lax.rsqrt(groups.var(2, keepdims=True) + 1)
    return biased(groups.reshape(5, 4) * row(p["s"], normal(0, 5, 4)), p["t"])


def conv(p: Any, x: Any, layout: Any = ("NHWC", "HWIO", "NHWC"), **options: Any) -> Any:
    strides = (1,) * (x.ndim - 2)
    options = {"window_strides": strides, "padding": "SAME"} | options
    y = lax.conv_general_dilated(x, p["w"], dimension_numbers=layout, **options)
    channel = y.ndim - 1 if layout is None or layout[2][-1] == "C" else 1
    return y + lax.broadcast_in_dim(p["b"], y.shape, (channel,)) if "b" in p else y


def scan_layers(p: Any, x: Any) -> Any:
    return lax.scan(lambda h, p: (jnp.tanh(biased(h @ p["w"], p["b"])), None), x, p)[0]


def recurrent(p: Any, x: Any) -> Any:
    step = lambda h, x: (jnp.tanh(biased(h @ p["u"], p["b"]) + x @ p["w"]), h)
    return lax.scan(step, jnp.zeros((5, 4)), jnp.moveaxis(x, 1, 0))[1]


IMAGES = normal(3, 2, 6, 6, 2)
SPELLINGS = [
    Spelling("plain", lambda p, x: biased(x @ p["w"], p["b"]), {"w": W, "b": B}, X, DENSE),
    Spelling("no bias", lambda p, x: x @ p["w"], {"w": W}, X, {"w": "dense_tag"}),
    Spelling("transposed", lambda p, x: biased(x @ p["w"].T, p["b"]), {"w": W.T, "b": B}, X, DENSE),
    Spelling(
        "einsum",
        lambda p, x: biased(jnp.einsum("oi,bi->bo", p["w"], x), p["b"]),
        {"w": W.T, "b": B},
        X,
        DENSE,
    ),
    Spelling(
        "mapped over examples",
        lambda p, x: jax.vmap(lambda x: p["w"] @ x + p["b"])(x),
        {"w": W.T, "b": B},
        X,
        DENSE,
    ),
    Spelling(
        "bias as a row", lambda p, x: x @ p["w"] + p["b"], {"w": W, "b": B[None]}, X[:1], DENSE
    ),
    Spelling(
        "sequence", lambda p, x: biased(x @ p["w"], p["b"]), {"w": W, "b": B}, SEQUENCE, DENSE
    ),
    Spelling(
        "merged axes",
        lambda p, x: biased((x.reshape(-1, 3) @ p["w"]).reshape(5, 7, 4), p["b"]),
        {"w": W, "b": B},
        SEQUENCE,
        DENSE,
    ),
    Spelling(
        "cast",
        lambda p, x: biased(
            x.astype(jnp.float32) @ p["w"].astype(jnp.float32), p["b"].astype(jnp.float32)
        ),
        {"w": W, "b": B},
        X,
        DENSE,
    ),
    Spelling(
        "into heads",
        lambda p, x: biased(jnp.einsum("bti,ihd->bthd", x, p["w"]), p["b"]),
        {"w": normal(4, 3, 2, 4), "b": normal(5, 2, 4)},
        SEQUENCE,
        DENSE,
    ),
    Spelling(
        "into heads, flat bias",
        lambda p, x: biased((x @ p["w"].reshape(3, 8)).reshape(5, 7, 2, 4), p["b"].reshape(2, 4)),
        {"w": normal(4, 3, 2, 4), "b": normal(5, 8)},
        SEQUENCE,
        DENSE,
    ),
    Spelling(
        "out of heads",
        lambda p, x: biased(jnp.einsum("bthd,hdo->bto", x, p["w"]), p["b"]),
        {"w": normal(4, 2, 4, 6), "b": normal(5, 6)},
        normal(6, 5, 7, 2, 4),
        DENSE,
    ),
    Spelling(
        "for each head",
        lambda p, x: biased(jnp.einsum("bhi,hio->bho", x, p["w"]), p["b"]),
        {"w": normal(4, 2, 3, 4), "b": normal(5, 2, 4)},
        normal(6, 5, 2, 3),
        DENSE,
    ),
    Spelling(
        "experts",
        lambda p, x: jnp.einsum("ebi,eio->ebo", x, p["w"]),
        {"w": normal(4, 2, 3, 4)},
        normal(6, 2, 5, 3),
        {"w": "dense_tag"},
    ),
    Spelling(
        "ensemble",
        lambda p, x: jax.vmap(lambda p, x: jnp.tanh(biased(x @ p["w"], p["b"])))(p, x),
        {"w": normal(4, 2, 3, 4), "b": normal(5, 2, 4)},
        normal(6, 2, 5, 3),
        DENSE,
    ),
    Spelling(
        "inside jit",
        lambda p, x: jax.jit(lambda p, x: biased(jax.jit(jnp.dot)(x, p["w"]), p["b"]))(p, x),
        {"w": W, "b": B},
        X,
        DENSE,
    ),
    Spelling(
        "checkpointed",
        lambda p, x: jax.checkpoint(lambda p, x: jnp.tanh(biased(x @ p["w"], p["b"])))(p, x),
        {"w": W, "b": B},
        X,
        DENSE,
    ),
    Spelling("scanned", scan_layers, {"w": normal(7, 6, 3, 3), "b": normal(8, 6, 3)}, X, DENSE),
    Spelling(
        "scanned and checkpointed",
        lambda p, x: jax.checkpoint(scan_layers)(p, x),
        {"w": normal(7, 6, 3, 3), "b": normal(8, 6, 3)},
        X,
        DENSE,
    ),
    Spelling(
        "recurrent",
        recurrent,
        {"w": W, "u": normal(9, 4, 4), "b": B},
        SEQUENCE,
        {"w": "dense_tag", "u": "dense_tag", "b": "dense_tag"},
        2,
    ),
    Spelling(
        "used twice",
        lambda p, x: biased(jnp.tanh(biased(x @ p["w"], p["b"])) @ p["w"], p["b"]),
        {"w": normal(7, 3, 3), "b": normal(8, 3)},
        X,
        DENSE,
    ),
    Spelling(
        "used twice, one bias",
        lambda p, x: jnp.tanh(biased(x @ p["w"], p["b"])) @ p["w"],
        {"w": normal(7, 3, 3), "b": normal(8, 3)},
        X,
        SHIFTED,
        2,
    ),
    Spelling(
        "bias of two sums",
        lambda p, x: biased(x @ p["w"] + jnp.sin(x) @ p["w"], p["b"]),
        {"w": W, "b": B},
        X,
        SHIFTED,
        2,
    ),
    Spelling(
        "product read twice",
        lambda p, x: (lambda y: biased(y, p["b"]) * y)(x @ p["w"]),
        {"w": W, "b": B},
        X,
        SHIFTED,
        2,
    ),
    Spelling(
        "mirrored",
        lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"].T,
        {"w": W},
        X,
        {"w": "dense_tag"},
    ),
    Spelling(
        "table",
        lambda p, x: p["e"][x],
        {"e": normal(1, 9, 3)},
        jnp.array([[1, 2], [0, 8]]),
        {"e": "embedding_tag"},
    ),
    Spelling(
        "table by take",
        lambda p, x: jnp.take(p["e"], x, axis=1),
        {"e": normal(1, 3, 9)},
        jnp.array([1, 2, 5]),
        {"e": "embedding_tag"},
    ),
    Spelling(
        "table, one row at a time",
        lambda p, x: jax.vmap(jax.vmap(lambda i: p["e"][i]))(x),
        {"e": normal(1, 9, 3)},
        jnp.array([[1, 2], [0, 8]]),
        {"e": "embedding_tag"},
    ),
    Spelling(
        "tied table",
        lambda p, x: p["e"][x] @ p["e"].T,
        {"e": normal(1, 9, 3)},
        jnp.array([1, 2, 5]),
        {"e": "embedding_tag"},
    ),
    Spelling(
        "one-hot product",
        lambda p, x: jax.nn.one_hot(x, 9, dtype=jnp.float64) @ p["e"],
        {"e": normal(1, 9, 3)},
        jnp.array([1, 2, 5]),
        {"e": "embedding_tag"},
    ),
    Spelling(
        "scale and shift",
        lambda p, x: biased(x * row(p["s"], x), p["t"]),
        {"s": normal(1, 3), "t": normal(2, 3)},
        X,
        SCALE,
    ),
    Spelling(
        "layer norm of Haiku", layer_norm_of_haiku, {"s": B, "t": B + 1}, normal(1, 5, 4), SCALE
    ),
    Spelling(
        "batch norm of Flax", batch_norm_of_flax, {"s": B, "t": B + 1}, normal(1, 5, 4), SCALE
    ),
    Spelling("group norm", group_norm, {"s": B, "t": B + 1}, normal(1, 5, 4), SCALE),
    Spelling(
        "RMS norm",
        lambda p, x: x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True)) * row(p["s"], x),
        {"s": normal(1, 3)},
        X,
        {"s": "scale_and_shift_tag"},
    ),
    Spelling("2-D", conv, {"w": normal(1, 3, 3, 2, 4), "b": B}, IMAGES, CONV),
    Spelling("2-D, no bias", conv, {"w": normal(1, 3, 3, 2, 4)}, IMAGES, {"w": "conv2d_tag"}),
    Spelling(
        "2-D, channels first",
        lambda p, x: conv(p, x, ("NCHW", "OIHW", "NCHW"), window_strides=(2, 1)),
        {"w": normal(1, 4, 2, 3, 3), "b": B},
        jnp.moveaxis(IMAGES, 3, 1),
        CONV,
    ),
    Spelling(
        "2-D, kernel transposed",
        lambda p, x: conv({"w": p["w"].transpose(2, 3, 1, 0), "b": p["b"]}, x),
        {"w": normal(1, 4, 2, 3, 3), "b": B},
        IMAGES,
        CONV,
    ),
    Spelling(
        "dilated",
        lambda p, x: conv(p, x, rhs_dilation=(2, 1), padding="VALID"),
        {"w": normal(1, 3, 3, 2, 4), "b": B},
        IMAGES,
        CONV,
    ),
    Spelling(
        "depthwise",
        lambda p, x: conv(p, x, feature_group_count=2),
        {"w": normal(1, 3, 3, 1, 4), "b": B},
        IMAGES,
        GENERAL,
    ),
    Spelling(
        "1-D",
        lambda p, x: conv(p, x, ("NWC", "WIO", "NWC")),
        {"w": normal(1, 3, 2, 4), "b": B},
        normal(2, 5, 8, 2),
        GENERAL,
    ),
    Spelling(
        "3-D",
        lambda p, x: conv(p, x, ("NDHWC", "DHWIO", "NDHWC")),
        {"w": normal(1, 2, 2, 2, 2, 4), "b": B},
        normal(2, 1, 4, 4, 4, 2),
        GENERAL,
    ),
    Spelling(
        "low rank",
        lambda p, x: (x @ p["a"]) @ p["b"],
        {"a": normal(1, 3, 2), "b": normal(2, 2, 4)},
        X,
        {"a": "dense_tag", "b": "dense_tag"},
        2,
    ),
]


GATES = {"a": normal(1, 3, 4), "b": normal(2, 3, 2), "s": normal(3, 4), "t": normal(4, 2)}


def fused(p: Any, x: Any) -> Any:
    y = x @ jnp.concatenate([p["a"], p["b"]], axis=1)
    return jnp.tanh(y + jnp.concatenate([p["s"], p["t"]]).reshape(1, -1))


SPELLINGS += [
    Spelling(
        "a number",
        lambda p, x: jnp.tanh(x * p["s"]) + p["t"],
        {"s": jnp.asarray(1.5), "t": jnp.asarray(0.5)},
        X,
        SCALE,
        layers=2,
    ),
    Spelling(
        "a number that scales and shifts",
        lambda p, x: x * p["s"] + p["t"],
        {"s": jnp.asarray(1.5), "t": jnp.asarray(0.5)},
        X,
        SCALE,
    ),
    Spelling("fused", fused, GATES, X, dict.fromkeys("abst", "dense_tag"), 2),
    Spelling(
        "fused, transposed and cast",
        lambda p, x: jnp.einsum(
            "oi,bti->bto", jnp.concatenate([p["a"].T, p["b"].T]).astype(jnp.float64), x
        ),
        {"a": GATES["a"], "b": GATES["b"]},
        SEQUENCE,
        {"a": "dense_tag", "b": "dense_tag"},
        2,
    ),
    Spelling(
        "fused, one bias",
        lambda p, x: biased(x @ jnp.concatenate([p["a"], p["b"]], axis=1), p["s"]),
        {"a": GATES["a"], "b": GATES["b"], "s": normal(5, 6)},
        X,
        {"a": "dense_tag", "b": "dense_tag", "s": "scale_and_shift_tag"},
        3,
    ),
    Spelling(
        "fused biases",
        lambda p, x: biased(jnp.sin(x), jnp.concatenate([p["s"], p["t"]])),
        {"s": normal(6, 2), "t": normal(7, 1)},
        X,
        {"s": "scale_and_shift_tag", "t": "scale_and_shift_tag"},
        2,
    ),
]


@jax.custom_jvp
def custom(w: Any, x: Any) -> Any:
    return x @ w


custom.defjvp(lambda primals, tangents: (custom(*primals), primals[1] @ tangents[0]))


def split(p: Any, x: Any) -> Any:
    (a, b), (s, t) = jnp.split(p["w"], 2, axis=1), jnp.split(p["b"], 2)
    return biased(x @ a, s) * jnp.tanh(biased(jnp.sin(x) @ b, t))


def looped(p: Any, x: Any) -> Any:
    for k in range(3):
        x = jnp.tanh(biased(x @ p["w"][k], p["b"][k]))
    return x


STACK = {"w": normal(1, 3, 3, 3), "b": normal(2, 3, 3)}


def partly_scanned(p: Any, x: Any) -> Any:
    x = jnp.tanh(x @ p["w"][0])
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"][1:])[0]


def two_loops(p: Any, x: Any) -> Any:
    inner = lambda h, w: lax.scan(lambda h, b: (jnp.tanh(biased(h @ w, b)), None), h, p["b"])[0]
    return lax.scan(lambda h, w: (inner(h, w), None), x, p["w"])[0]


SPELLINGS += [
    Spelling("split", split, {"w": W, "b": B}, X, DENSE),
    Spelling(
        "cut into unequal parts",
        lambda p, x: (x @ p["w"][:, :1]) * (x @ p["w"][:, 1:]),
        {"w": W},
        X,
        {"w": "dense_tag"},
    ),
    Spelling(
        "split as one of its axes",
        lambda p, x: x @ p["w"].reshape(3, 2, 2)[:, 0] + jnp.sin(x) @ p["w"].reshape(3, 2, 2)[:, 1],
        {"w": W},
        X,
        {"w": "dense_tag"},
    ),
    Spelling("a stack, slice by slice", looped, STACK, X, DENSE),
    Spelling("a stack, scanned in part", partly_scanned, {"w": STACK["w"]}, X, {"w": "dense_tag"}),
    Spelling(
        "positions, cut to length",
        lambda p, x: x + jnp.broadcast_to(p["t"][:7], x.shape),
        {"t": normal(1, 9, 3)},
        SEQUENCE,
        {"t": "scale_and_shift_tag"},
    ),
    Spelling(
        "a token of its own",
        lambda p, x: jnp.concatenate([row(p["t"], x[:, :1]), x, row(p["s"], x[:, :1])], axis=1),
        {"t": normal(1, 3), "s": normal(2, 3)},
        SEQUENCE,
        {"t": "scale_and_shift_tag", "s": "scale_and_shift_tag"},
        2,
    ),
    Spelling(
        "positions, looked up",
        lambda p, x: x + row(jnp.take(p["t"], jnp.arange(7), axis=0), x),
        {"t": normal(1, 9, 3)},
        SEQUENCE,
        {"t": "scale_and_shift_tag"},
    ),
    Spelling(
        "positions, looked up and as they are",
        lambda p, x: x + row(p["t"][jnp.arange(7)], x) + row(p["t"], jnp.sin(x)),
        {"t": normal(1, 7, 3)},
        SEQUENCE,
        {"t": "scale_and_shift_tag"},
    ),
    Spelling(
        "one example after the other",
        lambda p, x: lax.map(lambda x: x @ p["w"] + p["b"], x),
        {"w": W, "b": B},
        X,
        DENSE,
    ),
    Spelling("loops of one length, each with its own", two_loops, STACK, X, SHIFTED, 2),
    Spelling(
        "no row for an index",
        lambda p, x: jax.nn.one_hot(x, 9, dtype=jnp.float64) @ p["e"],
        {"e": normal(1, 9, 3)},
        jnp.array([1, -1, 5, 9]),
        {"e": "embedding_tag"},
    ),
    Spelling(
        "the next row for an index",
        lambda p, x: jnp.take(p["e"], x, axis=0, mode="clip"),
        {"e": normal(1, 9, 3)},
        jnp.array([1, -1, 5, 20]),
        {"e": "embedding_tag"},
    ),
    Spelling("times a constant", lambda p, x: x @ (0.5 * p["w"]), {"w": W}, X, {"w": "dense_tag"}),
    Spelling(
        "divided by a constant, transposed, biased",
        lambda p, x: biased(x @ (p["w"] / jnp.sqrt(jnp.asarray(3.0, x.dtype))).T, p["b"]),
        {"w": W.T, "b": B},
        X,
        DENSE,
    ),
    Spelling(
        "a scale, scaled",
        lambda p, x: x * row(2 * p["s"], x),
        {"s": normal(1, 3)},
        X,
        {"s": "scale_and_shift_tag"},
    ),
]


AFFINE = [
    Spelling(
        "a change of weights that are given",
        lambda p, x: x[0] @ (x[1] + p["w"]),
        {"w": W},
        (X, normal(3, 3, 4)),
        {"w": "dense_tag"},
    ),
]
"""Layers of which what they put out also depends on something else."""


class Generic(NamedTuple):
    name: str
    f: Callable[[Any, Any], Any]
    params: Any
    x: Any
    reason: str


GENERIC = [
    Generic(
        "times what is the same for all examples",
        lambda p, x: x[0] @ (p["w"] * x[1]),
        {"w": W},
        (X, normal(3, 3, 4)),
        "meets nothing that differs from example to example",
    ),
    Generic(
        "a known matrix times it",
        lambda p, x: x[0] @ (x[1] @ p["w"]),
        {"w": W},
        (X, normal(3, 3, 3)),
        "meets nothing that differs from example to example",
    ),
    Generic(
        "put together and multiplied with a known matrix",
        lambda p, x: x[0] @ (x[1] @ jnp.concatenate([p["a"], p["b"]], axis=1)),
        {"a": W, "b": W},
        (X, normal(3, 3, 3)),
        "meets nothing that differs from example to example",
    ),
    Generic(
        "next to zeros",
        lambda p, x: x @ jnp.concatenate([p["w"], jnp.zeros((3, 2))], axis=1),
        {"w": W},
        X,
        "meets nothing that differs from example to example",
    ),
    Generic(
        "rows in another order",
        lambda p, x: x + row(p["t"][jnp.array([2, 0, 1, 4, 3, 6, 5])], x),
        {"t": normal(1, 7, 3)},
        SEQUENCE,
        "meets nothing that differs from example to example",
    ),
    Generic(
        "parts that overlap",
        lambda p, x: (x @ p["w"][:, :3]) * (x @ p["w"][:, 1:]),
        {"w": W},
        X,
        "used in ways that do not go together",
    ),
    Generic(
        "every other column",
        lambda p, x: x @ p["w"][:, ::2],
        {"w": W},
        X,
        "slices of it are taken that are not contiguous",
    ),
    Generic(
        "a shift, scaled",
        lambda p, x: x + row(0.1 * p["t"], x),
        {"t": normal(1, 3)},
        X,
        "multiplied with a constant before it is added",
    ),
    Generic(
        "a table, scaled",
        lambda p, x: (0.1 * p["t"])[x[:, 0].astype(jnp.int32) % 7],
        {"t": normal(1, 7, 3)},
        X,
        "multiplied with a constant before it is indexed",
    ),
    Generic(
        "scaled and put together",
        lambda p, x: x @ jnp.concatenate([2 * p["a"], p["a"]], axis=1),
        {"a": W},
        X,
        "is multiplied with a constant before it is concatenated",
    ),
    Generic(
        "low rank, multiplied first",
        lambda p, x: x @ (p["a"] @ p["b"]),
        {"a": normal(1, 3, 2), "b": normal(2, 2, 4)},
        X,
        "meets another parameter in `dot_general`",
    ),
    Generic(
        "weight norm",
        lambda p, x: x @ (p["v"] / jnp.sqrt(jnp.sum(p["v"] ** 2))),
        {"v": W},
        X,
        "no layer is known",
    ),
    Generic("a function", lambda p, x: x * jnp.exp(p["s"]), {"s": X}, X, "used by `exp`"),
    Generic(
        "cond",
        lambda p, x: lax.cond(x[0, 0] > 0, lambda: x @ p["w"], lambda: x @ (p["w"] + 1)),
        {"w": W},
        X,
        "inside `cond`",
    ),
    Generic(
        "while",
        lambda p, x: x @ lax.fori_loop(0, x.astype(int)[0, 0], lambda _, w: w * 2, p["w"]),
        {"w": W},
        X,
        "inside `while`",
    ),
    Generic(
        "custom derivatives",
        lambda p, x: custom(p["w"], x),
        {"w": W},
        X,
        "inside `custom`, which has derivatives of its own",
    ),
    Generic(
        "a carry that changes",
        lambda p, x: lax.scan(lambda w, _: (2 * w, x @ w), p["w"], None, length=3)[1],
        {"w": W},
        X,
        "a loop carries it along and changes it",
    ),
    Generic(
        "a loop that returns it",
        lambda p, x: x @ lax.scan(lambda c, _: (p["w"], None), 0 * W, None, length=2)[0],
        {"w": W},
        X,
        "a loop returns it",
    ),
    Generic(
        "put together along the inputs",
        lambda p, x: x @ jnp.concatenate([p["a"], p["b"]]),
        {"a": normal(1, 1, 4), "b": normal(2, 2, 4)},
        X,
        "along an axis that is not one of the outputs",
    ),
    Generic(
        "put together and mixed",
        lambda p, x: jnp.sin(jnp.concatenate([p["a"], p["b"]])) * x,
        {"a": normal(1, 2, 3), "b": normal(2, 3, 3)},
        X,
        "concatenated with others, and used by `sin`",
    ),
    Generic(
        "used in two ways",
        lambda p, x: (x @ p["w"]) * row(p["w"][0], normal(0, 5, 4)),
        {"w": W},
        X,
        "",
    ),
]
