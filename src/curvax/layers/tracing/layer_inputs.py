"""`layer_tags_vjp`: what goes into each layer, and what comes back to it from the losses."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from curvax import _jax
from curvax._types import Array, Fun, PyTree
from curvax.layers.detection.program import Collected, Given, Node
from curvax.layers.tracing.loss_map import (
    AtLosses,
    Losses,
    LossMap,
    LossTangents,
    TracedFunction,
    check_devices,
    like_dependants,
)

LayerData = dict[str, Any]


def layer_tags_vjp(
    func: Fun,
    params_index: int = 0,
    auto_register_tags: bool = True,
    raise_error_on_diff_jaxpr: bool = True,
    **auto_registration_kwargs: Any,
) -> Callable[[Sequence[PyTree]], tuple[Losses, Callable[[LossTangents], list[LayerData]]]]:
    """A function for the values and the cotangents at all layers of `func`.

    Arguments:
        func: a function that registers at least one loss.
        params_index: which of its arguments are the parameters.
        auto_register_tags: whether to look for layers; otherwise there are only those that the
            function tags itself.
        raise_error_on_diff_jaxpr: whether it is an error if the function does other things for
            arguments of other shapes.
        auto_registration_kwargs: as in `curvax.auto_register_tags`.

    Returns:
        A function of the arguments of `func`, as one sequence. It returns `(losses, vjp)`, where
        `vjp` is a function of cotangents as that of `loss_tags_vjp`. It returns a list with a
        dictionary for each layer, sorted by the numbers of their parameters:

        - `inputs`, `outputs`, `params`: tuples of arrays;
        - `outputs_tangents`, `params_tangents`: the cotangents of these;
        - `sites`: a tuple of dictionaries with `inputs`, `outputs` and `outputs_tangents`, one for
          each place at which the layer is applied.

        Inside loops, arrays have one more axis in front. With several sites, the inputs and
        outputs of the layer are those of all sites along the first axis; they are missing where
        these do not fit together, as for a table that is also a matrix.

        Inside `jax.shard_map` they are those of each device. With `check_vma`, the cotangents of
        what is the same on all devices are sums over these, as those of `jax.vjp` are.

    Raises:
        RegistrationError: as `auto_register_tags`.
        ValueError: if the function does other things for other arguments, or if a layer is the same
            on all devices, and its losses are not.

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

    def vjp_at(
        func_args: Sequence[PyTree],
    ) -> tuple[Losses, Callable[[LossTangents], list[LayerData]]]:
        at = traced.at(func_args)
        operands, vjp = layer_data_at(at)
        return at.losses(*operands), vjp

    return vjp_at


def layer_data_at(at: LossMap) -> tuple[tuple[Any, Any], Callable[[LossTangents], list[LayerData]]]:
    """As what `layer_tags_vjp` returns does, for a function that is traced already.

    In place of losses there is what they are made of: what depends on parameters, and the rest.
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
        return [(node, number) for number in range(len(node.outputs))]

    def visit_layer(
        self, node: Node, operands: list[Array], given: Given
    ) -> tuple[list[Any], Collected]:
        outputs = operands[: len(node.outputs)]
        changed = [y + given[node, number] for number, y in enumerate(outputs)]
        return changed, {node: operands}


def _no_changes(at: LossMap) -> dict[Any, Array]:
    """Zeros to be added to the outputs of all layers."""
    changes: dict[Any, Array] = {}
    for layer in at.processed.layers:
        for node in layer.nodes:
            loops = at.processed.program.loop_lengths(node)
            for number, output in enumerate(node.outputs):
                zeros = jnp.zeros((*loops, *output.shape), output.dtype)
                kind = node.equation.outvars[number].aval
                changes[node, number] = _jax.varying_like(zeros, kind)
    return changes


def _layer_data(
    at: LossMap,
    numbers: Sequence[int],
    nodes: Sequence[Node],
    values: Collected,
    cotangents: Collected,
    params: Sequence[Array],
) -> LayerData:
    sites = []
    for node in nodes:
        tag = node.equation.primitive
        cut, end = tag.num_outputs, tag.num_outputs + tag.num_inputs
        sites.append(
            {
                "inputs": tuple(values[node][cut:end]),
                "outputs": tuple(values[node][:cut]),
                "outputs_tangents": tuple(cotangents[node, number] for number in range(cut)),
            }
        )
    together = {key: _together([site[key] for site in sites]) for key in sites[0]}
    return {
        **{key: arrays for key, arrays in together.items() if arrays is not None},
        "params": tuple(at.params[number] for number in numbers),
        "params_tangents": tuple(params[number] for number in numbers),
        "sites": tuple(sites),
    }


def _together(arrays: Sequence[tuple[Array, ...]]) -> tuple[Array, ...] | None:
    """The arrays of all sites, along the first axis; None if they do not fit."""
    if len(arrays) == 1:
        return arrays[0]
    if len({tuple(x.shape[1:] for x in site) for site in arrays}) > 1:
        return None
    return tuple(jnp.concatenate(each) for each in zip(*arrays, strict=True))
