"""`SlicedParams`: a block for a layer of which only parts are used at each place.

Gates that are cut out of one array, or layers of a stack that are used one by one, have curvature
of their own. Each part has a block, and where no part is, there is no curvature. A part that only
scales or shifts, such as a bias that is cut from the same array as its weights, has no Kronecker
factors: its block is diagonal.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from curvax._types import Array, PyTree
from curvax.curvature.blocks.base import (
    BlockState,
    CurvatureBlock,
    LayerEquation,
    MatrixPower,
    Powers,
    Refresh,
    Statistics,
)
from curvax.curvature.blocks.diagonal import ScaleAndShiftDiagonal
from curvax.curvature.linalg.psd import spectral_power
from curvax.layers.tracing.statistics import Sums
from curvax.layers.use import LayerUse

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
        self._cuts = list(dict.fromkeys(use.cuts for use in self._equation.uses))
        parts: list[CurvatureBlock] = []
        for number, cuts in enumerate(self._cuts):
            equation = self._equation_of(cuts)
            is_elementwise = equation.uses[0].kind == "scale_and_shift_tag"
            ctor = _DIAGONAL if is_elementwise else block_ctor
            parts.append(ctor(equation, f"{name}, part {number}"))
        self.parts = tuple(parts)

    def check_updates(self) -> None:
        """Check that no part has an update of its own, which would be for a whole layer."""
        own = dict.fromkeys(type(part).__name__ for part in self.parts if part.has_own_update)
        if own:
            raise ValueError(
                f"curvax: only parts of the parameters {self.name} are used at each place, so that "
                f"each part has a block, but {', '.join(own)} overrides "
                f"update_curvature_matrix_estimate, which is for a whole layer. Give these "
                f"parameters another block (index_to_block_ctor), such as "
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

    def statistics(self, use: LayerUse, uses: Sequence[LayerUse], state: Any) -> Statistics:
        number = self._cuts.index(use.cuts)
        part, own = self.parts[number], self._uses_of_parts(uses)[number]
        index = [other for other in uses if other.cuts == use.cuts].index(use)
        found = part.statistics(own[index], own, state.parts[number])
        return {(number, key): statistic for key, statistic in found.items()}

    def terms(self, sums: Sums, uses: Sequence[LayerUse], state: Any) -> Sums:
        each = zip(self.parts, self._uses_of_parts(uses), state.parts, strict=True)
        found = [
            part.terms(Sums(*(_of_part(x, number) for x in sums)), own_sites, own)
            for number, (part, own_sites, own) in enumerate(each)
        ]
        return Sums(*zip(*found, strict=True))

    def estimate(
        self, terms: Sums, uses: Sequence[LayerUse], batch_size: ArrayLike
    ) -> Sequence[Array]:
        each = zip(self.parts, self._uses_of_parts(uses), zip(*terms, strict=True), strict=True)
        found = [part.estimate(Sums(*own), own_sites, batch_size) for part, own_sites, own in each]
        return [estimate for of_part in found for estimate in of_part]

    def has_linear_estimates(self, uses: Sequence[LayerUse]) -> bool:
        pairs = zip(self.parts, self._uses_of_parts(uses), strict=True)
        return all(part.has_linear_estimates(own) for part, own in pairs)

    def init(
        self,
        rng: Array,
        exact_powers_to_cache: Powers,
        approx_powers_to_cache: Powers,
        cache_eigenvalues: bool,
    ) -> Any:
        options = (exact_powers_to_cache, approx_powers_to_cache, cache_eigenvalues)
        state: Any = self.State
        return state(cache={}, parts=tuple(part.init(rng, *options) for part in self.parts))

    def is_cached(self, state: Any, power: float | int, exact_power: bool) -> bool:
        pairs = zip(self.parts, state.parts, strict=True)
        return all(part.is_cached(own, power, exact_power) for part, own in pairs)

    def cache_requests(self, state: Any, wanted: Refresh) -> list[Any]:
        each = zip(self.parts, state.parts, self._refreshes(wanted), strict=True)
        return [part.cache_requests(own, refresh) for part, own, refresh in each]

    def with_cache(self, state: Any, results: PyTree, wanted: Refresh) -> Any:
        each = zip(self.parts, state.parts, results, self._refreshes(wanted), strict=True)
        return replace(state, parts=tuple(part.with_cache(*own) for part, *own in each))

    def _refreshes(self, wanted: Refresh) -> list[Refresh]:
        options = (wanted.identity_weight, wanted.exact, wanted.approx, wanted.eigenvalues)
        return [part.refresh(*options) for part in self.parts]

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

    def _equation_of(self, cuts: Any) -> LayerEquation:
        uses = [use.of_part() for use in self._equation.uses if use.cuts == cuts]
        return replace(self._equation, uses=tuple(uses))

    def _uses_of_parts(self, uses: Sequence[LayerUse]) -> list[list[LayerUse]]:
        """For each part its places, as its block sees them."""
        return [[use.of_part() for use in uses if use.cuts == cuts] for cuts in self._cuts]


def _of_part(sums: Mapping[tuple[int, Hashable], PyTree], number: int) -> dict[Hashable, PyTree]:
    return {key: x for (part, key), x in sums.items() if part == number}


def _cut(x: Array, cuts: Sequence[tuple[int, int, int]]) -> Array:
    for axis, start, stop in cuts:
        x = lax.slice_in_dim(x, start, stop, axis=axis)
    return x


def _with_part(x: Array, cuts: Sequence[tuple[int, int, int]], part: Array) -> Array:
    starts = [0] * x.ndim
    for axis, start, _ in cuts:
        starts[axis] += start
    return lax.dynamic_update_slice(x, part.astype(x.dtype), starts)
