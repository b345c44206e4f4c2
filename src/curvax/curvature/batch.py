"""The batch of a model function: which of its arguments it is, and how many examples it has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curvax import _jax
from curvax._errors import where
from curvax._tree import leaf_name
from curvax._types import Array, PyTree
from curvax.layers.tracing.loss_map import LossMap


@dataclass(frozen=True)
class BatchArgument:
    """Which arguments of a function are its batch: one, several, or the last that is no other."""

    params_index: int
    index: int | Sequence[int] | None

    def of(self, func_args: Any) -> PyTree:
        """The batch among the arguments; a tuple of those that are named, or of none."""
        if not isinstance(func_args, tuple | list):
            raise TypeError(
                f"{where()}: the arguments of the function are given as one sequence, such as "
                f"(params, batch), got {type(func_args).__name__}."
            )
        found = tuple(func_args[i] for i in self._places(len(func_args)))
        return found if isinstance(self.index, Sequence) or not found else found[0]

    def replace(self, func_args: Sequence[PyTree], batch: PyTree) -> tuple[PyTree, ...]:
        """The arguments with another batch."""
        places = self._places(len(func_args))
        several = isinstance(self.index, Sequence) or not places
        given = dict(zip(places, batch if several else (batch,), strict=True))
        return tuple(given.get(i, x) for i, x in enumerate(func_args))

    def without(self, func_args: Sequence[PyTree]) -> tuple[PyTree, ...]:
        """The arguments with nothing in the place of the batch."""
        places = self._places(len(func_args))
        return tuple(() if i in places else x for i, x in enumerate(func_args))

    def _places(self, count: int) -> list[int]:
        params, asked = self.params_index, self.index
        if not -count <= params < count:
            raise ValueError(
                f"{where()}: the parameters are argument {params}, but the function was given "
                f"{count} arguments."
            )
        if asked is None:
            return [i for i in range(count) if i != params % count][-1:]
        places = list(asked) if isinstance(asked, Sequence) else [asked]
        if any(not -count <= i < count or (i - params) % count == 0 for i in places):
            raise ValueError(
                f"{where()}: batch_index={asked!r} must say which of the {count} arguments are "
                f"the batch, and not name the parameters, which are argument {params}."
            )
        return [i % count for i in places]


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


def length_of(batch: PyTree) -> int:
    """The number of examples of a batch."""
    lengths = [jnp.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if is_of_examples(leaf)]
    return lengths[0] if lengths else 0


def axes_of(batch: PyTree) -> PyTree:
    """Along which axis each leaf of a batch is split: the first, or none."""
    return jax.tree.map(lambda leaf: 0 if is_of_examples(leaf) else None, batch)


def check_separate(at: LossMap) -> None:
    """What is computed for one example does not depend on others."""
    operation = at.processed.interaction
    if operation is not None:
        raise ValueError(
            f"{where()}: the examples of a batch interact, by `{operation}` (as with batch "
            f"normalisation in training), so that a batch is not the sum of its microbatches. "
            f"Leave microbatch_size and memory_budget out, or say examples_interact=True to take "
            f"each microbatch for a batch (in curvax.Optimizer: "
            f"auto_register_kwargs={{'examples_interact': True}})."
        )


def by_example(x: Array, length: int) -> Array:
    """What has a row for each of a loss, as (examples, rows of each, ...)."""
    if not length or x.shape[0] % length:
        raise ValueError(
            f"{where()}: in microbatches each example has as many rows of every loss, but there "
            f"are {x.shape[0]} rows for {length} examples. Leave microbatch_size and memory_budget "
            f"out, or, in an estimator, say by batch_index which arguments are the batch."
        )
    return jnp.moveaxis(x.reshape(-1, length, *x.shape[1:]), 1, 0)
