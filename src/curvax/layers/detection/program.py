"""Traced programs in a form that is easy to read and to run again with changes.

A `Program` is a list of nodes, in the order in which they are computed. Calls (`jit` and the like)
are dissolved into it. What has a meaning of its own stays: the body of a `checkpoint`, of a `scan`
or of a function with its own derivatives is a program inside a node. Each variable is written
once, in one place, so that it says which value is meant in the whole of a program and its bodies.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from curvax import _jax
from curvax._jax import Tag
from curvax._types import Fun, PyTree, TreeDef
from curvax.losses.tag import LossTag


@dataclass(frozen=True, eq=False)
class Variable:
    """A value that a program is given or computes."""

    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True, eq=False)
class Constant:
    """A value that is known: a literal, or an array that the function closes over."""

    value: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(jax.numpy.shape(self.value))


Operand = Variable | Constant


@dataclass(frozen=True, eq=False)
class Node:
    """One operation. `kind` is "plain", or says which meaning its body has."""

    equation: Any
    kind: _jax.Kind
    inputs: Sequence[Operand]
    outputs: Sequence[Variable]
    body: "Program | None" = None

    @cached_property
    def name(self) -> str:
        """The name of the operation."""
        return _jax.operation_name(self.equation)

    @property
    def params(self) -> dict[str, Any]:
        """The static parameters of the operation."""
        return _jax.parameters(self.equation)


@dataclass(frozen=True, eq=False)
class Program:
    """Nodes that compute outputs from inputs."""

    inputs: Sequence[Variable]
    nodes: Sequence[Node]
    outputs: Sequence[Operand]

    def all_nodes(self) -> Iterator[Node]:
        """The nodes, each followed by those of its body."""
        for node in self.nodes:
            yield node
            if node.body is not None:
                yield from node.body.all_nodes()


def trace_program(fun: Fun, *args: PyTree) -> tuple[Program, TreeDef]:
    """The program of a function, for arguments like these, and the structure of its result."""
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    return read(closed), jax.tree.structure(shapes)


def read(closed: Any) -> Program:
    """A closed jaxpr as a program."""
    return _Reader().program(closed)


@dataclass
class _Reader:
    """Reads a jaxpr; each time it is called for, it gets new variables."""

    known: dict[Any, Operand] = field(default_factory=dict)

    def program(self, closed: Any) -> Program:
        inputs = [_variable(v) for v in closed.jaxpr.invars]
        nodes, outputs = _Reader().inline(closed, inputs)
        return Program(inputs, nodes, outputs)

    def inline(self, closed: Any, inputs: Sequence[Operand]) -> tuple[list[Node], list[Operand]]:
        jaxpr, consts = closed.jaxpr, closed.consts
        self.known.update(zip(jaxpr.constvars, map(Constant, consts), strict=True))
        self.known.update(zip(jaxpr.invars, inputs, strict=True))
        nodes: list[Node] = []
        for equation in jaxpr.eqns:
            nodes += self._nodes(equation)
        return nodes, [self._operand(v) for v in jaxpr.outvars]

    def _nodes(self, equation: Any) -> list[Node]:
        inputs = [self._operand(v) for v in equation.invars]
        kind, inner = _jax.inner_program(equation)
        if kind == "call":
            nodes, outputs = _Reader().inline(inner, inputs)
            self.known.update(zip(equation.outvars, outputs, strict=True))
            return nodes
        outputs = [_variable(v) for v in equation.outvars]
        self.known.update(zip(equation.outvars, outputs, strict=True))
        body = None if inner is None else self.program(inner)
        return [Node(equation, kind, inputs, outputs, body)]

    def _operand(self, v: Any) -> Operand:
        return Constant(v.val) if _jax.is_literal(v) else self.known[v]


def _variable(v: Any) -> Variable:
    return Variable(tuple(getattr(v.aval, "shape", ())), getattr(v.aval, "dtype", None))


# What a program computes for the losses, without the rest.
#
# A function computes much that its losses do not depend on: its value, a weight decay, metrics.
# What is done with parameters there says nothing about layers, also where it is in the same
# `checkpoint` or `scan` as what matters.

Wanted = Callable[[Node], bool]


def needed_for(program: Program, wanted: Wanted) -> Program:
    """The nodes that are wanted and what they are computed from; there are no outputs."""
    pruned, _ = _pruned(replace(program, outputs=[]), wanted, [])
    return pruned


def _pruned(
    program: Program, wanted: Wanted, outputs: Sequence[bool]
) -> tuple[Program, set[Operand]]:
    """What is left if only some outputs are needed, and the operands that are read there."""
    pairs = zip(program.outputs, outputs, strict=True)
    outputs = [is_needed or _must_be(out) for out, is_needed in pairs]
    needed = {out for out, is_needed in zip(program.outputs, outputs, strict=True) if is_needed}
    kept: list[Node] = []
    for node in reversed(program.nodes):
        own = [out in needed for out in node.outputs]
        inside = node.body is not None and any(map(wanted, node.body.all_nodes()))
        if not (any(own) or inside or wanted(node)):
            continue
        left = node if node.body is None else _without(node, node.body, wanted, own)
        kept.append(left)
        needed.update(left.inputs)
    left_out = [
        out if is_needed else _anything(out)
        for out, is_needed in zip(program.outputs, outputs, strict=True)
    ]
    return Program(program.inputs, kept[::-1], left_out), needed


def _without(node: Node, body: Program, wanted: Wanted, outputs: list[bool]) -> Node:
    """A node with a body, if only some of its outputs are needed."""
    carried = range(0)
    if node.kind == "scan":
        form = _jax.ScanForm.of(node.equation)
        carried = range(form.num_consts, form.num_consts + form.num_carry)
    while True:
        pruned, needed = _pruned(body, wanted, outputs)
        read = [variable in needed for variable in body.inputs]
        # What a loop carries from step to step is needed if any step reads it.
        missing = [k for k, place in enumerate(carried) if read[place] and not outputs[k]]
        if not missing:
            break
        outputs = [is_needed or k in missing for k, is_needed in enumerate(outputs)]
    for k, place in enumerate(carried):
        read[place] = read[place] or outputs[k]
    inputs = [
        operand if is_read or _must_be(operand) else _anything(operand)
        for operand, is_read in zip(node.inputs, read, strict=True)
    ]
    return replace(node, inputs=inputs, body=pruned)


def _anything(operand: Operand) -> Operand:
    """A stand-in for what is not needed, where something has to be."""
    if isinstance(operand, Constant):
        return operand
    return Constant(np.broadcast_to(np.zeros((), operand.dtype), operand.shape))


def _must_be(operand: Operand) -> bool:
    """Whether there is no stand-in for it."""
    return isinstance(operand, Variable) and (operand.dtype is None or _jax.is_key(operand))


# Which values the losses have a derivative in.
#
# A value behind `stop_gradient`, one that is rounded, or one that only decides which row is
# looked up has an effect on a loss and no derivative there: JAX differentiates these operations
# as zero. What is done with parameters up to there has no curvature, and a loss that depends on
# parameters only in that way has none at all.

_ZERO_DERIVATIVE = {"bitcast_convert_type", "ceil", "floor", "round", "sign", "stop_gradient"}
"""Operations whose derivative is zero though they return real numbers."""


def reached_from(
    losses: Collection[Node], program: Program, through_custom: bool = False
) -> set[Operand]:
    """Return the values that the predictions of some losses may have a derivative in.

    What is not among them has a derivative of zero by construction. `through_custom`: functions
    with derivatives of their own are differentiated through.
    """
    reached: set[Operand] = set()
    _walk_back(program, [False] * len(program.outputs), losses, through_custom, reached)
    return reached


def _walk_back(
    program: Program,
    outputs: Sequence[bool],
    losses: Collection[Node],
    through_custom: bool,
    reached: set[Operand],
) -> None:
    """Add what is reached in a program of which some outputs are."""
    _add(reached, program.outputs, outputs)
    for node in reversed(program.nodes):
        own = [out in reached for out in node.outputs]
        if isinstance(node.equation.primitive, Tag):
            # It returns its first operands: of a loss, those that depend on parameters.
            is_wanted = isinstance(node.equation.primitive, LossTag) and node in losses
            _add(reached, node.inputs[: len(own)], [is_wanted or each for each in own])
        elif node.body is None or (node.kind == "custom" and not through_custom):
            is_on_path = any(own) and node.name not in _ZERO_DERIVATIVE
            _add(reached, node.inputs, [is_on_path] * len(node.inputs))
            for inner in node.body.all_nodes() if node.body is not None else ():
                # It has derivatives of its own, wherever in its body.
                _add(reached, inner.outputs, [is_on_path] * len(inner.outputs))
        else:
            _walk_back_body(node, node.body, own, losses, through_custom, reached)


def _walk_back_body(
    node: Node,
    body: Program,
    outputs: list[bool],
    losses: Collection[Node],
    through_custom: bool,
    reached: set[Operand],
) -> None:
    carried = range(0)
    if node.kind == "scan":
        form = _jax.ScanForm.of(node.equation)
        carried = range(form.num_consts, form.num_consts + form.num_carry)
    while True:
        _walk_back(body, outputs, losses, through_custom, reached)
        # What one step of a loop takes from its carry, the step before returns.
        again = [
            is_reached or (k < len(carried) and body.inputs[carried[k]] in reached)
            for k, is_reached in enumerate(outputs)
        ]
        if again == outputs:
            break
        outputs = again
    _add(reached, node.inputs, [variable in reached for variable in body.inputs])


def _add(reached: set[Operand], operands: Sequence[Operand], wanted: Sequence[bool]) -> None:
    for operand, is_wanted in zip(operands, wanted, strict=True):
        if is_wanted and isinstance(operand, Variable) and _is_inexact(operand):
            reached.add(operand)


def _is_inexact(variable: Variable) -> bool:
    return variable.dtype is not None and jnp.issubdtype(variable.dtype, jnp.inexact)


# Running a program again, with something done at some of its nodes.
#
# `Hooks` say what to do in the place of which nodes. Bodies that have none of these nodes are run
# as they are. A body that has some is entered, and stays what it is: checkpointed, repeated.
#
# Hooks can be given arrays by keys, and can collect others. Inside a loop, what is collected has a
# further leading axis, and so has what is given, of which each step gets its own part; unless the
# hooks say that it is for all steps.

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
