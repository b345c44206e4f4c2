"""A memory plan as a plot: what each size needs, and the budget."""

from typing import Any

from curvax.report._matplotlib import log_scales, new_axes

__all__ = ["plot_memory_plan"]


def plot_memory_plan(plan: Any, ax: Any = None) -> Any:
    """Memory against batch size for all sizes that were compiled, with the budget.

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
