"""`LossDerivatives`: products with the Jacobian and the Hessian of a function's losses.

J is the Jacobian of the map from the parameters to what the losses depend on. Here are `J v`,
`Jᵀ v`, both by one linearisation, and products with the Hessian, by forward over reverse mode
(Pearlmutter 1994, Fast Exact Multiplication by the Hessian).
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
"""From tangents of the parameters to tangents of what each loss depends on."""
PullBack = Callable[[LossTangents], PyTree]
"""From cotangents of what each loss depends on to cotangents of the parameters."""

T = TypeVar("T")


class LossDerivatives:
    """The losses of a function, with derivatives by its parameters.

    The function is traced once for each combination of shapes of its arguments, for all methods.
    These take its arguments as one sequence.

    Arguments:
        func: Function that registers at least one loss.
        params_index: Index of the argument that holds the parameters.
    """

    def __init__(self, func: Fun, params_index: int) -> None:
        # Layers do not matter: all parameters are generic.
        self._traced = TracedFunction.of(
            func,
            params_index,
            same_graph=False,
            allow_left_out_params=True,
            register_only_generic=True,
            allow_multiple_registrations=True,
        )

    def inspect(self, func_args: Sequence[PyTree], look: Callable[[Losses], T]) -> T:
        """Return `look(losses)`, where the arrays of the losses have shapes but no values."""
        at = self._traced.at(func_args)
        seen: list[T] = []

        def run(params: Sequence[Array]) -> None:
            dependants, (others, _) = at(params)
            seen.append(look(at.losses(dependants, others)))

        jax.eval_shape(run, at.params)
        return seen[0]

    def total(self, func_args: Sequence[PyTree]) -> tuple[Array, Losses]:
        """Return the sum of all losses over all examples, and the losses."""
        at = self._traced.at(func_args)
        dependants, (others, _) = at(at.params)
        losses = at.losses(dependants, others)
        return self._sum(losses, "the value"), losses

    def vjp(self, func_args: Sequence[PyTree]) -> tuple[Losses, PullBack]:
        """Return the losses, and the product of `Jᵀ` and a vector as a function."""
        at = self._traced.at(func_args)
        dependants, transposed, (others, _) = jax.vjp(at, at.params, has_aux=True)

        def pull_back(tangents: LossTangents) -> PyTree:
            (params,) = transposed(like_dependants(tangents, dependants))
            return _as_params(at, params)

        return at.losses(dependants, others), pull_back

    def jvp(
        self, func_args: Sequence[PyTree], params_tangents: PyTree
    ) -> tuple[Losses, tuple[tuple[Array, ...], ...]]:
        """Return the losses, and the product of J and a vector."""
        at = self._traced.at(func_args)
        tangents = _like_params(at, params_tangents)
        dependants, products, (others, _) = jax.jvp(at, (at.params,), (tangents,), has_aux=True)
        return at.losses(dependants, others), tuple(map(tuple, products))

    def linearize(self, func_args: Sequence[PyTree]) -> tuple[Losses, PushForward, PullBack]:
        """Return the losses, and products with J and with `Jᵀ`, by one linearisation."""
        at = self._traced.at(func_args)
        dependants, linear, (others, _) = jax.linearize(at, at.params, has_aux=True)

        def push_forward(params_tangents: PyTree) -> tuple[tuple[Array, ...], ...]:
            return tuple(map(tuple, linear(_like_params(at, params_tangents))))

        def pull_back(tangents: LossTangents) -> PyTree:
            transposed = jax.linear_transpose(linear, at.params)
            (params,) = transposed(like_dependants(tangents, dependants))
            return _as_params(at, params)

        return at.losses(dependants, others), push_forward, pull_back

    def hvp(self, func_args: Sequence[PyTree], params_tangents: PyTree) -> tuple[PyTree, Losses]:
        """Return the product of the Hessian of the sum of all losses and a vector; the losses."""
        at = self._traced.at(func_args)
        tangents = _like_params(at, params_tangents)

        def total(params: Sequence[Array]) -> tuple[Array, Any]:
            dependants, (others, _) = at(params)
            losses = at.losses(dependants, others)
            return self._sum(losses, "the Hessian"), (dependants, others)

        def directional(params: Sequence[Array]) -> tuple[Array, Any]:
            _, derivative, operands = jax.jvp(total, (params,), (tangents,), has_aux=True)
            return derivative, operands

        product, (dependants, others) = jax.grad(directional, has_aux=True)(at.params)
        return _as_params(at, product), at.losses(dependants, others)

    def _sum(self, losses: Losses, what: str) -> Array:
        for index, loss in enumerate(losses):
            if loss.needs_targets and loss.targets is None:
                raise ValueError(
                    f"{where()}: {what} depends on targets, but loss {index}, "
                    f"{type(loss).__name__}, was registered without any. Register it with its "
                    f"targets, or take the Fisher matrix or the GGN, which do not need them."
                )
        values = [jnp.sum(loss.evaluate()) for loss in losses]
        return sum(values[1:], start=values[0])


def _as_params(at: LossMap, leaves: Sequence[Array]) -> PyTree:
    return jax.tree.unflatten(at.processed.params_tree, list(leaves))


def _like_params(at: LossMap, tangents: PyTree) -> list[Array]:
    """Check user-supplied tangents of the parameters, and cast them to the parameters' dtypes."""
    expected = f"{where()}: tangents of the parameters are like the parameters"
    tree, params_tree = jax.tree.structure(tangents), at.processed.params_tree
    if tree != params_tree:
        raise ValueError(f"{expected}, of the structure {params_tree}, got {tree}.")
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


