"""`TwoKroneckerFactored`: curvature as the Kronecker product of two small matrices (K-FAC).

- Martens & Grosse (2015), "Optimizing neural networks with Kronecker-factored approximate
  curvature", arXiv:1503.05671.
- Grosse & Martens (2016), "A Kronecker-factored approximate Fisher matrix for convolution layers",
  arXiv:1602.01407.
- Eschenhagen, Immer, Turner, Schneider & Hennig (2023), "Kronecker-factored approximate curvature
  for modern neural network architectures", arXiv:2311.00636: "expand" and "reduce".

The gradient of an example in the weights of a layer is a sum of outer products of inputs and
cotangents, over the positions where the weights are applied. K-FAC takes inputs and cotangents, at
all positions, to be independent: the curvature is then the Kronecker product of their second
moments. For weights that are applied at several positions there are two such approximations:

- "expand": positions are independent as well. The factor of the inputs is an average over examples
  and positions, that of the outputs an average over examples of a sum over positions. Exact for a
  linear network with a loss at each position.
- "reduce": inputs are averaged over the positions of an example, and cotangents summed, before
  outer products are taken. Exact for a linear network that averages over positions.

The first half of the module computes both factors: moments of a layer's inputs, and of the
cotangents of its outputs. A layer with weights computes `matrix.T @ row` at each position. The
matrix contains the weights, with the bias as its last row; the row is the input at that position,
with a one appended. How they are laid out depends on the kind of layer. Heads and groups of
channels have one matrix each, along a leading axis.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from curvax._types import Array, PyTree
from curvax.curvature.blocks.base import (
    BlockState,
    CurvatureBlock,
    MatrixPower,
    Refresh,
    Statistics,
    TagEquation,
    power_key,
)
from curvax.curvature.linalg.kronecker import DenseSide, DiagonalSide, Kronecker, Side
from curvax.curvature.linalg.moving_average import WeightedMovingAverage
from curvax.curvature.linalg.norms import kronecker_norm
from curvax.curvature.linalg.psd import per_matrix
from curvax.curvature.linalg.tasks import run_matrix_tasks
from curvax.curvature.patches.geometry import ConvGeometry
from curvax.curvature.patches.patches import extract_patches, patch_moment_sums
from curvax.layers.tracing.statistics import Statistic, Sums
from curvax.layers.use import ConvolutionUse, EmbeddingUse, LayerUse

# The factors of a layer's curvature.


def matrix_shape(use: LayerUse) -> tuple[tuple[int, ...], int, int]:
    """Return the heads or groups, the number of inputs (with the bias), and that of outputs."""
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
    """Return the function's parameters as matrices, (*stack, *heads, inputs, outputs)."""
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
    """Inverse of `matrix_of_params`."""
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
    """Return the number of positions of all examples, over all steps that share the weights."""
    if isinstance(use, ConvolutionUse):
        numbers = use.dimension_numbers
        shape = use.output.shape
        count = math.prod(shape[axis] for axis in (numbers.out_spec[0], *numbers.out_spec[2:]))
        return count * use.repeats
    heads, _, outputs = matrix_shape(use)
    return math.prod(use.output.shape) // max(math.prod(heads) * outputs, 1) * use.repeats


def input_moment(use: LayerUse, side: Side, x: Array, dtype: jnp.dtype) -> Array:
    """Sum the outer products of rows over the positions of one step."""
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


def output_moment(use: LayerUse, side: Side, cotangent: Array, dtype: jnp.dtype) -> Array:
    """Sum the outer products of cotangents over the positions of one step."""
    return side.of_rows(_output_rows(use, cotangent.astype(dtype)))


def input_sums(use: LayerUse, x: Array, dtype: jnp.dtype) -> Array:
    """Sum rows over the positions of each example: (*heads, examples, inputs)."""
    if isinstance(use, EmbeddingUse):
        vocabulary = use.slice_shapes[0][0]
        indices = use.by_example(x, False)
        indices = indices.reshape(indices.shape[0], -1)
        zeros = jnp.zeros((indices.shape[0], vocabulary), dtype)
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


