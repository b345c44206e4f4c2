"""`find_examples`: which examples the values of a program are about, and along which axes.

The examples are the rows of the losses. Arrays with an axis of as many elements are assumed to have
one for each example, and the examples are followed from there through the program, by a rule for
each primitive (`RULES`). The assumption is right if they arrive at the losses along the rows of
these; otherwise some of the arrays are assumed not to be about examples, and the rest is tried
again. Which arrays are a batch by name or by intention does not matter: what is verified is that
each row of a loss depends on one example alone.

Only what depends on parameters matters for that, since derivatives pass through nothing else. So a
mean over a batch of data is a constant, and so are integers.
"""

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from curvax import _jax
from curvax.layers.detection.axes import REARRANGED, Atom, Axes, Dims, ints
from curvax.layers.detection.constants import StepIntegers
from curvax.layers.detection.program import (
    Constant,
    Node,
    Operand,
    Program,
    Variable,
    dot_operands,
    loop_length,
)
from curvax.layers.tags import LayerTag
from curvax.layers.use import ExampleProblem, ProblemKind
from curvax.losses.tag import LossTag, least_axes_of_batch

# What operations do to the examples of their operands.
#
# `ExampleAxes` says which examples a value is about, and along which of its axes they are. A rule
# for each operation derives them for its outputs. The rules promise what exact curvature needs: an
# element of an output that is about one example is computed from nothing that is about another
# one, so that derivatives with respect to one example's elements stay with it. Through an
# operation without a rule, examples are not followed.


_EXAMPLE = 0
"""The origin of the atoms that are digits of an example's index; all other atoms have none."""


