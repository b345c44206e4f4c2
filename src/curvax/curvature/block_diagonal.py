"""`BlockDiagonalCurvature`: a curvature matrix with a block for each layer of a model."""

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._errors import where
from curvax._reports import table
from curvax._tree import Static
from curvax._types import Array, Fun, PyTree
from curvax.curvature.backward_passes import (
    AverageUpdate,
    Layers,
    at_devices,
    sum_of_terms,
    updated_by_data,
    with_batch_terms,
)
from curvax.curvature.batch import (
    BatchArgument,
    axes_of,
    by_example,
    check_separate,
    length_of,
)
from curvax.curvature.blocks.base import CurvatureBlock, LayerEquation, Powers
from curvax.curvature.blocks.defaults import default_block_ctor, make_block
from curvax.curvature.blocks.settings import full_name, get_default_tag_to_block_ctor
from curvax.curvature.estimation_modes import LocalBatch, check_mode, draws, num_passes
from curvax.curvature.estimator import CurvatureEstimator, IdentityWeight
from curvax.curvature.linalg.tasks import run_matrix_tasks
from curvax.devices.task_assignment import run_assigned
from curvax.layers.tracing.loss_map import LossMap, TracedFunction
from curvax.layers.tracing.statistics import Sums
from curvax.maps.accumulators import AccumulationType
from curvax.maps.microbatch import microbatch

# What each block of an estimate is, as a table.


@dataclass(frozen=True)
class BlockRow:
    """One block."""

    params: tuple[str, ...]
    block: str
    dim: int
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class CurvatureReport:
    """All blocks of an estimate; it prints as a table."""

    rows: tuple[BlockRow, ...]

    def __str__(self) -> str:
        rows = [
            (row.block, str(row.dim), ", ".join(row.params), "; ".join(row.remarks))
            for row in self.rows
        ]
        return table(("block", "elements", "parameters", "remarks"), rows)


def report_of(blocks: Sequence[CurvatureBlock], params: Sequence[Sequence[str]]) -> CurvatureReport:
    """The table of some blocks and the names of their parameters."""
    rows = [
        BlockRow(tuple(names), type(block).__name__, block.dim, block.remarks)
        for block, names in zip(blocks, params, strict=True)
    ]
    return CurvatureReport(tuple(rows))


# Which blocks an estimate has, and which parameters belong to each.

BlockCtor = Callable[[Any, str], CurvatureBlock]
"""Makes a block, from the equation of a layer and a name."""


