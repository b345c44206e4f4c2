"""Which patches of its inputs a convolution sees: `ConvGeometry`, in the words of `jax.lax`.

An output position p of a convolution sees, along each spatial axis and for each place a in the
kernel, the element

    p * window_stride + a * rhs_dilation

of the inputs, once these are dilated by `lhs_dilation` and padded, both with zeros. The patch of a
position is what it sees at all places of the kernel, in all channels of its group.

Two orders are fixed here, for all of the room. Spatial axes are in the order of `window_strides`,
which is the order of the specs in `dimension_numbers`. An element of a patch is told by its place
in the kernel first, row-major, and then by its channel within the group.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jax import lax

__all__ = ["ConvGeometry"]

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ConvGeometry:
    """The parameters of `lax.conv_general_dilated` that decide on its patches; see `of`."""

    kernel_spatial_shape: tuple[int, ...]
    window_strides: tuple[int, ...]
    padding: Pairs
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    dimension_numbers: lax.ConvDimensionNumbers
    feature_group_count: int = 1
    batch_group_count: int = 1

    @classmethod
    def of(
        cls,
        kernel_spatial_shape: Sequence[int],
        *,
        window_strides: Sequence[int],
        padding: Sequence[tuple[int, int]],
        dimension_numbers: lax.ConvDimensionNumbers,
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        feature_group_count: int = 1,
        batch_group_count: int = 1,
    ) -> "ConvGeometry":
        """The geometry of a convolution, from the parameters of its equation.

        `kernel_spatial_shape` is `rhs.shape[i] for i in dimension_numbers.rhs_spec[2:]`. A dilation
        of None is one of 1 everywhere.
        """
        ones = (1,) * len(kernel_spatial_shape)
        return cls(
            tuple(kernel_spatial_shape),
            tuple(window_strides),
            tuple((low, high) for low, high in padding),
            ones if lhs_dilation is None else tuple(lhs_dilation),
            ones if rhs_dilation is None else tuple(rhs_dilation),
            lax.ConvDimensionNumbers(*map(tuple, dimension_numbers)),
            feature_group_count,
            batch_group_count,
        )

    @property
    def num_spatial(self) -> int:
        """The number of spatial axes."""
        return len(self.kernel_spatial_shape)

    @property
    def kernel_size(self) -> int:
        """The number of places in the kernel."""
        return math.prod(self.kernel_spatial_shape)

    @property
    def num_groups(self) -> int:
        """How many groups of channels or of images have patches of their own; mostly 1."""
        return self.feature_group_count * self.batch_group_count

    @property
    def spatial_order_of_outputs(self) -> tuple[int, ...]:
        """The numbers of the spatial axes, in the order in which the outputs have them."""
        axes = self.dimension_numbers.out_spec[2:]
        return tuple(sorted(range(self.num_spatial), key=lambda i: axes[i]))

    def spatial_shape(self, inputs_shape: Sequence[int]) -> tuple[int, ...]:
        """The spatial shape of the inputs."""
        return tuple(inputs_shape[axis] for axis in self.dimension_numbers.lhs_spec[2:])

    def padded_spatial_shape(self, inputs_shape: Sequence[int]) -> tuple[int, ...]:
        """The spatial shape of the inputs once they are dilated and padded; never negative."""
        sizes = zip(self.spatial_shape(inputs_shape), self.lhs_dilation, self.padding, strict=True)
        return tuple(
            max(0, (size and (size - 1) * dilation + 1) + low + high)
            for size, dilation, (low, high) in sizes
        )

    def position_shape(self, inputs_shape: Sequence[int]) -> tuple[int, ...]:
        """The number of output positions along each spatial axis, in the order of strides."""
        reach = zip(self.kernel_spatial_shape, self.rhs_dilation, strict=True)
        spans = [(size - 1) * dilation + 1 for size, dilation in reach]
        sizes = zip(
            self.padded_spatial_shape(inputs_shape), spans, self.window_strides, strict=True
        )
        return tuple(max(0, (size - span) // stride + 1) for size, span, stride in sizes)

    def output_spatial_shape(self, inputs_shape: Sequence[int]) -> tuple[int, ...]:
        """The spatial shape of the outputs, in the order in which these have their axes."""
        shape = self.position_shape(inputs_shape)
        return tuple(shape[i] for i in self.spatial_order_of_outputs)

    def num_positions(self, inputs_shape: Sequence[int]) -> int:
        """The number of patches in each image."""
        return math.prod(self.position_shape(inputs_shape))

    def num_images(self, inputs_shape: Sequence[int]) -> int:
        """The number of images in each group: all, unless there are several groups of them."""
        return inputs_shape[self.dimension_numbers.lhs_spec[0]] // self.batch_group_count

    def num_channels(self, inputs_shape: Sequence[int]) -> int:
        """The number of channels in each group."""
        return inputs_shape[self.dimension_numbers.lhs_spec[1]] // self.feature_group_count

    def patch_size(self, inputs_shape: Sequence[int]) -> int:
        """The number of elements of a patch."""
        return self.kernel_size * self.num_channels(inputs_shape)
