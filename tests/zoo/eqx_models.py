"""Models in Equinox: functions of one example, mapped over the batch."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from layers.models import normal
from zoo.case import (
    Family,
    Model,
    Taps,
    chances,
    normal_errors,
    one_class,
    random_like,
    squared_error,
    tokens,
    yes_or_no,
)

EQUINOX = Family("equinox")
KEYS = jax.random.split(jax.random.key(0), 8)
VECTORS, SEQUENCES, IMAGES = normal(0, 4, 6), normal(1, 3, 5, 6), normal(2, 3, 2, 6, 6)
TAPPED = (eqx.nn.Linear, eqx.nn.Conv)


class Tapped(eqx.Module):
    """A layer with a tap at its output."""

    layer: eqx.Module
    name: str
    taps: Taps

    def __call__(self, x, *, key=None):
        return self.taps(self.name, x, self.layer(x))


def with_taps(net, taps):
    is_layer = lambda node: isinstance(node, TAPPED)
    wrap = lambda path, node: (
        Tapped(node, jax.tree_util.keystr(path), taps) if is_layer(node) else node
    )
    return jax.tree_util.tree_map_with_path(wrap, net, is_leaf=is_layer)


def split(make):
    """Random parameters of a module, and the rest of it."""
    is_array = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    shapes, static = eqx.partition(eqx.filter_eval_shape(make), is_array)
    return random_like(shapes), static


def model(make, loss, x, targets, call=lambda net, x: net(x), **options):
    """`call(net, x)` is the prediction for one example."""
    params, static = split(make)

    def f(params, x, targets):
        net = eqx.combine(params, static)
        return loss(jax.vmap(lambda x: call(net, x))(x), targets)

    def tapped(params, changes, x, targets):
        def one(x, changes):
            taps = Taps(changes)
            y = call(with_taps(eqx.combine(params, static), taps), x)
            return y, taps.met

        y, met = jax.vmap(one)(x, changes)
        return loss(y, targets), met

    return Model(f, params, (x, targets), tapped=tapped, **options)


@EQUINOX.add(tapped=True)
def mlp():
    make = lambda: eqx.nn.MLP(6, 3, 5, 2, activation=jnp.tanh, key=KEYS[0])
    return model(make, one_class, VECTORS, tokens(3, 3, 4))


@EQUINOX.add(tapped=True)
def cnn():
    make = lambda: eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(2, 4, 3, key=KEYS[0]),
            eqx.nn.GroupNorm(2, 4),
            eqx.nn.Lambda(jax.nn.gelu),
            eqx.nn.AvgPool2d(2, 2),
            eqx.nn.Conv2d(4, 3, 2, use_bias=False, key=KEYS[1]),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(3, 2, key=KEYS[2]),
        ]
    )
    return model(make, yes_or_no, IMAGES, chances(3, 3, 2))


@EQUINOX.add()
def convolution_in_one_dimension():
    make = lambda: [
        eqx.nn.Conv1d(5, 4, 3, padding=2, dilation=2, key=KEYS[0]),
        eqx.nn.PReLU(0.3),
        eqx.nn.ConvTranspose1d(4, 3, 2, stride=2, key=KEYS[1]),
        eqx.nn.PReLU(jnp.ones((3, 1))),
        eqx.nn.Conv1d(3, 2, 2, stride=2, key=KEYS[2]),
    ]
    call = lambda net, x: functools.reduce(lambda x, layer: layer(x), net, x)
    return model(make, squared_error, SEQUENCES, normal(3, 3, 2, 6), call)


class Block(eqx.Module):
    """A transformer's."""

    attention: eqx.nn.MultiheadAttention
    norms: list[eqx.nn.LayerNorm]
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(2, 6, key=keys[0])
        self.norms = [eqx.nn.LayerNorm(6), eqx.nn.RMSNorm(6)]
        self.up = eqx.nn.Linear(6, 8, key=keys[1])
        self.down = eqx.nn.Linear(8, 6, key=keys[2])

    def __call__(self, x):
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attention(h, h, h)
        h = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norms[1])(x)))
        return x + jax.vmap(self.down)(h)


