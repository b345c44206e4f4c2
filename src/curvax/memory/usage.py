"""`MemoryUsage`: the memory that a compiled program needs, as reported by its compiler."""

import math
import os
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled, Wrapped
from jax.typing import ArrayLike

from curvax import _jax
from curvax._errors import where
from curvax._types import Array, Fun, PyTree, TreeDef
from curvax.memory.budget import format_bytes

ArrayOrShape: TypeAlias = ArrayLike | jax.ShapeDtypeStruct
"""What a function can be traced for: an array, a tracer, a scalar, or a shape with a dtype."""


@dataclass(frozen=True)
class MemoryUsage:
    """The memory of a compiled program, in bytes; of a sharded one, on one device.

    Returned by `memory_usage`.

    Attributes:
        argument_bytes: Size of the inputs: the arguments, and the arrays that the function closes
            over.
        output_bytes: Size of the outputs.
        temp_bytes: Peak size of the temporaries.
        alias_bytes: Size of the outputs that are written into donated arguments.
        scratch_bytes: Estimated upper bound on what library calls allocate themselves, which the
            compiler does not report. It comes from formulas fitted to measurements. Less than half
            a MiB counts as zero.

    Examples:
        >>> import jax.numpy as jnp
        >>> from curvax import memory_usage
        >>> usage = memory_usage(lambda x: jnp.cumsum(x), jnp.ones(1000))
        >>> usage.argument_bytes, usage.output_bytes
        (4000, 4000)
        >>> usage.added_bytes == usage.output_bytes + usage.temp_bytes
        True
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int = 0
    scratch_bytes: int = 0

    @property
    def added_bytes(self) -> int:
        """Bytes that a call allocates besides its inputs: output + temp + scratch - alias."""
        return self.output_bytes + self.temp_bytes + self.scratch_bytes - self.alias_bytes

    @classmethod
    def of(cls, compiled: Compiled) -> "MemoryUsage":
        """Return the memory usage that a compiled program reports.

        Arguments:
            compiled: Compiled program, as returned by `jax.jit(fun).lower(*args).compile()`. Arrays
                that `fun` closes over count as temporaries; `memory_usage` avoids that.

        Returns:
            The memory usage.

        Raises:
            NotImplementedError: If the compiler does not report memory usage.

        Examples:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> from curvax import MemoryUsage
            >>> compiled = jax.jit(jnp.outer).lower(jnp.ones(100), jnp.ones(100)).compile()
            >>> MemoryUsage.of(compiled).output_bytes
            40000
        """
        account = compiled.memory_analysis()
        if account is None:
            raise NotImplementedError(
                f"{where()}: the compiler for this device does not report how much memory a "
                f"program needs. Give sizes instead of memory budgets."
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
    """A compiled program, its memory usage, and the constants to call it with."""

    compiled: Compiled
    usage: MemoryUsage
    consts: tuple[ArrayLike, ...]
    structure: TreeDef
    """Pytree structure of the outputs."""

    @property
    def runs(self) -> bool:
        """Whether the program can be called: its constants are arrays, not tracers."""
        return not any(map(_jax.is_tracer, self.consts))

    def without_consts(self) -> "Executable":
        """Return the program without its constants, which are then not kept alive."""
        return replace(self, consts=())

    def with_consts(self, consts: Sequence[ArrayLike]) -> "Executable":
        """Return the program with these constants."""
        return replace(self, consts=tuple(consts))

    def __call__(self, *leaves: ArrayLike) -> PyTree:
        """Run the program on the leaves of its arguments."""
        return jax.tree.unflatten(self.structure, self.compiled(*self.consts, *leaves))


@dataclass(frozen=True)
class Program:
    """A traced function whose closed-over arrays are arguments.

    Closed-over arrays would become constants of the executable and be counted among its
    temporaries. As arguments they are not. It also allows for compiling, inside a transformation,
    a function that closes over tracers: the compiler needs their shapes only.
    """

    fun: Callable[..., list[Array]]
    """Function of `consts`, then `leaves`, that returns the leaves of the outputs."""
    consts: tuple[ArrayLike, ...]
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    outputs: PyTree
    """Pytree of the shapes of the outputs."""
    key: Hashable = None
    """Equal keys imply equal functions of constants and leaves."""
    donated: tuple[int, ...] = ()
    """Indices of the leaves that are donated."""

    @classmethod
    def of(cls, fun: Fun, leaves: Sequence[ArrayOrShape], donated: Sequence[int] = ()) -> "Program":
        """Trace `fun` for positional arguments with the shapes of `leaves`."""
        shapes = tuple(map(_jax.shape_of, leaves))
        program, outputs = _jax.trace_with_constants(fun, *shapes)
        consts = tuple(program.consts)
        operations = _jax.program_key(program, differentiated=False)
        key = operations, tuple(map(_jax.shape_of, consts)), jax.tree.structure(outputs)
        return cls(_jax.with_constants(program), consts, shapes, outputs, key, tuple(donated))

    @property
    def runs(self) -> bool:
        """Whether the program can be called: its constants are arrays, not tracers."""
        return not any(map(_jax.is_tracer, self.consts))

    def gradient(self) -> "Program":
        """Return the vector-Jacobian product with respect to all constants and leaves.

        It takes the cotangents of the outputs after the leaves. Integers have no cotangents.
        """
        inputs = (*map(_jax.shape_of, self.consts), *self.leaves)
        outputs = jax.tree.leaves(self.outputs)
        inexact_inputs, inexact_outputs = map(_inexact_indices, (inputs, outputs))
        cotangents = [
            jax.ShapeDtypeStruct(outputs[i].shape, outputs[i].dtype) for i in inexact_outputs
        ]

        def pull_back(*values: Array) -> list[Array]:
            primals, given = list(values[: len(inputs)]), list(values[len(inputs) :])

            def differentiable(*inexact: Array) -> list[Array]:
                filled = list(primals)
                for i, value in zip(inexact_inputs, inexact, strict=True):
                    filled[i] = value
                returned = self.fun(*filled)
                return [returned[i] for i in inexact_outputs]

            _, vjp = jax.vjp(differentiable, *[primals[i] for i in inexact_inputs])
            return list(vjp(given))

        gradients = jax.eval_shape(pull_back, *inputs, *cotangents)
        return Program(pull_back, self.consts, (*self.leaves, *cotangents), gradients)

    def compile(self) -> Executable:
        """Compile with XLA options that keep library calls visible to `memory_analysis`.

        Unused arguments are kept (`keep_unused`), so that `argument_bytes` counts all constants and
        leaves: they exist, whether the program reads them or not.
        """
        num_consts = len(self.consts)
        platform = jax.default_backend()
        compiled = (
            jax.jit(
                self.fun, donate_argnums=[num_consts + i for i in self.donated], keep_unused=True
            )
            .lower(*map(_jax.shape_of, self.consts), *self.leaves)
            .compile(_jax.exact_memory_options(platform))
        )
        usage = MemoryUsage.of(compiled)
        return Executable(compiled, usage, self.consts, jax.tree.structure(self.outputs))


def _inexact_indices(arrays: Sequence[jax.ShapeDtypeStruct]) -> list[int]:
    return [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.inexact)]


# Python scalars are also traced, as under `jax.jit`.
_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, int, float, complex)


def memory_usage(fun: Fun, *args: PyTree, **kwargs: PyTree) -> MemoryUsage:
    """Return the memory that `fun` needs when compiled for these arguments, without running it.

    Equal to

        jax.jit(fun).lower(*args, **kwargs).compile().memory_analysis()

    except that the account is complete. The scratch memory of library calls is included, or the
    program is compiled without such calls. Arrays that `fun` closes over exist before the call, so
    they count as arguments, not as temporaries. `fun` may also close over tracers: `memory_usage`
    can be called inside `jax.jit` and other transformations.

    Arguments:
        fun: A function, jitted or not. The static and donated arguments of a jitted function are
            respected.
        args: Positional arguments: arrays, `jax.ShapeDtypeStruct`s, tracers, or pytrees of these.
        kwargs: Keyword arguments of the same kinds.

    Returns:
        The memory usage, which prints as a table. `added_bytes` is what a call allocates.

    Raises:
        NotImplementedError: If the compiler for this device does not report memory usage.

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
        return _of_jitted(cast(Wrapped, fun), args, kwargs)
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS)]

    def call(*given: Array) -> PyTree:
        filled = list(leaves)
        for i, array in zip(arrays, given, strict=True):
            filled[i] = array
        args, kwargs = jax.tree.unflatten(structure, filled)
        return fun(*args, **kwargs)

    return Program.of(call, [leaves[i] for i in arrays]).compile().usage


