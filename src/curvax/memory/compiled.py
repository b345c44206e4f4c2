"""Functions that take a memory budget in place of a size, planned and compiled once.

`check_budget` validates the arguments. `plan_call` finds the size for a call: it looks the plan up,
or makes it, and returns the program that was compiled and measured. `compile_call` does the same
for a known size. Inside a transformation, where nothing can be run yet, `plan_call` only plans the
size for the given shapes, and the function of that size becomes part of the outer program.

A compiled program is reused only if the function still computes the same. So the function is
traced at each call, and programs are cached by what was traced (`Program.key`), without the arrays
that it closed over: these are arguments. With `is_settled` the caller guarantees that the cache key
determines the program, and the function is not traced.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeAlias, TypeVar, get_args

import jax
import numpy as np

from curvax import _jax
from curvax._errors import where
from curvax._tree import as_key
from curvax._types import Array, Fun, PyTree
from curvax.memory.budget import Budget, parse_memory
from curvax.memory.plan import ADVICE, MemoryPlan, plan_at, plan_fast_size, plan_size
from curvax.memory.usage import Executable, Program

T = TypeVar("T")

MOST = 64
"""Maximum number of values for a function; the least recently used are dropped."""


class FunctionCache(Generic[T]):
    """A cache of values by function and key, which does not keep the function alive.

    Functions are compared by identity. Bound methods are compared by the identity of their object,
    since each attribute access creates a new one. Identity bounds the lifetime of a value; it does
    not say what the function computes, which may depend on variables that have changed. That is
    the purpose of the key. Values must not refer to the function, or it would never be collected.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[object], dict[Hashable, T]]] = {}

    def get(self, fun: Fun, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value for this function and key, made by `make` if it is not cached."""
        value = self.find(fun, key)
        if value is None:
            value = make()
            self.keep(fun, key, value)
        return value

    def find(self, fun: Fun, key: Hashable) -> T | None:
        """Return the cached value for this function and key, or None."""
        owner, method = _owner_and_method(fun)
        entries = self._entries_of(owner) or {}
        full_key = method, key
        if full_key not in entries:
            return None
        entries[full_key] = value = entries.pop(full_key)  # Most recently used last.
        return value

    def keep(self, fun: Fun, key: Hashable, value: T) -> None:
        """Cache a value for this function and key, if the function supports weak references."""
        owner, method = _owner_and_method(fun)
        entries = self._entries_of(owner)
        if entries is None:
            return
        entries[method, key] = value
        while len(entries) > MOST:
            del entries[next(iter(entries))]

    def _entries_of(self, owner: object) -> dict[Hashable, T] | None:
        """Return the values cached for an object, None if it does not support weak references."""
        identity = id(owner)
        if identity not in self._entries:
            try:
                reference = weakref.ref(owner, lambda _: self._entries.pop(identity, None))
            except TypeError:
                return None
            self._entries[identity] = reference, {}
        return self._entries[identity][1]


def _owner_and_method(fun: Fun) -> tuple[object, Fun | None]:
    """Return the object that bounds the lifetime of a function, and the method if it is bound."""
    return (fun.__self__, fun.__func__) if inspect.ismethod(fun) else (fun, None)


PlanFor: TypeAlias = Literal["value", "gradient"]
"""The program that a budget is for: the function itself, or its reverse-mode derivative."""

Objective: TypeAlias = Literal["memory", "time"]
"""What to choose among sizes that fit: the largest, or the one that is expected to be fastest."""


@dataclass(frozen=True)
class BudgetRequest:
    """A user-supplied memory budget, and what it is for."""

    budget: Budget
    plan_for: PlanFor
    objective: Objective
    advice: str
    """The end of the error message if nothing fits."""
    is_multi_process: bool
    """Whether the program is multi-process. All processes then use the plan of the first."""


def check_budget(
    memory_budget: Budget | None,
    sizes: Mapping[str, int | None],
    *,
    plan_for: PlanFor = "value",
    objective: Objective = "memory",
    advice: str = ADVICE,
    is_multi_process: bool = False,
) -> BudgetRequest | None:
    """Check that a budget or one of the named sizes is given, not both.

    Arguments:
        memory_budget: The user-supplied budget.
        sizes: The user-supplied sizes that a budget replaces, by parameter name.
        plan_for: The program that must fit the budget.
        objective: What to choose among sizes that fit.
        advice: The end of the error message if nothing fits.
        is_multi_process: Whether the program is multi-process.

    Returns:
        The request, None without a budget.
    """
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
    """Record the plans of all calls with a memory budget that are made inside the `with` block.

    Yields:
        A list, to which each call appends its `MemoryPlan`.

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
"""The sizes planned for a function, the latest first; several if what it computes has changed."""

MOST_SIZES = 4
"""Maximum number of such sizes."""


def compile_call(
    fun: Fun,
    call: Fun,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    *,
    key: Hashable,
    is_settled: bool = False,
) -> Fun:
    """Return `call` compiled for arguments of these shapes, from the cache if possible.

    Arguments:
        fun: The user-supplied function behind `call`, which bounds the lifetime of the cache entry.
        call: The function to compile.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        key: What `call` depends on besides `fun` and the shapes of the arguments.
        is_settled: Whether key and shapes determine what `call` computes. Otherwise it is traced
            at each call to find out.

    Returns:
        A function of arguments of these shapes: `call` itself inside a transformation.
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
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    sizes: Sequence[int],
    *,
    key: Hashable = (),
    is_settled: bool = False,
) -> Fun:
    """Return `build(size)`, compiled for arguments of these shapes, at the planned size.

    Arguments:
        request: The memory budget.
        fun: The user-supplied function behind `build`, which bounds the lifetime of cache entries.
        build: Return the function to compile, given a size.
        args: Positional arguments of that function.
        kwargs: Keyword arguments of that function.
        sizes: The sizes to choose from, ascending.
        key: What `build` depends on besides `fun` and the shapes of the arguments.
        is_settled: Whether key and shapes determine what `build(size)` computes. Otherwise it is
            traced at each call to find out.

    Returns:
        A function of arguments of these shapes: `build(size)` itself inside a transformation.
    """
    given = _Arguments.of(args, kwargs)
    key = key, request, type(request.budget), given.key, tuple(sizes[-1:]), _jax.tracing_context()
    trace = functools.cache(lambda size: _traced(build(size), given))
    # If the function may have changed, the program at the planned size identifies what it computes.
    key_at = lambda size: (key, size) if is_settled else ((key, size), trace(size).key)

    planned = _sizes.find(fun, key) or []
    cached = (_plans.find(fun, key_at(size)) for size in planned)
    plan = next((plan for plan in cached if plan is not None), None)
    if plan is None:
        plan = _make_plan(request, trace, sizes)
        size, executable = plan.batch_size, plan.executable
        plan = replace(plan, executable=None)
        _plans.keep(fun, key_at(size), plan)
        _sizes.keep(fun, key, [size, *(s for s in planned if s != size)][:MOST_SIZES])
        # Tracers must not outlive their transformation, and a gradient is not what will be called.
        if request.plan_for == "value" and executable is not None and executable.runs:
            kept = executable if is_settled else executable.without_consts()
            _executables.keep(fun, key_at(size), kept)
    record(plan)
    size = plan.batch_size
    if given.are_traced:
        return build(size)
    executable = _compiled(fun, (key, size), lambda: trace(size), is_settled)
    return build(size) if executable is None else _on_arrays(executable)


def _make_plan(
    request: BudgetRequest, trace: Callable[[int], Program], sizes: Sequence[int]
) -> MemoryPlan:
    """Return the plan for a request; in a multi-process program, that of the first process."""

    def compile(size: int) -> Executable:
        program = trace(size)
        return (program.gradient() if request.plan_for == "gradient" else program).compile()

    broadcast = _jax.broadcast_from_first if request.is_multi_process else lambda value: value
    # As two integers of at most 32 bits: without x64, JAX would truncate wider ones.
    upper, lower = broadcast(divmod(parse_memory(request.budget), 1 << 30))
    budget = (int(upper) << 30) + int(lower)
    plan_with = plan_fast_size if request.objective == "time" else plan_size
    plan = plan_with(compile, sizes, budget, request.advice)
    size = int(broadcast(plan.batch_size))
    return plan if size == plan.batch_size else plan_at(plan, size, compile(size))


def _compiled(
    fun: Fun, key: Hashable, trace: Callable[[], Program], is_settled: bool
) -> Executable | None:
    """Return the executable for a key and, unless it is settled, for the current trace.

    None for a program that closes over tracers, which cannot be run by itself.
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
    """Positional and keyword arguments, with their arrays separated from the other leaves."""

    arrays: tuple[Array, ...]
    key: Hashable
    """The pytree structure, the shapes of the arrays, and the other leaves."""
    rebuild: Callable[[Sequence[Array]], tuple[tuple[PyTree, ...], dict[str, PyTree]]]
    """Return `args` and `kwargs` with other arrays in place of these."""

    @classmethod
    def of(cls, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> "_Arguments":
        leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)))
        indices = [i for i, x in enumerate(leaves) if _is_array(x)]
        arrays = _arrays(leaves)
        shapes = tuple(map(_jax.shape_of, arrays))
        others = tuple((i, as_key(x)) for i, x in enumerate(leaves) if i not in indices)

        def rebuild(given: Sequence[Array]) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
            filled = list(leaves)
            for i, array in zip(indices, given, strict=True):
                filled[i] = array
            return jax.tree.unflatten(structure, filled)

        weak = tuple(shape.weak_type for shape in shapes)
        return cls(arrays, (structure, shapes, weak, others), rebuild)

    @property
    def are_traced(self) -> bool:
        """Whether any argument is a tracer, so that nothing can be run yet."""
        return any(map(_jax.is_tracer, self.arrays))


def _traced(fun: Fun, given: _Arguments) -> Program:
    """Trace `fun` as a function of the arrays alone."""

    def call(*arrays: Array) -> PyTree:
        args, kwargs = given.rebuild(arrays)
        return fun(*args, **kwargs)

    return Program.of(call, given.arrays)


def _on_arrays(executable: Executable) -> Fun:
    """Return an executable as a function of arguments, whose arrays are passed to it."""

    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return executable(*_arrays(jax.tree.leaves((args, kwargs))))

    return run


def _arrays(leaves: Sequence[PyTree]) -> tuple[Array, ...]:
    return tuple(map(jax.numpy.asarray, filter(_is_array, leaves)))


def _is_array(x: PyTree) -> bool:
    """Return whether `x` is an array that a program can take, unlike one of strings or objects."""
    return isinstance(x, jax.Array) or (isinstance(x, np.ndarray) and x.dtype.kind not in "OSUMm")
