"""What blocks of one kind of layer share, whatever they keep of its matrix."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from curvax._types import Array, PyTree
from curvax.blocks._block import CurvatureBlock, Statistics
from curvax.blocks._layer import LayerSite, wide

__all__ = ["OfScaleAndShift", "OfTotalGradient", "SomeAtATime"]


class SomeAtATime(CurvatureBlock):
    """A block that takes the gradients of so many examples at a time."""

    def __init__(
        self, layer_tag_eq: Any, name: str, max_elements_for_vmap: int | None = None
    ) -> None:
        super().__init__(layer_tag_eq, name)
        self.max_elements = max_elements_for_vmap

    @property
    def max_elements_for_vmap(self) -> int | None:
        """How many elements of gradients of examples to hold at once."""
        return self.max_elements


class OfScaleAndShift(CurvatureBlock):
    """A block of a layer that scales and shifts."""

    @property
    def has_scale(self) -> bool:
        """Whether the layer has a scale."""
        return any(site.constants["has_scale"] for site in self._equation.sites)

    @property
    def has_shift(self) -> bool:
        """Whether the layer has a shift."""
        return any(site.constants["has_shift"] for site in self._equation.sites)


class OfTotalGradient(CurvatureBlock):
    """A block that knows only the gradient of all examples together."""

    sums_batch = True

    @property
    def remarks(self) -> tuple[str, ...]:
        return ("only the gradient of all examples together is known: estimates are noisy",)

    def statistics(self, site: LayerSite, sites: Sequence[LayerSite], state: Any) -> Statistics:
        del state
        return _total_gradient(site, sites, self.dtype)

    def total_gradient(
        self, statistics: Mapping[str, PyTree], sites: Sequence[LayerSite]
    ) -> list[Array]:
        """The gradient of all examples and sites, in the shapes of the parameters."""
        if "gradient" in statistics:
            return [x.astype(wide(x.dtype)) for x in statistics["gradient"]]
        each = [site.put(statistics[f"total {number}"]) for number, site in enumerate(sites)]
        return [functools.reduce(jnp.add, xs) for xs in zip(*each, strict=True)]


def _total_gradient(site: LayerSite, sites: Sequence[LayerSite], dtype: jnp.dtype) -> Statistics:
    """The gradient of all examples, as the function has the parameters or as the site does.

    Of a layer of the user's own it is not computed here: the pass itself has it.
    """
    number = sites.index(site)
    if not site.is_known:
        return {}
    if site.kind == "generic_tag":
        return {f"total {number}": lambda _, g: [g[0].astype(dtype)]}

    def summed(inputs: tuple[Array, ...], cotangents: tuple[Array, ...]) -> list[Array]:
        gradients = site.gradients(inputs[0], cotangents[0].astype(dtype))
        return [jnp.sum(x, 0) for x in gradients]

    return {f"total {number}": summed}
