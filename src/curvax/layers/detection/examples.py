"""Which examples the values of a program are about, and where these are.

The examples are the rows of the losses. It is assumed that arrays with an axis of as many elements
have one of these for each example, and the examples are followed from there through the program:
a rule for each primitive (`RULES`) says which axes of its outputs they are along. An assumption is
right if they arrive at the losses along the rows of these; otherwise some of the
arrays are taken not to be about examples, and the rest is tried again. Which arrays are a batch by
name or by intention does not matter: what is verified is that each row of a loss depends on one
example alone.

Only what depends on parameters matters for that: derivatives do not pass through anything else. So
a mean over a batch of data is a constant, and so are integers.
"""

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from curvax import _jax, _slicing
from curvax.layers.detection.axes import REARRANGED, Atom, Axes, Dims
from curvax.layers.detection.program import Constant, Node, Operand, Program, Variable
from curvax.layers.tags import LayerTag
from curvax.layers.use import INTERACT, NOT_FOLLOWED
from curvax.losses.tag import LossTag

# What operations do to the examples of their operands.
#
# `Rows` says which examples a value is about, and along which of its axes they are. The rules, one
# for each operation, say what follows for its outputs. What they promise is what exact curvature
# needs: an element of an output that is about one example is computed from nothing that is about
# another one, so that derivatives with respect to one example's elements stay with it. An operation
# without a rule is not followed.


_EXAMPLE = 0
"""The origin of the atoms that count examples; all other atoms have none."""


@dataclass(frozen=True)
class Rows:
    """Which examples a value is about, and where they are.

    Attributes:
        total: how many examples there are.
        start: the first of those that the value is about.
        dims: the atoms of each axis. Those with an origin are digits of the number of an example,
            counted from `start`.
        loops: the loops around, by number, each step of which is about other examples, with the
            atoms that their steps stand for.
    """

    total: int
    start: int
    dims: Dims
    loops: tuple[tuple[int, tuple[Atom, ...]], ...] = ()

    @classmethod
    def along(cls, axes: Sequence[int], shape: Sequence[int]) -> "Rows":
        """All examples, along axes of an array of that shape, the first of which is major."""
        dims, stride = [*no_examples(shape)], 1
        for axis in reversed(axes):
            dims[axis] = (Atom(_EXAMPLE, stride, shape[axis]),) if shape[axis] > 1 else ()
            stride *= shape[axis]
        return cls(stride, 0, tuple(dims))

    @property
    def count(self) -> int:
        """How many examples it is about."""
        taken = [atom for _, atoms in self.loops for atom in atoms]
        inside = [atom for dim in self.dims for atom in dim if atom.origin is not None]
        return math.prod(atom.size for atom in (*taken, *inside))

    @property
    def is_in_order(self) -> bool:
        """Whether its examples are in order along loops, outermost first, and then in a step."""
        taken = [atom for _, atoms in self.loops for atom in atoms]
        inside = [atom for dim in self.dims for atom in dim if atom.origin is not None]
        inside.sort(key=lambda atom: -atom.stride)
        return _tidy([*taken, *inside]) in ((), (Atom(_EXAMPLE, 1, self.count),))

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes along which there are examples."""
        return tuple(axis for axis in range(len(self.dims)) if self.has_examples(axis))

    def has_examples(self, axis: int) -> bool:
        """Whether there are examples along an axis, perhaps merged with something else."""
        return any(atom.origin is not None for atom in self.dims[axis])

    def has_only_examples(self, axis: int) -> bool:
        """Whether an axis is one of examples and nothing else."""
        return self.has_examples(axis) and all(a.origin is not None for a in self.dims[axis])

    def is_whole(self, axis: int) -> bool:
        """Whether an axis has the examples that the value is about, in order, and no other does."""
        own = (Atom(_EXAMPLE, 1, self.count),) if self.count > 1 else ()
        return not self.loops and self.dims[axis] == own

    def with_dims(self, dims: Sequence[Sequence[Atom]]) -> "Rows":
        """With other axes."""
        return Rows(self.total, self.start, tuple(map(_tidy, dims)), self.loops)

    def part(self, axis: int, start: int, count: int) -> "Rows":
        """The examples from `start` on, along an axis that has all of them."""
        own = (Atom(_EXAMPLE, 1, count),) if count > 1 else ()
        dims = (*self.dims[:axis], own, *self.dims[axis + 1 :])
        return replace(self, start=self.start + start, dims=dims)


Found = list[Rows | None] | str
"""For each output, which examples it is about; or why that is not known."""

Rule = Callable[[Node, Sequence[Rows | None]], Found]


def no_examples(shape: Sequence[int]) -> Dims:
    """The axes of a value of which nothing is known."""
    return tuple((Atom(None, 1, size),) if size != 1 else () for size in shape)


def _common(rows: Sequence[Rows | None], shape: Sequence[int]) -> Rows | str | None:
    """What an element-by-element function of such operands is about.

    Operands are of that shape, or repeated along axes of size one, or numbers.
    """
    found: Rows | None = None
    repeated = no_examples(shape)
    for own in rows:
        if own is None:
            continue
        dims = own.dims or ((),) * len(shape)
        own = own.with_dims([dim or repeated[axis] for axis, dim in enumerate(dims)])
        if found is not None and found != own:
            return INTERACT
        found = own
    return found


def _tidy(dim: Sequence[Atom]) -> tuple[Atom, ...]:
    """Atoms that follow one another as one."""
    found: list[Atom] = []
    for atom in dim:
        if atom.origin is None:
            atom = Atom(None, 1, atom.size)
        last = found[-1] if found else None
        in_order = last is not None and last.stride == atom.stride * atom.size
        if last is not None and last.origin == atom.origin and (in_order or atom.origin is None):
            found[-1] = Atom(atom.origin, atom.stride, last.size * atom.size)
        else:
            found.append(atom)
    return tuple(found)


def _ints(numbers: Any) -> tuple[int, ...]:
    """Plain integers; some transformations leave NumPy's in the parameters of an operation."""
    return tuple(map(int, numbers))


