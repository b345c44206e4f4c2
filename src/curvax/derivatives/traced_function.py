"""A user's function as it is at the time of a call.

What a function reads may change between two calls: attributes of the object whose method it is,
variables that it closes over, globals. So it is traced at each call, which takes little beside the
derivatives. Derivatives are taken of what was traced, with the arrays that it closed over as
arguments, and what was compiled for the same jaxpr before is used again
(`curvax._jax.program_keys`).

A derivative rule (`jax.custom_jvp`, `jax.custom_vjp`) is Python that runs when derivatives are
traced. It may read what has changed as well. With rules that are not JAX's own, all of the program
is traced at each call, derivatives included, to be compared with what was compiled.
"""

from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from curvax import _jax
from curvax._types import Fun, PyTree
from curvax.derivatives.columns import BlockProblem

__all__ = [
    "TracedFunction",
    "advised",
    "advised_to_go_forward",
    "check_scalar",
    "has_derivative",
    "linear_map",
    "raised",
    "value_shapes",
    "why_not",
]


@dataclass(frozen=True)
class TracedFunction:
    """A function, and what it does with arguments like some."""

    fun: Fun
    """The function itself, not what `jax.jit` made of it."""
    program: Any
    outputs: PyTree
    """The shapes of what it returns."""
    key: Hashable | None
    """What its derivatives depend on, but for constants; None if nothing short of them says so."""

    @classmethod
    def of(cls, fun: Fun, *args: PyTree) -> "TracedFunction":
        """Trace a function for arguments like these."""
        fun = _jax.unjitted(fun)
        program, outputs = _jax.trace_with_constants(fun, *args)
        key = _jax.program_key(program, differentiated=True)
        if key is not None:
            key = key, jax.tree.structure(outputs)
        return cls(fun, program, outputs, key)

    @property
    def consts(self) -> tuple[Any, ...]:
        """The arrays that it closes over."""
        return tuple(self.program.consts)

    def with_consts(self, consts: Sequence[Any]) -> Fun:
        """What was traced, with these in place of the arrays that it closes over."""
        run, structure = _jax.with_constants(self.program), jax.tree.structure(self.outputs)
        return lambda *args: jax.tree.unflatten(structure, run(*consts, *jax.tree.leaves(args)))

    def untraced(self) -> Fun:
        """The function, to be traced again."""
        return _jax.untraced(self.fun)


# Which modes of differentiation a function has, found out by trying.
#
# A `while_loop` cannot be differentiated in reverse mode, nor a `jax.custom_vjp` function in
# forward mode. JAX says so when it comes to that operation: when derivatives are traced, or only
# when they are lowered, just before they would be compiled. So both is done here, with one
# column.


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
        program, _ = _jax.trace_with_constants(fun, *args)
        leaves = [*program.consts, *jax.tree.leaves(args)]
        jax.jit(_jax.with_constants(program)).lower(*map(_jax.shape_of, leaves))
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


# What a function of the user's returns: its value, and perhaps an auxiliary one beside it.


def value_shapes(f: TracedFunction, has_aux: bool, where: str) -> PyTree:
    """The shapes of the value that `f` returns."""
    returned = f.outputs
    if not has_aux:
        return returned
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise TypeError(
            f"{where}: with has_aux=True, f must return a pair (value, aux), got {returned}."
        )
    return returned[0]


def check_scalar(f: TracedFunction, has_aux: bool, where: str) -> None:
    """Check that `f` returns one real number."""
    returned = value_shapes(f, has_aux, where)
    real = hasattr(returned, "dtype") and jnp.issubdtype(returned.dtype, jnp.floating)
    if not real or returned.shape != ():
        raise TypeError(
            f"{where}: f must return a real floating-point scalar, got {returned}. If it returns "
            f"(value, aux), say has_aux=True where that is taken; for a function of several values "
            f"see curvax.jacobian and curvax.gauss_newton."
        )


def linear_map(
    transform: Callable[..., tuple[Any, ...]], f: Fun, x: PyTree, has_aux: bool
) -> tuple[Any, PyTree]:
    """The linear map that `jax.linearize` or `jax.vjp` makes of `f` at `x`, and what is beside."""
    _, mapped, *aux = transform(f, x, has_aux=has_aux)
    return mapped, aux[0] if aux else None
