"""Steps on the devices of a mesh are those of one device."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import curvax
from curvax.curvature.linalg.tasks import Power
from helpers import assert_same, key, mesh_of, slow_but
from optimizer.collectives import collectives_of
from optimizer.mesh_cases import GIVEN, RULES, optimizer_of, same, trained
from optimizer.problems import ADAPTIVE, VALUES, loss, make, make_batch, make_params, train

KINDS = [AxisType.Auto, AxisType.Explicit]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@functools.cache
def trained_on_one_device(model, rules):
    return trained(optimizer_of(model, **RULES[rules]), model, 20)


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize(
    ("model", "rules", "inverses", "products"),
    [
        slow_but([("mlp", "adaptive", True, True), ("cnn", "fixed", False, False)], *case)
        for case in itertools.product(
            ("mlp", "cnn", "transformer"), ("fixed", "adaptive"), (False, True), (False, True)
        )
    ],
)
def test_training_is_that_of_one_device(model, rules, inverses, products, count):
    """Whether or not inverses and products with them are distributed over devices."""
    expected = trained_on_one_device(model, rules)
    assert expected[2][-1]["loss"] < 0.8 * expected[2][0]["loss"]
    flags = {"distributed_inverses": inverses, "distributed_precon_apply": products}
    optimizer = optimizer_of(model, mesh=mesh_of(count), **RULES[rules], **flags)
    same(trained(optimizer, model, 20), expected)


@pytest.mark.parametrize(
    "options",
    [
        ADAPTIVE,
        {"use_step_rejection": True, "num_burnin_steps": 1, "distributed_inverses": False},
    ],
    ids=["adaptive", "with step rejection"],
)
def test_training_on_all_devices_is_that_of_one(options):
    values = {} if options is ADAPTIVE else VALUES
    batches = lambda number: make_batch(number % 4, 16)

    def steps(**where):
        optimizer, params = make(**where, **options), make_params()
        state = optimizer.init(params, key(0), batches(0))
        return train(optimizer, 6, params, state, batches=batches, **values)

    found = steps(multi_device=True)
    assert jax.tree.leaves(found[0])[0].sharding.device_set == set(jax.devices())
    assert_same(found, steps(), 1e-8, 1e-10)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("fisher_gradients", {}),
        ("fisher_curvature_prop", {"register_only_generic": True}),
        ("fisher_empirical", {"num_estimator_samples": 2}),
        ("ggn_exact", {"microbatch_size": 1}),
    ],
)
def test_samples_do_not_depend_on_the_number_of_devices(mode, options):
    make_one = functools.partial(make, estimation_mode=mode, **options)
    found, expected = (trained(make_one(mesh=mesh), "mlp", 2)[:2] for mesh in (mesh_of(8), None))
    same(found, expected)


def test_samples_of_losses_in_vmap_and_scan_do_not_depend_on_the_number_of_devices():
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

    batch = make_batch(size=8)[0], jnp.cos(make_batch(1, size=8)[0][:, :2])

    def step(mesh):
        params = {"in": make_params()["in"]["w"][:, :2], "out": make_params()["out"]["w"][:2]}
        options = {"estimation_mode": "fisher_gradients", "mesh": mesh}
        optimizer = make(jax.value_and_grad(several), **options)
        state = optimizer.init(params, key(0), batch)
        return optimizer.step(params, state, key(1), batch=batch, **VALUES)[:2]

    same(step(mesh_of(2)), step(None))


class TestMeshes:
    """Auto and explicit axes, and parameters that are sharded along a second axis."""

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls):
        return trained(make(), "mlp", 3)

    @staticmethod
    def two_axes(kind):
        return jax.make_mesh((2, 4), ("model", "data"), axis_types=(kind, kind))

    @staticmethod
    def shardings(mesh):
        specs = {"in": {"w": P(None, "model"), "b": P("model")}, "out": {"w": P("model"), "b": P()}}
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    @each_kind
    def test_one_axis(self, kind, expected):
        mesh = mesh_of(8, kind)
        with jax.set_mesh(mesh) if kind is AxisType.Explicit else contextlib.nullcontext():
            found = trained(make(mesh=mesh), "mlp", 3)
        same(found, expected)
        assert jax.tree.leaves(found[0])[0].sharding == NamedSharding(mesh, P())

    @each_kind
    def test_parameters_sharded_along_a_second_axis_stay_so(self, kind, expected):
        mesh = self.two_axes(kind)
        to = self.shardings(mesh)
        optimizer = make(mesh=mesh, pmap_axis_name="data")
        params, state, stats = trained(
            optimizer, "mlp", 3, params=jax.device_put(make_params(), to)
        )
        same((params, state, stats), expected)
        for tree in (params, state.velocities):
            assert jax.tree.map(lambda x: x.sharding, tree) == to

    @each_kind
    @pytest.mark.parametrize("axes", ["one axis", "two axes"])
    def test_nothing_is_compiled_after_the_first_step(self, kind, axes, compilations):
        if axes == "one axis":
            mesh, params = mesh_of(8, kind), make_params()
        else:
            mesh = self.two_axes(kind)
            params = jax.device_put(make_params(), self.shardings(mesh))
        optimizer = make(mesh=mesh, pmap_axis_name="data")
        batches = [make_batch(number, 8) for number in range(3)]
        keys = [key(number) for number in range(3)]
        state = optimizer.init(params, key(0), batches[0])
        first = optimizer.step(params, state, keys[0], batch=batches[0], **GIVEN)
        assert compilations
        compilations.clear()
        second = optimizer.step(*first[:2], keys[1], batch=batches[1], **GIVEN)
        optimizer.step(*second[:2], keys[2], batch=batches[2], **GIVEN)
        assert not compilations

    @each_kind
    def test_steps_in_a_scan_under_jit(self, kind, expected):
        mesh = self.two_axes(kind)
        optimizer = make(mesh=mesh, pmap_axis_name="data", donate_buffers=False)
        batches = [make_batch(number, 8) for number in range(3)]
        params = jax.device_put(make_params(), self.shardings(mesh))
        state = optimizer.init(params, key(0), batches[0])
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *batches)
        stacked = jax.device_put(stacked, NamedSharding(mesh, P(None, "data")))

        @jax.jit
        def steps(params, state, batches):
            def body(carry, batch):
                *carry, stats = optimizer.step(*carry, key(0), batch=batch, **GIVEN)
                return tuple(carry), stats

            return jax.lax.scan(body, (params, state), batches)

        (params, state), stats = steps(params, state, stacked)
        same((params, state), expected[:2])
        same(stats["loss"], jnp.stack([each["loss"] for each in expected[2]]))


class TestCurvatureThatIsNotFinite:
    """All devices skip what is not finite on one of them, block by block, as one device does."""

    @staticmethod
    def troubled(params, batch):
        """A loss whose gradient at the first layer is NaN for an example with zero trouble."""
        x, y, trouble = batch
        inner = x @ params["in"]["w"] + params["in"]["b"][None]
        hidden = jnp.sqrt(inner**2 * trouble[:, None])
        prediction = hidden @ params["out"]["w"] + params["out"]["b"][None]
        curvax.register_squared_error_loss(prediction, y, weight=0.5)

    def steps(self, **options):
        """Parameters and state after a burn-in and steps, with troubled batches in both."""
        batches = [(*make_batch(number, 8), jnp.ones(8)) for number in range(3)]
        nan, zero = (
            (*batches[1][:2], jnp.ones(8).at[5].set(value)) for value in (jnp.nan, jnp.zeros(()))
        )
        optimizer = make(
            jax.value_and_grad(lambda params, batch: loss(params, batch[:2])),
            value_func_for_estimator=self.troubled,
            **options,
        )
        params = make_params()
        state = optimizer.init(params, key(0), batches[0])
        state, _ = optimizer.burnin(3, params, state, key(1), [batches[0], nan, batches[1]])
        reached = params, state
        for number, batch in enumerate((batches[2], zero, nan, batches[0])):
            *reached, stats = optimizer.step(*reached, key(number), batch=batch, **VALUES)
            assert not stats["skipped"]
        return tuple(reached)

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls):
        return cls().steps()

    def test_one_device_counts_what_it_skips(self, expected):
        first, second = expected[1].estimator_state.blocks_states
        assert (int(first.inputs_factor.refused), int(second.inputs_factor.refused)) == (3, 2)

    @pytest.mark.parametrize("count", [2, 8])
    def test_with_a_replicated_state(self, expected, count):
        same(self.steps(mesh=mesh_of(count)), expected)

    @pytest.mark.parametrize("count", [2, 8])
    def test_with_a_sharded_state(self, expected, count):
        found, state = self.steps(mesh=mesh_of(count), shard_state=True)
        same(found, expected[0])
        refused = [int(n) for own in state.estimator_state.shards for n in own.refused]
        assert sorted(refused) == [2, 3]


def test_a_step_under_shard_map_takes_the_examples_of_its_device():
    optimizer = make(pmap_axis_name="mine", multi_device=True, estimation_mode="fisher_gradients")
    one = make(estimation_mode="fisher_gradients")
    batch, params = make_batch(0, 8), make_params()
    state = one.init(params, key(0), batch)
    step = lambda params, state, batch: optimizer.step(params, state, key(1), batch=batch, **VALUES)
    specs = {"in_specs": (P(), P(), P("mine")), "out_specs": P()}
    mapped = jax.shard_map(step, mesh=mesh_of(4, name="mine"), check_vma=False, **specs)
    found = jax.jit(mapped)(params, state, batch)
    same(found, one.step(params, state, key(1), batch=batch, **VALUES))


def as_numpy(tree):
    return jax.tree.map(np.array, tree)


class TestMethods:
    """Everything besides steps, on eight devices and on one."""

    batch = make_batch(0, 8)

    @pytest.fixture(scope="class")
    @classmethod
    def both(cls):
        """Optimizers on a mesh and on one device, each with parameters and a state of its own."""
        several, one = make(mesh=mesh_of(8)), make()
        found, expected = trained(several, "mlp", 2, as_numpy)[:2], trained(one, "mlp", 2)[:2]
        same(found, expected)
        return (several, *found), (one, *expected)

    @pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
    def test_the_loss(self, both, transform):
        args = lambda params: (params, self.batch)
        same(*(transform(own.compute_loss_value)(args(params)) for own, params, _ in both))

    @pytest.mark.parametrize("name", ["compute_l2_quad_matrix", "exact", "approx"])
    def test_quadratic_models(self, both, name):
        def model(optimizer, params, state):
            vectors = [params, state.velocities]
            if name == "exact":
                args = vectors, params, (params, self.batch)
                return optimizer.compute_exact_quad_model(*args)
            if name == "approx":
                return optimizer.compute_approx_quad_model(state, vectors, params)
            return optimizer.compute_l2_quad_matrix(vectors)

        same(*(model(*own) for own in both))

    def test_burnin(self, both):
        batches = itertools.repeat(self.batch)
        same(*(own.burnin(2, *reached, key(3), batches)[0] for own, *reached in both))

    def test_fit_with_arrays_of_numpy(self, both):
        def fitted(optimizer, *reached):
            batches = (as_numpy(make_batch(number, 8)) for number in itertools.count())
            options = {"progress": False, **VALUES}
            return optimizer.fit(*as_numpy(reached), key(4), batches, 2, **options)

        found, expected = (fitted(*own) for own in both)
        same(tuple(found), tuple(expected))

    def test_buffers_are_donated(self):
        optimizer = make(mesh=mesh_of(8))
        first = trained(optimizer, "mlp", 1)[:2]
        optimizer.step(*first, key(5), batch=self.batch, **VALUES)
        assert jax.tree.leaves(first[0])[0].is_deleted()
        with pytest.raises(ValueError, match="took over their buffers"):
            optimizer.step(*first, key(5), batch=self.batch, **VALUES)


class TestAuxiliaryOutputs:
    """Of a function with a state, a key and auxiliary outputs, on eight devices and on one."""

    @staticmethod
    def full(params, func_state, rng, batch):
        value = loss(params, batch)
        aux = {
            "rows": batch[0][:, 0],
            "count": batch[0].shape[0],
            "sample": jax.random.normal(rng),
            "as long as a shard": jnp.mean(batch[0][:, :1], axis=0),
        }
        return value, ({"mean": jnp.mean(batch[0]), "steps": func_state["steps"] + 1}, aux)

    @pytest.fixture(scope="class")
    @classmethod
    def both(cls):
        def step(**options):
            flags = {f"value_func_has_{name}": True for name in ("aux", "state", "rng")}
            optimizer = make(jax.value_and_grad(cls.full, has_aux=True), **flags, **options)
            params, batch = make_params(), make_batch(0, 8)
            func_state = {"mean": 0.0, "steps": 0}
            state = optimizer.init(params, key(0), batch, func_state)
            values = {"func_state": func_state, **VALUES}
            *result, stats = optimizer.step(params, state, key(1), batch=batch, **values)
            sample = stats["aux"].pop("sample")
            return (*result, stats), sample

        return step(multi_device=True), step()

    def test_rows_are_concatenated_and_numbers_averaged_or_summed(self, both):
        (found, _), (expected, _) = both
        same(found, expected)

    def test_each_device_has_a_key_of_its_own(self, both):
        (_, found), (_, expected) = both
        rng = jax.random.split(key(1))[1]
        each = [jax.random.normal(jax.random.fold_in(rng, device)) for device in range(8)]
        same(found, jnp.mean(jnp.stack(each)))
        same(expected, jax.random.normal(rng))


class TestErrors:
    """On four devices, what is wrong is said before anything is computed."""

    batch = make_batch(0, 8)
    short = jax.tree.map(lambda x: x[:6], batch)
    none = jax.tree.map(lambda x: x[:0], batch)

    @pytest.fixture(scope="class")
    @classmethod
    def initialised(cls):
        optimizer, params = make(mesh=mesh_of(4), donate_buffers=False), make_params()
        return optimizer, params, optimizer.init(params, key(0), cls.batch)

    @pytest.fixture
    def rejected(self, initialised):
        optimizer, params, state = initialised

        def check(words, rng=None, **changed):
            args = {"params": params, "state": state, "batch": self.batch} | changed
            with pytest.raises(ValueError, match=words):
                optimizer.step(rng=key(1) if rng is None else rng, **args, **VALUES)

        return check

    def test_batches_that_do_not_divide(self, rejected):
        words = r"batch\[0\] is split evenly among 4 devices .* 6 examples.* Use 4 or 8"
        rejected(words, batch=self.short)
        rejected(r"batch\[1\] .* has 6 examples", batch=(self.batch[0], self.short[1]))

    def test_arrays_on_other_devices(self, rejected, initialised):
        elsewhere = jax.device_put(initialised[1], jax.devices()[5])
        words = r"params\['in'\]\['b'\] is committed to .* Move it there by"
        rejected(words, params=elsewhere)
        on_one = jax.device_put(self.batch, jax.devices()[0])
        rejected(r"batch\[0\] is committed to", batch=on_one)

    def test_parameters_and_states_stacked_for_devices(self, rejected, initialised):
        stack = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * 4), tree)
        _, params, state = initialised
        rejected("params have a first axis of 4 .* given once", params=stack(params))
        rejected(r"state.step_counter has the shape \(4,\)", state=stack(state))

    def test_a_key_for_each_device(self, rejected, initialised):
        keys = jax.random.split(key(1), 4)
        rejected("array of random keys", rng=keys)
        optimizer, params, _ = initialised
        with pytest.raises(ValueError, match="array of random keys"):
            optimizer.init(params, keys, self.batch)

    @pytest.mark.parametrize("under_jit", [False, True])
    def test_a_loss_without_examples(self, initialised, under_jit):
        optimizer, params, _ = initialised
        value = lambda params: optimizer.compute_loss_value((params, self.none))
        with pytest.raises(ValueError, match="has no examples"):
            (jax.jit(value) if under_jit else value)(params)

    def test_batches_that_do_not_divide_elsewhere(self, initialised):
        optimizer, params, state = initialised
        with pytest.raises(ValueError, match="6 examples"):
            optimizer.compute_loss_value((params, self.short))
        step = lambda params: optimizer.step(params, state, key(1), batch=self.short, **VALUES)
        with pytest.raises(ValueError, match="6 examples"):
            jax.jit(step)(params)

    def test_a_step_after_an_error_is_that_of_one_device(self, initialised, rejected):
        rejected("6 examples", batch=self.short)
        optimizer, params, state = initialised
        one = make()
        first = one.init(params, key(0), self.batch)
        found = optimizer.step(params, state, key(1), batch=self.batch, **VALUES)[0]
        same(found, one.step(make_params(), first, key(1), batch=self.batch, **VALUES)[0])


def deep_step(sizes, count):
    """A step for a network with layers of these sizes: a function, and its arguments."""

    def deep(params, batch):
        x, y = batch
        for w in params:
            x = jnp.tanh(x @ w)
        prediction = curvax.register_squared_error_loss(x, y)
        return jnp.mean((prediction - y) ** 2)

    normal = np.random.default_rng(0).standard_normal
    mesh = mesh_of(count)
    params = [normal((m, n)) for m, n in itertools.pairwise(sizes)]
    params = jax.device_put(params, NamedSharding(mesh, P()))
    batch = tuple(normal((8, size)) for size in (sizes[0], sizes[-1]))
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    options = {"mesh": mesh, "estimation_mode": "fisher_gradients"}
    optimizer = make(jax.value_and_grad(deep), donate_buffers=False, **options)
    state = optimizer.init(params, key(0), batch)
    step = lambda params, state, batch: optimizer.step(params, state, key(1), batch=batch, **VALUES)
    return step, (params, state, batch)


def test_a_compiled_step_sends_no_more_among_eight_devices_than_among_two():
    found = {}
    for count in (2, 8):
        step, args = deep_step([6] * 9, count)
        found[count] = collectives_of(jax.jit(step).lower(*args).compile().as_text())
    (few, bytes_of_two), (many, bytes_of_eight) = found[2], found[8]
    assert 0 < many <= few < 10
    assert 0 < bytes_of_eight <= bytes_of_two


def test_inverses_are_distributed_evenly_over_eight_devices(monkeypatch):
    """By the cubes of the sizes of the matrices that each device inverts in a step."""
    sizes = [78, 100, 50, 25, 3, 25, 50, 100, 78]
    work = [[] for _ in range(8)]
    each = Power.each

    def noted(self, *row):
        size = row[0].shape[-1]
        note = lambda device: work[device].append(size**3)
        jax.debug.callback(note, jax.lax.axis_index("data"))
        return each(self, *row)

    monkeypatch.setattr(Power, "each", noted)
    step, args = deep_step(sizes, 8)
    jax.block_until_ready(step(*args))
    jax.effects_barrier()
    loads = [sum(own) for own in work]
    largest = max(x for own in work for x in own)
    assert largest >= 100**3
    assert max(loads) <= 1.3 * max(np.mean(loads), largest)


def test_processes_must_be_given_a_budget_in_bytes(monkeypatch):
    make(multi_device=True, memory_budget="50%")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"memory_budget='50%' is a fraction .* Give bytes"):
        make(multi_device=True, memory_budget="50%")


@pytest.mark.usefixtures("unchecked")
def test_a_mesh_of_another_type_is_rejected():
    with pytest.raises(TypeError, match=r"mesh must be a jax.sharding.Mesh, such as .* got int"):
        make(mesh=8)


def test_a_mesh_must_have_the_named_axis():
    mesh = jax.make_mesh((1, 1), ("data", "model"))
    with pytest.raises(ValueError, match=r"\('data', 'model'\), none of which is pmap_axis_name"):
        make(mesh=mesh)
    assert make(mesh=mesh, pmap_axis_name="data").mesh is mesh
    assert make(mesh=jax.make_mesh((1,), ("any",))).mesh.axis_names == ("any",)
