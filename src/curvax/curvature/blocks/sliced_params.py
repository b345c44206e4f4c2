"""`SlicedParams`: a block for a layer of which only parts are used at each place.

Gates that are cut out of one array, or layers of a stack that are used one by one, have curvature
of their own. Each part has a block, and where no part is, there is no curvature. A part that only
scales or shifts, such as a bias that is cut from the same array as its weights, has no Kronecker
factors: its block is diagonal.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from curvax._types import Array, PyTree
from curvax.curvature.blocks.base import (
    BlockState,
    CacheUpdate,
    CurvatureBlock,
    MatrixPower,
    Refresh,
    Statistics,
    in_step,
)
from curvax.curvature.blocks.diagonal import ScaleAndShiftDiagonal
from curvax.curvature.blocks.layer import LayerEquation
from curvax.curvature.linalg.psd import spectral_power
from curvax.layers.use import LayerUse

__all__ = ["SlicedParams"]


_DIAGONAL = functools.partial(ScaleAndShiftDiagonal, allow_approximation=True)


class SlicedParams(CurvatureBlock):
    """Blocks for all parts of a layer's parameters that are used.

    Arguments:
        layer_tag_eq: the equation of the layer's tag.
        name: what the block is called.
        block_ctor: makes the block of a part with weights, from an equation and a name.
    """

    class State(BlockState):
        """What a block of parts keeps.

        Attributes:
            cache: empty.
            parts: the state of each part.
        """

        parts: tuple[Any, ...]

    def __init__(
        self, layer_tag_eq: Any, name: str, block_ctor: Callable[[Any, str], CurvatureBlock]
    ) -> None:
        super().__init__(layer_tag_eq, name)
        self._cuts = list(dict.fromkeys(site.cuts for site in self._equation.sites))
        parts: list[CurvatureBlock] = []
        for number, cuts in enumerate(self._cuts):
            equation = self._equation_of(cuts)
            is_elementwise = equation.sites[0].kind == "scale_and_shift_tag"
            ctor = _DIAGONAL if is_elementwise else block_ctor
            parts.append(ctor(equation, f"{name}, part {number}"))
        self.parts = tuple(parts)

    def check_updates(self) -> None:
        """Check that no part has an update of its own, which would be for a whole layer."""
        update = "update_curvature_matrix_estimate"
        kinds = {type(part) for part in self.parts}
        own = [
            kind.__name__
            for kind in kinds
            if getattr(kind, update) is not getattr(SlicedParams, update)
        ]
        if own:
            raise ValueError(
                f"curvax: only parts of the parameters {self.name} are used at each place, so that "
                f"each part has a block, but {', '.join(own)} overrides {update}, which is for a "
                f"whole layer. Give these parameters another block (index_to_block_ctor), such as "
                f"curvax.DenseTwoKroneckerFactored, or make the parts parameters of their own."
            )

    @property
    def cache_work(self) -> float:
        return sum(part.cache_work for part in self.parts)

    @property
    def multiply_work(self) -> float:
        return sum(part.multiply_work for part in self.parts)

    @property
    def remarks(self) -> tuple[str, ...]:
        remarks = [text for part in self.parts for text in part.remarks]
        if any(isinstance(part, ScaleAndShiftDiagonal) for part in self.parts):
            remarks.append("parts that only scale or shift have a diagonal block")
        return tuple(dict.fromkeys(remarks))

    def averages(self, state: Any) -> Sequence[Any]:
        pairs = zip(self.parts, state.parts, strict=True)
        return [average for part, own in pairs for average in part.averages(own)]

    def statistics(self, site: LayerUse, sites: Sequence[LayerUse], state: Any) -> Statistics:
        number = self._cuts.index(site.cuts)
        own = self._sites_of_part(sites)[number]
        (mine,) = [new for old, new in own if old is site]
        part = self.parts[number]
        found = part.statistics(mine, [new for _, new in own], state.parts[number])
        return {f"{name} of part {number}": statistic for name, statistic in found.items()}

    def terms(
        self, statistics: Mapping[str, PyTree], sites: Sequence[LayerUse], state: Any
    ) -> dict[str, PyTree]:
        found: dict[str, PyTree] = {}
        for number, (part, own) in enumerate(
            zip(self.parts, self._sites_of_part(sites), strict=True)
        ):
            terms = part.terms(
                _own(statistics, number), [new for _, new in own], state.parts[number]
            )
            found |= {f"{name} of part {number}": term for name, term in terms.items()}
        return found

    def estimate(
        self, terms: Mapping[str, PyTree], sites: Sequence[LayerUse], batch_size: ArrayLike
    ) -> Sequence[Array]:
        found: list[Array] = []
        for number, (part, own) in enumerate(
            zip(self.parts, self._sites_of_part(sites), strict=True)
        ):
            found += part.estimate(_own(terms, number), [new for _, new in own], batch_size)
        return found

    def has_linear_estimates(self, sites: Sequence[LayerUse]) -> bool:
        pairs = zip(self.parts, self._sites_of_part(sites), strict=True)
        return all(part.has_linear_estimates([new for _, new in own]) for part, own in pairs)

    def _init(
        self, rng: Array, exact: Sequence[float], approx: Sequence[float], cache_eigenvalues: bool
    ) -> Any:
        parts = [part.init(rng, exact, approx, cache_eigenvalues) for part in self.parts]
        state: Any = self.State
        return state(cache={}, parts=tuple(parts))

    def _multiply_matpower(
        self, state: Any, vector: tuple[Array, ...], how: MatrixPower
    ) -> tuple[Array, ...]:
        outside = spectral_power(how.identity_weight.astype(self.dtype)[None], how.power)[0]
        whole = [x * outside.astype(x.dtype) for x in vector]
        options = (how.identity_weight, how.power, how.is_exact, how.is_cached)
        for cuts, part, own in zip(self._cuts, self.parts, state.parts, strict=True):
            pieces = [_cut(x, cut) for x, cut in zip(vector, cuts, strict=True)]
            product = part.multiply_matpower(own, pieces, *options)
            whole = [
                _with_part(x, cut, piece)
                for x, cut, piece in zip(whole, cuts, product, strict=True)
            ]
        return tuple(whole)

    def _eigenvalues(self, state: Any, use_cached: bool) -> Array:
        pairs = zip(self.parts, state.parts, strict=True)
        values = [part.eigenvalues(own, use_cached) for part, own in pairs]
        missing = self.dim - sum(part.dim for part in self.parts)
        return jnp.concatenate([*values, jnp.zeros((missing,), self.dtype)])

    def _update_cache(self, state: Any, wanted: Refresh) -> CacheUpdate:
        options = (wanted.identity_weight, wanted.exact, wanted.approx, wanted.eigenvalues)
        pairs = zip(self.parts, state.parts, strict=True)
        parts = yield from in_step([part.cache_update(own, *options) for part, own in pairs])
        state.parts = tuple(parts)
        return state

    def _equation_of(self, cuts: Any) -> LayerEquation:
        sites = [site.of_part() for site in self._equation.sites if site.cuts == cuts]
        return replace(self._equation, sites=tuple(sites))

    def _sites_of_part(self, sites: Sequence[LayerUse]) -> list[list[tuple[LayerUse, LayerUse]]]:
        """For each part its places, as given and as its block sees them."""
        return [
            [(site, site.of_part()) for site in sites if site.cuts == cuts] for cuts in self._cuts
        ]


def _own(named: Mapping[str, PyTree], number: int) -> dict[str, PyTree]:
    ending = f" of part {number}"
    return {name.removesuffix(ending): x for name, x in named.items() if name.endswith(ending)}


def _cut(x: Array, cuts: Sequence[tuple[int, int, int]]) -> Array:
    for axis, start, stop in cuts:
        x = lax.slice_in_dim(x, start, stop, axis=axis)
    return x


def _with_part(x: Array, cuts: Sequence[tuple[int, int, int]], part: Array) -> Array:
    starts = [0] * x.ndim
    for axis, start, _ in cuts:
        starts[axis] += start
    return lax.dynamic_update_slice(x, part.astype(x.dtype), starts)
