"""Compiled programs of the optimizer's pure functions: donation of buffers, memory budgets."""

from collections.abc import Callable, Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax import _jax
from curvax._errors import where
from curvax._types import Fun, PyTree
from curvax.memory.budget import MemoryBudgetError, parse_memory
from curvax.memory.compiled import recorded_plans
from curvax.memory.usage import MemoryUsage
from curvax.optimizer.config import MicrobatchSizes
from curvax.optimizer.data_parallel import Devices
from curvax.optimizer.step import KFAC


class Programs:
    """A cache of compiled functions by name, each of which is compiled when it is first run.

    Arguments:
        is_compiled: Whether to compile functions; if False, they run op by op.
        is_donating: Whether to donate the buffers of arguments that results replace.
        devices: The devices over which batches are sharded; None for one device.
        has_budget: Whether to compile with options that make the memory analysis exact.
    """

    def __init__(
        self, is_compiled: bool, is_donating: bool, devices: Devices | None, has_budget: bool
    ) -> None:
        self._is_compiled, self._is_donating, self._devices = is_compiled, is_donating, devices
        self._has_budget = has_budget
        self._known: dict[Hashable, jax.stages.Wrapped] = {}
        self._fitting: dict[Hashable, tuple[str, KFAC]] = {}

    def run(
        self,
        name: str,
        fun: Fun,
        args: Mapping[str, PyTree],
        replaced: Sequence[str] = (),
        results: PyTree = None,
    ) -> PyTree:
        """Return `fun(*args.values())`.

        Arguments:
            name: The name under which the compiled function is cached.
            fun: The function.
            args: Its arguments by name. On several devices the one called "batch" is sharded.
            replaced: Names of the arguments that results replace, and whose buffers are donated.
            results: A pytree prefix of the result. Each leaf is the name of the argument whose
                sharding the result gets, or None for a replicated result.
        """
        if not self._is_compiled:
            return fun(*args.values())
        program, args = self._program(name, fun, args, replaced, results)
        if self._devices is None:
            return program(*args.values())
        return self._devices.run(program, args)

    def within_budget(
        self,
        build: Callable[[MicrobatchSizes], KFAC],
        args: Mapping[str, PyTree],
        replaced: Sequence[str],
        memory_budget: int | float | str,
    ) -> tuple[str, KFAC]:
        """Return a step that fits a memory budget on one device: its program's name, and K-FAC.

        `build` returns K-FAC for given bounds on microbatches.
        """
        leaves, structure = jax.tree.flatten(args)
        key = structure, _jax.call_key(leaves)
        if key not in self._fitting:
            prefix, budget = f"step {len(self._fitting)}", parse_memory(memory_budget)
            self._fitting[key] = self._fit(prefix, build, args, replaced, budget)
        return self._fitting[key]

    def _fit(
        self,
        prefix: str,
        build: Callable[[MicrobatchSizes], KFAC],
        args: Mapping[str, PyTree],
        replaced: Sequence[str],
        budget: int,
    ) -> tuple[str, KFAC]:
        tried: dict[Hashable, tuple[str, KFAC]] = {}

        def needs(sizes: MicrobatchSizes) -> int:
            kfac, name = build(sizes), f"{prefix}.{len(tried)}"
            tried[tuple(sizes.values())] = name, kfac
            program, placed = self._program(name, kfac.step, args, replaced, None)
            return MemoryUsage.of(program.lower(*placed.values()).compile()).added_bytes

        # The gradient is live throughout the step; so is the old state unless it is donated.
        live = args["params"], () if self._is_donating else args["state"]
        left = budget - sum(jnp.asarray(x).nbytes for x in jax.tree.leaves(live))
        chosen = tuple(sizes_within(budget, left, needs).values())
        for sizes, (name, _) in tried.items():
            if sizes != chosen:
                self._known.pop(name, None)
        return tried[chosen]

    def _program(
        self,
        name: str,
        fun: Fun,
        args: Mapping[str, PyTree],
        replaced: Sequence[str],
        results: PyTree,
    ) -> tuple[jax.stages.Wrapped, Mapping[str, PyTree]]:
        """Return the jitted function of this name, and the arguments to call it with.

        The arguments have neither weak types nor aliased buffers where they are donated, and are
        placed on the devices. `fun` is used if the name is new, or has other output shardings.
        """
        names = list(args)
        donated = tuple(i for i, arg in enumerate(names) if arg in replaced and self._is_donating)
        strong = [jax.tree.map(_strong, x) if arg in replaced else x for arg, x in args.items()]
        args = dict(zip(names, _without_aliases(strong, donated), strict=True))
        key: Hashable = name
        per_device, options = fun, {}
        compiler_options = (
            _jax.exact_memory_options(jax.default_backend()) if self._has_budget else None
        )
        if self._devices is not None:
            args = self._devices.placed(name, args)
            options["out_shardings"] = self._devices.shardings(results, args)
            leaves, structure = jax.tree.flatten(options)
            key = name, structure, *leaves
            per_device = self._devices.shard_map(fun, names, results)
        if key not in self._known:
            self._known[key] = jax.jit(
                per_device, donate_argnums=donated, compiler_options=compiler_options, **options
            )
        return self._known[key], args

    def check(self, args: Mapping[str, PyTree]) -> None:
        """Check arguments before any program is compiled for them."""
        if self._devices is not None:
            self._devices.check(args)

    def run_traced(self, fun: Fun, args: Mapping[str, PyTree], results: PyTree = None) -> PyTree:
        """Equal to `run`, except that the caller is traced, so that nothing is compiled here."""
        if self._devices is None or not self._is_compiled:
            return fun(*args.values())
        return self._devices.run_traced(fun, args, results)


