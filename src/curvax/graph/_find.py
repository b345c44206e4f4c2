"""Following parameters through a program to where they are used.

From each parameter, steps that only re-arrange it (`REARRANGED`) are followed to the operations
that use it, and each use is either a site of a layer (`_sites`) or has a reason why it is none. A
bias joins the product it is added to, if nothing else reads that product.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp

from curvax import _compat
from curvax.graph._axes import Axes
from curvax.graph._concatenated import ConcatView, Parts, dense_parts, shift_parts
from curvax.graph._program import Constant, Node, Operand, Program, Variable
from curvax.graph._rearranged import REARRANGED
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
from curvax.tags import LayerTag

__all__ = ["Found", "Use", "find_uses"]


@dataclass(frozen=True, eq=False)
class Use:
    """One use of a parameter by a node: a site, or the reason why it is none.

    A bias is also a site of its own, `alone`, should it not be able to stay with what it joined.
    """

    node: Node
    site: Site | None = None
    reason: str = ""
    alone: Site | None = None


@dataclass(frozen=True)
class _SiteView:
    """The output of a site, re-arranged. `only` if nothing else reads it on the way."""

    site: Site
    axes: Axes
    only: bool


@dataclass
class Found:
    """What became of the parameters of a program: the uses of each."""

    uses: dict[int, list[Use]] = field(default_factory=dict)
    explicit: list[tuple[Node, list[ParamView | None]]] = field(default_factory=list)
    """The layers that were tagged by hand: the node of each tag, and its parameters."""
    covered: dict[Node, set[Node]] = field(default_factory=dict)
    """What lies between the inputs and the outputs of each of these tags."""
    views: dict[Operand, ParamView] = field(default_factory=dict)
    """All operands that are parameters, at most re-arranged."""

    def add(self, param: int, use: Use) -> None:
        self.uses.setdefault(param, []).append(use)

    def replace_site(self, old: Site, new: Site) -> None:
        """Put a site in the place of another wherever that is used."""
        for uses in self.uses.values():
            uses[:] = [replace(use, site=new) if use.site is old else use for use in uses]


def find_uses(program: Program, params: Sequence[Variable], through_custom: bool = False) -> Found:
    """The uses of each parameter. `through_custom`: also inside of custom derivatives."""
    found = Found({number: [] for number in range(len(params))})
    numbers = {variable: number for number, variable in enumerate(params)}
    views = {v: ParamView(n, Axes.of(v.shape), v) for v, n in numbers.items()}
    data = {v for v in program.inputs if v not in numbers}
    _Finder(found, _readers(program), through_custom).walk(program, views, data)
    return found


def _readers(program: Program) -> Counter[Operand]:
    """How often each operand is read."""
    count: Counter[Operand] = Counter(program.outputs)
    for node in program.all_nodes():
        count.update(node.inputs)
        if node.body is not None:
            count.update(node.body.outputs)
    return count


_View = ParamView | _SiteView | ConcatView | Parts


@dataclass
class _Finder:
    found: Found
    readers: Counter[Operand]
    through_custom: bool
    reason: str = ""
    """Why nothing in here can be a layer, if so."""

    def walk(
        self, program: Program, views: dict[Variable, ParamView], data: set[Variable]
    ) -> tuple[list[ParamView | None], list[bool]]:
        """Go through a program. Returns views of its outputs, and which depend on data."""
        frame = _Frame(self, dict(views), set(data))
        for node in program.nodes:
            frame.visit(node)
        outputs = [frame.view(operand) for operand in program.outputs]
        own = [view if isinstance(view, ParamView) else None for view in outputs]
        for variable, view in frame.views.items():
            if isinstance(view, ParamView):
                self.found.views[variable] = view
        return own, [operand in frame.data for operand in program.outputs]


@dataclass
class _Frame:
    finder: _Finder
    views: dict[Variable, _View]
    data: set[Operand]
    made_by: dict[Operand, Node] = field(default_factory=dict)

    def view(self, operand: Operand) -> _View | None:
        return self.views.get(operand) if isinstance(operand, Variable) else None

    def visit(self, node: Node) -> None:
        if any(operand in self.data for operand in node.inputs):
            self.data.update(node.outputs)
        self.made_by.update(dict.fromkeys(node.outputs, node))
        views = [self.view(operand) for operand in node.inputs]
        if isinstance(node.equation.primitive, LayerTag):
            self._explicit(node, views)
        elif node.body is not None:
            self._enter(node, node.body, views)
        elif any(view is not None for view in views):
            self._use(node, views)

    def _explicit(self, node: Node, views: Sequence[_View | None]) -> None:
        tag = node.equation.primitive
        params = views[tag.num_outputs + tag.num_inputs :]
        own = [view if isinstance(view, ParamView) else None for view in params]
        self.finder.found.explicit.append((node, own))
        self.finder.found.covered[node] = self._between(
            node.inputs[: tag.num_outputs], node.inputs[tag.num_outputs :]
        )

    def _between(self, outputs: Sequence[Operand], inputs: Sequence[Operand]) -> set[Node]:
        """The nodes by which the outputs were computed, back to the inputs."""
        nodes: set[Node] = set()
        pending = list(outputs)
        while pending:
            operand = pending.pop()
            node = self.made_by.get(operand)
            if node is None or node in nodes or operand in inputs:
                continue
            nodes.update([node] if node.body is None else [node, *node.body.all_nodes()])
            pending += node.inputs
        return nodes

    def _use(self, node: Node, views: Sequence[_View | None]) -> None:
        if node.name in REARRANGED:
            for view, output in zip(views, node.outputs, strict=False):
                if view is not None:
                    self._rearrange(node, view, output)
            return
        if any(isinstance(view, ConcatView) for view in views):
            self._use_parts(node, views)
            return
        params = [view for view in views if isinstance(view, ParamView)]
        if node.name == "concatenate" and len(params) == len(views) and not self.finder.reason:
            self.views[node.outputs[0]] = ConcatView(tuple(params), node.params["dimension"])
            return
        if not params:
            if node.name == "mul":
                self._scale_further(node, views)
            return
        results = self._sites(node, views)
        for view in params:
            result = results if isinstance(results, str) else results.get(view.param)
            self._note(node, view, result)

    def _use_parts(self, node: Node, views: Sequence[_View | None]) -> None:
        """A use of parameters that were put together."""
        (view, *others) = [view for view in views if isinstance(view, ConcatView)]
        number = views.index(view)
        result: Any = f"it is put together with others, and used by `{node.name}`"
        if others or any(isinstance(view, ParamView) for view in views):
            result = f"it meets another parameter in `{node.name}` before it meets data"
        elif node.name == "dot_general":
            result = dense_parts(node, view, number)
        elif node.name in ("add", "add_any"):
            before = self.view(node.inputs[1 - number])
            only = self.finder.readers[node.inputs[1 - number]] == 1
            parts = before if isinstance(before, Parts) and only else None
            result = shift_parts(node, view, node.inputs[1 - number], parts)
            if parts is not None and not isinstance(result, str) and result[0] != result[1]:
                for old, new in zip(parts.sites, result[0].sites, strict=True):
                    self.finder.found.replace_site(old, new)
        if isinstance(result, str):
            for param in view.params:
                self._note(node, param, result)
            return
        sites, alone = result if isinstance(result, tuple) else (result, None)
        for k, param in enumerate(view.params):
            use = Use(node, sites.sites[k], alone=None if alone is None else alone.sites[k])
            self.finder.found.add(param.param, use)
        self.views[node.outputs[0]] = sites

    def _rearrange(self, node: Node, view: _View, output: Variable) -> None:
        real = output.dtype is not None and jnp.issubdtype(output.dtype, jnp.floating)
        move = REARRANGED[node.name]
        if isinstance(view, Parts):
            return
        if isinstance(view, ConcatView):
            parts = view.rearranged(node.name, move, node.params, output) if real else None
            if parts is not None:
                self.views[output] = parts
                return
            for param in view.params:
                self._note(node, param, "it is put together with others and then mixed with them")
            return
        moved = move(view.axes, node.params)
        if isinstance(view, ParamView):
            if moved is None or not real:
                reason = "its axes are mixed" if real else f"it is converted to {output.dtype}"
                self._note(node, view, f"{reason} before it is used")
            else:
                self.views[output] = ParamView(view.param, moved, output)
        elif moved is not None and real:
            only = view.only and self.finder.readers[output] == 1
            self.views[output] = replace(view, axes=moved, only=only)

    def _sites(self, node: Node, views: Sequence[_View | None]) -> Any:
        """For each parameter a site or a reason, or one reason for all."""
        params = [view for view in views if isinstance(view, ParamView)]
        if self.finder.reason:
            return self.finder.reason
        if len(params) > 1:
            return f"it meets another parameter in `{node.name}` before it meets data"
        (view,) = params
        number = views.index(view)
        make = _MADE.get(node.name)
        if make is None:
            inside = "inside of" if node.kind == "opaque" else "by"
            return f"it is used {inside} `{node.name}`, of which no layer is known"
        return {view.param: make(self, node, view, number)}

    def _note(self, node: Node, view: ParamView, result: Any) -> None:
        found = self.finder.found
        if isinstance(result, Use):
            found.add(view.param, result)
            site = result.site
        elif isinstance(result, Site):
            found.add(view.param, Use(node, result))
            site = result
        else:
            found.add(view.param, Use(node, reason=result))
            site = None
        if site is not None:
            only = self.finder.readers[site.output] == 1
            self.views[site.output] = _SiteView(site, site.axes, only)

    def dense(self, node: Node, view: ParamView, number: int) -> Site | str:
        return dense_site(node, view, is_left=number == 0)

    def gather(self, node: Node, view: ParamView, number: int) -> Site | str:
        if number != 0:
            return "it is used as an index"
        if node.inputs[1] not in self.data and isinstance(node.inputs[1], Constant):
            return "a fixed part of it is cut out"
        return embedding_site(node, view)

    def scale(self, node: Node, view: ParamView, number: int) -> Site | str:
        other = node.inputs[1 - number]
        if not self._meets_data(node, view, other):
            return "it passes through a function before it meets data"
        return elementwise_site(node, self._spread(node, view), other, "scale")

    def _scale_further(self, node: Node, views: Sequence[_View | None]) -> None:
        for number, view in enumerate(views):
            if isinstance(view, _SiteView) and view.only and _is_scale(view.site):
                further = scaled_further(view.site, node, view.axes, node.inputs[1 - number])
                if further is not None:
                    self.finder.found.replace_site(view.site, further)
                    only = self.finder.readers[further.output] == 1
                    self.views[further.output] = _SiteView(further, further.axes, only)
                return

    def conv(self, node: Node, view: ParamView, number: int) -> Site | str:
        return conv_site(node, view) if number == 1 else "it is convolved with a kernel"

    def shift(self, node: Node, view: ParamView, number: int) -> Use | str:
        other = node.inputs[1 - number]
        if not self._meets_data(node, view, other):
            return "it passes through a function before it meets data"
        spread = self._spread(node, view)
        alone = elementwise_site(node, spread, other, "shift")
        if isinstance(alone, str):
            return alone
        before = self.view(other)
        if isinstance(before, _SiteView) and before.only and _takes_bias(before.site):
            axes = before.axes
            if axes.shape == node.outputs[0].shape:
                joined = join(before.site, node, axes, spread)
                if joined is not None:
                    self.finder.found.replace_site(before.site, joined)
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

    def _enter(self, node: Node, body: Program, views: Sequence[_View | None]) -> None:
        own = [view if isinstance(view, ParamView) else None for view in views]
        reason = self.finder.reason
        if node.kind == "custom" and not self.finder.through_custom and not reason:
            name = _compat.function_name(node.equation)
            reason = f"it is used inside of `{name}`, which has derivatives of its own"
        inner = replace(self.finder, reason=reason)
        given = dict(zip(body.inputs, own, strict=True))
        data = {
            v for v, operand in zip(body.inputs, node.inputs, strict=True) if operand in self.data
        }
        if node.kind == "scan":
            self._enter_scan(node, body, given, data, inner)
            return
        inside = {v: replace(view, operand=v) for v, view in given.items() if view is not None}
        outputs, of_data = inner.walk(body, inside, data)
        self._leave(node, outputs, of_data)

    def _enter_scan(
        self,
        node: Node,
        body: Program,
        given: dict[Variable, ParamView | None],
        data: set[Variable],
        inner: _Finder,
    ) -> None:
        form = _compat.ScanForm.of(node.equation)
        carried = range(form.num_consts, form.num_consts + form.num_carry)
        inside: dict[Variable, ParamView] = {}
        unchanged: dict[int, ParamView] = {}
        for number, (variable, view) in enumerate(given.items()):
            if view is None:
                continue
            if number in carried:
                position = number - form.num_consts
                if body.outputs[position] is not variable:
                    self._note(node, view, "a loop carries it along and changes it")
                    data.add(variable)
                    continue
                unchanged[position] = view
            axes = view.axes.inside_loop(element=number >= carried.stop)
            inside[variable] = ParamView(view.param, axes, variable)
        # What a loop carries depends on data if anything does that it is computed from.
        if any(operand in self.data for operand in node.inputs):
            data.update(body.inputs[number] for number in carried)
        returned, of_data = inner.walk(body, inside, data)
        for number, view in enumerate(returned):
            if view is not None and number not in unchanged:
                self._note(node, view, "a loop returns it")
        outputs = [unchanged.get(number) for number in range(len(node.outputs))]
        self._leave(node, outputs, of_data)

    def _leave(
        self, node: Node, outputs: Sequence[ParamView | None], of_data: Sequence[bool]
    ) -> None:
        for variable, view, is_data in zip(node.outputs, outputs, of_data, strict=True):
            if view is not None:
                self.views[variable] = replace(view, operand=variable)
            if is_data:
                self.data.add(variable)


def _is_scale(site: Site) -> bool:
    constants = dict(site.constants)
    return constants.get("has_scale", False) and not constants["has_shift"]


def _takes_bias(site: Site) -> bool:
    if "has_shift" in dict(site.constants):
        return _is_scale(site)
    return len(site.params) == 1 and site.tag.name != "embedding_tag"


_MADE: dict[str, Callable[[_Frame, Node, ParamView, int], Any]] = {
    "dot_general": _Frame.dense,
    "mul": _Frame.scale,
    "add": _Frame.shift,
    "add_any": _Frame.shift,
    "gather": _Frame.gather,
    "conv_general_dilated": _Frame.conv,
}
"""Operations that are layers, if they meet a parameter in the right way."""
