"""`MemoryUsage`: what a compiled program needs, as its compiler accounts for it."""

import math
import os
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from curvax import _jax
from curvax._errors import where
from curvax._types import Array, Fun, PyTree
from curvax.memory.budget import format_bytes


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
        """What a call allocates besides what is there already: output + temp + scratch - alias."""
        return self.output_bytes + self.temp_bytes + self.scratch_bytes - self.alias_bytes

    @classmethod
    def of(cls, compiled: Any) -> "MemoryUsage":
        """As a compiled program tells."""
        account = compiled.memory_analysis()
        if account is None:
            raise NotImplementedError(
                f"{where()}: the compiler for this device does not tell how much memory a program "
                f"needs. Give sizes instead of memory budgets."
            )
        return cls(
            argument_bytes=account.argument_size_in_bytes,
            output_bytes=account.output_size_in_bytes,
            temp_bytes=account.temp_size_in_bytes,
            alias_bytes=account.alias_size_in_bytes,
            scratch_bytes=library_scratch(compiled, jax.default_backend()),
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
    """A traced function. `fun` takes `consts`, then leaves like `leaves`, and returns leaves.

    Arrays that a function closes over would be built into its executable, and be counted there
    among the temporaries. As a `Program` takes them as arguments they are not. It also makes it
    possible to compile a function that closes over tracers, inside another transformation: the
    compiler wants to know their shapes only.
    """

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
    arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS)]

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


# What library calls of a program compiled for CPUs allocate, besides what its compiler accounts
# for.
#
# XLA hands matrix products, convolutions, Fourier transforms, sorts and decompositions to
# libraries. What these allocate themselves is not among the temporaries of `memory_analysis`,
# though it can be larger than all of them: a convolution copies every window that it looks at.
#
# The formulas bound what was measured, as the most bytes that `malloc` had given out during one
# call less the compiler's account, on two cores with jaxlib 0.10.2 and 0.12.0 in float32 and
# float64. `tests/memory/test_scratch.py` compares both with the resident memory of a process.

NEGLIGIBLE = 1 << 19
"""Calls that allocate less do not count: a thread and its allocator keep as much for themselves."""

DEPTH = 320
"""Eigen packs at most so much of the contracted dimension at a time (its `kc`), twice in turn."""

BLOCKS = 1_800_000
"""Bytes of blocks that Eigen keeps for each thread: 0.2 to 3.3 MB were measured with two."""

PANEL = 64
"""How many columns each thread packs in a product by YNNPACK."""


def library_scratch(compiled: Any, platform: str) -> int:
    """Bytes that the library calls of a compiled program allocate, at the worst moment.

    One call at a time: calls that do not depend on each other can overlap, but the buffers in which
    XLA keeps their results seldom let them.
    """
    if platform != "cpu":
        return 0
    calls = _calls(compiled.as_text())
    most = max((_FORMULAS[call.name](call) for call in calls), default=0)
    return most if most >= NEGLIGIBLE else 0


class _Shape(NamedTuple):
    dtype: str
    dims: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        return max(1, int(bits.group()) // 8) if bits else 1


class _Call(NamedTuple):
    """An instruction: its name, shapes, the rest of its line, and whether YNNPACK runs it."""

    name: str
    output: _Shape
    operands: Sequence[_Shape]
    text: str
    is_ynn: bool


_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\(([^)]*)\)(.*)$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_FUSION = re.compile(r"kind=(\w+), calls=%?([\w.-]+)")
_WANTED = {"dot", "convolution", "fft", "sort", "custom-call"}


def _calls(text: str) -> Iterator[_Call]:
    """The instructions in the text of a program that a library may run."""
    shapes: dict[str, _Shape] = {}
    fusions: dict[str, str] = {}
    found: list[tuple[str, str, str, str, str]] = []
    computation = ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header is not None:
            computation = header.group(1)
            continue
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        name, type_, operation, operands, rest = match.groups()
        shape = _SHAPE.search(type_)
        if shape is not None:  # Of several results the first.
            shapes[name] = _Shape(shape.group(1), _numbers(shape.group(2)))
        if operation == "fusion":
            fusions |= {called: kind for kind, called in _FUSION.findall(rest)}
        elif operation in _WANTED:
            found.append((computation, operation, name, operands, rest))
    for computation, operation, name, operands, rest in found:
        kind = fusions.get(computation)
        if kind is not None and kind != "kCustom":
            continue  # Part of a loop that XLA compiles itself.
        given = [shapes.get(x.split()[-1].lstrip("%")) for x in operands.split(",") if x.strip()]
        known = [x for x in given if x is not None]
        if name in shapes and len(known) == len(given):
            yield _Call(operation, shapes[name], known, rest, kind is not None)


