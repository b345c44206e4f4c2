"""How many examples a batch holds: what sums over examples are divided by to be means."""

from typing import Any

import jax
import numpy as np

from curvax import _jax
from curvax._errors import where
from curvax._tree import leaf_name
from curvax._types import PyTree

__all__ = ["default_batch_size_extractor", "is_of_examples"]


def default_batch_size_extractor(batch: PyTree) -> int:
    """The number of examples in a batch: the length of the first axis of its arrays.

    Numbers, arrays without axes and random keys say nothing of the batch size and are passed over.
    All other arrays must agree. A batch of another layout, with its examples along the second axis
    for example, needs an extractor of its own: a function of the batch that returns a number, which
    may also depend on values.

    Arguments:
        batch: a pytree of arrays. It is the batch alone, without the parameters of the model.

    Returns:
        The number of examples.

    Raises:
        ValueError: if the arrays disagree, or there is none with an axis.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> batch = {"images": jnp.zeros((32, 28, 28)), "labels": jnp.zeros(32, int), "scale": 2.0}
        >>> curvax.default_batch_size_extractor(batch)
        32
    """
    found = [
        (leaf_name("batch", path), np.shape(leaf)[0])
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        if is_of_examples(leaf)
    ]
    if not found:
        raise ValueError(
            f"{where()}: the batch has no array with an axis, so its size is not known. Pass "
            f"batch_size_extractor, a function of the batch that returns the number of examples."
        )
    if len({size for _, size in found}) > 1:
        listed = ", ".join(f"{name} has {size}" for name, size in found)
        raise ValueError(
            f"{where()}: the first axis of all arrays in a batch is that of its examples, but "
            f"their lengths differ: {listed}. Pass batch_size_extractor, a function of the batch "
            f"that returns the number of examples."
        )
    return int(found[0][1])


def is_of_examples(leaf: Any) -> bool:
    """Whether the first axis of a leaf of a batch is taken to be that of examples."""
    return np.ndim(leaf) > 0 and not (hasattr(leaf, "dtype") and _jax.is_key(leaf))
