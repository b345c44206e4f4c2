"""Values that a program computes from constants: what detection must know before the program runs.

A parameter that is multiplied with `1 / sqrt(d)` is a scaled parameter if that number is known; a
loop that reads chunk after chunk of a batch goes through the examples in order if the start of each
chunk is known. The two questions differ. `ConstantFolder` evaluates any operation, once, by running
it, and only where it is asked. `StepIntegers` evaluates integer arithmetic for all steps of a loop
at once, with NumPy, since an index differs from step to step.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from curvax import _jax, _slicing
from curvax.layers.detection.program import Constant, Node, Operand, Program, Variable

_SMALL = 65536
"""Number of elements above which an array of integers is not folded."""


@dataclass
class ConstantFolder:
    """Evaluates scalars, and small arrays of integers, that depend on constants only.

    Attributes:
        made_by: The node that computes each variable; the caller adds to it.
        order: The position of each node in the program.
        known: What has been evaluated so far.
    """

    made_by: Mapping[Operand, Node]
    order: Mapping[Node, int]
    known: dict[Operand, Any] = field(default_factory=dict)

    def value(self, operand: Operand) -> Any:
        """Return the value of an operand; None if it is not small or depends on variables."""
        if isinstance(operand, Constant):
            is_foldable = not operand.shape or _is_integer(jnp.result_type(operand.value))
            return operand.value if is_foldable and _is_small(operand) else None
        for node in self._nodes_before(operand):
            outputs = _jax.run_now(node.equation, [self.value(x) for x in node.inputs])
            if outputs is None:
                return None
            self.known.update(zip(node.outputs, outputs, strict=True))
        return self.known.get(operand)

    def _nodes_before(self, operand: Operand) -> list[Node]:
        """Return the nodes that compute an operand from constants; [] if it depends on more."""
        nodes: set[Node] = set()
        pending = [operand]
        while pending:
            x = pending.pop()
            if x in self.known or (isinstance(x, Constant) and self.value(x) is not None):
                continue
            node = self.made_by.get(x)
            if node is None or node.kind != "plain" or not all(map(_is_foldable, node.outputs)):
                return []
            if node not in nodes:
                nodes.add(node)
                pending += node.inputs
        return sorted(nodes, key=self.order.__getitem__)


def _is_foldable(output: Variable) -> bool:
    has_type = output.dtype is not None and (not output.shape or _is_integer(output.dtype))
    return has_type and _is_small(output)


def _is_small(operand: Operand) -> bool:
    return math.prod(operand.shape) <= _SMALL


def _is_integer(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_)


_Carried = Sequence[tuple[Variable, Operand]]
"""For each carry of a loop, the variable that a step reads and the value that it returns."""


@dataclass
class StepIntegers:
    """Known integers: scalars, or, inside a loop, arrays with an integer for each of its steps."""

    known: dict[Operand, np.ndarray] = field(default_factory=dict)

    def get(self, operand: Operand) -> np.ndarray | None:
        """Return the integer that an operand is; None if it is not known."""
        if not isinstance(operand, Constant):
            return self.known.get(operand)
        value = operand.value
        if _jax.is_tracer(value) or np.size(value) != 1:
            return None
        is_integer = jnp.issubdtype(jnp.result_type(value), jnp.integer)
        return np.asarray(value).reshape(()) if is_integer else None

    def alias(self, variable: Variable, operand: Operand) -> None:
        """Note that a variable has the value of an operand."""
        value = self.get(operand)
        if value is not None:
            self.known[variable] = value

    def fold(self, node: Node) -> None:
        """Evaluate a node if it computes an integer from known ones."""
        if node.name == "eq" and any(map(_is_order_marker, node.inputs)):
            # The zero by which chunks are ordered one after the other.
            self.known[node.outputs[0]] = np.asarray(False)
            return
        operation = _INTEGER_OPERATIONS.get(node.name)
        if operation is None or any(math.prod(out.shape) != 1 for out in node.outputs):
            return
        values = [self.get(operand) for operand in node.inputs]
        if values and all(value is not None for value in values):
            self.known[node.outputs[0]] = np.asarray(operation(*values))

    def inside_loop(
        self, loop: Node, body: Program, carried: _Carried, starts: Sequence[Operand]
    ) -> "StepIntegers":
        """Return what is known in the body of a loop: scalars, and induction variables."""
        form = _jax.ScanForm.of(loop.equation)
        inside = StepIntegers({x: n for x, n in self.known.items() if n.ndim == 0})
        if not form.reverse:
            first = [self.get(x) for x in starts]
            inside.known |= inside._induction_variables(body, carried, first, form.length)
        return inside

    def leave_loop(self, variable: Variable, inside: np.ndarray | None) -> None:
        """Note that a loop returns the last of the integers that its steps return."""
        if inside is not None and inside.ndim:
            self.known[variable] = np.asarray(inside[-1])

    def _induction_variables(
        self,
        body: Program,
        carried: _Carried,
        starts: Sequence[np.ndarray | None],
        length: int,
    ) -> dict[Operand, np.ndarray]:
        """Find the carried integers that grow by the same amount in each step."""
        found: dict[Operand, np.ndarray] = {}
        for (taken, returned), start in zip(carried, starts, strict=True):
            if start is None or start.ndim or not length:
                continue
            after = self._evaluate(body, taken, start, returned)
            if after is None or after.ndim:
                continue
            steps = np.asarray(start + (after - start) * np.arange(length))
            again = self._evaluate(body, taken, steps, returned)
            if again is not None and np.array_equal(again, steps + (after - start)):
                found[taken] = steps
        return found

    def _evaluate(
        self, body: Program, variable: Variable, value: np.ndarray, wanted: Operand
    ) -> np.ndarray | None:
        """Return what `wanted` is if `variable` has a value."""
        assumed = StepIntegers({**self.known, variable: value})
        for node in body.nodes:
            if node.body is None:
                assumed.fold(node)
        return assumed.get(wanted)


def _is_order_marker(operand: Operand) -> bool:
    return isinstance(operand, Constant) and _slicing.is_order_marker(operand.value)


_identity: Callable[[np.ndarray], np.ndarray] = lambda x: x
_INTEGER_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "lt": np.less,
    "select_n": lambda which, no, yes: np.where(which, yes, no),
    **dict.fromkeys(
        ["convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "optimization_barrier"],
        _identity,
    ),
}
"""The operations by which indices are computed."""