@EQUINOX.add()
def transformer():
    class Net(eqx.Module):
        table: eqx.nn.Embedding
        blocks: list[Block]
        head: eqx.nn.Linear

        def __call__(self, tokens):
            x = jax.vmap(self.table)(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean(0))

    def make():
        table = eqx.nn.Embedding(7, 6, key=KEYS[0])
        return Net(table, [Block(KEYS[1]), Block(KEYS[2])], eqx.nn.Linear(6, 3, key=KEYS[3]))

    return model(make, one_class, tokens(1, 7, 3, 5), tokens(3, 3, 3))


@EQUINOX.add()
def gru():
    class Net(eqx.Module):
        cell: eqx.nn.GRUCell
        head: eqx.nn.Linear

        def __call__(self, x):
            step = lambda h, x: (self.cell(x, h), None)
            return self.head(lax.scan(step, jnp.zeros(4), x)[0])

    make = lambda: Net(eqx.nn.GRUCell(6, 4, key=KEYS[0]), eqx.nn.Linear(4, 2, key=KEYS[1]))
    return model(make, normal_errors, SEQUENCES, normal(3, 3, 2))


@EQUINOX.add()
def lstm():
    class Net(eqx.Module):
        cell: eqx.nn.LSTMCell
        head: eqx.nn.Linear

        def __call__(self, x):
            step = lambda h, x: ((h := self.cell(x, h)), h[0])
            return jax.vmap(self.head)(lax.scan(step, (jnp.zeros(4), jnp.zeros(4)), x)[1])

    make = lambda: Net(eqx.nn.LSTMCell(6, 4, key=KEYS[0]), eqx.nn.Linear(4, 3, key=KEYS[1]))
    return model(make, one_class, SEQUENCES, tokens(3, 3, 3, 5))


class Layer(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __call__(self, x):
        return x + jnp.tanh(self.linear(self.norm(x)))


@EQUINOX.add(scanned=True)
def scanned():
    """A stack made by `filter_vmap`, in `lax.scan`."""
    make = eqx.filter_vmap(lambda key: Layer(eqx.nn.Linear(6, 6, key=key), eqx.nn.LayerNorm(6)))
    layers, static = split(lambda: make(KEYS[:3]))
    head, linear = split(lambda: eqx.nn.Linear(6, 3, key=KEYS[3]))
    out = lambda params, x: eqx.combine(params, linear)(x)

    def loss(params, x, labels):
        def one(x):
            step = lambda x, layer: (eqx.combine(layer, static)(x), None)
            return out(params["head"], lax.scan(step, x, params["layers"])[0])

        return one_class(jax.vmap(one)(x), labels)

    def unrolled(params, x, labels):
        def one(x):
            for layer in params["layers"]:
                x = eqx.combine(layer, static)(x)
            return out(params["head"], x)

        return one_class(jax.vmap(one)(x), labels)

    slices = [jax.tree.map(lambda p: p[k], layers) for k in range(3)]  # noqa: B023
    return Model(
        loss,
        {"layers": layers, "head": head},
        (VECTORS, tokens(3, 3, 4)),
        unrolled=(unrolled, {"layers": slices, "head": head}, "['layers']"),
    )


@EQUINOX.add()
def deep_sets():
    """One network for all members of a set, another for their sum."""

    class DeepSets(eqx.Module):
        inner: eqx.nn.MLP
        outer: eqx.nn.MLP

        def __call__(self, x):
            return self.outer(jax.vmap(self.inner)(x).sum(0))

    mlp = lambda ins, outs, key: eqx.nn.MLP(ins, outs, 5, 1, activation=jnp.tanh, key=key)
    make = lambda: DeepSets(mlp(6, 4, KEYS[0]), mlp(4, 2, KEYS[1]))
    return model(make, squared_error, SEQUENCES, normal(3, 3, 2))


@EQUINOX.add(tapped=True)
def siamese():
    """One network at two places, and what distinguishes its results."""

    class Siamese(eqx.Module):
        arm: eqx.nn.MLP
        head: eqx.nn.Linear

        def __call__(self, x):
            return self.head(jnp.abs(self.arm(x[0]) - self.arm(x[1])))

    arm = lambda: eqx.nn.MLP(6, 4, 5, 1, activation=jnp.tanh, key=KEYS[0])
    make = lambda: Siamese(arm(), eqx.nn.Linear(4, 1, key=KEYS[1]))
    pairs, answers = normal(4, 4, 2, 6), tokens(5, 2, 4, 1).astype(float)
    return model(make, yes_or_no, pairs, answers)
