"""`LossTag`: says which part of a program is a loss, and of which kind.

Tags whose results nobody uses can vanish: a gradient function, traced, keeps of a `jit`, a
`checkpoint` or a `scan` only what the gradient needs. Each tag therefore knows where it was
registered, and `noted_registrations` collects these places while something is traced, so that the
tags that are found can be compared with those that were made.
"""

import contextlib
import inspect
from collections.abc import Generator, Sequence
from contextvars import ContextVar
from typing import Any

from curvax._jax import Tag

_noted: ContextVar[list[str] | None] = ContextVar("noted_registrations", default=None)


class LossTag(Tag):
    """A primitive that tags a loss: what it depends on, by name.

    It is called as

        kept = tag.bind(*arrays, args_names=names)

    and does nothing: the arrays that depend on the parameters are returned as they are, in a list.
    They come first, in the order given here; others may be left out.

    Arguments:
        cls: the class of the loss, a `LossFunction`.
        parameter_dependants: the names of the arguments of the class that depend on parameters.
        parameter_independants: the names of its other arguments.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> tag = curvax.LossTag(
        ...     curvax.NormalMeanNegativeLogProbLoss, ["mean"], ["targets", "variance", "weight"]
        ... )
        >>> (mean,) = tag.bind(jnp.ones((2, 1)), 0.5, args_names=("mean", "variance"))
    """

    def __init__(
        self,
        cls: type[Any],
        parameter_dependants: Sequence[str],
        parameter_independants: Sequence[str],
    ) -> None:
        dependants, independants = tuple(parameter_dependants), tuple(parameter_independants)
        if not dependants or len({*dependants, *independants}) < len(dependants + independants):
            raise ValueError(
                f"curvax.LossTag: the names of a loss's arguments must differ, and at least one "
                f"must depend on parameters, got {dependants} and {independants}."
            )
        super().__init__(f"{cls.__name__}_tag", len(dependants), multiple_results=True)
        self._cls = cls
        self._dependants, self._independants = dependants, independants

    @property
    def parameter_dependants_names(self) -> tuple[str, ...]:
        """The names of the arguments that depend on parameters."""
        return self._dependants

    @property
    def parameter_independants_names(self) -> tuple[str, ...]:
        """The names of the other arguments."""
        return self._independants

    @property
    def least_axes(self) -> int:
        """How many axes a prediction has at least, with that of the batch."""
        return getattr(self._cls, "least_axes", 1)

    def loss(self, *args: Any, args_names: Sequence[str]) -> Any:
        """The loss itself, made of the operands of a tag."""
        return self._cls(**dict(zip(args_names, args, strict=True)))

    def bind(self, *args: Any, args_names: Sequence[str], **params: Any) -> list[Any]:
        """Tag a loss. Returns the arrays that depend on parameters."""
        if "where" in params:  # A transformation calls it again.
            return super().bind(*args, args_names=args_names, **params)
        names, num = tuple(args_names), self._num_kept
        known = names[:num] == self._dependants and set(names[num:]) <= set(self._independants)
        if not known or len(set(names)) < len(names) or len(args) != len(names):
            raise ValueError(
                f"curvax: {self.name} takes {', '.join(self._dependants)} and any of "
                f"{', '.join(self._independants) or 'nothing else'}, each by its name, got "
                f"{len(args)} arrays named {names}."
            )
        where = _caller()
        noted = _noted.get()
        if noted is not None:
            noted.append(where)
        return super().bind(*args, args_names=names, where=where, **params)


@contextlib.contextmanager
def noted_registrations() -> Generator[list[str]]:
    """A list that grows by one place in the user's code with each loss that is registered."""
    noted: list[str] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def _caller() -> str:
    """The line of the user's code that is being run."""
    frame = inspect.currentframe()
    while frame is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return "unknown" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_ours(module: str) -> bool:
    # The latter two are around our functions while their arguments are checked.
    return module.partition(".")[0] in ("curvax", "beartype", "jaxtyping")
