"""kfac_jax's `tracer`: derivatives of the losses and of the layers of a function.

As in kfac_jax, each transformation returns two functions: the transformed one, and one that returns
the `ProcessedJaxpr` behind it. Both take the arguments of the function as one sequence.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from curvax import _jax
from curvax._types import Array, Fun, PyTree, TreeDef
from curvax.kfac_jax.layers_and_loss_tags import (
    LayerData,
    layer_eqn_data,
    loss_eqn_class_name,
)
from curvax.kfac_jax.loss_functions import LossFunction as LossFunction, of_kfac_jax
from curvax.kfac_jax.tag_graph_matcher import DEFAULT_GRAPH_PATTERNS, curvax_pattern_names
from curvax.layers.tags import LayerTag
from curvax.layers.tracing import layer_inputs, loss_derivatives, loss_map
from curvax.layers.use import LayerUse
from curvax.losses.tag import LossTag

T = TypeVar("T")
Params = TypeVar("Params")

Losses = tuple[Any, ...]
Arrays = tuple[Array, ...]
GetProcessed = Callable[[Sequence[PyTree]], "ProcessedJaxpr"]


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, kw_only=True)
class LayerVjpData(Generic[T]):
    """The values of one layer, and the cotangents of these.

    Arguments:
        primals: Inputs, outputs and parameters of the layer.
        tangents: The derivative of the losses with respect to outputs and parameters.
    """

    primals: LayerData[T]
    tangents: LayerData[T]

    def tree_flatten(self) -> tuple[tuple[LayerData[T], LayerData[T]], None]:
        """Return primals and tangents."""
        return (self.primals, self.tangents), None

    @classmethod
    def tree_unflatten(cls, aux_data: None, children: Any) -> "LayerVjpData[T]":
        """Return the data with these primals and tangents."""
        del aux_data
        primals, tangents = children
        return cls(primals=primals, tangents=tangents)


@dataclass
class VarMap:
    """Values of variables, by their identity.

    Arguments:
        id_to_var: The variables by their identity.
        var_to_val: Their values by their identity.
    """

    id_to_var: dict[int, Any] = field(default_factory=dict)
    var_to_val: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def create(cls, it: Iterable[tuple[Any, Any]]) -> "VarMap":
        """Return a map with these variables and values."""
        made = cls()
        made.update(it)
        return made

    def get(self, var: Any) -> Any:
        """Return the value of a variable."""
        return self.var_to_val[id(var)]

    def update(self, it: Iterable[tuple[Any, Any]]) -> None:
        """Set the values of variables."""
        for var, value in it:
            self.id_to_var[id(var)] = var
            self.var_to_val[id(var)] = value


class ProcessedJaxpr(loss_map.ProcessedJaxpr):
    """A traced function whose losses and layers are tagged, as `curvax.ProcessedJaxpr`.

    Layers are sorted by the smallest index of their parameters.

    Arguments:
        jaxpr: Jaxpr of the function.
        consts: Constants of the jaxpr.
        in_tree: Structure of the arguments of the function.
        params_index: Index of the argument that holds the parameters.
        allow_left_out_params: Whether there may be parameters that are in no layer.
    """

    def __init__(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        in_tree: TreeDef,
        params_index: int,
        allow_left_out_params: bool = False,
        *,
        describes_own_params: bool = False,
    ) -> None:
        super().__init__(
            jaxpr,
            consts,
            in_tree,
            params_index,
            allow_left_out_params,
            describes_own_params=describes_own_params,
        )
        self.layers = sorted(self.layers, key=lambda layer: min(layer.params))
        self.layer_tags = tuple(layer.nodes[0].equation for layer in self.layers)
        self.layer_indices = tuple(layer.params for layer in self.layers)

    @classmethod
    def make_from_func(
        cls,
        func: Fun,
        func_args: Sequence[PyTree],
        params_index: int = 0,
        auto_register_tags: bool = True,
        allow_left_out_params: bool = False,
        **auto_registration_kwargs: Any,
    ) -> "ProcessedJaxpr":
        """Trace a function with its layers tagged.

        Arguments:
            func: Function that registers at least one loss.
            func_args: Sequence of arguments to trace it with.
            params_index: Index of the argument that holds the parameters.
            auto_register_tags: Whether to look for layers.
            allow_left_out_params: Whether there may be parameters that are in no layer.
            auto_registration_kwargs: Keyword arguments of `auto_register_tags`.
        """
        options = with_default_patterns(auto_registration_kwargs) if auto_register_tags else {}
        made = super().make_from_func(
            func, func_args, params_index, auto_register_tags, allow_left_out_params, **options
        )
        assert isinstance(made, cls)
        return made

    def log_registered_losses(self) -> None:
        """Log the classes of the losses."""
        for eqn in self.loss_tags:
            logging.getLogger("curvax").info("Registered loss: %s", loss_eqn_class_name(eqn))

    def reconstruct_losses(self, losses_inputs: Sequence[Sequence[Array]]) -> Losses:
        """Return the losses with other values of their operands.

        Arguments:
            losses_inputs: For each loss its operands, of which the last may be left out.
        """
        found: list[Any] = []
        for eqn, inputs in zip(self.loss_tags, losses_inputs, strict=True):
            names = eqn.params["args_names"][: len(inputs)]
            found.append(of_kfac_jax(eqn.primitive.loss(*inputs, args_names=names)))
        return tuple(found)


def with_default_patterns(auto_registration_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments for curvax's `auto_register_tags`, from those for kfac_jax's."""
    skipped = curvax_pattern_names(auto_registration_kwargs.get("patterns_to_skip", ()))
    defaults = {"graph_patterns": DEFAULT_GRAPH_PATTERNS}
    return {**defaults, **auto_registration_kwargs, "patterns_to_skip": skipped}


