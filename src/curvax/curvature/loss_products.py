"""Products with sums over a batch, between parameters, inputs of losses and inner vectors.

Let J be the Jacobian of the inputs of the losses with respect to the parameters, and `C = B Bᵀ` the
Fisher matrix or the GGN of the losses in their inputs. Each function here is one product at given
arguments of the model, such as `Jᵀ C J v` (Schraudolph 2002, "Fast curvature matrix-vector products
for second-order gradient descent"), and returns the losses besides. It is a sum over the batch:
means and microbatches are the caller's. `MATRICES` has the products of losses with C and B.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import jax.numpy as jnp

from curvax._errors import where
from curvax._types import Array, PyTree
from curvax.layers.tracing.loss_derivatives import LossDerivatives
from curvax.layers.tracing.loss_map import Losses
from curvax.losses.loss_function import LossFunction, NegativeLogProbLoss

Shape = tuple[int, ...]


class LossMatrix(NamedTuple):
    """A matrix C of losses in their inputs, with a factor B: `C = B Bᵀ`.

    Attributes:
        name: "fisher" or "ggn".
        product: `C v`, from a loss and a vector like its inputs.
        factor: `B u`, from a loss and an inner vector.
        factor_transpose: `Bᵀ v`, from a loss and a vector like its inputs.
        inner_shape: The shape of inner vectors of a loss.
    """

    name: str
    product: Callable[[LossFunction, Sequence[Array]], tuple[Array, ...]]
    factor: Callable[[LossFunction, Array], tuple[Array, ...]]
    factor_transpose: Callable[[LossFunction, Sequence[Array]], Array]
    inner_shape: Callable[[LossFunction], Shape]

    def inner_shapes(self, losses: Losses) -> tuple[Shape, ...]:
        """Return the shape of the inner vectors of each loss."""
        return tuple(map(self.inner_shape, self.checked(losses)))

    def checked(self, losses: Losses) -> Losses:
        """Return the losses; raise an error if one of them does not have this matrix."""
        for index, loss in enumerate(losses):
            if self.name == "fisher" and not hasattr(loss, "multiply_fisher"):
                raise ValueError(
                    f"{where()}: there are no products with a Fisher matrix, because loss {index}, "
                    f"{type(loss).__name__}, has no predictive distribution. Use products with the "
                    f"GGN: multiply_ggn, multiply_ggn_factor, multiply_ggn_factor_transpose, or "
                    f"mode='ggn'."
                )
        return losses


Operation = Callable[
    [LossDerivatives, Sequence[PyTree], LossMatrix | None, PyTree], tuple[PyTree, Losses]
]
"""From a model, its arguments, a matrix of losses if there is one, and a vector, to a product."""


def _fisher(loss: LossFunction) -> NegativeLogProbLoss:
    return cast(NegativeLogProbLoss, loss)  # `LossMatrix.checked` raises an error if it is not.


MATRICES = {
    "fisher": LossMatrix(
        "fisher",
        lambda loss, vector: _fisher(loss).multiply_fisher(vector),
        lambda loss, vector: _fisher(loss).multiply_fisher_factor(vector),
        lambda loss, vector: _fisher(loss).multiply_fisher_factor_transpose(vector),
        lambda loss: _fisher(loss).fisher_factor_inner_shape,
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
    model: LossDerivatives, func_args: Sequence[PyTree], matrix: LossMatrix | None, vector: PyTree
) -> tuple[PyTree, Losses]:
    """Return the Hessian of the sum of all losses times a vector like the parameters.

    The product is the derivative of the gradient along the vector (Pearlmutter 1994, "Fast exact
    multiplication by the Hessian").
    """
    del matrix
    return model.hvp(func_args, vector)


def total(
    model: LossDerivatives, func_args: Sequence[PyTree], matrix: LossMatrix | None, vector: PyTree
) -> tuple[Array, Losses]:
    """Return the sum of all losses."""
    del matrix, vector
    return model.total(func_args)


def product(
    model: LossDerivatives, func_args: Sequence[PyTree], matrix: LossMatrix | None, vector: PyTree
) -> tuple[PyTree, Losses]:
    """Return `Jᵀ C J v`, with J and `Jᵀ` from one linearisation."""
    assert matrix is not None
    losses, push_forward, pull_back = model.linearize(func_args)
    pairs = zip(matrix.checked(losses), push_forward(vector), strict=True)
    return pull_back([_like_inputs(loss, matrix.product(loss, x)) for loss, x in pairs]), losses


def factor_transpose(
    model: LossDerivatives, func_args: Sequence[PyTree], matrix: LossMatrix | None, vector: PyTree
) -> tuple[tuple[Array, ...], Losses]:
    """Return `Bᵀ J v`: an inner vector for each loss."""
    assert matrix is not None
    losses, tangents = model.jvp(func_args, vector)
    pairs = zip(matrix.checked(losses), tangents, strict=True)
    return tuple(matrix.factor_transpose(loss, x) for loss, x in pairs), losses


def factor(
    model: LossDerivatives,
    func_args: Sequence[PyTree],
    matrix: LossMatrix | None,
    vector: Sequence[Array],
) -> tuple[PyTree, Losses]:
    """Return `Jᵀ B u`, from an inner vector for each loss."""
    assert matrix is not None
    losses, pull_back = model.vjp(func_args)
    check_vectors(losses, matrix, vector)
    cotangents = []
    for loss, x in zip(losses, vector, strict=True):
        widest = max((y.dtype for y in loss.parameter_dependants), key=lambda d: jnp.finfo(d).bits)
        cotangents.append(_like_inputs(loss, matrix.factor(loss, jnp.asarray(x, widest))))
    return pull_back(cotangents), losses


def jacobian_transpose(
    model: LossDerivatives,
    func_args: Sequence[PyTree],
    matrix: LossMatrix | None,
    vector: Sequence[Sequence[Array]],
) -> tuple[PyTree, Losses]:
    """Return `Jᵀ u`, from arrays like the inputs of each loss."""
    losses, pull_back = model.vjp(func_args)
    check_vectors(losses, matrix, vector)
    pairs = zip(losses, vector, strict=True)
    return pull_back([_like_inputs(loss, x) for loss, x in pairs]), losses


def shapes_of_inputs(losses: Losses) -> tuple[tuple[Shape, ...], ...]:
    """Return the shapes of the inputs of each loss that depend on parameters."""
    return tuple(_shapes(loss.parameter_dependants) for loss in losses)


def check_vectors(losses: Losses, matrix: LossMatrix | None, vectors: PyTree) -> None:
    """Check user-supplied vectors: an inner vector of the matrix for each loss.

    Without a matrix, there is a sequence of arrays like its inputs for each loss.
    """
    if matrix is None:
        expected, given = shapes_of_inputs(losses), tuple(map(_shapes, vectors))
    else:
        expected, given = matrix.inner_shapes(losses), _shapes(vectors)
    if given != expected:
        raise ValueError(
            f"{where()}: vectors of losses have one entry for each loss, in the order of "
            f"registration, with the shapes {expected}, got {given}."
        )


def _shapes(arrays: Sequence[Array]) -> tuple[Shape, ...]:
    return tuple(map(jnp.shape, arrays))


def _like_inputs(loss: LossFunction, arrays: Sequence[Array]) -> tuple[Array, ...]:
    """Cast cotangents to the dtypes of the inputs, which the backward pass requires."""
    pairs = zip(arrays, loss.parameter_dependants, strict=True)
    return tuple(jnp.asarray(x, like.dtype) for x, like in pairs)
