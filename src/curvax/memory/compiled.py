"""Functions that take a memory budget in place of a size, planned and compiled once.

`check_budget` validates what the user gave. `plan_call` finds the size for a call: it looks the
plan up, or makes it, and returns the very program that was compiled and checked. `compile_call`
does the same where the size is known. Under an outer transformation, where there is nothing to run
yet, only the size is planned, for shapes like these, and the function of that size becomes part of
the outer program.

A compiled program is used again only if it is the program of the function as it is now. So the
function is traced at each call, and programs are kept by what was traced (`Program.key`), without
the arrays that it closed over: these are arguments. Whoever knows what the program is without
tracing it says so with `is_settled`.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeAlias, TypeVar, get_args

import jax
import numpy as np

from curvax import _jax
from curvax._errors import where
from curvax._tree import as_key
from curvax._types import Fun
from curvax.memory.budget import Budget, parse_memory
from curvax.memory.plan import ADVICE, MemoryPlan, plan_at, plan_fast_size, plan_size
from curvax.memory.usage import Executable, Program

T = TypeVar("T")

MOST = 64
"""Maximum number of values for a function; the least recently used are dropped."""


class FunctionCache(Generic[T]):
    """Values by function and key.

    Functions are told apart by identity, and bound methods by that of their object, since Python
    makes a new one each time it is asked for. That says how long to keep something, not what a
    function does: it may read what has changed since. Keys say what it does. What is kept must not
    refer to the function: it would never be let go.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Any, dict[Hashable, T]]] = {}

    def get(self, fun: Callable[..., Any], key: Hashable, make: Callable[[], T]) -> T:
        """Return the value for this function and key; make it if there is none yet."""
        value = self.find(fun, key)
        if value is None:
            value = make()
            self.keep(fun, key, value)
        return value

    def find(self, fun: Callable[..., Any], key: Hashable) -> T | None:
        """Return the value for this function and key, or None."""
        owner, method = _owner(fun)
        entries = self._of(owner) or {}
        full_key = method, key
        if full_key not in entries:
            return None
        entries[full_key] = value = entries.pop(full_key)  # Most recently used last.
        return value

    def keep(self, fun: Callable[..., Any], key: Hashable, value: T) -> None:
        """Keep a value for this function and key, if anything can be kept for it."""
        owner, method = _owner(fun)
        entries = self._of(owner)
        if entries is None:
            return
        entries[method, key] = value
        while len(entries) > MOST:
            del entries[next(iter(entries))]

    def _of(self, owner: Any) -> dict[Hashable, T] | None:
        """The values kept for an object, or None if nothing can be kept for it."""
        number = id(owner)
        if number not in self._entries:
            try:
                reference = weakref.ref(owner, lambda _: self._entries.pop(number, None))
            except TypeError:
                return None
            self._entries[number] = reference, {}
        return self._entries[number][1]


def _owner(fun: Callable[..., Any]) -> tuple[Any, Any]:
    """The object that a function lives as long as, and which of its methods it is."""
    return (fun.__self__, fun.__func__) if inspect.ismethod(fun) else (fun, None)


PlanFor: TypeAlias = Literal["value", "gradient"]
"""Which program a budget is for: the function itself, or the gradient through it."""

Objective: TypeAlias = Literal["memory", "time"]
"""What to choose among sizes that fit: the largest, or the one that is expected to be fastest."""


@dataclass(frozen=True)
class BudgetRequest:
    """A memory budget as the user gave it, and what it is for."""

    budget: Budget
    plan_for: PlanFor
    objective: Objective
    advice: str
    is_multi_process: bool
    """Whether several processes run the program together. They must then do as the first does."""


