"""`find_uses`: follow parameters through a program to the operations that use them.

Operations that only rearrange a parameter (`REARRANGED`), slice it or multiply it with a constant
are followed (`ParamView`) to the operations that consume it. Each consumer is either a
`CandidateUse` of a layer, or there is a reason why it is none. A bias joins the product that it is
added to, if nothing else reads that product.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from curvax import _jax
from curvax.layers.detection.axes import REARRANGED, Arrangement, Axes, joined
from curvax.layers.detection.candidates import (
    CandidateUse,
    Lookup,
    ParamView,
    Reason,
    conv_use,
    dense_use,
    elementwise_use,
    embedding_use,
    with_bias,
    with_factor,
)
from curvax.layers.detection.constants import ConstantFolder
from curvax.layers.detection.examples import Examples
from curvax.layers.detection.lifting import Lifting
from curvax.layers.detection.program import (
    Constant,
    Node,
    Operand,
    Program,
    Variable,
    dot_operands,
)
from curvax.layers.tags import (
    LayerTag,
    dense_tag,
    embedding_tag,
    scale_and_shift_tag,
)
from curvax.layers.use import Slice

# Concatenated parameters: fused gates, fused projections.
#
# A `concatenate` of parameters is followed like a single one. Where it is contracted with an input,
# and the axis of concatenation is one of the output, each parameter is a dense layer of the same
# input whose output is a slice. Concatenated biases join slice by slice. A parameter that is
# concatenated with data, as a class token at the start of a sequence, is a shift of its slice.


@dataclass(frozen=True)
class ConcatView:
    """An operand that is several parameters, concatenated along an axis."""

    params: tuple[ParamView, ...]
    axis: int

    @property
    def sizes(self) -> list[int]:
        """The length of each parameter along the axis."""
        return [view.axes.shape[self.axis] for view in self.params]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the operand."""
        shape = self.params[0].axes.shape
        return (*shape[: self.axis], sum(self.sizes), *shape[self.axis + 1 :])

    def rearranged(self, node: Node, output: Variable) -> "ConcatView | None":
        """Return the output of an operation in `REARRANGED`; None if it mixes the parameters."""
        axis = self._axis_after(node, output)
        if axis is None:
            return None
        moved: list[ParamView] = []
        for view, size in zip(self.params, self.sizes, strict=True):
            resized = (*output.shape[:axis], size, *output.shape[axis + 1 :])
            shapes = {key: resized for key in ("shape", "new_sizes") if key in node.params}
            axes = REARRANGED[node.name](view.axes, {**node.params, **shapes})
            if axes is None:
                return None
            moved.append(replace(view, axes=axes))
        return ConcatView(tuple(moved), axis)

    def _axis_after(self, node: Node, output: Variable) -> int | None:
        """Return the axis of concatenation after an operation."""
        if node.name == "transpose":
            return list(node.params["permutation"]).index(self.axis)
        if node.name == "broadcast_in_dim":
            return int(node.params["broadcast_dimensions"][self.axis])
        before, size, new = math.prod(self.shape[: self.axis]), self.shape[self.axis], output.shape
        found = [k for k in range(len(new)) if math.prod(new[:k]) == before and new[k] == size]
        return found[0] if found else None


@dataclass(frozen=True)
class SlicedUses:
    """Uses whose outputs are the slices of one output."""

    uses: tuple[CandidateUse, ...]


def dense_uses(node: Node, view: ConcatView, index: int) -> SlicedUses | Reason:
    """Return the dense layers that a `dot_general` of concatenated weights computes.

    `index` says which of the operands they are.
    """
    side = dot_operands(node)[index]
    if view.axis not in side.free:
        return "it is concatenated with others along an axis that is not one of the outputs"
    uses: list[CandidateUse] = []
    start = 0
    for param, size in zip(view.params, view.sizes, strict=True):
        use = dense_use(node, param, index)
        if isinstance(use, str):
            return use
        axis = use.features[side.free.index(view.axis)]
        uses.append(_with_output_slice(use, axis, start, start + size))
        start += size
    return SlicedUses(tuple(uses))


class Shifts(NamedTuple):
    """Concatenated parameters that are added: as biases of what they are added to, and alone."""

    joined: SlicedUses
    alone: SlicedUses


