"""Functions: tracing them once, what they depend on, how they are compiled."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.core
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from curvax._jax.arrays import varying_axes
from curvax._jax.jaxprs import (
    ScanForm,
    checkpointed,
    inner_program,
    is_literal,
    run_equation,
)

__all__ = [
    "call_key",
    "default_device",
    "has_effects",
    "inlined",
    "is_bound",
    "is_jitted",
    "kept_as_call",
    "trace",
    "trace_change",
    "trace_with_constants",
    "tracing_context",
    "true_account",
    "unjitted",
    "untraced",
    "with_constants",
]


def trace(fun: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """`fun` traced once and for all, for arguments like these: arrays, or their shapes.

    The result is called like `fun`. Unlike a jitted function it is never traced again, also where
    an argument is of weak type at one time and not at another.
    """
    program, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    structure = jax.tree.structure(shapes)

    def traced(*args: Any) -> Any:
        leaves = jax.core.eval_jaxpr(program.jaxpr, program.consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(structure, leaves)

    return traced


def trace_change(
    fun: Callable[..., Any], state: Any
) -> tuple[Callable[[Sequence[Any]], list[Any]], list[bool]]:
    """`fun(state)` traced once, as a function of leaves, and which of these it changes at all."""
    program = jax.make_jaxpr(fun)(state)
    pairs = zip(program.jaxpr.outvars, program.jaxpr.invars, strict=True)
    changed = [after is not before for after, before in pairs]

    def traced(leaves: Sequence[Any]) -> list[Any]:
        return jax.core.eval_jaxpr(program.jaxpr, program.consts, *leaves)

    return traced, changed


def untraced(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun` as a function that JAX has never seen.

    `jax.make_jaxpr`, `jax.eval_shape` and `jax.checkpoint` keep what they traced for a function,
    and would not notice that something which it reads has changed since.
    """
    return lambda *args: fun(*args)


