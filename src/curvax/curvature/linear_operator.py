"""Curvature as a linear operator: a matrix that is known only by its products.

`CurvatureOperator` has such a product for pytrees and for vectors, and turns itself into an
operator of lineax or SciPy, whose solvers then take it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike

from curvax._errors import where
from curvax._types import Array, PyTree
from curvax.curvature.block_diagonal import BlockDiagonalCurvature
from curvax.curvature.implicit import ImplicitExactCurvature

# The one door to lineax and matfree, which are optional.

_ADVICE = "which is not installed: pip install 'curvax[linear]'."


def import_lineax() -> Any:
    """The module lineax."""
    try:
        import lineax
    except ImportError as error:
        raise ImportError(f"{where()}: operators for lineax need it, {_ADVICE}") from error
    return lineax


def import_matfree_decompositions() -> Any:
    """The module matfree.decomp."""
    try:
        from matfree import decomp
    except ImportError as error:
        raise ImportError(f"curvax.spectral_density: this needs matfree, {_ADVICE}") from error
    return decomp


_MATRICES = ("fisher", "ggn", "hessian")


@dataclass(frozen=True, eq=False)
class CurvatureOperator:
    """A symmetric matrix, by its products with vectors.

    Attributes:
        multiply: its product with a pytree like the parameters.
        params: the shapes and dtypes of the parameters.
        is_positive: whether it is known to be positive semi-definite.
    """

    multiply: Callable[[PyTree], PyTree]
    params: PyTree
    is_positive: bool

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and of columns."""
        size = sum(x.size for x in jax.tree.leaves(self.params))
        return size, size

    @property
    def dtype(self) -> Any:
        """The dtype of the vectors that `matvec` takes."""
        return jnp.result_type(*jax.tree.leaves(self.params))

    def matvec(self, vector: ArrayLike) -> Array:
        """The product with a vector: a pytree like the parameters, as `ravel_pytree` flattens it.

        Arguments:
            vector: as many numbers as the parameters have elements.

        Returns:
            As many numbers.

        Raises:
            ValueError: if there are more or fewer.
        """
        flat = jnp.asarray(vector, self.dtype)
        if flat.shape != self.shape[:1]:
            raise ValueError(
                f"curvax.CurvatureOperator: a vector has the shape {self.shape[:1]}, got "
                f"{flat.shape}."
            )
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.params)
        return ravel_pytree(self.multiply(ravel_pytree(zeros)[1](flat)))[0].astype(self.dtype)

    def as_lineax(self) -> Any:
        """The same as an operator of lineax, on pytrees like the parameters.

        Returns:
            A `lineax.FunctionLinearOperator`, tagged as symmetric or positive semi-definite.
        """
        lineax = import_lineax()
        tag = lineax.positive_semidefinite_tag if self.is_positive else lineax.symmetric_tag
        return lineax.FunctionLinearOperator(self.multiply, self.params, tag)

    def as_scipy(self) -> Any:
        """The same as an operator of SciPy, on NumPy vectors.

        Returns:
            A `scipy.sparse.linalg.LinearOperator`.
        """
        from scipy.sparse import linalg

        compiled = jax.jit(self.matvec)
        product = lambda vector: np.asarray(compiled(np.ravel(vector)))
        made: Any = linalg.LinearOperator
        return made(self.shape, matvec=product, rmatvec=product, dtype=self.dtype)


def as_linear_operator(
    curvature: BlockDiagonalCurvature | ImplicitExactCurvature,
    at: Any,
    *,
    identity_weight: ArrayLike = 0.0,
    inverse: bool = False,
    matrix: str = "ggn",
    use_cached: bool = False,
) -> CurvatureOperator:
    """A curvature matrix, or its damped inverse, as a linear operator.

    Arguments:
        curvature: an estimator, or exact products.
        at: the state of the estimator; for exact products, the arguments of the function.
        identity_weight: a multiple of the identity that is added.
        inverse: whether the operator is the inverse. Only estimators have one; for exact products,
            give the operator to a solver.
        matrix: which of the exact products: "fisher", "ggn" or "hessian". Estimators do not need
            it.
        use_cached: whether an estimator uses what its cache has; the power, 1 or -1, must have been
            cached as an exact one.

    Returns:
        The operator.

    Raises:
        ValueError: if there is no such matrix, or no inverse.

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
                f"{where()}: exact products have no inverse. Give the operator itself to a solver, "
                f"such as lineax.CG, or take an estimator."
            )
        if matrix not in _MATRICES:
            raise ValueError(f"{where()}: matrix is one of {_MATRICES}, got {matrix!r}.")
        return _exact(curvature, at, identity_weight, matrix)
    power = -1 if inverse else 1

    def multiply(vector: PyTree) -> PyTree:
        options = (identity_weight, power, True, use_cached, None)
        return curvature.multiply_matpower(at, vector, *options)

    return CurvatureOperator(multiply, curvature.params_shapes, True)


def _exact(
    curvature: ImplicitExactCurvature, func_args: Any, identity_weight: ArrayLike, matrix: str
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