def shift_uses(
    node: Node, view: ConcatView, other: Operand, before: SlicedUses | None
) -> Shifts | Reason:
    """Return the shifts that adding concatenated parameters computes, or why they are none.

    Arguments:
        node: The sum.
        view: The concatenated parameters.
        other: The other operand.
        before: The uses that compute the other operand, if their outputs are slices of it. The
            parameters become their biases if they fit; otherwise `joined` and `alone` are the same.
    """
    (output,) = node.outputs
    if len(output.shape) != len(view.shape):
        return "it is concatenated with others and added in another shape"
    shifts: list[CandidateUse] = []
    start = 0
    for param, size in zip(view.params, view.sizes, strict=True):
        shape = list(output.shape)
        shape[view.axis] = size
        broadcast = replace(param, axes=param.axes.broadcast(shape, range(len(shape))))
        shift = elementwise_use(node, broadcast, other, "shift")
        if isinstance(shift, str):
            return shift
        shifts.append(_with_output_slice(shift, view.axis, start, start + size))
        start += size
    biased: list[CandidateUse] = []
    slices = [shift.output_slice for shift in shifts]
    if before is not None and [use.output_slice for use in before.uses] == slices:
        for use, shift in zip(before.uses, shifts, strict=True):
            with_shift = with_bias(use, node, use.axes, shift.params[0])
            if with_shift is not None and not use.params[1:]:
                biased.append(with_shift)
    alone = SlicedUses(tuple(shifts))
    return Shifts(SlicedUses(tuple(biased)) if len(biased) == len(shifts) else alone, alone)


def shifts_next_to_data(
    node: Node, views: Sequence[ParamView | None]
) -> dict[int, CandidateUse | Reason]:
    """Return, by parameter, the shifts of zeros that a `concatenate` with data computes."""
    axis, start = int(node.params["dimension"]), 0
    found: dict[int, CandidateUse | Reason] = {}
    for operand, view in zip(node.inputs, views, strict=True):
        stop = start + operand.shape[axis]
        if view is not None:
            zero = Constant(np.zeros((), node.outputs[0].dtype))
            use = elementwise_use(node, view, zero, "shift")
            if view.scale is not None:
                use = "it is multiplied with a constant before it is concatenated with data"
            if view.param in found:
                use = "it is concatenated with data more than once"
            if not isinstance(use, str):
                use = _with_output_slice(use, axis, start, stop)
            found[view.param] = use
        start = stop
    return found


def _with_output_slice(use: CandidateUse, axis: int, start: int, stop: int) -> CandidateUse:
    shape = list(use.output.shape)
    shape[axis] = stop - start
    return replace(use, axes=Axes.of(shape), output_slice=(axis, start, stop))


# Slices of a parameter: fused weights that are split. Each is followed like a parameter.

_NOT_CONTIGUOUS = "slices of it are taken that are not contiguous"


def slice_views(node: Node, view: ParamView) -> list[ParamView] | Reason:
    """Return the views of a parameter that `slice` or `split` returns, or why it cannot."""
    if node.name == "split":
        axis, stops = int(node.params["axis"]), [0]
        for size in node.params["sizes"]:
            stops.append(stops[-1] + int(size))
        pieces = [{axis: bounds} for bounds in itertools.pairwise(stops)]
    else:
        if any(stride != 1 for stride in node.params["strides"] or ()):
            return _NOT_CONTIGUOUS
        bounds = zip(node.params["start_indices"], node.params["limit_indices"], strict=True)
        pieces = [{axis: (int(a), int(b)) for axis, (a, b) in enumerate(bounds)}]
    views = [slice_view(view, piece) for piece in pieces]
    found = [v for v in views if v is not None]
    if len(found) < len(views):
        return _NOT_CONTIGUOUS
    return [replace(v, operand=output) for v, output in zip(found, node.outputs, strict=True)]


def slice_view(view: ParamView, bounds: dict[int, tuple[int, int]]) -> ParamView | None:
    """Slice a parameter along some axes; None if that is not a contiguous slice of it."""
    for axis, (start, stop) in bounds.items():
        if (start, stop) == (0, view.axes.shape[axis]):
            continue
        sliced = view.axes.slice(axis, start, stop)
        if sliced is None:
            return None
        axes, param_slice = sliced
        view = replace(view, axes=axes)
        if param_slice is not None:
            view = replace(view, slices=_composed(view.slices, param_slice))
    return view


def _composed(slices: Sequence[Slice], further: Slice) -> tuple[Slice, ...]:
    """Return the slices of a parameter of which a slice is sliced further."""
    axis, start, stop = further
    offset = {a: first for a, first, _ in slices}.get(axis, 0)
    others = [other for other in slices if other[0] != axis]
    return tuple(sorted([*others, (axis, offset + start, offset + stop)]))


# Products with one-hot vectors, which look up rows of an embedding.


