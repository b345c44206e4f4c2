"""curvax's maps and loops next to `jax.vmap`, `jax.lax.map`, optax.microbatching and powerpax.

The claims: no program of ours takes longer than the best of its peers, beyond 5 % and the noise of
the machine, and none needs more temporaries than the leanest, beyond one chunk. This holds whether
or not the chunk size divides the length. `jax.vmap` and the plain `jax.lax.scan` are shown
for reference: they may use all the memory there is.

    python benchmarks/maps_and_loops.py [--quick] [--write] [--only words]
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import powerpax
from _measure import (
    Candidate,
    Comparison,
    Report,
    begin,
    import_seconds,
)
from jax import lax
from optax import microbatching

import curvax

SECONDS_PER_COMPARISON = 2.5
PACKAGES = ("jax", "jaxlib", "curvax", "optax", "powerpax")
FLOAT = 4  # bytes


@dataclass(frozen=True)
class Sizes:
    """The sizes of all problems."""

    examples: int = 16384
    features: int = 1024
    chunk: int = 512
    uneven_chunk: int = 500
    hidden: int = 256
    network_examples: int = 8192
    clip_chunk: int = 32
    uneven_clip_chunk: int = 25
    grid: int = 128
    steps: int = 2000
    signal: int = 8192
    tiny_steps: int = 100_000


QUICK = Sizes(
    examples=512,
    features=128,
    chunk=32,
    uneven_chunk=30,
    hidden=32,
    network_examples=512,
    clip_chunk=16,
    uneven_clip_chunk=13,
    grid=16,
    steps=400,
    signal=128,
    tiny_steps=2000,
)


def ours(name: str, fun: Callable[..., Any]) -> Candidate:
    return Candidate(f"**curvax.{name}**", fun, "ours")


def reference(name: str, fun: Callable[..., Any]) -> Candidate:
    return Candidate(name, fun, "reference")


# Maps: f(weights, example) over many examples.


def elementwise(weights: jax.Array, x: jax.Array) -> jax.Array:
    return weights * x * (1 + x)


def reduction(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(weights * x))


def network(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    first, second, third = weights
    return jnp.tanh(jnp.tanh(x @ first) @ second) @ third


def network_weights(inputs: int, hidden: int, outputs: int = 16) -> list[jax.Array]:
    shapes = [(inputs, hidden), (hidden, hidden), (hidden, outputs)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    pairs = zip(keys, shapes, strict=True)
    return [jax.random.normal(key, shape) / shape[0] ** 0.5 for key, shape in pairs]


def maps_of(f: Callable[..., Any], chunk: int) -> list[Candidate]:
    """Return all implementations of a map of `f(weights, x)` over x."""
    closed = lambda w: partial(f, w)
    return [
        reference("jax.vmap", jax.vmap(f, (None, 0))),
        Candidate("lax.map", lambda w, x: lax.map(closed(w), x, batch_size=chunk)),
        Candidate(
            "optax.micro_vmap",
            lambda w, x: microbatching.micro_vmap(closed(w), microbatch_size=chunk)(x),
        ),
        Candidate("powerpax.chunked_vmap", lambda w, x: powerpax.chunked_vmap(closed(w), chunk)(x)),
        ours("chunked_vmap", curvax.chunked_vmap(f, chunk, in_axes=(None, 0))),
        # Contiguous, as in the peers; the default order is for sharded batches.
        ours(
            "micro_vmap",
            curvax.micro_vmap(f, (None, 0), microbatch_size=chunk, order="contiguous"),
        ),
    ]


def rematerialised_maps_of(f: Callable[..., Any], chunk: int) -> list[Candidate]:
    """Equal to `maps_of`, except that a gradient rematerialises each chunk."""
    candidates = [c for c in maps_of(jax.checkpoint(f), chunk) if c.role != "ours"]
    mapped = curvax.chunked_vmap(f, chunk, in_axes=(None, 0), checkpoint=True)
    return [*candidates, ours("chunked_vmap", mapped)]


def gradient_of(candidate: Candidate, argnums: int | tuple[int, ...]) -> Candidate:
    """Return the gradient of the sum of squares of all outputs of a mapped function."""
    energy = lambda w, x: jnp.sum(jnp.square(candidate.fun(w, x)))
    return Candidate(candidate.name, jax.grad(energy, argnums), candidate.role)


def maps(sizes: Sizes) -> Iterator[Comparison]:
    key = jax.random.key(1)
    wide = jax.random.normal(key, (sizes.examples, sizes.features))
    narrow = jax.random.normal(key, (sizes.examples, 64))
    ones = jnp.ones(sizes.features)
    weights = network_weights(64, sizes.hidden)
    # The last entry is the number of elements per example: inputs, intermediates and outputs.
    programs = [
        ("Elementwise, as much out as in", elementwise, ones, wide, 3 * sizes.features),
        ("Large in, one number out", reduction, ones, wide, 2 * sizes.features + 1),
        ("Small network", network, weights, narrow, 64 + 2 * sizes.hidden + 16),
    ]
    by_weights = partial(gradient_of, argnums=0)
    by_both = partial(gradient_of, argnums=(0, 1))
    modes = [
        ("forward", maps_of, lambda c: c),
        ("gradient by weights", maps_of, by_weights),
        ("gradient by weights and inputs", maps_of, by_both),
        ("gradient by both, rematerialised", rematerialised_maps_of, by_both),
    ]
    for name, f, weights, x, numbers in programs:
        # Elementwise functions have no intermediates that are worth rematerialising.
        for mode, candidates, transform in modes[:3] if f is elementwise else modes:
            for chunk in (sizes.chunk, sizes.uneven_chunk):
                yield Comparison(
                    f"{name}, {mode}: {len(x)} in chunks of {chunk}",
                    [transform(c) for c in candidates(f, chunk)],
                    (weights, x),
                    baseline="lax.map",
                    chunk_bytes=FLOAT * chunk * numbers,
                )


# Accumulated gradients: one sum over all examples, microbatch by microbatch.


def loss(weights: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(network(weights, x) - y))


def clip(gradient: Any) -> Any:
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradient)))
    return jax.tree.map(lambda g: g / jnp.maximum(1.0, norm), gradient)


def clipped_gradients(weights: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    """Return the sum of clipped gradients over a batch, and per-example losses."""

    def one(x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
        value, gradient = jax.value_and_grad(loss)(weights, x, y)
        return value, clip(gradient)

    values, gradients = jax.vmap(one)(x, y)
    return jax.tree.map(partial(jnp.sum, axis=0), gradients), values


def summed_by_scan(fun: Callable[..., Any], chunk: int) -> Callable[..., Any]:
    """Return `fun(weights, x, y)` summed over microbatches, by a hand-written loop."""

    def run(weights: Any, x: jax.Array, y: jax.Array) -> Any:
        add = partial(jax.tree.map, jnp.add)
        even = len(x) // chunk * chunk
        cut = lambda a: a[:even].reshape(-1, chunk, *a.shape[1:])
        init = jax.tree.map(jnp.zeros_like, jax.eval_shape(fun, weights, x[:1], y[:1]))
        step = lambda total, batch: (add(total, fun(weights, *batch)), None)
        total, _ = lax.scan(step, init, (cut(x), cut(y)))
        return total if even == len(x) else add(total, fun(weights, x[even:], y[even:]))

    return run


def clipped_by_scan(chunk: int) -> Callable[..., Any]:
    def run(weights: Any, x: jax.Array, y: jax.Array) -> Any:
        add = partial(jax.tree.map, jnp.add)
        even = len(x) // chunk * chunk
        cut = lambda a: a[:even].reshape(-1, chunk, *a.shape[1:])

        def step(total: Any, batch: Any) -> tuple[Any, jax.Array]:
            gradient, values = clipped_gradients(weights, *batch)
            return add(total, gradient), values

        init = jax.tree.map(jnp.zeros_like, weights)
        total, values = lax.scan(step, init, (cut(x), cut(y)))
        values = values.reshape(-1)
        if even < len(x):
            rest, last = clipped_gradients(weights, x[even:], y[even:])
            total, values = add(total, rest), jnp.concatenate([values, last])
        return total, values

    return run


def clipped_by(micro_grad: Callable[..., Any], chunk: int) -> Callable[..., Any]:
    """Equal to `clipped_gradients`, by a library's `micro_grad`."""
    gradients = micro_grad(
        loss,
        batch_argnums=(1, 2),
        keep_batch_dim=False,
        microbatch_size=chunk,
        transform_fn=clip,
    )

    def run(weights: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        gradient, aux = gradients(weights, x, y)
        return gradient, aux.values

    return run


def accumulated_gradients(sizes: Sizes) -> Iterator[Comparison]:
    weights = network_weights(64, sizes.hidden)
    x = jax.random.normal(jax.random.key(2), (sizes.network_examples, 64))
    y = jax.random.normal(jax.random.key(3), (sizes.network_examples, 16))
    gradient = jax.grad(loss)
    for chunk in (sizes.chunk, sizes.uneven_chunk):
        yield Comparison(
            f"Sum of gradients: {len(x)} in microbatches of {chunk}",
            [
                reference("jax.grad, all at once", gradient),
                Candidate("lax.scan by hand", summed_by_scan(gradient, chunk)),
                Candidate("optax.microbatch", microbatching.microbatch(gradient, (1, 2), chunk)),
                ours("microbatch", curvax.microbatch(gradient, (1, 2), chunk)),
            ],
            (weights, x, y),
            baseline="lax.scan by hand",
            chunk_bytes=FLOAT * chunk * (64 + 2 * sizes.hidden + 2 * 16),
        )
    few = (network_weights(64, sizes.hidden // 2), x[: len(x) // 8], y[: len(x) // 8])
    gradient_size = sum(w.size for w in few[0])
    # XLA's time for such a network depends irregularly on the batch size: 31 may take less than
    # 30. With these sizes every program has chunks of the same size, except for the last.
    for chunk in (sizes.clip_chunk, sizes.uneven_clip_chunk):
        yield Comparison(
            f"Clipped gradients of examples: {len(few[1])} in microbatches of {chunk}",
            [
                reference("jax.vmap, all at once", clipped_gradients),
                Candidate("lax.scan by hand", clipped_by_scan(chunk)),
                Candidate("optax.micro_grad", clipped_by(microbatching.micro_grad, chunk)),
                ours("micro_grad", clipped_by(curvax.micro_grad, chunk)),
            ],
            few,
            baseline="lax.scan by hand",
            chunk_bytes=FLOAT * chunk * (64 + sizes.hidden + 2 * 16 + gradient_size),
        )


# Loops.


def diffuse(field: jax.Array, source: Any) -> jax.Array:
    """A step of the heat equation with a reaction term, which is memory-bound."""
    neighbours = sum(jnp.roll(field, shift, axis) for shift in (-1, 1) for axis in (0, 1))
    field = field + 0.2 * (neighbours - 4 * field) + 0.01 * field * (1 - field)
    return field if source is None else field + source


def heat(field: jax.Array, source: Any) -> tuple[jax.Array, jax.Array]:
    field = diffuse(field, source)
    return field, field


def heat_and_spectrum(field: jax.Array, source: Any) -> tuple[jax.Array, jax.Array]:
    """Equal to `heat`, except that the output costs much more than the step."""
    field = diffuse(field, source)
    return field, jnp.tanh(field @ field) @ field


def filtered(state: jax.Array, signal: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A recurrence whose input in each step is as large as its state."""
    state = 0.9 * state + 0.1 * signal * (1 + 0.1 * state)
    return state, state


def lorenz(state: jax.Array, _: Any) -> tuple[jax.Array, jax.Array]:
    """A step so small that the overhead of the loop dominates."""
    x, y, z = state
    change = jnp.stack([10 * (y - x), x * (8 - z) - y, x * y - 8 / 3 * z])
    state = state + 0.001 * change
    return state, state


def scan_then_slice(
    f: Any, init: Any, xs: Any, length: int, start: int | None = None, step: int | None = None
) -> Any:
    carry, ys = lax.scan(f, init, xs, length)
    return carry, ys[start::step]


def sliced(sizes: Sizes) -> Iterator[Comparison]:
    key = jax.random.key(4)
    field = jax.random.uniform(key, (sizes.grid, sizes.grid))
    state = jnp.ones(sizes.signal)
    signal = jax.random.normal(key, (sizes.steps, sizes.signal))
    point = jnp.array([1.0, 2.0, 3.0])
    every, offset = {"step": 100}, {"start": 1, "step": 100}
    plain, powers = "lax.scan, then slice", "powerpax.sliced_scan"
    cases = [
        ("heat equation", heat, field, None, sizes.steps, every),
        ("heat equation, uneven", heat, field, None, sizes.steps + 50, every),
        ("expensive outputs", heat_and_spectrum, field, None, sizes.steps // 2, every),
        ("expensive outputs, uneven", heat_and_spectrum, field, None, sizes.steps // 2 - 1, every),
        ("filtered signal", filtered, state, signal, sizes.steps, every),
        ("filtered signal, from the second on", filtered, state, signal, sizes.steps, offset),
        ("Lorenz system", lorenz, point, None, sizes.tiny_steps, every),
    ]
    for name, f, init, xs, length, bounds in cases:
        options = {"length": length, **bounds}
        programs = [
            reference(plain, partial(scan_then_slice, f, **options)),
            Candidate(powers, partial(powerpax.sliced_scan, f, **options)),
            ours("sliced_scan", partial(curvax.sliced_scan, f, **options)),
        ]
        title = f"Every 100th output, {name}: {length} steps"
        base = plain if bounds is offset else powers
        row = FLOAT * (init.size + (0 if xs is None else xs[0].size))
        yield Comparison(title, programs, (init, xs), base, row)
        if f in (heat, filtered) and bounds is every:
            gradients = [scan_gradient(c) for c in programs]
            yield Comparison(f"{title}, gradient", gradients, (init, xs), base, row)


def scan_gradient(candidate: Candidate) -> Candidate:
    """Return the gradient of the sum of squares of the last carry and all outputs."""

    def energy(init: Any, xs: Any) -> jax.Array:
        return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(candidate.fun(init, xs)))

    # Without xs the gradient is with respect to the initial state only.
    gradient = lambda init, xs: jax.grad(energy, 0 if xs is None else (0, 1))(init, xs)
    return Candidate(candidate.name, gradient, candidate.role)


def only_carry(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda carry, x: (f(carry, x)[0], None)


def checkpointed(sizes: Sizes) -> Iterator[Comparison]:
    key = jax.random.key(5)
    field = jax.random.uniform(key, (sizes.grid, sizes.grid))
    state = jnp.ones(sizes.signal)
    signal = jax.random.normal(key, (sizes.steps, sizes.signal))
    point = jnp.array([1.0, 2.0, 3.0])
    tiny = sizes.tiny_steps // 10
    even, uneven = sizes.steps // 2, sizes.steps // 2 - 7
    cases = [
        ("heat equation", only_carry(heat), field, None, even, 25),
        ("heat equation, uneven", only_carry(heat), field, None, uneven, 25),
        ("heat equation, all outputs", heat, field, None, even, 25),
        ("heat equation, all outputs, uneven", heat, field, None, uneven, 25),
        ("filtered signal", only_carry(filtered), state, signal, sizes.steps, 50),
        ("filtered signal, uneven", only_carry(filtered), state, signal, sizes.steps, 45),
        ("filtered signal, all outputs", filtered, state, signal, sizes.steps, 50),
        ("Lorenz system", only_carry(lorenz), point, None, tiny, 100),
    ]
    for name, f, init, xs, length, chunk in cases:
        options = {"length": length, "chunk_size": chunk}
        plain = partial(lax.scan, f, length=length)
        theirs = partial(powerpax.checkpoint_chunked_scan, f, **options)
        mine = partial(curvax.checkpoint_chunked_scan, f, **options)
        programs = [
            reference("lax.scan", plain),
            Candidate("powerpax.checkpoint_chunked_scan", theirs),
            ours("checkpoint_chunked_scan", mine),
        ]
        yield Comparison(
            f"Gradient through chunks, {name}: {length} steps in chunks of {chunk}",
            [scan_gradient(c) for c in programs],
            (init, xs),
            baseline="powerpax.checkpoint_chunked_scan",
            chunk_bytes=FLOAT * chunk * (init.size + (0 if xs is None else xs[0].size)),
        )


def imports(report: Report, rounds: int) -> None:
    report.say("## Import\n")
    alone, both = "import jax", "import jax, curvax; curvax.chunked_vmap; curvax.hessian"
    best = import_seconds((alone, both), rounds)
    report.table(["", "seconds"], [[name, f"{best[name]:.3f}"] for name in (alone, both)])
    added = best[both] - best[alone]
    report.claim_time(
        f"curvax, its maps and Hessians loaded, adds {added:.3f} s to import jax (allowed 0.3)",
        added <= 0.3,
    )
    report.say()


def main() -> None:
    report, only = begin("Maps and loops", __file__, __doc__, PACKAGES)
    sizes = QUICK if report.quick else Sizes()
    if only in "import":
        imports(report, rounds=2 if report.quick else 10)
    for group in (maps, accumulated_gradients, sliced, checkpointed):
        for comparison in group(sizes):
            if only in comparison.title:
                comparison.run(report, 0.1 if report.quick else SECONDS_PER_COMPARISON)
    report.finish()


if __name__ == "__main__":
    main()
