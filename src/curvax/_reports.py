"""How results are shown: tables of text, and plots. The only user of matplotlib, if installed."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows under a head, each column as wide as its longest entry."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)


def new_axes() -> Any:
    """Return new axes in a new figure."""
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise ImportError(
            "curvax: plots need matplotlib, which is not installed: pip install 'curvax[plot]'."
        ) from error
    return plt.subplots(layout="constrained")[1]


def log_scales(ax: Any) -> None:
    """Make both axes logarithmic, with plain numbers: 20, not 2 x 10^1."""
    from matplotlib.ticker import LogFormatter

    ax.set_xscale("log")
    ax.set_yscale("log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.4)))


def plot_memory_plan(plan: Any, ax: Any = None) -> Any:
    """Plot memory against batch size for all sizes that were compiled, with the budget.

    Arguments:
        plan: a `curvax.MemoryPlan`.
        ax: matplotlib axes to plot into; new ones by default.

    Returns:
        The axes.
    """
    ax = new_axes() if ax is None else ax
    trials = sorted(plan.trials, key=lambda trial: trial.size)
    sizes = [trial.size for trial in trials]
    needs = [max(1, trial.usage.added_bytes) for trial in trials]  # Nothing has no logarithm.
    most = max(plan.budget_bytes, *needs)
    unit, name = next((u, n) for u, n in _UNITS if most >= u or u == 1)
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


_UNITS = [(2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")]


def plot_spectral_density(density: Any, ax: Any = None) -> Any:
    """Plot the density of eigenvalues, on a logarithmic scale.

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
