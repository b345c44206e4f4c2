"""`MeshAxis` checks user-supplied meshes and runs functions under `shard_map` on their devices."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

from curvax.devices.mesh_axis import MeshAxis
from helpers import assert_same, mesh_of

ONE = mesh_of(1)
TWO = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))


def test_without_a_mesh_there_is_no_axis():
    assert MeshAxis.of(None, None) is None


def test_the_axis_of_a_mesh_with_one_need_not_be_named():
    assert MeshAxis.of(ONE, None) == MeshAxis.of(ONE, "data") == MeshAxis(ONE, ("data",))
    assert MeshAxis.of(TWO, ["model", "data"]) == MeshAxis(TWO, ("model", "data"))


def test_equal_axes_hash_alike():
    same = mesh_of(1)
    other = mesh_of(1, name="other")
    assert len({MeshAxis.of(mesh, None) for mesh in (ONE, same, other)}) == 2


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ((None, "data", False), ValueError, r"axis='data' is an axis of a mesh; give mesh as well"),
        ((None, None, True), ValueError, r"replicated=True asks for .* give mesh as well"),
        ((8, None, False), TypeError, r"must be a jax.sharding.Mesh.* got int"),
        (
            (AbstractMesh((1,), ("data",)), None, False),
            TypeError,
            r"must be a jax.sharding.Mesh.* got AbstractMesh",
        ),
        ((TWO, None, False), ValueError, r"the axes \('data', 'model'\); say along which"),
        ((ONE, "batch", False), ValueError, r"axis='batch' must name .* which has \('data',\)"),
        ((TWO, ("data", "data"), False), ValueError, r"must name one or more axes"),
        ((TWO, (), False), ValueError, r"must name one or more axes"),
        ((TWO, 0, False), ValueError, r"axis=0 must name one or more axes"),
    ],
)
def test_an_invalid_mesh_or_axis_is_rejected(given, error, words, unchecked):
    mesh, axis, replicated = given
    with pytest.raises(error, match="^curvax: .*" + words):
        MeshAxis.of(mesh, axis, replicated)


def test_specs_shard_the_given_axis_of_an_array():
    axis = MeshAxis(TWO, ("data",))
    assert axis.spec(None) == P()
    assert axis.spec(2) == P(None, None, ("data",))
    assert axis.sharding(0) == NamedSharding(TWO, P("data"))
    assert axis.count == 1
    assert not axis.is_multi_process


def test_shard_map_over_one_device_is_the_function_itself():
    axis = MeshAxis(ONE, ("data",))
    split, whole = axis.spec(0), axis.spec(None)
    on_all = axis.shard_map(lambda x, w: axis.psum(x * w["w"]), (split, whole), whole)
    assert on_all(jnp.arange(3.0), {"w": jnp.ones(())}).tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_arrays_on_the_mesh_or_uncommitted_are_accepted(kind):
    mesh = mesh_of(1, kind)
    placed = jax.device_put(jnp.ones(2), NamedSharding(mesh, P("data")))
    tree = {"placed": placed, "not": jnp.ones(2), "numpy": np.ones(2), "number": 3}
    MeshAxis(mesh, ("data",)).check_placement("x", tree)


X = jnp.sin(jnp.arange(16.0)).reshape(8, 2)
W = jnp.array([0.5, -2.0])
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def named(kinds):
    return "-".join(kind.name for kind in kinds)


@pytest.fixture(params=itertools.product((AUTO, EXPLICIT), repeat=2), ids=named)
def mesh(request):
    """A mesh of four by two devices, with axes that are explicit or not."""
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=request.param)


@pytest.fixture
def axis(mesh):
    return MeshAxis(mesh, ("data",))


def rows(x, w):
    return jnp.tanh(x * w[None])


def total(x, w):
    return jnp.sum(rows(x, w), axis=0)


def over_devices(axis):
    """Functions under `shard_map`, with their naive equivalents."""
    sharded, replicated = axis.spec(0), axis.spec(None)
    summed = lambda x, w: axis.psum(total(x, w))
    gathered = lambda x, w: axis.all_gather(rows(x, w), 0)
    return {
        "rows": (axis.shard_map(rows, (sharded, replicated), sharded), rows),
        "psum": (axis.shard_map(summed, (sharded, replicated), replicated), total),
        "all_gather": (axis.shard_map(gathered, (sharded, replicated), replicated), rows),
        "closed over": (
            lambda x, w: axis.shard_map(lambda x: summed(x, w), (sharded,), replicated)(x),
            total,
        ),
    }


def assert_derivatives_agree(name, axis):
    """Gradients are summed over all devices, also those by what is closed over."""
    fun, naive = over_devices(axis)[name]
    assert_same(fun(X, W), naive(X, W))
    for number in (0, 1):
        gradient = lambda fun, number=number: jax.grad(
            lambda x, w: jnp.sum(jnp.sin(fun(x, w))), number
        )
        assert_same(jax.jit(gradient(fun))(X, W), gradient(naive)(X, W))


FUNCTIONS = ["rows", "psum", "all_gather", "closed over"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_under_shard_map_are_those_of_one_device(name, axis):
    assert_derivatives_agree(name, axis)


def test_shard_map_can_be_mapped(axis):
    on_all = axis.shard_map(rows, (axis.spec(0), axis.spec(None)), axis.spec(0))
    stacked = jax.vmap(on_all, in_axes=(None, 0))(X, jnp.stack([W, 2 * W]))
    assert_same(stacked, jnp.stack([rows(X, W), rows(X, 2 * W)]))


class TestOtherAxes:
    """What is sharded along another axis of the mesh stays so."""

    @pytest.fixture
    def on_all(self, axis):
        return jax.jit(axis.shard_map(rows, (axis.spec(0), axis.spec(None)), axis.spec(0)))

    @pytest.fixture
    def args(self, mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data", "model")))
        return x, jax.device_put(W, NamedSharding(mesh, P("model")))

    def test_values_are_those_of_one_device(self, on_all, args):
        assert_same(on_all(*args), rows(X, W))

    @pytest.mark.parametrize("mesh", [(AUTO, AUTO), (EXPLICIT, AUTO)], indirect=True, ids=named)
    def test_nothing_is_sent_if_the_other_axis_is_auto(self, on_all, args):
        """Along an explicit axis, JAX gathers."""
        assert not re.search(r"all-\w+\(", on_all.lower(*args).compile().as_text())

    @pytest.mark.parametrize("mesh", [(EXPLICIT, EXPLICIT)], indirect=True, ids=named)
    def test_the_sharding_is_kept_in_the_type_if_both_axes_are_explicit(self, on_all, args):
        assert jax.typeof(on_all(*args)).sharding.spec == P("data", "model")

    @pytest.mark.parametrize("spec", [P(("model", "data")), P("model", None)], ids=str)
    def test_the_same_axis_of_an_array_may_be_sharded_by_another(self, mesh, on_all, spec):
        assert_same(on_all(jax.device_put(X, NamedSharding(mesh, spec)), W), rows(X, W))


class TestNestedShardMap:
    """A function under `shard_map` over one axis may be called under one over the other axis."""

    @pytest.fixture
    def nested(self, axis):
        def inner(x):
            axis.check_outside()
            added = lambda x: 2 * x + axis.axis_index().astype(x.dtype)
            return axis.shard_map(added, (axis.spec(0),), axis.spec(0))(x)

        def over(name, mesh):
            spec = P(None, name)
            options = {"in_specs": spec, "out_specs": spec, "axis_names": {name}}
            outer = jax.jit(jax.shard_map(inner, mesh=mesh, check_vma=False, **options))
            return lambda x: outer(jax.device_put(x, NamedSharding(mesh, spec)))

        return over

    def test_over_the_other_axis(self, nested, mesh):
        indices = jnp.repeat(jnp.arange(4.0), 2)[:, None]
        assert_same(nested("model", mesh)(X), 2 * X + jnp.broadcast_to(indices, X.shape))

    def test_over_the_same_axis_is_rejected(self, nested, mesh):
        words = r"curvax: mesh= .* inside a jax.shard_map over \('data',\)"
        with pytest.raises(ValueError, match=words):
            nested("data", mesh)(X.reshape(2, 8))

    def test_over_another_mesh_is_rejected(self, nested):
        other = Mesh(np.array(jax.devices()).reshape(4, 2), ("rows", "columns"))
        words = r"curvax: the mesh has .* of another mesh, which has .*rows"
        with pytest.raises(ValueError, match=words):
            nested("columns", other)(X)


def test_closing_over_an_array_on_an_explicit_mesh_is_rejected_with_a_remedy(mesh, axis):
    """JAX cannot transpose it there; with auto axes only it gives the values of one device."""
    w = jax.device_put(W, NamedSharding(mesh, P()))
    on_all = axis.shard_map(lambda x: rows(x, w), (axis.spec(0),), axis.spec(0))
    if AxisType.Explicit not in mesh.axis_types:
        assert_same(on_all(X), rows(X, W))
        return
    with pytest.raises((ValueError, NotImplementedError)) as raised:
        on_all(X)
    assert "pass it as an argument instead" in "".join(raised.value.__notes__)


class TestSeveralAxes:
    @pytest.fixture
    def axis(self):
        mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
        return MeshAxis.of(mesh, ("c", "a"))

    def test_devices_are_counted_and_indexed_over_all_of_them(self, axis):
        assert axis.count == 4
        index = lambda x: x[:1, 0] * 0 + axis.axis_index().astype(x.dtype)
        indices = axis.shard_map(index, (axis.spec(0),), axis.spec(0))
        assert_same(indices(X), jnp.arange(4.0))

    def test_gathering_is_in_the_order_of_the_index(self, axis):
        gather = lambda x: axis.all_gather(axis.axis_index()[None], 0)
        gathered = axis.shard_map(gather, (axis.spec(0),), axis.spec(None))
        np.testing.assert_array_equal(gathered(X), np.arange(4))

    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_values_and_gradients_are_those_of_one_device(self, name, axis):
        assert_derivatives_agree(name, axis)


class TestErrors:
    @pytest.fixture
    def axis(self):
        return MeshAxis(mesh_of(3), ("data",))

    def test_an_even_batch_is_accepted(self, axis):
        axis.check_divides(6, "the batch")

    @pytest.mark.parametrize(
        ("length", "words"),
        [
            (7, r"curvax: the batch .* 3 devices .* 7 examples.* Use 6 or 9"),
            (2, r"has 2 examples.* Use 3\."),
        ],
    )
    def test_an_uneven_batch_is_rejected_with_lengths_that_divide(self, axis, length, words):
        with pytest.raises(ValueError, match=words):
            axis.check_divides(length, "the batch")

    def test_arrays_on_another_device_are_rejected(self, axis):
        elsewhere = jax.device_put(X, jax.devices()[1])
        words = r"curvax: x\['a'\] is committed to .*1.* \(3 devices\)"
        with pytest.raises(ValueError, match=words):
            axis.check_placement("x", {"a": elsewhere})

    def test_arrays_on_more_devices_are_rejected(self, axis):
        everywhere = jax.device_put(X, NamedSharding(mesh_of(8, name="all"), P("all")))
        words = r"curvax: x is committed to .*, …, which is not where"
        with pytest.raises(ValueError, match=words):
            axis.check_placement("x", everywhere)

    def test_traced_arrays_are_accepted(self, axis):
        def traced(x):
            axis.check_placement("x", x)
            return x

        elsewhere = jax.device_put(X, jax.devices()[1])
        assert_same(jax.jit(traced)(elsewhere), X)
