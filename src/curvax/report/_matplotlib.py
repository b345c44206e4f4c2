"""The one door to matplotlib, which is optional."""

from typing import Any

__all__ = ["new_axes"]


def new_axes() -> Any:
    """New axes in a new figure."""
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise ImportError(
            "curvax: plots need matplotlib, which is not installed: pip install 'curvax[plot]'."
        ) from error
    return plt.subplots(layout="constrained")[1]
