"""`LossDerivatives`: the losses of a function, and derivatives of what they depend on.

Between the parameters and the losses there is one map, with a Jacobian J. Everything that is asked
of it is here: `J v`, `Jᵀ v`, both by one linearisation, and products with the Hessian.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from curvax._errors import where
from curvax._tree import leaf_name
from curvax._types import Array, Fun, PyTree
from curvax.layers.tracing.loss_map import (
    Losses,
    LossMap,
    LossTangents,
    TracedFunction,
    like_dependants,
)

PushForward = Callable[[PyTree], tuple[tuple[Array, ...], ...]]
"""From tangents of the parameters to those of what each loss depends on."""
PullBack = Callable[[LossTangents], PyTree]
"""From cotangents of what each loss depends on to those of the parameters."""

T = TypeVar("T")


class LossDerivatives:
    """The losses of a function, with derivatives by its parameters.

    The function is traced once for each shape of its arguments, whatever is asked. All methods take
    its arguments as one sequence.

    Arguments:
        func: a function that registers at least one loss.
        params_index: which of its arguments are the parameters.
        where: what errors call the user's function of curvax.
    """

    def __init__(self, func: Fun, params_index: int) -> None:
        # Layers do not matter here: all parameters are generic.
        self._traced = TracedFunction.of(
            func,
            params_index,
            same_graph=False,
            allow_left_out_params=True,
            register_only_generic=True,
            allow_multiple_registrations=True,
        )

    def inspect(self, func_args: Sequence[PyTree], look: Callable[[Losses], T]) -> T:
        """What `look` says of the losses, whose arrays have shapes but no values yet."""
        at = self._traced.at(func_args)
        seen: list[T] = []

        def run(params: Sequence[Array]) -> None:
            dependants, (others, _) = at(params)
            seen.append(look(at.losses(dependants, others)))

        jax.eval_shape(run, at.params)
        return seen[0]

    def total(self, func_args: Sequence[PyTree]) -> tuple[Array, Losses]:
        """The sum of all losses over all examples, and the losses."""
        at = self._traced.at(func_args)
        dependants, (others, _) = at(at.params)
        losses = at.losses(dependants, others)
        return self._sum(losses, "the value"), losses

    def vjp(self, func_args: Sequence[PyTree]) -> tuple[Losses, PullBack]:
        """The losses, and the product of `Jᵀ` and a vector."""
        at = self._traced.at(func_args)
        dependants, transposed, (others, _) = jax.vjp(at, at.params, has_aux=True)

        def pull_back(tangents: LossTangents) -> PyTree:
            (params,) = transposed(like_dependants(tangents, dependants))
            return _as_params(at, params)

        return at.losses(dependants, others), pull_back

    def jvp(
        self, func_args: Sequence[PyTree], params_tangents: PyTree
    ) -> tuple[Losses, tuple[tuple[Array, ...], ...]]:
        """The losses, and the product of J and a vector."""
        at = self._traced.at(func_args)
        tangents = _like_params(at, params_tangents)
        dependants, moved, (others, _) = jax.jvp(at, (at.params,), (tangents,), has_aux=True)
        return at.losses(dependants, others), tuple(map(tuple, moved))

    def linearize(self, func_args: Sequence[PyTree]) -> tuple[Losses, PushForward, PullBack]:
        """The losses, and products with J and with `Jᵀ`, by one linearisation."""
        at = self._traced.at(func_args)
        dependants, linear, (others, _) = jax.linearize(at, at.params, has_aux=True)

        def push_forward(params_tangents: PyTree) -> tuple[tuple[Array, ...], ...]:
            moved = linear(_like_params(at, params_tangents))
            return tuple(map(tuple, moved))

        def pull_back(tangents: LossTangents) -> PyTree:
            transposed = jax.linear_transpose(linear, at.params)
            (params,) = transposed(like_dependants(tangents, dependants))
            return _as_params(at, params)

        return at.losses(dependants, others), push_forward, pull_back

    def hvp(self, func_args: Sequence[PyTree], params_tangents: PyTree) -> tuple[PyTree, Losses]:
        """The product of a vector and the Hessian of the sum of all losses, and the losses."""
        at = self._traced.at(func_args)
        tangents = _like_params(at, params_tangents)

        def total(params: Sequence[Array]) -> tuple[Array, Any]:
            dependants, (others, _) = at(params)
            losses = at.losses(dependants, others)
            return self._sum(losses, "the Hessian"), (dependants, others)

        def slope(params: Sequence[Array]) -> tuple[Array, Any]:
            _, moved, found = jax.jvp(total, (params,), (tangents,), has_aux=True)
            return moved, found

        product, (dependants, others) = jax.grad(slope, has_aux=True)(at.params)
        return _as_params(at, product), at.losses(dependants, others)

    def _sum(self, losses: Losses, what: str) -> Array:
        for number, loss in enumerate(losses):
            if loss.needs_targets and loss.targets is None:
                raise ValueError(
                    f"{where()}: {what} depends on targets, but loss {number}, "
                    f"{type(loss).__name__}, was registered without any. Register it with its "
                    f"targets, or take the Fisher matrix or the GGN, which do not need them."
                )
        values = [jnp.sum(loss.evaluate()) for loss in losses]
        return sum(values[1:], start=values[0])


def _as_params(at: LossMap, leaves: Sequence[Array]) -> PyTree:
    return jax.tree.unflatten(at.processed.params_tree, list(leaves))


def _like_params(at: LossMap, tangents: PyTree) -> list[Array]:
    """Tangents of parameters as the user gave them, checked, in the dtypes of the parameters."""
    expected = f"{where()}: tangents of the parameters are like the parameters"
    tree, known = jax.tree.structure(tangents), at.processed.params_tree
    if tree != known:
        raise ValueError(f"{expected}, of the structure {known}, got {tree}.")
    found = jax.tree_util.tree_leaves_with_path(tangents)
    wrong = [
        f"{leaf_name('params', path)} is of shape {jnp.shape(param)} and its tangent of "
        f"{jnp.shape(tangent)}"
        for (path, tangent), param in zip(found, at.params, strict=True)
        if jnp.shape(tangent) != jnp.shape(param)
    ]
    if wrong:
        raise ValueError(f"{expected}, but {', '.join(wrong)}.")
    return [_cast(x, param) for (_, x), param in zip(found, at.params, strict=True)]


def _cast(tangent: Any, param: Any) -> Array:
    dtype = jnp.result_type(param)
    return jnp.asarray(tangent, dtype) if jnp.issubdtype(dtype, jnp.inexact) else tangent


# Derivatives of what the losses of a function depend on, by its parameters.


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
    return LossDerivatives(func, params_index).vjp


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
    return LossDerivatives(func, params_index).jvp


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
    return LossDerivatives(func, params_index).hvp
