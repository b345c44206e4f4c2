"""The batch of a model function: which of its arguments hold it, and its number of examples."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    """The arguments that hold the batch: one, several, or by default the last but the parameters.

    Attributes:
        params_index: Index of the argument that holds the parameters.
        index: Index of the argument that holds the batch, or several; None for the last one that is
            not the parameters.
    """

    params_index: int
    index: int | Sequence[int] | None

    def of(self, func_args: Sequence[PyTree]) -> PyTree:
        """Return the batch: one argument, or a tuple if `index` is a sequence or there is none."""
        if not isinstance(func_args, tuple | list):
            raise TypeError(
                f"{where()}: pass the arguments of the function as one sequence, such as "
                f"(params, batch), got {type(func_args).__name__}."
            )
        batch = tuple(func_args[i] for i in self._indices(len(func_args)))
        return batch if isinstance(self.index, Sequence) or not batch else batch[0]

    def replace(self, func_args: Sequence[PyTree], batch: PyTree) -> tuple[PyTree, ...]:
        """Return the arguments with another batch, in the form that `of` returns."""
        indices = self._indices(len(func_args))
        is_tuple = isinstance(self.index, Sequence) or not indices
        new = dict(zip(indices, batch if is_tuple else (batch,), strict=True))
        return tuple(new.get(i, x) for i, x in enumerate(func_args))

    def without(self, func_args: Sequence[PyTree]) -> tuple[PyTree, ...]:
        """Return the arguments with empty tuples for the batch."""
        indices = self._indices(len(func_args))
        return tuple(() if i in indices else x for i, x in enumerate(func_args))

    def _indices(self, count: int) -> list[int]:
        params, index = self.params_index, self.index
        if not -count <= params < count:
            raise ValueError(
                f"{where()}: the parameters are argument {params}, but the function was given "
                f"{count} arguments."
            )
        if index is None:
            return [i for i in range(count) if i != params % count][-1:]
        indices = list(index) if isinstance(index, Sequence) else [index]
        if any(not -count <= i < count or (i - params) % count == 0 for i in indices):
            raise ValueError(
                f"{where()}: batch_index={index!r} must say which of the {count} arguments are "
                f"the batch, and must not name the parameters, which are argument {params}."
            )
        return [i % count for i in indices]


def default_batch_size_extractor(batch: PyTree) -> int:
    """Return the number of examples in a batch: the length of the leading axis of its arrays.

    Python numbers, arrays without axes and random keys are ignored. All other arrays must agree. A
    batch of another layout, such as examples along the second axis, needs a user-supplied
    extractor: a function of the batch that returns a number, which may depend on values.

    Arguments:
        batch: A pytree of arrays: the batch alone, without the parameters of the model.

    Returns:
        The number of examples.

    Raises:
        ValueError: If the arrays disagree, or none of them has an axis.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> batch = {"images": jnp.zeros((32, 28, 28)), "labels": jnp.zeros(32, int), "scale": 2.0}
        >>> curvax.default_batch_size_extractor(batch)
        32
    """
    lengths = [
        (leaf_name("batch", path), np.shape(leaf)[0])
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        if has_examples(leaf)
    ]
    if not lengths:
        raise ValueError(
            f"{where()}: the batch has no array with an axis, so its size is unknown. Pass "
            f"batch_size_extractor, a function of the batch that returns the number of examples."
        )
    if len({length for _, length in lengths}) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths)
        raise ValueError(
            f"{where()}: the leading axis of every array in a batch must be the example axis, but "
            f"their lengths differ: {listed}. Pass batch_size_extractor, a function of the batch "
            f"that returns the number of examples."
        )
    return int(lengths[0][1])


def has_examples(leaf: PyTree) -> bool:
    """Return whether the leading axis of a leaf of a batch is assumed to be the example axis."""
    return np.ndim(leaf) > 0 and not (hasattr(leaf, "dtype") and _jax.is_key(leaf))


def length_of(batch: PyTree) -> int:
    """Return the number of examples in a batch; 0 if it has no arrays with an axis."""
    lengths = [jnp.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if has_examples(leaf)]
    return lengths[0] if lengths else 0


def axes_of(batch: PyTree) -> PyTree:
    """Return the `in_axes` of a batch: 0 for leaves with examples, None for the others."""
    return jax.tree.map(lambda leaf: 0 if has_examples(leaf) else None, batch)


def check_separate(at: LossMap) -> None:
    """Check that the computation of an example does not depend on other examples."""
    operation = at.processed.interaction
    if operation is not None:
        raise ValueError(
            f"{where()}: the examples of a batch interact, by `{operation}` (as with batch "
            f"normalisation in training), so a batch is not the sum of its microbatches. Leave out "
            f"microbatch_size and memory_budget, or pass examples_interact=True to treat each "
            f"microbatch as a batch (in curvax.Optimizer: "
            f"auto_register_kwargs={{'examples_interact': True}})."
        )


def by_example(x: Array, length: int) -> Array:
    """Reshape `(rows of a loss, ...)` to `(examples, rows of an example, ...)`."""
    if not length or x.shape[0] % length:
        raise ValueError(
            f"{where()}: in microbatches every example must have the same number of rows of every "
            f"loss, but there are {x.shape[0]} rows for {length} examples. Leave out "
            f"microbatch_size and memory_budget, or, in an estimator, say by batch_index which "
            f"arguments are the batch."
        )
    return jnp.moveaxis(x.reshape(-1, length, *x.shape[1:]), 1, 0)
