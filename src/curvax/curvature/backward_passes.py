"""The terms of all blocks at some arguments of a function: backward passes, and what is summed.

The function runs forward once, however many passes a mode takes. In each pass the blocks' sums over
layers are computed on the way back, turned into terms, and added up. What says that it depends on
the inputs of layers alone (`Sums.of_inputs`) is computed once.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from curvax import _jax
from curvax._types import Array, PyTree
from curvax.curvature.blocks.base import CurvatureBlock
from curvax.curvature.blocks.data import given_data
from curvax.curvature.estimation_modes import Sweep, sum_over_devices, sweeps
from curvax.layers.detection.layers import Layer, TaggedUse
from curvax.layers.tracing.layer_inputs import layer_data_at
from curvax.layers.tracing.loss_map import LossMap, TracedFunction
from curvax.layers.tracing.statistics import Sums, statistics_at
from curvax.layers.use import LayerUse


class AverageUpdate(NamedTuple):
    """How an estimate enters the moving averages of blocks.

    Attributes:
        ema_old: what the averages so far are multiplied with.
        ema_new: the weight of the new estimate.
        batch_size: the number of examples.
        axis_name: the name of a mapped axis of devices to average over, if there is one.
    """

    ema_old: ArrayLike
    ema_new: ArrayLike
    batch_size: ArrayLike
    axis_name: str | None


@dataclass(frozen=True, eq=False)
class Layers:
    """The layers of a traced function, with their blocks."""

    at: LossMap
    blocks: Sequence[CurvatureBlock]

    @functools.cached_property
    def uses(self) -> list[tuple[LayerUse, ...]]:
        """The uses of each layer."""
        return [layer.uses for layer in self.at.processed.layers]

    def rule(self, states: Sequence[Any]) -> Any:
        """What `layer_statistics` computes, for blocks in these states."""
        layers = self.at.processed.layers
        numbers = {layer: number for number, layer in enumerate(layers)}

        def rule(layer: Layer, tag: TaggedUse) -> Any:
            number = numbers[layer]
            return self.blocks[number].statistics(tag.use, layer.uses, states[number])

        return rule


def at_devices(traced: TracedFunction, func_args: Sequence[PyTree], params_index: int) -> LossMap:
    """The function at these arguments, with gradients of each device's own examples.

    Inside a `shard_map`, gradients of what is the same on all devices are sums over these.
    """
    leaves = jax.tree.leaves(tuple(func_args))
    args = list(func_args)
    args[params_index] = jax.tree.map(
        lambda x: _jax.varying_like(jnp.asarray(x), *leaves), args[params_index]
    )
    return traced.at(args)


def sum_of_terms(
    layers: Layers, states: Sequence[Any], mode: str, drawn: Sequence[Array]
) -> tuple[list[Sums], list[Any]]:
    """The sums over all passes of the terms of each block.

    Blocks whose terms are of the sum over the whole batch have none; instead, second, there are
    their sums in each pass, or the gradient of their parameters.
    """
    at, blocks, uses = layers.at, layers.blocks, layers.uses
    operands, pull_back = statistics_at(at, layers.rule(states))
    passes = [sweep for sweep in sweeps(at, operands, mode, drawn) if sweep.count]

    def compute(cotangents: Any) -> tuple[list[Sums], list[Sums]]:
        found, gradient = pull_back(cotangents)
        leaves = jax.tree.leaves(gradient)
        terms, batch_sums = [Sums()] * len(blocks), [Sums()] * len(blocks)
        for n, (block, sums) in enumerate(zip(blocks, found, strict=True)):
            if block.sums_batch:
                params = [leaves[k] for k in at.processed.layers[n].params]
                batch_sums[n] = Sums(of_cotangents=sums.of_cotangents or params)
            else:
                terms[n] = block.terms(sums, uses[n], states[n])
        return terms, batch_sums

    if len(passes) == 1 and passes[0].count == 1:
        terms, batch_sums = compute(passes[0].cotangents(0))
        return terms, [jax.tree.map(lambda x: x[None], batch_sums)]
    once, _ = compute([tuple(jnp.zeros_like(x) for x in each) for each in operands[0]])

    def of_cotangents(cotangents: Any) -> tuple[list[Any], list[Sums]]:
        terms, batch_sums = compute(cotangents)
        return [each.of_cotangents for each in terms], batch_sums

    totals, batch_sums = zip(
        *(_over_columns(of_cotangents, sweep) for sweep in passes), strict=True
    )
    total = functools.reduce(lambda x, y: jax.tree.map(jnp.add, x, y), totals)
    pairs = zip(once, total, strict=True)
    return [each._replace(of_cotangents=own) for each, own in pairs], list(batch_sums)


def with_batch_terms(
    layers: Layers,
    states: Sequence[Any],
    terms: Sequence[Sums],
    batch_sums: Sequence[Any],
    axis_name: str | None,
) -> list[Sums]:
    """The terms of all blocks, also of those that are of sums over the batch of all devices."""
    found, batch_sums = list(terms), sum_over_devices(list(batch_sums), axis_name)
    for number, block in enumerate(layers.blocks):
        if not block.sums_batch:
            continue
        uses, state = layers.uses[number], states[number]
        of_pass = lambda sums, b=block, s=uses, own=state: b.terms(sums, s, own)
        each = [jax.vmap(of_pass)(sums[number]) for sums in batch_sums]
        summed = [jax.tree.map(lambda x: jnp.sum(x, 0), own) for own in each]
        found[number] = jax.tree.map(lambda *xs: sum(xs[1:], start=xs[0]), *summed)
    return found


def updated_by_data(
    layers: Layers,
    states: Sequence[Any],
    mode: str,
    drawn: Sequence[Array],
    num_passes: int,
    update: AverageUpdate,
) -> list[Any]:
    """The states of all blocks after they were given the data of their layers, in each pass.

    Averages over all passes of what is larger by their number are the sums that are wanted.
    """
    at, blocks = layers.at, layers.blocks
    operands, vjp = layer_data_at(at)
    old, new, batch_size, pmap_axis_name = update
    scale = num_passes**0.5

    def step(states: Sequence[Any], cotangents: Any, old: ArrayLike) -> list[Any]:
        scaled = jax.tree.map(lambda x: x * jnp.asarray(scale, x.dtype), cotangents)
        found = []
        for block, state, data, uses in zip(blocks, states, vjp(scaled), layers.uses, strict=True):
            given = given_data(data, uses, batch_size)
            own = jax.tree.map(lambda x: x, state)  # A user's block may change it in place.
            rest = (old, new / num_passes, batch_size, pmap_axis_name)
            found.append(block.update_curvature_matrix_estimate(own, given, *rest))
        return found

    done: ArrayLike = 0
    for sweep in sweeps(at, operands, mode, drawn):

        def body(states: Any, k: Any, sweep: Any = sweep, done: Any = done) -> tuple[Any, None]:
            first = (k == 0) & (done == 0)
            return step(states, sweep.cotangents(k), jnp.where(first, old, 1.0)), None

        if sweep.count == 1:
            states, _ = body(states, 0)
        elif sweep.count:
            states, _ = lax.scan(body, list(states), jnp.arange(sweep.count))
        done += sweep.count
    return list(states)


def _over_columns(compute: Any, sweep: Sweep) -> tuple[Any, Any]:
    """Return sums over all passes of terms, and the sums that are kept of each."""
    of_pass = lambda k: compute(sweep.cotangents(k))
    if sweep.count == 1:
        terms, sums = of_pass(0)
        return terms, jax.tree.map(lambda x: x[None], sums)
    shapes, _ = jax.eval_shape(of_pass, 0)
    zeros = jax.tree.map(_jax.filled_like, shapes)

    def step(total: Any, k: Array) -> tuple[Any, Any]:
        terms, sums = of_pass(k)
        return jax.tree.map(jnp.add, total, terms), sums

    return lax.scan(step, zeros, jnp.arange(sweep.count))
