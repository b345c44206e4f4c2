"""Traced programs in a form that is easy to read and to run again with changes.

A `Program` is a list of nodes, in the order in which they are computed. Calls (`jit` and the like)
are dissolved into it. What has a meaning of its own stays: the body of a `checkpoint`, of a `scan`
or of a function with its own derivatives is a program inside of a node. Each variable is written
once, in one place, so that it says which value is meant in the whole of a program and its bodies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from curvax import _compat
from curvax._types import Fun, PyTree, TreeDef

__all__ = ["Constant", "Node", "Operand", "Program", "Variable", "read", "trace_program"]


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
    kind: _compat.Kind
    inputs: Sequence[Operand]
    outputs: Sequence[Variable]
    body: "Program | None" = None

    @property
    def name(self) -> str:
        """The name of the operation."""
        return _compat.operation_name(self.equation)

    @property
    def params(self) -> dict[str, Any]:
        """The static parameters of the operation."""
        return _compat.parameters(self.equation)


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
        kind, inner = _compat.inner_program(equation)
        if kind == "call":
            nodes, outputs = _Reader().inline(inner, inputs)
            self.known.update(zip(equation.outvars, outputs, strict=True))
            return nodes
        outputs = [_variable(v) for v in equation.outvars]
        self.known.update(zip(equation.outvars, outputs, strict=True))
        body = None if inner is None else self.program(inner)
        return [Node(equation, kind, inputs, outputs, body)]

    def _operand(self, v: Any) -> Operand:
        return Constant(v.val) if _compat.is_literal(v) else self.known[v]


def _variable(v: Any) -> Variable:
    return Variable(tuple(getattr(v.aval, "shape", ())), getattr(v.aval, "dtype", None))
