"""Products with exact curvature equal those with dense matrices, which a few lines here make.

Each case says what its model computes twice: as a function that registers losses, and as a plain
function to the rows that the losses depend on, with the value and the matrix of one row. From these
come the dense Jacobian, Hessian, Fisher matrix and GGN. None of it uses code of a loss.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import curvax
from curvax.curvature.implicit import ImplicitExactCurvature
from helpers import CountTraces, assert_same
from losses.cases import matrix_of

N = 5


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def like(tree: Any, seed: int) -> Any:
    """Random numbers in the shapes of a pytree. JAX's own take their time to compile."""
    leaves, structure = jax.tree.flatten(tree)
    found = [normal(100 * seed + i, *x.shape) for i, x in enumerate(leaves)]
    return structure.unflatten(found)


def biased(y: jax.Array, b: jax.Array) -> jax.Array:
    return y + jnp.broadcast_to(b, y.shape)


class Rows(NamedTuple):
    """One loss: its inputs, row by row, its targets, and what it is for one row."""

    inputs: Sequence[jax.Array]
    targets: jax.Array
    value: Callable[..., Any]
    matrix: Callable[..., Any]
    weight: Any = 1.0


class Case(NamedTuple):
    name: str
    func: Callable[..., Any]
    rows: Callable[..., list[Rows]]
    params: Any
    batch: Any
    has_fisher: bool = True

    @property
    def args(self) -> tuple[Any, Any]:
        return self.params, self.batch


def cross_entropy(z, target):
    return jax.nn.logsumexp(z) - z[target]


def softmax_matrix(z, target):
    p = jax.nn.softmax(z)
    return jnp.diag(p) - jnp.outer(p, p)


def squared_error(y, target):
    return jnp.sum((y - target) ** 2)


def twice_identity(y, target):
    return 2 * jnp.eye(y.size)


def binary(z, target):
    return jnp.sum(jnp.log1p(jnp.exp(z)) - target * z)


def binary_matrix(z, target):
    p = jax.nn.sigmoid(z)
    return jnp.diag(p * (1 - p))


def gaussian(mean, variance, target):
    return 0.5 * jnp.sum((target - mean) ** 2 / variance + jnp.log(variance))


def gaussian_matrix(mean, variance, target):
    return jnp.diag(jnp.concatenate([1 / variance, 0.5 / variance**2]))


def root(y, target):
    return jnp.sqrt(1 + jnp.sum((y - target) ** 2))


def mlp(p, x):
    (w, b), (v, c) = p["layers"]
    return biased(jnp.tanh(biased(x @ w, b)) @ v, c)


def classify(p, batch):
    curvax.register_softmax_cross_entropy_loss(mlp(p, batch["x"]), batch["y"])


def classify_one_by_one(p, batch):
    def one(x, y):
        curvax.register_softmax_cross_entropy_loss(mlp(p, x[None])[0], y)

    jax.vmap(one)(batch["x"], batch["y"])


def classified(p, batch):
    return [Rows([mlp(p, batch["x"])], batch["y"], cross_entropy, softmax_matrix)]


def heads(p, batch):
    w, (v, u) = p
    h = jnp.sin(batch["x"] @ w)
    return h @ v, h @ u


def two_losses(p, batch):
    y, z = heads(p, batch)
    curvax.register_squared_error_loss(y, batch["y"], weight=batch["weight"])
    curvax.register_sigmoid_cross_entropy_loss(z, batch["z"], weight=0.4)


def two_losses_rows(p, batch):
    y, z = heads(p, batch)
    return [
        Rows([y], batch["y"], squared_error, twice_identity, batch["weight"]),
        Rows([z], batch["z"], binary, binary_matrix, 0.4),
    ]


def recur(p, x, register=lambda y, x: y, checkpoint=jax.checkpoint):
    @checkpoint
    def step(h, x):
        h = jnp.tanh(h @ p["w"] + x)
        y = h @ p["v"]
        register(y, x)
        return h, y

    return jax.lax.scan(step, jnp.zeros(x.shape[::2]), jnp.swapaxes(x, 0, 1))[1]


def recurrent(p, batch):
    register = lambda y, x: curvax.register_squared_error_loss(y, x, weight=0.7)
    recur(p, batch, register)


