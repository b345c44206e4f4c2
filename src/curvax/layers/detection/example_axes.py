"""Following examples through a program: which of its values are about which examples.

`Examples` (found by a larger batch) says where examples are in the arguments. From there on rules
(`example_rules.py`) say what each operation makes of them, so that it is known, and not guessed
from sizes, which axis of a layer's output or which loop around it is one of examples, and whether
one example stays apart from the others all the way to the losses.

Only what depends on parameters matters for that: derivatives do not pass through anything else. So
a mean over a batch of data is a constant, and integers are.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from curvax import _jax, _slicing
from curvax.layers.detection.axes import Atom
from curvax.layers.detection.example_rules import (
    INTERACT,
    NOT_FOLLOWED,
    RULES,
    Found,
    Rows,
    no_examples,
)
from curvax.layers.detection.examples import UNKNOWN, Examples
from curvax.layers.detection.program import Constant, Node, Operand, Program, Variable
from curvax.layers.detection.sites import Site
from curvax.layers.tags import LayerTag
from curvax.losses.tag import LossTag

__all__ = [
    "ExamplesAt",
    "ExamplesInProgram",
    "FollowedExamples",
    "follow_examples",
    "same_examples",
]


@dataclass
class FollowedExamples:
    """Which examples the values of a program are about.

    Attributes:
        rows: of each value that is about examples, as far as they could be followed.
        loops: the loops whose steps are about different examples, by number.
        problem: why one example does not stay apart from others, up to the losses; or "".
        lost: where examples could not be followed that do not depend on parameters; or "".
    """

    rows: dict[Operand, Rows] = field(default_factory=dict)
    loops: dict[Node, int] = field(default_factory=dict)
    problem: str = ""
    lost: str = ""


def follow_examples(
    program: Program, params: Sequence[Variable], examples: Examples, reached: AbstractSet[Operand]
) -> FollowedExamples:
    """Follow the examples of the arguments through a program that has what its losses need.

    `reached` are the values that the losses have a derivative in (`reached_from`).
    """
    found = FollowedExamples()
    if not examples.is_known:
        return found
    for variable in program.inputs:
        axes = examples.axes.get(variable, ())
        if len(axes) == 1:
            found.rows[variable] = Rows.along(axes[0], variable.shape)
        elif axes:
            found.problem = "an argument has several axes for examples"
    _Walk(found, set(params), reached).walk(program)
    return found


@dataclass
class _Walk:
    found: FollowedExamples
    dependent: set[Operand]
    """What depends on parameters, and the losses have a derivative in."""
    reached: AbstractSet[Operand]
    numbers: dict[Operand, np.ndarray] = field(default_factory=dict)
    """Integers that are known; in a loop, one for each of its steps."""
    loop: Node | None = None
    """The innermost loop around."""
    around: tuple[Node, ...] = ()

    def walk(self, program: Program) -> None:
        for node in program.nodes:
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
        self._take(node, body.inputs[cut:], node.inputs[cut:], form.length)
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
        before = self.found.problem, self.found.lost
        while True:
            self.found.problem, self.found.lost = before
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

    def _take(
        self, loop: Node, elements: Sequence[Variable], arrays: Sequence[Operand], length: int
    ) -> None:
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
        taken = (Atom(0, size, steps),) if steps > 1 else ()
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
        dims[axis] = (Atom(0, 1, own.total),)
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
        if operation is None or any(np.prod(out.shape) != 1 for out in node.outputs):
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
        """A loss has one row for each example."""
        operand = node.inputs[0]
        own = self.found.rows.get(operand)
        if own is None or operand not in self.dependent or own.total == 1:
            return
        mapped = sum(level[0] for level in node.params["stacked"])
        least = max(node.equation.primitive.least_axes, 2 if node.params["stacked"] else 1)
        front = mapped + (1 if len(own.dims) - mapped >= least else 0)
        of_examples = all(not own.dims[k] or own.has_only_examples(k) for k in range(front))
        numbers = {self.found.loops.get(loop) for loop in self.around}
        outside = any(axis >= front for axis in own.axes)
        if outside or not of_examples or numbers != {number for number, _ in own.loops}:
            several = "a loss has several rows for each example"
            self.found.problem = self.found.problem or several


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


# Which examples a layer is applied to at each of its places, and where they are there.

_NOT_TRACED = (
    "the function could not be traced with a larger batch (is the batch size written out in it, "
    "or the batch closed over?)"
)


@dataclass(frozen=True)
class ExamplesAt:
    """Which examples a layer is applied to at one place, and where they are there.

    Attributes:
        before: how many positions there are before the axis of examples, in each step of the loops
            around.
        number: how many examples there are in each step.
        after: how many positions there are after that axis.
        loops: for each loop around, outermost first, a number of its own if its steps are about
            different examples; None if they are about the same.
        total: how many examples there are.
        first: the first of those at this place.
        count: how many examples there are at this place, in all steps.
        in_order: whether they are in order along all loops over examples, outermost first, and then
            along their axis.
        unknown: why none of this is known, if so.
        problem: why one example does not stay apart from others on the way to the losses, if so.
    """

    before: int = 1
    number: int = 1
    after: int = 1
    loops: tuple[int | None, ...] = ()
    total: int = 1
    first: int = 0
    count: int = 1
    in_order: bool = True
    unknown: str = ""
    problem: str = ""

    @property
    def around(self) -> tuple[int, int, int]:
        """How many positions there are before the axis of examples, along it, and after it."""
        return self.before, self.number, self.after

    @property
    def interaction(self) -> str:
        """By what examples interact, if that is known."""
        return self.problem if self.problem.startswith(INTERACT) else ""

    @property
    def remark(self) -> str:
        """What there is to say about it."""
        if self.unknown:
            interact = self.unknown.startswith(INTERACT)
            return self.unknown if interact else f"{UNKNOWN}: {self.unknown}"
        not_followed = self.problem.startswith(NOT_FOLLOWED)
        return f"{UNKNOWN}: {self.problem}" if not_followed else self.problem


@dataclass(frozen=True, eq=False)
class ExamplesInProgram:
    """What is known of the examples in a program."""

    program: Program
    examples: Examples
    followed: FollowedExamples

    def at_site(self, site: Site) -> ExamplesAt:
        """At a place where a layer was found."""
        rows = self._rows(site.output)
        if isinstance(rows, str):
            return self._unknown(rows)
        if len(rows.axes) > 1:
            return self._unknown("they are along several axes")
        if rows.axes and not rows.has_only_examples(rows.axes[0]):
            return self._unknown("they share an axis with positions")
        axis = rows.axes[0] if rows.axes else None
        size = 1 if axis is None else site.output.shape[axis]
        if axis is None:
            around = (1, 1, math.prod(site.output.shape[k] for k in site.positions))
        else:
            around = site.positions_around(axis, size)
        numbers = dict(site.constants).get("dimension_numbers")
        if around is None or (numbers is not None and axis not in (None, numbers.out_spec[0])):
            return self._unknown("they are along an axis that the parameters have, too")
        return self._known(site.node, rows, around)

    def at_tag(self, node: Node, output: Operand, batch_axis: int = 0) -> ExamplesAt:
        """At a layer of the user's, who says that examples are along an axis of its output."""
        shape, count = output.shape, self.examples.batch_size
        if not self.examples.is_known:
            if self._loops[node] or shape[batch_axis : batch_axis + 1] != (count,):
                return self._unknown(_NOT_TRACED)
            return ExamplesAt(1, count, 1, (), count, 0, count)
        rows = self._rows(output)
        if isinstance(rows, str):
            return self._unknown(rows)
        if len(shape) <= batch_axis or rows.axes not in ((), (batch_axis,)):
            return self._unknown(f"they are not along axis {batch_axis} of what is tagged")
        size = shape[batch_axis]
        if not (rows.has_only_examples(batch_axis) or size == 1):
            return self._unknown("they share an axis with positions")
        return self._known(node, rows, (1, size, 1))

    @functools.cached_property
    def _loops(self) -> dict[Node, tuple[Node, ...]]:
        return _loops_around(self.program)

    def _rows(self, operand: Any) -> Rows | str:
        """The examples that a value is about; or why that is not known."""
        if not self.examples.is_known:
            return _NOT_TRACED
        rows = self.followed.rows.get(operand) if isinstance(operand, Variable) else None
        return rows or self.followed.lost or "what it computes is not about single ones"

    def _unknown(self, why: str) -> ExamplesAt:
        return ExamplesAt(unknown=why, problem=self.followed.problem)

    def _known(self, node: Node, rows: Rows, around: tuple[int, int, int]) -> ExamplesAt:
        taken: Mapping[Any, Any] = dict(rows.loops)
        numbers = tuple(self.followed.loops.get(loop) for loop in self._loops[node])
        loops = tuple(number if number in taken else None for number in numbers)
        which = (rows.total, rows.start, rows.count, rows.is_in_order)
        return ExamplesAt(*around, loops, *which, problem=self.followed.problem)


def same_examples(at: Sequence[ExamplesAt]) -> dict[Any, list[int]] | str:
    """The numbers of the places that are about the same examples; or why that is not known.

    Each group has examples of its own, all of its places the same.
    """
    unknown = next((each.remark for each in at if each.unknown), "")
    if unknown:
        return unknown
    groups: dict[Any, list[int]] = {}
    for number, each in enumerate(at):
        order = () if each.in_order else each.loops
        groups.setdefault((each.total, each.first, each.count, order), []).append(number)
    pairs = [(a, b) for a, b in itertools.combinations(groups, 2) if a[0] == b[0]]
    if any(a[1] < b[1] + b[2] and b[1] < a[1] + a[2] for a, b in pairs):
        return f"{UNKNOWN}: they are in another order at another place"
    return groups


def _loops_around(program: Program, loops: tuple[Node, ...] = ()) -> dict[Node, tuple[Node, ...]]:
    """For each node the loops around it, outermost first."""
    found: dict[Node, tuple[Node, ...]] = {}
    for node in program.nodes:
        found[node] = loops
        if node.body is not None:
            inner = (*loops, node) if node.kind == "scan" else loops
            found |= _loops_around(node.body, inner)
    return found
