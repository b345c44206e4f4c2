"""`CurvatureBlock`: the part of a curvature matrix that belongs to the parameters of one layer.

A block is three things. A *representation* of a PSD matrix: diagonal, full, Kronecker-factored, a
multiple of the identity. *Statistics* that turn what happens at a layer into it. And a *cache* of
powers. The classes of this module leave all three open; those of the other modules fill them in.

Statistics go in three steps, so that they can be computed in the backward pass, and summed over
several of these. `statistics` says what is summed at each place of a layer; it is computed by
`curvax.layer_statistics`. `terms` makes of these sums what can be added up over passes:
squares of sums, say. `estimate` makes of the total what goes into the moving averages.

A refresh of the cache goes in two steps, so that powers and eigenvectors of the matrices of many
blocks are computed together. `cache_requests` says which a block needs, and `with_cache` returns
the state with what was made of them. States are replaced, never changed.
"""

import abc
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from curvax._cpu import all_finite
from curvax._types import Array, PyTree
from curvax.curvature.blocks.data import data_of_uses, sums_of_data
from curvax.curvature.linalg.moving_average import WeightedMovingAverage
from curvax.curvature.linalg.tasks import MatrixTask, run_matrix_tasks
from curvax.layers.detection.layers import Layer
from curvax.layers.detection.tagging import use_of_equation
from curvax.layers.tracing.statistics import Statistic, Sums
from curvax.layers.use import LayerUse

# A layer as a block sees it: its parameters and all of its uses.


def wide(*dtypes: Any) -> Any:
    """The dtype in which curvature is kept for arrays of some dtypes: at least float32."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes, jnp.float32)


@dataclass(frozen=True, eq=False)
class LayerEquation:
    """A layer: its uses, the equation of its first tag, and the dtypes of its parameters."""

    tag_name: str
    uses: tuple[LayerUse, ...]
    dtypes: tuple[Any, ...]
    equation: Any

    @classmethod
    def of(cls, equation: Any) -> "LayerEquation":
        """From an equation alone: a layer that is used once, outside of loops."""
        if isinstance(equation, cls):
            return equation
        tag = equation.primitive
        params = equation.invars[tag.num_outputs + tag.num_inputs :]
        use = use_of_equation(equation)
        return cls(use.layer, (use,), tuple(v.aval.dtype for v in params), equation)

    @classmethod
    def of_layer(cls, layer: Layer, params: Sequence[Any]) -> "LayerEquation":
        """From a layer of a traced function, and the variables of all parameters of it."""
        dtypes = tuple(params[number].aval.dtype for number in layer.params)
        return cls(layer.tag_name, layer.uses, dtypes, layer.nodes[0].equation)

    @property
    def param_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the parameters as the function has them."""
        return tuple(param.shape for param in self.uses[0].params)

    @property
    def primitive(self) -> Any:
        """The tag."""
        return self.equation.primitive

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the tag, without its arrays."""
        return dict(self.equation.params)

    @property
    def invars(self) -> list[Any]:
        """The operands of the tag: outputs, inputs and parameters."""
        return list(self.equation.invars)

    @property
    def outvars(self) -> list[Any]:
        """The results of the tag."""
        return list(self.equation.outvars)


# The cache of a block: which powers are in it, and what of it is computed again.

Powers = float | int | Sequence[float | int] | None
"""One power, or several."""


@dataclass(frozen=True)
class MatrixPower:
    """Which power of a block is asked for: `(matrix + identity_weight * identity) ** power`."""

    identity_weight: Any
    power: float | int
    is_exact: bool
    is_cached: bool


@dataclass(frozen=True)
class Refresh:
    """What of a block's cache is to be computed again, with what is added to the diagonal."""

    identity_weight: Any
    exact: tuple[float, ...]
    approx: tuple[float, ...]
    eigenvalues: bool

    @property
    def powers(self) -> tuple[float, ...]:
        """All powers, for blocks that have only exact ones."""
        return tuple(sorted({*self.exact, *self.approx}))


def powers_of(powers: Powers) -> tuple[float, ...]:
    """Powers as they are given, each once, in order."""
    if powers is None:
        return ()
    several = powers if isinstance(powers, Sequence) else (powers,)
    return tuple(sorted({float(power) for power in several}))