@dataclass(frozen=True)
class Structure:
    """Which parameters there are, and which blocks they belong to."""

    tree: Any
    shapes: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    indices: tuple[tuple[int, ...], ...]
    blocks: tuple[CurvatureBlock, ...]

    @classmethod
    def of(
        cls, at: LossMap, indices: tuple[tuple[int, ...], ...], blocks: tuple[CurvatureBlock, ...]
    ) -> "Structure":
        """Blocks of the parameters of a traced function, by the numbers of these."""
        shapes = tuple(v.aval.shape for v in at.processed.params_vars_flat)
        return cls(at.processed.params_tree, shapes, names_of(at), indices, blocks)

    @classmethod
    def of_layers(
        cls,
        at: LossMap,
        tag_ctors: Mapping[str, BlockCtor],
        index_ctors: Mapping[tuple[int, ...], BlockCtor],
    ) -> "Structure":
        """A block for each layer, made as is said for its parameters, its tag, or by default."""
        processed = at.processed
        names, indices = names_of(at), processed.layer_indices
        _check_single(indices, names)
        _check_ctors(at, tag_ctors, index_ctors)
        blocks = []
        for layer in processed.layers:
            ctor = index_ctors.get(layer.params) or tag_ctors.get(layer.tag_name)
            equation = LayerEquation.of_layer(layer, processed.params_vars_flat)
            name = ", ".join(names[n] for n in layer.params)
            blocks.append(make_block(ctor or default_block_ctor(layer.tag_name), equation, name))
        return cls.of(at, indices, tuple(blocks))

    def dense(self, blocks: Sequence[Array]) -> Array:
        """All blocks in one matrix, rows and columns as `ravel_pytree` has the parameters."""
        sizes = [math.prod(shape) for shape in self.shapes]
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        dtype = jnp.result_type(*blocks)
        whole = jnp.zeros((sum(sizes), sum(sizes)), dtype)
        for indices, block in zip(self.indices, blocks, strict=True):
            rows = jnp.concatenate([jnp.arange(sizes[n]) + starts[n] for n in sorted(indices)])
            whole = whole.at[rows[:, None], rows[None, :]].set(block.astype(dtype))
        return whole

    @property
    def params(self) -> PyTree:
        """The shapes and dtypes of the parameters."""
        dtypes = {
            n: dtype
            for own, block in zip(self.indices, self.blocks, strict=True)
            for n, dtype in zip(own, block.parameters_dtypes, strict=True)
        }
        shapes = [jax.ShapeDtypeStruct(s, dtypes[n]) for n, s in enumerate(self.shapes)]
        return jax.tree.unflatten(self.tree, shapes)

    @property
    def block_params(self) -> list[list[str]]:
        """The names of the parameters of each block."""
        return [[self.names[n] for n in own] for own in self.indices]

    def split(self, vector: PyTree) -> tuple[tuple[Array, ...], ...]:
        """What is like the parameters, as arrays for each block."""
        leaves, tree = jax.tree.flatten(vector)
        shapes = tuple(jnp.shape(x) for x in leaves)
        if tree != self.tree or shapes != self.shapes:
            raise ValueError(
                f"{where()}: a vector is like the parameters, {self.tree} of the shapes "
                f"{self.shapes}, got {tree} of {shapes}."
            )
        return tuple(tuple(jnp.asarray(leaves[n]) for n in own) for own in self.indices)

    def join(self, blocks_vectors: Sequence[Sequence[Any]]) -> PyTree:
        """Arrays for each block, together as the parameters are."""
        counts = [len(each) for each in blocks_vectors]
        expected = [len(own) for own in self.indices]
        if counts != expected:
            raise ValueError(
                f"{where()}: the blocks have {expected} parameters, got {counts} arrays."
            )
        numbered = {
            n: x
            for own, each in zip(self.indices, blocks_vectors, strict=True)
            for n, x in zip(own, each, strict=True)
        }
        return jax.tree.unflatten(self.tree, [numbered[n] for n in range(len(self.shapes))])


def names_of(at: LossMap) -> tuple[str, ...]:
    """The parameters, by their paths."""
    paths = jax.tree_util.tree_leaves_with_path(at.processed.params_vars)
    return tuple(jax.tree_util.keystr(path) for path, _ in paths)


def _check_single(indices: Sequence[tuple[int, ...]], names: Sequence[str]) -> None:
    """Check that each parameter is in one layer, once."""
    counts = [sum(own.count(n) for own in indices) for n in range(len(names))]
    wrong = [name for name, count in zip(names, counts, strict=True) if count != 1]
    if wrong:
        raise ValueError(
            f"{where()}: each parameter is in one block, once, but {', '.join(wrong)} are in none, "
            f"in several layers, or in one layer twice: the layers have the parameters {indices}. "
            f"Tag each once."
        )


def _check_ctors(
    at: LossMap,
    tag_ctors: Mapping[str, BlockCtor],
    index_ctors: Mapping[tuple[int, ...], BlockCtor],
) -> None:
    """What classes of blocks are given for is there."""
    layers, indices = at.processed.layers, at.processed.layer_indices
    present = {layer.tag_name for layer in layers}
    for name in tag_ctors:
        if name not in present:
            get_default_tag_to_block_ctor(name)  # Else it is an error: there is no such tag.
    unknown = [index for index in index_ctors if index not in indices]
    if unknown:
        raise ValueError(
            f"{where()}: index_to_block_ctor has {unknown}, but the blocks have the parameters "
            f"{indices}."
        )


# `BlockwiseCurvature`: what an estimate that has blocks knows about these and the parameters.


