"""Functions that take a memory budget in place of a size.

A `BudgetRequest` is what the user asked for. `run` calls a function whose size it plans: it looks
the plan up, or makes it; then it runs the very program that was compiled and checked. Under an
outer transformation, where there is nothing to run yet, only the size is planned, for shapes like
these, and the function of that size becomes part of the outer program.

A compiled program is used again only if it is the program of the function as it is now. So the
function is traced at each call, and programs are kept by what was traced (`Program.key`), without
the arrays that it closed over: these are arguments. Whoever knows what the program is without
tracing it says so with `is_settled`.
"""

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
from curvax._tree import as_key
from curvax._types import Fun, PyTree
from curvax.memory.budget import Budget, parse_memory
from curvax.memory.plan import ADVICE, MemoryPlan, plan_at, plan_size
from curvax.memory.timing import fastest
from curvax.memory.usage import Executable, Program

__all__ = [
    "BudgetRequest",
    "FunctionCache",
    "Objective",
    "PlanFor",
    "recorded_plans",
    "run_compiled",
]


# What was made for a function, kept as long as the function lives.
#
# Functions are told apart by identity, and bound methods by that of their object, since Python
# makes a new one each time it is asked for. That says how long to keep something, not what a
# function does: it may read what has changed since. Keys say what it does, see
# `_Call`. What is kept must not refer to the function: it would never be let go.

T = TypeVar("T")

MOST = 64
"""So many values are kept for a function, those that were last asked for."""


class FunctionCache(Generic[T]):
    """Values by function and key."""

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
        entries[full_key] = value = entries.pop(full_key)  # As the last.
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
"""What to choose among sizes that fit: the largest, or the fastest."""

Rehearsal: TypeAlias = Callable[[int], tuple[Fun, float]]
"""From a size, a function that does a part of the work, and which share of it."""

_recorders: ContextVar[tuple[list[MemoryPlan], ...]] = ContextVar("recorders", default=())


def record(plan: MemoryPlan) -> None:
    """Let whoever records plans know of one."""
    for plans in _recorders.get():
        plans.append(plan)


