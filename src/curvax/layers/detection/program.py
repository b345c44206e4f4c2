"""`Program`: a traced function in a form that is easy to read, prune and run again with changes.

A `Program` is a list of nodes, in the order in which they are computed. Calls (`jit` and the like)
are inlined. The body of a `checkpoint`, of a `scan` or of a function with custom derivatives stays
a program inside its node, because it means more than its operations. Each variable is defined once,
in one place, so that it identifies a value in the whole program, bodies included.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

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
    """A known value: a literal, or an array that the function closes over."""

    value: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(jax.numpy.shape(self.value))


Operand = Variable | Constant


@dataclass(frozen=True, eq=False)
class Node:
    """One operation. `kind` is "plain", or says what the operation does with its body."""

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
        """Yield the nodes, each followed by those of its body."""
        for node in self.nodes:
            yield node
            if node.body is not None:
                yield from node.body.all_nodes()

    @cached_property
    def loops_around(self) -> Mapping[Node, tuple[Node, ...]]:
        """For each node, bodies included, the scans around it, outermost first."""
        return dict(_with_loops(self, ()))

    def loop_lengths(self, node: Node) -> tuple[int, ...]:
        """Return the lengths of the scans around a node, outermost first."""
        return tuple(loop_length(loop) for loop in self.loops_around[node])


def _with_loops(
    program: Program, loops: tuple[Node, ...]
) -> Iterator[tuple[Node, tuple[Node, ...]]]:
    for node in program.nodes:
        yield node, loops
        if node.body is not None:
            yield from _with_loops(node.body, (*loops, node) if node.kind == "scan" else loops)


def loop_length(loop: Node) -> int:
    """Return the number of steps of a scan."""
    return _jax.ScanForm.of(loop.equation).length


class DotOperand(NamedTuple):
    """The axes of one operand of a `dot_general`.

    The axes of its output are the batch axes, the free axes of the first operand and those of the
    second.
    """

    contracted: tuple[int, ...]
    batch: tuple[int, ...]
    free: tuple[int, ...]


def dot_operands(node: Node) -> tuple[DotOperand, DotOperand]:
    """Return the axes of both operands of a `dot_general`."""
    contracted, batch = node.params["dimension_numbers"]
    found = [
        DotOperand(
            tuple(map(int, contracted[k])),
            tuple(map(int, batch[k])),
            tuple(
                axis
                for axis in range(len(operand.shape))
                if axis not in (*contracted[k], *batch[k])
            ),
        )
        for k, operand in enumerate(node.inputs)
    ]
    return found[0], found[1]


def trace_program(fun: Fun, *args: PyTree) -> tuple[Program, TreeDef]:
    """Trace a function for arguments like these; return its program and its output structure."""
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    return read(closed), jax.tree.structure(shapes)


def read(closed: Any) -> Program:
    """Convert a closed jaxpr to a program."""
    return _Reader().program(closed)


@dataclass
class _Reader:
    """Converts a jaxpr. A jaxpr that is called several times gets new variables each time."""

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


# Pruning: what a program computes for the losses, without the rest.
#
# A function computes much that its losses do not depend on: its value, a weight decay, metrics.
# What is done with parameters there says nothing about layers, even if it shares a `checkpoint` or
# a `scan` with what matters.

Wanted = Callable[[Node], bool]


def needed_for(program: Program, wanted: Wanted) -> Program:
    """Return the wanted nodes and what they are computed from, as a program without outputs."""
    pruned, _ = _pruned(replace(program, outputs=[]), wanted, [])
    return pruned


def _pruned(
    program: Program, wanted: Wanted, outputs: Sequence[bool]
) -> tuple[Program, set[Operand]]:
    """Prune a program of which only some outputs are needed; also return the operands it reads."""
    outputs = [
        is_needed or not _has_placeholder(out)
        for out, is_needed in zip(program.outputs, outputs, strict=True)
    ]
    needed = {out for out, is_needed in zip(program.outputs, outputs, strict=True) if is_needed}
    kept: list[Node] = []
    for node in reversed(program.nodes):
        needed_outputs = [out in needed for out in node.outputs]
        inside = node.body is not None and any(map(wanted, node.body.all_nodes()))
        if not (any(needed_outputs) or inside or wanted(node)):
            continue
        if node.body is not None:
            node = _with_pruned_body(node, node.body, wanted, needed_outputs)
        kept.append(node)
        needed.update(node.inputs)
    remaining = [
        out if is_needed else _placeholder(out)
        for out, is_needed in zip(program.outputs, outputs, strict=True)
    ]
    return Program(program.inputs, kept[::-1], remaining), needed


def _with_pruned_body(node: Node, body: Program, wanted: Wanted, outputs: list[bool]) -> Node:
    """Prune the body of a node of which only some outputs are needed."""
    carried = _carried(node)
    while True:
        pruned, needed = _pruned(body, wanted, outputs)
        read = [variable in needed for variable in body.inputs]
        # What a loop carries from step to step is needed if any step reads it.
        missing = [k for k, number in enumerate(carried) if read[number] and not outputs[k]]
        if not missing:
            break
        outputs = [is_needed or k in missing for k, is_needed in enumerate(outputs)]
    for k, number in enumerate(carried):
        read[number] = read[number] or outputs[k]
    inputs = [
        operand if is_read or not _has_placeholder(operand) else _placeholder(operand)
        for operand, is_read in zip(node.inputs, read, strict=True)
    ]
    return replace(node, inputs=inputs, body=pruned)


def _carried(node: Node) -> range:
    """Return which inputs of a node are the carry of a scan; output k is the new carry k."""
    if node.kind != "scan":
        return range(0)
    form = _jax.ScanForm.of(node.equation)
    return range(form.num_consts, form.num_consts + form.num_carry)


def _placeholder(operand: Operand) -> Operand:
    """Return zeros for an operand that is not needed but whose position has to be filled."""
    if isinstance(operand, Constant):
        return operand
    return Constant(np.broadcast_to(np.zeros((), operand.dtype), operand.shape))


def _has_placeholder(operand: Operand) -> bool:
    """Return whether zeros can stand for an operand; there are none of tokens and PRNG keys."""
    return isinstance(operand, Constant) or (operand.dtype is not None and not _jax.is_key(operand))


# Derivatives: the values in which the losses have one.
#
# A value behind `stop_gradient`, one that is rounded, or one that only selects a row affects a loss
# without having a derivative: JAX differentiates these operations as zero. What is done with
# parameters up to there has no curvature, and a loss that depends on parameters in no other way
# has none at all.

_ZERO_DERIVATIVE = {"bitcast_convert_type", "ceil", "floor", "round", "sign", "stop_gradient"}
"""Operations whose derivative is zero although they return real numbers."""


def reached_from(
    losses: Collection[Node], program: Program, through_custom: bool = False
) -> set[Operand]:
    """Return the values in which the predictions of some losses may have a derivative.

    In all other values the derivative is zero by construction.

    Arguments:
        losses: The loss tags to start from.
        program: The program that they are in.
        through_custom: Whether to differentiate through the bodies of functions with custom
            derivatives.
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
    """Add to `reached` the values of a program of which some outputs are reached."""
    _add(reached, program.outputs, outputs)
    for node in reversed(program.nodes):
        is_reached = [out in reached for out in node.outputs]
        if isinstance(node.equation.primitive, Tag):
            # A tag returns its first operands; those of a loss tag depend on parameters.
            is_wanted = isinstance(node.equation.primitive, LossTag) and node in losses
            is_reached = [is_wanted or each for each in is_reached]
            _add(reached, node.inputs[: len(is_reached)], is_reached)
        elif node.body is None or (node.kind == "custom" and not through_custom):
            is_on_path = any(is_reached) and node.name not in _ZERO_DERIVATIVE
            _add(reached, node.inputs, [is_on_path] * len(node.inputs))
            for inner in node.body.all_nodes() if node.body is not None else ():
                # A custom rule may use any value of the body.
                _add(reached, inner.outputs, [is_on_path] * len(inner.outputs))
        else:
            _walk_back_body(node, node.body, is_reached, losses, through_custom, reached)


