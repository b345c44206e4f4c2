"""The default blocks of layer tags, and the construction of blocks."""

import functools
from collections.abc import Mapping

from curvax.curvature.blocks.base import BlockCtor, CurvatureBlock, LayerEquation
from curvax.curvature.blocks.diagonal import NaiveDiagonal, ScaleAndShiftDiagonal
from curvax.curvature.blocks.example_gradients import ExampleGradientBlock
from curvax.curvature.blocks.kronecker import (
    Conv2DTwoKroneckerFactored,
    ConvTwoKroneckerFactored,
    DenseTwoKroneckerFactored,
    EmbeddingTwoKroneckerFactored,
)
from curvax.curvature.blocks.settings import get_default_tag_to_block_ctor
from curvax.curvature.blocks.sliced_params import SlicedParams

DEFAULT_BLOCKS: Mapping[str, type[CurvatureBlock]] = {
    "dense_tag": DenseTwoKroneckerFactored,
    "conv2d_tag": Conv2DTwoKroneckerFactored,
    "conv_tag": ConvTwoKroneckerFactored,
    "embedding_tag": EmbeddingTwoKroneckerFactored,
    "scale_and_shift_tag": ScaleAndShiftDiagonal,
    "generic_tag": NaiveDiagonal,
}


def default_block_ctor(tag_name: str) -> BlockCtor:
    """Return the constructor of blocks for a tag, for layers that the user chose no block for.

    Any model must be trainable without configuration. So the blocks that curvax chooses itself
    approximate per-example gradients where these are not known; their remarks say so.
    """
    ctor = get_default_tag_to_block_ctor(tag_name)
    default = DEFAULT_BLOCKS.get(tag_name)
    if default is not None and ctor is default and issubclass(default, ExampleGradientBlock):
        return functools.partial(default, allow_approximation=True)
    return ctor


def make_block(block_ctor: BlockCtor, equation: LayerEquation, name: str) -> CurvatureBlock:
    """Make the block of a layer; a `SlicedParams` of blocks if its slices need separate ones."""
    if any(cut for use in equation.uses for cut in use.cuts):
        parts = SlicedParams(equation, name, block_ctor)
        if any(part.splits_parts for part in parts.parts):
            parts.check_updates()
            return parts
    return block_ctor(equation, name)