def shape_and_type(x: Array) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and the dtype of an array."""
    return x.shape, x.dtype


def make_cache_key(
    func_args: Sequence[PyTree], *args: Any
) -> tuple[TreeDef, tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]]:
    """Return a key of arguments; a function is traced once for each."""
    leaves, tree = jax.tree.flatten((tuple(func_args), args))
    return tree, tuple((jnp.shape(x), np.dtype(jnp.result_type(x))) for x in leaves)


def cached_transformation(
    func: Fun,
    transformation: Callable[..., T],
    params_index: int = 0,
    auto_register_tags: bool = True,
    allow_left_out_params: bool = False,
    allow_no_losses: bool = False,
    raise_error_on_diff_jaxpr: bool = True,
    **auto_registration_kwargs: Any,
) -> tuple[Callable[..., T], GetProcessed]:
    """Return a function of a traced function, and the traced function.

    Arguments:
        func: Function that registers at least one loss.
        transformation: Function `transformation(processed_jaxpr, func_args, *args, **kwargs)`.
        params_index: Index of the argument that holds the parameters.
        auto_register_tags: Whether to look for layers.
        allow_left_out_params: Whether there may be parameters that are in no layer.
        allow_no_losses: Whether there may be no loss; not available here.
        raise_error_on_diff_jaxpr: Whether to raise if later arguments trace to other layers.
        auto_registration_kwargs: Keyword arguments of `auto_register_tags`.

    Returns:
        The function `(func_args, *args, **kwargs)` that the transformation makes, and a function
        from `func_args` to the `ProcessedJaxpr`.

    Raises:
        NotImplementedError: If `allow_no_losses` is True.
    """
    if allow_no_losses:
        raise NotImplementedError(
            "curvax.kfac_jax.tracer.cached_transformation: without a loss there is nothing to "
            "trace here. Register one."
        )
    known: dict[Any, ProcessedJaxpr] = {}

    def get_processed_jaxpr(func_args: Sequence[PyTree]) -> ProcessedJaxpr:
        key = make_cache_key(func_args)
        if key in known:
            return known[key]
        made = ProcessedJaxpr.make_from_func(
            func,
            func_args,
            params_index,
            auto_register_tags,
            allow_left_out_params,
            **auto_registration_kwargs,
        )
        if raise_error_on_diff_jaxpr and known:
            layers = lambda processed: [(x.tag_name, x.params) for x in processed.layers]
            first = next(iter(known.values()))
            if layers(first) != layers(made):
                raise ValueError(
                    f"Func for the {transformation} has been traced with different arguments to "
                    f"other layers: {layers(first)} and {layers(made)}. If that is intended, pass "
                    f"raise_error_on_diff_jaxpr=False."
                )
        if not any(map(_jax.is_tracer, made.consts)):
            known[key] = made
        return made

    def transformed(func_args: Sequence[PyTree], *args: Any, **kwargs: Any) -> T:
        return transformation(get_processed_jaxpr(func_args), func_args, *args, **kwargs)

    return transformed, get_processed_jaxpr


def _only_losses(func: Fun, params_index: int) -> tuple[Any, GetProcessed]:
    """Return the derivatives of the losses of a function, and the traced function."""
    _, get_processed_jaxpr = cached_transformation(
        func,
        lambda processed, args: processed,
        params_index,
        allow_left_out_params=True,
        register_only_generic=True,
    )
    return loss_derivatives.LossDerivatives(func, params_index), get_processed_jaxpr


def compute_all_losses(
    func: Fun, params_index: int = 0
) -> tuple[Callable[[Sequence[PyTree]], Losses], GetProcessed]:
    """Return a function to the losses that `func` registers, and one to the traced function.

    Arguments:
        func: Function that registers at least one loss.
        params_index: Index of the argument that holds the parameters.

    Examples:
        >>> import curvax
        >>> def func(w, x):
        ...     curvax.register_squared_error_loss(x @ w)
        >>> losses, _ = compute_all_losses(func)
        >>> [type(loss).__name__ for loss in losses((jnp.ones((2, 1)), jnp.ones((3, 2))))]
        ['NormalMeanNegativeLogProbLoss']
    """
    derivatives, get_processed_jaxpr = _only_losses(func, params_index)

    def compute(func_args: Sequence[PyTree]) -> Losses:
        losses, _ = derivatives.vjp(func_args)
        return tuple(map(of_kfac_jax, losses))

    return compute, get_processed_jaxpr


def loss_tags_vjp(
    func: Fun, params_index: int = 0
) -> tuple[Callable[[Sequence[PyTree]], tuple[Losses, Fun]], GetProcessed]:
    """Return a function for vector-Jacobian products from losses to parameters, as in kfac_jax.

    Equal to `curvax.loss_tags_vjp`, next to a function to the `ProcessedJaxpr`.

    Arguments:
        func: Function that registers at least one loss.
        params_index: Index of the argument that holds the parameters.
    """
    derivatives, get_processed_jaxpr = _only_losses(func, params_index)

    def vjp(func_args: Sequence[PyTree]) -> tuple[Losses, Fun]:
        losses, pull_back = derivatives.vjp(func_args)
        return tuple(map(of_kfac_jax, losses)), pull_back

    return vjp, get_processed_jaxpr


def loss_tags_jvp(
    func: Fun, params_index: int = 0
) -> tuple[
    Callable[[Sequence[PyTree], PyTree], tuple[Losses, tuple[tuple[Array, ...], ...]]],
    GetProcessed,
]:
    """Return a function for Jacobian-vector products from parameters to losses, as in kfac_jax.

    Equal to `curvax.loss_tags_jvp`, next to a function to the `ProcessedJaxpr`.

    Arguments:
        func: Function that registers at least one loss.
        params_index: Index of the argument that holds the parameters.
    """
    derivatives, get_processed_jaxpr = _only_losses(func, params_index)

    def jvp(
        func_args: Sequence[PyTree], params_tangents: PyTree
    ) -> tuple[Losses, tuple[tuple[Array, ...], ...]]:
        losses, tangents = derivatives.jvp(func_args, params_tangents)
        return tuple(map(of_kfac_jax, losses)), tangents

    return jvp, get_processed_jaxpr


def loss_tags_hvp(
    func: Fun, params_index: int = 0
) -> tuple[Callable[[Sequence[PyTree], PyTree], tuple[PyTree, Losses]], GetProcessed]:
    """Return a function for Hessian-vector products of the sum of losses, as in kfac_jax.

    Equal to `curvax.loss_tags_hvp`, next to a function to the `ProcessedJaxpr`.

    Arguments:
        func: Function that registers at least one loss.
        params_index: Index of the argument that holds the parameters.
    """
    derivatives, get_processed_jaxpr = _only_losses(func, params_index)

    def hvp(func_args: Sequence[PyTree], params_tangents: PyTree) -> tuple[PyTree, Losses]:
        product, losses = derivatives.hvp(func_args, params_tangents)
        return product, tuple(map(of_kfac_jax, losses))

    return hvp, get_processed_jaxpr


def layer_tags_vjp(
    func: Fun,
    params_index: int = 0,
    auto_register_tags: bool = True,
    raise_error_on_diff_jaxpr: bool = True,
    **auto_registration_kwargs: Any,
) -> tuple[Callable[[Sequence[PyTree]], tuple[Losses, Fun]], GetProcessed]:
    """Return a function for the values and cotangents at all layers of `func`, as in kfac_jax.

    Equal to `curvax.layer_tags_vjp`, except that each layer has a `LayerVjpData` in place of a
    dictionary, next to a function to the `ProcessedJaxpr`.

    Arguments:
        func: Function that registers at least one loss.
        params_index: Index of the argument that holds the parameters.
        auto_register_tags: Whether to look for layers.
        raise_error_on_diff_jaxpr: Whether to raise if later arguments trace to other layers.
        auto_registration_kwargs: Keyword arguments of `auto_register_tags`.

    Examples:
        >>> import curvax
        >>> def func(w, x):
        ...     curvax.register_squared_error_loss(x @ w)
        >>> at, _ = layer_tags_vjp(func)
        >>> losses, vjp = at((jnp.ones((2, 1)), jnp.ones((3, 2))))
        >>> (layer,) = vjp(tuple(loss.parameter_dependants for loss in losses))
        >>> layer.tangents.outputs[0].shape
        (3, 1)
    """
    _, get_processed_jaxpr = cached_transformation(
        func,
        lambda processed, args: processed,
        params_index,
        auto_register_tags,
        raise_error_on_diff_jaxpr=raise_error_on_diff_jaxpr,
        **auto_registration_kwargs,
    )

    def at(func_args: Sequence[PyTree]) -> tuple[Losses, Fun]:
        leaves = jax.tree.leaves(tuple(func_args))
        traced = loss_map.LossMap(get_processed_jaxpr(func_args), leaves)
        operands, vjp = layer_inputs.layer_data_at(traced)

        def pull_back(tangents: Sequence[Sequence[Array]]) -> tuple[LayerVjpData[Array], ...]:
            layers = zip(traced.processed.layers, vjp(tangents), strict=True)
            return tuple(_vjp_data(layer.uses, data) for layer, data in layers)

        return tuple(map(of_kfac_jax, traced.losses(*operands))), pull_back

    return at, get_processed_jaxpr


def _vjp_data(uses: Sequence[LayerUse], data: layer_inputs.LayerData) -> LayerVjpData[Array]:
    """Return the data of a layer in the shapes of the model, all uses along the first axis."""

    def of_uses(key: str, is_output: bool) -> Arrays:
        each = [
            tuple(use.as_in_model(x, is_output) for x in at_use[key])
            for use, at_use in zip(uses, data["sites"], strict=True)
        ]
        if len({tuple(x.shape[1:] for x in arrays) for arrays in each}) > 1:
            raise NotImplementedError(
                "curvax.kfac_jax.layer_tags_vjp: a layer is used with inputs of different shapes, "
                "for which kfac_jax has no data. curvax.layer_tags_vjp returns those of each use."
            )
        return tuple(jnp.concatenate(xs) for xs in zip(*each, strict=True)) if each[1:] else each[0]

    return LayerVjpData(
        primals=LayerData(
            inputs=of_uses("inputs", is_output=False),
            outputs=of_uses("outputs", is_output=True),
            params=data["params"],
        ),
        tangents=LayerData(
            inputs=(),
            outputs=of_uses("outputs_tangents", is_output=True),
            params=data["params_tangents"],
        ),
    )


def construct_compute_losses_inputs(
    processed_jaxpr: loss_map.ProcessedJaxpr,
    primal_func_args: Sequence[PyTree],
    params_index: int,
    drop_loss_tags: bool = True,
) -> Callable[[PyTree], tuple[tuple[Arrays, ...], tuple[list[Array], ...]]]:
    """Return a function from parameters to the operands of all losses.

    Arguments:
        processed_jaxpr: The traced function.
        primal_func_args: Its arguments.
        params_index: Index of the argument that holds the parameters.
        drop_loss_tags: Has no effect: operands are the same with and without tags.

    Returns:
        A function of the parameters. It returns, for each loss, the operands that depend on
        parameters; and as auxiliary output, all its operands.
    """
    del params_index, drop_loss_tags
    at = loss_map.LossMap(processed_jaxpr, jax.tree.leaves(tuple(primal_func_args)))

    def compute(params: PyTree) -> tuple[tuple[Arrays, ...], tuple[list[Array], ...]]:
        dependants, (others, _) = at(jax.tree.leaves(params))
        pairs = zip(dependants, others, strict=True)
        return tuple(map(tuple, dependants)), tuple([*of, *rest] for of, rest in pairs)

    return compute


def extract_tags(jaxpr: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the equations of a jaxpr that tag layers, and those that register losses."""
    layers = tuple(eqn for eqn in jaxpr.eqns if isinstance(eqn.primitive, LayerTag))
    return layers, tuple(eqn for eqn in jaxpr.eqns if isinstance(eqn.primitive, LossTag))