def recurrent_rows(p, batch):
    targets = jnp.swapaxes(batch, 0, 1).reshape(-1, 2)
    y = recur(p, batch, checkpoint=lambda f: f).reshape(-1, 2)
    return [Rows([y], targets, squared_error, twice_identity, 0.7)]


both_tag = curvax.LossTag(
    curvax.NormalMeanVarianceNegativeLogProbLoss, ["mean", "variance"], ["targets", "weight"]
)


def tie(p, x):
    y = jnp.tanh(x @ p["w"]) @ p["w"].T
    return y, jnp.exp(y @ p["v"])


def tied(p, batch):
    x, targets = batch
    names = "mean", "variance", "targets", "weight"
    both_tag.bind(*tie(p, x), targets, jnp.asarray(1.5), args_names=names)


def tied_rows(p, batch):
    x, targets = batch
    return [Rows(tie(p, x), targets, gaussian, gaussian_matrix, 1.5)]


def own(p, batch):
    curvax.register_loss(root, batch[0] @ p, batch[1])


def own_rows(p, batch):
    return [Rows([batch[0] @ p], batch[1], root, jax.hessian(root))]


X, LABELS = normal(0, N, 3), jnp.array([0, 2, 1, 1, 0])
MLP = {"layers": [(normal(1, 3, 2), normal(2, 2)), (normal(3, 2, 3), normal(4, 3))]}
HEADS = normal(5, 3, 2), (normal(6, 2, 2), normal(7, 2, 1))
WEIGHTED = {
    "x": X,
    "y": normal(8, N, 2),
    "z": normal(9, N, 1) ** 2,
    "weight": jnp.arange(N, dtype=jnp.float64),
}
RNN = {"w": normal(10, 2, 2), "v": normal(11, 2, 2)}
TIED = {"w": normal(12, 3, 2), "v": 0.3 * normal(13, 3, 3)}
CLASSES = {"x": X, "y": LABELS}
CASES = [
    Case("mlp", classify, classified, MLP, CLASSES),
    Case("vmap", classify_one_by_one, classified, MLP, CLASSES),
    Case("two losses", two_losses, two_losses_rows, HEADS, WEIGHTED),
    Case("recurrent", recurrent, recurrent_rows, RNN, normal(14, N, 3, 2)),
    Case("tied", tied, tied_rows, TIED, (X, normal(15, N, 3))),
    Case("own loss", own, own_rows, normal(16, 3, 2), (X, normal(17, N, 2)), has_fisher=False),
]
BY_NAME = {case.name: case for case in CASES}
each_case = pytest.mark.parametrize("name", list(BY_NAME))


def flat_row(inputs: Sequence[jax.Array]) -> jax.Array:
    """The inputs of a loss, with what belongs to one row in one row."""
    return jnp.concatenate([x.reshape(x.shape[0], -1) for x in inputs], axis=1)


def dense(case: Case, params: Any, batch: Any) -> dict[str, jax.Array]:
    """The matrices by definition."""
    flat, unflatten = ravel_pytree(params)
    rows_at = lambda flat: case.rows(unflatten(flat), batch)

    def objective(flat):
        total = jnp.zeros(())
        for loss in rows_at(flat):
            total += jnp.sum(loss.weight * jax.vmap(loss.value)(*loss.inputs, loss.targets))
        return total / N

    jacobians = jax.jacobian(lambda flat: [flat_row(loss.inputs) for loss in rows_at(flat)])(flat)
    curvature = jnp.zeros((flat.size, flat.size))
    for loss, jacobian in zip(rows_at(flat), jacobians, strict=True):
        blocks = jax.vmap(loss.matrix)(*loss.inputs, loss.targets)
        weights = jnp.broadcast_to(jnp.asarray(loss.weight), blocks.shape[:1])
        curvature += jnp.einsum("r,rip,rij,rjq->pq", weights, jacobian, blocks, jacobian) / N
    inputs = lambda flat: ravel_pytree([loss.inputs for loss in rows_at(flat)])[0]
    return {
        "Hessian": jax.hessian(objective)(flat),
        "curvature": curvature,
        "Jacobian": jax.jacobian(inputs)(flat),
    }


