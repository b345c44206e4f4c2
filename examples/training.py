"""Five common models, trained with K-FAC and with Adam for the same number of steps.

A convolutional network on digits, a network on the diabetes data, a transformer and an LSTM on
characters, and a network that solves Poisson's equation. The data are those of scikit-learn, or
generated here. Run as `python -m examples.training [steps]`. K-FAC has one set of options for each
model; Adam gets the best of three learning rates.
"""

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from sklearn.datasets import load_diabetes, load_digits

import curvax

RATES = (1e-3, 3e-3, 1e-2)
ADAPTIVE: dict[str, Any] = {
    "use_adaptive_learning_rate": True,
    "use_adaptive_momentum": True,
    "use_adaptive_damping": True,
    "initial_damping": 1.0,
}
CAREFUL: dict[str, Any] = {
    "learning_rate_schedule": lambda step: 0.1,
    "momentum_schedule": lambda step: 0.9,
    "damping_schedule": lambda step: 1e-2,
    "norm_constraint": 1e-2,
}
WORDS = {
    "clause": ["{phrase} {verb} {phrase}. ", "{phrase} {verb} {phrase} {adverb}. "],
    "phrase": ["the {noun}", "a {adjective} {noun}"],
    "noun": ["wave", "particle", "mirror", "photon", "crystal", "lens"],
    "verb": ["bends", "reaches", "follows", "meets"],
    "adjective": ["small", "bright", "distant"],
    "adverb": ["slowly", "at night", "twice"],
}


class Problem(NamedTuple):
    """A training problem: the loss, initial parameters, batches, and options for K-FAC."""

    loss: Callable[[Any, Any], jax.Array]
    params: Any
    batches: Callable[[], Iterator[Any]]
    options: dict[str, Any]


def _random(*shapes: tuple[int, ...]) -> list[jax.Array]:
    """Return normal random weights, scaled by the square root of their fan-in."""
    random = np.random.default_rng(0)
    fan = lambda shape: np.prod(shape[:-1]) ** 0.5 if len(shape) != 3 else shape[1] ** 0.5
    return [jnp.asarray(random.normal(size=s) / fan(s), jnp.float32) for s in shapes]


def _minibatches(size: int, *arrays: np.ndarray) -> Callable[[], Iterator[Any]]:
    def batches() -> Iterator[Any]:
        random = np.random.default_rng(1)
        while True:
            rows = random.integers(0, len(arrays[0]), size)
            yield tuple(jnp.asarray(x[rows]) for x in arrays)

    return batches


def _cross_entropy(logits: jax.Array, labels: jax.Array, weight: float = 1.0) -> jax.Array:
    logits = curvax.register_softmax_cross_entropy_loss(logits, labels, weight=weight)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1))


def convolutional() -> Problem:
    """Return two convolutions and a dense layer, on digits, in batches."""
    data = load_digits()
    images, labels = np.float32(data.images[..., None] / 16), np.int32(data.target)
    first, second, dense = _random((3, 3, 1, 16), (3, 3, 16, 16), (64, 10))
    params = {"first": first, "second": second, "dense": dense, "bias": jnp.zeros(10)}

    def loss(params: Any, batch: Any) -> jax.Array:
        x, labels = batch
        dims = ("NHWC", "HWIO", "NHWC")
        for name in ("first", "second"):
            x = lax.conv_general_dilated(x, params[name], (2, 2), "SAME", dimension_numbers=dims)
            x = jnp.tanh(x)
        return _cross_entropy(x.reshape(len(x), -1) @ params["dense"] + params["bias"], labels)

    return Problem(loss, params, _minibatches(256, images, labels), CAREFUL)


