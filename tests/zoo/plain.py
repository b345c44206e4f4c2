"""Models in plain JAX."""

import jax
import jax.numpy as jnp
from jax import lax

import curvax
from layers.models import normal
from zoo.case import (
    Family,
    Model,
    Taps,
    chances,
    draw,
    normal_errors,
    one_class,
    squared_error,
    tokens,
    yes_or_no,
)

PLAIN = Family("plain")
VECTORS = normal(0, 4, 6)


def keep(name, x, y):
    return y


def dense(p, x, tap=keep, name=""):
    return tap(name, x, x @ p["w"] + p["b"])


def pair(ins, outs, seed):
    return {"w": normal(seed, ins, outs) / ins**0.5, "b": normal(seed + 1, outs)}


def tapped(loss):
    """A loss that takes a tap, with taps."""

    def with_taps(params, changes, *batch):
        taps = Taps(changes)
        return loss(params, *batch, tap=taps), taps.met

    return with_taps


@PLAIN.add(tapped=True)
def mlp():
    def loss(params, x, targets, tap=keep):
        for name in "ab":
            x = jnp.tanh(dense(params[name], x, tap, f"['{name}']"))
        return normal_errors(dense(params["c"], x, tap, "['c']"), targets)

    params = {"a": pair(6, 5, 1), "b": pair(5, 4, 3), "c": pair(4, 3, 5)}
    return Model(loss, params, (VECTORS, normal(9, 4, 3)), tapped=tapped(loss))


@PLAIN.add()
def recurrent():
    """A `lax.scan` over time, both ways."""

    def loss(params, x, targets):
        x = jnp.moveaxis(x, 1, 0)
        both = []
        for name, reverse in (("forward", False), ("backward", True)):
            p = params[name]
            step = lambda h, x: ((h := jnp.tanh(x @ p["w"] + h @ p["u"] + p["b"])), h)  # noqa: B023
            both.append(lax.scan(step, jnp.zeros((x.shape[1], 4)), x, reverse=reverse)[1])
        y = jnp.moveaxis(jnp.concatenate(both, -1), 0, 1)
        return one_class(dense(params["out"], y), targets)

    params = {name: draw(w=(6, 4), u=(4, 4), b=(4,)) for name in ("forward", "backward")}
    params["out"] = pair(8, 3, 5)
    return Model(loss, params, (normal(0, 3, 5, 6), tokens(1, 3, 3, 5)))


@PLAIN.add(scanned=True)
def scanned():
    """Stacked residual layers with a norm."""

    def layer(h, p):
        normed = h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-5) * p["scale"]
        return h + jnp.tanh(dense(p["up"], normed)) @ p["down"]

    def loss(params, x, targets):
        x = lax.scan(lambda h, p: (layer(h, p), None), x, params["stack"])[0]
        return squared_error(dense(params["out"], x), targets)

    def unrolled(params, x, targets):
        for p in params["stack"]:
            x = layer(x, p)
        return squared_error(dense(params["out"], x), targets)

    one = lambda seed: {
        "scale": 1 + 0.2 * normal(seed, 6),
        "up": pair(6, 5, seed + 1),
        "down": normal(seed + 3, 5, 6),
    }
    slices = [one(10 * seed) for seed in range(3)]
    out = pair(6, 2, 7)
    stack = jax.tree.map(lambda *p: jnp.stack(p), *slices)
    return Model(
        loss,
        {"stack": stack, "out": out},
        (VECTORS, normal(9, 4, 2)),
        unrolled=(unrolled, {"stack": slices, "out": out}, "['stack']"),
    )


@PLAIN.add()
def mixture_of_experts():
    """Each expert sees all, weighed by a router."""

    def loss(params, x, labels):
        gates = jax.nn.softmax(x @ params["router"])
        h = jnp.einsum("bi,eio->ebo", x, params["up"]) + params["bias"][:, None]
        y = jnp.einsum("ebi,eio->beo", jax.nn.gelu(h), params["down"])
        return one_class(jnp.einsum("be,beo->bo", gates, y), labels)

    params = draw(router=(6, 3), up=(3, 6, 4), bias=(3, 4), down=(3, 4, 5))
    return Model(loss, params, (VECTORS, tokens(1, 5, 4)))


@PLAIN.add(tapped=True)
def graph_network():
    """Messages along edges, summed at each node."""

    def loss(params, nodes, source, target, answers, tap=keep):
        for name in ("first", "second"):
            p = params[name]
            ends = jnp.concatenate([nodes[source], nodes[target]], -1)
            messages = jnp.tanh(dense(p["message"], ends, tap, f"['{name}']['message']"))
            total = jax.ops.segment_sum(messages, target, len(nodes))
            both = jnp.concatenate([nodes, total], -1)
            nodes = jnp.tanh(dense(p["update"], both, tap, f"['{name}']['update']"))
        return yes_or_no(dense(params["out"], nodes, tap, "['out']"), answers)

    step = lambda seed: {"message": pair(8, 5, seed), "update": pair(9, 4, seed + 2)}
    params = {"first": step(1), "second": step(5), "out": pair(4, 2, 9)}
    batch = normal(0, 5, 4), tokens(1, 5, 9), tokens(2, 5, 9), chances(3, 5, 2)
    return Model(loss, params, batch, tapped=tapped(loss), independent=False)


def minus(log_determinant):
    return -jnp.sum(log_determinant)


