"""What the optimizer tells beside steps: properties, checks, losses and quadratic models."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from curvax._types import Array, PyTree
from curvax.curvature import (
    BlockDiagonalCurvature,
    ShardedCurvature,
    split_state,
    whole_state,
)
from curvax.optimizer._facade import Facade
from curvax.optimizer._programs import check_alive, is_traced
from curvax.optimizer._rules import Given
from curvax.optimizer._state import OptimizerState
from curvax.optimizer._step import Algorithm
from curvax.parallel import gathered

__all__ = ["Quantities"]


class Quantities(Facade):
    """The part of `Optimizer` that changes nothing."""

    @property
    def num_burnin_steps(self) -> int:
        """How often the curvature is updated before the first step."""
        return self._given["num_burnin_steps"]

    @property
    def l2_reg(self) -> Array:
        """The weight of the regulariser in the curvature."""
        return jnp.asarray(self._given["l2_reg"], float)

    @property
    def estimator(self) -> BlockDiagonalCurvature:
        """The curvature estimator, once the optimizer was used."""
        return self._algorithm.preconditioner.estimator

    @property
    def damping_decay_factor(self) -> Any:
        """By how much an adaptive damping falls or rises at once."""
        return self._settings.adaptation.factor

    def verify_args_and_get_step_counter(
        self,
        step_counter: Any,
        learning_rate: Any = None,
        momentum: Any = None,
        damping: Any = None,
        global_step_int: int | None = None,
    ) -> int:
        """Check what `step` was given.

        Arguments:
            step_counter: the number of steps so far, by the state.
            learning_rate: as in `step`.
            momentum: as in `step`.
            damping: as in `step`.
            global_step_int: as in `step`.

        Returns:
            The number of steps so far.

        Raises:
            ValueError: if a value is missing, or is given although the constructor says how it is
                chosen; or if `global_step_int` is another number than that of the state.
        """
        self._check_given(Given(learning_rate, momentum, damping))
        count = int(step_counter)
        if global_step_int is not None and global_step_int != count:
            raise ValueError(
                f"{self._where}: global_step_int={global_step_int}, but the state is that of step "
                f"{count} (state.step_counter). Pass the state that belongs to it, or leave "
                f"global_step_int out."
            )
        return count

    def should_update_damping(self, state: OptimizerState) -> Array:
        """Whether the next step adapts the damping (if that is adaptive)."""
        return jnp.asarray(self._settings.adaptation.is_due(state.step_counter))

    def whole_state(self, state: OptimizerState) -> OptimizerState:
        """A state that is split among devices (`shard_state=True`), as one that is not.

        It is on the host, as arrays of NumPy's: to be saved, to go on without `shard_state`, or, by
        `split_state`, with another number of devices. Of several processes all must call it.

        Arguments:
            state: a state for the same function, split among any number of devices, or whole.

        Returns:
            The whole state.

        Raises:
            ValueError: if the optimizer was not used yet, or if the state is that of another model.
        """
        self._check_movable(state)
        host = jax.tree.map(gathered, state)
        return replace(host, estimator_state=whole_state(self.estimator, host.estimator_state))

    def split_state(self, state: OptimizerState) -> OptimizerState:
        """A state as this optimizer (with `shard_state=True`) splits it among its devices.

        It is on the host, as what `whole_state` returns; `step` gives each device its share.

        Arguments:
            state: a state for the same function, split among any number of devices, or whole.

        Returns:
            The state for as many devices as the optimizer has.

        Raises:
            ValueError: as `whole_state`; and if the optimizer has no `shard_state`.
        """
        estimator = self.estimator
        if not isinstance(estimator, ShardedCurvature):
            raise ValueError(
                f"{self._where}: split_state is for shard_state=True, but this optimizer goes on "
                f"with a whole state: state = optimizer.whole_state(state)."
            )
        whole = self.whole_state(state)
        return replace(whole, estimator_state=split_state(estimator, whole.estimator_state))

    def compute_loss_value(self, func_args: Sequence[PyTree]) -> Array:
        """The loss, for arguments of `value_and_grad_func`."""
        loss = lambda algorithm: lambda *func_args: algorithm.loss(func_args)
        return self._computed("loss", loss, self._named(func_args), func_args)

    def compute_l2_quad_matrix(self, vectors: Sequence[PyTree]) -> Array:
        """The matrix of `vᵢᵀ L2 vⱼ`, where L2 is the curvature of the regulariser.

        Arguments:
            vectors: pytrees like the parameters.

        Returns:
            A matrix: `l2_reg` times the inner products of the vectors, over all parameters that
            have the regulariser.
        """
        return self._settings.l2.matrix(vectors)

    def compute_exact_quad_model(
        self,
        vectors: Sequence[PyTree],
        grads: PyTree,
        func_args: Sequence[PyTree] | None = None,
    ) -> tuple[Array, Array, Array]:
        """The quadratic model of the loss with its exact curvature C, in the span of vectors.

        Arguments:
            vectors: pytrees like the parameters.
            grads: the gradient of the loss.
            func_args: the arguments of `value_and_grad_func`.

        Returns:
            The matrices of `vᵢᵀ (C + L2) vⱼ` and `vᵢᵀ vⱼ`, and the vector of `vᵢᵀ grads`.

        Raises:
            ValueError: if there are no `func_args`.
        """
        if func_args is None:
            raise ValueError(
                f"{self._where}: compute_exact_quad_model needs func_args, the arguments of "
                f"value_and_grad_func: the exact curvature depends on them."
            )

        def model(algorithm: Algorithm) -> Callable[..., Any]:
            return lambda vectors, grads, *args: tuple(algorithm.exact_model(vectors, grads, args))

        args = {"vectors": list(vectors), "grads": grads, **self._named(func_args)}
        return self._computed("exact model", model, args, func_args)

    def compute_approx_quad_model(
        self, state: OptimizerState, vectors: Sequence[PyTree], grads: PyTree
    ) -> tuple[Array, Array, Array]:
        """As `compute_exact_quad_model`, with the estimate of the curvature in a state."""
        model = lambda algorithm: lambda *args: tuple(algorithm.approx_model(*args))
        args = {"state": state, "vectors": list(vectors), "grads": grads}
        return self._computed("approximate model", model, args)

    def _check_movable(self, state: OptimizerState) -> None:
        check_alive(state)
        if is_traced(state):
            raise ValueError(
                f"{self._where}: whole_state and split_state move arrays to the host. Call them "
                f"outside of functions that are traced."
            )

    def _named(self, func_args: Sequence[PyTree]) -> dict[str, PyTree]:
        """Arguments of the function by name."""
        return dict(zip(self._settings.function.names, func_args, strict=True))

    def _computed(
        self,
        name: str,
        of: Callable[[Algorithm], Callable[..., Any]],
        args: Mapping[str, Any],
        func_args: Sequence[PyTree] | None = None,
    ) -> Any:
        """A function of the algorithm's, on several devices if there are."""
        algorithm = self._algorithm if func_args is None else self._for_args(func_args)
        if algorithm.axis is None:
            return of(algorithm)(*args.values())
        if is_traced(args):
            return self._programs.inside(of(algorithm), args)
        return self._programs.run(name, of(algorithm), args)
