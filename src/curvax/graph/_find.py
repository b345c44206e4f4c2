"""Following parameters through a program to where they are used.

From each parameter, steps that only re-arrange it (`REARRANGED`), cut out a part of it or multiply
it with a constant are followed to the operations that use it, and each use is either a site of a
layer (`_sites`) or has a reason why it is none. A bias joins the product it is added to, if nothing
else reads that product.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from curvax import _compat
from curvax.graph._axes import Axes
from curvax.graph._concatenated import ConcatView, Parts, dense_parts, put_beside, shift_parts
from curvax.graph._cut import cut_out, cut_piece
from curvax.graph._examples import Examples
from curvax.graph._found import Found, SiteView, Use
from curvax.graph._frame import NO_EXAMPLES, OPERATIONS, Frame, View
from curvax.graph._program import Node, Operand, Program, Variable
from curvax.graph._rearranged import REARRANGED
from curvax.graph._sites import ParamView, Site, embedding_site
from curvax.tags import LayerTag

__all__ = ["find_uses"]


def find_uses(
    program: Program,
    params: Sequence[Variable],
    through_custom: bool = False,
    examples: Examples | None = None,
    is_tagged: bool = False,
) -> Found:
    """The uses of each parameter.

    `through_custom`: also inside of custom derivatives. `is_tagged`: all layers are tagged already,
    and it is only to be found which parameters these have.
    """
    found = Found({number: [] for number in range(len(params))}, readers=_readers(program))
    found.order.update({node: number for number, node in enumerate(program.all_nodes())})
    numbers = {variable: number for number, variable in enumerate(params)}
    views = {v: ParamView(n, Axes.of(v.shape), v) for v, n in numbers.items()}
    examples = examples or Examples()
    known = lambda v: examples.is_known and v not in examples.axes
    data = {v for v in program.inputs if v not in numbers and not known(v)}
    _Finder(found, through_custom, examples, is_tagged).walk(program, views, data)
    found.give_up(NO_EXAMPLES)
    return found


def _readers(program: Program) -> Counter[Operand]:
    """How often each operand is read."""
    count: Counter[Operand] = Counter(program.outputs)
    for node in program.all_nodes():
        count.update(node.inputs)
        if node.body is not None:
            count.update(node.body.outputs)
    return count


@dataclass
class _Finder:
    found: Found
    through_custom: bool
    examples: Examples
    is_tagged: bool
    for_each_example: bool = False
    num_steps: int = 1
    reason: str = ""
    """Why nothing in here can be a layer, if so."""

    def walk(
        self, program: Program, views: dict[Variable, ParamView], data: set[Variable]
    ) -> tuple[list[ParamView | None], list[bool]]:
        """Go through a program. Returns views of its outputs, and which depend on data."""
        frame = _Walk(
            self.found,
            dict(views),
            set(data),
            examples=self.examples,
            for_each_example=self.for_each_example,
            num_steps=self.num_steps,
            finder=self,
        )
        for node in program.nodes:
            frame.visit(node)
        outputs = [frame.view(operand) for operand in program.outputs]
        own = [view if isinstance(view, ParamView) else None for view in outputs]
        for variable, view in frame.views.items():
            if isinstance(view, ParamView):
                self.found.views[variable] = view
        return own, [operand in frame.data for operand in program.outputs]


@dataclass
class _Walk(Frame):
    """Goes through a body, node by node."""

    finder: _Finder = field(kw_only=True)

    def visit(self, node: Node) -> None:
        if any(operand in self.data for operand in node.inputs):
            self.data.update(node.outputs)
        self.data.update(out for out in node.outputs if out in self.examples.axes)
        self.made_by.update(dict.fromkeys(node.outputs, node))
        views = [self.view(operand) for operand in node.inputs]
        if isinstance(node.equation.primitive, LayerTag):
            self._explicit(node, views)
        elif node.body is not None:
            self._enter(node, node.body, views)
        elif any(view is not None for view in views):
            self._use(node, views)
        elif node.kind == "plain":
            self.compute(node)

    def _explicit(self, node: Node, views: Sequence[View | None]) -> None:
        tag = node.equation.primitive
        params = views[tag.num_outputs + tag.num_inputs :]
        # Where curvax tags a parameter that was scaled, it scales the input.
        scaled = node.params.get("scaled", False)
        own = [
            view if isinstance(view, ParamView) and (scaled or view.scale is None) else None
            for view in params
        ]
        self.found.explicit.append((node, own))
        cut = tag.num_outputs
        between = lambda: self._between(node.inputs[:cut], node.inputs[cut:])
        self.found.covered[node] = set() if self.finder.is_tagged else between()

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

    def _use(self, node: Node, views: Sequence[View | None]) -> None:
        if node.name in REARRANGED:
            for view, output in zip(views, node.outputs, strict=False):
                if view is not None:
                    self._rearrange(node, view, output)
            return
        if any(isinstance(view, ConcatView) for view in views):
            self._use_parts(node, views)
            return
        params = [view for view in views if isinstance(view, ParamView)]
        if len(params) == 1 and self._cut_or_scaled(node, params[0], views.index(params[0])):
            return
        if node.name == "concatenate" and len(params) == len(views) and not self.finder.reason:
            self._put_together(node, params)
            return
        if not params:
            if node.name == "mul":
                self.scale_further(node, views)
            return
        results = self._sites(node, views)
        for view in params:
            result = results if isinstance(results, str) else results.get(view.param)
            self._note(node, view, result)

    def _cut_or_scaled(self, node: Node, view: ParamView, number: int) -> bool:
        """Whether what is done to a parameter only cuts it or multiplies it with a constant."""
        if node.name in ("slice", "split"):
            pieces = cut_out(node, view)
            if isinstance(pieces, str):
                self._note(node, view, pieces)
            else:
                self.views.update(zip(node.outputs, pieces, strict=True))
            return True
        if node.name == "gather":
            return number == 0 and self._rows_in_order(node, view)
        if node.name in ("add", "add_any"):
            return self._moved_by_what_is_known(node, view)
        if node.name != "mul" and (node.name, number) != ("div", 0):
            return False
        factor = self.number(node.inputs[1 - number])
        (output,) = node.outputs
        if factor is None or jnp.shape(factor) or output.shape != view.axes.shape:
            return False
        if not _compat.is_tracer(factor):  # Else it is good for this trace only, like all else.
            factor = np.asarray(factor)
        factor = factor if node.name == "mul" else 1 / factor
        scale = factor if view.scale is None else view.scale * factor
        self.views[output] = replace(view, operand=output, scale=scale)
        return True

    def _moved_by_what_is_known(self, node: Node, view: ParamView) -> bool:
        """Whether something is added to a parameter that is the same for all examples."""
        (output,) = node.outputs
        known = self.finder.is_tagged or self.is_known(output)
        if not known or output.shape != view.axes.shape or view.scale is not None:
            return False
        self.views[output] = replace(view, operand=output)
        return True

    def _rows_in_order(self, node: Node, view: ParamView) -> bool:
        """Whether rows are looked up that are known, and follow one another: they are cut out."""
        indices = self.number(node.inputs[1])
        rows = None if indices is None else np.asarray(indices).reshape(-1)
        site = embedding_site(node, view)
        if rows is None or not rows.size or isinstance(site, str) or site.positions != (0,):
            return False
        first, last = int(rows[0]), int(rows[0]) + rows.size
        in_order = first >= 0 and last <= view.axes.shape[0] and np.all(np.diff(rows) == 1)
        whole_rows = site.layouts[0].inputs == view.axes.dims[0]
        piece = cut_piece(view, {0: (first, last)}) if in_order and whole_rows else None
        if piece is None:
            return False
        (output,) = node.outputs
        self.views[output] = replace(piece, operand=output)
        return True

    def _put_together(self, node: Node, params: Sequence[ParamView]) -> None:
        if all(view.scale is None for view in params):
            self.views[node.outputs[0]] = ConcatView(tuple(params), node.params["dimension"])
            return
        for view in params:
            scaled = "one of them is multiplied with a constant before it is put together"
            self._note(node, view, f"{scaled} with others")

    def _use_parts(self, node: Node, views: Sequence[View | None]) -> None:
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
            only = self.found.readers[node.inputs[1 - number]] == 1
            parts = before if isinstance(before, Parts) and only else None
            result = shift_parts(node, view, node.inputs[1 - number], parts)
            if parts is not None and not isinstance(result, str) and result[0] != result[1]:
                for old, new in zip(parts.sites, result[0].sites, strict=True):
                    self.found.replace_site(old, new)
        if isinstance(result, str):
            for param in view.params:
                self._note(node, param, result)
            return
        sites, alone = result if isinstance(result, tuple) else (result, None)
        for k, param in enumerate(view.params):
            use = Use(node, sites.sites[k], alone=None if alone is None else alone.sites[k])
            self.found.add(param.param, use)
            if not self.differs(sites.sites[k]):
                self.found.doubtful.add(sites.sites[k])
        self.views[node.outputs[0]] = sites

    def _rearrange(self, node: Node, view: View, output: Variable) -> None:
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
                self.views[output] = replace(view, axes=moved, operand=output)
        elif moved is not None and real:
            only = view.only and self.found.readers[output] == 1
            self.views[output] = replace(view, axes=moved, only=only)

    def _sites(self, node: Node, views: Sequence[View | None]) -> Any:
        """For each parameter a site or a reason, or one reason for all."""
        params = [view for view in views if isinstance(view, ParamView)]
        if self.finder.reason:
            return self.finder.reason
        if node.name == "concatenate" and len(params) < len(views):
            own = [view if isinstance(view, ParamView) else None for view in views]
            return put_beside(node, own)
        if len(params) > 1:
            return f"it meets another parameter in `{node.name}` before it meets data"
        (view,) = params
        number = views.index(view)
        make = OPERATIONS.get(node.name)
        if make is None:
            inside = "inside of" if node.kind == "opaque" else "by"
            return f"it is used {inside} `{node.name}`, of which no layer is known"
        return {view.param: make(self, node, view, number)}

    def _note(self, node: Node, view: ParamView, result: Any) -> None:
        found = self.found
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
            only = self.found.readers[site.output] == 1
            self.views[site.output] = SiteView(site, site.axes, only)
            if not self.differs(site):
                found.doubtful.add(site)

    def _enter(self, node: Node, body: Program, views: Sequence[View | None]) -> None:
        own = [view if isinstance(view, ParamView) else None for view in views]
        reason = self.finder.reason
        if node.kind == "custom" and not self.finder.through_custom and not reason:
            name = _compat.function_name(node.equation)
            reason = f"it is used inside of `{name}`, which has derivatives of its own"
        over_examples = not self.examples.loops.isdisjoint(node.outputs)
        inner = replace(
            self.finder,
            reason=reason,
            for_each_example=self.for_each_example or over_examples,
        )
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
        inner = replace(inner, num_steps=self.num_steps * form.length)
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
            inside[variable] = replace(view, axes=axes, operand=variable)
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
