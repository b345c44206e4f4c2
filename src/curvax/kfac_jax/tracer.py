"""kfac_jax's `tracer`: derivatives of losses and layers of a tagged function."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax

from curvax.kfac_jax.layers_and_loss_tags import LayerData

T = TypeVar("T")
Params = TypeVar("Params")


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, kw_only=True)
class LayerVjpData(Generic[T]):
    """The values of one layer, and the cotangents of these.

    Arguments:
        primals: Inputs, outputs and parameters of the layer.
        tangents: The derivative of the losses with respect to each of them.
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
