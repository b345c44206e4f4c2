"""Derivatives of what the losses of a function depend on, by its parameters."""

from collections.abc import Callable, Sequence

from curvax._types import Array, Fun, PyTree
from curvax.tracing._loss_derivatives import (
    LossDerivatives,
    Losses,
    LossTangents,
    PullBack,
    like_dependants,
)

__all__ = [
    "LossTangents",
    "Losses",
    "like_dependants",
    "loss_tags_hvp",
    "loss_tags_jvp",
    "loss_tags_vjp",
]


def loss_tags_vjp(
    func: Fun, params_index: int = 0
) -> Callable[[Sequence[PyTree]], tuple[Losses, PullBack]]:
    """A function for the vector-Jacobian product from the losses of `func` to its parameters.

    Equal to `jax.vjp` of the function from the parameters to what its losses depend on.

    Arguments:
        func: a function that registers at least one loss.
        params_index: which of its arguments are the parameters.

    Returns:
        A function of the arguments of `func`, as one sequence. It returns `(losses, vjp)`: a tuple
        of `LossFunction`s, and a function of cotangents, one sequence for each loss with one array
        for each of its `parameter_dependants`, that returns cotangents of the parameters.

    Raises:
        RegistrationError: if `func` registers no loss, or one was lost.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def func(w, x):
        ...     curvax.register_squared_error_loss(x @ w)
        >>> losses, vjp = curvax.loss_tags_vjp(func)((jnp.ones((2, 1)), jnp.ones((3, 2))))
        >>> vjp([losses[0].parameter_dependants])
        Array([[6.],
               [6.]], dtype=float32)
    """
    return LossDerivatives(func, params_index, "curvax.loss_tags_vjp").vjp


def loss_tags_jvp(
    func: Fun, params_index: int = 0
) -> Callable[[Sequence[PyTree], PyTree], tuple[Losses, tuple[tuple[Array, ...], ...]]]:
    """A function for the Jacobian-vector product from the parameters of `func` to its losses.

    Equal to `jax.jvp` of the function from the parameters to what its losses depend on.

    Arguments:
        func: a function that registers at least one loss.
        params_index: which of its arguments are the parameters.

    Returns:
        A function of the arguments of `func`, as one sequence, and tangents of the parameters. It
        returns `(losses, tangents)`: a tuple of `LossFunction`s, and for each of them the tangents
        of its `parameter_dependants`.

    Raises:
        RegistrationError: if `func` registers no loss, or one was lost.
    """
    return LossDerivatives(func, params_index, "curvax.loss_tags_jvp").jvp


def loss_tags_hvp(
    func: Fun, params_index: int = 0
) -> Callable[[Sequence[PyTree], PyTree], tuple[PyTree, Losses]]:
    """A function for the Hessian-vector product of the losses of `func`.

    Equal to the product of a vector with the Hessian, by the parameters, of the sum of
    `loss.evaluate()` over all losses and examples; weights included. The losses need targets.

    Arguments:
        func: a function that registers at least one loss.
        params_index: which of its arguments are the parameters.

    Returns:
        A function of the arguments of `func`, as one sequence, and of tangents of the parameters.
        It returns `(product, losses)`.

    Raises:
        RegistrationError: if `func` registers no loss, or one was lost.
        ValueError: if a loss has no targets.
    """
    return LossDerivatives(func, params_index, "curvax.loss_tags_hvp").hvp
