"""`MemoryUsage`: what a compiled program needs, as its compiler accounts for it."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curvax import _jax
from curvax._types import Array, Fun, PyTree
from curvax.memory.budget import format_bytes

__all__ = ["Executable", "MemoryUsage", "Program", "memory_usage"]


@dataclass(frozen=True)
class MemoryUsage:
    """The memory of a compiled program, in bytes.

    On several devices, that of one of them.
    """

    argument_bytes: int
    """What it is given: its arguments, and the arrays that it closes over."""

    output_bytes: int
    """What it returns."""

    temp_bytes: int
    """What it allocates on the way, at the worst moment."""

    alias_bytes: int = 0
    """Of the output, what is written into donated arguments."""

    scratch_bytes: int = 0
    """What libraries that it calls allocate themselves, which is not in the compiler's account: a
    bound by formulas that were fitted to measurements. Less than half a MiB counts as nothing."""

    @property
    def added_bytes(self) -> int:
        """What a call allocates beside what is there already: output + temp + scratch - alias."""
        return self.output_bytes + self.temp_bytes + self.scratch_bytes - self.alias_bytes

    @classmethod
    def of(cls, compiled: Any) -> "MemoryUsage":
        """As a compiled program tells."""
        account = compiled.memory_analysis()
        if account is None:
            raise NotImplementedError(
                "curvax.memory_usage: the compiler for this device does not tell how much memory a "
                "program needs. Give sizes instead of memory budgets."
            )
        return cls(
            argument_bytes=account.argument_size_in_bytes,
            output_bytes=account.output_size_in_bytes,
            temp_bytes=account.temp_size_in_bytes,
            alias_bytes=account.alias_size_in_bytes,
            scratch_bytes=_jax.library_scratch(compiled, jax.default_backend()),
        )

    def __str__(self) -> str:
        rows = [
            ("arguments", self.argument_bytes),
            ("output", self.output_bytes),
            ("temporaries", self.temp_bytes),
            ("library scratch", self.scratch_bytes),
            ("aliased", self.alias_bytes),
            ("added by a call", self.added_bytes),
        ]
        return "\n".join(f"{name:<15} {format_bytes(count):>12}" for name, count in rows)


# A function made into a program: traced, its constants set apart, compiled, and measured.
#
# Arrays that a function closes over would be built into its executable, and be counted there among
# the temporaries. As a `Program` takes them as arguments they are not. It also makes it possible to
# compile a function that closes over tracers, inside another transformation: the compiler wants
# to know their shapes only.


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
        return not any(map(_jax.is_tracer, self.consts))

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
        shapes = tuple(map(_jax.shape_of, leaves))
        program, outputs = _jax.trace_with_constants(fun, *shapes)
        consts = tuple(program.consts)
        operations = _jax.program_key(program, differentiated=False)
        key = operations, tuple(map(_jax.shape_of, consts)), jax.tree.structure(outputs)
        return cls(_jax.with_constants(program), consts, shapes, outputs, key, tuple(donated))

    @property
    def runs(self) -> bool:
        """Whether it can be called: if its constants are known. Tracers are not."""
        return not any(map(_jax.is_tracer, self.consts))

    def gradient(self) -> "Program":
        """The reverse pass: from the cotangent of the result to those of all that has one.

        That is of all arguments and constants, as long as they are not integers. It takes the
        cotangents of the result after the arguments.
        """
        inputs = (*map(_jax.shape_of, self.consts), *self.leaves)
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
            .lower(*map(_jax.shape_of, self.consts), *self.leaves)
            .compile(_jax.true_account(platform))
        )
        usage = MemoryUsage.of(compiled)
        return Executable(compiled, usage, self.consts, jax.tree.structure(self.outputs))


# `memory_usage`: what a function needs, without running it.

# As under `jax.jit`, numbers are traced too.
_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, int, float, complex)


def memory_usage(fun: Fun, *args: Any, **kwargs: Any) -> MemoryUsage:
    """What `fun` needs when it is compiled for arguments like these, without running it.

    Nearly

        jax.jit(fun).lower(*args, **kwargs).compile().memory_analysis()

    except that the account is true. The program is compiled without library calls whose scratch
    memory would be in no account. Arrays that `fun` closes over count as arguments, because they
    are there already, not as temporaries. And it may close over tracers: this can be called
    inside `jit` and other transformations.

    Arguments:
        fun: a function, already jitted or not. Of a jitted one, static and donated arguments
            are what they are.
        args: arrays, `jax.ShapeDtypeStruct`s, tracers or pytrees of these.
        kwargs: the same.

    Returns:
        A `MemoryUsage`. Print it for a table; `added_bytes` is what a call allocates.

    Raises:
        NotImplementedError: if the compiler for this device does not tell.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from curvax import memory_usage
        >>> matrix = jax.ShapeDtypeStruct((512, 512), jnp.float32)
        >>> print(memory_usage(lambda a: jnp.sin(a @ a) @ a, matrix))
        arguments           1.00 MiB
        output              1.00 MiB
        temporaries         1.00 MiB
        library scratch          0 B
        aliased                  0 B
        added by a call     2.00 MiB
    """
    if _jax.is_jitted(fun):
        return _of_jitted(fun, args, kwargs)
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]

    def call(*given: Any) -> Any:
        filled = list(leaves)
        for i, array in zip(arrays, given, strict=True):
            filled[i] = array
        args, kwargs = jax.tree.unflatten(structure, filled)
        return fun(*args, **kwargs)

    return Program.of(call, [leaves[i] for i in arrays]).compile().usage


def _of_jitted(fun: Any, args: Any, kwargs: Any) -> MemoryUsage:
    traced = fun.trace(*args, **kwargs)
    if not traced.jaxpr.consts:
        platform = jax.default_backend()
        return MemoryUsage.of(traced.lower().compile(_jax.true_account(platform)))
    infos = jax.tree.leaves(traced.args_info)
    donated = [i for i, info in enumerate(infos) if info.donated]
    shapes = [jax.ShapeDtypeStruct(info.shape, info.dtype) for info in infos]
    program = Program.of(_jax.as_function(traced.jaxpr), shapes, donated)
    return program.compile().usage


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, _ARRAYS)
