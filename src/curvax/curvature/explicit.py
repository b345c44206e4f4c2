"""`ExplicitExactCurvature`: the whole curvature matrix, from gradients of single examples."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from curvax._tree import Static
from curvax._types import Array, Fun, PyTree
from curvax.curvature.backward_passes import AverageUpdate, at_devices
from curvax.curvature.batch import axes_of, is_of_examples, length_of
from curvax.curvature.block_diagonal import BlockCtor, BlockDiagonalCurvature, Structure
from curvax.curvature.blocks.base import LayerEquation
from curvax.curvature.blocks.full import Full, NaiveFull, products_of_gradients
from curvax.curvature.blocks.settings import get_max_parallel_elements
from curvax.curvature.estimation_modes import LocalBatch, draws, num_passes, row_numbers, sweeps
from curvax.layers.tags import generic_tag
from curvax.layers.tracing.statistics import Sums
from curvax.layers.use import ParamUse
from curvax.maps.accumulators import AccumulationType
from curvax.maps.microbatch import microbatch

_ALONE = LocalBatch(1, None)
"""An example that is a batch of its own."""


class ExplicitExactCurvature(BlockDiagonalCurvature):
    """The whole curvature matrix, as one dense block.

    It is the mean over examples of outer products of gradients, each of one example alone. So it
    takes a time that grows with the number of examples, memory that grows with the square of the
    number of parameters, and each example must be a batch of its own. In the modes `fisher_exact`
    and `ggn_exact` it is exact.

    Arguments:
        func: the model function, which registers at least one loss.
        params_index: which of its arguments are the parameters.
        batch_index: which of them is the batch. All its arrays have the examples along their first
            axis.
        default_estimation_mode: the mode of `update_curvature_matrix_estimate` if none is given.
        layer_tag_to_block_ctor: a class of blocks under "generic_tag", in place of `NaiveFull`.
        index_to_block_ctor: the same, under the numbers of all parameters.
        auto_register_tags: without effect: layers do not matter here.
        microbatch_size: how many examples to take at a time; if neither this nor a budget is given,
            as many as have `get_max_parallel_elements()` elements.
        memory_budget: how much memory an update may use, as in `curvax.microbatch`.
        auto_register_kwargs: as in `curvax.auto_register_tags`.

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
        only_losses = {"register_only_generic": True, "allow_unused_params": True}
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
        """Which argument of the function is the batch."""
        return self._batch_index

    def _updated(
        self, state: Any, mode: str, rng: Array, func_args: Sequence[PyTree], update: AverageUpdate
    ) -> Any:
        batch = self._batch.of(func_args)
        (block,), (own,) = self._known.blocks, state.blocks_states
        run = microbatch(
            self._examples,
            argnums=(3, 4),
            accumulator=AccumulationType.SUM,
            in_axes=[axes_of(batch), 0],
            **self._sizes_for(func_args, mode),
        )
        local = self._local_batch(func_args, update)
        numbers = row_numbers(local.num_examples, (), local)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(rng, numbers)
        terms = run(Static(mode), self._batch.without(func_args), own, batch, keys)
        return self._update_averages(state, [terms], [block.uses], update)

    def _make(self, func_args: Sequence[PyTree]) -> Structure:
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
        batch = self._batch.of(func_args)
        one = lambda x: jnp.asarray(x)[:1] if is_of_examples(x) else x
        return self._batch.replace(func_args, jax.tree.map(one, batch))

    def _sizes_for(self, func_args: Sequence[PyTree], mode: str) -> dict[str, Any]:
        """How many examples to take at a time."""
        if not self._at_once:
            return self._sizes
        at = self._traced.at(self._first_example(func_args))
        rows = num_passes(mode, draws(at, mode, jax.random.key(0), _ALONE), row_by_row=True)
        size = get_max_parallel_elements() // max(self.dim * rows, 1)
        length = length_of(self._batch.of(func_args))
        return {"microbatch_size": min(max(size, 1), max(length, 1))}

    def _examples(
        self, mode: Static[str], others: PyTree, state: Any, batch: PyTree, keys: Array
    ) -> Sums:
        """The sum over some examples of the terms of their gradients."""
        (block,) = self._known.blocks

        leaves, tree = jax.tree.flatten(batch)
        axes = jax.tree.leaves(axes_of(batch), is_leaf=lambda axis: axis is None)

        def of_example(example: Sequence[Array], key: Array) -> list[Array]:
            pairs = zip(example, axes, strict=True)
            alone = jax.tree.unflatten(tree, [x if axis is None else x[None] for x, axis in pairs])
            return self._gradients(self._batch.replace(others, alone), mode.value, key)

        gradients = jax.vmap(of_example, (axes, 0))(leaves, keys)
        rows = [x.reshape(-1, *x.shape[2:]) for x in gradients]
        if isinstance(block, Full):
            products = products_of_gradients([x.astype(block.dtype) for x in rows])
            return Sums(of_cotangents=products)
        terms = lambda own: block.terms(Sums(of_cotangents=own), block.uses, state)
        return jax.tree.map(lambda x: jnp.sum(x, 0), jax.vmap(terms)(rows))

    def _gradients(self, func_args: Sequence[PyTree], mode: str, key: Array) -> list[Array]:
        """The gradients of a batch of one example in all passes, by parameter."""
        at = at_devices(self._traced, func_args, self.params_index)
        dependants, transposed, (others, _) = jax.vjp(at, at.params, has_aux=True)
        passes = sweeps(
            at, (dependants, others), mode, draws(at, mode, key, _ALONE), row_by_row=True
        )
        each = [
            lax.map(lambda k, s=sweep: transposed(s.cotangents(k))[0], jnp.arange(sweep.count))
            for sweep in passes
        ]
        return [jnp.concatenate(xs) for xs in zip(*each, strict=True)]
