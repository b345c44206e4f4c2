"""The density of eigenvalues as a plot."""

from typing import Any

import numpy as np

from curvax.report._matplotlib import new_axes

__all__ = ["plot_spectral_density"]


def plot_spectral_density(density: Any, ax: Any = None) -> Any:
    """The density of eigenvalues, on a logarithmic scale.

    Arguments:
        density: a `curvax.SpectralDensity`.
        ax: matplotlib axes to plot into; new ones by default.

    Returns:
        The axes.
    """
    ax = new_axes() if ax is None else ax
    lowest, highest = density.smallest, density.largest
    margin = 0.05 * max(highest - lowest, abs(highest), 1e-30)
    values = np.linspace(lowest - margin, highest + margin, 800)
    ax.semilogy(values, np.maximum(density.density(values), 1e-12), color="C0")
    ax.axvline(highest, color="C3", linestyle="--", label=f"largest: {highest:.3g}")
    ax.set_ylim(bottom=1e-2 / density.dim / (highest - lowest + margin))
    ax.set_xlabel("eigenvalue")
    ax.set_ylabel("density")
    ax.set_title(f"{density.dim} eigenvalues, with a sum of about {density.trace:.3g}")
    ax.legend()
    return ax
