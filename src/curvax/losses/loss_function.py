"""`LossFunction` and its bases: a loss as curvature sees it.

Training minimises the batch mean of `weight * loss(prediction, target)`. The curvature of the loss
in the predictions is a PSD matrix G with one block per example, and a factor B of it with
`G = B Bᵀ`: the Gauss-Newton matrix of a model with Jacobian J is `Jᵀ G J` (Schraudolph 2002, "Fast
curvature matrix-vector products for second-order gradient descent"). If the loss is a negative
log-probability, G is its Fisher matrix (Martens 2020, "New insights and perspectives on the natural
gradient method"). Neither G nor B is formed: a loss multiplies vectors by them.

A subclass evaluates the loss and multiplies by B. The gradient, the transpose of B, G itself and
single columns of B follow by autodiff; a subclass overrides them where it knows something cheaper.
Subclasses implement the methods whose names end in `_unweighted`. Those without the suffix call
them and apply the weight.
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
    """The loss of a batch of predictions, with its gradient and curvature in these predictions.

    To write a loss, subclass it with a constructor whose arrays can be passed by name, the
    properties `targets`, `parameter_dependants`, `parameter_independants` and
    `ggn_factor_inner_shape`, and the methods `copy_with_different_inputs`, `evaluate_unweighted`
    and `multiply_ggn_factor_unweighted`. A loss is immutable: attributes can be set once.

    Arguments:
        weight: Factor of the loss: a scalar, or one per example with shape `(batch,)`.

    Attributes:
        needs_targets: Whether the loss cannot be evaluated without targets.
        least_axes: Minimum number of axes of a prediction, the batch axis included.

    Examples:
        The loss `cosh(prediction)`. Its second derivative is also `cosh(prediction)`.

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
    least_axes: int = 1

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
            # Python calls this only for attributes that the loss does not have.
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
        """The factor of the loss: a scalar, or one per example."""
        return self._weight

    @property
    @abc.abstractmethod
    def targets(self) -> Array | None:
        """The targets, or None."""

    @property
    @abc.abstractmethod
    def parameter_dependants(self) -> tuple[Array, ...]:
        """The arrays that depend on the model's parameters: the predictions."""

    @property
    def num_parameter_dependants(self) -> int:
        """The number of arrays in `parameter_dependants`."""
        return len(self.parameter_dependants)

    @property
    @abc.abstractmethod
    def parameter_independants(self) -> tuple[ArrayLike, ...]:
        """The arrays that do not depend on the model's parameters, optional ones only if given."""

    @property
    def num_parameter_independants(self) -> int:
        """The number of arrays in `parameter_independants`."""
        return len(self.parameter_independants)

    @abc.abstractmethod
    def copy_with_different_inputs(self, parameter_dependants: Sequence[Array]) -> "LossFunction":
        """Return the same loss at other predictions.

        Arguments:
            parameter_dependants: Arrays that replace `parameter_dependants`, equally many.

        Returns:
            A loss with the same targets, weight and other arguments.

        Raises:
            ValueError: If there are more or fewer arrays.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> loss = curvax.NormalMeanNegativeLogProbLoss(jnp.zeros((1, 2)), weight=3.0)
            >>> other = loss.copy_with_different_inputs((jnp.ones((1, 2)),))
            >>> other.parameter_dependants, other.weight
            ((Array([[1., 1.]], dtype=float32),), 3.0)
        """

    def checked_inputs(self, parameter_dependants: Sequence[Array]) -> tuple[Array, ...]:
        """Return `parameter_dependants` as a tuple; raise if there are too many or too few.

        For use in `copy_with_different_inputs`. Only their number is checked, not their shapes.

        Arguments:
            parameter_dependants: Arrays that replace those of the loss.

        Returns:
            The arrays, unchanged.

        Raises:
            ValueError: If their number differs from `num_parameter_dependants`.
        """
        given, expected = len(parameter_dependants), self.num_parameter_dependants
        if given != expected:
            raise ValueError(
                f"curvax: a copy of {type(self).__name__} needs {expected} "
                f"{'array' if expected == 1 else 'arrays'} like its parameter_dependants, "
                f"got {given}."
            )
        return tuple(parameter_dependants)

    @abc.abstractmethod
    def evaluate_unweighted(self, targets: ArrayLike | None) -> Array:
        """Compute the loss of each example, without the weight.

        Arguments:
            targets: What the predictions are compared with. Unlike in `evaluate`, None does not
                stand for the targets of the loss: it means that there are none.

        Returns:
            An array with one number per example; for a categorical loss, `logits.shape[:-1]`.
        """

    def evaluate(
        self, targets: ArrayLike | None = None, coefficient_mode: str = "regular"
    ) -> Array:
        """Compute the loss of each example, neither summed nor averaged.

        Arguments:
            targets: Targets to use in place of those of the loss; None for those of the loss.
            coefficient_mode: "regular" for `weight * loss`, "sqrt" for `sqrt(weight) * loss`,
                "off" for the loss without its weight.

        Returns:
            An array with one number per example; for a categorical loss, `logits.shape[:-1]`.

        Raises:
            ValueError: If the loss needs targets and there are none, or `coefficient_mode` is none
                of the three.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> logits, targets = jnp.zeros((2, 2)), jnp.array([0, 1])
            >>> loss = curvax.CategoricalLogitsNegativeLogProbLoss(logits, targets, weight=2.0)
            >>> loss.evaluate().round(2)  # 2 log(2)
            Array([1.39, 1.39], dtype=float32)
            >>> loss.evaluate(coefficient_mode="off").round(2)
            Array([0.69, 0.69], dtype=float32)
        """
        value = self.evaluate_unweighted(self._checked_targets(targets, coefficient_mode))
        return value if coefficient_mode == "off" else self._times(value, coefficient_mode)

    def grad_of_evaluate(
        self, targets: ArrayLike | None, coefficient_mode: str
    ) -> tuple[Array, ...]:
        """Compute the gradient of `sum(evaluate(…))` in the `parameter_dependants`.

        Arguments:
            targets: Targets to use in place of those of the loss; None for those of the loss.
            coefficient_mode: "regular" for the gradient of `weight * loss`, "sqrt" for that of
                `sqrt(weight) * loss`, "off" for that of the loss without its weight.

        Returns:
            A tuple of arrays like the `parameter_dependants`.

        Raises:
            ValueError: If the loss needs targets and there are none, or `coefficient_mode` is none
                of the three.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> loss = curvax.MultiBernoulliNegativeLogProbLoss(jnp.zeros((1, 2)), jnp.ones((1, 2)))
            >>> loss.grad_of_evaluate(None, "regular")  # sigmoid(logits) - targets
            (Array([[-0.5, -0.5]], dtype=float32),)
            >>> loss.grad_of_evaluate(jnp.zeros((1, 2)), "regular")
            (Array([[0.5, 0.5]], dtype=float32),)
        """
        targets = self._checked_targets(targets, coefficient_mode)

        def evaluate(*dependants: Array) -> Array:
            return self.copy_with_different_inputs(dependants).evaluate(targets, coefficient_mode)

        value, pull_back = jax.vjp(evaluate, *self.parameter_dependants)
        return pull_back(jnp.ones_like(value))

    def multiply_ggn(self, vector: Sequence[Array]) -> tuple[Array, ...]:
        """Multiply a vector by the GGN.

        The GGN (generalized Gauss-Newton matrix) of a loss is a PSD matrix in its predictions, with
        a block per example: the Hessian of the loss if that is PSD for all targets, otherwise the
        matrix that the class of the loss names. The weight is included.

        Arguments:
            vector: Arrays like the predictions (`parameter_dependants`).

        Returns:
            A tuple of arrays like the `parameter_dependants`.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> logits = jnp.zeros((1, 2))
            >>> loss = curvax.CategoricalLogitsNegativeLogProbLoss(logits, weight=4.0)
            >>> loss.multiply_ggn((jnp.array([[1.0, 0.0]]),))  # 4 (diag(p) - p pᵀ) e₀
            (Array([[ 1., -1.]], dtype=float32),)
        """
        return self._weighted(self.multiply_ggn_unweighted(vector))

    def multiply_ggn_unweighted(self, vector: Sequence[Array]) -> tuple[Array, ...]:
        """Multiply a vector by the GGN without the weight: by `multiply_ggn` at weight one.

        Arguments:
            vector: Arrays like the predictions (`parameter_dependants`).

        Returns:
            A tuple of arrays like the `parameter_dependants`.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> mean = jnp.zeros((1, 2))
            >>> loss = curvax.NormalMeanNegativeLogProbLoss(mean, variance=0.5, weight=3.0)
            >>> loss.multiply_ggn_unweighted((jnp.ones((1, 2)),))
            (Array([[2., 2.]], dtype=float32),)
        """
        inner = self.multiply_ggn_factor_transpose_unweighted(vector)
        return self.multiply_ggn_factor_unweighted(inner)

    def multiply_ggn_factor(self, vector: Array) -> tuple[Array, ...]:
        """Multiply a vector by the factor B of the GGN.

        B is any matrix with `B Bᵀ` equal to the GGN, the same one in all methods of a loss.

        Arguments:
            vector: An array of shape `ggn_factor_inner_shape`.

        Returns:
            A tuple of arrays like the `parameter_dependants`.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> mean = jnp.zeros((1, 2))
            >>> loss = curvax.NormalMeanNegativeLogProbLoss(mean, variance=1.0, weight=4.0)
            >>> loss.multiply_ggn_factor(jnp.ones((1, 2)))  # The GGN is 4 I, so B is 2 I.
            (Array([[2., 2.]], dtype=float32),)
        """
        return self._weighted(self.multiply_ggn_factor_unweighted(vector), "sqrt")

    @abc.abstractmethod
    def multiply_ggn_factor_unweighted(self, vector: Array) -> tuple[Array, ...]:
        """Multiply a vector by B without the weight: by `multiply_ggn_factor` at weight one.

        Arguments:
            vector: An array of shape `ggn_factor_inner_shape`.

        Returns:
            A tuple of arrays like the `parameter_dependants`.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> mean = jnp.zeros((1, 2))
            >>> loss = curvax.NormalMeanNegativeLogProbLoss(mean, variance=0.25, weight=4.0)
            >>> loss.multiply_ggn_factor_unweighted(jnp.ones((1, 2)))
            (Array([[2., 2.]], dtype=float32),)
        """

    def multiply_ggn_factor_transpose(self, vector: Sequence[Array]) -> Array:
        """Multiply a vector by the transpose of the factor B of the GGN.

        Arguments:
            vector: Arrays like the predictions (`parameter_dependants`).

        Returns:
            An array of shape `ggn_factor_inner_shape`.

        Examples:
            The GGN is `B Bᵀ`.

            >>> import jax.numpy as jnp
            >>> import curvax
            >>> loss = curvax.CategoricalLogitsNegativeLogProbLoss(jnp.array([[0.0, 1.0, 3.0]]))
            >>> vector = (jnp.array([[1.0, 2.0, 3.0]]),)
            >>> inner = loss.multiply_ggn_factor_transpose(vector)
            >>> (product,), (expected,) = loss.multiply_ggn_factor(inner), loss.multiply_ggn(vector)
            >>> bool(jnp.allclose(product, expected, atol=1e-6))
            True
        """
        return self._times(self.multiply_ggn_factor_transpose_unweighted(vector), "sqrt")

    def multiply_ggn_factor_transpose_unweighted(self, vector: Sequence[Array]) -> Array:
        """Multiply by `Bᵀ` without the weight: by `multiply_ggn_factor_transpose` at weight one.

        Arguments:
            vector: Arrays like the predictions (`parameter_dependants`).

        Returns:
            An array of shape `ggn_factor_inner_shape`.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> mean = jnp.zeros((1, 2))
            >>> loss = curvax.NormalMeanNegativeLogProbLoss(mean, variance=0.25, weight=4.0)
            >>> loss.multiply_ggn_factor_transpose_unweighted((jnp.ones((1, 2)),))
            Array([[2., 2.]], dtype=float32)
        """
        factor = self.multiply_ggn_factor_unweighted
        return transposed(factor, self.ggn_factor_inner_shape, self._inner_dtype)(vector)

    def multiply_ggn_factor_replicated_one_hot(self, index: Sequence[int]) -> tuple[Array, ...]:
        """Multiply the factor B of the GGN by the same unit vector for each example.

        Arguments:
            index: Where the unit vector has its one: an index of an array of shape
                `ggn_factor_inner_shape[1:]`.

        Returns:
            A tuple of arrays like the `parameter_dependants`: one column of B per example.

        Raises:
            ValueError: If the index does not have one integer for each axis but the first.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> mean = jnp.zeros((2, 2))
            >>> loss = curvax.NormalMeanNegativeLogProbLoss(mean, variance=0.25)
            >>> loss.multiply_ggn_factor_replicated_one_hot((1,))
            (Array([[0., 2.],
                   [0., 2.]], dtype=float32),)
        """
        return self._weighted(self.multiply_ggn_factor_replicated_one_hot_unweighted(index), "sqrt")

    def multiply_ggn_factor_replicated_one_hot_unweighted(
        self, index: Sequence[int]
    ) -> tuple[Array, ...]:
        """Return a column of B per example, without the weight.

        Equal to `multiply_ggn_factor_replicated_one_hot` at weight one.

        Arguments:
            index: Where the unit vector has its one: an index of an array of shape
                `ggn_factor_inner_shape[1:]`.

        Returns:
            A tuple of arrays like the `parameter_dependants`: one column of B per example.

        Raises:
            ValueError: If the index does not have one integer for each axis but the first.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> mean = jnp.zeros((1, 2))
            >>> loss = curvax.NormalMeanNegativeLogProbLoss(mean, variance=0.25, weight=4.0)
            >>> loss.multiply_ggn_factor_replicated_one_hot_unweighted((0,))
            (Array([[2., 0.]], dtype=float32),)
        """
        one_hot = replicated_one_hot(index, self.ggn_factor_inner_shape, self._inner_dtype)
        return self.multiply_ggn_factor_unweighted(one_hot)

    @property
    @abc.abstractmethod
    def ggn_factor_inner_shape(self) -> Shape:
        """The shape of the argument of `multiply_ggn_factor`; its first axis is the batch."""

    @property
    def _inner_dtype(self) -> jnp.dtype:
        return widest(self.parameter_dependants)

    def _checked_targets(
        self, targets: ArrayLike | None, coefficient_mode: str
    ) -> ArrayLike | None:
        """Return the targets to evaluate the loss on; check them and the coefficient mode."""
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
        """Multiply each example of `x` by its weight, or by the square root of it."""
        weight = jnp.asarray(self.weight).astype(at_least_single(x.dtype))
        return over_examples(jnp.sqrt(weight) if mode == "sqrt" else weight, x) * x

    def _weighted(self, arrays: tuple[Array, ...], mode: str = "regular") -> tuple[Array, ...]:
        return tuple(self._times(x, mode) for x in arrays)


