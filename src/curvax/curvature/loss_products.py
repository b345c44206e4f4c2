"""Products with sums over a batch, between parameters, inputs of losses and inner vectors.

Each function is one product at given arguments of the model, `(product, losses)`: it knows nothing
of means or of microbatches. `MATRICES` says how losses multiply by their own matrices.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from curvax._errors import where
from curvax._types import Array, PyTree
from curvax.layers.tracing.loss_derivatives import LossDerivatives
from curvax.layers.tracing.loss_map import Losses

Shape = tuple[int, ...]
Operation = Callable[[LossDerivatives, Sequence[PyTree], Any, Any], tuple[PyTree, Losses]]
"""From a model, its arguments, a `LossMatrix` if need be, and a vector, to a product."""


class LossMatrix(NamedTuple):
    """A matrix C that losses have in their inputs, with a factor: `C = B Bᵀ`."""

    name: str
    product: Callable[[Any, Sequence[Array]], tuple[Array, ...]]
    factor: Callable[[Any, Array], tuple[Array, ...]]
    factor_transpose: Callable[[Any, Sequence[Array]], Array]
    inner_shape: Callable[[Any], Shape]

    def inner_shapes(self, losses: Losses) -> tuple[Shape, ...]:
        """The shapes of what the factor of each loss takes."""
        return tuple(map(self.inner_shape, self.checked(losses)))

    def checked(self, losses: Losses) -> Losses:
        """The losses, if all of them have this matrix."""
        for number, loss in enumerate(losses):
            if self.name == "fisher" and not hasattr(loss, "multiply_fisher"):
                raise ValueError(
                    f"{where()}: there are no products with a Fisher matrix, "
                    f"because loss {number}, {type(loss).__name__}, has none: it has no predictive "
                    f"distribution. Use those with the GGN: multiply_ggn, multiply_ggn_factor, "
                    f"multiply_ggn_factor_transpose, or mode='ggn'."
                )
        return losses


MATRICES = {
    "fisher": LossMatrix(
        "fisher",
        lambda loss, vector: loss.multiply_fisher(vector),
        lambda loss, vector: loss.multiply_fisher_factor(vector),
        lambda loss, vector: loss.multiply_fisher_factor_transpose(vector),
        lambda loss: loss.fisher_factor_inner_shape,
    ),
    "ggn": LossMatrix(
        "ggn",
        lambda loss, vector: loss.multiply_ggn(vector),
        lambda loss, vector: loss.multiply_ggn_factor(vector),
        lambda loss, vector: loss.multiply_ggn_factor_transpose(vector),
        lambda loss: loss.ggn_factor_inner_shape,
    ),
}


def hessian_product(
    model: LossDerivatives, func_args: Sequence[PyTree], matrix: None, vector: PyTree
) -> tuple[PyTree, Losses]:
    """The Hessian of the sum of all losses times a vector like the parameters."""
    del matrix
    return model.hvp(func_args, vector)


def total(
    model: LossDerivatives, func_args: Sequence[PyTree], matrix: None, vector: None
) -> tuple[Array, Losses]:
    """The sum of all losses."""
    del matrix, vector
    return model.total(func_args)


def product(
    model: LossDerivatives, func_args: Sequence[PyTree], matrix: LossMatrix, vector: PyTree
) -> tuple[PyTree, Losses]:
    """`Jᵀ C J v`, forward and back by one linearisation."""
    losses, push_forward, pull_back = model.linearize(func_args)
    pairs = zip(matrix.checked(losses), push_forward(vector), strict=True)
    return pull_back([_like_inputs(loss, matrix.product(loss, x)) for loss, x in pairs]), losses


def factor_transpose(
    model: LossDerivatives, func_args: Sequence[PyTree], matrix: LossMatrix, vector: PyTree
) -> tuple[tuple[Array, ...], Losses]:
    """`Bᵀ J v`, an array for each loss."""
    losses, moved = model.jvp(func_args, vector)
    pairs = zip(matrix.checked(losses), moved, strict=True)
    return tuple(matrix.factor_transpose(loss, x) for loss, x in pairs), losses


def factor(
    model: LossDerivatives, func_args: Sequence[PyTree], matrix: LossMatrix, vector: Sequence[Array]
) -> tuple[PyTree, Losses]:
    """`Jᵀ B u`, for an array for each loss."""
    losses, pull_back = model.vjp(func_args)
    check_vectors(losses, matrix, vector)
    found = []
    for loss, x in zip(losses, vector, strict=True):
        widest = max((y.dtype for y in loss.parameter_dependants), key=lambda d: jnp.finfo(d).bits)
        found.append(_like_inputs(loss, matrix.factor(loss, jnp.asarray(x, widest))))
    return pull_back(found), losses


def jacobian_transpose(
    model: LossDerivatives,
    func_args: Sequence[PyTree],
    matrix: None,
    vector: Sequence[Sequence[Array]],
) -> tuple[PyTree, Losses]:
    """`Jᵀ u`, for arrays like the inputs of each loss."""
    losses, pull_back = model.vjp(func_args)
    check_vectors(losses, matrix, vector)
    pairs = zip(losses, vector, strict=True)
    return pull_back([_like_inputs(loss, x) for loss, x in pairs]), losses


def shapes_of_inputs(losses: Losses) -> tuple[tuple[Shape, ...], ...]:
    """The shapes of what each loss depends on."""
    return tuple(_shapes(loss.parameter_dependants) for loss in losses)


def check_vectors(losses: Losses, matrix: LossMatrix | None, vectors: Sequence[Any]) -> None:
    """Vectors of losses as the user gave them: inner ones of a matrix, or like their inputs."""
    if matrix is None:
        expected, given = shapes_of_inputs(losses), tuple(map(_shapes, vectors))
    else:
        expected, given = matrix.inner_shapes(losses), _shapes(vectors)
    if given != expected:
        raise ValueError(
            f"{where()}: vectors of losses have one entry for each loss, in "
            f"the order of registration; here they are of the shapes {expected}, got {given}."
        )


def _shapes(arrays: Sequence[Any]) -> tuple[Shape, ...]:
    return tuple(map(jnp.shape, arrays))


def _like_inputs(loss: Any, arrays: Sequence[Array]) -> tuple[Array, ...]:
    """Arrays for the backward pass, which wants the dtypes of what the loss depends on."""
    pairs = zip(arrays, loss.parameter_dependants, strict=True)
    return tuple(jnp.asarray(x, like.dtype) for x, like in pairs)
