"""Curvature as a linear operator: a matrix that is known only by its products with vectors.

`CurvatureOperator` multiplies pytrees and flat vectors. It converts to an operator of lineax or
SciPy, for their solvers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike

from curvax._errors import where
from curvax._types import Array, PyTree
from curvax.curvature.block_diagonal import BlockDiagonalCurvature, BlockDiagonalState
from curvax.curvature.implicit import ImplicitExactCurvature

if TYPE_CHECKING:
    import lineax
    import scipy.sparse.linalg

# lineax and matfree are optional dependencies; nothing else imports them.

_ADVICE = "which is not installed: pip install 'curvax[linear]'."


def import_lineax() -> ModuleType:
    """Import lineax; raise an error that says how to install it."""
    try:
        import lineax
    except ImportError as error:
        raise ImportError(f"{where()}: operators for lineax need it, {_ADVICE}") from error
    return lineax


def import_matfree_decompositions() -> ModuleType:
    """Import matfree.decomp; raise an error that says how to install it."""
    try:
        from matfree import decomp
    except ImportError as error:
        raise ImportError(f"curvax.spectral_density: this needs matfree, {_ADVICE}") from error
    return decomp


_MATRICES = ("fisher", "ggn", "hessian")


@dataclass(frozen=True, eq=False)
class CurvatureOperator:
    """A symmetric matrix that is known by its products with vectors.

    Attributes:
        multiply: The product with a pytree like the parameters.
        params: The shapes and dtypes of the parameters: a pytree of `jax.ShapeDtypeStruct`s.
        is_positive: Whether the matrix is known to be positive semi-definite.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> params = {"b": jax.ShapeDtypeStruct((2,), jnp.float32)}
        >>> double = lambda tree: jax.tree.map(lambda x: 2 * x, tree)
        >>> operator = curvax.CurvatureOperator(double, params, is_positive=True)
        >>> operator.shape, operator.matvec(jnp.ones(2))
        ((2, 2), Array([2., 2.], dtype=float32))
    """

    multiply: Callable[[PyTree], PyTree]
    params: PyTree
    is_positive: bool

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        size = sum(x.size for x in jax.tree.leaves(self.params))
        return size, size

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the vectors of `matvec`."""
        return jnp.result_type(*jax.tree.leaves(self.params))

    def matvec(self, vector: ArrayLike) -> Array:
        """Multiply a flat vector: a pytree like the parameters as `ravel_pytree` flattens it.

        Arguments:
            vector: A vector with as many elements as the parameters.

        Returns:
            A vector with as many elements.

        Raises:
            ValueError: If the vector has another shape.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def func(w, x):
            ...     curvax.register_normal_predictive_distribution(x @ w, variance=1.0)
            >>> args = jnp.ones((2, 1)), jnp.array([[1.0, 2.0], [3.0, 0.0]])
            >>> exact = curvax.ImplicitExactCurvature(func)
            >>> curvax.as_linear_operator(exact, args).matvec(jnp.array([0.0, 1.0]))
            Array([1., 2.], dtype=float32)
        """
        flat = jnp.asarray(vector, self.dtype)
        if flat.shape != self.shape[:1]:
            raise ValueError(
                f"curvax.CurvatureOperator: a vector has the shape {self.shape[:1]}, got "
                f"{flat.shape}."
            )
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.params)
        return ravel_pytree(self.multiply(ravel_pytree(zeros)[1](flat)))[0].astype(self.dtype)

    def as_lineax(self) -> "lineax.FunctionLinearOperator":
        """Return a lineax operator on pytrees like the parameters.

        Returns:
            A `lineax.FunctionLinearOperator`, tagged as symmetric or positive semi-definite.

        Raises:
            ImportError: If lineax is not installed.

        Examples:
            >>> import jax.numpy as jnp
            >>> import lineax
            >>> import curvax
            >>> def func(w, x):
            ...     curvax.register_normal_predictive_distribution(x @ w, variance=1.0)
            >>> args = jnp.ones((2, 1)), jnp.array([[2.0, 0.0], [0.0, 4.0]])
            >>> exact = curvax.ImplicitExactCurvature(func)
            >>> operator = curvax.as_linear_operator(exact, args, identity_weight=2.0).as_lineax()
            >>> solver = lineax.CG(rtol=1e-6, atol=1e-6)
            >>> gradient = jnp.array([[4.0], [10.0]])
            >>> lineax.linear_solve(operator, gradient, solver).value.round()
            Array([[1.],
                   [1.]], dtype=float32)
        """
        lineax = import_lineax()
        tag = lineax.positive_semidefinite_tag if self.is_positive else lineax.symmetric_tag
        return lineax.FunctionLinearOperator(self.multiply, self.params, tag)

    def as_scipy(self) -> "scipy.sparse.linalg.LinearOperator":
        """Return a SciPy operator on NumPy vectors.

        Returns:
            A `scipy.sparse.linalg.LinearOperator`.

        Examples:
            >>> import jax.numpy as jnp
            >>> from scipy.sparse.linalg import eigsh
            >>> import curvax
            >>> def func(w, x):
            ...     curvax.register_normal_predictive_distribution(x @ w, variance=1.0)
            >>> args = jnp.ones((2, 1)), jnp.array([[2.0, 0.0], [0.0, 4.0]])
            >>> exact = curvax.ImplicitExactCurvature(func)
            >>> operator = curvax.as_linear_operator(exact, args).as_scipy()
            >>> [round(float(x), 3) for x in eigsh(operator, k=1, return_eigenvectors=False)]
            [8.0]
        """
        from scipy.sparse import linalg

        compiled = jax.jit(self.matvec)
        multiply = lambda vector: np.asarray(compiled(np.ravel(vector)))
        # `LinearOperator.__new__` returns a subclass with other parameters.
        make: Any = linalg.LinearOperator
        return make(self.shape, matvec=multiply, rmatvec=multiply, dtype=self.dtype)


