"""What is around the algorithm: the user's arguments as attributes, the trace, what is compiled."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from curvax import _compat
from curvax._types import Array, PyTree
from curvax.curvature import by_leaf
from curvax.memory import parse_memory
from curvax.optimizer._budget import Sizes, sizes_within
from curvax.optimizer._construction import Settings, algorithm_of, settings_of
from curvax.optimizer._devices import SPLIT, Devices, axis_of, without_places
from curvax.optimizer._programs import Programs
from curvax.optimizer._rules import Given
from curvax.optimizer._state import OptimizerState
from curvax.optimizer._step import Algorithm

__all__ = ["Facade"]


class Facade:
    """Holds the arguments of a constructor, and makes the algorithm when it can be made.

    The arguments are attributes. They may be set until the function was traced, and afterwards if
    the user said so; then everything is made anew.
    """

    _where: str
    _settings: Settings
    _programs: Programs
    _given: dict[str, Any]
    _made: Algorithm | None
    _fitting: dict[Any, tuple[str, Algorithm]]

    def __init__(self, given: Mapping[str, Any], where: str) -> None:
        self.__dict__["_where"] = where
        self._set_up(dict(given))

    def __getattr__(self, name: str) -> Any:
        given = self.__dict__.get("_given", {})
        if name not in given:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")
        return given[name]

    def __setattr__(self, name: str, value: Any) -> None:
        given = self.__dict__.get("_given")
        if given is None:  # A class that extends this one, before it calls `__init__`.
            object.__setattr__(self, name, value)
            return
        is_forbidden = given["forbid_setting_attributes_after_finalize"]
        exceptions = given["modifiable_attribute_exceptions"]
        if self._made is not None and is_forbidden and name not in exceptions:
            raise AttributeError(
                f"{self._where}: {name} cannot be set any more, because the optimizer was used "
                f"already. Make another one; or name it in modifiable_attribute_exceptions, or say "
                f"forbid_setting_attributes_after_finalize=False."
            )
        if name in given:
            self._set_up({**given, name: value})
        else:
            object.__setattr__(self, name, value)

    @property
    def _algorithm(self) -> Algorithm:
        """The algorithm of a function that was traced already."""
        if self._made is None:
            raise ValueError(
                f"{self._where}: what the function consists of is not known before it was traced. "
                f"Call init or step first."
            )
        return self._made

    def finalize(
        self, params: PyTree, rng: Array, batch: PyTree, func_state: PyTree = None
    ) -> Algorithm:
        """Trace the function, if that was not done yet; `init` and `step` do it by themselves.

        Arguments:
            params: the parameters.
            rng: a random key.
            batch: a batch.
            func_state: the state of the function, if it has one.

        Returns:
            The algorithm: the pure functions that `init` and `step` compile.
        """
        if self._made is not None:
            return self._made
        return self._for_args(self._settings.function.arguments(params, func_state, rng, batch))

    def _for_args(self, func_args: Sequence[PyTree]) -> Algorithm:
        """As `finalize`."""
        if self._made is None:
            axis = self._axis
            if axis is not None and not _compat.is_bound(axis):
                func_args = without_places(func_args)
            made = algorithm_of(self._given, self._settings, func_args, axis)
            self.__dict__["_made"] = made
        return self._algorithm

    def _within_budget(
        self, args: Mapping[str, Any], replaced: Sequence[str], axis: str | None
    ) -> tuple[str, Algorithm]:
        """The name of the program of a step, and the algorithm it is of.

        With a memory budget, on one device, of one whose microbatches are so small that the whole
        step fits.
        """
        made, given = self._algorithm, self._given
        if given["memory_budget"] is None or given["debug"] or axis is not None:
            return "step", made
        leaves, structure = jax.tree.flatten(args)
        key = structure, _compat.call_key(leaves)
        if key not in self._fitting:
            self._fitting[key] = self._fit(len(self._fitting), args, replaced)
        return self._fitting[key]

    def _fit(
        self, number: int, args: Mapping[str, Any], replaced: Sequence[str]
    ) -> tuple[str, Algorithm]:
        names = ("params", "func_state", "rng", "batch")
        func_args = self._settings.function.arguments(*(args[name] for name in names))
        tried: dict[Any, tuple[str, Algorithm]] = {}

        def needs(sizes: Sizes) -> int:
            given = {**self._given, **sizes}
            algorithm = algorithm_of(given, settings_of(given), func_args, None)
            name = f"step {number}.{len(tried)}"
            tried[tuple(sizes.values())] = name, algorithm
            return self._programs.usage(name, algorithm.alone, args, replaced).added_bytes

        budget = parse_memory(self._given["memory_budget"])
        # The gradient is there while all else is computed; old states are if they are not donated.
        kept = args["params"], () if self._given["donate_buffers"] else args["state"]
        left = budget - sum(jnp.asarray(x).nbytes for x in jax.tree.leaves(kept))
        found = tuple(sizes_within(budget, left, needs, self._where).values())
        for sizes, (name, _) in tried.items():
            if sizes != found:
                self._programs.forget(name)
        name, algorithm = tried[found]
        self.__dict__["_made"] = algorithm
        return name, algorithm

    def _like_state(self, init: Callable[..., Any], args: Mapping[str, Any]) -> OptimizerState:
        """How a new state is placed: what is like the parameters as these, and rows are split."""
        like = OptimizerState.like_params("params")
        if not self._given["shard_state"] or self._axis is None:
            return like
        made = jax.eval_shape(init, *args.values()).estimator_state
        split = by_leaf(lambda _, position: None if position is None else SPLIT, made)
        return replace(like, estimator_state=split)

    @property
    def _axis(self) -> str | None:
        """The name of the axis of devices, if there is one."""
        given = self._given
        has_axis = (given["multi_device"] or given["mesh"] is not None) and not given["debug"]
        return axis_of(given["mesh"], given["pmap_axis_name"]) if has_axis else None

    def _check_given(self, given: Given) -> None:
        """What a call gives for learning rate, momentum and damping, if it shall give anything."""
        rules = self._settings.rules
        for rule, value in zip(
            (rules.learning_rate, rules.momentum, rules.damping), given, strict=True
        ):
            rule.check(value)

    def _set_up(self, given: dict[str, Any]) -> None:
        settings = settings_of(given)
        self.__dict__.update(_given=given, _settings=settings, _made=None)
        is_compiled, is_donating = not given["debug"], given["donate_buffers"]
        devices = None if self._axis is None else Devices(given["mesh"], self._axis)
        has_budget = given["memory_budget"] is not None
        self.__dict__["_programs"] = Programs(is_compiled, is_donating, devices, has_budget)
        self.__dict__["_fitting"] = {}
