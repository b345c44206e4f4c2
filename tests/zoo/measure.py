"""What curvax says about a model, and what JAX says, in one compiled program for each."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import curvax
from curvax import layer_statistics
from layers.layers import recompute
from layers.tracing.book import from_layer_data, moments
from zoo.case import Entry

# Programs run once and on a few numbers, so it is compiling that takes time.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
if jax.__version_info__ < (0, 11):
    QUICKLY["xla_cpu_use_fusion_emitters"] = False


def compute(f: Any, *args: Any) -> Any:
    """`f(*args)`, in one program."""
    return jax.jit(f).lower(*args).compile(QUICKLY)(*args)


class Measured(NamedTuple):
    """The report, the layers with their data and statistics, and the gradient of the loss.

    And what an estimate of curvature makes of the gradient, with its state and inverse.
    """

    report: Any
    layers: Any
    data: Any
    statistics: Any
    gradient: Any
    state: Any
    step: Any


def layer_data(loss: Any, **options: Any) -> Any:
    """A function for the data of all layers, for the gradients of the registered losses."""
    vjp_at = curvax.layer_tags_vjp(loss, **options)

    def data(*args: Any) -> Any:
        losses, vjp = vjp_at(args)
        return vjp([loss.grad_of_evaluate(None, "regular") for loss in losses])

    return data


def statistics(loss: Any, **options: Any) -> Any:
    """A function for the statistics of all layers, for the same cotangents."""
    pull_back_at = layer_statistics(loss, moments, **options)

    def found(*args: Any) -> Any:
        losses, pull_back = pull_back_at(args)
        return pull_back([loss.grad_of_evaluate(None, "regular") for loss in losses])[0]

    return found


def preconditioned(loss: Any, args: Any, **options: Any) -> Any:
    """A function for an estimate of curvature, and its inverse times a vector."""
    estimator = curvax.BlockDiagonalCurvature(
        loss, default_estimation_mode="ggn_curvature_prop", **options
    )
    state = estimator.init(jax.random.key(0), args, None, -1)
    batch_size = jax.tree.leaves(args[1:])[0].shape[0]

    def found(vector: Any, *args: Any) -> Any:
        ema = (0.0, 1.0)
        new = estimator.update_curvature_matrix_estimate(
            state, *ema, batch_size, jax.random.key(1), args, None
        )
        new = estimator.update_cache(new, 1e-3, None, -1, False, None)
        return new, estimator.multiply_inverse(new, vector, 1e-3, False, True, None)

    return found


def of_sites(layer: Any, data: Any) -> tuple[Any, Any]:
    """What a layer computes at each of its sites, and what comes back from there, added up."""
    outputs, total = [], [jnp.zeros_like(p) for p in data["params"]]
    for place, site in zip(layer.tags, data["sites"], strict=True):
        (x,), (g,), node = site["inputs"], site["outputs_tangents"], place.node
        alone = lambda *params: recompute(node, x, place.use.stacked, params, place.use.cuts)  # noqa: B023
        y, pull_back = jax.vjp(alone, *data["params"])
        outputs.append(y)
        total = [a + b for a, b in zip(total, pull_back(g.astype(y.dtype)), strict=True)]
    return outputs, tuple(total)


@functools.cache
def registered(entry: Entry) -> Any:
    """What is recognised of a model."""
    model = entry.get()
    return curvax.explain_registration(model.loss, model.args)


@functools.cache
def measured(entry: Entry) -> Measured:
    model = entry.get()
    args = model.args
    report = registered(entry)
    # Tagged once for all.
    tagged = curvax.auto_register_tags(model.loss, args)
    done = {"auto_register_tags": False}
    layers = curvax.ProcessedJaxpr.make_from_func(tagged, args, **done).layers
    data_at, statistics_at = layer_data(tagged, **done), statistics(tagged, **done)
    step_at = preconditioned(tagged, args, **done)

    def everything(*args: Any) -> Any:
        gradient = jax.grad(model.loss)(*args)
        return data_at(*args), statistics_at(*args), gradient, *step_at(gradient, *args)

    return Measured(report, layers, *compute(everything, *args))


def alone(entry: Entry, complete: bool = False) -> list[tuple[Any, Any, Any]]:
    """For each layer of a known kind: its data, and `of_sites` from these.

    `complete`: only of layers that have all uses of their parameters.
    """
    rows = measured(entry).report.rows
    found = _alone(entry)
    return [each for layer, *each in found if not (complete and rows[layer.params[0]].reason)]


@functools.cache
def _alone(entry: Entry) -> list[tuple[Any, Any, Any, Any]]:
    found = measured(entry)
    pairs = zip(found.layers, found.data, strict=True)
    known = [(layer, data) for layer, data in pairs if not layer.is_generic]
    layers, data = zip(*known, strict=True)
    each = compute(lambda data: list(map(of_sites, layers, data)), data)
    return [(layer, of, *computed) for (layer, of), computed in zip(known, each, strict=True)]


def statistics_by_the_book(entry: Entry) -> Any:
    """The statistics, from the data of all layers."""
    found = measured(entry)
    return compute(lambda data: from_layer_data(found, data), found.data)