@PLAIN.add()
def flow():
    """Coupling layers: two losses, one of what comes out and one of the log-determinant."""

    def loss(params, x):
        total = jnp.zeros(len(x))
        for p in params:
            fixed, moved = x[:, :3], x[:, 3:]
            h = jnp.tanh(dense(p["in"], fixed))
            log_scale = jnp.tanh(dense(p["scale"], h))
            total = total + log_scale.sum(1)
            x = jnp.concatenate([moved * jnp.exp(log_scale) + dense(p["shift"], h), fixed], 1)
        curvax.register_loss(minus, total[:, None])
        return normal_errors(x, jnp.zeros_like(x), 1.0) - jnp.sum(total)

    step = lambda s: {"in": pair(3, 5, s), "scale": pair(5, 3, s + 2), "shift": pair(5, 3, s + 4)}
    return Model(loss, [step(1), step(7)], (VECTORS,))


def small(params, x):
    x = jnp.tanh(dense(params["in"], x))
    return jnp.tanh(dense(params["mid"], x)) @ params["out"]["w"]


@PLAIN.add()
def physics_informed():
    """The residual of a differential equation, and the values at the boundary."""

    def loss(params, x, source, boundary, values):
        u = lambda x: (small(params, x) + params["out"]["b"])[0]

        def second(x, direction):
            slope = lambda x: jax.jvp(u, (x,), (direction,))[1]
            return jax.jvp(slope, (x,), (direction,))[1]

        laplacian = lambda x: sum(second(x, direction) for direction in jnp.eye(2))
        residual = jax.vmap(laplacian)(x)[:, None] - source
        inside = squared_error(residual, jnp.zeros_like(residual))
        return inside + normal_errors(jax.vmap(u)(boundary)[:, None], values)

    params = {"in": pair(2, 4, 1), "mid": pair(4, 4, 3), "out": pair(4, 1, 5)}
    batch = normal(0, 4, 2), normal(1, 4, 1), normal(2, 3, 2), normal(3, 3, 1)
    return Model(loss, params, batch, independent=False)


@PLAIN.add()
def physics_informed_by_hessian():
    def loss(params, x, source):
        laplacian = lambda x: jnp.trace(jax.hessian(lambda x: small(params, x)[0])(x))
        return squared_error(jax.vmap(laplacian)(x)[:, None], source)

    params = {"in": pair(2, 4, 1), "mid": pair(4, 4, 3), "out": {"w": normal(5, 4, 1)}}
    return Model(loss, params, (normal(0, 4, 2), normal(1, 4, 1)))


@PLAIN.add()
def mirrored_autoencoder():
    """The decoder has the encoder's weights, transposed."""

    def loss(params, x):
        h = jnp.tanh(x @ params["a"] + params["p"])
        h = jnp.tanh(h @ params["b"] + params["q"])
        h = jnp.tanh(h @ params["b"].T + params["r"])
        return yes_or_no(h @ params["a"].T + params["s"], jax.nn.sigmoid(x))

    params = draw(a=(6, 4), b=(4, 3), p=(4,), q=(3,), r=(4,), s=(6,))
    return Model(loss, params, (VECTORS,))


@PLAIN.add(tapped=True)
def low_rank():
    """Adapters next to frozen weights, which are no parameters here."""
    kept = draw(a=(6, 5), b=(5, 3))

    def loss(params, x, targets, tap=keep):
        for name, w in kept.items():
            p = params[name]
            inner = tap(f"['{name}']['down']", x, x @ p["down"])
            x = x @ w + 0.5 * tap(f"['{name}']['up']", inner, inner @ p["up"])
            x = jnp.tanh(x) if name == "a" else x
        return squared_error(x, targets)

    params = {"a": draw(down=(6, 2), up=(2, 5)), "b": draw(down=(5, 2), up=(2, 3))}
    return Model(loss, params, (VECTORS, normal(9, 4, 3)), tapped=tapped(loss))


@PLAIN.add(tapped=True)
def grouped_convolution():
    """In one dimension, channels first."""

    def convolve(p, x, groups, tap, name):
        numbers = ("NCW", "OIW", "NCW")
        options = {"dimension_numbers": numbers, "feature_group_count": groups}
        y = lax.conv_general_dilated(x, p["w"], (1,), "SAME", **options)
        return tap(name, x, y + p["b"][:, None])

    def loss(params, x, labels, tap=keep):
        x = jnp.tanh(convolve(params["a"], x, 1, tap, "['a']"))
        x = jnp.tanh(convolve(params["b"], x, 2, tap, "['b']"))
        return one_class(dense(params["c"], x.mean(2), tap, "['c']"), labels)

    params = {"a": draw(w=(4, 3, 3), b=(4,)), "b": draw(w=(6, 2, 3), b=(6,)), "c": pair(6, 3, 1)}
    return Model(loss, params, (normal(0, 4, 3, 7), tokens(1, 3, 4)), tapped=tapped(loss))


@PLAIN.add()
def wave_function():
    """The logarithm of a determinant of orbitals, mapped over electrons and over examples."""

    def log_psi(params, positions):
        h = positions
        for p in params["layers"]:
            mean = h.mean(0)
            h = jax.vmap(lambda h: jnp.tanh(dense(p, jnp.concatenate([h, mean]))))(h)  # noqa: B023
        decay = jnp.exp(-jnp.linalg.norm(positions, axis=1, keepdims=True))
        orbitals = jnp.einsum("ei,dio->deo", h, params["orbitals"]) * decay
        signs, logs = jnp.linalg.slogdet(orbitals)
        top = lax.stop_gradient(logs.max())
        return top + jnp.log(jnp.abs(jnp.sum(signs * jnp.exp(logs - top) * params["weights"])))

    def loss(params, positions, targets):
        logs = jax.vmap(log_psi, (None, 0))(params, positions)
        return normal_errors(logs[:, None], targets, 0.5)

    params = {"layers": [pair(6, 5, 1), pair(10, 6, 3)], **draw(orbitals=(2, 6, 3), weights=(2,))}
    return Model(loss, params, (normal(0, 4, 3, 3), normal(1, 4, 1)))
