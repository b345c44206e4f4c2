"""How many columns at a time: what all functions of this package take, checked in one place."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from curvax._errors import check_size
from curvax._types import Fun, PyTree
from curvax.derivatives.column_sharding import Devices, SplitProblem
from curvax.derivatives.columns import BlockProblem, Blocks, Problem, Progress
from curvax.derivatives.traced_function import TracedFunction
from curvax.memory.budget import Budget
from curvax.memory.compiled import BudgetRequest, Objective, run_compiled

__all__ = ["BlockOptions", "solve"]


REHEARSED = 256
"""So many columns are timed to compare block sizes, not all of them."""

ONE = Devices(None, replicated=False, to_disk=False)

_ADVICE = "What else helps: checkpoint=True, or streaming the result to disk with out=."


@dataclass(frozen=True)
class BlockOptions:
    """In how many blocks to compute `length` columns, or within which budget.

    On several devices these are the columns of one of them, and the budget is for it alone.
    """

    length: int
    size: int
    budget: BudgetRequest | None
    jit: bool
    devices: Devices
    is_given: bool
    """Whether the user named a size or a number of blocks, or neither."""
    where: str

    @classmethod
    def of(
        cls,
        length: int,
        where: str,
        *,
        devices: Devices = ONE,
        nbatches: Any = 1,
        batch_size: Any = None,
        memory_budget: Budget | None = None,
        objective: Objective = "memory",
        jit: bool = True,
        most: int | None = None,
        what: str = "parameters",
    ) -> "BlockOptions":
        """Check what the user gave. `nbatches` is at most `most`, or the length."""
        number = check_size("nbatches", nbatches, where)
        size = check_size("batch_size", batch_size, where)
        if number is None:
            raise TypeError(f"{where}: nbatches must be a Python integer, got None.")
        most = length if most is None else most
        if number > max(1, most):
            count = devices.count
            each = f" on each of {count} devices" if count > 1 and not devices.to_disk else ""
            raise ValueError(
                f"{where}: nbatches={number} is more than there are {what} to share out{each}: "
                f"{most}."
            )
        if size is not None and number != 1:
            raise ValueError(
                f"{where}: give nbatches or batch_size, not both; got nbatches={number} and "
                f"batch_size={size}."
            )
        sizes = {"nbatches": None if number == 1 else number, "batch_size": size}
        budget = BudgetRequest.of(
            memory_budget,
            sizes,
            where,
            objective=objective,
            advice=_ADVICE,
            is_shared=devices.is_shared,
        )
        if budget is not None and not jit:
            raise ValueError(
                f"{where}: a memory budget is for a compiled program; it cannot be kept with "
                f"jit=False."
            )
        if devices.axis is not None and not jit:
            raise ValueError(
                f"{where}: what runs on a mesh is a compiled program; mesh= does not go with "
                f"jit=False."
            )
        chosen = -(-length // number) if size is None else min(size, length)
        is_given = size is not None or number != 1
        return cls(length, max(1, chosen), budget, jit, devices, is_given, where)

    def run(
        self,
        functions: Sequence[TracedFunction],
        build: Callable[[Sequence[Fun], int, Sequence[int] | None], Fun],
        *args: Any,
        key: Hashable,
        lengths: Callable[[], Sequence[int]] | None = None,
        rehearsed: bool = True,
    ) -> PyTree:
        """Call `build(functions, size, limits)(*args)` at the right size.

        It is compiled once for what the functions do and for the key, and kept as long as the first
        of them lives. The work may be in several parts, whose `lengths` are asked for when they are
        needed. `limits` is None, or for each part the number of blocks after which to stop; that is
        for timing, unless all of the work is to be timed.
        """
        # On a mesh, types say where arrays are, and those of a trace outside of it do not fit.
        is_settled = self.jit and self.devices.axis is None and all(f.key for f in functions)
        plain = [function.untraced() for function in functions]

        def made(size: int, limits: Sequence[int] | None = None) -> Fun:
            if not is_settled:
                return build(plain, size, limits)

            def call(consts: Sequence[Sequence[Any]], *args: Any) -> Any:
                pairs = zip(functions, consts, strict=True)
                return build([f.with_consts(given) for f, given in pairs], size, limits)(*args)

            return call

        key = self.where, key
        if is_settled:
            key = key, tuple(function.key for function in functions)
            args = tuple(function.consts for function in functions), *args
        number = lambda: [self.length] if lengths is None else lengths()
        if self.budget is not None:
            return self.budget.run(
                functions[0].fun,
                made,
                args,
                {},
                lambda: range(1, max([1, *number()]) + 1),
                key=(key, self.length),
                is_settled=is_settled,
                rehearse=(lambda size: self._rehearsal(made, size, number()))
                if rehearsed
                else None,
            )
        if not self.jit:
            return made(self.size)(*args)
        return run_compiled(
            functions[0].fun,
            made(self.size),
            args,
            {},
            key=(key, self.size),
            is_settled=is_settled,
        )

    def _rehearsal(
        self, build: Callable[[int, Sequence[int] | None], Fun], size: int, lengths: Sequence[int]
    ) -> tuple[Fun, float]:
        total = max(1, sum(lengths))
        share = min(1.0, max(REHEARSED, size) / total)
        limits = [max(1, int(share * -(-length // size))) for length in lengths]
        pairs = zip(limits, lengths, strict=True)
        done = sum(min(limit * size, length) for limit, length in pairs)
        return build(size, limits), max(1, done) / total


# `solve`: a problem computed in one compiled program, on one device or on those of a mesh.


def solve(
    problem: Callable[..., Problem],
    functions: Sequence[TracedFunction],
    x: PyTree,
    options: BlockOptions,
    *,
    key: Hashable,
    progress: str | None = None,
) -> tuple[Any, PyTree]:
    """Return the result of `problem(*functions)` at `x`, and its auxiliary value.

    It is compiled once for what the functions do, the shapes and the key. On a mesh the problem is
    a `BlockProblem`.
    """
    devices, plain = options.devices, [function.untraced() for function in functions]
    if devices.axis is not None:
        x = devices.placed(x)
        prepare = lambda x: _block_problem(problem, plain).prepare(x)
        devices.check_closed_over(prepare, x, options.where)
        if progress is not None:
            devices.check_progress(options.where)

    def of(functions: Sequence[Fun]) -> Problem:
        if devices.axis is None:
            return problem(*functions)
        split = _block_problem(problem, functions)
        return SplitProblem(split, devices.axis, devices.replicated)

    def build(functions: Sequence[Fun], size: int, limits: Sequence[int] | None) -> Fun:
        def compute(x: PyTree) -> tuple[Any, PyTree]:
            made = of(functions)
            bar = Progress(progress) if progress is not None and limits is None else None
            lengths = made.lengths()
            each = limits or [None] * len(lengths)
            blocks = [
                Blocks(length, size, limit, bar, options.where)
                for length, limit in zip(lengths, each, strict=True)
            ]
            if bar is not None:
                bar.total = sum(part.count for part in blocks)
            return made.compute(x, blocks)

        return compute

    key = key, progress, devices
    return options.run(functions, build, x, key=key, lengths=lambda: of(plain).lengths())


def _block_problem(problem: Callable[..., Problem], functions: Sequence[Fun]) -> BlockProblem:
    made = problem(*functions)
    assert isinstance(made, BlockProblem)
    return made
