"""`CurvatureBlock`: the part of a curvature matrix that belongs to the parameters of one layer.

A block is three things. A *representation* of a PSD matrix: diagonal, full, Kronecker-factored, a
multiple of the identity. *Statistics* that turn what happens at a layer into it. And a *cache* of
powers. The classes of this module leave all three open; those of the other modules fill them in.

Statistics go in three steps, so that they can be computed in the backward pass, and summed over
several of these. `statistics` says what is summed at each place of a layer; it is computed by
`curvax.layer_statistics`. `terms` makes of these sums what can be added up over passes:
squares of sums, say. `estimate` makes of the total what goes into the moving averages.
"""

import abc
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from curvax._cpu import all_finite
from curvax._types import Array, PyTree
from curvax.curvature.blocks.data import data_of_sites, statistics_of_data
from curvax.curvature.blocks.layer import LayerEquation, wide
from curvax.curvature.linalg.tasks import run_matrix_tasks
from curvax.layers.use import LayerUse

__all__ = [
    "BlockState",
    "CacheUpdate",
    "CurvatureBlock",
    "MatrixPower",
    "Powers",
    "Refresh",
    "Statistics",
    "copied",
    "finished",
    "in_step",
    "power_key",
    "powers_of",
]


# The cache of a block: which powers are in it, and how it is updated.
#
# What takes long in an update, powers and eigenvectors of matrices, an update only asks for.
# Whoever runs it has this computed, for many blocks together.

Powers = float | int | Sequence[float | int] | None
"""One power, or several."""


CacheUpdate = Generator[Sequence[Any], Any, Any]
"""An update of a cache. It yields tasks, is sent their results, and returns the new state.

So tasks of several blocks can be computed together, by `run_matrix_tasks`.
"""


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


def in_step(updates: Sequence[CacheUpdate]) -> Generator[Sequence[Any], Any, list[Any]]:
    """Several updates as one: it yields what all of them do at a time, and returns all states."""
    states: list[Any] = [None] * len(updates)
    waiting, replies = dict(enumerate(updates)), dict[int, Any]()
    while waiting:
        asked: dict[int, Sequence[Any]] = {}
        for number, update in list(waiting.items()):
            try:
                asked[number] = update.send(replies.get(number))
            except StopIteration as end:
                states[number] = end.value
                del waiting[number]
        if asked:
            found = iter((yield [task for tasks in asked.values() for task in tasks]))
            replies = {number: [next(found) for _ in tasks] for number, tasks in asked.items()}
    return states


def finished(update: CacheUpdate, compute: Callable[..., Any]) -> Any:
    """What an update returns, whose tasks are computed by a function."""
    try:
        tasks = next(update)
        while True:
            tasks = update.send(compute(tasks))
    except StopIteration as end:
        return end.value


# The state of a block: a pytree whose fields can be replaced, with a cache of powers.


@dataclass
class BlockState:
    """What a block keeps. A class that extends it is made a dataclass and a pytree."""

    cache: dict[str, Any] | None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        jax.tree_util.register_dataclass(dataclass(cls))


jax.tree_util.register_dataclass(BlockState)


def copied(state: Any) -> Any:
    """A state with the same arrays, whose fields can be changed."""
    return jax.tree.map(lambda x: x, state)


