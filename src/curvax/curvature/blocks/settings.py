"""Settings that blocks read when they are made or traced.

They are context variables: a setting holds in the context in which it is made, from then on; or,
where it is used in a `with` statement, inside that.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType, TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_max_parallel_elements: ContextVar[int] = ContextVar("max_parallel_elements", default=2**23)
_eigen_threshold: ContextVar[int] = ContextVar("eigen_decomposition_threshold", default=5)
_own_ctors: ContextVar[Mapping[str, Any]] = ContextVar(
    "tag_to_block_ctor", default=MappingProxyType({})
)


class Setting(Generic[T]):
    """A setting that was made. Used in a `with` statement, it is undone at its end."""

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self._undo: Callable[[], None]
        token = variable.set(value)
        self._undo = lambda: variable.reset(token)

    def __enter__(self) -> "Setting[T]":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._undo()


def set_max_parallel_elements(value: int) -> Setting[int]:
    """Set how many elements blocks that go through gradients of examples handle at once.

    A larger number is faster and needs more memory. It is read when an update is traced.

    Arguments:
        value: the number.

    Returns:
        The setting, which can be used in a `with` statement.

    Raises:
        ValueError: if it is less than one.
    """
    return Setting(_max_parallel_elements, _positive("set_max_parallel_elements", value))


def get_max_parallel_elements() -> int:
    """How many elements blocks that go through gradients of examples handle at once."""
    return _max_parallel_elements.get()


def set_default_eigen_decomposition_threshold(value: int) -> Setting[int]:
    """Set up to how many powers of a `Full` block are cached one by one.

    Of more powers, the eigenvalues and eigenvectors are cached instead, from which any power
    follows.

    Arguments:
        value: the number of powers.

    Returns:
        The setting, which can be used in a `with` statement.

    Raises:
        ValueError: if it is less than one.
    """
    name = "set_default_eigen_decomposition_threshold"
    return Setting(_eigen_threshold, _positive(name, value))


def get_default_eigen_decomposition_threshold() -> int:
    """Up to how many powers of a `Full` block are cached one by one."""
    return _eigen_threshold.get()


def set_default_tag_to_block_ctor(
    tag_name: str, block_ctor: Callable[..., Any]
) -> Setting[Mapping[str, Any]]:
    """Set which block is made for the layers of a tag, where an estimator is not told otherwise.

    Arguments:
        tag_name: the name of the tag, such as "dense_tag", or "dense" for short.
        block_ctor: a class of blocks, or a function of an equation and a name that makes one.

    Returns:
        The setting, which can be used in a `with` statement.

    Raises:
        TypeError: if the second is no function.

    Examples:
        >>> import curvax
        >>> with curvax.set_default_tag_to_block_ctor("dense_tag", curvax.DenseDiagonal):
        ...     curvax.get_default_tag_to_block_ctor("dense_tag").__name__
        'DenseDiagonal'
        >>> curvax.get_default_tag_to_block_ctor("dense_tag").__name__
        'DenseTwoKroneckerFactored'
    """
    if not callable(block_ctor):
        raise TypeError(
            f"curvax.set_default_tag_to_block_ctor: block_ctor makes blocks, got {block_ctor!r}."
        )
    return Setting(_own_ctors, {**_own_ctors.get(), full_name(tag_name): block_ctor})


def get_default_tag_to_block_ctor(tag_name: str) -> Callable[..., Any]:
    """The class of blocks that is used for the layers of a tag.

    Arguments:
        tag_name: the name of the tag, such as "dense_tag", or "dense" for short.

    Returns:
        The class, or a function that makes blocks.

    Raises:
        ValueError: if there is none.
    """
    from curvax.curvature.blocks.defaults import DEFAULT_BLOCKS

    known = {**DEFAULT_BLOCKS, **_own_ctors.get()}
    name = full_name(tag_name)
    if name not in known:
        raise ValueError(
            f"curvax: no block is known for the tag {tag_name!r}, only for "
            f"{', '.join(sorted(known))}. Say which with layer_tag_to_block_ctor or "
            f"curvax.set_default_tag_to_block_ctor."
        )
    return known[name]


def full_name(tag_name: str) -> str:
    """The name of a tag that may be given without its ending."""
    return tag_name if tag_name.endswith("_tag") else f"{tag_name}_tag"


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"curvax.{name}: expected a positive int, got {value!r}.")
    return value