def as_lookup(use: CandidateUse, made_by: Mapping[Operand, Node]) -> CandidateUse:
    """Turn a dense layer of one-hot vectors into an embedding; return others as they are."""
    (vectors,) = use.factors
    indices = _one_hot_indices(vectors, made_by)
    side = dot_operands(use.node)[use.node.inputs.index(vectors)]
    if indices is None or side.contracted != (len(vectors.shape) - 1,) or side.batch:
        return use
    dims = Axes.of(indices.shape).dims
    return replace(
        use,
        tag=embedding_tag,
        factors=(indices,),
        input_arrangement=Arrangement.of(dims, [joined(dims)]),
        lookup=Lookup(vectors.shape[-1]),
    )


def _one_hot_indices(vectors: Operand, made_by: Mapping[Operand, Node]) -> Operand | None:
    """Return the indices of one-hot vectors: `indices[..., None] == arange`, as floats."""
    compared = _before_conversions(vectors, made_by)
    if compared is None or compared not in made_by or made_by[compared].name != "eq":
        return None
    for one, other in (made_by[compared].inputs, made_by[compared].inputs[::-1]):
        counting = made_by.get(other)
        expanding = made_by.get(one)
        if counting is None or counting.name != "iota" or expanding is None:
            continue
        counts_last_axis = int(counting.params["dimension"]) == len(vectors.shape) - 1
        is_expanded = one.shape == (*vectors.shape[:-1], 1)
        if counts_last_axis and is_expanded and expanding.name in ("broadcast_in_dim", "reshape"):
            (indices, *_) = expanding.inputs
            if indices.shape == vectors.shape[:-1]:
                return indices
    return None


def _before_conversions(operand: Operand, made_by: Mapping[Operand, Node]) -> Operand | None:
    """Return what was converted to the type of an operand; None if nothing was."""
    found = None
    while operand in made_by and made_by[operand].name == "convert_element_type":
        (operand,) = made_by[operand].inputs
        found = operand
    return found


# The interpreter.


@dataclass(frozen=True, eq=False)
class Consumer:
    """An operation that consumes a parameter.

    Attributes:
        node: The operation.
        use: The use of a layer that it may be; None if it is none.
        reason: Why it is none.
        alone: For a bias, the same as a use without weights, in case it cannot stay with them.
        is_constant: Whether it computes the same for all examples.
    """

    node: Node
    use: CandidateUse | None = None
    reason: Reason = ""
    alone: CandidateUse | None = None
    is_constant: bool = False


@dataclass(frozen=True)
class UseView:
    """An operand that is the output of a use, at most rearranged.

    Attributes:
        use: The use.
        axes: Where the axes of its output are in the operand.
        is_only: Whether nothing else reads the output on the way.
    """

    use: CandidateUse
    axes: Axes
    is_only: bool


View = ParamView | UseView | ConcatView | SlicedUses

Views = Sequence[View | None]
"""What the operands, or the outputs, of an operation are; None for anything else."""


class Consumed(NamedTuple):
    """What an operation that consumes parameters makes of them.

    Attributes:
        consumers: By the index of each parameter, the use, or the reason why there is none.
        view: The view of its output, if that is more than the output of a single use.
    """

    consumers: Mapping[int, Consumer | CandidateUse | Reason]
    view: View | None = None


Result = Views | Consumed | Reason
"""What an operation does with parameters.

Views of its outputs if it only rearranges them, `Consumed` if it may be a use of layers, or the
reason why it is none for any of its operands that are parameters.
"""

Transfer = Callable[["Interpreter", Node, Views], Result]
"""What an operation does, given the views of its operands, at least one of which is not None."""

NO_EXAMPLES = "it meets nothing that differs from example to example"


class Scope(NamedTuple):
    """The body that the interpreter is in.

    Attributes:
        reason: Why nothing in the current body can be a layer; "" if it can.
        in_example_loop: Whether the current body is inside a loop over examples.
        num_steps: How often the current body runs, by the loops around it.
    """

    reason: Reason = ""
    in_example_loop: bool = False
    num_steps: int = 1


