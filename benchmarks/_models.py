"""Models for both sides of a benchmark: losses that are registered, parameters, data.

They are plain functions of arrays, in the form that each library detects best: every layer is a
line of its own, without loops. The functions of a library that they call have the same names in
both, and this file imports nothing else of curvax, so it runs with any version of JAX.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["MODELS", "Model"]

Model = tuple[Callable[..., Any], Any, Any]
"""A loss as a function of parameters and a batch, the parameters, and a batch."""


def autoencoder(library: Any, small: bool, number: int = 500) -> Model:
    """Return the deep autoencoder that K-FAC was introduced with; 500 images of 784 pixels."""
    widths = [784, 1000, 500, 250, 30, 250, 500, 1000, 784]
    if small:
        widths, number = [64, 48, 16, 48, 64], number // 10
    draw = np.random.default_rng(0)
    params = [dense(draw, *pair) for pair in itertools.pairwise(widths)]
    images = draw.uniform(size=(number, widths[0])) > 0.8

    def loss(params: Any, images: Any) -> Any:
        x = images
        for number, p in enumerate(params):
            x = (jnp.tanh(x) if number else x) @ p["weight"] + p["bias"]
        library.register_sigmoid_cross_entropy_loss(x, images)
        return jnp.mean(jnp.sum(jnp.logaddexp(x, 0.0) - images * x, axis=1))

    return loss, params, images.astype(np.float32)


def resnet(library: Any, small: bool) -> Model:
    """Return a ResNet of three stages with two blocks each, for 64 images of 32 by 32 pixels."""
    widths = [4, 8] if small else [16, 32, 64]
    draw = np.random.default_rng(0)
    stages = []
    for before, width in zip([widths[0], *widths[:-1]], widths, strict=True):
        first = {"one": kernel(draw, 3, before, width), "two": kernel(draw, 3, width, width)}
        if before != width:
            first["shortcut"] = kernel(draw, 1, before, width)
        last = {"one": kernel(draw, 3, width, width), "two": kernel(draw, 3, width, width)}
        stages.append([first, last])
    stem, head = kernel(draw, 3, 3, widths[0]), dense(draw, widths[-1], 10)
    params = {"stem": stem, "stages": stages, "head": head}
    number, size = (8, 8) if small else (64, 32)
    images = draw.normal(size=(number, size, size, 3)).astype(np.float32)
    classes = draw.integers(10, size=number).astype(np.int32)

    def conv(p: Any, x: Any, stride: int = 1) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(
            x, p["weight"], (stride, stride), "SAME", dimension_numbers=numbers
        )
        return y + p["bias"]

    def block(p: Any, x: Any) -> Any:
        stride = 2 if "shortcut" in p else 1
        y = conv(p["two"], jax.nn.relu(conv(p["one"], x, stride)))
        return jax.nn.relu(y + (conv(p["shortcut"], x, stride) if "shortcut" in p else x))

    def loss(params: Any, batch: Any) -> Any:
        images, classes = batch
        x = jax.nn.relu(conv(params["stem"], images))
        for stage in params["stages"]:
            for p in stage:
                x = block(p, x)
        p = params["head"]
        logits = jnp.mean(x, axis=(1, 2)) @ p["weight"] + p["bias"]
        library.register_softmax_cross_entropy_loss(logits, classes)
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(classes)), classes])

    return loss, params, (images, classes)


def transformer(library: Any, small: bool, apart: bool = False) -> Model:
    """Return a transformer of 6 layers and 4 heads that predicts the next of 64 tokens.

    There are 32 sequences, but all layers see one row for each token, which both libraries detect
    as dense layers and layer norms; so the tokens are the examples. For the same reason the
    embedding is a product with one-hot rows. Positions have no parameters. With `apart` each token
    is a sequence of its own, so that examples do not interact.
    """
    width, depth, length, number = (8, 2, 4, 4) if small else (128, 6, 64, 32)
    if apart:
        length, number = 1, number * length
    heads, vocabulary = 4, 8 if small else 64
    draw = np.random.default_rng(0)
    layers = []
    for _ in range(depth):
        names = ("query", "key", "value", "out")
        attention = {name: dense(draw, width, width) for name in names}
        inner = {"up": dense(draw, width, 4 * width), "down": dense(draw, 4 * width, width)}
        layers.append(attention | inner | {"before": scale(width), "between": scale(width)})
    embedding, head = dense(draw, vocabulary, width)["weight"], dense(draw, width, vocabulary)
    params = {"embedding": embedding, "layers": layers, "last": scale(width), "head": head}
    tokens = draw.integers(vocabulary, size=(number, length + 1)).astype(np.int32)
    batch = tokens[:, :-1].reshape(-1), tokens[:, 1:].reshape(-1)
    angles = np.arange(length)[:, None] / 1e4 ** (np.arange(width // 2) / (width // 2))
    positions = np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
    # Attention is causal.
    mask = np.where(np.tri(length, dtype=bool), 0.0, -1e9).astype(np.float32)

    def apply(p: Any, x: Any) -> Any:
        return x @ p["weight"] + p["bias"]

    def norm(p: Any, x: Any) -> Any:
        x = x - jnp.mean(x, axis=1, keepdims=True)
        x = x * lax.rsqrt(jnp.mean(x**2, axis=1, keepdims=True) + 1e-5)
        return x * p["scale"] + p["shift"]

    def attend(p: Any, x: Any) -> Any:
        split = lambda y: y.reshape(number, length, heads, width // heads)
        query, key, value = (split(apply(p[name], x)) for name in ("query", "key", "value"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / (width // heads) ** 0.5
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores + mask), value)
        return apply(p["out"], mixed.reshape(number * length, width))

    def loss(params: Any, batch: Any) -> Any:
        before, after = batch
        x = jax.nn.one_hot(before, vocabulary) @ params["embedding"]
        x = x + np.tile(positions, (number, 1))
        for p in params["layers"]:
            x = x + attend(p, norm(p["before"], x))
            x = x + apply(p["down"], jax.nn.gelu(apply(p["up"], norm(p["between"], x))))
        logits = apply(params["head"], norm(params["last"], x))
        library.register_softmax_cross_entropy_loss(logits, after)
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(after)), after])

    return loss, params, batch


def dense(draw: Any, inputs: int, outputs: int) -> Any:
    """Return weights, scaled by their fan-in, and a bias."""
    weight = draw.normal(size=(inputs, outputs)) / inputs**0.5
    return {"weight": weight.astype(np.float32), "bias": np.zeros(outputs, np.float32)}


def kernel(draw: Any, size: int, inputs: int, outputs: int) -> Any:
    """Return a square kernel, with half the usual variance for residual branches, and a bias."""
    weight = draw.normal(size=(size, size, inputs, outputs)) / (2 * size**2 * inputs) ** 0.5
    return {"weight": weight.astype(np.float32), "bias": np.zeros(outputs, np.float32)}


def scale(width: int) -> Any:
    """Return the scale and the shift of a layer norm."""
    return {"scale": np.ones(width, np.float32), "shift": np.zeros(width, np.float32)}


MODELS: dict[str, Callable[[Any, bool], Model]] = {
    "autoencoder": autoencoder,
    "autoencoder-2000": functools.partial(autoencoder, number=2000),
    "resnet": resnet,
    "transformer": transformer,
    "transformer-apart": functools.partial(transformer, apart=True),
}