Statistics = Mapping[str, Callable[[tuple[Array, ...], tuple[Array, ...]], PyTree]]
"""By name, what is summed at a place, from its inputs and the cotangents of its outputs.

What depends on inputs alone has a name that begins with "inputs": it is the same in each pass.
"""


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
    def sites(self) -> tuple[LayerUse, ...]:
        """The places of the layer in the program that the block was made for."""
        return self._equation.sites

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
        """The places of the parameters in the order in which the layer is usually written."""
        return tuple(range(self.number_of_parameters))

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
        first = replace(self._equation.sites[0], loops=())
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
            exact_powers_to_cache: which exact powers `update_cache` will be asked for.
            approx_powers_to_cache: which approximate ones.
            cache_eigenvalues: whether it will be asked for eigenvalues.

        Returns:
            The state.
        """
        exact, approx = powers_of(exact_powers_to_cache), powers_of(approx_powers_to_cache)
        return self._init(rng, exact, approx, cache_eigenvalues)

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
            use_cached: whether to use what `update_cache` computed last.

        Returns:
            Arrays like the parameters.

        Raises:
            ValueError: if the vector is not like the parameters, or that power is not cached.
        """
        self._check_vector(vector)
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
            eigenvalues: whether the eigenvalues too. If they were not cached before, the state
                gets a further entry.

        Returns:
            The state with these.

        Raises:
            ValueError: if the state was not made to cache a power.
        """
        options = (identity_weight, exact_powers, approx_powers, eigenvalues)
        return finished(self.cache_update(state, *options), run_matrix_tasks)

    def cache_update(
        self,
        state: Any,
        identity_weight: ArrayLike,
        exact_powers: Powers,
        approx_powers: Powers,
        eigenvalues: bool,
    ) -> CacheUpdate:
        """As `update_cache`, with tasks that can be computed together with those of others."""
        weight = jnp.asarray(identity_weight) / self.fixed_scale()
        powers = powers_of(exact_powers), powers_of(approx_powers)
        return self._update_cache(copied(state), Refresh(weight, *powers, eigenvalues))

    def update_curvature_matrix_estimate(
        self,
        state: Any,
        estimation_data: Mapping[str, Any],
        ema_old: ArrayLike,
        ema_new: ArrayLike,
        batch_size: ArrayLike,
        pmap_axis_name: str | None,
    ) -> Any:
        """Take what happened at the layer into the estimate.

        A class that overrides this may change `inputs` and `outputs_tangents` (or those of each
        place, in `sites`) and call `super()`: what is passed is used. Arrays of another shape are
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
        sites, arrays = data_of_sites(self, estimation_data, batch_size)
        statistics = statistics_of_data(self, state, estimation_data, sites, arrays)
        terms = self.terms(statistics, sites, state)
        return self.take_in(state, terms, sites, ema_old, ema_new, batch_size, pmap_axis_name)

    def take_in(
        self,
        state: Any,
        terms: Mapping[str, PyTree],
        sites: Sequence[LayerUse],
        ema_old: ArrayLike,
        ema_new: ArrayLike,
        batch_size: ArrayLike,
        pmap_axis_name: str | None,
    ) -> Any:
        """The state with what `estimate` makes of a sum of terms in its averages.

        The mean over devices is finite if it is on all of them, so all take it in, or none.
        """
        state = copied(state)
        estimates = self.estimate_here(terms, sites, batch_size, pmap_axis_name)
        if pmap_axis_name is not None:
            estimates = lax.pmean(estimates, pmap_axis_name)
        finite = all_finite(
            self.finiteness_probe(estimates)
        )  # One answer: all are of the same batches.
        for average, value in zip(self.averages(state), estimates, strict=True):
            average.update(value, ema_old, ema_new, is_finite=finite)
        return state

    def estimate_here(
        self,
        terms: Mapping[str, PyTree],
        sites: Sequence[LayerUse],
        batch_size: ArrayLike,
        axis_name: str | None,
    ) -> Sequence[Array]:
        """As `estimate`, of the terms of one device; the mean over devices is that of all."""
        if axis_name is not None and not self.has_linear_estimates(sites):
            terms = lax.pmean(dict(terms), axis_name)
        return self.estimate(terms, sites, batch_size)

    def needs_examples(self, sites: Sequence[LayerUse]) -> bool:
        """Return whether an estimate depends on which positions belong to one example."""
        del sites
        return True

    def has_linear_estimates(self, sites: Sequence[LayerUse]) -> bool:
        """Whether what `estimate` makes of a sum is the sum of what it makes of its parts."""
        del sites
        return True

    def finiteness_probe(self, estimates: Sequence[Array]) -> Sequence[Array]:
        """Return parts of estimates that are finite only if all is: diagonals of second moments."""
        return estimates

    @abc.abstractmethod
    def averages(self, state: Any) -> Sequence[Any]:
        """The moving averages in the state."""

    @abc.abstractmethod
    def statistics(self, site: LayerUse, sites: Sequence[LayerUse], state: Any) -> Statistics:
        """What is summed at one of the sites of the layer."""

    @abc.abstractmethod
    def terms(
        self, statistics: Mapping[str, PyTree], sites: Sequence[LayerUse], state: Any
    ) -> dict[str, PyTree]:
        """What can be added up over passes, from the sums of one.

        What depends on inputs alone has a name that begins with "inputs", too.
        """

    @abc.abstractmethod
    def estimate(
        self, terms: Mapping[str, PyTree], sites: Sequence[LayerUse], batch_size: ArrayLike
    ) -> Sequence[Array]:
        """What goes into each of the averages, from the sum of all terms."""

    @abc.abstractmethod
    def _init(
        self, rng: Array, exact: Sequence[float], approx: Sequence[float], cache_eigenvalues: bool
    ) -> Any:
        """As `init`, with sorted powers."""

    @abc.abstractmethod
    def _multiply_matpower(
        self, state: Any, vector: tuple[Array, ...], how: MatrixPower
    ) -> tuple[Array, ...]:
        """As `multiply_matpower`, without the scale (that depends on the state, if cached)."""

    @abc.abstractmethod
    def _eigenvalues(self, state: Any, use_cached: bool) -> Array:
        """As `eigenvalues`, without the scale."""

    @abc.abstractmethod
    def _update_cache(self, state: Any, wanted: Refresh) -> CacheUpdate:
        """As `cache_update`, without the fixed scale, of a state that may be changed."""

    def to_dense_matrix(self, state: Any) -> Array:
        """The matrix itself, rows and columns in the order of the parameters, flattened."""
        multiply = lambda x: self.multiply(state, self.unflattened(x), 0.0, True, False)
        identity = jnp.eye(self.dim, dtype=self.dtype)
        return jax.vmap(lambda x: self.flattened(multiply(x)), out_axes=1)(identity)

    def _cached(self, state: Any, key: str) -> Any:
        if state.cache is None or key not in state.cache:
            raise ValueError(
                f"curvax: the block {self.name} has {key!r} not in its cache, only "
                f"{sorted(state.cache or ())}. Say so when the state is made (init)."
            )
        return state.cache[key]
