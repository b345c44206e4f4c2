"""The optimizer on meshes, compared with one device. Run by `test_mesh.py` on eight devices.

The first argument is the name of a check; the others are its own.
"""

import contextlib
import itertools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import curvax
from curvax.curvature.linalg.tasks import Power

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import key
from optimizer import problems
from optimizer.collectives import collectives_of
from optimizer.models import MODELS
from optimizer.problems import ADAPTIVE, VALUES, loss, make, make_params

jax.config.update("jax_enable_x64", True)

FIXED = {"norm_constraint": 0.01, "num_burnin_steps": 2}
RULES = {"fixed": FIXED, "adaptive": ADAPTIVE | {"num_burnin_steps": 1}}


def mesh_of(count, kind=AxisType.Auto, names=("data",), shape=None):
    shape = (count,) if shape is None else shape
    kinds = (kind,) * len(shape)
    return jax.make_mesh(shape, names, axis_types=kinds, devices=jax.devices()[:count])


def close(found, expected, rtol=1e-9, atol=1e-11):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol, atol)


def trained(optimizer, model, num_steps, batches=lambda batch: batch, params=None):
    """Parameters, state and statistics after some steps; the first batch is seen again later."""
    _, make_model, make_batch = MODELS[model]
    params = make_model() if params is None else params
    batch = lambda number: batches(make_batch(number % 4, 8))
    is_adaptive = optimizer.use_adaptive_damping
    values = {} if is_adaptive else {"learning_rate": 0.1, "momentum": 0.5, "damping": 0.1}
    state = optimizer.init(params, key(0), batch(0))
    history = []
    for number in range(num_steps):
        params, state, stats = optimizer.step(
            params, state, key(number), batch=batch(number), **values
        )
        history.append(stats)
    return params, state, history


def optimizer_of(model, **options):
    return curvax.Optimizer(jax.value_and_grad(MODELS[model][0]), l2_reg=1e-3, **options)


def check_training(model, rules, flags):
    """20 steps, in a mode that draws, on one, two and eight devices; flags are 0 or 1 each."""
    names = ("distributed_inverses", "distributed_precon_apply")
    options = RULES[rules] | dict(zip(names, map(bool, map(int, flags)), strict=True))
    expected = trained(optimizer_of(model, **RULES[rules]), model, 20)
    assert expected[2][-1]["loss"] < 0.8 * expected[2][0]["loss"]
    for count in (1, 2, 8):
        close(trained(optimizer_of(model, mesh=mesh_of(count), **options), model, 20), expected)


def check_modes():
    """All modes draw the same on any number of devices, also for parameters that are generic."""
    modes = ("fisher_gradients", "fisher_curvature_prop", "fisher_empirical", "ggn_exact")
    others = [{}, {"register_only_generic": True}, {"num_estimator_samples": 2}]
    others.append({"microbatch_size": 1})
    for mode, options in zip(modes, others, strict=True):
        both = [make(estimation_mode=mode, **options, mesh=mesh) for mesh in (mesh_of(8), None)]
        close(*(trained(optimizer, "mlp", 2)[:2] for optimizer in both))
    close(*(_losses_in_loops(mesh) for mesh in (mesh_of(2), None)))


def _losses_in_loops(mesh):
    """Parameters after a step with losses in `vmap` over examples, and in a loop over time."""

    def several(params, batch):
        x, y = batch

        def one(x, y):
            rows = jnp.stack([jnp.tanh(x @ params["in"]), y]) @ params["out"]
            curvax.register_normal_predictive_distribution(rows, variance=1.0)
            return jnp.sum(rows**2)

        def step(total, time):
            rows = jnp.tanh(x @ params["in"] * time) @ params["out"]
            curvax.register_normal_predictive_distribution(rows, variance=1.0)
            return total + jnp.mean(rows**2), None

        total, _ = jax.lax.scan(step, jnp.zeros(()), jnp.arange(1.0, 4.0))
        return total + jnp.mean(jax.vmap(one)(x, y))

    batch = problems.make_batch(size=8)[0], jnp.cos(problems.make_batch(1, size=8)[0][:, :2])
    params = {"in": make_params()["in"]["w"][:, :2], "out": make_params()["out"]["w"][:2]}
    optimizer = make(jax.value_and_grad(several), estimation_mode="fisher_gradients", mesh=mesh)
    state = optimizer.init(params, key(0), batch)
    return optimizer.step(params, state, key(1), batch=batch, **VALUES)[:2]