class NegativeLogProbLoss(LossFunction):
    """A loss that is the negative log-probability of its targets, and so has a Fisher matrix.

    The Fisher matrix is `F = E[g gᵀ]`, where g is the gradient of the loss in the predictions and
    targets are sampled from the predicted distribution. In the natural parameters of an exponential
    family (logits, a mean of known variance) the Hessian does not depend on the targets and equals
    F. So the GGN of such a loss is its Fisher matrix.

    To write such a loss, subclass it with a constructor, `targets`, `parameter_independants`,
    `params`, `fisher_factor_inner_shape`, `copy_with_different_inputs`, `evaluate_unweighted`,
    `sample` and `multiply_fisher_factor_unweighted`. Override the `multiply_ggn…_unweighted`
    methods if its GGN is not its Fisher matrix.

    Arguments:
        weight: Factor of the loss: a scalar, or one per example with shape `(batch,)`.

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
        """The arrays that depend on the model's parameters: those of the distribution."""
        return self.params

    @property
    @abc.abstractmethod
    def params(self) -> tuple[Array, ...]:
        """The arrays that parameterise the distribution."""

    @abc.abstractmethod
    def sample(self, rng: Array) -> Array:
        """Sample targets from the predicted distribution.

        Arguments:
            rng: A random key.

        Returns:
            Targets, one per example, in the form that `evaluate` takes.

        Examples:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> logits = jnp.array([[0.0, -100.0], [-100.0, 0.0]])
            >>> loss = curvax.CategoricalLogitsNegativeLogProbLoss(logits)
            >>> loss.sample(jax.random.key(0))
            Array([0, 1], dtype=int32)
        """

    def grad_of_evaluate_on_sample(self, rng: Array, coefficient_mode: str) -> tuple[Array, ...]:
        """Compute `grad_of_evaluate` on targets that are sampled from the predicted distribution.

        Over samples, the gradient has mean zero. With `coefficient_mode="sqrt"` its covariance is
        the Fisher matrix, the weight included.

        Arguments:
            rng: A random key.
            coefficient_mode: "regular" for the gradient of `weight * loss`, "sqrt" for that of
                `sqrt(weight) * loss`, "off" for that of the loss without its weight.

        Returns:
            A tuple of arrays like the `parameter_dependants`.

        Raises:
            ValueError: If `coefficient_mode` is none of the three.

        Examples:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> loss = curvax.MultiBernoulliNegativeLogProbLoss(jnp.zeros((2, 1)), weight=4.0)
            >>> (gradient,) = loss.grad_of_evaluate_on_sample(jax.random.key(0), "sqrt")
            >>> gradient**2  # The Fisher matrix: weight * p * (1 - p), with p = 1/2.
            Array([[1.],
                   [1.]], dtype=float32)
        """
        return self.grad_of_evaluate(self.sample(rng), coefficient_mode)

    def multiply_fisher(self, vector: Sequence[Array]) -> tuple[Array, ...]:
        """Multiply a vector by the Fisher matrix.

        Arguments:
            vector: Arrays like the predictions (`parameter_dependants`).

        Returns:
            A tuple of arrays like the `parameter_dependants`.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> logits = jnp.zeros((1, 2))
            >>> loss = curvax.MultiBernoulliNegativeLogProbLoss(logits, weight=8.0)
            >>> loss.multiply_fisher((jnp.array([[1.0, 2.0]]),))  # weight * p * (1 - p)
            (Array([[2., 4.]], dtype=float32),)
        """
        return self._weighted(self.multiply_fisher_unweighted(vector))

    def multiply_fisher_unweighted(self, vector: Sequence[Array]) -> tuple[Array, ...]:
        """Multiply a vector by the Fisher matrix without the weight.

        Equal to `multiply_fisher` at weight one.

        Arguments:
            vector: Arrays like the predictions (`parameter_dependants`).

        Returns:
            A tuple of arrays like the `parameter_dependants`.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> logits = jnp.zeros((1, 2))
            >>> loss = curvax.MultiBernoulliNegativeLogProbLoss(logits, weight=8.0)
            >>> loss.multiply_fisher_unweighted((jnp.array([[1.0, 2.0]]),))
            (Array([[0.25, 0.5 ]], dtype=float32),)
        """
        inner = self.multiply_fisher_factor_transpose_unweighted(vector)
        return self.multiply_fisher_factor_unweighted(inner)

    def multiply_fisher_factor(self, vector: Array) -> tuple[Array, ...]:
        """Multiply a vector by the factor B of the Fisher matrix.

        B is any matrix with `B Bᵀ` equal to the Fisher matrix, the same one in all methods of a
        loss.

        Arguments:
            vector: An array of shape `fisher_factor_inner_shape`.

        Returns:
            A tuple of arrays like the `parameter_dependants`.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> mean = jnp.zeros((1, 2))
            >>> loss = curvax.NormalMeanNegativeLogProbLoss(mean, variance=0.25, weight=4.0)
            >>> loss.multiply_fisher_factor(jnp.ones((1, 2)))  # F = weight / variance = 16
            (Array([[4., 4.]], dtype=float32),)
        """
        return self._weighted(self.multiply_fisher_factor_unweighted(vector), "sqrt")

    @abc.abstractmethod
    def multiply_fisher_factor_unweighted(self, vector: Array) -> tuple[Array, ...]:
        """Multiply a vector by B without the weight: by `multiply_fisher_factor` at weight one.

        Arguments:
            vector: An array of shape `fisher_factor_inner_shape`.

        Returns:
            A tuple of arrays like the `parameter_dependants`.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> mean = jnp.zeros((1, 2))
            >>> loss = curvax.NormalMeanNegativeLogProbLoss(mean, variance=0.25, weight=4.0)
            >>> loss.multiply_fisher_factor_unweighted(jnp.ones((1, 2)))
            (Array([[2., 2.]], dtype=float32),)
        """

    def multiply_fisher_factor_transpose(self, vector: Sequence[Array]) -> Array:
        """Multiply a vector by the transpose of the factor B of the Fisher matrix.

        Arguments:
            vector: Arrays like the predictions (`parameter_dependants`).

        Returns:
            An array of shape `fisher_factor_inner_shape`.

        Examples:
            The factor need not be square.

            >>> import jax.numpy as jnp
            >>> import curvax
            >>> mean, variance = jnp.zeros((1, 3)), jnp.ones((1, 3))
            >>> loss = curvax.NormalMeanVarianceNegativeLogProbLoss(mean, variance)
            >>> loss.multiply_fisher_factor_transpose((mean, variance)).shape
            (1, 6)
        """
        return self._times(self.multiply_fisher_factor_transpose_unweighted(vector), "sqrt")

    def multiply_fisher_factor_transpose_unweighted(self, vector: Sequence[Array]) -> Array:
        """Multiply by `Bᵀ` without the weight: by `multiply_fisher_factor_transpose` at weight one.

        Arguments:
            vector: Arrays like the predictions (`parameter_dependants`).

        Returns:
            An array of shape `fisher_factor_inner_shape`.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> mean = jnp.zeros((1, 2))
            >>> loss = curvax.NormalMeanNegativeLogProbLoss(mean, variance=0.25, weight=4.0)
            >>> loss.multiply_fisher_factor_transpose_unweighted((jnp.ones((1, 2)),))
            Array([[2., 2.]], dtype=float32)
        """
        factor = self.multiply_fisher_factor_unweighted
        return transposed(factor, self.fisher_factor_inner_shape, self._inner_dtype)(vector)

    def multiply_fisher_factor_replicated_one_hot(self, index: Sequence[int]) -> tuple[Array, ...]:
        """Multiply the factor B of the Fisher matrix by the same unit vector for each example.

        Arguments:
            index: Where the unit vector has its one: an index of an array of shape
                `fisher_factor_inner_shape[1:]`.

        Returns:
            A tuple of arrays like the `parameter_dependants`: one column of B per example.

        Raises:
            ValueError: If the index does not have one integer for each axis but the first.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> mean = jnp.zeros((2, 2))
            >>> loss = curvax.NormalMeanNegativeLogProbLoss(mean, variance=0.25)
            >>> loss.multiply_fisher_factor_replicated_one_hot((1,))
            (Array([[0., 2.],
                   [0., 2.]], dtype=float32),)
        """
        columns = self.multiply_fisher_factor_replicated_one_hot_unweighted(index)
        return self._weighted(columns, "sqrt")

    def multiply_fisher_factor_replicated_one_hot_unweighted(
        self, index: Sequence[int]
    ) -> tuple[Array, ...]:
        """Return a column of B per example, without the weight.

        Equal to `multiply_fisher_factor_replicated_one_hot` at weight one.

        Arguments:
            index: Where the unit vector has its one: an index of an array of shape
                `fisher_factor_inner_shape[1:]`.

        Returns:
            A tuple of arrays like the `parameter_dependants`: one column of B per example.

        Raises:
            ValueError: If the index does not have one integer for each axis but the first.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> mean = jnp.zeros((1, 2))
            >>> loss = curvax.NormalMeanNegativeLogProbLoss(mean, variance=0.25, weight=4.0)
            >>> loss.multiply_fisher_factor_replicated_one_hot_unweighted((0,))
            (Array([[2., 0.]], dtype=float32),)
        """
        one_hot = replicated_one_hot(index, self.fisher_factor_inner_shape, self._inner_dtype)
        return self.multiply_fisher_factor_unweighted(one_hot)

    @property
    @abc.abstractmethod
    def fisher_factor_inner_shape(self) -> Shape:
        """The shape of the argument of `multiply_fisher_factor`; its first axis is the batch."""

    # The GGN is the Fisher matrix.

    def multiply_ggn_unweighted(self, vector: Sequence[Array]) -> tuple[Array, ...]:
        """Return `multiply_fisher_unweighted`: the GGN is the Fisher matrix."""
        return self.multiply_fisher_unweighted(vector)

    def multiply_ggn_factor_unweighted(self, vector: Array) -> tuple[Array, ...]:
        """Return `multiply_fisher_factor_unweighted`: the GGN is the Fisher matrix."""
        return self.multiply_fisher_factor_unweighted(vector)

    def multiply_ggn_factor_transpose_unweighted(self, vector: Sequence[Array]) -> Array:
        """Return `multiply_fisher_factor_transpose_unweighted`: the GGN is the Fisher matrix."""
        return self.multiply_fisher_factor_transpose_unweighted(vector)

    def multiply_ggn_factor_replicated_one_hot_unweighted(
        self, index: Sequence[int]
    ) -> tuple[Array, ...]:
        """Return `multiply_fisher_factor_replicated_one_hot_unweighted`: the GGN is the Fisher."""
        return self.multiply_fisher_factor_replicated_one_hot_unweighted(index)

    @property
    def ggn_factor_inner_shape(self) -> Shape:
        """The shape of the argument of `multiply_ggn_factor`: `fisher_factor_inner_shape`."""
        return self.fisher_factor_inner_shape


