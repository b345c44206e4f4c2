"""`spectral_density`: how the eigenvalues of a curvature matrix are distributed.

By Lanczos' method, as matfree has it: from a random vector, some products with the matrix give a
few eigenvalues with weights, so that weighted sums over them are like means over all eigenvalues.
The mean over several vectors is what is known of the density.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from curvax._errors import where
from curvax._types import Array
from curvax.curvature.linear_operator import CurvatureOperator, import_matfree_decompositions


@dataclass(frozen=True, eq=False)
class SpectralDensity:
    """Eigenvalues with weights that add up to one: what the spectrum of a matrix is like.

    Attributes:
        eigenvalues: (samples, steps).
        weights: (samples, steps), which add up to one.
        dim: the number of eigenvalues that the matrix has.
    """

    eigenvalues: NDArray[Any]
    weights: NDArray[Any]
    dim: int

    @property
    def largest(self) -> float:
        """The largest eigenvalue."""
        return float(self._found.max())

    @property
    def smallest(self) -> float:
        """The smallest eigenvalue that was found."""
        return float(self._found.min())

    @property
    def trace(self) -> float:
        """An estimate of the sum of all eigenvalues."""
        return float(self.dim * np.sum(self.weights * self.eigenvalues))

    @property
    def _found(self) -> NDArray[Any]:
        return self.eigenvalues[self.weights > np.finfo(self.weights.dtype).eps]

    def share_above(self, value: float) -> float:
        """An estimate of the share of eigenvalues that are larger than a value."""
        return float(np.sum(self.weights[self.eigenvalues > value]))

    def density(self, values: Any, width: float | None = None) -> NDArray[Any]:
        """The density at some values, each eigenvalue smeared out by a normal distribution.

        Arguments:
            values: where.
            width: how far; by default a hundredth of the range of all eigenvalues.

        Returns:
            As many numbers.
        """
        spread = max(self.largest - self.smallest, abs(self.largest), 1e-30)
        width = spread / 100 if width is None else width
        apart = (np.asarray(values)[..., None] - self.eigenvalues.ravel()) / width
        bells = np.exp(-(apart**2) / 2) / (width * np.sqrt(2 * np.pi))
        return bells @ self.weights.ravel()

    def __str__(self) -> str:
        return (
            f"{self.dim} eigenvalues from {self.smallest:.3g} to {self.largest:.3g}, with a sum of "
            f"about {self.trace:.3g}; {100 * self.share_above(0.01 * self.largest):.3g} % are "
            f"larger than a hundredth of the largest"
        )

    def plot(self, ax: Any = None) -> Any:
        """Plot the density; needs matplotlib.

        Arguments:
            ax: matplotlib axes to draw on; by default a figure of its own.

        Returns:
            The axes.
        """
        from curvax._reports import plot_spectral_density

        return plot_spectral_density(self, ax)


def spectral_density(
    operator: CurvatureOperator, rng: Array, *, num_samples: int = 4, num_steps: int = 64
) -> SpectralDensity:
    """The density of the eigenvalues of a symmetric matrix, by Lanczos' method; needs matfree.

    Arguments:
        operator: the matrix, as `as_linear_operator` returns it.
        rng: a key for the vectors to begin with.
        num_samples: how many of these.
        num_steps: how many products with each; fewer if the matrix has fewer rows.

    Returns:
        The density.

    Raises:
        ValueError: if a number is less than one.
        TypeError: if the matrix is not a `CurvatureOperator`.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def func(w, x):
        ...     curvax.register_normal_predictive_distribution(x @ w, variance=1.0)
        >>> args = jnp.ones((2, 1)), jnp.array([[2.0, 0.0], [0.0, 4.0]])
        >>> exact = curvax.ImplicitExactCurvature(func)
        >>> operator = curvax.as_linear_operator(exact, args, matrix="fisher")
        >>> density = curvax.spectral_density(operator, jax.random.key(0))
        >>> f"{density.dim} eigenvalues, {density.smallest:.3f} to {density.largest:.3f}"
        '2 eigenvalues, 2.000 to 8.000'
    """
    if num_samples < 1 or num_steps < 1:
        raise ValueError(
            f"{where()}: num_samples and num_steps are at least one, got {num_samples} and "
            f"{num_steps}."
        )
    if not isinstance(operator, CurvatureOperator):
        raise TypeError(
            f"{where()}: operator must be a curvax.CurvatureOperator, got "
            f"{type(operator).__name__}. Exact products and estimators become one by "
            f"curvax.as_linear_operator: as_linear_operator(exact, func_args, matrix='ggn'), or "
            f"as_linear_operator(estimator, state)."
        )
    dim = operator.shape[0]
    tridiagonal = import_matfree_decompositions().tridiag_sym(min(num_steps, dim), custom_vjp=False)

    def of_sample(key: Array) -> tuple[Array, Array]:
        vector = jax.random.rademacher(key, (dim,), operator.dtype)
        basis, small, *_ = tridiagonal(operator.matvec, vector / dim**0.5)
        values, vectors = jnp.linalg.eigh(_trusted(operator, basis, small))
        return values, vectors[0] ** 2

    keys = jax.random.split(rng, num_samples)
    values, weights = jax.jit(lambda keys: jax.lax.map(of_sample, keys))(keys)
    return SpectralDensity(np.asarray(values), np.asarray(weights) / num_samples, dim)


def _trusted(operator: CurvatureOperator, basis: Array, small: Array) -> Array:
    """The tridiagonal matrix, cut off where the method broke down.

    It does so as soon as all there is to find was found, as for a matrix of low rank. From there
    on, the matrix times a vector of the basis is not what the tridiagonal matrix says it is.
    """
    products = jax.lax.map(operator.matvec, basis)
    errors = jnp.linalg.norm(products - small @ basis, axis=1)
    is_right = errors <= jnp.sqrt(jnp.finfo(small.dtype).eps) * jnp.abs(small).max()
    before = jnp.concatenate([jnp.ones(1, bool), jnp.cumprod(is_right[:-1]).astype(bool)])
    return jnp.where(before[:, None] & before[None, :], small, 0)
