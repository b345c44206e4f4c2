"""Which axes of which values have one entry for each example.

A function is traced a second time, with a batch twice as large: the axes that have grown are those.
It is the only way that needs no knowledge of any operation. An argument that happens to have an
axis of that size and is no batch lets the function fail, or do other things: then such arguments
are left as they are, one at a time and two at a time; and at last parameters are made larger, too,
that may have one entry for each example. Where nothing helps (the batch is closed over, or the
function takes no other size), only the number of examples is known.

Where that batch is taken in other chunks (six examples in chunks of four leave two over, and twelve
leave none), others are tried: three times as many, one more, one less.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from curvax import _jax
from curvax._types import Fun, PyTree
from curvax.layers.detection.program import Node, Program, Variable, read
from curvax.losses.tag import LossTag

__all__ = ["UNKNOWN", "Examples", "find_examples", "find_interaction"]


UNKNOWN = "examples unknown"
"""How a remark begins on a layer of which it is not known which examples it is applied to."""

_OtherSize = Callable[[int], int]
_OTHER_SIZES: tuple[_OtherSize, ...] = (
    lambda size: 2 * size,
    lambda size: 3 * size,
    lambda size: size + 1,
    lambda size: max(size - 1, 1),
)
_MOST_TRACES = 8
_MOST_LEFT = 2


@dataclass
class Examples:
    """The axes of each variable, and the loops, that have one entry or step for each example.

    Loops are known by their outputs. Unless `is_known`, there are none of both.
    """

    batch_size: int = 1
    """The least number of examples of any loss, or fewer if it is not known."""
    is_known: bool = False
    grows_everywhere: bool = False
    """Whether all axes and loops of examples are among these, and not only some."""
    axes: dict[Any, tuple[int, ...]] = field(default_factory=dict)
    loops: set[Variable] = field(default_factory=set)
    followed: Collection[Any] = ()
    """Further values that are known to be about examples (`follow_examples`)."""


def find_examples(
    func: Fun, args: Sequence[PyTree], params_index: int, program: Program, losses: Sequence[Node]
) -> Examples:
    """Where the examples are in the program of a function."""
    sizes = {size for node in losses if (size := _batch_size(node)) is not None}
    batch_size = min(sizes, default=1)
    for other_size in _OTHER_SIZES:
        takes_more = False
        for larger in _larger(args, params_index, sizes, other_size):
            try:
                other = read(jax.make_jaxpr(func)(*larger))
            except Exception:  # noqa: BLE001  It is the user's function, which may refuse anyhow.
                continue
            takes_more = True
            found = Examples(batch_size, True, other_size is _OTHER_SIZES[0])
            if _compare(program, other, found) and _has_grown(losses, found):
                return found
        if not takes_more:
            break
    return Examples(_number_of_examples(args, params_index, batch_size))


def _larger(
    args: Sequence[PyTree], params_index: int, sizes: Collection[int], other_size: _OtherSize
) -> Iterator[list[PyTree]]:
    """The arguments with other numbers of examples: all data, all but a few, then everything."""
    doubled = [jax.tree.map(lambda x: _resized(x, sizes, other_size), arg) for arg in args]
    is_first = other_size is _OTHER_SIZES[0]
    has_grown = [any(_place(x, sizes) is not None for x in jax.tree.leaves(arg)) for arg in args]
    data = [k for k in range(len(args)) if has_grown[k] and k != params_index]
    counts = range(min(_MOST_LEFT + 1, len(data)))
    choices = itertools.chain(*(itertools.combinations(data, count) for count in counts))
    for left in itertools.islice(choices, _MOST_TRACES if is_first else 1):
        grown = set(data) - set(left)
        yield [doubled[k] if k in grown else arg for k, arg in enumerate(args)]
    if data and has_grown[params_index] and is_first:
        yield doubled


def _number_of_examples(args: Sequence[PyTree], params_index: int, batch_size: int) -> int:
    """How many examples there are, if the predictions of one may be merged with those of others.

    As those for all tokens of all sequences are, for a loss that has no axis for time.
    """
    data = [x for k, arg in enumerate(args) if k != params_index for x in jax.tree.leaves(arg)]
    sizes = [shape[0] for x in data if len(shape := jax.numpy.shape(x)) > 1 and shape[0] > 0]
    return max((size for size in sizes if batch_size % size == 0), default=batch_size)


def _batch_size(loss: Node) -> int | None:
    """The number of examples of a loss, along the first axis of its predictions."""
    shape = loss.inputs[0].shape
    return shape[0] if shape and shape[0] > 0 else None


def _place(x: Any, sizes: Collection[int]) -> int | None:
    """The first axis of an array that may be for examples."""
    return next((k for k, size in enumerate(jax.numpy.shape(x)) if size in sizes), None)


def _resized(x: Any, sizes: Collection[int], other_size: _OtherSize) -> Any:
    """The type of an array with another number of examples, if it has an axis for these."""
    place = _place(x, sizes)
    if place is None:
        return x
    shape = list(jax.numpy.shape(x))
    shape[place] = other_size(shape[place])
    return _jax.resized(x, tuple(shape))


def _has_grown(losses: Sequence[Node], found: Examples) -> bool:
    """Whether there are more examples for any loss. Else something else has grown."""
    return bool(found.loops) or any(0 in found.axes.get(loss.inputs[0], ()) for loss in losses)


def _compare(one: Program, twice: Program, found: Examples) -> bool:
    """Note which axes have grown. Returns whether both programs do the same."""
    if len(one.nodes) != len(twice.nodes) or not _same_axes(one.inputs, twice.inputs, found):
        return False
    return all(_compare_nodes(*pair, found) for pair in zip(one.nodes, twice.nodes, strict=True))


def _compare_nodes(one: Node, twice: Node, found: Examples) -> bool:
    if one.name != twice.name or not _same_axes(one.outputs, twice.outputs, found):
        return False
    if one.kind == "scan":
        lengths = [_jax.ScanForm.of(node.equation).length for node in (one, twice)]
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


# Whether the examples of a batch interact: whether what is computed for one depends on others.
#
# It does where something that depends on examples has no axis for them any more and is still needed
# for the losses, as a mean over the batch; or has two of them, as the distances of all pairs; or
# where a loop over examples hands something on from one to the next. What re-orders examples is not
# noticed.


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
        form = _jax.ScanForm.of(node.equation)
        over_examples = not self._examples.loops.isdisjoint(node.outputs)
        carried = node.body.inputs[form.num_consts : form.num_consts + form.num_carry]
        if over_examples:
            return "scan" if carried else None
        # What is carried depends on examples if anything does, after a step.
        return self.walk(node.body, {*inner, *(v for v in carried if v in self._examples.axes)})
