"""`FunctionLoss`: a user-supplied function of one example as a loss; see `register_loss`.

Its GGN is the Hessian of the function in the prediction by autodiff, one (n, n) block per example.
An eigendecomposition `V diag(λ) Vᵀ` gives the factor `B = V diag(sqrt(λ))` and shows whether the
function is convex at the prediction. If it is not, there is no factor. That raises an error: at
once where values are concrete, from a callback inside a compiled program.

The operands of a tag are arrays, so there is one tag for each function. JAX keeps primitives alive
for ever, so a tag must not hold its function: it has a weak reference, and the traced programs that
contain the tag hold the function, as a parameter of the equation.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from curvax import _jax
from curvax._types import Array, Fun
from curvax.losses.loss_function import LossFunction, Shape, WithTargets, widened
from curvax.losses.tag import LossTag


class FunctionLoss(WithTargets, LossFunction):
    """A loss that is given as a function of one example, as `register_loss` registers it.

    Arguments:
        fn: A function from one prediction and, if there are targets, one target to a scalar.
        predictions: Predictions, with examples along the first axis.
        targets: Targets, with examples along the first axis.
        weight: Factor of the loss: a scalar, or one per example with shape `(batch,)`.
    """

    def __init__(
        self,
        fn: Fun,
        predictions: Array,
        targets: ArrayLike | None = None,
        weight: ArrayLike = 1.0,
    ) -> None:
        super().__init__(targets, weight)
        self._fn, self._predictions = fn, predictions

    @property
    def parameter_dependants(self) -> tuple[Array]:
        """The predictions."""
        return (self._predictions,)

    def copy_with_different_inputs(self, parameter_dependants: Sequence[Array]) -> "FunctionLoss":
        """Return the same loss of other predictions.

        Arguments:
            parameter_dependants: A sequence of one array, the predictions.

        Returns:
            A loss with the same function, targets and weight.

        Raises:
            ValueError: If there is not exactly one array.
        """
        (predictions,) = self.checked_inputs(parameter_dependants)
        return type(self)(self._fn, predictions, self._targets, self._weight)

    def evaluate_unweighted(self, targets: ArrayLike | None) -> Array:
        """Compute the function of each example."""
        others = () if targets is None else (widened(targets),)
        values = jax.vmap(self._fn)(widened(self._predictions), *others)
        return jnp.asarray(values).astype(self._predictions.dtype)

    def multiply_ggn_unweighted(self, vector: Sequence[Array]) -> tuple[Array]:
        """Multiply each example's vector by its Hessian."""
        # Not as `B Bᵀ`: eigenvectors have no derivatives where eigenvalues are equal.
        hessians, (x,) = self._hessians(), vector
        eigenvalues = jnp.linalg.eigvalsh(jax.lax.stop_gradient(hessians))
        hessians = jnp.where(_refused(eigenvalues, self._fn), jnp.nan, hessians)
        return (self._product("bij,bj->bi", hessians, self._flat(x)),)

    def multiply_ggn_factor_unweighted(self, vector: Array) -> tuple[Array]:
        """Multiply each example's vector by `V diag(sqrt(λ))`."""
        return (self._product("bij,bj->bi", self._factor(), self._flat(vector)),)

    def multiply_ggn_factor_transpose_unweighted(self, vector: Sequence[Array]) -> Array:
        """Multiply each example's vector by `diag(sqrt(λ)) Vᵀ`."""
        (x,) = vector
        return self._product("bij,bi->bj", self._factor(), self._flat(x))

    @property
    def ggn_factor_inner_shape(self) -> Shape:
        """The shape of the argument of `multiply_ggn_factor`: that of the predictions."""
        return self._predictions.shape

    def _flat(self, x: Array) -> Array:
        return widened(x).reshape(x.shape[0], math.prod(x.shape[1:]))

    def _product(self, subscripts: str, matrices: Array, vectors: Array) -> Array:
        product = jnp.einsum(subscripts, matrices, vectors)
        return product.reshape(self._predictions.shape).astype(self._predictions.dtype)

    def _factor(self) -> Array:
        """Return `V diag(sqrt(λ))` of each example; eigenvalues below zero by rounding are zero."""
        eigenvalues, eigenvectors = jnp.linalg.eigh(self._hessians())
        roots = jnp.sqrt(jnp.maximum(eigenvalues, 0))
        roots = jnp.where(_refused(eigenvalues, self._fn), jnp.nan, roots)
        return eigenvectors * roots[:, None, :]

    def _hessians(self) -> Array:
        event = self._predictions.shape[1:]
        others = () if self._targets is None else (widened(self._targets),)
        of_flat = lambda x, *others: self._fn(x.reshape(event), *others)
        return jax.vmap(jax.hessian(of_flat))(self._flat(self._predictions), *others)