def output_sums(use: LayerUse, cotangent: Array, dtype: jnp.dtype) -> Array:
    """Sum cotangents over the positions of each example: (*heads, examples, outputs)."""
    rows = _output_rows(use, cotangent.astype(dtype))
    if isinstance(use, ConvolutionUse):
        batch = use.output.shape[use.dimension_numbers.out_spec[0]]
        return jnp.sum(rows.reshape(*rows.shape[:-2], batch, -1, rows.shape[-1]), -2)
    return jnp.sum(_examples_of_rows(use, rows), -2)


def geometry_of(use: ConvolutionUse) -> ConvGeometry:
    """Return the geometry of a convolution."""
    settings = use.convolution
    numbers = settings["dimension_numbers"]
    kernel = tuple(use.slice_shapes[0][axis] for axis in numbers.rhs_spec[2:])
    return ConvGeometry.of(kernel, **settings)


def _rows(use: LayerUse, x: Array) -> Array:
    """Return inputs as (*heads, positions, inputs)."""
    heads, inputs, _ = matrix_shape(use)
    inputs -= len(use.slice_shapes) - 1
    rows = x.reshape(-1, *heads, inputs)
    return jnp.moveaxis(rows, 0, -2)


def _output_rows(use: LayerUse, cotangent: Array) -> Array:
    """Return cotangents as (*heads, positions, outputs)."""
    heads, _, outputs = matrix_shape(use)
    if isinstance(use, ConvolutionUse):
        out = use.dimension_numbers.out_spec
        cotangent = jnp.transpose(cotangent, (out[0], *out[2:], out[1]))
    return jnp.moveaxis(cotangent.reshape(-1, *heads, outputs), 0, -2)


def _examples_of_rows(use: LayerUse, rows: Array) -> Array:
    """Return rows as (*heads, examples, positions of each, features)."""
    *heads, _, features = rows.shape
    if not use.is_arranged or use.num_examples is None:
        return rows.reshape(*heads, use.num_counted, -1, features)
    return use.split_examples(rows, len(heads))


def _patch_sums(x: Array, geometry: ConvGeometry) -> Array:
    """Return the sum of all patches."""
    _, sums = patch_moment_sums(x, geometry, with_first=True)
    assert sums is not None
    return sums


def _bordered(side: Side, moment: Array, sums: Array | None, count: int) -> Array:
    """Return the moment of rows with a one appended, from their moment, sum and count."""
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
    """Return the axes of a kernel in the order of a patch: spatial, input and output channels."""
    out, channels, *spatial = use.dimension_numbers.rhs_spec
    return (*spatial, channels, out)


def _kernel_axes(use: ConvolutionUse, ndim: int) -> tuple[int, ...]:
    front = ndim - len(_order(use))
    return tuple(front + axis for axis in _order(use))


WeightSharing = Literal["expand", "reduce"]

MAX_FACTOR_SIZE = 8192
"""Default maximum width of a dense factor."""

FACTORS = ("inputs_factor", "outputs_factor")
"""The names of the factors, in states and caches."""


@dataclass(frozen=True)
class FactorKey:
    """The key of a statistic of inputs or outputs, for one orientation of the weights."""

    side: Literal["inputs", "outputs"]
    is_swapped: bool