SPLIT = {"in": {"w": P(None, "model"), "b": P("model")}, "out": {"w": P("model"), "b": P()}}


def check_meshes():
    """Explicit and automatic axes, a second axis, parameters split along that; what was set."""
    expected = trained(make(), "mlp", 3)
    axes = {"names": ("model", "data"), "shape": (2, 4)}
    for kind in (AxisType.Auto, AxisType.Explicit):
        one, two = mesh_of(8, kind), mesh_of(8, kind, **axes)
        with jax.set_mesh(one) if kind is AxisType.Explicit else contextlib.nullcontext():
            optimizer = make(mesh=one)
            found = trained(optimizer, "mlp", 3)
        close(found, expected)
        assert jax.tree.leaves(found[0])[0].sharding == NamedSharding(one, P())
        assert all(program._cache_size() == 1 for program in optimizer._programs._known.values())
        to = jax.tree.map(lambda spec, mesh=two: NamedSharding(mesh, spec), SPLIT)
        optimizer = make(mesh=two, pmap_axis_name="data")
        params, state, stats = trained(
            optimizer, "mlp", 3, params=jax.device_put(make_params(), to)
        )
        close((params, state, stats), expected)
        for tree in (params, state.velocities):
            assert jax.tree.map(lambda x, s: x.sharding == s, tree, to) == jax.tree.map(
                lambda _: True, to
            )
        assert all(program._cache_size() == 1 for program in optimizer._programs._known.values())
        check_inside(two, jax.device_put(make_params(), to), expected)


def check_inside(mesh, params, expected):
    """Steps in a loop of the caller's own, inside of `jit`."""
    optimizer = make(mesh=mesh, pmap_axis_name="data", donate_buffers=False)
    batches = [problems.make_batch(number, 8) for number in range(3)]
    state = optimizer.init(params, key(0), batches[0])
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *batches)
    stacked = jax.device_put(stacked, NamedSharding(mesh, P(None, "data")))
    values = {"learning_rate": 0.1, "momentum": 0.5, "damping": 0.1}

    @jax.jit
    def steps(params, state, batches):
        def body(carry, batch):
            *carry, stats = optimizer.step(*carry, key(0), batch=batch, **values)
            return tuple(carry), stats

        return jax.lax.scan(body, (params, state), batches)

    (params, state), stats = steps(params, state, stacked)
    close((params, state), expected[:2])
    close(stats["loss"], np.array([each["loss"] for each in expected[2]]))


def _troubled(params, batch):
    """Of an example whose trouble is zero, only the gradient at the first layer is NaN."""
    x, y, trouble = batch
    inner = x @ params["in"]["w"] + params["in"]["b"]
    hidden = jnp.sqrt(inner**2 * trouble[:, None])
    prediction = hidden @ params["out"]["w"] + params["out"]["b"]
    curvax.register_squared_error_loss(prediction, y, weight=0.5)


def check_refused():
    """All devices refuse what is not finite on one of them: in burn-in, and in an update."""
    batches = [(*problems.make_batch(number, 8), jnp.ones(8)) for number in range(3)]
    nan, zero = (
        (*batches[1][:2], jnp.ones(8).at[5].set(value)) for value in (jnp.nan, jnp.zeros(()))
    )

    def run(**options):
        optimizer = make(
            jax.value_and_grad(lambda params, batch: loss(params, batch[:2])),
            value_func_for_estimator=_troubled,
            **options,
        )
        params = make_params()
        state = optimizer.init(params, key(0), batches[0])
        state, _ = optimizer.burnin(3, params, state, key(1), [batches[0], nan, batches[1]])
        steps = params, state
        for number, batch in enumerate((batches[2], zero, nan, batches[0])):
            *steps, stats = optimizer.step(*steps, key(number), batch=batch, **VALUES)
            assert not stats["skipped"]
        return steps

    expected_params, expected = run()
    first, second = expected.estimator_state.blocks_states
    assert (int(first.inputs_factor.refused), int(second.inputs_factor.refused)) == (3, 2)
    for count in (2, 8):
        close(run(mesh=mesh_of(count)), [expected_params, expected])
        found, state = run(mesh=mesh_of(count), shard_state=True)
        close(found, expected_params)
        shards = state.estimator_state.shards
        refused = [int(number) for own in shards for number in own.refused]
        assert sorted(refused) == [2, 3]


