"""The cost of detecting the layers of a model, and of computing their statistics.

The claims: tracing and tagging a transformer of 48 layers that is written as a Python loop takes at
most three seconds more than `jax.make_jaxpr` of its gradient; and on an LSTM of 500 steps,
statistics need at most 10 % more temporary memory than the gradient. The time of both together is
shown next to that of the gradient and of statistics from all inputs and cotangents at once.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from _measure import Clock, Report, begin
from jax import lax

import curvax
from curvax import layer_statistics

PACKAGES = ["curvax", "jax", "jaxlib"]


def transformer(layers: int, width: int = 64, heads: int = 4) -> tuple[Callable[..., Any], Any]:
    """Return the loss of a language model, and its arguments."""
    shapes = {"query": (width, heads, width // heads), "out": (heads, width // heads, width)}
    shapes |= {"key": shapes["query"], "value": shapes["query"]}
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    shapes |= {"up_bias": (4 * width,), "down_bias": (width,)}
    shapes |= {f"norm_{k}_{what}": (width,) for k in range(2) for what in ("scale", "shift")}
    key = jax.random.key(0)
    make = lambda shape: 0.1 * jax.random.normal(key, shape)
    blocks = [{name: make(shape) for name, shape in shapes.items()} for _ in range(layers)]
    params = {"table": make((128, width)), "blocks": blocks}

    def normalised(x: Any, scale: Any, shift: Any) -> Any:
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + shift

    def block(p: Any, x: Any) -> Any:
        y = normalised(x, p["norm_0_scale"], p["norm_0_shift"])
        q, k, v = (jnp.einsum("btd,dhf->bthf", y, p[name]) for name in ("query", "key", "value"))
        weights = jax.nn.softmax(jnp.einsum("bthf,bshf->bhts", q, k))
        y = jnp.einsum("bhts,bshf->bthf", weights, v)
        x = x + jnp.einsum("bthf,hfd->btd", y, p["out"])
        y = normalised(x, p["norm_1_scale"], p["norm_1_shift"])
        y = jax.nn.gelu(y @ p["up"] + p["up_bias"])
        return x + y @ p["down"] + p["down_bias"]

    def loss(params: Any, tokens: Any) -> Any:
        x = params["table"][tokens]
        for p in params["blocks"]:
            x = block(p, x)
        logits = (x @ params["table"].T).reshape(-1, 128)
        targets = jnp.roll(tokens, -1, axis=1).reshape(-1)
        curvax.register_softmax_cross_entropy_loss(logits, targets)
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(targets)), targets])

    return loss, (params, jnp.arange(64).reshape(4, 16))


def tracing(report: Report) -> None:
    """Measure the time to detect the layers, beyond that to trace the gradient."""
    layers = 6 if report.quick else 48
    report.say(f"## Finding the layers of a transformer of {layers} layers\n")
    loss, args = transformer(layers)
    found = curvax.explain_registration(loss, args)

    def process() -> None:
        jax.clear_caches()
        curvax.ProcessedJaxpr.make_from_func(loss, args)

    def trace() -> None:
        jax.clear_caches()
        jax.make_jaxpr(jax.grad(loss))(*args)

    seconds: dict[str, float] = {}
    for _ in range(2 if report.quick else 5):
        for name, call in (("trace and tag", process), ("make_jaxpr of the gradient", trace)):
            begin = time.perf_counter()
            call()
            seconds[name] = min(seconds.get(name, float("inf")), time.perf_counter() - begin)
    report.table(["", "time"], [[name, f"{each:.2f} s"] for name, each in seconds.items()])
    beyond = seconds["trace and tag"] - seconds["make_jaxpr of the gradient"]
    report.claim(f"{found.coverage:.2%} of the parameters in layers (100 %)", found.coverage == 1)
    report.claim_time(f"{beyond:.2f} s beyond make_jaxpr of the gradient (at most 3)", beyond <= 3)
    report.say()


def lstm(width: int) -> tuple[Callable[..., Any], Any]:
    """Return the loss of an LSTM over 500 steps, and its arguments."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "input": 0.1 * jax.random.normal(keys[0], (32, 4 * width)),
        "state": 0.1 * jax.random.normal(keys[1], (width, 4 * width)),
        "out": 0.1 * jax.random.normal(keys[2], (width, 10)),
    }

    def loss(params: Any, x: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            h, c = state
            i, f, o, g = jnp.split(x @ params["input"] + h @ params["state"], 4, axis=1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), None

        zero = jnp.zeros((x.shape[1], width))
        (h, _), _ = lax.scan(step, (zero, zero), x)
        y = h @ params["out"]
        curvax.register_squared_error_loss(y)
        return jnp.sum(y**2) / 2

    return loss, (params, jax.random.normal(keys[3], (500, 32, 32)))


FACTORS = {"inputs": lambda x, _: x[0].T @ x[0], "outputs": lambda _, g: g[0].T @ g[0]}


def statistics(report: Report) -> None:
    """Measure statistics in the backward pass, and from the results of `layer_tags_vjp`."""
    width = 16 if report.quick else 128
    report.say(f"## Kronecker factors of an LSTM, {width} wide, 500 steps\n")
    loss, args = lstm(width)

    def ours(*args: Any) -> Any:
        losses, pull_back = layer_statistics(loss, lambda layer, place: FACTORS)(args)
        return pull_back([losses[0].parameter_dependants])

    def at_once(*args: Any) -> Any:
        losses, vjp = curvax.layer_tags_vjp(loss)(args)
        layers = vjp([losses[0].parameter_dependants])
        rows = lambda x: x.reshape(-1, x.shape[-1])
        moment = lambda x: rows(x).T @ rows(x)
        names = ("inputs", "outputs_tangents")
        return [
            (moment(d[names[0]][0]), moment(d[names[1]][0]), d["params_tangents"]) for d in layers
        ]

    programs = {"gradient": jax.grad(loss), "with statistics": ours, "all at once": at_once}
    compiled = {name: jax.jit(f).lower(*args).compile() for name, f in programs.items()}
    memory = {name: c.memory_analysis().temp_size_in_bytes for name, c in compiled.items()}
    clock = Clock({name: lambda c=c: c(*args) for name, c in compiled.items()}, set(compiled))
    clock.run(2 if report.quick else 20)
    rows = [
        [name, f"{1e3 * clock.best[name]:.1f} ms", f"{memory[name] / 1e6:.1f} MB"]
        for name in programs
    ]
    report.table(["", "time", "temporaries"], rows)
    ratio = memory["with statistics"] / memory["gradient"]
    report.claim(f"{ratio:.2f} of the temporaries of the gradient (at most 1.10)", ratio <= 1.1)
    ratio = clock.best["with statistics"] / clock.best["all at once"]
    report.claim_time(f"{ratio:.2f} of the time of all at once (at most 1.05)", ratio <= 1.05)
    report.say()


def main() -> None:
    report, only = begin("Layers", __file__, __doc__, PACKAGES)
    for part in (tracing, statistics):
        if only in part.__name__:
            part(report)
    report.finish()


if __name__ == "__main__":
    main()
