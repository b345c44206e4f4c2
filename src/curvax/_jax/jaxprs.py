"""Jaxprs: traced functions that are read equation by equation, evaluated, and compared.

A traced program is a closed jaxpr. Its equations differ between versions of JAX: `as_program` finds
inner jaxprs, `parameters` the parameters of an operation. Two programs compute the same if their
`program_key` is equal.
"""

import dataclasses
import functools
import types
import weakref
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set as AbstractSet,
)
from typing import Any, Literal, NamedTuple, TypeAlias, TypeGuard, TypeVar, final

import jax.core
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AbstractMesh, Sharding

from curvax._jax import core
from curvax._jax.arrays import is_tracer, varying_axes
from curvax._jax.core import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Params, Primitive, Value, Var
from curvax._types import ArrayLike, Fun, PyTree

T = TypeVar("T")

OnLeaves: TypeAlias = Callable[..., list[Any]]
"""A jaxpr as a function of leaves: values in, a list of values out."""


def operation_name(equation: JaxprEqn) -> str:
    """Return the name of an equation's operation, as reports print it."""
    high = equation.params.get("_prim")
    return equation.primitive.name if high is None else type(high).__name__


def parameters(equation: JaxprEqn) -> Params:
    """Return the static parameters of an equation's operation, wherever this JAX keeps them."""
    return _unwrapped(equation.params)


def _unwrapped(params: Params) -> Params:
    # With `jax_remat3` and the like, all such operations are one primitive, `call_hi_primitive`,
    # whose only parameter is the operation.
    high = params.get("_prim")
    return params if high is None else high.params


class Program(NamedTuple):
    """A jaxpr and its constants, whichever class holds them in this version of JAX."""

    jaxpr: Jaxpr
    consts: Sequence[Value]


def as_program(x: object) -> Program | None:
    """Return a jaxpr and its constants if `x` is a jaxpr, closed or not; else None.

    This finds inner jaxprs, whatever the name and the form in which parameters hold them.
    """
    if isinstance(x, jax.stages.Traced):
        x = x.jaxpr
    if isinstance(x, ClosedJaxpr):
        return Program(x.jaxpr, x.consts)
    return Program(x, ()) if isinstance(x, Jaxpr) else None


def as_function(program: ClosedJaxpr) -> OnLeaves:
    """Return a closed jaxpr as a function of leaves."""
    return lambda *leaves: jax.core.eval_jaxpr(program.jaxpr, program.consts, *leaves)


def closed(jaxpr: Jaxpr, consts: Sequence[Value]) -> ClosedJaxpr:
    """Return a jaxpr closed over constants."""
    return ClosedJaxpr(jaxpr, list(consts))


def is_literal(x: object) -> TypeGuard[core.Literal]:
    """Return whether an operand is a literal, not a variable."""
    return isinstance(x, core.Literal)


Kind = Literal["plain", "call", "checkpoint", "custom", "scan", "opaque"]
"""The role of an equation's inner jaxpr: there is none; it is called; it is rematerialised in the
backward pass; it has a derivative rule; it is the body of a scan; or another one."""


_KINDS: dict[str, tuple[Kind, str]] = {
    "jit": ("call", "jaxpr"),
    "closed_call": ("call", "call_jaxpr"),
    "remat2": ("checkpoint", "jaxpr"),
    "custom_jvp_call": ("custom", "call_jaxpr"),
    "custom_vjp_call": ("custom", "call_jaxpr"),
    "scan": ("scan", "jaxpr"),
    "RematTraced": ("checkpoint", "jaxpr"),  # These three: see `_unwrapped`.
    "CustomJVPTraced": ("custom", "traced"),
    "CustomVJPTraced": ("custom", "traced"),
}


