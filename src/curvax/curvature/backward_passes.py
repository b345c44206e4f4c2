"""Sums of the terms of all blocks over the backward passes of an estimation mode.

The function runs forward once, however many backward passes a mode takes. Each pass computes the
statistics of the layers on its way back; `CurvatureBlock.terms` maps them to quantities that can be
added over passes. Statistics that depend on the inputs of layers alone (`Sums.of_inputs`) are
computed once. If a block overrides `update_curvature_matrix_estimate`, `update_from_layer_data`
takes the place of these sums, for all blocks.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from curvax import _jax
from curvax._errors import where
from curvax._types import Array, Fun, PyTree
from curvax.curvature.blocks.base import BlockState, CurvatureBlock, scope_of
from curvax.curvature.blocks.data import given_data
from curvax.curvature.estimation_modes import (
    Cotangents,
    Index,
    Sweep,
    is_sampled,
    sum_over_devices,
    sweeps,
)
from curvax.layers.detection.layers import Layer, TaggedUse
from curvax.layers.tracing.layer_inputs import layer_data_at
from curvax.layers.tracing.loss_map import LossMap, TracedFunction
from curvax.layers.tracing.statistics import Statistic, Sums, statistics_at
from curvax.layers.use import LayerUse


class AverageUpdate(NamedTuple):
    """The weights with which an estimate enters the moving averages of blocks.

    Attributes:
        ema_old: The accumulated sum and its weight are multiplied by this.
        ema_new: Weight with which the new estimate is added; the average is sum / weight, so the
            first update counts fully whatever the weights.
        batch_size: Number of examples per device.
        axis_name: Name of a mapped axis of devices to average over, or None.
        identity_weight: The damping, for blocks whose estimate depends on it.
    """

    ema_old: ArrayLike
    ema_new: ArrayLike
    batch_size: ArrayLike
    axis_name: str | None
    identity_weight: ArrayLike = 0.0

    @property
    def averaging(self) -> tuple[ArrayLike, ArrayLike, ArrayLike, str | None]:
        """The arguments of `CurvatureBlock.update_averages`: all but the damping."""
        return self.ema_old, self.ema_new, self.batch_size, self.axis_name


class TermSums(NamedTuple):
    """Sums over backward passes.

    Attributes:
        terms: The sum of the terms of each block; empty for blocks with `sums_batch`.
        batch_sums: For each sweep and block, the sums of its passes, along a leading axis; empty
            for blocks without `sums_batch`.
    """

    terms: list[Sums]
    batch_sums: list[list[Sums]]


@dataclass(frozen=True, eq=False)
class Layers:
    """The layers of a traced function, with their blocks."""

    at: LossMap
    blocks: Sequence[CurvatureBlock]

    @functools.cached_property
    def uses(self) -> list[tuple[LayerUse, ...]]:
        """The uses of each layer."""
        return [layer.uses for layer in self.at.processed.layers]

    def rule(
        self, states: Sequence[BlockState | None]
    ) -> Callable[[Layer, TaggedUse], Mapping[Hashable, Statistic]]:
        """Return the rule for `layer_statistics`: the statistics of blocks in these states."""
        indices = {layer: index for index, layer in enumerate(self.at.processed.layers)}

        def rule(layer: Layer, tag: TaggedUse) -> Mapping[Hashable, Statistic]:
            block, state = self.blocks[indices[layer]], states[indices[layer]]
            statistics = block.statistics(tag.use, layer.uses, state)
            return {key: _in_scope_of(block, each) for key, each in statistics.items()}

        return rule


def _in_scope_of(block: CurvatureBlock, statistic: Statistic) -> Statistic:
    def compute(inputs: tuple[Array, ...], cotangents: tuple[Array, ...]) -> PyTree:
        with scope_of(block):
            return statistic.compute(inputs, cotangents)

    return replace(statistic, compute=compute)


def local_loss_map(
    traced: TracedFunction, func_args: Sequence[PyTree], params_index: int
) -> LossMap:
    """Return the function at these arguments, with gradients of the local examples only.

    Under `shard_map`, gradients of replicated values are summed over devices. So parameters are
    marked as varying like the other arguments.
    """
    leaves = jax.tree.leaves(tuple(func_args))
    args = list(func_args)
    args[params_index] = jax.tree.map(
        lambda x: _jax.varying_like(jnp.asarray(x), *leaves), args[params_index]
    )
    return traced.at(args)


def sum_of_terms(
    layers: Layers,
    states: Sequence[BlockState | None],
    mode: str,
    randomness: Sequence[Array],
    vmap_samples: bool = False,
) -> TermSums:
    """Return the sums of the blocks' terms over all backward passes of a mode.

    With `vmap_samples`, passes of a mode that samples are computed at the same time.

    Blocks with `sums_batch` have terms of sums over the global batch. These are not known here: in
    place of their terms there are the sums themselves, or the gradient of their parameters.
    """
    at, blocks, uses = layers.at, layers.blocks, layers.uses
    operands, pull_back = statistics_at(at, layers.rule(states))
    passes = [sweep for sweep in sweeps(at, operands, mode, randomness) if sweep.count]

    def compute(cotangents: Cotangents) -> tuple[list[Sums], list[Sums]]:
        sums_of_layers, gradient = pull_back(cotangents)
        leaves = jax.tree.leaves(gradient)
        terms, batch_sums = [Sums()] * len(blocks), [Sums()] * len(blocks)
        for n, (block, sums) in enumerate(zip(blocks, sums_of_layers, strict=True)):
            if block.sums_batch:
                params = [leaves[k] for k in at.processed.layers[n].params]
                batch_sums[n] = Sums(of_cotangents=sums.of_cotangents or params)
            else:
                with scope_of(block):
                    terms[n] = block.terms(sums, uses[n], states[n])
        return terms, batch_sums

    if len(passes) == 1 and passes[0].count == 1:
        terms, batch_sums = compute(passes[0].cotangents(0))
        return TermSums(terms, [jax.tree.map(lambda x: x[None], batch_sums)])
    of_inputs, _ = compute([tuple(jnp.zeros_like(x) for x in each) for each in operands[0]])

    def of_cotangents(cotangents: Cotangents) -> tuple[list[PyTree], list[Sums]]:
        terms, batch_sums = compute(cotangents)
        return [each.of_cotangents for each in terms], batch_sums

    sum_sweep = _sum_sweep_by_vmap if vmap_samples and is_sampled(mode) else _sum_sweep
    totals, batch_sums = zip(*(sum_sweep(of_cotangents, sweep) for sweep in passes), strict=True)
    total = functools.reduce(lambda x, y: jax.tree.map(jnp.add, x, y), totals)
    terms = [
        terms._replace(of_cotangents=summed) for terms, summed in zip(of_inputs, total, strict=True)
    ]
    return TermSums(terms, list(batch_sums))


def with_batch_terms(
    layers: Layers, states: Sequence[BlockState | None], sums: TermSums, axis_name: str | None
) -> list[Sums]:
    """Return the terms of all blocks; those with `sums_batch` sum over the batch of all devices."""
    terms, batch_sums = list(sums.terms), sum_over_devices(sums.batch_sums, axis_name)
    for index, block in enumerate(layers.blocks):
        if not block.sums_batch:
            continue
        uses, state = layers.uses[index], states[index]
        of_pass = lambda sums, b=block, u=uses, s=state: b.terms(sums, u, s)
        of_sweeps = [jax.vmap(of_pass)(each[index]) for each in batch_sums]
        summed = [jax.tree.map(lambda x: jnp.sum(x, 0), each) for each in of_sweeps]
        terms[index] = jax.tree.map(lambda *xs: sum(xs[1:], start=xs[0]), *summed)
    return terms


def update_from_layer_data(
    layers: Layers,
    states: Sequence[BlockState | None],
    mode: str,
    randomness: Sequence[Array],
    num_passes: int,
    update: AverageUpdate,
) -> list[BlockState | None]:
    """Return the states of all blocks, updated in each pass with the data of their layers.

    This is for blocks that override `update_curvature_matrix_estimate`. The estimate is the sum
    over passes, but a block averages its updates. Estimates are quadratic in cotangents, so
    cotangents are scaled by `sqrt(num_passes)`, and each pass has the weight
    `ema_new / num_passes`.
    """
    at, blocks = layers.at, layers.blocks
    operands, vjp = layer_data_at(at)
    scale = num_passes**0.5

    def step(
        states: Sequence[BlockState | None], cotangents: Cotangents, ema_old: ArrayLike
    ) -> list[BlockState | None]:
        scaled = jax.tree.map(lambda x: x * jnp.asarray(scale, x.dtype), cotangents)
        updated = []
        for block, state, data, uses in zip(blocks, states, vjp(scaled), layers.uses, strict=True):
            given = given_data(data, uses, update.batch_size)
            copied = jax.tree.map(lambda x: x, state)  # The user's method may mutate its argument.
            updated.append(
                block.update_from_data(
                    copied,
                    given,
                    ema_old,
                    update.ema_new / num_passes,
                    update.identity_weight,
                    update.batch_size,
                    update.axis_name,
                )
            )
        return updated

    done = 0
    for sweep in sweeps(at, operands, mode, randomness):

        def body(
            states: Sequence[BlockState | None], k: Index, sweep: Sweep = sweep, done: int = done
        ) -> tuple[list[BlockState | None], None]:
            is_first = (k == 0) & (done == 0)
            ema_old = jnp.where(is_first, update.ema_old, 1.0)
            return step(states, sweep.cotangents(k), ema_old), None

        if sweep.count == 1:
            states, _ = body(states, 0)
        elif sweep.count:
            states, _ = lax.scan(body, list(states), jnp.arange(sweep.count))
        done += sweep.count
    return list(states)


def check_gradient_blocks(mode: str, blocks: Sequence[CurvatureBlock]) -> None:
    """Check that all blocks can be estimated from the gradient of the batch."""
    wrong = [block.name for block in blocks if not block.uses_gradient_only]
    if wrong:
        raise ValueError(
            f"{where()}: the mode {mode!r} has no inputs of layers, only the gradient of the "
            f"objective, but the blocks of {', '.join(wrong)} need more. Use blocks such as "
            f"curvax.NaiveDiagonal or curvax.NaiveFull, with layer_tag_to_block_ctor or "
            f"register_only_generic=True."
        )


def gradient_of_objective(
    func: Fun, func_and_grad: Fun | None, func_args: Sequence[PyTree], params_index: int
) -> list[Array]:
    """Return the gradient of the objective, an array for each parameter.

    The objective is what `func` returns, or the first of what it returns.
    """
    args = list(func_args)
    leaves = jax.tree.leaves(tuple(func_args))
    # Under `shard_map`, gradients of replicated values would be summed over devices.
    varying = lambda x: _jax.varying_like(jnp.asarray(x), *leaves)
    params = jax.tree.map(varying, args[params_index])

    def objective(params: PyTree) -> Array:
        args[params_index] = params
        result = func(*args)
        return result[0] if isinstance(result, tuple) else result

    if func_and_grad is None:
        return jax.tree.leaves(jax.grad(objective)(params))
    args[params_index] = params
    _, gradient = func_and_grad(*args)
    return jax.tree.leaves(gradient)


def update_from_gradient(
    layers: Layers,
    states: Sequence[BlockState | None],
    gradient: Sequence[Array],
    update: AverageUpdate,
) -> list[BlockState | None]:
    """Return the states of all blocks, each updated with its part of the gradient."""
    updated = []
    for layer, block, state in zip(layers.at.processed.layers, layers.blocks, states, strict=True):
        params = tuple(layers.at.params[index] for index in layer.params)
        tangents = tuple(gradient[index] for index in layer.params)
        data = {"params": params, "params_tangents": tangents}
        copied = jax.tree.map(lambda x: x, state)
        updated.append(
            block.update_from_gradient(
                copied,
                data,
                update.ema_old,
                update.ema_new,
                update.identity_weight,
                update.batch_size,
                update.axis_name,
            )
        )
    return updated


def _sum_sweep_by_vmap(
    compute: Callable[[Cotangents], tuple[list[PyTree], list[Sums]]], sweep: Sweep
) -> tuple[list[PyTree], list[Sums]]:
    """Equal to `_sum_sweep`, except that all passes are computed at the same time."""
    terms, sums = jax.vmap(lambda k: compute(sweep.cotangents(k)))(jnp.arange(sweep.count))
    return jax.tree.map(lambda x: jnp.sum(x, 0), terms), sums


def _sum_sweep(
    compute: Callable[[Cotangents], tuple[list[PyTree], list[Sums]]], sweep: Sweep
) -> tuple[list[PyTree], list[Sums]]:
    """Return the sum of terms over the passes of a sweep, and the batch sums of each pass."""
    of_pass = lambda k: compute(sweep.cotangents(k))
    if sweep.count == 1:
        terms, sums = of_pass(0)
        return terms, jax.tree.map(lambda x: x[None], sums)
    shapes, _ = jax.eval_shape(of_pass, 0)
    zeros = jax.tree.map(_jax.filled_like, shapes)

    def step(total: list[PyTree], k: Array) -> tuple[list[PyTree], list[Sums]]:
        terms, sums = of_pass(k)
        return jax.tree.map(jnp.add, total, terms), sums

    return lax.scan(step, zeros, jnp.arange(sweep.count))
