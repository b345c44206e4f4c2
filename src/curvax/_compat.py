"""The only place that knows which JAX is running.

JAX's internals move with each release. Whatever curvax needs beyond the documented API, or needs
in different words on different versions, is asked for here and nowhere else; a test holds the
other modules to that.

Meshes with `Explicit` axes (what `jax.make_mesh` makes by default) put the sharding of an array
into its type, and then JAX refuses an operation whose result it would have to communicate for.
`sharding_of`, `unsharded_along`, `filled_like` and `mesh_of` are what loops need to live with that.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

__all__ = [
    "Kind",
    "Primitive",
    "ScanForm",
    "as_function",
    "as_program",
    "checkpointed",
    "closed",
    "default_device",
    "define_identity",
    "filled_like",
    "function_name",
    "has_effects",
    "inner_program",
    "is_jitted",
    "is_key",
    "is_literal",
    "is_tracer",
    "is_varying",
    "made_up",
    "mesh_of",
    "passes_through",
    "returns_complex",
    "run_equation",
    "shape_of",
    "sharding_of",
    "trace",
    "trace_with_constants",
    "tracing_context",
    "true_account",
    "unjitted",
    "unsharded_along",
    "unwrap_keys",
    "varying_like",
    "wrap_keys",
]


# The class itself is in `jax.extend.core`, which takes a while to load.
Primitive: Any = type(lax.sin_p)


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


def trace_with_constants(
    fun: Callable[..., Any], *args: Any
) -> tuple[Callable[..., Any], list[Any], Any]:
    """`fun` traced for arguments like these, what it closed over, and the shapes of its result.

    The first takes those constants, then the leaves of the arguments, and returns the leaves of
    the result. Constants are arrays, or tracers of the transformation in which this is called.
    """
    program, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    count = len(program.consts)

    def traced(*leaves: Any) -> list[Any]:
        return jax.core.eval_jaxpr(program.jaxpr, leaves[:count], *leaves[count:])

    return traced, program.consts, shapes


def tracing_context() -> Any:
    """What beside its arguments decides how a function is traced; to be compared only."""
    settings: Any = jax.config
    mesh = jax.sharding.get_abstract_mesh()
    names = ("enable_x64", "default_matmul_precision", "numpy_dtype_promotion", "default_prng_impl")
    names += ("numpy_rank_promotion", "debug_nans", "threefry_partitionable")
    return default_device(), mesh, *(getattr(settings, f"jax_{name}", None) for name in names)


@functools.cache
def true_account(platform: str) -> dict[str, Any]:
    """Compiler options with which a compiled program tells all the memory it needs.

    On CPU, XLA of JAX 0.10 may turn a chain of matrix products into one library call whose scratch
    memory is in no account. Older ones have no such calls, and do not know the option.
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


def default_device() -> Any:
    """The device on which JAX computes by default."""
    settings: Any = jax.config
    device = settings.jax_default_device  # A device, the name of a platform, or None.
    if device is None or isinstance(device, str):
        return jax.local_devices(backend=device)[0]
    return device


def is_jitted(fun: Any) -> bool:
    """Whether a function comes from `jax.jit`."""
    return all(hasattr(fun, name) for name in ("trace", "lower", "__wrapped__"))


def unjitted(fun: Any) -> Callable[..., Any]:
    """The function that `jax.jit` was applied to, if it was, else the function itself.

    What a jitted function closes over stays inside of it, out of reach for `trace_with_constants`.
    """
    return unjitted(fun.__wrapped__) if is_jitted(fun) else fun


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """What a program has to know of an argument, be it an array, a tracer, a number or a shape.

    An array says on which devices it lies. A tracer does not, whatever its type says of axes; a
    program for it alone is for one device.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    kind = jax.typeof(x)
    placed = isinstance(x, jax.Array) and not is_tracer(x) and x.committed
    sharding = x.sharding if placed else None
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding, weak_type=kind.weak_type)


def made_up(shape: Any) -> Any:
    """A concrete array of such a shape, inside of transformations too: ones, zeros, or keys."""
    if not is_key(shape):
        value = np.ones if jnp.issubdtype(shape.dtype, jnp.inexact) else np.zeros
        return value(shape.shape, shape.dtype)
    with jax.ensure_compile_time_eval():
        key = jax.random.key(0, impl=shape.dtype._impl)
        return jnp.broadcast_to(key, shape.shape)


def has_effects(fun: Callable[[], Any]) -> bool:
    """Whether a function does anything beside computing its result, by its trace."""
    return bool(jax.make_jaxpr(fun)().effects)


def is_tracer(x: Any) -> bool:
    """Whether `x` stands for a value that is not known yet."""
    return isinstance(x, jax.core.Tracer)


def is_key(x: Any) -> bool:
    """Whether `x` is an array of typed random keys, which have no numeric dtype."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def unwrap_keys(x: Array) -> Array:
    """The numbers behind typed random keys, along new last axes; other arrays as they are."""
    return jax.random.key_data(x) if is_key(x) else x


