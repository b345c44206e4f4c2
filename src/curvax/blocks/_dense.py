"""Kronecker-factored blocks for dense layers and tables."""

from curvax.blocks._kronecker import TwoKroneckerFactored

__all__ = ["DenseTwoKroneckerFactored", "EmbeddingTwoKroneckerFactored"]


class DenseTwoKroneckerFactored(TwoKroneckerFactored):
    """A `TwoKroneckerFactored` block for dense layers: `y = x @ w + b`.

    Arguments:
        layer_tag_eq: the equation of the layer's tag.
        name: what the block is called.
        weight_sharing: "expand" or "reduce", where weights are applied at several positions.
        max_factor_size: a factor that is wider is kept as its diagonal.
    """


class EmbeddingTwoKroneckerFactored(TwoKroneckerFactored):
    """A `TwoKroneckerFactored` block for tables whose rows are looked up.

    The factor of the inputs is that of one-hot vectors: diagonal, how often each row is used.

    Arguments:
        layer_tag_eq: the equation of the layer's tag.
        name: what the block is called.
        weight_sharing: "expand" or "reduce", where rows are looked up at several positions.
        max_factor_size: a factor that is wider is kept as its diagonal.
    """
