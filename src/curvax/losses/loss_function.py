"""The bases of all losses: what curvature needs to know of a loss.

Training minimises the mean over the batch of `weight * loss(prediction, target)`. Around a point,
curvature in the predictions is a matrix G, one block for each example, and a factor B of it with
`G = B Bᵀ`. Nobody forms these matrices: a loss multiplies vectors by them.

A class of losses says how to evaluate itself and how to multiply by B. The gradient, the transpose
of B, G itself and single columns of B follow from these by autodiff, and may be overridden by
something cheaper. Methods whose names end in `_unweighted` leave the weight to the others.
"""

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array, at_least_single

Shape = tuple[int, ...]
Factor = Callable[[Array], tuple[Array, ...]]


class LossFunction(abc.ABC):
    """A loss of a batch of predictions, as curvature sees it. The base of all losses.

    To make a class of your own, give it a constructor that takes its arrays by name, the
    properties `targets`, `parameter_dependants`, `parameter_independants` and
    `ggn_factor_inner_shape`, and the methods `copy_with_different_inputs`, `evaluate_unweighted`
    and `multiply_ggn_factor_unweighted`. A loss is a value: what its constructor sets stays.

    Arguments:
        weight: what the loss is multiplied by, a number, or one for each example.

    Examples:
        The loss `cosh(prediction)`. Its second derivative is `cosh(prediction)` too.

        >>> import jax.numpy as jnp
        >>> import curvax
        >>> class Cosh(curvax.LossFunction):
        ...     def __init__(self, x, weight=1.0):
        ...         super().__init__(weight)
        ...         self._x = x
        ...
        ...     targets = None
        ...     parameter_dependants = property(lambda self: (self._x,))
        ...     parameter_independants = property(lambda self: (self.weight,))
        ...     ggn_factor_inner_shape = property(lambda self: self._x.shape)
        ...
        ...     def copy_with_different_inputs(self, parameter_dependants):
        ...         return Cosh(*self.checked_inputs(parameter_dependants), self.weight)
        ...
        ...     def evaluate_unweighted(self, targets):
        ...         return jnp.cosh(self._x)
        ...
        ...     def multiply_ggn_factor_unweighted(self, vector):
        ...         return (jnp.sqrt(jnp.cosh(self._x)) * vector,)
        >>> loss = Cosh(jnp.zeros(2), weight=3.0)
        >>> loss.multiply_ggn((jnp.ones(2),))
        (Array([3., 3.], dtype=float32),)
    """

    needs_targets: bool = False
    """Whether there is no loss without targets."""

    least_axes: int = 1
    """How many axes a prediction has at least, with that of the batch."""

    def __init__(self, weight: ArrayLike) -> None:
        self._weight = weight

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            raise AttributeError(
                f"curvax: a loss cannot be changed (tried to set {name!r} of "
                f"{type(self).__name__}). Make a new one, or use copy_with_different_inputs."
            )
        super().__setattr__(name, value)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Only asked for what a loss does not have.
            if "fisher" in name or name in ("grad_of_evaluate_on_sample", "sample", "dist"):
                raise AttributeError(
                    f"curvax: {type(self).__name__} has no {name!r}: it is a loss without a "
                    f"predictive distribution, so it has no Fisher matrix and targets cannot be "
                    f"sampled. The estimation modes that work with it are 'ggn_exact', "
                    f"'ggn_curvature_prop' and, with targets, 'fisher_empirical'."
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def weight(self) -> ArrayLike:
        """What the loss is multiplied by."""
        return self._weight

    @property
    @abc.abstractmethod
    def targets(self) -> Array | None:
        """The targets, if the loss has any."""

    @property
    @abc.abstractmethod
    def parameter_dependants(self) -> tuple[Array, ...]:
        """The arrays that depend on parameters: what curvature is taken in."""

    @property
    def num_parameter_dependants(self) -> int:
        """How many arrays depend on parameters."""
        return len(self.parameter_dependants)

    @property
    @abc.abstractmethod
    def parameter_independants(self) -> tuple[ArrayLike, ...]:
        """The arrays that do not depend on parameters, as far as they are given."""

    @property
    def num_parameter_independants(self) -> int:
        """How many arrays that do not depend on parameters are given."""
        return len(self.parameter_independants)

    @abc.abstractmethod
    def copy_with_different_inputs(self, parameter_dependants: Sequence[Array]) -> "LossFunction":
        """The same loss of other arrays in the place of `parameter_dependants`.

        Arguments:
            parameter_dependants: as many arrays as there are now.

        Returns:
            A loss with the same targets and weight, and whatever else this one has.

        Raises:
            ValueError: if there are more or fewer arrays.
        """

    def checked_inputs(self, parameter_dependants: Sequence[Array]) -> tuple[Array, ...]:
        """The arrays themselves, if there are as many as this loss has `parameter_dependants`."""
        given, expected = len(parameter_dependants), self.num_parameter_dependants
        if given != expected:
            raise ValueError(
                f"curvax: a copy of {type(self).__name__} needs {expected} "
                f"{'array' if expected == 1 else 'arrays'} like its parameter_dependants, "
                f"got {given}."
            )
        return tuple(parameter_dependants)

    @abc.abstractmethod
    def evaluate_unweighted(self, targets: Any) -> Array:
        """The loss of each example, without the weight.

        Arguments:
            targets: what the predictions are compared with; None for the `targets` of a loss
                that has none and needs none.

        Returns:
            An array of one number for each example.
        """

    def evaluate(
        self, targets: ArrayLike | None = None, coefficient_mode: str = "regular"
    ) -> Array:
        """The loss of each example, neither summed nor averaged.

        Arguments:
            targets: in place of the loss's own targets.
            coefficient_mode: "regular" for `weight * loss`, "sqrt" for `sqrt(weight) * loss`,
                "off" for the loss alone.

        Returns:
            An array of one number for each example.

        Raises:
            ValueError: if the loss needs targets and there are none, or the mode is another word.
        """
        value = self.evaluate_unweighted(self._checked_targets(targets, coefficient_mode))
        return value if coefficient_mode == "off" else self._times(value, coefficient_mode)

    def grad_of_evaluate(
        self, targets: ArrayLike | None, coefficient_mode: str
    ) -> tuple[Array, ...]:
        """The gradient of the sum of `evaluate` in the `parameter_dependants`.

        Arguments:
            targets: in place of the loss's own targets.
            coefficient_mode: as in `evaluate`.

        Returns:
            A tuple of arrays like the `parameter_dependants`.

        Raises:
            ValueError: as `evaluate`.
        """
        targets = self._checked_targets(targets, coefficient_mode)

        def evaluate(*dependants: Array) -> Array:
            return self.copy_with_different_inputs(dependants).evaluate(targets, coefficient_mode)

        value, pull_back = jax.vjp(evaluate, *self.parameter_dependants)
        return pull_back(jnp.ones_like(value))

    def multiply_ggn(self, vector: Sequence[Array]) -> tuple[Array, ...]:
        """The product of the GGN and a vector.

        The GGN (generalized Gauss-Newton matrix) of a loss is a positive semi-definite matrix in
        its predictions, with a block for each example: the Hessian, where that is positive
        semi-definite whatever the targets are; else a class says what it takes instead.

        Arguments:
            vector: arrays like the `parameter_dependants`.

        Returns:
            A tuple of arrays like the `parameter_dependants`.
        """
        return self._weighted(self.multiply_ggn_unweighted(vector))

    def multiply_ggn_unweighted(self, vector: Sequence[Array]) -> tuple[Array, ...]:
        """As `multiply_ggn`, without the weight."""
        inner = self.multiply_ggn_factor_transpose_unweighted(vector)
        return self.multiply_ggn_factor_unweighted(inner)

    def multiply_ggn_factor(self, vector: Array) -> tuple[Array, ...]:
        """The product of the factor B of the GGN and a vector.

        Any B with `B Bᵀ` equal to the GGN will do; it is the same in all methods of a loss.

        Arguments:
            vector: an array of the shape `ggn_factor_inner_shape`.

        Returns:
            A tuple of arrays like the `parameter_dependants`.
        """
        return self._weighted(self.multiply_ggn_factor_unweighted(vector), "sqrt")

    @abc.abstractmethod
    def multiply_ggn_factor_unweighted(self, vector: Array) -> tuple[Array, ...]:
        """As `multiply_ggn_factor`, without the weight."""

    def multiply_ggn_factor_transpose(self, vector: Sequence[Array]) -> Array:
        """The product of the transpose of the factor B of the GGN and a vector.

        Arguments:
            vector: arrays like the `parameter_dependants`.

        Returns:
            An array of the shape `ggn_factor_inner_shape`.
        """
        return self._times(self.multiply_ggn_factor_transpose_unweighted(vector), "sqrt")

    def multiply_ggn_factor_transpose_unweighted(self, vector: Sequence[Array]) -> Array:
        """As `multiply_ggn_factor_transpose`, without the weight."""
        factor = self.multiply_ggn_factor_unweighted
        return transposed(factor, self.ggn_factor_inner_shape, self._inner_dtype)(vector)

    def multiply_ggn_factor_replicated_one_hot(self, index: Sequence[int]) -> tuple[Array, ...]:
        """The product of the factor B of the GGN and the same unit vector for each example.

        Arguments:
            index: where each slice along the first axis of an array of the shape
                `ggn_factor_inner_shape` has its one; it is zero elsewhere.

        Returns:
            A tuple of arrays like the `parameter_dependants`: one column of B for each example.

        Raises:
            ValueError: if the index does not have one number for each axis but the first.
        """
        return self._weighted(self.multiply_ggn_factor_replicated_one_hot_unweighted(index), "sqrt")

    def multiply_ggn_factor_replicated_one_hot_unweighted(
        self, index: Sequence[int]
    ) -> tuple[Array, ...]:
        """As `multiply_ggn_factor_replicated_one_hot`, without the weight."""
        one_hot = replicated_one_hot(index, self.ggn_factor_inner_shape, self._inner_dtype)
        return self.multiply_ggn_factor_unweighted(one_hot)

    @property
    @abc.abstractmethod
    def ggn_factor_inner_shape(self) -> Shape:
        """The shape of what `multiply_ggn_factor` takes; its first axis is that of examples."""

    @property
    def _inner_dtype(self) -> Any:
        return widest(self.parameter_dependants)

    def _checked_targets(self, targets: ArrayLike | None, coefficient_mode: str) -> Any:
        """The targets to evaluate the loss on, for a mode that there is."""
        if coefficient_mode not in ("regular", "sqrt", "off"):
            raise ValueError(
                f"curvax: coefficient_mode must be 'regular', 'sqrt' or 'off', got "
                f"{coefficient_mode!r}."
            )
        targets = self.targets if targets is None else targets
        if targets is None and self.needs_targets:
            raise ValueError(
                f"curvax: {type(self).__name__} was made without targets. Pass targets here, or "
                f"register the loss with its targets."
            )
        return targets

    def _times(self, x: Array, mode: str = "regular") -> Array:
        """`x` times the weight, or its square root."""
        weight = jnp.asarray(self.weight).astype(at_least_single(x.dtype))
        return over_examples(jnp.sqrt(weight) if mode == "sqrt" else weight, x) * x

    def _weighted(self, arrays: tuple[Array, ...], mode: str = "regular") -> tuple[Array, ...]:
        return tuple(self._times(x, mode) for x in arrays)


class NegativeLogProbLoss(LossFunction):
    """A loss that is a negative log-probability of its targets, and so has a Fisher matrix.

    The Fisher matrix is `F = E[g gᵀ]`, where g is the gradient of the loss in the predictions and
    the targets come from the distribution that the predictions describe. In the natural parameters
    of an exponential family (logits, a mean of known variance) the Hessian does not depend on the
    targets and equals F. So the GGN of such a loss is its Fisher matrix.

    A class of your own needs a constructor, `targets`, `parameter_independants`, `params`,
    `fisher_factor_inner_shape`, `copy_with_different_inputs`, `evaluate_unweighted`, `sample` and
    `multiply_fisher_factor_unweighted`. Its GGN is its Fisher matrix unless it says otherwise.

    Arguments:
        weight: what the loss is multiplied by, a number, or one for each example.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> loss = curvax.NormalMeanNegativeLogProbLoss(jnp.zeros((2, 1)), variance=0.25)
        >>> isinstance(loss, curvax.NegativeLogProbLoss)
        True
        >>> loss.multiply_fisher((jnp.ones((2, 1)),))
        (Array([[4.],
               [4.]], dtype=float32),)
    """

    needs_targets = True

    @property
    def parameter_dependants(self) -> tuple[Array, ...]:
        """The arrays that depend on parameters: those of the distribution."""
        return self.params

    @property
    @abc.abstractmethod
    def params(self) -> tuple[Array, ...]:
        """The arrays that describe the distribution."""

    @abc.abstractmethod
    def sample(self, rng: Array) -> Array:
        """Targets drawn from the distribution, one for each example.

        Arguments:
            rng: a random key.

        Returns:
            An array that `evaluate` takes as targets.
        """

    def grad_of_evaluate_on_sample(self, rng: Array, coefficient_mode: str) -> tuple[Array, ...]:
        """As `grad_of_evaluate`, of targets drawn from the distribution.

        Its mean is zero, and with "sqrt" its covariance is the Fisher matrix, weight included.

        Arguments:
            rng: a random key.
            coefficient_mode: as in `evaluate`.

        Returns:
            A tuple of arrays like the `parameter_dependants`.

        Raises:
            ValueError: if the mode is none of the three.
        """
        return self.grad_of_evaluate(self.sample(rng), coefficient_mode)

    def multiply_fisher(self, vector: Sequence[Array]) -> tuple[Array, ...]:
        """The product of the Fisher matrix and a vector.

        Arguments:
            vector: arrays like the `parameter_dependants`.

        Returns:
            A tuple of arrays like the `parameter_dependants`.
        """
        return self._weighted(self.multiply_fisher_unweighted(vector))

    def multiply_fisher_unweighted(self, vector: Sequence[Array]) -> tuple[Array, ...]:
        """As `multiply_fisher`, without the weight."""
        inner = self.multiply_fisher_factor_transpose_unweighted(vector)
        return self.multiply_fisher_factor_unweighted(inner)

    def multiply_fisher_factor(self, vector: Array) -> tuple[Array, ...]:
        """The product of the factor B of the Fisher matrix and a vector.

        Any B with `B Bᵀ` equal to the Fisher matrix will do; it is the same in all methods.

        Arguments:
            vector: an array of the shape `fisher_factor_inner_shape`.

        Returns:
            A tuple of arrays like the `parameter_dependants`.
        """
        return self._weighted(self.multiply_fisher_factor_unweighted(vector), "sqrt")

    @abc.abstractmethod
    def multiply_fisher_factor_unweighted(self, vector: Array) -> tuple[Array, ...]:
        """As `multiply_fisher_factor`, without the weight."""

    def multiply_fisher_factor_transpose(self, vector: Sequence[Array]) -> Array:
        """The product of the transpose of the factor B of the Fisher matrix and a vector.

        Arguments:
            vector: arrays like the `parameter_dependants`.

        Returns:
            An array of the shape `fisher_factor_inner_shape`.
        """
        return self._times(self.multiply_fisher_factor_transpose_unweighted(vector), "sqrt")

    def multiply_fisher_factor_transpose_unweighted(self, vector: Sequence[Array]) -> Array:
        """As `multiply_fisher_factor_transpose`, without the weight."""
        factor = self.multiply_fisher_factor_unweighted
        return transposed(factor, self.fisher_factor_inner_shape, self._inner_dtype)(vector)

    def multiply_fisher_factor_replicated_one_hot(self, index: Sequence[int]) -> tuple[Array, ...]:
        """The product of the factor B of the Fisher matrix and one unit vector for all examples.

        Arguments:
            index: where each slice along the first axis of an array of the shape
                `fisher_factor_inner_shape` has its one; it is zero elsewhere.

        Returns:
            A tuple of arrays like the `parameter_dependants`: one column of B for each example.

        Raises:
            ValueError: if the index does not have one number for each axis but the first.
        """
        columns = self.multiply_fisher_factor_replicated_one_hot_unweighted(index)
        return self._weighted(columns, "sqrt")

    def multiply_fisher_factor_replicated_one_hot_unweighted(
        self, index: Sequence[int]
    ) -> tuple[Array, ...]:
        """As `multiply_fisher_factor_replicated_one_hot`, without the weight."""
        one_hot = replicated_one_hot(index, self.fisher_factor_inner_shape, self._inner_dtype)
        return self.multiply_fisher_factor_unweighted(one_hot)

    @property
    @abc.abstractmethod
    def fisher_factor_inner_shape(self) -> Shape:
        """The shape of what `multiply_fisher_factor` takes; its first axis is that of examples."""

    # The GGN is the Fisher matrix.

    def multiply_ggn_unweighted(self, vector: Sequence[Array]) -> tuple[Array, ...]:
        """As `multiply_ggn`, without the weight: the GGN is the Fisher matrix."""
        return self.multiply_fisher_unweighted(vector)

    def multiply_ggn_factor_unweighted(self, vector: Array) -> tuple[Array, ...]:
        """As `multiply_ggn_factor`, without the weight: the GGN is the Fisher matrix."""
        return self.multiply_fisher_factor_unweighted(vector)

    def multiply_ggn_factor_transpose_unweighted(self, vector: Sequence[Array]) -> Array:
        """As `multiply_ggn_factor_transpose`, without the weight: the GGN is the Fisher matrix."""
        return self.multiply_fisher_factor_transpose_unweighted(vector)

    def multiply_ggn_factor_replicated_one_hot_unweighted(
        self, index: Sequence[int]
    ) -> tuple[Array, ...]:
        """As `multiply_ggn_factor_replicated_one_hot`, without the weight."""
        return self.multiply_fisher_factor_replicated_one_hot_unweighted(index)

    @property
    def ggn_factor_inner_shape(self) -> Shape:
        """The shape of what `multiply_ggn_factor` takes: that of the Fisher matrix's factor."""
        return self.fisher_factor_inner_shape


@runtime_checkable
class Distribution(Protocol):
    """What a loss needs of a distribution."""

    def sample(self, *, seed: Array) -> Array:
        """One outcome for each example, drawn with this random key."""
        ...

    def log_prob(self, value: Any) -> Array:
        """The logarithm of the probability (or its density) of each example's outcome."""
        ...

    def mean(self) -> Array:
        """The mean outcome."""
        ...

    def entropy(self) -> Array:
        """The mean of `-log_prob`, for each example."""
        ...


class DistributionNegativeLogProbLoss(NegativeLogProbLoss):
    """A negative log-probability loss with a distribution object, `dist`.

    Arguments:
        weight: what the loss is multiplied by, a number, or one for each example.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> loss = curvax.MultiBernoulliNegativeLogProbLoss(jnp.zeros((2, 3)))
        >>> isinstance(loss, curvax.DistributionNegativeLogProbLoss)
        True
        >>> loss.dist.probs[0]
        Array([0.5, 0.5, 0.5], dtype=float32)
    """

    @property
    @abc.abstractmethod
    def dist(self) -> Distribution:
        """The distribution that the predictions describe."""

    def evaluate_unweighted(self, targets: Any) -> Array:
        """The negative log-probability of each example's target."""
        return -self.dist.log_prob(targets)

    def sample(self, rng: Array) -> Array:
        """Targets drawn from the distribution, one for each example."""
        return self.dist.sample(seed=rng)

    @property
    def fisher_factor_inner_shape(self) -> Shape:
        """The shape of what `multiply_fisher_factor` takes: that of the first of `params`."""
        return self.params[0].shape


class WithTargets:
    """To be put before a class of losses: its targets, which may be missing, and its weight."""

    _weight: ArrayLike

    def __init__(self, targets: ArrayLike | None, weight: ArrayLike) -> None:
        super().__init__(weight)  # pyright: ignore[reportCallIssue]
        self._targets = None if targets is None else jnp.asarray(targets)

    @property
    def targets(self) -> Array | None:
        """What is to be predicted, if it is given."""
        return self._targets

    @property
    def parameter_independants(self) -> tuple[Any, ...]:
        """The targets if given, what else there is, and the weight."""
        given = () if self._targets is None else (self._targets,)
        return (*given, *self._further(), self._weight)

    def _further(self) -> tuple[Any, ...]:
        """What else does not depend on parameters."""
        return ()


# The arithmetic of batches that the losses share.
#
# A loss computes in its own dtype, except that half precision is too coarse for logarithms and
# exponentials: these are taken in float32, and what comes out is cast back. Numbers that belong to
# whole examples (a weight, a variance) are scalars, or have the leading axes of what they scale.


def widened(x: ArrayLike) -> Array:
    """Real numbers in the dtype in which to compute with them."""
    array = jnp.asarray(x)
    return array.astype(at_least_single(array.dtype))


def widest(arrays: Iterable[Array]) -> Any:
    """The dtype of the most bits among these arrays."""
    return max((x.dtype for x in arrays), key=lambda dtype: jnp.finfo(dtype).bits)


def over_examples(x: ArrayLike, like: Array) -> Array:
    """`x` with axes of length one at its end, so that it multiplies the examples of `like`."""
    array = jnp.asarray(x).astype(like.dtype)
    return array.reshape(array.shape + (1,) * (like.ndim - array.ndim)) if array.ndim else array


def columns(x: Array) -> Array:
    """A batch of arrays as they are, and a batch of numbers as one of vectors of length one."""
    return x if x.ndim > 1 else x[..., None]


def sum_of_events(x: Array) -> Array:
    """The sum over all axes but the first: one number for each example."""
    return jnp.sum(x, axis=tuple(range(1, x.ndim)))


def transposed(factor: Factor, shape: Shape, dtype: Any) -> Callable[[Sequence[Array]], Array]:
    """The transpose of a linear function of one array of this shape and dtype."""
    transpose = jax.linear_transpose(factor, jax.ShapeDtypeStruct(shape, dtype))

    def apply(vector: Sequence[Array]) -> Array:
        (product,) = transpose(tuple(vector))
        return product

    return apply


def replicated_one_hot(index: Sequence[int], shape: Shape, dtype: Any) -> Array:
    """Zeros, but for a one at `index` of each slice along the first axis."""
    if len(index) != len(shape) - 1:
        raise ValueError(
            f"curvax: the index of a replicated one-hot vector has one number for each axis but "
            f"the first of the factor's inner shape {shape}, got {tuple(index)}."
        )
    return jnp.zeros(shape, dtype).at[(slice(None), *index)].set(1)
