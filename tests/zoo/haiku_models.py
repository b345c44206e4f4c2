"""Models in Haiku."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np

from layers.models import normal
from zoo.case import (
    Family,
    Model,
    chances,
    normal_errors,
    one_class,
    random_like,
    squared_error,
    tapped_by,
    tokens,
    yes_or_no,
)

with warnings.catch_warnings():  # Haiku uses names that JAX warns about.
    warnings.filterwarnings("ignore", r"jax\.core\.", DeprecationWarning)
    import haiku as hk

HAIKU = Family("haiku")
KEY = jax.random.key(0)
VECTORS, SEQUENCES, IMAGES = normal(0, 4, 6), normal(1, 3, 5, 6), normal(2, 3, 6, 6, 2)
TAPPED = (hk.Linear, hk.Conv2D, hk.Conv2DTranspose)
TAPPED_NORMS = (hk.LayerNorm, hk.BatchNorm)
tapped = tapped_by(
    hk.intercept_methods, TAPPED, TAPPED_NORMS, lambda module: f"['{module.module_name}']"
)


def model(net, loss, x, targets, **options):
    transformed = hk.transform_with_state(net)
    shapes, state = jax.eval_shape(transformed.init, KEY, x)
    state = jax.tree.map(lambda s: np.ones(s.shape, s.dtype), state)

    def f(params, x, targets):
        y, _ = transformed.apply(params, state, None, x)
        return loss(y, targets)

    return Model(f, random_like(shapes), (x, targets), tapped=tapped(f), **options)


@HAIKU.add(tapped=True)
def mlp():
    net = lambda x: hk.nets.MLP([5, 4, 3], activation=jnp.tanh)(x)
    return model(net, one_class, VECTORS, tokens(3, 3, 4))


@HAIKU.add(tapped=True)
def resnet():
    def norm(x):
        return hk.BatchNorm(True, True, 0.9)(x, is_training=True)

    def net(x):
        x = hk.Conv2D(3, 3)(x)
        y = jax.nn.relu(norm(x))
        y = norm(hk.Conv2D(3, 3, with_bias=False)(y))
        return hk.Linear(3)(jax.nn.relu(x + y).mean((1, 2)))

    return model(net, one_class, IMAGES, tokens(3, 3, 3), independent=False)


@HAIKU.add()
def autoencoder():
    def net(x):
        x = jnp.tanh(hk.Conv2D(3, 3, stride=2)(x))
        x = jnp.tanh(hk.DepthwiseConv2D(2, 3)(x))
        return hk.Conv2DTranspose(2, 3, stride=2)(x)

    return model(net, normal_errors, IMAGES, normal(3, 3, 6, 6, 2))


@HAIKU.add()
def lstm():
    def net(x):
        core = hk.LSTM(4)
        x = jnp.moveaxis(x, 1, 0)
        state = jax.tree.map(lambda s: s.astype(x.dtype), core.initial_state(x.shape[1]))
        y, _ = hk.dynamic_unroll(core, x, state)
        return hk.Linear(2)(y[-1])

    return model(net, squared_error, SEQUENCES, normal(3, 3, 2))


@HAIKU.add()
def gru():
    """Splits its weights and biases before it uses them."""

    def net(x):
        core = hk.GRU(4)
        x = jnp.moveaxis(x, 1, 0)
        y, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]).astype(x.dtype))
        return hk.Linear(2)(y[-1])

    return model(net, squared_error, SEQUENCES, normal(3, 3, 2))


@HAIKU.add(tapped=True)
def transformer():
    def net(tokens):
        x = hk.Embed(7, 6)(tokens)
        x = x + hk.get_parameter("position", (5, 6), x.dtype, hk.initializers.RandomNormal())
        h = hk.LayerNorm(-1, True, True)(x)
        x = x + hk.MultiHeadAttention(2, 3, model_size=6, w_init=hk.initializers.RandomNormal())(
            h, h, h
        )
        h = hk.LayerNorm(-1, True, True)(x)
        x = x + hk.Linear(6)(jax.nn.gelu(hk.Linear(8)(h)))
        return hk.Linear(7)(x)

    return model(net, one_class, tokens(1, 7, 3, 5), tokens(3, 7, 3, 5))


@HAIKU.add()
def stacked():
    def net(x):
        def layer(x):
            return x + hk.Linear(6)(jnp.tanh(hk.LayerNorm(-1, True, True)(x)))

        return hk.Linear(2)(hk.experimental.layer_stack(3)(layer)(x))

    return model(net, yes_or_no, VECTORS, chances(3, 4, 2))
