"""A user's function as it is at the time of a call.

What a function reads may change between two calls: attributes of the object whose method it is,
variables that it closes over, globals. So it is traced at each call, which takes little beside the
derivatives. Derivatives are taken of what was traced, with the arrays that it closed over as
arguments, and what was compiled for the same jaxpr before is used again (`curvax._compat._keys`).

A derivative rule (`jax.custom_jvp`, `jax.custom_vjp`) is Python that runs when derivatives are
traced. It may read what has changed as well. With rules that are not JAX's own, all of the program
is traced at each call, derivatives included, to be compared with what was compiled.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from curvax import _compat
from curvax._types import Fun, PyTree

__all__ = ["TracedFunction"]


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
        fun = _compat.unjitted(fun)
        program, outputs = _compat.trace_with_constants(fun, *args)
        key = _compat.program_key(program, differentiated=True)
        if key is not None:
            key = key, jax.tree.structure(outputs)
        return cls(fun, program, outputs, key)

    @property
    def consts(self) -> tuple[Any, ...]:
        """The arrays that it closes over."""
        return tuple(self.program.consts)

    def with_consts(self, consts: Sequence[Any]) -> Fun:
        """What was traced, with these in place of the arrays that it closes over."""
        run, structure = _compat.with_constants(self.program), jax.tree.structure(self.outputs)
        return lambda *args: jax.tree.unflatten(structure, run(*consts, *jax.tree.leaves(args)))

    def untraced(self) -> Fun:
        """The function, to be traced again."""
        return _compat.untraced(self.fun)
