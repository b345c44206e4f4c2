"""`LossTag`: a primitive that marks a loss in a traced program.

Dead-code elimination removes tags whose results are unused: a traced gradient function keeps only
what the gradient needs of a `jit`, a `checkpoint` or a `scan`. Each tag therefore records the line
of user code that registered it, and `noted_registrations` collects these lines during a trace, so
that the tags in the program can be compared with the registrations.
"""

import contextlib
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, cast

from jax.typing import ArrayLike

from curvax._jax import Tag, Value
from curvax._types import Array
from curvax.losses.loss_function import LossFunction

_noted: ContextVar[list[str] | None] = ContextVar("noted_registrations", default=None)


class LossTag(Tag):
    """A primitive that registers losses of one class.

    Make one tag for each class of losses, and bind it in the model:

        predictions = tag.bind(*arrays, args_names=names)

    The tag computes nothing. It returns the arrays that depend on the model's parameters, in a
    list. Compute the loss from these: where a gradient is traced, JAX may drop a tag whose results
    are unused.

    Arguments:
        cls: The class of the loss, a subclass of `LossFunction`.
        parameter_dependants: Names of the constructor's arguments that depend on the model's
            parameters.
        parameter_independants: Names of its other arguments.

    Raises:
        ValueError: If names are repeated, or none depends on parameters.

    Examples:
        Register predictions of both mean and variance.

        >>> import jax.numpy as jnp
        >>> import curvax
        >>> tag = curvax.LossTag(
        ...     curvax.NormalMeanVarianceNegativeLogProbLoss,
        ...     ["mean", "variance"],
        ...     ["targets", "weight"],
        ... )
        >>> def model(w, x, y):
        ...     mean, variance = x @ w[0], jnp.exp(x @ w[1])
        ...     names = ("mean", "variance", "targets")
        ...     return tag.bind(mean, variance, y, args_names=names)
        >>> args = (jnp.ones((2, 1)), jnp.zeros((2, 1))), jnp.ones((3, 2)), jnp.ones((3, 1))
        >>> (registered,), _ = curvax.loss_tags_vjp(model)(args)
        >>> type(registered).__name__, registered.num_parameter_dependants
        ('NormalMeanVarianceNegativeLogProbLoss', 2)
    """

    def __init__(
        self,
        cls: type[object],
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
        """The names of the arguments that depend on the model's parameters."""
        return self._dependants

    @property
    def parameter_independants_names(self) -> tuple[str, ...]:
        """The names of the other arguments."""
        return self._independants

    @property
    def least_axes(self) -> int:
        """Minimum number of axes of a prediction, the batch axis included."""
        return getattr(self._cls, "least_axes", 1)

    def loss(self, *args: ArrayLike, args_names: Sequence[str]) -> LossFunction:
        """Return the loss of the operands of a bound tag.

        Arguments:
            args: Operands of the tag.
            args_names: Their names.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> tag = curvax.LossTag(curvax.NormalMeanNegativeLogProbLoss, ["mean"], ["variance"])
            >>> loss = tag.loss(jnp.zeros((1, 2)), 0.25, args_names=("mean", "variance"))
            >>> loss.multiply_ggn((jnp.ones((1, 2)),))
            (Array([[4., 4.]], dtype=float32),)
        """
        constructor = cast("Callable[..., LossFunction]", self._cls)
        return constructor(**dict(zip(args_names, args, strict=True)))

    def bind(self, *args: Value, args_names: Sequence[str], **params: Any) -> list[Array]:
        """Register a loss in the program that is being traced.

        Arguments:
            args: Arrays: first those that depend on the model's parameters, all of them and in the
                order of the tag; then any of the others.
            args_names: Their names.
            params: Further parameters of the primitive; JAX's transformations pass them on.

        Returns:
            The arrays that depend on parameters.

        Raises:
            ValueError: If the names are not those of the tag.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> tag = curvax.LossTag(curvax.NormalMeanNegativeLogProbLoss, ["mean"], ["variance"])
            >>> tag.bind(jnp.ones((1, 2)), 0.5, args_names=("mean", "variance"))
            [Array([[1., 1.]], dtype=float32)]
        """
        if "where" in params:  # A transformation binds a tag that is bound already.
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


def least_axes_of_batch(tag: LossTag, params: Mapping[str, Any]) -> int:
    """Return the number of axes from which on predictions are a batch, not one example.

    Inside `jax.vmap`, a vector belongs to one example, and is not a batch of scalars. Axes for the
    parts of a complex number do not count.

    Arguments:
        tag: The tag of the loss.
        params: Static parameters of its equation.
    """
    least = max(tag.least_axes, 2 if params["stacked"] else 1)
    return least + params.get("num_part_axes", 0)


@contextlib.contextmanager
def noted_registrations() -> Generator[list[str]]:
    """Yield a list to which each registration of a loss appends its line of user code."""
    noted: list[str] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def _caller() -> str:
    """Return the file and line of the user code that is running."""
    frame = inspect.currentframe()
    while frame is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return "unknown" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_ours(module: str) -> bool:
    # The latter two wrap our functions when annotations are checked at run time.
    return module.partition(".")[0] in ("curvax", "beartype", "jaxtyping")
