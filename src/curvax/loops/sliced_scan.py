"""`sliced_scan`: a scan that keeps some of its outputs and never makes the others.

In the order in which the steps run, the kept ones are `first, first + gap, first + 2 gap, …`. So
the loop is: steps whose output is dropped up to the first; then groups of one kept step and
`gap - 1` dropped ones; then what is left. A dropped output is not computed at all, because nothing
in its loop uses it. Kept outputs are written straight into their places in the result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from curvax._errors import as_integer, where
from curvax._slicing import Rows
from curvax._types import Carry, PyTree, Size
from curvax.loops.scan_program import Outputs, ScanProgram, save_all_but_reads, unroll_within

State: TypeAlias = tuple[Carry, PyTree]
"""Of the loop over groups: the carry, and the buffers for the kept outputs."""


def sliced_scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: PyTree,
    xs: PyTree,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    start: int | None = None,
    stop: int | None = None,
    step: int | None = None,
) -> tuple[PyTree, PyTree]:
    """Scan, and keep only a slice of the outputs.

    Equal to

        carry, ys = jax.lax.scan(f, init, xs, length, reverse, unroll)
        ys = jax.tree.map(lambda leaf: leaf[start:stop:step], ys)

    except that outputs outside the slice are neither stored nor computed. The carry runs through
    all steps as ever. Works in forward and reverse mode; for a reverse pass that does not
    remember every step, see `checkpoint_chunked_scan`.

    Arguments:
        f: the body, `(carry, x) -> (carry, y)`. It is traced once.
        init: the first carry.
        xs: what to scan over, along leading axes, or None.
        length: the number of steps; needed if `xs` has no leaves.
        reverse: run from the last position to the first.
        unroll: the most steps to unroll in the innermost loop.
        start: as in a Python slice, of any sign.
        stop: as in a Python slice, of any sign.
        step: as in a Python slice, of any sign but zero.

    Returns:
        The last carry, and the slice of the outputs.

    Raises:
        ValueError: if sizes disagree, or `step` is zero.
        TypeError: if the body changes the type of the carry, or a bound is no integer.

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
    if range(program.length)[bounds] == range(program.length):  # All are kept.
        within = unroll_within(unroll, program.length)
        return program.steps(program.init, 0, program.length, within)
    with program.mesh():
        return _run(program, _Kept.of(program, bounds), unroll)


def _run(program: ScanProgram, kept: "_Kept", unroll: int | bool) -> tuple[Carry, PyTree]:
    outputs = Outputs(program, kept.count)
    # The last kept step is a group of its own, unless as many steps follow it as the others.
    groups = kept.count if kept.after >= kept.gap - 1 else kept.count - 1

    def skip(program: ScanProgram, carry: Carry, time: Size, count: int) -> Carry:
        within = unroll_within(unroll, count)
        if not count:
            return carry
        part = program.within(time, count)
        body = lambda carry, offset: (part.step(carry, time + offset)[0], None)
        return lax.scan(body, carry, jnp.arange(count), unroll=within)[0]

    def keep(program: ScanProgram, state: State, time: Size, number: Size) -> State:
        carry, buffers = state
        carry, y = program.step(carry, time)
        y = jax.tree.map(lambda leaf: leaf[None], y)
        return carry, outputs.write(buffers, y, Rows(kept.slot(number), 1))

    @save_all_but_reads
    def run_group(state: State, time: Size, number: Size) -> State:
        inner = program.within(time, kept.gap)
        carry, buffers = keep(inner, state, time, number)
        return skip(inner, carry, time + 1, kept.gap - 1), buffers

    def group(state: State, number: Size) -> tuple[State, None]:
        return run_group(state, kept.first + number * kept.gap, number), None

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
    """The steps whose output is kept, by the time at which they run, and where they go."""

    first: int
    gap: int
    count: int
    after: int
    descending: bool

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

    def slot(self, number: Size) -> Size:
        """Where the kept step of that number, in the order of running, goes in the result."""
        return self.count - 1 - number if self.descending else number


def _bounds(start: Any, stop: Any, step: Any) -> slice:
    for name, bound in (("start", start), ("stop", stop), ("step", step)):
        if bound is not None and as_integer(bound) is None:
            raise TypeError(
                f"{where()}: {name} must be a Python integer or None, got {type(bound).__name__} "
                f"{bound!r}: which outputs are kept shapes the program."
            )
    if step is not None and as_integer(step) == 0:
        raise ValueError(f"{where()}: step must not be zero.")
    return slice(start, stop, step)
