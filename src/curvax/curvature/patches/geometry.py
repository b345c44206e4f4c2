"""`ConvGeometry`: the patches of its inputs that a convolution reads, in the terms of `jax.lax`.

The output position p of a convolution reads, along each spatial axis and for each kernel offset a,
the element

    p * window_stride + a * rhs_dilation

of the inputs, after these have been dilated by `lhs_dilation` and padded, both with zeros. The
patch of a position consists of the elements at all kernel offsets, in all channels of its group.

The package uses two fixed orders. Spatial axes are in the order of `window_strides`, which is the
order of the specs in `dimension_numbers`. Elements of a patch are ordered by kernel offset first,
row-major, and then by channel within the group.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from curvax._errors import as_integer, where
from curvax._types import Array

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ConvGeometry:
    """The parameters of `lax.conv_general_dilated` that determine its patches.

    Attributes:
        kernel_spatial_shape: Spatial shape of the kernel.
        window_strides: Strides, along each spatial axis.
        padding: Padding before and after the inputs, along each spatial axis.
        lhs_dilation: Dilation of the inputs, along each spatial axis.
        rhs_dilation: Dilation of the kernel, along each spatial axis.
        dimension_numbers: Layouts of inputs, kernel and outputs.
        feature_group_count: Number of groups of channels.
        batch_group_count: Number of groups of images.
    """

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
        """Return the geometry of a convolution, from the parameters of its equation.

        `kernel_spatial_shape` is `rhs.shape[i] for i in dimension_numbers.rhs_spec[2:]`. A dilation
        of None means 1 along all axes.
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
        """The number of kernel offsets."""
        return math.prod(self.kernel_spatial_shape)

    @property
    def num_groups(self) -> int:
        """The number of groups of channels or of images, each with separate patches."""
        return self.feature_group_count * self.batch_group_count

    @property
    def spatial_order_of_outputs(self) -> tuple[int, ...]:
        """The indices of the spatial axes, in the order of the outputs."""
        axes = self.dimension_numbers.out_spec[2:]
        return tuple(sorted(range(self.num_spatial), key=lambda i: axes[i]))

    def spatial_shape(self, inputs_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the spatial shape of the inputs."""
        return tuple(inputs_shape[axis] for axis in self.dimension_numbers.lhs_spec[2:])

    def padded_spatial_shape(self, inputs_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the spatial shape of the dilated and padded inputs, at least zero."""
        sizes = zip(self.spatial_shape(inputs_shape), self.lhs_dilation, self.padding, strict=True)
        return tuple(
            max(0, (size and (size - 1) * dilation + 1) + low + high)
            for size, dilation, (low, high) in sizes
        )

    def position_shape(self, inputs_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the number of output positions along each axis, in the order of strides."""
        reach = zip(self.kernel_spatial_shape, self.rhs_dilation, strict=True)
        spans = [(size - 1) * dilation + 1 for size, dilation in reach]
        sizes = zip(
            self.padded_spatial_shape(inputs_shape), spans, self.window_strides, strict=True
        )
        return tuple(max(0, (size - span) // stride + 1) for size, span, stride in sizes)

    def output_spatial_shape(self, inputs_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the spatial shape of the outputs, in the order of their axes."""
        shape = self.position_shape(inputs_shape)
        return tuple(shape[i] for i in self.spatial_order_of_outputs)

    def num_positions(self, inputs_shape: Sequence[int]) -> int:
        """Return the number of patches of each image."""
        return math.prod(self.position_shape(inputs_shape))

    def num_images(self, inputs_shape: Sequence[int]) -> int:
        """Return the number of images in each batch group."""
        return inputs_shape[self.dimension_numbers.lhs_spec[0]] // self.batch_group_count

    def num_channels(self, inputs_shape: Sequence[int]) -> int:
        """Return the number of channels in each feature group."""
        return inputs_shape[self.dimension_numbers.lhs_spec[1]] // self.feature_group_count

    def patch_size(self, inputs_shape: Sequence[int]) -> int:
        """Return the number of elements of a patch."""
        return self.kernel_size * self.num_channels(inputs_shape)


# Validation of the arguments of the public functions.

Sizes = int | Sequence[int]
"""An integer for each spatial axis, or one for all."""

Padding = str | Sequence[Sequence[int]]
"""The name of a padding, or the padding before and after along each spatial axis."""

DimNumbers = Sequence[str] | lax.ConvDimensionNumbers
"""The layouts of inputs, kernel and outputs, as `lax.conv_dimension_numbers` accepts them."""

_FORMATS = ("NWC", "NCW", "NHWC", "NCHW", "NDHWC", "NCDHW")
_PADDINGS = ("SAME", "VALID", "SAME_LOWER")


def read_inputs(inputs: ArrayLike) -> Array:
    """Return the images; check that they are real and have one to three spatial axes."""
    array = jnp.asarray(inputs)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"{where()}: inputs must be of a real floating dtype, got {array.dtype}. Convert them "
            f"to the dtype to compute in, for example with inputs.astype(jnp.float32)."
        )
    if not 3 <= array.ndim <= 5:
        raise ValueError(
            f"{where()}: inputs must have a batch axis, a channel axis and one to three spatial "
            f"axes, got shape {array.shape}. Give a single image a batch axis of 1."
        )
    return array


def read_geometry(
    inputs_shape: tuple[int, ...],
    kernel_spatial_shape: Sizes,
    strides: Sizes,
    padding: Padding,
    data_format: str | None,
    dim_numbers: DimNumbers | None,
    inputs_dilation: Sizes | None,
    kernel_dilation: Sizes | None,
    feature_group_count: int,
    batch_group_count: int,
) -> ConvGeometry:
    """Return the convolution that the arguments describe; check that it has patches."""
    numbers = _read_layout(len(inputs_shape), data_format, dim_numbers)
    num_spatial = len(inputs_shape) - 2
    sizes = lambda name, value: _read_sizes(name, value, num_spatial)
    kernel = sizes("kernel_spatial_shape", kernel_spatial_shape)
    window_strides = sizes("strides", strides)
    lhs_dilation = sizes("inputs_dilation", 1 if inputs_dilation is None else inputs_dilation)
    rhs_dilation = sizes("kernel_dilation", 1 if kernel_dilation is None else kernel_dilation)
    spatial = tuple(inputs_shape[axis] for axis in numbers.lhs_spec[2:])
    geometry = ConvGeometry.of(
        kernel,
        window_strides=window_strides,
        padding=_read_padding(padding, spatial, kernel, window_strides, lhs_dilation, rhs_dilation),
        dimension_numbers=numbers,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        feature_group_count=_read_group_count("feature_group_count", feature_group_count),
        batch_group_count=_read_group_count("batch_group_count", batch_group_count),
    )
    _check_groups(geometry, inputs_shape)
    _check_has_patches(geometry, inputs_shape)
    return geometry


def read_weights(
    weights: ArrayLike | None, geometry: ConvGeometry, inputs_shape: tuple[int, ...]
) -> Array | None:
    """Return the weights of patches, broadcast to all patches; None if there are none."""
    if weights is None:
        return None
    array = jnp.asarray(weights)
    shape = _weights_shape(geometry, inputs_shape)
    try:
        fits = jnp.broadcast_shapes(array.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"{where()}: weighting_array must broadcast to {shape}, the images and the spatial "
            f"shape of the outputs, got shape {array.shape}. Give weights of images as "
            f"weights.reshape({(shape[0], *(1 for _ in shape[1:]))})."
        )
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{where()}: weighting_array must be real, got {array.dtype}.")
    # Expands the rank explicitly, because `jax_numpy_rank_promotion` may forbid promotion.
    return jnp.broadcast_to(array.reshape((1,) * (len(shape) - array.ndim) + array.shape), shape)


def _weights_shape(geometry: ConvGeometry, inputs_shape: Sequence[int]) -> tuple[int, ...]:
    images = inputs_shape[geometry.dimension_numbers.lhs_spec[0]]
    return (images, *geometry.output_spatial_shape(inputs_shape))


def _read_layout(
    rank: int, data_format: str | None, dim_numbers: DimNumbers | None
) -> lax.ConvDimensionNumbers:
    """Return `dim_numbers`, else the layout of the data format, else the default of `jax.lax`."""
    if isinstance(dim_numbers, lax.ConvDimensionNumbers):
        if not all(sorted(spec) == list(range(rank)) for spec in dim_numbers):
            raise ValueError(
                f"{where()}: each spec of dim_numbers must hold the axes 0 to {rank - 1}, because "
                f"inputs have {rank} axes; got {dim_numbers}."
            )
        return dim_numbers
    if dim_numbers is None and data_format is not None:
        if data_format not in _FORMATS:
            raise ValueError(
                f"{where()}: data_format must be None or one of {_FORMATS}, got {data_format!r}. "
                f"Describe any other layout with dim_numbers."
            )
        if len(data_format) != rank:
            same_rank = [name for name in _FORMATS if len(name) == rank]
            raise ValueError(
                f"{where()}: data_format={data_format!r} is for inputs with {len(data_format)} "
                f"axes, but these have {rank}. For {rank - 2} spatial axes give one of {same_rank}."
            )
        spatial = data_format.replace("N", "").replace("C", "")
        dim_numbers = (data_format, spatial + "IO", data_format)
    try:
        return lax.conv_dimension_numbers((1,) * rank, (1,) * rank, dim_numbers)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{where()}: dim_numbers must be a lax.ConvDimensionNumbers or three strings of "
            f"{rank} letters such as ('NHWC', 'HWIO', 'NHWC'), got {dim_numbers!r}: {error}"
        ) from error


