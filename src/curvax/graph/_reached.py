"""Which values the losses have a derivative in.

A value behind `stop_gradient`, one that is rounded, or one that only decides which row is looked up
has an effect on a loss and no derivative there: JAX differentiates these operations as zero. What
is done with parameters up to there has no curvature, and a loss that depends on parameters only in
that way has none at all.
"""

from collections.abc import Collection, Sequence

import jax.numpy as jnp

from curvax import _compat
from curvax.graph._program import Node, Operand, Program, Variable
from curvax.tags import LossTag, Tag

__all__ = ["reached_from"]

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
        form = _compat.ScanForm.of(node.equation)
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