def inner_program(equation: JaxprEqn) -> tuple[Kind, ClosedJaxpr | None]:
    """Return the kind of an equation, and the inner jaxpr that belongs to it.

    There is one for "call", "checkpoint", "custom" and "scan". An equation whose inner jaxpr does
    not take its operands is "opaque".
    """
    kind, key = _KINDS.get(operation_name(equation), ("opaque", None))
    params = parameters(equation)
    program = None if key is None else as_program(params[key])
    if program is not None and len(program.jaxpr.invars) == len(equation.invars):
        return kind, closed(*program)
    return ("opaque" if any(map(_holds_program, params.values())) else "plain"), None


def reads_reference(equation: JaxprEqn) -> bool:
    """Return whether an operation reads or writes a mutable array (`jax.new_ref`)."""
    return any(type(v.aval).__name__ == "AbstractRef" for v in equation.invars)


def equations_inside(
    programs: ClosedJaxpr | Jaxpr | JaxprEqn | Sequence[ClosedJaxpr | Jaxpr | JaxprEqn],
) -> Iterator[JaxprEqn]:
    """Yield all equations of some jaxprs, at any depth; each jaxpr is visited once.

    `programs` is a jaxpr, an equation, or a tuple or list of these.
    """
    pending, seen = list[object]([programs]), set[int]()
    while pending:
        x = pending.pop()
        if isinstance(x, tuple | list):
            pending += x
        elif isinstance(x, JaxprEqn):
            pending += parameters(x).values()
        program = as_program(x)
        if program is not None and id(program.jaxpr) not in seen:
            seen.add(id(program.jaxpr))
            yield from program.jaxpr.eqns
            pending += program.jaxpr.eqns


def callback_name(equation: JaxprEqn) -> str | None:
    """Return the name of the Python function that an operation calls for its result, or None."""
    name = equation.primitive.name
    if not name.endswith("_callback") or name == "debug_callback":
        return None
    found = equation.params.get("callback")
    function = getattr(found, "callback_func", found)
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _holds_program(x: object) -> bool:
    return any(map(_holds_program, x)) if isinstance(x, tuple | list) else as_program(x) is not None


class ScanForm(NamedTuple):
    """The layout of a scan's operands (constants, then the carry, then `xs`) and its options."""

    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int | bool

    @classmethod
    def of(cls, equation: JaxprEqn) -> "ScanForm":
        """Return the form of an equation that is a scan."""
        params = equation.params
        if "ft_in" in params:  # Since JAX 0.11, operands are in three groups, outputs in two.
            consts, carry, _ = params["ft_in"].unpack()
            num_consts, num_carry = len(consts), len(carry)
        else:
            num_consts, num_carry = params["num_consts"], params["num_carry"]
        return cls(num_consts, num_carry, params["length"], params["reverse"], params["unroll"])


def checkpointed(equation: JaxprEqn, fun: Callable[..., T]) -> Callable[..., T]:
    """Apply `jax.checkpoint` to `fun`, with the options of a checkpoint equation."""
    params = parameters(equation)
    prevent_cse = params.get("prevent_cse", True)  # A flag, or one for each operand.
    prevent_cse = prevent_cse if isinstance(prevent_cse, bool) else any(prevent_cse)
    return jax.checkpoint(fun, prevent_cse=prevent_cse, policy=params["policy"])


def run_equation(equation: JaxprEqn, inputs: Sequence[Value]) -> list[Any]:
    """Evaluate an equation of a jaxpr for these inputs."""
    with equation.ctx.manager:
        return _bind(equation.primitive, inputs, equation.params)


def _bind(primitive: Primitive, inputs: Sequence[Value], params: Params) -> list[Any]:
    results = primitive.bind(*inputs, **primitive.get_bind_params(params))
    return list(results) if primitive.multiple_results else [results]