def _of_jitted(fun: Wrapped, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> MemoryUsage:
    traced = fun.trace(*args, **kwargs)
    if not traced.jaxpr.consts:
        platform = jax.default_backend()
        return MemoryUsage.of(traced.lower().compile(_jax.exact_memory_options(platform)))
    infos = jax.tree.leaves(traced.args_info)
    donated = [i for i, info in enumerate(infos) if info.donated]
    shapes = [jax.ShapeDtypeStruct(info.shape, info.dtype) for info in infos]
    program = Program.of(_jax.as_function(traced.jaxpr), shapes, donated)
    return program.compile().usage


# Scratch memory of library calls on CPUs.
#
# XLA implements matrix products, convolutions, Fourier transforms, sorts and decompositions by
# library calls. What these allocate is not part of the temporaries in `memory_analysis`, though it
# can exceed them: a convolution copies every window of its input.
#
# The formulas are upper bounds on measurements: the peak of bytes allocated by `malloc` during one
# call, minus the compiler's account, on two cores with jaxlib 0.10.2 and 0.12.0 in float32 and
# float64. `tests/memory/test_scratch.py` compares them with the resident memory of a process.

NEGLIGIBLE = 1 << 19
"""Scratch memory below this counts as zero: a thread and its allocator keep as much anyway."""

DEPTH = 320
"""Eigen's block size along the contracted dimension (its `kc`); it packs two blocks at once."""

BLOCKS = 1_800_000
"""Bytes of blocks that Eigen keeps for each thread: 0.2 to 3.3 MB were measured with two."""

PANEL = 64
"""Number of columns that each thread packs in a product by YNNPACK."""


def library_scratch(compiled: Compiled, platform: str) -> int:
    """Return a bound on the bytes that library calls of a compiled program allocate at a time.

    Calls are assumed not to overlap. Independent calls could, but the buffers in which XLA keeps
    their results rarely allow for it. Calls whose shapes the HLO text does not show are left out.
    """
    if platform != "cpu":
        return 0
    calls = _library_calls(compiled.as_text() or "")
    peak = max((_FORMULAS[call.opcode](call) for call in calls), default=0)
    return peak if peak >= NEGLIGIBLE else 0


class _Shape(NamedTuple):
    dtype: str
    dims: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        return max(1, int(bits.group()) // 8) if bits else 1


class _Call(NamedTuple):
    """An HLO instruction that a library may run."""

    opcode: str
    output: _Shape
    operands: Sequence[_Shape]
    attributes: str
    """The rest of its line after the operands."""
    is_ynn: bool
    """Whether YNNPACK runs it."""


_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\(([^)]*)\)(.*)$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_FUSION = re.compile(r"kind=(\w+), calls=%?([\w.-]+)")


def _library_calls(text: str) -> Iterator[_Call]:
    """Yield the instructions in the HLO text of a program that a library may run.

    Instructions with an operand whose shape is not found in the text are dropped.
    """
    shapes: dict[str, _Shape] = {}
    fusions: dict[str, str] = {}
    candidates: list[tuple[str, str, str, str, str]] = []
    computation = ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header is not None:
            computation = header.group(1)
            continue
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        name, type_, opcode, operands, rest = match.groups()
        shape = _SHAPE.search(type_)
        if shape is not None:  # The first one, if there are several results.
            shapes[name] = _Shape(shape.group(1), _integers(shape.group(2)))
        if opcode == "fusion":
            fusions |= {called: kind for kind, called in _FUSION.findall(rest)}
        elif opcode in _FORMULAS:
            candidates.append((computation, opcode, name, operands, rest))
    for computation, opcode, name, operands, rest in candidates:
        kind = fusions.get(computation)
        if kind is not None and kind != "kCustom":
            continue  # Part of a fused loop, for which XLA generates code.
        given = [shapes.get(x.split()[-1].lstrip("%")) for x in operands.split(",") if x.strip()]
        known = [x for x in given if x is not None]
        if name in shapes and len(known) == len(given):
            is_ynn = kind == "kCustom"  # On CPU, custom fusions are YNNPACK's ("__ynn_fusion").
            yield _Call(opcode, shapes[name], known, rest, is_ynn)


def _dot(call: _Call) -> int:
    left, right = call.operands[:2]
    batch = [left.dims[i] for i in _attribute(call, "lhs_batch_dims")]
    contracted = [left.dims[i] for i in _attribute(call, "lhs_contracting_dims")]
    count, k = math.prod(batch), math.prod(contracted)
    m, n = (math.prod(x.dims) // max(1, count * k) for x in (left, right))
    if min(count, k, m, n) < 1 or (min(m, n) == 1 and count == 1):
        return 0  # XLA generates code for a product with a vector.
    if call.is_ynn:
        # YNNPACK packs the right-hand side: all of it in a batched product, else in panels.
        # Half precision is multiplied in float32.
        size = max(left.itemsize, 4)
        packed = count * k * n if count > 1 else k * min(n, _threads() * PANEL)
        wide = count * m * n if left.itemsize < 4 else 0
        return size * (packed + wide)
    size = max(left.itemsize, 4)
    if count > 1:  # All products of the batch are started at once.
        return count * size * k * (m + n)
    return _contraction(m, n, k, size)


def _contraction(m: int, n: int, k: int, size: int) -> int:
    """Return the scratch bytes of a product in Eigen: both packed sides, and blocks per thread."""
    packed = size * min(k, 2 * DEPTH) * (m + n)
    return packed + min(5 * packed // 2, _threads() * BLOCKS)


def _convolution(call: _Call) -> int:
    """Return the scratch bytes of a convolution: the kernel contracted with all windows."""
    image, kernel = call.operands[:2]
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", call.attributes)
    if labels is None or image.itemsize > 4:  # XLA generates code for float64.
        return 0
    kernel_labels, output_labels = labels.group(2), labels.group(3)
    channels = kernel.dims[kernel_labels.index("o")]
    k = math.prod(kernel.dims) // max(1, channels)
    positions = math.prod(call.output.dims) // max(1, call.output.dims[output_labels.index("f")])
    groups = re.search(r"(?:feature|batch)_group_count=(\d+)", call.attributes)
    count = int(groups.group(1)) if groups is not None else 1
    if channels == 1:  # A matrix-vector product.
        return _threads() * BLOCKS
    return _contraction(channels, count * positions, k, max(image.itemsize, 4))


def _fft(call: _Call) -> int:
    """Return the scratch bytes of a Fourier transform.

    Buffers and roots of unity for one row on each thread; more if the length has a prime factor
    above 13.
    """
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
    """Return the scratch bytes of a stable sort: 16 bytes per element of a row and operand."""
    axes = _attribute(call, "dimensions")
    if not axes or not call.output.dims or "is_stable=true" not in call.attributes:
        return 0
    return 16 * call.output.dims[axes[0]] * len(call.operands)


def _custom_call(call: _Call) -> int:
    """Return the bytes of LAPACK workspaces, one for each matrix of a batch in progress.

    On two cores up to four were measured at once.
    """
    target = re.search(r'custom_call_target="lapack_([sdcz])(\w+?)(?:_ffi)?"', call.attributes)
    if target is None or not call.operands or len(call.operands[0].dims) < 2:
        return 0
    kind, routine = target.groups()
    *batch, m, n = call.operands[0].dims
    size = {"s": 4, "d": 8, "c": 8, "z": 16}[kind]
    each = _WORKSPACES.get(routine, lambda m, n: PANEL * (m + n))(m, n)
    return size * int(each) * min(math.prod(batch), 2 * _threads())


_WORKSPACES: Mapping[str, Callable[[int, int], float]] = {
    # In elements. Routines that are not listed need a few columns.
    "syevd": lambda m, n: 1 + 6 * n + 2 * n * n,  # LAPACK's manual, plus a row of integers.
    "heevd": lambda m, n: 1 + 6 * n + 3 * n * n,
    "gesdd": lambda m, n: 5 * min(m, n) ** 2 + PANEL * (m + n),  # Measured: 3 square, 4 tall.
    "geev": lambda m, n: 4 * n * n,  # Measured: 3.3 to 3.6, with copies of the eigenvectors.
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
    match = re.search(rf"\b{name}={{([\d,]*)}}", call.attributes)
    return _integers(match.group(1)) if match is not None else ()


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(",") if x)


def _threads() -> int:
    """Return the number of threads that the libraries use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