def _read_sizes(name: str, value: Sizes, num_spatial: int) -> tuple[int, ...]:
    """Return a positive integer for each spatial axis."""
    number = as_integer(value)
    given = [number] * num_spatial if number is not None else value
    sizes = [as_integer(x) for x in given] if isinstance(given, Sequence) else [None]
    if None in sizes:
        raise TypeError(
            f"{where()}: {name} must be a Python integer or a sequence of them, got {value!r}."
        )
    if len(sizes) != num_spatial:
        raise ValueError(
            f"{where()}: {name} must have an entry for each of the {num_spatial} spatial axes of "
            f"inputs, got {value!r}. Give a single integer if they are all the same."
        )
    positive = tuple(size for size in sizes if size is not None and size > 0)
    if len(positive) != num_spatial:
        raise ValueError(f"{where()}: {name} must be at least 1 everywhere, got {value!r}.")
    return positive


def _read_padding(
    padding: Padding,
    spatial: tuple[int, ...],
    kernel: tuple[int, ...],
    strides: tuple[int, ...],
    lhs_dilation: tuple[int, ...],
    rhs_dilation: tuple[int, ...],
) -> Sequence[tuple[int, int]]:
    if isinstance(padding, str):
        name = padding.upper()
        if name not in _PADDINGS:
            raise ValueError(
                f"{where()}: padding must be one of {_PADDINGS} or a pair of integers for each "
                f"spatial axis, got {padding!r}."
            )
        if name != "VALID" and math.prod(lhs_dilation) > 1:
            raise ValueError(
                f"{where()}: padding={padding!r} has no agreed meaning for dilated inputs, and "
                f"inputs_dilation={lhs_dilation}. Give pairs of integers, as for jax.lax."
            )
        spans = [(k - 1) * d + 1 for k, d in zip(kernel, rhs_dilation, strict=True)]
        return lax.padtype_to_pads(spatial, spans, strides, name)
    try:
        pairs = [(as_integer(low), as_integer(high)) for low, high in padding]
    except (TypeError, ValueError):
        pairs = [(None, None)]
    if any(None in pair for pair in pairs) or len(pairs) != len(spatial):
        raise ValueError(
            f"{where()}: padding must be one of {_PADDINGS} or a pair (low, high) of integers for "
            f"each of the {len(spatial)} spatial axes, got {padding!r}."
        )
    return [(low, high) for low, high in pairs if low is not None and high is not None]


