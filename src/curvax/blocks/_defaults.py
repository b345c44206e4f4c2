"""Which block a layer gets if nobody says otherwise, and how it is made."""

from collections.abc import Callable, Mapping
from typing import Any

from curvax.blocks._block import CurvatureBlock
from curvax.blocks._conv import Conv2DTwoKroneckerFactored, ConvTwoKroneckerFactored
from curvax.blocks._dense import DenseTwoKroneckerFactored, EmbeddingTwoKroneckerFactored
from curvax.blocks._diagonal import NaiveDiagonal, ScaleAndShiftDiagonal
from curvax.blocks._layer import LayerEquation
from curvax.blocks._parts import Parts

__all__ = ["DEFAULT_BLOCKS", "make_block"]

DEFAULT_BLOCKS: Mapping[str, type[CurvatureBlock]] = {
    "dense_tag": DenseTwoKroneckerFactored,
    "conv2d_tag": Conv2DTwoKroneckerFactored,
    "conv_tag": ConvTwoKroneckerFactored,
    "embedding_tag": EmbeddingTwoKroneckerFactored,
    "scale_and_shift_tag": ScaleAndShiftDiagonal,
    "generic_tag": NaiveDiagonal,
}


def make_block(
    block_ctor: Callable[[Any, str], CurvatureBlock], equation: LayerEquation, name: str
) -> CurvatureBlock:
    """Make the block of a layer; one for each part, if it needs that."""
    if any(cut for site in equation.sites for cut in site.cuts):
        parts = Parts(equation, name, block_ctor)
        if any(part.splits_parts for part in parts.parts):
            return parts
    return block_ctor(equation, name)
