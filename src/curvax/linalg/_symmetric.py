"""Products that are symmetric: one triangle is computed, the other is its mirror image.

A product is cut into panels, each as wide as the triangle is there. Products of large dense parts
remain, which is what machines are good at. Each panel also makes the program larger and slower to
compile, so there are never many.
"""

import itertools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from curvax._types import Array

__all__ = ["symmetric_product"]

MOST_PANELS = 5
"""How a product is cut: more panels save little time, and each takes its time to compile."""

NARROWEST = 128
"""How narrow panels may be."""


def symmetric_product(x: Array, y: Array | None = None) -> Array:
    """`x.T @ x`, or `x.T @ y` if that is known to be symmetric, by one triangle.

    Along axes in front there are several such matrices.
    """
    y = x if y is None else y
    panel = lambda start, end: jnp.matrix_transpose(x[..., start:end]) @ y[..., :end]
    return _by_panels(panel, x.shape[-1])


def _by_panels(panel: Callable[[int, int], Array], size: int) -> Array:
    """A symmetric matrix of which `panel` returns some rows, up to the last that is diagonal."""
    count = max(1, min(MOST_PANELS, size // NARROWEST))
    width = 16 * max(1, -(-size // (16 * count)))  # What vector instructions like.
    edges = [*range(0, size, width), size]
    panels = [panel(start, end) for start, end in itertools.pairwise(edges)]
    if len(panels) == 1:
        return panels[0]
    zero = jnp.zeros((), panels[0].dtype)
    before = [(0, 0, 0)] * (panels[0].ndim - 1)
    widened = [lax.pad(x, zero, [*before, (0, size - x.shape[-1], 0)]) for x in panels]
    lower = jnp.concatenate(widened, axis=-2)
    # A choice between the matrix and its transpose makes programs of JAX 0.10 for CPUs crash.
    return jnp.tril(lower) + jnp.matrix_transpose(jnp.tril(lower, -1))
