"""The state of the optimizer."""

from dataclasses import dataclass, field, fields
from typing import Any

import jax
import jax.numpy as jnp

from curvax._types import Array

__all__ = ["OptimizerState"]


def _no_steps() -> Array:
    return jnp.zeros((), jnp.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OptimizerState:
    """What the optimizer keeps from one step to the next: a pytree, to be saved as any other.

    Attributes:
        velocities: the last update of the parameters.
        estimator_state: the state of the curvature estimator.
        damping: the damping, if it is adaptive, else None.
        data_seen: the number of examples so far. It stays at the largest integer once it is there.
        step_counter: the number of steps so far.
        damping_factor: what a damping that is given or scheduled is multiplied with. It is one,
            unless steps were skipped or rejected, and comes back to one with those that are not.
        skipped: how many steps were skipped because something was not finite.
        rejected: how many steps were rejected because the loss would have risen.
        is_stale: whether the next step computes curvature and inverses, whatever their periods.
    """

    velocities: Any
    estimator_state: Any
    damping: Any
    data_seen: Any
    step_counter: Any
    damping_factor: Any = field(default_factory=lambda: jnp.ones(()), kw_only=True)
    skipped: Any = field(default_factory=_no_steps, kw_only=True)
    rejected: Any = field(default_factory=_no_steps, kw_only=True)
    is_stale: Any = field(default_factory=lambda: jnp.ones((), bool), kw_only=True)

    @classmethod
    def like_params(cls, params: Any) -> "OptimizerState":
        """This for what is like the parameters, and None for everything else."""
        others = {entry.name: None for entry in fields(cls)}
        return cls(**(others | {"velocities": params}))
