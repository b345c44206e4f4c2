"""Which examples a layer is applied to at each of its places, and where they are there."""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from curvax.graph._example_rules import INTERACT, NOT_FOLLOWED, Rows
from curvax.graph._examples import UNKNOWN, Examples
from curvax.graph._follow_examples import FollowedExamples
from curvax.graph._program import Node, Operand, Program, Variable
from curvax.graph._sites import Site

__all__ = ["ExamplesAt", "ExamplesInProgram", "same_examples"]

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
