"""Tags do nothing, under every transformation, and stay in the program to be found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import curvax
from curvax import LayerTag, LossFunction, LossTag
from curvax.losses.tag import noted_registrations
from helpers import assert_same


class Loss(LossFunction):
    """Holds its arguments, and computes nothing."""

    targets = None

    def __init__(self, mean, targets=None):
        self.mean, self.targets = mean, targets


Loss.__abstractmethods__ = frozenset()


LAYER = LayerTag("some_layer_tag", num_inputs=1, num_outputs=1)
PAIR = LayerTag("pair_tag", num_inputs=1, num_outputs=2)
LOSS = LossTag(Loss, ["mean"], ["targets"])
W, X = jnp.linspace(-1.0, 1.0, 6).reshape(3, 2), jnp.linspace(0.0, 1.0, 12).reshape(4, 3)


def plain(w, x):
    return jnp.sum(jnp.sin(jnp.tanh(x @ w)) ** 2)


def tagged(w, x):
    y = LAYER.bind(x @ w, x, w)
    y, _ = PAIR.bind(jnp.tanh(y), x, x, w)
    (y,) = LOSS.bind(jnp.sin(y), x, args_names=("mean", "targets"))
    return jnp.sum(y**2)


def found(fun, *args):
    """The names of all tags in a program, also in the programs inside it."""
    names = []

    def look(jaxpr):
        for eqn in jaxpr.eqns:
            names.extend([eqn.primitive.name] if eqn.primitive in (LAYER, PAIR, LOSS) else [])
            for inner in jax.tree.leaves(list(eqn.params.values())):
                look(getattr(inner, "jaxpr", inner)) if hasattr(inner, "eqns") else None

    look(jax.make_jaxpr(fun)(*args).jaxpr)
    return names


ALL = ["some_layer_tag", "pair_tag", "Loss_tag"]
XS = jnp.stack([X, 2 * X])
scanned = lambda f: lambda w, xs: jax.lax.scan(lambda c, x: (c + f(w, x), None), 0.0, xs)[0]
AROUND = {
    "nothing": (lambda f: f, X),
    "jit": (jax.jit, X),
    "checkpoint": (jax.checkpoint, X),
    "vmap": (lambda f: lambda w, xs: jnp.sum(jax.vmap(f, (None, 0))(w, xs)), XS),
    "vmap of both": (
        lambda f: lambda w, xs: jnp.sum(jax.vmap(f)(jnp.stack([w, w]), xs)),
        XS,
    ),
    "scan": (scanned, XS),
    "scan of checkpoint": (lambda f: scanned(jax.checkpoint(f)), XS),
    "grad": (lambda f: lambda w, x: jnp.sum(jax.grad(f)(w, x) ** 2), X),
}


@pytest.mark.parametrize("name", AROUND)
def test_tags_change_nothing(name):
    around, x = AROUND[name]
    derivatives = lambda f: (
        f(W, x),
        jax.grad(f, (0, 1))(W, x),
        jax.jvp(f, (W, x), (jnp.cos(W), jnp.cos(x))),
        jax.hessian(f)(W, x),
    )
    ours, naive = jax.jit(derivatives, static_argnums=0), jax.jit(derivatives, static_argnums=0)
    assert_same(ours(around(tagged)), naive(around(plain)), 1e-12, 1e-12)


@pytest.mark.parametrize("name", [name for name in AROUND if name != "grad"])
def test_tags_stay_in_the_program(name):
    around, x = AROUND[name]
    assert found(around(tagged), W, x) == ALL


@pytest.mark.parametrize("check", [True, False])
def test_inside_shard_map(check):
    mesh = jax.make_mesh((1,), ("i",), (AxisType.Auto,))
    local = lambda f: jax.shard_map(
        lambda w, x: jax.lax.psum(f(w, x), "i"),
        mesh=mesh,
        in_specs=(P(), P("i")),
        out_specs=P(),
        check_vma=check,
    )
    both = lambda f: jax.jit(jax.value_and_grad(local(f)))(W, X)
    assert_same(both(tagged), both(plain))


def test_they_cost_nothing_when_compiled():
    text = lambda f: jax.jit(f).lower(W, X).as_text()
    assert text(tagged).replace("tagged", "plain") == text(plain)


def test_vmap_says_which_operands_it_maps():
    (eqn,) = [
        eqn
        for eqn in jax.make_jaxpr(jax.vmap(tagged, (None, 0)))(W, XS).jaxpr.eqns
        if eqn.primitive is LAYER
    ]
    assert eqn.params["stacked"] == ((True, True, False),)
    assert [v.aval.shape for v in eqn.invars] == [(2, 4, 2), (2, 4, 3), (3, 2)]


def test_a_loss_is_made_from_its_tag():
    jaxpr = jax.make_jaxpr(tagged)(W, X).jaxpr
    (eqn,) = [eqn for eqn in jaxpr.eqns if eqn.primitive is LOSS]
    loss = eqn.primitive.loss(1, 2, args_names=eqn.params["args_names"])
    assert (loss.mean, loss.targets) == (1, 2)
    assert "test_tags.py:" in eqn.params["where"]


def test_names_and_numbers():
    assert (LAYER.num_inputs, LAYER.num_outputs) == (1, 1)
    assert LOSS.parameter_dependants_names == ("mean",)
    assert LOSS.parameter_independants_names == ("targets",)


def test_call_sites_of_registrations_are_noted():
    with noted_registrations() as noted:
        jax.make_jaxpr(lambda w, x: tagged(w, x))(W, X)
        jax.make_jaxpr(jax.grad(lambda w, x: tagged(w, x)))(W, X)
    assert len(noted) == 2
    assert noted[0] == noted[1]
    assert noted[0].rpartition(":")[0] == __file__


@pytest.mark.usefixtures("unchecked")
class TestErrors:
    def test_a_layer_without_outputs(self):
        with pytest.raises(ValueError, match=r"^curvax\.LayerTag: .*num_outputs=0"):
            LayerTag("x", 1, 0)

    def test_too_few_operands(self):
        with pytest.raises(ValueError, match="some_layer_tag is called with 1 outputs, 1 inputs"):
            LAYER.bind(X)

    @pytest.mark.parametrize(
        ("args", "names"),
        [((X,), ("targets",)), ((X, X), ("mean", "mean")), ((X,), ("mean", "targets"))],
        ids=str,
    )
    def test_names_that_do_not_fit(self, args, names):
        with pytest.raises(ValueError, match="Loss_tag takes mean and any of targets"):
            LOSS.bind(*args, args_names=names)

    def test_a_loss_that_depends_on_nothing(self):
        with pytest.raises(ValueError, match=r"^curvax\.LossTag: the names"):
            LossTag(Loss, [], ["targets"])


class TestRegister:
    """What is tagged is returned, and shapes that are no layer's are refused."""

    def test_outputs_are_returned(self):
        b, y = jnp.ones(2), X @ W
        assert_same(curvax.register_dense(y, X, W, b), y)
        assert_same(curvax.register_dense(y, X, W), y)
        assert_same(curvax.register_generic(W), W)
        assert_same(curvax.register_scale_and_shift(X, X, scale=jnp.ones(3)), X)
        assert_same(curvax.register_scale_and_shift(X, X, shift=jnp.ones(3)), X)
        images, kernel = jnp.ones((2, 4, 4, 3)), jnp.ones((3, 3, 3, 5))
        assert_same(curvax.register_conv2d(images, images, kernel), images)
        assert_same(curvax.register_conv(X, X, W), X)
        rows = jnp.array([0, 2])
        assert_same(curvax.register_embedding(W[rows], rows, W), W[rows])

    @pytest.mark.parametrize(
        ("register", "words"),
        [
            (lambda: curvax.register_dense(X, X, W), r"y has the shape \(4, 3\).*\(4, 2\)"),
            (lambda: curvax.register_dense(X @ W, X[:, :2], W), r"x has the shape \(4, 2\)"),
            (lambda: curvax.register_dense(X @ W, X, W[0]), "w has the shape"),
            (lambda: curvax.register_dense(X @ W, X, W, jnp.ones(3)), "b has the shape"),
            (lambda: curvax.register_scale_and_shift(X, X), "got neither"),
            (lambda: curvax.register_scale_and_shift(X, X, jnp.ones(2)), "scale has the shape"),
            (lambda: curvax.register_scale_and_shift(X, X[:2], jnp.ones(3)), "y has the shape"),
            (lambda: curvax.register_conv2d(X, X, W), "w has the shape"),
            (lambda: curvax.register_embedding(W, X, W), "indices has .* expected integers"),
            (lambda: curvax.register_embedding(W, jnp.array([0]), W), "y has the shape"),
        ],
    )
    def test_other_shapes_are_rejected(self, register, words):
        with pytest.raises(ValueError, match=rf"^curvax\.register_\w+: .*{words}"):
            register()


def test_numbers_can_be_tagged():
    (mean,) = LOSS.bind(1.5, args_names=("mean",))
    np.testing.assert_array_equal(mean, 1.5)


def test_tags_can_be_transposed():
    f = lambda x: curvax.register_dense(x @ W, x, W) * 2
    transposed = jax.linear_transpose(f, jnp.ones((4, W.shape[0])))
    g = jnp.ones((4, W.shape[1]))
    assert_same(transposed(g)[0], 2 * g @ W.T)
