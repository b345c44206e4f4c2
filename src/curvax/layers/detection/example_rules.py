"""What operations do to the examples of their operands.

`Rows` says which examples a value is about, and along which of its axes they are. The rules of this
module, one for each operation, say what follows for its outputs. What they promise is what exact
curvature needs: an element of an output that is about one example is computed from nothing that is
about another one, so that derivatives with respect to one example's elements stay with it.

An operation without a rule is not followed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from curvax.layers.detection.axes import REARRANGED, Atom, Axes, Dims
from curvax.layers.detection.program import Node
from curvax.layers.use import INTERACT, NOT_FOLLOWED

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
        return replace(self, dims=tuple(map(_tidy, dims)))

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
