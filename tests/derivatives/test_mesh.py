"""Derivatives on a mesh are those of one device, and each device needs memory for its shard."""

import contextlib
import functools
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import curvax
from derivatives.mesh_cases import (
    KINDS,
    POINTS,
    WAYS,
    X,
    assert_agrees,
    assert_sharded_as_documented,
    compute,
    loss,
    mesh_of,
    naive,
    residuals,
    same,
    two_axes,
)

pytestmark = pytest.mark.optimised
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@pytest.mark.parametrize("way", ["hessian", "reverse jacobian", "hessian_blocks"])
def test_rows_on_eight_devices_are_those_of_one(way):
    assert_agrees(way, 8, AxisType.Auto, "even", size=2)


@pytest.mark.parametrize("way", ["hessian", "forward jacobian", "gauss_newton", "hessian_diagonal"])
def test_columns_on_three_devices_of_which_the_last_has_fewer_are_those_of_one(way):
    assert_agrees(way, 3, AxisType.Explicit, "odd", size=3)


@pytest.mark.slow
@pytest.mark.parametrize("replicated", [False, True], ids=["sharded", "replicated"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_devices_sizes_and_remainders_all_crossed(devices, point, size, way, replicated):
    assert_agrees(way, devices, AxisType.Auto, point, size, replicated)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 100])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_devices_sizes_and_remainders_all_crossed_on_explicit_meshes(devices, point, size, way):
    assert_agrees(way, devices, AxisType.Explicit, point, size)


def assert_agrees_at_sharded(kinds, spec, way):
    """At a point that is sharded along another axis of the mesh, or along the same."""
    mesh = two_axes(*kinds)
    put = lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P(*spec[: leaf.ndim])))
    name, options = WAYS[way]
    run = functools.partial(compute, name, mesh=mesh, axis="i", batch_size=2, **options)
    x = jax.tree.map(put, X)
    for result in (run(x), jax.jit(run)(x)):
        same(result, naive(name, "even"))
        assert_sharded_as_documented(result, way, mesh)


@each_kind
@pytest.mark.parametrize("spec", [(None, "model"), ("i",)], ids=str)
def test_the_hessian_at_a_sharded_point_is_that_of_one_device(kind, spec):
    assert_agrees_at_sharded((kind, kind), spec, "hessian")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "spec",
    [("model",), ("i",), (("i", "model"),), (None, "model"), ("i", "model")],
    ids=str,
)
@pytest.mark.parametrize("other", KINDS, ids=lambda kind: kind.name)
@each_kind
def test_every_derivative_at_a_point_sharded_in_any_way(kind, other, spec, way):
    assert_agrees_at_sharded((kind, other), spec, way)


def scaled_on_mesh(mesh):
    run = functools.partial(curvax.hessian, mesh=mesh, batch_size=2)
    return lambda x, s: run(lambda p: s * loss(p), x)[0]


def scaled_naive(x, s):
    flat, unflatten = ravel_pytree(x)
    return jax.hessian(lambda v: s * loss(unflatten(v)))(flat)


def derivatives_of(fun):
    """Reverse and forward derivatives, also by a scale that the loss closes over."""
    scalar = lambda x, s: jnp.sum(jnp.sin(fun(x, s)))
    grad, jvp = jax.grad(scalar, (0, 1)), lambda x, s: jax.jvp(fun, (x, s), (x, s))
    return jax.jit(lambda x, s: (grad(x, s), jvp(x, s)))


class TestTransformations:
    x = jax.tree.map(jnp.asarray, X)

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls):
        return derivatives_of(scaled_naive)(cls.x, 2.0)

    @each_kind
    def test_a_hessian_can_be_differentiated(self, kind, expected):
        same(derivatives_of(scaled_on_mesh(mesh_of(8, kind)))(self.x, 2.0), expected)

    @each_kind
    def test_a_hessian_can_be_mapped(self, kind):
        two = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), self.x)
        mapped = lambda fun: jax.jit(jax.vmap(fun, (0, None)))(two, 2.0)
        same(mapped(scaled_on_mesh(mesh_of(8, kind))), mapped(scaled_naive))

    @each_kind
    def test_a_hessian_within_a_budget_under_jit(self, kind):
        within = lambda x: curvax.hessian(loss, x, mesh=mesh_of(8, kind), memory_budget="1MB")[0]
        same(jax.jit(within)(self.x), naive("hessian", "even"))

    @each_kind
    def test_auxiliary_outputs_are_returned(self, kind):
        f = lambda x: (loss(x), 2 * x["b"])
        aux = curvax.hessian(f, self.x, has_aux=True, mesh=mesh_of(8, kind))[2]
        same(aux, 2 * X["b"])