def _strong(leaf: ArrayLike) -> ArrayLike:
    """Return a leaf without a weak type.

    Its replacement has none, for which the next call would compile another program.
    """
    is_weak = isinstance(leaf, float) or getattr(leaf, "weak_type", False)
    return jnp.asarray(leaf, jnp.result_type(leaf)) if is_weak else leaf


def is_traced(tree: PyTree) -> bool:
    """Return whether any leaf is a tracer."""
    return any(map(_jax.is_tracer, jax.tree.leaves(tree)))


def check_alive(tree: PyTree) -> None:
    """Check that no buffer was donated before."""
    leaves = jax.tree.leaves(tree)
    if any(isinstance(x, jax.Array) and not _jax.is_tracer(x) and x.is_deleted() for x in leaves):
        raise ValueError(
            f"{where()}: params or state were given to an earlier step, which took over their "
            f"buffers. Continue with what that step returned, or set donate_buffers=False."
        )


def _without_aliases(args: Sequence[PyTree], donated: Sequence[int]) -> list[PyTree]:
    """Copy arrays that occur twice: a buffer can be donated only once."""
    seen = {id(x) for k, arg in enumerate(args) if k not in donated for x in jax.tree.leaves(arg)}

    def copy_if_seen(leaf: ArrayLike) -> ArrayLike:
        if id(leaf) in seen:
            return jnp.array(leaf)
        seen.add(id(leaf))
        return leaf

    return [jax.tree.map(copy_if_seen, arg) if k in donated else arg for k, arg in enumerate(args)]


ATTEMPTS = 3
"""Number of budgets for the parts that are tried before the smallest microbatches."""

ADVICE = (
    "That is for microbatches of one example: the rest is the gradient, inverses and their "
    "temporaries, and the new state if donate_buffers=False. What else helps: donate_buffers=True, "
    "stagger_inverses=True, which inverts some layers at a time, and shard_state=True on several "
    "devices."
)


def sizes_within(
    budget: int, left: int, needs: Callable[[MicrobatchSizes], int]
) -> MicrobatchSizes:
    """Return bounds on microbatches with which a step of the optimizer stays within the budget.

    Gradient, statistics and exact products each plan their microbatches within a budget of their
    own. A step needs more: gradient and statistics are live at the same time, and there are
    inverses and the state. How much more is known only after compilation. So the step is compiled
    with all of `left` as the budget of its parts. If it exceeds `budget`, that of the parts is
    reduced by the excess.

    Arguments:
        budget: Bytes that the step may add.
        left: Bytes that are available to the parts at most.
        needs: Compiles the step with given bounds, and returns the bytes that a call adds.
    """
    too_large: dict[int, int] = {}
    for _ in range(ATTEMPTS):
        if left < 1:
            break
        sizes: MicrobatchSizes = {"microbatch_size": None, "memory_budget": left}
        try:
            with recorded_plans() as plans:
                needed = needs(sizes)
        except MemoryBudgetError:
            break
        if needed <= budget:
            return sizes
        too_large[min((plan.batch_size for plan in plans), default=1)] = needed
        left -= needed - budget + budget // 100
    one: MicrobatchSizes = {"microbatch_size": 1, "memory_budget": None}
    least = needs(one)
    if least > budget:
        raise MemoryBudgetError(budget, least, where(), ADVICE)
    size = _interpolated_size(least, too_large, budget)
    some: MicrobatchSizes = {"microbatch_size": size, "memory_budget": None}
    return some if size > 1 and needs(some) <= budget else one


def _interpolated_size(least: int, too_large: Mapping[int, int], budget: int) -> int:
    """Interpolate linearly between one example and the smallest size that is too large."""
    if not too_large:
        return 1
    size = min(too_large)
    if size == 1 or too_large[size] <= least:
        return 1
    fraction = (budget - least) / (too_large[size] - least)
    return int(1 + 0.95 * fraction * (size - 1))
