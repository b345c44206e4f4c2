"""`spectral_density`: the distribution of the eigenvalues of a curvature matrix.

Stochastic Lanczos quadrature, with the tridiagonalisation of matfree: from a random vector, a few
products with the matrix give a few eigenvalues (Ritz values) with weights, such that weighted sums
over them estimate means over all eigenvalues. The estimate is averaged over several vectors (Lin,
Saad & Yang 2016, "Approximating spectral densities of large matrices"; Ghorbani, Krishnan & Xiao
2019, "An investigation into neural net optimization via Hessian eigenvalue density").
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from numpy.typing import NDArray

from curvax._errors import where
from curvax._types import Array
from curvax.curvature.linear_operator import CurvatureOperator, import_matfree_decompositions

if TYPE_CHECKING:
    import matplotlib.axes


@dataclass(frozen=True, eq=False)
class SpectralDensity:
    """An estimate of the distribution of a matrix's eigenvalues: Ritz values with weights.

    Attributes:
        eigenvalues: Ritz values, of shape (samples, steps).
        weights: Their weights, of shape (samples, steps), which add up to one.
        dim: Number of eigenvalues of the matrix.

    Examples:
        >>> import numpy as np
        >>> import curvax
        >>> values, weights = np.array([[1.0, 3.0]]), np.array([[0.75, 0.25]])
        >>> density = curvax.SpectralDensity(values, weights, dim=100)
        >>> density.largest, density.trace, density.share_above(2.0)
        (3.0, 150.0, 0.25)
    """

    eigenvalues: NDArray[np.floating]
    weights: NDArray[np.floating]
    dim: int

    @property
    def largest(self) -> float:
        """The largest Ritz value: an estimate, from below, of the largest eigenvalue."""
        return float(self._found.max())

    @property
    def smallest(self) -> float:
        """The smallest Ritz value: an estimate, from above, of the smallest eigenvalue."""
        return float(self._found.min())

    @property
    def trace(self) -> float:
        """An estimate of the sum of all eigenvalues."""
        return float(self.dim * np.sum(self.weights * self.eigenvalues))

    @property
    def _found(self) -> NDArray[np.floating]:
        """The Ritz values whose weights are not rounding."""
        return self.eigenvalues[self.weights > np.finfo(self.weights.dtype).eps]

    def share_above(self, value: float) -> float:
        """Estimate the fraction of eigenvalues that are larger than a value.

        Arguments:
            value: The value.

        Returns:
            A number between 0 and 1.

        Examples:
            >>> import numpy as np
            >>> import curvax
            >>> values, weights = np.array([[1.0, 3.0]]), np.array([[0.75, 0.25]])
            >>> curvax.SpectralDensity(values, weights, dim=100).share_above(2.0)
            0.25
        """
        return float(np.sum(self.weights[self.eigenvalues > value]))

    def density(self, values: ArrayLike, width: float | None = None) -> NDArray[np.floating]:
        """Return the density at some values, smoothed by a normal distribution.

        Arguments:
            values: The values.
            width: Standard deviation of the normal distribution; by default a hundredth of the
                range of the eigenvalues.

        Returns:
            The densities, of the shape of `values`.

        Examples:
            >>> import numpy as np
            >>> import curvax
            >>> values, weights = np.array([[1.0, 3.0]]), np.array([[0.75, 0.25]])
            >>> density = curvax.SpectralDensity(values, weights, dim=100)
            >>> grid = np.linspace(0.0, 4.0, 401)
            >>> round(float(density.density(grid).sum() * 0.01), 3)
            1.0
        """
        spread = max(self.largest - self.smallest, abs(self.largest), 1e-30)
        width = spread / 100 if width is None else width
        distances = (np.asarray(values)[..., None] - self.eigenvalues.ravel()) / width
        kernels = np.exp(-(distances**2) / 2) / (width * np.sqrt(2 * np.pi))
        return kernels @ self.weights.ravel()

    def __str__(self) -> str:
        return (
            f"{self.dim} eigenvalues from {self.smallest:.3g} to {self.largest:.3g}, with a sum of "
            f"about {self.trace:.3g}; {100 * self.share_above(0.01 * self.largest):.3g} % are "
            f"larger than a hundredth of the largest"
        )

    def plot(self, ax: "matplotlib.axes.Axes | None" = None) -> "matplotlib.axes.Axes":
        """Plot the density on a logarithmic scale; needs matplotlib.

        Arguments:
            ax: Matplotlib axes to plot into; by default those of a new figure.

        Returns:
            The axes.

        Examples:
            >>> import numpy as np
            >>> import curvax
            >>> values, weights = np.array([[1.0, 3.0]]), np.array([[0.75, 0.25]])
            >>> axes = curvax.SpectralDensity(values, weights, dim=100).plot()
            >>> axes.get_xlabel()
            'eigenvalue'
        """
        from curvax._reports import plot_spectral_density

        return plot_spectral_density(self, ax)


def spectral_density(
    operator: CurvatureOperator, rng: Array, *, num_samples: int = 4, num_steps: int = 64
) -> SpectralDensity:
    """Estimate the density of a symmetric matrix's eigenvalues, by stochastic Lanczos quadrature.

    This needs matfree.

    Arguments:
        operator: The matrix, as `as_linear_operator` returns it.
        rng: Random key for the initial vectors.
        num_samples: Number of initial vectors.
        num_steps: Number of products with the matrix for each vector; at most its number of rows.

    Returns:
        The density.

    Raises:
        ValueError: If `num_samples` or `num_steps` is less than one.
        TypeError: If the operator is not a `CurvatureOperator`.
        ImportError: If matfree is not installed.

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
            f"{where()}: num_samples and num_steps must be at least one, got {num_samples} and "
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
    tridiagonalise = import_matfree_decompositions().tridiag_sym(
        min(num_steps, dim), custom_vjp=False
    )

    def of_sample(key: Array) -> tuple[Array, Array]:
        vector = jax.random.rademacher(key, (dim,), operator.dtype)
        basis, tridiagonal, *_ = tridiagonalise(operator.matvec, vector / dim**0.5)
        values, vectors = jnp.linalg.eigh(_before_breakdown(operator, basis, tridiagonal))
        return values, vectors[0] ** 2

    keys = jax.random.split(rng, num_samples)
    values, weights = jax.jit(lambda keys: jax.lax.map(of_sample, keys))(keys)
    return SpectralDensity(np.asarray(values), np.asarray(weights) / num_samples, dim)


def _before_breakdown(operator: CurvatureOperator, basis: Array, tridiagonal: Array) -> Array:
    """Return the tridiagonal matrix with zeros after the step at which the recurrence broke down.

    It breaks down once the Krylov space is invariant, as for a matrix of low rank. From there on
    `matrix @ basis` and `basis @ tridiagonal` differ by more than rounding.
    """
    products = jax.lax.map(operator.matvec, basis)
    errors = jnp.linalg.norm(products - tridiagonal @ basis, axis=1)
    tolerance = jnp.sqrt(jnp.finfo(tridiagonal.dtype).eps) * jnp.abs(tridiagonal).max()
    is_right = errors <= tolerance
    is_kept = jnp.concatenate([jnp.ones(1, bool), jnp.cumprod(is_right[:-1]).astype(bool)])
    return jnp.where(is_kept[:, None] & is_kept[None, :], tridiagonal, 0)