def diabetes() -> Problem:
    """Return a network with a regulariser, on the diabetes data, full batch."""
    data, weight = load_diabetes(), 1e-3
    scaled = lambda a: np.float32((a - a.mean(0)) / a.std(0))
    batch = jnp.asarray(scaled(data.data)), jnp.asarray(scaled(data.target[:, None]))
    one, two = _random((10, 20), (20, 1))
    params = {"one": one, "b": jnp.zeros(20), "two": two}

    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        predict = lambda x: jnp.tanh(x @ params["one"] + params["b"]) @ params["two"]
        output = curvax.register_squared_error_loss(jax.vmap(predict)(x), y, weight=0.5)
        squares = sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
        return jnp.mean((output - y) ** 2) / 2 + weight / 2 * squares

    return Problem(loss, params, lambda: itertools.repeat(batch), {**ADAPTIVE, "l2_reg": weight})


def text(length: int = 20_000) -> tuple[np.ndarray, int]:
    """Return sentences as indices of characters, and the size of the alphabet."""
    random, words = np.random.default_rng(0), ""
    while len(words) < length:
        sentence = "{clause}"
        while "{" in sentence:
            name = sentence[sentence.index("{") + 1 : sentence.index("}")]
            choice = WORDS[name][random.integers(len(WORDS[name]))]
            sentence = sentence.replace(f"{{{name}}}", choice, 1)
        words += sentence
    alphabet = sorted(set(words))
    return np.array([alphabet.index(c) for c in words], np.int32), len(alphabet)


def _characters(model: Callable[[Any, Any], Any], params: Any, size: int, span: int) -> Problem:
    """Return the problem of predicting the next character from the previous ones."""
    tokens, _ = text()
    windows = np.lib.stride_tricks.sliding_window_view(tokens, span + 1)

    def loss(params: Any, batch: Any) -> jax.Array:
        (window,) = batch
        logits = model(params, window[:, :-1])
        labels = window[:, 1:].reshape(-1)
        return _cross_entropy(logits.reshape(len(labels), -1), labels, weight=1 / span)

    return Problem(loss, params, _minibatches(size, windows), CAREFUL)


def transformer(width: int = 32, depth: int = 2, span: int = 24) -> Problem:
    """Return attention and dense layers, by a scan over stacked weights."""
    _, count = text()
    shapes = [(depth, width, width)] * 4 + [(depth, width, 2 * width), (depth, 2 * width, width)]
    *layers, head, table, place = _random(*shapes, (width, count), (count, width), (span, width))
    names = ("q", "k", "v", "o", "up", "down")
    stack = dict(zip(names, layers, strict=True)) | {"scale": jnp.ones((depth, width))}
    params = {"stack": stack, "head": head, "table": table, "place": place}
    mask = jnp.tril(jnp.ones((span, span), bool))

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        normed = p["scale"] * x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
        query, keys, values = (normed @ p[name] for name in "qkv")
        scores = jnp.einsum("btd,bsd->bts", query, keys) / width**0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        x = x + jnp.einsum("bts,bsd->btd", weights, values) @ p["o"]
        return x + jnp.tanh(x @ p["up"]) @ p["down"], None

    def model(params: Any, tokens: jax.Array) -> jax.Array:
        x, _ = lax.scan(layer, params["table"][tokens] + params["place"], params["stack"])
        return x @ params["head"]

    return _characters(model, params, 32, span)


