"""Where things stand in one body of a program, and what an operation with a parameter is there."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from curvax import _compat
from curvax.graph._concatenated import ConcatView, Parts
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

__all__ = ["OPERATIONS", "Frame", "View"]

View = ParamView | SiteView | ConcatView | Parts


@dataclass
class Frame:
    """What is known so far of the variables of a body, and of all parameters."""

    found: Found
    readers: Counter[Operand]
    views: dict[Variable, View]
    data: set[Operand]
    made_by: dict[Operand, Node] = field(default_factory=dict)
    numbers: dict[Operand, Any] = field(default_factory=dict)
    """Numbers that are computed from nothing but constants."""

    def view(self, operand: Operand) -> View | None:
        return self.views.get(operand) if isinstance(operand, Variable) else None

    def compute(self, node: Node) -> None:
        values = [self.number(operand) for operand in node.inputs]
        if all(value is not None for value in values):
            self.numbers.update(
                zip(node.outputs, _compat.run_equation(node.equation, values), strict=True)
            )

    def number(self, operand: Operand) -> Any:
        if isinstance(operand, Constant):
            return None if operand.shape else operand.value
        return self.numbers.get(operand)

    def dense(self, node: Node, view: ParamView, number: int) -> Site | str:
        site = dense_site(node, view, is_left=number == 0)
        if isinstance(site, str) or view.scale is not None:
            return site
        return as_lookup(site, self.made_by)

    def gather(self, node: Node, view: ParamView, number: int) -> Site | str:
        if number != 0:
            return "it is used as an index"
        if node.inputs[1] not in self.data and isinstance(node.inputs[1], Constant):
            return "a fixed part of it is cut out"
        if view.scale is not None:
            return "it is multiplied with a constant before it is indexed"
        return embedding_site(node, view)

    def scale(self, node: Node, view: ParamView, number: int) -> Site | str:
        other = node.inputs[1 - number]
        if not self._meets_data(node, view, other):
            return "it passes through a function before it meets data"
        return elementwise_site(node, self._spread(node, view), other, "scale")

    def scale_further(self, node: Node, views: Sequence[View | None]) -> None:
        for number, view in enumerate(views):
            if isinstance(view, SiteView) and view.only and _is_scale(view.site):
                further = scaled_further(view.site, node, view.axes, node.inputs[1 - number])
                if further is not None:
                    self.found.replace_site(view.site, further)
                    only = self.readers[further.output] == 1
                    self.views[further.output] = SiteView(further, further.axes, only)
                return

    def conv(self, node: Node, view: ParamView, number: int) -> Site | str:
        return conv_site(node, view) if number == 1 else "it is convolved with a kernel"

    def shift(self, node: Node, view: ParamView, number: int) -> Use | str:
        other = node.inputs[1 - number]
        if not self._meets_data(node, view, other):
            return "it passes through a function before it meets data"
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
        return other in self.data or view.axes.shape != node.outputs[0].shape

    def _spread(self, node: Node, view: ParamView) -> ParamView:
        """The parameter broadcast to the result: an axis of size one stands for a longer one."""
        shape = node.outputs[0].shape
        if view.axes.shape == shape:
            return view
        # A number has no axes to begin with; anything else has as many as the result.
        axes = range(len(shape)) if view.axes.dims else ()
        return replace(view, axes=view.axes.broadcast(shape, axes))


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