def of_products(case: Case, params: Any, batch: Any, **options: Any) -> dict[str, jax.Array]:
    """The matrices, put together from products with all unit vectors."""
    args = params, batch
    products = ImplicitExactCurvature(case.func, **options)
    shapes, _ = products.get_loss_inner_vector_shapes_and_batch_size(args, "ggn")
    inputs, _ = products.get_loss_input_shapes_and_batch_size(args)
    inner, ins = [jnp.zeros(s) for s in shapes], [[jnp.zeros(s) for s in each] for each in inputs]
    by_vector = {
        "Hessian": (products.multiply_hessian, params),
        "ggn": (products.multiply_ggn, params),
        "Jacobian transposed": (products.multiply_jacobian_transpose, ins),
        "ggn factor": (products.multiply_ggn_factor, inner),
        "ggn factor transposed": (products.multiply_ggn_factor_transpose, params),
    }
    if case.has_fisher:
        by_vector |= {
            "fisher": (products.multiply_fisher, params),
            "fisher factor": (products.multiply_fisher_factor, inner),
            "fisher factor transposed": (products.multiply_fisher_factor_transpose, params),
        }
    matrices = {}
    for name, (multiply, like) in by_vector.items():
        matrices[name] = matrix_of(functools.partial(multiply, args), like)
    return matrices


@functools.cache
def measured(name: str) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    case = BY_NAME[name]
    compute = lambda *args: (of_products(case, *args), dense(case, *args))
    return jax.jit(compute)(*case.args)


def close(actual: Any, expected: Any) -> None:
    assert_same(actual, expected, 1e-9, 1e-10)


@each_case
class TestMatrices:
    def test_the_hessian_is_that_of_the_mean_loss(self, name):
        ours, naive = measured(name)
        close(ours["Hessian"], naive["Hessian"])

    def test_fisher_and_ggn_are_sums_over_examples(self, name):
        ours, naive = measured(name)
        assert jnp.linalg.norm(naive["curvature"]) > 0.1
        close(ours["ggn"], naive["curvature"])
        if BY_NAME[name].has_fisher:
            close(ours["fisher"], naive["curvature"])

    @pytest.mark.parametrize("matrix", ["fisher", "ggn"])
    def test_factors_make_up_the_matrix(self, name, matrix):
        ours, naive = measured(name)
        if matrix in ours:
            factor = ours[f"{matrix} factor"]
            close(factor @ factor.T, naive["curvature"])
            close(ours[f"{matrix} factor transposed"], factor.T)

    def test_the_jacobian_is_not_a_mean(self, name):
        ours, naive = measured(name)
        close(ours["Jacobian transposed"], naive["Jacobian"].T)


def products(curvature: ImplicitExactCurvature, args: Any) -> dict[str, Any]:
    """Products with a vector like the parameters."""
    vector = like(args[0], 3)
    return {
        "Hessian": curvature.multiply_hessian(args, vector),
        "ggn": curvature.multiply_ggn(args, vector),
    }


def vectors_of_losses(curvature: ImplicitExactCurvature, args: Any) -> tuple[Any, Any]:
    """An inner vector, and one like the inputs of losses."""
    inner, _ = curvature.get_loss_inner_vector_shapes_and_batch_size(args, "fisher")
    inputs, _ = curvature.get_loss_input_shapes_and_batch_size(args)
    of_shapes = lambda shapes, seed: [normal(seed + i, *shape) for i, shape in enumerate(shapes)]
    return of_shapes(inner, 50), [of_shapes(each, 60) for each in inputs]


def products_of_losses(curvature: ImplicitExactCurvature, args: Any) -> dict[str, Any]:
    """Products with vectors of losses, or that return such."""
    inner, inputs = vectors_of_losses(curvature, args)
    return {
        "fisher factor": curvature.multiply_fisher_factor(args, inner),
        "fisher factor transposed": curvature.multiply_fisher_factor_transpose(
            args, like(args[0], 3)
        ),
        "Jacobian transposed": curvature.multiply_jacobian_transpose(args, inputs),
    }


def flat(tree: Any) -> jax.Array:
    return ravel_pytree(tree)[0]


