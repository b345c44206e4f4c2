"""Which axes of which values have one entry for each example.

A function is traced a second time, with a batch twice as large: the axes that have grown are those.
It is the only way that needs no knowledge of any operation. Where it cannot be done (the
batch is closed over, or the function takes no other size), nothing is known.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from curvax import _compat
from curvax._types import Fun, PyTree
from curvax.graph._program import Node, Program, Variable, read

__all__ = ["Examples", "find_examples"]


@dataclass
class Examples:
    """The axes of each variable, and the loops, that have one entry or step for each example.

    Loops are known by their outputs.
    """

    batch_size: int
    """The least number of examples of any loss."""
    axes: dict[Any, tuple[int, ...]] = field(default_factory=dict)
    loops: set[Variable] = field(default_factory=set)


def find_examples(
    func: Fun, args: Sequence[PyTree], params_index: int, program: Program, losses: Sequence[Node]
) -> Examples | None:
    """Where the examples are in the program of a function; None if that cannot be found out."""
    sizes = {size for node in losses if (size := _batch_size(node)) is not None}
    larger = [
        arg if index == params_index else jax.tree.map(lambda x: _doubled(x, sizes), arg)
        for index, arg in enumerate(args)
    ]
    shapes = lambda args: [jax.numpy.shape(x) for x in jax.tree.leaves(tuple(args))]
    if shapes(larger) == shapes(args):
        return None
    try:
        twice = read(jax.make_jaxpr(func)(*larger))
    except Exception:  # noqa: BLE001  It is the user's function, which may refuse in any way.
        return None
    found = Examples(min(sizes))
    return found if _compare(program, twice, found) else None


def _batch_size(loss: Node) -> int | None:
    """The number of examples of a loss, along the first axis of its predictions."""
    shape = loss.inputs[0].shape
    return shape[0] if shape and shape[0] > 0 else None


def _doubled(x: Any, sizes: Collection[int]) -> Any:
    """The shape of an array with twice as many examples, if it has an axis for these."""
    shape = list(jax.numpy.shape(x))
    place = next((k for k, size in enumerate(shape) if size in sizes), None)
    if place is None:
        return x
    shape[place] *= 2
    return jax.ShapeDtypeStruct(tuple(shape), jax.numpy.result_type(x))


def _compare(one: Program, twice: Program, found: Examples) -> bool:
    """Note which axes have grown. Returns whether both programs do the same."""
    if len(one.nodes) != len(twice.nodes) or not _same_axes(one.inputs, twice.inputs, found):
        return False
    return all(_compare_nodes(*pair, found) for pair in zip(one.nodes, twice.nodes, strict=True))


def _compare_nodes(one: Node, twice: Node, found: Examples) -> bool:
    if one.name != twice.name or not _same_axes(one.outputs, twice.outputs, found):
        return False
    if one.kind == "scan":
        lengths = [_compat.ScanForm.of(node.equation).length for node in (one, twice)]
        if lengths[0] != lengths[1]:
            found.loops.update(one.outputs)
    if one.body is None or twice.body is None:
        return one.body is twice.body
    return _compare(one.body, twice.body, found)


def _same_axes(one: Sequence[Variable], twice: Sequence[Variable], found: Examples) -> bool:
    if len(one) != len(twice):
        return False
    for mine, theirs in zip(one, twice, strict=True):
        if len(mine.shape) != len(theirs.shape):
            return False
        pairs = enumerate(zip(mine.shape, theirs.shape, strict=True))
        grown = tuple(axis for axis, (size, larger) in pairs if size != larger)
        if grown:
            found.axes[mine] = grown
    return True
