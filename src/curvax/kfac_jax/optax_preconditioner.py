"""`OptaxPreconditioner`: K-FAC's preconditioner, to be chained with optax transformations."""

from typing import TYPE_CHECKING, NamedTuple

from curvax._types import Array, PyTree

if TYPE_CHECKING:
    pass  # An optional dependency.


class OptaxPreconditionState(NamedTuple):
    """The state of `OptaxPreconditioner`.

    Attributes:
        count: The number of steps so far.
        estimator_state: The state of the curvature estimator.
    """

    count: Array
    estimator_state: PyTree


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
    """
