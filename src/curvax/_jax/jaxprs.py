"""Jaxprs: functions traced, read operation by operation, run again, and compared.

A program that was traced is a closed jaxpr. What its equations look like differs between versions
of JAX: programs inside programs are found by `as_program`, the parameters of an operation by
`parameters`. `program_key` tells whether two programs compute the same.
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
from typing import Any, Literal, NamedTuple, final

import jax.core
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AbstractMesh, Sharding

from curvax._jax.arrays import varying_axes


def _core() -> Any:
    from jax.extend import core  # It loads much that is not needed otherwise.

    return core


def operation_name(equation: Any) -> str:
    """Return the name of an equation's operation, as reports print it."""
    high = equation.params.get("_prim")
    return equation.primitive.name if high is None else type(high).__name__


def parameters(equation: Any) -> dict[str, Any]:
    """Return the static parameters of an equation's operation, wherever this JAX keeps them."""
    return _own_parameters(equation.params)


def _own_parameters(params: dict[str, Any]) -> dict[str, Any]:
    # With `jax_remat3` and the like, all such operations are one primitive, `call_hi_primitive`,
    # whose only parameter is the operation.
    high = params.get("_prim")
    return params if high is None else high.params


def as_program(x: Any) -> tuple[Any, Sequence[Any]] | None:
    """`x` as a jaxpr and its constants if it is one, closed or not; else None.

    Programs inside programs are found by it wherever an operation's parameters keep them.
    """
    core = _core()
    if isinstance(x, jax.stages.Traced):
        x = x.jaxpr
    if isinstance(x, core.ClosedJaxpr):
        return x.jaxpr, x.consts
    return (x, ()) if isinstance(x, core.Jaxpr) else None


def as_function(program: Any) -> Callable[..., list[Any]]:
    """A closed jaxpr as a function of leaves."""
    return lambda *leaves: jax.core.eval_jaxpr(program.jaxpr, program.consts, *leaves)