def as_linear_operator(
    curvature: BlockDiagonalCurvature | ImplicitExactCurvature,
    at: BlockDiagonalState | Sequence[PyTree],
    *,
    identity_weight: ArrayLike = 0.0,
    inverse: bool = False,
    matrix: str = "ggn",
    use_cached: bool = False,
) -> CurvatureOperator:
    """Return a curvature matrix, or its damped inverse, as a linear operator.

    Arguments:
        curvature: An estimator, or exact products.
        at: The state of the estimator; for exact products, the arguments of the function.
        identity_weight: Multiple of the identity that is added to the matrix.
        inverse: Whether to return the inverse. Exact products have none; pass the operator to a
            solver instead.
        matrix: Matrix of the exact products: "fisher", "ggn" or "hessian". Ignored for estimators.
        use_cached: Whether an estimator uses its cache, which must hold the exact power 1 or -1.

    Returns:
        The operator.

    Raises:
        ValueError: If there is no such matrix or inverse.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def func(w, x):
        ...     curvax.register_normal_predictive_distribution(x @ w, variance=1.0)
        >>> args = jnp.ones((2, 1)), jnp.array([[1.0, 2.0], [3.0, 0.0]])
        >>> exact = curvax.ImplicitExactCurvature(func)
        >>> operator = curvax.as_linear_operator(exact, args, matrix="fisher")
        >>> operator.matvec(jnp.array([1.0, 0.0]))
        Array([5., 1.], dtype=float32)
    """
    if isinstance(curvature, ImplicitExactCurvature):
        if inverse:
            raise ValueError(
                f"{where()}: exact products have no inverse. Pass the operator itself to a solver, "
                f"such as lineax.CG, or use an estimator."
            )
        if matrix not in _MATRICES:
            raise ValueError(f"{where()}: matrix must be one of {_MATRICES}, got {matrix!r}.")
        return _exact(curvature, cast(Sequence[PyTree], at), identity_weight, matrix)
    state, power = cast(BlockDiagonalState, at), -1 if inverse else 1

    def multiply(vector: PyTree) -> PyTree:
        options = (identity_weight, power, True, use_cached, None)
        return curvature.multiply_matpower(state, vector, *options)

    return CurvatureOperator(multiply, curvature.params_shapes, True)


def _exact(
    curvature: ImplicitExactCurvature,
    func_args: Sequence[PyTree],
    identity_weight: ArrayLike,
    matrix: str,
) -> CurvatureOperator:
    product = getattr(curvature, f"multiply_{matrix}")

    def multiply(vector: PyTree) -> PyTree:
        weight = jnp.asarray(identity_weight)
        add = lambda x, v: x + weight.astype(x.dtype) * v
        return jax.tree.map(add, product(func_args, vector), vector)

    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)),
        tuple(func_args)[curvature.params_index],
    )
    return CurvatureOperator(multiply, params, matrix != "hessian")
