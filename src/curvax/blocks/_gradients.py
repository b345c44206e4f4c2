"""Statistics of gradients of single examples: their squares, or their outer products.

Where a layer is applied once, what is made of the gradients of its examples can be summed at
once, some examples at a time. Where it is applied at several places or in each step of a loop, the
gradient of an example is a sum over these, and the gradients of all examples are held until it is
complete. And where it is not known which position belongs to which example, or places differ in
that, each counts on its own.
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

__all__ = ["Quadratic", "gradient_statistics", "gradient_terms", "remarks_on_examples"]

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
    if _are_held(sites, on_whole):
        name = f"gradients {_form_number(site, sites)}"
        return {name: lambda x, g: site.gradients(x[0], g[0].astype(dtype))}
    if on_whole and site.stack:
        raise NotImplementedError(
            "curvax: the places where a stacked layer is applied differ in their number of "
            "examples. Use a diagonal or a Kronecker-factored block for it."
        )

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
    if _are_held(sites, on_whole):
        numbers = [n for n, site in enumerate(sites) if _form_number(site, sites) == n]
        gradients = [_put_examples(sites[n], statistics[f"gradients {n}"]) for n in numbers]
        return quadratic(_sum(gradients))
    terms = [statistics[f"squares {number}"] for number in range(len(sites))]
    if not on_whole:
        terms = [site.put(each) for site, each in zip(sites, terms, strict=True)]
    return _sum(terms)


def remarks_on_examples(sites: Sequence[LayerSite]) -> tuple[str, ...]:
    """What to know where examples cannot be told apart."""
    if any(site.num_examples is None for site in sites):
        return ("which positions belong to one example is not known: each counts as one",)
    if len({site.num_examples for site in sites}) > 1:
        return ("its places differ in their number of examples: each place counts on its own",)
    return ()


def _are_held(sites: Sequence[LayerSite], on_whole: bool) -> bool:
    """Whether gradients of all examples are held until all places have added to them."""
    if len({site.num_counted for site in sites}) > 1:
        return False
    return len(sites) > 1 or sites[0].repeats > 1 or (on_whole and bool(sites[0].stack))


def _form_number(site: LayerSite, sites: Sequence[LayerSite]) -> int:
    """The number of the first site that uses the parameters in the same form."""
    form = lambda s: (s.stack, s.stacked, s.cuts, s.slice_shapes, s.constants.get("layouts"))
    return next(n for n, other in enumerate(sites) if form(other) == form(site))


def _put_examples(site: LayerSite, gradients: Sequence[Array]) -> list[Array]:
    """Gradients of examples in the shapes of the parameters, with an axis for examples in front."""
    depth = len(site.stack)  # Axes for stacks are in front of that of the examples.
    return jax.vmap(site.put)([jnp.moveaxis(x, depth, 0) for x in gradients])


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