def _walk_back_body(
    node: Node,
    body: Program,
    outputs: list[bool],
    losses: Collection[Node],
    through_custom: bool,
    reached: set[Operand],
) -> None:
    carried = _carried(node)
    while True:
        _walk_back(body, outputs, losses, through_custom, reached)
        # What one step of a loop reads from its carry, the step before returns.
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


# Running a program again, with hooks at some of its nodes.
#
# `Hooks` replace some nodes. Bodies without such nodes are run as they are. A body with some is
# entered, and stays checkpointed or repeated.
#
# Hooks can be given arrays by key, and can collect arrays by key. Inside a loop, what is collected
# gains a leading axis of steps. What is given also has one, and each step gets its slice, unless
# the hooks say that all steps share it.

Given = Mapping[Any, PyTree]
"""Pytrees of arrays for hooks, by key."""

Collected = dict[Any, PyTree]
"""Pytrees of arrays from hooks, by key."""


@runtime_checkable
class Hooks(Protocol):
    """What to run in place of some nodes of a program."""

    def keys_at(self, node: Node) -> Collection[Any] | None:
        """Return the keys of what is given for a node; None to run the node as it is."""
        ...

    def is_per_step(self, key: Any, loop: Node) -> bool:
        """Return whether what is given under a key has a leading axis of the steps of a loop."""
        ...

    def visit(
        self, node: Node, inputs: Sequence[Any], values: "Values", given: Given
    ) -> tuple[list[Any], Collected]:
        """Return the outputs of a node, and what to collect there."""
        ...


class Values:
    """The values of the operands of a program that have been computed so far."""

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
    """Run a program with hooks; return its outputs, and what the hooks collected."""
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
    """Return all keys of the nodes in a program; None if no node has a hook."""
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
    names = [key for key in given if key in inside and hooks.is_per_step(key, node)]
    keys: list[Any] = []  # Outside the pytrees: JAX would have to sort them.

    def step(carry: list[Any], x: tuple[list[Any], list[Any]]) -> tuple[list[Any], Any]:
        xs, slices = x
        given_here = {**given, **dict(zip(names, slices, strict=True))}
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
