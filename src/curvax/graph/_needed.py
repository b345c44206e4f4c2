"""What a program computes for the losses, without the rest.

A function computes much that its losses do not depend on: its value, a weight decay, metrics. What
is done with parameters there says nothing about layers, also where it is in the same `checkpoint`
or `scan` as what matters.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from curvax import _compat
from curvax.graph._program import Constant, Node, Operand, Program, Variable

__all__ = ["needed_for"]

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
        form = _compat.ScanForm.of(node.equation)
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
    return isinstance(operand, Variable) and (operand.dtype is None or _compat.is_key(operand))
