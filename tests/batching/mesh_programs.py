"""Maps on a mesh, compared with one device. Run by `test_mesh.py` on eight devices.

The first argument names the checks to run; those after it are cases, for some of them.
"""

import functools
import itertools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

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


def check_placement():
    """However arrays are split before, results are where the documentation says."""
    x = examples(24)
    rows = jax.vmap(example, (None, 0))(W, x)
    count = 0
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of(8, kind)
        split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
        mapped = curvax.chunked_vmap(example, 2, in_axes=(None, 0), mesh=mesh)
        everywhere = curvax.chunked_vmap(example, 2, in_axes=(None, 0), mesh=mesh, replicated=True)
        for given in (x, np.asarray(x), jax.device_put(x, split), jax.device_put(x, whole)):
            for call in (lambda f: f, jax.jit):
                result = call(mapped)(W, given)
                same(result, rows)
                assert result.sharding.is_equivalent_to(split, 2)
                result = call(everywhere)(W, given)
                same(result, rows)
                assert result.sharding.is_fully_replicated
                count += 1
        columns = curvax.chunked_vmap(example, in_axes=(None, 0), out_axes=1, mesh=mesh)(W, x)
        assert columns.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "data")), 2)
        uneven = mapped(W, x[:13])
        same(uneven, rows[:13])
        assert uneven.sharding.is_fully_replicated
        total = curvax.micro_vmap(example, (None, 0), accumulator=SUM, mesh=mesh)(W, x)
        assert total.sharding.is_fully_replicated
        assert total.sharding.device_set == set(jax.devices())
        with jax.set_mesh(mesh):
            same(jax.jit(mapped)(W, x), rows)
    return count


def check_model_axis(*kinds):
    """Parameters, and examples too, may be split along another axis of the mesh."""
    count = 0
    fun = lambda w, x: jnp.tanh(x * w["scale"]) + w["shift"]
    contracted = lambda w, x: fun(w, x) @ w["scale"]
    x = examples(12)
    for kind in [AxisType[name] for name in kinds]:
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
        put = lambda x, *spec, mesh=mesh: jax.device_put(x, NamedSharding(mesh, P(*spec)))
        w = {"scale": put(W["scale"], "model"), "shift": put(W["shift"])}
        # An explicit axis asks of a contraction along it how its result is split.
        for of_one in (fun, contracted)[: 2 if kind is AxisType.Auto else 1]:
            for length, size in ((12, 2), (11, 2)):
                given = x[:length] if length == 11 else put(x, "data", "model")
                micro = functools.partial(
                    curvax.micro_vmap,
                    lambda w, x, of_one=of_one: (of_one(w, x),) * 3,
                    (None, 0),
                    microbatch_size=size,
                    accumulator=(SUM, RUNNING_MEAN, CONCAT),
                )
                mapped = micro(mesh=mesh, axis="data")
                expected = derivatives(micro())(W, x[:length])
                same(derivatives(mapped)(w, given), expected, f"{kind}, {length}")
                count += 1
        step = jax.value_and_grad(lambda w, x: jnp.mean(jnp.sum(jax.vmap(fun, (None, 0))(w, x), 1)))
        micro = curvax.microbatch(step, 1, 1, MEAN, mesh=mesh, axis="data")
        same(jax.jit(micro)(w, put(x, "data")), step(W, x))
        both = curvax.chunked_vmap(fun, 1, in_axes=(None, 0), mesh=mesh, axis=("model", "data"))
        same(jax.jit(both)(W, examples(16)), jax.vmap(fun, (None, 0))(W, examples(16)))
        over_model = jax.shard_map(
            curvax.chunked_vmap(fun, 2, in_axes=(None, 0), mesh=mesh, axis="data"),
            mesh=mesh,
            in_specs=({"scale": P("model"), "shift": P()}, P(None, "model")),
            out_specs=P(None, "model"),
            axis_names={"model"},
            check_vma=False,
        )
        same(jax.jit(over_model)(W, x), jax.vmap(fun, (None, 0))(W, x))
    return count