class TestMicrobatches:
    """Products are those with the matrices of the whole batch."""

    @pytest.mark.parametrize("size", [1, 2, 3, N, N + 1])
    def test_any_size(self, size):
        case, vector = BY_NAME["two losses"], like(HEADS, 3)
        curvature = ImplicitExactCurvature(case.func, microbatch_size=size)
        product = jax.jit(curvature.multiply_ggn)(case.args, vector)
        close(flat(product), measured(case.name)[0]["ggn"] @ flat(vector))

    @pytest.mark.parametrize("name", ["two losses", "vmap", "recurrent", "own loss"])
    def test_any_model(self, name):
        case, (matrices, _) = BY_NAME[name], measured(name)
        curvature = ImplicitExactCurvature(case.func, microbatch_size=2)
        found = jax.jit(lambda *args: products(curvature, args))(*case.args)
        for kind, product in found.items():
            close(flat(product), matrices[kind] @ flat(like(case.params, 3)))

    @pytest.mark.parametrize("name", ["two losses", "tied"])
    def test_vectors_of_losses_are_microbatched_too(self, name):
        case, (matrices, _) = BY_NAME[name], measured(name)
        curvature = ImplicitExactCurvature(case.func, microbatch_size=2)
        found = jax.jit(lambda *args: products_of_losses(curvature, args))(*case.args)
        inner, inputs = vectors_of_losses(curvature, case.args)
        vectors = {"fisher factor": inner, "Jacobian transposed": inputs}
        for kind, product in found.items():
            vector = vectors.get(kind, like(case.params, 3))
            close(flat(product), matrices[kind] @ flat(vector))

    def test_only_the_batch_is_microbatched(self):
        key = jax.random.key(3)

        def func(p, state, rng, batch):
            bits = jax.random.bits(rng, (3,)) + jax.random.bits(batch["key"], (3,))
            noise = bits.astype(jnp.float64) / 2**32
            classify(p, {**batch, "x": biased(batch["x"], batch["scale"] * noise * state[:3])})

        args = MLP, jnp.arange(7.0), key, {**CLASSES, "key": key, "scale": jnp.asarray(0.1)}
        vector = like(MLP, 1)
        whole, split = ImplicitExactCurvature(func), ImplicitExactCurvature(func, microbatch_size=2)
        assert split.batch_size(args) == N
        multiply = lambda curvature: jax.jit(curvature.multiply_fisher)(args, vector)
        close(multiply(split), multiply(whole))

    def test_several_arguments_are_the_batch(self):
        func = lambda x, y, p: classify(p, {"x": x, "y": y})
        vector = like(MLP, 1)
        options = {"params_index": -1, "batch_index": (0, 1)}
        curvature = ImplicitExactCurvature(func, **options, microbatch_size=2)
        expected = measured("mlp")[0]["fisher"] @ flat(vector)
        product = jax.jit(curvature.multiply_fisher)((X, LABELS, MLP), vector)
        close(flat(product), expected)
        # Without batch_index the batch is the labels, which will do for its size.
        assert ImplicitExactCurvature(func, 2).batch_size((X, LABELS, MLP)) == N

    def test_a_loss_that_is_no_sum_over_examples(self):
        def func(w, x):
            curvax.register_squared_error_loss(x @ w)
            curvax.register_squared_error_loss(w, weight=0.1)

        curvature = ImplicitExactCurvature(func, microbatch_size=2)
        message = r"they have \(5, 3\) rows for 5 examples, and \(2, 3\) for 2"
        with pytest.raises(ValueError, match=message):
            jax.make_jaxpr(curvature.multiply_ggn)((normal(1, 3, 2), X), normal(2, 3, 2))

    def test_vectors_of_losses_with_other_rows(self):
        case = BY_NAME["recurrent"]
        curvature = ImplicitExactCurvature(case.func, microbatch_size=2)
        with pytest.raises(
            ValueError, match=r"each of the 5 examples, but the losses have \(15,\)"
        ):
            jax.make_jaxpr(curvature.multiply_ggn_factor_transpose)(case.args, case.params)


