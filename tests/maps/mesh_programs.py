"""The numbers of maps on a mesh, compared with one device. Run by `test_mesh.py` on eight.

The first argument names the checks to run; those after it are cases, for some of them.
"""

import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

import curvax
from curvax import AccumulationType, Accumulator

jax.config.update("jax_enable_x64", True)

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


def mesh_of(count, kind=AxisType.Auto):
    return Mesh(np.array(jax.devices()[:count]), ("data",), axis_types=(kind,))


def example(w, x, kind="tanh"):
    """Of parameters, one example and something that is no array; it closes over an array, too."""
    return getattr(jnp, kind)(x * w["scale"] + CLOSED_OVER) * jnp.sum(jnp.sin(x)) + w["shift"]


def same(actual, expected, name=""):
    assert jax.tree.structure(actual) == jax.tree.structure(expected), name
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert got.dtype == want.dtype, name
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12, err_msg=name)


def derivatives(fun):
    """The values of a function with its reverse and forward derivatives, by all arguments."""

    def loss(args):
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(fun(*args)))

    def compute(*args):
        tangents = jax.tree.map(jnp.cos, args)
        return fun(*args), jax.grad(loss)(args), jax.jvp(fun, args, tangents)[1]

    return jax.jit(compute)


def accumulated(map_of_kinds):
    """One output for each way of accumulating, in one program, and what it is to equal."""
    kinds = {
        SUM: lambda rows: rows.sum(axis=0),
        MEAN: lambda rows: rows.mean(axis=0),
        RUNNING_MEAN: lambda rows: rows.mean(axis=0),
        CONCAT: lambda rows: rows,
        NORM: lambda rows: jnp.sqrt(jnp.sum(rows**2, axis=0)),
    }
    names = [f"out{i}" for i in range(len(kinds))]
    mapped = map_of_kinds(dict(zip(names, kinds, strict=True)))
    return mapped, lambda rows: {
        name: kind(rows) for name, kind in zip(names, kinds.values(), strict=True)
    }


def each_chunked_vmap(mesh, size):
    """Along other axes, with an output that is the same for all examples, in chunks and again."""
    fun = lambda w, x: (example(w, x), {"sum": jnp.sum(x), "same": w["shift"] * 2})
    axes = {"in_axes": (None, 1), "out_axes": (1, {"sum": 0, "same": None})}
    naive = jax.vmap(fun, **axes)
    for checkpoint in (False, True):
        mapped = curvax.chunked_vmap(fun, size, **axes, checkpoint=checkpoint, mesh=mesh)
        yield f"chunked_vmap, checkpoint={checkpoint}", mapped, naive, lambda x: x.T


def each_micro_vmap(mesh, size):
    for order in ("strided", "contiguous"):
        mapped, reduced = accumulated(
            lambda kinds, order=order: curvax.micro_vmap(
                lambda w, x: dict.fromkeys(kinds, example(w, x)),
                (None, 0),
                microbatch_size=size,
                accumulator=kinds,
                order=order,
                mesh=mesh,
            )
        )
        naive = lambda w, x, reduced=reduced: reduced(jax.vmap(example, (None, 0))(w, x))
        yield f"micro_vmap, {order}", mapped, naive, lambda x: x


def each_micro_grad(mesh, size):
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

    yield "micro_grad", mapped, naive, lambda x: x


def each_microbatch(mesh, size):
    def fun(w, x):
        rows = jax.vmap(example, (None, 0))(w, x)
        return {"sum": rows.sum(axis=0), "mean": rows.mean(axis=0), "rows": rows}

    for kind in (MEAN, RUNNING_MEAN):
        kinds = {"sum": SUM, "mean": kind, "rows": CONCAT}
        mapped = curvax.microbatch(fun, 1, size, kinds, mesh=mesh)
        yield f"microbatch, {kind.name}", mapped, fun, lambda x: x
    squares = lambda w, x: jnp.sum(fun(w, x)["rows"] ** 2, axis=0)
    norm = curvax.microbatch(squares, 1, size, NORM, mesh=mesh)
    yield "microbatch, norm", norm, lambda w, x: jnp.sqrt(squares(w, x)), lambda x: x


MAPS = {
    "chunked_vmap": each_chunked_vmap,
    "micro_vmap": each_micro_vmap,
    "micro_grad": each_micro_grad,
    "microbatch": each_microbatch,
}


def check_matrix(*cases):
    """A case is a map, a number of devices, of examples, and a size; or a choice of each."""
    count = 0
    for case in cases:
        choices = [choice.split(",") for choice in case.split(":")]
        for name, devices, length, size in itertools.product(*choices):
            if name == "microbatch" and int(length) % int(devices):
                continue
            x = examples(int(length))
            size = None if size == "all" else int(size)
            for label, mapped, naive, arranged in MAPS[name](mesh_of(int(devices)), size):
                where = f"{label}: {length} examples on {devices} devices in chunks of {size}"
                args = W, arranged(x)
                same(derivatives(mapped)(*args), derivatives(naive)(*args), where)
                count += 1
    return count


