"""The default blocks of kfac_jax's tags, and constructors of blocks in curvax's form.

kfac_jax makes a block from the equation of a layer, curvax from the equation and a name, and their
names of tags differ: `block_ctors` translates.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from curvax.curvature.blocks import defaults
from curvax.curvature.blocks.base import BlockCtor, CurvatureBlock as CoreBlock, LayerEquation
from curvax.kfac_jax.curvature_blocks.diagonal import NaiveDiagonal, ScaleAndShiftDiagonal
from curvax.kfac_jax.curvature_blocks.kronecker import (
    Conv2DTwoKroneckerFactored,
    DenseTwoKroneckerFactored,
)
from curvax.kfac_jax.curvature_blocks.repeated_dense import RepeatedDenseKroneckerFactored
from curvax.kfac_jax.layers_and_loss_tags import curvax_tag_name
from curvax.kfac_jax.utils.staging import Finalizable

KfacBlockCtor: TypeAlias = Callable[..., CoreBlock]
"""Makes a block from the equation of a layer; or, as curvax's do, from the equation and a name."""

_DEFAULTS: dict[str, KfacBlockCtor] = {
    "dense_tag": DenseTwoKroneckerFactored,
    "repeated_dense_tag": RepeatedDenseKroneckerFactored,
    "conv2d_tag": Conv2DTwoKroneckerFactored,
    "scale_and_shift_tag": ScaleAndShiftDiagonal,
    "generic_tag": NaiveDiagonal,
}


def get_default_tag_to_block_ctor(tag_name: str) -> KfacBlockCtor | None:
    """Return the default class of blocks for the layers of a tag; None if there is none.

    Args:
        tag_name: Name of the tag: "dense", or "dense_tag" as in older releases.

    Examples:
        >>> get_default_tag_to_block_ctor("dense").__name__
        'DenseTwoKroneckerFactored'
    """
    return _DEFAULTS.get(curvax_tag_name(tag_name))


def set_default_tag_to_block_ctor(tag_name: str, block_ctor: KfacBlockCtor) -> None:
    """Set the default class of blocks for the layers of a tag, for all of `curvax.kfac_jax`.

    Args:
        tag_name: Name of the tag: "dense", or "dense_tag" as in older releases.
        block_ctor: A class of blocks, or a function from the equation of a layer to a block.
    """
    _DEFAULTS[curvax_tag_name(tag_name)] = block_ctor


def set_multi_default_tag_to_block_ctor(tags_to_block_ctor: Mapping[str, KfacBlockCtor]) -> None:
    """Set the default classes of blocks for several tags.

    Args:
        tags_to_block_ctor: A class of blocks for each name of a tag.
    """
    for tag_name, block_ctor in tags_to_block_ctor.items():
        set_default_tag_to_block_ctor(tag_name, block_ctor)


def default_block_ctor(tag_name: str) -> BlockCtor:
    """Return the default constructor of blocks for a tag, as curvax's estimator calls it.

    Layers that kfac_jax does not know, such as embeddings, get curvax's blocks.
    """
    ctor = get_default_tag_to_block_ctor(tag_name)
    return defaults.default_block_ctor(tag_name) if ctor is None else with_name(ctor)


def block_ctors(ctors: Mapping[str, KfacBlockCtor | None] | None) -> dict[str, BlockCtor]:
    """Return constructors by the names of kfac_jax's tags as curvax's estimator takes them."""
    given = {curvax_tag_name(name): ctor for name, ctor in (ctors or {}).items()}
    return {name: with_name(ctor) for name, ctor in given.items() if ctor is not None}


def with_name(ctor: KfacBlockCtor) -> BlockCtor:
    """Return a constructor that takes the equation of a layer and a name."""
    if _takes_name(ctor):
        return ctor

    def make(equation: LayerEquation, name: str) -> CoreBlock:
        block = ctor(replace(equation, name=name))
        if isinstance(block, Finalizable) and not block.finalized:
            block.finalize()
        return block

    return make


def _takes_name(ctor: Callable[..., Any]) -> bool:
    """Return whether a constructor requires a name, as those of curvax's blocks do."""
    try:
        inspect.signature(ctor).bind(None)
    except TypeError:
        return True
    return False