def check_own_map():
    """A step inside of a `shard_map` of the caller's takes the examples of its device."""
    optimizer = make(pmap_axis_name="mine", multi_device=True, estimation_mode="fisher_gradients")
    one = make(estimation_mode="fisher_gradients")
    batch, params = problems.make_batch(0, 8), make_params()
    state = one.init(params, key(0), batch)
    step = lambda params, state, batch: optimizer.step(params, state, key(1), batch=batch, **VALUES)
    options = {"in_specs": (P(), P(), P("mine")), "out_specs": P(), "check_vma": False}
    mapped = jax.shard_map(step, mesh=mesh_of(4, names=("mine",)), **options)
    found = jax.jit(mapped)(params, state, batch)
    close(found, one.step(params, state, key(1), batch=batch, **VALUES))


def check_methods():
    """Everything else than steps; arrays of NumPy's; functions with a state, a key and more."""
    one, several = make(), make(mesh=mesh_of(8))
    as_numpy = lambda batch: jax.tree.map(np.asarray, batch)
    expected, found = trained(one, "mlp", 2)[:2], trained(several, "mlp", 2, as_numpy)[:2]
    close(found, expected)
    batch, everything = problems.make_batch(0, 8), []
    for optimizer, (params, state) in ((one, expected), (several, found)):
        vectors, args = [params, state.velocities], (params, batch)
        told = (
            optimizer.compute_loss_value(args),
            optimizer.compute_l2_quad_matrix(vectors),
            optimizer.compute_exact_quad_model(vectors, params, args),
            optimizer.compute_approx_quad_model(state, vectors, params),
            jax.jit(optimizer.compute_loss_value)(args),
            optimizer.burnin(2, params, state, key(3), itertools.repeat(batch))[0],
        )
        saved = jax.tree.map(np.array, (params, state))
        batches = map(as_numpy, (problems.make_batch(n, 8) for n in itertools.count()))
        options = {"progress": False, **VALUES}
        everything.append((*told, *optimizer.fit(*saved, key(4), batches, 2, **options)))
    close(*everything)
    donated = jax.tree.leaves(found[0])[0]
    several.step(*found, key(5), batch=batch, **VALUES)
    assert donated.is_deleted()
    with pytest.raises(ValueError, match="took over their buffers"):
        several.step(*found, key(5), batch=batch, **VALUES)
    check_functions()


def check_functions():
    """Rows of examples are put together, numbers averaged or added up, and keys differ."""

    def full(params, func_state, rng, batch):
        value = loss(params, batch)
        aux = {"rows": batch[0][:, 0], "count": batch[0].shape[0], "drawn": jax.random.normal(rng)}
        aux["as long as a share"] = jnp.mean(batch[0][:, :1], axis=0)
        return value, ({"mean": jnp.mean(batch[0]), "steps": func_state["steps"] + 1}, aux)

    def step(**options):
        flags = {f"value_func_has_{name}": True for name in ("aux", "state", "rng")}
        optimizer = make(jax.value_and_grad(full, has_aux=True), **flags, **options)
        params, batch = make_params(), problems.make_batch(0, 8)
        func_state = {"mean": 0.0, "steps": 0}
        state = optimizer.init(params, key(0), batch, func_state)
        return optimizer.step(params, state, key(1), batch=batch, func_state=func_state, **VALUES)

    expected, found = step(), step(multi_device=True)
    drawn = [stats["aux"].pop("drawn") for *_, stats in (expected, found)]
    close(found, expected)
    own = jax.random.split(key(1))[1]
    each = [jax.random.normal(jax.random.fold_in(own, device)) for device in range(8)]
    close(drawn, [jax.random.normal(own), jnp.mean(jnp.stack(each))])


