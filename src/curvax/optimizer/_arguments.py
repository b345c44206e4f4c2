"""Arguments of the constructor, checked: each by itself, and one against the other."""

from collections.abc import Mapping
from typing import Any

from curvax._checks import check_size
from curvax.curvature import check_mode

__all__ = ["check_arguments"]

_WHERE = "curvax.Optimizer"


def check_arguments(given: Mapping[str, Any]) -> None:
    """The arguments of the constructor, by name, make sense on their own and together."""
    for name in _COUNTS:
        check_size(name, given[name], _WHERE)
    for name, (is_right, expected) in _NUMBERS.items():
        if given[name] is not None and not is_right(given[name]):
            raise ValueError(f"{_WHERE}: {name} must be {expected}, got {given[name]}.")
    for is_wrong, message in _CONTRADICTIONS:
        if is_wrong(given):
            raise ValueError(f"{_WHERE}: {message.format(**given)}")
    check_mode(given["estimation_mode"])
    if not callable(given["value_and_grad_func"]):
        raise TypeError(
            f"{_WHERE}: value_and_grad_func must be a function, such as jax.value_and_grad(loss), "
            f"got {type(given['value_and_grad_func']).__name__}."
        )


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
    "num_burnin_steps": (lambda x: x == int(x) >= 0, "a number of steps, zero or more"),
    "curvature_ema": (lambda x: 0 <= x <= 1, "between zero and one"),
    "reject_damping_increase_factor": (lambda x: x >= 1, "at least one"),
}

_CONTRADICTIONS: tuple[Any, ...] = (
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
        lambda g: g["register_only_generic"] and g["strict_registration"],
        "register_only_generic=True and strict_registration=True contradict each other: generic "
        "parameters are in no layer of a known kind.",
    ),
)