class TwoKroneckerFactored(CurvatureBlock):
    """The Kronecker product of a factor for inputs and one for outputs, for layers with weights.

    A bias is one more row of the weights. Several matrices (layers of a stack, heads, groups of
    channels) have separate factors, along leading axes. Weights whose transpose is used as well,
    as in tied embeddings, have a pair of factors for each orientation. Both pairs are scaled so
    that the mean eigenvalues of their two factors agree, and added.

    Arguments:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator. Do not construct
            blocks yourself: put the class, or a `functools.partial` of it, into
            `layer_tag_to_block_ctor`.
        name: Name of the block, for error messages. Passed by the estimator.
        weight_sharing: "expand" or "reduce", for layers that are applied at several positions
            (pixels or time steps) of an example. "expand" takes positions to be independent;
            "reduce" averages inputs and sums cotangents over the positions of an example first.
        max_factor_size: Maximum width of a dense factor. A wider one is kept as its diagonal.

    Raises:
        ValueError: If `weight_sharing` is neither "expand" nor "reduce".

    Examples:
        >>> import functools
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def model(w, x):
        ...     return curvax.register_squared_error_loss(x @ w)
        >>> blocks = {"dense": functools.partial(curvax.TwoKroneckerFactored, max_factor_size=8)}
        >>> estimator = curvax.BlockDiagonalCurvature(model, layer_tag_to_block_ctor=blocks)
        >>> estimator.finalize((jnp.ones((9, 2)), jnp.ones((4, 9))))
        >>> estimator.blocks[0].remarks
        ('the factor of the inputs is diagonal: it has 9 rows, more than 8',)
    """

    class State(BlockState):
        """The state of a Kronecker-factored block.

        Attributes:
            cache: Powers of both factors, and eigenvalues, as of the last `update_cache`.
            inputs_factor: A moving average of the factor of the inputs.
            outputs_factor: A moving average of the factor of the outputs.
        """

        inputs_factor: WeightedMovingAverage
        outputs_factor: WeightedMovingAverage

    splits_parts = True

    is_plain = True
    """Whether the block is determined by its factors: no override changes the state or products."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        names = ("State", "update_cache", "cache_requests", "with_cache")
        names += ("_multiply_matpower", "state_dependent_scale")
        plain = TwoKroneckerFactored
        cls.is_plain = all(getattr(cls, name) is getattr(plain, name) for name in names)

    def __init__(
        self,
        layer_tag_eq: TagEquation,
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
        """The number of positions of an example that the factor of the outputs is averaged over."""
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
                "which positions belong to one example is not known, or differs from use to use, "
                "or a loop runs over examples: weight_sharing is 'expand'"
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
        """The operations on both factors."""
        return self._kronecker

    def as_matrices(self, vector: Sequence[Array]) -> Array:
        """Return arrays like the parameters as the matrices that the factors act on.

        Arguments:
            vector: Arrays like the parameters.

        Returns:
            An array of shape (..., inputs, outputs).
        """
        return matrix_of_params(self._equation.uses[0], vector)

    def of_matrices(self, x: Array) -> tuple[Array, ...]:
        """Inverse of `as_matrices`."""
        return tuple(params_of_matrix(self._equation.uses[0], x))

    def finiteness_probe(self, estimates: Sequence[Array]) -> Sequence[Array]:
        inputs, outputs, *rest = estimates
        sides = self._kronecker.inputs, self._kronecker.outputs
        return [sides[0].diagonal(inputs), sides[1].diagonal(outputs), *rest]

    def statistics(
        self, use: LayerUse, uses: Sequence[LayerUse], state: BlockState | None
    ) -> Statistics:
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

    def terms(self, sums: Sums, uses: Sequence[LayerUse], state: BlockState | None) -> Sums:
        del state
        terms = Sums([], [])
        for is_swapped in self._orientations(uses):
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
        for is_swapped, inputs, outputs in zip(self._orientations(uses), *terms, strict=True):
            oriented = [use for use in uses if self._is_swapped(use) == is_swapped]
            rows = sum(map(num_rows, oriented))
            if self._reduces(uses):
                # With P positions in each of N examples, rows = N P. The factor is the mean of
                # outer products of means over positions, `inputs` the sum of those of sums: it is
                # divided by N P².
                rows *= rows / oriented[0].num_counted
            pair = inputs / max(rows, 1), outputs / (batch_size * self.num_averaged_positions)
            pairs.append(pair[::-1] if is_swapped else pair)
        return pairs[0] if len(pairs) == 1 else self._together(pairs)

    def is_cached(self, state: BlockState, power: float | int, exact_power: bool) -> bool:
        return cache_key(power, exact_power) in (state.cache or {})

    def cache_requests(self, state: BlockState, wanted: Refresh) -> dict[str, PyTree]:
        state_scale = jnp.asarray(self.state_dependent_scale(state), self.dtype)
        inputs, outputs = _factors(state)
        requests: dict[str, PyTree] = {
            power_key(power): self._kronecker.power(
                inputs.raw_value,
                outputs.raw_value,
                wanted.identity_weight,
                power,
                scales=(state_scale * inputs.scale, outputs.scale),
            )
            for power in wanted.approx
        }
        if wanted.exact or wanted.eigenvalues:
            eigen = self._kronecker.eigen_tasks(state_scale * inputs.value, outputs.value)
            requests["eigen"] = eigen
        return requests

    def with_cache(self, state: BlockState, results: PyTree, wanted: Refresh) -> BlockState:
        entries: dict[str, PyTree] = {
            power_key(power): dict(zip(FACTORS, results[power_key(power)], strict=True))
            for power in wanted.approx
        }
        eigen = self._kronecker.eigen_of(results["eigen"]) if "eigen" in results else {}
        if wanted.exact:
            entries["eigen"] = eigen
        if wanted.eigenvalues:
            entries["eigenvalues"] = self._kronecker.eigenvalues(eigen).reshape(-1)
        return self._with_entries(state, entries)

    def _initial_fields(self) -> dict[str, PyTree]:
        sides = self._kronecker.inputs, self._kronecker.outputs
        averages = [WeightedMovingAverage.zeros_array(side.shape, self.dtype) for side in sides]
        return dict(zip(FACTORS, averages, strict=True))

    def _multiply_matpower(
        self, state: BlockState, vector: tuple[Array, ...], how: MatrixPower
    ) -> tuple[Array, ...]:
        x = self.as_matrices(vector)
        factors = lambda: self._values(state)
        cached = lambda key: self._cached(state, key)
        return self.of_matrices(multiplied(self._kronecker, factors, cached, x, how))

    def _eigenvalues(self, state: BlockState, use_cached: bool) -> Array:
        if use_cached:
            return self._cached(state, "eigenvalues")
        eigen = self._kronecker.eigen(*self._values(state))
        return self._kronecker.eigenvalues(eigen).reshape(-1)

    def _norm(self, state: BlockState, norm_type: str) -> Array:
        return kronecker_norm(self._values(state), self._kronecker.inputs.stack, norm_type)

    def _values(self, state: BlockState) -> tuple[Array, Array]:
        inputs, outputs = _factors(state)
        return inputs.value, outputs.value

    def _reduces(self, uses: Sequence[LayerUse]) -> bool:
        """Return whether positions are reduced: "reduce" is set, and examples are known."""
        counts = {(use.num_examples, use.examples.first) for use in uses}
        is_known = len(counts) == 1 and not any(use.examples.unknown for use in uses)
        in_loop = any(any(use.example_loops) for use in uses)
        return self._weight_sharing == "reduce" and is_known and not in_loop

    def needs_examples(self, uses: Sequence[LayerUse]) -> bool:
        return self._reduces(uses)

    def _is_swapped(self, use: LayerUse) -> bool:
        """Return whether a use has the transpose of the weights of the first use."""
        first = self._equation.uses[0]
        return not use.is_conv and use.params[0].arrangement != first.params[0].arrangement

    def _orientations(self, uses: Sequence[LayerUse]) -> list[bool]:
        """Return the distinct values of `_is_swapped`, in the order of the uses."""
        return list(dict.fromkeys(map(self._is_swapped, uses)))

    def has_linear_estimates(self, uses: Sequence[LayerUse]) -> bool:
        return len(self._orientations(uses)) <= 1

    def _sides(self, is_swapped: bool) -> tuple[Side, Side]:
        """Return the sides of inputs and outputs for one orientation of the weights."""
        inputs, outputs = self._kronecker.inputs, self._kronecker.outputs
        return (outputs, inputs) if is_swapped else (inputs, outputs)

    def _together(self, pairs: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
        """Add pairs of factors, so that n equal pairs make a pair with n times their product."""
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
        # n equal pairs add up to (n A, n B), whose product is n² A ⊗ B.
        root = len(pairs) ** 0.5
        return totals[0] / root, totals[1] / root


def _side(size: int, stack: tuple[int, ...], is_diagonal: bool) -> Side:
    return DiagonalSide(size, stack) if is_diagonal else DenseSide(size, stack)


def _factors(state: BlockState) -> tuple[WeightedMovingAverage, WeightedMovingAverage]:
    state = cast(TwoKroneckerFactored.State, state)
    return state.inputs_factor, state.outputs_factor


def cache_key(power: float | int, is_exact: bool) -> str:
    """Return the cache key of what a power of a Kronecker product is computed from."""
    return "eigen" if is_exact else power_key(power)


def multiplied(
    kronecker: Kronecker,
    factors: Callable[[], tuple[Array, Array]],
    cached: Callable[[str], PyTree],
    x: Array,
    how: MatrixPower,
) -> Array:
    """Multiply by a power of a Kronecker product plus a multiple of the identity.

    Arguments:
        kronecker: The operations on both factors.
        factors: Returns both factors.
        cached: Returns the cache entry of a key.
        x: The matrices to multiply, (..., inputs, outputs).
        how: The power, and the multiple of the identity.
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
    """A `TwoKroneckerFactored` block for dense layers, `y = x @ w + b`.

    Arguments:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator. Do not construct
            blocks yourself: put the class, or a `functools.partial` of it, into
            `layer_tag_to_block_ctor`.
        name: Name of the block, for error messages. Passed by the estimator.
        weight_sharing: "expand" or "reduce", for layers that are applied at several positions
            (pixels or time steps) of an example. "expand" takes positions to be independent;
            "reduce" averages inputs and sums cotangents over the positions of an example first.
        max_factor_size: Maximum width of a dense factor. A wider one is kept as its diagonal.

    Raises:
        ValueError: If `weight_sharing` is neither "expand" nor "reduce".

    Examples:
        It is the default for dense layers.

        >>> import jax
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def model(w, x):
        ...     return curvax.register_normal_predictive_distribution(x @ w, variance=0.25)
        >>> args = jnp.ones((2, 1)), jnp.array([[1.0, 2.0], [3.0, 4.0]])
        >>> estimator, key = curvax.BlockDiagonalCurvature(model), jax.random.key(0)
        >>> state = estimator.update_curvature_matrix_estimate(
        ...     estimator.init(key, args, None, None), 0.0, 1.0, 2, key, args, None, "ggn_exact"
        ... )
        >>> state.blocks_states[0].inputs_factor.value  # The second moment of the inputs.
        Array([[ 5.,  7.],
               [ 7., 10.]], dtype=float32)
        >>> state.blocks_states[0].outputs_factor.value  # That of the cotangents: 1 / variance.
        Array([[4.]], dtype=float32)
    """


