"""Kronecker-factored blocks for convolutions."""

import math
from typing import Any

from jax.typing import ArrayLike

from curvax.blocks._factors import geometry_of, matrix_shape
from curvax.blocks._kronecker import TwoKroneckerFactored

__all__ = ["Conv2DTwoKroneckerFactored", "ConvTwoKroneckerFactored"]


class ConvTwoKroneckerFactored(TwoKroneckerFactored):
    """A `TwoKroneckerFactored` block for convolutions, of any number of spatial axes, or grouped.

    The rows of its weights are the elements of a patch: the factor of the inputs is the second
    moment of patches. The factor of the outputs is an average over positions; their number is the
    `fixed_scale`.

    Arguments:
        layer_tag_eq: the equation of the layer's tag.
        name: what the block is called.
        weight_sharing: "expand" or "reduce", where patches are the positions.
        max_factor_size: a factor that is wider is kept as its diagonal.
    """

    @property
    def num_averaged_positions(self) -> int:
        return self.num_locations

    def fixed_scale(self) -> ArrayLike:
        return float(self.num_locations)

    @property
    def outputs_channel_index(self) -> int:
        """The axis of channels in the outputs."""
        return self._numbers.out_spec[1]

    @property
    def inputs_channel_index(self) -> int:
        """The axis of channels in the inputs."""
        return self._numbers.lhs_spec[1]

    @property
    def weights_output_channel_index(self) -> int:
        """The axis of the kernel for the channels of the outputs."""
        return self._numbers.rhs_spec[0]

    @property
    def weights_spatial_size(self) -> int:
        """The number of elements of the kernel in each channel."""
        return geometry_of(self._equation.sites[0]).kernel_size

    @property
    def num_locations(self) -> int:
        """The number of positions in an image that the kernel is applied at, at all places."""
        count = 0
        for site in self._equation.sites:
            numbers = site.convolution["dimension_numbers"]
            positions = math.prod(site.output.shape[axis] for axis in numbers.out_spec[2:])
            count += positions * site.repeats
        return count

    @property
    def num_inputs_channels(self) -> int:
        """The number of channels of the inputs."""
        return self._equation.sites[0].input.shape[self.inputs_channel_index]

    @property
    def num_outputs_channels(self) -> int:
        """The number of channels of the outputs."""
        heads, _, outputs = matrix_shape(self._equation.sites[0])
        return math.prod(heads) * outputs

    @property
    def _numbers(self) -> Any:
        return self._equation.sites[0].convolution["dimension_numbers"]


class Conv2DTwoKroneckerFactored(ConvTwoKroneckerFactored):
    """A `TwoKroneckerFactored` block for convolutions with two spatial axes.

    See `ConvTwoKroneckerFactored`.

    Arguments:
        layer_tag_eq: the equation of the layer's tag.
        name: what the block is called.
        weight_sharing: "expand" or "reduce", where patches are the positions.
        max_factor_size: a factor that is wider is kept as its diagonal.
    """
