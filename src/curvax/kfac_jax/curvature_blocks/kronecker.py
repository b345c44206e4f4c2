"""kfac_jax's `KroneckerFactored`: a Kronecker product with a factor for each axis of an array.

The parameters of a layer are rearranged into one array; the block is the Kronecker product of a
matrix for each of its axes. Damping is divided among the factors by their mean eigenvalues, which
are made equal first (Martens & Grosse 2015, section 6.3, for two factors). A factor of size one
gets none of it: with such a factor the damped product is exact.
"""

# kfac_jax's states and updates differ from curvax's on purpose.
# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false

import math
import re
import string
import sys
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array, PyTree
from curvax.curvature.blocks import kronecker
from curvax.curvature.blocks.base import (
    BlockState,
    MatrixPower,
    Refresh,
    Statistics,
    TagEquation,
    power_key,
)
from curvax.curvature.blocks.data import EstimationData
from curvax.curvature.linalg.norms import kronecker_norm
from curvax.curvature.linalg.psd import clamp_eigenvalues, diagonal, per_matrix, spectral_power
from curvax.curvature.linalg.tasks import Eigenvectors, MatrixTask, Power, run_matrix_tasks
from curvax.curvature.patches.patches import extract_patches
from curvax.kfac_jax.curvature_blocks.block import BlockStateBase, CurvatureBlock
from curvax.kfac_jax.utils.matrices import get_special_case_zero_inv, rearrange
from curvax.kfac_jax.utils.states import WeightedMovingAverage, register_state_class
from curvax.layers.tracing.statistics import Sums
from curvax.layers.use import LayerUse