def power_key(power: float | int) -> str:
    """Under which key of the cache a power is."""
    short = f"{float(power):g}"
    return short if float(short) == power else repr(float(power))


def cached_entry(cache: Mapping[str, Any] | None, key: str, name: str) -> Any:
    """Return an entry of the cache of the block of this name."""
    if key not in (cache or {}):
        raise ValueError(
            f"curvax: the block {name} has {key!r} not in its cache, only {sorted(cache or {})}. "
            f"Call update_cache with it first; in a loop, whose state keeps its structure, say so "
            f"when the state is made (init), too."
        )
    return (cache or {})[key]


# The state of a block: a pytree whose fields can be replaced, with a cache of powers.


@dataclass
class BlockState:
    """What a block keeps. A class that extends it is made a dataclass and a pytree."""

    cache: dict[str, Any] | None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        jax.tree_util.register_dataclass(dataclass(cls))


jax.tree_util.register_dataclass(BlockState)


Statistics = Mapping[Hashable, Statistic]
"""What is summed at a place. What has the same key at several places is added up."""


class CurvatureBlock(abc.ABC):
    """The curvature of the parameters of one layer, as a matrix that is never formed.

    To make a class of your own, extend one of those that curvax has, and override
    `update_curvature_matrix_estimate`. Or extend this one, with a class `State` that extends
    `CurvatureBlock.State`.

    Arguments:
        layer_tag_eq: the equation of the layer's tag.
        name: what the block is called.
    """

    State: ClassVar[Any] = BlockState

    sums_batch: ClassVar[bool] = False
    """Whether its terms are of the sum over the whole batch, and not sums over examples."""

    splits_parts: ClassVar[bool] = False
    """Whether parts that are cut out of a parameter have blocks of their own."""

    has_own_update: ClassVar[bool] = False
    """Whether a user's class overrides `update_curvature_matrix_estimate`."""

    has_own_cache: ClassVar[bool] = False
    """Whether a user's class overrides `update_cache`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        base, update = CurvatureBlock, "update_curvature_matrix_estimate"
        cls.has_own_update = getattr(cls, update) is not getattr(base, update)
        cls.has_own_cache = cls.update_cache is not base.update_cache

    def __init__(self, layer_tag_eq: Any, name: str) -> None:
        self._equation = LayerEquation.of(layer_tag_eq)
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.parameters_shapes})"

    @property
    def layer_tag_primitive(self) -> Any:
        """The tag of the layer."""
        return self._equation.primitive

    @property
    def uses(self) -> tuple[LayerUse, ...]:
        """The places of the layer in the program that the block was made for."""
        return self._equation.uses

    @property
    def parameter_variables(self) -> tuple[Any, ...]:
        """The variables of the parameters in the equation of the tag."""
        tag = self.layer_tag_primitive
        return tuple(self._equation.invars[tag.num_outputs + tag.num_inputs :])

    @property
    def outputs_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the outputs of the layer, examples first, in each step of a loop."""
        return self._shapes(is_output=True)

    @property
    def inputs_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the inputs of the layer, examples first, in each step of a loop."""
        return self._shapes(is_output=False)

    @property
    def parameters_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the parameters."""
        return self._equation.param_shapes

    @property
    def parameters_dtypes(self) -> tuple[Any, ...]:
        """The dtypes of the parameters."""
        return self._equation.dtypes

    @property
    def parameters_canonical_order(self) -> tuple[int, ...]:
        """The places of the parameters in the order in which the function has them.

        So they follow each other in `jax.flatten_util.ravel_pytree`, and in `to_dense_matrix`.
        """
        params = self._equation.uses[0].params
        return tuple(sorted(range(len(params)), key=lambda k: params[k].index))

    @property
    def layer_tag_extra_params(self) -> dict[str, Any]:
        """Return the parameters of the layer's tag, without its arrays."""
        return self._equation.params

    @property
    def number_of_parameters(self) -> int:
        """How many arrays the parameters are."""
        return len(self.parameters_shapes)

    @property
    def dim(self) -> int:
        """How many elements the parameters have together."""
        return sum(math.prod(shape) for shape in self.parameters_shapes)

    @property
    def dtype(self) -> Any:
        """The dtype of the estimates."""
        return wide(*self._equation.dtypes)

    def flattened(self, arrays: Sequence[Array]) -> Array:
        """Arrays like the parameters, as one vector."""
        return jnp.concatenate([x.reshape(-1) for x in arrays])

    def unflattened(self, vector: Array) -> tuple[Array, ...]:
        """Inverse of `flattened`."""
        sizes = [math.prod(shape) for shape in self.parameters_shapes]
        parts = jnp.split(vector, [sum(sizes[: k + 1]) for k in range(len(sizes) - 1)])
        return tuple(x.reshape(s) for x, s in zip(parts, self.parameters_shapes, strict=True))

    def _shapes(self, *, is_output: bool) -> tuple[tuple[int, ...], ...]:
        """The shapes of inputs or outputs, as `estimation_data` has them."""
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
        """How much there is to do to update the cache, in some unit."""
        return float(self.dim)

    @property
    def multiply_work(self) -> float:
        """How much there is to do to multiply a vector, in some unit."""
        return float(self.dim)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What there is to know about the approximation; empty if it is as one would expect."""
        return ()

    def scale(self, state: Any, use_cache: bool) -> ArrayLike:
        """What the representation is multiplied with.

        Arguments:
            state: the state of the block.
            use_cache: whether that is asked for cached values, which have the part that depends on
                the state in them already.

        Returns:
            A number.
        """
        if use_cache:
            return self.fixed_scale()
        return self.fixed_scale() * self.state_dependent_scale(state)

    def fixed_scale(self) -> ArrayLike:
        """The part of the scale that is always the same."""
        return 1.0

    def state_dependent_scale(self, state: Any) -> ArrayLike:
        """The part of the scale that depends on the estimate."""
        del state
        return 1.0

    def init(
        self,
        rng: Array,
        exact_powers_to_cache: Powers,
        approx_powers_to_cache: Powers,
        cache_eigenvalues: bool,
    ) -> Any:
        """The state of a block that has seen nothing yet.

        Arguments:
            rng: a key, for blocks that begin at random.
            exact_powers_to_cache: which exact powers `update_cache` will be asked for. In a loop,
                whose state keeps its structure, all must be named here.
            approx_powers_to_cache: which approximate ones.
            cache_eigenvalues: whether it will be asked for eigenvalues.

        Returns:
            The state.
        """
        del rng
        state = self.State(cache={}, **self._initial_fields())
        options = (1.0, exact_powers_to_cache, approx_powers_to_cache, cache_eigenvalues)

        def cache() -> Any:
            wanted = self.refresh(*options)
            zeros = lambda task: task.zeros() if isinstance(task, MatrixTask) else task
            results = jax.tree.map(zeros, self.cache_requests(state, wanted))
            return self.with_cache(state, results, wanted).cache

        # The cache that an update makes, with zeros in it.
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(cache))
        return replace(state, cache=empty)

    def multiply_matpower(
        self,
        state: Any,
        vector: Sequence[Array],
        identity_weight: ArrayLike,
        power: float | int,
        exact_power: bool,
        use_cached: bool,
    ) -> tuple[Array, ...]:
        """`(matrix + identity_weight * identity) ** power` times a vector.

        Arguments:
            state: the state of the block.
            vector: arrays like the parameters.
            identity_weight: what is added to the diagonal. What is cached may have another one in
                it, that of the last `update_cache`.
            power: any real number.
            exact_power: whether the power is that of this matrix, and not that of an approximation
                that is cheaper.
            use_cached: whether to use what `update_cache` computed last. The first power is
                computed if it is not cached.

        Returns:
            Arrays like the parameters.

        Raises:
            ValueError: if the vector is not like the parameters, or that power is not cached.
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
        state: Any,
        vector: Sequence[Array],
        identity_weight: ArrayLike,
        exact_power: bool,
        use_cached: bool,
    ) -> tuple[Array, ...]:
        """`matrix + identity_weight * identity` times a vector; see `multiply_matpower`."""
        return self.multiply_matpower(state, vector, identity_weight, 1, exact_power, use_cached)

    def multiply_inverse(
        self,
        state: Any,
        vector: Sequence[Array],
        identity_weight: ArrayLike,
        exact_power: bool,
        use_cached: bool,
    ) -> tuple[Array, ...]:
        """The inverse of `matrix + identity_weight * identity` times a vector."""
        return self.multiply_matpower(state, vector, identity_weight, -1, exact_power, use_cached)

    def eigenvalues(self, state: Any, use_cached: bool) -> Array:
        """The eigenvalues of the matrix, in no order.

        Arguments:
            state: the state of the block.
            use_cached: whether to use what `update_cache` computed last.

        Returns:
            As many numbers as the parameters have elements.

        Raises:
            ValueError: if they are not cached.
        """
        values = self._eigenvalues(state, use_cached)
        return values * jnp.asarray(self.scale(state, use_cached)).astype(values.dtype)

    def update_cache(
        self,
        state: Any,
        identity_weight: ArrayLike,
        exact_powers: Powers,
        approx_powers: Powers,
        eigenvalues: bool,
    ) -> Any:
        """Compute powers and eigenvalues of the estimate as it is now, to be used from now on.

        Arguments:
            state: the state of the block.
            identity_weight: what is added to the diagonal before a power is taken.
            exact_powers: which exact powers.
            approx_powers: which approximate ones.
            eigenvalues: whether the eigenvalues too.

        Returns:
            The state with these in its cache. What was not there before, as `init` was not told of
            it, is a further entry: a state of another structure.
        """
        wanted = self.refresh(identity_weight, exact_powers, approx_powers, eigenvalues)
        results = run_matrix_tasks(self.cache_requests(state, wanted))
        return self.with_cache(state, results, wanted)

    def refresh(
        self, identity_weight: ArrayLike, exact: Powers, approx: Powers, eigenvalues: bool
    ) -> Refresh:
        """Return what `update_cache` with these arguments computes, without the fixed scale."""
        weight = jnp.asarray(identity_weight) / self.fixed_scale()
        return Refresh(weight, powers_of(exact), powers_of(approx), eigenvalues)

    def cache_requests(self, state: Any, wanted: Refresh) -> PyTree:
        """Return the tasks whose results `with_cache` needs, for `run_matrix_tasks`."""
        del state, wanted
        return ()

    @abc.abstractmethod
    def with_cache(self, state: Any, results: PyTree, wanted: Refresh) -> Any:
        """Return the state with a new cache, from the results of `cache_requests`."""

    def is_cached(self, state: Any, power: float | int, exact_power: bool) -> bool:
        """Return whether a power can be had from the cache."""
        del exact_power
        return power_key(power) in (state.cache or {})

    def update_curvature_matrix_estimate(
        self,
        state: Any,
        estimation_data: Mapping[str, Any],
        ema_old: ArrayLike,
        ema_new: ArrayLike,
        batch_size: ArrayLike,
        pmap_axis_name: str | None,
    ) -> Any:
        """Update the estimate with what happened at the layer.

        A class that overrides this may change `inputs` and `outputs_tangents` (or those of each
        place, in `uses`) and call `super()`: what is passed is used. Arrays of another shape are
        (examples, *positions, *features), with axes for stacked layers in front; convolutions may
        have another number of examples only. Blocks of the gradient of the whole batch, such as
        `NaiveDiagonal`, take `params_tangents` if these were changed.

        Arguments:
            state: the state of the block.
            estimation_data: what `layer_tags_vjp` returns for the layer, with an axis for the
                positions of each example where it has several.
            ema_old: what the estimate so far is multiplied with.
            ema_new: the weight of the new one.
            batch_size: the number of examples.
            pmap_axis_name: the name of a mapped axis to average over, if there is one.

        Returns:
            The state with the new estimate.

        Raises:
            ValueError: if data that were changed contradict the layer, each other or `batch_size`.
        """
        uses, arrays = data_of_uses(self, estimation_data, batch_size)
        sums = sums_of_data(self, state, estimation_data, uses, arrays)
        update = (ema_old, ema_new, batch_size, pmap_axis_name)
        return self.update_averages(state, self.terms(sums, uses, state), uses, *update)

    def update_averages(
        self,
        state: Any,
        terms: Sums,
        uses: Sequence[LayerUse],
        ema_old: ArrayLike,
        ema_new: ArrayLike,
        batch_size: ArrayLike,
        pmap_axis_name: str | None,
    ) -> Any:
        """Return the state with what `estimate` makes of a sum of terms in its averages.

        The mean over devices is finite if it is on all of them, so all update theirs, or none.
        """
        estimates = self.estimate_here(terms, uses, batch_size, pmap_axis_name)
        if pmap_axis_name is not None:
            estimates = lax.pmean(estimates, pmap_axis_name)
        # One answer: all are of the same batches.
        finite = all_finite(self.finiteness_probe(estimates))
        # A class that extends ours may keep further averages, after these.
        pairs = zip(self.averages(state), estimates, strict=False)
        new = iter([old.updated(x, ema_old, ema_new, is_finite=finite) for old, x in pairs])
        replaced = lambda x: next(new, x) if _is_average(x) else x
        return jax.tree.map(replaced, state, is_leaf=_is_average)

    def averages(self, state: Any) -> list[WeightedMovingAverage]:
        """Return the moving averages in the state, in the order of its fields."""
        return list(filter(_is_average, jax.tree.leaves(state, is_leaf=_is_average)))

    def estimate_here(
        self,
        terms: Sums,
        uses: Sequence[LayerUse],
        batch_size: ArrayLike,
        axis_name: str | None,
    ) -> Sequence[Array]:
        """As `estimate`, of the terms of one device; the mean over devices is that of all."""
        if axis_name is not None and not self.has_linear_estimates(uses):
            terms = lax.pmean(terms, axis_name)
        return self.estimate(terms, uses, batch_size)

    def needs_examples(self, uses: Sequence[LayerUse]) -> bool:
        """Return whether an estimate depends on which positions belong to one example."""
        del uses
        return True

    def has_linear_estimates(self, uses: Sequence[LayerUse]) -> bool:
        """Whether what `estimate` makes of a sum is the sum of what it makes of its parts."""
        del uses
        return True

    def finiteness_probe(self, estimates: Sequence[Array]) -> Sequence[Array]:
        """Return parts of estimates that are finite only if all is: diagonals of second moments."""
        return estimates

    @abc.abstractmethod
    def statistics(self, use: LayerUse, uses: Sequence[LayerUse], state: Any) -> Statistics:
        """What is summed at one of the uses of the layer."""

    @abc.abstractmethod
    def terms(self, sums: Sums, uses: Sequence[LayerUse], state: Any) -> Sums:
        """Return what can be added up over passes, from the sums of one.

        `sums` has a mapping from the keys of `statistics` in each of its fields.
        """

    @abc.abstractmethod
    def estimate(
        self, terms: Sums, uses: Sequence[LayerUse], batch_size: ArrayLike
    ) -> Sequence[Array]:
        """What goes into each of the averages, from the sum of all terms."""

    def _initial_fields(self) -> dict[str, Any]:
        """Return what is in a state that has seen nothing yet, besides the cache."""
        return {}

    @abc.abstractmethod
    def _multiply_matpower(
        self, state: Any, vector: tuple[Array, ...], how: MatrixPower
    ) -> tuple[Array, ...]:
        """As `multiply_matpower`, without `fixed_scale`, and without the scale unless cached."""

    @abc.abstractmethod
    def _eigenvalues(self, state: Any, use_cached: bool) -> Array:
        """As `eigenvalues`, without the scale."""

    def to_dense_matrix(self, state: Any) -> Array:
        """Return the matrix, with rows and columns as `ravel_pytree` has the parameters."""
        multiply = lambda x: self.multiply(state, self.unflattened(x), 0.0, True, False)
        identity = jnp.eye(self.dim, dtype=self.dtype)
        return self.ravelled(jax.vmap(lambda x: self.flattened(multiply(x)), out_axes=1)(identity))

    def ravelled(self, matrix: Array) -> Array:
        """Return a matrix whose rows are as `flattened` has them, as `ravel_pytree` has them."""
        order = self.parameters_canonical_order
        if order == tuple(range(len(order))):
            return matrix
        each = self.unflattened(jnp.arange(self.dim))
        rows = self.flattened([each[k] for k in order])
        return matrix[rows[:, None], rows[None, :]]

    def _cached(self, state: Any, key: str) -> Any:
        return cached_entry(state.cache, key, self.name)

    def _with_entries(self, state: Any, entries: Mapping[str, Any]) -> Any:
        return replace(state, cache={**(state.cache or {}), **entries})


def _is_average(x: Any) -> bool:
    return isinstance(x, WeightedMovingAverage)
