"""Random convolutions, and their patches by hand: loops and slices in NumPy, without `lax`."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

from curvax.curvature.patches.geometry import ConvGeometry

LETTERS = "XYZ"


@dataclasses.dataclass(frozen=True)
class Conv:
    """A convolution as users describe it; the layout of inputs and outputs is in strings."""

    images: int
    spatial: tuple[int, ...]
    channels: int
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    inputs_dilation: tuple[int, ...]
    kernel_dilation: tuple[int, ...]
    layouts: tuple[str, str, str]
    feature_group_count: int = 1
    batch_group_count: int = 1

    def shape_in(self, layout: str) -> tuple[int, ...]:
        """The shape of inputs in a layout."""
        sizes = dict(zip(LETTERS, self.spatial, strict=False))
        sizes |= {"N": self.images, "C": self.channels}
        return tuple(sizes[letter] for letter in layout)

    def inputs(self, seed: int = 0) -> Any:
        shape = self.shape_in(self.layouts[0])
        return jnp.asarray(np.random.default_rng(seed).normal(size=shape))

    def arguments(self) -> dict[str, Any]:
        """Those of `patches_moments`."""
        return {
            "kernel_spatial_shape": self.kernel,
            "strides": self.strides,
            "padding": self.padding,
            "dim_numbers": self.layouts,
            "inputs_dilation": self.inputs_dilation,
            "kernel_dilation": self.kernel_dilation,
            "feature_group_count": self.feature_group_count,
            "batch_group_count": self.batch_group_count,
        }

    def parameters(self) -> dict[str, Any]:
        """Those of `lax.conv_general_dilated`."""
        shape = self.shape_in(self.layouts[0])
        return {
            "window_strides": self.strides,
            "padding": self.padding,
            "lhs_dilation": self.inputs_dilation,
            "rhs_dilation": self.kernel_dilation,
            "dimension_numbers": lax.conv_dimension_numbers(shape, shape, self.layouts),
            "feature_group_count": self.feature_group_count,
            "batch_group_count": self.batch_group_count,
        }

    def geometry(self) -> ConvGeometry:
        return ConvGeometry.of(self.kernel, **self.parameters())


@st.composite
def convolutions(draw):
    """Any convolution that has at least one patch in each image."""
    rank = draw(st.integers(1, 3))
    per_axis = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(rank))
    kernel = per_axis(1, 3)
    # Unit strides are a case of their own, and that of most convolutions.
    strides = draw(st.sampled_from([(1,) * rank, per_axis(1, 3)]))
    inputs_dilation, kernel_dilation = per_axis(1, 2), per_axis(1, 2)
    padding = tuple(zip(per_axis(-1, 2), per_axis(-1, 2), strict=True))
    spatial = []
    for axis in range(rank):
        span = (kernel[axis] - 1) * kernel_dilation[axis] + 1
        # What is left of each side, once it is cut off, is enough for the kernel.
        least = span + sum(max(0, -pad) for pad in padding[axis])
        spatial.append(least + draw(st.integers(0, 6 // rank)))
    groups = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (3, 1), (1, 2)]))
    spatial_letters = LETTERS[:rank]
    layout = lambda others: "".join(draw(st.permutations(spatial_letters + others)))
    return Conv(
        images=groups[1] * draw(st.integers(1, 3)),
        spatial=tuple(spatial),
        channels=groups[0] * draw(st.integers(1, 2)),
        kernel=kernel,
        strides=strides,
        padding=padding,
        inputs_dilation=inputs_dilation,
        kernel_dilation=kernel_dilation,
        # The kernel's layout gives the order of all arguments; here that of `LETTERS`.
        layouts=(layout("NC"), spatial_letters + "IO", layout("NC")),
        feature_group_count=groups[0],
        batch_group_count=groups[1],
    )


def plain(**changes: Any) -> Conv:
    """A small convolution with nothing special about it but the changes."""
    rank = len(changes.get("kernel", (2, 2)))
    letters = LETTERS[:rank]
    defaults = {
        "images": 6,
        "spatial": (6, 5, 4)[:rank],
        "channels": 2,
        "kernel": (2,) * rank,
        "strides": (1,) * rank,
        "padding": ((1, 0),) * rank,
        "inputs_dilation": (1,) * rank,
        "kernel_dilation": (1,) * rank,
        "layouts": (f"N{letters}C", f"{letters}IO", f"N{letters}C"),
    }
    return Conv(**defaults | changes)


def patches_by_hand(conv: Conv, inputs: Any) -> np.ndarray:
    """All patches, `(groups, images, *outputs' spatial shape, *kernel, channels)`."""
    letters = LETTERS[: len(conv.kernel)]
    images = np.einsum(f"{conv.layouts[0]}->N{letters}C", np.asarray(inputs))
    for axis, (low, high) in enumerate(conv.padding):
        dilation, size = conv.inputs_dilation[axis], images.shape[1 + axis]
        spread = np.zeros_like(images, shape=[*images.shape]).repeat(dilation, 1 + axis)
        at = (slice(None),) * (1 + axis)
        spread[(*at, slice(None, None, dilation))] = images
        spread = spread[(*at, slice(0, (size - 1) * dilation + 1))]
        pads = [(0, 0)] * images.ndim
        pads[1 + axis] = (max(low, 0), max(high, 0))
        padded = np.pad(spread, pads)
        images = padded[(*at, slice(max(-low, 0), padded.shape[1 + axis] - max(-high, 0)))]

    def count(axis: int) -> int:
        span = (conv.kernel[axis] - 1) * conv.kernel_dilation[axis] + 1
        return sum(
            start % conv.strides[axis] == 0 for start in range(images.shape[1 + axis] - span + 1)
        )

    positions = tuple(count(axis) for axis in range(len(conv.kernel)))
    patches = np.zeros((len(images), *positions, *conv.kernel, conv.channels), images.dtype)
    for position in np.ndindex(*positions):
        for place in np.ndindex(*conv.kernel):
            steps = zip(position, conv.strides, place, conv.kernel_dilation, strict=True)
            seen = tuple(p * s + a * d for p, s, a, d in steps)
            patches[(slice(None), *position, *place)] = images[(slice(None), *seen)]

    in_outputs = [letter for letter in conv.layouts[2] if letter in letters]
    order = [1 + letters.index(letter) for letter in in_outputs]
    patches = patches.transpose(0, *order, *range(1 + len(letters), patches.ndim))
    by_group = np.split(patches, conv.batch_group_count, 0)
    if conv.feature_group_count > 1:
        by_group = np.split(patches, conv.feature_group_count, -1)
    return np.stack(by_group)


def moments_by_hand(conv: Conv, inputs: Any, weights: Any = None) -> tuple[Any, Any]:
    """The averages over patches, the plain way."""
    rank = len(conv.kernel)
    patches = patches_by_hand(conv, inputs)
    shape = patches.shape[1 : 2 + rank]
    if weights is None:
        weights = 1.0
    elif conv.batch_group_count > 1:
        full = np.broadcast_to(weights, (conv.images, *shape[1:]))
        weights = np.stack(np.split(full, conv.batch_group_count))
    weights = np.broadcast_to(weights, (len(patches), *shape)).reshape(len(patches), -1)
    rows = patches.reshape(len(patches), math.prod(shape), -1)
    second = np.einsum("gpi,gp,gpj->gij", rows, weights, rows) / rows.shape[1]
    first = np.einsum("gpi,gp->gi", rows, weights) / rows.shape[1]
    patch = patches.shape[2 + rank :]
    groups = (len(patches),) if len(patches) > 1 else ()
    return second.reshape(*groups, *patch, *patch), first.reshape(*groups, *patch)