class EmbeddingTwoKroneckerFactored(TwoKroneckerFactored):
    """A `TwoKroneckerFactored` block for embeddings.

    The factor of the inputs is the second moment of one-hot vectors: a diagonal matrix of the
    frequencies of the indices.

    Arguments:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator. Do not construct
            blocks yourself: put the class, or a `functools.partial` of it, into
            `layer_tag_to_block_ctor`.
        name: Name of the block, for error messages. Passed by the estimator.
        weight_sharing: "expand" or "reduce", for layers that are applied at several positions
            (pixels or time steps) of an example. "expand" takes positions to be independent;
            "reduce" averages inputs and sums cotangents over the positions of an example first.
        max_factor_size: Maximum width of a dense factor. A wider one is kept as its diagonal.

    Raises:
        ValueError: If `weight_sharing` is neither "expand" nor "reduce".

    Examples:
        It is the default for embeddings.

        >>> import jax
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def model(embedding, indices):
        ...     return curvax.register_squared_error_loss(embedding[indices])
        >>> args = jnp.ones((3, 1)), jnp.array([0, 0, 1, 2])
        >>> estimator, key = curvax.BlockDiagonalCurvature(model), jax.random.key(0)
        >>> state = estimator.update_curvature_matrix_estimate(
        ...     estimator.init(key, args, None, None), 0.0, 1.0, 4, key, args, None, "ggn_exact"
        ... )
        >>> state.blocks_states[0].inputs_factor.value
        Array([0.5 , 0.25, 0.25], dtype=float32)
    """