@runtime_checkable
class Distribution(Protocol):
    """A batch of distributions, as far as a loss needs it."""

    def sample(self, *, seed: Array) -> Array:
        """Sample one outcome per example with a random key."""
        ...

    def log_prob(self, value: ArrayLike) -> Array:
        """Return the log-probability, or log-density, of each example's outcome."""
        ...

    def mean(self) -> Array:
        """Return the mean outcome."""
        ...

    def entropy(self) -> Array:
        """Return the mean of `-log_prob` for each example."""
        ...


class DistributionNegativeLogProbLoss(NegativeLogProbLoss):
    """A `NegativeLogProbLoss` that has its predicted distribution as an object, `dist`.

    Arguments:
        weight: Factor of the loss: a scalar, or one per example with shape `(batch,)`.

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
        """The predicted distribution."""

    def evaluate_unweighted(self, targets: ArrayLike | None) -> Array:
        """Compute the negative log-probability of each example's target, without the weight."""
        return -self.dist.log_prob(given_targets(self, targets))

    def sample(self, rng: Array) -> Array:
        return self.dist.sample(seed=rng)

    @property
    def fisher_factor_inner_shape(self) -> Shape:
        """The shape of the argument of `multiply_fisher_factor`: that of the first of `params`."""
        return self.params[0].shape