class TestFisherInformation:
    """Examples are sharded, and the information is summed over devices."""

    data = np.sin(np.arange(48.0)).reshape(16, 3)

    @staticmethod
    def loglike(x, d):
        return jnp.sum(jnp.cos(x["b"][:3] * d)) * x["a"][0, 0]

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls):
        return curvax.fisher_information(cls.loglike, X, cls.data)[0]

    @pytest.mark.parametrize(
        "options",
        [{"batch_size": 1}, {"nbatches": 2}, {"memory_budget": "1MB", "objective": "time"}],
        ids=lambda options: " ".join(options),
    )
    @each_kind
    @pytest.mark.parametrize("count", [1, 8])
    def test_it_is_that_of_one_device_and_replicated(self, expected, count, kind, options):
        mesh = mesh_of(count, kind)
        F, _ = curvax.fisher_information(self.loglike, X, self.data, mesh=mesh, **options)
        same(F, expected)
        assert F.is_fully_replicated

    def test_examples_that_cannot_be_sharded_evenly_are_rejected(self):
        words = r"data is split evenly among 3 devices .*Use 15 or 18"
        with pytest.raises(ValueError, match=words):
            curvax.fisher_information(self.loglike, X, self.data, mesh=mesh_of(3))


def tanh_hessian(count, replicated=False, **options):
    """A function that computes a Hessian of 512 coordinates on a mesh, and its argument."""
    mesh = mesh_of(count)
    data = np.sin(np.arange(40.0 * 512)).reshape(40, 512)
    f = lambda x: jnp.sum(jnp.tanh(data @ x) ** 2)
    run = lambda x: curvax.hessian(f, x, mesh=mesh, replicated=replicated, **options)[0]
    x = jax.device_put(np.linspace(0.0, 1.0, 512), NamedSharding(mesh, P()))
    return run, x


class TestProgram:
    @pytest.fixture(scope="class")
    @classmethod
    def programs(cls):
        """Compiled Hessians on several numbers of devices, sharded and replicated."""
        found = {}
        for count in (1, 2, 8):
            for replicated in (False, True):
                run, x = tanh_hessian(count, replicated, batch_size=8)
                found[count, replicated] = jax.jit(run).lower(x).compile()
        return found

    @pytest.mark.parametrize("replicated", [False, True], ids=["sharded", "replicated"])
    @pytest.mark.parametrize("count", [1, 2, 8])
    def test_nothing_is_sent_but_to_replicate_the_result(self, programs, count, replicated):
        kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
        found = re.findall(rf"({kinds})[-a-z]*\(", programs[count, replicated].as_text())
        assert found == (["all-gather"] if replicated and count > 1 else [])

    def test_memory_falls_with_the_number_of_devices(self, programs):
        needs = {}
        for (count, replicated), program in programs.items():
            usage = program.memory_analysis()
            assert usage.output_size_in_bytes == 512 * 512 * 8 // (1 if replicated else count)
            needs[count, replicated] = usage.output_size_in_bytes + usage.temp_size_in_bytes
        for count in (2, 8):
            assert needs[count, False] < needs[1, False] / (0.9 * count) + 40_000
            assert needs[count, True] < needs[1, True] + 512 * 512 * 8 / count + 40_000


class TestBudget:
    """A budget is for each device, so that more devices have more."""

    @staticmethod
    def plan_for(count, budget):
        run, x = tanh_hessian(count, memory_budget=budget)
        with curvax.recorded_plans() as plans:
            run(x)
        return plans[0]

    @staticmethod
    def needs(count, size):
        run, x = tanh_hessian(count, batch_size=size)
        return curvax.memory_usage(run, x).added_bytes

    @pytest.mark.parametrize(("count", "budget"), [(1, 2_300_000), (8, 400_000)])
    def test_the_largest_size_that_fits_is_taken(self, count, budget):
        plan = self.plan_for(count, budget)
        assert plan.batch_size < plan.max_size == 512 // count
        assert plan.usage.added_bytes == self.needs(count, plan.batch_size) <= budget
        assert self.needs(count, int(1.1 * plan.batch_size) + 1) > budget

    def test_all_at_once_fits_on_eight_devices_where_it_does_not_fit_on_one(self):
        plan = self.plan_for(8, 2_300_000)
        assert plan.batch_size == plan.max_size == 64
        assert plan.usage.added_bytes == self.needs(8, 64) <= 2_300_000

    def test_a_budget_that_is_enough_for_eight_devices_may_be_too_small_for_one(self):
        with pytest.raises(curvax.MemoryBudgetError):
            self.plan_for(1, 400_000)


