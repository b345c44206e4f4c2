"""What the optimizer tells beside steps: properties, checks, losses and quadratic models."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from curvax._types import Array, PyTree
from curvax.curvature import BlockDiagonalCurvature
from curvax.optimizer._facade import Facade
from curvax.optimizer._programs import is_traced
from curvax.optimizer._rules import Given
from curvax.optimizer._state import OptimizerState
from curvax.optimizer._step import Algorithm

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
