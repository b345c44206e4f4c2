"""Which block a layer gets if nobody says otherwise, and how it is made."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from curvax.curvature.blocks.base import CurvatureBlock, LayerEquation
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


def default_block_ctor(tag_name: str) -> Callable[[Any, str], CurvatureBlock]:
    """What makes the blocks of a tag, if nobody says which for a layer.

    A model must be trainable as it is: of the blocks that curvax chooses itself, those that are
    made of gradients of single examples make do without them. Their remarks say so.
    """
    ctor = get_default_tag_to_block_ctor(tag_name)
    own: Any = ctor
    if ctor is DEFAULT_BLOCKS.get(tag_name) and issubclass(own, ExampleGradientBlock):
        return functools.partial(ctor, allow_approximation=True)
    return ctor


def make_block(
    block_ctor: Callable[[Any, str], CurvatureBlock], equation: LayerEquation, name: str
) -> CurvatureBlock:
    """Make the block of a layer; one for each part, if it needs that."""
    if any(cut for use in equation.uses for cut in use.cuts):
        parts = SlicedParams(equation, name, block_ctor)
        if any(part.splits_parts for part in parts.parts):
            parts.check_updates()
            return parts
    return block_ctor(equation, name)
