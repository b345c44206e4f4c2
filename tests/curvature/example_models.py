"""Models that take their examples in all sorts of ways, and the curvature that each must have.

A family is a function of one example, `(positions, features)` to an output, and a way to run it
on all examples; or a model of a whole batch that merges examples with positions, writes the batch
size out, or lets examples interact. `verdict` says whether blocks that claim to be exact are, or
refuse; anything else fails.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

import curvax

FULL = {"dense": curvax.DenseFull, "scale_and_shift": curvax.ScaleAndShiftFull}
DIAGONAL = {"dense": curvax.DenseDiagonal, "scale_and_shift": curvax.ScaleAndShiftDiagonal}
T, D = 2, 3
"""Positions of an example, and features."""


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def batch(size: int, positions: int = T) -> jax.Array:
    return normal(size + 100 * positions, size, positions, D)


PARAMS = {
    "s": 1 + normal(0, D) / 3,
    "w": normal(1, D, D) / 2,
    "b": normal(2, D) / 3,
    "v": normal(3, D, 1) / 2,
}


def over(x: jax.Array, like: jax.Array) -> jax.Array:
    """The tests allow no promotion of ranks."""
    return jnp.broadcast_to(x, like.shape)


# Functions of one example.


def plain(p: Any, a: jax.Array) -> jax.Array:
    h = jnp.tanh(a * over(p["s"], a)) @ p["w"]
    return jnp.sum(jnp.tanh(h + over(p["b"], h)) @ p["v"], 0)


def one_position(p: Any, a: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.tanh(a[0] * p["s"]) @ p["w"] + p["b"]) @ p["v"]


def twice(p: Any, a: jax.Array) -> jax.Array:
    """Weights, scales and biases that are used at two places."""
    for _ in range(2):
        a = a * over(p["s"], a) @ p["w"]
        a = jnp.tanh(a + over(p["b"], a))
    return jnp.sum(a @ p["v"], 0)


def recurrent(p: Any, a: jax.Array) -> jax.Array:
    step = lambda h, x: (jnp.tanh(h @ p["w"] + x * p["s"] + p["b"]), None)
    return lax.scan(step, jnp.zeros((D,)), a)[0] @ p["v"]


def backwards(p: Any, a: jax.Array) -> jax.Array:
    step = lambda h, x: (jnp.tanh(h @ p["w"] + x * p["s"]) + p["b"], h @ p["v"])
    return jnp.sum(lax.scan(step, jnp.ones((D,)), a, reverse=True)[1], 0)


FUNCTIONS = [plain, one_position, twice, recurrent, backwards]

# Ways to run one on all examples: `(fun, examples, chunk size) -> outputs`.


def by_scan(f: Callable, x: jax.Array, c: int, **options: Any) -> jax.Array:
    del c
    return lax.scan(lambda _, a: (None, f(a)), None, x, **options)[1]


def in_chunks(f: Callable, x: jax.Array, c: int, reverse: bool = False) -> jax.Array:
    """A scan over chunks, each of them by `vmap`; as many as fit, and then the rest."""
    full = len(x) // c * c
    chunks = x[:full].reshape(full // c, c, *x.shape[1:])
    ys = lax.scan(lambda _, a: (None, jax.vmap(f)(a)), None, chunks, reverse=reverse)[1]
    ys = ys.reshape(full, *ys.shape[2:])
    return ys if full == len(x) else jnp.concatenate([ys, jax.vmap(f)(x[full:])])


def nested(f: Callable, x: jax.Array, c: int) -> jax.Array:
    """Loops over chunks of chunks, if they come out even."""
    if len(x) % c:
        return in_chunks(f, x, c)
    ys = lax.map(lambda a: lax.map(f, a), x.reshape(-1, c, *x.shape[1:]))
    return ys.reshape(len(x), *ys.shape[2:])


def strided(f: Callable, x: jax.Array, c: int) -> jax.Array:
    """Chunks of examples that do not follow one another, if they come out even."""
    if len(x) % c:
        return jax.vmap(f)(x)
    ys = lax.map(jax.vmap(f), jnp.swapaxes(x.reshape(c, -1, *x.shape[1:]), 0, 1))
    return jnp.swapaxes(ys, 0, 1).reshape(len(x), -1)


def chunks_of_chunks(f: Callable, x: jax.Array, c: int) -> jax.Array:
    if len(x) % c:
        return curvax.chunked_vmap(f, c)(x)
    ys = lax.map(curvax.chunked_vmap(f, 1), x.reshape(-1, c, *x.shape[1:]))
    return ys.reshape(len(x), *ys.shape[2:])


def one_by_one(f: Callable, x: jax.Array, c: int) -> jax.Array:
    del c
    return jnp.stack([f(a) for a in x])


MAPS: dict[str, Callable[[Callable, jax.Array, int], jax.Array]] = {
    "vmap": lambda f, x, c: jax.vmap(f)(x),
    "map": lambda f, x, c: lax.map(f, x),
    "map in chunks": lambda f, x, c: lax.map(f, x, batch_size=c),
    "scan": by_scan,
    "reversed scan": lambda f, x, c: by_scan(f, x, c, reverse=True),
    "scan in chunks": in_chunks,
    "reversed scan in chunks": lambda f, x, c: in_chunks(f, x, c, reverse=True),
    "nested": nested,
    "chunked_vmap": lambda f, x, c: curvax.chunked_vmap(f, c)(x),
    "chunked_vmap, checkpointed": lambda f, x, c: curvax.chunked_vmap(f, c, checkpoint=True)(x),
    "nested chunked_vmap": chunks_of_chunks,
    "map under checkpoint": lambda f, x, c: jax.checkpoint(lambda y: lax.map(f, y))(x),
    "one by one": one_by_one,
    "shuffled": lambda f, x, c: lax.map(f, x[::-1]),
    "strided": strided,
}


def of_examples(function: Callable, mapped: str, c: int) -> Callable[[Any, jax.Array], jax.Array]:
    """A model of a batch."""
    return lambda p, x: MAPS[mapped](lambda a: function(p, a), x, c)


# Models of a whole batch `(examples, positions, features)`.


def head(p: Any, h: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(h) @ p["v"], 1)


def tokens(p: Any, h: jax.Array) -> jax.Array:
    """A layer with all parameters but the last, on merged positions."""
    h = h * over(p["s"], h) @ p["w"]
    return jnp.tanh(h + over(p["b"], h))


def merged(p: Any, x: jax.Array) -> jax.Array:
    return head(p, tokens(p, x.reshape(-1, D)).reshape(x.shape))


def time_major(p: Any, x: jax.Array) -> jax.Array:
    b, t, _ = x.shape
    h = tokens(p, jnp.swapaxes(x, 0, 1).reshape(-1, D))
    return head(p, jnp.swapaxes(h.reshape(t, b, D), 0, 1))


def scrambled(p: Any, x: jax.Array) -> jax.Array:
    """Merged with time first and split as if examples were first."""
    return head(p, jnp.swapaxes(tokens(p, x), 0, 1).reshape(-1, D).reshape(x.shape))


def split_differently(p: Any, x: jax.Array) -> jax.Array:
    b, t, _ = x.shape
    h = tokens(p, x.reshape(b * t, D)).reshape(t, b, D)
    return jnp.sum(h @ p["v"], 0)


def split_again(p: Any, x: jax.Array) -> jax.Array:
    """Merged, split, and merged in another order, with the batch size written out."""
    b, t, _ = x.shape
    h = tokens(p, x.reshape(b * t, D)).reshape(b, t, D)
    h = tokens(p, jnp.swapaxes(h, 0, 1).reshape(t * b, D)).reshape(t, b, D)
    return jnp.sum(h @ p["v"], 0)


def time_major_data(p: Any, x: jax.Array) -> jax.Array:
    """Data whose second axis is that of examples."""
    step = lambda h, a: (jnp.tanh(h @ p["w"] + a * over(p["s"], a) + over(p["b"], a)), None)
    return lax.scan(step, jnp.zeros(x.shape[1:]), x)[0] @ p["v"]


def rows_of_positions(p: Any, x: jax.Array) -> jax.Array:
    """A loss with a row for each position, none of which depends on another."""
    return (tokens(p, x) @ p["v"]).reshape(-1, 1)


def ragged(p: Any, x: jax.Array) -> jax.Array:
    """Positions of different examples next to each other, as many of some as of others."""
    half = len(x) // 2
    rows = jnp.concatenate([x[:half].reshape(-1, D), x[half:, 0]])
    h = tokens(p, rows)
    h = jnp.concatenate([h[: half * x.shape[1] : x.shape[1]], h[half * x.shape[1] :]])
    return h @ p["v"]


def mapped_tokens(p: Any, x: jax.Array) -> jax.Array:
    """A loop over examples and positions."""
    h = lax.map(lambda a: tokens(p, a), x.reshape(-1, D))
    return head(p, h.reshape(x.shape))


def merged_rows(p: Any, x: jax.Array) -> jax.Array:
    """A loss with a row for each position."""
    h = tokens(p, x)
    h = h + over(jnp.sum(h, 1, keepdims=True), h)
    return (h @ p["v"]).reshape(-1, 1)


def with_size_written_out(size: int) -> Callable[[Any, jax.Array], jax.Array]:
    return lambda p, x: head(p, tokens(p, x)) + jnp.zeros((size, 1))


def centred(p: Any, x: jax.Array) -> jax.Array:
    h = tokens(p, x)
    return head(p, h - over(jnp.mean(h, 0, keepdims=True), h))


def centred_by_a_constant(p: Any, x: jax.Array) -> jax.Array:
    h = tokens(p, x)
    return head(p, h - jax.lax.stop_gradient(over(jnp.mean(h, 0, keepdims=True), h)))


def normalised(p: Any, x: jax.Array) -> jax.Array:
    h = x * over(p["s"], x) @ p["w"]
    h = (h - over(jnp.mean(h, (0, 1)), h)) / over(jnp.std(h, (0, 1)) + 1, h)
    return head(p, h + over(p["b"], h))


def rolled(p: Any, x: jax.Array) -> jax.Array:
    h = tokens(p, x)
    return head(p, h + 0.5 * jnp.roll(h, 1, axis=0))


def summed_up(p: Any, x: jax.Array) -> jax.Array:
    return head(p, jnp.cumsum(tokens(p, x), 0))


def in_pairs(p: Any, x: jax.Array) -> jax.Array:
    h = jnp.sum(tokens(p, x), 1)
    near = jax.nn.softmax(h @ h.T)
    return near @ h @ p["v"]


def handed_on(p: Any, x: jax.Array) -> jax.Array:
    """A loop over examples that carries something from one to the next."""
    step = lambda h, a: ((h := jnp.tanh(tokens(p, a) + 0.5 * h)), jnp.sum(h @ p["v"], 0))
    return lax.scan(step, jnp.zeros(x.shape[1:]), x)[1]


def reversed_between(p: Any, x: jax.Array) -> jax.Array:
    """The same weights before and after examples change their places."""
    return head(p, tokens(p, tokens(p, x)[::-1]))


def in_two_loops(p: Any, x: jax.Array) -> jax.Array:
    h = lax.map(lambda a: tokens(p, a), x)
    return head(p, tokens(p, h))


def shuffled_features(p: Any, x: jax.Array) -> jax.Array:
    """Nothing of this concerns examples."""
    h = tokens(p, jnp.flip(x, 2))
    h = jnp.sort(jnp.concatenate([h, jnp.ones_like(h)], 1), 1)[:, 1:]
    h = jnp.take_along_axis(h, jnp.argsort(h, 1), 1).reshape(len(x), -1, D)
    return head(p, jnp.cumsum(jnp.pad(h, ((0, 0), (1, 0), (0, 0))), 1))


def attention(p: Any, x: jax.Array) -> jax.Array:
    h = tokens(p, x)
    scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", h, h))
    return head(p, jnp.einsum("bts,bsd->btd", scores, h))


def normalised_data(p: Any, x: jax.Array) -> jax.Array:
    """Examples interact where no parameter is."""
    return head(p, tokens(p, x - over(jnp.mean(x, 0, keepdims=True), x)))


def time_first(p: Any, x: jax.Array) -> jax.Array:
    """A scan over time of all examples, with time as the leading axis."""
    step = lambda h, a: (jnp.tanh(tokens(p, a) + 0.5 * h), None)
    return lax.scan(step, jnp.zeros((len(x), D)), jnp.swapaxes(x, 0, 1))[0] @ p["v"]


# What blocks say of a model.


def loss_of(model: Callable) -> Callable[[Any, jax.Array], None]:
    def loss(p: Any, x: jax.Array) -> None:
        curvax.register_squared_error_loss(model(p, x), weight=0.5)

    return loss


def estimated(
    model: Callable, x: jax.Array, ctors: Any, mode: str = "ggn_exact"
) -> tuple[Any, Callable[[int], tuple[np.ndarray, np.ndarray]]]:
    """The estimator, and its matrix and the exact one as functions of a seed."""
    estimator = curvax.BlockDiagonalCurvature(loss_of(model), layer_tag_to_block_ctor=ctors)
    args = PARAMS, x
    state = estimator.init(jax.random.key(0), args, None, None)

    @jax.jit
    def both(args: Any, rng: jax.Array) -> tuple[jax.Array, jax.Array]:
        how = (0.0, 1.0, len(x), rng, args, None, mode)
        updated = estimator.update_curvature_matrix_estimate(state, *how)
        return estimator.to_dense_matrix(updated), exact(model, *args)

    return estimator, lambda seed: tuple(map(np.asarray, both(args, jax.random.key(seed))))


def exact(model: Callable, params: Any, x: jax.Array) -> jax.Array:
    """The Gauss-Newton matrix, from the Jacobian of the model of the whole batch."""
    flat, unflatten = ravel_pytree(params)
    rows = jax.jacrev(lambda flat: model(unflatten(flat), x).reshape(-1))(flat)
    return rows.T @ rows / len(x)


def in_blocks(estimator: Any, whole: np.ndarray) -> np.ndarray:
    """What of a matrix is in the blocks of an estimator."""
    leaves = jax.tree.leaves(PARAMS)
    block_of = {n: k for k, own in enumerate(estimator.indices_to_block_map) for n in own}
    numbers = np.concatenate([np.full(leaf.size, block_of[n]) for n, leaf in enumerate(leaves)])
    return np.where(numbers[:, None] == numbers[None], whole, 0)


def verdict(model: Callable, x: jax.Array, ctors: Any) -> str:
    """Whether blocks are "exact" (whatever the seed), or "refused"; else it fails."""
    try:
        estimator, matrices = estimated(model, x, ctors)
    except ValueError as error:
        if "examples" not in str(error):
            raise
        return "refused"
    rows = estimator.report().rows
    if any(row.block.startswith("Naive") for row in rows):
        return "refused"  # Generic parameters, as the registration report says.
    assert not any(row.remarks for row in rows)
    for seed in range(2):
        ours, oracle = matrices(seed)
        assert np.abs(oracle).max() > 1e-3
        expected = in_blocks(estimator, oracle) if ctors is FULL else np.diag(np.diag(oracle))
        error = np.abs(ours - expected).max() / np.abs(oracle).max()
        assert error < 1e-9, f"{error:.2g} off, and nobody says so"
    return "exact"
