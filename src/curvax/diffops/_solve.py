"""`solve`: a problem computed in one compiled program, on one device or on those of a mesh."""

from collections.abc import Hashable, Sequence
from typing import Any

from curvax._types import Fun, PyTree
from curvax.diffops._options import BlockOptions
from curvax.diffops._problem import BlockProblem, Blocks, Problem
from curvax.diffops._progress import Progress
from curvax.diffops._split import SplitProblem

__all__ = ["solve"]


def solve(
    problem: Problem,
    fun: Fun,
    x: PyTree,
    options: BlockOptions,
    *,
    key: Hashable,
    progress: str | None = None,
) -> tuple[Any, PyTree]:
    """The result and the auxiliary value, compiled once for `fun`, the shapes and the key.

    On a mesh the problem is a `BlockProblem`.
    """
    devices = options.devices
    if devices.axis is not None:
        assert isinstance(problem, BlockProblem)
        x = devices.placed(x)
        devices.check_closed_over(problem.prepare, x, options.where)
        if progress is not None:
            devices.check_progress(options.where)
        problem = SplitProblem(problem, devices.axis, devices.replicated)

    def build(size: int, limits: Sequence[int] | None) -> Fun:
        def compute(x: PyTree) -> tuple[Any, PyTree]:
            bar = Progress(progress) if progress is not None and limits is None else None
            lengths = problem.lengths()
            each = limits or [None] * len(lengths)
            blocks = [
                Blocks(length, size, limit, bar, options.where)
                for length, limit in zip(lengths, each, strict=True)
            ]
            if bar is not None:
                bar.total = sum(part.count for part in blocks)
            return problem.compute(x, blocks)

        return compute

    key = key, progress, devices
    return options.run(fun, build, x, key=key, lengths=problem.lengths)