def closed(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """A jaxpr with its constants."""
    return _core().ClosedJaxpr(jaxpr, list(consts))


def is_literal(x: Any) -> bool:
    """Whether what an operation reads is a value written into the program, not a variable."""
    return isinstance(x, _core().Literal)


Kind = Literal["plain", "call", "checkpoint", "custom", "scan", "opaque"]
"""What an operation does with the program inside it: nothing, it has none; runs it; runs it
again in the backward pass; has derivatives of its own for it; repeats it; or something else."""


_KINDS: dict[str, tuple[Kind, str]] = {
    "jit": ("call", "jaxpr"),
    "closed_call": ("call", "call_jaxpr"),
    "remat2": ("checkpoint", "jaxpr"),
    "custom_jvp_call": ("custom", "call_jaxpr"),
    "custom_vjp_call": ("custom", "call_jaxpr"),
    "scan": ("scan", "jaxpr"),
    "RematTraced": ("checkpoint", "jaxpr"),  # This and the next ones: see `_own_parameters`.
    "CustomJVPTraced": ("custom", "traced"),
    "CustomVJPTraced": ("custom", "traced"),
}


def inner_program(equation: Any) -> tuple[Kind, Any]:
    """The kind of an equation, and the closed program that belongs to that kind.

    A program that does not take what the equation reads is of no known kind: it is opaque.
    """
    kind, key = _KINDS.get(operation_name(equation), ("opaque", None))
    params = parameters(equation)
    program = None if key is None else as_program(params[key])
    if program is not None and len(program[0].invars) == len(equation.invars):
        return kind, closed(*program)
    return ("opaque" if any(map(_holds_program, params.values())) else "plain"), None


def reads_reference(equation: Any) -> bool:
    """Whether an operation reads or writes a mutable array, as those of `jax.new_ref` are."""
    return any(type(v.aval).__name__ == "AbstractRef" for v in equation.invars)


def equations_inside(x: Any) -> Iterator[Any]:
    """Yield all equations of the programs in `x`, however deep; each program is walked once.

    `x` is a program, an equation, or a tuple or list of these.
    """
    pending, seen = [x], set[int]()
    while pending:
        x = pending.pop()
        if isinstance(x, tuple | list):
            pending += x
        elif isinstance(x, _core().JaxprEqn):
            pending += parameters(x).values()
        program = as_program(x)
        if program is not None and id(program[0]) not in seen:
            seen.add(id(program[0]))
            yield from program[0].eqns
            pending += program[0].eqns


def callback_name(equation: Any) -> str | None:
    """The Python function that an operation calls for its result; None if it calls none."""
    name = equation.primitive.name
    if not name.endswith("_callback") or name == "debug_callback":
        return None
    found = equation.params.get("callback")
    function = getattr(found, "callback_func", found)
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _holds_program(x: Any) -> bool:
    return any(map(_holds_program, x)) if isinstance(x, tuple | list) else as_program(x) is not None


class ScanForm(NamedTuple):
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
        if "ft_in" in params:  # JAX 0.11: the inputs as three groups, the outputs as two.
            consts, carry, _ = params["ft_in"].unpack()
            num_consts, num_carry = len(consts), len(carry)
        else:
            num_consts, num_carry = params["num_consts"], params["num_carry"]
        return cls(num_consts, num_carry, params["length"], params["reverse"], params["unroll"])


def checkpointed(equation: Any, fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, checkpointed as the equation is."""
    params = parameters(equation)
    prevent_cse = params.get("prevent_cse", True)  # A flag, or one for each input.
    prevent_cse = prevent_cse if isinstance(prevent_cse, bool) else any(prevent_cse)
    return jax.checkpoint(fun, prevent_cse=prevent_cse, policy=params["policy"])


def run_equation(equation: Any, inputs: Sequence[Any]) -> list[Any]:
    """What an equation of a jaxpr computes from other inputs than those it was traced with."""
    with equation.ctx.manager:
        return _bound(equation.primitive, inputs, equation.params)


def _bound(primitive: Any, inputs: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    results = primitive.bind(*inputs, **primitive.get_bind_params(params))
    return list(results) if primitive.multiple_results else [results]


def run_now(equation: Any, inputs: Sequence[Any]) -> list[Any] | None:
    """What an equation computes, also while something else is traced; None if that cannot be."""
    if equation.effects or any(isinstance(x, jax.core.Tracer) for x in inputs):
        return None
    if equation.primitive.name in ("pvary", "pcast"):  # They change types, inside of `shard_map`.
        return list(inputs)
    # Inside `shard_map`, what is made is on the devices of a mesh. Here it is a mere value.
    params = {k: None if isinstance(x, Sharding) else x for k, x in equation.params.items()}
    nowhere = jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    with equation.ctx.manager, nowhere, jax.ensure_compile_time_eval():
        return _bound(equation.primitive, inputs, params)


def function_name(equation: Any) -> str:
    """The name of the function that an equation with a program inside was made from."""
    _, inner = inner_program(equation)
    info = getattr(getattr(inner, "jaxpr", None), "debug_info", None)
    name = parameters(equation).get("name", operation_name(equation))
    return getattr(info, "func_name", None) or name


def passes_through(params: dict[str, Any]) -> bool:
    """Whether an operation is a function with custom derivatives that computes nothing."""
    called = _called(params)
    return called is not None and not called.eqns


def returns_complex(primitive: Any, avals: Iterable[Any], params: dict[str, Any]) -> bool:
    """Whether an operation puts out complex numbers, for operands of these types."""
    called = _called(params)
    if called is not None:
        outputs = [v.aval for v in called.outvars]
    else:
        outputs, _ = primitive.abstract_eval(*avals, **params)
        outputs = outputs if primitive.multiple_results else [outputs]
    dtypes = [x.dtype for x in outputs if hasattr(x, "dtype")]
    return any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes)


def _called(params: dict[str, Any]) -> Any:
    """The jaxpr of a function with custom derivatives, if these are the parameters of one."""
    params = _own_parameters(params)
    program = as_program(params.get("call_jaxpr", params.get("traced")))
    return None if program is None else program[0]


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
    """What besides its arguments decides how a function is traced; to be compared only."""
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
    """Whether a function does anything besides computing its result, by its trace."""
    return bool(jax.make_jaxpr(fun)().effects)


# Keys of traced programs: equal only where two jaxprs compute the same, operation by operation.
#
# A compiled program may be used again only for a function that is still what it was. Python cannot
# tell whether it is: a method may read attributes that have changed, a closure a variable that was
# assigned to. So a function is traced again, and its jaxpr compared. Variables count by the order
# in which they appear, literals with all their bits (`0.0` is not `-0.0`), numbers by type (`1` is
# not `True`). The constants of the program itself do not count, only their types, since a compiled
# program takes them as arguments; those of programs inside it are built in, and do count.
#
# Two kinds of Python functions are part of a program. A *callback* is called while the compiled
# program runs. It is compared as a function: by its code and by what it closes over. A *derivative
# rule* is called while derivatives are traced, and may read anything then. JAX's own rules are
# known to read nothing that changes; of any other nothing is known before it has been traced.


def program_key(program: Any, *, differentiated: bool) -> Hashable | None:
    """A key for a closed jaxpr, without the values of its constants.

    Args:
        program: the closed jaxpr.
        differentiated: whether it will be differentiated, so that derivative rules count, or only
            be compiled as it is.

    Returns:
        Something that equals what another program gives if both compute the same from constants
        and arguments. None if a derivative rule in it is a Python function that is not JAX's own.
    """
    jaxpr, _ = as_program(program) or (program, ())
    try:
        return _Keys(differentiated).jaxpr(jaxpr)
    except _UnknownRule:
        return None


class _UnknownRule(Exception):
    """A derivative rule whose results cannot be known without tracing it."""


class _Keys:
    """Keys for what is in a program."""

    def __init__(self, differentiated: bool) -> None:
        self._differentiated = differentiated
        # A function that is called twice is one jaxpr in two places, and so is what it calls.
        self._known: dict[int, Hashable] = {}

    def jaxpr(self, jaxpr: Any) -> Hashable:
        """A key for a jaxpr, up to the names of its variables."""
        numbers: dict[Any, int] = {}

        def read(atom: Any) -> Hashable:
            if is_literal(atom):
                return atom.aval, self.value(atom.val)
            return numbers[atom]

        def written(variable: Any) -> Hashable:
            numbers[variable] = len(numbers)
            return variable.aval

        inputs = [tuple(map(written, of)) for of in (jaxpr.constvars, jaxpr.invars)]
        equations = []
        for eqn in jaxpr.eqns:
            is_callback = "callback" in eqn.primitive.name
            params = [(k, self._param(x, is_callback)) for k, x in parameters(eqn).items()]
            reads = tuple(map(read, eqn.invars))
            # Contexts are interned. They have settings that change what an operation computes.
            writes = tuple(map(written, eqn.outvars))
            kind = eqn.primitive, operation_name(eqn)
            equations.append((kind, tuple(params), eqn.ctx, reads, writes))
        return (*inputs, *equations, tuple(map(read, jaxpr.outvars)))

    def _param(self, x: Any, is_callback: bool) -> Hashable:
        if is_callback or not _is_function(x):
            return self.value(x)
        if not self._differentiated:
            # It has been applied, or it will not be. What is compiled are the programs beside it.
            return "function"
        return _rule_key(x)

    def value(self, x: Any) -> Hashable:
        """A key for anything that can be a parameter of an operation."""
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
        if hasattr(x, "dtype") and hasattr(x, "__array__"):  # NumPy's, and the values of literals.
            array = np.asarray(x)
            return "array", array.dtype, array.shape, array.tobytes()
        inside = self._inside(x)
        if inside is not None:
            return type(x), *inside
        if isinstance(x, types.FunctionType):
            return _Function(x)
        return value_key(x)

    def _inside(self, x: Any) -> Sequence[Hashable] | None:
        """The keys of what a container holds, or None if `x` is not one."""
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


def value_key(x: Any) -> Hashable:
    """Return a key for a value: numbers by type and bits, what cannot be hashed by identity."""
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
    """A key that equals only one of the very same object, which it keeps alive."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@final
class _Alive:
    """A key that equals only one of the very same array, and that does not keep it alive."""

    def __init__(self, array: Any) -> None:
        self._array, self._hash = weakref.ref(array), id(array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Alive) and self._array() is other._array() is not None

    def __hash__(self) -> int:
        return self._hash


@final
class _Function:
    """A key for a Python function that equals one that does the same now.

    That is a function of the same code, globals and defaults that closes over the same objects, or
    equal numbers. What they close over is looked at when they are compared, since it is then that
    one is to be called in place of the other.
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
    # JAX does not change what its own functions close over. Of others, a list is that very list.
    open_containers = _is_of_jax(one.__module__)
    have_attributes = bool(vars(one) or vars(two))
    return not have_attributes and _are_same(_held_by(one), _held_by(two), open_containers)


def _are_same(a: Any, b: Any, open_containers: bool) -> bool:
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


def _held_by(function: types.FunctionType) -> tuple[Any, ...]:
    """All that a function refers to besides its globals."""
    keywords = sorted((function.__kwdefaults__ or {}).items())
    contents = []
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:  # It has not been assigned to yet.
            contents.append(None)
    return function.__defaults__ or (), tuple(keywords), *contents


def _is_function(x: Any) -> bool:
    """Whether `x` is called in Python: a function, or something made of one."""
    if isinstance(x, type):
        return False
    if hasattr(x, "call_wrapped") or hasattr(x, "__wrapped__"):
        return True
    # JAX has things that can be called and are no functions, such as a mesh.
    return callable(x) and (isinstance(x, _FUNCTIONS) or not _is_of_jax(type(x).__module__))


_FUNCTIONS = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    functools.partial,
)


def _rule_key(rule: Any) -> Hashable:
    """A key for a derivative rule of JAX's own: the code of all functions that it is made of."""
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
        # What else there is are types, and where JAX will store results.
        pending += parts or ()
    return tuple(found)


def _parts(x: Any) -> Sequence[Any] | None:
    """What a function or a tuple is made of, or None if it is neither."""
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