def run_now(equation: JaxprEqn, inputs: Sequence[Value]) -> list[Any] | None:
    """Evaluate an equation eagerly, even under a trace; None if an input is a tracer."""
    if equation.effects or any(map(is_tracer, inputs)):
        return None
    if equation.primitive.name in ("pvary", "pcast"):  # They only change types, in `shard_map`.
        return list(inputs)
    # Equations under `shard_map` name the devices of a mesh. The value needs none.
    params = {k: None if isinstance(x, Sharding) else x for k, x in equation.params.items()}
    without_mesh = jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    with equation.ctx.manager, without_mesh, jax.ensure_compile_time_eval():
        return _bind(equation.primitive, inputs, params)


def function_name(equation: JaxprEqn) -> str:
    """Return the name of the Python function that an equation's inner jaxpr was traced from."""
    _, inner = inner_program(equation)
    info = getattr(getattr(inner, "jaxpr", None), "debug_info", None)
    name = parameters(equation).get("name", operation_name(equation))
    return getattr(info, "func_name", None) or name


def passes_through(params: Params) -> bool:
    """Return whether an operation has a derivative rule but no equations: an identity."""
    called = _called(params)
    return called is not None and not called.eqns


def returns_complex(
    primitive: Primitive, avals: Iterable[core.AbstractValue], params: Params
) -> bool:
    """Return whether an operation has complex outputs, for operands of these types."""
    called = _called(params)
    if called is not None:
        outputs = [v.aval for v in called.outvars]
    else:
        outputs, _ = primitive.abstract_eval(*avals, **params)
        outputs = outputs if primitive.multiple_results else [outputs]
    dtypes = [getattr(x, "dtype", None) for x in outputs]
    return any(x is not None and jnp.issubdtype(x, jnp.complexfloating) for x in dtypes)


def _called(params: Params) -> Jaxpr | None:
    """Return the jaxpr of a function with a derivative rule, if these are its parameters."""
    params = _unwrapped(params)
    program = as_program(params.get("call_jaxpr", params.get("traced")))
    return None if program is None else program.jaxpr