def _elementwise(node: Node, rows: Sequence[Rows | None]) -> Found:
    shape = node.outputs[0].shape
    if any(len(x.shape) not in (0, len(shape)) for x in node.inputs):
        return NOT_FOLLOWED
    found = _common(rows, shape)
    return found if isinstance(found, str) else [found] * len(node.outputs)


def _rearranged(node: Node, rows: Sequence[Rows | None]) -> Found:
    found: list[Rows | None] = []
    for own, _ in zip(rows, node.outputs, strict=False):
        if own is None:
            found.append(None)
            continue
        dims = own.dims
        if node.name == "reshape":  # What is not about examples may be mixed with its like.
            dims = tuple((atom,) for atom in _tidy([atom for dim in dims for atom in dim]))
        moved = REARRANGED[node.name](Axes((own.total,), dims), node.params)
        if moved is None:
            return NOT_FOLLOWED
        found.append(own.with_dims(moved.dims))
    return found


def _dot_general(node: Node, rows: Sequence[Rows | None]) -> Found:
    contracted, batched = (
        [_ints(axes) for axes in pair] for pair in node.params["dimension_numbers"]
    )
    free = [
        [k for k in range(len(x.shape)) if k not in (*contracted[n], *batched[n])]
        for n, x in enumerate(node.inputs)
    ]
    found: list[Rows] = []
    for n, own in enumerate(rows):
        if own is None:
            continue
        if any(own.has_examples(k) for k in contracted[n]):
            return INTERACT
        other = [no_examples(node.inputs[1 - n].shape)[k] for k in free[1 - n]]
        mine = [own.dims[k] for k in free[n]]
        sides = [mine, other] if n == 0 else [other, mine]
        found.append(own.with_dims([*(own.dims[k] for k in batched[n]), *sides[0], *sides[1]]))
    both = _common(found, node.outputs[0].shape)
    return both if isinstance(both, str) else [both]


def _along(*names: str, last: int = 0) -> Rule:
    """An operation on its operands along some axes, of which examples must be none.

    Other axes stay, or vanish if the outputs have fewer. The axes are a parameter of one of these
    names, or the last ones.
    """

    def rule(node: Node, rows: Sequence[Rows | None]) -> Found:
        ndim = len(node.inputs[0].shape)
        given: Any = next((node.params[name] for name in names if name in node.params), None)
        if given is None:
            axes = tuple(range(ndim - last, ndim))
        else:
            axes = _ints(given) if isinstance(given, tuple | list) else (int(given) % ndim,)
        moved: list[Rows] = []
        for own in rows:
            if own is None:
                continue
            if len(own.dims) != ndim:
                return NOT_FOLLOWED
            if any(own.has_examples(axis) for axis in axes):
                return INTERACT
            moved.append(own.with_dims([() if k in axes else d for k, d in enumerate(own.dims)]))
        both = _common(moved, node.inputs[0].shape)
        if both is None or isinstance(both, str):
            return NOT_FOLLOWED if both is None else both
        return [_with_sizes(both, axes, out.shape) for out in node.outputs]

    return rule


def _with_sizes(own: Rows, axes: Sequence[int], shape: Sequence[int]) -> Rows | None:
    """What is left where something was done along some axes, in a shape."""
    rest = [dim for axis, dim in enumerate(own.dims) if axis not in axes]
    if len(shape) == len(rest):
        return own.with_dims(rest)
    plain = no_examples(shape)
    if len(shape) == len(own.dims):
        return own.with_dims([plain[k] if k in axes else own.dims[k] for k in range(len(shape))])
    front = min(axes, default=len(own.dims))  # As of matrices, along the last two axes.
    return own.with_dims([*own.dims[:front], *plain[front:]])


