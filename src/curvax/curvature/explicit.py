"""`ExplicitExactCurvature`: the dense curvature matrix, from gradients of single examples.

The Fisher matrix and the GGN of each example are sums of outer products of vectors `Jᵀ c`; see
`curvax.curvature.estimation_modes` (Schraudolph 2002, "Fast curvature matrix-vector products for
second-order gradient descent"; Martens 2020, "New insights and perspectives on the natural gradient
method").
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from curvax._errors import where
from curvax._tree import Static
from curvax._types import Array, Fun, PyTree
from curvax.curvature.backward_passes import AverageUpdate, local_loss_map
from curvax.curvature.batch import axes_of, has_examples, length_of
from curvax.curvature.block_diagonal import (
    BlockCtor,
    BlockDiagonalCurvature,
    BlockDiagonalState,
    MicrobatchOptions,
    Structure,
)
from curvax.curvature.blocks.base import BlockState, LayerEquation
from curvax.curvature.blocks.full import Full, NaiveFull, products_of_gradients
from curvax.curvature.blocks.settings import get_max_parallel_elements
from curvax.curvature.estimation_modes import (
    LocalBatch,
    num_passes,
    row_indices,
    sample_randomness,
    sweeps,
)
from curvax.layers.tags import generic_tag
from curvax.layers.tracing.statistics import Sums
from curvax.layers.use import ParamUse
from curvax.maps.accumulators import AccumulationType
from curvax.maps.microbatch import microbatch

_SINGLE_EXAMPLE = LocalBatch(1, None)


class ExplicitExactCurvature(BlockDiagonalCurvature):
    """The curvature matrix of all parameters, as one dense block.

    It is the mean over examples of outer products of gradients, each of a single example. So the
    time of an update is linear in the number of examples and the memory quadratic in the number of
    parameters, and the function must accept a batch of one example. In the modes `fisher_exact` and
    `ggn_exact` the matrix is exact.

    Arguments:
        func: The model function, which registers at least one loss.
        params_index: Index of the argument that holds the parameters.
        batch_index: Index of the argument, or several, that hold the batch. All of its arrays have
            the examples along their leading axis.
        default_estimation_mode: Mode of `update_curvature_matrix_estimate` unless one is given.
        layer_tag_to_block_ctor: A block class under "generic_tag", in place of `NaiveFull`.
        index_to_block_ctor: A block class under the tuple of the indices of all parameters, in
            place of `NaiveFull`.
        auto_register_tags: Has no effect: all parameters are in one block, whatever their layers.
        microbatch_size: Number of examples to process at a time. If neither this nor a budget is
            given, as many as have `get_max_parallel_elements()` elements.
        memory_budget: Memory that an update may use, in place of `microbatch_size`: an integer
            number of bytes, a string such as "2GB", or a fraction of `available_memory()` such as
            "50%" or 0.5. The largest microbatch that fits is used.
        auto_register_kwargs: Further arguments of `curvax.auto_register_tags`, such as
            `through_custom_derivatives`. `register_only_generic` and `allow_unused_params` are
            always True.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def func(w, x):
        ...     curvax.register_normal_predictive_distribution(x @ w, variance=1.0)
        >>> args = jnp.ones((2, 1)), jnp.array([[1.0, 2.0], [3.0, 0.0]])
        >>> estimator = curvax.ExplicitExactCurvature(func)
        >>> state = estimator.init(jax.random.key(0), args, None, None)
        >>> state = estimator.update_curvature_matrix_estimate(
        ...     state, 0.0, 1.0, 2, jax.random.key(0), args, None
        ... )
        >>> estimator.to_dense_matrix(state)
        Array([[5., 1.],
               [1., 2.]], dtype=float32)
    """

    def __init__(
        self,
        func: Fun,
        params_index: int = 0,
        batch_index: int | Sequence[int] = 1,
        default_estimation_mode: str = "fisher_exact",
        layer_tag_to_block_ctor: Mapping[str, BlockCtor] | None = None,
        index_to_block_ctor: Mapping[tuple[int, ...], BlockCtor] | None = None,
        auto_register_tags: bool = True,
        *,
        microbatch_size: int | None = None,
        memory_budget: int | float | str | None = None,
        **auto_register_kwargs: Any,
    ) -> None:
        del auto_register_tags
        only_losses: dict[str, Any] = {"register_only_generic": True, "allow_unused_params": True}
        super().__init__(
            func,
            params_index,
            default_estimation_mode,
            layer_tag_to_block_ctor,
            index_to_block_ctor,
            microbatch_size=microbatch_size,
            memory_budget=memory_budget,
            batch_index=batch_index,
            **{**auto_register_kwargs, **only_losses},
        )
        self._batch_index = batch_index

    @property
    def batch_index(self) -> int | Sequence[int]:
        """The index of the argument, or several, that hold the batch."""
        return self._batch_index

    def _updated(
        self,
        state: BlockDiagonalState,
        mode: str,
        rng: Array,
        func_args: Sequence[PyTree],
        update: AverageUpdate,
    ) -> BlockDiagonalState:
        batch, sizes = self._batch.of(func_args), self._microbatches_for(func_args, mode)
        (block,), (block_state,) = self._structure.blocks, state.blocks_states
        run = microbatch(
            self._sum_examples,
            argnums=(3, 4),
            microbatch_size=sizes.microbatch_size,
            memory_budget=sizes.memory_budget,
            accumulator=AccumulationType.SUM,
            in_axes=[axes_of(batch), 0],
        )
        local = self._local_batch(func_args, update)
        indices = row_indices(local.num_examples, (), local)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(rng, indices)
        terms = run(Static(mode), self._batch.without(func_args), block_state, batch, keys)
        return self._update_averages(state, [terms], [block.uses], update)

    def _updated_from_gradient(
        self,
        state: BlockDiagonalState,
        mode: str,
        func_args: Sequence[PyTree],
        update: AverageUpdate,
    ) -> BlockDiagonalState:
        raise ValueError(
            f"{where()}: the mode {mode!r} squares the gradient of the batch, and this matrix is "
            f"the sum of those of single examples. Use fisher_empirical."
        )

    def _make_structure(self, func_args: Sequence[PyTree]) -> Structure:
        at = self._traced.at(self._first_example(func_args))
        variables = at.processed.params_vars_flat
        indices = tuple(range(len(variables)))
        ctor = self._index_ctors.get(indices) or self._tag_ctors.get(generic_tag.name) or NaiveFull
        first, dtypes = at.processed.layers[0], tuple(v.aval.dtype for v in variables)
        params = tuple(ParamUse(n, v.aval.shape) for n, v in enumerate(variables))
        use = replace(first.uses[0], params=params)
        equation = LayerEquation(generic_tag.name, (use,), dtypes, first.nodes[0].equation)
        return Structure.of(at, (indices,), (ctor(equation, "all parameters"),))

    def _first_example(self, func_args: Sequence[PyTree]) -> tuple[PyTree, ...]:
        """Return the arguments with a batch of the first example only."""
        batch = self._batch.of(func_args)
        first = lambda x: jnp.asarray(x)[:1] if has_examples(x) else x
        return self._batch.replace(func_args, jax.tree.map(first, batch))

    def _microbatches_for(self, func_args: Sequence[PyTree], mode: str) -> MicrobatchOptions:
        """Return the size of microbatches, by default from `get_max_parallel_elements`."""
        if not self._microbatches.is_none:
            return self._microbatches
        at = self._traced.at(self._first_example(func_args))
        randomness = sample_randomness(at, mode, jax.random.key(0), _SINGLE_EXAMPLE)
        rows = num_passes(mode, randomness, row_by_row=True)
        size = get_max_parallel_elements() // max(self.dim * rows, 1)
        length = length_of(self._batch.of(func_args))
        return MicrobatchOptions(min(max(size, 1), max(length, 1)), None)

    def _sum_examples(
        self,
        mode: Static[str],
        other_args: PyTree,
        state: BlockState,
        batch: PyTree,
        keys: Array,
    ) -> Sums:
        """Return the sum over the examples of a microbatch of the terms of their gradients."""
        (block,) = self._structure.blocks

        leaves, tree = jax.tree.flatten(batch)
        axes = jax.tree.leaves(axes_of(batch), is_leaf=lambda axis: axis is None)

        def of_example(example: Sequence[Array], key: Array) -> list[Array]:
            pairs = zip(example, axes, strict=True)
            single = jax.tree.unflatten(tree, [x if axis is None else x[None] for x, axis in pairs])
            return self._gradients(self._batch.replace(other_args, single), mode.value, key)

        gradients = jax.vmap(of_example, (axes, 0))(leaves, keys)
        rows = [x.reshape(-1, *x.shape[2:]) for x in gradients]
        if isinstance(block, Full):
            products = products_of_gradients([x.astype(block.dtype) for x in rows])
            return Sums(of_cotangents=products)
        terms = lambda row: block.terms(Sums(of_cotangents=row), block.uses, state)
        return jax.tree.map(lambda x: jnp.sum(x, 0), jax.vmap(terms)(rows))

    def _gradients(self, func_args: Sequence[PyTree], mode: str, key: Array) -> list[Array]:
        """Return the gradients of a single example in all passes: an array for each parameter."""
        at = local_loss_map(self._traced, func_args, self.params_index)
        dependants, transposed, (others, _) = jax.vjp(at, at.params, has_aux=True)
        randomness = sample_randomness(at, mode, key, _SINGLE_EXAMPLE)
        passes = sweeps(at, (dependants, others), mode, randomness, row_by_row=True)
        of_sweeps = [
            lax.map(lambda k, s=sweep: transposed(s.cotangents(k))[0], jnp.arange(sweep.count))
            for sweep in passes
        ]
        return [jnp.concatenate(xs) for xs in zip(*of_sweeps, strict=True)]