def check_errors():
    """What is wrong is said before anything is computed, in the words of the caller."""
    params, batch = make_params(), problems.make_batch(0, 8)
    optimizer = make(mesh=mesh_of(4))
    state = optimizer.init(params, key(0), batch)

    def refused(words, params=params, state=state, keys=None, batch=batch):
        rng = key(1) if keys is None else keys
        with pytest.raises(ValueError, match=words):
            optimizer.step(params, state, rng, batch=batch, **VALUES)

    short = jax.tree.map(lambda x: x[:6], batch)
    refused(r"batch\[0\] is split evenly among 4 devices .* 6 examples.* Use 4 or 8", batch=short)
    refused(r"batch\[1\] .* has 6 examples", batch=(batch[0], short[1]))
    elsewhere = jax.device_put(params, jax.devices()[5])
    refused(r"params\['in'\]\['b'\] is committed to .* Move it there by", params=elsewhere)
    refused(r"batch\[0\] is committed to", batch=jax.device_put(batch, jax.devices()[0]))
    stacked = jax.tree.map(lambda x: jnp.stack([x] * 4), (params, state))
    refused("params have a first axis of 4 .* given once", params=stacked[0])
    refused("state.step_counter has the shape \\(4,\\)", state=stacked[1])
    refused("array of random keys", keys=jax.random.split(key(1), 4))
    with pytest.raises(ValueError, match="array of random keys"):
        optimizer.init(params, jax.random.split(key(1), 4), batch)
    with pytest.raises(ValueError, match="6 examples"):
        jax.jit(lambda p: optimizer.step(p, state, key(1), batch=short, **VALUES))(params)
    with pytest.raises(ValueError, match="6 examples"):
        optimizer.compute_loss_value((params, short))
    none = jax.tree.map(lambda x: x[:0], batch)
    with pytest.raises(ValueError, match="has no examples"):
        optimizer.compute_loss_value((params, none))
    with pytest.raises(ValueError, match="has no examples"):
        jax.jit(lambda p: optimizer.compute_loss_value((p, none)))(params)
    close(optimizer.step(params, state, key(1), batch=batch, **VALUES)[0], _one_step())


def _one_step():
    params, batch, optimizer = make_params(), problems.make_batch(0, 8), make()
    state = optimizer.init(params, key(0), batch)
    return optimizer.step(params, state, key(1), batch=batch, **VALUES)[0]


def check_collectives():
    """What the compiled step sends, on two devices and on eight."""
    found = {count: collectives_of(_program(*_deep_step([6] * 9, count))) for count in (2, 8)}
    sys.stdout.write(json.dumps(found) + "\n")


def _deep_step(sizes, count):
    """A step for a network with layers of these sizes: the optimizer, and the arguments."""

    def deep(params, batch):
        x, y = batch
        for w in params:
            x = jnp.tanh(x @ w)
        prediction = curvax.register_squared_error_loss(x, y)
        return jnp.mean((prediction - y) ** 2)

    drawn = np.random.default_rng(0).standard_normal
    params = [jnp.asarray(drawn((m, n))) for m, n in itertools.pairwise(sizes)]
    batch = tuple(jnp.asarray(drawn((8, size))) for size in (sizes[0], sizes[-1]))
    options = {"mesh": mesh_of(count), "estimation_mode": "fisher_gradients"}
    optimizer = make(jax.value_and_grad(deep), donate_buffers=False, **options)
    args = {"params": params, "state": optimizer.init(params, key(0), batch), "rng": key(1)}
    optimizer.step(*args.values(), batch=batch, **VALUES)
    return optimizer, {**args, "batch": batch, "func_state": None, **VALUES}


def check_balance():
    """What each of eight devices inverts in a step: cubes of the sizes of its matrices."""
    sizes = [78, 100, 50, 25, 3, 25, 50, 100, 78]
    work = [[] for _ in range(8)]
    each = Power.each

    def noted(self, *row):
        size = row[0].shape[-1]
        note = lambda device: work[device].append(size**3)
        jax.debug.callback(note, jax.lax.axis_index("data"))
        return each(self, *row)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Power, "each", noted)
        _deep_step(sizes, 8)
        jax.effects_barrier()
    sys.stdout.write(json.dumps(work) + "\n")


def _program(optimizer, args):
    """The text of the compiled step."""
    programs = optimizer._programs
    (step,) = (run for name, run in programs._known.items() if name[0] == "step")
    args |= {name: jnp.asarray(args[name], jnp.float64) for name in VALUES}
    placed = programs._devices.placed("step", args)
    return step.lower(*placed.values()).compile().as_text()


CHECKS = {name.removeprefix("check_"): fun for name, fun in globals().items() if "check_" in name}

if __name__ == "__main__":
    CHECKS[sys.argv[1]](*sys.argv[2:])
    sys.stdout.write("all agree\n")