def trace_with_constants(fun: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """`fun` traced for arguments like these, as a closed jaxpr, and the shapes of its result.

    Its constants, what the function closed over, are arrays, or tracers of the transformation in
    which this is called. Those of jitted functions that it calls are among them, unless they are
    small. See `with_constants`.
    """
    program, shapes = jax.make_jaxpr(untraced(fun), return_shape=True)(*args)
    if any(map(_hides_constants, program.jaxpr.eqns)):
        run = lambda *args: _run_hoisted(program, jax.tree.leaves(args))
        program = jax.make_jaxpr(run)(*args)
    return program, shapes


# Constants of jitted functions inside a traced one. JAX keeps them in the equation that calls the
# function, out of reach. Such calls are inlined, also inside `checkpoint` and `scan`.

SMALL_BYTES = 2**16
"""Constants that take less stay where they are: they make no difference to a memory budget."""


def _hides_constants(equation: Any) -> bool:
    """Whether a call has large constants, in itself or in what it calls."""
    kind, inner = inner_program(equation)
    if kind not in ("call", "checkpoint", "scan") or _says_shardings(equation):
        return False
    large = any(getattr(const, "nbytes", 0) >= SMALL_BYTES for const in inner.consts)
    return large or any(map(_hides_constants, inner.jaxpr.eqns))


def _says_shardings(equation: Any) -> bool:
    """Whether a jitted function was given shardings, which inlining would lose."""
    names = "in_shardings", "out_shardings"
    given = [each for name in names for each in equation.params.get(name, ())]
    return any(type(each).__name__ != "UnspecifiedValue" for each in given)


def _run_hoisted(program: Any, leaves: Sequence[Any]) -> list[Any]:
    """Run a closed jaxpr with those calls inlined that hide constants."""
    jaxpr = program.jaxpr
    variables = [*jaxpr.constvars, *jaxpr.invars]
    values = dict(zip(variables, [*program.consts, *leaves], strict=True))
    read = lambda atom: atom.val if is_literal(atom) else values[atom]
    for equation in jaxpr.eqns:
        run = _run_entered if _hides_constants(equation) else run_equation
        outputs = run(equation, [read(atom) for atom in equation.invars])
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _run_entered(equation: Any, inputs: Sequence[Any]) -> list[Any]:
    """Run an equation whose program hides constants."""
    kind, inner = inner_program(equation)
    if kind == "call":
        return _run_hoisted(inner, inputs)
    if kind == "checkpoint":
        return checkpointed(equation, lambda *leaves: _run_hoisted(inner, leaves))(*inputs)
    form = ScanForm.of(equation)
    consts, rest = inputs[: form.num_consts], inputs[form.num_consts :]
    init, xs = list(rest[: form.num_carry]), list(rest[form.num_carry :])

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = _run_hoisted(inner, [*consts, *carry, *x])
        return outputs[: form.num_carry], outputs[form.num_carry :]

    options: Any = {"length": form.length, "reverse": form.reverse, "unroll": form.unroll}
    carry, ys = jax.lax.scan(step, init, xs, **options)
    return [*carry, *ys]


def with_constants(program: Any) -> Callable[..., list[Any]]:
    """A closed jaxpr as a function of constants like its own, then of leaves; to leaves."""
    jaxpr, count = program.jaxpr, len(program.consts)
    return lambda *leaves: jax.core.eval_jaxpr(jaxpr, leaves[:count], *leaves[count:])


def tracing_context() -> Any:
    """What beside its arguments decides how a function is traced; to be compared only."""
    settings: Any = jax.config
    mesh = jax.sharding.get_abstract_mesh()
    names = ("enable_x64", "default_matmul_precision", "numpy_dtype_promotion", "default_prng_impl")
    names += ("numpy_rank_promotion", "debug_nans", "threefry_partitionable")
    return default_device(), mesh, *(getattr(settings, f"jax_{name}", None) for name in names)


def call_key(leaves: Sequence[Any]) -> Any:
    """What decides how a function of these arrays is traced; to be compared only."""
    kinds = tuple((jnp.shape(x), jnp.result_type(x), varying_axes(x)) for x in leaves)
    return kinds, tracing_context()


@functools.cache
def true_account(platform: str) -> dict[str, Any]:
    """Compiler options with which a compiled program tells all the memory it needs.

    On CPU, XLA may turn a chain of matrix products into one library call whose scratch memory is in
    no account. A version that does not know the option is left as it is.
    """
    options: Any = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
    if platform != "cpu":
        return {}
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        jax.jit(lambda x: x).lower(scalar).compile(options)
    except Exception:  # noqa: BLE001  Which one it is depends on the version.
        return {}
    return options


def is_bound(axis_name: str) -> bool:
    """Whether there is a mapped axis of this name around."""
    try:
        jax.lax.axis_size(axis_name)
    except NameError:
        return False
    return True


def kept_as_call(outputs: Any) -> Any:
    """What a jitted function returned, which then stays a function in the compiled program."""
    return set_xla_metadata(outputs, inlineable="false")


def default_device() -> Any:
    """The device on which JAX computes by default."""
    settings: Any = jax.config
    device = settings.jax_default_device  # A device, the name of a platform, or None.
    if device is None or isinstance(device, str):
        return jax.local_devices(backend=device)[0]
    return device


def inlined(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Jit `fun` so that it is traced once, and its operations join the program that calls it."""
    inline = getattr(jax, "Inline", None)  # Since 0.11 there are several ways.
    return jax.jit(fun, inline=True if inline is None else inline.JAX_EARLY)


def is_jitted(fun: Any) -> bool:
    """Whether a function comes from `jax.jit`."""
    return all(hasattr(fun, name) for name in ("trace", "lower", "__wrapped__"))


def unjitted(fun: Any) -> Callable[..., Any]:
    """The function that `jax.jit` was applied to, if it was, else the function itself.

    What a jitted function closes over stays inside it, out of reach for `trace_with_constants`.
    """
    return unjitted(fun.__wrapped__) if is_jitted(fun) else fun


def has_effects(fun: Callable[[], Any]) -> bool:
    """Whether a function does anything beside computing its result, by its trace."""
    return bool(jax.make_jaxpr(fun)().effects)
