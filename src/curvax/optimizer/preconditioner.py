"""The preconditioner: an estimate of curvature, when it is updated, and its inverse."""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from curvax import _jax
from curvax._types import Array, PyTree
from curvax.curvature.block_diagonal import BlockDiagonalCurvature
from curvax.devices.task_assignment import assign
from curvax.optimizer.state import combined, inner_products, number_type

__all__ = ["L2", "Preconditioner", "Schedules", "is_turn", "run_if"]


# What is done only in some steps.

T = TypeVar("T")


def is_turn(step: Any, period: int, turn: int = 0) -> Any:
    """Whether it is the turn of what is done once in a period."""
    return period == 1 or step % period == turn


def run_if(flag: Any, fun: Callable[[T], T], state: T) -> T:
    """`fun(state)` if the flag is set, else the state.

    While tracing it is a loop of at most one step, not a `lax.cond`: that would copy the state,
    which may be as large as all inverses, also in steps in which nothing is done. The loop carries
    only what changes.
    """
    if not _jax.is_tracer(flag):
        return fun(state) if flag else state
    leaves, structure = jax.tree.flatten(state)
    traced, changed = _jax.trace_change(fun, state)
    mine = [number for number, is_changed in enumerate(changed) if is_changed]

    def body(carry: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
        flag, own = carry
        current = dict(enumerate(leaves)) | dict(zip(mine, own, strict=True))
        found = traced([current[number] for number in range(len(leaves))])
        return jnp.zeros_like(flag), [found[number] for number in mine]

    start = (jnp.asarray(flag, bool), [jnp.asarray(leaves[number]) for number in mine])
    _, own = lax.while_loop(lambda carry: carry[0], body, start)
    for number, leaf in zip(mine, own, strict=True):
        leaves[number] = leaf
    return jax.tree.unflatten(structure, leaves)


@dataclass(frozen=True)
class Schedules:
    """How often what is done, in steps, and how.

    With `stagger`, each step of a period computes the inverses of its share of the blocks.
    """

    ema: Any
    update_period: int
    inverse_period: int
    stagger: bool


@dataclass(frozen=True)
class L2:
    """The curvature of a regulariser `weight / 2 * sum(params**2)`, of parameters that have it."""

    weight: Any
    exclusions: tuple[str, ...] = ()
    """Regular expressions; a parameter in whose path one is found has no regulariser."""

    def has(self, path: str) -> bool:
        """Whether a parameter has the regulariser."""
        return not any(re.search(pattern, path) for pattern in self.exclusions)

    def times(self, vector: PyTree) -> PyTree:
        """The matrix times a vector."""
        keep = lambda path, x: x if self.has(jax.tree_util.keystr(path)) else jnp.zeros_like(x)
        weight = jnp.asarray(self.weight, number_type(vector))
        return combined([weight], [jax.tree_util.tree_map_with_path(keep, vector)])

    def matrix(self, vectors: Sequence[PyTree]) -> Array:
        """`vᵢᵀ L2 vⱼ`."""
        return inner_products(vectors, [self.times(v) for v in vectors])


@dataclass(frozen=True)
class Preconditioner:
    """`(C + damping + L2) ** power`, as pure functions of the state of an estimator of C."""

    estimator: BlockDiagonalCurvature
    l2: L2
    schedules: Schedules
    power: float | int
    is_exact: bool
    axis: str | None

    @property
    def cached(self) -> tuple[Any, Any]:
        """Which exact and which approximate powers are in the cache."""
        return (self.power, None) if self.is_exact else (None, self.power)

    def init(self, rng: Array, func_args: Sequence[PyTree]) -> Any:
        """The state before the first step."""
        return self.estimator.init(rng, func_args, *self.cached)

    def updated(
        self,
        state: Any,
        func_args: Sequence[PyTree],
        batch_size: Any,
        rng: Array,
        is_fine: Any = True,
    ) -> Any:
        """The state with the curvature of a batch in its averages; as it was, if that is not fine.

        An average that keeps all of its weight and gives none to what is new stays what it was. So
        there is nothing to choose from or to copy.
        """
        old, new = jnp.where(is_fine, self.schedules.ema, 1.0), jnp.where(is_fine, 1.0, 0.0)
        return self.estimator.update_curvature_matrix_estimate(
            state, old, new, batch_size, rng, func_args, self.axis
        )

    def updated_in_turn(
        self, state: Any, step: Any, is_stale: Any, *args: Any, is_fine: Any = True
    ) -> Any:
        """As `updated`, in steps in which it is time for it, or if what there is is stale."""
        due = is_turn(step, self.schedules.update_period)
        update = lambda state: self.updated(state, *args, is_fine=is_fine)
        return run_if(_either(due, is_stale), update, state)

    def refreshed(self, state: Any, step: Any, is_stale: Any, damping: Any) -> Any:
        """The state with inverses as they are now, in steps in which it is time for them."""
        weights = self.weights(damping)
        period = self.schedules.inverse_period

        def refresh(blocks: Sequence[int] | None, state: Any) -> Any:
            return self.estimator.update_cache(
                state, weights, *self.cached, False, self.axis, blocks=blocks
            )

        if not self.schedules.stagger or period == 1:
            due = _either(is_turn(step, period), is_stale)
            return run_if(due, functools.partial(refresh, None), state)
        blocks = self.estimator.blocks or ()
        owners = assign([block.cache_work for block in blocks], period)
        for turn in range(period):
            own = [number for number, owner in enumerate(owners) if owner == turn]
            if own:
                due = _either(is_turn(step, period, turn), is_stale)
                state = run_if(due, functools.partial(refresh, own), state)
        return state

    def apply(self, state: Any, gradient: PyTree, damping: Any) -> PyTree:
        """The preconditioned gradient, by what is in the cache."""
        weights = self.weights(damping)
        return self.estimator.multiply_matpower(
            state, gradient, weights, self.power, self.is_exact, True, self.axis
        )

    def multiply(self, state: Any, vector: PyTree) -> PyTree:
        """The estimated curvature, with that of the regulariser, times a vector."""
        product = self.estimator.multiply(state, vector, 0.0, True, False, self.axis)
        one = jnp.ones((), number_type(vector))
        return combined([one, one], [product, self.l2.times(vector)])

    def weights(self, damping: Any) -> Any:
        """What is added to the diagonal of each block.

        The regulariser counts for all parameters of a block if some of them have it.
        """
        with_l2 = damping + jnp.asarray(self.l2.weight, jnp.result_type(damping))
        if not self.l2.exclusions:
            return with_l2
        names = self.estimator.params_names
        return [with_l2 if any(map(self.l2.has, own)) else damping for own in names]


def _either(due: Any, is_stale: Any) -> Any:
    return due if due is True else due | is_stale
