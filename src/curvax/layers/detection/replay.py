"""Running a program again, with something done at some of its nodes.

`Hooks` say what to do in the place of which nodes. Bodies that have none of these nodes are run as
they are. A body that has some is entered, and what it was stays what it is: checkpointed, repeated.

Hooks can be given arrays by keys, and can collect others. Inside a loop, what is collected has
one more axis in front, and so has what is given, of which each step gets its own part; unless the
hooks say that it is for all steps.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jax import lax

from curvax import _jax
from curvax._types import PyTree
from curvax.layers.detection.program import Constant, Node, Operand, Program, Variable

Given = Mapping[Any, PyTree]
"""Pytrees of arrays for hooks, by key."""

Collected = dict[Any, PyTree]
"""Pytrees of arrays from hooks, by key."""


@runtime_checkable
class Hooks(Protocol):
    """What to do at some nodes of a program."""

    def keys_at(self, node: Node) -> Collection[Any] | None:
        """The keys of what is given for a node; None if there is nothing to do at it."""
        ...

    def is_split(self, key: Any, loop: Node) -> bool:
        """Whether what is given under a key has a part for each step of a loop."""
        ...

    def visit(
        self, node: Node, inputs: Sequence[Any], values: "Values", given: Given
    ) -> tuple[list[Any], Collected]:
        """The outputs of a node, and what is collected there."""
        ...


class Values:
    """The values of operands where a program has been run so far."""

    def __init__(self, program: Program, inputs: Sequence[Any]) -> None:
        self._known: dict[Variable, Any] = dict(zip(program.inputs, inputs, strict=True))
        self.lifted: dict[Operand, Any] = {}
        """Values with a leading axis of examples that the program does not have (`Lifting`)."""

    def __getitem__(self, operand: Operand) -> Any:
        return operand.value if isinstance(operand, Constant) else self._known[operand]

    def __setitem__(self, variable: Variable, value: Any) -> None:
        self._known[variable] = value


def run(
    program: Program, inputs: Sequence[Any], hooks: Hooks, given: Given | None = None
) -> tuple[list[Any], Collected]:
    """The outputs of a program, and what the hooks collected."""
    given = {} if given is None else given
    values = Values(program, inputs)
    collected: Collected = {}
    for node in program.nodes:
        read = [values[operand] for operand in node.inputs]
        if hooks.keys_at(node) is not None:
            outputs, found = hooks.visit(node, read, values, given)
        elif node.body is not None and _keys_inside(node.body, hooks) is not None:
            outputs, found = _run_body(node, node.body, read, hooks, given)
        else:
            outputs, found = _jax.run_equation(node.equation, read), {}
        collected |= found
        for variable, value in zip(node.outputs, outputs, strict=True):
            values[variable] = value
    return [values[operand] for operand in program.outputs], collected


def _keys_inside(program: Program, hooks: Hooks) -> set[Any] | None:
    """All keys of the nodes in a program; None if there is nothing to do in it."""
    found = [keys for node in program.all_nodes() if (keys := hooks.keys_at(node)) is not None]
    return set().union(*found) if found else None


def _run_body(
    node: Node, body: Program, inputs: Sequence[Any], hooks: Hooks, given: Given
) -> tuple[list[Any], Collected]:
    if node.kind == "scan":
        return _run_scan(node, body, inputs, hooks, given)
    keys: list[Any] = []
    names, values = list(given), list(given.values())

    def inner(inputs: list[Any], values: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs, found = run(body, inputs, hooks, dict(zip(names, values, strict=True)))
        keys[:] = found
        return outputs, list(found.values())

    if node.kind == "checkpoint":
        inner = _jax.checkpointed(node.equation, inner)
    outputs, found = inner(list(inputs), values)
    return outputs, dict(zip(keys, found, strict=True))


def _run_scan(
    node: Node, body: Program, inputs: Sequence[Any], hooks: Hooks, given: Given
) -> tuple[list[Any], Collected]:
    form = _jax.ScanForm.of(node.equation)
    start = form.num_consts + form.num_carry
    consts, carry, xs = inputs[: form.num_consts], inputs[form.num_consts : start], inputs[start:]
    inside = _keys_inside(body, hooks) or set()
    names = [key for key in given if key in inside and hooks.is_split(key, node)]
    keys: list[Any] = []  # Keys need not be what JAX takes for keys of a dictionary.

    def step(carry: list[Any], part: tuple[list[Any], list[Any]]) -> tuple[list[Any], Any]:
        xs, own = part
        given_here = {**given, **dict(zip(names, own, strict=True))}
        outputs, found = run(body, [*consts, *carry, *xs], hooks, given_here)
        keys[:] = found
        return outputs[: form.num_carry], (outputs[form.num_carry :], list(found.values()))

    final, (ys, found) = lax.scan(
        step,
        list(carry),
        (list(xs), [given[name] for name in names]),
        length=form.length,
        reverse=form.reverse,
        unroll=form.unroll,
    )
    return [*final, *ys], dict(zip(keys, found, strict=True))


def loops_around(program: Program, wanted: Node) -> tuple[Node, ...] | None:
    """The loops around a node, outermost first; None if it is not in the program."""
    for node in program.nodes:
        if node is wanted:
            return ()
        inner = None if node.body is None else loops_around(node.body, wanted)
        if inner is not None:
            return (node, *inner) if node.kind == "scan" else inner
    return None


def stack_shape(program: Program, node: Node) -> tuple[int, ...]:
    """The lengths of the loops around a node of a program, outermost first."""
    loops = loops_around(program, node) or ()
    return tuple(_jax.ScanForm.of(loop.equation).length for loop in loops)


def loop_lengths(program: Program) -> dict[Node, tuple[int, ...]]:
    """The lengths of the loops around each node of a program, outermost first."""
    found: dict[Node, tuple[int, ...]] = {}
    for node in program.nodes:
        found[node] = ()
        if node.body is not None:
            own = (_jax.ScanForm.of(node.equation).length,) if node.kind == "scan" else ()
            found |= {inner: own + rest for inner, rest in loop_lengths(node.body).items()}
    return found
