"""`CurvatureBlock`: the block of a curvature matrix that belongs to the parameters of one layer.

A block has three parts. A *representation* of a PSD matrix: diagonal, full, Kronecker-factored, a
multiple of the identity. *Statistics* of the layer, from which the representation is estimated. And
a *cache* of matrix powers. The base class leaves all three open; the other modules of this package
fill them in.

An estimate takes three steps, so that statistics are computed inside the backward pass and can be
summed over several passes. `statistics` returns what to sum over each use of the layer;
`layer_statistics` computes the sums. `terms` turns the sums of one pass into terms that can be
added over passes, such as squares of sums. `estimate` turns the total of the terms into new values
for the moving averages.

A cache update takes two steps, so that powers and eigendecompositions of many blocks are computed
together. `cache_requests` returns the matrix tasks that a block needs, and `with_cache` returns the
state with a cache made of their results. States are replaced, never mutated.
"""

import abc
import functools
import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from curvax._cpu import all_finite
from curvax._types import Array, Float, PyTree
from curvax.curvature.blocks.data import EstimationData, data_of_uses, sums_of_data
from curvax.curvature.linalg.moving_average import WeightedMovingAverage
from curvax.curvature.linalg.norms import psd_norm
from curvax.curvature.linalg.tasks import MatrixTask, run_matrix_tasks
from curvax.layers.detection.layers import Layer
from curvax.layers.detection.tagging import use_of_equation
from curvax.layers.tags import LayerTag
from curvax.layers.tracing.statistics import Statistic, Sums
from curvax.layers.use import LayerUse

# A layer, as a block sees it: its parameters and all of its uses.


