"""Putting tags where layers were found.

The program is run again with a tag at each site. Inputs and outputs are brought into the order that
all layers of a kind share, tagged, and brought back. A generic parameter is tagged before anything
is computed from it.
"""

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from curvax import _jax
from curvax._types import Array
from curvax.layers.detection.example_axes import ExamplesAt, ExamplesInProgram
from curvax.layers.detection.layers import Layer
from curvax.layers.detection.program import Node
from curvax.layers.detection.replay import Collected, Given, Values
from curvax.layers.detection.sites import Site
from curvax.layers.patterns import Match
from curvax.layers.tags import generic_tag
from curvax.losses.tag import LossTag

__all__ = ["TagSites", "tag_generic"]


@dataclass(frozen=True)
class TagSites:
    """Hooks that put a tag at each site of some layers, and collect what losses are made of."""

    layers: Sequence[Layer]
    examples: ExamplesInProgram

    def keys_at(self, node: Node) -> Collection[Any] | None:
        found = node in self._sites or node in self._matches or node in self._tagged
        return () if found or is_loss(node) else None

    def is_split(self, key: Any, loop: Node) -> bool:
        raise NotImplementedError  # Nothing is given.

    def visit(
        self, node: Node, inputs: Sequence[Any], values: Values, given: Given
    ) -> tuple[list[Any], Collected]:
        del given
        if node in self._tagged:
            at = examples_of_tag(self.examples, node)
            tagged = node.equation.primitive.bind(*inputs, **node.params, tagged_examples=at)
            return (tagged if node.equation.primitive.multiple_results else [tagged]), {}
        outputs = _jax.run_equation(node.equation, inputs)
        if is_loss(node):
            return outputs, {node: outputs}
        if node in self._matches:
            at = self.examples.at_tag(node, node.outputs[0])
            return [_tag_match(self._matches[node], outputs[0], values, at)], {}
        output = outputs[0]
        for layer, site in self._sites[node]:
            output = _tag_part(layer, site, output, values, self.examples.at_site(site))
        return [output, *outputs[1:]], {}

    @functools.cached_property
    def _sites(self) -> dict[Node, list[tuple[Layer, Site]]]:
        found: dict[Node, list[tuple[Layer, Site]]] = {}
        for layer in self.layers:
            for site in layer.sites:
                found.setdefault(site.node, []).append((layer, site))
        return found

    @functools.cached_property
    def _tagged(self) -> set[Node]:
        return {node for layer in self.layers if not layer.is_generic for node in layer.tagged}

    @functools.cached_property
    def _matches(self) -> dict[Node, Match]:
        return {match.nodes[0]: match for layer in self.layers for match in layer.matched}


def is_loss(node: Node) -> bool:
    """Whether a node is the tag of a loss."""
    return isinstance(node.equation.primitive, LossTag)


def tag_generic(layers: Sequence[Layer], params: Sequence[Array]) -> list[Array]:
    """The parameters, those of generic layers tagged."""
    generic = {layer.params[0] for layer in layers if layer.is_generic and not layer.places}
    return [generic_tag.bind(x, x) if n in generic else x for n, x in enumerate(params)]


def examples_of_tag(examples: ExamplesInProgram, node: Node) -> ExamplesAt:
    """The examples at a tag of the user's."""
    axis = 0
    if node.name in ("conv2d_tag", "conv_tag"):
        numbers = node.params.get("dimension_numbers")
        if isinstance(numbers, lax.ConvDimensionNumbers):
            axis = numbers.out_spec[0]
        elif numbers is not None:
            axis = str(numbers[2]).index("N")
    return examples.at_tag(node, node.inputs[0], axis)


def _tag_part(
    layer: Layer, site: Site, output: Array, values: Values, examples: ExamplesAt
) -> Array:
    """The output, with the part of it tagged that the site is about."""
    if site.part is None:
        return _tag(layer, site, output, values, examples)
    axis, start, stop = site.part
    before, own, after = (
        lax.slice_in_dim(output, first, last, axis=axis)
        for first, last in ((0, start), (start, stop), (stop, output.shape[axis]))
    )
    return jnp.concatenate([before, _tag(layer, site, own, values, examples), after], axis)


def _tag(layer: Layer, site: Site, output: Array, values: Values, examples: ExamplesAt) -> Array:
    factors = [jnp.asarray(values[operand]) for operand in site.factors]
    params = [values[view.operand] for view in site.params]
    constants: dict[str, Any] = {**dict(site.constants), "examples": examples}
    layouts = [
        layout.arrangement(view.axes)
        for layout, view in zip(site.layouts, site.params, strict=True)
    ]
    if "kernel" in constants:  # Images stay as they are, and kernels as the convolution has them.
        layouts[0] = constants.pop("kernel")
    if not all(layout.is_trivial for layout in layouts):
        constants["layouts"] = tuple(layouts)
    scale = site.params[0].scale
    if scale is not None:
        factors[0] = factors[0] * jnp.asarray(scale, factors[0].dtype)
        constants["scaled"] = True
    if layer.tag_name != site.tag.name:
        constants["layer"] = layer.tag_name
    if site.tag.name in ("conv2d_tag", "conv_tag"):
        return site.tag.bind(output, *factors, *params, **constants)
    arrangement = site.output_arrangement
    if "column" in constants:  # Indices have an axis for the axes that they index.
        factors = [factors[0][..., constants.pop("column")]]
    if "rows" in constants:
        factors = [_rows(factors[0], *constants.pop("rows"))]
    if site.input_arrangement is None:
        taken = arrangement.apply(_product(factors, output.shape, site.part))
    else:
        taken = site.input_arrangement.apply(factors[0])
    tagged = site.tag.bind(arrangement.apply(output), taken, *params, **constants)
    return arrangement.undo(tagged)


def _rows(indices: Array, number: int, clipped: bool) -> Array:
    """Indices of rows that there are; any that is none is the number of rows."""
    if clipped:
        return jnp.clip(indices, 0, number - 1)
    return jnp.where((indices >= 0) & (indices < number), indices, number)


def _tag_match(match: Match, output: Array, values: Values, examples: ExamplesAt) -> Array:
    pattern = match.pattern
    operands = [values[operand] for operand in (*match.inputs, *match.params)]
    if pattern.in_values_preprocessor is not None:
        operands = list(pattern.in_values_preprocessor(operands))
    constants = pattern.parameters_extractor_func([node.equation for node in match.nodes])
    constants = {**constants, "tagged_examples": examples}
    return pattern.tag_primitive.bind(output, *operands, **constants)


def _product(
    factors: Sequence[Array], shape: Sequence[int], part: tuple[int, int, int] | None
) -> Array:
    """The product of all factors, or that part of it, in the shape."""
    if part is not None:
        axis, start, stop = part
        factors = [
            x if x.ndim == 0 or x.shape[axis] == 1 else lax.slice_in_dim(x, start, stop, axis=axis)
            for x in factors
        ]
    product = jnp.broadcast_to(factors[0], shape)
    for factor in factors[1:]:
        product = product * jnp.broadcast_to(factor, shape).astype(product.dtype)
    return product
