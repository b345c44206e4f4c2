"""Models × losses, and their curvature by definition: a new line of `MODELS` joins every test.

A model is written once. Where curvax sees it, `layer(names, fun, params, x)` is just `fun`; for
oracles it is a `Recorder`, which takes note of what a layer does alone. A loss says what it is for
one example, and its matrix. None of this uses code of curvax, but for what registers a loss.

- `dense_curvature`: the matrix from Jacobians of single examples.
- `kronecker_curvature`: by the book, from the Jacobian of each layer in its own parameters (which
  has its inputs for entries) and of the losses in its outputs.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

import curvax

N = 4


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def like(tree: Any, seed: int) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([normal(100 * seed + i, *x.shape) for i, x in enumerate(leaves)])


def flat(tree: Any) -> jax.Array:
    return ravel_pytree(tree)[0]


# Layers, as functions of an input and parameters.


def biased(y: jax.Array, b: jax.Array) -> jax.Array:
    return y + jnp.broadcast_to(b, y.shape)


def dense(x: jax.Array, w: jax.Array, b: jax.Array | None = None) -> jax.Array:
    return x @ w if b is None else biased(x @ w, b)


def scale_and_shift(x: jax.Array, s: jax.Array, t: jax.Array) -> jax.Array:
    return biased(x * jnp.broadcast_to(s, x.shape), t)


def convolve(x: jax.Array, w: jax.Array, b: jax.Array, layout: Any, **options: Any) -> jax.Array:
    options = {"window_strides": (1,) * (x.ndim - 2), "padding": "SAME"} | options
    y = lax.conv_general_dilated(x, w, dimension_numbers=layout, **options)
    return y + lax.broadcast_in_dim(b, y.shape, (layout[2].index("C"),))


def plain(names: str, fun: Callable[..., Any], p: Any, x: Any, **_: Any) -> Any:
    """A layer as it is."""
    return fun(x, *(p[name] for name in names.split()))


class Model(NamedTuple):
    """A function `apply(params, x, layer)` to outputs (examples, ..., outputs).

    `layers` has the names of the parameters of each layer. Where these are applied in a loop,
    `book` says the same without one. `generic` has the names of parameters of which nothing is
    known, and `no_book` of those whose layers have no Kronecker factors.
    """

    name: str
    apply: Callable[..., Any]
    params: dict[str, jax.Array]
    x: jax.Array
    layers: Sequence[str]
    book: Callable[..., Any] | None = None
    is_mapped: bool = False
    generic: str = ""
    no_book: str = ""


def mlp(p, x, layer=plain):
    return layer("v c", dense, p, jnp.tanh(layer("w b", dense, p, x)))


def deep_linear(p, x, layer=plain):
    return layer("u", dense, p, layer("v c", dense, p, layer("w b", dense, p, x)))


def relu(p, x, layer=plain):
    h = jax.nn.relu(layer("w b", dense, p, x))
    return layer("u", dense, p, jax.nn.relu(layer("v c", dense, p, h)))


def linear_positions(p, x, layer=plain):
    return layer("v", dense, p, layer("w b", dense, p, x))


def scaled(p, x, layer=plain):
    h = jnp.tanh(layer("w", dense, p, x))
    return layer("v", dense, p, layer("s t", scale_and_shift, p, h))


def pooled(p, x, layer=plain):
    return layer("v", dense, p, layer("w b", dense, p, x).mean(1))


def heads(p, x, layer=plain):
    fun = lambda x, w, b: biased(jnp.einsum("nhi,hio->nho", x, w), b)
    return layer("v", dense, p, jnp.tanh(layer("w b", fun, p, x, heads=True)).reshape(len(x), -1))


def table(p, x, layer=plain):
    return layer("v", dense, p, jnp.tanh(layer("e", lambda x, e: e[x], p, x)))


def tied_table(p, x, layer=plain):
    return jnp.tanh(p["e"][x].mean(1)) @ p["e"].T


def twice(p, x, layer=plain):
    h = jnp.tanh(layer("w b", dense, p, x))
    return layer("v", dense, p, jnp.sin(layer("w b", dense, p, h)))


def recurrent(p, x, layer=plain):
    step = lambda h, x: (jnp.tanh(dense(h, p["u"], p["b"]) + x @ p["w"]), None)
    return lax.scan(step, jnp.zeros((len(x), 2)), jnp.moveaxis(x, 1, 0))[0] @ p["v"]


def unrolled(p, x, layer):
    h = jnp.zeros((len(x), 2))
    for t in range(x.shape[1]):
        h = jnp.tanh(layer("u b", dense, p, h) + layer("w", dense, p, x[:, t]))
    return layer("v", dense, p, h)


def stack(p, x, layer=plain):
    step = lambda h, own: (jnp.tanh(dense(h, own["w"], own["b"])), None)
    return lax.scan(step, x, {"w": p["w"], "b": p["b"]})[0] @ p["v"]


def unstacked(p, x, layer):
    for k in range(len(p["w"])):
        fun = lambda x, w, b, k=k: dense(x, w[k], b[k])
        x = jnp.tanh(layer("w b", fun, p, x, part=k))
    return layer("v", dense, p, x)


def parts(p, x, layer=plain):
    first = lambda x, w, b: dense(x, w[:, :2], b[:2])
    last = lambda x, w, b: dense(x, w[:, 2:], b[2:])
    gate = jnp.tanh(layer("w b", first, p, x, part=0))
    return layer("v", dense, p, gate * layer("w b", last, p, jnp.sin(x), part=1))


def exponential(p, x, layer=plain):
    return layer("v", dense, p, jnp.tanh(x @ jnp.exp(p["a"])))


CHANNELS_LAST = ("NHWC", "HWIO", "NHWC")


def convolution(
    name: str, images: Sequence[int], kernel: Sequence[int], layout: Any = CHANNELS_LAST, **options
) -> Model:
    """A convolution, something that is not linear, and a dense layer."""
    groups = options.get("feature_group_count", 1)
    fun = functools.partial(convolve, layout=layout, **options)
    channel = layout[2].index("C")

    def apply(p, x, layer=plain):
        y = jnp.tanh(layer("w b", fun, p, x, channel=channel, groups=groups))
        return layer("v", dense, p, y.reshape(len(y), -1))

    x, w, b = normal(1, N, *images), normal(2, *kernel), normal(3, kernel[layout[1].index("O")])
    size = jax.eval_shape(fun, x[:1], w, b).size
    params = {"w": w, "b": b, "v": normal(4, size, 2) / size**0.5}
    return Model(name, apply, params, x, ["w b", "v"])


X, SEQUENCE, WORDS = (
    normal(0, N, 3),
    normal(1, N, 3, 2),
    jnp.array([[0, 2], [2, 2], [1, 3], [4, 0]]),
)
MLP = {"w": normal(2, 3, 2), "b": normal(3, 2), "v": normal(4, 2, 2), "c": normal(5, 2)}
RELU = {"w": normal(2, 3, 4), "b": jnp.ones(4), "v": normal(3, 4, 3), "c": jnp.ones(3)}
RELU |= {"u": normal(4, 3, 2)}
POOLED = {"w": normal(2, 2, 3), "b": normal(3, 3), "v": normal(4, 3, 2)}
MODELS = [
    Model("mlp", mlp, MLP, X, ["w b", "v c"]),
    Model("mapped", mlp, MLP, X, ["w b", "v c"], is_mapped=True),
    Model("deep linear", deep_linear, MLP | {"u": normal(6, 2, 2)}, X, ["w b", "v c", "u"]),
    Model("relu", relu, RELU, X, ["w b", "v c", "u"]),
    Model(
        "scale and shift",
        scaled,
        {"w": normal(2, 3, 2), "s": normal(3, 2), "t": normal(4, 2), "v": normal(5, 2, 2)},
        X,
        ["w", "s t", "v"],
        no_book="s t",
    ),
    Model("positions", mlp, MLP | {"w": normal(6, 2, 2)}, SEQUENCE, ["w b", "v c"]),
    Model("linear positions", linear_positions, POOLED, SEQUENCE, ["w b", "v"]),
    Model("pooled", pooled, POOLED, SEQUENCE, ["w b", "v"]),
    Model(
        "heads",
        heads,
        {"w": normal(2, 3, 2, 2), "b": normal(3, 3, 2), "v": normal(4, 6, 2)},
        SEQUENCE,
        ["w b", "v"],
    ),
    Model("table", table, {"e": normal(2, 5, 2), "v": normal(3, 2, 2)}, WORDS, ["e", "v"]),
    Model("tied table", tied_table, {"e": normal(2, 5, 2)}, WORDS, ["e"], no_book="e"),
    Model(
        "twice",
        twice,
        {"w": normal(2, 3, 3), "b": normal(3, 3), "v": normal(4, 3, 2)},
        X,
        ["w b", "v"],
    ),
    Model(
        "recurrent",
        recurrent,
        {"w": normal(2, 2, 2), "u": normal(3, 2, 2), "b": normal(4, 2), "v": normal(5, 2, 2)},
        SEQUENCE,
        ["u b", "w", "v"],
        unrolled,
    ),
    Model(
        "stack",
        stack,
        {"w": normal(2, 2, 3, 3), "b": normal(3, 2, 3), "v": normal(4, 3, 2)},
        X,
        ["w b", "v"],
        unstacked,
    ),
    Model(
        "parts",
        parts,
        {"w": normal(2, 3, 4), "b": normal(3, 4), "v": normal(4, 2, 2)},
        X,
        ["w b", "v"],
    ),
    Model(
        "exponential",
        exponential,
        {"a": normal(2, 3, 2), "v": normal(3, 2, 2)},
        X,
        ["a", "v"],
        generic="a",
        no_book="a",
    ),
    convolution("2-D", (3, 3, 2), (2, 2, 2, 2)),
    convolution("one position", (2, 2, 2), (2, 2, 2, 2), padding="VALID"),
    convolution(
        "strided", (5, 4, 1), (2, 2, 1, 2), window_strides=(2, 1), padding=((1, 0), (0, 2))
    ),
    convolution(
        "dilated",
        (5, 3, 1),
        (2, 2, 1, 2),
        rhs_dilation=(2, 1),
        window_strides=(1, 2),
        padding=((0, 0), (1, 0)),
    ),
    convolution(
        "upsampled", (2, 2, 1), (2, 2, 1, 2), lhs_dilation=(2, 1), padding=((0, 0), (0, 0))
    ),
    convolution("grouped", (2, 3, 4), (2, 2, 2, 4), feature_group_count=2),
    convolution("depthwise", (3, 2, 2), (2, 2, 1, 4), feature_group_count=2),
    convolution("channels first", (2, 3, 3), (2, 2, 2, 2), ("NCHW", "OIHW", "NCHW")),
    convolution("1-D", (4, 2), (3, 2, 2), ("NWC", "WIO", "NWC")),
    convolution("3-D", (2, 2, 3, 1), (2, 1, 2, 1, 2), ("NDHWC", "DHWIO", "NDHWC")),
]
BY_NAME = {model.name: model for model in MODELS}


class Loss(NamedTuple):
    """One loss: how it is registered for a batch, and what it is for one example.

    `inputs` is what it depends on, from the outputs of a model, as a vector; `value` and `matrix`
    are functions of that and of a target. The matrix is its Hessian and Fisher matrix.
    """

    register: Callable[[Any, Any, Any], Any]
    value: Callable[[Any, Any], Any]
    matrix: Callable[[Any, Any], Any]
    targets: Callable[[tuple[int, ...]], jax.Array]
    weight: Any = 1.0
    inputs: Callable[[Any], Any] = lambda y: y.reshape(-1)
    has_fisher: bool = True


def softmax_matrix(z, target):
    p = jax.nn.softmax(z.reshape(*target.shape, -1))
    rows = p.reshape(-1, p.shape[-1])
    return jax.scipy.linalg.block_diag(*(jnp.diag(q) - jnp.outer(q, q) for q in rows))


def cross_entropy(z, target):
    logs = jax.nn.log_softmax(z.reshape(*target.shape, -1))
    return -jnp.sum(logs * jax.nn.one_hot(target, logs.shape[-1], dtype=logs.dtype))


def binary(z, target):
    return jnp.sum(jnp.log1p(jnp.exp(z)) - target.reshape(-1) * z)


def binary_matrix(z, target):
    p = jax.nn.sigmoid(z)
    return jnp.diag(p * (1 - p))


def squares(z, target):
    return jnp.sum((z - target.reshape(-1)) ** 2)


def mean_and_variance(y):
    return jnp.concatenate([y[..., :1].reshape(-1), jnp.exp(y[..., 1:]).reshape(-1)])


def gaussian(z, target):
    mean, variance = jnp.split(z, [target.size])
    logs = jnp.sum(jnp.log(variance))
    return 0.5 * (jnp.sum((target.reshape(-1) - mean) ** 2 / variance[: mean.size]) + logs)


def gaussian_matrix(z, target):
    _, variance = jnp.split(z, [target.size])
    return jnp.diag(jnp.concatenate([1 / variance, 0.5 / variance**2]))


both_tag = curvax.LossTag(
    curvax.NormalMeanVarianceNegativeLogProbLoss, ["mean", "variance"], ["targets", "weight"]
)


def register_both(y, targets, weight):
    names = ("mean", "variance", "targets", "weight")
    both_tag.bind(y[..., :1], jnp.exp(y[..., 1:]), targets, jnp.asarray(weight), args_names=names)


def root(z, target):
    return jnp.sqrt(1 + squares(z.reshape(-1), target))


def register_variance(y, targets, weight):
    curvax.register_normal_predictive_distribution(y, targets, 0.7, weight)


def classes(shape: tuple[int, ...]) -> jax.Array:
    return jnp.arange(int(np.prod(shape[:-1]))).reshape(shape[:-1]) % shape[-1]


def values(shape: tuple[int, ...]) -> jax.Array:
    return normal(9, *shape)


EACH = jnp.array([0.5, 2.0, 1.0, 0.2])
SOFTMAX = Loss(
    lambda y, t, w: curvax.register_softmax_cross_entropy_loss(y, t, weight=w),
    cross_entropy,
    softmax_matrix,
    classes,
)
SQUARED = Loss(
    lambda y, t, w: curvax.register_squared_error_loss(y, t, w),
    squares,
    lambda z, _: 2 * jnp.eye(z.size),
    values,
)
LOSSES: dict[str, Sequence[Loss]] = {
    "softmax": [SOFTMAX],
    "squared": [SQUARED],
    "variance": [
        Loss(
            register_variance,
            lambda z, t: squares(z, t) / 1.4,
            lambda z, _: jnp.eye(z.size) / 0.7,
            values,
            EACH,
        )
    ],
    "bernoulli": [
        Loss(
            lambda y, t, w: curvax.register_sigmoid_cross_entropy_loss(y, t, w),
            binary,
            binary_matrix,
            lambda shape: jnp.abs(jnp.sin(values(shape))),
            0.4,
        )
    ],
    "both": [
        Loss(
            register_both,
            gaussian,
            gaussian_matrix,
            lambda shape: values((*shape[:-1], 1)),
            inputs=mean_and_variance,
        )
    ],
    "own": [
        Loss(
            lambda y, t, w: curvax.register_loss(root, y, t, weight=w),
            root,
            jax.hessian(root),
            values,
            EACH,
            has_fisher=False,
        )
    ],
    "several": [SOFTMAX._replace(weight=EACH), SQUARED._replace(weight=0.3)],
}


class Case(NamedTuple):
    """A model with losses: a function that registers them, and its arguments."""

    model: Model
    losses: Sequence[Loss]

    @property
    def batch(self) -> dict[str, Any]:
        shape = jax.eval_shape(self.model.apply, self.model.params, self.model.x).shape
        return {
            "x": self.model.x,
            "targets": [loss.targets(shape) for loss in self.losses],
            "weights": [jnp.asarray(loss.weight) for loss in self.losses],
        }

    @property
    def args(self) -> tuple[Any, Any]:
        return self.model.params, self.batch

    @property
    def has_fisher(self) -> bool:
        return all(loss.has_fisher for loss in self.losses)

    def func(self, params: Any, batch: Any) -> None:
        def one(x, *given):
            y = self.model.apply(params, x[None])[0]
            for loss, target, weight in zip(self.losses, *given, strict=True):
                loss.register(y, target, weight)

        if self.model.is_mapped:
            weights = [weights for _, _, weights in self.each_loss(batch)]
            jax.vmap(one)(batch["x"], batch["targets"], weights)
            return
        y = self.model.apply(params, batch["x"])
        for loss, targets, weight in zip(
            self.losses, batch["targets"], batch["weights"], strict=True
        ):
            loss.register(y, targets, weight)

    def each_loss(self, batch: Any) -> list[tuple[Loss, Any, Any]]:
        """Each loss with its targets and weights."""
        number = len(batch["x"])
        weights = [jnp.broadcast_to(w, (number,)) for w in batch["weights"]]
        return list(zip(self.losses, batch["targets"], weights, strict=True))

    def mean_loss(self, params: Any, batch: Any) -> jax.Array:
        """What all of this is the curvature of."""
        y = self.model.apply(params, batch["x"])
        total = jnp.zeros(())
        for loss, targets, weights in self.each_loss(batch):
            value = lambda y, target, o=loss: o.value(o.inputs(y), target)
            total += jnp.sum(weights * jax.vmap(value)(y, targets))
        return total / len(y)

    def numbers(self) -> np.ndarray:
        """The number of the layer that each element of the parameters belongs to."""
        names = {name: k for k, own in enumerate(self.model.layers) for name in own.split()}
        params = self.model.params
        return np.asarray(
            flat({name: jnp.full(x.shape, names[name]) for name, x in params.items()})
        )

    def same_block(self) -> np.ndarray:
        """Which pairs of elements belong to the same layer."""
        return np.equal.outer(self.numbers(), self.numbers())

    def elsewhere(self, names: str) -> np.ndarray:
        """Which pairs of elements do not belong to these parameters."""
        params = self.model.params
        not_these = {n: jnp.full(x.shape, n not in names.split()) for n, x in params.items()}
        return np.logical_and.outer(*[np.asarray(flat(not_these))] * 2)


def case(model: str, loss: str) -> Case:
    return Case(BY_NAME[model], LOSSES[loss])


def fit(model: str, loss: str) -> bool:
    """Whether a model has the two outputs that a mean and a variance need."""
    return (model, loss) != ("tied table", "both")


def matrix_of(loss: Loss, mode: str) -> Callable[[Any, Any], jax.Array]:
    """The matrix of a loss: its own, or the square of its gradient for the targets."""

    def empirical(z, target):
        gradient = jax.grad(loss.value)(z, target)
        return jnp.outer(gradient, gradient)

    return empirical if mode == "fisher_empirical" else loss.matrix


def dense_curvature(case: Case, params: Any, batch: Any, mode: str = "exact") -> jax.Array:
    """The whole matrix by definition."""
    point, unflatten = ravel_pytree(params)

    def of_example(x, each):
        total = jnp.zeros((point.size, point.size))
        for loss, (target, weight) in zip(case.losses, each, strict=True):
            inputs = lambda p, o=loss: o.inputs(case.model.apply(unflatten(p), x[None])[0])
            jacobian = jax.jacrev(inputs)(point)
            matrix = matrix_of(loss, mode)(inputs(point), target)
            total += weight * jacobian.T @ matrix @ jacobian
        return total

    each = [(targets, weights) for _, targets, weights in case.each_loss(batch)]
    return jax.vmap(of_example)(batch["x"], each).mean(0)


class Place(NamedTuple):
    """A layer at one place.

    `form` brings its output into (rows, heads, channels); `jacobian` is that of the output in this
    form, in all parameters as one vector.
    """

    key: str
    output: jax.Array
    form: Callable[[Any], Any]
    jacobian: jax.Array


class Recorder:
    """Takes note of what each layer does alone, and adds changes to its outputs."""

    def __init__(self, without: str, changes: dict[str, jax.Array] | None = None) -> None:
        self.without, self.changes = without, changes
        self.layers: dict[Any, list[Place]] = {}

    def __call__(self, names, fun, p, x, heads=False, channel=-1, groups=1, part=0):
        y = plain(names, fun, p, x)
        if names in self.without:
            return y

        def form(y):
            y = jnp.moveaxis(y, channel, -1)
            y = y if heads else y.reshape(*y.shape[:-1], groups, -1)
            return y.reshape(-1, *y.shape[-2:])

        point, unflatten = ravel_pytree(p)
        alone = lambda point: form(plain(names, fun, unflatten(point), x))
        places = self.layers.setdefault((names, part), [])
        key = f"{names}, part {part}, place {len(places)}"
        places.append(Place(key, y, form, jax.jacrev(alone)(point)))
        return y if self.changes is None else y + self.changes[key]


def kronecker_curvature(
    case: Case, params: Any, batch: Any, mode: str = "exact", reduce: bool = False
) -> jax.Array:
    """K-FAC by the book, as a whole matrix: for each layer the product of both moments."""
    apply = case.model.book or case.model.apply
    seen = Recorder(case.model.no_book)
    number = len(apply(params, batch["x"], seen))
    layers = seen.layers.values()
    changes = {place.key: jnp.zeros_like(place.output) for places in layers for place in places}
    of_losses = []
    for loss, targets, weights in case.each_loss(batch):
        inputs = lambda changes, o=loss: jax.vmap(o.inputs)(
            apply(params, batch["x"], Recorder(case.model.no_book, changes))
        )
        matrices = weights[:, None, None] * jax.vmap(matrix_of(loss, mode))(
            inputs(changes), targets
        )
        of_losses.append((jax.jacrev(inputs)(changes), matrices))
    total = jnp.zeros((flat(params).size,) * 2)
    for places in layers:
        ins = jnp.concatenate([place.jacobian for place in places])
        if reduce:
            ins = ins.reshape(len(places), number, -1, *ins.shape[1:]).mean((0, 2))
        for jacobians, matrices in of_losses:
            outs = [jax.vmap(jax.vmap(place.form))(jacobians[place.key]) for place in places]
            outs = jnp.concatenate(outs, 2)
            outs = outs.sum(2, keepdims=True) if reduce else outs
            outer = jnp.einsum("nzrho,nzy,nyrhq->hoq", outs, matrices, outs) / number
            total += jnp.einsum("rhop,rhqs,hoq->ps", ins, ins, outer) / len(ins)
    return total


FULL = {
    "dense": curvax.DenseFull,
    "conv2d": curvax.Conv2DFull,
    "conv": curvax.Conv2DFull,
    "embedding": curvax.Full,
    "scale_and_shift": curvax.ScaleAndShiftFull,
    "generic": curvax.NaiveFull,
}
DIAGONAL = {
    "dense": curvax.DenseDiagonal,
    "conv2d": curvax.Conv2DDiagonal,
    "conv": curvax.Conv2DDiagonal,
    "embedding": curvax.Diagonal,
    "scale_and_shift": curvax.ScaleAndShiftDiagonal,
    "generic": curvax.NaiveDiagonal,
}
KEY = jax.random.key(7, impl="unsafe_rbg")


def estimated(
    estimator: Any, args: Any, mode: str | None = None, batch_size: Any = None, key: Any = KEY
) -> Any:
    """The state after one update."""
    state = estimator.init(key, args, None, None)
    size = len(args[1]["x"]) if batch_size is None else batch_size
    return estimator.update_curvature_matrix_estimate(state, 0.0, 1.0, size, key, args, None, mode)


def estimated_matrix(estimator: Any, args: Any, mode: str | None = None, **options: Any) -> Any:
    return estimator.to_dense_matrix(estimated(estimator, args, mode, **options))
