"""The models of `scaling.py`: plain functions, with the shapes of parameters and of an example.

Each is described by a few sizes, so that small ones can run, and large ones only be traced.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import curvax

__all__ = ["Model", "resnet", "transformer"]


@dataclass(frozen=True)
class Model:
    """A loss as a function of parameters and a batch, with shapes in place of arrays."""

    loss: Callable[..., Any]
    params: Any
    example: Any
    """The shapes of one example."""
    repeated: Any = ()
    """Parameters whose gradients, and squares of these, equal those of others.

    The compiler sends them only once.
    """
    repeated_inputs: Any = ()
    """Input factors that equal those of other layers, likewise."""

    def batch(self, length: int) -> Any:
        """Return the shapes of a batch of `count` examples."""
        many = lambda x: jax.ShapeDtypeStruct((length, *x.shape), x.dtype)
        return jax.tree.map(many, self.example)

    @property
    def num_params(self) -> int:
        """The number of elements of all parameters."""
        return sum(x.size for x in jax.tree.leaves(self.params))


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """Return the shape of an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def transformer(
    width: int, depth: int, inner: int, vocabulary: int, length: int, head: int
) -> Model:
    """Return a transformer that predicts the next token, by a `scan` over stacked parameters."""
    attention = {name: array(depth, width, width) for name in ("query", "key", "value", "out")}
    mixing = {"up": array(depth, width, inner), "down": array(depth, inner, width)}
    norms = {name: array(depth, width) for name in ("before", "between")}
    params = {
        "embedding": array(vocabulary, width),
        "layers": attention | mixing | norms,
        "last": array(width),
        "head": array(width, vocabulary),
    }
    tokens = array(length, dtype=jnp.int32)

    def norm(scale: Any, x: Any) -> Any:
        return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5) * scale

    def attend(p: Any, x: Any) -> Any:
        split = lambda y: y.reshape(*y.shape[:2], width // head, head)
        query, key, value = (split(x @ p[name]) for name in ("query", "key", "value"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / head**0.5
        scores = jnp.where(jnp.tri(length, dtype=bool), scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
        return mixed.reshape(x.shape) @ p["out"]

    def layer(x: Any, p: Any) -> Any:
        x = x + attend(p, norm(p["before"], x))
        return x + jax.nn.gelu(norm(p["between"], x) @ p["up"]) @ p["down"], None

    def loss(params: Any, batch: Any) -> Any:
        tokens, after = batch
        x, _ = lax.scan(layer, params["embedding"][tokens], params["layers"])
        logits = (norm(params["last"], x) @ params["head"]).reshape(-1, vocabulary)
        return cross_entropy(logits, after.reshape(-1))

    return Model(loss, params, (tokens, tokens))


def resnet(stages: tuple[int, ...], width: int, size: int, classes: int) -> Model:
    """Return a ResNet of bottleneck blocks, with given numbers in each stage, for square images.

    Batch normalisation is over the local batch of each device, as is usual in data parallelism.
    """
    blocks, before = [], width
    for number, count in enumerate(stages):
        inner = width * 2**number
        for k in range(count):
            blocks.append(_bottleneck(before, inner, k == 0))
            before = 4 * inner
    strides = [2 if s and k == 0 else 1 for s, count in enumerate(stages) for k in range(count)]
    params = {
        "stem": _normalised(7, 3, width),
        "blocks": blocks,
        "head": {"weight": array(before, classes), "bias": array(classes)},
    }

    def conv(p: Any, x: Any, stride: int) -> Any:
        layout = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(x, p["w"], (stride, stride), "SAME", dimension_numbers=layout)
        y = y - jnp.mean(y, axis=(0, 1, 2))
        y = y * lax.rsqrt(jnp.mean(y**2, axis=(0, 1, 2)) + 1e-5)
        return y * p["scale"] + p["shift"]

    def block(p: Any, x: Any, stride: int) -> Any:
        y = jax.nn.relu(conv(p["one"], x, 1))
        y = jax.nn.relu(conv(p["two"], y, stride))
        return jax.nn.relu(
            conv(p["three"], y, 1) + (conv(p["shortcut"], x, stride) if "shortcut" in p else x)
        )

    def loss(params: Any, batch: Any) -> Any:
        images, labels = batch
        x = jax.nn.relu(conv(params["stem"], images, 2))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for p, stride in zip(params["blocks"], strides, strict=True):
            x = block(p, x, stride)
        p = params["head"]
        return cross_entropy(jnp.mean(x, axis=(1, 2)) @ p["weight"] + p["bias"], labels)

    # The shifts of both branches of a block have the same gradient.
    repeated = [p["shortcut"]["shift"] for p in blocks if "shortcut" in p]
    # Both branches of the first block have the same inputs.
    inputs = [array(width, width)]
    return Model(loss, params, (array(size, size, 3), array(dtype=jnp.int32)), repeated, inputs)


def cross_entropy(logits: Any, classes: Any) -> Any:
    """Register and return the mean cross entropy."""
    curvax.register_softmax_cross_entropy_loss(logits, classes)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), classes[:, None], axis=1))


def _bottleneck(before: int, inner: int, is_first: bool) -> Any:
    block = {
        "one": _normalised(1, before, inner),
        "two": _normalised(3, inner, inner),
        "three": _normalised(1, inner, 4 * inner),
    }
    return block | ({"shortcut": _normalised(1, before, 4 * inner)} if is_first else {})


def _normalised(size: int, inputs: int, outputs: int) -> Any:
    """Return a kernel, with the scale and shift of the normalisation after it."""
    return {
        "w": array(size, size, inputs, outputs),
        "scale": array(outputs),
        "shift": array(outputs),
    }
