"""`OfLayer`: what a block says of the layer whose parameters it is for."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from curvax._types import Array
from curvax.blocks._layer import LayerEquation, LayerSite, wide

__all__ = ["OfLayer"]


class OfLayer:
    """A part of a curvature matrix that belongs to the parameters of one layer.

    Arguments:
        layer_tag_eq: the equation of the layer's tag.
        name: what the block is called.
    """

    def __init__(self, layer_tag_eq: Any, name: str) -> None:
        self._equation = LayerEquation.of(layer_tag_eq)
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.parameters_shapes})"

    @property
    def layer_tag_primitive(self) -> Any:
        """The tag of the layer."""
        return self._equation.primitive

    @property
    def sites(self) -> tuple[LayerSite, ...]:
        """The places of the layer in the program that the block was made for."""
        return self._equation.sites

    @property
    def parameter_variables(self) -> tuple[Any, ...]:
        """The variables of the parameters in the equation of the tag."""
        tag = self.layer_tag_primitive
        return tuple(self._equation.invars[tag.num_outputs + tag.num_inputs :])

    @property
    def outputs_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the outputs of the layer, examples first, in each step of a loop."""
        return self._shapes(self._equation.invars[: self.layer_tag_primitive.num_outputs])

    @property
    def inputs_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the inputs of the layer, examples first, in each step of a loop."""
        tag = self.layer_tag_primitive
        return self._shapes(
            self._equation.invars[tag.num_outputs : tag.num_outputs + tag.num_inputs]
        )

    @property
    def parameters_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the parameters."""
        return self._equation.param_shapes

    @property
    def parameters_dtypes(self) -> tuple[Any, ...]:
        """The dtypes of the parameters."""
        return self._equation.dtypes

    @property
    def parameters_canonical_order(self) -> tuple[int, ...]:
        """The places of the parameters in the order in which the layer is usually written."""
        return tuple(range(self.number_of_parameters))

    @property
    def layer_tag_extra_params(self) -> dict[str, Any]:
        """What the tag says of the layer beside its arrays."""
        return self._equation.params

    @property
    def number_of_parameters(self) -> int:
        """How many arrays the parameters are."""
        return len(self.parameters_shapes)

    @property
    def dim(self) -> int:
        """How many elements the parameters have together."""
        return sum(math.prod(shape) for shape in self.parameters_shapes)

    @property
    def dtype(self) -> Any:
        """The dtype of the estimates."""
        return wide(*self._equation.dtypes)

    def flattened(self, arrays: Sequence[Array]) -> Array:
        """Arrays like the parameters, as one vector."""
        return jnp.concatenate([x.reshape(-1) for x in arrays])

    def unflattened(self, vector: Array) -> tuple[Array, ...]:
        """What `flattened` made one vector."""
        sizes = [math.prod(shape) for shape in self.parameters_shapes]
        parts = jnp.split(vector, [sum(sizes[: k + 1]) for k in range(len(sizes) - 1)])
        return tuple(x.reshape(s) for x, s in zip(parts, self.parameters_shapes, strict=True))

    def _shapes(self, variables: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
        """The shapes of inputs or outputs, as `estimation_data` has them."""
        first = replace(self._equation.sites[0], stacked=(), lengths=())
        return tuple(jax.eval_shape(first.with_positions, v.aval).shape for v in variables)

    def _check_vector(self, vector: Sequence[Array]) -> None:
        shapes = tuple(jnp.shape(x) for x in vector)
        if shapes != self.parameters_shapes:
            raise ValueError(
                f"curvax: a vector for the block {self.name} is like its parameters, of the shapes "
                f"{self.parameters_shapes}, got {shapes}."
            )