class KroneckerFactored(CurvatureBlock):
    """A Kronecker product with one factor for each axis of the array of the parameters.

    A subclass updates `state.factors` in `update_curvature_matrix_estimate`.

    Args:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator.
        parameters_specs: For each parameter, how its axes are arranged, such as "abc -> (ab)c". By
            default all axes but the last are merged, and a bias is one row.
        parameters_concat_axis: The axis along which the arrays of all parameters are concatenated.
    """

    @register_state_class
    class State(BlockStateBase):
        """The state of a Kronecker-factored block.

        Attributes:
            factors: A moving average of the factor of each axis.
        """

        factors: tuple[WeightedMovingAverage[Array], ...]

        @property
        def inputs_factor(self) -> WeightedMovingAverage[Array]:
            """The first factor, under the name that it has in curvax."""
            return self.factors[0]

        @property
        def outputs_factor(self) -> WeightedMovingAverage[Array]:
            """The last factor, under the name that it has in curvax."""
            return self.factors[-1]

    def __init__(
        self,
        layer_tag_eq: TagEquation,
        parameters_specs: Sequence[str] | None = None,
        parameters_concat_axis: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(layer_tag_eq, **kwargs)
        count = self.number_of_parameters
        if parameters_specs is not None and len(parameters_specs) != count:
            raise ValueError(
                f"There are {count} parameters, but {len(parameters_specs)} parameters_specs: "
                f"{list(parameters_specs)}."
            )
        self._parameters_specs = None if parameters_specs is None else tuple(parameters_specs)
        self._parameters_concat_axis = parameters_concat_axis

    @property
    def stack(self) -> tuple[int, ...]:
        """The leading axes of the array that have no factor: one matrix for each element."""
        return ()

    @property
    def array_shape(self) -> tuple[int, ...]:
        """The shape of the array of the parameters."""
        shapes = [jax.ShapeDtypeStruct(s, self.dtype) for s in self.parameters_shapes]
        array = jax.eval_shape(self.parameters_shaped_list_to_array, shapes)
        return array.shape[len(self.stack) :]

    @property
    def array_ndim(self) -> int:
        """The number of axes of the array of the parameters, and of factors."""
        return len(self.array_shape)

    @property
    def cache_work(self) -> float:
        return float(math.prod(self.stack)) * sum(size**3 for size in self.array_shape)

    @property
    def multiply_work(self) -> float:
        return float(self.dim) * sum(self.array_shape)

    def parameters_shaped_list_to_array(self, parameters_shaped_list: Sequence[Array]) -> Array:
        """Return arrays like the parameters as one array, whose axes the factors act along."""
        arrays = [
            rearrange(x, spec) for x, spec in zip(parameters_shaped_list, self._specs, strict=True)
        ]
        return jnp.concatenate(arrays, axis=self._parameters_concat_axis)

    def array_to_parameters_shaped_list(self, array: Array) -> tuple[Array, ...]:
        """Inverse of `parameters_shaped_list_to_array`."""
        axis, specs = self._parameters_concat_axis, self._specs
        arranged = [
            jax.eval_shape(lambda x, spec=spec: rearrange(x, spec), _like(shape, array)).shape
            for shape, spec in zip(self.parameters_shapes, specs, strict=True)
        ]
        ends = [sum(shape[axis] for shape in arranged[: k + 1]) for k in range(len(arranged) - 1)]
        parts = zip(jnp.split(array, ends, axis), specs, self.parameters_shapes, strict=True)
        return tuple(_undo_rearrange(x, spec, shape) for x, spec, shape in parts)

    @property
    def _specs(self) -> tuple[str, ...]:
        if self._parameters_specs is not None:
            return self._parameters_specs
        return tuple(_default_spec(len(shape)) for shape in self.parameters_shapes)

    def statistics(
        self, use: LayerUse, uses: Sequence[LayerUse], state: BlockState | None
    ) -> Statistics:
        raise NotImplementedError(
            f"{type(self).__name__} does not implement update_curvature_matrix_estimate."
        )

    def terms(self, sums: Sums, uses: Sequence[LayerUse], state: BlockState | None) -> Sums:
        return Sums()

    def estimate(
        self, terms: Sums, uses: Sequence[LayerUse], batch_size: ArrayLike
    ) -> Sequence[Array]:
        return ()

    def is_cached(self, state: BlockState, power: float | int, exact_power: bool) -> bool:
        key = "eigen" if exact_power else power_key(power)
        return key in (state.cache or {})

    def cache_requests(self, state: BlockState, wanted: Refresh) -> dict[str, PyTree]:
        scale = jnp.asarray(self.state_dependent_scale(state), self.dtype)
        factors = self.factor_values(state)
        requests: dict[str, PyTree] = {
            power_key(power): damped_powers(factors, scale, wanted.identity_weight, power)
            for power in wanted.approx
        }
        if wanted.exact or wanted.eigenvalues:
            first = per_matrix(scale, 2, self.dtype) * factors[0]
            requests["eigen"] = [Eigenvectors(x) for x in (first, *factors[1:])]
        return requests

    def with_cache(self, state: BlockState, results: PyTree, wanted: Refresh) -> BlockState:
        entries: dict[str, PyTree] = {
            power_key(power): dict(_named(results[power_key(power)])) for power in wanted.approx
        }
        if wanted.exact:
            entries["eigen"] = dict(_named(results["eigen"]))
        if wanted.eigenvalues:
            values = [values for values, _ in results["eigen"]]
            entries["eigenvalues"] = self._products_of_eigenvalues(values).reshape(-1)
        return self._with_entries(state, entries)

    def _initial_fields(self) -> dict[str, PyTree]:
        zeros = lambda n: WeightedMovingAverage.zeros_array((*self.stack, n, n), self.dtype)
        return {"factors": tuple(map(zeros, self.array_shape))}

    def _multiply_matpower(
        self, state: BlockState, vector: tuple[Array, ...], how: MatrixPower
    ) -> tuple[Array, ...]:
        x = self.parameters_shaped_list_to_array(vector)
        return self.array_to_parameters_shaped_list(self._multiplied(state, x, how))

    def _multiplied(self, state: BlockState, x: Array, how: MatrixPower) -> Array:
        if how.is_exact and how.power == 1 and not how.is_cached:
            added = per_matrix(how.identity_weight, self.array_ndim, x.dtype) * x
            return added + self._multiply_axes(self.factor_values(state), x)
        if how.is_exact:
            return self._multiply_in_eigenbasis(self._eigen(state, how.is_cached), x, how)
        if how.is_cached:
            powers = list(self._cached(state, power_key(how.power)).values())
        else:
            one = jnp.ones((), self.dtype)
            factors = self.factor_values(state)
            tasks = damped_powers(factors, one, how.identity_weight, how.power)
            powers = run_matrix_tasks(tasks)
        return self._multiply_axes(powers, x)

    def _eigen(self, state: BlockState, is_cached: bool) -> list[tuple[Array, Array]]:
        if is_cached:
            return list(self._cached(state, "eigen").values())
        return run_matrix_tasks([Eigenvectors(x) for x in self.factor_values(state)])

    def _multiply_in_eigenbasis(
        self, eigen: Sequence[tuple[Array, Array]], x: Array, how: MatrixPower
    ) -> Array:
        clamped = [clamp_eigenvalues(v, how.identity_weight, how.power) for v, _ in eigen]
        weight = per_matrix(how.identity_weight, self.array_ndim, x.dtype)
        axes = tuple(range(-self.array_ndim, 0))
        values = self._products_of_eigenvalues(clamped) + weight
        powers = spectral_power(values, how.power, axes=axes)
        vectors = [vectors for _, vectors in eigen]
        inside = self._multiply_axes([jnp.matrix_transpose(q) for q in vectors], x)
        return self._multiply_axes(vectors, powers * inside)

    def _multiply_axes(self, matrices: Sequence[Array], x: Array) -> Array:
        """Multiply `x` by each matrix, along the axis that the matrix belongs to."""
        front, ndim = len(self.stack), len(matrices)
        for axis, matrix in enumerate(matrices):
            moved = jnp.moveaxis(x, front + axis, -1)
            flat = moved.reshape(*x.shape[:front], -1, moved.shape[-1])
            product = flat @ jnp.matrix_transpose(matrix)
            x = jnp.moveaxis(product.reshape(moved.shape), -1, front + axis)
        assert x.ndim == front + ndim
        return x

    def _products_of_eigenvalues(self, values: Sequence[Array]) -> Array:
        """Return the eigenvalues of the Kronecker product, in the shape of the array."""
        total = jnp.ones((), self.dtype)
        for axis, of_factor in enumerate(values):
            shape = [1] * len(values)
            shape[axis] = of_factor.shape[-1]
            total = total * of_factor.reshape(*of_factor.shape[:-1], *shape)
        return total

    def _eigenvalues(self, state: BlockState, use_cached: bool) -> Array:
        if use_cached:
            return self._cached(state, "eigenvalues")
        values = [values for values, _ in self._eigen(state, False)]
        return self._products_of_eigenvalues(values).reshape(-1)

    def _norm(self, state: BlockState, norm_type: str) -> Array:
        return kronecker_norm(self.factor_values(state), self.stack, norm_type)

    def _undamped_diagonal(self, state: BlockState) -> tuple[Array, ...]:
        diagonals = [diagonal(x) for x in self.factor_values(state)]
        return self.array_to_parameters_shaped_list(self._products_of_eigenvalues(diagonals))

    def factor_values(self, state: BlockState) -> tuple[Array, ...]:
        """Return the factors of all axes."""
        return tuple(x.value for x in cast(KroneckerFactored.State, state).factors)


class TwoKroneckerFactored(KroneckerFactored, kronecker.TwoKroneckerFactored):
    """The Kronecker product of a factor for inputs and one for outputs.

    The statistics are those of curvax, the products those of `KroneckerFactored`. Several matrices,
    as of heads or of layers that are scanned over, have factors with leading axes.

    Args:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator.
        parameters_specs: For each parameter, how its axes are arranged into (inputs, outputs), such
            as "abc -> (ab)c". None for as curvax arranges them.
        parameters_concat_axis: The axis along which weights and bias are concatenated.
    """

    def __init__(
        self,
        layer_tag_eq: TagEquation,
        parameters_specs: Sequence[str] | None = None,
        parameters_concat_axis: int = 0,
    ) -> None:
        options = parameters_specs, parameters_concat_axis
        super().__init__(layer_tag_eq, *options, max_factor_size=sys.maxsize)

    @property
    def stack(self) -> tuple[int, ...]:
        return self._kronecker.inputs.stack if self._parameters_specs is None else ()

    def parameters_shaped_list_to_array(self, parameters_shaped_list: Sequence[Array]) -> Array:
        if self._parameters_specs is None:
            return self.as_matrices(parameters_shaped_list)
        return super().parameters_shaped_list_to_array(parameters_shaped_list)

    def array_to_parameters_shaped_list(self, array: Array) -> tuple[Array, ...]:
        if self._parameters_specs is None:
            return self.of_matrices(array)
        return super().array_to_parameters_shaped_list(array)

    def statistics(
        self, use: LayerUse, uses: Sequence[LayerUse], state: BlockState | None
    ) -> Statistics:
        return kronecker.TwoKroneckerFactored.statistics(self, use, uses, state)

    def terms(self, sums: Sums, uses: Sequence[LayerUse], state: BlockState | None) -> Sums:
        return kronecker.TwoKroneckerFactored.terms(self, sums, uses, state)

    def estimate(
        self, terms: Sums, uses: Sequence[LayerUse], batch_size: ArrayLike
    ) -> Sequence[Array]:
        return kronecker.TwoKroneckerFactored.estimate(self, terms, uses, batch_size)


class DenseTwoKroneckerFactored(TwoKroneckerFactored, kronecker.DenseTwoKroneckerFactored):
    """The Kronecker product of a factor for inputs and one for outputs of a dense layer.

    Equal to `curvax.DenseTwoKroneckerFactored` except that factors are dense however wide they are,
    and that a factor of size one is not damped.

    Args:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator.
        parameters_specs: For each parameter, how its axes are arranged into (inputs, outputs), such
            as "abc -> (ab)c". None for as they are.
        parameters_concat_axis: The axis along which weights and bias are concatenated.
    """

    def _update_estimate(
        self,
        state: BlockState,
        data: EstimationData,
        ema_old: ArrayLike,
        ema_new: ArrayLike,
        batch_size: ArrayLike,
    ) -> BlockState:
        arrays = _rows_of_data(data)
        if arrays is None or self.stack:
            return super()._update_estimate(state, data, ema_old, ema_new, batch_size)
        inputs, cotangents = (x.astype(self.dtype) for x in arrays)
        inputs = self.with_bias(inputs)
        estimates = [x.T @ x / batch_size for x in (inputs, cotangents)]
        return with_estimates(self, state, estimates, ema_old, ema_new)

    def with_bias(self, inputs: Array) -> Array:
        """Append a one to the inputs if the layer has a bias."""
        if self.number_of_parameters == 1:
            return inputs
        return jnp.concatenate([inputs, jnp.ones_like(inputs[..., :1])], axis=-1)

    def positions_of_data(self, data: EstimationData) -> tuple[Array, Array]:
        """Return inputs and cotangents of the layer as (examples, positions, features)."""
        names = ("inputs", "outputs_tangents")
        if self.stack or not all(len(data.get(name, ())) == 1 for name in names):
            raise NotImplementedError(
                f"curvax.kfac_jax.{type(self).__name__} of {self.name}: the layer has several "
                f"matrices, or uses of different shapes. Use DenseTwoKroneckerFactored."
            )
        ((x,), (g,)), sizes = (data[name] for name in names), self.array_shape
        features = sizes[0] - (self.number_of_parameters - 1), sizes[1]
        arranged = [
            y.astype(self.dtype).reshape(y.shape[0], -1, size)
            for y, size in zip((x, g), features, strict=True)
        ]
        return arranged[0], arranged[1]


class Conv2DTwoKroneckerFactored(TwoKroneckerFactored, kronecker.Conv2DTwoKroneckerFactored):
    """The Kronecker product of a factor for patches of the inputs and one for the output channels.

    Equal to `curvax.Conv2DTwoKroneckerFactored` except that factors are dense however wide they
    are, and that a factor of size one is not damped.

    Args:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator.
        parameters_specs: For each parameter, how its axes are arranged into (inputs, outputs). None
            for the elements of a patch, and output channels.
        parameters_concat_axis: The axis along which kernel and bias are concatenated.
    """

    @property
    def inputs_spatial_shape(self) -> tuple[int, ...]:
        """The sizes of the spatial axes of the inputs."""
        return tuple(self._first.input.shape[axis] for axis in self._numbers.lhs_spec[2:])

    @property
    def kernel_output_axis(self) -> int:
        """The axis of the kernel for the channels of the outputs."""
        return self.weights_output_channel_index

    @property
    def weights_spatial_shape(self) -> tuple[int, ...]:
        """The sizes of the spatial axes of the kernel."""
        kernel = self.parameters_shapes[0]
        return tuple(kernel[axis] for axis in self._numbers.rhs_spec[2:])

    def input_size(self) -> int:
        """Return the number of rows of the first factor: elements of a patch, and the bias."""
        return self.array_shape[0]

    def output_size(self) -> int:
        """Return the number of rows of the last factor: output channels."""
        return self.array_shape[1]

    def compute_inputs_stats(self, inputs: Array, weighting_array: Array | None = None) -> Array:
        """Return the second moment of the patches of the inputs, with a one for the bias.

        Args:
            inputs: Images.
            weighting_array: A weight for each example, or for each example and position.
        """
        rows = self.patches_of(inputs)
        if weighting_array is None:
            weighted = rows
        else:
            weights = weighting_array.reshape(rows.shape[0], -1, 1).astype(rows.dtype)
            weighted = rows * jnp.broadcast_to(weights, (*rows.shape[:2], 1))
        count = rows.shape[0] * rows.shape[1]
        return jnp.einsum("nta,ntb->ab", weighted, rows) / count

    def compute_outputs_stats(self, tangent_of_output: Array) -> Array:
        """Return the second moment of the cotangents, averaged over examples and positions.

        Args:
            tangent_of_output: Cotangents of the outputs.
        """
        rows = self.rows_of_outputs(tangent_of_output)
        return jnp.einsum("nta,ntb->ab", rows, rows) / (rows.shape[0] * rows.shape[1])

    def patches_of(self, inputs: Array) -> Array:
        """Return the patches of images, with a one for the bias: (examples, positions, patch)."""
        if self.stack:
            raise NotImplementedError(
                "curvax.kfac_jax: statistics of grouped convolutions are computed inside "
                "update_curvature_matrix_estimate only."
            )
        patches = extract_patches(inputs.astype(self.dtype), kronecker.geometry_of(self._first))
        if self.number_of_parameters == 1:
            return patches
        return jnp.concatenate([patches, jnp.ones_like(patches[..., :1])], axis=-1)

    def rows_of_outputs(self, outputs: Array) -> Array:
        """Return outputs or their cotangents as (examples, positions, channels)."""
        spec = self._numbers.out_spec
        rows = jnp.transpose(outputs.astype(self.dtype), (spec[0], *spec[2:], spec[1]))
        return rows.reshape(rows.shape[0], -1, rows.shape[-1])


def with_estimates(
    block: CurvatureBlock,
    state: BlockState,
    estimates: Sequence[Array],
    ema_old: ArrayLike,
    ema_new: ArrayLike,
) -> BlockState:
    """Return the state with its moving averages updated by these estimates."""
    updated = jax.tree.map(lambda x: x, state)
    # A subclass may keep further averages after these.
    for average, estimate in zip(block.averages(updated), estimates, strict=False):
        average.update(estimate, ema_old, ema_new)
    return updated


def damped_powers(
    factors: Sequence[Array], scale: Array, identity_weight: ArrayLike, power: float | int
) -> list[MatrixTask]:
    """Return tasks for powers of the damped factors of a Kronecker product.

    All factors are brought to the same mean eigenvalue, and each that is larger than 1 by 1 gets an
    equal share of the damping. Where a factor is zero, the damping is all there is.

    Args:
        factors: The factors, with leading axes for several products.
        scale: A number that multiplies the product.
        identity_weight: What is added to the product.
        power: Any real number.
    """
    count, dtype = len(factors), factors[0].dtype
    means = [jnp.mean(diagonal(x), axis=-1) for x in factors]
    is_fine = jnp.stack([(mean > 0) & jnp.isfinite(mean) for mean in means]).all(0)
    safe = [jnp.where(is_fine, mean, 1) for mean in means]
    total = math.prod(safe) * jnp.broadcast_to(scale, safe[0].shape)
    common = total ** (1 / count)  # The mean eigenvalue that all factors get.
    weight = jnp.broadcast_to(jnp.asarray(identity_weight).astype(dtype), total.shape)
    is_single = [x.shape[-1] == 1 for x in factors]
    if all(is_single):
        common, shares = (total + weight) ** (1 / count), [jnp.zeros_like(total)] * count
    else:
        left = weight / common ** sum(is_single)
        share = left ** (1 / (count - sum(is_single)))
        shares = [jnp.zeros_like(share) if single else share for single in is_single]
    tasks: list[MatrixTask] = []
    for factor, mean, share in zip(factors, safe, shares, strict=True):
        factor_scale = common / mean
        if get_special_case_zero_inv():
            factor_scale = jnp.where(is_fine, factor_scale, 0)
            share = jnp.where(is_fine, share, weight ** (1 / count))
            factor = jnp.where(is_fine[..., None, None], factor, 0)
        tasks.append(Power(factor, share, power, factor_scale))
    return tasks


def _named(values: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(f"{axis}_factor", value) for axis, value in enumerate(values)]


def _like(shape: Sequence[int], array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), array.dtype)


def _default_spec(ndim: int) -> str:
    """Return a specification that merges all axes but the last; a bias is one row."""
    names = string.ascii_letters[:ndim]
    return f"{names} -> ({names[:-1]})({names[-1:]})"


def _undo_rearrange(x: Array, spec: str, shape: Sequence[int]) -> Array:
    """Invert `rearrange`, for an array of this shape before."""
    left, right = (re.sub(r"[() ]", "", side) for side in spec.split("->"))
    sizes = dict(zip(left, shape, strict=True))
    return x.reshape([sizes[name] for name in right]).transpose([right.index(n) for n in left])


def _rows_of_data(data: EstimationData) -> tuple[Array, Array] | None:
    """Return inputs and cotangents that were changed to (rows, features), else None."""
    record = data.get("given")
    names = ("inputs", "outputs_tangents")
    if not all(len(data.get(name, ())) == 1 for name in names):
        return None
    if record is not None and not record.is_changed(data, *names):
        return None
    (x,), (g,) = (data[name] for name in names)
    return (x, g) if x.ndim == g.ndim == 2 else None
