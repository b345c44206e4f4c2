"""From the arguments of the constructor to the parts of the algorithm."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from curvax import _jax
from curvax._errors import check_size
from curvax._types import PyTree
from curvax.curvature.block_diagonal import BlockDiagonalCurvature
from curvax.curvature.estimation_modes import check_mode
from curvax.curvature.implicit import ImplicitExactCurvature
from curvax.curvature.sharded import ShardedCurvature
from curvax.maps.microbatch import microbatch
from curvax.optimizer.devices import check_mesh, num_devices
from curvax.optimizer.hyperparameters import LevenbergMarquardt, Options, Rules, rule_of
from curvax.optimizer.preconditioner import L2, Preconditioner, Schedules
from curvax.optimizer.step import Algorithm
from curvax.optimizer.value_function import ValueFunction

__all__ = ["Settings", "algorithm_of", "check_arguments", "settings_of"]


# Arguments of the constructor, checked: each by itself, and one against the other.

_WHERE = "curvax.Optimizer"


def check_arguments(given: Mapping[str, Any]) -> None:
    """The arguments of the constructor, by name, make sense on their own and together."""
    for name in _COUNTS:
        if check_size(name, given[name], _WHERE) is None:
            raise TypeError(f"{_WHERE}: {name} must be a Python integer, got None.")
    for name, (is_right, expected) in _NUMBERS.items():
        _check_number(name, given[name], is_right, expected)
    for name in _FUNCTIONS:
        if not (callable(given[name]) or (given[name] is None and name in _OPTIONAL)):
            raise TypeError(
                f"{_WHERE}: {name} must be a function, got {type(given[name]).__name__} "
                f"{given[name]!r}.{_HINTS.get(name, '')}"
            )
    for name in _SEQUENCES:
        if isinstance(given[name], str):
            raise TypeError(
                f"{_WHERE}: {name} must be a sequence of strings, got the string {given[name]!r}. "
                f"Write ({given[name]!r},)."
            )
    for is_wrong, message in _CONTRADICTIONS:
        if is_wrong(given):
            raise ValueError(f"{_WHERE}: {message.format(**given)}")
    check_mode(given["estimation_mode"])
    check_mesh(given["mesh"], given["pmap_axis_name"])
    sizes = {name: given[name] for name in ("microbatch_size", "memory_budget")}
    microbatch(len, 0, **sizes)  # A wrong size or budget is an error here.


def _check_number(name: str, value: Any, is_right: Any, expected: str) -> None:
    if (value is None and name in _OPTIONAL) or _jax.is_tracer(value):
        return
    is_number = isinstance(value, int | float | np.generic | np.ndarray | jax.Array)
    if not is_number or np.ndim(value) or isinstance(value, bool):
        raise TypeError(f"{_WHERE}: {name} must be a number, got {value!r}.")
    if not is_right(value):
        raise ValueError(f"{_WHERE}: {name} must be {expected}, got {value}.")


def _is_fraction(budget: Any) -> bool:
    return isinstance(budget, float) or (isinstance(budget, str) and "%" in budget)


_COUNTS = (
    "inverse_update_period",
    "curvature_update_period",
    "damping_adaptation_interval",
    "num_estimator_samples",
)

_NUMBERS: dict[str, Any] = {
    "l2_reg": (lambda x: x >= 0, "zero or more"),
    "initial_damping": (lambda x: x > 0, "positive"),
    "min_damping": (lambda x: x >= 0, "zero or more"),
    "damping_adaptation_decay": (lambda x: 0 < x <= 1, "above zero and at most one"),
    "norm_constraint": (lambda x: x > 0, "positive"),
    "max_damping": (lambda x: x > 0, "positive"),
    "damping_lower_threshold": (lambda x: x == x, "a number"),
    "damping_upper_threshold": (lambda x: x == x, "a number"),
    "precon_power": (lambda x: x == x, "a number"),
    "num_burnin_steps": (
        lambda x: isinstance(x, int) and x >= 0,
        "a number of steps, an integer of zero or more",
    ),
    "curvature_ema": (lambda x: 0 <= x <= 1, "between zero and one"),
    "reject_damping_increase_factor": (lambda x: x >= 1, "at least one"),
}

_OPTIONAL = {
    "initial_damping",
    "norm_constraint",
    "learning_rate_schedule",
    "momentum_schedule",
    "damping_schedule",
    "batch_process_func",
    "value_func_for_estimator",
}
"""What may be None."""

_FUNCTIONS = (
    "value_and_grad_func",
    "learning_rate_schedule",
    "momentum_schedule",
    "damping_schedule",
    "batch_process_func",
    "batch_size_extractor",
    "value_func_for_estimator",
)

_HINTS = {
    "value_and_grad_func": " Give jax.value_and_grad(loss), for example.",
    "learning_rate_schedule": " For a constant, give learning_rate to step.",
    "momentum_schedule": " For a constant, give momentum to step.",
    "damping_schedule": " For a constant, give damping to step.",
}

_SEQUENCES = (
    "patterns_to_skip",
    "modifiable_attribute_exceptions",
    "regularized_parameters_path_exclusions",
)

_CONTRADICTIONS: tuple[Any, ...] = (
    (
        lambda g: g["shard_state"] and not g["multi_device"] and g["mesh"] is None,
        "shard_state=True splits the state among devices, but multi_device=False and mesh=None. "
        "Give one of them.",
    ),
    (
        lambda g: g["norm_constraint"] is not None and g["use_adaptive_learning_rate"],
        "norm_constraint={norm_constraint} and use_adaptive_learning_rate=True contradict each "
        "other: an adaptive learning rate decides itself how long a step is. Give one of them.",
    ),
    (
        lambda g: g["use_adaptive_damping"] and g["initial_damping"] is None,
        "use_adaptive_damping=True needs initial_damping, where it begins.",
    ),
    (
        lambda g: not g["use_adaptive_damping"] and g["initial_damping"] is not None,
        "initial_damping={initial_damping} is where an adaptive damping begins, but "
        "use_adaptive_damping=False. Say use_adaptive_damping=True, or give damping to step.",
    ),
    (
        lambda g: g["min_damping"] > g["max_damping"],
        "min_damping={min_damping} is larger than max_damping={max_damping}.",
    ),
    (
        lambda g: g["damping_lower_threshold"] > g["damping_upper_threshold"],
        "damping_lower_threshold={damping_lower_threshold} is larger than "
        "damping_upper_threshold={damping_upper_threshold}.",
    ),
    (
        lambda g: (
            g["initial_damping"] is not None
            and not g["min_damping"] <= g["initial_damping"] <= g["max_damping"]
        ),
        "initial_damping={initial_damping} is not between min_damping={min_damping} and "
        "max_damping={max_damping}.",
    ),
    (
        lambda g: g["microbatch_size"] is not None and g["memory_budget"] is not None,
        "microbatch_size={microbatch_size} and memory_budget={memory_budget!r} say the same thing; "
        "give one of them.",
    ),
    (
        lambda g: (
            _is_fraction(g["memory_budget"])
            and (g["multi_device"] or g["mesh"] is not None)
            and jax.process_count() > 1
        ),
        "memory_budget={memory_budget!r} is a share of what a process has, which may differ "
        "between processes, but all must run the same program. Give bytes, such as '2GiB'.",
    ),
    (
        lambda g: g["register_only_generic"] and g["strict_registration"],
        "register_only_generic=True and strict_registration=True contradict each other: generic "
        "parameters are in no layer of a known kind.",
    ),
)


class Settings(NamedTuple):
    """The parts that do not depend on what the function is given."""

    function: ValueFunction
    rules: Rules
    adaptation: LevenbergMarquardt
    l2: L2
    schedules: Schedules
    options: Options


def settings_of(given: Mapping[str, Any]) -> Settings:
    """The arguments of the constructor, by name, checked and put together."""
    check_arguments(given)
    named = lambda name: rule_of(name, given[f"use_adaptive_{name}"], given[f"{name}_schedule"])
    return Settings(
        function=ValueFunction(
            given["value_and_grad_func"],
            given["value_func_has_aux"],
            given["value_func_has_state"],
            given["value_func_has_rng"],
            given["microbatch_size"],
            given["memory_budget"],
        ),
        rules=Rules(named("learning_rate"), named("momentum"), named("damping")),
        adaptation=LevenbergMarquardt(
            given["initial_damping"],
            given["min_damping"],
            given["max_damping"],
            given["damping_adaptation_interval"],
            given["damping_adaptation_decay"],
            given["damping_lower_threshold"],
            given["damping_upper_threshold"],
        ),
        l2=L2(given["l2_reg"], tuple(given["regularized_parameters_path_exclusions"])),
        schedules=Schedules(
            given["curvature_ema"],
            given["curvature_update_period"],
            given["inverse_update_period"],
            given["stagger_inverses"],
        ),
        options=Options(
            given["norm_constraint"],
            given["include_damping_in_quad_change"],
            given["always_use_exact_qmodel_for_damping_adjustment"],
            given["use_step_rejection"],
            given["reject_damping_increase_factor"],
            given["include_norms_in_stats"],
            given["include_per_param_norms_in_stats"],
            given["include_registered_loss_in_stats"],
        ),
    )


def algorithm_of(
    given: Mapping[str, Any], settings: Settings, func_args: Sequence[PyTree], axis: str | None
) -> Algorithm:
    """The whole, for a function of such arguments; the last of these is the batch."""
    func = settings.function.for_estimator(given["value_func_for_estimator"], func_args)
    sizes = {name: given[name] for name in ("microbatch_size", "memory_budget")}
    batch = {"batch_index": len(func_args) - 1}
    kind: Any = BlockDiagonalCurvature
    if given["shard_state"] and axis is not None:
        count = num_devices(given["mesh"], axis)
        kind = functools.partial(ShardedCurvature, num_devices=count, axis_name=axis)
    estimator = kind(
        func,
        0,
        given["estimation_mode"],
        given["layer_tag_to_block_ctor"],
        distributed_multiplies=given["distributed_precon_apply"],
        distributed_cache_updates=given["distributed_inverses"],
        **sizes,
        **batch,
        num_samples=given["num_estimator_samples"],
        register_only_generic=given["register_only_generic"],
        patterns_to_skip=given["patterns_to_skip"],
        strict=given["strict_registration"],
        **dict(given["auto_register_kwargs"] or {}),
    )
    estimator.finalize(func_args)
    extractor = given["batch_size_extractor"]
    power, is_exact = given["precon_power"], given["use_exact_inverses"]
    return Algorithm(
        settings.function,
        Preconditioner(estimator, settings.l2, settings.schedules, power, is_exact, axis),
        ImplicitExactCurvature(func, 0, extractor, **batch, **sizes),
        extractor,
        settings.rules,
        settings.adaptation,
        settings.options,
        given["num_burnin_steps"],
        axis,
    )