# Kronecker-factored blocks for convolutions.


class ConvTwoKroneckerFactored(TwoKroneckerFactored):
    """A `TwoKroneckerFactored` block for convolutions with any number of spatial axes, or groups.

    The rows of its weights are the elements of a patch: the factor of the inputs is the second
    moment of patches. The factor of the outputs is an average over positions; their number is the
    `fixed_scale`.

    Arguments:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator. Do not construct
            blocks yourself: put the class, or a `functools.partial` of it, into
            `layer_tag_to_block_ctor`.
        name: Name of the block, for error messages. Passed by the estimator.
        weight_sharing: "expand" or "reduce", for layers that are applied at several positions
            (pixels or time steps) of an example. "expand" takes positions to be independent;
            "reduce" averages inputs and sums cotangents over the positions of an example first.
        max_factor_size: Maximum width of a dense factor. A wider one is kept as its diagonal.

    Raises:
        ValueError: If `weight_sharing` is neither "expand" nor "reduce".

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from jax import lax
        >>> import curvax
        >>> def model(kernel, x):
        ...     y = lax.conv_general_dilated(x, kernel, (1,), "VALID")
        ...     return curvax.register_squared_error_loss(jnp.mean(y, axis=2))
        >>> args = jnp.ones((5, 2, 3)), jnp.ones((4, 2, 8))  # 5 channels from 2, width 3
        >>> estimator = curvax.BlockDiagonalCurvature(model)
        >>> state = estimator.init(jax.random.key(0), args, None, None).blocks_states[0]
        >>> state.inputs_factor.value.shape, state.outputs_factor.value.shape
        ((6, 6), (5, 5))
        >>> estimator.blocks[0].num_locations
        6
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
        """The number of positions of an image that the kernel is applied at, over all uses."""
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
    def _numbers(self) -> lax.ConvDimensionNumbers:
        return self._first.dimension_numbers


class Conv2DTwoKroneckerFactored(ConvTwoKroneckerFactored):
    """A `TwoKroneckerFactored` block for convolutions with two spatial axes.

    The rows of its weights are the elements of a patch: the factor of the inputs is the second
    moment of patches. The factor of the outputs is an average over positions; their number is the
    `fixed_scale`.

    Arguments:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator. Do not construct
            blocks yourself: put the class, or a `functools.partial` of it, into
            `layer_tag_to_block_ctor`.
        name: Name of the block, for error messages. Passed by the estimator.
        weight_sharing: "expand" or "reduce", for layers that are applied at several positions
            (pixels or time steps) of an example. "expand" takes positions to be independent;
            "reduce" averages inputs and sums cotangents over the positions of an example first.
        max_factor_size: Maximum width of a dense factor. A wider one is kept as its diagonal.

    Raises:
        ValueError: If `weight_sharing` is neither "expand" nor "reduce".

    Examples:
        >>> import functools
        >>> import jax.numpy as jnp
        >>> from jax import lax
        >>> import curvax
        >>> def model(params, images):
        ...     layout = ("NHWC", "HWIO", "NHWC")
        ...     y = lax.conv_general_dilated(
        ...         images, params["w"], (1, 1), "SAME", dimension_numbers=layout
        ...     )
        ...     return curvax.register_squared_error_loss(jnp.mean(y, axis=(1, 2)))
        >>> args = {"w": jnp.ones((3, 3, 1, 2))}, jnp.ones((4, 8, 8, 1))
        >>> ctor = functools.partial(curvax.Conv2DTwoKroneckerFactored, weight_sharing="reduce")
        >>> blocks = {"conv2d": ctor}
        >>> estimator = curvax.BlockDiagonalCurvature(model, layer_tag_to_block_ctor=blocks)
        >>> estimator.finalize(args)
        >>> estimator.blocks
        (Conv2DTwoKroneckerFactored("['w']", ((3, 3, 1, 2),)),)
    """