def check_transformations():
    """The whole map under `vmap`, and a `vmap_fn` that speaks of the mesh, too."""
    mesh = mesh_of(4)
    x = examples(10)
    mapped = curvax.chunked_vmap(example, 2, in_axes=(None, 0), mesh=mesh)
    naive = jax.vmap(example, (None, 0))
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf, leaf**2]), W)
    for arguments in ((several, x), (W, jnp.stack([x, x**2]))):
        axes = (0, None) if arguments[0] is several else (None, 0)
        outer = lambda fun, axes=axes: derivatives(jax.vmap(fun, axes))
        same(outer(mapped)(*arguments), outer(naive)(*arguments))
    constrain = lambda x: jax.lax.with_sharding_constraint(x, P("model"))
    two = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    for vmap_fn in (
        functools.partial(jax.vmap, spmd_axis_name="data"),
        functools.partial(jax.vmap, axis_name="examples"),
    ):
        micro = curvax.micro_vmap(
            lambda w, x: constrain(example(w, x)), (None, 0), vmap_fn=vmap_fn, mesh=two, axis="data"
        )
        with jax.set_mesh(two):
            same(jax.jit(micro)(W, x[:8]), naive(W, x[:8]))
    return 4


def collectives(fun, *args):
    text = jax.jit(fun).lower(*args).compile().as_text()
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return re.findall(rf"= .* ({kinds})(?:-start)?\(", text), text


def check_collectives():
    """Devices meet once for each sum, whatever the number of chunks, and else not at all."""
    mesh = mesh_of(8)
    x = jax.device_put(examples(64), NamedSharding(mesh, P("data")))
    w = jax.device_put(W, NamedSharding(mesh, P()))
    rows = curvax.chunked_vmap(example, 2, in_axes=(None, 0), mesh=mesh)
    found, text = collectives(rows, w, x)
    assert not found, found
    assert "while" in text  # There are chunks.
    outputs = lambda w, x: {"a": example(w, x), "b": jnp.sum(x)}
    for kind in (SUM, MEAN, RUNNING_MEAN):
        total = curvax.micro_vmap(
            outputs, (None, 0), microbatch_size=2, accumulator=kind, mesh=mesh
        )
        found, text = collectives(total, w, x)
        assert 1 <= len(found) <= 2, found
        assert set(found) == {"all-reduce"}, found
        loops = [part for part in text.split("\n\n") if "body" in part.split("\n")[0]]
        assert not any("all-reduce(" in part for part in loops)
    # By parameters: one sum for each of their leaves. By examples: none.
    loss = lambda w, x: jnp.sum(rows(w, x) * jnp.cos(jnp.arange(64.0))[:, None])
    found, _ = collectives(jax.grad(loss), w, x)
    assert 1 <= len(found) <= 2, found
    assert set(found) == {"all-reduce"}, found
    assert not collectives(jax.grad(loss, 1), w, x)[0]
    return 5