class FunctionLossTag(LossTag):
    """The tag of all losses with one function, which it does not keep alive."""

    def __init__(self, reference: Callable[[], Fun | None]) -> None:
        super().__init__(FunctionLoss, ["predictions"], ["targets", "weight"])
        self._reference = reference

    def loss(self, *args: ArrayLike, args_names: Sequence[str]) -> FunctionLoss:
        """Return the loss of the operands of a bound tag."""
        arrays: dict[str, Any] = dict(zip(args_names, args, strict=True))
        return FunctionLoss(self._function(), **arrays)

    def bind(self, *args: _jax.Value, args_names: Sequence[str], **params: Any) -> list[Array]:
        """Register a loss. The equation, and so the traced program, holds the function."""
        params = {"function": _jax.Same(self._function()), **params}
        return super().bind(*args, args_names=args_names, **params)

    def _function(self) -> Fun:
        fn = self._reference()
        if fn is None:
            raise ReferenceError(
                "curvax: the function of this loss is gone. Keep the traced program that contains "
                "the loss, or the function itself, for as long as its tag is used."
            )
        return fn


_tags: dict[int, FunctionLossTag] = {}  # By the id of a function, for as long as it lives.


def tag_of(fn: Fun) -> FunctionLossTag:
    """Return the tag of a function, always the same one."""
    tag = _tags.get(id(fn))
    if tag is None:
        reference = _reference(fn)
        tag = _tags[id(fn)] = FunctionLossTag(reference)
        if isinstance(reference, weakref.ref):
            weakref.finalize(fn, _tags.pop, id(fn), None)
    return tag


def _reference(fn: Fun) -> Callable[[], Fun | None]:
    """Return a weak reference, or a strong one if the object does not support weak references."""
    try:
        return weakref.ref(fn)
    except TypeError:
        return lambda: fn


def _refused(eigenvalues: Array, fn: Fun) -> Array:
    """Raise an error if an eigenvalue of a Hessian is negative by more than rounding.

    Returns whether that is so. Callers set their results to NaN then: some devices return results
    before the callback raises its error, and they must not look valid.
    """
    if not eigenvalues.size:
        return jnp.array(False)
    smallest, largest = jnp.min(eigenvalues, axis=-1), jnp.max(jnp.abs(eigenvalues), axis=-1)
    # Second derivatives are differences of terms of order one (p − p² for a softmax), or of the
    # order of other examples, so that their rounding errors do not shrink with them.
    precision = jnp.finfo(eigenvalues.dtype)
    noise = 16 * precision.eps * jnp.maximum(1, jnp.max(largest))
    margins = smallest + (1e-5 if precision.bits == 32 else 1e-10) * largest + noise
    worst = jnp.argmin(margins)
    values = margins[worst] < 0, smallest[worst], largest[worst]
    name = getattr(fn, "__name__", repr(fn))

    def refuse(indefinite: ArrayLike, smallest: ArrayLike, largest: ArrayLike) -> None:
        if np.any(indefinite):
            raise ValueError(
                f"curvax.register_loss: the Hessian of {name!r} in the prediction has a negative "
                f"eigenvalue, {np.min(smallest):.3g}, where the largest absolute value is "
                f"{np.max(largest):.3g}. A GGN must be positive semi-definite: register a function "
                f"that is convex in the prediction, or write a subclass of curvax.LossFunction "
                f"with a curvature of your choice."
            )

    if _jax.is_tracer(values[0]):
        jax.lax.cond(values[0], lambda: jax.debug.callback(refuse, *values), lambda: None)
    else:
        refuse(*values)
    return values[0]
