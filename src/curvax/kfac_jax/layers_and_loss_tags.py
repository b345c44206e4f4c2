"""kfac_jax's `layers_and_loss_tags`: tags of layers and losses, with kfac_jax's names and data.

A layer has a *variant* in kfac_jax ("dense") and a *tag* in curvax ("dense_tag"). Both select the
block of the layer. `curvax_tag_name` and `variant_name` translate, here and nowhere else.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import jax

from curvax import _jax
from curvax._types import Array
from curvax.layers import tags
from curvax.losses import tag as loss_tags
from curvax.losses.loss_function import LossFunction

T = TypeVar("T")
Arrays = tuple[Array, ...]

_SUFFIX = "_tag"


def curvax_tag_name(variant: str) -> str:
    """Return the name of curvax's tag for a variant of kfac_jax.

    kfac_jax 0.0.8 names its variants "dense", "repeated_dense", "conv2d", "scale_and_shift" and
    "generic"; releases before it and curvax name the tags "dense_tag" and so on. The same suffix
    goes to variants of one's own. The name of a tag stays as it is.

    Examples:
        >>> curvax_tag_name("repeated_dense"), curvax_tag_name("dense_tag")
        ('repeated_dense_tag', 'dense_tag')
    """
    return variant if variant.endswith(_SUFFIX) else variant + _SUFFIX


def variant_name(tag: str) -> str:
    """Return kfac_jax's variant for the name of a tag of curvax; inverse of `curvax_tag_name`.

    Examples:
        >>> variant_name("repeated_dense_tag"), variant_name("dense")
        ('repeated_dense', 'dense')
    """
    return tag.removesuffix(_SUFFIX)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, kw_only=True)
class LayerData(Generic[T]):
    """What belongs to one layer: a value for each of its inputs, outputs and parameters.

    Arguments:
        inputs: One value per input of the layer.
        outputs: One value per output.
        params: One value per parameter.
    """

    inputs: tuple[T, ...]
    outputs: tuple[T, ...]
    params: tuple[T, ...]

    def tree_flatten(self) -> tuple[tuple[tuple[T, ...], tuple[T, ...], tuple[T, ...]], None]:
        """Return the inputs, the outputs and the parameters."""
        return (self.inputs, self.outputs, self.params), None

    @classmethod
    def tree_unflatten(cls, aux_data: None, children: Any) -> "LayerData[T]":
        """Return the data with these inputs, outputs and parameters."""
        del aux_data
        inputs, outputs, params = children
        return cls(inputs=inputs, outputs=outputs, params=params)


@dataclass(frozen=True, kw_only=True)
class LayerMetaData:
    """What a layer tag says of its operands.

    Arguments:
        variant: Kind of the layer, which selects its block.
        outputs_index: Which operands are outputs.
        inputs_index: Which operands are inputs.
        params_index: Which operands are parameters.
        name: Name of the layer.
        nesting: Names of the programs around the layer.
    """

    variant: str
    outputs_index: tuple[int, ...]
    inputs_index: tuple[int, ...]
    params_index: tuple[int, ...]
    name: str | None = None
    nesting: tuple[str, ...] = ()

    def in_order(self) -> "LayerMetaData":
        """Return the same of operands in the order outputs, inputs, parameters."""
        outputs, inputs = len(self.outputs_index), len(self.inputs_index)
        stop = outputs + inputs + len(self.params_index)
        return replace(
            self,
            outputs_index=tuple(range(outputs)),
            inputs_index=tuple(range(outputs, outputs + inputs)),
            params_index=tuple(range(outputs + inputs, stop)),
        )


@dataclass(frozen=True, kw_only=True)
class LossMetaData(Generic[T]):
    """What a loss tag says of its operands.

    Arguments:
        loss_class: Class of the loss.
        parameter_dependants: Names of the arguments that depend on the model's parameters.
        parameter_independants: Names of the other arguments that it is given.
        argument_names: Names of the operands, in their order.
    """

    loss_class: type[T]
    parameter_dependants: tuple[str, ...]
    parameter_independants: tuple[str, ...]
    argument_names: tuple[str, ...]


# Layers.


class LayerTag(tags.LayerTag):
    """A primitive that tags layers of one kind, or of the variant that each `bind` names.

    `LayerTag(name, num_inputs, num_outputs)` is `curvax.LayerTag`, as in kfac_jax before 0.0.8.
    `LayerTag()` is kfac_jax 0.0.8's, of which `layer_tag` is one: its `bind` takes a
    `LayerMetaData`, and puts the tag of that variant into the program.

    Arguments:
        name: Name of the kind of layer; None if each `bind` names it.
        num_inputs: Number of inputs of a layer.
        num_outputs: Number of outputs of a layer.

    Examples:
        >>> import jax.numpy as jnp
        >>> repeated_dense = LayerTag("repeated_dense_tag", num_inputs=1, num_outputs=1)
        >>> x, w = jnp.ones((2, 1)), jnp.ones((1, 1))
        >>> repeated_dense.bind(x @ w, x, w).shape
        (2, 1)
        >>> meta = LayerMetaData(
        ...     variant="repeated_dense", outputs_index=(0,), inputs_index=(1,), params_index=(2,)
        ... )
        >>> layer_tag.bind(x @ w, x, w, meta=meta).shape
        (2, 1)
    """

    def __init__(self, name: str | None = None, num_inputs: int = 1, num_outputs: int = 1) -> None:
        tag_name = "layer_tag" if name is None else curvax_tag_name(name)
        super().__init__(tag_name, num_inputs, num_outputs)
        self.has_variants = name is None

    def bind(self, *args: Any, **constants: Any) -> Any:
        """Tag a layer.

        Arguments:
            args: The operands: of a tag with a name, outputs, inputs and parameters in this order;
                otherwise as `meta` says.
            constants: Static parameters; `meta` among them if the tag has no name.

        Returns:
            The outputs: an array if there is one, otherwise a list. Compute with these.
        """
        if not self.has_variants:
            return super().bind(*args, **constants)
        data = self.layer_data(args, constants)
        meta: LayerMetaData = constants["meta"].in_order()
        operands = (*data.outputs, *data.inputs, *data.params)
        return tag_of_variant(meta).bind(*operands, **{**constants, "meta": meta})

    def layer_data(
        self,
        args: Sequence[T],
        params: Mapping[str, Any],
        err_suffix: str = "",
        exclude_inputs: bool = False,
    ) -> LayerData[T]:
        """Return the operands of an equation by what they are in the layer.

        Arguments:
            args: A value for each operand.
            params: Static parameters of the equation.
            err_suffix: Name of what is tagged, in the message of an error.
            exclude_inputs: Whether to leave the inputs out of the result.
        """
        meta = get_and_verify_layer_meta(args, params, err_suffix)
        taken = lambda index: tuple(args[k] for k in index)
        return LayerData(
            inputs=() if exclude_inputs else taken(meta.inputs_index),
            outputs=taken(meta.outputs_index),
            params=taken(meta.params_index),
        )


layer_tag = LayerTag()


def tag_of_variant(meta: LayerMetaData) -> tags.LayerTag:
    """Return the tag of curvax that `layer_tag` stands for, with this meta data."""
    counts = len(meta.inputs_index), len(meta.outputs_index)
    return _tag_with_name(curvax_tag_name(meta.variant), *counts)


_OF_CURVAX = (
    tags.dense_tag,
    tags.conv2d_tag,
    tags.scale_and_shift_tag,
    tags.generic_tag,
    tags.conv_tag,
    tags.embedding_tag,
)


@functools.cache
def _tag_with_name(name: str, num_inputs: int, num_outputs: int) -> tags.LayerTag:
    for tag in _OF_CURVAX:
        if (tag.name, tag.num_inputs, tag.num_outputs) == (name, num_inputs, num_outputs):
            return tag
    return LayerTag(name, num_inputs, num_outputs)


def get_and_verify_layer_meta(
    args: Sequence[Any], params: Mapping[str, Any], err_suffix: str = ""
) -> LayerMetaData:
    """Return the meta data of a layer tag; check that it is about operands that there are.

    Arguments:
        args: A value for each operand.
        params: Static parameters of the equation.
        err_suffix: Name of what is tagged, in the message of an error.

    Raises:
        ValueError: If there is no meta data, or it is about other operands.
    """
    meta = params.get("meta")
    if not isinstance(meta, LayerMetaData):
        raise ValueError(f"Meta must be LayerMetaData, but found {meta=}{_for(err_suffix)}.")
    for name in ("outputs_index", "inputs_index", "params_index"):
        index = getattr(meta, name)
        if any(k >= len(args) for k in index):
            raise ValueError(
                f"Meta data has meta.{name}={index}, but only {len(args)} arguments passed"
                f"{_for(err_suffix)}."
            )
    return meta


def _for(name: str) -> str:
    return f" for {name}" if name else ""


class LayerTagEqn(_jax.JaxprEqn):
    """The equation of a layer tag, in annotations."""


class LossTagEqn(_jax.JaxprEqn):
    """The equation of a loss tag, in annotations."""


def layer_eqn_data(eqn: _jax.JaxprEqn, raise_an_error: bool = True) -> LayerData[_jax.Atom] | None:
    """Return the variables of a layer's equation by what they are in the layer.

    Arguments:
        eqn: The equation.
        raise_an_error: Whether to raise if it does not tag a layer; otherwise return None.

    Raises:
        ValueError: If it does not tag a layer.
    """
    tag = eqn.primitive
    if not isinstance(tag, tags.LayerTag):
        if raise_an_error:
            raise ValueError(f"Expected the equation of a layer tag, got {tag.name}.")
        return None
    cut, end = tag.num_outputs, tag.num_outputs + tag.num_inputs
    return LayerData(
        outputs=tuple(eqn.invars[:cut]),
        inputs=tuple(eqn.invars[cut:end]),
        params=tuple(eqn.invars[end:]),
    )


def layer_eqn_name(eqn: _jax.JaxprEqn) -> str:
    """Return the name of the layer that an equation tags.

    Layers that detection found are named by their variant and their parameters.

    Raises:
        ValueError: If the layer has no name.
    """
    meta, use = eqn.params.get("meta"), eqn.params.get("use")
    if isinstance(meta, LayerMetaData) and meta.name is not None:
        return meta.name
    if use is not None:
        return f"Auto[tag_variant={variant_name(eqn.primitive.name)}({use.index})]"
    raise ValueError("Layer name must be provided at this stage.")


def register_generic(*args: Array) -> Array:
    """Tag parameters as belonging to no known layer.

    Arguments:
        args: The parameters, before anything is computed from them.

    Returns:
        The first parameter, tagged. Use it in place of the argument.

    Raises:
        NotImplementedError: If there are several.
    """
    if len(args) != 1:
        raise NotImplementedError(
            f"curvax.kfac_jax.register_generic: a generic layer has one parameter here, got "
            f"{len(args)}. Register each by itself, or tag them together with a LayerTag of your "
            f"own and choose its block with layer_tag_to_block_ctor."
        )
    return tags.register_generic(args[0])


def register_dense(
    y: Array, x: Array, w: Array, b: Array | None = None, variant: str = "dense", **kwargs: Any
) -> Array:
    """Tag a dense layer: `y = matmul(x, w) + b`.

    Arguments:
        y: Output.
        x: Input.
        w: Weights.
        b: Bias, if there is one.
        variant: Kind of the layer, which selects its block.
        kwargs: Static parameters of the tag.

    Returns:
        The output. Compute with what is returned.
    """
    return _register(y, x, [w, b], variant, kwargs)


register_repeated_dense = functools.partial(register_dense, variant="repeated_dense")


def register_conv2d(
    y: Array, x: Array, w: Array, b: Array | None = None, variant: str = "conv2d", **kwargs: Any
) -> Array:
    """Tag a convolution with two spatial axes: `y = conv2d(x, w) + b`.

    Arguments:
        y: Output, a batch of images.
        x: Input, a batch of images.
        w: Kernel.
        b: Bias, if there is one.
        variant: Kind of the layer, which selects its block.
        kwargs: Keyword arguments that `lax.conv_general_dilated` was called with.

    Returns:
        The output. Compute with what is returned.
    """
    return _register(y, x, [w, b], variant, kwargs)


def register_scale_and_shift(
    y: Array,
    x: Array,
    scale: Array | None = None,
    shift: Array | None = None,
    variant: str = "scale_and_shift",
    **kwargs: Any,
) -> Array:
    """Tag a layer `y = x * scale + shift`, of which either may be missing.

    Arguments:
        y: Output, of the shape of `x`.
        x: Input.
        scale: What `x` is multiplied with.
        shift: What is added.
        variant: Kind of the layer, which selects its block.
        kwargs: Static parameters of the tag.

    Returns:
        The output. Compute with what is returned.

    Raises:
        ValueError: If both are missing.
    """
    if scale is None and shift is None:
        raise ValueError("At least one of `scale` and `shift` must be provided.")
    has = {"has_scale": scale is not None, "has_shift": shift is not None}
    return _register(y, x, [scale, shift], variant, {**has, **kwargs})


def _register(
    y: Array,
    x: Array,
    params: Sequence[Array | None],
    variant: str,
    constants: Mapping[str, Any],
) -> Array:
    given = [param for param in params if param is not None]
    index = tuple(range(2, 2 + len(given)))
    meta = LayerMetaData(variant=variant, outputs_index=(0,), inputs_index=(1,), params_index=index)
    return layer_tag.bind(y, x, *given, meta=meta, **constants)


# Losses.


class LossTag(loss_tags.LossTag):
    """A primitive that registers losses of one class, or of the class that each `bind` names.

    `LossTag(cls, parameter_dependants, parameter_independants)` is `curvax.LossTag`, as in kfac_jax
    before 0.0.8. `LossTag()` is kfac_jax 0.0.8's, of which `loss_tag` is one: its `bind` takes a
    `LossMetaData`, and puts the tag of that class into the program.

    Arguments:
        cls: The class of the loss; None if each `bind` names it.
        parameter_dependants: Names of the constructor's arguments that depend on the model's
            parameters.
        parameter_independants: Names of its other arguments.
    """

    def __init__(
        self,
        cls: type[object] | None = None,
        parameter_dependants: Sequence[str] = ("inputs",),
        parameter_independants: Sequence[str] = (),
    ) -> None:
        self.has_classes = cls is None
        super().__init__(cls or LossFunction, parameter_dependants, parameter_independants)
        if cls is None:
            self.name = "loss_tag"

    def bind(
        self, *args: Any, args_names: Sequence[str] = (), meta: Any = None, **params: Any
    ) -> list[Array]:
        """Register a loss in the program that is being traced.

        Arguments:
            args: Arrays: first those that depend on the model's parameters.
            args_names: Their names, if the tag has a class.
            meta: The class and the names, if the tag has none.
            params: Further parameters of the primitive.

        Returns:
            The arrays that depend on parameters.
        """
        if not self.has_classes:
            return super().bind(*args, args_names=args_names, **params)
        meta = get_and_verify_loss_meta(args, {"meta": meta})
        names: tuple[str, ...] = meta.argument_names
        order = sorted(range(len(names)), key=lambda k: names[k] not in meta.parameter_dependants)
        tag = _tag_of_class(meta.loss_class, meta.parameter_dependants, meta.parameter_independants)
        ordered = tuple(names[k] for k in order)
        return tag.bind(*(args[k] for k in order), args_names=ordered, **params)


loss_tag = LossTag()


@functools.cache
def _tag_of_class(
    cls: type[object], dependants: tuple[str, ...], independants: tuple[str, ...]
) -> loss_tags.LossTag:
    return loss_tags.LossTag(cls, dependants, independants)


def get_and_verify_loss_meta(
    args: Sequence[Any], params: Mapping[str, Any], err_suffix: str = ""
) -> LossMetaData[Any]:
    """Return the meta data of a loss tag; check that it names as many operands as there are.

    Arguments:
        args: A value for each operand.
        params: Static parameters of the equation.
        err_suffix: Name of what is tagged, in the message of an error.

    Raises:
        ValueError: If there is no meta data, or it names more or fewer operands.
    """
    meta = params.get("meta")
    if not isinstance(meta, LossMetaData):
        raise ValueError(f"Meta must be LossMetaData, but found {meta=}{_for(err_suffix)}.")
    if len(args) != len(meta.argument_names):
        raise ValueError(
            f"Number of arguments {len(args)} must match the number of argument names "
            f"{len(meta.argument_names)}{_for(err_suffix)}."
        )
    return meta


def get_loss_outputs(
    args: Sequence[T], params: Mapping[str, Any], err_suffix: str = ""
) -> tuple[T, ...]:
    """Return the operands of a loss tag that depend on parameters.

    Arguments:
        args: A value for each operand.
        params: Static parameters of the equation.
        err_suffix: Name of what is tagged, in the message of an error.
    """
    meta = get_and_verify_loss_meta(args, params, err_suffix)
    return tuple(args[meta.argument_names.index(name)] for name in meta.parameter_dependants)


def loss_eqn_class_name(eqn: _jax.JaxprEqn) -> str:
    """Return the name of the class of the loss that an equation registers."""
    return _tag_of(eqn).name.removesuffix(_SUFFIX)


def loss_eqn_construct_loss(eqn: _jax.JaxprEqn, *args: Array) -> Any:
    """Return the loss that an equation registers, with these values of its operands."""
    return _tag_of(eqn).loss(*args, args_names=eqn.params["args_names"])


def loss_eqn_parameter_dependants(
    eqn: _jax.JaxprEqn, raise_an_error: bool = True
) -> list[_jax.Atom]:
    """Return the variables of a loss's equation that depend on parameters.

    Arguments:
        eqn: The equation.
        raise_an_error: Whether to raise if it does not register a loss; otherwise return [].

    Raises:
        ValueError: If it does not register a loss.
    """
    if not raise_an_error and not isinstance(eqn.primitive, loss_tags.LossTag):
        return []
    return list(eqn.invars[: len(_tag_of(eqn).parameter_dependants_names)])


def _tag_of(eqn: _jax.JaxprEqn) -> loss_tags.LossTag:
    if not isinstance(eqn.primitive, loss_tags.LossTag):
        raise ValueError(f"Expected the equation of a loss tag, got {eqn.primitive.name}.")
    return eqn.primitive