@contextmanager
def recorded_plans() -> Generator[list[MemoryPlan]]:
    """Collect the plans behind all calls with a memory budget inside of the block.

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


@dataclass
class _Kept:
    """What is kept for a function: its plan if it has one, and its compiled value if that runs."""

    plan: MemoryPlan | None
    value: Executable | None


_kept: FunctionCache[_Kept] = FunctionCache()
_sizes: FunctionCache[list[int]] = FunctionCache()
"""The sizes that were planned for a function, which is not always the same; the last first."""

MOST_SIZES = 4


def run_compiled(
    fun: Fun,
    call_with: Fun,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    key: Hashable,
    is_settled: bool = False,
) -> PyTree:
    """Call `call_with(*args, **kwargs)`, compiled once for what it computes, and for the key.

    What is kept does not outlive `fun`, of which `call_with` is made. With `is_settled`, the key
    and the shapes of the arguments say what it computes, and it is not traced to know.
    """
    call = _Call.of(args, kwargs)
    if call.is_traced:
        return call_with(*args, **kwargs)
    key = key, call.key, _jax.tracing_context()
    if is_settled:
        kept = _kept.get(fun, key, lambda: _Kept(None, call.compile(call_with)))
        return call_with(*args, **kwargs) if kept.value is None else kept.value(*call.leaves)
    program = call.program(call_with)
    if not program.runs:
        return call_with(*args, **kwargs)
    kept = _kept.get(
        fun, (key, program.key), lambda: _Kept(None, program.compile().without_consts())
    )
    assert kept.value is not None
    return kept.value.with_consts(program.consts)(*call.leaves)


@dataclass(frozen=True)
class BudgetRequest:
    """A memory budget as the user gave it, and what it is for."""

    budget: Budget
    plan_for: PlanFor
    objective: Objective
    where: str
    advice: str = ADVICE
    is_shared: bool = False

    @classmethod
    def of(
        cls,
        memory_budget: Budget | None,
        sizes: Mapping[str, Any],
        where: str,
        *,
        plan_for: PlanFor = "value",
        objective: Objective = "memory",
        advice: str = ADVICE,
        is_shared: bool = False,
    ) -> "BudgetRequest | None":
        """Check what the user gave: a budget, or one of the named sizes. None is no budget.

        `is_shared` says that several processes run the program together and all make this request.
        They must then do as the first of them.
        """
        for name, choice, kinds in (
            ("plan_for", plan_for, get_args(PlanFor)),
            ("objective", objective, get_args(Objective)),
        ):
            if choice not in kinds:
                raise ValueError(f"{where}: {name} must be one of {kinds}, got {choice!r}.")
        if memory_budget is None:
            if objective != "memory":
                raise ValueError(
                    f"{where}: objective={objective!r} chooses among sizes that fit a budget; give "
                    f"memory_budget as well."
                )
            return None
        for name, size in sizes.items():
            if size is not None:
                raise ValueError(
                    f"{where}: give {name} or memory_budget, not both; got {name}={size!r} and "
                    f"memory_budget={memory_budget!r}."
                )
        parse_memory(memory_budget)
        return cls(memory_budget, plan_for, objective, where, advice, is_shared)

    def run(
        self,
        fun: Fun,
        build: Callable[[int], Fun],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        sizes: Sequence[int] | Callable[[], Sequence[int]],
        *,
        key: Hashable = (),
        is_settled: bool = False,
        rehearse: Rehearsal | None = None,
    ) -> PyTree:
        """Call `build(size)(*args, **kwargs)` at the planned size, one of `sizes`.

        What was planned is kept as long as `fun` lives, for what is computed, the shapes of the
        arguments and `key`, which must tell apart all that the sizes depend on beside them. With
        `is_settled` the key and the shapes say what is computed, and it is not traced to know.
        `rehearse` gives a part of the work to time in its place, and which share it is.
        """
        call = _Call.of(args, kwargs)
        largest = () if callable(sizes) else tuple(sizes[-1:])
        key = key, self, type(self.budget), call.key, largest, _jax.tracing_context()
        traced: dict[int, Program] = {}

        def program(size: int) -> Program:
            if size not in traced:
                traced[size] = call.program(build(size))
            return traced[size]

        def plan() -> _Kept:
            return self._plan(program, call, sizes() if callable(sizes) else sizes, rehearse)

        if is_settled:
            kept = _kept.get(fun, key, plan)
        else:
            kept = _found(fun, key, program) or _keep(fun, key, program, plan())
        assert kept.plan is not None
        record(kept.plan)
        size = kept.plan.batch_size
        if call.is_traced or (not is_settled and not program(size).runs):
            return build(size)(*args, **kwargs)
        if is_settled:
            kept.value = kept.value or call.compile(build(size))
            runs = kept.value
        else:
            kept.value = kept.value or program(size).compile().without_consts()
            runs = kept.value.with_consts(program(size).consts)
        return build(size)(*args, **kwargs) if runs is None else runs(*call.leaves)

    def _plan(
        self,
        value: Callable[[int], Program],
        call: "_Call",
        sizes: Sequence[int],
        rehearse: Rehearsal | None,
    ) -> _Kept:
        of_gradient = self.plan_for == "gradient"

        def program(size: int) -> Program:
            return value(size).gradient() if of_gradient else value(size)

        def timed(size: int) -> tuple[Program, float]:
            if rehearse is None or of_gradient:
                return program(size), 1.0
            part, share = rehearse(size)
            return call.program(part), share

        sent = _jax.sent_by_first if self.is_shared else lambda number: number
        budget = _joined(sent(_digits(parse_memory(self.budget))))
        plan = plan_size(program, sizes, budget, self.where, self.advice)
        if self.objective == "time":
            plan = fastest(plan, program, timed, None if of_gradient else call.leaves, sent)
        size = int(sent(plan.batch_size))
        if size != plan.batch_size:
            plan = plan_at(plan, size, program(size).compile())
        compiled = None if of_gradient else runnable(plan.executable)
        return _Kept(replace(plan, executable=None), compiled)


def _found(fun: Fun, key: Hashable, program: Callable[[int], Program]) -> _Kept | None:
    """What is kept for a function, as it is now and at one of the sizes that were planned."""
    for size in _sizes.find(fun, key) or ():
        kept = _kept.find(fun, (key, size, program(size).key))
        if kept is not None:
            return kept
    return None


def _keep(fun: Fun, key: Hashable, program: Callable[[int], Program], made: _Kept) -> _Kept:
    """Keep what was planned, without what the function closes over now."""
    assert made.plan is not None
    size = made.plan.batch_size
    if made.value is not None:
        made.value = made.value.without_consts()
    _kept.keep(fun, (key, size, program(size).key), made)
    others = [before for before in _sizes.find(fun, key) or () if before != size]
    _sizes.keep(fun, key, [size, *others][:MOST_SIZES])
    return made


def _digits(number: int) -> tuple[int, int]:
    """A number as two that processes can send each other, as 32 bits."""
    return divmod(number, 1 << 30)


def _joined(digits: Sequence[Any]) -> int:
    return (int(digits[0]) << 30) + int(digits[1])


def runnable(executable: Executable | None) -> Executable | None:
    """The executable if it can be run and kept; tracers must not outlive their transformation."""
    return executable if executable is not None and executable.runs else None


@dataclass(frozen=True)
class _Call:
    """The arguments of a call: its arrays, and all that is not an array."""

    leaves: tuple[Any, ...]
    key: Hashable
    rebuild: Callable[[Sequence[Any]], tuple[Any, Any]]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "_Call":
        leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)))
        places = [i for i, x in enumerate(leaves) if _is_array(x)]
        arrays = tuple(jax.numpy.asarray(leaves[i]) for i in places)
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
    def is_traced(self) -> bool:
        """Whether some argument is a tracer, so that nothing can be run yet."""
        return any(map(_jax.is_tracer, self.leaves))

    def program(self, fun: Fun) -> Program:
        """`fun`, of the arrays alone, traced."""

        def call(*arrays: Any) -> Any:
            args, kwargs = self.rebuild(arrays)
            return fun(*args, **kwargs)

        return Program.of(call, self.leaves)

    def compile(self, fun: Fun) -> Executable | None:
        """`fun` compiled, if it can be run by itself and there is something to run it on."""
        if self.is_traced:
            return None
        program = self.program(fun)
        return program.compile() if program.runs else None


def _is_array(x: Any) -> bool:
    """Whether `x` is an array that a program can take. Arrays of texts or objects are not."""
    return isinstance(x, jax.Array) or (isinstance(x, np.ndarray) and x.dtype.kind not in "OSUMm")