class TestTransformations:
    case = BY_NAME["two losses"]

    @pytest.mark.parametrize("options", [{}, {"microbatch_size": 2}], ids=["whole", "split"])
    def test_derivatives_of_products(self, options):
        case, vector = BY_NAME["mlp"], like(MLP, 1)
        curvature = ImplicitExactCurvature(case.func, **options)

        def ours(params, batch):
            product = curvature.multiply_fisher((params, batch), vector)
            return jnp.sum(jnp.sin(flat(product)))

        def naive(params, batch):
            matrix = dense(case, params, batch)["curvature"]
            return jnp.sum(jnp.sin(matrix @ flat(vector)))

        both = jax.jit(lambda *args: (jax.grad(ours)(*args), jax.grad(naive)(*args)))
        close(*both(*case.args))

    def test_vmap_over_batches(self):
        vector = like(self.case.params, 1)
        curvature = ImplicitExactCurvature(self.case.func)

        def multiply(x):
            args = self.case.params, {**WEIGHTED, "x": x}
            return ravel_pytree(curvature.multiply_ggn(args, vector))[0]

        many = jnp.stack([X, 2 * X])
        expected = jnp.stack(list(map(jax.jit(multiply), many)))
        close(jax.jit(jax.vmap(multiply))(many), expected)

    def test_the_function_is_traced_once_for_each_shape(self):
        func = CountTraces(self.case.func)
        curvature = ImplicitExactCurvature(func)
        jax.make_jaxpr(curvature.multiply_ggn)(self.case.args, self.case.params)
        count = func.count
        jax.make_jaxpr(lambda *args: products(curvature, args))(*self.case.args)
        jax.make_jaxpr(lambda *args: products_of_losses(curvature, args))(*self.case.args)
        assert func.count == count

    def test_the_forward_pass_is_computed_once(self):
        curvature, vector = ImplicitExactCurvature(classify), like(MLP, 1)
        program = jax.make_jaxpr(curvature.multiply_fisher)((MLP, CLASSES), vector)
        assert str(program).count(" tanh ") == 1

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
    def test_dtypes_are_those_of_the_parameters(self, dtype):
        cast = functools.partial(jax.tree.map, lambda x: x.astype(dtype))
        params, vector = cast(HEADS), like(HEADS, 1)
        batch = cast(WEIGHTED)
        curvature = ImplicitExactCurvature(two_losses)
        multiply = jax.jit(curvature.multiply_fisher)
        product, exact = multiply((params, batch), vector), multiply((HEADS, WEIGHTED), vector)
        accuracy = 0.1 if dtype == jnp.bfloat16 else 1e-4
        assert_same(product, cast(exact), accuracy, accuracy)
        jax.make_jaxpr(lambda *args: products_of_losses(curvature, args))(params, batch)


class TestBatchSize:
    def test_it_is_that_of_the_last_argument(self):
        assert ImplicitExactCurvature(classify).batch_size((MLP, CLASSES)) == N
        assert ImplicitExactCurvature(classify, 1).batch_size((CLASSES, MLP)) == N

    def test_a_user_supplied_one(self):
        vector, matrices = like(MLP, 1), measured("mlp")[0]
        curvature = ImplicitExactCurvature(classify, 0, lambda batch: jnp.sum(batch["y"] > 0))
        product = jax.jit(curvature.multiply_ggn)((MLP, CLASSES), vector)
        close(flat(product), 5 / 3 * matrices["ggn"] @ flat(vector))

    def test_a_batch_that_is_closed_over(self):
        func, vector = lambda p: classify(p, CLASSES), like(MLP, 1)
        with pytest.raises(ValueError, match=r"no array with an axis.* Pass batch_size_extractor"):
            ImplicitExactCurvature(func).multiply_ggn((MLP,), vector)
        curvature = ImplicitExactCurvature(func, 0, lambda _: N)
        product = jax.jit(curvature.multiply_ggn)((MLP,), vector)
        expected = measured("mlp")[0]["ggn"] @ flat(vector)
        close(flat(product), expected)


class TestShapes:
    @pytest.mark.parametrize("mode", ["fisher", "ggn"])
    def test_inner_vectors(self, mode):
        curvature = ImplicitExactCurvature(two_losses)
        args = HEADS, WEIGHTED
        shapes = curvature.get_loss_inner_vector_shapes_and_batch_size(args, mode)
        assert shapes == (((N, 2), (N, 1)), N)

    def test_inputs(self):
        case = BY_NAME["tied"]
        shapes = ImplicitExactCurvature(tied).get_loss_input_shapes_and_batch_size(case.args)
        assert shapes == ((((N, 3), (N, 3)),), N)

    def test_inner_vectors_of_two_inputs(self):
        args = BY_NAME["tied"].args
        curvature = ImplicitExactCurvature(tied)
        assert curvature.get_loss_inner_vector_shapes_and_batch_size(args, "fisher")[0] == ((N, 6),)

    def test_another_mode(self):
        with pytest.raises(ValueError, match="mode must be 'fisher' or 'ggn', got 'hessian'"):
            ImplicitExactCurvature(classify).get_loss_inner_vector_shapes_and_batch_size(
                (MLP, CLASSES), "hessian"
            )


