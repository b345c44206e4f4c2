"""`sliced_scan`: a scan that keeps a slice of its outputs and never computes the others.

In the order of execution, the kept steps are `first, first + gap, first + 2 gap, …`. The scan is
therefore a loop over the steps before the first kept one, then a loop over groups of one kept step
and `gap - 1` dropped ones, then a loop over the remaining steps. Dropped outputs are not computed,
because nothing in their loop uses them. Kept outputs are written in place into the result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from curvax._errors import as_integer, where
from curvax._slicing import Rows
from curvax._types import Carry, PyTree, Size
from curvax.loops.scan_program import Outputs, ScanProgram, save_all_but_reads, unroll_within

C = TypeVar("C")
X = TypeVar("X")
Y = TypeVar("Y")

State: TypeAlias = tuple[Carry, PyTree]
"""The state of the loop over groups: the carry, and the buffers for the kept outputs."""


def sliced_scan(
    f: Callable[[C, X], tuple[C, Y]],
    init: C,
    xs: X,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    start: int | None = None,
    stop: int | None = None,
    step: int | None = None,
) -> tuple[C, Y]:
    """Scan, and keep only a slice of the outputs.

    Equal to

        carry, ys = jax.lax.scan(f, init, xs, length, reverse, unroll)
        ys = jax.tree.map(lambda leaf: leaf[start:stop:step], ys)

    except that outputs outside the slice are neither stored nor computed. The carry passes through
    all steps. Forward and reverse mode work. The reverse pass saves the residuals of every step;
    `checkpoint_chunked_scan` does not.

    Arguments:
        f: Body of the scan, `(carry, x) -> (carry, y)`. It is traced once.
        init: Initial carry, a pytree of arrays.
        xs: Pytree of arrays to scan over along their leading axes, or None.
        length: Number of steps; required if `xs` has no leaves.
        reverse: Whether to run from the last position to the first.
        unroll: Maximum number of steps to unroll in the innermost loop; True unrolls all.
        start: First position of the slice. A negative one counts from the end; None is the first
            position, or the last if `step` is negative.
        stop: Position that ends the slice and is not part of it. A negative one counts from the
            end; None includes all positions from `start` on.
        step: Distance between kept positions, None for 1. A negative one reverses the outputs.

    Returns:
        The final carry, and the slice of the stacked outputs.

    Raises:
        ValueError: If sizes disagree, or `step` is zero.
        TypeError: If the body changes the type of the carry, or a bound is not an integer.

    Examples:
        >>> import jax.numpy as jnp
        >>> from curvax import sliced_scan
        >>> total, kept = sliced_scan(
        ...     lambda total, x: (total + x, total + x), 0.0, jnp.arange(1.0, 11.0), start=1, step=4
        ... )
        >>> total, kept
        (Array(55., dtype=float32), Array([ 3., 21., 55.], dtype=float32))
    """
    program = ScanProgram.of(f, init, xs, length, reverse)
    bounds = _bounds(start, stop, step)
    if range(program.length)[bounds] == range(program.length):
        within = unroll_within(unroll, program.length)
        return program.steps(program.init, 0, program.length, within)
    with program.mesh():
        return _run(program, _Kept.of(program, bounds), unroll)


def _run(program: ScanProgram, kept: "_Kept", unroll: int | bool) -> tuple[Carry, PyTree]:
    outputs = Outputs(program, kept.count)
    # The last kept step forms a group only if at least `gap - 1` steps follow it.
    groups = kept.count if kept.after >= kept.gap - 1 else kept.count - 1

    def skip(program: ScanProgram, carry: Carry, time: Size, count: int) -> Carry:
        within = unroll_within(unroll, count)
        if not count:
            return carry
        inner = program.within(time, count)
        body = lambda carry, offset: (inner.step(carry, time + offset)[0], None)
        return lax.scan(body, carry, jnp.arange(count), unroll=within)[0]

    def keep(program: ScanProgram, state: State, time: Size, index: Size) -> State:
        carry, buffers = state
        carry, y = program.step(carry, time)
        y = jax.tree.map(lambda leaf: leaf[None], y)
        return carry, outputs.write(buffers, y, Rows(kept.slot(index), 1))

    @save_all_but_reads
    def run_group(state: State, time: Size, index: Size) -> State:
        inner = program.within(time, kept.gap)
        carry, buffers = keep(inner, state, time, index)
        return skip(inner, carry, time + 1, kept.gap - 1), buffers

    def group(state: State, index: Size) -> tuple[State, None]:
        return run_group(state, kept.first + index * kept.gap, index), None

    state = skip(program, program.init, 0, kept.first), outputs.allocate()
    if groups > 0:
        within = unroll_within(unroll, max(1, groups * kept.gap)) // kept.gap
        state = lax.scan(group, state, jnp.arange(groups), unroll=max(1, within))[0]
    done = kept.first + groups * kept.gap
    if groups < kept.count:
        state, done = keep(program, state, done, groups), done + 1
    carry, buffers = state
    return skip(program, carry, done, program.length - done), outputs.finish(buffers)


@dataclass(frozen=True)
class _Kept:
    """The steps whose output is kept, by their time (index in the order of execution)."""

    first: int
    """Time of the first kept step."""
    gap: int
    """Number of steps from one kept step to the next."""
    count: int
    """Number of kept steps."""
    after: int
    """Number of steps after the last kept one."""
    descending: bool
    """Whether later steps come first in the result."""

    @classmethod
    def of(cls, program: ScanProgram, bounds: slice) -> "_Kept":
        positions = range(program.length)[bounds]
        if not positions:
            return cls(program.length, 1, 0, 0, False)
        last = program.length - 1
        times = range(last, -1, -1)[bounds] if program.reverse else positions
        ascending = times if times.step > 0 or len(times) == 1 else times[::-1]
        gap = ascending.step if len(times) > 1 else 1
        return cls(ascending[0], gap, len(times), last - ascending[-1], ascending[0] != times[0])

    def slot(self, index: Size) -> Size:
        """Return the row of the result that the kept step of this index writes."""
        return self.count - 1 - index if self.descending else index


def _bounds(start: int | None, stop: int | None, step: int | None) -> slice:
    for name, bound in (("start", start), ("stop", stop), ("step", step)):
        if bound is not None and as_integer(bound) is None:
            raise TypeError(
                f"{where()}: {name} must be a Python integer or None, got {type(bound).__name__} "
                f"{bound!r}: which outputs are kept shapes the program."
            )
    if step is not None and as_integer(step) == 0:
        raise ValueError(f"{where()}: step must not be zero.")
    return slice(start, stop, step)