@dataclass
class Interpreter:
    """Follows parameters through a program and its bodies to the operations that consume them.

    Each variable is defined once in a program, so that one table serves all bodies.
    """

    # Input.

    examples: Examples
    """The examples that values are about."""
    through_custom: bool = False
    """Whether to look into functions with custom derivatives."""
    is_tagged: bool = False
    """Whether all layers are tagged already, so that only the parameters of tags are wanted."""
    readers: Counter[Operand] = field(default_factory=Counter)
    """How often each operand is read."""
    order: dict[Node, int] = field(default_factory=dict)
    """The position of each node in the program."""

    # Tables, filled on the way.

    views: dict[Operand, View] = field(default_factory=dict)
    """Operands that are parameters or outputs of uses."""
    data: set[Operand] = field(default_factory=set)
    """Operands that depend on arrays with examples."""
    made_by: dict[Operand, Node] = field(default_factory=dict)
    """The node that computes each operand."""
    constants: ConstantFolder = field(init=False)
    """Values that depend on constants only."""

    # State of the walk.

    scope: Scope = field(default_factory=Scope)
    """The current body."""

    # Results.

    consumers: dict[int, list[Consumer]] = field(default_factory=dict)
    """For each parameter, the operations that consume it."""
    explicit: list[tuple[Node, list[ParamView | None]]] = field(default_factory=list)
    """Tags that the program has already, each with its parameters."""
    covered: dict[Node, set[Node]] = field(default_factory=dict)
    """For each of these tags, the nodes between its inputs and its outputs."""
    without_derivative: set[int] = field(default_factory=set)
    """Parameters with consumers, in none of which a loss has a derivative."""
    example_independent: set[CandidateUse] = field(default_factory=set)
    """Uses that compute the same for all examples, as far as is known."""

    def __post_init__(self) -> None:
        self.constants = ConstantFolder(self.made_by, self.order)

    @classmethod
    def of(
        cls,
        program: Program,
        views: Mapping[Operand, ParamView],
        examples: Examples,
        through_custom: bool = False,
        is_tagged: bool = False,
    ) -> "Interpreter":
        """Return an interpreter of a program some of whose inputs are parameters."""
        return cls(
            examples,
            through_custom,
            is_tagged,
            readers=_count_readers(program),
            order={node: position for position, node in enumerate(program.all_nodes())},
            views={**views},
            consumers={view.param: [] for view in views.values()},
        )

    # What was found.

    def is_param(self, operand: Operand) -> bool:
        """Return whether an operand is a parameter, at most rearranged and sliced."""
        view = self.views.get(operand)
        return isinstance(view, ParamView) and view.scale is None

    def params_of(self, operands: Sequence[Operand]) -> list[ParamView | None]:
        """Return the views of those operands that are parameters."""
        views = [self.views.get(operand) for operand in operands]
        return [view if isinstance(view, ParamView) else None for view in views]

    def read_elsewhere(self, nodes: Collection[Node], tag: Node | None = None) -> int:
        """Count the values that some nodes compute from parameters and that others also read.

        The tag of the nodes, if given, is not counted: others read what it returns.
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

    def drop_unreached(self, reached: Set[Operand]) -> None:
        """Drop consumers in whose outputs no loss has a derivative: there is no curvature."""
        for param, consumers in self.consumers.items():
            kept = [each for each in consumers if not reached.isdisjoint(each.node.outputs)]
            if consumers and not kept:
                self.without_derivative.add(param)
            consumers[:] = kept

    def lift(self, program: Program, reached: Set[Operand]) -> Lifting:
        """Lift the uses that compute the same for all examples; reject those that cannot be."""
        lifting = Lifting()
        # Weights and their bias are consumed by one use.
        lifted: dict[CandidateUse, CandidateUse | Reason] = {}
        for consumers in self.consumers.values():
            for k, each in enumerate(consumers):
                if each.use is None or each.use not in self.example_independent:
                    continue
                if each.use not in lifted:
                    lifted[each.use] = self._lifted(each.use, lifting, program, reached)
                new = lifted[each.use]
                if isinstance(new, str):
                    consumers[k] = Consumer(each.node, reason=new, is_constant=True)
                else:
                    consumers[k] = replace(each, use=new)
        return lifting

    def _lifted(
        self, use: CandidateUse, lifting: Lifting, program: Program, reached: Set[Operand]
    ) -> CandidateUse | Reason:
        """Return a use with an axis of examples, or why it cannot have one."""
        is_dense = use.tag is dense_tag and use.output_slice is None
        if not self.examples.is_known or not is_dense:
            return NO_EXAMPLES
        unbiased = use.unbiased
        if unbiased is not None:
            found = self._lifted(unbiased, lifting, program, reached)
            if isinstance(found, str):
                return found
            unbiased = found
        why = lifting.add(use.output, program, self.examples, reached)
        if why:
            return f"{NO_EXAMPLES}, and {why}"
        return replace(use, lifted_examples=lifting.totals[use.output], unbiased=unbiased)

    # Walking through a program.

    def walk(self, program: Program) -> None:
        """Interpret all nodes of a program or a body, whose inputs are in the tables."""
        for node in program.nodes:
            self._visit(node)

    def _visit(self, node: Node) -> None:
        if any(operand in self.data for operand in node.inputs):
            self.data.update(node.outputs)
        self.made_by.update(dict.fromkeys(node.outputs, node))
        views = [self.views.get(operand) for operand in node.inputs]
        if isinstance(node.equation.primitive, LayerTag):
            self._record_tag(node, views)
        elif node.body is not None:
            self._enter(node, node.body, views)
        elif any(view is not None for view in views):
            transfer = TRANSFER.get(node.name, _unknown)
            self._record(node, views, transfer(self, node, views))

    def _record(self, node: Node, views: Views, result: Result) -> None:
        if isinstance(result, str):
            result = Consumed({view.param: result for view in params_among(views)})
        if not isinstance(result, Consumed):
            self.views.update({x: v for x, v in zip(node.outputs, result, strict=False) if v})
            return
        for param, consumer in result.consumers.items():
            self.add_consumer(node, param, consumer)
        if result.view is not None and not self.scope.reason and not is_complex(node.outputs[0]):
            self.views[node.outputs[0]] = result.view

    def add_consumer(
        self, node: Node, param: int, consumer: Consumer | CandidateUse | Reason
    ) -> None:
        """Note that a node consumes a parameter."""
        if self.scope.reason and not isinstance(consumer, str):
            consumer = self.scope.reason
        if isinstance(consumer, str):
            consumer = Consumer(node, reason=consumer)
        elif isinstance(consumer, CandidateUse):
            consumer = Consumer(node, consumer)
        if consumer.use is not None and is_complex(consumer.use.output):
            consumer = Consumer(node, reason=COMPLEX)
        self.consumers[param].append(consumer)
        use = consumer.use
        if use is not None:
            is_only = self.readers[use.output] == 1
            self.views[use.output] = UseView(use, use.axes, is_only)
            if not self._depends_on_example(use):
                self.example_independent.add(use)

    def replace_use(self, old: CandidateUse, new: CandidateUse) -> None:
        """Replace a use by one that includes it."""
        for param in {view.param for view in old.params}:
            consumers = self.consumers[param]
            consumers[:] = [replace(c, use=new) if c.use is old else c for c in consumers]
        if not self._depends_on_example(new):
            self.example_independent.add(new)

    def _record_tag(self, node: Node, views: Views) -> None:
        tag = node.equation.primitive
        # A tag that detection placed has the scaled parameter, and its input is scaled instead.
        is_scale_allowed = node.params.get("use") is not None
        params = [
            view
            if isinstance(view, ParamView) and (is_scale_allowed or view.scale is None)
            else None
            for view in views[tag.num_outputs + tag.num_inputs :]
        ]
        self.explicit.append((node, params))
        outputs, rest = node.inputs[: tag.num_outputs], node.inputs[tag.num_outputs :]
        self.covered[node] = set() if self.is_tagged else self._between(outputs, rest)

    def _between(self, outputs: Sequence[Operand], inputs: Sequence[Operand]) -> set[Node]:
        """Return the nodes that compute the outputs from the inputs."""
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
        """Interpret the body of a node."""
        around = self.scope
        if node.kind == "custom" and not self.through_custom and not around.reason:
            name = _jax.function_name(node.equation)
            reason = f"it is used inside `{name}`, which has derivatives of its own"
            self.scope = around._replace(reason=reason)
        for variable, operand in zip(body.inputs, node.inputs, strict=True):
            if operand in self.data:
                self.data.add(variable)
        params = [view if isinstance(view, ParamView) else None for view in views]
        if node.kind == "scan":
            outputs = self._enter_scan(node, body, params)
        else:
            for variable, view in zip(body.inputs, params, strict=True):
                if view is not None:
                    self.views[variable] = replace(view, operand=variable)
            self.walk(body)
            outputs = self.params_of(body.outputs)
        self.scope = around
        for variable, view, inner in zip(node.outputs, outputs, body.outputs, strict=True):
            if view is not None:
                self.views[variable] = replace(view, operand=variable)
            if inner in self.data:
                self.data.add(variable)

    def _enter_scan(
        self, node: Node, body: Program, views: Sequence[ParamView | None]
    ) -> list[ParamView | None]:
        """Interpret the body of a loop. Return the parameters that it returns unchanged."""
        form = _jax.ScanForm.of(node.equation)
        self.scope = self.scope._replace(
            in_example_loop=self.scope.in_example_loop or node in self.examples.loops,
            num_steps=self.scope.num_steps * form.length,
        )
        carried = range(form.num_consts, form.num_consts + form.num_carry)
        unchanged: dict[int, ParamView] = {}
        for k, (variable, view) in enumerate(zip(body.inputs, views, strict=True)):
            if view is None:
                continue
            if k in carried:
                position = k - form.num_consts
                if body.outputs[position] is not variable:
                    self.add_consumer(node, view.param, "a loop carries it along and changes it")
                    self.data.add(variable)
                    continue
                unchanged[position] = view
            axes = view.axes.inside_loop(element=k >= carried.stop)
            self.views[variable] = replace(view, axes=axes, operand=variable)
        # What a loop carries depends on data if anything does that it is computed from.
        if any(operand in self.data for operand in node.inputs):
            self.data.update(body.inputs[k] for k in carried)
        self.walk(body)
        for k, view in enumerate(self.params_of(body.outputs)):
            if view is not None and k not in unchanged:
                self.add_consumer(node, view.param, "a loop returns it")
        return [unchanged.get(k) for k in range(len(node.outputs))]

    # What depends on examples.

    def is_constant(self, operand: Operand) -> bool:
        """Return whether a value is known to be the same for all examples."""
        return self.is_tagged or (self.examples.is_known and operand not in self.data)

    def meets_data(self, node: Node, view: ParamView, other: Operand) -> bool:
        """Return whether the other operand may differ from example to example.

        Where examples are known it is taken to: whether it does is decided later (`lift`).
        """
        has_broadcast_axis = any(atom.origin is None for atom in view.axes.atoms)
        is_broadcast = has_broadcast_axis or view.axes.shape != node.outputs[0].shape
        return self.examples.is_known or other in self.data or is_broadcast

    def _depends_on_example(self, use: CandidateUse) -> bool:
        """Return whether the output of a use differs from example to example, as far as is known.

        It does if it has examples; if it depends on data and is in a loop over examples; or if it
        depends on data and has as many positions as there are examples, as the edges of a graph
        do. Where examples are not known, the number of positions, in all steps, decides.
        """
        if use.output in self.examples.axes:
            return True
        num_positions = math.prod(use.output.shape[axis] for axis in use.positions)
        if not self.examples.is_known:
            return num_positions * self.scope.num_steps >= self.examples.batch_size
        is_enough = self.scope.in_example_loop or num_positions >= self.examples.batch_size
        return is_enough and use.output in self.data


COMPLEX = "it is combined with complex numbers"


def is_complex(operand: Operand) -> bool:
    """Return whether an array is complex. Statistics of layers are those of real numbers."""
    dtype = operand.dtype if isinstance(operand, Variable) else None
    return dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating)


def params_among(views: Views) -> list[ParamView]:
    """Return the parameters among some operands, concatenated ones included."""
    found: list[ParamView] = []
    for view in views:
        found += [view] if isinstance(view, ParamView) else []
        found += view.params if isinstance(view, ConcatView) else ()
    return found


# What operations do to parameters: one function each, in `TRANSFER`.


def _unknown(state: Interpreter, node: Node, views: Views) -> Reason:
    del state
    sources = [view for view in views if isinstance(view, ParamView | ConcatView)]
    if len(sources) > 1:
        return _meets_another(node)
    if any(isinstance(view, ConcatView) for view in sources):
        return f"it is concatenated with others, and used by `{node.name}`"
    inside = "inside" if node.kind == "opaque" else "by"
    return f"it is used {inside} `{node.name}`, of which no layer is known"


def _meets_another(node: Node) -> Reason:
    return f"it meets another parameter in `{node.name}` before it meets data"


def _only_param(views: Views) -> tuple[int, ParamView] | None:
    """Return the index and the view of the only operand that is a parameter; None otherwise."""
    found = [(k, view) for k, view in enumerate(views) if isinstance(view, ParamView)]
    return found[0] if len(found) == len(params_among(views)) == 1 else None


def _rearrange(state: Interpreter, node: Node, views: Views) -> Result:
    found: list[View | None] = []
    reasons: dict[int, Consumer | CandidateUse | Reason] = {}
    for view, output in zip(views, node.outputs, strict=False):
        is_real = output.dtype is not None and jnp.issubdtype(output.dtype, jnp.floating)
        moved: View | None = None
        if isinstance(view, ConcatView):
            moved = view.rearranged(node, output) if is_real else None
            mixed = "it is concatenated with others and then mixed with them"
            reasons |= {} if moved else {param.param: mixed for param in view.params}
        elif isinstance(view, ParamView | UseView):
            axes = REARRANGED[node.name](view.axes, node.params) if is_real else None
            if isinstance(view, UseView):
                is_only = view.is_only and state.readers[output] == 1
                moved = None if axes is None else replace(view, axes=axes, is_only=is_only)
            elif axes is not None:
                moved = replace(view, axes=axes, operand=output)
            else:
                reason = "its axes are mixed" if is_real else f"it is converted to {output.dtype}"
                reasons[view.param] = f"{reason} before it is used"
        found.append(moved)
    return Consumed(reasons) if reasons else found


def _slice(state: Interpreter, node: Node, views: Views) -> Result:
    only = _only_param(views)
    return _unknown(state, node, views) if only is None else slice_views(node, only[1])


def _gather(state: Interpreter, node: Node, views: Views) -> Result:
    only = _only_param(views)
    if only is None:
        return _unknown(state, node, views)
    index, view = only
    if index != 0:
        return "it is used as an index"
    rows = _contiguous_rows(state, node, view)
    if rows is not None:
        return [rows]
    if view.scale is not None:
        return "it is multiplied with a constant before it is indexed"
    return Consumed({view.param: embedding_use(node, view)})


def _contiguous_rows(state: Interpreter, node: Node, view: ParamView) -> ParamView | None:
    """Return the slice that a lookup of known, consecutive rows is; None if it is not one."""
    indices = state.constants.value(node.inputs[1])
    rows = None if indices is None else np.asarray(indices).reshape(-1)
    use = embedding_use(node, view)
    if rows is None or not rows.size or isinstance(use, str) or use.positions != (0,):
        return None
    first, last = int(rows[0]), int(rows[0]) + rows.size
    in_order = first >= 0 and last <= view.axes.shape[0] and np.all(np.diff(rows) == 1)
    is_first_axis = use.layouts[0].inputs == view.axes.dims[0]
    sliced = slice_view(view, {0: (first, last)}) if in_order and is_first_axis else None
    return None if sliced is None else replace(sliced, operand=node.outputs[0])


def _dot_general(state: Interpreter, node: Node, views: Views) -> Result:
    concatenated = [view for view in views if isinstance(view, ConcatView)]
    if len(concatenated) == 1 and len(params_among(views)) == len(concatenated[0].params):
        (view,) = concatenated
        uses = dense_uses(node, view, views.index(view))
        return uses if isinstance(uses, str) else _consumed_slices(view, uses)
    only = _only_param(views)
    if only is None:
        return _unknown(state, node, views)
    index, view = only
    use = dense_use(node, view, index)
    if not isinstance(use, str) and view.scale is None:
        use = as_lookup(use, state.made_by)
    return Consumed({view.param: use})


def _consumed_slices(
    view: ConcatView, uses: SlicedUses, alone: SlicedUses | None = None
) -> Consumed:
    """Return that each of the concatenated parameters is consumed by one of the uses."""
    consumers = {
        param.param: Consumer(use.node, use, alone=None if alone is None else alone.uses[k])
        for k, (param, use) in enumerate(zip(view.params, uses.uses, strict=True))
    }
    return Consumed(consumers, uses)


def _conv(state: Interpreter, node: Node, views: Views) -> Result:
    only = _only_param(views)
    if only is None:
        return _unknown(state, node, views)
    index, view = only
    return Consumed({view.param: conv_use(node, view) if index == 1 else "it is convolved"})


def _mul(state: Interpreter, node: Node, views: Views) -> Result:
    only = _only_param(views)
    if only is not None:
        return _scaled_by_constant(state, node, *only) or _scale(state, node, *only)
    if params_among(views):
        return _unknown(state, node, views)
    for index, view in enumerate(views):
        if isinstance(view, UseView) and view.is_only and _is_scale(view.use):
            use = with_factor(view.use, node, view.axes, node.inputs[1 - index])
            if use is None:
                break
            state.replace_use(view.use, use)
            return [UseView(use, use.axes, state.readers[use.output] == 1)]
    return []


def _div(state: Interpreter, node: Node, views: Views) -> Result:
    only = _only_param(views)
    if only is None:
        return _unknown(state, node, views) if params_among(views) else []
    return _scaled_by_constant(state, node, *only) or _unknown(state, node, views)


def _scaled_by_constant(
    state: Interpreter, node: Node, index: int, view: ParamView
) -> list[ParamView] | None:
    """Return the view of a parameter that is multiplied with, or divided by, a constant."""
    if (node.name, index) == ("div", 1):
        return None
    factor = state.constants.value(node.inputs[1 - index])
    (output,) = node.outputs
    if factor is None or jnp.shape(factor) or output.shape != view.axes.shape:
        return None
    if not _jax.is_tracer(factor):  # A tracer is valid in this trace only, like all else in it.
        factor = np.asarray(factor)
    factor = factor if node.name == "mul" else 1 / factor
    scale = factor if view.scale is None else view.scale * factor
    return [replace(view, operand=output, scale=scale)]


def _scale(state: Interpreter, node: Node, index: int, view: ParamView) -> Result:
    other = node.inputs[1 - index]
    if not state.meets_data(node, view, other):
        return Consumed({view.param: Consumer(node, reason=NO_EXAMPLES, is_constant=True)})
    return Consumed({view.param: elementwise_use(node, _broadcast(node, view), other, "scale")})


def _add(state: Interpreter, node: Node, views: Views) -> Result:
    only = _only_param(views)
    concatenated = [view for view in views if isinstance(view, ConcatView)]
    if only is None and len(concatenated) == 1:
        return _add_concatenated(state, node, views, concatenated[0])
    if only is None:
        return _unknown(state, node, views) if params_among(views) else []
    index, view = only
    (output,) = node.outputs
    # Adding what is the same for all examples does not change the derivatives by a parameter.
    is_same_shape = output.shape == view.axes.shape
    if state.is_constant(output) and is_same_shape and view.scale is None:
        return [replace(view, operand=output)]
    other = node.inputs[1 - index]
    if not state.meets_data(node, view, other):
        return Consumed({view.param: Consumer(node, reason=NO_EXAMPLES, is_constant=True)})
    if view.scale is not None:
        return "it is multiplied with a constant before it is added"
    bias = _broadcast(node, view)
    alone = elementwise_use(node, bias, other, "shift")
    before = state.views.get(other)
    if isinstance(alone, CandidateUse) and isinstance(before, UseView) and before.is_only:
        fits = before.axes.shape == output.shape and _takes_bias(before.use)
        biased = with_bias(before.use, node, before.axes, bias) if fits else None
        if biased is not None and not state.scope.reason:
            state.replace_use(before.use, biased)
            return Consumed({view.param: Consumer(node, biased, alone=alone)})
    return Consumed({view.param: alone})


def _add_concatenated(state: Interpreter, node: Node, views: Views, view: ConcatView) -> Result:
    if len(params_among(views)) > len(view.params):
        return _meets_another(node)
    other = node.inputs[1 - views.index(view)]
    found = state.views.get(other)
    before = found if isinstance(found, SlicedUses) and state.readers[other] == 1 else None
    shifts = shift_uses(node, view, other, before)
    if isinstance(shifts, str):
        return shifts
    if before is not None and shifts.joined != shifts.alone:
        for old, new in zip(before.uses, shifts.joined.uses, strict=True):
            state.replace_use(old, new)
    return _consumed_slices(view, shifts.joined, shifts.alone)


def _concatenate(state: Interpreter, node: Node, views: Views) -> Result:
    if any(isinstance(view, ConcatView) for view in views):
        return _unknown(state, node, views)
    params = [view for view in views if isinstance(view, ParamView)]
    if len(params) < len(views):
        views = [view if isinstance(view, ParamView) else None for view in views]
        return Consumed(shifts_next_to_data(node, views))
    if any(view.scale is not None for view in params):
        return "one of them is multiplied with a constant before it is concatenated with others"
    return [ConcatView(tuple(params), node.params["dimension"])]


def _broadcast(node: Node, view: ParamView) -> ParamView:
    """Broadcast a parameter to the shape of the output."""
    shape = node.outputs[0].shape
    if view.axes.shape == shape:
        return view
    # A scalar has no axes; anything else has as many as the output.
    axes = range(len(shape)) if view.axes.dims else ()
    return replace(view, axes=view.axes.broadcast(shape, axes))


def _is_scale(use: CandidateUse) -> bool:
    return use.has_scale and not use.has_shift


def _takes_bias(use: CandidateUse) -> bool:
    if use.tag is scale_and_shift_tag:
        return _is_scale(use)
    return len(use.params) == 1 and use.tag is not embedding_tag


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
"""What operations do to parameters, by name. Any other makes the parameters generic."""


def find_uses(
    program: Program,
    params: Sequence[Variable],
    through_custom: bool = False,
    examples: Examples | None = None,
    is_tagged: bool = False,
) -> Interpreter:
    """Find the operations that consume each parameter.

    Arguments:
        program: The program.
        params: The inputs that are parameters.
        through_custom: Whether to look into functions with custom derivatives.
        examples: The examples that values are about, if that is known.
        is_tagged: Whether all layers are tagged already, so that only the parameters of the tags
            are wanted.
    """
    examples = examples or Examples()
    views: dict[Operand, ParamView] = {
        variable: ParamView(index, variable.shape, Axes.of(variable.shape), variable)
        for index, variable in enumerate(params)
    }
    state = Interpreter.of(program, views, examples, through_custom, is_tagged)
    if examples.is_known:
        inputs = set(program.inputs)
        state.data.update(x for x in examples.axes if x in inputs or isinstance(x, Constant))
    else:
        state.data.update(program.inputs)
    state.data.difference_update(params)
    state.walk(program)
    return state


def _count_readers(program: Program) -> Counter[Operand]:
    """Count how often each operand is read."""
    count: Counter[Operand] = Counter(program.outputs)
    for node in program.all_nodes():
        count.update(node.inputs)
        if node.body is not None:
            count.update(node.body.outputs)
    return count
