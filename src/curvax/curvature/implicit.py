"""`ImplicitExactCurvature`: products with exact curvature matrices that are never formed.

Let J be the Jacobian of what the losses depend on by the parameters, and C the Fisher matrix or the
GGN of the losses in these, which is small: one block for each example. Then the matrix in the
parameters is `Jᵀ C J`, and a product with it is `J v` forward, C in the middle, and `Jᵀ` back. Both
passes come from one linearisation. With `C = B Bᵀ` its factor is `Jᵀ B`.
"""

from collections.abc import Callable, Sequence
from typing import final

import jax
import jax.numpy as jnp

from curvax._errors import as_integer, where
from curvax._types import Array, Fun, PyTree, at_least_single
from curvax.curvature.batch import BatchArgument, default_batch_size_extractor
from curvax.curvature.loss_products import (
    MATRICES,
    LossMatrix,
    Operation,
    Shape,
    factor,
    factor_transpose,
    hessian_product,
    jacobian_transpose,
    product,
    shapes_of_inputs,
    total,
)
from curvax.curvature.microbatching import SumOverExamples
from curvax.layers.tracing.loss_derivatives import LossDerivatives
from curvax.layers.tracing.loss_map import LossTangents

Number = int | float | Array


@final
class ImplicitExactCurvature:
    """Products of vectors with exact curvature matrices, none of which is ever formed.

    The objective is the mean over the batch of all losses that `func` registers, weights included:

        objective = lambda params: sum(jnp.sum(loss.evaluate()) for loss in losses) / N

    Products with its Hessian equal `jax.jvp(jax.grad(objective), (params,), (v,))[1]`. Products
    with its Fisher matrix or GGN equal `Jᵀ C J v / N`, where J is the Jacobian of the inputs of the
    losses by the parameters and C the Fisher matrix or the GGN of the losses in their inputs; those
    with a factor of these equal `Jᵀ B u / sqrt(N)`, where `C = B Bᵀ`, except that no matrix exists
    at any time. All methods are functions of arrays, and compose with `jax.jit`, `jax.vmap` and
    `jax.grad`. `func` is traced once for each shape of its arguments.

    A loss inside loops or of `jax.vmap` is one loss, with their axes merged into that of its
    batch. What it adds up to is still divided by the number of examples in the batch.

    Arguments:
        func: a function that registers at least one loss. What it returns does not matter.
        params_index: which of its arguments are the parameters.
        batch_size_extractor: a function of the batch that returns its number of examples N, a
            Python int or a traced number.
        batch_index: which argument is the batch, or which ones; then `batch_size_extractor` is
            given a tuple of these. None is the last argument that is not the parameters.
        microbatch_size: the most examples to compute at once. Results are the same, to rounding, if
            `func` does to each example what it would do to it alone. The batch is split along the
            first axis of its arrays; random keys and arrays without axes are passed whole, as all
            other arguments are. None takes all.
        memory_budget: bytes, in place of `microbatch_size`, in any form that `parse_memory` takes.
            The largest microbatch is taken with which the product, compiled by itself, allocates
            no more.

    Raises:
        TypeError: if the size of a microbatch is no integer.
        ValueError: if that is not positive, or both a size and a budget are given.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def func(w, batch):
        ...     x, y = batch
        ...     curvax.register_squared_error_loss(x @ w, y, weight=0.5)
        >>> curvature = curvax.ImplicitExactCurvature(func)
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
        *,
        batch_index: int | Sequence[int] | None = None,
        microbatch_size: int | None = None,
        memory_budget: int | float | str | None = None,
    ) -> None:
        self.params_index = params_index
        self._model = LossDerivatives(func, params_index)
        self._argument = BatchArgument(params_index, batch_index)
        self._batch_size_extractor = batch_size_extractor
        self._sum = SumOverExamples(self._model, self._argument, microbatch_size, memory_budget)

    def batch_size(self, func_args: Sequence[PyTree]) -> Number:
        """The number of examples that means are over.

        Arguments:
            func_args: the arguments of `func`.

        Returns:
            What `batch_size_extractor` says of the batch among them.

        Raises:
            ValueError: as `default_batch_size_extractor`, or if there is no such argument.
        """
        return self._batch_size_extractor(self._argument.of(func_args))

    def mean_loss(self, func_args: Sequence[PyTree]) -> Array:
        """The objective itself: the mean over the batch of all losses, weights included.

        Arguments:
            func_args: the arguments of `func`.

        Returns:
            A number.

        Raises:
            RegistrationError: if `func` registers no loss, or one was lost.
            ValueError: if a loss has no targets, or the batch size is not known.
        """
        return self._mean(total, None, func_args, None)

    def multiply_hessian(
        self, func_args: Sequence[PyTree], parameter_structured_vector: PyTree
    ) -> PyTree:
        """The product of the Hessian of the mean loss and a vector.

        Arguments:
            func_args: the arguments of `func`.
            parameter_structured_vector: a pytree like the parameters.

        Returns:
            A pytree like the parameters.

        Raises:
            RegistrationError: if `func` registers no loss, or one was lost.
            ValueError: if the vector is not like the parameters, a loss has no targets, or the
                batch size is not known.
        """
        return self._mean(hessian_product, None, func_args, parameter_structured_vector)

    def multiply_fisher(
        self, func_args: Sequence[PyTree], parameter_structured_vector: PyTree
    ) -> PyTree:
        """The product of the Fisher matrix of the mean loss and a vector.

        Arguments:
            func_args: the arguments of `func`.
            parameter_structured_vector: a pytree like the parameters.

        Returns:
            A pytree like the parameters.

        Raises:
            RegistrationError: if `func` registers no loss, or one was lost.
            ValueError: if the vector is not like the parameters, a loss has no Fisher matrix, or
                the batch size is not known.
        """
        return self._mean(product, MATRICES["fisher"], func_args, parameter_structured_vector)

    def multiply_ggn(
        self, func_args: Sequence[PyTree], parameter_structured_vector: PyTree
    ) -> PyTree:
        """The product of the GGN of the mean loss and a vector.

        Arguments, result and errors are as those of `multiply_fisher`, but all losses have a GGN.
        """
        return self._mean(product, MATRICES["ggn"], func_args, parameter_structured_vector)

    def multiply_fisher_factor_transpose(
        self, func_args: Sequence[PyTree], parameter_structured_vector: PyTree
    ) -> tuple[Array, ...]:
        """The product of the transpose of a factor of the Fisher matrix and a vector.

        Arguments:
            func_args: the arguments of `func`.
            parameter_structured_vector: a pytree like the parameters.

        Returns:
            `Bᵀ v`, where the Fisher matrix is `B Bᵀ`: an array for each loss, of the shapes that
            `get_loss_inner_vector_shapes_and_batch_size` tells.

        Raises:
            RegistrationError, ValueError: as `multiply_fisher`.
        """
        return self._mean(
            factor_transpose, MATRICES["fisher"], func_args, parameter_structured_vector, root=True
        )

    def multiply_ggn_factor_transpose(
        self, func_args: Sequence[PyTree], parameter_structured_vector: PyTree
    ) -> tuple[Array, ...]:
        """As `multiply_fisher_factor_transpose`, for the GGN."""
        return self._mean(
            factor_transpose, MATRICES["ggn"], func_args, parameter_structured_vector, root=True
        )

    def multiply_fisher_factor(
        self, func_args: Sequence[PyTree], loss_inner_vectors: Sequence[Array]
    ) -> PyTree:
        """The product of a factor of the Fisher matrix and a vector.

        Arguments:
            func_args: the arguments of `func`.
            loss_inner_vectors: an array for each loss, of the shapes that
                `get_loss_inner_vector_shapes_and_batch_size` tells.

        Returns:
            `B v`, where the Fisher matrix is `B Bᵀ`: a pytree like the parameters.

        Raises:
            RegistrationError: if `func` registers no loss, or one was lost.
            ValueError: if there are other vectors than that, a loss has no Fisher matrix, or the
                batch size is not known.
        """
        return self._mean(
            factor, MATRICES["fisher"], func_args, list(loss_inner_vectors), root=True
        )

    def multiply_ggn_factor(
        self, func_args: Sequence[PyTree], loss_inner_vectors: Sequence[Array]
    ) -> PyTree:
        """As `multiply_fisher_factor`, for the GGN."""
        return self._mean(factor, MATRICES["ggn"], func_args, list(loss_inner_vectors), root=True)

    def multiply_jacobian_transpose(
        self, func_args: Sequence[PyTree], loss_input_vectors: LossTangents
    ) -> PyTree:
        """The product of the transpose of the model's Jacobian and a vector.

        It is a sum over the batch, not a mean.

        Arguments:
            func_args: the arguments of `func`.
            loss_input_vectors: for each loss one array for each of its `parameter_dependants`, of
                the shapes that `get_loss_input_shapes_and_batch_size` tells.

        Returns:
            `Jᵀ v`, where J is the Jacobian of the inputs of the losses: a pytree like the
            parameters.

        Raises:
            RegistrationError: if `func` registers no loss, or one was lost.
            ValueError: if there are other vectors than that.
        """
        vectors = [tuple(each) for each in loss_input_vectors]
        return self._sum(jacobian_transpose, None, func_args, vectors)

    def get_loss_inner_vector_shapes_and_batch_size(
        self, func_args: Sequence[PyTree], mode: str
    ) -> tuple[tuple[Shape, ...], Number]:
        """The shapes of what `multiply_fisher_factor` or `multiply_ggn_factor` takes.

        Nothing is computed for it.

        Arguments:
            func_args: the arguments of `func`.
            mode: "fisher" or "ggn".

        Returns:
            A tuple of a shape for each loss, and the batch size.

        Raises:
            RegistrationError: if `func` registers no loss, or one was lost.
            ValueError: if the mode is another word, a loss has no Fisher matrix, or the batch size
                is not known.
        """
        if mode not in MATRICES:
            raise ValueError(f"{where()}: mode must be 'fisher' or 'ggn', got {mode!r}.")
        shapes = self._model.inspect(func_args, MATRICES[mode].inner_shapes)
        return shapes, self._known_batch_size(func_args)

    def get_loss_input_shapes_and_batch_size(
        self, func_args: Sequence[PyTree]
    ) -> tuple[tuple[tuple[Shape, ...], ...], Number]:
        """The shapes of what `multiply_jacobian_transpose` takes. Nothing is computed for it.

        Arguments:
            func_args: the arguments of `func`.

        Returns:
            A tuple with a tuple for each loss of the shapes of its inputs, and the batch size.

        Raises:
            RegistrationError: if `func` registers no loss, or one was lost.
            ValueError: if the batch size is not known.
        """
        shapes = self._model.inspect(func_args, shapes_of_inputs)
        return shapes, self._known_batch_size(func_args)

    def _mean(
        self,
        operation: Operation,
        matrix: LossMatrix | None,
        func_args: Sequence[PyTree],
        vector: PyTree,
        root: bool = False,
    ) -> PyTree:
        """A product that is a sum over examples, divided by their number or by its root."""
        size = self.batch_size(func_args)
        return _divided(self._sum(operation, matrix, func_args, vector), size, root)

    def _known_batch_size(self, func_args: Sequence[PyTree]) -> Number:
        """The batch size, as a Python int where it is known."""
        size = self.batch_size(func_args)
        known = as_integer(size)
        return size if known is None else known


def _divided(tree: PyTree, batch_size: Number, root: bool) -> PyTree:
    """Arrays divided by the batch size or its root, which half precision may not hold."""

    def divide(x: Array) -> Array:
        wide = at_least_single(x.dtype)
        size = jnp.asarray(batch_size).astype(wide)
        return (x.astype(wide) / (jnp.sqrt(size) if root else size)).astype(x.dtype)

    return jax.tree.map(divide, tree)
