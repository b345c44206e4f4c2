"""Calls of kfac_jax's losses, tags and tracer that are run with kfac_jax 0.0.8 and with curvax.

    .venv-kfac/bin/python tests/drop_in/tags_cases.py > tests/drop_in/tags_values.json

records what kfac_jax returns; `test_tags.py` compares. Each case is a function of the modules, as
attributes of one object, to a pytree of arrays, numbers and strings.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

X = jnp.asarray(np.sin(np.arange(12.0)).reshape(4, 3), jnp.float32)
Y = jnp.asarray(np.cos(np.arange(8.0)).reshape(4, 2), jnp.float32)
PARAMS = {
    "b": jnp.array([0.5, -1.0], jnp.float32),
    "s": jnp.array([2.0, 3.0], jnp.float32),
    "w": jnp.asarray(np.cos(np.arange(6.0)).reshape(3, 2), jnp.float32),
}
ARGS = (PARAMS, X, Y)
TANGENTS = jax.tree.map(jnp.sin, PARAMS)


def model(k, normalize=True):
    def func(params, x, y):
        z = jnp.tanh(x @ params["w"] + params["b"]) * params["s"]
        register = k.loss_functions.register_normal_predictive_distribution
        register(z, y, 0.3, 2.0, normalize)
        return jnp.mean((z - y) ** 2)

    return func


def repeated(k):
    def func(params, x, y):
        z = jnp.tanh(jnp.stack([x, 2 * x], axis=1) @ params["w"] + params["b"]) * params["s"]
        k.loss_functions.register_squared_error_loss(jnp.sum(z, axis=1), y)
        return jnp.mean(z)

    return func


def of_loss(loss, vectors, index=(1,)):
    """What a loss says of itself. In kfac_jax, copies forget `normalize_log_prob`."""
    copies = [loss.copy_with_different_inputs(vectors)]
    return {
        "values": [loss.evaluate(None, mode) for mode in ("regular", "sqrt", "off")],
        "gradients": loss.grad_of_evaluate(None, "regular"),
        "fisher": loss.multiply_fisher(vectors),
        "ggn": loss.multiply_ggn(vectors),
        "factor": loss.multiply_fisher_factor(vectors[0]),
        "transposed": loss.multiply_fisher_factor_transpose(vectors),
        "one_hot": loss.multiply_fisher_factor_replicated_one_hot(index),
        "shape": list(loss.fisher_factor_inner_shape),
        "dtype": str(loss.dtype),
        "leaves": jax.tree.leaves(loss),
        "copy": [x.evaluate() for x in copies if getattr(loss, "normalize_log_prob", True)],
    }


def losses(k):
    logits, bits = X, jnp.asarray(np.arange(12) % 2, jnp.float32).reshape(4, 3)
    classes, mask = jnp.array([0, 2, 1, 1]), jnp.array([1, 0, 1, 1])
    lf = k.loss_functions
    hot = jnp.eye(3, dtype=jnp.float32)[classes]
    return {
        "mean": lf.NormalMeanNegativeLogProbLoss(logits, bits, 0.3, 2.0),
        "mean, unnormalised": lf.NormalMeanNegativeLogProbLoss(logits, bits, 0.3, 2.0, False),
        "bits": lf.MultiBernoulliNegativeLogProbLoss(logits, bits, 3.0),
        "class": lf.CategoricalLogitsNegativeLogProbLoss(logits, classes, mask, 0.5),
        "one-hot": lf.OneHotCategoricalLogitsNegativeLogProbLoss(logits, hot),
    }


def vjp(k):
    at, _ = k.tracer.loss_tags_vjp(model(k))
    found, pull_back = at(ARGS)
    return [type(found[0]).__name__, pull_back(tuple(x.parameter_dependants for x in found))]


def jvp(k):
    found, tangents = k.tracer.loss_tags_jvp(model(k))[0](ARGS, TANGENTS)
    return [found[0].parameter_dependants, tangents]


def hvp(k):
    product, found = k.tracer.loss_tags_hvp(model(k))[0](ARGS, TANGENTS)
    return [product, found[0].evaluate()]


def layers(k, func):
    at, processed = k.tracer.layer_tags_vjp(func)
    found, pull_back = at(ARGS)
    data = pull_back(tuple(x.parameter_dependants for x in found))
    fields = lambda x: {"inputs": x.inputs, "outputs": x.outputs, "params": x.params}
    return [
        [{"primals": fields(x.primals), "tangents": fields(x.tangents)} for x in data],
        [list(index) for index in processed(ARGS).layer_indices],
    ]


def meta(k, **options):
    fields = {"outputs_index": (0,), "inputs_index": (1,), "params_index": (2,)}
    return k.layers_and_loss_tags.LayerMetaData(variant="mine", **{**fields, **options})


def described(x):
    fields = ("variant", "outputs_index", "inputs_index", "params_index", "name", "nesting")
    return [str(getattr(x, name)) for name in fields]


def extracted(k, name, func, *args, **options):
    equations = jax.make_jaxpr(func)(*args).eqns[::-1]
    found = dict(getattr(k.tag_graph_matcher, name)(equations, **options))
    rest = sorted(key for key in found if key.startswith("has_") or key == "dimension_numbers")
    return [described(found["meta"]), [[key, str(found[key])] for key in rest]]


CASES = {
    **{
        f"loss: {name}": lambda k, name=name: of_loss(losses(k)[name], (jnp.cos(X),))
        for name in ("mean", "mean, unnormalised", "bits", "class", "one-hot")
    },
    "filter_none": lambda k: k.loss_functions.filter_none(a=1, b=None, c=2.0),
    "insert_slice_in_zeros": lambda k: k.loss_functions.insert_slice_in_zeros(
        X[:, :1], (4, 3), (0, 2)
    ),
    "loss_tags_vjp": vjp,
    "loss_tags_jvp": jvp,
    "loss_tags_hvp": hvp,
    "layer_tags_vjp": lambda k: layers(k, model(k)),
    "layer_tags_vjp, repeated": lambda k: layers(k, repeated(k)),
    "compute_all_losses": lambda k: [
        [x.evaluate() for x in k.tracer.compute_all_losses(model(k, normalize))[0](ARGS)]
        for normalize in (True, False)
    ],
    "ProcessedJaxpr": lambda k: [
        (made := k.tracer.ProcessedJaxpr.make_from_func(model(k), ARGS))
        .reconstruct_losses(((Y, Y),))[0]
        .evaluate(),
        len(made.loss_tags),
        str(made.params_tree),
    ],
    "construct_compute_losses_inputs": lambda k: k.tracer.construct_compute_losses_inputs(
        k.tracer.ProcessedJaxpr.make_from_func(model(k), ARGS), ARGS, 0
    )(PARAMS)[0],
    "shape_and_type": lambda k: [str(x) for x in k.tracer.shape_and_type(X)],
    "LayerMetaData": lambda k: described(meta(k)),
    "layer_data": lambda k: jax.tree.leaves(
        k.layers_and_loss_tags.layer_tag.layer_data(
            [1, 2, 3], {"meta": meta(k, outputs_index=(2,), params_index=(0,))}
        )
    ),
    "layer_tag": lambda k: k.layers_and_loss_tags.layer_tag.bind(Y, X, Y, meta=meta(k)),
    "register_dense": lambda k: [
        k.layers_and_loss_tags.register_dense(X @ PARAMS["w"], X, PARAMS["w"], variant="mine"),
        k.layers_and_loss_tags.register_repeated_dense(Y, X, PARAMS["w"], PARAMS["b"]),
        k.layers_and_loss_tags.register_scale_and_shift(Y, Y, PARAMS["b"]),
        k.layers_and_loss_tags.register_generic(PARAMS["w"]),
    ],
    "_dense_parameter_extractor": lambda k: [
        extracted(k, "_dense_parameter_extractor", lambda x, w, b: x @ w + b, X, *WB),
        extracted(k, "_dense_parameter_extractor", lambda x, w: x @ w, X, WB[0], variant="mine"),
    ],
    "_scale_and_shift_parameter_extractor": lambda k: [
        extracted(k, "_scale_and_shift_parameter_extractor", func, Y, *args)
        for func, args in (
            (lambda x, s: x * s, WB[1:]),
            (lambda x, s: x + s, WB[1:]),
            (lambda x, s, t: x * s + t, (WB[1], WB[1])),
        )
    ],
    "_dense": lambda k: [
        k.tag_graph_matcher._dense(X, WB[:n], axes=1, with_reshape=reshape)
        for n in (1, 2)
        for reshape in (True, False)
    ],
    "equivalent": lambda k: equivalences(k.tag_graph_matcher),
    "num_unique_inputs": lambda k: k.tag_graph_matcher.num_unique_inputs(
        jax.make_jaxpr(lambda x, w, b: x @ w + b)(X, *WB).eqns
    ),
}
WB = (PARAMS["w"], PARAMS["b"])


def equivalences(matcher):
    first = lambda func, *args: jax.make_jaxpr(func)(*args).eqns[0]
    dots = [
        first(lambda a, b: a @ b, X, WB[0]),
        first(lambda a, b: a @ b, jnp.ones((9, 3)), WB[0]),
        first(lambda a, b: jax.lax.dot_general(a, b, (((0,), (0,)), ((), ()))), X, X),
    ]
    rules = matcher.GraphMatcherComparator()
    return [
        [bool(matcher.dot_general_equivalent(dots[0], x)) for x in dots],
        [bool(rules.are_equivalent(dots[0], x)) for x in dots],
        sorted(rules.commutative_ops_names),
    ]


if __name__ == "__main__":
    import kfac_jax
    from utils_cases import plain

    found = {name: plain(case(kfac_jax)) for name, case in CASES.items()}
    json.dump(found, sys.stdout, indent=None, separators=(",", ":"))