def _dot(call: _Call) -> int:
    left, right = call.operands[:2]
    batch = [left.dims[i] for i in _attribute(call, "lhs_batch_dims")]
    contracted = [left.dims[i] for i in _attribute(call, "lhs_contracting_dims")]
    count, k = math.prod(batch), math.prod(contracted)
    m, n = (math.prod(x.dims) // max(1, count * k) for x in (left, right))
    if min(count, k, m, n) < 1 or (min(m, n) == 1 and count == 1):
        return 0  # The product with a vector is compiled.
    if call.is_ynn:
        # It packs the right side: as a whole if there is one for each of the batch, else in panels.
        # Narrow numbers are multiplied in float32.
        size = max(left.itemsize, 4)
        packed = count * k * n if count > 1 else k * min(n, _threads() * PANEL)
        wide = count * m * n if left.itemsize < 4 else 0
        return size * (packed + wide)
    size = max(left.itemsize, 4)
    if count > 1:  # All of the batch are begun at once.
        return count * size * k * (m + n)
    return _contraction(m, n, k, size)


def _contraction(m: int, n: int, k: int, size: int) -> int:
    """Of a product by Eigen, which packs both sides, and has blocks of its own for each thread."""
    packed = size * min(k, 2 * DEPTH) * (m + n)
    return packed + min(5 * packed // 2, _threads() * BLOCKS)


def _convolution(call: _Call) -> int:
    """A contraction of the kernel with all windows, one for each number of each output channel."""
    image, kernel = call.operands[:2]
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", call.text)
    if labels is None or image.itemsize > 4:  # Those of doubles are compiled.
        return 0
    of_kernel, of_output = labels.group(2), labels.group(3)
    channels = kernel.dims[of_kernel.index("o")]
    k = math.prod(kernel.dims) // max(1, channels)
    positions = math.prod(call.output.dims) // max(1, call.output.dims[of_output.index("f")])
    groups = re.search(r"(?:feature|batch)_group_count=(\d+)", call.text)
    count = int(groups.group(1)) if groups is not None else 1
    if channels == 1:  # The product of all windows with a vector.
        return _threads() * BLOCKS
    return _contraction(channels, count * positions, k, max(image.itemsize, 4))


def _fft(call: _Call) -> int:
    """Buffers and roots of unity, for a row on each thread; much more for large prime factors."""
    lengths = _attribute(call, "fft_length")
    item = max(x.itemsize for x in (call.output, *call.operands))
    row = max(lengths, default=0)
    rows = math.prod(call.output.dims) // max(1, row)
    rest = row
    for prime in (2, 3, 5, 7, 11, 13):
        while rest > 1 and rest % prime == 0:
            rest //= prime
    return (2 if rest <= 1 else 10) * row * item * max(1, min(_threads(), rows))


def _sort(call: _Call) -> int:
    """A copy of a row, 16 bytes a number and operand."""
    axes = _attribute(call, "dimensions")
    if not axes or not call.output.dims or "is_stable=true" not in call.text:
        return 0
    return 16 * call.output.dims[axes[0]] * len(call.operands)


def _custom_call(call: _Call) -> int:
    """Workspaces of LAPACK, one for each matrix of a batch that is being worked on.

    On two cores up to four were seen at once.
    """
    target = re.search(r'custom_call_target="lapack_([sdcz])(\w+?)(?:_ffi)?"', call.text)
    if target is None or not call.operands or len(call.operands[0].dims) < 2:
        return 0
    kind, routine = target.groups()
    *batch, m, n = call.operands[0].dims
    size = {"s": 4, "d": 8, "c": 8, "z": 16}[kind]
    each = _WORKSPACES.get(routine, lambda m, n: PANEL * (m + n))(m, n)
    return size * int(each) * min(math.prod(batch), 2 * _threads())


_WORKSPACES: Mapping[str, Callable[[int, int], float]] = {
    # In numbers; the routines that are not here need some columns.
    "syevd": lambda m, n: 1 + 6 * n + 2 * n * n,  # As its manual says, and a row of integers.
    "heevd": lambda m, n: 1 + 6 * n + 3 * n * n,
    "gesdd": lambda m, n: 5 * min(m, n) ** 2 + PANEL * (m + n),  # 3 if square, 4 if long: measured.
    "geev": lambda m, n: 4 * n * n,  # 3.3 to 3.6: with copies of the eigenvectors.
    "potrf": lambda m, n: 0,
    "getrf": lambda m, n: 0,
    "trsm": lambda m, n: 0,
}

_FORMULAS: Mapping[str, Callable[[_Call], int]] = {
    "dot": _dot,
    "convolution": _convolution,
    "fft": _fft,
    "sort": _sort,
    "custom-call": _custom_call,
}


def _attribute(call: _Call, name: str) -> tuple[int, ...]:
    found = re.search(rf"\b{name}={{([\d,]*)}}", call.text)
    return _numbers(found.group(1)) if found is not None else ()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(",") if x)


def _threads() -> int:
    """How many threads the libraries use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
