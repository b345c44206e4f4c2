"""Base classes of blocks that are estimated from per-example gradients, or from that of a batch.

If a layer has one use per example, squares or outer products of per-example gradients are summed
at that use, in chunks of examples. If it has several uses, or is used in several steps of a loop,
the gradient of an example is a sum over these, and the gradients of all examples are held until
their sums are complete. Steps of a loop over examples are not summed. Uses with different examples
(chunks of a batch, and the remainder) form separate groups. Where it is not known which positions
belong to one example, each position counts as an example.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from curvax._types import Array, PyTree
from curvax.curvature.blocks.base import (
    BlockState,
    CurvatureBlock,
    Statistics,
    TagEquation,
    wide,
)
from curvax.curvature.blocks.settings import get_max_parallel_elements
from curvax.layers.tracing.statistics import Statistic, Sums
from curvax.layers.use import LayerUse, ScaleAndShiftUse, same_examples

# Statistics of per-example gradients: their squares, or their outer products.

Quadratic = Callable[[list[Array]], PyTree]
"""Sums a quadratic function of per-example gradients, (examples, *shape) for each parameter."""


@dataclass(frozen=True, order=True)
class GradientsAt:
    """The key of a statistic of gradients: the index of the first use that has it."""

    use: int


def gradient_statistics(
    use: LayerUse,
    uses: Sequence[LayerUse],
    quadratic: Quadratic,
    in_param_shapes: bool,
    dtype: jnp.dtype,
    max_elements: int | None = None,
) -> Statistics:
    """Return what to sum over a use.

    Arguments:
        use: The use.
        uses: All uses of the layer.
        quadratic: A quadratic function of per-example gradients.
        in_param_shapes: Whether `quadratic` takes gradients in the shapes of the function's
            parameters. Otherwise it takes those of the parameters as used: sliced and rearranged.
        dtype: The dtype to compute in.
        max_elements: Maximum number of elements of per-example gradients to hold at once; None for
            `get_max_parallel_elements()`.
    """
    (group,) = [group for group in _groups(uses) if use in group]
    if _is_held(group, in_param_shapes):
        key = GradientsAt(uses.index(_first_of_form(use, group)))
        compute = lambda x, g: use.gradients(x[0], g[0].astype(dtype))
        reduce = tuple(not over_examples for over_examples in use.example_loops)
        return {key: Statistic(compute, reduce=reduce)}

    def summed(inputs: tuple[Array, ...], cotangents: tuple[Array, ...]) -> PyTree:
        (x,), (g,) = inputs, cotangents
        put = jax.vmap(use.put) if in_param_shapes else lambda gradients: gradients
        compute = lambda x, g: quadratic(put(use.gradients_by_example(x, g)))
        return _in_chunks(use, compute, x, g.astype(dtype), max_elements)

    return {GradientsAt(uses.index(use)): Statistic(summed)}


def gradient_terms(
    sums: Sums, uses: Sequence[LayerUse], quadratic: Quadratic, in_param_shapes: bool
) -> PyTree:
    """Return the sum of the quadratic over all uses and examples, from the sums of each use.

    Arguments:
        sums: The sums of the statistics that `gradient_statistics` returns.
        uses: All uses of the layer.
        quadratic: A quadratic function of per-example gradients. If it is not `in_param_shapes`, it
            returns one array for each parameter.
        in_param_shapes: Whether `quadratic` takes gradients in the shapes of the function's
            parameters.
    """
    found = lambda use: sums.of_cotangents[GradientsAt(uses.index(use))]
    terms = []
    for group in _groups(uses):
        if _is_held(group, in_param_shapes):
            firsts = [use for use in group if _first_of_form(use, group) is use]
            terms.append(quadratic(_sum([_put_examples(use, found(use)) for use in firsts])))
        else:
            (use,) = group
            terms.append(found(use) if in_param_shapes else use.put(found(use)))
    return _sum(terms)


def why_inexact(uses: Sequence[LayerUse]) -> str:
    """Return why per-example gradients are not known; "" if they are."""
    if uses[0].uncovered:
        return uses[0].remark_on_coverage
    groups = _known_groups(uses)
    if isinstance(groups, str):
        return groups
    return next((use.examples.remark for use in uses if use.examples.remark), "")


def remarks_on_examples(uses: Sequence[LayerUse]) -> tuple[str, ...]:
    """Return how per-example gradients are approximated, if they are not known."""
    why = why_inexact(uses)
    if not why:
        return ()
    if uses[0].uncovered:
        return (why,)
    if any(use.examples.unknown for use in uses):
        return (f"{why}: each position counts as a separate example",)
    if isinstance(_known_groups(uses), str):
        return (f"{why}: each use counts separately",)
    return (f"{why}: gradients of different ones are taken to be independent",)


def _known_groups(uses: Sequence[LayerUse]) -> list[list[LayerUse]] | str:
    """Group the uses that have the same examples; return a reason if these are not known."""
    pairs = [zip(use.stacked, use.example_loops, strict=True) for use in uses]
    if any(is_stacked and over_examples for each in pairs for is_stacked, over_examples in each):
        return "examples unknown: a loop takes other parameters for each of them"
    groups = same_examples([use.examples for use in uses])
    if isinstance(groups, str):
        return groups
    return [[uses[index] for index in group] for group in groups.values()]


def _groups(uses: Sequence[LayerUse]) -> list[list[LayerUse]]:
    """Group the uses that have the same examples; each use by itself if these are not known."""
    groups = _known_groups(uses)
    return [[use] for use in uses] if isinstance(groups, str) else groups


def _is_held(group: Sequence[LayerUse], in_param_shapes: bool) -> bool:
    """Return whether per-example gradients are held until all uses and steps have added to them."""
    use = group[0]
    loops = zip(use.lengths, use.stacked, use.example_loops, strict=True)
    has_steps = any(
        length > 1 and not is_stacked and not over_examples
        for length, is_stacked, over_examples in loops
    )
    return len(group) > 1 or has_steps or (in_param_shapes and bool(use.stack))


def _first_of_form(use: LayerUse, group: Sequence[LayerUse]) -> LayerUse:
    """Return the first use of the group that has the parameters in the same form."""
    form = lambda s: (
        (s.stack, s.stacked, s.cuts, s.slice_shapes, [p.arrangement for p in s.params]),
        (s.lengths, s.example_loops, s.num_examples),
    )
    return next(other for other in group if form(other) == form(use))


def _put_examples(use: LayerUse, gradients: Sequence[Array]) -> list[Array]:
    """Return per-example gradients in the shapes of the parameters, with a leading example axis."""
    # There is a leading axis for each loop that takes slices of parameters or is over examples.
    loops = zip(use.stacked, use.example_loops, strict=True)
    axes_are_examples = [over for is_stacked, over in loops if is_stacked or over]
    example_axes = [axis for axis, is_examples in enumerate(axes_are_examples) if is_examples]

    def with_leading_examples(x: Array) -> Array:
        axes = (*example_axes, len(axes_are_examples))
        x = jnp.moveaxis(x, axes, range(len(axes)))
        return x.reshape(-1, *x.shape[len(axes) :])

    return jax.vmap(use.put)([with_leading_examples(x) for x in gradients])


def _sum(terms: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *each: sum(each[1:], start=each[0]), *terms)


def _in_chunks(
    use: LayerUse,
    compute: Callable[[Array, Array], PyTree],
    x: Array,
    g: Array,
    max_elements: int | None,
) -> PyTree:
    """Sum over examples, in chunks of at most `max_elements` elements of gradients."""
    xs, gs = use.by_example(x, False), use.by_example(g, True)
    num_examples = xs.shape[0]
    dim = max(sum(map(math.prod, use.slice_shapes)), 1)
    size = min(num_examples, max(1, (max_elements or get_max_parallel_elements()) // dim))
    full = num_examples // size
    parts = [y[: full * size].reshape(full, size, *y.shape[1:]) for y in (xs, gs)]
    if full == 1:
        total = compute(parts[0][0], parts[1][0])
    else:
        zeros = jax.tree.map(
            lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(compute, parts[0][0], parts[1][0])
        )
        step = lambda total, part: (jax.tree.map(jnp.add, total, compute(*part)), None)
        total, _ = lax.scan(step, zeros, tuple(parts))
    if full * size < num_examples:
        rest = compute(xs[full * size :], gs[full * size :])
        total = jax.tree.map(jnp.add, total, rest)
    return total


class ExampleGradientBlock(CurvatureBlock):
    """A block that is estimated from per-example gradients.

    Arguments:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator. Do not construct
            blocks yourself: put the class, or a `functools.partial` of it, into
            `layer_tag_to_block_ctor`.
        name: Name of the block, for error messages. Passed by the estimator.
        allow_approximation: Whether to approximate per-example gradients where they are not known,
            instead of raising an error. If it is not known which positions (pixels or time steps)
            belong to one example, each position counts as one. Examples that interact are taken to
            be independent. The
            `remarks` say so.
    """

    def __init__(
        self, layer_tag_eq: TagEquation, name: str, *, allow_approximation: bool = False
    ) -> None:
        super().__init__(layer_tag_eq, name)
        self._allows_approximation = allow_approximation
        if not self.has_own_update:
            self.check_examples(self._equation.uses)

    @property
    def remarks(self) -> tuple[str, ...]:
        return remarks_on_examples(self._equation.uses)

    def check_examples(self, uses: Sequence[LayerUse]) -> None:
        """Raise an error if per-example gradients are not known and may not be approximated."""
        why = why_inexact(uses)
        if not why or not self.needs_examples(uses) or self._allows_approximation:
            return
        kind = self._equation.tag_name
        other = _NEEDS_NO_EXAMPLES.get(kind, "NaiveDiagonal")
        raise ValueError(
            f"curvax.{type(self).__name__} of {self.name or 'the parameter'}: {why}. This block "
            f"needs per-example gradients, which are not known here. Use curvax.{other}, which "
            f"does not need them, or functools.partial(curvax.{type(self).__name__}, "
            f"allow_approximation=True), which approximates them and is not exact."
        )


_NEEDS_NO_EXAMPLES = {
    "dense_tag": "DenseTwoKroneckerFactored",
    "conv2d_tag": "Conv2DTwoKroneckerFactored",
    "conv_tag": "ConvTwoKroneckerFactored",
    "embedding_tag": "EmbeddingTwoKroneckerFactored",
}
"""Blocks that do not need per-example gradients, by tag."""


class ChunkedExampleGradientBlock(ExampleGradientBlock):
    """A block that computes per-example gradients in chunks of a given size.

    Arguments:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator. Do not construct
            blocks yourself: put the class, or a `functools.partial` of it, into
            `layer_tag_to_block_ctor`.
        name: Name of the block, for error messages. Passed by the estimator.
        max_elements_for_vmap: Maximum number of elements of per-example gradients to hold at once;
            None for `get_max_parallel_elements()`, by default 2**23.
        allow_approximation: Whether to approximate per-example gradients where they are not known,
            instead of raising an error.
    """

    def __init__(
        self,
        layer_tag_eq: TagEquation,
        name: str,
        max_elements_for_vmap: int | None = None,
        *,
        allow_approximation: bool = False,
    ) -> None:
        super().__init__(layer_tag_eq, name, allow_approximation=allow_approximation)
        self.max_elements = max_elements_for_vmap

    @property
    def max_elements_for_vmap(self) -> int | None:
        """Maximum number of elements of per-example gradients to hold at once, or None."""
        return self.max_elements


class ScaleAndShiftBlock(CurvatureBlock):
    """A block of a scale-and-shift layer."""

    @property
    def has_scale(self) -> bool:
        """Whether the layer has a scale."""
        return any(isinstance(use, ScaleAndShiftUse) and use.has_scale for use in self.uses)

    @property
    def has_shift(self) -> bool:
        """Whether the layer has a shift."""
        return any(isinstance(use, ScaleAndShiftUse) and use.has_shift for use in self.uses)


class BatchGradientBlock(CurvatureBlock):
    """A block that is estimated from the gradient of the batch, without per-example gradients."""

    sums_batch = True

    def needs_examples(self, uses: Sequence[LayerUse]) -> bool:
        del uses
        return False

    @property
    def remarks(self) -> tuple[str, ...]:
        return ("only the gradient of all examples together is known: estimates are noisy",)

    def statistics(
        self, use: LayerUse, uses: Sequence[LayerUse], state: BlockState | None
    ) -> Statistics:
        del state
        if not use.is_known:  # The backward pass returns the gradient itself.
            return {}
        return {GradientsAt(uses.index(use)): _batch_gradient(use, self.dtype)}

    def total_gradient(self, sums: Sums, uses: Sequence[LayerUse]) -> list[Array]:
        """Return the gradient of the batch over all uses, in the shapes of the parameters.

        `sums.of_cotangents` is a mapping with the sums of each use, or the gradient itself.
        """
        found = sums.of_cotangents
        if not isinstance(found, dict):
            return [x.astype(wide(x.dtype)) for x in found]
        each = [use.put(found[GradientsAt(index)]) for index, use in enumerate(uses)]
        return [functools.reduce(jnp.add, xs) for xs in zip(*each, strict=True)]


def _batch_gradient(use: LayerUse, dtype: jnp.dtype) -> Statistic:
    """Return the statistic that sums the gradient of the batch over a use."""
    if use.kind == "generic_tag":
        return Statistic(lambda _, g: [g[0].astype(dtype)], "cotangents")

    def summed(inputs: tuple[Array, ...], cotangents: tuple[Array, ...]) -> list[Array]:
        gradients = use.gradients(inputs[0], cotangents[0].astype(dtype))
        return [jnp.sum(x, 0) for x in gradients]

    return Statistic(summed)