class BlockwiseCurvature(CurvatureEstimator):
    """An estimator with blocks, which are known once its function was traced."""

    _where: str
    _made: Structure | None = None

    @property
    def blocks(self) -> tuple[CurvatureBlock, ...] | None:
        """The blocks, once the function was traced (by `init` or `finalize`)."""
        return None if self._made is None else self._made.blocks

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return len(self._known.blocks)

    @property
    def block_dims(self) -> tuple[int, ...]:
        """The number of elements of the parameters of each block."""
        return tuple(block.dim for block in self._known.blocks)

    @property
    def dim(self) -> int:
        """The number of elements of all parameters."""
        return sum(self.block_dims)

    @property
    def params_shapes(self) -> PyTree:
        """The parameters, with each replaced by its shape and dtype."""
        return self._known.params

    @property
    def params_names(self) -> list[list[str]]:
        """The paths of the parameters of each block."""
        return self._known.block_params

    @property
    def params_structure_vector_of_indices(self) -> PyTree:
        """The parameters, with each replaced by its number."""
        return self._known.join(self._known.indices)

    @property
    def indices_to_block_map(self) -> dict[tuple[int, ...], CurvatureBlock]:
        """The blocks, by the numbers of their parameters."""
        return dict(zip(self._known.indices, self._known.blocks, strict=True))

    @property
    def params_block_index(self) -> PyTree:
        """The parameters, with each replaced by the number of its block."""
        known = self._known
        return known.join([[k] * len(own) for k, own in enumerate(known.indices)])

    @property
    def num_params_variables(self) -> int:
        """The number of arrays that the parameters are."""
        return len(self._known.shapes)

    def finalize(self, func_args: Sequence[PyTree]) -> None:
        """Trace the function and make the blocks, if that was not done yet.

        Arguments:
            func_args: arguments of the function.
        """
        if self._made is None:
            self._made = self._make(func_args)

    def params_vector_to_blocks_vectors(
        self, parameter_structured_vector: PyTree
    ) -> tuple[tuple[Array, ...], ...]:
        """The parts of a vector that belong to each block.

        Arguments:
            parameter_structured_vector: a pytree like the parameters.

        Returns:
            For each block, an array for each of its parameters.

        Raises:
            ValueError: if it is not like the parameters.
        """
        return self._known.split(parameter_structured_vector)

    def blocks_vectors_to_params_vector(self, blocks_vectors: Sequence[Sequence[Array]]) -> PyTree:
        """What `params_vector_to_blocks_vectors` split, together.

        Arguments:
            blocks_vectors: for each block, an array for each of its parameters.

        Returns:
            A pytree like the parameters.

        Raises:
            ValueError: if there are more or fewer.
        """
        return self._known.join(blocks_vectors)

    def to_diagonal_block_dense_matrix(self, state: Any) -> tuple[Array, ...]:
        """Each block as a dense matrix.

        Arguments:
            state: the state of the estimator.

        Returns:
            A matrix for each block. Rows and columns are in the order in which
            `jax.flatten_util.ravel_pytree` has its parameters.
        """
        each = zip(self._known.blocks, state.blocks_states, strict=True)
        return tuple(block.to_dense_matrix(own) for block, own in each)

    def to_dense_matrix(self, state: Any) -> Array:
        """The whole matrix, dense, with zeros between the blocks.

        Arguments:
            state: the state of the estimator.

        Returns:
            A matrix with rows and columns in the order of all parameters, flattened, as
            `jax.flatten_util.ravel_pytree` has them.
        """
        return self._known.dense(self.to_diagonal_block_dense_matrix(state))

    def report(self) -> CurvatureReport:
        """What each block is, of which parameters, and what there is to know about it."""
        return report_of(self._known.blocks, self._known.block_params)

    @property
    def _known(self) -> Structure:
        if self._made is None:
            raise ValueError(
                f"{where()}: the blocks are not known before the function was traced. Call "
                f"init or finalize(func_args) first."
            )
        return self._made

    @abc.abstractmethod
    def _make(self, func_args: Sequence[PyTree]) -> Structure:
        """Which blocks there are, for a function of such arguments."""