def loss_tags_vjp(
    func: Fun, params_index: int = 0
) -> Callable[[Sequence[PyTree]], tuple[Losses, PullBack]]:
    """Return a function for vector-Jacobian products from the losses of `func` to its parameters.

    Equal to `jax.vjp` of the function from the parameters to the predictions
    (`parameter_dependants`) of its registered losses.

    Arguments:
        func: Function that registers at least one loss.
        params_index: Index of the argument that holds the parameters.

    Returns:
        A function of the arguments of `func`, as one sequence. It returns `(losses, vjp)`: a tuple
        of `LossFunction`s, and a function from cotangents to cotangents of the parameters. It takes
        a sequence for each loss, with one array for each of its `parameter_dependants`.

    Raises:
        RegistrationError: If `func` registers no loss, or JAX dropped one while tracing.

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
    """Return a function for Jacobian-vector products from the parameters of `func` to its losses.

    Equal to `jax.jvp` of the function from the parameters to the predictions
    (`parameter_dependants`) of its registered losses.

    Arguments:
        func: Function that registers at least one loss.
        params_index: Index of the argument that holds the parameters.

    Returns:
        A function of the arguments of `func`, as one sequence, and tangents of the parameters. It
        returns `(losses, tangents)`: a tuple of `LossFunction`s, and for each of them the tangents
        of its `parameter_dependants`.

    Raises:
        RegistrationError: If `func` registers no loss, or JAX dropped one while tracing.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def func(w, x):
        ...     curvax.register_squared_error_loss(x @ w)
        >>> w, x = jnp.ones((2, 1)), jnp.ones((3, 2))
        >>> _, ((tangents,),) = curvax.loss_tags_jvp(func)((w, x), jnp.array([[1.0], [3.0]]))
        >>> tangents
        Array([[4.],
               [4.],
               [4.]], dtype=float32)
    """
    return LossDerivatives(func, params_index).jvp


def loss_tags_hvp(
    func: Fun, params_index: int = 0
) -> Callable[[Sequence[PyTree], PyTree], tuple[PyTree, Losses]]:
    """Return a function for Hessian-vector products of the losses of `func`.

    Equal to the product of the Hessian, by the parameters, of the sum of `loss.evaluate()` over all
    losses and examples, weights included, and a vector. The losses need targets.

    Arguments:
        func: Function that registers at least one loss.
        params_index: Index of the argument that holds the parameters.

    Returns:
        A function of the arguments of `func`, as one sequence, and tangents of the parameters. It
        returns `(product, losses)`: a pytree like the parameters, and a tuple of `LossFunction`s.

    Raises:
        RegistrationError: If `func` registers no loss, or JAX dropped one while tracing.
        ValueError: If a loss has no targets.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def func(w, x, y):
        ...     curvax.register_squared_error_loss(x @ w, y)
        >>> args = jnp.ones((2, 1)), jnp.ones((3, 2)), jnp.zeros((3, 1))
        >>> product, _ = curvax.loss_tags_hvp(func)(args, jnp.array([[1.0], [0.0]]))
        >>> product.shape, bool(product[0, 0] == product[1, 0])
        ((2, 1), True)
    """
    return LossDerivatives(func, params_index).hvp
