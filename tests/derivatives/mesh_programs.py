"""Derivatives split among the devices of a mesh, compared with one device.

Run by `test_mesh.py` on eight devices, with the names of the checks to be made: those of the
functions that begin with `check_`.
"""

import contextlib
import functools
import io
import itertools
import re
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import curvax

jax.config.update("jax_enable_x64", True)

KINDS = AxisType.Auto, AxisType.Explicit
POINTS = {
    "even": {"a": np.cos(np.arange(16.0)).reshape(8, 2), "b": np.sin(np.arange(8.0))},
    "odd": {"a": np.cos(np.arange(15.0)).reshape(5, 3), "b": np.arange(3.0), "c": np.float64(0.3)},
}
X = POINTS["even"]
WAVES = np.sin(np.arange(8.0))[:, None]
WEIGHT = np.linspace(1.0, 2.0, 14)


def residuals(p):
    """A vector and a matrix, on which each coordinate has an influence of its own."""
    flat = ravel_pytree(p)[0]
    vector = jnp.sin(WAVES * flat) @ jnp.cos(jnp.arange(1.0 * flat.size) * flat)
    return {"matrix": jnp.outer(vector[:2], flat[:3]), "vector": vector}


def stacked(p):
    return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(residuals(p))])


def loss(p):
    return jnp.sum(stacked(p) ** 2)


def mesh_of(count, kind=AxisType.Auto):
    return Mesh(np.array(jax.devices()[:count]), ("i",), axis_types=(kind,))


@functools.cache
def naive(name, point):
    """What one device computes at once."""
    flat, unflatten = ravel_pytree(POINTS[point])
    jacobian = lambda f: jax.jit(jax.jacfwd(lambda v: f(unflatten(v))))(flat)
    if name == "hessian":
        return jax.jit(jax.hessian(lambda v: loss(unflatten(v))))(flat)
    if name == "jacobian":
        return jacobian(residuals)
    if name == "gauss_newton":
        J = jacobian(stacked)
        return J.T @ (WEIGHT[:, None] * J)
    if name == "hessian_diagonal":
        return unflatten(jnp.diagonal(naive("hessian", point)))
    blocks = curvax.hessian_to_pytree(naive("hessian", point), POINTS[point])
    return {key: blocks[key][key] for key in blocks}


def compute(name, x, **options):
    """The result of one of the functions, and nothing beside."""
    if name == "jacobian":
        return curvax.jacobian(residuals, x, **options)[0]
    if name == "gauss_newton":
        return curvax.gauss_newton(stacked, x, WEIGHT, **options)[0]
    result = getattr(curvax, name)(loss, x, **options)
    return result[0] if name == "hessian" else result


def agree(actual, expected, about=""):
    assert jax.tree.structure(actual) == jax.tree.structure(expected), about
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-11, err_msg=str(about))


WAYS = [
    ("hessian", {}),
    ("jacobian", {"mode": "forward"}),
    ("jacobian", {"mode": "reverse"}),
    ("gauss_newton", {}),
    ("hessian_diagonal", {}),
    ("hessian_blocks", {}),
]


def is_placed_as_documented(result, way, mesh, replicated):
    """Split along the last axis for columns and along the first for rows, where that divides."""
    name, options = way
    last = name == "gauss_newton" or options.get("mode") == "forward"
    for array in jax.tree.leaves(result):
        axis = array.ndim - 1 if last else 0
        splits = array.ndim and not replicated and array.shape[axis] % mesh.shape["i"] == 0
        spec = PartitionSpec(*[None] * axis, "i") if splits else PartitionSpec()
        if not array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim):
            return False
    return True


def run_matrix(counts, kinds, points, sizes, ways, replications):
    """Each combination of these."""
    count = 0
    for combination in itertools.product(counts, kinds, points, sizes, ways, replications):
        devices, kind, point, size, (name, options), replicated = combination
        mesh = mesh_of(devices, kind)
        options = options | {"mesh": mesh, "batch_size": size, "replicated": replicated}
        result = compute(name, POINTS[point], **options)
        agree(result, naive(name, point), combination)
        assert is_placed_as_documented(result, (name, options), mesh, replicated), combination
        count += 1
    return count


def check_corners():
    """Rows on eight devices, columns on three of which the last has less to do."""
    rows = run_matrix([8], [AxisType.Auto], ["even"], [2], [WAYS[0], WAYS[2], WAYS[5]], [False])
    columns = [WAYS[0], WAYS[1], WAYS[3], WAYS[4]]
    return rows + run_matrix([3], [AxisType.Explicit], ["odd"], [3], columns, [False])


def check_matrix():
    return run_matrix([1, 2, 3, 8], KINDS[:1], POINTS, [1, 2, 3, 100], WAYS, [False, True])


def check_explicit():
    return run_matrix([1, 2, 3, 8], KINDS[1:], POINTS, [2, 100], WAYS, [False])