def trace(fun: Callable[..., T], *args: PyTree) -> Callable[..., T]:
    """Trace `fun` for arguments like these, arrays or shapes; return the traced function.

    The result is called like `fun`. Unlike a jitted function, it is never traced again, not even
    for an argument of another weak type.
    """
    program, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    structure = jax.tree.structure(shapes)

    def traced(*args: PyTree) -> T:
        leaves = jax.core.eval_jaxpr(program.jaxpr, program.consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(structure, leaves)

    return traced


def trace_change(
    fun: Callable[[T], T], state: T
) -> tuple[Callable[[Sequence[Value]], list[Any]], list[bool]]:
    """Trace `fun(state)`. Return it as a function of leaves, and which leaves it changes."""
    program = jax.make_jaxpr(fun)(state)
    pairs = zip(program.jaxpr.outvars, program.jaxpr.invars, strict=True)
    changed = [after is not before for after, before in pairs]

    def traced(leaves: Sequence[Value]) -> list[Any]:
        return jax.core.eval_jaxpr(program.jaxpr, program.consts, *leaves)

    return traced, changed


def untraced(fun: Callable[..., T]) -> Callable[..., T]:
    """Return a new function equal to `fun`, for which JAX has nothing cached.

    `jax.make_jaxpr`, `jax.eval_shape` and `jax.checkpoint` cache traces by function, and would miss
    a change of what the function reads.
    """
    return lambda *args: fun(*args)


def trace_with_constants(fun: Fun, *args: PyTree) -> tuple[ClosedJaxpr, PyTree]:
    """Trace `fun` for arguments like these. Return a closed jaxpr, and the shapes of its outputs.

    Its constants are what the function closes over: arrays, or tracers of the transformation in
    which this is called. They include those of jitted functions that it calls, unless these are
    small. See `with_constants`.
    """
    program, shapes = jax.make_jaxpr(untraced(fun), return_shape=True)(*args)
    if any(map(_hides_constants, program.jaxpr.eqns)):
        run = lambda *args: _run_hoisted(program, jax.tree.leaves(args))
        program = jax.make_jaxpr(run)(*args)
    return program, shapes


# Constants of jitted functions that a traced function calls. JAX keeps them in the inner jaxpr of
# the call, where they cannot be arguments. Such calls are inlined, also in `checkpoint` and `scan`.

SMALL_BYTES = 2**16
"""Smaller constants stay in inner jaxprs: they make no difference to a memory budget."""


def _hides_constants(equation: JaxprEqn) -> bool:
    """Return whether a call has large constants, at any depth."""
    kind, inner = inner_program(equation)
    if inner is None or kind == "custom" or _has_shardings(equation):
        return False
    large = any(getattr(const, "nbytes", 0) >= SMALL_BYTES for const in inner.consts)
    return large or any(map(_hides_constants, inner.jaxpr.eqns))


def _has_shardings(equation: JaxprEqn) -> bool:
    """Return whether a jitted function has explicit shardings, which inlining would lose."""
    names = "in_shardings", "out_shardings"
    given = [sharding for name in names for sharding in equation.params.get(name, ())]
    return any(type(sharding).__name__ != "UnspecifiedValue" for sharding in given)


def _run_hoisted(program: ClosedJaxpr, leaves: Sequence[Value]) -> list[Any]:
    """Evaluate a closed jaxpr, inlining the calls that hide constants."""
    jaxpr = program.jaxpr
    variables = [*jaxpr.constvars, *jaxpr.invars]
    values = dict(zip(variables, [*program.consts, *leaves], strict=True))
    read = lambda atom: atom.val if is_literal(atom) else values[atom]
    for equation in jaxpr.eqns:
        run = _run_entered if _hides_constants(equation) else run_equation
        outputs = run(equation, [read(atom) for atom in equation.invars])
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _run_entered(equation: JaxprEqn, inputs: Sequence[Value]) -> list[Any]:
    """Evaluate an equation whose inner jaxpr hides constants."""
    kind, inner = inner_program(equation)
    assert inner is not None
    if kind == "call":
        return _run_hoisted(inner, inputs)
    if kind == "checkpoint":
        return checkpointed(equation, lambda *leaves: _run_hoisted(inner, leaves))(*inputs)
    form = ScanForm.of(equation)
    consts, rest = inputs[: form.num_consts], inputs[form.num_consts :]
    init, xs = list(rest[: form.num_carry]), list(rest[form.num_carry :])

    def step(carry: list[Value], x: list[Value]) -> tuple[list[Value], list[Value]]:
        outputs = _run_hoisted(inner, [*consts, *carry, *x])
        return outputs[: form.num_carry], outputs[form.num_carry :]

    carry, ys = jax.lax.scan(
        step, init, xs, length=form.length, reverse=form.reverse, unroll=form.unroll
    )
    return [*carry, *ys]


def with_constants(program: ClosedJaxpr) -> OnLeaves:
    """Return a closed jaxpr as a function of its constants, followed by its leaves."""
    jaxpr, count = program.jaxpr, len(program.consts)
    return lambda *leaves: jax.core.eval_jaxpr(jaxpr, leaves[:count], *leaves[count:])


def tracing_context() -> Hashable:
    """Return a key for the settings that tracing depends on, besides a function's arguments."""
    settings: Any = jax.config
    mesh = jax.sharding.get_abstract_mesh()
    names = ("enable_x64", "default_matmul_precision", "numpy_dtype_promotion", "default_prng_impl")
    names += ("numpy_rank_promotion", "debug_nans", "threefry_partitionable")
    return default_device(), mesh, *(getattr(settings, f"jax_{name}", None) for name in names)


def call_key(leaves: Sequence[ArrayLike | jax.ShapeDtypeStruct]) -> Hashable:
    """Return a key for all that tracing a function of these arrays, or shapes, depends on."""
    kinds = tuple((jnp.shape(x), jnp.result_type(x), varying_axes(x)) for x in leaves)
    return kinds, tracing_context()


@functools.cache
def exact_memory_options(platform: str) -> dict[str, str | bool]:
    """Return compiler options with which `memory_analysis` accounts for all memory.

    On CPU, XLA may fuse a chain of matrix products into one library call, whose scratch memory
    `memory_analysis` leaves out. There are no options for a version that does not know this one.
    """
    options: dict[str, str | bool] = {
        "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
    }
    if platform != "cpu":
        return {}
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        jax.jit(lambda x: x).lower(scalar).compile(options)
    except Exception:  # noqa: BLE001  Which one it is depends on the version.
        return {}
    return options


def is_bound(axis_name: str) -> bool:
    """Return whether an axis of this name is bound, by `vmap` or `shard_map`."""
    try:
        jax.lax.axis_size(axis_name)
    except NameError:
        return False
    return True


def kept_as_call(outputs: T) -> T:
    """Mark the outputs of a jitted function, so that XLA does not inline it."""
    marked: Any = set_xla_metadata(outputs, inlineable="false")
    return marked


def default_device() -> Any:
    """Return the device that JAX computes on by default."""
    settings: Any = jax.config
    device = settings.jax_default_device  # A device, the name of a platform, or None.
    if device is None or isinstance(device, str):
        return jax.local_devices(backend=device)[0]
    return device


def inlined(fun: Callable[..., T]) -> Callable[..., T]:
    """Jit `fun` so that it is traced once, and inlined into the jaxpr of its caller."""
    inline = getattr(jax, "Inline", None)  # An enum since 0.11.
    return jax.jit(fun, inline=True if inline is None else inline.JAX_EARLY)


def is_jitted(fun: object) -> bool:
    """Return whether a function was made by `jax.jit`."""
    return all(hasattr(fun, name) for name in ("trace", "lower", "__wrapped__"))


def unjitted(fun: Fun) -> Fun:
    """Return the function that `jax.jit` was applied to, or `fun` itself.

    The constants of a jitted function stay in an inner jaxpr; see `trace_with_constants`.
    """
    return unjitted(getattr(fun, "__wrapped__", fun)) if is_jitted(fun) else fun


def has_effects(fun: Callable[[], PyTree]) -> bool:
    """Return whether the trace of a function has side effects."""
    return bool(jax.make_jaxpr(fun)().effects)


# Keys of traced programs: equal only if two jaxprs compute the same, operation by operation.
#
# A compiled program may be reused only for a function that still computes the same. Python cannot
# decide that: a method may read an attribute that has changed, a closure a variable that was
# reassigned. So the function is traced again, and its jaxpr is compared. Variables are compared by
# the order in which they appear, literals by their bits (`0.0` is not `-0.0`), numbers by type (`1`
# is not `True`). For the constants of the program itself only their types are compared, since a
# compiled program takes them as arguments; constants of inner jaxprs are part of the program.
#
# Two kinds of Python functions occur in a program. A *callback* is called while the compiled
# program runs. It is compared as a function: by its code and by what it closes over. A *derivative
# rule* is called while derivatives are traced, and may read anything then. The rules in JAX itself
# read nothing that changes. What any other rule does is unknown until it is traced.


def program_key(program: ClosedJaxpr, *, differentiated: bool) -> Hashable | None:
    """Return a key for a closed jaxpr, without the values of its constants.

    Arguments:
        program: The closed jaxpr.
        differentiated: Whether it will be differentiated, so that its derivative rules matter, or
            only be compiled as it is.

    Returns:
        A key that equals that of another program only if both compute the same from constants and
        arguments. None if a derivative rule in it is a Python function that is not part of JAX.
    """
    try:
        return _Keys(differentiated).jaxpr(program.jaxpr)
    except _UnknownRule:
        return None


class _UnknownRule(Exception):
    """A derivative rule that must be traced to know what it does."""


class _Keys:
    """Keys of the parts of a program."""

    def __init__(self, differentiated: bool) -> None:
        self._differentiated = differentiated
        # By identity: a function that is called twice is one jaxpr, and so is each that it calls.
        self._known: dict[int, Hashable] = {}

    def jaxpr(self, jaxpr: Jaxpr) -> Hashable:
        """Return a key for a jaxpr, up to renaming of its variables."""
        indices: dict[Var, int] = {}

        def read(atom: Atom) -> Hashable:
            if isinstance(atom, core.Literal):
                return atom.aval, self.value(atom.val)
            return indices[atom]

        def written(variable: Var) -> Hashable:
            indices[variable] = len(indices)
            return variable.aval

        inputs = [tuple(map(written, group)) for group in (jaxpr.constvars, jaxpr.invars)]
        equations = []
        for eqn in jaxpr.eqns:
            is_callback = "callback" in eqn.primitive.name
            params = [(k, self._param(x, is_callback)) for k, x in parameters(eqn).items()]
            reads = tuple(map(read, eqn.invars))
            # A context holds settings that change what an operation computes. It is interned.
            writes = tuple(map(written, eqn.outvars))
            kind = eqn.primitive, operation_name(eqn)
            equations.append((kind, tuple(params), eqn.ctx, reads, writes))
        return (*inputs, *equations, tuple(map(read, jaxpr.outvars)))

    def _param(self, x: object, is_callback: bool) -> Hashable:
        if is_callback or not _is_function(x):
            return self.value(x)
        if not self._differentiated:
            # The rule has been applied already or never will be. Only jaxprs are compiled.
            return "function"
        return _rule_key(x)

    def value(self, x: object) -> Hashable:
        """Return a key for a parameter of an operation, of any type."""
        if x is None or type(x) in (str, int):
            return x
        if isinstance(x, bool | int | float | complex | np.generic):
            return value_key(x)
        program = as_program(x)
        if program is not None:
            if id(x) not in self._known:
                jaxpr, consts = program
                self._known[id(x)] = (self.jaxpr(jaxpr), *map(self.value, consts))
            return self._known[id(x)]
        if isinstance(x, jax.Array):
            return _Alive(x)
        if hasattr(x, "dtype") and hasattr(x, "__array__"):  # Of NumPy, or a literal.
            array = np.asarray(x)
            return "array", array.dtype, array.shape, array.tobytes()
        inside = self._inside(x)
        if inside is not None:
            return type(x), *inside
        if isinstance(x, types.FunctionType):
            return _Function(x)
        return value_key(x)

    def _inside(self, x: object) -> Sequence[Hashable] | None:
        """Return the keys of the items of a container, or None if `x` is not one."""
        if isinstance(x, tuple | list):
            return [self.value(item) for item in x]
        if isinstance(x, AbstractSet):
            return [frozenset(self.value(item) for item in x)]
        if isinstance(x, Mapping):
            return [frozenset((self.value(key), self.value(item)) for key, item in x.items())]
        if isinstance(x, functools.partial):
            return [self.value(item) for item in (x.func, x.args, x.keywords)]
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            return [self.value(getattr(x, field.name, None)) for field in dataclasses.fields(x)]
        return None


def value_key(x: object) -> Hashable:
    """Return a key for a value: numbers by type and bits, unhashable objects by identity."""
    if isinstance(x, int):
        return type(x), int(x)
    if isinstance(x, float | complex | np.generic):
        return type(x), np.asarray(x).tobytes()
    try:
        hash(x)
    except TypeError:
        return Same(x)
    return type(x), x


@final
class Same:
    """A key that compares an object by identity, and keeps it alive."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@final
class _Alive:
    """A key that compares an array by identity, and does not keep it alive."""

    def __init__(self, array: jax.Array) -> None:
        self._array, self._hash = weakref.ref(array), id(array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Alive) and self._array() is other._array() is not None

    def __hash__(self) -> int:
        return self._hash


@final
class _Function:
    """A key that compares Python functions by what they do now.

    Two functions are equal if they have the same code, globals and defaults, and close over the
    same objects or equal numbers. Closures are read when keys are compared, because only then is
    one function used instead of the other.
    """

    def __init__(self, function: types.FunctionType) -> None:
        self._function = function

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Function) and _do_the_same(self._function, other._function)

    def __hash__(self) -> int:
        return hash(self._function.__code__)


def _do_the_same(one: types.FunctionType, two: types.FunctionType) -> bool:
    if one is two:
        return True
    if one.__code__ != two.__code__ or one.__globals__ is not two.__globals__:
        return False
    # JAX never mutates what its functions close over. Elsewhere, lists are compared by identity.
    open_containers = _is_of_jax(one.__module__)
    have_attributes = bool(vars(one) or vars(two))
    return not have_attributes and _are_same(_held_by(one), _held_by(two), open_containers)


def _are_same(a: Any, b: Any, open_containers: bool) -> bool:
    """Return whether two objects that functions close over are identical or equal for good.

    With `open_containers`, lists and dicts are compared by their items.
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, str | jax.tree_util.PyTreeDef):
        return a == b
    if isinstance(a, bool | int | float | complex):
        return value_key(a) == value_key(b)
    if isinstance(a, types.FunctionType):
        return _do_the_same(a, b)
    if type(a) is tuple or (open_containers and type(a) is list):
        pairs = zip(a, b, strict=False)
        return len(a) == len(b) and all(_are_same(x, y, open_containers) for x, y in pairs)
    if open_containers and type(a) is dict:
        return a.keys() == b.keys() and all(_are_same(a[k], b[k], True) for k in a)
    return False