def _cut(node: Node, rows: Sequence[Rows | None]) -> Found:
    """`slice` and `split`: of examples, those that follow one another can be cut out."""
    (own,) = rows
    if own is None:
        return [None for _ in node.outputs]
    if node.name == "slice":
        starts, strides = node.params["start_indices"], node.params["strides"]
        pieces = [(tuple(starts), strides or (1,) * len(starts))]
    else:
        axis, sizes = int(node.params["axis"]), _ints(node.params["sizes"])
        at = [sum(sizes[:k]) for k in range(len(sizes))]
        ones = (1,) * len(own.dims)
        pieces = [(tuple(s if k == axis else 0 for k in range(len(ones))), ones) for s in at]
    found: list[Rows | None] = []
    for (starts, strides), out in zip(pieces, node.outputs, strict=True):
        piece = own
        for axis, (size, left) in enumerate(zip(node.inputs[0].shape, out.shape, strict=True)):
            if size == left:
                continue
            if not own.has_examples(axis):
                dims = [*piece.dims]
                dims[axis] = no_examples((left,))[0]
                piece = piece.with_dims(dims)
            elif own.is_whole(axis) and strides[axis] == 1:
                piece = piece.part(axis, int(starts[axis]), left)
            else:
                return NOT_FOLLOWED
        found.append(piece)
    return found


def _concatenate(node: Node, rows: Sequence[Rows | None]) -> Found:
    axis, shape = int(node.params["dimension"]), node.outputs[0].shape
    known = [own for own in rows if own is not None]
    first = known[0]
    if any(own.has_examples(axis) or own.start != first.start for own in known):
        if len(known) < len(rows) or not all(own.is_whole(axis) for own in known):
            merged = any(not own.is_whole(axis) for own in known if own.has_examples(axis))
            return NOT_FOLLOWED if merged or len(known) == 1 else INTERACT
        stops = [own.start + own.count for own in known]
        in_order = all(s == own.start for s, own in zip(stops, known[1:], strict=False))
        if not in_order or len({own.total for own in known}) > 1:
            return INTERACT
        return [first.part(axis, 0, shape[axis])]
    whole = no_examples(shape)[axis]
    moved = [own.with_dims([*own.dims[:axis], whole, *own.dims[axis + 1 :]]) for own in known]
    both = _common(moved, shape)
    return both if isinstance(both, str) else [both]


def _stack(node: Node, rows: Sequence[Rows | None]) -> Found:
    axis, shape = int(node.params["axis"]), node.outputs[0].shape
    known = [own for own in rows if own is not None]
    if any(own.start != known[0].start for own in known):
        return INTERACT
    whole = no_examples(shape)[axis]
    both = _common(
        [own.with_dims([*own.dims[:axis], whole, *own.dims[axis:]]) for own in known], shape
    )
    return both if isinstance(both, str) else [both]


def _changed_axes(node: Node, rows: Sequence[Rows | None]) -> Found:
    """Operations that change the sizes of some axes, of which examples must be none."""
    (own, *others) = rows
    shape, before = node.outputs[0].shape, node.inputs[0].shape
    windows = node.params.get("window_dimensions", (1,) * len(shape))
    pads: Any = node.params.get("padding", node.params.get("padding_config"))
    same = [
        s == b and w == 1 and not any(pad)
        for s, b, w, pad in zip(shape, before, windows, pads, strict=True)
    ]
    if own is None or any(other is not None for other in others):
        return NOT_FOLLOWED
    if any(own.has_examples(axis) and not same[axis] for axis in range(len(shape))):
        return INTERACT
    plain = no_examples(shape)
    return [own.with_dims([own.dims[k] if same[k] else plain[k] for k in range(len(shape))])]


def _conv(node: Node, rows: Sequence[Rows | None]) -> Found:
    own, kernel = rows
    numbers, shape = node.params["dimension_numbers"], node.outputs[0].shape
    images, out = int(numbers.lhs_spec[0]), int(numbers.out_spec[0])
    if own is None or kernel is not None or node.params["batch_group_count"] != 1:
        return NOT_FOLLOWED
    if any(axis != images for axis in own.axes):
        return INTERACT
    dims = [*no_examples(shape)]
    dims[out] = own.dims[images]
    return [own.with_dims(dims)]


def _gather(node: Node, rows: Sequence[Rows | None]) -> Found:
    own, indices = rows
    numbers, sizes = node.params["dimension_numbers"], node.params["slice_sizes"]
    before, shape = node.inputs[0].shape, node.outputs[0].shape
    batch = [axis for axis in range(len(shape)) if axis not in numbers.offset_dims]
    plain, found = no_examples(shape), []
    if indices is not None:
        if indices.has_examples(len(indices.dims) - 1):
            return NOT_FOLLOWED
        dims = [*plain]
        for axis, dim in zip(batch, indices.dims[:-1], strict=True):
            dims[axis] = dim
        found.append(indices.with_dims(dims))
    if own is not None:
        paired = dict(
            zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
        )
        left_out = (*numbers.collapsed_slice_dims, *paired)
        kept = [axis for axis in range(len(before)) if axis not in left_out]
        places = dict(zip(kept, numbers.offset_dims, strict=True))
        places |= {axis: batch[place] for axis, place in paired.items()}
        whole = [axis for axis in kept if sizes[axis] == before[axis]]
        if any(axis not in (*whole, *paired) for axis in own.axes):
            return NOT_FOLLOWED
        dims = [*plain]
        for axis in (*whole, *paired):
            dims[places[axis]] = own.dims[axis]
        found.append(own.with_dims(dims))
    both = _common(found, shape)
    return both if isinstance(both, str) else [both]


