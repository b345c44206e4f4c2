"""A user-supplied block may change its data before it calls `super()`: what it passes is used."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

import curvax
from curvature.cases import DIAGONAL, FULL, KEY, normal
from helpers import assert_same

repeated_dense_tag = curvax.LayerTag("repeated_dense_tag", num_inputs=1, num_outputs=1)
MODES = (
    "fisher_exact",
    "ggn_exact",
    "fisher_empirical",
    "fisher_gradients",
    "fisher_curvature_prop",
    "ggn_curvature_prop",
)
WAYS = ("found", "by hand", "own tag")


class Repeated(curvax.DenseTwoKroneckerFactored):
    """A dense layer at all positions of each example, as users of kfac_jax write its block."""

    def fixed_scale(self):
        (shape,) = self.inputs_shapes
        return float(math.prod(shape[1:-1]))

    def update_curvature_matrix_estimate(
        self, state, estimation_data, ema_old, ema_new, batch_size, pmap_axis_name
    ):
        estimation_data = dict(estimation_data)
        (x,), (dy,) = estimation_data["inputs"], estimation_data["outputs_tangents"]
        estimation_data["inputs"] = (x.reshape(-1, x.shape[-1]),)
        estimation_data["outputs_tangents"] = (dy.reshape(-1, dy.shape[-1]),)
        num_rows = x.size // x.shape[-1]
        is_static = isinstance(batch_size, int)
        batch_size = num_rows if is_static else batch_size * math.prod(x.shape[1:-1])
        return super().update_curvature_matrix_estimate(
            state=state,
            estimation_data=estimation_data,
            ema_old=ema_old,
            ema_new=ema_new,
            batch_size=batch_size,
            pmap_axis_name=pmap_axis_name,
        )


def layer(way, params, x):
    """`x @ w + b`, in each of the ways in which curvax gets to know of a layer."""
    w, *b = params
    y = x @ w
    y = y + jnp.broadcast_to(b[0], y.shape) if b else y
    if way == "by hand":
        return curvax.register_dense(y, x, w, *b)
    return repeated_dense_tag.bind(y, x, w, *b) if way == "own tag" else y


def after(v, y):
    """From what the layer puts out to predictions, so that all positions matter."""
    return jnp.tanh(y).reshape(len(y), -1) @ v


def case(batch, positions, inputs, outputs, has_bias, way="found"):
    """A model function, its arguments, and what comes after the layer as a function."""
    params = [normal(0, inputs, outputs), *([normal(1, outputs)] if has_bias else [])]
    v = normal(2, math.prod(positions) * outputs, 2)
    x, targets = normal(3, batch, *positions, inputs), normal(4, batch, 2)

    def func(params, data):
        z = after(v, layer(way, params, data["x"]))
        curvax.register_squared_error_loss(z, data["y"], weight=0.5)

    return func, (params, {"x": x, "y": targets}), functools.partial(after, v)


def formula(args, after, mode):
    """Return n · (Σxxᵀ / Bn) ⊗ (Σddᵀ / Bn), with rows and columns in the order (w, b)."""
    (w, *b), data = args
    x, y = data["x"], layer("found", args[0], data["x"])
    each = jax.vmap(jax.jacrev(lambda y: after(y[None])[0]))(y)  # (examples, predictions, *y)
    if mode == "fisher_empirical":
        # √weight times the gradient of the squared error, as all modes scale their cotangents.
        each = jnp.einsum("bc,bc...->b...", 2 * 0.5**0.5 * (after(y) - data["y"]), each)
    x = np.asarray(x).reshape(-1, len(w))
    x = np.concatenate([x, np.ones((len(x), 1))], 1) if b else x
    d = np.asarray(each).reshape(-1, w.shape[1])
    n, rows = len(x) / len(y), len(x)
    return n * np.kron(x.T @ x / rows, d.T @ d / rows)


def matrix(func, args, mode, ctor, batch_size=None, tags=("dense", "repeated_dense")):
    with curvax.set_default_tag_to_block_ctor("repeated_dense", ctor):
        estimator = curvax.BlockDiagonalCurvature(
            func, 0, mode, layer_tag_to_block_ctor=dict.fromkeys(tags, ctor)
        )

        @jax.jit
        def compute(args, batch_size):
            state = estimator.init(KEY, args, None, None)
            how = (0.0, 1.0, batch_size, KEY, args, None)
            return estimator.to_dense_matrix(
                estimator.update_curvature_matrix_estimate(state, *how)
            )

        size = len(args[1]["x"])
        if batch_size == "traced":
            return compute(args, size)
        return jax.jit(lambda args: compute.__wrapped__(args, size))(args)


@settings(max_examples=max(2, settings.default.max_examples // 3))  # Each compiles a program.
@given(
    st.integers(1, 4),
    st.sampled_from([(1,), (3,), (4,), (2, 3)]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from(WAYS),
    st.sampled_from(MODES[:3]),
    st.sampled_from([None, "traced"]),
)
@example(3, (2,), 3, 2, True, "found", "fisher_exact", None)
@example(2, (3,), 2, 3, False, "by hand", "fisher_empirical", "traced")
@example(2, (2, 2), 2, 1, True, "own tag", "ggn_exact", None)
def test_rows_of_all_positions(batch, positions, inputs, outputs, has_bias, way, mode, size):
    func, args, rest = case(batch, positions, inputs, outputs, has_bias, way)
    assert_same(matrix(func, args, mode, Repeated, size), formula(args, rest, mode), 1e-9, 1e-10)


@pytest.mark.parametrize(
    "mode", [MODES[3], *(pytest.param(mode, marks=pytest.mark.slow) for mode in MODES[4:])]
)
def test_modes_that_draw(mode):
    """Where nothing is reduced, the usual block has the same matrix, with the same draws."""
    func, args, _ = case(3, (2,), 2, 2, True)
    ours = matrix(func, args, mode, curvax.DenseTwoKroneckerFactored)
    assert_same(matrix(func, args, mode, Repeated), ours, 1e-9, 1e-10)


def test_devices():
    """Each device has its own examples; the average over these is the estimate of all."""
    func, args, rest = case(4, (3,), 2, 2, True)
    params, data = args
    estimator = curvax.BlockDiagonalCurvature(
        func, 0, "fisher_exact", layer_tag_to_block_ctor={"dense": Repeated}
    )

    def on_device(data):
        args = params, data
        state = estimator.init(KEY, args, None, None)
        how = (0.0, 1.0, 2, KEY, args, "devices")
        return estimator.to_dense_matrix(estimator.update_curvature_matrix_estimate(state, *how))

    halves = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), data)
    found = jax.jit(jax.vmap(on_device, axis_name="devices"))(halves)
    expected = formula(args, rest, "fisher_exact")
    assert_same(found[0], expected, 1e-9, 1e-10)
    assert_same(found[1], expected, 1e-9, 1e-10)


@pytest.mark.slow
def test_optimizer_takes_the_same_steps():
    func, args, _ = case(4, (3,), 2, 2, True)

    def value(params, data):
        func(params, data)
        w, b = params
        y = data["x"] @ w
        return jnp.mean(jnp.tanh(y + jnp.broadcast_to(b, y.shape)) ** 2)

    def steps(ctor):
        optimizer = curvax.Optimizer(
            jax.value_and_grad(value),
            l2_reg=0.0,
            num_burnin_steps=0,
            estimation_mode="fisher_exact",
            layer_tag_to_block_ctor={"dense": ctor},
        )
        params = jax.tree.map(jnp.copy, args[0])
        state = optimizer.init(params, KEY, args[1])
        for _ in range(2):
            how = {"learning_rate": 0.1, "momentum": 0.5, "damping": 0.1}
            params, state, _ = optimizer.step(params, state, KEY, batch=args[1], **how)
        return params

    assert_same(steps(Repeated), steps(curvax.DenseTwoKroneckerFactored), 1e-9, 1e-10)


def changing(change):
    """For any class of blocks, one that changes its data and its batch size before `super()`."""

    def of(ctor):
        class Changed(ctor):
            def update_curvature_matrix_estimate(
                self, state, estimation_data, ema_old, ema_new, batch_size, pmap_axis_name
            ):
                data, batch_size = change(dict(estimation_data), batch_size)
                rest = (ema_old, ema_new, batch_size, pmap_axis_name)
                return super().update_curvature_matrix_estimate(state, data, *rest)

        return Changed

    return of


def both(data, function, keys=("inputs", "outputs_tangents")):
    return data | {key: tuple(map(function, data[key])) for key in keys}


def scaled(data, batch_size):
    return both(data, lambda g: 3 * g, ["outputs_tangents"]), batch_size


def at_sites(data, batch_size):
    sites = [scaled(site, None)[0] for site in data["sites"]]
    return data | {"sites": tuple(sites)}, batch_size


def rebuilt(data, batch_size):
    """A new dictionary, of nothing but what is needed."""
    changed, _ = scaled(data, None)
    return {key: changed[key] for key in ("inputs", "outputs_tangents")}, batch_size


def first_two(data, batch_size):
    return both(data, lambda x: x[:2]), 2


def dense(p, x):
    return jnp.tanh(x @ p)


def scales(p, x):
    return jnp.tanh(x * jnp.broadcast_to(p, x.shape))


def convolution(p, x):
    image = x.reshape(len(x), 1, -1, 1)
    return jnp.tanh(jax.lax.conv(image, p.reshape(1, 1, -1, 1), (1, 1), "SAME"))


def embedding(p, x):
    return jnp.tanh(p[(x > 0).astype(int)])


def recurrent(p, x):
    return jax.lax.scan(lambda c, a: (jnp.tanh(c + a @ p), None), x[:, 0], x.swapaxes(0, 1))[0]


def deep(p, x):
    return jax.lax.scan(lambda c, q: (jnp.tanh(c @ q), None), x, p)[0]


def twice(p, x):
    return jnp.tanh(jnp.tanh(x @ p) @ p)


LAYERS = {
    "dense": (dense, (3, 3), (3,)),
    "positions": (dense, (3, 3), (2, 3)),
    "scales": (scales, (3,), (3,)),
    "convolution": (convolution, (2,), (4,)),
    "embedding": (embedding, (2, 2), (3,)),
    "loop": (recurrent, (3, 3), (2, 3)),
    "stack": (deep, (2, 3, 3), (3,)),
    "twice": (twice, (3, 3), (3,)),
}
KRONECKER = {
    "dense": curvax.DenseTwoKroneckerFactored,
    "conv": curvax.ConvTwoKroneckerFactored,
    "conv2d": curvax.Conv2DTwoKroneckerFactored,
    "embedding": curvax.EmbeddingTwoKroneckerFactored,
}
BLOCKS = {"Kronecker": KRONECKER, "Full": FULL, "Diagonal": DIAGONAL}


def matrices(name, ctors, change, rows=slice(None)):
    """The matrix of a layer whose block changes its data, and that of the usual one for `rows`."""
    compute, shape, inputs = LAYERS[name]
    p, x = 0.5 * normal(0, *shape), normal(1, 4, *inputs)
    data = {"x": x, "y": normal(2, *compute(p, x).reshape(4, -1).shape)}

    def func(p, data):
        z = compute(p, data["x"])
        curvax.register_squared_error_loss(z.reshape(len(z), -1), data["y"], weight=0.5)

    theirs = {tag: changing(change)(ctor) for tag, ctor in ctors.items()}

    @jax.jit
    def both_matrices(p, data):
        found = []
        for tags, part in ((theirs, slice(None)), (ctors, rows)):
            args = p, jax.tree.map(lambda x, part=part: x[part], data)
            estimator = curvax.BlockDiagonalCurvature(
                func, 0, "fisher_empirical", layer_tag_to_block_ctor=tags
            )
            state = estimator.init(KEY, args, None, None)
            how = (0.0, 1.0, len(args[1]["x"]), KEY, args, None)
            new = estimator.update_curvature_matrix_estimate(state, *how)
            found.append(estimator.to_dense_matrix(new))
            assert all(type(block) in tags.values() for block in estimator.blocks)
        return found

    return both_matrices(p, data)


def cases(*quick, slow):
    return [*quick, *(pytest.param(*each, marks=pytest.mark.slow) for each in slow)]


SCALED = cases(
    ("positions", "Full", at_sites),
    ("scales", "Diagonal", scaled),
    ("convolution", "Kronecker", scaled),
    ("loop", "Kronecker", scaled),
    ("twice", "Full", scaled),
    slow=[
        *((name, kind, scaled) for name in LAYERS for kind in ("Full", "Diagonal")),
        *((name, "Kronecker", scaled) for name in LAYERS if name != "scales"),
        *((name, "Kronecker", at_sites) for name in ("loop", "stack", "twice")),
        *((name, "Full", rebuilt) for name in ("positions", "twice")),
    ],
)


@pytest.mark.parametrize(("name", "kind", "change"), SCALED)
def test_scaled_cotangents(name, kind, change):
    found, plain = matrices(name, BLOCKS[kind], change)
    assert_same(found, 9 * plain, 1e-9, 1e-10)


FEWER = cases(
    ("positions", "Full"),
    ("convolution", "Diagonal"),
    ("embedding", "Kronecker"),
    slow=[
        ("dense", "Kronecker"),
        ("positions", "Diagonal"),
        ("scales", "Full"),
        ("convolution", "Kronecker"),
        ("embedding", "Full"),
    ],
)


@pytest.mark.parametrize(("name", "kind"), FEWER)
def test_some_of_the_examples(name, kind):
    """Of the first two examples, data are what they are in a batch of these alone."""
    assert_same(*matrices(name, BLOCKS[kind], first_two, slice(2)), 1e-9, 1e-10)


def test_layers_of_a_stack():
    """The axis for the layers of a stack stays the leading axis."""
    change = lambda data, size: (both(data, lambda x: x[:, :2]), 2)
    assert_same(*matrices("stack", KRONECKER, change, slice(2)), 1e-9, 1e-10)


def test_steps_of_a_loop():
    """Kronecker factors do not depend on which rows are of the same example."""
    flat = lambda data, size: (both(data, lambda x: x.reshape(-1, x.shape[-1])), size)
    assert_same(*matrices("loop", KRONECKER, flat), 1e-9, 1e-10)


def test_gradients_of_the_full_batch():
    change = lambda data, size: (both(data, lambda g: 3 * g, ["params_tangents"]), size)
    found, plain = matrices("dense", {"dense": curvax.NaiveDiagonal}, change)
    assert_same(found, 9 * plain, 1e-9, 1e-10)


WRONG = {
    "features": (
        "dense",
        KRONECKER,
        lambda data, size: (both(data, lambda x: x[:, :2], ["inputs"]), size),
        r"Changed: the estimation_data .* contradict its layer: inputs and outputs_tangents have "
        r"the shapes \(4, 2\) and \(4, 3\) .* the features \(3,\) and \(3,\)",
    ),
    "rows": (
        "positions",
        KRONECKER,
        lambda data, size: (both(data, lambda x: x[:2], ["inputs"]), size),
        r"have the shapes \(2, 2, 3\) and \(4, 2, 3\)",
    ),
    "batch size": (
        "positions",
        KRONECKER,
        lambda data, size: (both(data, lambda x: x.reshape(-1, 3)), 5),
        r"the batch_size 5 does not divide its 8 rows. Pass the number of examples, or that of",
    ),
    "both": (
        "dense",
        KRONECKER,
        lambda data, size: (scaled(at_sites(data, size)[0], size)[0], size),
        r"both the arrays of the layer .* and those of its uses .* were changed. Change one",
    ),
    "sites": (
        "twice",
        KRONECKER,
        lambda data, size: (data | {"sites": data["sites"][:1]}, size),
        r"it has data of 1 sites, the layer has 2 uses",
    ),
    "missing": (
        "dense",
        KRONECKER,
        lambda data, size: ({"inputs": data["inputs"]}, size),
        r"it lacks inputs or outputs_tangents",
    ),
    "images": (
        "convolution",
        KRONECKER,
        lambda data, size: (both(data, lambda x: x[:, :, :2]), size),
        r"have the shapes \(4, 1, 2, 1\) and \(4, 1, 2, 1\)",
    ),
    "dtype": (
        "embedding",
        KRONECKER,
        lambda data, size: (
            both(first_two(data, size)[0], lambda x: x.astype(float), ["inputs"]),
            2,
        ),
        r"the dtypes float64 and float64",
    ),
    "places": (
        "twice",
        FULL,
        first_two,
        r"has 2 uses, .* must keep their shapes, .*\(8, 3\).* under sites, instead",
    ),
    "loop": (
        "loop",
        FULL,
        lambda data, size: (both(data, lambda x: x.reshape(-1, 3)), size),
        r"is in a loop, and Changed needs per-example gradients",
    ),
    "number of arrays": (
        "dense",
        KRONECKER,
        lambda data, size: (data | {"inputs": data["inputs"] * 2}, size),
        r"the layer has 1 inputs and 1 outputs of the shapes",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_data_that_contradict_the_layer(name):
    layer, ctors, change, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        matrices(layer, ctors, change)


def test_parts_of_a_parameter():
    def func(p, data):
        y = jnp.tanh(data["x"] @ p[:3]) @ p[3:5]
        curvax.register_squared_error_loss(y, data["y"], weight=0.5)

    args = normal(0, 5, 2), {"x": normal(1, 4, 3), "y": normal(2, 4, 2)}
    own = curvax.BlockDiagonalCurvature(func, layer_tag_to_block_ctor={"dense": Repeated})
    message = r"each part has a block, but Repeated overrides .* Give these .*index_to_block_ctor"
    with pytest.raises(ValueError, match=message):
        own.finalize(args)
    index = {(0,): curvax.DenseTwoKroneckerFactored}
    curvax.BlockDiagonalCurvature(
        func, layer_tag_to_block_ctor={"dense": Repeated}, index_to_block_ctor=index
    ).finalize(args)
