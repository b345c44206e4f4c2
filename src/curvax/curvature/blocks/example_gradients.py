"""Base classes of blocks that are estimated from per-example gradients, or from that of a batch.

Where a layer is applied once to an example, squares or outer products of the gradients of its
examples can be summed at once, some examples at a time. Where it is applied to an example at
several places or in several steps of a loop, the gradient of the example is a sum over these, and
the gradients of all examples are held until it is complete. The steps of a loop over examples are
kept apart. Places that are about other examples (chunks of a batch, and what is left over) form
groups of their own. Where it is not known which position belongs to which example, each counts as
one.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from curvax._types import Array, PyTree
from curvax.curvature.blocks.base import CurvatureBlock, Statistics, wide
from curvax.curvature.blocks.settings import get_max_parallel_elements
from curvax.layers.tracing.statistics import Statistic, Sums
from curvax.layers.use import LayerUse, ScaleAndShiftUse, same_examples

# Statistics of per-example gradients: their squares, or their outer products.

Quadratic = Callable[[list[Array]], PyTree]
"""Sums over examples of something quadratic in gradients: (examples, *shape) for each parameter."""


@dataclass(frozen=True, order=True)
class GradientsAt:
    """The key of a statistic of gradients: the index of the first use that has it."""

    use: int


def gradient_statistics(
    use: LayerUse,
    uses: Sequence[LayerUse],
    quadratic: Quadratic,
    on_whole: bool,
    dtype: jnp.dtype,
    max_elements: int | None = None,
) -> Statistics:
    """What to sum at a use.

    `on_whole` says that the quadratic is of gradients as the function has the parameters.
    """
    (group,) = [group for group in _groups(uses) if use in group]
    if _is_held(group, on_whole):
        key = GradientsAt(uses.index(_first_of_form(use, group)))
        compute = lambda x, g: use.gradients(x[0], g[0].astype(dtype))
        return {key: Statistic(compute, reduce=tuple(not own for own in use.example_loops))}

    def summed(inputs: tuple[Array, ...], cotangents: tuple[Array, ...]) -> PyTree:
        (x,), (g,) = inputs, cotangents
        whole = jax.vmap(use.put) if on_whole else lambda gradients: gradients
        compute = lambda x, g: quadratic(whole(use.gradients_by_example(x, g)))
        return _in_chunks(use, compute, x, g.astype(dtype), max_elements)

    return {GradientsAt(uses.index(use)): Statistic(summed)}


def gradient_terms(
    sums: Sums, uses: Sequence[LayerUse], quadratic: Quadratic, on_whole: bool
) -> PyTree:
    """Sums over all uses and examples.

    If the quadratic is not `on_whole`, it returns one array for each parameter.
    """
    found = lambda use: sums.of_cotangents[GradientsAt(uses.index(use))]
    terms = []
    for group in _groups(uses):
        if _is_held(group, on_whole):
            firsts = [use for use in group if _first_of_form(use, group) is use]
            terms.append(quadratic(_sum([_put_examples(use, found(use)) for use in firsts])))
        else:
            (use,) = group
            terms.append(found(use) if on_whole else use.put(found(use)))
    return _sum(terms)


def why_inexact(uses: Sequence[LayerUse]) -> str:
    """Why the gradients of single examples are not known; "" if they are."""
    if uses[0].uncovered:
        return uses[0].remark_on_coverage
    groups = _known_groups(uses)
    if isinstance(groups, str):
        return groups
    return next((use.examples.remark for use in uses if use.examples.remark), "")


def remarks_on_examples(uses: Sequence[LayerUse]) -> tuple[str, ...]:
    """What to know where gradients of single examples are not known: what is done instead."""
    why = why_inexact(uses)
    if not why:
        return ()
    if uses[0].uncovered:
        return (why,)
    if any(use.examples.unknown for use in uses):
        return (f"{why}: each position counts as an example of its own",)
    if isinstance(_known_groups(uses), str):
        return (f"{why}: each place counts on its own",)
    return (f"{why}: gradients of different ones are taken to be independent",)


def _known_groups(uses: Sequence[LayerUse]) -> list[list[LayerUse]] | str:
    """The uses that are about the same examples, together; or why that is not known."""
    pairs = [zip(use.stacked, use.example_loops, strict=True) for use in uses]
    if any(has and own for each in pairs for has, own in each):
        return "examples unknown: a loop takes other parameters for each of them"
    groups = same_examples([use.examples for use in uses])
    if isinstance(groups, str):
        return groups
    return [[uses[number] for number in group] for group in groups.values()]


def _groups(uses: Sequence[LayerUse]) -> list[list[LayerUse]]:
    """The uses that are about the same examples, together; all apart if that is not known."""
    groups = _known_groups(uses)
    return [[use] for use in uses] if isinstance(groups, str) else groups


def _is_held(group: Sequence[LayerUse], on_whole: bool) -> bool:
    """Whether gradients of all examples are held until all places have added to them."""
    use = group[0]
    loops = zip(use.lengths, use.stacked, use.example_loops, strict=True)
    has_steps = any(n > 1 and not has and not own for n, has, own in loops)
    return len(group) > 1 or has_steps or (on_whole and bool(use.stack))


def _first_of_form(use: LayerUse, group: Sequence[LayerUse]) -> LayerUse:
    """The first use that uses the parameters in the same form."""
    form = lambda s: (
        (s.stack, s.stacked, s.cuts, s.slice_shapes, [p.arrangement for p in s.params]),
        (s.lengths, s.example_loops, s.num_examples),
    )
    return next(other for other in group if form(other) == form(use))


def _put_examples(use: LayerUse, gradients: Sequence[Array]) -> list[Array]:
    """Gradients of examples in the shapes of the parameters, with an axis for examples in front."""
    # In front are axes for the loops that take slices of parameters, or are over examples.
    loops = [own for has, own in zip(use.stacked, use.example_loops, strict=True) if has or own]
    over_examples = [axis for axis, own in enumerate(loops) if own]

    def with_examples_in_front(x: Array) -> Array:
        axes = (*over_examples, len(loops))
        x = jnp.moveaxis(x, axes, range(len(axes)))
        return x.reshape(-1, *x.shape[len(axes) :])

    return jax.vmap(use.put)([with_examples_in_front(x) for x in gradients])


def _sum(terms: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *each: sum(each[1:], start=each[0]), *terms)


def _in_chunks(
    use: LayerUse,
    compute: Callable[[Array, Array], PyTree],
    x: Array,
    g: Array,
    max_elements: int | None,
) -> PyTree:
    """The sum over examples, as many at a time as may be held."""
    xs, gs = use.by_example(x, False), use.by_example(g, True)
    number = xs.shape[0]
    dim = max(sum(map(math.prod, use.slice_shapes)), 1)
    size = min(number, max(1, (max_elements or get_max_parallel_elements()) // dim))
    full = number // size
    parts = [y[: full * size].reshape(full, size, *y.shape[1:]) for y in (xs, gs)]
    if full == 1:
        total = compute(parts[0][0], parts[1][0])
    else:
        zeros = jax.tree.map(
            lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(compute, parts[0][0], parts[1][0])
        )
        step = lambda total, part: (jax.tree.map(jnp.add, total, compute(*part)), None)
        total, _ = lax.scan(step, zeros, tuple(parts))
    if full * size < number:
        rest = compute(xs[full * size :], gs[full * size :])
        total = jax.tree.map(jnp.add, total, rest)
    return total


class ExampleGradientBlock(CurvatureBlock):
    """A block that is made of gradients of single examples, and refuses to be made of others.

    Arguments:
        layer_tag_eq: the equation of the layer's tag.
        name: what the block is called.
        allow_approximation: whether to make do where these are not known: each position counts as
            an example if it is not known which positions belong to one, and examples that interact
            are taken to be independent. The `remarks` then say so. Otherwise that is an error.
    """

    def __init__(self, layer_tag_eq: Any, name: str, *, allow_approximation: bool = False) -> None:
        super().__init__(layer_tag_eq, name)
        self._allows_approximation = allow_approximation
        if not self.has_own_update:
            self.check_examples(self._equation.uses)

    @property
    def remarks(self) -> tuple[str, ...]:
        return remarks_on_examples(self._equation.uses)

    def check_examples(self, uses: Sequence[LayerUse]) -> None:
        """Refuse places at which the gradients of single examples are not known."""
        why = why_inexact(uses)
        if not why or not self.needs_examples(uses) or self._allows_approximation:
            return
        kind = self._equation.tag_name
        other = _NEEDS_NO_EXAMPLES.get(kind, "NaiveDiagonal")
        raise ValueError(
            f"curvax.{type(self).__name__} of {self.name or 'the parameter'}: {why}. This block "
            f"needs per-example gradients, which are not known here. Use curvax.{other}, which "
            f"does without them, or functools.partial(curvax.{type(self).__name__}, "
            f"allow_approximation=True), which makes do and is not exact."
        )


_NEEDS_NO_EXAMPLES = {
    "dense_tag": "DenseTwoKroneckerFactored",
    "conv2d_tag": "Conv2DTwoKroneckerFactored",
    "conv_tag": "ConvTwoKroneckerFactored",
    "embedding_tag": "EmbeddingTwoKroneckerFactored",
}
"""Blocks that do not have to know which examples there are, by tag."""


class ChunkedExampleGradientBlock(ExampleGradientBlock):
    """A block that computes the gradients of some examples at a time."""

    def __init__(
        self,
        layer_tag_eq: Any,
        name: str,
        max_elements_for_vmap: int | None = None,
        *,
        allow_approximation: bool = False,
    ) -> None:
        super().__init__(layer_tag_eq, name, allow_approximation=allow_approximation)
        self.max_elements = max_elements_for_vmap

    @property
    def max_elements_for_vmap(self) -> int | None:
        """How many elements of gradients of examples to hold at once."""
        return self.max_elements


class ScaleAndShiftBlock(CurvatureBlock):
    """A block of a layer that scales and shifts."""

    @property
    def has_scale(self) -> bool:
        """Whether the layer has a scale."""
        return any(isinstance(use, ScaleAndShiftUse) and use.has_scale for use in self.uses)

    @property
    def has_shift(self) -> bool:
        """Whether the layer has a shift."""
        return any(isinstance(use, ScaleAndShiftUse) and use.has_shift for use in self.uses)


class BatchGradientBlock(CurvatureBlock):
    """A block that is estimated from the gradient of the whole batch alone."""

    sums_batch = True

    def needs_examples(self, uses: Sequence[LayerUse]) -> bool:
        del uses
        return False

    @property
    def remarks(self) -> tuple[str, ...]:
        return ("only the gradient of all examples together is known: estimates are noisy",)

    def statistics(self, use: LayerUse, uses: Sequence[LayerUse], state: Any) -> Statistics:
        del state
        if not use.is_known:  # The pass itself has the gradient.
            return {}
        return {GradientsAt(uses.index(use)): _batch_gradient(use, self.dtype)}

    def total_gradient(self, sums: Sums, uses: Sequence[LayerUse]) -> list[Array]:
        """Return the gradient of all examples and uses, in the shapes of the parameters.

        The sums are those of each use, or the gradient itself.
        """
        found = sums.of_cotangents
        if not isinstance(found, dict):
            return [x.astype(wide(x.dtype)) for x in found]
        each = [use.put(found[GradientsAt(number)]) for number, use in enumerate(uses)]
        return [functools.reduce(jnp.add, xs) for xs in zip(*each, strict=True)]


def _batch_gradient(use: LayerUse, dtype: jnp.dtype) -> Statistic:
    """The gradient of all examples at a use, with the parameters as the use has them."""
    if use.kind == "generic_tag":
        return Statistic(lambda _, g: [g[0].astype(dtype)], "cotangents")

    def summed(inputs: tuple[Array, ...], cotangents: tuple[Array, ...]) -> list[Array]:
        gradients = use.gradients(inputs[0], cotangents[0].astype(dtype))
        return [jnp.sum(x, 0) for x in gradients]

    return Statistic(summed)
