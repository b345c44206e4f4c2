"""kfac_jax's `layers_and_loss_tags`: tags of layers and losses, with kfac_jax's names and data.

A layer has a *variant* in kfac_jax ("dense") and a *tag* in curvax ("dense_tag"). Both select the
block of the layer. `curvax_tag_name` and `variant_name` translate, here and nowhere else.
"""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax

T = TypeVar("T")

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