def order_layer_tags(
    params_vars_flat: Sequence[Any],
    layer_tags: Sequence[Any],
    allow_left_out_params: bool = False,
) -> tuple[tuple[Any, ...], tuple[tuple[int, ...], ...]]:
    """Sort the equations of layers by their first parameters, and return these as indices.

    Arguments:
        params_vars_flat: Variables of the parameters.
        layer_tags: Equations of layers.
        allow_left_out_params: Whether there may be parameters that are in no layer.

    Raises:
        ValueError: If a parameter is in no layer, or in several.
    """
    index = {var: k for k, var in enumerate(params_vars_flat)}
    found = [(tuple(index[v] for v in _params_of(eqn)), eqn) for eqn in layer_tags]
    used = [k for params, _ in found for k in params]
    if len(set(used)) < len(used):
        raise ValueError(f"Some parameters are in several layers: {[p for p, _ in found]}.")
    left_out = set(index.values()) - set(used)
    if left_out and not allow_left_out_params:
        raise ValueError(f"The following parameter indices were not assigned a block: {left_out}.")
    found.sort(key=lambda pair: min(pair[0]))
    return tuple(eqn for _, eqn in found), tuple(params for params, _ in found)


def _params_of(eqn: Any) -> tuple[Any, ...]:
    data = layer_eqn_data(eqn)
    assert data is not None
    return data.params


def name_layer_tags(layer_tags: Sequence[Any]) -> None:
    """Do nothing: layers have names already, by `layer_eqn_name`."""
    del layer_tags