class TestDisk:
    """Each block is computed by one device, and a store does not tell how many there were."""

    @pytest.mark.parametrize("first", ["three devices", "two explicit axes"])
    def test_a_store_is_completed_on_another_mesh(self, tmp_path, first):
        x, path = POINTS["odd"], tmp_path / "H"
        mesh = mesh_of(3) if first == "three devices" else two_axes(*KINDS[1:] * 2)
        H, _ = curvax.hessian(loss, x, mesh=mesh, axis="i", batch_size=2, out=path)
        same(H[...], np.asarray(naive("hessian", "odd")))
        assert H.chunks == (2, 19)
        for block in (0, 3, 9):
            (path / ".curvax" / "done" / str(block)).unlink()
        before = (path / "c" / "1" / "0").stat().st_mtime_ns
        with jax.set_mesh(mesh_of(8)):
            H, _ = curvax.hessian(loss, x, mesh=mesh_of(8), batch_size=2, out=path)
        same(H[...], np.asarray(naive("hessian", "odd")))
        assert (path / "c" / "1" / "0").stat().st_mtime_ns == before
        assert len([*(path / ".curvax" / "done").iterdir()]) == 10
        curvax.hessian(loss, x, out=path)

    def test_a_jacobian_has_a_block_for_each_device(self, tmp_path):
        J, _ = curvax.jacobian(residuals, POINTS["odd"], mesh=mesh_of(8), out=tmp_path / "J")
        expected = jax.tree.map(np.asarray, naive("jacobian", "odd"))
        same(jax.tree.map(lambda array: array[...], J), expected)
        assert J["vector"].chunks == (8, 3)

    def test_a_budget_is_planned_for_the_rows_of_a_device(self, tmp_path):
        options = {"mesh": mesh_of(8), "memory_budget": "1MB", "out": tmp_path / "H"}
        with curvax.recorded_plans() as plans:
            curvax.hessian(loss, POINTS["odd"], **options)
        assert plans[0].max_size == 3


class TestErrors:
    """What is wrong only where there are several devices."""

    def test_a_point_on_another_device(self):
        elsewhere = jax.device_put(jnp.ones(3), jax.devices()[1])
        words = r"^curvax\.hessian: x\['b'\] is committed to cpu:1, .*Move it there"
        with pytest.raises(ValueError, match=words):
            curvax.hessian(loss, X | {"b": elsewhere}, mesh=mesh_of(8))

    def test_more_batches_than_rows_on_a_device(self):
        words = r"nbatches=4 is more than .* on each of 8 devices: 3\.$"
        with pytest.raises(ValueError, match=words):
            curvax.hessian(loss, X, nbatches=4, mesh=mesh_of(8))

    def test_under_a_shard_map_over_the_same_axis(self):
        inner = lambda x: curvax.hessian(loss, x, mesh=mesh_of(8), replicated=True)[0]
        outer = jax.shard_map(inner, mesh=mesh_of(8), in_specs=P(), out_specs=P())
        with pytest.raises(ValueError, match=r"inside a jax.shard_map over \('i',\)"):
            jax.jit(outer)(jax.tree.map(jnp.asarray, X))

    def test_closing_over_an_array_on_an_explicit_mesh(self):
        mesh = mesh_of(8, AxisType.Explicit)
        scale = jax.device_put(np.ones(8), NamedSharding(mesh, P()))
        words = r"f closes over an array float64\[8\] .*Explicit.*numpy.asarray"
        with pytest.raises(ValueError, match=words):
            curvax.hessian(lambda x: jnp.sum(scale * x["b"] ** 3), X, mesh=mesh)

    def test_a_progress_bar_on_two_explicit_axes(self):
        options = {"mesh": two_axes(*KINDS[1:] * 2), "axis": "i", "progress": True}
        with pytest.raises(ValueError, match="progress=True calls back from the devices"):
            curvax.hessian(loss, X, **options)

    def test_two_axes_of_which_none_is_named(self):
        with pytest.raises(ValueError, match="say along which the work is to be split"):
            curvax.hessian(loss, X, mesh=two_axes(*KINDS[1:] * 2))


def test_the_progress_bar_counts_the_blocks_of_one_device():
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        curvax.hessian(loss, X, mesh=mesh_of(8), batch_size=2, progress=True)
        jax.effects_barrier()
    assert "2/2 " in shown.getvalue()


POINT = jnp.arange(3.0)


def cubic(x):
    return jnp.sum(x**3)


@pytest.mark.parametrize(
    "function",
    [
        curvax.jacobian,
        curvax.hessian,
        curvax.hessian_blocks,
        curvax.hessian_diagonal,
        curvax.gauss_newton,
    ],
    ids=lambda function: function.__name__,
)
class TestArguments:
    def test_an_axis_without_a_mesh(self, function):
        with pytest.raises(ValueError, match=rf"^curvax\.{function.__name__}: axis='i' is an axis"):
            function(cubic, POINT, axis="i")

    def test_replicated_without_a_mesh(self, function):
        with pytest.raises(ValueError, match=r"replicated=True .*; give mesh as well\."):
            function(cubic, POINT, replicated=True)

    def test_an_axis_that_the_mesh_does_not_have(self, function):
        with pytest.raises(ValueError, match=r"axis='j' must name .* the mesh, which has \('i',\)"):
            function(cubic, POINT, mesh=mesh_of(1), axis="j")

    def test_without_compiling(self, function):
        with pytest.raises(ValueError, match="mesh= does not go with jit=False"):
            function(cubic, POINT, mesh=mesh_of(1), jit=False)

    def test_something_else_for_a_mesh(self, function, unchecked):
        with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh"):
            function(cubic, POINT, mesh=jax.devices())


@pytest.mark.parametrize("function", [curvax.jacobian, curvax.hessian])
def test_replicated_results_on_disk_are_rejected(function, tmp_path):
    with pytest.raises(ValueError, match=r"replicated=True .* and out= .*Leave one of them out"):
        function(cubic, POINT, mesh=mesh_of(1), replicated=True, out=tmp_path / "result.zarr")