def check_memory():
    """Temporaries of a device fall with their number, and budgets are for each."""
    heavy = lambda x: jnp.sum(jnp.sin(x[:, None] * x[None, :]) ** 2)
    x = jnp.ones((64, 48))
    needed = {}
    for devices in (1, 2, 8):
        mesh = mesh_of(devices)
        given = jax.device_put(x, NamedSharding(mesh, P("data")))
        program = jax.jit(curvax.chunked_vmap(heavy, None, mesh=mesh)).lower(given).compile()
        needed[devices] = program.memory_analysis().temp_size_in_bytes
    assert needed[2] < 0.6 * needed[1], needed
    assert needed[8] < 0.2 * needed[1], needed

    expected = jax.vmap(heavy)(x)
    for devices, length in ((8, 64), (8, 61)):
        mesh = mesh_of(devices)
        budget = 6 * 48 * 48 * 8
        mapped = curvax.chunked_vmap(heavy, memory_budget=budget, mesh=mesh)
        with curvax.recorded_plans() as plans:
            same(mapped(x[:length]), expected[:length])
            same(mapped(np.asarray(x[:length])), expected[:length])
            whole = jax.device_put(x[:length], NamedSharding(mesh, P()))
            same(mapped(whole), expected[:length])
            same(jax.jit(mapped)(x[:length]), expected[:length])
            if length == 64:
                split = jax.device_put(x, NamedSharding(mesh, P("data")))
                same(mapped(split), expected)
        assert all(plan.max_size == length // devices for plan in plans)
        assert all(plan.usage.added_bytes <= budget for plan in plans)
        assert 1 < plans[0].batch_size < 8, plans[0].batch_size
    # One function, two meshes: two plans.
    with curvax.recorded_plans() as plans:
        for devices in (2, 4):
            curvax.chunked_vmap(heavy, memory_budget="100MB", mesh=mesh_of(devices))(x)
    assert [plan.batch_size for plan in plans] == [32, 16]
    others = Mesh(np.array(jax.devices()[4:6]), ("data",))
    elsewhere = curvax.chunked_vmap(heavy, memory_budget="100MB", mesh=others)(x)
    assert elsewhere.sharding.device_set == set(jax.devices()[4:6])
    whole = curvax.chunked_vmap(heavy, memory_budget="100MB", mesh=others, replicated=True)(x)
    assert whole.sharding.is_fully_replicated
    gradient = curvax.micro_grad(
        lambda w, x: heavy(w * x[0]), memory_budget="1MB", objective="time", mesh=mesh_of(4)
    )
    same(
        gradient(1.5, x)[0],
        jnp.sum(jax.vmap(jax.grad(lambda w, x: heavy(w * x)), (None, 0))(1.5, x)),
    )
    batch = lambda x: jax.vmap(heavy)(x)
    planned = curvax.microbatch(
        batch, 0, accumulator=CONCAT, memory_budget="1MB", plan_for="gradient", mesh=mesh_of(4)
    )
    same(planned(x), expected)
    micro = curvax.micro_vmap(heavy, memory_budget="1MB", accumulator=SUM, mesh=mesh_of(4))
    same(micro(x), expected.sum())
    return 4


def check_errors():
    mesh, x = mesh_of(3), examples(15)
    steps = NORM.init, NORM.update, NORM.finalize, NORM.aggregate
    plain = Accumulator(*steps)
    even = Accumulator(*steps, combine=jnp.add)
    wide = Accumulator(*steps, combine=lambda one, other: jnp.stack([one, other]))
    elsewhere = jax.device_put(x, jax.devices()[7])
    chunked = functools.partial(curvax.chunked_vmap, jnp.sin, mesh=mesh)
    micro = functools.partial(curvax.micro_vmap, jnp.sin, mesh=mesh)
    first = functools.partial(micro, num_real_microbatches=1)
    batch = curvax.microbatch(jnp.sum, 0, 2, mesh=mesh)
    inside = jax.shard_map(chunked(), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    cases = [
        (chunked(), elsewhere, r"chunked_vmap: .* is committed to .*7.* \(3 devices\)"),
        (jax.jit(inside), x, r"chunked_vmap: mesh= .* inside of a jax.shard_map over \('data',\)"),
        (batch, x[:11], r"microbatch: the batch .* among 3 devices .* has 11 .* Use 9 or 12"),
        (micro(accumulator=plain), x, r"micro_vmap: .* among 3 devices, .* with combine="),
        (
            micro(accumulator=even),
            x[:11],
            r"11 examples on 3 devices come out uneven.* uneven=True",
        ),
        (micro(accumulator=even, microbatch_size=3), x, r"5 examples .* \(sizes 3 and 2\)"),
        (first(microbatch_size=2, order="contiguous"), x, r"on a mesh needs order='strided'"),
        (first(microbatch_size=3), x, r"even; got 15 examples on 3 devices .* at most 3 on each"),
        (first(microbatch_size=2), x[:11], r"even; got 11 examples on 3 devices"),
    ]
    for fun, given, words in cases:
        with pytest.raises(ValueError, match=words):
            fun(given)
    with pytest.raises(TypeError, match=r"Accumulator.combine must return a carry like"):
        micro(accumulator=wide)(x)
    # One device has nothing to combine.
    alone = curvax.micro_vmap(jnp.sin, accumulator=plain, mesh=mesh_of(1))
    same(alone(x), jnp.sqrt(jnp.sum(jnp.sin(x) ** 2, axis=0)))
    return len(cases) + 1


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    name, *arguments = sys.argv[1:]
    sys.stdout.write(f"{globals()[f'check_{name}'](*arguments)} agree\n")