class TestErrors:
    """All of them come up while a product is traced, so that nothing is compiled for them."""

    case = BY_NAME["two losses"]
    curvature = ImplicitExactCurvature(two_losses)

    @pytest.mark.parametrize("product", ["hessian", "fisher", "ggn", "ggn_factor_transpose"])
    def test_a_vector_unlike_the_parameters(self, product):
        multiply = getattr(self.curvature, f"multiply_{product}")
        w, (v, u) = HEADS
        with pytest.raises(ValueError, match=r"params\[1\]\[0\] is of shape \(2, 2\) .* \(2, 1\)"):
            jax.make_jaxpr(multiply)(self.case.args, (w, (u, u)))
        with pytest.raises(ValueError, match=r"ImplicitExactCurvature: .* of the structure"):
            jax.make_jaxpr(multiply)(self.case.args, (w, v, u))

    @pytest.mark.parametrize("options", [{}, {"microbatch_size": 2}])
    @pytest.mark.parametrize("vectors", [[(N, 2)], [(N, 1), (N, 2)], [(N, 2), (N, 1), (N, 1)]])
    def test_vectors_unlike_the_losses(self, vectors, options):
        curvature = ImplicitExactCurvature(two_losses, **options)
        inner = list(map(jnp.zeros, vectors))
        for multiply in (curvature.multiply_fisher_factor, curvature.multiply_ggn_factor):
            with pytest.raises(ValueError, match=r"one entry for each loss.* \(\(5, 2\), \(5, 1\)"):
                jax.make_jaxpr(multiply)(self.case.args, inner)
        with pytest.raises(ValueError, match=r"one entry for each loss.* \(\(\(5, 2\),\), "):
            jax.make_jaxpr(curvature.multiply_jacobian_transpose)(
                self.case.args, [[x] for x in inner]
            )

    def test_a_loss_without_a_fisher_matrix(self):
        case = BY_NAME["own loss"]
        curvature = ImplicitExactCurvature(own)
        reason = "loss 0, FunctionLoss, has no predictive distribution"
        message = f"products with a Fisher matrix.* {reason}.* multiply_ggn"
        for multiply, vector in [
            (curvature.multiply_fisher, case.params),
            (curvature.multiply_fisher_factor_transpose, case.params),
            (curvature.multiply_fisher_factor, [jnp.zeros((N, 2))]),
        ]:
            with pytest.raises(ValueError, match=message):
                jax.make_jaxpr(multiply)(case.args, vector)
        with pytest.raises(ValueError, match=message):
            curvature.get_loss_inner_vector_shapes_and_batch_size(case.args, "fisher")

    def test_a_hessian_without_targets(self):
        func = lambda w, x: curvax.register_squared_error_loss(x @ w)
        curvature, w = ImplicitExactCurvature(func), normal(1, 3, 2)
        message = "the Hessian depends on targets, but loss 0, NormalMeanNegativeLogProbLoss"
        with pytest.raises(ValueError, match=message):
            jax.make_jaxpr(curvature.multiply_hessian)((w, X), w)
        jax.make_jaxpr(curvature.multiply_ggn)((w, X), w)

    def test_no_loss(self):
        curvature, w = ImplicitExactCurvature(lambda w, x: x @ w), normal(1, 3, 2)
        with pytest.raises(curvax.RegistrationError, match="registers no loss"):
            curvature.multiply_ggn((w, X), w)

    def test_no_sequence(self, unchecked):
        with pytest.raises(TypeError, match=r"as one sequence, such as \(params, batch\)"):
            ImplicitExactCurvature(classify).batch_size(MLP)

    @pytest.mark.parametrize("index", [2, -3, 0, -2, (1, 0)])
    def test_a_batch_that_is_not_there(self, index):
        curvature = ImplicitExactCurvature(classify, batch_index=index)
        with pytest.raises(ValueError, match=r"batch_index=.* which of the 2 arguments"):
            curvature.batch_size((MLP, CLASSES))

    def test_parameters_that_are_not_there(self):
        with pytest.raises(ValueError, match="the parameters are argument 2, but the function"):
            ImplicitExactCurvature(classify, 2).multiply_ggn((MLP, CLASSES), MLP)
