"""`layer_tags_vjp`: the inputs and outputs of each layer, and the cotangents of its outputs."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from curvax import _jax
from curvax._types import Array, Fun, PyTree
from curvax.layers.detection.program import Collected, Given, Node
from curvax.layers.tracing.loss_map import (
    AtLosses,
    LossArrays,
    Losses,
    LossMap,
    LossTangents,
    TracedFunction,
    check_devices,
    like_dependants,
)

LayerData = dict[str, Any]
"""Arrays of a layer, under the keys that `layer_tags_vjp` describes."""

LayerVjp = Callable[[LossTangents], list[LayerData]]
"""From cotangents of what each loss depends on to the arrays of each layer."""


def layer_tags_vjp(
    func: Fun,
    params_index: int = 0,
    auto_register_tags: bool = True,
    raise_error_on_diff_jaxpr: bool = True,
    **auto_registration_kwargs: Any,
) -> Callable[[Sequence[PyTree]], tuple[Losses, LayerVjp]]:
    """Return a function for the values and cotangents at all layers of `func`.

    Equal to `jax.vjp` of the predictions (`parameter_dependants`) of the registered losses, with
    respect to the parameters and to a zero added to each layer output.

    Arguments:
        func: Function that registers at least one loss.
        params_index: Index of the argument that holds the parameters.
        auto_register_tags: Whether to look for layers; otherwise there are only those that the
            function tags itself.
        raise_error_on_diff_jaxpr: Whether to raise if a later call traces to a different jaxpr.
        auto_registration_kwargs: Keyword arguments of `curvax.auto_register_tags`, such as
            `strict`, `patterns_to_skip` or `allow_unused_params`.

    Returns:
        A function of the arguments of `func`, as one sequence. It returns `(losses, vjp)`, where
        `losses` is a tuple of `LossFunction`s. `vjp` takes cotangents: for each loss, a sequence
        with one array for each of its `parameter_dependants`. It returns a list with a dictionary
        for each layer, sorted by the indices of their parameters:

        - `inputs`, `outputs`, `params`: tuples of arrays;
        - `outputs_tangents`, `params_tangents`: the cotangents of these;
        - `sites`: a tuple of dictionaries with `inputs`, `outputs` and `outputs_tangents`, one for
          each use of the layer.

        Inside loops, arrays have a further leading axis. With several uses, the inputs and outputs
        of the layer are those of all uses, concatenated along the first axis; they are missing
        where shapes differ, as for an embedding that is also used as a matrix.

        Inside `jax.shard_map` they are those of each device. With `check_vma`, the cotangents of
        replicated values are sums over devices, as those of `jax.vjp` are.

    Raises:
        RegistrationError: If no loss is registered, or one was dropped or has no derivative in any
            parameter; if no loss depends on some parameter, or one is in several layers.
        ValueError: If a later call traces to a different jaxpr, or if the outputs of a layer are
            replicated while its losses differ from device to device.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def func(w, x):
        ...     curvax.register_squared_error_loss(x @ w)
        >>> losses, vjp = curvax.layer_tags_vjp(func)((jnp.ones((2, 1)), jnp.ones((3, 2))))
        >>> (layer,) = vjp([losses[0].grad_of_evaluate(jnp.zeros((3, 1)), "regular")])
        >>> layer["outputs_tangents"][0].shape
        (3, 1)
    """
    options = {"auto_register_tags": auto_register_tags, **auto_registration_kwargs}
    traced = TracedFunction.of(func, params_index, raise_error_on_diff_jaxpr, **options)

    def vjp_at(func_args: Sequence[PyTree]) -> tuple[Losses, LayerVjp]:
        at = traced.at(func_args)
        operands, vjp = layer_data_at(at)
        return at.losses(*operands), vjp

    return vjp_at


def layer_data_at(at: LossMap) -> tuple[tuple[LossArrays, LossArrays], LayerVjp]:
    """Return the layers of a traced function.

    Equal to the function that `layer_tags_vjp` returns, except that in place of losses there are
    their operands: those that depend on parameters, and the others.
    """
    check_devices(at)
    nodes = [node for layer in at.processed.layers for node in layer.nodes]
    zeros = _no_changes(at)
    keys = list(zeros)

    def changed(params: Sequence[Array], changes: Sequence[Array]) -> Any:
        given = dict(zip(keys, changes, strict=True))
        dependants, (others, operands) = at(params, _Changes(), given)
        return dependants, (others, [operands[node] for node in nodes])

    dependants, pull_back, (others, operands) = jax.vjp(
        changed, at.params, list(zeros.values()), has_aux=True
    )
    values = dict(zip(nodes, operands, strict=True))

    def vjp(tangents: LossTangents) -> list[LayerData]:
        params, changes = pull_back(like_dependants(tangents, dependants))
        cotangents = dict(zip(keys, changes, strict=True))
        return [
            _layer_data(at, layer.params, layer.nodes, values, cotangents, params)
            for layer in at.processed.layers
        ]

    return (dependants, others), vjp


class _Changes(AtLosses):
    """Hooks that add a change to each output of each layer, and collect the operands of layers."""

    def keys_at_layer(self, node: Node) -> Collection[Any]:
        return [(node, k) for k in range(len(node.outputs))]

    def visit_layer(
        self, node: Node, operands: list[Array], given: Given
    ) -> tuple[list[Any], Collected]:
        outputs = operands[: len(node.outputs)]
        changed = [y + given[node, k] for k, y in enumerate(outputs)]
        return changed, {node: operands}


def _no_changes(at: LossMap) -> dict[Any, Array]:
    """Return zeros to add to the outputs of all layers."""
    changes: dict[Any, Array] = {}
    for layer in at.processed.layers:
        for node in layer.nodes:
            loops = at.processed.program.loop_lengths(node)
            for k, output in enumerate(node.outputs):
                zeros = jnp.zeros((*loops, *output.shape), output.dtype)
                kind = node.equation.outvars[k].aval
                changes[node, k] = _jax.varying_like(zeros, kind)
    return changes


def _layer_data(
    at: LossMap,
    indices: Sequence[int],
    nodes: Sequence[Node],
    values: Collected,
    cotangents: Collected,
    params: Sequence[Array],
) -> LayerData:
    uses = []
    for node in nodes:
        tag = node.equation.primitive
        cut, end = tag.num_outputs, tag.num_outputs + tag.num_inputs
        uses.append(
            {
                "inputs": tuple(values[node][cut:end]),
                "outputs": tuple(values[node][:cut]),
                "outputs_tangents": tuple(cotangents[node, k] for k in range(cut)),
            }
        )
    of_layer = {key: _concatenated([use[key] for use in uses]) for key in uses[0]}
    return {
        **{key: arrays for key, arrays in of_layer.items() if arrays is not None},
        "params": tuple(at.params[index] for index in indices),
        "params_tangents": tuple(params[index] for index in indices),
        "sites": tuple(uses),
    }


def _concatenated(arrays: Sequence[tuple[Array, ...]]) -> tuple[Array, ...] | None:
    """Concatenate the arrays of all uses along the first axis; None if shapes differ."""
    if len(arrays) == 1:
        return arrays[0]
    if len({tuple(x.shape[1:] for x in of_use) for of_use in arrays}) > 1:
        return None
    return tuple(jnp.concatenate(each) for each in zip(*arrays, strict=True))