def check_budget(
    memory_budget: Budget | None,
    sizes: Mapping[str, Any],
    *,
    plan_for: PlanFor = "value",
    objective: Objective = "memory",
    advice: str = ADVICE,
    is_multi_process: bool = False,
) -> BudgetRequest | None:
    """Check that there is a budget or one of the named sizes, not both. None is no budget."""
    for name, choice, kinds in (
        ("plan_for", plan_for, get_args(PlanFor)),
        ("objective", objective, get_args(Objective)),
    ):
        if choice not in kinds:
            raise ValueError(f"{where()}: {name} must be one of {kinds}, got {choice!r}.")
    if memory_budget is None:
        if objective != "memory":
            raise ValueError(
                f"{where()}: objective={objective!r} chooses among sizes that fit a budget; give "
                f"memory_budget as well."
            )
        return None
    for name, size in sizes.items():
        if size is not None:
            raise ValueError(
                f"{where()}: give {name} or memory_budget, not both; got {name}={size!r} and "
                f"memory_budget={memory_budget!r}."
            )
    parse_memory(memory_budget)
    return BudgetRequest(memory_budget, plan_for, objective, advice, is_multi_process)


_recorders: ContextVar[tuple[list[MemoryPlan], ...]] = ContextVar("recorders", default=())


def record(plan: MemoryPlan) -> None:
    """Append a plan to the list of each active `recorded_plans`."""
    for plans in _recorders.get():
        plans.append(plan)


@contextmanager
def recorded_plans() -> Generator[list[MemoryPlan]]:
    """Collect the plans behind all calls with a memory budget inside the block.

    Examples:
        >>> import curvax
        >>> import jax.numpy as jnp
        >>> with curvax.recorded_plans() as plans:
        ...     y = curvax.chunked_vmap(jnp.sin, memory_budget="1MB")(jnp.ones((100, 100)))
        >>> plans[0].batch_size
        100
    """
    plans: list[MemoryPlan] = []
    token = _recorders.set((*_recorders.get(), plans))
    try:
        yield plans
    finally:
        _recorders.reset(token)


_plans: FunctionCache[MemoryPlan] = FunctionCache()
_executables: FunctionCache[Executable] = FunctionCache()
_sizes: FunctionCache[list[int]] = FunctionCache()
"""The sizes that were planned for a function, which is not always the same; the last first."""

MOST_SIZES = 4


def compile_call(
    fun: Fun,
    call: Fun,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    key: Hashable,
    is_settled: bool = False,
) -> Fun:
    """Return `call` compiled for arguments like these, once for what it computes and for the key.

    What is kept does not outlive `fun`, of which `call` is made. With `is_settled`, the key and the
    shapes of the arguments say what it computes, and it is not traced to know.
    """
    given = _Arguments.of(args, kwargs)
    if given.are_traced:
        return call
    key = key, given.key, _jax.tracing_context()
    executable = _compiled(fun, key, lambda: _traced(call, given), is_settled)
    return call if executable is None else _on_arrays(executable)


def plan_call(
    request: BudgetRequest,
    fun: Fun,
    build: Callable[[int], Fun],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    sizes: Sequence[int],
    *,
    key: Hashable = (),
    is_settled: bool = False,
) -> Fun:
    """Return `build(size)`, compiled for arguments like these, at the size that is planned.

    What was planned is kept as long as `fun` lives, for what is computed, the shapes of the
    arguments and `key`, which must tell apart all that the sizes depend on besides them. With
    `is_settled` the key and the shapes say what is computed, and it is not traced to know.
    """
    given = _Arguments.of(args, kwargs)
    key = key, request, type(request.budget), given.key, tuple(sizes[-1:]), _jax.tracing_context()
    trace = functools.cache(lambda size: _traced(build(size), given))
    # Of a function that may have changed, the program at the planned size says what it does.
    key_at = lambda size: (key, size) if is_settled else ((key, size), trace(size).key)

    planned = _sizes.find(fun, key) or []
    found = (_plans.find(fun, key_at(size)) for size in planned)
    plan = next((plan for plan in found if plan is not None), None)
    if plan is None:
        plan = _planned(request, trace, sizes)
        size, executable = plan.batch_size, plan.executable
        plan = replace(plan, executable=None)
        _plans.keep(fun, key_at(size), plan)
        _sizes.keep(fun, key, [size, *(s for s in planned if s != size)][:MOST_SIZES])
        # Tracers must not outlive their transformation. A gradient is not what will be called.
        if request.plan_for == "value" and executable is not None and executable.runs:
            kept = executable if is_settled else executable.without_consts()
            _executables.keep(fun, key_at(size), kept)
    record(plan)
    size = plan.batch_size
    if given.are_traced:
        return build(size)
    executable = _compiled(fun, (key, size), lambda: trace(size), is_settled)
    return build(size) if executable is None else _on_arrays(executable)


