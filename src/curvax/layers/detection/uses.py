"""Following parameters through a program to where they are used.

From each parameter, steps that only re-arrange it (`REARRANGED`), cut out a part of it or multiply
it with a constant are followed to the operations that use it, and each use is either a site of a
layer (`detection/sites.py`) or has a reason why it is none. A bias joins the product it is added
to, if nothing else reads that product.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from curvax import _jax
from curvax.layers.detection.axes import REARRANGED, Arrangement, Axes
from curvax.layers.detection.examples import Examples
from curvax.layers.detection.program import Constant, Node, Operand, Program, Variable
from curvax.layers.detection.sites import (
    Cut,
    ParamView,
    Site,
    conv_site,
    dense_site,
    elementwise_site,
    embedding_site,
    join,
    scaled_further,
)
from curvax.layers.tags import LayerTag, embedding_tag

__all__ = [
    "NO_EXAMPLES",
    "OPERATIONS",
    "ConcatView",
    "Found",
    "Frame",
    "Parts",
    "SiteView",
    "Use",
    "View",
    "as_lookup",
    "concat_shape",
    "cut_out",
    "cut_piece",
    "dense_parts",
    "find_uses",
    "put_beside",
    "shift_parts",
]


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
        alone.append(_part(replace(site, params=(spread,)), view.axis, start, start + size))
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


def _cut_further(view: ParamView, cut: Cut) -> ParamView:
    """What is left of a parameter if a piece is cut out of what was left already."""
    axis, start, stop = cut
    before = {a: first for a, first, _ in view.cuts}.get(axis, 0)
    rest = [other for other in view.cuts if other[0] != axis]
    return replace(view, cuts=tuple(sorted([*rest, (axis, before + start, before + stop)])))


# What is found of parameters: their uses, and what is on the way to these.


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
class SiteView:
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
    readers: Counter[Operand] = field(default_factory=Counter)
    """How often each operand is read."""
    order: dict[Node, int] = field(default_factory=dict)
    """The nodes, in the order in which they are computed."""
    doubtful: set[Site] = field(default_factory=set)
    """Sites that met nothing so far that differs from example to example."""
    views: dict[Operand, ParamView] = field(default_factory=dict)
    """All operands that are parameters, at most re-arranged."""
    without_derivative: set[int] = field(default_factory=set)
    """Parameters with uses, all of which were left out as no loss has a derivative there."""

    def is_param(self, operand: Operand) -> bool:
        """Whether an operand is a parameter, at most re-arranged."""
        return operand in self.views and self.views[operand].scale is None

    def read_elsewhere(self, nodes: Collection[Node], tag: Node | None = None) -> int:
        """How many values that some nodes compute from parameters are read by others, too.

        What is tagged is not read by others: they read the tag.
        """
        if not nodes:
            return 0
        inside: Counter[Operand] = Counter(tag.inputs) if tag is not None else Counter()
        for node in nodes:
            inside.update(node.inputs)
        computed: set[Operand] = set(self.views)
        for node in sorted(nodes, key=lambda node: self.order.get(node, 0)):
            if not computed.isdisjoint(node.inputs):
                computed.update(node.outputs)
        outputs = {out for node in nodes for out in node.outputs}
        found = (outputs & computed) - set(self.views)
        return sum(self.readers[operand] > inside[operand] for operand in found)

    def add(self, param: int, use: Use) -> None:
        self.uses.setdefault(param, []).append(use)

    def give_up(self, reason: str) -> None:
        """Let no site be doubtful any more: none of these is one."""
        for uses in self.uses.values():
            uses[:] = [
                Use(use.node, reason=reason) if use.site in self.doubtful else use for use in uses
            ]

    def leave_out(self, reached: Set[Operand]) -> None:
        """Leave out the uses that return nothing that is reached: there is no curvature there."""
        for param, uses in self.uses.items():
            kept = [use for use in uses if not reached.isdisjoint(use.node.outputs)]
            if uses and not kept:
                self.without_derivative.add(param)
            uses[:] = kept

    def replace_site(self, old: Site, new: Site) -> None:
        """Put a site in the place of another wherever that is used."""
        for uses in self.uses.values():
            uses[:] = [replace(use, site=new) if use.site is old else use for use in uses]


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
        constants=(("rows", (vectors.shape[-1], False)),),
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


# Where things stand in one body of a program, and what an operation with a parameter is there.

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
        outputs = _jax.run_now(node.equation, values)
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


def find_uses(
    program: Program,
    params: Sequence[Variable],
    through_custom: bool = False,
    examples: Examples | None = None,
    is_tagged: bool = False,
) -> Found:
    """The uses of each parameter.

    `through_custom`: also inside custom derivatives. `is_tagged`: all layers are tagged already,
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
        if not _jax.is_tracer(factor):  # Else it is good for this trace only, like all else.
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
            name = _jax.function_name(node.equation)
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
        form = _jax.ScanForm.of(node.equation)
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