def _read_group_count(name: str, value: int) -> int:
    count = as_integer(value)
    if count is None or count < 1:
        raise ValueError(f"{where()}: {name} must be a positive Python integer, got {value!r}.")
    return count


def _check_groups(geometry: ConvGeometry, inputs_shape: tuple[int, ...]) -> None:
    features, batches = geometry.feature_group_count, geometry.batch_group_count
    if features > 1 and batches > 1:
        raise ValueError(
            f"{where()}: feature_group_count={features} and batch_group_count={batches}, but as in "
            f"jax.lax at least one of them must be 1."
        )
    batch, channel = geometry.dimension_numbers.lhs_spec[:2]
    for name, count, what, axis in (
        ("feature_group_count", features, "channels", channel),
        ("batch_group_count", batches, "images", batch),
    ):
        if inputs_shape[axis] % count:
            raise ValueError(
                f"{where()}: {name}={count} does not divide the {inputs_shape[axis]} {what} of "
                f"inputs of shape {inputs_shape}. Check the layout, or the number of groups."
            )


def _check_has_patches(geometry: ConvGeometry, inputs_shape: tuple[int, ...]) -> None:
    if 0 in inputs_shape:
        raise ValueError(
            f"{where()}: there is nothing to average in inputs of shape {inputs_shape}."
        )
    if geometry.num_positions(inputs_shape) == 0:
        raise ValueError(
            f"{where()}: there are no patches: the kernel of shape "
            f"{geometry.kernel_spatial_shape}, with dilation {geometry.rhs_dilation}, does not fit "
            f"into inputs that have spatial shape {geometry.padded_spatial_shape(inputs_shape)} "
            f"after dilation and padding. Pad more, for example with padding='SAME', or check the "
            "layout."
        )