def check_exactness():
    """Nothing is computed from an example that is not there, whatever its derivative."""
    root = lambda w, x: jnp.sqrt(w - x)
    x = jnp.arange(9.0)
    gradient = lambda fun: jax.jit(jax.grad(lambda w, x: jnp.sum(fun(w, x)), (0, 1)))
    expected = gradient(jax.vmap(root, (None, 0)))
    for devices in (2, 8):
        mapped = curvax.chunked_vmap(root, 2, in_axes=(None, 0), mesh=mesh_of(devices))
        found = gradient(mapped)
        # The example whose derivative is infinite is in every place in turn.
        for w in (8.0, 7.0, 5.0, 4.0, 2.0):
            args = jnp.array(w), jnp.minimum(x, w)
            assert jnp.isinf(expected(*args)[0])
            same(found(*args), expected(*args))

    seen = []

    def noted(x):
        jax.debug.callback(lambda x: seen.append(int(x)), x)
        return x

    jax.block_until_ready(curvax.chunked_vmap(noted, 2, mesh=mesh_of(4))(jnp.arange(11)))
    jax.effects_barrier()
    assert sorted(seen) == list(range(11))

    traced = []

    def counted(x):
        traced.append(x)
        return jnp.sin(x)

    for length, size in ((8, None), (8, 3), (11, 2), (3, None)):
        traced.clear()
        mapped = curvax.chunked_vmap(counted, size, mesh=mesh_of(4))
        jax.jit(jax.grad(lambda x, mapped=mapped: jnp.sum(mapped(x)))).lower(jnp.ones(length))
        assert len(traced) == 1, (length, size, len(traced))

    # Which examples a function of a batch sees together: successive ones, on each device.
    spread = lambda x: jnp.std(x, axis=0)
    for order in ("strided", "contiguous"):
        micro = functools.partial(curvax.microbatch, spread, 0, 2, order=order)
        shares = jnp.split(examples(12), 3)
        same(jax.jit(micro(mesh=mesh_of(3)))(examples(12)), sum(map(micro(), shares)))
    return 5


def check_dtypes():
    """Keys, integers, half precision, complex numbers; on three devices of which one has more."""
    keys = jax.random.split(jax.random.key(0), 7)
    draw = curvax.chunked_vmap(lambda key: (key, jax.random.normal(key)), 2, mesh=mesh_of(3))
    drawn, numbers = draw(keys)
    same(jax.random.key_data(drawn), jax.random.key_data(keys))
    same(numbers, jax.vmap(jax.random.normal)(keys))
    outputs = lambda x: (x.astype(jnp.int32), (x > 0.5), x.astype(jnp.bfloat16), jnp.exp(1j * x))
    x = jnp.arange(600.0)
    kinds = (SUM, SUM, MEAN, RUNNING_MEAN)
    for length in (600, 599):
        micro = functools.partial(curvax.micro_vmap, outputs, microbatch_size=7, accumulator=kinds)
        same(jax.jit(micro(mesh=mesh_of(3)))(x[:length]), jax.jit(micro())(x[:length]))
    empty = curvax.micro_vmap(outputs, accumulator=(SUM, CONCAT, MEAN, RUNNING_MEAN))
    on_mesh = curvax.micro_vmap(
        outputs, accumulator=(SUM, CONCAT, MEAN, RUNNING_MEAN), mesh=mesh_of(3)
    )
    same(on_mesh(x[:0]), empty(x[:0]))
    return 5


def check_limits(*numbers):
    """Each microbatch has examples of all devices: those of one device, and as many times more."""
    x = examples(48)
    rows_of = jax.vmap(example, (None, 0))
    kinds = {kind.name: kind for kind in AccumulationType} | {"norm": NORM}
    for devices in map(int, numbers):
        micro = functools.partial(
            curvax.micro_vmap,
            lambda w, x: dict.fromkeys(kinds, example(w, x)),
            (None, 0),
            accumulator=kinds,
        )
        whole = lambda limit, micro=micro, devices=devices: micro(
            microbatch_size=4 * devices, num_real_microbatches=limit
        )
        split = lambda limit, micro=micro, devices=devices: micro(
            microbatch_size=4, num_real_microbatches=limit, mesh=mesh_of(devices)
        )
        traced = jax.jit(lambda limit, w, x, split=split: split(limit)(w, x))
        for limit in (0, 1):
            expected = jax.jit(whole(limit))(W, x)
            same(traced(limit, W, x), expected)
            same(jax.jit(split(limit))(W, x), expected)
        expected = derivatives(whole(2))(W, x)
        same(derivatives(split(2))(W, x), expected)
        same(traced(2, W, x), expected[0])
    rows = rows_of(W, x)
    batch = lambda w, x: jnp.mean(rows_of(w, x), axis=0)
    mean = curvax.microbatch(batch, 1, 4, MEAN, num_real_microbatches=2, mesh=mesh_of(3))
    ran = np.arange(48) % 4 < 2
    same(jax.jit(mean)(W, x), rows[ran].mean(axis=0))
    per_example = curvax.micro_grad(
        lambda w, x: jnp.sum(example(w, x[0])),
        microbatch_size=4,
        num_real_microbatches=2,
        mesh=mesh_of(3),
    )(W, x)[1]
    same(per_example.values, jnp.where(ran, rows.sum(axis=1), 0.0))
    # One microbatch on each device is any order; one device has any number.
    curvax.micro_vmap(
        example,
        (None, 0),
        num_real_microbatches=1,
        order="contiguous",
        mesh=mesh_of(3),
    )(W, x)
    curvax.micro_vmap(
        example,
        (None, 0),
        microbatch_size=5,
        num_real_microbatches=2,
        order="contiguous",
        mesh=mesh_of(1),
    )(W, x)
    return 4 * len(numbers) + 4


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    name, *arguments = sys.argv[1:]
    sys.stdout.write(f"{globals()[f'check_{name}'](*arguments)} agree\n")
