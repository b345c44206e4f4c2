"""The one door to matplotlib, which is optional."""

from typing import Any

__all__ = ["log_scales", "new_axes"]


def new_axes() -> Any:
    """New axes in a new figure."""
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
