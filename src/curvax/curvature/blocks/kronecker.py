"""`TwoKroneckerFactored`: curvature as the Kronecker product of two small matrices.

K-FAC is due to Martens & Grosse (2015), arXiv:1503.05671; for convolutions to Grosse & Martens
(2016), arXiv:1602.01407; "expand" and "reduce" to Eschenhagen et al. (2023), arXiv:2311.00636.

At a layer with weights, the gradient of an example is a sum, over the positions where the weights
are applied, of outer products of inputs and cotangents. K-FAC takes inputs and cotangents, at all
positions, to be independent: the curvature is then the product of the second moments of both.
Where weights are applied at several positions, there are two ways to do so:

- "expand": positions are independent as well. The factor of the inputs is an average over examples
  and positions, that of the outputs an average over examples of a sum over positions. Exact for a
  linear network with a loss at each position.
- "reduce": inputs are averaged over the positions of an example, and cotangents summed, before
  anything is multiplied. Exact for a linear network that averages over positions.

The first half of the module computes both factors, moments of a layer's inputs and of the
cotangents of its outputs. A layer with weights computes, at each position, `matrix.T @ row`: the
matrix is made of its weights, with the bias for a last row, and the row is the input there, with a
one at its end. What these are depends on the kind of layer. Heads and groups of channels have a
matrix each, along a leading axis.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array, PyTree
from curvax.curvature.blocks.base import (
    BlockState,
    CurvatureBlock,
    MatrixPower,
    Refresh,
    Statistics,
    power_key,
)
from curvax.curvature.linalg.kronecker import DenseSide, DiagonalSide, Kronecker, Side
from curvax.curvature.linalg.moving_average import WeightedMovingAverage
from curvax.curvature.linalg.psd import per_matrix
from curvax.curvature.linalg.tasks import run_matrix_tasks
from curvax.curvature.patches.geometry import ConvGeometry
from curvax.curvature.patches.patches import extract_patches, patch_moment_sums
from curvax.layers.tracing.statistics import Statistic, Sums
from curvax.layers.use import ConvolutionUse, EmbeddingUse, LayerUse

# Both factors of a layer's curvature.


def matrix_shape(use: LayerUse) -> tuple[tuple[int, ...], int, int]:
    """Heads or groups, the number of inputs (with the bias), and that of outputs."""
    weight = use.slice_shapes[0]
    bias = int(len(use.slice_shapes) > 1)
    if isinstance(use, ConvolutionUse):
        geometry = geometry_of(use)
        size = geometry.patch_size(use.input.shape)
        groups, out = geometry.num_groups, _out_channels(use)
        heads = (groups,) if groups > 1 else ()
        return heads, size + bias, out // groups
    if isinstance(use, EmbeddingUse):
        return (), weight[0] + bias, math.prod(weight[1:])
    return weight[:-2], weight[-2] + bias, weight[-1]


def matrix_of_params(use: LayerUse, params: Sequence[Array]) -> Array:
    """Parameters as the function has them, as (*stack, *heads, inputs, outputs)."""
    weight, *rest = use.take(params)
    heads, inputs, outputs = matrix_shape(use)
    front = weight.shape[: len(use.stack)]
    size = inputs - len(rest)
    if isinstance(use, ConvolutionUse):
        kernel = jnp.moveaxis(weight, _kernel_axes(use, weight.ndim), range(-len(_order(use)), 0))
        if heads:
            kernel = kernel.reshape(*front, size, *heads, outputs)
            weight = jnp.swapaxes(kernel, -3, -2)
        else:
            weight = kernel
    weight = weight.reshape(*front, *heads, size, outputs)
    if not rest:
        return weight
    return jnp.concatenate([weight, rest[0].reshape(*front, *heads, 1, outputs)], axis=-2)


def params_of_matrix(use: LayerUse, matrix: Array) -> list[Array]:
    """What `matrix_of_params` made of parameters, back."""
    heads, _, _ = matrix_shape(use)
    front = matrix.shape[: len(use.stack)]
    has_bias = len(use.slice_shapes) > 1
    weight = matrix[..., :-1, :] if has_bias else matrix
    shape = use.slice_shapes[0]
    if isinstance(use, ConvolutionUse):
        ordered = [shape[axis] for axis in _order(use)]
        if heads:
            weight = jnp.swapaxes(weight, -3, -2)
        weight = weight.reshape(*front, *ordered)
        weight = jnp.moveaxis(weight, range(-len(ordered), 0), _kernel_axes(use, weight.ndim))
    taken = [weight.reshape(*front, *shape)]
    if has_bias:
        taken.append(matrix[..., -1, :].reshape(*front, *use.slice_shapes[1]))
    return use.put(taken)


def num_rows(use: LayerUse) -> int:
    """At how many positions the same weights are applied, over all steps that share them."""
    if isinstance(use, ConvolutionUse):
        numbers = use.dimension_numbers
        shape = use.output.shape
        count = math.prod(shape[axis] for axis in (numbers.out_spec[0], *numbers.out_spec[2:]))
        return count * use.repeats
    heads, _, outputs = matrix_shape(use)
    return math.prod(use.output.shape) // max(math.prod(heads) * outputs, 1) * use.repeats


def input_moment(use: LayerUse, side: Side, x: Array, dtype: Any) -> Array:
    """The sum over positions, in one step, of outer products of rows."""
    has_bias = len(use.slice_shapes) > 1
    if isinstance(use, EmbeddingUse):
        counts = jnp.zeros((use.slice_shapes[0][0],), dtype)
        return side.of_diagonal(counts.at[x.reshape(-1)].add(1, mode="drop"))
    x = x.astype(dtype)
    if not isinstance(use, ConvolutionUse):
        rows = _rows(use, x)
        if has_bias:
            rows = jnp.concatenate([rows, jnp.ones_like(rows[..., :1])], -1)
        return side.of_rows(rows)
    geometry = geometry_of(use)
    if isinstance(side, DenseSide):
        moment, sums = patch_moment_sums(x, geometry, with_first=has_bias)
    else:
        moment = _patch_sums(x**2, geometry)
        sums = _patch_sums(x, geometry) if has_bias else None
    count = num_rows(use) // use.repeats
    return _bordered(side, moment, sums, count) if has_bias else moment


def output_moment(use: LayerUse, side: Side, cotangent: Array, dtype: Any) -> Array:
    """The sum over positions, in one step, of outer products of cotangents."""
    return side.of_rows(_output_rows(use, cotangent.astype(dtype)))


def input_sums(use: LayerUse, x: Array, dtype: Any) -> Array:
    """The sum over the positions of each example of its rows: (*heads, examples, inputs)."""
    if isinstance(use, EmbeddingUse):
        table = use.slice_shapes[0][0]
        indices = use.by_example(x, False)
        indices = indices.reshape(indices.shape[0], -1)
        zeros = jnp.zeros((indices.shape[0], table), dtype)
        return zeros.at[jnp.arange(indices.shape[0])[:, None], indices].add(1, mode="drop")
    x = x.astype(dtype)
    if isinstance(use, ConvolutionUse):
        sums = jnp.sum(extract_patches(x, geometry_of(use)), -2)
        count = math.prod(use.output.shape) // max(sums.shape[-2] * _out_channels(use), 1)
    else:
        rows = _examples_of_rows(use, _rows(use, x))
        sums, count = jnp.sum(rows, -2), rows.shape[-2]
    if len(use.slice_shapes) == 1:
        return sums
    return jnp.concatenate([sums, jnp.full_like(sums[..., :1], count)], -1)


def output_sums(use: LayerUse, cotangent: Array, dtype: Any) -> Array:
    """The sum over the positions of each example of its cotangents."""
    rows = _output_rows(use, cotangent.astype(dtype))
    if isinstance(use, ConvolutionUse):
        number = use.output.shape[use.dimension_numbers.out_spec[0]]
        return jnp.sum(rows.reshape(*rows.shape[:-2], number, -1, rows.shape[-1]), -2)
    return jnp.sum(_examples_of_rows(use, rows), -2)


def geometry_of(use: ConvolutionUse) -> ConvGeometry:
    """The geometry of a convolution."""
    settings = use.convolution
    numbers = settings["dimension_numbers"]
    kernel = tuple(use.slice_shapes[0][axis] for axis in numbers.rhs_spec[2:])
    return ConvGeometry.of(kernel, **settings)


def _rows(use: LayerUse, x: Array) -> Array:
    """Inputs as (*heads, positions, inputs)."""
    heads, inputs, _ = matrix_shape(use)
    inputs -= len(use.slice_shapes) - 1
    rows = x.reshape(-1, *heads, inputs)
    return jnp.moveaxis(rows, 0, -2)


def _output_rows(use: LayerUse, cotangent: Array) -> Array:
    """Cotangents as (*heads, positions, outputs)."""
    heads, _, outputs = matrix_shape(use)
    if isinstance(use, ConvolutionUse):
        out = use.dimension_numbers.out_spec
        cotangent = jnp.transpose(cotangent, (out[0], *out[2:], out[1]))
    return jnp.moveaxis(cotangent.reshape(-1, *heads, outputs), 0, -2)


def _examples_of_rows(use: LayerUse, rows: Array) -> Array:
    """Rows as (*heads, examples, positions of each, features)."""
    *heads, _, features = rows.shape
    if not use.is_arranged or use.num_examples is None:
        return rows.reshape(*heads, use.num_counted, -1, features)
    return use.split_examples(rows, len(heads))


def _patch_sums(x: Array, geometry: ConvGeometry) -> Array:
    """The sum of all patches."""
    _, sums = patch_moment_sums(x, geometry, with_first=True)
    assert sums is not None
    return sums


def _bordered(side: Side, moment: Array, sums: Array | None, count: int) -> Array:
    """The moment of rows with a one at their end."""
    assert sums is not None
    one = jnp.full((*sums.shape[:-1], 1), count, moment.dtype)
    if not isinstance(side, DenseSide):
        return jnp.concatenate([moment, one], -1)
    sums = sums.astype(moment.dtype)
    above = jnp.concatenate([moment, sums[..., :, None]], -1)
    below = jnp.concatenate([sums, one], -1)[..., None, :]
    return jnp.concatenate([above, below], -2)


def _out_channels(use: ConvolutionUse) -> int:
    return use.slice_shapes[0][use.dimension_numbers.rhs_spec[0]]


def _order(use: ConvolutionUse) -> tuple[int, ...]:
    """The axes of a kernel, in the order of a patch: spatial ones, channels in, channels out."""
    out, channels, *spatial = use.dimension_numbers.rhs_spec
    return (*spatial, channels, out)


def _kernel_axes(use: ConvolutionUse, ndim: int) -> tuple[int, ...]:
    front = ndim - len(_order(use))
    return tuple(front + axis for axis in _order(use))


WeightSharing = Literal["expand", "reduce"]

MAX_FACTOR_SIZE = 8192
"""Factors that are wider than this are diagonal."""

FACTORS = ("inputs_factor", "outputs_factor")
"""The names of both factors, in states and caches."""


@dataclass(frozen=True)
class FactorKey:
    """The key of a statistic of inputs or of outputs, where weights are used one way round."""

    side: Literal["inputs", "outputs"]
    is_swapped: bool


class TwoKroneckerFactored(CurvatureBlock):
    """The Kronecker product of a factor for inputs and one for outputs, for layers with weights.

    A bias is one more row of the weights. Several matrices (layers of a stack, heads, groups of
    channels) have factors of their own, along axes in front. Weights that are also used the other
    way round, as a tied table is, have a pair of factors for each way; both pairs are scaled so
    that the traces of their factors, divided by the sizes, are the same, and added up.

    Arguments:
        layer_tag_eq: the equation of the layer's tag.
        name: what the block is called.
        weight_sharing: "expand" or "reduce", where weights are applied at several positions.
        max_factor_size: a factor that is wider is kept as its diagonal.
    """

    class State(BlockState):
        """What a Kronecker-factored block keeps.

        Attributes:
            cache: powers of both factors and eigenvalues, as they were when last asked for.
            inputs_factor: a moving average of the factor of the inputs.
            outputs_factor: a moving average of the factor of the outputs.
        """

        inputs_factor: WeightedMovingAverage
        outputs_factor: WeightedMovingAverage

    splits_parts = True

    is_plain = True
    """Whether both factors are all there is to know, for classes that extend this one too."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        names = ("State", "update_cache", "cache_requests", "with_cache")
        names += ("_multiply_matpower", "state_dependent_scale")
        plain = TwoKroneckerFactored
        cls.is_plain = all(getattr(cls, name) is getattr(plain, name) for name in names)

    def __init__(
        self,
        layer_tag_eq: Any,
        name: str,
        *,
        weight_sharing: WeightSharing = "expand",
        max_factor_size: int = MAX_FACTOR_SIZE,
    ) -> None:
        super().__init__(layer_tag_eq, name)
        if weight_sharing not in ("expand", "reduce"):
            raise ValueError(
                f"curvax.{type(self).__name__}: weight_sharing is 'expand' or 'reduce', got "
                f"{weight_sharing!r}."
            )
        self._weight_sharing = weight_sharing
        first = self._equation.uses[0]
        heads, inputs, outputs = matrix_shape(first)
        stack = (*first.stack, *heads)
        indexed = {self._is_swapped(s) for s in self._equation.uses if isinstance(s, EmbeddingUse)}
        self._kronecker = Kronecker(
            _side(inputs, stack, inputs > max_factor_size or False in indexed),
            _side(outputs, stack, outputs > max_factor_size or True in indexed),
        )
        self._max_factor_size = max_factor_size

    @property
    def has_bias(self) -> bool:
        """Whether the layer has a bias."""
        return self.number_of_parameters > 1

    @property
    def num_averaged_positions(self) -> int:
        """Over how many positions of an example the factor of the outputs is averaged."""
        return 1

    @property
    def cache_work(self) -> float:
        return sum(side.work for side in (self._kronecker.inputs, self._kronecker.outputs))

    @property
    def multiply_work(self) -> float:
        return float(self.dim) * (self._kronecker.inputs.size + self._kronecker.outputs.size)

    @property
    def remarks(self) -> tuple[str, ...]:
        sides = {"inputs": self._kronecker.inputs, "outputs": self._kronecker.outputs}
        found = [
            f"the factor of the {name} is diagonal: it has {side.size} rows, more than "
            f"{self._max_factor_size}"
            for name, side in sides.items()
            if side.size > self._max_factor_size
        ]
        if self._weight_sharing == "reduce" and not self._reduces(self._equation.uses):
            found.append(
                "which positions belong to one example is not known, or differs from place to "
                "place, or examples are run by a loop: weight_sharing is 'expand'"
            )
        first = self._equation.uses[0]
        if first.uncovered:
            found.append(first.remark_on_coverage)
        interaction = first.examples.interaction
        if interaction:
            found.append(f"{interaction}: gradients of different ones are taken to be independent")
        return tuple(found)

    @property
    def kronecker(self) -> Kronecker:
        """How to compute with both factors."""
        return self._kronecker

    def as_matrices(self, vector: Sequence[Array]) -> Array:
        """Arrays like the parameters as what both factors act on, (..., inputs, outputs)."""
        return matrix_of_params(self._equation.uses[0], vector)

    def of_matrices(self, x: Array) -> tuple[Array, ...]:
        """What `as_matrices` made of arrays like the parameters, back."""
        return tuple(params_of_matrix(self._equation.uses[0], x))

    def finiteness_probe(self, estimates: Sequence[Array]) -> Sequence[Array]:
        inputs, outputs, *rest = estimates
        sides = self._kronecker.inputs, self._kronecker.outputs
        return [sides[0].diagonal(inputs), sides[1].diagonal(outputs), *rest]

    def statistics(self, use: LayerUse, uses: Sequence[LayerUse], state: Any) -> Statistics:
        del state
        is_swapped, dtype = self._is_swapped(use), self.dtype
        inputs, outputs = self._sides(is_swapped)
        if self._reduces(uses):
            of_input = lambda x, _: input_sums(use, x[0], dtype)
            of_output = lambda _, g: output_sums(use, g[0], dtype)
        else:
            of_input = lambda x, _: input_moment(use, inputs, x[0], dtype)
            of_output = lambda _, g: output_moment(use, outputs, g[0], dtype)
        return {
            FactorKey("inputs", is_swapped): Statistic(of_input, "inputs"),
            FactorKey("outputs", is_swapped): Statistic(of_output, "cotangents"),
        }

    def terms(self, sums: Sums, uses: Sequence[LayerUse], state: Any) -> Sums:
        del state
        terms = Sums([], [])
        for is_swapped in self._ways(uses):
            inputs = sums.of_inputs[FactorKey("inputs", is_swapped)]
            outputs = sums.of_cotangents[FactorKey("outputs", is_swapped)]
            if self._reduces(uses):
                sides = self._sides(is_swapped)
                inputs, outputs = sides[0].of_rows(inputs), sides[1].of_rows(outputs)
            terms.of_inputs.append(inputs)
            terms.of_cotangents.append(outputs)
        return terms

    def estimate(
        self, terms: Sums, uses: Sequence[LayerUse], batch_size: ArrayLike
    ) -> Sequence[Array]:
        pairs = []
        for is_swapped, inputs, outputs in zip(self._ways(uses), *terms, strict=True):
            own = [use for use in uses if self._is_swapped(use) == is_swapped]
            rows = sum(map(num_rows, own))
            if self._reduces(uses):
                # Of each example, the mean over its positions.
                rows *= rows / own[0].num_counted
            pair = inputs / max(rows, 1), outputs / (batch_size * self.num_averaged_positions)
            pairs.append(pair[::-1] if is_swapped else pair)
        return pairs[0] if len(pairs) == 1 else self._together(pairs)

    def is_cached(self, state: Any, power: float | int, exact_power: bool) -> bool:
        return cache_key(power, exact_power) in state.cache

    def cache_requests(self, state: Any, wanted: Refresh) -> dict[str, Any]:
        own_scale = jnp.asarray(self.state_dependent_scale(state), self.dtype)
        inputs, outputs = state.inputs_factor, state.outputs_factor
        requests: dict[str, Any] = {
            power_key(power): self._kronecker.power(
                inputs.raw_value,
                outputs.raw_value,
                wanted.identity_weight,
                power,
                scales=(own_scale * inputs.scale, outputs.scale),
            )
            for power in wanted.approx
        }
        if wanted.exact or wanted.eigenvalues:
            eigen = self._kronecker.eigen_tasks(own_scale * inputs.value, outputs.value)
            requests["eigen"] = eigen
        return requests

    def with_cache(self, state: Any, results: PyTree, wanted: Refresh) -> Any:
        entries: dict[str, Any] = {
            power_key(power): dict(zip(FACTORS, results[power_key(power)], strict=True))
            for power in wanted.approx
        }
        eigen = self._kronecker.eigen_of(results["eigen"]) if "eigen" in results else {}
        if wanted.exact:
            entries["eigen"] = eigen
        if wanted.eigenvalues:
            entries["eigenvalues"] = self._kronecker.eigenvalues(eigen).reshape(-1)
        return self._with_entries(state, entries)

    def _initial_fields(self) -> dict[str, Any]:
        sides = self._kronecker.inputs, self._kronecker.outputs
        averages = [WeightedMovingAverage.zeros_array(side.shape, self.dtype) for side in sides]
        return dict(zip(FACTORS, averages, strict=True))

    def _multiply_matpower(
        self, state: Any, vector: tuple[Array, ...], how: MatrixPower
    ) -> tuple[Array, ...]:
        x = self.as_matrices(vector)
        factors = lambda: self._values(state)
        cached = lambda key: self._cached(state, key)
        return self.of_matrices(multiplied(self._kronecker, factors, cached, x, how))

    def _eigenvalues(self, state: Any, use_cached: bool) -> Array:
        if use_cached:
            return self._cached(state, "eigenvalues")
        eigen = self._kronecker.eigen(*self._values(state))
        return self._kronecker.eigenvalues(eigen).reshape(-1)

    def _values(self, state: Any) -> tuple[Array, Array]:
        return state.inputs_factor.value, state.outputs_factor.value

    def _reduces(self, uses: Sequence[LayerUse]) -> bool:
        """Whether sums over the positions of each example are taken first."""
        counts = {(use.num_examples, use.examples.first) for use in uses}
        is_known = len(counts) == 1 and not any(use.examples.unknown for use in uses)
        in_loop = any(any(use.example_loops) for use in uses)
        return self._weight_sharing == "reduce" and is_known and not in_loop

    def needs_examples(self, uses: Sequence[LayerUse]) -> bool:
        return self._reduces(uses)

    def _is_swapped(self, use: LayerUse) -> bool:
        """Whether the weights are used the other way round than at the first place."""
        first = self._equation.uses[0]
        return not use.is_conv and use.params[0].arrangement != first.params[0].arrangement

    def _ways(self, uses: Sequence[LayerUse]) -> list[bool]:
        """Which ways round weights are used: whether swapped, as `_is_swapped` says."""
        return list(dict.fromkeys(map(self._is_swapped, uses)))

    def has_linear_estimates(self, uses: Sequence[LayerUse]) -> bool:
        return len(self._ways(uses)) <= 1

    def _sides(self, is_swapped: bool) -> tuple[Side, Side]:
        """The sides that inputs and outputs have where weights are used one way round."""
        inputs, outputs = self._kronecker.inputs, self._kronecker.outputs
        return (outputs, inputs) if is_swapped else (inputs, outputs)

    def _together(self, pairs: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
        """One pair for several, so that of equal ones it is as many times their product."""
        sides = self._kronecker.inputs, self._kronecker.outputs
        totals = [jnp.zeros(side.shape, self.dtype) for side in sides]
        for pair in pairs:
            means = [side.trace(x) / side.size for side, x in zip(sides, pair, strict=True)]
            is_zero = (means[0] <= 0) | (means[1] <= 0)
            first, last = (jnp.where(is_zero, 1, mean) for mean in means)
            ratio = jnp.sqrt(last) / jnp.sqrt(first)
            for k, (x, scale) in enumerate(zip(pair, (ratio, 1 / ratio), strict=True)):
                scale = scale.reshape(*scale.shape, *[1] * (x.ndim - scale.ndim))
                totals[k] = totals[k] + scale * x
        root = len(pairs) ** 0.5
        return totals[0] / root, totals[1] / root


def _side(size: int, stack: tuple[int, ...], is_diagonal: bool) -> Side:
    return DiagonalSide(size, stack) if is_diagonal else DenseSide(size, stack)


def cache_key(power: float | int, is_exact: bool) -> str:
    """Under which key of the cache of a Kronecker product what a power needs is."""
    return "eigen" if is_exact else power_key(power)


def multiplied(
    kronecker: Kronecker,
    factors: Callable[[], tuple[Array, Array]],
    cached: Callable[[str], Any],
    x: Array,
    how: MatrixPower,
) -> Array:
    """A power of a Kronecker product, with something added to its diagonal, times `x`.

    Arguments:
        kronecker: how to compute with the factors.
        factors: returns both.
        cached: returns what is in the cache under a key.
        x: what is multiplied, (..., inputs, outputs).
        how: which power, and what is added.
    """
    if how.is_exact and how.is_cached:
        return kronecker.multiply_power(cached("eigen"), x, how.identity_weight, how.power)
    if how.is_exact and how.power == 1:
        added = per_matrix(how.identity_weight, 2, x.dtype) * x
        return added + kronecker.multiply(*factors(), x)
    if how.is_exact:
        eigen = kronecker.eigen(*factors())
        return kronecker.multiply_power(eigen, x, how.identity_weight, how.power)
    if how.is_cached:
        powers = cached(power_key(how.power))
        return kronecker.multiply(powers["inputs_factor"], powers["outputs_factor"], x)
    inputs, outputs = run_matrix_tasks(kronecker.power(*factors(), how.identity_weight, how.power))
    return kronecker.multiply(inputs, outputs, x)


# Kronecker-factored blocks for dense layers and embeddings.


class DenseTwoKroneckerFactored(TwoKroneckerFactored):
    """A `TwoKroneckerFactored` block for dense layers: `y = x @ w + b`.

    Arguments:
        layer_tag_eq: the equation of the layer's tag.
        name: what the block is called.
        weight_sharing: "expand" or "reduce", where weights are applied at several positions.
        max_factor_size: a factor that is wider is kept as its diagonal.
    """


class EmbeddingTwoKroneckerFactored(TwoKroneckerFactored):
    """A `TwoKroneckerFactored` block for tables whose rows are looked up.

    The factor of the inputs is that of one-hot vectors: diagonal, how often each row is used.

    Arguments:
        layer_tag_eq: the equation of the layer's tag.
        name: what the block is called.
        weight_sharing: "expand" or "reduce", where rows are looked up at several positions.
        max_factor_size: a factor that is wider is kept as its diagonal.
    """


# Kronecker-factored blocks for convolutions.


class ConvTwoKroneckerFactored(TwoKroneckerFactored):
    """A `TwoKroneckerFactored` block for convolutions, of any number of spatial axes, or grouped.

    The rows of its weights are the elements of a patch: the factor of the inputs is the second
    moment of patches. The factor of the outputs is an average over positions; their number is the
    `fixed_scale`.

    Arguments:
        layer_tag_eq: the equation of the layer's tag.
        name: what the block is called.
        weight_sharing: "expand" or "reduce", where patches are the positions.
        max_factor_size: a factor that is wider is kept as its diagonal.
    """

    @property
    def num_averaged_positions(self) -> int:
        return self.num_locations

    def fixed_scale(self) -> ArrayLike:
        return float(self.num_locations)

    @property
    def outputs_channel_index(self) -> int:
        """The axis of channels in the outputs."""
        return self._numbers.out_spec[1]

    @property
    def inputs_channel_index(self) -> int:
        """The axis of channels in the inputs."""
        return self._numbers.lhs_spec[1]

    @property
    def weights_output_channel_index(self) -> int:
        """The axis of the kernel for the channels of the outputs."""
        return self._numbers.rhs_spec[0]

    @property
    def weights_spatial_size(self) -> int:
        """The number of elements of the kernel in each channel."""
        return geometry_of(self._first).kernel_size

    @property
    def num_locations(self) -> int:
        """The number of positions in an image that the kernel is applied at, at all places."""
        count = 0
        for use in self._equation.uses:
            spatial = self._numbers.out_spec[2:]
            count += math.prod(use.output.shape[axis] for axis in spatial) * use.repeats
        return count

    @property
    def num_inputs_channels(self) -> int:
        """The number of channels of the inputs."""
        return self._equation.uses[0].input.shape[self.inputs_channel_index]

    @property
    def num_outputs_channels(self) -> int:
        """The number of channels of the outputs."""
        heads, _, outputs = matrix_shape(self._equation.uses[0])
        return math.prod(heads) * outputs

    @property
    def _first(self) -> ConvolutionUse:
        first = self._equation.uses[0]
        assert isinstance(first, ConvolutionUse)
        return first

    @property
    def _numbers(self) -> Any:
        return self._first.dimension_numbers


class Conv2DTwoKroneckerFactored(ConvTwoKroneckerFactored):
    """A `TwoKroneckerFactored` block for convolutions with two spatial axes.

    See `ConvTwoKroneckerFactored`.

    Arguments:
        layer_tag_eq: the equation of the layer's tag.
        name: what the block is called.
        weight_sharing: "expand" or "reduce", where patches are the positions.
        max_factor_size: a factor that is wider is kept as its diagonal.
    """