def _planned(
    request: BudgetRequest, trace: Callable[[int], Program], sizes: Sequence[int]
) -> MemoryPlan:
    """Make the plan; of several processes, all make that of the first."""

    def compile(size: int) -> Executable:
        program = trace(size)
        return (program.gradient() if request.plan_for == "gradient" else program).compile()

    sent = _jax.sent_by_first if request.is_multi_process else lambda number: number
    # As two numbers of 32 bits, which is what processes can send each other.
    upper, lower = sent(divmod(parse_memory(request.budget), 1 << 30))
    budget = (int(upper) << 30) + int(lower)
    plan_with = plan_fast_size if request.objective == "time" else plan_size
    plan = plan_with(compile, sizes, budget, request.advice)
    size = int(sent(plan.batch_size))
    return plan if size == plan.batch_size else plan_at(plan, size, compile(size))


def _compiled(
    fun: Fun, key: Hashable, trace: Callable[[], Program], is_settled: bool
) -> Executable | None:
    """Return the executable for a key and, unless that is settled, for what is traced now.

    It is None for a program that closes over tracers, and so cannot be run by itself.
    """
    if is_settled:
        return _executables.get(fun, key, lambda: trace().compile())
    program = trace()
    if not program.runs:
        return None
    executable = _executables.get(
        fun, (key, program.key), lambda: program.compile().without_consts()
    )
    return executable.with_consts(program.consts)


@dataclass(frozen=True)
class _Arguments:
    """Positional and keyword arguments, of which the arrays may be replaced by others."""

    arrays: tuple[Any, ...]
    key: Hashable
    """The shapes of the arrays, and everything else."""
    rebuild: Callable[[Sequence[Any]], tuple[Any, Any]]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "_Arguments":
        leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)))
        places = [i for i, x in enumerate(leaves) if _is_array(x)]
        arrays = _arrays(leaves)
        shapes = tuple(map(_jax.shape_of, arrays))
        others = tuple((i, as_key(x)) for i, x in enumerate(leaves) if i not in places)

        def rebuild(given: Sequence[Any]) -> tuple[Any, Any]:
            filled = list(leaves)
            for i, array in zip(places, given, strict=True):
                filled[i] = array
            return jax.tree.unflatten(structure, filled)

        weak = tuple(shape.weak_type for shape in shapes)
        return cls(arrays, (structure, shapes, weak, others), rebuild)

    @property
    def are_traced(self) -> bool:
        """Whether some argument is a tracer, so that nothing can be run yet."""
        return any(map(_jax.is_tracer, self.arrays))


def _traced(fun: Fun, given: _Arguments) -> Program:
    """Trace `fun` as a function of the arrays alone."""

    def call(*arrays: Any) -> Any:
        args, kwargs = given.rebuild(arrays)
        return fun(*args, **kwargs)

    return Program.of(call, given.arrays)


def _on_arrays(executable: Executable) -> Fun:
    """Return an executable as a function of arguments, of which it takes the arrays."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return executable(*_arrays(jax.tree.leaves((args, kwargs))))

    return run


def _arrays(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(map(jax.numpy.asarray, filter(_is_array, leaves)))


def _is_array(x: Any) -> bool:
    """Whether `x` is an array that a program can take. Arrays of texts or objects are not."""
    return isinstance(x, jax.Array) or (isinstance(x, np.ndarray) and x.dtype.kind not in "OSUMm")
