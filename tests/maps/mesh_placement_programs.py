"""Where arrays are, what is sent and what is refused, for maps on a mesh of eight devices.

Run by `test_mesh.py`. The first argument names the checks to run; those after it are cases.
"""

import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from mesh_programs import (
    CONCAT,
    MEAN,
    NORM,
    RUNNING_MEAN,
    SUM,
    W,
    derivatives,
    example,
    examples,
    mesh_of,
    same,
)

import curvax
from curvax import Accumulator


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
        split = {"scale": put(W["scale"], "model"), "shift": W["shift"]}
        same(jax.jit(over_model)(split, put(x, None, "model")), jax.vmap(fun, (None, 0))(W, x))
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
    # Sorting keeps the compiler from adding up numbers as it makes them.
    heavy = lambda x: jnp.sum(jnp.sort(jnp.sin(x[:, None] * x[None, :])) ** 2)
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
