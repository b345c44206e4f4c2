"""Models that are trained on several devices: an MLP, a CNN and a transformer in a loop.

Each is `(loss, params, batch)`: a function of parameters and a batch, parameters, and a function
from a seed and a number of examples to a batch.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import curvax
from optimizer import problems

TOKENS, LENGTH, WIDTH, DEPTH = 5, 3, 4, 2


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape)) / 2


def cnn(params, images):
    dimensions = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    for layer, stride in (("first", 1), ("second", 2)):
        kernel, bias = params[layer]["w"], params[layer]["b"]
        images = lax.conv_general_dilated(images, kernel, (stride, stride), "SAME", **dimensions)
        images = jnp.tanh(images + bias)
    return images.reshape(images.shape[0], -1) @ params["out"]["w"] + params["out"]["b"]


def cnn_loss(params, batch):
    images, labels = batch
    with jax.numpy_rank_promotion("allow"):
        logits = cnn(params, images)
    curvax.register_categorical_predictive_distribution(logits, labels)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1))


def cnn_params():
    return {
        "first": {"w": random(1, 3, 3, 1, 2), "b": random(2, 2)},
        "second": {"w": random(3, 2, 2, 2, 3), "b": random(4, 3)},
        "out": {"w": random(5, 12, 3), "b": random(6, 3)},
    }


def cnn_batch(seed, size):
    labels = np.random.default_rng(seed).integers(0, 3, size)
    return random(seed, size, 4, 4, 1), jnp.asarray(labels)


def normalised(x, scale, shift):
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return scale * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-3) + shift


def transformer(params, tokens):
    x = params["table"][tokens] + params["places"]

    def layer(x, own):
        y = normalised(x, own["scale"], own["shift"])
        queries, keys, values = (y @ own[name] for name in ("queries", "keys", "values"))
        weights = jax.nn.softmax(queries @ jnp.swapaxes(keys, 1, 2) / WIDTH**0.5)
        x = x + weights @ values @ own["mix"]
        return x + jnp.tanh(x @ own["up"] + own["bias"]) @ own["down"], None

    x, _ = lax.scan(layer, x, params["layers"])
    return x @ params["out"]


def transformer_loss(params, tokens):
    with jax.numpy_rank_promotion("allow"):
        logits = transformer(params, tokens[:, :-1]).reshape(-1, TOKENS)
    targets = tokens[:, 1:].reshape(-1)
    curvax.register_categorical_predictive_distribution(logits, targets)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)
    return -jnp.sum(chosen) / tokens.shape[0]


def transformer_params():
    square = dict.fromkeys(("queries", "keys", "values", "mix"), (WIDTH, WIDTH))
    shapes = square | {"scale": (WIDTH,), "shift": (WIDTH,), "up": (WIDTH, 6), "down": (6, WIDTH)}
    shapes["bias"] = (6,)
    layers = {
        name: random(number, DEPTH, *shape) for number, (name, shape) in enumerate(shapes.items())
    }
    table = {"table": random(20, TOKENS, WIDTH), "places": random(21, LENGTH, WIDTH)}
    return {**table, "layers": layers, "out": random(22, WIDTH, TOKENS)}


def transformer_batch(seed, size):
    return jnp.asarray(np.random.default_rng(seed).integers(0, TOKENS, (size, LENGTH + 1)))


MODELS = {
    "mlp": (problems.loss, problems.make_params, problems.make_batch),
    "cnn": (cnn_loss, cnn_params, cnn_batch),
    "transformer": (transformer_loss, transformer_params, transformer_batch),
}
