"""Compiled programs of the pure functions, with donated buffers and within a memory budget."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from curvax import _jax
from curvax._errors import where
from curvax._types import PyTree
from curvax.memory.budget import MemoryBudgetError, parse_memory
from curvax.memory.compiled import recorded_plans
from curvax.memory.usage import MemoryUsage
from curvax.optimizer.data_parallel import DataParallel
from curvax.optimizer.step import KFAC


class Programs:
    """Runs functions, compiled when they are first run, or as they are.

    Arguments:
        is_compiled: Whether to compile them.
        is_donating: Whether to donate the buffers of arguments that are to be replaced.
        devices: The devices over which batches are sharded; None for one device.
        has_budget: Whether to compile them so that their memory analysis is exact.
    """

    def __init__(
        self, is_compiled: bool, is_donating: bool, devices: DataParallel | None, has_budget: bool
    ) -> None:
        self._is_compiled, self._is_donating, self._devices = is_compiled, is_donating, devices
        self._has_budget = has_budget
        self._known: dict[Any, Any] = {}
        self._fitting: dict[Any, tuple[str, KFAC]] = {}

    def run(
        self,
        name: str,
        fun: Callable[..., Any],
        args: Mapping[str, Any],
        replaced: Sequence[str] = (),
        results: Any = None,
    ) -> Any:
        """Return `fun(*args.values())`, where some arguments are replaced by the result.

        On several devices the argument called "batch" is sharded. `results` has the structure of
        the result, with the name of the argument whose sharding it gets, or None, for leaves.
        """
        if not self._is_compiled:
            return fun(*args.values())
        program, args = self._program(name, fun, args, replaced, results)
        if self._devices is None:
            return program(*args.values())
        return self._devices.run(program, args)

    def within_budget(
        self,
        build: Callable[["Sizes"], KFAC],
        args: Mapping[str, Any],
        replaced: Sequence[str],
        memory_budget: int | float | str,
    ) -> tuple[str, KFAC]:
        """Return the name of the program of a step that fits a memory budget, on one device.

        `build` returns K-FAC with given bounds on microbatches; the one that fits is returned, too.
        """
        leaves, structure = jax.tree.flatten(args)
        key = structure, _jax.call_key(leaves)
        if key not in self._fitting:
            number, budget = len(self._fitting), parse_memory(memory_budget)
            self._fitting[key] = self._fit(number, build, args, replaced, budget)
        return self._fitting[key]

    def _fit(
        self,
        number: int,
        build: Callable[["Sizes"], KFAC],
        args: Mapping[str, Any],
        replaced: Sequence[str],
        budget: int,
    ) -> tuple[str, KFAC]:
        tried: dict[Any, tuple[str, KFAC]] = {}

        def needs(sizes: Sizes) -> int:
            kfac, name = build(sizes), f"step {number}.{len(tried)}"
            tried[tuple(sizes.values())] = name, kfac
            program, placed = self._program(name, kfac.step, args, replaced, None)
            return MemoryUsage.of(program.lower(*placed.values()).compile()).added_bytes

        # The gradient exists while all else is computed; so does the old state if not donated.
        kept = args["params"], () if self._is_donating else args["state"]
        left = budget - sum(jnp.asarray(x).nbytes for x in jax.tree.leaves(kept))
        found = tuple(sizes_within(budget, left, needs).values())
        for sizes, (name, _) in tried.items():
            if sizes != found:
                self._known.pop(name, None)
        return tried[found]

    def _program(
        self,
        name: str,
        fun: Callable[..., Any],
        args: Mapping[str, Any],
        replaced: Sequence[str],
        results: Any,
    ) -> tuple[Any, Mapping[str, Any]]:
        """Return the program of this name, and its arguments as it takes them."""
        names = list(args)
        donated = tuple(k for k, x in enumerate(names) if x in replaced and self._is_donating)
        given = [jax.tree.map(_strong, x) if k in replaced else x for k, x in args.items()]
        args = dict(zip(names, _without_aliases(given, donated), strict=True))
        key: Any = name
        mapped, options = fun, {}
        account = _jax.true_account(jax.default_backend()) if self._has_budget else None
        if self._devices is not None:
            args = self._devices.placed(name, args)
            options["out_shardings"] = self._devices.shardings(results, args)
            leaves, structure = jax.tree.flatten(options)
            key = name, structure, *leaves
            mapped = self._devices.shard_map(fun, names, results)
        if key not in self._known:
            self._known[key] = jax.jit(
                mapped, donate_argnums=donated, compiler_options=account, **options
            )
        return self._known[key], args

    def check(self, args: Mapping[str, Any]) -> None:
        """Check arguments before any program is made for them."""
        if self._devices is not None:
            self._devices.check_plain(args)

    def inside(self, fun: Callable[..., Any], args: Mapping[str, Any], results: Any = None) -> Any:
        """Equal to `run`, inside a function that is traced."""
        if self._devices is None or not self._is_compiled:
            return fun(*args.values())
        return self._devices.inside(fun, args, results)


def _strong(leaf: Any) -> Any:
    """Return a leaf without a weak type.

    What replaces it has none, and the next call would compile another program for that.
    """
    is_weak = isinstance(leaf, float) or getattr(leaf, "weak_type", False)
    return jnp.asarray(leaf, jnp.result_type(leaf)) if is_weak else leaf


def is_traced(tree: PyTree) -> bool:
    """Return whether a leaf is a tracer."""
    return any(map(_jax.is_tracer, jax.tree.leaves(tree)))


def check_alive(tree: PyTree) -> None:
    """Check that no buffer was donated before."""
    leaves = jax.tree.leaves(tree)
    if any(isinstance(x, jax.Array) and not _jax.is_tracer(x) and x.is_deleted() for x in leaves):
        raise ValueError(
            f"{where()}: params or state were given to a step before, which took over their "
            f"buffers. Go on with what that step returned; or say donate_buffers=False."
        )


def _without_aliases(args: Sequence[Any], donated: Sequence[int]) -> list[Any]:
    """Copy arrays that are there twice: a buffer can be donated only once."""
    seen = {id(x) for k, arg in enumerate(args) if k not in donated for x in jax.tree.leaves(arg)}

    def own(leaf: Any) -> Any:
        if id(leaf) in seen:
            return jnp.array(leaf)
        seen.add(id(leaf))
        return leaf

    return [jax.tree.map(own, arg) if k in donated else arg for k, arg in enumerate(args)]


ATTEMPTS = 3
"""Number of budgets for the parts that are tried before the smallest microbatches."""

ADVICE = (
    "That is for microbatches of one example: the rest is the gradient, inverses and their "
    "temporaries, and the new state if donate_buffers=False. What else helps: donate_buffers=True, "
    "stagger_inverses=True, which inverts some layers at a time, and shard_state=True on several "
    "devices."
)

Sizes = Mapping[str, Any]


def sizes_within(budget: int, left: int, needs: Callable[[Sizes], int]) -> Sizes:
    """Return the options with which a step of an optimizer stays within the budget.

    `left` is the most of it that the parts can have; `needs` compiles the step with some options
    and returns the number of bytes that a call adds.

    Gradient, statistics and exact products plan their microbatches themselves, each within its own
    budget. A step holds more: gradient and statistics at the same time, inverses, the state. How
    much more is known once it is compiled. So it is compiled with all that is left for its parts,
    and only if it needs too much are the parts given less, by as much.
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
        raise MemoryBudgetError(budget, least, where(), ADVICE)
    size = _between(least, known, budget)
    some = {"microbatch_size": size, "memory_budget": None}
    return some if size > 1 and needs(some) <= budget else one


def _between(least: int, known: Mapping[int, int], budget: int) -> int:
    """Interpolate linearly between one example and the smallest size that is too large."""
    if not known:
        return 1
    size = min(known)
    if size == 1 or known[size] <= least:
        return 1
    fraction = (budget - least) / (known[size] - least)
    return int(1 + 0.95 * fraction * (size - 1))
