"""Blocks that keep only the diagonal."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array, PyTree
from curvax.blocks._block import CurvatureBlock, Statistics
from curvax.blocks._gradients import gradient_statistics, gradient_terms, remarks_on_examples
from curvax.blocks._layer import LayerSite, wide
from curvax.blocks._state import BlockState, power_key
from curvax.linalg import WeightedMovingAverage, spectral_power

__all__ = ["Conv2DDiagonal", "DenseDiagonal", "Diagonal", "NaiveDiagonal", "ScaleAndShiftDiagonal"]


class Diagonal(CurvatureBlock):
    """The diagonal of the curvature: the mean over examples of their squared gradients.

    Arguments:
        layer_tag_eq: the equation of the layer's tag.
        name: what the block is called.
    """

    class State(BlockState):
        """What a diagonal block keeps.

        Attributes:
            cache: powers and eigenvalues, as they were when they were last asked for.
            diagonal_factors: a moving average for each parameter, of its shape.
        """

        diagonal_factors: tuple[WeightedMovingAverage, ...]

    max_elements: int | None = None
    """How many elements of gradients of examples to hold at once; None for what is set."""

    @property
    def remarks(self) -> tuple[str, ...]:
        return remarks_on_examples(self._equation.sites)

    def averages(self, state: Any) -> Sequence[Any]:
        return state.diagonal_factors

    def statistics(self, site: LayerSite, sites: Sequence[LayerSite], state: Any) -> Statistics:
        del state
        return gradient_statistics(site, sites, _squares, False, self.dtype, self.max_elements)

    def terms(
        self, statistics: Mapping[str, PyTree], sites: Sequence[LayerSite], state: Any
    ) -> dict[str, PyTree]:
        del state
        return {"squares": gradient_terms(statistics, sites, _squares, on_whole=False)}

    def estimate(
        self, terms: Mapping[str, PyTree], sites: Sequence[LayerSite], batch_size: ArrayLike
    ) -> Sequence[Array]:
        del sites
        return [x / batch_size for x in terms["squares"]]

    def _init(
        self, rng: Array, exact: Sequence[float], approx: Sequence[float], cache_eigenvalues: bool
    ) -> Any:
        del rng
        zeros = lambda: tuple(jnp.zeros(shape, self.dtype) for shape in self.parameters_shapes)
        cache: dict[str, Any] = {power_key(power): zeros() for power in {*exact, *approx}}
        if cache_eigenvalues:
            cache["eigenvalues"] = jnp.zeros((self.dim,), self.dtype)
        factors = tuple(
            WeightedMovingAverage.zeros_array(shape, self.dtype) for shape in self.parameters_shapes
        )
        state: Any = self.State
        return state(cache=cache, diagonal_factors=factors)

    def _multiply_matpower(
        self,
        state: Any,
        vector: tuple[Array, ...],
        identity_weight: Array,
        power: float | int,
        exact_power: bool,
        use_cached: bool,
    ) -> tuple[Array, ...]:
        del exact_power  # It is always exact.
        if use_cached:
            powers = self._cached(state, power_key(power))
        else:
            powers = _powers([d.value for d in state.diagonal_factors], identity_weight, power)
        return tuple(x * p for x, p in zip(vector, powers, strict=True))

    def _eigenvalues(self, state: Any, use_cached: bool) -> Array:
        if use_cached:
            return self._cached(state, "eigenvalues")
        return self.flattened([d.value for d in state.diagonal_factors])

    def _update_cache(
        self,
        state: Any,
        identity_weight: Array,
        exact: Sequence[float],
        approx: Sequence[float],
        eigenvalues: bool,
    ) -> Any:
        scale = jnp.asarray(self.state_dependent_scale(state), self.dtype)
        diagonal = [d.value * scale for d in state.diagonal_factors]
        for power in {*exact, *approx}:
            self._cached(state, power_key(power))
            state.cache[power_key(power)] = _powers(diagonal, identity_weight, power)
        if eigenvalues:
            state.cache["eigenvalues"] = self.flattened(diagonal)
        return state


class DenseDiagonal(Diagonal):
    """A `Diagonal` block for dense layers."""


class Conv2DDiagonal(Diagonal):
    """A `Diagonal` block for convolutions.

    The gradients of single examples are computed, some at a time.

    Arguments:
        layer_tag_eq: the equation of the layer's tag.
        name: what the block is called.
        max_elements_for_vmap: how many elements of such gradients to hold at once; None for
            `get_max_parallel_elements()`.
    """

    def __init__(
        self, layer_tag_eq: Any, name: str, max_elements_for_vmap: int | None = None
    ) -> None:
        super().__init__(layer_tag_eq, name)
        self.max_elements = max_elements_for_vmap

    @property
    def max_elements_for_vmap(self) -> int | None:
        """How many elements of gradients of examples to hold at once."""
        return self.max_elements


class ScaleAndShiftDiagonal(Diagonal):
    """A `Diagonal` block for layers that scale and shift."""

    @property
    def has_scale(self) -> bool:
        """Whether the layer has a scale."""
        return self.layer_tag_extra_params["has_scale"]

    @property
    def has_shift(self) -> bool:
        """Whether the layer has a shift."""
        return self.layer_tag_extra_params["has_shift"]


class NaiveDiagonal(Diagonal):
    """The diagonal of `g gᵀ / N`, where `g` is the sum of the gradients of all N examples.

    It needs to know nothing of the layer. Products of gradients of different examples are zero on
    average, as far as estimation modes have random signs or targets, and are noise here.
    """

    sums_batch = True

    @property
    def remarks(self) -> tuple[str, ...]:
        return ("only the gradient of all examples together is known: estimates are noisy",)

    def statistics(self, site: LayerSite, sites: Sequence[LayerSite], state: Any) -> Statistics:
        del state
        return total_gradient(site, sites, self.dtype)

    def terms(
        self, statistics: Mapping[str, PyTree], sites: Sequence[LayerSite], state: Any
    ) -> dict[str, PyTree]:
        del state
        return {"squares": [x**2 for x in put_total_gradient(statistics, sites)]}


def total_gradient(site: LayerSite, sites: Sequence[LayerSite], dtype: jnp.dtype) -> Statistics:
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


def put_total_gradient(statistics: Mapping[str, PyTree], sites: Sequence[LayerSite]) -> list[Array]:
    """The gradient of all examples and sites, in the shapes of the parameters."""
    if "gradient" in statistics:
        return [x.astype(wide(x.dtype)) for x in statistics["gradient"]]
    each = [site.put(statistics[f"total {number}"]) for number, site in enumerate(sites)]
    return [functools.reduce(jnp.add, xs) for xs in zip(*each, strict=True)]


def _squares(gradients: list[Array]) -> list[Array]:
    return [jnp.sum(x**2, 0) for x in gradients]


def _powers(
    diagonal: Sequence[Array], identity_weight: Array, power: float | int
) -> tuple[Array, ...]:
    flat = jnp.concatenate([x.reshape(-1) for x in diagonal])
    powers = spectral_power(flat + identity_weight.astype(flat.dtype), power)
    sizes = [x.size for x in diagonal]
    parts = jnp.split(powers, [sum(sizes[: k + 1]) for k in range(len(sizes) - 1)])
    return tuple(p.reshape(x.shape) for p, x in zip(parts, diagonal, strict=True))
