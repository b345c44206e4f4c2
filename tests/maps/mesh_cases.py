"""Maps over the devices of a mesh, each with its naive equivalent on one device."""

import functools

import jax
import jax.numpy as jnp

import curvax
from curvax import AccumulationType, Accumulator

CONCAT, MEAN = AccumulationType.CONCAT, AccumulationType.MEAN
RUNNING_MEAN, SUM = AccumulationType.RUNNING_MEAN, AccumulationType.SUM
W = {"scale": jnp.linspace(-1.0, 1.0, 4), "shift": jnp.array(0.3)}
CLOSED_OVER = jnp.cos(jnp.arange(4.0))
NORM = Accumulator(
    init=lambda like: jnp.zeros(like.shape, like.dtype),
    update=lambda carry, value, index: carry + value,
    finalize=jnp.sqrt,
    aggregate=lambda values: jnp.sum(values**2, axis=0),
    uneven=True,
    combine=jnp.add,
)


def examples(length):
    return jnp.sin(jnp.arange(4.0 * length)).reshape(length, 4)


def example(w, x, kind="tanh"):
    """A function of parameters, one example and a string, which closes over an array."""
    return getattr(jnp, kind)(x * w["scale"] + CLOSED_OVER) * jnp.sum(jnp.sin(x)) + w["shift"]


def derivatives(fun):
    """The values of a function with its reverse and forward derivatives, by all arguments."""

    def loss(args):
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(fun(*args)))

    def compute(*args):
        tangents = jax.tree.map(jnp.cos, args)
        return fun(*args), jax.grad(loss)(args), jax.jvp(fun, args, tangents)[1]

    return jax.jit(compute)


REDUCTIONS = {
    SUM: lambda rows: rows.sum(axis=0),
    MEAN: lambda rows: rows.mean(axis=0),
    RUNNING_MEAN: lambda rows: rows.mean(axis=0),
    CONCAT: lambda rows: rows,
    NORM: lambda rows: jnp.sqrt(jnp.sum(rows**2, axis=0)),
}
NAMES = [f"out{i}" for i in range(len(REDUCTIONS))]


def rows_of(w, x):
    return jax.vmap(example, (None, 0))(w, x)


def chunked_vmap(mesh, size, checkpoint):
    """Along other axes than the first, with an output that all examples share."""
    fun = lambda w, x: (example(w, x), {"sum": jnp.sum(x), "same": w["shift"] * 2})
    axes = {"in_axes": (None, 1), "out_axes": (1, {"sum": 0, "same": None})}
    of_columns = lambda fun: lambda w, x: fun(w, x.T)
    mapped = curvax.chunked_vmap(fun, size, **axes, checkpoint=checkpoint, mesh=mesh)
    return of_columns(mapped), of_columns(jax.vmap(fun, **axes))


def micro_vmap(mesh, size, order):
    """With one output for each way of accumulating."""
    mapped = curvax.micro_vmap(
        lambda w, x: dict.fromkeys(NAMES, example(w, x)),
        (None, 0),
        microbatch_size=size,
        accumulator=dict(zip(NAMES, REDUCTIONS, strict=True)),
        order=order,
        mesh=mesh,
    )
    reductions = list(zip(NAMES, REDUCTIONS.values(), strict=True))
    naive = lambda w, x: {name: reduce(rows_of(w, x)) for name, reduce in reductions}
    return mapped, naive


def micro_grad(mesh, size):
    def loss(w, x):
        value = jnp.sum(example(w, x[0]) ** 2)
        return value, jnp.stack([value, x[0, 0]])

    mapped = curvax.micro_grad(
        loss,
        has_aux=True,
        microbatch_size=size,
        accumulator=(SUM, MEAN),
        transform_fn=lambda gradient: (gradient, jax.tree.map(jnp.sin, gradient)),
        metrics_fn=lambda gradient: jnp.sum(gradient["scale"] ** 2),
        mesh=mesh,
    )

    def naive(w, x):
        of_one = lambda x: jax.value_and_grad(loss, has_aux=True)(w, x[None])
        (values, aux), gradients = jax.vmap(of_one)(x)
        total = jax.tree.map(lambda g: g.sum(axis=0), gradients)
        mean = jax.tree.map(lambda g: jnp.sin(g).mean(axis=0), gradients)
        metrics = jnp.sum(gradients["scale"] ** 2, axis=1)
        return (total, mean), curvax.PerExample(values, metrics, aux)

    return mapped, naive


def microbatch(mesh, size, kind):
    def fun(w, x):
        rows = rows_of(w, x)
        return {"sum": rows.sum(axis=0), "mean": rows.mean(axis=0), "rows": rows}

    kinds = {"sum": SUM, "mean": kind, "rows": CONCAT}
    return curvax.microbatch(fun, 1, size, kinds, mesh=mesh), fun


def microbatch_norm(mesh, size):
    """With a user-supplied accumulator."""
    squares = lambda w, x: jnp.sum(rows_of(w, x) ** 2, axis=0)
    mapped = curvax.microbatch(squares, 1, size, NORM, mesh=mesh)
    return mapped, lambda w, x: jnp.sqrt(squares(w, x))


# Each makes of a mesh and a size a map of parameters and rows, and its naive equivalent.
MAPS = {
    "chunked_vmap": functools.partial(chunked_vmap, checkpoint=False),
    "chunked_vmap, checkpointed": functools.partial(chunked_vmap, checkpoint=True),
    "micro_vmap, strided": functools.partial(micro_vmap, order="strided"),
    "micro_vmap, contiguous": functools.partial(micro_vmap, order="contiguous"),
    "micro_grad": micro_grad,
}
BATCH_MAPS = {
    "microbatch, mean": functools.partial(microbatch, kind=MEAN),
    "microbatch, running mean": functools.partial(microbatch, kind=RUNNING_MEAN),
    "microbatch, norm": microbatch_norm,
}
