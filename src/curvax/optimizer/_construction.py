"""From the arguments of the constructor to the parts of the algorithm."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from curvax._types import PyTree
from curvax.curvature import BlockDiagonalCurvature, ImplicitExactCurvature, ShardedCurvature
from curvax.optimizer._arguments import check_arguments
from curvax.optimizer._devices import num_devices
from curvax.optimizer._function import ValueFunction
from curvax.optimizer._preconditioner import L2, Preconditioner, Schedules
from curvax.optimizer._rules import LevenbergMarquardt, Options, Rules, rule_of
from curvax.optimizer._step import Algorithm

__all__ = ["Settings", "algorithm_of", "settings_of"]


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
