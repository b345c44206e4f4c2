"""Statistics of gradients of single examples: their squares, or their outer products.

Where a layer is applied once to an example, what is made of the gradients of its examples can be
summed at once, some examples at a time. Where it is applied to an example at several places or in
several steps of a loop, the gradient of the example is a sum over these, and the gradients of all
examples are held until it is complete. The steps of a loop over examples are kept apart.

Places that are about other examples (chunks of a batch, and what is left over) form groups of their
own. Where it is not known which position belongs to which example, each counts as one.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from curvax._types import Array, PyTree
from curvax.blocks._block import Statistics
from curvax.blocks._layer import LayerSite
from curvax.blocks._settings import get_max_parallel_elements
from curvax.graph import EachStep, same_examples

__all__ = [
    "Quadratic",
    "gradient_statistics",
    "gradient_terms",
    "remarks_on_examples",
    "why_inexact",
]

Quadratic = Callable[[list[Array]], PyTree]
"""Sums over examples of something quadratic in gradients: (examples, *shape) for each parameter."""


def gradient_statistics(
    site: LayerSite,
    sites: Sequence[LayerSite],
    quadratic: Quadratic,
    on_whole: bool,
    dtype: jnp.dtype,
    max_elements: int | None = None,
) -> Statistics:
    """What to sum at a site.

    `on_whole` says that the quadratic is of gradients as the function has the parameters.
    """
    (group,) = [group for group in _groups(sites) if site in group]
    if _is_held(group, on_whole):
        number = sites.index(_first_of_form(site, group))
        compute = lambda x, g: site.gradients(x[0], g[0].astype(dtype))
        return {f"gradients {number}": EachStep(compute, site.example_loops)}

    def summed(inputs: tuple[Array, ...], cotangents: tuple[Array, ...]) -> PyTree:
        (x,), (g,) = inputs, cotangents
        whole = jax.vmap(site.put) if on_whole else lambda gradients: gradients
        compute = lambda x, g: quadratic(whole(site.gradients_by_example(x, g)))
        return _in_chunks(site, compute, x, g.astype(dtype), max_elements)

    return {f"squares {sites.index(site)}": summed}


def gradient_terms(
    statistics: Mapping[str, PyTree],
    sites: Sequence[LayerSite],
    quadratic: Quadratic,
    on_whole: bool,
) -> PyTree:
    """Sums over all sites and examples.

    If the quadratic is not `on_whole`, it returns one array for each parameter.
    """
    terms = []
    for group in _groups(sites):
        if _is_held(group, on_whole):
            firsts = [site for site in group if _first_of_form(site, group) is site]
            named = [(site, statistics[f"gradients {sites.index(site)}"]) for site in firsts]
            terms.append(quadratic(_sum([_put_examples(site, found) for site, found in named])))
            continue
        (site,) = group
        found = statistics[f"squares {sites.index(site)}"]
        terms.append(found if on_whole else site.put(found))
    return _sum(terms)


def why_inexact(sites: Sequence[LayerSite]) -> str:
    """Why the gradients of single examples are not known; "" if they are."""
    groups = _known_groups(sites)
    if isinstance(groups, str):
        return groups
    return next((site.examples.remark for site in sites if site.examples.remark), "")


def remarks_on_examples(sites: Sequence[LayerSite]) -> tuple[str, ...]:
    """What to know where gradients of single examples are not known: what is done instead."""
    why = why_inexact(sites)
    if not why:
        return ()
    if any(site.examples.unknown for site in sites):
        return (f"{why}: each position counts as an example of its own",)
    if isinstance(_known_groups(sites), str):
        return (f"{why}: each place counts on its own",)
    return (f"{why}: gradients of different ones are taken to be independent",)


def _known_groups(sites: Sequence[LayerSite]) -> list[list[LayerSite]] | str:
    """The sites that are about the same examples, together; or why that is not known."""
    pairs = [zip(site.stacked, site.example_loops, strict=True) for site in sites]
    if any(has and own for each in pairs for has, own in each):
        return "examples unknown: a loop takes other parameters for each of them"
    groups = same_examples([site.examples for site in sites])
    if isinstance(groups, str):
        return groups
    return [[sites[number] for number in group] for group in groups.values()]


def _groups(sites: Sequence[LayerSite]) -> list[list[LayerSite]]:
    """The sites that are about the same examples, together; all apart if that is not known."""
    groups = _known_groups(sites)
    return [[site] for site in sites] if isinstance(groups, str) else groups


def _is_held(group: Sequence[LayerSite], on_whole: bool) -> bool:
    """Whether gradients of all examples are held until all places have added to them."""
    site = group[0]
    loops = zip(site.lengths, site.stacked, site.example_loops, strict=True)
    has_steps = any(n > 1 and not has and not own for n, has, own in loops)
    return len(group) > 1 or has_steps or (on_whole and bool(site.stack))


def _first_of_form(site: LayerSite, group: Sequence[LayerSite]) -> LayerSite:
    """The first site that uses the parameters in the same form."""
    form = lambda s: (
        (s.stack, s.stacked, s.cuts, s.slice_shapes, s.constants.get("layouts")),
        (s.lengths, s.example_loops, s.num_examples),
    )
    return next(other for other in group if form(other) == form(site))


def _put_examples(site: LayerSite, gradients: Sequence[Array]) -> list[Array]:
    """Gradients of examples in the shapes of the parameters, with an axis for examples in front."""
    # In front are axes for the loops that take slices of parameters, or are over examples.
    loops = [own for has, own in zip(site.stacked, site.example_loops, strict=True) if has or own]
    over_examples = [axis for axis, own in enumerate(loops) if own]

    def with_examples_in_front(x: Array) -> Array:
        axes = (*over_examples, len(loops))
        x = jnp.moveaxis(x, axes, range(len(axes)))
        return x.reshape(-1, *x.shape[len(axes) :])

    return jax.vmap(site.put)([with_examples_in_front(x) for x in gradients])


def _sum(terms: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *each: sum(each[1:], start=each[0]), *terms)


def _in_chunks(
    site: LayerSite,
    compute: Callable[[Array, Array], PyTree],
    x: Array,
    g: Array,
    max_elements: int | None,
) -> PyTree:
    """The sum over examples, as many at a time as may be held."""
    xs, gs = site.by_example(x, False), site.by_example(g, True)
    number = xs.shape[0]
    dim = max(sum(map(math.prod, site.slice_shapes)), 1)
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
