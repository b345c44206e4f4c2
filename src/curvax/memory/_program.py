"""A function made into a program: traced, its constants set apart, compiled, and measured.

Arrays that a function closes over would be built into its executable, and be counted there among
the temporaries. As a `Program` takes them as arguments they are not. It also makes it possible to
compile a function that closes over tracers, inside of another transformation: the compiler wants
to know their shapes only.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from curvax import _compat
from curvax._types import Array, Fun, PyTree
from curvax.memory._usage import MemoryUsage

__all__ = ["Executable", "Program"]


@dataclass(frozen=True)
class Executable:
    """A compiled program, what it needs, and the constants it is to be called with."""

    compiled: Any
    usage: MemoryUsage
    consts: tuple[Any, ...]
    structure: Any

    @property
    def runs(self) -> bool:
        """Whether it can be called: if its constants are known. Tracers are not."""
        return not any(map(_compat.is_tracer, self.consts))

    def without_consts(self) -> "Executable":
        """The program alone, which keeps none of them alive."""
        return replace(self, consts=())

    def with_consts(self, consts: Sequence[Any]) -> "Executable":
        """The program, to be called with these constants."""
        return replace(self, consts=tuple(consts))

    def __call__(self, *leaves: Array) -> PyTree:
        """Run it on the leaves of its arguments."""
        return jax.tree.unflatten(self.structure, self.compiled(*self.consts, *leaves))


@dataclass(frozen=True)
class Program:
    """A traced function. `fun` takes `consts`, then leaves like `leaves`, and returns leaves."""

    fun: Callable[..., list[Any]]
    consts: tuple[Any, ...]
    leaves: tuple[Any, ...]
    outputs: PyTree
    key: Hashable = None
    """Equals that of another program only if both compute the same from constants and leaves."""
    donated: tuple[int, ...] = ()

    @classmethod
    def of(cls, fun: Fun, leaves: Sequence[Any], donated: Sequence[int] = ()) -> "Program":
        """Trace `fun` for positional arguments like these: arrays, tracers or shapes."""
        shapes = tuple(map(_compat.shape_of, leaves))
        program, outputs = _compat.trace_with_constants(fun, *shapes)
        consts = tuple(program.consts)
        operations = _compat.program_key(program, differentiated=False)
        key = operations, tuple(map(_compat.shape_of, consts)), jax.tree.structure(outputs)
        return cls(_compat.with_constants(program), consts, shapes, outputs, key, tuple(donated))

    @property
    def runs(self) -> bool:
        """Whether it can be called: if its constants are known. Tracers are not."""
        return not any(map(_compat.is_tracer, self.consts))

    def gradient(self) -> "Program":
        """The reverse pass: from the cotangent of the result to those of all that has one.

        That is of all arguments and constants, as long as they are not integers. It takes the
        cotangents of the result after the arguments.
        """
        inputs = (*map(_compat.shape_of, self.consts), *self.leaves)
        moving = [i for i, x in enumerate(inputs) if jnp.issubdtype(x.dtype, jnp.inexact)]
        outputs = jax.tree.leaves(self.outputs)
        smooth = [i for i, x in enumerate(outputs) if jnp.issubdtype(x.dtype, jnp.inexact)]
        cotangents = [jax.ShapeDtypeStruct(outputs[i].shape, outputs[i].dtype) for i in smooth]

        def pull_back(*values: Any) -> list[Any]:
            primals, given = list(values[: len(inputs)]), list(values[len(inputs) :])

            def differentiable(*moved: Any) -> list[Any]:
                filled = list(primals)
                for i, value in zip(moving, moved, strict=True):
                    filled[i] = value
                returned = self.fun(*filled)
                return [returned[i] for i in smooth]

            _, transpose = jax.vjp(differentiable, *[primals[i] for i in moving])
            return list(transpose(given))

        gradients = jax.eval_shape(pull_back, *inputs, *cotangents)
        return Program(pull_back, self.consts, (*self.leaves, *cotangents), gradients)

    def compile(self) -> Executable:
        """Compile it so that its account of memory is true."""
        shift = len(self.consts)
        platform = jax.default_backend()
        compiled = (
            jax.jit(self.fun, donate_argnums=[shift + i for i in self.donated], keep_unused=True)
            .lower(*map(_compat.shape_of, self.consts), *self.leaves)
            .compile(_compat.true_account(platform))
        )
        usage = MemoryUsage.of(compiled)
        return Executable(compiled, usage, self.consts, jax.tree.structure(self.outputs))
