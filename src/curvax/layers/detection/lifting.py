"""Giving an axis of examples to values that are the same for all of them.

In a derivative of a network, a tangent such as `W @ e` does not depend on the example: it has no
axis for these, and is repeated where it meets something that has. Its cotangent does depend on the
example, and would be summed over all of them before it gets to `W`. So the use of `W` is run with
the tangent repeated for each example, and so is all that is computed from it up to where it meets
examples element by element: the values are *lifted*, with examples along a leading axis. What is
computed stays the same; the cotangents of the use are now those of single examples.
"""

from collections.abc import Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curvax import _jax
from curvax._types import Array
from curvax.layers.detection.examples import ELEMENTWISE, Examples, Rows
from curvax.layers.detection.program import Node, Operand, Program, Variable


@dataclass
class Lifting:
    """Which values of a program are lifted.

    Attributes:
        totals: for each lifted variable, the number of examples.
        shapes: for each lifted variable, its shape without the axis of examples. It is of size one
            along axes along which the variable is only repeated.
        merges: the nodes at which lifted values meet examples, with the axis of these.
    """

    totals: dict[Operand, int] = field(default_factory=dict)
    shapes: dict[Operand, tuple[int, ...]] = field(default_factory=dict)
    merges: dict[Node, int] = field(default_factory=dict)

    def add(
        self, output: Variable, program: Program, examples: Examples, reached: AbstractSet[Operand]
    ) -> str:
        """Lift the output of a use, and what is computed from it; or return why that cannot be."""
        readers, returned = _readers(program)
        new = Lifting(shapes={output: output.shape})
        totals: set[int] = set()
        pending: list[Operand] = [output]
        while pending:
            variable = pending.pop()
            if variable in returned:
                return (
                    "it is returned by a loop, a checkpoint or a function with its own derivatives"
                )
            for node in readers.get(variable, ()):
                if reached.isdisjoint(node.outputs):
                    continue
                rows = [examples.rows.get(out) for out in node.outputs]
                if rows == [None] and node.body is None:
                    pending += new._lift(node)
                elif rows[0] is not None and new._meets_examples(node, variable, rows[0]):
                    totals.add(rows[0].total)
                else:
                    return f"it goes into `{node.name}`, which is not known to keep examples apart"
        if len(totals) != 1:
            return "it meets no examples later on, or those of several losses"
        (total,) = totals
        self.shapes |= new.shapes
        self.merges |= new.merges
        self.totals |= dict.fromkeys(new.shapes, total)
        return ""

    def _lift(self, node: Node) -> list[Operand]:
        """Lift the output of a node. Returns it, if that is new."""
        (output,) = node.outputs
        shape = _lifted_shape(node, self.shapes)
        if output not in self.shapes:
            self.shapes[output] = shape
            return [output]
        if self.shapes[output] != shape:  # It is not only repeated, seen from another operand.
            self.shapes[output] = output.shape
        return []

    def _meets_examples(self, node: Node, variable: Operand, rows: Rows) -> bool:
        """Note a node at which a lifted value meets examples; returns whether it is such."""
        axis = rows.axes[0] if rows.axes else 0
        shape = self.shapes[variable]
        if node.name == "broadcast_in_dim":
            shape = _lifted_shape(node, self.shapes)
        elif node.name not in ELEMENTWISE:
            return False
        is_all = rows.is_whole(axis) and rows.count == rows.total
        if node.body is not None or not is_all or (shape and shape[axis] != 1):
            return False
        self.merges[node] = axis
        return True

    def reads(self, node: Node) -> bool:
        """Whether a node reads lifted values."""
        return any(x in self.totals for x in node.inputs) and node.body is None


def _readers(program: Program) -> tuple[dict[Operand, list[Node]], set[Operand]]:
    """The nodes that read each operand, and the operands that bodies return."""
    readers: dict[Operand, list[Node]] = {}
    returned: set[Operand] = set(program.outputs)
    for node in program.all_nodes():
        for operand in dict.fromkeys(node.inputs):
            readers.setdefault(operand, []).append(node)
        returned.update(node.body.outputs if node.body is not None else ())
    return readers, returned


def _lifted_shape(node: Node, shapes: Mapping[Operand, tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of an output, of size one along axes along which a lifted operand is repeated."""
    (output,) = node.outputs
    if node.name in ELEMENTWISE and all(x in shapes or not x.shape for x in node.inputs):
        return tuple(np.broadcast_shapes(*(shapes[x] for x in node.inputs if x in shapes)))
    if node.name != "broadcast_in_dim" or node.inputs[0] not in shapes:
        return output.shape
    before = shapes[node.inputs[0]]
    kept = dict(zip(map(int, node.params["broadcast_dimensions"]), before, strict=True))
    return tuple(kept.get(axis, 1) for axis in range(len(output.shape)))


def run_lifted(
    lifting: Lifting, node: Node, inputs: Sequence[Any], lifted: dict[Operand, Array]
) -> list[Any]:
    """Run a node that may read lifted values. Returns its outputs, and adds those that are lifted.

    `inputs` are the values that are not lifted, `lifted` those that are, of this and other nodes.
    """
    if not any(x in lifted for x in node.inputs):  # Of no use that is tagged.
        return _jax.run_equation(node.equation, inputs)
    if node in lifting.merges:
        axis, shape = lifting.merges[node], node.outputs[0].shape
        if node.name == "broadcast_in_dim":
            x = apply_lifted(node, inputs, lifted, _lifted_shape(node, lifting.shapes))
            return [jnp.broadcast_to(_along(x, axis, len(shape)), shape)]
        operands = [
            _along(lifted[x], axis, len(shape)) if x in lifted else given
            for x, given in zip(node.inputs, inputs, strict=True)
        ]
        return _jax.run_equation(
            node.equation, [x if jnp.ndim(x) == 0 else jnp.broadcast_to(x, shape) for x in operands]
        )
    (output,) = node.outputs
    if output in lifting.totals:
        lifted[output] = apply_lifted(node, inputs, lifted, lifting.shapes[output])
    return _jax.run_equation(node.equation, inputs)


def apply_lifted(
    node: Node, inputs: Sequence[Any], lifted: Mapping[Operand, Array], shape: Sequence[int]
) -> Array:
    """The output of a node with a leading axis of examples, in a shape that may be repeated."""
    own = [lifted.get(x) for x in node.inputs]
    if node.name == "broadcast_in_dim" and own[0] is not None:
        return own[0].reshape(own[0].shape[0], *shape)
    # Element by element, what is repeated stays so.
    sizes = [shape if node.name in ELEMENTWISE else operand.shape for operand in node.inputs]
    full = [
        given if x is None else jnp.broadcast_to(x, (x.shape[0], *size))
        for size, x, given in zip(sizes, own, inputs, strict=True)
    ]
    axes = [None if x is None else 0 for x in own]
    return jax.vmap(lambda *xs: _jax.run_equation(node.equation, xs)[0], axes)(*full)


def _along(x: Array, axis: int, ndim: int) -> Array:
    """A lifted value with its examples along an axis, along which it was repeated."""
    if x.ndim == 1:
        return x.reshape([-1 if k == axis else 1 for k in range(ndim)])
    return jnp.moveaxis(jnp.squeeze(x, axis + 1), 0, axis)
