"""The plot of `scaling.py`: operations, bytes and memory per device against their number.

Solid lines show a mean step, dotted ones a step in which inverses are computed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

__all__ = ["draw"]

STYLES = {
    "replicated": ("K-FAC, inverses and products on every device", "#e0a3ab", 4.0),
    "shared": ("K-FAC, inverses and products distributed (the default)", "#2e6f95", 1.6),
    "split": ("K-FAC, state sharded, too (shard_state=True)", "#3a8f5d", 1.6),
}
"""For each plan a label, a colour and a line width, since lines may coincide."""

Of = Callable[[Any], float]


def draw(problems: dict[str, Any], path: Path) -> None:
    """Draw a row of panels for each problem."""
    settings: Any = {"svg.hashsalt": "curvax", "font.size": 9, "axes.titlesize": 9}
    with mpl.rc_context(settings):
        figure = plt.figure(figsize=(9.6, 3.1 * len(problems) + 0.9), layout="constrained")
        ratios = [*[3.1] * len(problems), 0.55]
        parts: Any = figure.subfigures(len(problems) + 1, 1, height_ratios=ratios)
        *rows, last = parts
        for row, (title, curves) in zip(rows, problems.items(), strict=True):
            row.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=10)
            axes = row.subplots(1, 3)
            _operations(axes[0], curves)
            _sent(axes[1], curves)
            _kept(axes[2], curves)
        last.legend(
            *rows[0].axes[0].get_legend_handles_labels(), loc="center", ncols=2, frameon=False
        )
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def _operations(ax: Any, curves: Any) -> None:
    own = ("inverses", "preconditioning")
    apart: Of = lambda c: c.mean({phase: c.flops[phase] for phase in own})
    worst: Of = lambda c: sum(c.flops[phase] for phase in own)
    _curves(ax, curves, apart, 1e12)
    _reference(ax, curves, lambda c: c.flops["gradient"], 1e12)
    _reference(
        ax, curves, lambda c: c.flops["gradient"] + c.flops["statistics"], 1e12, is_kfac=True
    )
    for name, (_, color, _) in STYLES.items():
        values = [worst(costs) / 1e12 for costs in curves[name].values()]
        ax.plot(list(curves[name]), values, color=color, lw=1.2, ls=":")
    _decorate(ax, "TFLOP in a step")


def _sent(ax: Any, curves: Any) -> None:
    _curves(ax, curves, lambda c: c.mean(c.sent), 1e9)
    _reference(ax, curves, lambda c: c.sent.get("gradient", 0), 1e9)
    _decorate(ax, "GB sent in a step")


def _kept(ax: Any, curves: Any) -> None:
    kinds = ("parameters", "gradient", "momentum")
    _curves(ax, curves, lambda c: sum(c.memory.values()), 1e9)
    _reference(ax, curves, lambda c: sum(c.memory[kind] for kind in kinds), 1e9)
    _decorate(ax, "GB kept, without activations")


def _curves(ax: Any, curves: Any, of: Of, unit: float) -> None:
    for name, (label, color, width) in STYLES.items():
        # A single device sends nothing.
        values = {n: of(costs) / unit for n, costs in curves[name].items() if of(costs)}
        marker = {"marker": "o", "ms": 3} if width < 2 else {}
        ax.plot(list(values), list(values.values()), color=color, lw=width, label=label, **marker)


def _reference(ax: Any, curves: Any, of: Of, unit: float, *, is_kfac: bool = False) -> None:
    label = "K-FAC, both passes over a batch" if is_kfac else "gradient descent with momentum"
    style = {"color": "#555555"} if is_kfac else {"color": "#8a8a8a", "ls": "--"}
    found = {n: of(costs) / unit for n, costs in curves["shared"].items() if of(costs)}
    ax.plot(list(found), list(found.values()), lw=1.2, label=label, **style)


def _decorate(ax: Any, title: str) -> None:
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_title(title, loc="left", color="#333333")
    ax.set_xlabel("devices")
    ax.xaxis.set_major_locator(FixedLocator([1, 4, 16, 64, 256]))
    ax.xaxis.set_minor_locator(NullLocator())
    low, high = ax.get_ylim()
    subs = [1.0] if high / low > 100 else [1.0, 2.0, 5.0]
    ax.yaxis.set_major_locator(LogLocator(subs=subs))
    ax.yaxis.set_minor_locator(NullLocator())
    for along in (ax.xaxis, ax.yaxis):
        along.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
    ax.set_xlim(0.85, 300)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
