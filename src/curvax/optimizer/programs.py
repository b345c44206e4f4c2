"""Compiled programs of the pure functions, which take over the buffers of what they replace."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from curvax import _jax
from curvax._types import PyTree
from curvax.memory.budget import MemoryBudgetError
from curvax.memory.compiled import recorded_plans
from curvax.memory.usage import MemoryUsage
from curvax.optimizer.devices import DataParallel

__all__ = ["Programs", "Sizes", "check_alive", "is_traced", "sizes_within"]


class Programs:
    """Runs functions, compiled when they are first run, or as they are.

    Arguments:
        is_compiled: whether to compile them.
        is_donating: whether they may use the buffers of those arguments that are to be replaced.
        devices: the devices among which batches are split; None for one device.
        has_budget: whether to compile them so that their account of memory is true.
    """

    def __init__(
        self, is_compiled: bool, is_donating: bool, devices: DataParallel | None, has_budget: bool
    ) -> None:
        self._is_compiled, self._is_donating, self._devices = is_compiled, is_donating, devices
        self._has_budget = has_budget
        self._known: dict[Any, Any] = {}

    def run(
        self,
        name: str,
        fun: Callable[..., Any],
        args: Mapping[str, Any],
        replaced: Sequence[str] = (),
        results: Any = None,
    ) -> Any:
        """`fun(*args.values())`, where some arguments are replaced by the result.

        On several devices the argument called "batch" is split. The results, of which some are
        called like arguments and others None, are placed as these are.
        """
        if not self._is_compiled:
            return fun(*args.values())
        program, args = self._made(name, fun, args, replaced, results)
        if self._devices is None:
            return program(*args.values())
        return self._devices.run(program, args)

    def usage(
        self, name: str, fun: Callable[..., Any], args: Mapping[str, Any], replaced: Sequence[str]
    ) -> MemoryUsage:
        """What `run` on one device will need. It runs what is compiled here, and not again."""
        program, args = self._made(name, fun, args, replaced, None)
        return MemoryUsage.of(program.lower(*args.values()).compile())

    def forget(self, name: str) -> None:
        """Let a program go."""
        self._known.pop(name, None)

    def _made(
        self,
        name: str,
        fun: Callable[..., Any],
        args: Mapping[str, Any],
        replaced: Sequence[str],
        results: Any,
    ) -> tuple[Any, Mapping[str, Any]]:
        """The program of this name, and its arguments as it takes them."""
        names = list(args)
        donated = tuple(k for k, x in enumerate(names) if x in replaced and self._is_donating)
        given = [jax.tree.map(_strong, x) if k in replaced else x for k, x in args.items()]
        args = dict(zip(names, _without_aliases(given, donated), strict=True))
        key: Any = name
        whole, options = fun, {}
        account = _jax.true_account(jax.default_backend()) if self._has_budget else None
        if self._devices is not None:
            args = self._devices.placed(name, args)
            options["out_shardings"] = self._devices.shardings(results, args)
            leaves, structure = jax.tree.flatten(options)
            key = name, structure, *leaves
            whole = self._devices.shard_map(fun, names, results)
        if key not in self._known:
            self._known[key] = jax.jit(
                whole, donate_argnums=donated, compiler_options=account, **options
            )
        return self._known[key], args

    def check(self, args: Mapping[str, Any]) -> None:
        """Check what can be told of arguments before any program is made for them."""
        if self._devices is not None:
            self._devices.check_plain(args)

    def inside(self, fun: Callable[..., Any], args: Mapping[str, Any], results: Any = None) -> Any:
        """As `run`, inside of a trace."""
        if self._devices is None or not self._is_compiled:
            return fun(*args.values())
        return self._devices.inside(fun, args, results)


def _strong(leaf: Any) -> Any:
    """Without the weak type of a Python number.

    What replaces it has none, and the next call would compile another program for that.
    """
    is_weak = isinstance(leaf, float) or getattr(leaf, "weak_type", False)
    return jnp.asarray(leaf, jnp.result_type(leaf)) if is_weak else leaf


def is_traced(tree: PyTree) -> bool:
    """Whether some of it has no value yet."""
    return any(map(_jax.is_tracer, jax.tree.leaves(tree)))


def check_alive(tree: PyTree) -> None:
    """No array was given away before."""
    leaves = jax.tree.leaves(tree)
    if any(isinstance(x, jax.Array) and not _jax.is_tracer(x) and x.is_deleted() for x in leaves):
        raise ValueError(
            "curvax.Optimizer: params or state were given to a step before, which took over their "
            "buffers. Go on with what that step returned; or say donate_buffers=False."
        )


def _without_aliases(args: Sequence[Any], donated: Sequence[int]) -> list[Any]:
    """The arguments, with copies of arrays that are there twice: a buffer is donated only once."""
    seen = {id(x) for k, arg in enumerate(args) if k not in donated for x in jax.tree.leaves(arg)}

    def own(leaf: Any) -> Any:
        if id(leaf) in seen:
            return jnp.array(leaf)
        seen.add(id(leaf))
        return leaf

    return [jax.tree.map(own, arg) if k in donated else arg for k, arg in enumerate(args)]


# The sizes of microbatches with which a whole step fits a memory budget.
#
# Gradient, statistics and exact products plan their microbatches themselves, each for what it is
# given. A step holds more: gradient and statistics beside each other, inverses, the state. How
# much more is known once it is compiled. So it is compiled with all that there is left for its
# parts, and only if it needs too much are the parts given less, by as much.

ATTEMPTS = 3
"""How often the parts are given less, before the smallest microbatches are tried."""

ADVICE = (
    "That is for microbatches of one example: the rest is the gradient, inverses and their "
    "temporaries, and the new state if donate_buffers=False. What else helps: donate_buffers=True, "
    "stagger_inverses=True, which inverts some layers at a time, and shard_state=True on several "
    "devices."
)

Sizes = Mapping[str, Any]


def sizes_within(budget: int, left: int, needs: Callable[[Sizes], int], where: str) -> Sizes:
    """The arguments by which a step of an optimizer stays within the budget.

    `left` is how much of it the parts can have, at most; `needs` compiles the step with some
    arguments and returns what a call of it adds.
    """
    known: dict[int, int] = {}
    for _ in range(ATTEMPTS):
        if left < 1:
            break
        sizes = {"microbatch_size": None, "memory_budget": left}
        try:
            with recorded_plans() as plans:
                needed = needs(sizes)
        except MemoryBudgetError:
            break
        if needed <= budget:
            return sizes
        known[min((plan.batch_size for plan in plans), default=1)] = needed
        left -= needed - budget + budget // 100
    one = {"microbatch_size": 1, "memory_budget": None}
    least = needs(one)
    if least > budget:
        raise MemoryBudgetError(budget, least, where, ADVICE)
    size = _between(least, known, budget)
    some = {"microbatch_size": size, "memory_budget": None}
    return some if size > 1 and needs(some) <= budget else one


def _between(least: int, known: Mapping[int, int], budget: int) -> int:
    """The size at which the line from one example to the smallest that is too large meets it."""
    if not known:
        return 1
    size = min(known)
    if size == 1 or known[size] <= least:
        return 1
    share = (budget - least) / (known[size] - least)
    return int(1 + 0.95 * share * (size - 1))
