"""Following parameters through a program to where they are used.

From each parameter, steps that only re-arrange it (`REARRANGED`), cut out a part of it or multiply
it with a constant are followed to the operations that use it (`Interpreter`), and each use is
either a `Site` of a layer or has a reason why it is none. A bias joins the product it is added to,
if nothing else reads that product.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from curvax import _jax
from curvax.layers.detection.axes import REARRANGED, Arrangement, Axes
from curvax.layers.detection.examples import Examples
from curvax.layers.detection.lifting import Lifting
from curvax.layers.detection.program import Constant, Node, Operand, Program, Variable
from curvax.layers.detection.sites import (
    Lookup,
    ParamView,
    Site,
    conv_site,
    dense_site,
    elementwise_site,
    embedding_site,
    join,
    scaled_further,
)
from curvax.layers.tags import (
    LayerTag,
    dense_tag,
    embedding_tag,
    scale_and_shift_tag,
)
from curvax.layers.use import Slice

# Parameters that are put together before they are used: fused gates, fused projections.
#
# `concatenate` of parameters is followed like a single one. Where it is contracted with an input,
# and the axis along which it was put together is one of the output's, each parameter is a dense
# layer of the same input whose output is its own part. A bias that is put together alike joins
# part by part. A parameter beside data, as a token of its own at the start of a sequence, is a
# shift of that part.


@dataclass(frozen=True)
class ConcatView:
    """Parameters, re-arranged, one after the other along an axis."""

    params: tuple[ParamView, ...]
    axis: int

    @property
    def sizes(self) -> list[int]:
        """The length of each along the axis."""
        return [view.axes.shape[self.axis] for view in self.params]

    def rearranged(
        self,
        name: str,
        move: Callable[[Axes, dict[str, Any]], Axes | None],
        params: dict[str, Any],
        output: Variable,
    ) -> "ConcatView | None":
        """What an operation makes of it; None if the parts are not one after the other any more."""
        old, new = concat_shape(self), tuple(output.shape)
        axis = _moved_axis(name, params, self.axis, old, new)
        if axis is None:
            return None
        moved: list[ParamView] = []
        for view, size in zip(self.params, self.sizes, strict=True):
            own = {**params}
            resized = (*new[:axis], size, *new[axis + 1 :])
            for key in ("shape", "new_sizes"):
                if key in own:
                    own[key] = resized
            axes = move(view.axes, own)
            if axes is None:
                return None
            moved.append(replace(view, axes=axes))
        return ConcatView(tuple(moved), axis)


def concat_shape(view: ConcatView) -> tuple[int, ...]:
    """The shape of all parts together."""
    shape = view.params[0].axes.shape
    return (*shape[: view.axis], sum(view.sizes), *shape[view.axis + 1 :])


def _moved_axis(
    name: str, params: dict[str, Any], axis: int, old: Sequence[int], new: Sequence[int]
) -> int | None:
    if name == "transpose":
        return list(params["permutation"]).index(axis)
    if name == "broadcast_in_dim":
        return int(params["broadcast_dimensions"][axis])
    before, size = math.prod(old[:axis]), old[axis]
    found = [k for k in range(len(new)) if math.prod(new[:k]) == before and new[k] == size]
    return found[0] if found else None


@dataclass(frozen=True)
class Parts:
    """Sites that are the parts of one output."""

    sites: tuple[Site, ...]


def dense_parts(node: Node, view: ConcatView, number: int) -> Parts | str:
    """A contraction of concatenated parameters with an input; or why it is no dense layer."""
    contracted, batched = node.params["dimension_numbers"]
    own = (*contracted[number], *batched[number])
    if view.axis in own:
        return "it is put together with others along an axis that is not of the outputs"
    free = [axis for axis in range(len(concat_shape(view))) if axis not in own]
    sites: list[Site] = []
    start = 0
    for param, size in zip(view.params, view.sizes, strict=True):
        site = dense_site(node, param, is_left=number == 0)
        if isinstance(site, str):
            return site
        axis = site.features[free.index(view.axis)]
        sites.append(_part(site, axis, start, start + size))
        start += size
    return Parts(tuple(sites))


def shift_parts(
    node: Node, view: ConcatView, other: Operand, before: Parts | None
) -> tuple[Parts, Parts] | str:
    """Biases that are added to parts, and the same as shifts of their own; or why that cannot be.

    `before` is what they are added to, if that is the parts of a layer.
    """
    (output,) = node.outputs
    if len(output.shape) != len(concat_shape(view)):
        return "it is put together with others and added in another shape"
    alone: list[Site] = []
    start = 0
    for param, size in zip(view.params, view.sizes, strict=True):
        shape = list(output.shape)
        shape[view.axis] = size
        spread = replace(param, axes=param.axes.broadcast(shape, range(len(shape))))
        site = elementwise_site(node, spread, other, "shift")
        if isinstance(site, str):
            return site
        alone.append(_part(site, view.axis, start, start + size))
        start += size
    joined: list[Site] = []
    if before is not None and [s.part for s in before.sites] == [s.part for s in alone]:
        for site, shift in zip(before.sites, alone, strict=True):
            one = join(site, node, site.axes, shift.params[0])
            if one is not None and not site.params[1:]:
                joined.append(one)
    apart = Parts(tuple(alone))
    return (Parts(tuple(joined)) if len(joined) == len(alone) else apart), apart


def put_beside(node: Node, views: Sequence[ParamView | None]) -> dict[int, Site | str]:
    """Parameters beside data: each is a shift, of nothing, in its own part of the output."""
    axis, start = int(node.params["dimension"]), 0
    sites: dict[int, Site | str] = {}
    for operand, view in zip(node.inputs, views, strict=True):
        stop = start + operand.shape[axis]
        if view is not None:
            nothing = Constant(np.zeros((), node.outputs[0].dtype))
            site = elementwise_site(node, view, nothing, "shift")
            if view.scale is not None:
                site = "it is multiplied with a constant before it is put beside data"
            if view.param in sites:
                site = "it is put beside data more than once"
            sites[view.param] = site if isinstance(site, str) else _part(site, axis, start, stop)
        start = stop
    return sites


def _part(site: Site, axis: int, start: int, stop: int) -> Site:
    shape = list(site.output.shape)
    shape[axis] = stop - start
    return replace(site, axes=Axes.of(shape), part=(axis, start, stop))


# Parts that are cut out of a parameter before they are used: fused weights that are split.
#
# Each part is followed like a parameter of its own. What remembers where it came from is its view.


def cut_out(node: Node, view: ParamView) -> list[ParamView] | str:
    """What `slice` or `split` leaves of a parameter, one view for each output; or why it cannot."""
    if node.name == "split":
        axis, stops = int(node.params["axis"]), [0]
        for size in node.params["sizes"]:
            stops.append(stops[-1] + int(size))
        pieces = [{axis: bounds} for bounds in itertools.pairwise(stops)]
    else:
        if any(stride != 1 for stride in node.params["strides"] or ()):
            return "parts of it are cut out that are not in one piece"
        bounds = zip(node.params["start_indices"], node.params["limit_indices"], strict=True)
        pieces = [{axis: (int(a), int(b)) for axis, (a, b) in enumerate(bounds)}]
    views = [cut_piece(view, piece) for piece in pieces]
    found = [v for v in views if v is not None]
    if len(found) < len(views):
        return "parts of it are cut out that are not in one piece"
    return [replace(v, operand=output) for v, output in zip(found, node.outputs, strict=True)]


def cut_piece(view: ParamView, bounds: dict[int, tuple[int, int]]) -> ParamView | None:
    """What is within bounds along some axes; None if that is not in one piece."""
    for axis, (start, stop) in bounds.items():
        if (start, stop) == (0, view.axes.shape[axis]):
            continue
        found = view.axes.cut(axis, start, stop)
        if found is None:
            return None
        axes, own = found
        view = replace(view, axes=axes)
        if own is not None:
            view = _cut_further(view, own)
    return view


def _cut_further(view: ParamView, cut: Slice) -> ParamView:
    """What is left of a parameter if a piece is cut out of what was left already."""
    axis, start, stop = cut
    before = {a: first for a, first, _ in view.cuts}.get(axis, 0)
    rest = [other for other in view.cuts if other[0] != axis]
    return replace(view, cuts=tuple(sorted([*rest, (axis, before + start, before + stop)])))


# Products with one-hot vectors, which look up rows of a table.


def as_lookup(site: Site, made_by: Mapping[Operand, Node]) -> Site:
    """A dense site whose input is one-hot vectors, as an embedding; any other as it is."""
    (vectors,) = site.factors
    indices = _indices(vectors, made_by)
    last = len(vectors.shape) - 1
    side = site.node.inputs.index(vectors)
    contracted, batched = site.node.params["dimension_numbers"]
    if indices is None or tuple(contracted[side]) != (last,) or batched[side]:
        return site
    axes = Axes.of(indices.shape).dims
    positions = [atom for dim in axes for atom in dim]
    return replace(
        site,
        tag=embedding_tag,
        factors=(indices,),
        input_arrangement=Arrangement.of(axes, [positions]),
        rows=Lookup(vectors.shape[-1]),
    )


def _indices(vectors: Operand, made_by: Mapping[Operand, Node]) -> Operand | None:
    """The indices of one-hot vectors: `indices[..., None] == arange`, as floats."""
    compared = _before(vectors, "convert_element_type", made_by)
    if compared is None or compared not in made_by or made_by[compared].name != "eq":
        return None
    for one, other in (made_by[compared].inputs, made_by[compared].inputs[::-1]):
        numbers = made_by.get(other)
        expanded = made_by.get(one)
        if numbers is None or numbers.name != "iota" or expanded is None:
            continue
        last = len(vectors.shape) - 1
        counted = int(numbers.params["dimension"]) == last
        in_front = one.shape == (*vectors.shape[:-1], 1)
        if counted and in_front and expanded.name in ("broadcast_in_dim", "reshape"):
            (indices, *_) = expanded.inputs
            if indices.shape == vectors.shape[:-1]:
                return indices
    return None


def _before(operand: Operand, name: str, made_by: Mapping[Operand, Node]) -> Operand | None:
    """What an operation of that name was applied to, once or several times."""
    found = None
    while operand in made_by and made_by[operand].name == name:
        (operand,) = made_by[operand].inputs
        found = operand
    return found


# One encounter of an operation with a parameter.


@dataclass(frozen=True, eq=False)
class Encounter:
    """An operation that meets a parameter: a use of a layer, or the reason why it is none.

    A bias is also a use of its own, `alone`, should it not be able to stay with what it joined.
    """

    node: Node
    site: Site | None = None
    reason: str = ""
    alone: Site | None = None
    is_constant: bool = False
    """Whether it is the same for all examples."""


@dataclass(frozen=True)
class SiteView:
    """The output of a use, re-arranged. `only` if nothing else reads it on the way."""

    site: Site
    axes: Axes
    only: bool


View = ParamView | SiteView | ConcatView | Parts

Views = Sequence[View | None]
"""What the operands, or the outputs, of an operation are; None for anything else."""


class Met(NamedTuple):
    """Uses of parameters, or reasons, by the numbers of these; and what the output then is."""

    uses: Mapping[int, Encounter | Site | str]
    view: View | None = None


Result = Views | Met | str
"""What an operation does: move parameters about (views of its outputs), use them, or a reason."""

Transfer = Callable[["Interpreter", Node, Views], Result]

NO_EXAMPLES = "it meets nothing that differs from example to example"
_SMALL = 65536


@dataclass
class Interpreter:
    """Follows parameters through a program and its bodies, to the operations that use them.

    Each variable is written once in a program, so there is one table for all of its bodies.
    """

    examples: Examples
    through_custom: bool = False
    """Whether to look into functions with derivatives of their own."""
    is_tagged: bool = False
    """Whether all layers are tagged already, so that only their parameters are looked for."""
    uses: dict[int, list[Encounter]] = field(default_factory=dict)
    """For each parameter, what meets it."""
    explicit: list[tuple[Node, list[ParamView | None]]] = field(default_factory=list)
    """The layers that were tagged by hand: the node of each tag, and its parameters."""
    covered: dict[Node, set[Node]] = field(default_factory=dict)
    """What lies between the inputs and the outputs of each of these tags."""
    views: dict[Operand, View] = field(default_factory=dict)
    """What is a parameter, the output of a use, or made of such."""
    readers: Counter[Operand] = field(default_factory=Counter)
    """How often each operand is read."""
    order: dict[Node, int] = field(default_factory=dict)
    """The nodes, in the order in which they are computed."""
    without_derivative: set[int] = field(default_factory=set)
    """Parameters with uses, all of which were left out as no loss has a derivative there."""
    data: set[Operand] = field(default_factory=set)
    """What depends on the arrays that have examples."""
    made_by: dict[Operand, Node] = field(default_factory=dict)
    numbers: dict[Operand, Any] = field(default_factory=dict)
    """Numbers, and integers in arrays, that are computed from nothing but constants."""
    doubtful: set[Site] = field(default_factory=set)
    """Uses that met nothing so far that differs from example to example."""
    reason: str = ""
    """Why nothing in the present body can be a layer, if so."""
    for_each_example: bool = False
    """Whether the present body is in a loop over examples."""
    num_steps: int = 1
    """How often the present body is run, by the loops around it."""

    # What was found.

    def is_param(self, operand: Operand) -> bool:
        """Whether an operand is a parameter, at most re-arranged."""
        view = self.views.get(operand)
        return isinstance(view, ParamView) and view.scale is None

    def read_elsewhere(self, nodes: Collection[Node], tag: Node | None = None) -> int:
        """Count the values that some nodes compute from parameters and others read, too.

        What is tagged is not read by others: they read the tag.
        """
        if not nodes:
            return 0
        inside: Counter[Operand] = Counter(tag.inputs) if tag is not None else Counter()
        for node in nodes:
            inside.update(node.inputs)
        params = {x for x, view in self.views.items() if isinstance(view, ParamView)}
        computed: set[Operand] = set(params)
        for node in sorted(nodes, key=lambda node: self.order.get(node, 0)):
            if not computed.isdisjoint(node.inputs):
                computed.update(node.outputs)
        outputs: set[Operand] = {out for node in nodes for out in node.outputs}
        found = (outputs & computed) - params
        return sum(self.readers[operand] > inside[operand] for operand in found)

    def leave_out(self, reached: Set[Operand]) -> None:
        """Leave out the uses that return nothing that is reached: there is no curvature there."""
        for param, met in self.uses.items():
            kept = [each for each in met if not reached.isdisjoint(each.node.outputs)]
            if met and not kept:
                self.without_derivative.add(param)
            met[:] = kept

    def lift(self, program: Program, reached: Set[Operand]) -> Lifting:
        """Lift the uses that are the same for all examples, and reject those that cannot be."""
        lifting = Lifting()
        # Several parameters meet in one site: weights and their bias.
        lifted: dict[Site, Site | str] = {}
        for met in self.uses.values():
            for number, each in enumerate(met):
                if each.site is None or each.site not in self.doubtful:
                    continue
                if each.site not in lifted:
                    lifted[each.site] = self._lifted(each.site, lifting, program, reached)
                new = lifted[each.site]
                if isinstance(new, str):
                    met[number] = Encounter(each.node, reason=new, is_constant=True)
                else:
                    met[number] = replace(each, site=new)
        return lifting

    def _lifted(
        self, site: Site, lifting: Lifting, program: Program, reached: Set[Operand]
    ) -> Site | str:
        """The site with an axis of examples; or why it cannot have one."""
        if not self.examples.is_known or site.tag is not dense_tag or site.part is not None:
            return NO_EXAMPLES
        unbiased = site.unbiased
        if unbiased is not None:
            found = self._lifted(unbiased, lifting, program, reached)
            if isinstance(found, str):
                return found
            unbiased = found
        why = lifting.add(site.output, program, self.examples, reached)
        if why:
            return f"{NO_EXAMPLES}, and {why}"
        return replace(site, lifted=lifting.totals[site.output], unbiased=unbiased)

    # Walking through a program.

    def walk(self, program: Program) -> None:
        """Go through all nodes of a program or a body, whose inputs are in the tables."""
        for node in program.nodes:
            self._visit(node)

    def _visit(self, node: Node) -> None:
        if any(operand in self.data for operand in node.inputs):
            self.data.update(node.outputs)
        self.made_by.update(dict.fromkeys(node.outputs, node))
        views = [self.views.get(operand) for operand in node.inputs]
        if isinstance(node.equation.primitive, LayerTag):
            self._explicit(node, views)
        elif node.body is not None:
            self._enter(node, node.body, views)
        elif any(view is not None for view in views):
            transfer = TRANSFER.get(node.name, _unknown)
            self._record(node, views, transfer(self, node, views))

    def _record(self, node: Node, views: Views, result: Result) -> None:
        if isinstance(result, str):
            result = Met({view.param: result for view in params_among(views)})
        if not isinstance(result, Met):
            self.views.update({x: v for x, v in zip(node.outputs, result, strict=False) if v})
            return
        for param, each in result.uses.items():
            self.note(node, param, each)
        if result.view is not None and not self.reason:
            self.views[node.outputs[0]] = result.view

    def note(self, node: Node, param: int, met: Encounter | Site | str) -> None:
        """Note what meets a parameter."""
        if self.reason and not isinstance(met, str):
            met = self.reason
        if isinstance(met, str):
            met = Encounter(node, reason=met)
        elif isinstance(met, Site):
            met = Encounter(node, met)
        self.uses[param].append(met)
        if met.site is not None:
            only = self.readers[met.site.output] == 1
            self.views[met.site.output] = SiteView(met.site, met.site.axes, only)
            if not self._differs(met.site):
                self.doubtful.add(met.site)

    def replace_site(self, old: Site, new: Site) -> None:
        """Put a use in the place of another."""
        for param in {view.param for view in old.params}:
            met = self.uses[param]
            met[:] = [replace(each, site=new) if each.site is old else each for each in met]
        if not self._differs(new):
            self.doubtful.add(new)

    def _explicit(self, node: Node, views: Views) -> None:
        tag = node.equation.primitive
        params = views[tag.num_outputs + tag.num_inputs :]
        # Where detection tags a parameter that was scaled, it scales the input.
        is_ours = node.params.get("use") is not None
        own = [
            view if isinstance(view, ParamView) and (is_ours or view.scale is None) else None
            for view in params
        ]
        self.explicit.append((node, own))
        outputs, rest = node.inputs[: tag.num_outputs], node.inputs[tag.num_outputs :]
        self.covered[node] = set() if self.is_tagged else self._between(outputs, rest)

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

    def _enter(self, node: Node, body: Program, views: Views) -> None:
        """Go through the body of a node, whose inputs are its own."""
        before = self.reason, self.for_each_example, self.num_steps
        if node.kind == "custom" and not self.through_custom and not self.reason:
            name = _jax.function_name(node.equation)
            self.reason = f"it is used inside of `{name}`, which has derivatives of its own"
        for variable, operand in zip(body.inputs, node.inputs, strict=True):
            if operand in self.data:
                self.data.add(variable)
        own = [view if isinstance(view, ParamView) else None for view in views]
        if node.kind == "scan":
            self.for_each_example |= node in self.examples.loops
            outputs = self._enter_scan(node, body, own)
        else:
            for variable, view in zip(body.inputs, own, strict=True):
                if view is not None:
                    self.views[variable] = replace(view, operand=variable)
            self.walk(body)
            outputs = self.params_of(body.outputs)
        self.reason, self.for_each_example, self.num_steps = before
        for variable, view, inner in zip(node.outputs, outputs, body.outputs, strict=True):
            if view is not None:
                self.views[variable] = replace(view, operand=variable)
            if inner in self.data:
                self.data.add(variable)

    def _enter_scan(
        self, node: Node, body: Program, views: Sequence[ParamView | None]
    ) -> list[ParamView | None]:
        """Go through the body of a loop. Returns the parameters that it returns unchanged."""
        form = _jax.ScanForm.of(node.equation)
        self.num_steps *= form.length
        carried = range(form.num_consts, form.num_consts + form.num_carry)
        unchanged: dict[int, ParamView] = {}
        for number, (variable, view) in enumerate(zip(body.inputs, views, strict=True)):
            if view is None:
                continue
            if number in carried:
                position = number - form.num_consts
                if body.outputs[position] is not variable:
                    self.note(node, view.param, "a loop carries it along and changes it")
                    self.data.add(variable)
                    continue
                unchanged[position] = view
            axes = view.axes.inside_loop(element=number >= carried.stop)
            self.views[variable] = replace(view, axes=axes, operand=variable)
        # What a loop carries depends on data if anything does that it is computed from.
        if any(operand in self.data for operand in node.inputs):
            self.data.update(body.inputs[number] for number in carried)
        self.walk(body)
        for number, view in enumerate(self.params_of(body.outputs)):
            if view is not None and number not in unchanged:
                self.note(node, view.param, "a loop returns it")
        return [unchanged.get(number) for number in range(len(node.outputs))]

    def params_of(self, operands: Sequence[Operand]) -> list[ParamView | None]:
        """Return the views of those operands that are parameters."""
        views = [self.views.get(operand) for operand in operands]
        return [view if isinstance(view, ParamView) else None for view in views]

    # What is known of values.

    def number(self, operand: Operand) -> Any:
        """Return the value of an operand if it is small and depends on constants only."""
        if isinstance(operand, Constant):
            known = not operand.shape or _is_integer(jnp.result_type(operand.value))
            return operand.value if known and math.prod(operand.shape) <= _SMALL else None
        for node in self._constants_before(operand):
            outputs = _jax.run_now(node.equation, [self.number(x) for x in node.inputs])
            if outputs is None:
                return None
            self.numbers.update(zip(node.outputs, outputs, strict=True))
        return self.numbers.get(operand)

    def _constants_before(self, operand: Operand) -> list[Node]:
        """The nodes that compute an operand from small constants; none if it depends on more."""
        nodes: set[Node] = set()
        pending = [operand]
        while pending:
            x = pending.pop()
            if x in self.numbers or (isinstance(x, Constant) and self.number(x) is not None):
                continue
            node = self.made_by.get(x)
            if node is None or node.kind != "plain" or not all(map(_is_small, node.outputs)):
                return []
            if node not in nodes:
                nodes.add(node)
                pending += node.inputs
        return sorted(nodes, key=self.order.__getitem__)

    def is_constant(self, operand: Operand) -> bool:
        """Whether a value is known to be the same for all examples."""
        return self.is_tagged or (self.examples.is_known and operand not in self.data)

    def meets_data(self, node: Node, view: ParamView, other: Operand) -> bool:
        """Whether what a parameter meets may differ from example to example.

        Where examples are known it is taken to: whether it does is decided later (`lift`).
        """
        repeated = any(atom.origin is None for atom in view.axes.atoms)
        spread = repeated or view.axes.shape != node.outputs[0].shape
        return self.examples.is_known or other in self.data or spread

    def _differs(self, site: Site) -> bool:
        """Whether what a use puts out differs from example to example, as far as is known.

        Either it is about examples, or all of it is in a loop over these, or the use is at so many
        places that depend on examples that it must be: the edges of a graph, say. Where nothing is
        known, it is to be at as many places as there are examples.
        """
        if site.output in self.examples.rows:
            return True
        places = math.prod(site.output.shape[axis] for axis in site.positions)
        if not self.examples.is_known:
            return places * self.num_steps >= self.examples.batch_size
        many = self.for_each_example or places >= self.examples.batch_size
        return many and site.output in self.data


def _is_integer(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_)


def _is_small(output: Variable) -> bool:
    known = output.dtype is not None and (not output.shape or _is_integer(output.dtype))
    return known and math.prod(output.shape) <= _SMALL


def params_among(views: Views) -> list[ParamView]:
    """The parameters that some operands are, also those that are put together."""
    found: list[ParamView] = []
    for view in views:
        found += [view] if isinstance(view, ParamView) else []
        found += view.params if isinstance(view, ConcatView) else ()
    return found


# What operations do to parameters: one function each, in `TRANSFER`.
#
# A function is given the interpreter, the node and the views of its operands, one of which at least
# is of a parameter, or of the output of a use. It returns views of the outputs, uses, or a reason.


def _unknown(state: Interpreter, node: Node, views: Views) -> str:
    del state
    sources = [view for view in views if isinstance(view, ParamView | ConcatView)]
    if len(sources) > 1:
        return _meets_another(node)
    if any(isinstance(view, ConcatView) for view in sources):
        return f"it is put together with others, and used by `{node.name}`"
    inside = "inside of" if node.kind == "opaque" else "by"
    return f"it is used {inside} `{node.name}`, of which no layer is known"


def _meets_another(node: Node) -> str:
    return f"it meets another parameter in `{node.name}` before it meets data"


def _only_param(views: Views) -> tuple[int, ParamView] | None:
    """The one operand that is a parameter, with its number; None if there is another number."""
    found = [(k, view) for k, view in enumerate(views) if isinstance(view, ParamView)]
    return found[0] if len(found) == len(params_among(views)) == 1 else None


def _rearrange(state: Interpreter, node: Node, views: Views) -> Result:
    move = REARRANGED[node.name]
    found: list[View | None] = []
    reasons: dict[int, Encounter | Site | str] = {}
    for view, output in zip(views, node.outputs, strict=False):
        real = output.dtype is not None and jnp.issubdtype(output.dtype, jnp.floating)
        moved: View | None = None
        if isinstance(view, ConcatView):
            moved = view.rearranged(node.name, move, node.params, output) if real else None
            mixed = "it is put together with others and then mixed with them"
            reasons |= {} if moved else {param.param: mixed for param in view.params}
        elif isinstance(view, ParamView | SiteView):
            axes = move(view.axes, node.params) if real else None
            if isinstance(view, SiteView):
                only = view.only and state.readers[output] == 1
                moved = None if axes is None else replace(view, axes=axes, only=only)
            elif axes is not None:
                moved = replace(view, axes=axes, operand=output)
            else:
                reason = "its axes are mixed" if real else f"it is converted to {output.dtype}"
                reasons[view.param] = f"{reason} before it is used"
        found.append(moved)
    return Met(reasons) if reasons else found


def _slice(state: Interpreter, node: Node, views: Views) -> Result:
    only = _only_param(views)
    return _unknown(state, node, views) if only is None else cut_out(node, only[1])


def _gather(state: Interpreter, node: Node, views: Views) -> Result:
    only = _only_param(views)
    if only is None:
        return _unknown(state, node, views)
    number, view = only
    if number != 0:
        return "it is used as an index"
    rows = _rows_in_order(state, node, view)
    if rows is not None:
        return [rows]
    if view.scale is not None:
        return "it is multiplied with a constant before it is indexed"
    return Met({view.param: embedding_site(node, view)})


def _rows_in_order(state: Interpreter, node: Node, view: ParamView) -> ParamView | None:
    """Rows that are looked up, are known and follow one another: they are cut out."""
    indices = state.number(node.inputs[1])
    rows = None if indices is None else np.asarray(indices).reshape(-1)
    site = embedding_site(node, view)
    if rows is None or not rows.size or isinstance(site, str) or site.positions != (0,):
        return None
    first, last = int(rows[0]), int(rows[0]) + rows.size
    in_order = first >= 0 and last <= view.axes.shape[0] and np.all(np.diff(rows) == 1)
    whole_rows = site.layouts[0].inputs == view.axes.dims[0]
    piece = cut_piece(view, {0: (first, last)}) if in_order and whole_rows else None
    return None if piece is None else replace(piece, operand=node.outputs[0])


def _dot_general(state: Interpreter, node: Node, views: Views) -> Result:
    concatenated = [view for view in views if isinstance(view, ConcatView)]
    if len(concatenated) == 1 and len(params_among(views)) == len(concatenated[0].params):
        (view,) = concatenated
        parts = dense_parts(node, view, views.index(view))
        return parts if isinstance(parts, str) else _met_parts(view, parts)
    only = _only_param(views)
    if only is None:
        return _unknown(state, node, views)
    number, view = only
    site = dense_site(node, view, is_left=number == 0)
    if not isinstance(site, str) and view.scale is None:
        site = as_lookup(site, state.made_by)
    return Met({view.param: site})


def _met_parts(view: ConcatView, sites: Parts, alone: Parts | None = None) -> Met:
    """Uses of parameters that are put together, each with its own part of the output."""
    return Met(
        {
            param.param: Encounter(site.node, site, alone=None if alone is None else alone.sites[k])
            for k, (param, site) in enumerate(zip(view.params, sites.sites, strict=True))
        },
        sites,
    )


def _conv(state: Interpreter, node: Node, views: Views) -> Result:
    only = _only_param(views)
    if only is None:
        return _unknown(state, node, views)
    number, view = only
    return Met({view.param: conv_site(node, view) if number == 1 else "it is convolved"})


def _mul(state: Interpreter, node: Node, views: Views) -> Result:
    only = _only_param(views)
    if only is not None:
        return _scaled_by_number(state, node, *only) or _scale(state, node, *only)
    if params_among(views):
        return _unknown(state, node, views)
    # `(r * s) * v` is `(r * v) * s`: a scale whose output is multiplied further.
    for number, view in enumerate(views):
        if isinstance(view, SiteView) and view.only and _is_scale(view.site):
            further = scaled_further(view.site, node, view.axes, node.inputs[1 - number])
            if further is None:
                break
            state.replace_site(view.site, further)
            return [SiteView(further, further.axes, state.readers[further.output] == 1)]
    return []


def _div(state: Interpreter, node: Node, views: Views) -> Result:
    only = _only_param(views)
    if only is None:
        return _unknown(state, node, views) if params_among(views) else []
    return _scaled_by_number(state, node, *only) or _unknown(state, node, views)


def _scaled_by_number(
    state: Interpreter, node: Node, number: int, view: ParamView
) -> list[ParamView] | None:
    """A parameter that is multiplied with, or divided by, a number that is known."""
    if (node.name, number) == ("div", 1):
        return None
    factor = state.number(node.inputs[1 - number])
    (output,) = node.outputs
    if factor is None or jnp.shape(factor) or output.shape != view.axes.shape:
        return None
    if not _jax.is_tracer(factor):  # Else it is good for this trace only, like all else.
        factor = np.asarray(factor)
    factor = factor if node.name == "mul" else 1 / factor
    scale = factor if view.scale is None else view.scale * factor
    return [replace(view, operand=output, scale=scale)]


def _scale(state: Interpreter, node: Node, number: int, view: ParamView) -> Result:
    other = node.inputs[1 - number]
    if not state.meets_data(node, view, other):
        return Met({view.param: Encounter(node, reason=NO_EXAMPLES, is_constant=True)})
    return Met({view.param: elementwise_site(node, _spread(node, view), other, "scale")})


def _add(state: Interpreter, node: Node, views: Views) -> Result:
    only = _only_param(views)
    concatenated = [view for view in views if isinstance(view, ConcatView)]
    if only is None and len(concatenated) == 1:
        return _shift_parts(state, node, views, concatenated[0])
    if only is None:
        return _unknown(state, node, views) if params_among(views) else []
    number, view = only
    (output,) = node.outputs
    # What is the same for all examples may be added to a parameter: its derivatives are the same.
    same_shape = output.shape == view.axes.shape
    if state.is_constant(output) and same_shape and view.scale is None:
        return [replace(view, operand=output)]
    other = node.inputs[1 - number]
    if not state.meets_data(node, view, other):
        return Met({view.param: Encounter(node, reason=NO_EXAMPLES, is_constant=True)})
    if view.scale is not None:
        return "it is multiplied with a constant before it is added"
    spread = _spread(node, view)
    alone = elementwise_site(node, spread, other, "shift")
    before = state.views.get(other)
    if isinstance(alone, Site) and isinstance(before, SiteView) and before.only:
        fits = before.axes.shape == output.shape and _takes_bias(before.site)
        joined = join(before.site, node, before.axes, spread) if fits else None
        if joined is not None and not state.reason:
            state.replace_site(before.site, joined)
            return Met({view.param: Encounter(node, joined, alone=alone)})
    return Met({view.param: alone})


def _shift_parts(state: Interpreter, node: Node, views: Views, view: ConcatView) -> Result:
    if len(params_among(views)) > len(view.params):
        return _meets_another(node)
    other = node.inputs[1 - views.index(view)]
    before = state.views.get(other)
    parts = before if isinstance(before, Parts) and state.readers[other] == 1 else None
    result = shift_parts(node, view, other, parts)
    if isinstance(result, str):
        return result
    joined, alone = result
    if parts is not None and joined != alone:
        for old, new in zip(parts.sites, joined.sites, strict=True):
            state.replace_site(old, new)
    return _met_parts(view, joined, alone)


def _concatenate(state: Interpreter, node: Node, views: Views) -> Result:
    if any(isinstance(view, ConcatView) for view in views):
        return _unknown(state, node, views)
    params = [view for view in views if isinstance(view, ParamView)]
    if len(params) < len(views):
        beside = [view if isinstance(view, ParamView) else None for view in views]
        return Met(put_beside(node, beside))
    if any(view.scale is not None for view in params):
        scaled = "one of them is multiplied with a constant before it is put together"
        return f"{scaled} with others"
    return [ConcatView(tuple(params), node.params["dimension"])]


def _spread(node: Node, view: ParamView) -> ParamView:
    """The parameter broadcast to the result: an axis of size one stands for a longer one."""
    shape = node.outputs[0].shape
    if view.axes.shape == shape:
        return view
    # A number has no axes to begin with; anything else has as many as the result.
    axes = range(len(shape)) if view.axes.dims else ()
    return replace(view, axes=view.axes.broadcast(shape, axes))


def _is_scale(site: Site) -> bool:
    return site.has_scale and not site.has_shift


def _takes_bias(site: Site) -> bool:
    if site.tag is scale_and_shift_tag:
        return _is_scale(site)
    return len(site.params) == 1 and site.tag is not embedding_tag


TRANSFER: dict[str, Transfer] = {
    **dict.fromkeys(REARRANGED, _rearrange),
    "slice": _slice,
    "split": _slice,
    "gather": _gather,
    "dot_general": _dot_general,
    "conv_general_dilated": _conv,
    "mul": _mul,
    "div": _div,
    "add": _add,
    "add_any": _add,
    "concatenate": _concatenate,
}
"""What is known of operations, by name. Any other makes the parameters that it meets generic."""


def find_uses(
    program: Program,
    params: Sequence[Variable],
    through_custom: bool = False,
    examples: Examples | None = None,
    is_tagged: bool = False,
) -> Interpreter:
    """Find the uses of each parameter.

    `through_custom`: also inside custom derivatives. `is_tagged`: all layers are tagged already,
    and it is only to be found which parameters these have.
    """
    examples = examples or Examples()
    state = Interpreter(examples, through_custom, is_tagged)
    state.uses = {number: [] for number in range(len(params))}
    state.readers = _readers(program)
    state.order = {node: number for number, node in enumerate(program.all_nodes())}
    for number, variable in enumerate(params):
        axes = Axes.of(variable.shape)
        state.views[variable] = ParamView(number, variable.shape, axes, variable)
    if examples.is_known:
        inputs = set(program.inputs)
        state.data.update(x for x in examples.rows if x in inputs or isinstance(x, Constant))
    else:
        state.data.update(program.inputs)
    state.data.difference_update(params)
    state.walk(program)
    return state


def _readers(program: Program) -> Counter[Operand]:
    """How often each operand is read."""
    count: Counter[Operand] = Counter(program.outputs)
    for node in program.all_nodes():
        count.update(node.inputs)
        if node.body is not None:
            count.update(node.body.outputs)
    return count