class BlockDiagonalCurvature(BlockwiseCurvature):
    """An estimate of curvature with a block for each layer, and zeros between layers.

    The layers are those that the function registers, and those that are found in it. Which class of
    blocks a layer gets depends on its tag.

    Arguments:
        func: the model function, which registers at least one loss.
        params_index: which of its arguments are the parameters.
        default_estimation_mode: the mode of `update_curvature_matrix_estimate` if none is given.
        layer_tag_to_block_ctor: classes of blocks for layers of some tags, by their names
            ("dense_tag", or "dense" for short), in place of the default ones.
        index_to_block_ctor: classes of blocks for single layers, by the numbers of their
            parameters; see `indices_to_block_map`.
        auto_register_tags: whether to look for layers that the function does not register.
        distributed_multiplies: whether products with blocks are shared out among devices, where a
            method is called with a `pmap_axis_name`.
        distributed_cache_updates: whether updates of the cache are.
        microbatch_size: how many examples to take at a time. The result is the same.
        memory_budget: how much memory an update may use, as in `curvax.microbatch`; the size is
            chosen accordingly.
        batch_index: which argument, or arguments, are the batch that is split for that; by default
            the last one that is not the parameters.
        examples_interact: with microbatches, whether it is fine that a batch is not the sum of its
            examples, as with batch normalisation in training. Each microbatch is then taken for a
            batch.
        num_samples: how many samples an update takes for each example, in modes that draw. They
            share a forward pass.
        auto_register_kwargs: as in `curvax.auto_register_tags`.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def loss(params, x, y):
        ...     prediction = curvax.register_squared_error_loss(x @ params["w"] + params["b"], y)
        ...     return jnp.mean(jnp.sum((prediction - y) ** 2, axis=1))
        >>> args = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}, jnp.ones((4, 3)), jnp.ones((4, 2))
        >>> estimator = curvax.BlockDiagonalCurvature(loss)
        >>> state = estimator.init(jax.random.key(0), args, None, -1)
        >>> state = estimator.update_curvature_matrix_estimate(
        ...     state, 0.0, 1.0, 4, jax.random.key(1), args, None, "ggn_exact"
        ... )
        >>> state = estimator.update_cache(state, 1e-3, None, -1, False, None)
        >>> gradient = jax.grad(loss)(*args)
        >>> step = estimator.multiply_inverse(state, gradient, 1e-3, False, True, None)
        >>> jax.tree.map(jnp.shape, step)
        {'b': (2,), 'w': (3, 2)}
    """

    @jax.tree_util.register_dataclass
    @dataclass
    class State:
        """What the estimator keeps.

        Attributes:
            blocks_states: the state of each block.
        """

        blocks_states: tuple[Any, ...]

    def __init__(
        self,
        func: Fun,
        params_index: int = 0,
        default_estimation_mode: str = "fisher_gradients",
        layer_tag_to_block_ctor: Mapping[str, BlockCtor] | None = None,
        index_to_block_ctor: Mapping[tuple[int, ...], BlockCtor] | None = None,
        auto_register_tags: bool = True,
        distributed_multiplies: bool = True,
        distributed_cache_updates: bool = True,
        *,
        microbatch_size: int | None = None,
        memory_budget: int | float | str | None = None,
        batch_index: int | Sequence[int] | None = None,
        examples_interact: bool = False,
        num_samples: int = 1,
        **auto_register_kwargs: Any,
    ) -> None:
        super().__init__(func, params_index, default_estimation_mode)
        self._num_samples = num_samples
        self._tag_ctors = {
            full_name(name): ctor for name, ctor in (layer_tag_to_block_ctor or {}).items()
        }
        self._index_ctors = {
            tuple(index): ctor for index, ctor in (index_to_block_ctor or {}).items()
        }
        self._distributed_multiplies = distributed_multiplies
        self._distributed_cache_updates = distributed_cache_updates
        options = {"auto_register_tags": auto_register_tags, **auto_register_kwargs}
        self._traced = TracedFunction.of(func, params_index, True, **options)
        self._batch = BatchArgument(params_index, batch_index)
        self._at_once = microbatch_size is None and memory_budget is None
        self._examples_interact = examples_interact
        self._sizes: dict[str, Any] = {
            "microbatch_size": microbatch_size,
            "memory_budget": memory_budget,
        }

    @property
    def batch_argument(self) -> int | Sequence[int] | None:
        """Which arguments of the function are the batch; None for the last but the parameters."""
        return self._batch.index

    def init(
        self,
        rng: Array,
        func_args: Sequence[PyTree],
        exact_powers_to_cache: Powers,
        approx_powers_to_cache: Powers,
        cache_eigenvalues: bool = False,
    ) -> Any:
        self.finalize(func_args)
        keys = jax.random.split(rng, self.num_blocks)
        options = exact_powers_to_cache, approx_powers_to_cache, cache_eigenvalues
        states = [b.init(key, *options) for b, key in zip(self._known.blocks, keys, strict=True)]
        return self.State(blocks_states=tuple(states))

    def multiply_matpower(
        self,
        state: Any,
        parameter_structured_vector: PyTree,
        identity_weight: IdentityWeight,
        power: float | int,
        exact_power: bool,
        use_cached: bool,
        pmap_axis_name: str | None,
    ) -> PyTree:
        vectors = self.params_vector_to_blocks_vectors(parameter_structured_vector)
        weights = self._per_block(identity_weight)
        options = (power, exact_power, use_cached)
        products = self._products(state, vectors, weights, options, pmap_axis_name)
        found = self.blocks_vectors_to_params_vector(
            [products[number] for number in range(self.num_blocks)]
        )
        return jax.tree.map(
            lambda x, v: x.astype(jnp.asarray(v).dtype), found, parameter_structured_vector
        )

    def block_eigenvalues(self, state: Any, use_cached: bool) -> tuple[Array, ...]:
        """The eigenvalues of each block.

        Arguments:
            state: the state of the estimator.
            use_cached: whether to use what `update_cache` computed last.

        Returns:
            For each block, in the order of `blocks`, as many numbers as its parameters have
            elements.
        """
        each = zip(self._known.blocks, state.blocks_states, strict=True)
        return tuple(block.eigenvalues(own, use_cached) for block, own in each)

    def eigenvalues(self, state: Any, use_cached: bool) -> Array:
        return jnp.concatenate(self.block_eigenvalues(state, use_cached))

    def update_curvature_matrix_estimate(
        self,
        state: Any,
        ema_old: ArrayLike,
        ema_new: ArrayLike,
        batch_size: ArrayLike,
        rng: Array,
        func_args: Sequence[PyTree],
        pmap_axis_name: str | None,
        estimation_mode: str | None = None,
    ) -> Any:
        mode = check_mode(estimation_mode or self.default_estimation_mode)
        self.finalize(func_args)
        update = AverageUpdate(ema_old, ema_new, batch_size, pmap_axis_name)
        return self._updated(state, mode, rng, func_args, update)

    def update_cache(
        self,
        state: Any,
        identity_weight: IdentityWeight,
        exact_powers: Powers,
        approx_powers: Powers,
        eigenvalues: bool,
        pmap_axis_name: str | None,
        *,
        blocks: Sequence[int] | None = None,
    ) -> Any:
        """As in `CurvatureEstimator`; of some `blocks` only, by number, if they are given."""
        weights = self._per_block(identity_weight)
        options = (exact_powers, approx_powers, eigenvalues)
        numbers = sorted({*(self._whole if blocks is None else blocks)} & {*self._whole})
        axis = pmap_axis_name if self._distributed_cache_updates else None
        known, states = self._known.blocks, list(state.blocks_states)
        for n in (n for n in numbers if known[n].has_own_cache):
            states[n] = known[n].update_cache(states[n], weights[n], *options)
        wanted = {
            n: known[n].refresh(weights[n], *options) for n in numbers if not known[n].has_own_cache
        }
        requests = {n: known[n].cache_requests(states[n], own) for n, own in wanted.items()}
        results = run_matrix_tasks(requests, axis)
        for n, own in wanted.items():
            states[n] = known[n].with_cache(states[n], results[n], own)
        return replace(state, blocks_states=tuple(states))

    def _updated(
        self, state: Any, mode: str, rng: Array, func_args: Sequence[PyTree], update: AverageUpdate
    ) -> Any:
        """The state after an update."""
        layers, blocks = self._layers(func_args), self._known.blocks
        states = state.blocks_states
        drawn = draws(layers.at, mode, rng, self._local_batch(func_args, update), self._num_samples)
        if any(block.has_own_update for block in blocks):
            self._check_at_once()
            passes = num_passes(mode, drawn)
            found = updated_by_data(layers, states, mode, drawn, passes, update)
            return replace(state, blocks_states=tuple(found))
        if self._at_once:
            terms, batch_sums = sum_of_terms(layers, states, mode, drawn)
        else:
            terms, batch_sums = self._in_microbatches(layers, states, mode, drawn, func_args)
        terms = with_batch_terms(layers, states, terms, batch_sums, update.axis_name)
        return self._update_averages(state, terms, layers.uses, update)

    def _local_batch(self, func_args: Sequence[PyTree], update: AverageUpdate) -> LocalBatch:
        """The local part of the batch."""
        return LocalBatch(length_of(self._batch.of(func_args)), update.axis_name)

    @property
    def _whole(self) -> Sequence[int]:
        """The numbers of the blocks whose states every device has."""
        return range(self.num_blocks)

    def _products(
        self,
        state: Any,
        vectors: Sequence[Any],
        weights: Sequence[ArrayLike],
        options: tuple[float | int, bool, bool],
        axis: str | None,
    ) -> dict[int, Sequence[Array]]:
        """By the number of a block, a power of it times its part of a vector."""

        def task(number: int) -> Callable[[], Any]:
            block, own = self._known.blocks[number], state.blocks_states[number]
            return lambda: block.multiply_matpower(own, vectors[number], weights[number], *options)

        work = [self._known.blocks[number].multiply_work for number in self._whole]
        shared = axis if self._distributed_multiplies else None
        found = run_assigned([task(number) for number in self._whole], work, shared)
        return dict(zip(self._whole, found, strict=True))

    def _update_averages(
        self, state: Any, terms: Sequence[Sums], uses: Sequence[Any], update: AverageUpdate
    ) -> Any:
        """The state with a sum of terms of each block in its averages."""
        states = list(state.blocks_states)
        for number in self._whole:
            block, own = self._known.blocks[number], states[number]
            states[number] = block.update_averages(own, terms[number], uses[number], *update)
        return replace(state, blocks_states=tuple(states))

    def _layers(self, func_args: Sequence[PyTree]) -> Layers:
        at = at_devices(self._traced, func_args, self.params_index)
        return Layers(at, self._known.blocks)

    def _per_block(self, identity_weight: IdentityWeight) -> Sequence[ArrayLike]:
        count, given = self.num_blocks, identity_weight
        several: Any = given if isinstance(given, list | tuple) else jnp.asarray(given)
        if not isinstance(several, list | tuple) and several.ndim == 0:
            return [several] * count
        if len(several) != count:
            raise ValueError(
                f"{where()}: identity_weight is a number, or one for each of the {count} "
                f"blocks, got {len(several)}."
            )
        return list(several)

    def _make(self, func_args: Sequence[PyTree]) -> Structure:
        """Which blocks there are, for a function of such arguments."""
        at = self._traced.at(func_args)
        return Structure.of_layers(at, self._tag_ctors, self._index_ctors)

    def _check_at_once(self) -> None:
        if not self._at_once:
            names = [block.name for block in self._known.blocks if block.has_own_update]
            raise ValueError(
                f"{where()}: with microbatch_size or memory_budget, blocks must not override "
                f"update_curvature_matrix_estimate, but {', '.join(names)} do: what they take from "
                f"a microbatch is not known to add up."
            )

    def _in_microbatches(
        self,
        layers: Layers,
        states: Sequence[Any],
        mode: str,
        drawn: Sequence[Array],
        func_args: Sequence[PyTree],
    ) -> tuple[list[Sums], list[Any]]:
        """As `sum_of_terms`, of microbatches in turn."""
        batch = self._batch.of(func_args)
        length = length_of(batch)
        if not self._examples_interact:
            check_separate(layers.at)
        rows = [by_example(x, length) for x in drawn]
        run = microbatch(
            self._part,
            argnums=(3, 4),
            accumulator=AccumulationType.SUM,
            in_axes=[axes_of(batch), 0],
            **self._sizes,
        )
        return run(Static(mode), self._batch.without(func_args), list(states), batch, rows)

    def _part(
        self, mode: Static[str], others: PyTree, states: Any, batch: PyTree, rows: Sequence[Array]
    ) -> tuple[list[Sums], list[Any]]:
        layers = self._layers(self._batch.replace(others, batch))
        drawn = [jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:]) for x in rows]
        return sum_of_terms(layers, states, mode.value, drawn)
