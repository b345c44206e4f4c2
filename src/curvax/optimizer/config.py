"""The configuration of K-FAC: every option, its default and its valid values.

Three frozen dataclasses, each a subclass of the previous one: `PreconditionerConfig` holds the
options of `scale_by_kfac`, `KFACConfig` those of `kfac`, and `OptimizerConfig` those of
`Optimizer`, whose docstring describes every option. Values are validated once, on construction.

Learning rate, momentum and damping each have one of three sources: a number that is passed to each
step, a schedule, or an adaptive rule. The last two are part of the configuration.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike

from curvax import _jax
from curvax._errors import check_count, where
from curvax._types import Array, Fun, PyTree
from curvax.curvature.batch import default_batch_size_extractor
from curvax.curvature.block_diagonal import BlockCtor, BlockDiagonalCurvature
from curvax.curvature.estimation_modes import check_mode
from curvax.curvature.linalg.norms import NORMS
from curvax.maps.microbatch import microbatch
from curvax.optimizer.data_parallel import axis_of, check_mesh, num_devices

Number = float | int | Array

Schedule = Callable[..., ArrayLike]
"""A function from the index of a step, which is traced, to a value.

It may have a second argument, called `data_seen`: the number of examples before the step.
"""


class Adaptive:
    """The source of a value that the optimizer chooses itself.

    A quadratic model of the loss chooses learning rate and momentum; the Levenberg-Marquardt rule
    chooses the damping.
    """


ADAPTIVE = Adaptive()

Hyperparameter = Schedule | Adaptive | None
"""The source of a value; None for a number that is passed to each step."""


class MicrobatchSizes(TypedDict):
    """The two options that bound the size of microbatches. At most one is not None."""

    microbatch_size: int | None
    memory_budget: int | float | str | None


# Metadata of a field: a function `check(name, value)` that raises for an invalid value.

Metadata = dict[str, Callable[[str, Any], object]]


def _number(
    is_valid: Callable[[Any], bool], expected: str, *, is_optional: bool = False
) -> Metadata:
    def check(name: str, value: Any) -> None:
        if (value is None and is_optional) or _jax.is_tracer(value):
            return
        is_number = isinstance(value, int | float | np.generic | np.ndarray | jax.Array)
        if not is_number or np.ndim(value) or isinstance(value, bool):
            raise TypeError(f"{where()}: {name} must be a number, got {value!r}.")
        if not is_valid(value):
            raise ValueError(f"{where()}: {name} must be {expected}, got {value}.")

    return {"check": check}


def _function(hint: str = "", *, is_optional: bool = False) -> Metadata:
    def check(name: str, value: Any) -> None:
        if not (callable(value) or (value is None and is_optional)):
            raise TypeError(
                f"{where()}: {name} must be a function, got {type(value).__name__} {value!r}.{hint}"
            )

    return {"check": check}


def _schedule(name: str) -> Metadata:
    return _function(f" For a constant, give {name} to step.", is_optional=True)


def _strings(name: str, value: Any) -> None:
    if isinstance(value, str):
        raise TypeError(
            f"{where()}: {name} must be a sequence of strings, got the string {value!r}. "
            f"Write ({value!r},)."
        )


def _norm_type(name: str, value: Any) -> None:
    if value is not None and value not in NORMS:
        raise ValueError(
            f"{where()}: {name} must be the name of a norm, one of {', '.join(NORMS)}, or "
            f"None, got {value!r}."
        )


def _matrix_type(name: str, value: Any) -> None:
    if value not in (None, "fisher", "ggn"):
        raise ValueError(
            f"{where()}: {name} must be 'fisher', 'ggn', or None for the matrix of the "
            f"estimation mode, got {value!r}."
        )


_ANY = _number(lambda x: x == x, "a number")
_POSITIVE = _number(lambda x: x > 0, "positive")
_POSITIVE_OR_NONE = _number(lambda x: x > 0, "positive", is_optional=True)
_NON_NEGATIVE = _number(lambda x: x >= 0, "zero or more")
_COUNT: Metadata = {"check": check_count}
_STRINGS: Metadata = {"check": _strings}
_FUNCTION_OR_NONE = _function(is_optional=True)


def _require(is_valid: bool | Array, otherwise: str) -> None:
    if not is_valid:
        raise ValueError(f"{where()}: {otherwise}")


@dataclass(frozen=True, kw_only=True, eq=False)
class PreconditionerConfig:
    """Options of the curvature estimate and its inverse."""

    l2_reg: Number = field(default=0.0, metadata=_NON_NEGATIVE)
    estimation_mode: str = "fisher_gradients"
    curvature_ema: Number = field(
        default=0.95, metadata=_number(lambda x: 0 <= x <= 1, "between zero and one")
    )
    curvature_update_period: int = field(default=1, metadata=_COUNT)
    inverse_update_period: int = field(default=5, metadata=_COUNT)
    stagger_inverses: bool = False
    use_exact_inverses: bool = False
    precon_power: float | int = field(default=-1, metadata=_ANY)
    num_estimator_samples: int = field(default=1, metadata=_COUNT)
    should_vmap_estimator_samples: bool = False
    norm_to_scale_identity_weight_per_block: str | None = field(
        default=None, metadata={"check": _norm_type}
    )
    register_only_generic: bool = False
    strict_registration: bool = False
    patterns_to_skip: Sequence[str] = field(default=(), metadata=_STRINGS)
    use_automatic_registration: bool = True
    auto_register_kwargs: Mapping[str, Any] | None = None
    layer_tag_to_block_ctor: Mapping[str, BlockCtor] | None = None
    custom_estimator_ctor: Callable[..., BlockDiagonalCurvature] | None = field(
        default=None, metadata=_FUNCTION_OR_NONE
    )
    regularized_parameters_path_exclusions: Sequence[str] = field(default=(), metadata=_STRINGS)
    batch_size_extractor: Callable[[PyTree], Number] = field(
        default=default_batch_size_extractor, metadata=_function()
    )
    distributed_precon_apply: bool = True
    distributed_inverses: bool = True
    microbatch_size: int | None = None
    memory_budget: int | float | str | None = None

    def __post_init__(self) -> None:
        for option in fields(self):
            if "check" in option.metadata:
                option.metadata["check"](option.name, getattr(self, option.name))
        check_mode(self.estimation_mode)
        _require(
            self.microbatch_size is None or self.memory_budget is None,
            f"microbatch_size={self.microbatch_size} and memory_budget={self.memory_budget!r} set "
            f"the same size; give one of them.",
        )
        microbatch(len, 0, **self.sizes)  # Raises for an invalid size or budget.
        _require(
            not (self.register_only_generic and self.strict_registration),
            "register_only_generic=True and strict_registration=True contradict each other: "
            "generic parameters belong to no layer of a known kind.",
        )

    @property
    def sizes(self) -> MicrobatchSizes:
        """The bounds on the size of microbatches, as keyword arguments."""
        return {"microbatch_size": self.microbatch_size, "memory_budget": self.memory_budget}


@dataclass(frozen=True, kw_only=True, eq=False)
class KFACConfig(PreconditionerConfig):
    """Options of the preconditioner and of the update rule."""

    use_adaptive_learning_rate: bool = False
    learning_rate_schedule: Schedule | None = field(
        default=None, metadata=_schedule("learning_rate")
    )
    use_adaptive_momentum: bool = False
    momentum_schedule: Schedule | None = field(default=None, metadata=_schedule("momentum"))
    use_adaptive_damping: bool = False
    damping_schedule: Schedule | None = field(default=None, metadata=_schedule("damping"))
    initial_damping: Number | None = field(default=None, metadata=_POSITIVE_OR_NONE)
    use_initial_damping_calibration: bool = False
    min_damping: Number = field(default=1e-8, metadata=_NON_NEGATIVE)
    max_damping: Number = field(default=float("inf"), metadata=_POSITIVE)
    include_damping_in_quad_change: bool = False
    damping_adaptation_interval: int = field(default=5, metadata=_COUNT)
    damping_adaptation_decay: Number = field(
        default=0.9, metadata=_number(lambda x: 0 < x <= 1, "above zero and at most one")
    )
    damping_lower_threshold: Number = field(default=0.25, metadata=_ANY)
    damping_upper_threshold: Number = field(default=0.75, metadata=_ANY)
    always_use_exact_qmodel_for_damping_adjustment: bool = False
    exact_quad_model_matrix_type: str | None = field(default=None, metadata={"check": _matrix_type})
    precon_damping_mult: Number = field(default=1.0, metadata=_POSITIVE)
    precon_damping_schedule: Schedule | None = field(
        default=None, metadata=_function(is_optional=True)
    )
    norm_constraint: Number | None = field(default=None, metadata=_POSITIVE_OR_NONE)
    use_step_rejection: bool = False
    reject_damping_increase_factor: Number = field(
        default=2.0, metadata=_number(lambda x: x >= 1, "at least one")
    )
    num_burnin_steps: int = field(
        default=10,
        metadata=_number(
            lambda x: isinstance(x, int) and x >= 0,
            "a number of steps, an integer of zero or more",
        ),
    )
    batch_process_func: Callable[[PyTree], PyTree] | None = field(
        default=None, metadata=_FUNCTION_OR_NONE
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high, initial = self.min_damping, self.max_damping, self.initial_damping
        lower, upper = self.damping_lower_threshold, self.damping_upper_threshold
        for name in ("learning_rate", "momentum", "damping"):
            _require(
                not getattr(self, f"use_adaptive_{name}")
                or getattr(self, f"{name}_schedule") is None,
                f"use_adaptive_{name}=True and {name}_schedule contradict each other; give one of "
                f"them.",
            )
        _require(
            self.norm_constraint is None or not self.use_adaptive_learning_rate,
            f"norm_constraint={self.norm_constraint} and use_adaptive_learning_rate=True "
            f"contradict each other: an adaptive learning rate determines the length of a step. "
            f"Give one of them.",
        )
        _require(
            not self.use_adaptive_damping or initial is not None,
            "use_adaptive_damping=True needs initial_damping, the value to start from.",
        )
        _require(
            self.use_adaptive_damping or initial is None,
            f"initial_damping={initial} is the initial value of an adaptive damping, but "
            f"use_adaptive_damping=False. Set use_adaptive_damping=True, or give damping to step.",
        )
        _require(
            not self.use_initial_damping_calibration
            or (self.use_adaptive_damping and self.num_burnin_steps > 0),
            "use_initial_damping_calibration=True finds the initial value of an adaptive damping, "
            "with the curvature of burn-in. Set use_adaptive_damping=True and num_burnin_steps to "
            "one or more.",
        )
        _require(low <= high, f"min_damping={low} is larger than max_damping={high}.")
        _require(
            lower <= upper,
            f"damping_lower_threshold={lower} is larger than damping_upper_threshold={upper}.",
        )
        _require(
            initial is None or low <= initial <= high,
            f"initial_damping={initial} is not between min_damping={low} and max_damping={high}.",
        )

    @property
    def learning_rate(self) -> Hyperparameter:
        """The source of the learning rate."""
        return ADAPTIVE if self.use_adaptive_learning_rate else self.learning_rate_schedule

    @property
    def momentum(self) -> Hyperparameter:
        """The source of the momentum."""
        return ADAPTIVE if self.use_adaptive_momentum else self.momentum_schedule

    @property
    def damping(self) -> Hyperparameter:
        """The source of the damping."""
        return ADAPTIVE if self.use_adaptive_damping else self.damping_schedule

    @property
    def needs_loss(self) -> bool:
        """Whether a step depends on the loss itself, besides its gradient."""
        return self.use_adaptive_damping or self.use_step_rejection


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerConfig(KFACConfig):
    """Options of K-FAC, of the user-supplied function, devices, compilation and statistics."""

    value_and_grad_func: Fun = field(
        metadata=_function(" Give jax.value_and_grad(loss), for example.")
    )
    value_func_has_aux: bool = False
    value_func_has_state: bool = False
    value_func_has_rng: bool = False
    value_func_for_estimator: Fun | None = field(default=None, metadata=_FUNCTION_OR_NONE)
    multi_device: bool = False
    mesh: Mesh | None = None
    pmap_axis_name: str = "kfac_axis"
    shard_state: bool = False
    debug: bool = False
    donate_buffers: bool = True
    forbid_setting_attributes_after_finalize: bool = True
    modifiable_attribute_exceptions: Sequence[str] = field(default=(), metadata=_STRINGS)
    include_norms_in_stats: bool = False
    include_per_param_norms_in_stats: bool = False
    include_registered_loss_in_stats: bool = False
    invalid_metric_value: Number | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        has_devices = self.multi_device or self.mesh is not None
        _require(
            has_devices or not self.shard_state,
            "shard_state=True shards the state over devices, but multi_device=False and "
            "mesh=None. Give one of them.",
        )
        budget = self.memory_budget
        is_fraction = isinstance(budget, float) or (isinstance(budget, str) and "%" in budget)
        _require(
            not (is_fraction and has_devices and jax.process_count() > 1),
            f"memory_budget={budget!r} is a fraction of the memory of a process, which may differ "
            f"between processes, but all must run the same program. Give bytes, such as '2GiB'.",
        )
        _require(
            not (self.shard_state and self.custom_estimator_ctor is not None),
            "shard_state=True has an estimator of its own, which custom_estimator_ctor cannot "
            "replace. Give one of them.",
        )
        check_mesh(self.mesh, self.pmap_axis_name)

    @property
    def axis_name(self) -> str | None:
        """The name of the mesh axis along which batches are sharded; None on one device."""
        has_axis = (self.multi_device or self.mesh is not None) and not self.debug
        return axis_of(self.mesh, self.pmap_axis_name) if has_axis else None

    @property
    def num_shards(self) -> int | None:
        """The number of devices over which the state is sharded; None if it is replicated."""
        axis = self.axis_name
        return num_devices(self.mesh, axis) if self.shard_state and axis is not None else None


def check_given(name: str, hyperparameter: Hyperparameter, value: ArrayLike | None) -> None:
    """Check that `step` was given a value if and only if the configuration has no source for it."""
    if hyperparameter is None:
        if value is None:
            raise ValueError(
                f"{where()}: give {name}= to step, or one of {name}_schedule and "
                f"use_adaptive_{name} to the constructor."
            )
    elif value is not None:
        is_adaptive = isinstance(hyperparameter, Adaptive)
        adaptive = f"the constructor has use_adaptive_{name}=True"
        reason = adaptive if is_adaptive else f"{name}_schedule was given to the constructor"
        raise ValueError(f"{where()}: step was given {name}={value}, but {reason}. Leave it out.")


def as_scalar(
    name: str, value: ArrayLike | None, dtype: np.dtype, shape: tuple[int, ...] = ()
) -> Array | None:
    """Return a number as an array of the given dtype, repeated to a shape.

    A Python float and a float32 array then run the same compiled program.
    """
    if value is None:
        return None
    if jnp.shape(value) not in ((), shape):
        form = (
            f"once, or as an array of shape {shape}" if shape else "once, also on several devices"
        )
        raise ValueError(
            f"{where()}: {name} is one number, got an array of shape {jnp.shape(value)}. "
            f"It is given {form}."
        )
    array = jnp.asarray(value, dtype)
    return array if array.shape == shape else jnp.broadcast_to(array, shape)
