"""A layer as a block sees it: its parameters and all of its uses.

A `LayerEquation` can be used in place of the equation of the layer's first tag.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from curvax.layers.detection.layers import Layer
from curvax.layers.detection.tagging import use_of_equation
from curvax.layers.use import LayerUse


def wide(*dtypes: Any) -> Any:
    """The dtype in which curvature is kept for arrays of some dtypes: at least float32."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes, jnp.float32)


@dataclass(frozen=True, eq=False)
class LayerEquation:
    """A layer: its uses, the equation of its first tag, and the dtypes of its parameters."""

    tag_name: str
    sites: tuple[LayerUse, ...]
    dtypes: tuple[Any, ...]
    equation: Any

    @classmethod
    def of(cls, equation: Any) -> "LayerEquation":
        """From an equation alone: a layer that is used once, outside of loops."""
        if isinstance(equation, cls):
            return equation
        tag = equation.primitive
        params = equation.invars[tag.num_outputs + tag.num_inputs :]
        use = use_of_equation(equation)
        return cls(use.layer, (use,), tuple(v.aval.dtype for v in params), equation)

    @classmethod
    def of_layer(cls, layer: Layer, params: Sequence[Any]) -> "LayerEquation":
        """From a layer of a traced function, and the variables of all parameters of it."""
        dtypes = tuple(params[number].aval.dtype for number in layer.params)
        return cls(layer.tag_name, layer.uses, dtypes, layer.nodes[0].equation)

    @property
    def param_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the parameters as the function has them."""
        return tuple(param.shape for param in self.sites[0].params)

    @property
    def primitive(self) -> Any:
        """The tag."""
        return self.equation.primitive

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the tag, without its arrays."""
        return dict(self.equation.params)

    @property
    def invars(self) -> list[Any]:
        """The operands of the tag: outputs, inputs and parameters."""
        return list(self.equation.invars)

    @property
    def outvars(self) -> list[Any]:
        """The results of the tag."""
        return list(self.equation.outvars)