def wrap_keys(x: Array, like: Any) -> Array:
    """What `unwrap_keys` undid, for an array of the dtype of `like`."""
    if not is_key(like):
        return x
    implementations: list[Any] = []
    jax.eval_shape(lambda keys: implementations.append(jax.random.key_impl(keys)), like)
    return jax.random.wrap_key_data(x, impl=implementations[0])


def passes_through(params: dict[str, Any]) -> bool:
    """Whether an operation is a function with custom derivatives that computes nothing."""
    return "call_jaxpr" in params and not params["call_jaxpr"].jaxpr.eqns


def returns_complex(primitive: Any, avals: Iterable[Any], params: dict[str, Any]) -> bool:
    """Whether an operation puts out complex numbers, for operands of these types."""
    if "call_jaxpr" in params:  # A function with custom derivatives.
        outputs = params["call_jaxpr"].out_avals
    else:
        outputs, _ = primitive.abstract_eval(*avals, **params)
        outputs = outputs if primitive.multiple_results else [outputs]
    dtypes = [x.dtype for x in outputs if hasattr(x, "dtype")]
    return any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes)


def sharding_of(x: Any) -> NamedSharding | None:
    """The sharding in the type of `x`, or None where it has none to speak of."""
    sharding = getattr(_type(x), "sharding", None)
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return sharding


def unsharded_along(x: Array, axis: int) -> Array:
    """`x` itself, gathered along `axis` if its type says that it is sharded there."""
    sharding = sharding_of(x)
    if sharding is None:
        return x
    spec = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
    if spec[axis] is None:
        return x
    spec[axis] = None
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def filled_like(x: Any, value: Any = 0, shape: tuple[int, ...] | None = None) -> Array:
    """An array full of one value, of the type of `x` but for the given shape.

    The type includes the sharding over explicit mesh axes and the manual axes of a `shard_map`
    over which `x` varies, because a loop's carry must have the type that its body returns.
    """
    full = lax.full(x.shape if shape is None else shape, value, x.dtype, sharding=sharding_of(x))
    return varying_like(full, x)


def varying_like(x: Array, like: Any) -> Array:
    """`x`, made to vary over the manual axes of a `shard_map` over which `like` varies."""
    missing = tuple(_varying(like) - _varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def _varying(x: Any) -> frozenset[Any]:
    # JAX 0.10 put the set of these axes into a larger object; in 0.9 a mere shape may have None.
    manual = getattr(_type(x), "manual_axis_type", None)
    found = manual.varying if manual is not None else getattr(_type(x), "vma", None)
    return found or frozenset()


def is_varying(x: Any) -> bool:
    """Whether an array differs between the devices of a `shard_map`, by its type."""
    return bool(_varying(x))


def mesh_of(arrays: Iterable[Any]) -> AbstractContextManager[Any]:
    """A context in which new arrays can have shardings like those of `arrays`.

    A traced program knows its mesh. Outside of one, arrays over explicit mesh axes bring theirs
    along in their shardings, but JAX wants it said.
    """
    if is_tracer(lax.full((), 0)):  # New arrays are traced: a program is being made.
        return nullcontext()
    for x in arrays:
        if is_tracer(x) or sharding_of(x) is None or not jax.sharding.get_abstract_mesh().empty:
            continue
        return jax.set_mesh(x.sharding.mesh)
    return nullcontext()


def _type(x: Any) -> Any:
    return x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)


