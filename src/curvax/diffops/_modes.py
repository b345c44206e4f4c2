"""Which modes of differentiation a function has, found out by trying.

A `while_loop` cannot be differentiated in reverse mode, nor a `jax.custom_vjp` function in forward
mode. JAX says so when it comes to that operation: when derivatives are traced, or only when they
are lowered, just before they would be compiled. So both is done here, with one column.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax

from curvax import _compat
from curvax._types import Fun, PyTree
from curvax.diffops._function import TracedFunction
from curvax.diffops._problem import BlockProblem

__all__ = ["advised", "advised_to_go_forward", "has_derivative", "raised", "why_not"]


def why_not(problem: BlockProblem, x: PyTree) -> Exception | None:
    """Return the error that the derivatives of a problem raise when they are tried, or None."""
    if not problem.parts:
        return None
    return raised(lambda x: problem.parts[0].column(problem.prepare(x)[0], 0), x)


def has_derivative(derivative: Callable[..., Any], *args: PyTree) -> bool:
    """Return whether a function that computes a derivative can do so."""
    return raised(derivative, *args) is None


def raised(fun: Callable[..., Any], *args: PyTree) -> Exception | None:
    """Return the error that a function raises when it is traced and lowered, or None."""
    try:
        program, _ = _compat.trace_with_constants(fun, *args)
        leaves = [*program.consts, *jax.tree.leaves(args)]
        jax.jit(_compat.with_constants(program)).lower(*map(_compat.shape_of, leaves))
    except Exception as error:  # noqa: BLE001  What it is depends on the operation.
        return error
    return None


@contextmanager
def advised(
    where: str, reason: Callable[[], Exception | None], advice: Callable[[], str | None]
) -> Generator[None]:
    """Say what to do if a function lacks the derivatives that are taken inside of the block.

    When something fails there, `reason` tries these derivatives alone. If they fail too, `advice`
    tries what might take their place, and says what works. Any other error stays as it is, be it
    JAX's or one of the user's own.
    """
    try:
        yield
    except Exception as error:
        lacking = reason()
        known = None if lacking is None else advice()
        if known is None:
            raise
        said = str(lacking).strip().split("\n", 1)[0]
        raise ValueError(f"{where}: {known} JAX says: {said}") from error


def advised_to_go_forward(
    where: str,
    problem: Callable[[Fun], BlockProblem],
    f: TracedFunction,
    x: PyTree,
    has_aux: bool = False,
) -> AbstractContextManager[None]:
    """`advised` for second derivatives, which are those of the gradient, by forward mode."""
    g = f.with_consts(f.consts)
    value = (lambda x: g(x)[0]) if has_aux else g

    def advice() -> str | None:
        along = lambda of: lambda x: jax.jvp(of, (x,), (x,))[1]
        if not has_derivative(along(along(value)), x):
            return None
        return (
            "f has no derivative in reverse mode, which its gradient takes. It has second "
            "derivatives by forward mode alone: curvax.jacobian(lambda x: curvax.jacobian(f, x, "
            "mode='forward')[0], x, mode='forward')[0] is the Hessian."
        )

    return advised(where, lambda: why_not(problem(g), x), advice)