@dataclass(frozen=True)
class ExampleAxes:
    """Which examples a value is about, and along which axes they are.

    Attributes:
        total: Number of examples in the batch.
        start: Index of the first example that the value is about.
        dims: Atoms of each axis. Those with an origin are digits of an example's index, counted
            from `start`.
        loops: Identifiers of the loops around the value whose steps are about different examples,
            each with the atoms that its steps stand for.

    Examples:
        A batch of 5 sequences of 3 tokens, merged into one axis:

        >>> batch = ExampleAxes.along((0,), (5, 3, 8))
        >>> merged = batch.with_dims([(*batch.dims[0], *batch.dims[1]), batch.dims[2]])
        >>> merged.count, merged.axes, merged.has_only_examples(0)
        (5, (0,), False)
    """

    total: int
    start: int
    dims: Dims
    loops: tuple[tuple[int, tuple[Atom, ...]], ...] = ()

    @classmethod
    def along(cls, axes: Sequence[int], shape: Sequence[int]) -> "ExampleAxes":
        """Return all examples along some axes of an array, the first of them most significant."""
        dims, stride = [*plain_dims(shape)], 1
        for axis in reversed(axes):
            dims[axis] = _digits(shape[axis], stride)
            stride *= shape[axis]
        return cls(stride, 0, tuple(dims))

    @property
    def _in_loops(self) -> list[Atom]:
        return [atom for _, atoms in self.loops for atom in atoms]

    @property
    def _in_axes(self) -> list[Atom]:
        return [atom for dim in self.dims for atom in dim if atom.origin is not None]

    @property
    def count(self) -> int:
        """The number of examples that the value is about."""
        return math.prod(atom.size for atom in (*self._in_loops, *self._in_axes))

    @property
    def is_in_order(self) -> bool:
        """Whether the examples are in order along the loops, outermost first, then in a step."""
        in_axes = sorted(self._in_axes, key=lambda atom: -atom.stride)
        return _merged([*self._in_loops, *in_axes]) == _digits(self.count)

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes along which there are examples."""
        return tuple(axis for axis in range(len(self.dims)) if self.has_examples(axis))

    def has_examples(self, axis: int) -> bool:
        """Return whether there are examples along an axis, perhaps merged with other axes."""
        return any(atom.origin is not None for atom in self.dims[axis])

    def has_only_examples(self, axis: int) -> bool:
        """Return whether an axis has examples and is not merged with other axes."""
        return self.has_examples(axis) and all(a.origin is not None for a in self.dims[axis])

    def has_all_examples(self, axis: int) -> bool:
        """Return whether an axis has all examples of the value, in order, and nothing else."""
        return not self.loops and self.dims[axis] == _digits(self.count)

    def with_dims(self, dims: Sequence[Sequence[Atom]]) -> "ExampleAxes":
        """Return the same examples along other axes."""
        return ExampleAxes(self.total, self.start, tuple(map(_merged, dims)), self.loops)

    def with_dim(self, axis: int, dim: Sequence[Atom]) -> "ExampleAxes":
        """Return the same examples, with other atoms for one axis."""
        return self.with_dims([*self.dims[:axis], dim, *self.dims[axis + 1 :]])

    def resized(self, shape: Sequence[int], is_kept: Sequence[bool]) -> "ExampleAxes":
        """Return the same examples in another shape, whose other axes have none."""
        plain = plain_dims(shape)
        return self.with_dims([self.dims[k] if is_kept[k] else plain[k] for k in range(len(shape))])

    def slice(self, axis: int, start: int, count: int) -> "ExampleAxes":
        """Return `count` examples from `start` on, along an axis that has all of them."""
        dims = (*self.dims[:axis], _digits(count), *self.dims[axis + 1 :])
        return replace(self, start=self.start + start, dims=dims)


def _digits(count: int, stride: int = 1) -> tuple[Atom, ...]:
    """Return the atoms of an axis of examples."""
    return (Atom(_EXAMPLE, stride, count),) if count > 1 else ()


def plain_dims(shape: Sequence[int]) -> Dims:
    """Return the atoms of a value without examples."""
    return tuple((Atom(None, 1, size),) if size != 1 else () for size in shape)


def _merged(dim: Sequence[Atom]) -> tuple[Atom, ...]:
    """Merge neighbouring atoms that are one range of digits, or have no examples."""
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


MaybeExamples = ExampleAxes | None
"""The examples that a value is about; None if it is about none."""

Followed = list[MaybeExamples] | ProblemKind
"""The examples of each output of an operation; or why they are not known."""

Rule = Callable[[Node, Sequence[MaybeExamples]], Followed]
"""From an operation and the examples of its operands to those of its outputs."""


def _common(operands: Sequence[MaybeExamples], shape: Sequence[int]) -> MaybeExamples | ProblemKind:
    """Return the examples of an elementwise function.

    Operands have the given shape, or size one along some axes, or no axes.
    """
    found: MaybeExamples = None
    plain = plain_dims(shape)
    for examples in operands:
        if examples is None:
            continue
        dims = examples.dims or ((),) * len(shape)
        examples = examples.with_dims([dim or plain[axis] for axis, dim in enumerate(dims)])
        if found is not None and found != examples:
            return ProblemKind.INTERACTION
        found = examples
    return found


def _combined(operands: Sequence[MaybeExamples], node: Node) -> Followed:
    """Return the examples of outputs that combine operands elementwise."""
    found = _common(operands, node.outputs[0].shape)
    return found if isinstance(found, ProblemKind) else [found] * len(node.outputs)


def _elementwise(node: Node, operands: Sequence[MaybeExamples]) -> Followed:
    ndim = len(node.outputs[0].shape)
    if any(len(x.shape) not in (0, ndim) for x in node.inputs):
        return ProblemKind.NOT_FOLLOWED
    return _combined(operands, node)


def _rearranged(node: Node, operands: Sequence[MaybeExamples]) -> Followed:
    found: list[MaybeExamples] = []
    for examples, _ in zip(operands, node.outputs, strict=False):
        if examples is None:
            found.append(None)
            continue
        dims = examples.dims
        if node.name == "reshape":  # Axes without examples may be mixed with one another.
            dims = tuple((atom,) for atom in _merged([atom for dim in dims for atom in dim]))
        moved = REARRANGED[node.name](Axes((examples.total,), dims), node.params)
        if moved is None:
            return ProblemKind.NOT_FOLLOWED
        found.append(examples.with_dims(moved.dims))
    return found


def _dot_general(node: Node, operands: Sequence[MaybeExamples]) -> Followed:
    sides = dot_operands(node)
    found: list[MaybeExamples] = []
    for k, examples in enumerate(operands):
        if examples is None:
            continue
        if any(examples.has_examples(axis) for axis in sides[k].contracted):
            return ProblemKind.INTERACTION
        free = [examples.dims[axis] for axis in sides[k].free]
        other_dims = plain_dims(node.inputs[1 - k].shape)
        other_free = [other_dims[axis] for axis in sides[1 - k].free]
        batch = [examples.dims[axis] for axis in sides[k].batch]
        first, second = (free, other_free) if k == 0 else (other_free, free)
        found.append(examples.with_dims([*batch, *first, *second]))
    return _combined(found, node)


def _rule_for_axes(*names: str, last: int = 0) -> Rule:
    """Return the rule of an operation along some axes, which must not be those of examples.

    All other axes stay. The operated axes vanish (`reduce_sum`), stay (`cumsum`, `sort`), or are
    replaced by other trailing axes (`svd`). They are read from the first of the equation's
    parameters `names` that exists, else they are the last `last` axes.
    """

    def rule(node: Node, operands: Sequence[MaybeExamples]) -> Followed:
        ndim = len(node.inputs[0].shape)
        given: Any = next((node.params[name] for name in names if name in node.params), None)
        if given is None and last == 0:
            return ProblemKind.NOT_FOLLOWED  # A JAX version with another name for the parameter.
        if given is None:
            axes = tuple(range(ndim - last, ndim))
        else:
            axes = ints(given) if isinstance(given, tuple | list) else (int(given) % ndim,)
        moved: list[MaybeExamples] = []
        for examples in operands:
            if examples is None:
                continue
            if len(examples.dims) != ndim:
                return ProblemKind.NOT_FOLLOWED
            if any(examples.has_examples(axis) for axis in axes):
                return ProblemKind.INTERACTION
            # `()` is size one, so that operands of different sizes along the operated axes compare
            # equal (`triangular_solve`).
            dims = [() if k in axes else dim for k, dim in enumerate(examples.dims)]
            moved.append(examples.with_dims(dims))
        common = _common(moved, node.inputs[0].shape)
        if common is None:  # No operand has examples.
            return ProblemKind.NOT_FOLLOWED
        if isinstance(common, ProblemKind):
            return common
        return [_after_operation(common, axes, out.shape) for out in node.outputs]

    return rule


def _after_operation(
    examples: ExampleAxes, axes: Sequence[int], shape: Sequence[int]
) -> ExampleAxes:
    """Return the examples of an output after an operation along some axes."""
    ndim = len(examples.dims)
    remaining = [dim for axis, dim in enumerate(examples.dims) if axis not in axes]
    if len(shape) == len(remaining):
        return examples.with_dims(remaining)
    if len(shape) == ndim:
        return examples.resized(shape, [axis not in axes for axis in range(ndim)])
    # Decompositions of matrices have outputs with other trailing axes.
    front = min(axes, default=ndim)
    return examples.with_dims([*examples.dims[:front], *plain_dims(shape)[front:]])


def _slice(node: Node, operands: Sequence[MaybeExamples]) -> Followed:
    """Follow `slice` and `split`: contiguous examples may be sliced out."""
    (examples,) = operands
    if examples is None:
        return [None for _ in node.outputs]
    ndim = len(examples.dims)
    if node.name == "slice":
        first = ints(node.params["start_indices"])
        pieces = [(first, node.params["strides"] or (1,) * ndim)]
    else:
        axis, sizes = int(node.params["axis"]), ints(node.params["sizes"])
        starts = [sum(sizes[:k]) for k in range(len(sizes))]
        pieces = [
            (tuple(start if k == axis else 0 for k in range(ndim)), (1,) * ndim) for start in starts
        ]
    found: list[MaybeExamples] = []
    for (starts, strides), out in zip(pieces, node.outputs, strict=True):
        piece = examples
        for axis, (size, new_size) in enumerate(zip(node.inputs[0].shape, out.shape, strict=True)):
            if size == new_size:
                continue
            if not examples.has_examples(axis):
                piece = piece.with_dim(axis, plain_dims((new_size,))[0])
            elif examples.has_all_examples(axis) and strides[axis] == 1:
                piece = piece.slice(axis, starts[axis], new_size)
            else:
                return ProblemKind.NOT_FOLLOWED
        found.append(piece)
    return found


def _concatenate(node: Node, operands: Sequence[MaybeExamples]) -> Followed:
    axis, shape = int(node.params["dimension"]), node.outputs[0].shape
    known = [examples for examples in operands if examples is not None]
    first = known[0]
    if any(each.has_examples(axis) or each.start != first.start for each in known):
        # The pieces are examples: they have to be all of them, in order.
        if len(known) < len(operands) or not all(each.has_all_examples(axis) for each in known):
            merged = any(not e.has_all_examples(axis) for e in known if e.has_examples(axis))
            is_unclear = merged or len(known) == 1
            return ProblemKind.NOT_FOLLOWED if is_unclear else ProblemKind.INTERACTION
        stops = [each.start + each.count for each in known]
        in_order = all(s == each.start for s, each in zip(stops, known[1:], strict=False))
        if not in_order or len({each.total for each in known}) > 1:
            return ProblemKind.INTERACTION
        return [first.slice(axis, 0, shape[axis])]
    dim = plain_dims(shape)[axis]
    return _combined([each.with_dim(axis, dim) for each in known], node)


def _stack(node: Node, operands: Sequence[MaybeExamples]) -> Followed:
    axis = int(node.params["axis"])
    known = [examples for examples in operands if examples is not None]
    if any(each.start != known[0].start for each in known):
        return ProblemKind.INTERACTION
    dim = plain_dims(node.outputs[0].shape)[axis]
    stacked = [each.with_dims([*each.dims[:axis], dim, *each.dims[axis:]]) for each in known]
    return _combined(stacked, node)


def _resized_axes(node: Node, operands: Sequence[MaybeExamples]) -> Followed:
    """Follow operations that resize some axes, which must not be those of examples."""
    (examples, *others) = operands
    shape, before = node.outputs[0].shape, node.inputs[0].shape
    windows = node.params.get("window_dimensions", (1,) * len(shape))
    pads: Any = node.params.get("padding", node.params.get("padding_config"))
    is_kept = [
        s == b and w == 1 and not any(pad)
        for s, b, w, pad in zip(shape, before, windows, pads, strict=True)
    ]
    if examples is None or any(other is not None for other in others):
        return ProblemKind.NOT_FOLLOWED
    if not all(is_kept[axis] for axis in examples.axes):
        return ProblemKind.INTERACTION
    return [examples.resized(shape, is_kept)]


def _conv(node: Node, operands: Sequence[MaybeExamples]) -> Followed:
    images, kernel = operands
    numbers, shape = node.params["dimension_numbers"], node.outputs[0].shape
    batch_axis, out_axis = int(numbers.lhs_spec[0]), int(numbers.out_spec[0])
    if images is None or kernel is not None or node.params["batch_group_count"] != 1:
        return ProblemKind.NOT_FOLLOWED
    if any(axis != batch_axis for axis in images.axes):
        return ProblemKind.INTERACTION
    return [images.with_dims(plain_dims(shape)).with_dim(out_axis, images.dims[batch_axis])]


def _gather(node: Node, operands: Sequence[MaybeExamples]) -> Followed:
    array, indices = operands
    numbers, sizes = node.params["dimension_numbers"], node.params["slice_sizes"]
    before, shape = node.inputs[0].shape, node.outputs[0].shape
    batch = [axis for axis in range(len(shape)) if axis not in numbers.offset_dims]
    plain, found = plain_dims(shape), []
    if indices is not None:
        if indices.has_examples(len(indices.dims) - 1):
            return ProblemKind.NOT_FOLLOWED
        dims = [*plain]
        for axis, dim in zip(batch, indices.dims[:-1], strict=True):
            dims[axis] = dim
        found.append(indices.with_dims(dims))
    if array is not None:
        paired = dict(
            zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
        )
        dropped = (*numbers.collapsed_slice_dims, *paired)
        kept = [axis for axis in range(len(before)) if axis not in dropped]
        out_axes = dict(zip(kept, numbers.offset_dims, strict=True))
        out_axes |= {axis: batch[k] for axis, k in paired.items()}
        followed = [*(axis for axis in kept if sizes[axis] == before[axis]), *paired]
        if any(axis not in followed for axis in array.axes):
            return ProblemKind.NOT_FOLLOWED
        dims = [*plain]
        for axis in followed:
            dims[out_axes[axis]] = array.dims[axis]
        found.append(array.with_dims(dims))
    return _combined(found, node)


def _dynamic_slice(node: Node, operands: Sequence[MaybeExamples]) -> Followed:
    return _unless_sliced(node, operands, node.inputs[0].shape, num_arrays=1)


def _dynamic_update_slice(node: Node, operands: Sequence[MaybeExamples]) -> Followed:
    return _unless_sliced(node, operands, node.inputs[1].shape, num_arrays=2)


def _unless_sliced(
    node: Node, operands: Sequence[MaybeExamples], sizes: Sequence[int], num_arrays: int
) -> Followed:
    """Follow arrays, then indices, if no axis of examples has another size than the output."""
    shape = node.outputs[0].shape
    is_kept = [s == size for s, size in zip(shape, sizes, strict=True)]
    arrays: list[MaybeExamples] = []
    for examples in operands[:num_arrays]:
        if examples is not None:
            if not all(is_kept[axis] for axis in examples.axes):
                return ProblemKind.NOT_FOLLOWED
            examples = examples.resized(shape, is_kept)
        arrays.append(examples)
    return _combined([*arrays, *operands[num_arrays:]], node)


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
    **{f"reduce_{name}": _rule_for_axes("axes") for name in _REDUCTIONS},
    **dict.fromkeys(["argmax", "argmin"], _rule_for_axes("axes")),
    **{f"cum{name}": _rule_for_axes("axis") for name in ("sum", "prod", "max", "min", "logsumexp")},
    **dict.fromkeys(["reduce_window_sum", "reduce_window_max", "reduce_window_min"], _resized_axes),
    **dict.fromkeys(
        ["cholesky", "eigh", "svd", "qr", "lu", "triangular_solve"], _rule_for_axes(last=2)
    ),
    "sort": _rule_for_axes("dimension"),
    "rev": _rule_for_axes("dimensions"),
    "top_k": _rule_for_axes("axis", last=1),
    "dot_general": _dot_general,
    "slice": _slice,
    "split": _slice,
    "concatenate": _concatenate,
    "stack": _stack,
    "pad": _resized_axes,
    "conv_general_dilated": _conv,
    "gather": _gather,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
}
"""What operations do to examples, by name."""


_SEVERAL_ROWS = ExampleProblem(
    ProblemKind.SEVERAL_ROWS, "examples have several rows of a loss each"
)
_MAX_TRIALS = 16
_MAX_LEFT_OUT = 2


@dataclass
class Examples:
    """The examples that the values of a program are about.

    Attributes:
        batch_size: Smallest number of examples of any loss.
        is_known: Whether the examples were followed from the arguments to the losses, or to where
            they interact.
        axes: The examples of each value that is about some, as far as they could be followed.
        loops: Identifiers of the loops whose steps are about different examples.
        problem: Why one example does not stay apart from others on the way to the losses.
        interaction: Name of the operation by which examples interact, also where nothing depends on
            parameters; or "".
        lost: Where examples could not be followed, also where nothing depends on parameters.
        num_unreached: Number of losses at which no examples arrive.
    """

    batch_size: int = 1
    is_known: bool = False
    axes: dict[Operand, ExampleAxes] = field(default_factory=dict)
    loops: dict[Node, int] = field(default_factory=dict)
    problem: ExampleProblem | None = None
    interaction: str = ""
    lost: ExampleProblem | None = None
    num_unreached: int = 0

    @property
    def interact(self) -> bool:
        """Whether the problem is that examples interact."""
        return self.problem is not None and self.problem.kind is ProblemKind.INTERACTION

    @property
    def stays_separate(self) -> bool:
        """Whether examples arrive at all losses and do not interact on the way."""
        return not self.num_unreached and not self.interact

    def loop_id(self, loop: Node) -> int:
        """Return the identifier of a loop over examples, which may be new."""
        return self.loops.setdefault(loop, len(self.loops))


def find_examples(
    program: Program,
    params: Sequence[Variable],
    losses: Sequence[Node],
    reached: AbstractSet[Operand],
) -> Examples:
    """Find the examples of the values in a program.

    Arguments:
        program: A program that computes what its losses need.
        params: The inputs that are parameters.
        losses: The loss tags.
        reached: Values that a loss depends on differentiably (`reached_from`).
    """
    sizes = {size for node in losses if (size := _num_rows(node)) is not None}
    batch_size = min(sizes, default=1)
    smaller = _smaller_batch(program, params, batch_size)
    trials: list[Examples] = []
    for assumed in _distinct(_assumptions(program, params, sizes, smaller), _MAX_TRIALS):
        # After a trial with nothing worse than several rows for each example, only one without any
        # problem is better.
        stop_at_problem = any(trial.stays_separate for trial in trials)
        trial = Examples(batch_size, True, dict(assumed))
        forward = _ForwardWalk(trial, set(params), reached, stop_at_problem=stop_at_problem)
        if assumed or batch_size == 1:
            forward.walk(program)
        else:  # From no array, no examples arrive anywhere.
            trial.num_unreached = len(losses)
        if trial.problem and stop_at_problem:
            continue
        if not trial.num_unreached:
            _BackwardWalk(trial, forward.dependent).walk(program)
        if not trial.problem and not trial.num_unreached:
            return trial
        trials.append(trial)
    likely = trials[0]
    # That the examples of the batch interact says more than that another axis has several rows.
    interacting = [likely] if likely.interact else []
    separate = [trial for trial in trials if trial.stays_separate]
    arrived = [trial for trial in trials if not trial.num_unreached]
    return [*interacting, *separate, *arrived, _unknown(smaller, likely)][0]


Assumption = Mapping[Operand, ExampleAxes]
"""Arrays that are assumed to be about examples, and along which axes."""


def _distinct(assumptions: Iterator[Assumption], most: int) -> list[Assumption]:
    """Return the first assumptions, at most `most`, without repetitions."""
    found: list[Assumption] = []
    for assumed in assumptions:
        if assumed not in found:
            found.append(assumed)
        if len(found) == most:
            break
    return found


def _unknown(batch_size: int, likely: Examples) -> Examples:
    """Return that examples are not known, and why the likely assumption failed."""
    lost = likely.problem or likely.lost
    if lost is not None and lost.kind is ProblemKind.SEVERAL_ROWS:
        lost = ExampleProblem.not_located(lost.text)
    return Examples(batch_size, lost=lost)


def _num_rows(loss: Node) -> int | None:
    """Return the number of rows of a loss: the length of the first axis of its predictions."""
    shape = loss.inputs[0].shape
    return shape[0] if shape and shape[0] > 0 else None


def _assumptions(
    program: Program, params: Sequence[Variable], sizes: AbstractSet[int], smaller: int
) -> Iterator[Assumption]:
    """Yield assumptions on which arrays are about examples, most likely ones first."""
    data: list[Operand] = [v for v in program.inputs if v not in params]
    constants = dict.fromkeys(
        x
        for node in program.all_nodes()
        for x in node.inputs
        if isinstance(x, Constant) and x.shape
    )
    first = _along_axis(data, sizes, 0)
    yield from _with_fewer(first)
    for k in range(1, max((len(x.shape) for x in data), default=0)):
        other = _along_axis(data, sizes, k)
        if other:
            yield {**first, **other}
    closed_over = _along_axis(list(constants), sizes, 0)
    if closed_over:
        yield from _with_fewer({**closed_over, **first})
    yield _along_axis(data, {smaller}, 0)
    yield _along_leading_axes(data, sizes)  # A loss may have a row for each position.
    yield {**first, **_along_axis(params, sizes, 0)}


def _with_fewer(arrays: dict[Operand, ExampleAxes]) -> Iterator[Assumption]:
    """Assume all arrays, all but one, and all but two."""
    for count in range(min(_MAX_LEFT_OUT + 1, max(len(arrays), 1))):
        for left_out in itertools.combinations(reversed(arrays), count):
            yield {x: examples for x, examples in arrays.items() if x not in left_out}


def _along_axis(
    operands: Sequence[Operand], sizes: AbstractSet[int], k: int
) -> dict[Operand, ExampleAxes]:
    """Take the k-th of the axes of suitable length to be that of examples."""
    found: dict[Operand, ExampleAxes] = {}
    for operand in operands:
        axes = [axis for axis, size in enumerate(operand.shape) if size in sizes]
        if k < len(axes):
            found[operand] = ExampleAxes.along((axes[k],), operand.shape)
    return found


def _along_leading_axes(
    operands: Sequence[Operand], sizes: AbstractSet[int]
) -> dict[Operand, ExampleAxes]:
    """Take leading axes with a suitable number of elements to be those of examples."""
    found: dict[Operand, ExampleAxes] = {}
    for operand in operands:
        for ndim in range(1, len(operand.shape) + 1):
            if math.prod(operand.shape[:ndim]) in sizes:
                found[operand] = ExampleAxes.along(range(ndim), operand.shape)
                break
    return found


def _smaller_batch(program: Program, params: Sequence[Variable], batch_size: int) -> int:
    """Return the number of examples if a loss may have a row for each of their positions.

    A loss on all tokens of all sequences, merged into one axis, has such rows.
    """
    shapes = [v.shape for v in program.inputs if v not in params and len(v.shape) > 1]
    sizes = [shape[0] for shape in shapes if shape[0] > 0]
    return max((size for size in sizes if batch_size % size == 0), default=batch_size)


@dataclass
class _ForwardWalk:
    """Follows examples from the assumed arrays to the losses.

    Attributes:
        found: Where to note what is found.
        dependent: Values that depend on parameters and that a loss depends on: those that
            derivatives pass through.
        reached: Values that a loss depends on differentiably.
        integers: The integers that are known in the current body.
        loops: The loops around the current body, outermost first.
        stop_at_problem: Whether to stop at the first problem.
    """

    found: Examples
    dependent: set[Operand]
    reached: AbstractSet[Operand]
    integers: StepIntegers = field(default_factory=StepIntegers)
    loops: tuple[Node, ...] = ()
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
        self.integers.fold(node)
        operands = self._followed_operands(node.inputs)
        if any(examples is not None for examples in operands):
            self._set(node, self._apply(node, operands))
            everything = [self.found.axes.get(x) for x in node.inputs]
            # Examples may also interact through data that no derivative passes through. That does
            # not matter for layers, but for microbatches.
            is_same = everything == operands
            if not is_same and self._apply(node, everything) is ProblemKind.INTERACTION:
                self.found.interaction = self.found.interaction or node.name

    def _followed_operands(self, operands: Sequence[Operand]) -> list[MaybeExamples]:
        """Return the examples of each operand; only of those with derivatives, if some have."""
        axes = self.found.axes
        some = any(x in self.dependent and x in axes for x in operands)
        return [axes.get(x) if not some or x in self.dependent else None for x in operands]

    def _set(self, node: Node, followed: Followed) -> None:
        if isinstance(followed, ProblemKind):
            self._lose(node, followed, node.inputs, node.outputs)
            return
        for variable, examples in zip(node.outputs, followed, strict=True):
            self._set_examples(variable, examples)

    def _set_examples(self, variable: Variable, examples: MaybeExamples) -> None:
        if examples is None:  # In the first pass over a loop it may have been about some.
            self.found.axes.pop(variable, None)
        else:
            self.found.axes[variable] = examples

    def _lose(
        self,
        node: Node,
        kind: ProblemKind,
        inputs: Sequence[Operand],
        outputs: Sequence[Variable],
    ) -> None:
        """Forget the examples of `outputs`, since `node` cannot be followed (`kind`).

        Record the first such place in `found.lost`, and in `found.problem` if a derivative passes
        from `inputs` to `outputs`.
        """
        problem = ExampleProblem.at_operation(kind, node.name)
        self.found.lost = self.found.lost or problem
        if kind is ProblemKind.INTERACTION:
            self.found.interaction = self.found.interaction or node.name
        has_derivative_in = any(x in self.dependent and x in self.found.axes for x in inputs)
        if has_derivative_in and any(out in self.dependent for out in outputs):
            self.found.problem = self.found.problem or problem
        for variable in outputs:
            self._set_examples(variable, None)

    def _apply(self, node: Node, operands: Sequence[MaybeExamples]) -> Followed:
        if isinstance(node.equation.primitive, LayerTag | LossTag):
            return list(operands[: len(node.outputs)])
        if node.name in ("gather", "dynamic_slice"):
            chunk = self._read_chunk(node, operands[0])
            if chunk is not None:
                return [chunk]
        if node.name == "dynamic_update_slice":
            written = self._written_chunk(node, operands)
            if written is not None:
                return [written]
        rule = RULES.get(node.name)
        return ProblemKind.NOT_FOLLOWED if rule is None else rule(node, operands)

    def _enter(self, node: Node, body: Program) -> None:
        for inner, outer in zip(body.inputs, node.inputs, strict=True):
            self._alias(inner, outer)
        self.walk(body)
        for outer, inner in zip(node.outputs, body.outputs, strict=True):
            self._alias(outer, inner)

    def _alias(self, variable: Variable, operand: Operand) -> None:
        """Note that a variable has the value of an operand."""
        self._set_examples(variable, self.found.axes.get(operand))
        if operand in self.dependent:
            self.dependent.add(variable)
        self.integers.alias(variable, operand)

    # Loops.

    def _scan(self, node: Node) -> None:
        assert node.body is not None
        form = _jax.ScanForm.of(node.equation)
        body, num_kept = node.body, form.num_consts + form.num_carry
        for inner, outer in zip(body.inputs[: form.num_consts], node.inputs, strict=False):
            self._alias(inner, outer)
        self._take_elements(node, body.inputs[num_kept:], node.inputs[num_kept:])
        carried = list(zip(body.inputs[form.num_consts : num_kept], body.outputs, strict=False))
        starts = node.inputs[form.num_consts : num_kept]
        for (inner, _), outer in zip(carried, starts, strict=True):
            self._alias(inner, outer)
            self.integers.known.pop(inner, None)  # It is the start in the first step only.
        integers = self.integers.inside_loop(node, body, carried, starts)
        inside = replace(self, integers=integers, loops=(*self.loops, node))
        before = copy.copy(self.found)
        while True:
            self.found.problem, self.found.lost = before.problem, before.lost
            self.found.interaction = before.interaction
            self.found.num_unreached = before.num_unreached
            inside.walk(body)
            is_new = [self._carry_over(node, *pair) for pair in carried]
            if not any(is_new):
                break
        for k, (outer, inner) in enumerate(zip(node.outputs, body.outputs, strict=True)):
            if inner in self.dependent:
                self.dependent.add(outer)
            if k < form.num_carry:
                self._alias(outer, carried[k][0])
                self.integers.leave_loop(outer, integers.known.get(inner))
                continue
            examples = self.found.axes.get(inner)
            self._set_examples(outer, None if examples is None else self._stacked(node, examples))

    def _take_elements(
        self, loop: Node, elements: Sequence[Variable], arrays: Sequence[Operand]
    ) -> None:
        """Follow the arrays that a loop scans over to the element of a step."""
        taken = None
        for element, array in zip(elements, arrays, strict=True):
            if array in self.dependent:
                self.dependent.add(element)
            examples = self.found.axes.get(array)
            if examples is None:
                self._set_examples(element, None)
                continue
            first, *rest = examples.dims
            if not examples.has_examples(0):
                self.found.axes[element] = examples.with_dims(rest)
            elif examples.has_only_examples(0) and len(first) == 1 and taken in (None, first):
                taken = first
                loops = (*examples.loops, (self.found.loop_id(loop), first))
                self.found.axes[element] = replace(examples, dims=tuple(rest), loops=loops)
            else:
                self._lose(loop, ProblemKind.NOT_FOLLOWED, [array], [element])

    def _carry_over(self, loop: Node, taken: Variable, returned: Operand) -> bool:
        """Let the next step take what a step returns. Return whether that is new."""
        axes = self.found.axes
        has_new_derivative = returned in self.dependent and taken not in self.dependent
        if has_new_derivative:
            self.dependent.add(taken)
        examples, before = axes.get(returned), axes.get(taken)
        if examples is None or examples == before:
            return has_new_derivative
        from_example_to_example = self.found.loops.get(loop) in dict(examples.loops)
        if from_example_to_example or before is not None:
            self.found.interaction = self.found.interaction or loop.name
            if returned in self.dependent:
                problem = ExampleProblem.at_operation(ProblemKind.INTERACTION, loop.name)
                self.found.problem = self.found.problem or problem
            return has_new_derivative
        axes[taken] = examples
        return True

    def _stacked(self, loop: Node, examples: ExampleAxes) -> ExampleAxes:
        """Return the examples of what a loop stacks, from those of a step."""
        loop_id = self.found.loops.get(loop)
        steps = dict(examples.loops).get(loop_id) if loop_id is not None else None
        if steps is None:
            return examples.with_dims([plain_dims((loop_length(loop),))[0], *examples.dims])
        others = tuple(each for each in examples.loops if each[0] != loop_id)
        return replace(examples, loops=others).with_dims([steps, *examples.dims])

    # Chunks that are read from an array and written to one, at indices that a loop counts.

    def _read_chunk(self, node: Node, examples: MaybeExamples) -> MaybeExamples:
        """Return the contiguous examples that are read from an array of all; None otherwise."""
        if examples is None:
            return None
        sizes, shape = node.params["slice_sizes"], node.inputs[0].shape
        sliced = [k for k, size in enumerate(sizes) if size != shape[k]]
        if len(sliced) != 1 or not examples.has_all_examples(sliced[0]):
            return None
        (axis,) = sliced
        is_collapsed = False
        if node.name == "gather":
            numbers = node.params["dimension_numbers"]
            if numbers.start_index_map != (axis,) or np.prod(node.inputs[1].shape) != 1:
                return None
            is_collapsed = numbers.collapsed_slice_dims == (axis,)
            start = self.integers.get(node.inputs[1])
        else:
            start = self.integers.get(node.inputs[1 + axis])
        chunk = self._chunk(examples, axis, start, sizes[axis])
        if chunk is None or len(node.outputs[0].shape) != len(shape) - is_collapsed:
            return None
        dims = [dim for k, dim in enumerate(chunk.dims) if not (is_collapsed and k == axis)]
        return chunk.with_dims(dims)

    def _chunk(
        self, examples: ExampleAxes, axis: int, start: np.ndarray | None, size: int
    ) -> MaybeExamples:
        """Return `size` examples from `start` on, if each step of a loop takes the next ones."""
        if start is None or start.min() < 0 or start.max() + size > examples.count:
            return None
        if start.ndim == 0:
            return examples.slice(axis, int(start), size)
        num_steps = len(start)
        if not self.loops or np.any(start != start[0] + size * np.arange(num_steps)):
            return None
        chunk = examples.slice(axis, int(start[0]), size)
        steps = self.found.loop_id(self.loops[-1]), _digits(num_steps, stride=size)
        return replace(chunk, loops=(*chunk.loops, steps))

    def _written_chunk(self, node: Node, operands: Sequence[MaybeExamples]) -> MaybeExamples:
        """Return all examples if a chunk is written where it belongs in an array of all."""
        buffer, chunk = operands[:2]
        if chunk is None:
            return None
        shape, chunk_shape = node.outputs[0].shape, node.inputs[1].shape
        sliced = [k for k in range(len(shape)) if shape[k] != chunk_shape[k]]
        if len(sliced) != 1 or shape[sliced[0]] != chunk.total:
            return None
        (axis,) = sliced
        if any(k != axis for k in chunk.axes):
            return None
        dims = [*plain_dims(shape)]
        dims[axis] = (Atom(_EXAMPLE, 1, chunk.total),)
        whole = ExampleAxes(chunk.total, 0, tuple(dims))
        start = self.integers.get(node.inputs[2 + axis])
        if self._chunk(whole, axis, start, chunk_shape[axis]) != chunk:
            return None
        return whole if buffer in (None, whole) else None

    def _check_loss(self, node: Node) -> None:
        """Check that a loss that depends on parameters has one row for each example."""
        operand = node.inputs[0]
        if operand not in self.dependent:
            return
        examples = self.found.axes.get(operand)
        if examples is None:
            self.found.num_unreached += int(_num_rows(node) != 1)
            return
        if examples.total == 1:
            return
        num_mapped = sum(level[0] for level in node.params["stacked"])
        least_axes = least_axes_of_batch(node.equation.primitive, node.params)
        has_batch = len(examples.dims) - num_mapped >= least_axes
        num_leading = num_mapped + (1 if has_batch else 0)
        leading_only = all(
            not examples.dims[k] or examples.has_only_examples(k) for k in range(num_leading)
        )
        outside = any(axis >= num_leading for axis in examples.axes)
        loop_ids = {self.found.loops.get(loop) for loop in self.loops}
        if outside or not leading_only or loop_ids != {loop_id for loop_id, _ in examples.loops}:
            self.found.problem = self.found.problem or _SEVERAL_ROWS


@dataclass
class _BackwardWalk:
    """Follows examples back to values that are the same for all of them.

    The cotangent of such a value may be about single examples: that of the zeros with which a
    recurrent network starts, say. It is if the value's examples, followed forward, are those of
    everything that is computed from it.

    Attributes:
        found: What the forward walk found; values are added.
        dependent: Values that depend on parameters and that a loss depends on: those that
            derivatives pass through.
        demanded: For each value, the examples that its readers take it to be about.
    """

    found: Examples
    dependent: set[Operand]
    demanded: dict[Operand, set[MaybeExamples]] = field(default_factory=dict)

    def walk(self, program: Program) -> None:
        for node in reversed(program.nodes):
            for variable in node.outputs:
                self._decide(variable)
            if node.body is None:
                self._visit(node)
            elif node.kind == "scan":
                form = _jax.ScanForm.of(node.equation)
                num_kept = form.num_consts + form.num_carry
                examples = [self.found.axes.get(v) for v in node.body.inputs[:num_kept]]
                examples = [None if each is None or each.loops else each for each in examples]
                self._demand(node.inputs[:num_kept], examples)
                self._demand(node.inputs[num_kept:], [None] * (len(node.inputs) - num_kept))
            else:
                for inner, outer in zip(node.body.outputs, node.outputs, strict=True):
                    self._demand([inner], [self.found.axes.get(outer)])
                self.walk(node.body)
                for variable in node.body.inputs:
                    self._decide(variable)
                self._demand(node.inputs, [self.found.axes.get(v) for v in node.body.inputs])

    def _decide(self, variable: Variable) -> None:
        """Accept what all readers of a value agree on."""
        demanded = self.demanded.get(variable, set())
        if variable not in self.found.axes and len(demanded) == 1:
            (examples,) = demanded
            if examples is not None:
                self.found.axes[variable] = examples

    def _demand(self, operands: Sequence[Operand], examples: Sequence[MaybeExamples]) -> None:
        for operand, each in zip(operands, examples, strict=True):
            if operand in self.dependent and operand not in self.found.axes:
                self.demanded.setdefault(operand, set()).add(each)

    def _visit(self, node: Node) -> None:
        operands = [self.found.axes.get(x) if x in self.dependent else None for x in node.inputs]
        outputs = [self.found.axes.get(x) for x in node.outputs if x in self.dependent]
        for k, operand in enumerate(node.inputs):
            if outputs and operand in self.dependent and operands[k] is None:
                self._demand([operand], [self._before(node, k, operands, outputs)])

    def _before(
        self,
        node: Node,
        k: int,
        operands: Sequence[MaybeExamples],
        outputs: Sequence[MaybeExamples],
    ) -> MaybeExamples:
        """Return the examples of the k-th operand for which the rule gives those of the outputs."""
        rule, shape = RULES.get(node.name), node.inputs[k].shape
        wanted = outputs[0]
        if rule is None or wanted is None or wanted.loops or wanted.count != wanted.total:
            return None
        for axis in (axis for axis, size in enumerate(shape) if size == wanted.total):
            examples = ExampleAxes.along((axis,), shape)
            assumed = [examples if j == k else other for j, other in enumerate(operands)]
            if rule(node, assumed) == [*outputs]:
                return examples
        return None
