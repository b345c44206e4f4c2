"""`Lifting`: an axis of examples for values that are the same for all of them.

In a derivative of a network, a tangent such as `W @ e` does not depend on the example: it has no
axis of examples, and is broadcast where it meets a value that has one. Its cotangent does depend on
the example, and would be summed over all examples before it gets to `W`. So the use of `W` is run
with the tangent repeated for each example, and so is all that is computed from it, up to where it
meets examples elementwise: these values are *lifted*, with examples along a leading axis. The
program computes the same, but the cotangents of the use are now those of single examples.
"""

from collections.abc import Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curvax import _jax
from curvax._types import Array
from curvax.layers.detection.examples import ELEMENTWISE, ExampleAxes, Examples
from curvax.layers.detection.program import Node, Operand, Program, Variable


@dataclass
class Lifting:
    """Which values of a program are lifted.

    Attributes:
        totals: For each lifted variable, the number of examples.
        shapes: For each lifted variable, its shape without the axis of examples, with size one
            along axes along which the variable was broadcast.
        merges: The nodes at which lifted values meet examples, with the axis of these.
    """

    totals: dict[Operand, int] = field(default_factory=dict)
    shapes: dict[Operand, tuple[int, ...]] = field(default_factory=dict)
    merges: dict[Node, int] = field(default_factory=dict)

    def add(
        self, output: Variable, program: Program, examples: Examples, reached: AbstractSet[Operand]
    ) -> str:
        """Lift the output of a use, and what is computed from it.

        Returns:
            Why that cannot be; "" if it is done.
        """
        readers, returned = _readers(program)
        new = Lifting(shapes={output: output.shape})
        totals: set[int] = set()
        pending: list[Operand] = [output]
        while pending:
            variable = pending.pop()
            if variable in returned:
                return (
                    "it is returned by a loop, a checkpoint or a function with custom derivatives"
                )
            for node in readers.get(variable, ()):
                if reached.isdisjoint(node.outputs):
                    continue
                outputs = [examples.axes.get(out) for out in node.outputs]
                if outputs == [None] and node.body is None:
                    pending += new._lift(node)
                elif outputs[0] is not None and new._meets_examples(node, variable, outputs[0]):
                    totals.add(outputs[0].total)
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
        """Lift the output of a node. Return it, if that is new."""
        (output,) = node.outputs
        shape = _lifted_shape(node, self.shapes)
        if output not in self.shapes:
            self.shapes[output] = shape
            return [output]
        if self.shapes[output] != shape:  # Another operand is not broadcast.
            self.shapes[output] = output.shape
        return []

    def _meets_examples(self, node: Node, variable: Operand, output: ExampleAxes) -> bool:
        """Note a node at which a lifted value meets examples. Return whether it is one."""
        axis = output.axes[0] if output.axes else 0
        shape = self.shapes[variable]
        if node.name == "broadcast_in_dim":
            shape = _lifted_shape(node, self.shapes)
        elif node.name not in ELEMENTWISE:
            return False
        has_all = output.has_all_examples(axis) and output.count == output.total
        if node.body is not None or not has_all or (shape and shape[axis] != 1):
            return False
        self.merges[node] = axis
        return True

    def reads(self, node: Node) -> bool:
        """Return whether a node reads lifted values."""
        return any(x in self.totals for x in node.inputs) and node.body is None


def _readers(program: Program) -> tuple[dict[Operand, list[Node]], set[Operand]]:
    """Return the nodes that read each operand, and the operands that bodies return."""
    readers: dict[Operand, list[Node]] = {}
    returned: set[Operand] = set(program.outputs)
    for node in program.all_nodes():
        for operand in dict.fromkeys(node.inputs):
            readers.setdefault(operand, []).append(node)
        returned.update(node.body.outputs if node.body is not None else ())
    return readers, returned


def _lifted_shape(node: Node, shapes: Mapping[Operand, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of a lifted output, with size one along axes of broadcasting."""
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
    """Run a node that may read lifted values; return its outputs.

    Arguments:
        lifting: Which values are lifted.
        node: The node.
        inputs: The values of its operands, not lifted.
        lifted: The lifted values so far. The output of the node is added if it is lifted.
    """
    if not any(x in lifted for x in node.inputs):  # The use that is lifted is not tagged.
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
    """Return the output of a node with a leading axis of examples, then axes of this shape."""
    operands = [lifted.get(x) for x in node.inputs]
    if node.name == "broadcast_in_dim" and operands[0] is not None:
        return operands[0].reshape(operands[0].shape[0], *shape)
    # Elementwise operations need not be done for each element of a broadcast axis.
    sizes = [shape if node.name in ELEMENTWISE else operand.shape for operand in node.inputs]
    full = [
        given if x is None else jnp.broadcast_to(x, (x.shape[0], *size))
        for size, x, given in zip(sizes, operands, inputs, strict=True)
    ]
    axes = [None if x is None else 0 for x in operands]
    return jax.vmap(lambda *xs: _jax.run_equation(node.equation, xs)[0], axes)(*full)


def _along(x: Array, axis: int, ndim: int) -> Array:
    """Move the examples of a lifted value to the axis along which it was broadcast."""
    if x.ndim == 1:
        return x.reshape([-1 if k == axis else 1 for k in range(ndim)])
    return jnp.moveaxis(jnp.squeeze(x, axis + 1), 0, axis)
