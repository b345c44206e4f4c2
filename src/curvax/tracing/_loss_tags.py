"""Derivatives of what the losses of a function depend on, by its parameters."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from curvax._types import Array, Fun, PyTree
from curvax.tracing._traced import LossMap, TracedFunction

__all__ = [
    "LossTangents",
    "Losses",
    "like_dependants",
    "loss_tags_hvp",
    "loss_tags_jvp",
    "loss_tags_vjp",
]

Losses = tuple[Any, ...]
LossTangents = Sequence[Sequence[Array]]


def loss_tags_vjp(
    func: Fun, params_index: int = 0
) -> Callable[[Sequence[PyTree]], tuple[Losses, Callable[[LossTangents], PyTree]]]:
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
    traced = _losses_only(func, params_index, "curvax.loss_tags_vjp")

    def vjp_at(func_args: Sequence[PyTree]) -> tuple[Losses, Callable[[LossTangents], PyTree]]:
        at = traced.at(func_args)
        dependants, pull_back, (others, _) = jax.vjp(at, at.params, has_aux=True)

        def vjp(tangents: LossTangents) -> PyTree:
            checked = like_dependants(tangents, dependants, "curvax.loss_tags_vjp")
            (params,) = pull_back(checked)
            return _as_params(at, params)

        return at.losses(dependants, others), vjp

    return vjp_at


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
    traced = _losses_only(func, params_index, "curvax.loss_tags_jvp")

    def jvp_at(
        func_args: Sequence[PyTree], params_tangents: PyTree
    ) -> tuple[Losses, tuple[tuple[Array, ...], ...]]:
        at = traced.at(func_args)
        tangents = _like_params(at, params_tangents, "curvax.loss_tags_jvp")
        dependants, moved, (others, _) = jax.jvp(at, (at.params,), (tangents,), has_aux=True)
        return at.losses(dependants, others), tuple(map(tuple, moved))

    return jvp_at


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
    traced = _losses_only(func, params_index, "curvax.loss_tags_hvp")

    def hvp_at(func_args: Sequence[PyTree], params_tangents: PyTree) -> tuple[PyTree, Losses]:
        at = traced.at(func_args)
        tangents = _like_params(at, params_tangents, "curvax.loss_tags_hvp")

        def total(params: Sequence[Array]) -> tuple[Array, Any]:
            dependants, (others, _) = at(params)
            values = [jnp.sum(loss.evaluate()) for loss in at.losses(dependants, others)]
            return sum(values[1:], start=values[0]), (dependants, others)

        def slope(params: Sequence[Array]) -> tuple[Array, Any]:
            _, moved, found = jax.jvp(total, (params,), (tangents,), has_aux=True)
            return moved, found

        product, (dependants, others) = jax.grad(slope, has_aux=True)(at.params)
        return _as_params(at, product), at.losses(dependants, others)

    return hvp_at


def _losses_only(func: Fun, params_index: int, where: str) -> TracedFunction:
    """A function of which the layers do not matter: all parameters are generic."""
    return TracedFunction.of(
        func,
        params_index,
        where,
        same_graph=False,
        allow_left_out_params=True,
        register_only_generic=True,
        allow_multiple_registrations=True,
    )


def _as_params(at: LossMap, leaves: Sequence[Array]) -> PyTree:
    return jax.tree.unflatten(at.processed.params_tree, list(leaves))


def _like_params(at: LossMap, tangents: PyTree, where: str) -> list[Array]:
    """Tangents of parameters as the user gave them, checked."""
    tree, leaves = jax.tree.structure(tangents), jax.tree.leaves(tangents)
    shapes = lambda arrays: [jnp.shape(x) for x in arrays]
    if tree != at.processed.params_tree or shapes(leaves) != shapes(at.params):
        raise ValueError(
            f"{where}: tangents of the parameters are like the parameters, "
            f"{at.processed.params_tree} of the shapes {shapes(at.params)}, got {tree} of "
            f"{shapes(leaves)}."
        )
    return leaves


def like_dependants(
    tangents: LossTangents, dependants: Sequence[Any], where: str
) -> list[tuple[Array, ...]]:
    """Cotangents as the user gave them, checked."""
    given = [tuple(map(jnp.shape, each)) for each in tangents]
    expected = [tuple(x.shape for x in each) for each in dependants]
    if given != expected:
        raise ValueError(
            f"{where}: for each loss there is one array for each of its parameter_dependants, of "
            f"the shapes {expected}, got {given}."
        )
    return [tuple(each) for each in tangents]