def given_targets(loss: LossFunction, targets: ArrayLike | None) -> ArrayLike:
    """Return targets, or raise if there are none."""
    if targets is None:
        raise ValueError(
            f"curvax: {type(loss).__name__} cannot be evaluated without targets. Pass them."
        )
    return targets


class WithTargets:
    """A mixin for losses with a weight and optional targets; it precedes the base class."""

    _weight: ArrayLike

    def __init__(self, targets: ArrayLike | None, weight: ArrayLike) -> None:
        super().__init__(weight)  # pyright: ignore[reportCallIssue]
        self._targets = None if targets is None else jnp.asarray(targets)

    @property
    def targets(self) -> Array | None:
        """The targets, or None."""
        return self._targets

    @property
    def parameter_independants(self) -> tuple[ArrayLike, ...]:
        """The targets if given, further arrays of the class, and the weight."""
        given = () if self._targets is None else (self._targets,)
        return (*given, *self._further_independants(), self._weight)

    def _further_independants(self) -> tuple[ArrayLike, ...]:
        """Return the `parameter_independants` besides targets and weight."""
        return ()


# Arithmetic of batches.
#
# Half precision is too coarse for logarithms and exponentials: a loss takes them in float32 and
# casts the result back to the dtype of its predictions. A weight or a variance is a scalar, or has
# the leading axes of what it scales.


