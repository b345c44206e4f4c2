"""`BlockDiagonalCurvature`: a curvature matrix with a block for each layer of a model.

With Kronecker-factored blocks this is K-FAC (Martens & Grosse 2015, "Optimizing neural networks
with Kronecker-factored approximate curvature"). `curvax.curvature.blocks` has the kinds of blocks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from curvax._errors import where
from curvax._reports import table
from curvax._tree import Static
from curvax._types import Array, Float, Fun, PyTree, TreeDef
from curvax.curvature.backward_passes import (
    AverageUpdate,
    Layers,
    TermSums,
    check_gradient_blocks,
    gradient_of_objective,
    local_loss_map,
    sum_of_terms,
    update_from_gradient,
    update_from_layer_data,
    with_batch_terms,
)
from curvax.curvature.batch import (
    BatchArgument,
    axes_of,
    by_example,
    check_separate,
    length_of,
)
from curvax.curvature.blocks.base import (
    BlockState,
    CurvatureBlock,
    LayerEquation,
    Powers,
    present,
    scope_of,
)
from curvax.curvature.blocks.defaults import DEFAULT_BLOCKS, default_block_ctor, make_block
from curvax.curvature.blocks.settings import full_name, get_default_tag_to_block_ctor
from curvax.curvature.estimation_modes import (
    DIRECT_MODES,
    LocalBatch,
    check_mode,
    num_passes,
    sample_randomness,
)
from curvax.curvature.estimator import CurvatureEstimator, IdentityWeight
from curvax.curvature.linalg.tasks import run_matrix_tasks
from curvax.devices.task_assignment import run_assigned
from curvax.layers.tracing.loss_map import LossMap, ProcessedJaxpr, TracedFunction
from curvax.layers.tracing.statistics import Sums
from curvax.layers.use import LayerUse
from curvax.maps.accumulators import AccumulationType
from curvax.maps.microbatch import microbatch


@dataclass(frozen=True)
class BlockRow:
    """One block of a `CurvatureReport`.

    Attributes:
        params: Paths of the parameters.
        block: Class of the block.
        dim: Number of elements of the parameters.
        remarks: Deviations from the approximation that one would expect.
    """

    params: tuple[str, ...]
    block: str
    dim: int
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class CurvatureReport:
    """The blocks of an estimate, printed as a table.

    Attributes:
        rows: One row for each block.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def model(params, x):
        ...     prediction = x @ params["w"] + params["b"]
        ...     curvax.register_normal_predictive_distribution(prediction, variance=1.0)
        >>> estimator = curvax.BlockDiagonalCurvature(model)
        >>> estimator.finalize(({"w": jnp.ones((3, 2)), "b": jnp.ones(2)}, jnp.ones((4, 3))))
        >>> [(row.block, row.dim, row.params) for row in estimator.report().rows]
        [('DenseTwoKroneckerFactored', 8, ("['w']", "['b']"))]
    """

    rows: tuple[BlockRow, ...]

    def __str__(self) -> str:
        rows = [
            (row.block, str(row.dim), ", ".join(row.params), "; ".join(row.remarks))
            for row in self.rows
        ]
        return table(("block", "elements", "parameters", "remarks"), rows)


BlockCtor = Callable[[LayerEquation, str], CurvatureBlock]
"""Makes a block from the equation of a layer and a name; a class of blocks, for example."""


@dataclass(frozen=True)
class Structure:
    """The parameters of a model, and the blocks that they belong to.

    Attributes:
        tree: Structure of the pytree of parameters.
        shapes: Shape of each parameter.
        names: Path of each parameter.
        indices: Indices of the parameters of each block.
        blocks: The blocks.
    """

    tree: TreeDef
    shapes: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    indices: tuple[tuple[int, ...], ...]
    blocks: tuple[CurvatureBlock, ...]

    @classmethod
    def of(
        cls, at: LossMap, indices: tuple[tuple[int, ...], ...], blocks: tuple[CurvatureBlock, ...]
    ) -> "Structure":
        """Return the structure of a traced function, from the parameters of its blocks."""
        shapes = tuple(v.aval.shape for v in at.processed.params_vars_flat)
        return cls(at.processed.params_tree, shapes, _param_names(at), indices, blocks)

    @classmethod
    def of_layers(
        cls,
        at: LossMap,
        tag_ctors: Mapping[str, BlockCtor],
        index_ctors: Mapping[tuple[int, ...], BlockCtor],
        default_ctor: Callable[[str], BlockCtor] = default_block_ctor,
    ) -> "Structure":
        """Make a block for each layer: by its parameters, else by its tag, else by default."""
        processed = at.processed
        names, indices = _param_names(at), processed.layer_indices
        _check_partition(indices, names)
        _check_ctors(at, tag_ctors, index_ctors)
        blocks = []
        for layer in processed.layers:
            ctor = index_ctors.get(layer.params) or tag_ctors.get(layer.tag_name)
            equation = LayerEquation.of_layer(layer, processed.params_vars_flat)
            name = ", ".join(names[n] for n in layer.params)
            blocks.append(make_block(ctor or default_ctor(layer.tag_name), equation, name))
        return cls.of(at, indices, tuple(blocks))

    def dense(self, blocks: Sequence[Array]) -> Array:
        """Return the block-diagonal matrix, rows and columns in the order of `ravel_pytree`."""
        sizes = [math.prod(shape) for shape in self.shapes]
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        dtype = jnp.result_type(*blocks)
        matrix = jnp.zeros((sum(sizes), sum(sizes)), dtype)
        for indices, block in zip(self.indices, blocks, strict=True):
            rows = jnp.concatenate([jnp.arange(sizes[n]) + starts[n] for n in sorted(indices)])
            matrix = matrix.at[rows[:, None], rows[None, :]].set(block.astype(dtype))
        return matrix

    @property
    def params(self) -> PyTree:
        """The shapes and dtypes of the parameters."""
        dtypes = {
            n: dtype
            for indices, block in zip(self.indices, self.blocks, strict=True)
            for n, dtype in zip(indices, block.parameters_dtypes, strict=True)
        }
        shapes = [jax.ShapeDtypeStruct(s, dtypes[n]) for n, s in enumerate(self.shapes)]
        return jax.tree.unflatten(self.tree, shapes)

    @property
    def block_params(self) -> list[list[str]]:
        """The paths of the parameters of each block."""
        return [[self.names[n] for n in indices] for indices in self.indices]

    def split(self, vector: PyTree) -> tuple[tuple[Array, ...], ...]:
        """Return the leaves of a pytree like the parameters, for each block."""
        leaves, tree = jax.tree.flatten(vector)
        shapes = tuple(jnp.shape(x) for x in leaves)
        if tree != self.tree or shapes != self.shapes:
            raise ValueError(
                f"{where()}: expected a vector like the parameters, {self.tree} with the shapes "
                f"{self.shapes}, got {tree} with {shapes}."
            )
        return tuple(tuple(jnp.asarray(leaves[n]) for n in indices) for indices in self.indices)

    def join(self, blocks_vectors: Sequence[Sequence[Array | int]]) -> PyTree:
        """Inverse of `split`."""
        counts = [len(vectors) for vectors in blocks_vectors]
        expected = [len(indices) for indices in self.indices]
        if counts != expected:
            raise ValueError(
                f"{where()}: the blocks have {expected} parameters, got {counts} arrays."
            )
        leaves = {
            n: x
            for indices, vectors in zip(self.indices, blocks_vectors, strict=True)
            for n, x in zip(indices, vectors, strict=True)
        }
        return jax.tree.unflatten(self.tree, [leaves[n] for n in range(len(self.shapes))])


def _param_names(at: LossMap) -> tuple[str, ...]:
    """Return the path of each parameter."""
    paths = jax.tree_util.tree_leaves_with_path(at.processed.params_vars)
    return tuple(jax.tree_util.keystr(path) for path, _ in paths)


def _check_partition(indices: Sequence[tuple[int, ...]], names: Sequence[str]) -> None:
    """Check that each parameter is in exactly one layer, once."""
    counts = [sum(layer.count(n) for layer in indices) for n in range(len(names))]
    wrong = [name for name, count in zip(names, counts, strict=True) if count != 1]
    if wrong:
        raise ValueError(
            f"{where()}: each parameter must be in exactly one layer, once, but "
            f"{', '.join(wrong)} are in none, in several, or twice in one: the layers have the "
            f"parameters {indices}. Tag each parameter once."
        )


def _check_ctors(
    at: LossMap,
    tag_ctors: Mapping[str, BlockCtor],
    index_ctors: Mapping[tuple[int, ...], BlockCtor],
) -> None:
    """Check that the tags and parameters for which block classes are given exist."""
    layers, indices = at.processed.layers, at.processed.layer_indices
    present = {layer.tag_name for layer in layers}
    for name in tag_ctors:
        # A user-defined tag that this function does not use is fine; a misspelling is not.
        known = [*present, *DEFAULT_BLOCKS]
        if name not in known and get_close_matches(name, known, cutoff=0.9):
            get_default_tag_to_block_ctor(name)  # Raises an error if there is no such tag.
    unknown = [index for index in index_ctors if index not in indices]
    if unknown:
        raise ValueError(
            f"{where()}: index_to_block_ctor has {unknown}, but the blocks have the parameters "
            f"{indices}."
        )


class MicrobatchOptions(NamedTuple):
    """The size of microbatches: given, or chosen to fit a memory budget."""

    microbatch_size: int | None
    memory_budget: int | float | str | None

    @property
    def is_none(self) -> bool:
        """Whether the batch is not divided into microbatches."""
        return self.microbatch_size is None and self.memory_budget is None


class PowerOptions(NamedTuple):
    """The power of a block to multiply by; see `CurvatureEstimator.multiply_matpower`."""

    power: float | int
    exact_power: bool
    use_cached: bool


@jax.tree_util.register_dataclass
@dataclass
class BlockDiagonalState:
    """The state of a `BlockDiagonalCurvature`.

    Attributes:
        blocks_states: The state of each block.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def model(w, x):
        ...     curvax.register_normal_predictive_distribution(x @ w, variance=1.0)
        >>> args = jnp.ones((3, 2)), jnp.ones((4, 3))
        >>> state = curvax.BlockDiagonalCurvature(model).init(jax.random.key(0), args, None, None)
        >>> isinstance(state, curvax.BlockDiagonalCurvature.State), len(state.blocks_states)
        (True, 1)
    """

    blocks_states: tuple[BlockState | None, ...]


class BlockDiagonalCurvature(CurvatureEstimator[BlockDiagonalState]):
    """A curvature estimate with a block for each layer, and zeros between layers.

    The layers are those that the function tags and those that are detected in it. The tag of a
    layer determines the default class of its block. The blocks are known once the function has been
    traced, by `init` or `finalize`.

    Arguments:
        func: The model function, which registers at least one loss.
        params_index: Index of the argument that holds the parameters.
        default_estimation_mode: Mode of `update_curvature_matrix_estimate` unless one is given.
        layer_tag_to_block_ctor: Block classes that replace the default ones, by the name of the tag
            ("dense_tag", or "dense" for short).
        index_to_block_ctor: Block classes for single layers, by the indices of their parameters;
            see `indices_to_block_map`.
        auto_register_tags: Whether to detect layers that the function does not tag itself.
        distributed_multiplies: Whether to distribute products with blocks over devices, in methods
            that are called with a `pmap_axis_name`.
        distributed_cache_updates: Whether to distribute cache updates in the same way.
        microbatch_size: Number of examples to process at a time. The result is the same.
        memory_budget: Memory that an update may use, in place of `microbatch_size`: an integer
            number of bytes, a string such as "2GB", or a fraction of `available_memory()` such as
            "50%" or 0.5. The largest microbatch that fits is used.
        batch_index: Index of the argument, or several, that hold the batch, which microbatches
            divide. By default the last argument that is not the parameters.
        examples_interact: Whether to allow microbatches for a function whose examples interact, as
            with batch normalisation in training. Each microbatch is then treated as a batch.
        num_samples: Number of samples for each example in an update, in modes that sample. They
            share one forward pass.
        should_vmap_samples: Whether to compute the backward passes of all samples at the same time,
            which takes more memory. Otherwise they are computed one by one. The result is the same.
        func_and_grad: A function of the arguments of `func` that returns its value and its gradient
            with respect to the parameters, for the modes `fisher_empirical_direct` and
            `fisher_empirical_direct_synced`. None for the gradient of `func`.
        default_block_ctor: Maps the name of a tag to the class of blocks for layers that neither
            `layer_tag_to_block_ctor` nor `index_to_block_ctor` names. By default
            `get_default_tag_to_block_ctor`.
        divide_empirical_by_batch_size: Whether to divide the estimates of `fisher_empirical` by the
            batch size once more, as kfac_jax does: then they are the mean over examples of the
            outer products of gradients, divided by the number of examples.
        auto_register_kwargs: Further options of layer detection, such as `graph_patterns`,
            `patterns_to_skip`, `strict` or `allow_unused_params`; see `curvax.auto_register_tags`.

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

    State = BlockDiagonalState

    _structure_or_none: Structure | None = None

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
        should_vmap_samples: bool = False,
        func_and_grad: Fun | None = None,
        default_block_ctor: Callable[[str], BlockCtor] = default_block_ctor,
        divide_empirical_by_batch_size: bool = False,
        **auto_register_kwargs: Any,
    ) -> None:
        super().__init__(func, params_index, default_estimation_mode)
        self._num_samples = num_samples
        self._should_vmap_samples = should_vmap_samples
        self._func_and_grad = func_and_grad
        self._default_block_ctor = default_block_ctor
        self._divides_empirical = divide_empirical_by_batch_size
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
        self._examples_interact = examples_interact
        self._microbatches = MicrobatchOptions(microbatch_size, memory_budget)

    @property
    def batch_argument(self) -> int | Sequence[int] | None:
        """The index of the argument that holds the batch; None for the last but the parameters."""
        return self._batch.index

    @property
    def blocks(self) -> tuple[CurvatureBlock, ...] | None:
        """The blocks; None before the function has been traced, by `init` or `finalize`."""
        return None if self._structure_or_none is None else self._structure_or_none.blocks

    @property
    def processed(self) -> ProcessedJaxpr | None:
        """The function as it was traced first; None before that."""
        return next(iter(self._traced.known.values()), None)

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return len(self._structure.blocks)

    @property
    def block_dims(self) -> tuple[int, ...]:
        """The number of elements of the parameters of each block."""
        return tuple(block.dim for block in self._structure.blocks)

    @property
    def dim(self) -> int:
        """The number of elements of all parameters."""
        return sum(self.block_dims)

    @property
    def params_shapes(self) -> PyTree:
        """The shapes and dtypes of the parameters: a pytree of `jax.ShapeDtypeStruct`s."""
        return self._structure.params

    @property
    def params_names(self) -> list[list[str]]:
        """The paths of the parameters of each block."""
        return self._structure.block_params

    @property
    def params_structure_vector_of_indices(self) -> PyTree:
        """The index of each parameter, in a pytree like the parameters."""
        return self._structure.join(self._structure.indices)

    @property
    def indices_to_block_map(self) -> dict[tuple[int, ...], CurvatureBlock]:
        """The blocks, by the indices of their parameters."""
        return dict(zip(self._structure.indices, self._structure.blocks, strict=True))

    @property
    def params_block_index(self) -> PyTree:
        """The index of each parameter's block, in a pytree like the parameters."""
        structure = self._structure
        return structure.join([[k] * len(params) for k, params in enumerate(structure.indices)])

    @property
    def num_params_variables(self) -> int:
        """The number of arrays among the parameters."""
        return len(self._structure.shapes)

    def finalize(self, func_args: Sequence[PyTree]) -> None:
        """Trace the function and make the blocks, unless that has been done.

        Arguments:
            func_args: Arguments of the function.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def model(w, x):
            ...     curvax.register_normal_predictive_distribution(x @ w, variance=1.0)
            >>> estimator = curvax.BlockDiagonalCurvature(model)
            >>> estimator.finalize((jnp.ones((3, 2)), jnp.ones((4, 3))))
            >>> estimator.num_blocks, estimator.dim
            (1, 6)
        """
        if self._structure_or_none is None:
            self._structure_or_none = self._make_structure(func_args)

    def params_vector_to_blocks_vectors(
        self, parameter_structured_vector: PyTree
    ) -> tuple[tuple[Array, ...], ...]:
        """Return the leaves of a pytree like the parameters, for each block.

        Arguments:
            parameter_structured_vector: A pytree like the parameters.

        Returns:
            For each block, an array for each of its parameters.

        Raises:
            ValueError: If the vector is not like the parameters.

        Examples:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def model(params, x):
            ...     prediction = x @ params["w"] + params["b"]
            ...     curvax.register_normal_predictive_distribution(prediction, variance=1.0)
            >>> params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
            >>> estimator = curvax.BlockDiagonalCurvature(model)
            >>> estimator.finalize((params, jnp.ones((4, 3))))
            >>> jax.tree.map(jnp.shape, estimator.params_vector_to_blocks_vectors(params))
            (((3, 2), (2,)),)
        """
        return self._structure.split(parameter_structured_vector)

    def blocks_vectors_to_params_vector(self, blocks_vectors: Sequence[Sequence[Array]]) -> PyTree:
        """Inverse of `params_vector_to_blocks_vectors`.

        Arguments:
            blocks_vectors: For each block, an array for each of its parameters.

        Returns:
            A pytree like the parameters.

        Raises:
            ValueError: If a block has another number of parameters.

        Examples:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def model(params, x):
            ...     prediction = x @ params["w"] + params["b"]
            ...     curvax.register_normal_predictive_distribution(prediction, variance=1.0)
            >>> params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
            >>> estimator = curvax.BlockDiagonalCurvature(model)
            >>> estimator.finalize((params, jnp.ones((4, 3))))
            >>> vectors = [[jnp.zeros((3, 2)), jnp.zeros(2)]]
            >>> jax.tree.map(jnp.shape, estimator.blocks_vectors_to_params_vector(vectors))
            {'b': (2,), 'w': (3, 2)}
        """
        return self._structure.join(blocks_vectors)

    def init(
        self,
        rng: Array,
        func_args: Sequence[PyTree],
        exact_powers_to_cache: Powers,
        approx_powers_to_cache: Powers,
        cache_eigenvalues: bool = False,
    ) -> BlockDiagonalState:
        """Trace the function, make the blocks, and return the initial state.

        Arguments:
            rng: Random key, for blocks with a random initial value.
            func_args: Arguments of the function, to trace it with.
            exact_powers_to_cache: Exact matrix powers that `update_cache` will compute: a number, a
                sequence of numbers, or None. Others can also be cached, but they change the
                structure of the state.
            approx_powers_to_cache: Approximate matrix powers that `update_cache` will compute.
            cache_eigenvalues: Whether `update_cache` will compute eigenvalues.

        Returns:
            The state, with the state of each block.

        Examples:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def model(w, x):
            ...     curvax.register_normal_predictive_distribution(x @ w, variance=1.0)
            >>> estimator = curvax.BlockDiagonalCurvature(model)
            >>> args = jnp.ones((3, 2)), jnp.ones((4, 3))
            >>> state = estimator.init(jax.random.key(0), args, None, -1)
            >>> (block,) = state.blocks_states
            >>> block.inputs_factor.value.shape, block.outputs_factor.value.shape
            ((3, 3), (2, 2))
        """
        self.finalize(func_args)
        keys = jax.random.split(rng, self.num_blocks)
        options = exact_powers_to_cache, approx_powers_to_cache, cache_eigenvalues
        blocks = zip(self._structure.blocks, keys, strict=True)
        return self.State(tuple(block.init(key, *options) for block, key in blocks))

    def update_curvature_matrix_estimate(
        self,
        state: BlockDiagonalState,
        ema_old: ArrayLike,
        ema_new: ArrayLike,
        batch_size: ArrayLike,
        rng: Array,
        func_args: Sequence[PyTree],
        pmap_axis_name: str | None,
        estimation_mode: str | None = None,
        *,
        identity_weight: ArrayLike = 0.0,
    ) -> BlockDiagonalState:
        """Update the moving averages of all blocks with the curvature at these arguments.

        Arguments:
            state: State of the estimator.
            ema_old: The accumulated sum and its weight are multiplied by this.
            ema_new: Weight with which the new estimate is added; the average is sum / weight, so
                the first update counts fully whatever the weights.
            batch_size: Number of examples per device.
            rng: Random key, the same on all devices. Samples of an example depend on its index in
                the global batch.
            func_args: Arguments of the function.
            pmap_axis_name: Name of a `shard_map` or `pmap` axis to average over, or None.
            estimation_mode: Matrix to estimate, and the method. None for the
                `default_estimation_mode` of the constructor.

                - `fisher_gradients`: the Fisher matrix, from gradients with targets that are
                  sampled from the predictive distribution.
                - `fisher_curvature_prop`: the Fisher matrix, by curvature propagation: from one
                  backward pass of `B s` for each sample, with the factor B of the loss's Fisher
                  matrix and random signs s.
                - `fisher_exact`: the Fisher matrix, with one backward pass for each output of an
                  example.
                - `fisher_empirical`: the empirical Fisher matrix, from gradients with the targets
                  of the batch; all losses must be registered with targets.
                - `fisher_empirical_direct`: the square of the gradient of the objective itself, by
                  `func_and_grad` or by `jax.grad` of the function; for blocks that are estimated
                  from the gradient of the batch, such as `NaiveDiagonal`.
                - `fisher_empirical_direct_synced`: the same, with the gradient averaged over
                  devices before it is squared.
                - `ggn_curvature_prop`, `ggn_exact`: the generalised Gauss-Newton matrix by the
                  same methods, for any kind of loss.
            identity_weight: The damping, for user-supplied blocks whose estimate depends on it.

        Returns:
            The updated state.

        Raises:
            ValueError: If the mode is unknown; or if, with microbatches, examples interact or a
                block overrides `update_curvature_matrix_estimate`.

        Examples:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def model(w, x):
            ...     curvax.register_normal_predictive_distribution(x @ w, variance=1.0)
            >>> args = jnp.ones((2, 1)), jnp.array([[1.0, 2.0], [3.0, 0.0]])
            >>> estimator = curvax.BlockDiagonalCurvature(model)
            >>> key = jax.random.key(0)
            >>> state = estimator.init(key, args, None, None)
            >>> state = estimator.update_curvature_matrix_estimate(
            ...     state, 0.95, 0.05, 2, key, args, None, "fisher_exact"
            ... )
            >>> estimator.to_dense_matrix(state).round()
            Array([[5., 1.],
                   [1., 2.]], dtype=float32)
        """
        mode = check_mode(estimation_mode or self.default_estimation_mode)
        self.finalize(func_args)
        update = AverageUpdate(ema_old, ema_new, batch_size, pmap_axis_name, identity_weight)
        if mode in DIRECT_MODES:
            return self._updated_from_gradient(state, mode, func_args, update)
        return self._updated(state, mode, rng, func_args, update)

    def update_cache(
        self,
        state: BlockDiagonalState,
        identity_weight: IdentityWeight,
        exact_powers: Powers,
        approx_powers: Powers,
        eigenvalues: bool,
        pmap_axis_name: str | None,
        *,
        blocks: Sequence[int] | None = None,
        norm_to_scale_identity_weight_per_block: str | None = None,
    ) -> BlockDiagonalState:
        """Compute powers and eigenvalues of the blocks and cache them.

        Arguments:
            state: State of the estimator.
            identity_weight: Multiple of the identity that is added to the matrix: one number, or
                one for each block.
            exact_powers: Exact matrix powers to cache: a number, a sequence of numbers, or None.
            approx_powers: Approximate matrix powers to cache.
            eigenvalues: Whether to also cache the eigenvalues.
            pmap_axis_name: Name of a mapped axis over which to distribute the work, or None.
            blocks: Indices of the blocks to update; None for all.
            norm_to_scale_identity_weight_per_block: Name of a norm: "avg_diag", "1_norm",
                "2_norm" or "avg_fro". The identity weight of each block is then multiplied by this
                norm of the block. None to leave it as it is.

        Returns:
            The state with a new cache. Entries that were not listed in `init` are added.

        Examples:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def model(w, x):
            ...     curvax.register_normal_predictive_distribution(x @ w, variance=1.0)
            >>> args = jnp.ones((2, 1)), jnp.array([[2.0, 0.0], [0.0, 4.0]])
            >>> estimator = curvax.BlockDiagonalCurvature(model)
            >>> key = jax.random.key(0)
            >>> state = estimator.init(key, args, -1, None)
            >>> state = estimator.update_curvature_matrix_estimate(
            ...     state, 0.0, 1.0, 2, key, args, None, "fisher_exact"
            ... )
            >>> state = estimator.update_cache(state, 2.0, -1, None, False, None)
            >>> gradient = jnp.array([[4.0], [10.0]])
            >>> estimator.multiply_inverse(state, gradient, 2.0, True, True, None).round()
            Array([[1.],
                   [1.]], dtype=float32)
        """
        weights = self._scaled_weights(
            state, identity_weight, norm_to_scale_identity_weight_per_block
        )
        options = (exact_powers, approx_powers, eigenvalues)
        selected = set(self._replicated if blocks is None else blocks)
        indices = sorted(selected & set(self._replicated))
        axis = pmap_axis_name if self._distributed_cache_updates else None
        all_blocks, states = self._structure.blocks, list(state.blocks_states)
        for n in (n for n in indices if all_blocks[n].has_own_cache):
            states[n] = all_blocks[n].update_cache(present(states[n]), weights[n], *options)
        refreshes = {
            n: all_blocks[n].refresh(weights[n], *options)
            for n in indices
            if not all_blocks[n].has_own_cache
        }
        requests = {
            n: all_blocks[n].cache_requests(present(states[n]), x) for n, x in refreshes.items()
        }
        results = self._run_matrix_tasks(requests, axis)
        for n, refresh in refreshes.items():
            states[n] = all_blocks[n].with_cache(present(states[n]), results[n], refresh)
        return replace(state, blocks_states=tuple(states))

    def multiply_matpower(
        self,
        state: BlockDiagonalState,
        parameter_structured_vector: PyTree,
        identity_weight: IdentityWeight,
        power: float | int,
        exact_power: bool,
        use_cached: bool,
        pmap_axis_name: str | None,
        *,
        norm_to_scale_identity_weight_per_block: str | None = None,
    ) -> PyTree:
        """Multiply a vector by `(matrix + identity_weight * identity) ** power`, block by block.

        Arguments:
            state: State of the estimator.
            parameter_structured_vector: A pytree like the parameters.
            identity_weight: Multiple of the identity that is added to the matrix: one number, or
                one for each block.
            power: Any real number.
            exact_power: Whether to compute the power of this very matrix; otherwise that of a
                cheaper approximation.
            use_cached: Whether to use the result of the last `update_cache`, including the
                `identity_weight` it was given. The power 1 is computed if it is not cached.
            pmap_axis_name: Name of a mapped axis over which to distribute the work, or None.
            norm_to_scale_identity_weight_per_block: Name of a norm: "avg_diag", "1_norm",
                "2_norm" or "avg_fro". The identity weight of each block is then multiplied by this
                norm of the block. None to leave it as it is.

        Returns:
            A pytree like the parameters.

        Raises:
            ValueError: If the vector is not like the parameters, or the power is not cached.

        Examples:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def model(w, x):
            ...     curvax.register_normal_predictive_distribution(x @ w, variance=1.0)
            >>> args = jnp.ones((2, 1)), jnp.array([[2.0, 0.0], [0.0, 4.0]])
            >>> estimator = curvax.BlockDiagonalCurvature(model)
            >>> key = jax.random.key(0)
            >>> state = estimator.init(key, args, None, None)
            >>> state = estimator.update_curvature_matrix_estimate(
            ...     state, 0.0, 1.0, 2, key, args, None, "fisher_exact"
            ... )
            >>> ones = jnp.ones((2, 1))
            >>> estimator.multiply_matpower(state, ones, 1.0, 2, True, False, None).round()
            Array([[ 9.],
                   [81.]], dtype=float32)
        """
        vectors = self.params_vector_to_blocks_vectors(parameter_structured_vector)
        weights = self._scaled_weights(
            state, identity_weight, norm_to_scale_identity_weight_per_block
        )
        options = PowerOptions(power, exact_power, use_cached)
        products = self._products(state, vectors, weights, options, pmap_axis_name)
        product = self.blocks_vectors_to_params_vector(
            [products[index] for index in range(self.num_blocks)]
        )
        return jax.tree.map(
            lambda x, v: x.astype(jnp.asarray(v).dtype), product, parameter_structured_vector
        )

    def block_eigenvalues(self, state: BlockDiagonalState, use_cached: bool) -> tuple[Array, ...]:
        """Return the eigenvalues of each block, in no particular order.

        Arguments:
            state: State of the estimator.
            use_cached: Whether to use the result of the last `update_cache`.

        Returns:
            For each block, in the order of `blocks`, a vector with as many elements as its
            parameters.

        Examples:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def model(w, x):
            ...     curvax.register_normal_predictive_distribution(x @ w, variance=1.0)
            >>> args = jnp.ones((2, 1)), jnp.array([[2.0, 0.0], [0.0, 4.0]])
            >>> estimator = curvax.BlockDiagonalCurvature(model)
            >>> key = jax.random.key(0)
            >>> state = estimator.init(key, args, None, None)
            >>> state = estimator.update_curvature_matrix_estimate(
            ...     state, 0.0, 1.0, 2, key, args, None, "fisher_exact"
            ... )
            >>> [values.round().tolist() for values in estimator.block_eigenvalues(state, False)]
            [[2.0, 8.0]]
        """
        blocks = zip(self._structure.blocks, state.blocks_states, strict=True)
        return tuple(block.eigenvalues(present(x), use_cached) for block, x in blocks)

    def eigenvalues(self, state: BlockDiagonalState, use_cached: bool) -> Float[Array, " n"]:
        """Return the eigenvalues of all blocks, in the order of `blocks`.

        Arguments:
            state: State of the estimator.
            use_cached: Whether to use the result of the last `update_cache`.

        Returns:
            A vector with `dim` elements.

        Examples:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def model(w, x):
            ...     curvax.register_normal_predictive_distribution(x @ w, variance=1.0)
            >>> args = jnp.ones((2, 1)), jnp.array([[2.0, 0.0], [0.0, 4.0]])
            >>> estimator = curvax.BlockDiagonalCurvature(model)
            >>> key = jax.random.key(0)
            >>> state = estimator.init(key, args, None, None)
            >>> state = estimator.update_curvature_matrix_estimate(
            ...     state, 0.0, 1.0, 2, key, args, None, "fisher_exact"
            ... )
            >>> estimator.eigenvalues(state, use_cached=False).round()
            Array([2., 8.], dtype=float32)
        """
        return jnp.concatenate(self.block_eigenvalues(state, use_cached))

    def to_diagonal_block_dense_matrix(self, state: BlockDiagonalState) -> tuple[Array, ...]:
        """Return each block as a dense matrix.

        Arguments:
            state: State of the estimator.

        Returns:
            A matrix for each block, with rows and columns in the order in which
            `jax.flatten_util.ravel_pytree` flattens its parameters.

        Examples:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def model(w, x):
            ...     curvax.register_normal_predictive_distribution(x @ w, variance=1.0)
            >>> args = jnp.ones((3, 2)), jnp.ones((4, 3))
            >>> estimator = curvax.BlockDiagonalCurvature(model)
            >>> state = estimator.init(jax.random.key(0), args, None, None)
            >>> [matrix.shape for matrix in estimator.to_diagonal_block_dense_matrix(state)]
            [(6, 6)]
        """
        blocks = zip(self._structure.blocks, state.blocks_states, strict=True)
        return tuple(block.to_dense_matrix(present(x)) for block, x in blocks)

    def to_dense_matrix(self, state: BlockDiagonalState) -> Float[Array, "n n"]:
        """Return the block-diagonal matrix, dense, with zeros between the blocks.

        Arguments:
            state: State of the estimator.

        Returns:
            A matrix with rows and columns in the order in which `jax.flatten_util.ravel_pytree`
            flattens the parameters.

        Examples:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def model(w, x):
            ...     curvax.register_normal_predictive_distribution(x @ w, variance=1.0)
            >>> args = jnp.ones((2, 1)), jnp.array([[1.0, 2.0], [3.0, 0.0]])
            >>> estimator = curvax.BlockDiagonalCurvature(model)
            >>> key = jax.random.key(0)
            >>> state = estimator.init(key, args, None, None)
            >>> state = estimator.update_curvature_matrix_estimate(
            ...     state, 0.0, 1.0, 2, key, args, None, "fisher_exact"
            ... )
            >>> estimator.to_dense_matrix(state).round()
            Array([[5., 1.],
                   [1., 2.]], dtype=float32)
        """
        return self._structure.dense(self.to_diagonal_block_dense_matrix(state))

    def report(self) -> CurvatureReport:
        """Return the class, the parameters and the remarks of each block; it prints as a table.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def model(w, x):
            ...     curvax.register_normal_predictive_distribution(x @ w, variance=1.0)
            >>> estimator = curvax.BlockDiagonalCurvature(model)
            >>> estimator.finalize((jnp.ones((3, 2)), jnp.ones((4, 3))))
            >>> (row,) = estimator.report().rows
            >>> row.block, row.dim, row.remarks
            ('DenseTwoKroneckerFactored', 6, ())
        """
        structure = self._structure
        blocks = zip(structure.blocks, structure.block_params, strict=True)
        rows = [
            BlockRow(tuple(names), type(block).__name__, block.dim, block.remarks)
            for block, names in blocks
        ]
        return CurvatureReport(tuple(rows))

    @property
    def _structure(self) -> Structure:
        if self._structure_or_none is None:
            raise ValueError(
                f"{where()}: the blocks are not known before the function has been traced. Call "
                f"init or finalize(func_args) first."
            )
        return self._structure_or_none

    def _make_structure(self, func_args: Sequence[PyTree]) -> Structure:
        """Trace the function and make its blocks."""
        at = self._traced.at(func_args)
        return Structure.of_layers(at, self._tag_ctors, self._index_ctors, self._default_block_ctor)

    @property
    def _replicated(self) -> Sequence[int]:
        """The indices of the blocks whose states are replicated on all devices."""
        return range(self.num_blocks)

    def _updated(
        self,
        state: BlockDiagonalState,
        mode: str,
        rng: Array,
        func_args: Sequence[PyTree],
        update: AverageUpdate,
    ) -> BlockDiagonalState:
        """Return the state after an update."""
        layers, states = self._layers(func_args), state.blocks_states
        local = self._local_batch(func_args, update)
        randomness = sample_randomness(layers.at, mode, rng, local, self._num_samples)
        if self._divides_empirical and mode == "fisher_empirical":
            root = jnp.sqrt(jnp.asarray(update.batch_size, jnp.float32))
            randomness = [signs / root for signs in randomness]
        if any(block.has_own_update for block in layers.blocks):
            self._check_no_microbatches()
            passes = num_passes(mode, randomness)
            updated = update_from_layer_data(layers, states, mode, randomness, passes, update)
            return replace(state, blocks_states=tuple(updated))
        if self._microbatches.is_none:
            sums = sum_of_terms(layers, states, mode, randomness, self._should_vmap_samples)
        else:
            sums = self._sum_microbatches(layers, states, mode, randomness, func_args)
        terms = with_batch_terms(layers, states, sums, update.axis_name)
        return self._update_averages(state, terms, layers.uses, update)

    def _local_batch(self, func_args: Sequence[PyTree], update: AverageUpdate) -> LocalBatch:
        return LocalBatch(length_of(self._batch.of(func_args)), update.axis_name)

    def _products(
        self,
        state: BlockDiagonalState,
        vectors: Sequence[Sequence[Array]],
        weights: Sequence[ArrayLike],
        options: PowerOptions,
        axis: str | None,
    ) -> dict[int, Sequence[Array]]:
        """Return a power of each block times its part of a vector, by the index of the block."""

        def task(index: int) -> Callable[[], Sequence[Array]]:
            block, block_state = self._structure.blocks[index], state.blocks_states[index]
            vector, weight = vectors[index], weights[index]

            def product() -> Sequence[Array]:
                with scope_of(block):
                    return block.multiply_matpower(present(block_state), vector, weight, *options)

            return product

        work = [self._structure.blocks[index].multiply_work for index in self._replicated]
        axis = axis if self._distributed_multiplies else None
        products = run_assigned([task(index) for index in self._replicated], work, axis)
        return dict(zip(self._replicated, products, strict=True))

    def _run_matrix_tasks(self, requests: dict[int, PyTree], axis: str | None) -> dict[int, PyTree]:
        """Run the tasks of each block in its scope; on several devices all are run together."""
        if axis is not None:
            return run_matrix_tasks(requests, axis)
        results = {}
        for n, request in requests.items():
            with scope_of(self._structure.blocks[n]):
                results[n] = run_matrix_tasks(request)
        return results

    def _update_averages(
        self,
        state: BlockDiagonalState,
        terms: Sequence[Sums],
        uses: Sequence[Sequence[LayerUse]],
        update: AverageUpdate,
    ) -> BlockDiagonalState:
        """Return the state with the estimate of each block, from its terms, in its averages."""
        states = list(state.blocks_states)
        for n in self._replicated:
            block = self._structure.blocks[n]
            weights = update.averaging
            with scope_of(block):
                states[n] = block.update_averages(present(states[n]), terms[n], uses[n], *weights)
        return replace(state, blocks_states=tuple(states))

    def _layers(self, func_args: Sequence[PyTree]) -> Layers:
        at = local_loss_map(self._traced, func_args, self.params_index)
        return Layers(at, self._structure.blocks)

    def _updated_from_gradient(
        self,
        state: BlockDiagonalState,
        mode: str,
        func_args: Sequence[PyTree],
        update: AverageUpdate,
    ) -> BlockDiagonalState:
        """Return the state after an update with the gradient of the objective itself."""
        layers = self._layers(func_args)
        check_gradient_blocks(mode, layers.blocks)
        gradient = gradient_of_objective(
            self.func, self._func_and_grad, func_args, self.params_index
        )
        if update.axis_name is not None and mode.endswith("_synced"):
            gradient = lax.pmean(gradient, update.axis_name)
        updated = update_from_gradient(layers, state.blocks_states, gradient, update)
        return replace(state, blocks_states=tuple(updated))

    def block_norms(self, state: BlockDiagonalState, norm_type: str) -> tuple[Array, ...]:
        """Return a norm of each block.

        Arguments:
            state: State of the estimator.
            norm_type: "avg_diag", the mean of the diagonal; "2_norm", the largest eigenvalue;
                "1_norm", the largest sum of absolute values in a column; or "avg_fro", the
                Frobenius norm divided by the square root of the size.

        Returns:
            A scalar for each block, in the order of `blocks`.

        Raises:
            ValueError: If there is no norm of this name.

        Examples:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def model(w, x):
            ...     curvax.register_normal_predictive_distribution(x @ w, variance=1.0)
            >>> args = jnp.ones((2, 1)), jnp.array([[2.0, 0.0], [0.0, 4.0]])
            >>> estimator, key = curvax.BlockDiagonalCurvature(model), jax.random.key(0)
            >>> state = estimator.update_curvature_matrix_estimate(
            ...     estimator.init(key, args, None, None), 0.0, 1.0, 2, key, args, None, "ggn_exact"
            ... )
            >>> [float(norm) for norm in estimator.block_norms(state, "2_norm")]
            [8.0]
        """
        blocks = zip(self._structure.blocks, state.blocks_states, strict=True)
        return tuple(block.norm(present(x), norm_type) for block, x in blocks)

    def _scaled_weights(
        self, state: BlockDiagonalState, identity_weight: IdentityWeight, norm_type: str | None
    ) -> Sequence[ArrayLike]:
        """Return the identity weight of each block, multiplied by a norm of the block."""
        weights = self._per_block(identity_weight)
        if norm_type is None:
            return weights
        norms = self.block_norms(state, norm_type)
        return [weight * norm for weight, norm in zip(weights, norms, strict=True)]

    def _per_block(self, identity_weight: IdentityWeight) -> Sequence[ArrayLike]:
        """Return the identity weight of each block."""
        count = self.num_blocks
        if isinstance(identity_weight, list | tuple):
            weights = list(identity_weight)
        else:
            array = jnp.asarray(identity_weight)
            weights = [array] * count if array.ndim == 0 else list(array)
        if len(weights) != count:
            raise ValueError(
                f"{where()}: identity_weight must be a number, or one for each of the {count} "
                f"blocks, got {len(weights)}."
            )
        return weights

    def _check_no_microbatches(self) -> None:
        if not self._microbatches.is_none:
            names = [block.name for block in self._structure.blocks if block.has_own_update]
            raise ValueError(
                f"{where()}: with microbatch_size or memory_budget, blocks must not override "
                f"update_curvature_matrix_estimate, but {', '.join(names)} do: their updates from "
                f"microbatches are not known to add up."
            )

    def _sum_microbatches(
        self,
        layers: Layers,
        states: Sequence[BlockState | None],
        mode: str,
        randomness: Sequence[Array],
        func_args: Sequence[PyTree],
    ) -> TermSums:
        """Equal to `sum_of_terms`, except that it processes one microbatch at a time."""
        batch = self._batch.of(func_args)
        length = length_of(batch)
        if not self._examples_interact:
            check_separate(layers.at)
        rows = [by_example(x, length) for x in randomness]
        run = microbatch(
            self._sum_microbatch,
            argnums=(3, 4),
            microbatch_size=self._microbatches.microbatch_size,
            memory_budget=self._microbatches.memory_budget,
            accumulator=AccumulationType.SUM,
            in_axes=[axes_of(batch), 0],
        )
        return run(Static(mode), self._batch.without(func_args), list(states), batch, rows)

    def _sum_microbatch(
        self,
        mode: Static[str],
        other_args: PyTree,
        states: Sequence[BlockState | None],
        batch: PyTree,
        rows: Sequence[Array],
    ) -> TermSums:
        layers = self._layers(self._batch.replace(other_args, batch))
        randomness = [jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:]) for x in rows]
        return sum_of_terms(layers, states, mode.value, randomness, self._should_vmap_samples)
