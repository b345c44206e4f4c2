"""Presentation of results: text tables, and plots. The only user of matplotlib, if installed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import matplotlib.axes


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows under a header, each column as wide as its longest entry."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)


def new_axes() -> "matplotlib.axes.Axes":
    """Return new axes in a new figure."""
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise ImportError(
            "curvax: plots need matplotlib, which is not installed: pip install 'curvax[plot]'."
        ) from error
    return plt.subplots(layout="constrained")[1]


def log_scales(ax: "matplotlib.axes.Axes") -> None:
    """Make both axes logarithmic, with tick labels in plain notation: 20, not 2 x 10^1."""
    from matplotlib.ticker import LogFormatter

    ax.set_xscale("log")
    ax.set_yscale("log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.4)))


# The classes that are plotted are defined in packages that import this module. These protocols are
# what the plots read of them.


@runtime_checkable
class Usage(Protocol):
    """The part of a `curvax.MemoryUsage` that is plotted."""

    @property
    def added_bytes(self) -> int: ...


@runtime_checkable
class Trial(Protocol):
    """A batch size that was compiled for a memory plan."""

    @property
    def size(self) -> int: ...
    @property
    def usage(self) -> Usage: ...


@runtime_checkable
class Plan(Protocol):
    """The part of a `curvax.MemoryPlan` that is plotted."""

    @property
    def batch_size(self) -> int: ...
    @property
    def max_size(self) -> int: ...
    @property
    def budget_bytes(self) -> int: ...
    @property
    def usage(self) -> Usage: ...
    @property
    def trials(self) -> Sequence[Trial]: ...


@runtime_checkable
class Density(Protocol):
    """The part of a `curvax.SpectralDensity` that is plotted."""

    @property
    def smallest(self) -> float: ...
    @property
    def largest(self) -> float: ...
    @property
    def dim(self) -> int: ...
    @property
    def trace(self) -> float: ...
    def density(self, values: NDArray[np.floating]) -> NDArray[np.floating]: ...


_UNITS = [(2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")]


def plot_memory_plan(
    plan: Plan, ax: "matplotlib.axes.Axes | None" = None
) -> "matplotlib.axes.Axes":
    """Plot memory against batch size for all sizes that were compiled, with the budget.

    Arguments:
        plan: A `curvax.MemoryPlan`.
        ax: Matplotlib axes to plot into; new ones by default.

    Returns:
        The axes.
    """
    ax = new_axes() if ax is None else ax
    trials = sorted(plan.trials, key=lambda trial: trial.size)
    sizes = [trial.size for trial in trials]
    needs = [max(1, trial.usage.added_bytes) for trial in trials]  # Zero has no logarithm.
    largest = max(plan.budget_bytes, *needs)
    unit, name = next((u, n) for u, n in _UNITS if largest >= u or u == 1)
    ax.plot(sizes, [need / unit for need in needs], "o-", color="C0", label="needed")
    ax.axhline(plan.budget_bytes / unit, color="C3", linestyle="--", label="budget")
    ax.plot(
        [plan.batch_size],
        [max(1, plan.usage.added_bytes) / unit],
        "o",
        markersize=11,
        fillstyle="none",
        color="C2",
        markeredgewidth=2,
        label=f"chosen: {plan.batch_size} of {plan.max_size}",
    )
    log_scales(ax)
    ax.set_xlabel("batch size")
    ax.set_ylabel(f"memory added by a call [{name}]")
    ax.legend()
    return ax


def plot_spectral_density(
    density: Density, ax: "matplotlib.axes.Axes | None" = None
) -> "matplotlib.axes.Axes":
    """Plot the density of eigenvalues, on a logarithmic scale.

    Arguments:
        density: A `curvax.SpectralDensity`.
        ax: Matplotlib axes to plot into; new ones by default.

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
