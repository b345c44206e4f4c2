"""Programs: traced functions, the operations in them and the programs inside these."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.core
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Sharding

__all__ = [
    "Kind",
    "ScanForm",
    "as_function",
    "as_program",
    "callback_name",
    "checkpointed",
    "closed",
    "equations_inside",
    "function_name",
    "inner_program",
    "is_literal",
    "operation_name",
    "parameters",
    "passes_through",
    "reads_reference",
    "returns_complex",
    "run_equation",
    "run_now",
]


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
