"""kfac_jax's `ImplicitExactCurvature`: products with exact curvature matrices."""

from collections.abc import Callable, Sequence
from typing import Any

from curvax._types import Array, Fun, PyTree
from curvax.curvature.implicit import ImplicitExactCurvature as CoreCurvature, Number
from curvax.kfac_jax.utils.trees import default_batch_size_extractor
from curvax.layers.tracing.loss_derivatives import LossDerivatives
from curvax.layers.tracing.loss_map import Losses, LossTangents

LossVectors = tuple[tuple[Array, ...], ...]
"""For each loss an array for each of its inputs."""


class ImplicitExactCurvature:
    """Products of vectors with exact curvature matrices, none of which is ever formed.

    Equal to `curvax.ImplicitExactCurvature`, with kfac_jax's further methods.

    Args:
        func: A function that registers at least one loss.
        params_index: Index of the argument that holds the parameters.
        batch_size_extractor: Returns the number of examples of the last argument.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def func(w, batch):
        ...     x, y = batch
        ...     curvax.register_squared_error_loss(x @ w, y, weight=0.5)
        >>> curvature = ImplicitExactCurvature(func)
        >>> args = jnp.ones((2, 1)), (jnp.ones((3, 2)), jnp.zeros((3, 1)))
        >>> curvature.multiply_ggn(args, jnp.array([[1.0], [0.0]]))
        Array([[1.],
               [1.]], dtype=float32)
    """

    def __init__(
        self,
        func: Fun,
        params_index: int = 0,
        batch_size_extractor: Callable[[PyTree], Number] = default_batch_size_extractor,
    ) -> None:
        self.params_index = params_index
        self._core = CoreCurvature(func, params_index, batch_size_extractor)
        self._derivatives = LossDerivatives(func, params_index)

    def batch_size(self, func_args: Sequence[PyTree]) -> Number:
        """Return the number of examples that means are taken over."""
        return self._core.batch_size(func_args)

    def multiply_hessian(
        self, func_args: Sequence[PyTree], parameter_structured_vector: PyTree
    ) -> PyTree:
        """Multiply a vector by the Hessian of the total loss."""
        return self._core.multiply_hessian(func_args, parameter_structured_vector)

    def multiply_fisher(
        self, func_args: Sequence[PyTree], parameter_structured_vector: PyTree
    ) -> PyTree:
        """Multiply a vector by the Fisher matrix of the total loss."""
        return self._core.multiply_fisher(func_args, parameter_structured_vector)

    def multiply_ggn(
        self, func_args: Sequence[PyTree], parameter_structured_vector: PyTree
    ) -> PyTree:
        """Multiply a vector by the GGN of the total loss."""
        return self._core.multiply_ggn(func_args, parameter_structured_vector)

    def multiply_fisher_factor_transpose(
        self, func_args: Sequence[PyTree], parameter_structured_vector: PyTree
    ) -> tuple[Array, ...]:
        """Multiply a vector by the transpose of a factor of the Fisher matrix."""
        return self._core.multiply_fisher_factor_transpose(func_args, parameter_structured_vector)

    def multiply_ggn_factor_transpose(
        self, func_args: Sequence[PyTree], parameter_structured_vector: PyTree
    ) -> tuple[Array, ...]:
        """Multiply a vector by the transpose of a factor of the GGN."""
        return self._core.multiply_ggn_factor_transpose(func_args, parameter_structured_vector)

    def multiply_fisher_factor(
        self, func_args: Sequence[PyTree], loss_inner_vectors: Sequence[Array]
    ) -> PyTree:
        """Multiply a vector by a factor of the Fisher matrix."""
        return self._core.multiply_fisher_factor(func_args, loss_inner_vectors)

    def multiply_ggn_factor(
        self, func_args: Sequence[PyTree], loss_inner_vectors: Sequence[Array]
    ) -> PyTree:
        """Multiply a vector by a factor of the GGN."""
        return self._core.multiply_ggn_factor(func_args, loss_inner_vectors)

    def multiply_jacobian(
        self,
        func_args: Sequence[PyTree],
        parameter_structured_vector: PyTree,
        return_loss_objects: bool = False,
    ) -> LossVectors | tuple[LossVectors, Losses]:
        """Multiply a vector by the Jacobian of the inputs of the losses.

        Args:
            func_args: Arguments of the function.
            parameter_structured_vector: A pytree like the parameters.
            return_loss_objects: Whether to return the losses as well.
        """
        losses, product = self._derivatives.jvp(func_args, parameter_structured_vector)
        return (product, losses) if return_loss_objects else product

    def multiply_jacobian_transpose(
        self,
        func_args: Sequence[PyTree],
        loss_input_vectors: LossTangents,
        return_loss_objects: bool = False,
    ) -> PyTree:
        """Multiply a vector by the transpose of that Jacobian.

        Args:
            func_args: Arguments of the function.
            loss_input_vectors: For each loss an array for each of its inputs.
            return_loss_objects: Whether to return the losses as well.
        """
        losses, pull_back = self._derivatives.vjp(func_args)
        product = pull_back(loss_input_vectors)
        return (product, losses) if return_loss_objects else product

    def multiply_loss_fisher(
        self, losses: Sequence[Any], loss_vectors: Sequence[tuple[Array, ...]]
    ) -> LossVectors:
        """Multiply vectors by the Fisher matrix of each loss in its inputs."""
        pairs = zip(losses, loss_vectors, strict=True)
        return tuple(loss.multiply_fisher(vector) for loss, vector in pairs)

    def multiply_loss_ggn(
        self, losses: Sequence[Any], loss_vectors: Sequence[tuple[Array, ...]]
    ) -> LossVectors:
        """Multiply vectors by the GGN of each loss in its inputs."""
        pairs = zip(losses, loss_vectors, strict=True)
        return tuple(loss.multiply_ggn(vector) for loss, vector in pairs)

    def multiply_loss_fisher_factor(
        self, losses: Sequence[Any], loss_inner_vectors: Sequence[Array]
    ) -> LossVectors:
        """Multiply vectors by a factor of the Fisher matrix of each loss."""
        pairs = zip(losses, loss_inner_vectors, strict=True)
        return tuple(loss.multiply_fisher_factor(vector) for loss, vector in pairs)

    def multiply_loss_ggn_factor(
        self, losses: Sequence[Any], loss_inner_vectors: Sequence[Array]
    ) -> LossVectors:
        """Multiply vectors by a factor of the GGN of each loss."""
        pairs = zip(losses, loss_inner_vectors, strict=True)
        return tuple(loss.multiply_ggn_factor(vector) for loss, vector in pairs)

    def multiply_loss_fisher_factor_transpose(
        self, losses: Sequence[Any], loss_vectors: Sequence[tuple[Array, ...]]
    ) -> tuple[Array, ...]:
        """Multiply vectors by the transpose of a factor of the Fisher matrix of each loss."""
        pairs = zip(losses, loss_vectors, strict=True)
        return tuple(loss.multiply_fisher_factor_transpose(vector) for loss, vector in pairs)

    def multiply_loss_ggn_factor_transpose(
        self, losses: Sequence[Any], loss_vectors: Sequence[tuple[Array, ...]]
    ) -> tuple[Array, ...]:
        """Multiply vectors by the transpose of a factor of the GGN of each loss."""
        pairs = zip(losses, loss_vectors, strict=True)
        return tuple(loss.multiply_ggn_factor_transpose(vector) for loss, vector in pairs)

    def get_loss_inner_vector_shapes_and_batch_size(
        self, func_args: Sequence[PyTree], mode: str
    ) -> tuple[tuple[tuple[int, ...], ...], Number]:
        """Return the shapes of inner vectors, "fisher" or "ggn", and the batch size."""
        return self._core.get_loss_inner_vector_shapes_and_batch_size(func_args, mode)

    def get_loss_input_shapes_and_batch_size(
        self, func_args: Sequence[PyTree]
    ) -> tuple[tuple[tuple[tuple[int, ...], ...], ...], Number]:
        """Return the shapes of the inputs of each loss, and the batch size."""
        return self._core.get_loss_input_shapes_and_batch_size(func_args)