def run_placed(kinds, specs, ways):
    """Points that are split already: along another axis of the mesh, or along the very same."""
    count = 0
    for axis_types, spec, way in itertools.product(kinds, specs, ways):
        mesh = jax.make_mesh((4, 2), ("i", "model"), axis_types)
        (name, options), run = way, functools.partial(compute, way[0], mesh=mesh, axis="i")
        x = {key: put(leaf, mesh, *spec[: leaf.ndim]) for key, leaf in X.items()}
        run = functools.partial(run, batch_size=2, **options)
        for result in (run(x), jax.jit(run)(x)):
            agree(result, naive(name, "even"), (axis_types, spec, name))
            assert is_placed_as_documented(result, way, mesh, False)
            count += 1
    return count


def put(leaf, mesh, *spec):
    return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))


def check_placed():
    return run_placed([KINDS[:1] * 2, KINDS[1:] * 2], [(None, "model"), ("i",)], WAYS[:1])


def check_placed_anyhow():
    specs = [("model",), ("i",), (("i", "model"),), (None, "model"), ("i", "model")]
    return run_placed(itertools.product(KINDS, repeat=2), specs, WAYS)


def check_transformed():
    """Derivatives of derivatives, also by what a function closes over."""
    x = jax.tree.map(jnp.asarray, X)
    two = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), x)

    def naive_scaled(x, s):
        flat, unflatten = ravel_pytree(x)
        return jax.hessian(lambda v: s * loss(unflatten(v)))(flat)

    def transformed(fun):
        scalar = lambda x, s: jnp.sum(jnp.sin(fun(x, s)))
        grad, jvp = jax.grad(scalar, (0, 1)), lambda x, s: jax.jvp(fun, (x, s), (x, s))
        vmap = jax.jit(jax.vmap(fun, (0, None)))
        return jax.jit(lambda x, s: (grad(x, s), jvp(x, s)))(x, 2.0), vmap(two, 2.0)

    expected = transformed(naive_scaled)
    for mesh in (mesh_of(8, kind) for kind in KINDS):
        hessian = functools.partial(curvax.hessian, mesh=mesh)
        split = lambda x, s, h=hessian: h(lambda p: s * loss(p), x, batch_size=2)[0]
        agree(transformed(split), expected, mesh)
        within = lambda x, h=hessian: h(loss, x, memory_budget="1MB")[0]
        agree(jax.jit(within)(x), naive("hessian", "even"), mesh)
        aux = hessian(lambda x: (loss(x), 2 * x["b"]), x, has_aux=True)[2]
        agree(aux, 2 * X["b"], mesh)
    return "done"


def tanh_hessian(count, replicated=False, **options):
    """The compiled program of a Hessian of 512 coordinates."""
    mesh = mesh_of(count)
    data = np.sin(np.arange(40.0 * 512)).reshape(40, 512)
    f = lambda x: jnp.sum(jnp.tanh(data @ x) ** 2)
    run = lambda x: curvax.hessian(f, x, mesh=mesh, replicated=replicated, **options)[0]
    x = jax.device_put(np.linspace(0.0, 1.0, 512), NamedSharding(mesh, PartitionSpec()))
    return run, x


def check_examples():
    """The information of examples that are split among devices."""
    data = np.sin(np.arange(48.0)).reshape(16, 3)
    loglike = lambda x, d: jnp.sum(jnp.cos(x["b"][:3] * d)) * x["a"][0, 0]
    expected = curvax.fisher_information(loglike, X, data)[0]
    ways = {"batch_size": 1}, {"nbatches": 2}, {"memory_budget": "1MB", "objective": "time"}
    for count, kind, options in itertools.product((1, 8), KINDS, ways):
        F, _ = curvax.fisher_information(loglike, X, data, mesh=mesh_of(count, kind), **options)
        agree(F, expected, (count, kind, options))
        assert F.is_fully_replicated
    with pytest.raises(ValueError, match=r"data is split evenly among 3 devices .*Use 15 or 18"):
        curvax.fisher_information(loglike, X, data, mesh=mesh_of(3))
    return "done"