def wide(*dtypes: DTypeLike) -> jnp.dtype:
    """Return the dtype to keep curvature in, for arrays of these dtypes: at least float32."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes, jnp.float32)


@runtime_checkable
class ArrayType(Protocol):
    """The abstract value of a variable, as far as blocks read it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        ...

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype."""
        ...


@runtime_checkable
class Variable(Protocol):
    """A variable of a jaxpr, as far as blocks read it."""

    @property
    def aval(self) -> ArrayType:
        """The abstract value."""
        ...


@runtime_checkable
class TagEquation(Protocol):
    """The equation of a layer tag in a jaxpr: a `JaxprEqn`, or a `LayerEquation`."""

    @property
    def primitive(self) -> LayerTag:
        """The tag."""
        ...

    @property
    def params(self) -> dict[str, Any]:
        """The static parameters of the tag."""
        ...

    @property
    def invars(self) -> list[Variable]:
        """The operands of the tag: outputs, inputs and parameters of the layer."""
        ...

    @property
    def outvars(self) -> list[Variable]:
        """The results of the tag."""
        ...


@dataclass(frozen=True, eq=False)
class LayerEquation:
    """A layer: its uses, the equation of its first tag, the dtypes of its parameters, its name."""

    tag_name: str
    uses: tuple[LayerUse, ...]
    dtypes: tuple[jnp.dtype, ...]
    equation: TagEquation
    name: str = ""

    @classmethod
    def of(cls, equation: TagEquation) -> "LayerEquation":
        """Return the layer of an equation alone: it is used once, outside loops."""
        if isinstance(equation, cls):
            return equation
        tag = equation.primitive
        params = equation.invars[tag.num_outputs + tag.num_inputs :]
        use = use_of_equation(equation)
        return cls(use.layer, (use,), tuple(v.aval.dtype for v in params), equation)

    @classmethod
    def of_layer(cls, layer: Layer, params: Sequence[Variable]) -> "LayerEquation":
        """Return a layer of a traced function, given the variables of the function's parameters."""
        dtypes = tuple(params[index].aval.dtype for index in layer.params)
        return cls(layer.tag_name, layer.uses, dtypes, layer.nodes[0].equation)

    @property
    def param_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the parameters, as the traced function takes them."""
        return tuple(param.shape for param in self.uses[0].params)

    @property
    def primitive(self) -> LayerTag:
        """The tag."""
        return self.equation.primitive

    @property
    def params(self) -> dict[str, Any]:
        """The static parameters of the tag."""
        return dict(self.equation.params)

    @property
    def invars(self) -> list[Variable]:
        """The operands of the tag: outputs, inputs and parameters of the layer."""
        return list(self.equation.invars)

    @property
    def outvars(self) -> list[Variable]:
        """The results of the tag."""
        return list(self.equation.outvars)


# The cache of a block: which powers it holds, and which of them an update computes.

Powers = float | int | Sequence[float | int] | None
"""One power, or several."""

Cache: TypeAlias = dict[str, PyTree]
"""Matrix powers by `power_key`, eigenvalues and eigenvectors: arrays, or pytrees of arrays."""


@dataclass(frozen=True)
class MatrixPower:
    """The power of a block to multiply with: `(matrix + identity_weight * identity) ** power`."""

    identity_weight: Array
    power: float | int
    is_exact: bool
    is_cached: bool


@dataclass(frozen=True)
class Refresh:
    """The cache entries to compute, and the multiple of the identity to add before."""

    identity_weight: Array
    exact: tuple[float, ...]
    approx: tuple[float, ...]
    eigenvalues: bool

    @property
    def powers(self) -> tuple[float, ...]:
        """All powers, for blocks whose powers are always exact."""
        return tuple(sorted({*self.exact, *self.approx}))


def powers_of(powers: Powers) -> tuple[float, ...]:
    """Return powers without duplicates, in order."""
    if powers is None:
        return ()
    several = powers if isinstance(powers, Sequence) else (powers,)
    return tuple(sorted({float(power) for power in several}))


def power_key(power: float | int) -> str:
    """Return the cache key of a power."""
    short = f"{float(power):g}"
    return short if float(short) == power else repr(float(power))


def cached_entry(cache: Cache | None, key: str, name: str) -> PyTree:
    """Return an entry of the cache of the block of this name; raise an error if it is missing."""
    if key not in (cache or {}):
        raise ValueError(
            f"curvax: {key!r} is not in the cache of the block {name}, which has "
            f"{sorted(cache or {})}. Call update_cache with it first; in a loop, whose carry keeps "
            f"its structure, also pass it to init."
        )
    return (cache or {})[key]


# The state of a block: a pytree with replaceable fields, one of them the cache.


@dataclass
class BlockState:
    """The state of a block. Subclasses become dataclasses and pytrees."""

    cache: Cache | None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        jax.tree_util.register_dataclass(dataclass(cls))


jax.tree_util.register_dataclass(BlockState)


def scope_of(block: "CurvatureBlock") -> AbstractContextManager[object]:
    """Return a named scope: in profiles, operations of a block have the names of its parameters."""
    params = [re.sub(r"[^\w~]+", ".", path).strip(".") for path in block.name.split(", ")]
    return jax.named_scope(",".join(params))


def present(state: BlockState | None) -> BlockState:
    """Return the state of a block whose factors are not sharded; of a sharded one there is none."""
    assert state is not None, "the state of this block is in a shard, or was replaced by None"
    return state


Statistics = Mapping[Hashable, Statistic]
"""The statistics of one use of a layer. Those with the same key at several uses are added."""


class CurvatureBlock(abc.ABC):
    """The curvature of the parameters of one layer, as a matrix that is not formed.

    To write a block, subclass one of curvax's and override either how the estimate follows from its
    statistics (`estimate`), or the entire update (`update_curvature_matrix_estimate`), which can
    transform the inputs and cotangents of the layer before it calls `super()`. To keep more than
    the base class does, add a nested class `State` that extends that of the base class, and extend
    `_initial_fields`. A new representation subclasses `CurvatureBlock` itself and implements
    `statistics`, `terms`, `estimate`, `with_cache`, `_multiply_matpower` and `_eigenvalues`.

    Arguments:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator. Do not construct
            blocks yourself: put the class, or a `functools.partial` of it, into
            `layer_tag_to_block_ctor`.
        name: Name of the block, for error messages. Passed by the estimator.

    Examples:
        A diagonal block with one number per parameter, and a Kronecker-factored block that clips
        cotangents. The former computes its statistics inside the backward pass; the latter is
        passed the inputs and cotangents of its layer.

        >>> import jax
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> class Averaged(curvax.DenseDiagonal):
        ...     def estimate(self, terms, uses, batch_size):
        ...         diagonals = super().estimate(terms, uses, batch_size)
        ...         return [jnp.full_like(x, jnp.mean(x)) for x in diagonals]
        >>> class Clipped(curvax.DenseTwoKroneckerFactored):
        ...     def update_curvature_matrix_estimate(self, state, estimation_data, *args):
        ...         (cotangent,) = estimation_data["outputs_tangents"]
        ...         data = {**estimation_data, "outputs_tangents": (jnp.clip(cotangent, -1, 1),)}
        ...         return super().update_curvature_matrix_estimate(state, data, *args)
        >>> def model(w, x):
        ...     return curvax.register_normal_predictive_distribution(x @ w, variance=0.25)
        >>> def curvature(block):
        ...     args = jnp.ones((2, 1)), jnp.array([[1.0, 2.0], [3.0, 4.0]])
        ...     key, blocks = jax.random.key(0), {"dense": block}
        ...     estimator = curvax.BlockDiagonalCurvature(model, layer_tag_to_block_ctor=blocks)
        ...     state = estimator.update_curvature_matrix_estimate(
        ...         estimator.init(key, args, None, None), 0.0, 1.0, 2, key, args, None, "ggn_exact"
        ...     )
        ...     return estimator.to_dense_matrix(state)
        >>> curvature(Averaged)
        Array([[30.,  0.],
               [ 0., 30.]], dtype=float32)
        >>> curvature(Clipped)  # Without the class: four times as much.
        Array([[ 5.,  7.],
               [ 7., 10.]], dtype=float32)
    """

    State: ClassVar[type[BlockState]] = BlockState

    sums_batch: ClassVar[bool] = False
    """Whether its terms are functions of the batch gradient, not sums over examples."""

    splits_parts: ClassVar[bool] = False
    """Whether slices of a parameter that are used separately get separate blocks."""

    has_own_update: ClassVar[bool] = False
    """Whether the class overrides `update_curvature_matrix_estimate`."""

    has_own_cache: ClassVar[bool] = False
    """Whether the class overrides `update_cache`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        base, update = CurvatureBlock, "update_curvature_matrix_estimate"
        cls.has_own_update = getattr(cls, update) is not getattr(base, update)
        cls.has_own_cache = cls.update_cache is not base.update_cache

    def __init__(self, layer_tag_eq: TagEquation, name: str) -> None:
        self._layer_tag_eq = layer_tag_eq
        self._name = name

    @functools.cached_property
    def _equation(self) -> LayerEquation:
        return LayerEquation.of(self._layer_tag_eq)

    @property
    def name(self) -> str:
        """The name of the block, for error messages."""
        return self._name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.parameters_shapes})"

    @property
    def layer_tag_primitive(self) -> LayerTag:
        """The tag of the layer."""
        return self._equation.primitive

    @property
    def uses(self) -> tuple[LayerUse, ...]:
        """The uses of the layer in the program that the block was made for."""
        return self._equation.uses

    @property
    def parameter_variables(self) -> tuple[Variable, ...]:
        """The variables of the parameters in the equation of the tag."""
        tag = self.layer_tag_primitive
        return tuple(self._equation.invars[tag.num_outputs + tag.num_inputs :])

    @property
    def outputs_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the layer's outputs in one step of its loops, batch axis first."""
        return self._shapes(is_output=True)

    @property
    def inputs_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the layer's inputs in one step of its loops, batch axis first."""
        return self._shapes(is_output=False)

    @property
    def parameters_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the parameters."""
        return self._equation.param_shapes

    @property
    def parameters_dtypes(self) -> tuple[jnp.dtype, ...]:
        """The dtypes of the parameters."""
        return self._equation.dtypes

    @property
    def parameters_canonical_order(self) -> tuple[int, ...]:
        """The permutation of the layer's parameters into the order of the function's parameters.

        That is their order in `jax.flatten_util.ravel_pytree` and in `to_dense_matrix`.
        """
        params = self._equation.uses[0].params
        return tuple(sorted(range(len(params)), key=lambda k: params[k].index))

    @property
    def layer_tag_extra_params(self) -> dict[str, Any]:
        """The static parameters of the layer's tag."""
        return self._equation.params

    @property
    def number_of_parameters(self) -> int:
        """The number of parameter arrays."""
        return len(self.parameters_shapes)

    @property
    def dim(self) -> int:
        """The total number of elements of the parameters."""
        return sum(math.prod(shape) for shape in self.parameters_shapes)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the estimates."""
        return wide(*self._equation.dtypes)

    def flattened(self, arrays: Sequence[Array]) -> Array:
        """Concatenate arrays like the parameters into one vector."""
        return jnp.concatenate([x.reshape(-1) for x in arrays])

    def unflattened(self, vector: Array) -> tuple[Array, ...]:
        """Inverse of `flattened`."""
        sizes = [math.prod(shape) for shape in self.parameters_shapes]
        parts = jnp.split(vector, [sum(sizes[: k + 1]) for k in range(len(sizes) - 1)])
        return tuple(x.reshape(s) for x, s in zip(parts, self.parameters_shapes, strict=True))

    def _shapes(self, *, is_output: bool) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that inputs or outputs have in `estimation_data`, without loop axes."""
        first = replace(self._equation.uses[0], loops=())
        in_model = lambda x: first.as_in_model(x, is_output)
        arrays = first.outputs if is_output else first.inputs
        return tuple(jax.eval_shape(in_model, x).shape for x in arrays)

    def _check_vector(self, vector: Sequence[Array]) -> None:
        shapes = tuple(jnp.shape(x) for x in vector)
        if shapes != self.parameters_shapes:
            raise ValueError(
                f"curvax: a vector for the block {self.name} is like its parameters, of the shapes "
                f"{self.parameters_shapes}, got {shapes}."
            )

    @property
    def cache_work(self) -> float:
        """The relative cost of a cache update, for balancing blocks over devices."""
        return float(self.dim)

    @property
    def multiply_work(self) -> float:
        """The relative cost of a product with a vector, for balancing blocks over devices."""
        return float(self.dim)

    @property
    def remarks(self) -> tuple[str, ...]:
        """How the approximation differs from what its class promises; empty if it does not."""
        return ()

    def scale(self, state: BlockState, use_cache: bool) -> ArrayLike:
        """Return the number that multiplies the representation.

        Arguments:
            state: State of the block.
            use_cache: Whether the number multiplies cached values. These include the
                state-dependent scale already, so that it is left out.

        Returns:
            A scalar.
        """
        if use_cache:
            return self.fixed_scale()
        return self.fixed_scale() * self.state_dependent_scale(state)

    def fixed_scale(self) -> ArrayLike:
        """Return the factor of the scale that is constant."""
        return 1.0

    def state_dependent_scale(self, state: BlockState) -> ArrayLike:
        """Return the factor of the scale that depends on the estimate."""
        del state
        return 1.0

    def init(
        self,
        rng: Array,
        exact_powers_to_cache: Powers,
        approx_powers_to_cache: Powers,
        cache_eigenvalues: bool,
    ) -> BlockState:
        """Return the initial state of a block, with empty averages.

        Arguments:
            rng: A random key, for blocks with random initial states.
            exact_powers_to_cache: Exact powers that `update_cache` will compute. In a loop, whose
                carry keeps its structure, all of them must be given here.
            approx_powers_to_cache: Approximate powers that `update_cache` will compute.
            cache_eigenvalues: Whether `update_cache` will compute eigenvalues.

        Returns:
            The state.
        """
        del rng
        state = self.State(cache={}, **self._initial_fields())
        options = (1.0, exact_powers_to_cache, approx_powers_to_cache, cache_eigenvalues)

        def cache() -> Cache | None:
            wanted = self.refresh(*options)
            zeros = lambda task: task.zeros() if isinstance(task, MatrixTask) else task
            results = jax.tree.map(zeros, self.cache_requests(state, wanted))
            return self.with_cache(state, results, wanted).cache

        # The entries that `update_cache` makes, as zeros.
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(cache))
        return replace(state, cache=empty)

    def multiply_matpower(
        self,
        state: BlockState,
        vector: Sequence[Array],
        identity_weight: ArrayLike,
        power: float | int,
        exact_power: bool,
        use_cached: bool,
    ) -> tuple[Array, ...]:
        """Multiply a vector by `(matrix + identity_weight * identity) ** power`.

        Arguments:
            state: State of the block.
            vector: Arrays like the parameters.
            identity_weight: Multiple of the identity that is added. Cached powers contain that of
                the last `update_cache` instead.
            power: Any real number.
            exact_power: Whether the power is that of this matrix. Otherwise it may be that of a
                cheaper approximation.
            use_cached: Whether to use what the last `update_cache` computed. The first power is
                computed if it is not cached.

        Returns:
            Arrays like the parameters.

        Raises:
            ValueError: If the vector is not like the parameters, or the power is not cached.
        """
        self._check_vector(vector)
        use_cached = use_cached and (power != 1 or self.is_cached(state, power, exact_power))
        scale = self.scale(state, use_cached)
        vector = tuple(jnp.asarray(x).astype(wide(x.dtype, self.dtype)) for x in vector)
        weight = jnp.asarray(identity_weight) / scale
        how = MatrixPower(weight, power, exact_power, use_cached)
        product = self._multiply_matpower(state, vector, how)
        factor = jnp.asarray(scale) ** power
        return tuple(x * factor.astype(x.dtype) for x in product)

    def multiply(
        self,
        state: BlockState,
        vector: Sequence[Array],
        identity_weight: ArrayLike,
        exact_power: bool,
        use_cached: bool,
    ) -> tuple[Array, ...]:
        """Multiply a vector by `matrix + identity_weight * identity`.

        Equal to `multiply_matpower` with `power=1`.

        Arguments:
            state: State of the block.
            vector: Arrays like the parameters.
            identity_weight: Multiple of the identity that is added.
            exact_power: Whether the product is with this matrix. Otherwise it may be with a cheaper
                approximation.
            use_cached: Whether to use what the last `update_cache` computed, if it is cached.

        Returns:
            Arrays like the parameters.

        Raises:
            ValueError: If the vector is not like the parameters.
        """
        return self.multiply_matpower(state, vector, identity_weight, 1, exact_power, use_cached)

    def multiply_inverse(
        self,
        state: BlockState,
        vector: Sequence[Array],
        identity_weight: ArrayLike,
        exact_power: bool,
        use_cached: bool,
    ) -> tuple[Array, ...]:
        """Multiply a vector by the inverse of `matrix + identity_weight * identity`.

        Equal to `multiply_matpower` with `power=-1`.

        Arguments:
            state: State of the block.
            vector: Arrays like the parameters.
            identity_weight: Multiple of the identity that is added. A cached inverse contains that
                of the last `update_cache` instead.
            exact_power: Whether the inverse is that of this matrix. Otherwise it may be that of a
                cheaper approximation.
            use_cached: Whether to use what the last `update_cache` computed.

        Returns:
            Arrays like the parameters.

        Raises:
            ValueError: If the vector is not like the parameters, or the inverse is not cached.
        """
        return self.multiply_matpower(state, vector, identity_weight, -1, exact_power, use_cached)

    def eigenvalues(self, state: BlockState, use_cached: bool) -> Array:
        """Compute the eigenvalues of the matrix, in no particular order.

        Arguments:
            state: State of the block.
            use_cached: Whether to use what the last `update_cache` computed.

        Returns:
            A vector of length `dim`.

        Raises:
            ValueError: If they are not cached.
        """
        values = self._eigenvalues(state, use_cached)
        return values * jnp.asarray(self.scale(state, use_cached)).astype(values.dtype)

    def update_cache(
        self,
        state: BlockState,
        identity_weight: ArrayLike,
        exact_powers: Powers,
        approx_powers: Powers,
        eigenvalues: bool,
    ) -> BlockState:
        """Compute powers and eigenvalues of the current estimate and put them into the cache.

        Arguments:
            state: State of the block.
            identity_weight: Multiple of the identity that is added before a power is taken.
            exact_powers: Exact powers to compute.
            approx_powers: Approximate powers to compute.
            eigenvalues: Whether to compute the eigenvalues.

        Returns:
            The state with a new cache. Entries that were not listed in `init` are added, which
            changes the structure of the state.
        """
        wanted = self.refresh(identity_weight, exact_powers, approx_powers, eigenvalues)
        results = run_matrix_tasks(self.cache_requests(state, wanted))
        return self.with_cache(state, results, wanted)

    def refresh(
        self, identity_weight: ArrayLike, exact: Powers, approx: Powers, eigenvalues: bool
    ) -> Refresh:
        """Return what `update_cache` computes with these arguments, without the fixed scale."""
        weight = jnp.asarray(identity_weight) / self.fixed_scale()
        return Refresh(weight, powers_of(exact), powers_of(approx), eigenvalues)

    def cache_requests(self, state: BlockState, wanted: Refresh) -> PyTree:
        """Return the tasks whose results `with_cache` needs, for `run_matrix_tasks`."""
        del state, wanted
        return ()

    @abc.abstractmethod
    def with_cache(self, state: BlockState, results: PyTree, wanted: Refresh) -> BlockState:
        """Return the state with a new cache, from the results of `cache_requests`."""

    def is_cached(self, state: BlockState, power: float | int, exact_power: bool) -> bool:
        """Return whether the cache contains a power, or what it follows from."""
        del exact_power
        return power_key(power) in (state.cache or {})

    def update_curvature_matrix_estimate(
        self,
        state: BlockState,
        estimation_data: EstimationData,
        ema_old: ArrayLike,
        ema_new: ArrayLike,
        batch_size: ArrayLike,
        pmap_axis_name: str | None,
    ) -> BlockState:
        """Update the estimate from the inputs and cotangents of the layer.

        A subclass may change `inputs` and `outputs_tangents` (or those of each use, in `sites`) and
        call `super()`, which uses what it is passed. Arrays of another shape are read as
        (examples, *positions, *features), with leading axes for stacked layers. Of convolutions,
        only the number of examples may change. Blocks that are estimated from the gradient of the
        entire batch, such as `NaiveDiagonal`, use `params_tangents` if these were changed.

        Arguments:
            state: State of the block.
            estimation_data: What `layer_tags_vjp` returns for the layer, with an axis for the
                positions of each example where it has several.
            ema_old: Factor of the current estimate.
            ema_new: Weight of the new estimate.
            batch_size: Number of examples.
            pmap_axis_name: Name of a mapped axis to average the estimate over, or None.

        Returns:
            The state with the new estimate.

        Raises:
            ValueError: If changed data contradict the layer, each other or `batch_size`.
        """
        uses, arrays = data_of_uses(self, estimation_data, batch_size)
        sums = sums_of_data(self, state, estimation_data, uses, arrays)
        update = (ema_old, ema_new, batch_size, pmap_axis_name)
        return self.update_averages(state, self.terms(sums, uses, state), uses, *update)

    def update_from_data(
        self,
        state: BlockState,
        estimation_data: EstimationData,
        ema_old: ArrayLike,
        ema_new: ArrayLike,
        identity_weight: ArrayLike,
        batch_size: ArrayLike,
        pmap_axis_name: str | None,
    ) -> BlockState:
        """Call `update_curvature_matrix_estimate`, which users may override.

        `identity_weight` is the damping; it is for blocks of another signature.
        """
        del identity_weight
        return self.update_curvature_matrix_estimate(
            state, estimation_data, ema_old, ema_new, batch_size, pmap_axis_name
        )

    @property
    def uses_gradient_only(self) -> bool:
        """Whether the estimate depends on the gradient of the batch alone."""
        return self.sums_batch

    def update_from_gradient(
        self,
        state: BlockState,
        estimation_data: EstimationData,
        ema_old: ArrayLike,
        ema_new: ArrayLike,
        identity_weight: ArrayLike,
        batch_size: ArrayLike,
        pmap_axis_name: str | None,
    ) -> BlockState:
        """Update the estimate from the gradient of the batch, for blocks that need no more.

        `estimation_data` has "params" and, under "params_tangents", their gradient.
        """
        del identity_weight
        sums = Sums(of_cotangents=list(estimation_data["params_tangents"]))
        terms = self.terms(sums, self.uses, state)
        update = (ema_old, ema_new, batch_size, pmap_axis_name)
        return self.update_averages(state, terms, self.uses, *update)

    def update_averages(
        self,
        state: BlockState,
        terms: Sums,
        uses: Sequence[LayerUse],
        ema_old: ArrayLike,
        ema_new: ArrayLike,
        batch_size: ArrayLike,
        pmap_axis_name: str | None,
    ) -> BlockState:
        """Return the state with its moving averages updated by the estimate from these terms.

        The mean over devices is finite only if it is on each of them, so all devices update their
        averages, or none does.
        """
        estimates = self.estimate_here(terms, uses, batch_size, pmap_axis_name)
        if pmap_axis_name is not None:
            estimates = lax.pmean(estimates, pmap_axis_name)
        # One flag for all averages, because they come from the same batch.
        finite = all_finite(self.finiteness_probe(estimates))
        # A subclass may keep further averages after these.
        pairs = zip(self.averages(state), estimates, strict=False)
        new = iter([old.updated(x, ema_old, ema_new, is_finite=finite) for old, x in pairs])
        replaced = lambda x: next(new, x) if _is_average(x) else x
        return jax.tree.map(replaced, state, is_leaf=_is_average)

    def averages(self, state: BlockState) -> list[WeightedMovingAverage]:
        """Return the moving averages in the state, in the order of its fields."""
        return list(filter(_is_average, jax.tree.leaves(state, is_leaf=_is_average)))

    def estimate_here(
        self,
        terms: Sums,
        uses: Sequence[LayerUse],
        batch_size: ArrayLike,
        axis_name: str | None,
    ) -> Sequence[Array]:
        """Compute the estimate from one device's terms.

        The mean of the result over devices equals `estimate` of the mean of the terms.
        """
        if axis_name is not None and not self.has_linear_estimates(uses):
            terms = lax.pmean(terms, axis_name)
        return self.estimate(terms, uses, batch_size)

    def needs_examples(self, uses: Sequence[LayerUse]) -> bool:
        """Return whether the estimate depends on which positions belong to one example."""
        del uses
        return True

    def has_linear_estimates(self, uses: Sequence[LayerUse]) -> bool:
        """Return whether `estimate` is linear in the terms."""
        del uses
        return True

    def finiteness_probe(self, estimates: Sequence[Array]) -> Sequence[Array]:
        """Return parts of the estimates that are finite only if all is: diagonals of moments."""
        return estimates

    @abc.abstractmethod
    def statistics(
        self, use: LayerUse, uses: Sequence[LayerUse], state: BlockState | None
    ) -> Statistics:
        """Return what to sum over one of the uses of the layer.

        `state` is None for a Kronecker-factored block whose state is sharded over devices.
        """

    @abc.abstractmethod
    def terms(self, sums: Sums, uses: Sequence[LayerUse], state: BlockState | None) -> Sums:
        """Return terms that can be added over passes, from the sums of one pass.

        Each field of `sums` is a mapping with the keys of `statistics`. `state` is None for a
        Kronecker-factored block whose state is sharded over devices.
        """

    @abc.abstractmethod
    def estimate(
        self, terms: Sums, uses: Sequence[LayerUse], batch_size: ArrayLike
    ) -> Sequence[Array]:
        """Return a new value for each of the averages, from the sum of all terms."""

    def _initial_fields(self) -> dict[str, PyTree]:
        """Return the fields of the initial state, without the cache."""
        return {}

    @abc.abstractmethod
    def _multiply_matpower(
        self, state: BlockState, vector: tuple[Array, ...], how: MatrixPower
    ) -> tuple[Array, ...]:
        """Compute `multiply_matpower` without `fixed_scale`.

        Products with cached powers include the state-dependent scale, other products do not.
        """

    @abc.abstractmethod
    def _eigenvalues(self, state: BlockState, use_cached: bool) -> Array:
        """Compute `eigenvalues` without the scale."""

    def norm(self, state: BlockState, norm_type: str) -> Array:
        """Return a norm of the matrix.

        Arguments:
            state: State of the block.
            norm_type: "avg_diag", the mean of the diagonal; "2_norm", the largest eigenvalue;
                "1_norm", the largest sum of absolute values in a column; or "avg_fro", the
                Frobenius norm divided by the square root of the size.

        Returns:
            A scalar.

        Raises:
            ValueError: If there is no norm of this name.
        """
        return jnp.abs(self.scale(state, False)) * self._norm(state, norm_type)

    def _norm(self, state: BlockState, norm_type: str) -> Array:
        """Compute `norm` without the scale."""
        scale = jnp.asarray(self.scale(state, False))
        matrix = self.to_dense_matrix(state)
        return psd_norm(matrix / scale.astype(matrix.dtype), norm_type)

    def to_dense_matrix(self, state: BlockState) -> Float[Array, "n n"]:
        """Return the matrix, with rows and columns in the order of `ravel_pytree`."""
        multiply = lambda x: self.multiply(state, self.unflattened(x), 0.0, True, False)
        identity = jnp.eye(self.dim, dtype=self.dtype)
        return self.ravelled(jax.vmap(lambda x: self.flattened(multiply(x)), out_axes=1)(identity))

    def ravelled(self, matrix: Array) -> Array:
        """Permute rows and columns from the order of `flattened` to that of `ravel_pytree`."""
        order = self.parameters_canonical_order
        if order == tuple(range(len(order))):
            return matrix
        each = self.unflattened(jnp.arange(self.dim))
        rows = self.flattened([each[k] for k in order])
        return matrix[rows[:, None], rows[None, :]]

    def _cached(self, state: BlockState, key: str) -> PyTree:
        return cached_entry(state.cache, key, self.name)

    def _with_entries(self, state: BlockState, entries: Mapping[str, PyTree]) -> BlockState:
        return replace(state, cache={**(state.cache or {}), **entries})


BlockCtor: TypeAlias = Callable[[LayerEquation, str], CurvatureBlock]
"""A constructor of blocks: a class, or a function of a layer and a name."""


def _is_average(x: PyTree) -> bool:
    return isinstance(x, WeightedMovingAverage)
