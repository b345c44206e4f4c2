"""`shard_state=True`: the same steps as on one device, with less memory on each."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import curvax
from helpers import key, mesh_of, slow_but
from optimizer.mesh_cases import GIVEN, RULES, optimizer_of, same, trained
from optimizer.models import MODELS

pytestmark = pytest.mark.optimised
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.mark.parametrize(
    ("model", "rules", "count", "kind", "exact", "stagger"),
    [
        slow_but([("transformer", "fixed", 2, AUTO, False, False)], *case)
        for case in [
            ("transformer", "fixed", 2, AUTO, False, False),
            ("mlp", "adaptive", 8, EXPLICIT, False, True),
            ("cnn", "fixed", 8, AUTO, True, False),
            ("cnn", "adaptive", 2, AUTO, False, True),
            ("transformer", "adaptive", 8, AUTO, True, False),
        ]
    ],
)
def test_training_is_that_of_one_device(model, rules, count, kind, exact, stagger):
    """With exact and approximate inverses, staggered or not; and so is the quadratic model."""
    options = RULES[rules] | {"use_exact_inverses": exact, "inverse_update_period": 3}
    options |= {"stagger_inverses": stagger}
    one = optimizer_of(model, donate_buffers=False, **options)
    expected = trained(one, model, 7)
    sharded = optimizer_of(model, mesh=mesh_of(count, kind), shard_state=True, **options)
    params, state, stats = trained(sharded, model, 7)
    same((params, stats), (expected[0], expected[2]))
    factors = jax.tree.leaves([own.factors for own in state.estimator_state.shards])
    assert factors
    for x in factors:
        assert x.addressable_shards[0].data.shape[0] * count == x.shape[0]
    found = sharded.compute_approx_quad_model(state, [params], params)
    same(found, one.compute_approx_quad_model(expected[1], expected[:1], expected[0]))


def deep(params, batch):
    """Eight layers of one shape, and one of another."""
    x = batch
    for w in params["hidden"]:
        x = jnp.tanh(x @ w)
    x = x @ params["out"]
    curvax.register_squared_error_loss(x, jnp.zeros_like(x))
    return jnp.mean(jnp.sum(x**2, axis=1))


def deep_params(width):
    draw = np.random.default_rng(0).standard_normal
    hidden = [jnp.asarray(draw((width, width)) / width**0.5) for _ in range(8)]
    return {"hidden": hidden, "out": jnp.asarray(draw((width, 4)))}


def deep_optimizer(mesh, shard_state=True, **options):
    options = {"l2_reg": 0.0, "donate_buffers": False, "shard_state": shard_state, **options}
    return curvax.Optimizer(jax.value_and_grad(deep), mesh=mesh, **options)


def test_each_device_holds_and_computes_its_shard():
    """Bytes of the state on a device, and those that a compiled step needs there."""
    params, batch = deep_params(64), jnp.ones((16, 64))
    held, needed = {}, {}
    for count, is_sharded in ((2, True), (8, False), (8, True)):
        mesh = mesh_of(count)
        optimizer = deep_optimizer(mesh, is_sharded)
        own, images = jax.device_put((params, batch), NamedSharding(mesh, P()))
        state = optimizer.init(own, key(0), images)
        factors = jax.tree.leaves(state.estimator_state)
        held[count, is_sharded] = sum(x.addressable_shards[0].data.nbytes for x in factors)
        step = lambda *args, own=optimizer, x=images: own.step(*args, batch=x, **GIVEN)
        usage = jax.jit(step).lower(own, state, key(1)).compile().memory_analysis()
        needed[count, is_sharded] = usage.argument_size_in_bytes + usage.temp_size_in_bytes
    assert held[2, True] < 0.55 * held[8, False]
    assert held[8, True] < 0.2 * held[8, False]
    assert needed[8, True] < 0.8 * needed[8, False]
    assert needed[8, True] < 0.8 * needed[2, True]


class TestSteps:
    params, batch = deep_params(4), jnp.ones((8, 4))

    @pytest.fixture(
        scope="class",
        params=[AUTO, pytest.param(EXPLICIT, marks=pytest.mark.slow)],
        ids=lambda kind: kind.name,
    )
    @classmethod
    def stepped(cls, request):
        """A mesh, an optimizer, a state of it, and what a step makes of that."""
        mesh = mesh_of(4, request.param)
        optimizer = deep_optimizer(mesh)
        state = optimizer.init(cls.params, key(0), cls.batch)
        step = functools.partial(optimizer.step, batch=cls.batch, **GIVEN)
        return mesh, step, state, step(cls.params, state, key(1))

    def test_a_state_saved_as_leaves_is_restored_by_another_optimizer(self, stepped):
        mesh, _, state, expected = stepped
        leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, state))
        other = deep_optimizer(mesh)
        other.init(self.params, key(0), self.batch)
        restored = jax.tree.unflatten(structure, leaves)
        same(other.step(self.params, restored, key(1), batch=self.batch, **GIVEN), expected)

    @pytest.mark.parametrize("stepped", [AUTO], indirect=True, ids=["Auto"])
    def test_a_step_under_jit(self, stepped):
        _, step, state, expected = stepped
        same(jax.jit(step)(self.params, state, key(1)), expected)


@functools.cache
def saved(count, is_sharded=True, width=4, **options):
    """An optimizer of the deep network, and a state of it that was saved."""
    optimizer = deep_optimizer(mesh_of(count), is_sharded, **options)
    state = optimizer.init(deep_params(width), key(0), jnp.ones((8, width)))
    return optimizer, jax.tree.map(np.asarray, state)


class TestErrors:
    """A state that is sharded otherwise is rejected, with words that say how to convert it."""

    @staticmethod
    def rejected(words, optimizer, state):
        with pytest.raises(ValueError, match=words):
            optimizer.step(deep_params(4), state, key(1), batch=jnp.ones((8, 4)), **GIVEN)

    def test_a_replicated_state_where_a_sharded_one_is_needed(self):
        words = r"made without shard_state.* optimizer.split_state\(state\)"
        self.rejected(words, saved(8)[0], saved(8, False)[1])

    def test_a_sharded_state_where_a_replicated_one_is_needed(self):
        words = r"sharded over 8 devices.* optimizer.whole_state\(state\)"
        self.rejected(words, saved(8, False)[0], saved(8)[1])

    @pytest.mark.parametrize("count", [1, 2, 4])
    def test_a_state_of_another_number_of_devices(self, count):
        words = rf"sharded over 8 devices, but here are {count}.* optimizer.split_state\(state\)"
        self.rejected(words, saved(count)[0], saved(8)[1])

    def test_split_state_without_shard_state(self):
        replicated, state = saved(8, False)
        with pytest.raises(ValueError, match="split_state is for shard_state=True"):
            replicated.split_state(state)

    def test_whole_state_under_jit(self):
        optimizer, state = saved(8)
        with pytest.raises(ValueError, match="Call them outside of functions that are traced"):
            jax.jit(optimizer.whole_state)(state)

    def test_split_state_of_another_model(self):
        with pytest.raises(ValueError, match="not one of this model"):
            saved(8)[0].split_state(saved(8, False, width=5)[1])

    def test_split_state_with_another_cache(self):
        exact = saved(8, False, use_exact_inverses=True)[1]
        words = r"has \['eigen'\] in its cache, where \['-1'\] is needed"
        with pytest.raises(ValueError, match=words):
            saved(8)[0].split_state(exact)

    def test_whole_state_with_other_rows(self):
        with pytest.raises(ValueError, match=r"has \[16\] rows of factors.* got \[8, 8\]"):
            saved(8)[0].whole_state(saved(8, width=5)[1])

    @pytest.mark.parametrize("is_sharded", [True, False])
    def test_whole_state_of_another_model(self, is_sharded):
        state = saved(8, is_sharded, width=5)[1]
        with pytest.raises(ValueError, match="not one of this model"):
            saved(8, width=6)[0].whole_state(state)

    def test_one_device(self):
        function = jax.value_and_grad(lambda params, batch: (params * batch).sum())
        words = r"shard_state=True .* multi_device=False and mesh=None"
        with pytest.raises(ValueError, match=words):
            curvax.Optimizer(function, l2_reg=0.0, shard_state=True)


MOVES = {"2, 8, one": (2, 8, None), "one, 8, 1": (None, 8, 1), "8, 2, 8": (8, 2, 8)}


@pytest.mark.parametrize("moves", MOVES)
@pytest.mark.parametrize(
    ("model", "exact"),
    [("transformer", False), pytest.param("cnn", True, marks=pytest.mark.slow)],
)
class TestAnotherNumberOfDevices:
    """Training goes on where it was, with the inverses that were computed before."""

    @staticmethod
    @functools.cache
    def optimizer(model, exact, count):
        """On a mesh of `count` devices; or on one device, without a mesh."""
        options = RULES["fixed"] | {"use_exact_inverses": exact, "inverse_update_period": 3}
        where = {} if count is None else {"mesh": mesh_of(count), "shard_state": True}
        optimizer = optimizer_of(model, donate_buffers=False, **options, **where)
        _, make_params, make_batch = MODELS[model]
        optimizer.finalize(make_params(), key(0), make_batch(0, 8))
        return optimizer

    @classmethod
    @functools.cache
    def trained(cls, model, exact, counts):
        """Parameters and the whole state after two steps of each, saved and restored between."""
        _, make_params, make_batch = MODELS[model]
        params, state = make_params(), None
        for position, count in enumerate(counts):
            own = cls.optimizer(model, exact, count)
            if state is None:
                state = own.init(params, key(0), make_batch(0, 8))
            else:
                params, state = pickle.loads(pickle.dumps(jax.device_get((params, state))))
                state = own.whole_state(state) if count is None else own.split_state(state)
            for number in (2 * position, 2 * position + 1):
                batch = make_batch(number, 8)
                params, state, _ = own.step(params, state, key(number), batch=batch, **GIVEN)
        return params, own.whole_state(state)

    def test_parameters_and_state_are_those_of_one_device(self, model, exact, moves):
        params, state = self.trained(model, exact, MOVES[moves])
        expected = self.trained(model, exact, (None, None, None))
        same(params, expected[0])
        assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(state))
        if not exact:  # Eigenvectors may differ in their signs.
            same(state, expected[1])