def _dynamic_slice(node: Node, rows: Sequence[Rows | None]) -> Found:
    own, *indices = rows
    shape, before = node.outputs[0].shape, node.inputs[0].shape
    if own is not None:
        same = [s == b for s, b in zip(shape, before, strict=True)]
        if any(not same[axis] for axis in own.axes):
            return NOT_FOLLOWED
        plain = no_examples(shape)
        own = own.with_dims([own.dims[k] if same[k] else plain[k] for k in range(len(shape))])
    both = _common([own, *indices], shape)
    return both if isinstance(both, str) else [both]


def _dynamic_update_slice(node: Node, rows: Sequence[Rows | None]) -> Found:
    shape, of_update = node.outputs[0].shape, node.inputs[1].shape
    same = [s == b for s, b in zip(shape, of_update, strict=True)]
    moved: list[Rows | None] = []
    for own in rows[:2]:
        if own is not None:
            if any(not same[axis] for axis in own.axes):
                return NOT_FOLLOWED
            plain = no_examples(shape)
            own = own.with_dims([own.dims[k] if same[k] else plain[k] for k in range(len(shape))])
        moved.append(own)
    both = _common([*moved, *rows[2:]], shape)
    return both if isinstance(both, str) else [both]


ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
complex conj cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag
integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul ne neg nextafter not
one_minus_square or population_count pow random_gamma_grad real regularized_incomplete_beta rem
round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
square stop_gradient sub tan tanh xor bitcast_convert_type
""".split()  # noqa: SIM905  A list of as many strings is harder to read.

_REDUCTIONS = ("sum", "max", "min", "prod", "and", "or", "xor")

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(REARRANGED, _rearranged),
    **{f"reduce_{name}": _along("axes") for name in _REDUCTIONS},
    **dict.fromkeys(["argmax", "argmin"], _along("axes")),
    **{f"cum{name}": _along("axis") for name in ("sum", "prod", "max", "min", "logsumexp")},
    **dict.fromkeys(["reduce_window_sum", "reduce_window_max", "reduce_window_min"], _changed_axes),
    **dict.fromkeys(["cholesky", "eigh", "svd", "qr", "lu", "triangular_solve"], _along(last=2)),
    "sort": _along("dimension"),
    "rev": _along("dimensions"),
    "top_k": _along("axis", last=1),
    "dot_general": _dot_general,
    "slice": _cut,
    "split": _cut,
    "concatenate": _concatenate,
    "stack": _stack,
    "pad": _changed_axes,
    "conv_general_dilated": _conv,
    "gather": _gather,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
}
"""What is known of operations, by name."""


_SEVERAL_ROWS = "examples have several rows of a loss each"
_MOST_TRIALS = 16
_MOST_LEFT_OUT = 2


@dataclass
class Examples:
    """Which examples the values of a program are about.

    Attributes:
        batch_size: the least number of examples of any loss.
        is_known: whether the examples were followed from the arguments to the losses, or to where
            they interact.
        rows: of each value that is about examples, as far as they could be followed.
        loops: the loops whose steps are about different examples, by number.
        problem: why one example does not stay apart from others, up to the losses; or "".
        interaction: the operation by which examples interact, also where nothing depends on
            parameters; or "".
        lost: where examples could not be followed that do not depend on parameters; or "".
        unmarked: how many losses there are that no examples arrive at.
    """

    batch_size: int = 1
    is_known: bool = False
    rows: dict[Operand, Rows] = field(default_factory=dict)
    loops: dict[Node, int] = field(default_factory=dict)
    problem: str = ""
    interaction: str = ""
    lost: str = ""
    unmarked: int = 0


def find_examples(
    program: Program,
    params: Sequence[Variable],
    losses: Sequence[Node],
    reached: AbstractSet[Operand],
) -> Examples:
    """Find the examples in a program that has what its losses need.

    `reached` are the values that the losses have a derivative in (`reached_from`).
    """
    sizes = {size for node in losses if (size := _num_rows(node)) is not None}
    batch_size = min(sizes, default=1)
    smaller = _smaller_batch(program, params, batch_size)
    assumptions: list[Assumption] = []
    for rows in _assumptions(program, params, sizes, smaller):
        if rows not in assumptions and len(assumptions) < _MOST_TRIALS:
            assumptions.append(rows)
    arrived: list[Examples] = []
    apart: list[Examples] = []
    likely: Examples | None = None
    for rows in assumptions:
        trial = Examples(batch_size, True, dict(rows))
        # Where one has only several rows for each example, no other problem is of interest.
        walk = _Walk(trial, set(params), reached, stop_at_problem=bool(apart))
        if rows or batch_size == 1:
            walk.walk(program)
        else:  # From no array, no examples arrive anywhere.
            trial.unmarked = len(losses)
        if trial.problem and apart:
            continue
        if not trial.unmarked:
            _Demand(trial, walk.dependent).walk(program)
        if not trial.problem and not trial.unmarked:
            return trial
        likely = likely or trial
        if not trial.unmarked:
            arrived.append(trial)
            apart += [] if trial.problem.startswith(INTERACT) else [trial]
    assert likely is not None
    interacting = [likely] if likely.problem.startswith(INTERACT) else []
    unknown = Examples(smaller, lost=likely.problem or likely.lost)
    # That the batch interacts is told, and not that another axis would have several rows.
    return [*interacting, *apart, *arrived, unknown][0]


def _num_rows(loss: Node) -> int | None:
    """The number of rows of a loss: the length of the first axis of its predictions."""
    shape = loss.inputs[0].shape
    return shape[0] if shape and shape[0] > 0 else None


Assumption = Mapping[Operand, Rows]


def _assumptions(
    program: Program, params: Sequence[Variable], sizes: AbstractSet[int], smaller: int
) -> Iterator[Assumption]:
    """Return assumptions on the arrays that are about examples, most likely ones first."""
    data: list[Operand] = [v for v in program.inputs if v not in params]
    nodes = list(program.all_nodes())
    constants = dict.fromkeys(
        x for node in nodes for x in node.inputs if isinstance(x, Constant) and x.shape
    )
    first = _along_axis(data, sizes, 0)
    yield from _with_fewer(first)
    for number in range(1, max((len(x.shape) for x in data), default=0)):
        other = _along_axis(data, sizes, number)
        if other:
            yield {**first, **other}
    closed_over = _along_axis(list(constants), sizes, 0)
    if closed_over:
        yield from _with_fewer({**closed_over, **first})
    yield _along_axis(data, {smaller}, 0)
    yield _along_leading_axes(data, sizes)  # Rows of losses for all positions of all examples.
    yield {**first, **_along_axis(params, sizes, 0)}


def _with_fewer(rows: dict[Operand, Rows]) -> Iterator[Assumption]:
    """Assume all of these, all but one, and all but two."""
    for count in range(min(_MOST_LEFT_OUT + 1, max(len(rows), 1))):
        for left_out in itertools.combinations(reversed(rows), count):
            yield {x: own for x, own in rows.items() if x not in left_out}


def _along_axis(
    operands: Sequence[Operand], sizes: AbstractSet[int], number: int
) -> dict[Operand, Rows]:
    """Take an axis of a suitable length, the first or a later one, to be that of examples."""
    found: dict[Operand, Rows] = {}
    for operand in operands:
        axes = [axis for axis, size in enumerate(operand.shape) if size in sizes]
        if number < len(axes):
            found[operand] = Rows.along((axes[number],), operand.shape)
    return found


def _along_leading_axes(
    operands: Sequence[Operand], sizes: AbstractSet[int]
) -> dict[Operand, Rows]:
    """Take leading axes with a suitable number of elements to be those of examples."""
    found: dict[Operand, Rows] = {}
    for operand in operands:
        for number in range(1, len(operand.shape) + 1):
            if math.prod(operand.shape[:number]) in sizes:
                found[operand] = Rows.along(range(number), operand.shape)
                break
    return found


def _smaller_batch(program: Program, params: Sequence[Variable], batch_size: int) -> int:
    """Return the number of examples if a loss may have rows for each of their positions.

    As one has for all tokens of all sequences, if these are merged into one axis.
    """
    shapes = [v.shape for v in program.inputs if v not in params and len(v.shape) > 1]
    sizes = [shape[0] for shape in shapes if shape[0] > 0]
    return max((size for size in sizes if batch_size % size == 0), default=batch_size)


@dataclass
class _Walk:
    found: Examples
    dependent: set[Operand]
    """What depends on parameters, and the losses have a derivative in."""
    reached: AbstractSet[Operand]
    numbers: dict[Operand, np.ndarray] = field(default_factory=dict)
    """Integers that are known; in a loop, one for each of its steps."""
    loop: Node | None = None
    """The innermost loop around."""
    around: tuple[Node, ...] = ()
    stop_at_problem: bool = False

    def walk(self, program: Program) -> None:
        for node in program.nodes:
            if self.found.problem and self.stop_at_problem:
                return
            self._visit(node)

    def _visit(self, node: Node) -> None:
        if node.kind == "scan":
            self._scan(node)
            return
        if node.body is not None:
            self._enter(node, node.body)
            return
        if any(operand in self.dependent for operand in node.inputs):
            self.dependent.update(out for out in node.outputs if out in self.reached)
        if isinstance(node.equation.primitive, LossTag):
            self._check_loss(node)
        self._count(node)
        rows = self._rows_of(node.inputs)
        if any(own is not None for own in rows):
            self._set(node, self._apply(node, rows))
            everything = [self.found.rows.get(x) for x in node.inputs]
            if everything != rows and self._apply(node, everything) == INTERACT:
                # By data that no derivative passes through; microbatches must know that, too.
                self.found.interaction = self.found.interaction or node.name

    def _rows_of(self, operands: Sequence[Operand]) -> list[Rows | None]:
        """The examples of each operand; of those alone that have derivatives, if some have."""
        known = self.found.rows
        some = any(x in self.dependent and x in known for x in operands)
        return [known.get(x) if not some or x in self.dependent else None for x in operands]

    def _set(self, node: Node, found: Found) -> None:
        if isinstance(found, str):
            self._lose(node, found, node.inputs, node.outputs)
            return
        for variable, own in zip(node.outputs, found, strict=True):
            self._know(variable, own)

    def _know(self, variable: Variable, own: Rows | None) -> None:
        if own is None:  # It may have been thought to be about some, in a loop's first step.
            self.found.rows.pop(variable, None)
        else:
            self.found.rows[variable] = own

    def _lose(
        self, node: Node, why: str, inputs: Sequence[Operand], outputs: Sequence[Variable]
    ) -> None:
        """Note that examples are lost. That is harmless if no derivative passes through there."""
        text = f"{why} `{node.name}`"
        self.found.lost = self.found.lost or text
        if why == INTERACT:
            self.found.interaction = self.found.interaction or node.name
        passes = any(x in self.dependent and x in self.found.rows for x in inputs)
        if passes and any(out in self.dependent for out in outputs):
            self.found.problem = self.found.problem or text
        for variable in outputs:
            self._know(variable, None)

    def _apply(self, node: Node, rows: Sequence[Rows | None]) -> Found:
        if isinstance(node.equation.primitive, LayerTag | LossTag):
            return list(rows[: len(node.outputs)])
        if node.name in ("gather", "dynamic_slice"):
            read = self._read(node, rows[0])
            if read is not None:
                return [read]
        if node.name == "dynamic_update_slice":
            written = self._written(node, rows)
            if written is not None:
                return [written]
        rule = RULES.get(node.name)
        return NOT_FOLLOWED if rule is None else rule(node, rows)

    def _enter(self, node: Node, body: Program) -> None:
        for inner, outer in zip(body.inputs, node.inputs, strict=True):
            self._alias(inner, outer)
        self.walk(body)
        for outer, inner in zip(node.outputs, body.outputs, strict=True):
            self._alias(outer, inner)

    def _alias(self, variable: Variable, operand: Operand) -> None:
        rows = self.found.rows
        self._know(variable, rows.get(operand))
        if operand in self.dependent:
            self.dependent.add(variable)
        number = self._number(operand)
        if number is not None:
            self.numbers[variable] = number

    # Loops.

    def _scan(self, node: Node) -> None:
        assert node.body is not None
        form = _jax.ScanForm.of(node.equation)
        body, cut = node.body, form.num_consts + form.num_carry
        for inner, outer in zip(body.inputs[: form.num_consts], node.inputs, strict=False):
            self._alias(inner, outer)
        self._take(node, body.inputs[cut:], node.inputs[cut:])
        carried = list(zip(body.inputs[form.num_consts : cut], body.outputs, strict=False))
        starts = node.inputs[form.num_consts : cut]
        for (inner, _), outer in zip(carried, starts, strict=True):
            self._alias(inner, outer)
            self.numbers.pop(inner, None)
        inside = replace(
            self,
            numbers={x: n for x, n in self.numbers.items() if n.ndim == 0},
            loop=node,
            around=(*self.around, node),
        )
        if not form.reverse:
            begin = [self._number(x) for x in starts]
            inside.numbers |= inside._counters(body, carried, begin, form.length)
        before = copy.copy(self.found)
        while True:
            self.found.problem, self.found.lost = before.problem, before.lost
            self.found.interaction, self.found.unmarked = before.interaction, before.unmarked
            inside.walk(body)
            is_new = [self._hand_on(node, *pair) for pair in carried]
            if not any(is_new):
                break
        for number, (outer, inner) in enumerate(zip(node.outputs, body.outputs, strict=True)):
            if inner in self.dependent:
                self.dependent.add(outer)
            if number < form.num_carry:
                self._alias(outer, carried[number][0])
                self._last_number(outer, inside.numbers.get(inner))
                continue
            rows = self.found.rows
            own = rows.get(inner)
            self._know(outer, None if own is None else self._stacked(node, own, form.length))

    def _take(self, loop: Node, elements: Sequence[Variable], arrays: Sequence[Operand]) -> None:
        """What a loop takes one element of in each step."""
        rows = self.found.rows
        taken = None
        for element, array in zip(elements, arrays, strict=True):
            if array in self.dependent:
                self.dependent.add(element)
            own = rows.get(array)
            if own is None:
                self._know(element, None)
                continue
            first, *rest = own.dims
            if not own.has_examples(0):
                self.found.rows[element] = own.with_dims(rest)
            elif own.has_only_examples(0) and len(first) == 1 and taken in (None, first):
                taken = first
                number = self._number_of(loop)
                self.found.rows[element] = replace(
                    own, dims=tuple(rest), loops=(*own.loops, (number, first))
                )
            else:
                self._lose(loop, NOT_FOLLOWED, [array], [element])

    def _number_of(self, loop: Node) -> int:
        return self.found.loops.setdefault(loop, len(self.found.loops))

    def _hand_on(self, loop: Node, taken: Variable, given: Operand) -> bool:
        """Let the next step take what a step gives it. Returns whether that is new."""
        rows = self.found.rows
        new_derivative = given in self.dependent and taken not in self.dependent
        if new_derivative:
            self.dependent.add(taken)
        own, before = rows.get(given), rows.get(taken)
        if own is None or own == before:
            return new_derivative
        from_example_to_example = self.found.loops.get(loop) in dict(own.loops)
        if from_example_to_example or before is not None:
            self.found.interaction = self.found.interaction or loop.name
            if given in self.dependent:
                self.found.problem = self.found.problem or f"{INTERACT} `{loop.name}`"
            return new_derivative
        self.found.rows[taken] = own
        return True

    def _stacked(self, loop: Node, own: Rows, length: int) -> Rows:
        """What a loop returns of all steps, from what each has."""
        number = self.found.loops.get(loop)
        taken = dict(own.loops).get(number) if number is not None else None
        if taken is None:
            return own.with_dims([no_examples((length,))[0], *own.dims])
        left = tuple(each for each in own.loops if each[0] != number)
        return replace(own, loops=left).with_dims([taken, *own.dims])

    # Chunks that are read from an array and written to one, at places that a loop counts.

    def _read(self, node: Node, own: Rows | None) -> Rows | None:
        """Some examples after each other, cut out of an array that has all of them."""
        if own is None:
            return None
        sizes, shape = node.params["slice_sizes"], node.inputs[0].shape
        cut = [k for k, size in enumerate(sizes) if size != shape[k]]
        if len(cut) != 1 or not own.is_whole(cut[0]):
            return None
        (axis,) = cut
        collapsed = False
        if node.name == "gather":
            numbers = node.params["dimension_numbers"]
            if numbers.start_index_map != (axis,) or np.prod(node.inputs[1].shape) != 1:
                return None
            collapsed = numbers.collapsed_slice_dims == (axis,)
            start = self._number(node.inputs[1])
        else:
            start = self._number(node.inputs[1 + axis])
        placed = self._placed(own, axis, start, sizes[axis])
        if placed is None or len(node.outputs[0].shape) != len(shape) - collapsed:
            return None
        dims = [dim for k, dim in enumerate(placed.dims) if not (collapsed and k == axis)]
        return placed.with_dims(dims)

    def _placed(self, own: Rows, axis: int, start: Any, size: int) -> Rows | None:
        """So many examples from a place on that is known, or that is the next in each step."""
        if start is None or start.min() < 0 or start.max() + size > own.count:
            return None
        if start.ndim == 0:
            return own.part(axis, int(start), size)
        steps = len(start)
        if self.loop is None or np.any(start != start[0] + size * np.arange(steps)):
            return None
        part = own.part(axis, int(start[0]), size)
        taken = (Atom(_EXAMPLE, size, steps),) if steps > 1 else ()
        return replace(part, loops=(*part.loops, (self._number_of(self.loop), taken)))

    def _written(self, node: Node, rows: Sequence[Rows | None]) -> Rows | None:
        """An array of all examples, into which some were written at their places."""
        buffer, own = rows[:2]
        if own is None:
            return None
        shape, of_update = node.outputs[0].shape, node.inputs[1].shape
        cut = [k for k in range(len(shape)) if shape[k] != of_update[k]]
        if len(cut) != 1 or shape[cut[0]] != own.total:
            return None
        (axis,) = cut
        dims = [*no_examples(shape)]
        for k in own.axes:
            if k != axis:
                return None
        dims[axis] = (Atom(_EXAMPLE, 1, own.total),)
        whole = Rows(own.total, 0, tuple(dims))
        start = self._number(node.inputs[2 + axis])
        if self._placed(whole, axis, start, of_update[axis]) != own:
            return None
        return whole if buffer in (None, whole) else None

    # Integers.

    def _number(self, operand: Operand) -> np.ndarray | None:
        if not isinstance(operand, Constant):
            return self.numbers.get(operand)
        value = operand.value
        if _jax.is_tracer(value) or np.size(value) != 1:
            return None
        is_integer = jnp.issubdtype(jnp.result_type(value), jnp.integer)
        return np.asarray(value).reshape(()) if is_integer else None

    def _last_number(self, variable: Variable, numbers: np.ndarray | None) -> None:
        if numbers is not None and numbers.ndim:
            self.numbers[variable] = np.asarray(numbers[-1])

    def _count(self, node: Node) -> None:
        """Compute an integer, if it is computed from such that are known."""
        if node.name == "eq" and any(map(_is_special, node.inputs)):
            # The zero that chunks wait for, so that they are computed one after the other.
            self.numbers[node.outputs[0]] = np.asarray(False)
            return
        operation = _INTEGERS.get(node.name)
        if operation is None or any(math.prod(out.shape) != 1 for out in node.outputs):
            return
        values = [self._number(operand) for operand in node.inputs]
        if values and all(value is not None for value in values):
            self.numbers[node.outputs[0]] = np.asarray(operation(*values))

    def _counters(
        self,
        body: Program,
        carried: Sequence[tuple[Variable, Operand]],
        starts: Sequence[np.ndarray | None],
        length: int,
    ) -> dict[Operand, np.ndarray]:
        """What a loop carries along that is an integer, larger by as much after each step."""
        found: dict[Operand, np.ndarray] = {}
        for (taken, given), start in zip(carried, starts, strict=True):
            if start is None or start.ndim or not length:
                continue
            after = self._evaluated(body, taken, start, given)
            if after is None or after.ndim:
                continue
            numbers = np.asarray(start + (after - start) * np.arange(length))
            again = self._evaluated(body, taken, numbers, given)
            if again is not None and np.array_equal(again, numbers + (after - start)):
                found[taken] = numbers
        return found

    def _evaluated(
        self, body: Program, known: Variable, number: np.ndarray, wanted: Operand
    ) -> np.ndarray | None:
        alone = replace(self, numbers={**self.numbers, known: number})
        for node in body.nodes:
            if node.body is None:
                alone._count(node)
        return alone._number(wanted)

    def _check_loss(self, node: Node) -> None:
        """Check that a loss that depends on parameters has one row for each example."""
        operand = node.inputs[0]
        if operand not in self.dependent:
            return
        own = self.found.rows.get(operand)
        if own is None:
            self.found.unmarked += int(_num_rows(node) != 1)
            return
        if own.total == 1:
            return
        mapped = sum(level[0] for level in node.params["stacked"])
        least = max(node.equation.primitive.least_axes, 2 if node.params["stacked"] else 1)
        front = mapped + (1 if len(own.dims) - mapped >= least else 0)
        of_examples = all(not own.dims[k] or own.has_only_examples(k) for k in range(front))
        numbers = {self.found.loops.get(loop) for loop in self.around}
        outside = any(axis >= front for axis in own.axes)
        if outside or not of_examples or numbers != {number for number, _ in own.loops}:
            self.found.problem = self.found.problem or _SEVERAL_ROWS


@dataclass
class _Demand:
    """Follows examples back from where they are to values that are the same for all of them.

    The cotangent of such a value may be about single examples: that of zeros which are the first
    state of a recurrent network, say. It is if its examples, followed forward again, are those of
    all that is computed from it.
    """

    found: Examples
    dependent: set[Operand]
    demanded: dict[Operand, set[Rows | None]] = field(default_factory=dict)

    def walk(self, program: Program) -> None:
        for node in reversed(program.nodes):
            for variable in node.outputs:
                self._decide(variable)
            if node.body is None:
                self._look_back(node)
            elif node.kind == "scan":
                form = _jax.ScanForm.of(node.equation)
                kept = form.num_consts + form.num_carry
                rows = [self.found.rows.get(v) for v in node.body.inputs[:kept]]
                rows = [own if own is None or not own.loops else None for own in rows]
                self._demand(node.inputs[:kept], rows)
                self._demand(node.inputs[kept:], [None] * (len(node.inputs) - kept))
            else:
                for inner, outer in zip(node.body.outputs, node.outputs, strict=True):
                    self._demand([inner], [self.found.rows.get(outer)])
                self.walk(node.body)
                for variable in node.body.inputs:
                    self._decide(variable)
                self._demand(node.inputs, [self.found.rows.get(v) for v in node.body.inputs])

    def _decide(self, variable: Variable) -> None:
        """Take what all that is computed from a value says of it."""
        said = self.demanded.get(variable, set())
        if variable not in self.found.rows and len(said) == 1:
            (own,) = said
            if own is not None:
                self.found.rows[variable] = own

    def _demand(self, operands: Sequence[Operand], rows: Sequence[Rows | None]) -> None:
        for operand, own in zip(operands, rows, strict=True):
            if operand in self.dependent and operand not in self.found.rows:
                self.demanded.setdefault(operand, set()).add(own)

    def _look_back(self, node: Node) -> None:
        rows = [self.found.rows.get(x) if x in self.dependent else None for x in node.inputs]
        outputs = [self.found.rows.get(x) for x in node.outputs if x in self.dependent]
        for number, operand in enumerate(node.inputs):
            if outputs and operand in self.dependent and rows[number] is None:
                self._demand([operand], [self._before(node, number, rows, outputs)])

    def _before(
        self, node: Node, number: int, rows: Sequence[Rows | None], outputs: Sequence[Rows | None]
    ) -> Rows | None:
        """The examples that an operand is about, if the outputs are about these."""
        rule, shape = RULES.get(node.name), node.inputs[number].shape
        wanted = outputs[0]
        if rule is None or wanted is None or wanted.loops or wanted.count != wanted.total:
            return None
        for axis in (axis for axis, size in enumerate(shape) if size == wanted.total):
            own = Rows.along((axis,), shape)
            given = [own if k == number else other for k, other in enumerate(rows)]
            if rule(node, given) == [*outputs]:
                return own
        return None


def _is_special(operand: Operand) -> bool:
    return isinstance(operand, Constant) and _slicing.is_order_marker(operand.value)


_same = lambda x: x
_INTEGERS: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "lt": np.less,
    "select_n": lambda which, no, yes: np.where(which, yes, no),
    **dict.fromkeys(
        ["convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "optimization_barrier"],
        _same,
    ),
}
"""Operations by which places in arrays are computed."""