def widened(x: ArrayLike) -> Array:
    """Return real numbers in the dtype to compute in: at least float32."""
    array = jnp.asarray(x)
    return array.astype(at_least_single(array.dtype))


def widest(arrays: Iterable[Array]) -> jnp.dtype:
    """Return the dtype with the most bits among these arrays."""
    return max((x.dtype for x in arrays), key=lambda dtype: jnp.finfo(dtype).bits)


def over_examples(x: ArrayLike, like: Array) -> Array:
    """Append axes of length one to `x`, so that it broadcasts over the examples of `like`."""
    array = jnp.asarray(x).astype(like.dtype)
    return array.reshape(array.shape + (1,) * (like.ndim - array.ndim)) if array.ndim else array


def where_kept(mask: Array | None, x: Array) -> Array:
    """Set `x` to zero where a mask of its leading axes is zero; None masks nothing."""
    if mask is None:
        return x
    is_kept = mask.astype(bool).reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
    return jnp.where(is_kept, x, jnp.zeros((), x.dtype))


def columns(x: Array) -> Array:
    """Return a batch of arrays as it is, and a batch of scalars as one of vectors of length one."""
    return x if x.ndim > 1 else x[..., None]


def sum_of_events(x: Array) -> Array:
    """Sum over all axes but the first."""
    return jnp.sum(x, axis=tuple(range(1, x.ndim)))


def transposed(
    factor: Factor, shape: Shape, dtype: jnp.dtype
) -> Callable[[Sequence[Array]], Array]:
    """Return the transpose of a linear function of one array with this shape and dtype."""
    transpose = jax.linear_transpose(factor, jax.ShapeDtypeStruct(shape, dtype))

    def apply(vector: Sequence[Array]) -> Array:
        (product,) = transpose(tuple(vector))
        return product

    return apply


def replicated_one_hot(index: Sequence[int], shape: Shape, dtype: jnp.dtype) -> Array:
    """Return zeros with a one at `index` of each slice along the first axis."""
    if len(index) != len(shape) - 1:
        raise ValueError(
            f"curvax: the index of a replicated one-hot vector has one integer for each axis but "
            f"the first of the factor's inner shape {shape}, got {tuple(index)}."
        )
    return jnp.zeros(shape, dtype).at[(slice(None), *index)].set(1)
