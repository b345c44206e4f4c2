"""What blocks of one kind of layer share, whatever they keep of its matrix."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from curvax._types import Array, PyTree
from curvax.blocks._block import CurvatureBlock, Statistics
from curvax.blocks._gradients import remarks_on_examples, why_inexact
from curvax.blocks._layer import LayerSite, wide

__all__ = ["OfExampleGradients", "OfScaleAndShift", "OfTotalGradient", "SomeAtATime"]


class OfExampleGradients(CurvatureBlock):
    """A block that is made of gradients of single examples, and refuses to be made of others.

    Arguments:
        layer_tag_eq: the equation of the layer's tag.
        name: what the block is called.
        allow_approximation: whether to make do where these are not known: each position counts as
            an example if it is not known which positions belong to one, and examples that interact
            are taken to be independent. The `remarks` then say so. Otherwise that is an error.
    """

    def __init__(self, layer_tag_eq: Any, name: str, *, allow_approximation: bool = False) -> None:
        super().__init__(layer_tag_eq, name)
        self._allows_approximation = allow_approximation
        own, base = type(self), CurvatureBlock
        if own.update_curvature_matrix_estimate is base.update_curvature_matrix_estimate:
            self.check_examples(self._equation.sites)

    @property
    def remarks(self) -> tuple[str, ...]:
        return remarks_on_examples(self._equation.sites)

    def check_examples(self, sites: Sequence[LayerSite]) -> None:
        """Refuse places at which the gradients of single examples are not known."""
        why = why_inexact(sites)
        if not why or not self.needs_examples(sites) or self._allows_approximation:
            return
        kind = self._equation.layer.tag_name if self._equation.layer else sites[0].kind
        other = _NEEDS_NO_EXAMPLES.get(kind, "NaiveDiagonal")
        raise ValueError(
            f"curvax.{type(self).__name__} of {self.name or 'the parameter'}: {why}. This block "
            f"needs per-example gradients, which are not known here. Use curvax.{other}, which "
            f"does without them, or functools.partial(curvax.{type(self).__name__}, "
            f"allow_approximation=True), which makes do and is not exact."
        )


_NEEDS_NO_EXAMPLES = {
    "dense_tag": "DenseTwoKroneckerFactored",
    "conv2d_tag": "Conv2DTwoKroneckerFactored",
    "conv_tag": "ConvTwoKroneckerFactored",
    "embedding_tag": "EmbeddingTwoKroneckerFactored",
}
"""Blocks that do not have to know which examples there are, by tag."""


class SomeAtATime(OfExampleGradients):
    """A block that takes the gradients of so many examples at a time."""

    def __init__(
        self,
        layer_tag_eq: Any,
        name: str,
        max_elements_for_vmap: int | None = None,
        *,
        allow_approximation: bool = False,
    ) -> None:
        super().__init__(layer_tag_eq, name, allow_approximation=allow_approximation)
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

    def needs_examples(self, sites: Sequence[LayerSite]) -> bool:
        del sites
        return False

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
