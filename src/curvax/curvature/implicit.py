"""`ImplicitExactCurvature`: products with exact curvature matrices that are never formed.

Let J be the Jacobian of the inputs of the losses with respect to the parameters, and C the Fisher
matrix or the GGN of the losses in their inputs, which has a small block for each example. Then the
matrix of the parameters is `Jᵀ C J`, and a product with it is `J v` forward, C in the middle, and
`Jᵀ` backward, both passes from one linearisation (Schraudolph 2002, "Fast curvature matrix-vector
products for second-order gradient descent"). With `C = B Bᵀ` its factor is `Jᵀ B`. Products with
the Hessian are derivatives of the gradient along a vector (Pearlmutter 1994, "Fast exact
multiplication by the Hessian").
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
"""A number of examples, known or traced."""


@final
class ImplicitExactCurvature:
    """Products of vectors with exact curvature matrices, none of which is ever formed.

    The objective is the mean over the batch of the weighted sum of all losses that `func`
    registers:

        objective = lambda params: sum(jnp.sum(loss.evaluate()) for loss in losses) / N

    Products with its Hessian equal `jax.jvp(jax.grad(objective), (params,), (v,))[1]`. Products
    with its Fisher matrix or GGN equal `Jᵀ C J v / N`, where J is the Jacobian of the inputs of the
    losses with respect to the parameters and C the Fisher matrix or the GGN of the losses in their
    inputs; those with a factor of these equal `Jᵀ B u / sqrt(N)`, where `C = B Bᵀ`; except that no
    matrix is ever formed. All methods are functions of arrays and compose with `jax.jit`,
    `jax.vmap` and `jax.grad`. `func` is traced once for each shape of its arguments.

    A loss inside loops or `jax.vmap` is one loss, with their axes merged into its batch axis. Its
    sum is still divided by the number of examples in the batch.

    Arguments:
        func: A function that registers at least one loss. Its result is ignored.
        params_index: Index of the argument that holds the parameters.
        batch_size_extractor: A function of the batch that returns its number of examples N, as a
            Python number or traced.
        batch_index: Index of the argument that holds the batch, or several, of which
            `batch_size_extractor` is then given a tuple. None for the last argument that is not the
            parameters.
        microbatch_size: Number of examples to process at a time; None for all. Results are the
            same, up to rounding, if the examples do not interact in `func`. The batch is divided
            along the leading axis of its arrays; random keys and arrays without axes are passed
            unchanged, like all other arguments.
        memory_budget: Memory that a product may use, in place of `microbatch_size`, in any form
            that `parse_memory` accepts: an integer number of bytes, a string such as "2GB", or a
            fraction of `available_memory()` such as "50%" or 0.5. The microbatch is the largest for
            which the product, compiled by itself, allocates no more.

    Raises:
        TypeError: If `microbatch_size` is not an integer.
        ValueError: If `microbatch_size` is not positive, or both a size and a budget are given.

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
        """Return the number of examples that means are taken over.

        Arguments:
            func_args: Arguments of `func`.

        Returns:
            The result of `batch_size_extractor` for the batch among the arguments.

        Raises:
            ValueError: If there is no such argument, or the default extractor finds arrays that
                disagree or none with an axis.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def func(w, batch):
            ...     x, y = batch
            ...     curvax.register_squared_error_loss(x @ w, y, weight=0.5)
            >>> batch = jnp.array([[2.0, 0.0], [0.0, 4.0]]), jnp.zeros((2, 1))
            >>> exact = curvax.ImplicitExactCurvature(func)
            >>> func_args = jnp.ones((2, 1)), batch
            >>> exact.batch_size(func_args)
            2
        """
        return self._batch_size_extractor(self._argument.of(func_args))

    def mean_loss(self, func_args: Sequence[PyTree]) -> Array:
        """Return the objective: the mean over the batch of the weighted sum of all losses.

        Arguments:
            func_args: Arguments of `func`.

        Returns:
            A scalar.

        Raises:
            RegistrationError: If `func` registers no loss, or JAX dropped one while tracing.
            ValueError: If a loss has no targets, or the batch size is unknown.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def func(w, batch):
            ...     x, y = batch
            ...     curvax.register_squared_error_loss(x @ w, y, weight=0.5)
            >>> batch = jnp.array([[2.0, 0.0], [0.0, 4.0]]), jnp.zeros((2, 1))
            >>> exact = curvax.ImplicitExactCurvature(func)
            >>> func_args = jnp.ones((2, 1)), batch
            >>> f"{exact.mean_loss(func_args):.3f}"  # A negative log-likelihood, with its constant.
            '5.286'
        """
        return self._mean(total, None, func_args, None)

    def multiply_hessian(
        self, func_args: Sequence[PyTree], parameter_structured_vector: PyTree
    ) -> PyTree:
        """Multiply a vector by the Hessian of the mean loss.

        Arguments:
            func_args: Arguments of `func`.
            parameter_structured_vector: A pytree like the parameters.

        Returns:
            A pytree like the parameters.

        Raises:
            RegistrationError: If `func` registers no loss, or JAX dropped one while tracing.
            ValueError: If the vector is not like the parameters, a loss has no targets, or the
                batch size is unknown.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def func(w, batch):
            ...     x, y = batch
            ...     curvax.register_squared_error_loss(x @ w, y, weight=0.5)
            >>> batch = jnp.array([[2.0, 0.0], [0.0, 4.0]]), jnp.zeros((2, 1))
            >>> exact = curvax.ImplicitExactCurvature(func)
            >>> func_args = jnp.ones((2, 1)), batch
            >>> exact.multiply_hessian(func_args, jnp.ones((2, 1)))
            Array([[2.],
                   [8.]], dtype=float32)
        """
        return self._mean(hessian_product, None, func_args, parameter_structured_vector)

    def multiply_fisher(
        self, func_args: Sequence[PyTree], parameter_structured_vector: PyTree
    ) -> PyTree:
        """Multiply a vector by the Fisher matrix of the mean loss.

        Arguments:
            func_args: Arguments of `func`.
            parameter_structured_vector: A pytree like the parameters.

        Returns:
            A pytree like the parameters.

        Raises:
            RegistrationError: If `func` registers no loss, or JAX dropped one while tracing.
            ValueError: If the vector is not like the parameters, a loss has no Fisher matrix, or
                the batch size is unknown.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def func(w, batch):
            ...     x, y = batch
            ...     curvax.register_squared_error_loss(x @ w, y, weight=0.5)
            >>> batch = jnp.array([[2.0, 0.0], [0.0, 4.0]]), jnp.zeros((2, 1))
            >>> exact = curvax.ImplicitExactCurvature(func)
            >>> func_args = jnp.ones((2, 1)), batch
            >>> exact.multiply_fisher(func_args, jnp.ones((2, 1))).round()
            Array([[2.],
                   [8.]], dtype=float32)
        """
        return self._mean(product, MATRICES["fisher"], func_args, parameter_structured_vector)

    def multiply_ggn(
        self, func_args: Sequence[PyTree], parameter_structured_vector: PyTree
    ) -> PyTree:
        """Multiply a vector by the generalised Gauss-Newton matrix of the mean loss.

        Arguments:
            func_args: Arguments of `func`.
            parameter_structured_vector: A pytree like the parameters.

        Returns:
            A pytree like the parameters.

        Raises:
            RegistrationError: If `func` registers no loss, or JAX dropped one while tracing.
            ValueError: If the vector is not like the parameters, or the batch size is unknown.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def func(w, batch):
            ...     x, y = batch
            ...     curvax.register_squared_error_loss(x @ w, y, weight=0.5)
            >>> batch = jnp.array([[2.0, 0.0], [0.0, 4.0]]), jnp.zeros((2, 1))
            >>> exact = curvax.ImplicitExactCurvature(func)
            >>> func_args = jnp.ones((2, 1)), batch
            >>> exact.multiply_ggn(func_args, jnp.ones((2, 1))).round()
            Array([[2.],
                   [8.]], dtype=float32)
        """
        return self._mean(product, MATRICES["ggn"], func_args, parameter_structured_vector)

    def multiply_fisher_factor_transpose(
        self, func_args: Sequence[PyTree], parameter_structured_vector: PyTree
    ) -> tuple[Array, ...]:
        """Multiply a vector by the transpose of a factor of the Fisher matrix.

        Arguments:
            func_args: Arguments of `func`.
            parameter_structured_vector: A pytree like the parameters.

        Returns:
            `Fᵀ v`, where the Fisher matrix is `F Fᵀ`: an array for each loss, with the shapes that
            `get_loss_inner_vector_shapes_and_batch_size` returns.

        Raises:
            RegistrationError: If `func` registers no loss, or JAX dropped one while tracing.
            ValueError: If the vector is not like the parameters, a loss has no Fisher matrix, or
                the batch size is unknown.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def func(w, batch):
            ...     x, y = batch
            ...     curvax.register_squared_error_loss(x @ w, y, weight=0.5)
            >>> batch = jnp.array([[2.0, 0.0], [0.0, 4.0]]), jnp.zeros((2, 1))
            >>> exact = curvax.ImplicitExactCurvature(func)
            >>> func_args = jnp.ones((2, 1)), batch
            >>> v = jnp.ones((2, 1))
            >>> (inner,) = exact.multiply_fisher_factor_transpose(func_args, v)
            >>> bool(jnp.allclose(jnp.vdot(inner, inner), 10.0))  # The quadratic form of v.
            True
        """
        return self._mean(
            factor_transpose, MATRICES["fisher"], func_args, parameter_structured_vector, root=True
        )

    def multiply_ggn_factor_transpose(
        self, func_args: Sequence[PyTree], parameter_structured_vector: PyTree
    ) -> tuple[Array, ...]:
        """Multiply a vector by the transpose of a factor of the generalised Gauss-Newton matrix.

        Arguments:
            func_args: Arguments of `func`.
            parameter_structured_vector: A pytree like the parameters.

        Returns:
            `Fᵀ v`, where the GGN is `F Fᵀ`: an array for each loss, with the shapes that
            `get_loss_inner_vector_shapes_and_batch_size` returns.

        Raises:
            RegistrationError: If `func` registers no loss, or JAX dropped one while tracing.
            ValueError: If the vector is not like the parameters, or the batch size is unknown.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def func(w, batch):
            ...     x, y = batch
            ...     curvax.register_squared_error_loss(x @ w, y, weight=0.5)
            >>> batch = jnp.array([[2.0, 0.0], [0.0, 4.0]]), jnp.zeros((2, 1))
            >>> exact = curvax.ImplicitExactCurvature(func)
            >>> func_args = jnp.ones((2, 1)), batch
            >>> v = jnp.ones((2, 1))
            >>> (inner,) = exact.multiply_ggn_factor_transpose(func_args, v)
            >>> bool(jnp.allclose(jnp.vdot(inner, inner), 10.0))  # The quadratic form of v.
            True
        """
        return self._mean(
            factor_transpose, MATRICES["ggn"], func_args, parameter_structured_vector, root=True
        )

    def multiply_fisher_factor(
        self, func_args: Sequence[PyTree], loss_inner_vectors: Sequence[Array]
    ) -> PyTree:
        """Multiply a vector by a factor of the Fisher matrix.

        Arguments:
            func_args: Arguments of `func`.
            loss_inner_vectors: An array for each loss, with the shapes that
                `get_loss_inner_vector_shapes_and_batch_size` returns.

        Returns:
            `F u`, where the Fisher matrix is `F Fᵀ`: a pytree like the parameters.

        Raises:
            RegistrationError: If `func` registers no loss, or JAX dropped one while tracing.
            ValueError: If the vectors have other shapes, a loss has no Fisher matrix, or the batch
                size is unknown.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def func(w, batch):
            ...     x, y = batch
            ...     curvax.register_squared_error_loss(x @ w, y, weight=0.5)
            >>> batch = jnp.array([[2.0, 0.0], [0.0, 4.0]]), jnp.zeros((2, 1))
            >>> exact = curvax.ImplicitExactCurvature(func)
            >>> func_args = jnp.ones((2, 1)), batch
            >>> inner = exact.multiply_fisher_factor_transpose(func_args, jnp.ones((2, 1)))
            >>> exact.multiply_fisher_factor(func_args, inner).round()
            Array([[2.],
                   [8.]], dtype=float32)
        """
        return self._mean(
            factor, MATRICES["fisher"], func_args, list(loss_inner_vectors), root=True
        )

    def multiply_ggn_factor(
        self, func_args: Sequence[PyTree], loss_inner_vectors: Sequence[Array]
    ) -> PyTree:
        """Multiply a vector by a factor of the generalised Gauss-Newton matrix.

        Arguments:
            func_args: Arguments of `func`.
            loss_inner_vectors: An array for each loss, with the shapes that
                `get_loss_inner_vector_shapes_and_batch_size` returns.

        Returns:
            `F u = Jᵀ B u / sqrt(N)`, a pytree like the parameters: u are the `loss_inner_vectors`,
            `B Bᵀ` is the GGN of the losses, and `F Fᵀ` that of the mean over N examples.

        Raises:
            RegistrationError: If `func` registers no loss, or JAX dropped one while tracing.
            ValueError: If the vectors have other shapes, or the batch size is unknown.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def func(w, batch):
            ...     x, y = batch
            ...     curvax.register_squared_error_loss(x @ w, y, weight=0.5)
            >>> batch = jnp.array([[2.0, 0.0], [0.0, 4.0]]), jnp.zeros((2, 1))
            >>> exact = curvax.ImplicitExactCurvature(func)
            >>> func_args = jnp.ones((2, 1)), batch
            >>> inner = exact.multiply_ggn_factor_transpose(func_args, jnp.ones((2, 1)))
            >>> exact.multiply_ggn_factor(func_args, inner).round()
            Array([[2.],
                   [8.]], dtype=float32)
        """
        return self._mean(factor, MATRICES["ggn"], func_args, list(loss_inner_vectors), root=True)

    def multiply_jacobian_transpose(
        self, func_args: Sequence[PyTree], loss_input_vectors: LossTangents
    ) -> PyTree:
        """Multiply a vector by the transpose of the model's Jacobian.

        The product is a sum over the batch, not a mean.

        Arguments:
            func_args: Arguments of `func`.
            loss_input_vectors: For each loss an array for each of its `parameter_dependants`, with
                the shapes that `get_loss_input_shapes_and_batch_size` returns.

        Returns:
            `Jᵀ u`, where J is the Jacobian of the inputs of the losses: a pytree like the
            parameters.

        Raises:
            RegistrationError: If `func` registers no loss, or JAX dropped one while tracing.
            ValueError: If the vectors have other shapes.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def func(w, batch):
            ...     x, y = batch
            ...     curvax.register_squared_error_loss(x @ w, y, weight=0.5)
            >>> batch = jnp.array([[2.0, 0.0], [0.0, 4.0]]), jnp.zeros((2, 1))
            >>> exact = curvax.ImplicitExactCurvature(func)
            >>> func_args = jnp.ones((2, 1)), batch
            >>> exact.multiply_jacobian_transpose(func_args, [[jnp.ones((2, 1))]])
            Array([[2.],
                   [4.]], dtype=float32)
        """
        vectors = [tuple(each) for each in loss_input_vectors]
        return self._sum(jacobian_transpose, None, func_args, vectors)

    def get_loss_inner_vector_shapes_and_batch_size(
        self, func_args: Sequence[PyTree], mode: str
    ) -> tuple[tuple[Shape, ...], Number]:
        """Return the shapes of the inner vectors of `multiply_fisher_factor` or `_ggn_factor`.

        This only traces the function.

        Arguments:
            func_args: Arguments of `func`.
            mode: "fisher" or "ggn".

        Returns:
            A tuple of a shape for each loss, and the batch size.

        Raises:
            RegistrationError: If `func` registers no loss, or JAX dropped one while tracing.
            ValueError: If `mode` is neither, a loss has no Fisher matrix, or the batch size is
                unknown.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def func(w, batch):
            ...     x, y = batch
            ...     curvax.register_squared_error_loss(x @ w, y, weight=0.5)
            >>> batch = jnp.array([[2.0, 0.0], [0.0, 4.0]]), jnp.zeros((2, 1))
            >>> exact = curvax.ImplicitExactCurvature(func)
            >>> func_args = jnp.ones((2, 1)), batch
            >>> exact.get_loss_inner_vector_shapes_and_batch_size(func_args, "ggn")
            (((2, 1),), 2)
        """
        if mode not in MATRICES:
            raise ValueError(f"{where()}: mode must be 'fisher' or 'ggn', got {mode!r}.")
        shapes = self._model.inspect(func_args, MATRICES[mode].inner_shapes)
        return shapes, self._known_batch_size(func_args)

    def get_loss_input_shapes_and_batch_size(
        self, func_args: Sequence[PyTree]
    ) -> tuple[tuple[tuple[Shape, ...], ...], Number]:
        """Return the shapes of the vectors of `multiply_jacobian_transpose`.

        This only traces the function.

        Arguments:
            func_args: Arguments of `func`.

        Returns:
            For each loss a tuple of the shapes of its inputs, and the batch size.

        Raises:
            RegistrationError: If `func` registers no loss, or JAX dropped one while tracing.
            ValueError: If the batch size is unknown.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def func(w, batch):
            ...     x, y = batch
            ...     curvax.register_squared_error_loss(x @ w, y, weight=0.5)
            >>> batch = jnp.array([[2.0, 0.0], [0.0, 4.0]]), jnp.zeros((2, 1))
            >>> exact = curvax.ImplicitExactCurvature(func)
            >>> func_args = jnp.ones((2, 1)), batch
            >>> exact.get_loss_input_shapes_and_batch_size(func_args)
            ((((2, 1),),), 2)
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
        """Divide a product, a sum over examples, by their number or by its square root."""
        size = self.batch_size(func_args)
        return _divide(self._sum(operation, matrix, func_args, vector), size, root)

    def _known_batch_size(self, func_args: Sequence[PyTree]) -> Number:
        """Return the batch size, as a Python int if it is known."""
        size = self.batch_size(func_args)
        known = as_integer(size)
        return size if known is None else known


def _divide(tree: PyTree, batch_size: Number, root: bool) -> PyTree:
    """Divide arrays by the batch size or its square root, which half precision may not hold."""

    def divide(x: Array) -> Array:
        wide = at_least_single(x.dtype)
        size = jnp.asarray(batch_size).astype(wide)
        return (x.astype(wide) / (jnp.sqrt(size) if root else size)).astype(x.dtype)

    return jax.tree.map(divide, tree)
