"""`solve`: a problem computed in one compiled program, on one device or on those of a mesh."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from curvax._types import Fun, PyTree
from curvax.diffops._function import TracedFunction
from curvax.diffops._options import BlockOptions
from curvax.diffops._problem import BlockProblem, Blocks, Problem
from curvax.diffops._progress import Progress
from curvax.diffops._split import SplitProblem

__all__ = ["solve"]


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
