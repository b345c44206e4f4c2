"""`SlicedParams`: a block for parameters of which each use takes a slice.

Gates that are sliced out of one array, or layers of a stack that are used one by one, are separate
layers as far as curvature goes. Each slice has a block; elements outside all slices have no
curvature. A slice that only scales or shifts, such as a bias in the same array as its weights, has
no Kronecker factors: its block is diagonal.
"""

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from curvax._types import Array, PyTree
from curvax.curvature.blocks.base import (
    BlockCtor,
    BlockState,
    CurvatureBlock,
    LayerEquation,
    MatrixPower,
    Powers,
    Refresh,
    Statistics,
    TagEquation,
)
from curvax.curvature.blocks.diagonal import ScaleAndShiftDiagonal
from curvax.curvature.linalg.norms import norm_of_blocks
from curvax.curvature.linalg.psd import spectral_power
from curvax.layers.tracing.statistics import Sums
from curvax.layers.use import LayerUse, Slice

_DIAGONAL = functools.partial(ScaleAndShiftDiagonal, allow_approximation=True)


class SlicedParams(CurvatureBlock):
    """Blocks for all slices of a layer's parameters that are used.

    Arguments:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator. Do not construct
            blocks yourself: put the class, or a `functools.partial` of it, into
            `layer_tag_to_block_ctor`.
        name: Name of the block, for error messages. Passed by the estimator.
        block_ctor: Makes the block of a slice with weights, from an equation and a name.
    """

    class State(BlockState):
        """The state of all slices.

        Attributes:
            cache: Empty.
            parts: The state of each slice's block.
        """

        parts: tuple[BlockState, ...]

    def __init__(self, layer_tag_eq: TagEquation, name: str, block_ctor: BlockCtor) -> None:
        super().__init__(layer_tag_eq, name)
        self._cuts = list(dict.fromkeys(use.cuts for use in self._equation.uses))
        parts: list[CurvatureBlock] = []
        for index, cuts in enumerate(self._cuts):
            equation = self._equation_of(cuts)
            is_elementwise = equation.uses[0].kind == "scale_and_shift_tag"
            ctor = _DIAGONAL if is_elementwise else block_ctor
            parts.append(ctor(equation, f"{name}, part {index}"))
        self.parts = tuple(parts)

    def check_updates(self) -> None:
        """Raise an error if a block overrides the update, which is that of an entire layer."""
        names = dict.fromkeys(type(part).__name__ for part in self.parts if part.has_own_update)
        if names:
            raise ValueError(
                f"curvax: each use of the parameters {self.name} takes only parts of them, so that "
                f"each part has a block, but {', '.join(names)} overrides "
                f"update_curvature_matrix_estimate, which is for an entire layer. Give these "
                f"parameters another block (index_to_block_ctor), such as "
                f"curvax.DenseTwoKroneckerFactored, or make the parts separate parameters."
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

    def statistics(
        self, use: LayerUse, uses: Sequence[LayerUse], state: BlockState | None
    ) -> Statistics:
        index = self._cuts.index(use.cuts)
        part, part_uses = self.parts[index], self._uses_of_parts(uses)[index]
        position = [other for other in uses if other.cuts == use.cuts].index(use)
        found = part.statistics(part_uses[position], part_uses, _states(state)[index])
        return {(index, key): statistic for key, statistic in found.items()}

    def terms(self, sums: Sums, uses: Sequence[LayerUse], state: BlockState | None) -> Sums:
        each = zip(self.parts, self._uses_of_parts(uses), _states(state), strict=True)
        found = [
            part.terms(Sums(*(_sums_of_part(x, index) for x in sums)), part_uses, part_state)
            for index, (part, part_uses, part_state) in enumerate(each)
        ]
        return Sums(*zip(*found, strict=True))

    def estimate(
        self, terms: Sums, uses: Sequence[LayerUse], batch_size: ArrayLike
    ) -> Sequence[Array]:
        each = zip(self.parts, self._uses_of_parts(uses), zip(*terms, strict=True), strict=True)
        estimates = [
            part.estimate(Sums(*part_terms), part_uses, batch_size)
            for part, part_uses, part_terms in each
        ]
        return [estimate for of_part in estimates for estimate in of_part]

    def has_linear_estimates(self, uses: Sequence[LayerUse]) -> bool:
        pairs = zip(self.parts, self._uses_of_parts(uses), strict=True)
        return all(part.has_linear_estimates(part_uses) for part, part_uses in pairs)

    def init(
        self,
        rng: Array,
        exact_powers_to_cache: Powers,
        approx_powers_to_cache: Powers,
        cache_eigenvalues: bool,
    ) -> BlockState:
        options = (exact_powers_to_cache, approx_powers_to_cache, cache_eigenvalues)
        fields = {"parts": tuple(part.init(rng, *options) for part in self.parts)}
        return self.State(cache={}, **fields)

    def is_cached(self, state: BlockState, power: float | int, exact_power: bool) -> bool:
        pairs = zip(self.parts, _states(state), strict=True)
        return all(part.is_cached(part_state, power, exact_power) for part, part_state in pairs)

    def cache_requests(self, state: BlockState, wanted: Refresh) -> list[PyTree]:
        each = zip(self.parts, _states(state), self._refreshes(wanted), strict=True)
        return [part.cache_requests(part_state, refresh) for part, part_state, refresh in each]

    def with_cache(self, state: BlockState, results: PyTree, wanted: Refresh) -> BlockState:
        each = zip(self.parts, _states(state), results, self._refreshes(wanted), strict=True)
        parts = tuple(
            part.with_cache(part_state, result, refresh)
            for part, part_state, result, refresh in each
        )
        return replace(cast(SlicedParams.State, state), parts=parts)

    def _refreshes(self, wanted: Refresh) -> list[Refresh]:
        options = (wanted.identity_weight, wanted.exact, wanted.approx, wanted.eigenvalues)
        return [part.refresh(*options) for part in self.parts]

    def _multiply_matpower(
        self, state: BlockState, vector: tuple[Array, ...], how: MatrixPower
    ) -> tuple[Array, ...]:
        # Elements outside all slices have no curvature but the added multiple of the identity.
        outside = spectral_power(how.identity_weight.astype(self.dtype)[None], how.power)[0]
        product = [x * outside.astype(x.dtype) for x in vector]
        options = (how.identity_weight, how.power, how.is_exact, how.is_cached)
        for cuts, part, part_state in zip(self._cuts, self.parts, _states(state), strict=True):
            slices = [_slice(x, cut) for x, cut in zip(vector, cuts, strict=True)]
            products = part.multiply_matpower(part_state, slices, *options)
            product = [
                _with_slice(x, cut, new)
                for x, cut, new in zip(product, cuts, products, strict=True)
            ]
        return tuple(product)

    def _eigenvalues(self, state: BlockState, use_cached: bool) -> Array:
        pairs = zip(self.parts, _states(state), strict=True)
        values = [part.eigenvalues(part_state, use_cached) for part, part_state in pairs]
        missing = self.dim - sum(part.dim for part in self.parts)
        return jnp.concatenate([*values, jnp.zeros((missing,), self.dtype)])

    def _norm(self, state: BlockState, norm_type: str) -> Array:
        pairs = zip(self.parts, _states(state), strict=True)
        norms = [part.norm(part_state, norm_type) for part, part_state in pairs]
        sizes = [part.dim for part in self.parts]
        outside = [self.dim - sum(sizes)]  # Elements outside all slices have no curvature.
        zero = jnp.zeros((), self.dtype)
        norms = jnp.stack([*norms, zero]).astype(self.dtype)
        return norm_of_blocks(norms, jnp.asarray([*sizes, *outside], self.dtype), norm_type)

    def _equation_of(self, cuts: tuple[tuple[Slice, ...], ...]) -> LayerEquation:
        uses = [use.of_part() for use in self._equation.uses if use.cuts == cuts]
        return replace(self._equation, uses=tuple(uses))

    def _uses_of_parts(self, uses: Sequence[LayerUse]) -> list[list[LayerUse]]:
        """Return the uses of each slice, as its block sees them."""
        return [[use.of_part() for use in uses if use.cuts == cuts] for cuts in self._cuts]


def _states(state: BlockState | None) -> tuple[BlockState, ...]:
    return cast(SlicedParams.State, state).parts


def _sums_of_part(
    sums: Mapping[tuple[int, Hashable], PyTree], index: int
) -> dict[Hashable, PyTree]:
    return {key: x for (part, key), x in sums.items() if part == index}


def _slice(x: Array, cuts: Sequence[Slice]) -> Array:
    for axis, start, stop in cuts:
        x = lax.slice_in_dim(x, start, stop, axis=axis)
    return x


def _with_slice(x: Array, cuts: Sequence[Slice], new: Array) -> Array:
    starts = [0] * x.ndim
    for axis, start, _ in cuts:
        starts[axis] += start
    return lax.dynamic_update_slice(x, new.astype(x.dtype), starts)