def lstm(width: int = 32, span: int = 24) -> Problem:
    """Return a recurrent network, by a scan over time."""
    _, count = text()
    x, h, head, table = _random(
        (width, 4 * width), (width, 4 * width), (width, count), (count, width)
    )
    params = {"x": x, "h": h, "b": jnp.zeros(4 * width), "head": head, "table": table}

    def model(params: Any, tokens: jax.Array) -> jax.Array:
        def step(carry: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            h, c = carry
            i, f, g, o = jnp.split(x @ params["x"] + h @ params["h"] + params["b"], 4, axis=-1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((len(tokens), width))
        _, h = lax.scan(step, (zeros, zeros), params["table"][tokens].swapaxes(0, 1))
        return h.swapaxes(0, 1) @ params["head"]

    return _characters(model, params, 32, span)


def poisson(width: int = 24) -> Problem:
    """Return two losses: `u_xx + u_yy = -2π² sin(πx) sin(πy)` in a square, and its boundary."""
    random = np.random.default_rng(1)
    inside = jnp.asarray(random.uniform(size=(400, 2)), jnp.float32)
    along, ends = random.uniform(size=400), random.integers(0, 2, 400)
    edges = np.where(np.arange(400)[:, None] % 2, np.c_[along, ends], np.c_[ends, along])
    one, two, three = _random((2, width), (width, width), (width, 1))
    params = {"one": one, "b": jnp.zeros(width), "two": two, "c": jnp.zeros(width), "out": three}

    def network(params: Any, point: jax.Array) -> jax.Array:
        hidden = jnp.tanh(point @ params["one"] + params["b"])
        return (jnp.tanh(hidden @ params["two"] + params["c"]) @ params["out"])[0]

    def loss(params: Any, batch: Any) -> jax.Array:
        inside, edges = batch
        u = lambda point: network(params, point)
        laplacian = jax.vmap(lambda point: jnp.trace(jax.hessian(u)(point)))(inside)
        source = 2 * jnp.pi**2 * jnp.prod(jnp.sin(jnp.pi * inside), axis=1)
        residual, at_edges = (laplacian + source)[:, None], jax.vmap(u)(edges)[:, None]
        zeros = jnp.zeros_like(residual)
        residual = curvax.register_squared_error_loss(residual, zeros, weight=0.5)
        at_edges = curvax.register_squared_error_loss(at_edges, zeros, weight=5.0)
        return jnp.mean(residual**2) / 2 + 5 * jnp.mean(at_edges**2)

    batch = inside, jnp.asarray(edges, jnp.float32)
    return Problem(loss, params, lambda: itertools.repeat(batch), ADAPTIVE)


PROBLEMS = {
    "convolutional": convolutional,
    "diabetes": diabetes,
    "transformer": transformer,
    "LSTM": lstm,
    "Poisson": poisson,
}


def with_kfac(problem: Problem, num_steps: int) -> list[float]:
    """Return the losses of K-FAC, one for each step."""
    options = {"l2_reg": 0.0, "num_burnin_steps": 0, **problem.options}
    optimizer = curvax.Optimizer(jax.value_and_grad(problem.loss), **options)
    params, batches = jax.tree.map(jnp.array, problem.params), problem.batches()
    state = optimizer.init(params, jax.random.key(0), next(problem.batches()))
    losses: list[float] = []
    note = lambda params, state, stats: losses.append(float(stats["loss"]))
    optimizer.fit(params, state, jax.random.key(1), batches, num_steps, note, progress=False)
    return losses


def with_adam(problem: Problem, num_steps: int, rate: float) -> list[float]:
    """Return the losses of Adam, one for each step."""
    transformation = optax.adam(rate)
    params, losses = problem.params, []
    state = transformation.init(params)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        value, gradient = jax.value_and_grad(problem.loss)(params, batch)
        updates, state = transformation.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    for _, batch in zip(range(num_steps), problem.batches(), strict=False):
        params, state, value = step(params, state, batch)
        losses.append(float(value))
    return losses


def main(num_steps: int = 200) -> None:
    last = lambda losses: float(np.mean(losses[-10:]))
    print(f"loss after {num_steps} steps, mean of the last ten\n")
    print(f"{'':16}{'at first':>10}{'K-FAC':>12}{'best Adam':>12}{'its rate':>10}{'seconds':>9}")
    for name, make in PROBLEMS.items():
        problem, begin = make(), time.perf_counter()
        kfac = with_kfac(problem, num_steps)
        adams = {rate: last(with_adam(problem, num_steps, rate)) for rate in RATES}
        rate = min(adams, key=lambda r: adams[r])
        seconds = time.perf_counter() - begin
        numbers = f"{kfac[0]:10.3g}{last(kfac):12.3g}{adams[rate]:12.3g}{rate:10g}{seconds:9.0f}"
        print(f"{name:16}{numbers}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
