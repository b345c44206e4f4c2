"""Maps on a mesh: where results are, what devices send and need, and what is rejected."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import curvax
from curvax import Accumulator
from helpers import assert_same, mesh_of
from maps.mesh_cases import (
    CONCAT,
    MEAN,
    NORM,
    RUNNING_MEAN,
    SUM,
    W,
    derivatives,
    example,
    examples,
    rows_of,
)

pytestmark = pytest.mark.optimised
same = functools.partial(assert_same, rtol=1e-11, atol=1e-12)
each_kind = pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name
)


@each_kind
class TestPlacement:
    """However arguments are sharded, results are where the documentation says."""

    x = examples(24)

    def arguments(self, mesh):
        sharded, replicated = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
        put = functools.partial(jax.device_put, self.x)
        return self.x, np.asarray(self.x), put(sharded), put(replicated)

    @pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
    def test_rows_are_sharded(self, kind, transform):
        mesh = mesh_of(8, kind)
        mapped = transform(curvax.chunked_vmap(example, 2, in_axes=(None, 0), mesh=mesh))
        for given in self.arguments(mesh):
            result = mapped(W, given)
            same(result, rows_of(W, self.x))
            assert result.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)

    @pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
    def test_rows_are_replicated_on_demand(self, kind, transform):
        mesh = mesh_of(8, kind)
        options = {"in_axes": (None, 0), "mesh": mesh, "replicated": True}
        mapped = transform(curvax.chunked_vmap(example, 2, **options))
        for given in self.arguments(mesh):
            result = mapped(W, given)
            same(result, rows_of(W, self.x))
            assert result.sharding.is_fully_replicated

    def test_columns_are_sharded(self, kind):
        mesh = mesh_of(8, kind)
        mapped = curvax.chunked_vmap(example, in_axes=(None, 0), out_axes=1, mesh=mesh)
        result = mapped(W, self.x)
        same(result, rows_of(W, self.x).T)
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "data")), 2)

    def test_an_uneven_result_is_replicated(self, kind):
        mapped = curvax.chunked_vmap(example, 2, in_axes=(None, 0), mesh=mesh_of(8, kind))
        uneven = mapped(W, self.x[:13])
        same(uneven, rows_of(W, self.x[:13]))
        assert uneven.sharding.is_fully_replicated

    def test_a_sum_is_replicated_on_all_devices(self, kind):
        mesh = mesh_of(8, kind)
        total = curvax.micro_vmap(example, (None, 0), accumulator=SUM, mesh=mesh)(W, self.x)
        same(total, rows_of(W, self.x).sum(axis=0))
        assert total.sharding.is_fully_replicated
        assert total.sharding.device_set == set(jax.devices())

    def test_the_mesh_may_be_set(self, kind):
        mesh = mesh_of(8, kind)
        mapped = jax.jit(curvax.chunked_vmap(example, 2, in_axes=(None, 0), mesh=mesh))
        with jax.set_mesh(mesh):
            same(mapped(W, self.x), rows_of(W, self.x))


def scaled(w, x):
    return jnp.tanh(x * w["scale"]) + w["shift"]


def contracted(w, x):
    return scaled(w, x) @ w["scale"]


def put(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def mesh_of_two_axes(kind):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))


def sharded_params(mesh):
    return {"scale": put(mesh, W["scale"], "model"), "shift": put(mesh, W["shift"])}


def assert_agrees_with_sharded_params(fun, kind, length):
    mesh, x = mesh_of_two_axes(kind), examples(12)
    given = x[:length] if length == 11 else put(mesh, x, "data", "model")
    micro = functools.partial(
        curvax.micro_vmap,
        lambda w, x: (fun(w, x),) * 3,
        (None, 0),
        microbatch_size=2,
        accumulator=(SUM, RUNNING_MEAN, CONCAT),
    )
    expected = derivatives(micro())(W, x[:length])
    found = derivatives(micro(mesh=mesh, axis="data"))(sharded_params(mesh), given)
    same(found, expected)


@pytest.mark.parametrize("length", [12, 11])
def test_functions_may_contract_along_an_auto_axis(length):
    """Along an explicit one, JAX asks how the result is sharded."""
    assert_agrees_with_sharded_params(contracted, AxisType.Auto, length)


@each_kind
class TestOtherAxes:
    """Parameters and examples may be sharded along another axis of the mesh."""

    x = examples(12)

    @pytest.mark.parametrize("length", [12, 11])
    def test_values_and_derivatives(self, kind, length):
        assert_agrees_with_sharded_params(scaled, kind, length)

    def test_the_gradient_of_a_batch(self, kind):
        mesh = mesh_of_two_axes(kind)
        loss = lambda w, x: jnp.mean(jnp.sum(jax.vmap(scaled, (None, 0))(w, x), 1))
        step = jax.value_and_grad(loss)
        micro = curvax.microbatch(step, 1, 1, MEAN, mesh=mesh, axis="data")
        same(jax.jit(micro)(sharded_params(mesh), put(mesh, self.x, "data")), step(W, self.x))

    def test_examples_may_be_sharded_over_both_axes(self, kind):
        axes = {"in_axes": (None, 0), "axis": ("model", "data")}
        both = curvax.chunked_vmap(scaled, 1, mesh=mesh_of_two_axes(kind), **axes)
        same(jax.jit(both)(W, examples(16)), jax.vmap(scaled, (None, 0))(W, examples(16)))

    def test_under_a_shard_map_over_the_other_axis(self, kind):
        mesh = mesh_of_two_axes(kind)
        over_model = jax.shard_map(
            curvax.chunked_vmap(scaled, 2, in_axes=(None, 0), mesh=mesh, axis="data"),
            mesh=mesh,
            in_specs=({"scale": P("model"), "shift": P()}, P(None, "model")),
            out_specs=P(None, "model"),
            axis_names={"model"},
            check_vma=False,
        )
        w = {"scale": put(mesh, W["scale"], "model"), "shift": W["shift"]}
        found = jax.jit(over_model)(w, put(mesh, self.x, None, "model"))
        same(found, jax.vmap(scaled, (None, 0))(W, self.x))


class TestTransformations:
    x = examples(10)

    @pytest.mark.parametrize("mapped", ["parameters", "examples"])
    def test_a_map_can_be_mapped(self, mapped):
        several = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf, leaf**2]), W)
        axes, args = {
            "parameters": ((0, None), (several, self.x)),
            "examples": ((None, 0), (W, jnp.stack([self.x, self.x**2]))),
        }[mapped]
        outer = lambda fun: derivatives(jax.vmap(fun, axes))
        on_mesh = curvax.chunked_vmap(example, 2, in_axes=(None, 0), mesh=mesh_of(4))
        same(outer(on_mesh)(*args), outer(rows_of)(*args))

    @pytest.mark.parametrize("options", [{"spmd_axis_name": "data"}, {"axis_name": "examples"}])
    def test_vmap_fn_may_name_axes(self, options):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        constrain = lambda x: jax.lax.with_sharding_constraint(x, P("model"))
        micro = curvax.micro_vmap(
            lambda w, x: constrain(example(w, x)),
            (None, 0),
            vmap_fn=functools.partial(jax.vmap, **options),
            mesh=mesh,
            axis="data",
        )
        with jax.set_mesh(mesh):
            same(jax.jit(micro)(W, self.x[:8]), rows_of(W, self.x[:8]))


class TestCollectives:
    """Devices communicate once for each sum, whatever the number of chunks, and else not at all."""

    @pytest.fixture
    def args(self):
        mesh = mesh_of(8)
        w = jax.device_put(W, NamedSharding(mesh, P()))
        return w, jax.device_put(examples(64), NamedSharding(mesh, P("data")))

    @staticmethod
    def collectives(fun, args):
        text = jax.jit(fun).lower(*args).compile().as_text()
        kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
        return re.findall(rf"= .* ({kinds})(?:-start)?\(", text), text

    @staticmethod
    def computation(name, text):
        (found,) = re.findall(rf"^%{re.escape(name)} .*?^}}", text, re.M | re.S)
        return found

    @staticmethod
    def rows(w, x):
        return curvax.chunked_vmap(example, 2, in_axes=(None, 0), mesh=mesh_of(8))(w, x)

    def loss(self, w, x):
        return jnp.sum(self.rows(w, x) * jnp.cos(jnp.arange(64.0))[:, None])

    def test_rows_need_none(self, args):
        found, text = self.collectives(self.rows, args)
        assert found == []
        assert "while" in text  # There are chunks.

    @pytest.mark.parametrize("kind", [SUM, MEAN, RUNNING_MEAN], ids=lambda kind: kind.name)
    def test_a_reduction_needs_one_for_each_output_after_the_loop(self, args, kind):
        total = curvax.micro_vmap(
            lambda w, x: {"a": example(w, x), "b": jnp.sum(x)},
            (None, 0),
            microbatch_size=2,
            accumulator=kind,
            mesh=mesh_of(8),
        )
        found, text = self.collectives(total, args)
        assert 1 <= len(found) <= 2
        assert set(found) == {"all-reduce"}
        loops = [self.computation(name, text) for name in re.findall(r"body=%([\w.-]+)", text)]
        assert loops
        assert not any("all-reduce" in loop for loop in loops)

    def test_gradients_by_parameters_need_one_for_each_leaf(self, args):
        found, _ = self.collectives(jax.grad(self.loss), args)
        assert 1 <= len(found) <= 2
        assert set(found) == {"all-reduce"}

    def test_gradients_by_examples_need_none(self, args):
        assert self.collectives(jax.grad(self.loss, 1), args)[0] == []


def heavy(x):
    """Sorting keeps the compiler from fusing the sum with what is summed."""
    return jnp.sum(jnp.sort(jnp.sin(x[:, None] * x[None, :])) ** 2)


class TestMemory:
    x = jnp.ones((64, 48))

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls):
        return jax.vmap(heavy)(cls.x)

    def test_temporaries_fall_with_the_number_of_devices(self):
        needed = {}
        for devices in (1, 2, 8):
            mesh = mesh_of(devices)
            given = jax.device_put(self.x, NamedSharding(mesh, P("data")))
            program = jax.jit(curvax.chunked_vmap(heavy, None, mesh=mesh)).lower(given).compile()
            needed[devices] = program.memory_analysis().temp_size_in_bytes
        assert needed[2] < 0.6 * needed[1], needed
        assert needed[8] < 0.2 * needed[1], needed

    @pytest.mark.parametrize("length", [64, 61])
    def test_a_budget_is_for_each_device_however_arguments_are_sharded(self, expected, length):
        mesh, budget = mesh_of(8), 6 * 48 * 48 * 8
        mapped = curvax.chunked_vmap(heavy, memory_budget=budget, mesh=mesh)
        x = self.x[:length]
        given = [x, np.asarray(x), jax.device_put(x, NamedSharding(mesh, P()))]
        if length == 64:
            given.append(jax.device_put(x, NamedSharding(mesh, P("data"))))
        with curvax.recorded_plans() as plans:
            for arguments in given:
                same(mapped(arguments), expected[:length])
            same(jax.jit(mapped)(x), expected[:length])
        assert plans
        assert all(plan.max_size == length // 8 for plan in plans)
        assert all(plan.usage.added_bytes <= budget for plan in plans)
        assert 1 < plans[0].batch_size < 8

    def test_each_mesh_has_a_plan(self):
        with curvax.recorded_plans() as plans:
            for devices in (2, 4):
                curvax.chunked_vmap(heavy, memory_budget="100MB", mesh=mesh_of(devices))(self.x)
        assert [plan.batch_size for plan in plans] == [32, 16]

    def test_planned_results_are_on_the_devices_of_the_mesh(self):
        others = Mesh(np.array(jax.devices()[4:6]), ("data",))
        planned = functools.partial(curvax.chunked_vmap, heavy, memory_budget="100MB", mesh=others)
        assert planned()(self.x).sharding.device_set == set(jax.devices()[4:6])
        assert planned(replicated=True)(self.x).sharding.is_fully_replicated

    def test_micro_grad_within_a_budget(self):
        loss = lambda w, x: heavy(w * x)
        gradient = curvax.micro_grad(
            lambda w, x: loss(w, x[0]), memory_budget="1MB", objective="time", mesh=mesh_of(4)
        )
        expected = jnp.sum(jax.vmap(jax.grad(loss), (None, 0))(1.5, self.x))
        same(gradient(1.5, self.x)[0], expected)

    def test_microbatch_within_a_budget(self, expected):
        options = {"memory_budget": "1MB", "plan_for": "gradient", "mesh": mesh_of(4)}
        planned = curvax.microbatch(jax.vmap(heavy), 0, accumulator=CONCAT, **options)
        same(planned(self.x), expected)

    def test_micro_vmap_within_a_budget(self, expected):
        micro = curvax.micro_vmap(heavy, memory_budget="1MB", accumulator=SUM, mesh=mesh_of(4))
        same(micro(self.x), expected.sum())


class TestErrors:
    """On three devices."""

    x = examples(15)
    steps = NORM.init, NORM.update, NORM.finalize, NORM.aggregate

    @staticmethod
    def chunked(**options):
        return curvax.chunked_vmap(jnp.sin, mesh=mesh_of(3), **options)

    @staticmethod
    def micro(**options):
        return curvax.micro_vmap(jnp.sin, mesh=mesh_of(3), **options)

    def test_arguments_on_another_device(self):
        words = r"chunked_vmap: .* is committed to .*7.* \(3 devices\)"
        with pytest.raises(ValueError, match=words):
            self.chunked()(jax.device_put(self.x, jax.devices()[7]))

    def test_under_a_shard_map_over_the_same_axis(self):
        specs = {"in_specs": P("data"), "out_specs": P("data")}
        inside = jax.shard_map(self.chunked(), mesh=mesh_of(3), **specs)
        words = r"chunked_vmap: mesh= .* inside a jax.shard_map over \('data',\)"
        with pytest.raises(ValueError, match=words):
            jax.jit(inside)(self.x)

    def test_an_uneven_batch(self):
        words = r"microbatch: the batch .* among 3 devices .* has 11 .* Use 9 or 12"
        with pytest.raises(ValueError, match=words):
            curvax.microbatch(jnp.sum, 0, 2, mesh=mesh_of(3))(self.x[:11])

    def test_an_accumulator_without_combine(self):
        plain = Accumulator(*self.steps)
        with pytest.raises(ValueError, match=r"micro_vmap: .* among 3 devices, .* with combine="):
            self.micro(accumulator=plain)(self.x)
        # One device has nothing to combine.
        alone = curvax.micro_vmap(jnp.sin, accumulator=plain, mesh=mesh_of(1))
        same(alone(self.x), jnp.sqrt(jnp.sum(jnp.sin(self.x) ** 2, axis=0)))

    @pytest.mark.parametrize(
        ("length", "options", "words"),
        [
            (11, {}, r"11 examples on 3 devices come out uneven.* uneven=True"),
            (15, {"microbatch_size": 3}, r"5 examples .* \(sizes 3 and 2\)"),
        ],
    )
    def test_uneven_microbatches_of_an_accumulator_that_needs_even_ones(
        self, length, options, words
    ):
        even = Accumulator(*self.steps, combine=jnp.add)
        with pytest.raises(ValueError, match=words):
            self.micro(accumulator=even, **options)(self.x[:length])

    @pytest.mark.parametrize(
        ("length", "options", "words"),
        [
            (
                15,
                {"microbatch_size": 2, "order": "contiguous"},
                r"on a mesh needs order='strided'",
            ),
            (
                15,
                {"microbatch_size": 3},
                r"even; got 15 examples on 3 devices .* at most 3 on each",
            ),
            (11, {"microbatch_size": 2}, r"even; got 11 examples on 3 devices"),
        ],
    )
    def test_the_first_of_microbatches_that_are_not_spread_evenly(self, length, options, words):
        with pytest.raises(ValueError, match=words):
            self.micro(num_real_microbatches=1, **options)(self.x[:length])

    def test_an_accumulator_whose_combine_changes_the_shape(self):
        wide = Accumulator(*self.steps, combine=lambda one, other: jnp.stack([one, other]))
        with pytest.raises(TypeError, match=r"Accumulator.combine must return a carry like"):
            self.micro(accumulator=wide)(self.x)