def as_program(x: Any) -> tuple[Any, Sequence[Any]] | None:
    """`x` as a jaxpr and its constants if it is one, closed or not; else None.

    Programs inside of programs are found by it wherever an operation's parameters keep them.
    """
    from jax.extend import core  # It loads much that is not needed otherwise.

    if isinstance(x, core.ClosedJaxpr):
        return x.jaxpr, x.consts
    return (x, ()) if isinstance(x, core.Jaxpr) else None


def as_function(program: Any) -> Callable[..., list[Any]]:
    """A closed jaxpr as a function of leaves."""
    return lambda *leaves: jax.core.eval_jaxpr(program.jaxpr, program.consts, *leaves)


def is_literal(x: Any) -> bool:
    """Whether what an operation reads is a value written into the program, not a variable."""
    from jax.extend import core

    return isinstance(x, core.Literal)


def define_identity(primitive: Any, num_kept: int, batch: Callable[..., Any]) -> None:
    """Let a primitive return its first `num_kept` operands, under every transformation.

    `batch(args, axes, **params)` is what `jax.vmap` makes of it.
    """
    several = primitive.multiple_results
    first = lambda args: list(args[:num_kept]) if several else args[0]

    def jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
        return primitive.bind(*primals, **params), first(tangents)

    primitive.def_impl(lambda *args, **_: first([jnp.asarray(x) for x in args]))
    primitive.def_abstract_eval(lambda *avals, **_: first(avals))
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, lambda _, *args, **__: list(args[:num_kept]))


Kind = Literal["plain", "call", "checkpoint", "custom", "scan", "opaque"]
"""What an operation does with the program inside of it: nothing, it has none; runs it; runs it
again in the backward pass; has derivatives of its own for it; repeats it; or something else."""

_KINDS: dict[str, tuple[Kind, str]] = {
    "jit": ("call", "jaxpr"),
    "pjit": ("call", "jaxpr"),
    "closed_call": ("call", "call_jaxpr"),
    "core_call": ("call", "call_jaxpr"),
    "remat": ("checkpoint", "jaxpr"),
    "remat2": ("checkpoint", "jaxpr"),
    "checkpoint": ("checkpoint", "jaxpr"),
    "custom_jvp_call": ("custom", "call_jaxpr"),
    "custom_vjp_call": ("custom", "call_jaxpr"),
    "custom_vjp_call_jaxpr": ("custom", "fun_jaxpr"),
    "scan": ("scan", "jaxpr"),
}


def inner_program(equation: Any) -> tuple[Kind, Any]:
    """The kind of an equation, and the closed program that belongs to that kind."""
    from jax.extend import core

    name = equation.primitive.name
    if name in _KINDS:
        kind, key = _KINDS[name]
        inner = equation.params[key]
        closed = inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())
        return kind, closed
    inside = any(map(_holds_program, equation.params.values()))
    return ("opaque" if inside else "plain"), None


def _holds_program(x: Any) -> bool:
    return any(map(_holds_program, x)) if isinstance(x, tuple | list) else as_program(x) is not None


@dataclass(frozen=True)
class ScanForm:
    """How a scan is put together: the first inputs are constants, the next the carry."""

    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: Any

    @classmethod
    def of(cls, equation: Any) -> "ScanForm":
        """The form of an equation that is a scan."""
        params = equation.params
        names = ("num_consts", "num_carry", "length", "reverse", "unroll")
        return cls(*(params[name] for name in names))


def checkpointed(equation: Any, fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, checkpointed as the equation is."""
    params = equation.params
    return jax.checkpoint(fun, prevent_cse=params["prevent_cse"], policy=params["policy"])


def run_equation(equation: Any, inputs: Sequence[Any]) -> list[Any]:
    """What an equation of a jaxpr computes from other inputs than those it was traced with."""
    params = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        results = equation.primitive.bind(*inputs, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def function_name(equation: Any) -> str:
    """The name of the function that an equation with a program inside was made from."""
    _, inner = inner_program(equation)
    info = getattr(getattr(inner, "jaxpr", None), "debug_info", None)
    return getattr(info, "func_name", None) or equation.params.get("name", equation.primitive.name)


def closed(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """A jaxpr with its constants."""
    from jax.extend import core

    return core.ClosedJaxpr(jaxpr, list(consts))
