"""Whether the examples of a batch interact: whether what is computed for one depends on others.

It does where something that depends on examples has no axis for them any more and is still needed
for the losses, as a mean over the batch; or has two of them, as the distances of all pairs; or
where a loop over examples hands something on from one to the next. What re-orders examples is not
noticed.
"""

from collections.abc import Collection

from curvax import _compat
from curvax.graph._examples import Examples
from curvax.graph._program import Node, Program, Variable
from curvax.tags import LossTag

__all__ = ["find_interaction"]


def find_interaction(program: Program, examples: Examples) -> str | None:
    """The first operation by which examples interact; None if none is found."""
    if not examples.grows_everywhere:
        return None
    return _Search(examples).walk(program, {v for v in program.inputs if v in examples.axes})


class _Search:
    def __init__(self, examples: Examples) -> None:
        self._examples = examples
        self._dependent: set[Variable] = set()

    def walk(self, program: Program, dependent: Collection[Variable]) -> str | None:
        """Go through a program, some of whose inputs depend on examples."""
        self._dependent.update(dependent)
        for node in program.nodes:
            if isinstance(node.equation.primitive, LossTag):
                continue
            if not any(operand in self._dependent for operand in node.inputs):
                continue
            found = self._enter(node) if node.body is not None else None
            if found is not None:
                return found
            outputs = self._outputs(node)
            self._dependent.update(outputs)
            if any(len(self._examples.axes.get(out, ())) != 1 for out in outputs):
                return node.name
        return None

    def _outputs(self, node: Node) -> list[Variable]:
        """What a node puts out that depends on examples."""
        if node.body is None or not self._examples.loops.isdisjoint(node.outputs):
            return list(node.outputs)
        pairs = zip(node.outputs, node.body.outputs, strict=True)
        return [mine for mine, inner in pairs if inner in self._dependent]

    def _enter(self, node: Node) -> str | None:
        assert node.body is not None
        pairs = zip(node.body.inputs, node.inputs, strict=True)
        inner = {mine for mine, outer in pairs if outer in self._dependent}
        if node.kind != "scan":
            return self.walk(node.body, inner)
        form = _compat.ScanForm.of(node.equation)
        over_examples = not self._examples.loops.isdisjoint(node.outputs)
        carried = node.body.inputs[form.num_consts : form.num_consts + form.num_carry]
        if over_examples:
            return "scan" if carried else None
        # What is carried depends on examples if anything does, after a step.
        return self.walk(node.body, {*inner, *(v for v in carried if v in self._examples.axes)})