def _held_by(function: types.FunctionType) -> tuple[object, ...]:
    """Return all that a function refers to besides its globals."""
    keywords = sorted((function.__kwdefaults__ or {}).items())
    contents: list[object] = []
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:  # Not assigned yet.
            contents.append(None)
    return function.__defaults__ or (), tuple(keywords), *contents


def _is_function(x: object) -> bool:
    """Return whether `x` is a Python function, or wraps one."""
    if isinstance(x, type):
        return False
    if hasattr(x, "call_wrapped") or hasattr(x, "__wrapped__"):
        return True
    # Some callables of JAX are not functions, such as a mesh.
    return callable(x) and (isinstance(x, _FUNCTIONS) or not _is_of_jax(type(x).__module__))


_FUNCTIONS = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    functools.partial,
)


def _rule_key(rule: object) -> Hashable:
    """Return a key for a derivative rule of JAX: the code of all functions that it consists of."""
    found: list[Hashable] = []
    seen: set[int] = set()
    pending = [rule]
    while pending:
        x = pending.pop()
        parts = _parts(x)
        if isinstance(x, types.FunctionType):
            if not _is_of_jax(x.__module__):
                raise _UnknownRule
            found.append(x.__code__)
            parts = () if id(x) in seen else parts  # It may close over itself.
            seen.add(id(x))
        elif isinstance(x, str | bool | int | float | complex):
            found.append(x if isinstance(x, str) else value_key(x))
        elif parts is None and _is_function(x):
            raise _UnknownRule
        # Anything else is a type, or an object in which JAX stores results.
        pending += parts or ()
    return tuple(found)


def _parts(x: Any) -> Sequence[object] | None:
    """Return what a function or a tuple consists of, or None if it is neither."""
    if isinstance(x, tuple | list):
        return x
    if hasattr(x, "call_wrapped"):  # JAX's wrapper, with transformations and their arguments.
        return x.f, x.transforms
    if isinstance(x, functools.partial):
        return x.func, *x.args, *x.keywords.values()
    if isinstance(x, types.FunctionType):
        return _held_by(x)
    if hasattr(x, "__wrapped__"):  # Made by `jax.jit` or `jax.custom_jvp`.
        return (x.__wrapped__,)
    return None


def _is_of_jax(module: str | None) -> bool:
    return (module or "").partition(".")[0] in ("jax", "jaxlib")
