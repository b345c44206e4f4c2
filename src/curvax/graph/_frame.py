"""Where things stand in one body of a program, and what an operation with a parameter is there."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp

from curvax import _compat
from curvax.graph._concatenated import ConcatView, Parts
from curvax.graph._examples import Examples
from curvax.graph._found import Found, SiteView, Use
from curvax.graph._one_hot import as_lookup
from curvax.graph._program import Constant, Node, Operand, Variable
from curvax.graph._sites import (
    ParamView,
    Site,
    conv_site,
    dense_site,
    elementwise_site,
    embedding_site,
    join,
    scaled_further,
)

__all__ = ["NO_EXAMPLES", "OPERATIONS", "Frame", "View"]

View = ParamView | SiteView | ConcatView | Parts


@dataclass
class Frame:
    """What is known so far of the variables of a body, and of all parameters."""

    found: Found
    views: dict[Variable, View]
    data: set[Operand]
    made_by: dict[Operand, Node] = field(default_factory=dict)
    numbers: dict[Operand, Any] = field(default_factory=dict)
    """Numbers, and whole numbers in arrays, that are computed from nothing but constants."""
    examples: Examples = field(default_factory=Examples)
    for_each_example: bool = False
    """Whether all of it is in a loop over examples."""
    num_steps: int = 1
    """How often all of it is done, by the loops around it."""

    def view(self, operand: Operand) -> View | None:
        return self.views.get(operand) if isinstance(operand, Variable) else None

    def compute(self, node: Node) -> None:
        """Compute what an operation puts out, if that is small and depends on constants only."""
        values = [self.number(operand) for operand in node.inputs]
        if any(value is None for value in values) or not all(map(_is_small, node.outputs)):
            return
        outputs = _compat.run_now(node.equation, values)
        if outputs is not None:
            self.numbers.update(zip(node.outputs, outputs, strict=True))

    def number(self, operand: Operand) -> Any:
        """The value of an operand, if that is known and small."""
        if isinstance(operand, Constant):
            known = not operand.shape or _is_whole(jnp.result_type(operand.value))
            return operand.value if known and math.prod(operand.shape) <= _SMALL else None
        return self.numbers.get(operand)

    def is_known(self, operand: Operand) -> bool:
        """Whether a value is the same for all examples, and that is known."""
        return self.examples.is_known and operand not in self.data

    def differs(self, site: Site) -> bool:
        """Whether what a site puts out differs from example to example, as far as is known.

        Either there is an axis for examples, or all of it is in a loop over these, or the site is
        at so many places that depend on examples that it must be: the edges of a graph, say. Where
        nothing is known, it is to be at as many places as there are examples.
        """
        if self.examples.axes.get(site.output) or site.output in self.examples.followed:
            return True
        places = math.prod(site.output.shape[axis] for axis in site.positions)
        if not self.examples.is_known:
            return places * self.num_steps >= self.examples.batch_size
        many = self.for_each_example or places >= self.examples.batch_size
        return many and site.output in self.data

    def dense(self, node: Node, view: ParamView, number: int) -> Site | str:
        site = dense_site(node, view, is_left=number == 0)
        if isinstance(site, str) or view.scale is not None:
            return site
        return as_lookup(site, self.made_by)

    def gather(self, node: Node, view: ParamView, number: int) -> Site | str:
        if number != 0:
            return "it is used as an index"
        if view.scale is not None:
            return "it is multiplied with a constant before it is indexed"
        return embedding_site(node, view)

    def scale(self, node: Node, view: ParamView, number: int) -> Site | str:
        other = node.inputs[1 - number]
        if not self._meets_data(node, view, other):
            return NO_EXAMPLES
        return elementwise_site(node, self._spread(node, view), other, "scale")

    def scale_further(self, node: Node, views: Sequence[View | None]) -> None:
        for number, view in enumerate(views):
            if isinstance(view, SiteView) and view.only and _is_scale(view.site):
                further = scaled_further(view.site, node, view.axes, node.inputs[1 - number])
                if further is not None:
                    self.found.replace_site(view.site, further)
                    only = self.found.readers[further.output] == 1
                    self.views[further.output] = SiteView(further, further.axes, only)
                return

    def conv(self, node: Node, view: ParamView, number: int) -> Site | str:
        return conv_site(node, view) if number == 1 else "it is convolved with a kernel"

    def shift(self, node: Node, view: ParamView, number: int) -> Use | str:
        other = node.inputs[1 - number]
        if not self._meets_data(node, view, other):
            return NO_EXAMPLES
        if view.scale is not None:
            return "it is multiplied with a constant before it is added"
        spread = self._spread(node, view)
        alone = elementwise_site(node, spread, other, "shift")
        if isinstance(alone, str):
            return alone
        before = self.view(other)
        if isinstance(before, SiteView) and before.only and _takes_bias(before.site):
            axes = before.axes
            if axes.shape == node.outputs[0].shape:
                joined = join(before.site, node, axes, spread)
                if joined is not None:
                    self.found.replace_site(before.site, joined)
                    return Use(node, joined, alone=alone)
        return Use(node, alone)

    def _meets_data(self, node: Node, view: ParamView, other: Operand) -> bool:
        repeated = any(atom.origin is None for atom in view.axes.atoms)
        spread = repeated or view.axes.shape != node.outputs[0].shape
        return self.examples.is_known or other in self.data or spread

    def _spread(self, node: Node, view: ParamView) -> ParamView:
        """The parameter broadcast to the result: an axis of size one stands for a longer one."""
        shape = node.outputs[0].shape
        if view.axes.shape == shape:
            return view
        # A number has no axes to begin with; anything else has as many as the result.
        axes = range(len(shape)) if view.axes.dims else ()
        return replace(view, axes=view.axes.broadcast(shape, axes))


_SMALL = 65536
NO_EXAMPLES = "it meets nothing that differs from example to example"


def _is_whole(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_)


def _is_small(output: Variable) -> bool:
    known = output.dtype is not None and (not output.shape or _is_whole(output.dtype))
    return known and math.prod(output.shape) <= _SMALL


def _is_scale(site: Site) -> bool:
    constants = dict(site.constants)
    return constants.get("has_scale", False) and not constants["has_shift"]


def _takes_bias(site: Site) -> bool:
    if "has_shift" in dict(site.constants):
        return _is_scale(site)
    return len(site.params) == 1 and site.tag.name != "embedding_tag"


OPERATIONS: dict[str, Callable[[Frame, Node, ParamView, int], Any]] = {
    "dot_general": Frame.dense,
    "mul": Frame.scale,
    "add": Frame.shift,
    "add_any": Frame.shift,
    "gather": Frame.gather,
    "conv_general_dilated": Frame.conv,
}
"""Operations that are layers, if they meet a parameter in the right way."""
