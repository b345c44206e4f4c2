"""`OptaxPreconditioner`: K-FAC's preconditioner, to be chained with optax transformations."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from curvax._errors import where
from curvax._types import Array, PyTree
from curvax.curvature.blocks.base import Powers
from curvax.kfac_jax.curvature_estimator.block_diagonal import (
    BlockDiagonalCurvature,
    BlockDiagonalCurvatureState,
)
from curvax.kfac_jax.utils.pmap import in_pmap
from curvax.kfac_jax.utils.trees import (
    call_func_with_conditional_kwargs,
    default_batch_size_extractor,
    inner_product,
    scalar_mul,
)
from curvax.kfac_jax.utils.types import Numeric, PRNGKey, ScheduleType

if TYPE_CHECKING:
    import optax  # An optional dependency.


class OptaxPreconditionState(NamedTuple):
    """The state of `OptaxPreconditioner`.

    Attributes:
        count: The number of steps so far.
        estimator_state: The state of the curvature estimator.
    """

    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]  As in kfac_jax.
    estimator_state: BlockDiagonalCurvatureState


class OptaxPreconditioner:
    """K-FAC's preconditioner, with the state of its estimator in the hands of the caller.

    With the estimated curvature C, `apply` returns `(C + (damping + l2_reg) * identity) ** -1 @ g`
    for a gradient g. In each step, call `maybe_update`, then `increment_count`, and give the state
    to `apply`, or as `precond_state=` to the transformation of `as_gradient_transform`.

    Args:
        value_func: The function that registers losses.
        l2_reg: Weight of the L2 regulariser in the loss, which is added to the curvature.
        damping: The damping. Give this or `damping_schedule`.
        damping_schedule: The damping as a function of the index of the step.
        norm_constraint: Upper bound on the squared norm of what `apply` returns, in the metric of
            the estimate. Longer vectors are scaled down.
        estimation_mode: Which curvature to estimate, and how.
        curvature_ema: Decay of the moving average of the curvature.
        curvature_update_period: Number of steps between updates of the curvature.
        inverse_update_period: Number of steps between updates of the inverses.
        use_exact_inverses: Whether to add the damping to the curvature of a layer instead of to its
            Kronecker factors.
        use_sqrt_inv: Whether to multiply by the power -1/2 in place of the inverse.
        register_only_generic: Whether to treat all parameters as generic ones.
        patterns_to_skip: Names of the kinds of layers that are not detected.
        auto_register_kwargs: Further arguments of `auto_register_tags`.
        layer_tag_to_block_ctor: Classes of curvature blocks by layer tag.
        pmap_axis_name: Name of the axis of devices, if methods are called under `pmap`.
        batch_size_extractor: A function from the arguments after the parameters to the number of
            examples.
        distributed_inverses: Whether the computation of inverses is distributed over devices.
        distributed_precon_apply: Whether products with inverses are distributed over devices.
        num_samples: Number of samples per curvature update, in modes that sample.
        should_vmap_samples: Whether to compute samples at the same time.
        norm_to_scale_identity_weight_per_block: Name of a norm of each block by which its damping
            is multiplied.

    Examples:
        >>> import curvax, jax, jax.numpy as jnp, optax
        >>> from curvax.kfac_jax.optax_preconditioner import OptaxPreconditioner
        >>> def loss(w, batch):
        ...     x, y = batch
        ...     curvax.register_squared_error_loss(x @ w, y)
        ...     return jnp.mean((x @ w - y) ** 2)
        >>> batch, params = (jnp.eye(4), jnp.ones((4, 1))), jnp.zeros((4, 1))
        >>> preconditioner = OptaxPreconditioner(loss, damping=1e-3, estimation_mode="ggn_exact")
        >>> chain = optax.chain(preconditioner.as_gradient_transform(), optax.scale(-0.5))
        >>> state, key = chain.init(params), jax.random.key(0)
        >>> precond_state = preconditioner.init((params, batch), key)
        >>> precond_state = preconditioner.maybe_update(precond_state, (params, batch), key)
        >>> precond_state = preconditioner.increment_count(precond_state)
        >>> gradient = jax.grad(loss)(params, batch)
        >>> updates, state = chain.update(gradient, state, precond_state=precond_state)
        >>> bool(loss(optax.apply_updates(params, updates), batch) < 0.3)
        True
    """

    def __init__(
        self,
        value_func: Callable[..., Any],
        l2_reg: Numeric = 0.0,
        damping: float | None = None,
        damping_schedule: ScheduleType | None = None,
        norm_constraint: Numeric | None = None,
        estimation_mode: str = "fisher_gradients",
        curvature_ema: Numeric = 0.95,
        curvature_update_period: int = 1,
        inverse_update_period: int = 5,
        use_exact_inverses: bool = False,
        use_sqrt_inv: bool = False,
        register_only_generic: bool = False,
        patterns_to_skip: Sequence[str] = (),
        auto_register_kwargs: dict[str, Any] | None = None,
        layer_tag_to_block_ctor: dict[str, Callable[..., Any]] | None = None,
        pmap_axis_name: str = "kfac_axis",
        batch_size_extractor: Callable[[Any], Numeric] = default_batch_size_extractor,
        distributed_inverses: bool = True,
        distributed_precon_apply: bool = True,
        num_samples: int = 1,
        should_vmap_samples: bool = False,
        norm_to_scale_identity_weight_per_block: str | None = None,
    ) -> None:
        if (damping is None) == (damping_schedule is None):
            raise ValueError(f"{where()}: give either damping or damping_schedule, and not both.")
        self._l2_reg, self._damping, self._schedule = l2_reg, damping, damping_schedule
        self._norm_constraint, self._curvature_ema = norm_constraint, curvature_ema
        self._curvature_period, self._inverse_period = (
            curvature_update_period,
            inverse_update_period,
        )
        self._use_exact_inverses, self._power = use_exact_inverses, -0.5 if use_sqrt_inv else -1
        self._pmap_axis_name, self._batch_size_extractor = pmap_axis_name, batch_size_extractor
        self._norm_type = norm_to_scale_identity_weight_per_block
        self._estimator = BlockDiagonalCurvature(
            func=value_func,
            default_estimation_mode=estimation_mode,
            layer_tag_to_block_ctor=layer_tag_to_block_ctor,
            distributed_multiplies=distributed_precon_apply,
            distributed_cache_updates=distributed_inverses,
            num_samples=num_samples,
            should_vmap_samples=should_vmap_samples,
            auto_register_kwargs={
                "register_only_generic": register_only_generic,
                "patterns_to_skip": patterns_to_skip,
                **(auto_register_kwargs or {}),
            },
        )

    @property
    def estimator(self) -> BlockDiagonalCurvature:
        """The curvature estimator."""
        return self._estimator

    @property
    def pmap_axis_name(self) -> str:
        """The name of the axis of devices."""
        return self._pmap_axis_name

    @property
    def _axis(self) -> str | None:
        """The axis of devices, if it is mapped around the caller."""
        return self._pmap_axis_name if in_pmap(self._pmap_axis_name) else None

    @property
    def _powers(self) -> tuple[Powers, Powers]:
        """The exact and the approximate power that the cache holds."""
        return (self._power, None) if self._use_exact_inverses else (None, self._power)

    def init(self, func_args: Sequence[PyTree], rng: PRNGKey) -> OptaxPreconditionState:
        """Trace the function, and return the state before the first step."""
        state = self._estimator.init(rng, func_args, *self._powers)
        return OptaxPreconditionState(jnp.zeros((), jnp.int32), state)

    def get_identity_weight(self, state: OptaxPreconditionState) -> Numeric:
        """Return the multiple of the identity that is added to the curvature."""
        damping = self._damping
        if self._schedule is not None:
            damping = call_func_with_conditional_kwargs(self._schedule, state.count)
        assert damping is not None
        return damping + self._l2_reg

    def should_update_estimator_curvature(self, state: OptaxPreconditionState) -> Array | bool:
        """Return whether this step updates the curvature."""
        return _is_due(state.count, self._curvature_period)

    def should_update_inverse_cache(self, state: OptaxPreconditionState) -> Array | bool:
        """Return whether this step updates the inverses."""
        return _is_due(state.count, self._inverse_period)

    def should_sync_estimate_curvature(self, state: OptaxPreconditionState) -> Array | bool:
        """Return whether this step averages the curvature over devices: when it inverts."""
        return self.should_update_inverse_cache(state)

    def maybe_update(
        self, state: OptaxPreconditionState, func_args: Sequence[PyTree], rng: PRNGKey
    ) -> OptaxPreconditionState:
        """Update curvature and inverses, if they are due in this step."""
        sync = self.should_sync_estimate_curvature(state)
        state = self.maybe_update_estimator_curvature(state, func_args, rng, sync=sync)
        return self.maybe_update_inverse_cache(state)

    def maybe_update_estimator_curvature(
        self,
        state: OptaxPreconditionState,
        func_args: Sequence[PyTree],
        rng: PRNGKey,
        decay_old_ema: Array | bool = True,
        sync: Array | bool = True,
    ) -> OptaxPreconditionState:
        """Update the curvature, if that is due in this step.

        Args:
            state: The state.
            func_args: The arguments of the function.
            rng: A random key.
            decay_old_ema: Whether the moving average decays.
            sync: Whether to average over devices. Here every update does.
        """
        del sync
        ema = jnp.where(decay_old_ema, self._curvature_ema, 1.0)

        def update(estimator_state: BlockDiagonalCurvatureState) -> BlockDiagonalCurvatureState:
            return self._estimator.update_curvature_matrix_estimate(
                state=estimator_state,
                ema_old=ema,
                ema_new=1.0,
                identity_weight=self.get_identity_weight(state),
                batch_size=self._batch_size_extractor(func_args[1]),
                rng=rng,
                func_args=func_args,
                pmap_axis_name=self._axis,
            )

        return _updated_if(self.should_update_estimator_curvature(state), update, state)

    def sync_estimator_state(self, state: OptaxPreconditionState) -> OptaxPreconditionState:
        """Average the curvature over devices."""
        return state._replace(
            estimator_state=self._estimator.sync(state.estimator_state, self._axis)
        )

    def maybe_update_inverse_cache(self, state: OptaxPreconditionState) -> OptaxPreconditionState:
        """Update the inverses, if that is due in this step."""

        def update(estimator_state: BlockDiagonalCurvatureState) -> BlockDiagonalCurvatureState:
            exact_powers, approx_powers = self._powers
            return self._estimator.update_cache(
                estimator_state,
                identity_weight=self.get_identity_weight(state),
                exact_powers=exact_powers,
                approx_powers=approx_powers,
                eigenvalues=False,
                pmap_axis_name=self._axis,
                norm_to_scale_identity_weight_per_block=self._norm_type,
            )

        return _updated_if(self.should_update_inverse_cache(state), update, state)

    def increment_count(self, state: OptaxPreconditionState) -> OptaxPreconditionState:
        """Return the state of the next step."""
        return state._replace(count=state.count + 1)

    def apply(self, updates: PyTree, state: OptaxPreconditionState) -> PyTree:
        """Return the preconditioned updates, scaled down to the norm constraint if there is one."""
        product = self._estimator.multiply_matpower(
            state=state.estimator_state,
            parameter_structured_vector=updates,
            identity_weight=self.get_identity_weight(state),
            power=self._power,
            exact_power=self._use_exact_inverses,
            use_cached=True,
            pmap_axis_name=self._axis,
            norm_to_scale_identity_weight_per_block=self._norm_type,
        )
        if self._norm_constraint is None:
            return product
        squared = inner_product(product, updates)
        return scalar_mul(product, jnp.minimum(1.0, jnp.sqrt(self._norm_constraint / squared)))

    def multiply_curvature(self, updates: PyTree, state: OptaxPreconditionState) -> PyTree:
        """Return the updates, multiplied by the damped curvature."""
        return self._estimator.multiply(
            state=state.estimator_state,
            parameter_structured_vector=updates,
            identity_weight=self.get_identity_weight(state),
            exact_power=self._use_exact_inverses,
            use_cached=False,
            pmap_axis_name=self._axis,
            norm_to_scale_identity_weight_per_block=self._norm_type,
        )

    def as_gradient_transform(
        self, use_inverse: bool = True
    ) -> "optax.GradientTransformationExtraArgs":
        """Return `apply`, or `multiply_curvature`, as an optax transformation.

        Its `update` takes the state of the preconditioner as `precond_state=`.

        Args:
            use_inverse: Whether to multiply by the inverse of the curvature, or by itself.
        """
        import optax

        multiply = self.apply if use_inverse else self.multiply_curvature

        def update(
            updates: PyTree,
            state: PyTree,
            params: PyTree = None,
            *,
            precond_state: OptaxPreconditionState,
            **extra_args: Any,
        ) -> tuple[PyTree, PyTree]:
            del params, extra_args
            return multiply(updates, precond_state), state

        update_fn: Any = update
        return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update_fn)


def _is_due(count: Array, period: int) -> Array | bool:
    return True if period == 1 else count % period == 0


def _updated_if(
    flag: Array | bool,
    update: Callable[[BlockDiagonalCurvatureState], BlockDiagonalCurvatureState],
    state: OptaxPreconditionState,
) -> OptaxPreconditionState:
    """Update the state of the estimator if the flag is set."""
    before = state.estimator_state
    if isinstance(flag, bool):
        return state._replace(estimator_state=update(before) if flag else before)
    like = lambda tree: jax.tree.map(lambda x, y: jnp.asarray(x, jnp.result_type(y)), tree, before)
    after = lax.cond(flag, lambda x: like(update(x)), lambda x: x, before)
    return state._replace(estimator_state=after)