def check_program():
    """Nothing is sent but for what shall be whole, and memory falls with the number of devices."""
    collective = r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)[-a-z]*\("
    needs = {}
    for count, replicated in itertools.product((1, 2, 8), (False, True)):
        run, x = tanh_hessian(count, replicated, batch_size=8)
        compiled = jax.jit(run).lower(x).compile()
        found = re.findall(collective, compiled.as_text())
        assert found == (["all-gather"] if replicated and count > 1 else []), found
        usage = compiled.memory_analysis()
        assert usage.output_size_in_bytes == 512 * 512 * 8 // (1 if replicated else count)
        needs[count, replicated] = usage.output_size_in_bytes + usage.temp_size_in_bytes
    for count in (2, 8):
        assert needs[count, False] < needs[1, False] / (0.9 * count) + 40_000
        assert needs[count, True] < needs[1, True] + 512 * 512 * 8 / count + 40_000
    return "done"


def check_budget():
    """A budget is for each device, so that with more of them there is more."""

    def plan_for(count, budget):
        run, x = tanh_hessian(count, memory_budget=budget)
        with curvax.recorded_plans() as plans:
            run(x)
        return plans[0]

    def needs(count, size):
        run, x = tanh_hessian(count, batch_size=size)
        return curvax.memory_usage(run, x).added_bytes

    for count, budget in ((1, 2_300_000), (8, 2_300_000), (8, 400_000)):
        plan = plan_for(count, budget)
        assert plan.max_size == 512 // count
        assert plan.usage.added_bytes == needs(count, plan.batch_size) <= budget
        is_all = plan.batch_size == plan.max_size
        assert is_all == (budget > 2_000_000 and count == 8)
        assert is_all or needs(count, int(1.1 * plan.batch_size) + 1) > budget
    with pytest.raises(curvax.MemoryBudgetError):
        plan_for(1, 400_000)
    return "done"


def check_disk():
    """Blocks of one device each: how many devices there were is not to be seen in the store."""
    folder = Path(tempfile.mkdtemp())
    x, f = POINTS["odd"], loss
    expected = naive("hessian", "odd")
    two_axes = jax.make_mesh((4, 2), ("i", "model"), KINDS[1:] * 2)
    for number, mesh in enumerate((mesh_of(3), two_axes)):
        path = folder / str(number)
        H, _ = curvax.hessian(f, x, mesh=mesh, axis="i", batch_size=2, out=path)
        agree(H[...], expected)
        assert H.chunks == (2, 19)
        for block in (0, 3, 9):
            (path / ".curvax" / "done" / str(block)).unlink()
        before = (path / "c" / "1" / "0").stat().st_mtime_ns
        with jax.set_mesh(mesh_of(8)):
            H, _ = curvax.hessian(f, x, mesh=mesh_of(8), batch_size=2, out=path)
        agree(H[...], expected)
        assert (path / "c" / "1" / "0").stat().st_mtime_ns == before
        assert len([*(path / ".curvax" / "done").iterdir()]) == 10
        curvax.hessian(f, x, out=path)
    J, _ = curvax.jacobian(residuals, x, mesh=mesh_of(8), out=folder / "J")
    agree(jax.tree.map(lambda array: array[...], J), naive("jacobian", "odd"))
    assert J["vector"].chunks == (8, 3)  # So that there is one for each device.
    with curvax.recorded_plans() as plans:
        curvax.hessian(f, x, mesh=mesh_of(8), memory_budget="1MB", out=folder / "H")
    assert plans[0].max_size == 3
    return "done"


def check_errors():
    """What is wrong only where there are several devices."""
    mesh = mesh_of(8)
    refused = functools.partial(pytest.raises, ValueError)
    elsewhere = jax.device_put(jnp.ones(3), jax.devices()[1])
    with refused(match=r"^curvax\.hessian: x\['b'\] is committed to cpu:1, .*Move it there"):
        curvax.hessian(loss, X | {"b": elsewhere}, mesh=mesh)
    with refused(match=r"nbatches=4 is more than .* on each of 8 devices: 3\.$"):
        curvax.hessian(loss, X, nbatches=4, mesh=mesh)
    inner = lambda x: curvax.hessian(loss, x, mesh=mesh, replicated=True)[0]
    outer = jax.shard_map(inner, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    with refused(match=r"inside of a jax.shard_map over \('i',\)"):
        jax.jit(outer)(jax.tree.map(jnp.asarray, X))
    explicit = mesh_of(8, AxisType.Explicit)
    scale = jax.device_put(np.ones(8), NamedSharding(explicit, PartitionSpec()))
    with refused(match=r"f closes over an array float64\[8\] .*Explicit.*numpy.asarray"):
        curvax.hessian(lambda x: jnp.sum(scale * x["b"] ** 3), X, mesh=explicit)
    two_axes = jax.make_mesh((4, 2), ("i", "model"), KINDS[1:] * 2)
    with refused(match="progress=True calls back from the devices"):
        curvax.hessian(loss, X, mesh=two_axes, axis="i", progress=True)
    with refused(match="say along which the work is to be split"):
        curvax.hessian(loss, X, mesh=two_axes)
    return "done"


def check_progress():
    """As many blocks as a device has."""
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        curvax.hessian(loss, X, mesh=mesh_of(8), batch_size=2, progress=True)
        jax.effects_barrier()
    assert "2/2 " in shown.getvalue(), shown.getvalue()
    return "done"


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    for name in sys.argv[1:]:
        sys.stdout.write(f"{name}: {globals()[f'check_{name}']()}\n")
        sys.stdout.flush()
