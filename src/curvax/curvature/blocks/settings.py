"""Settings that blocks read when they are constructed or traced.

They are context variables. A setting holds from the call on, in the context of the call; as a
context manager, it holds inside the `with` statement only.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType, TracebackType
from typing import Generic, TypeVar

from curvax.curvature.blocks.base import BlockCtor

T = TypeVar("T")

_max_parallel_elements: ContextVar[int] = ContextVar("max_parallel_elements", default=2**23)
_eigen_threshold: ContextVar[int] = ContextVar("eigen_decomposition_threshold", default=5)
_user_ctors: ContextVar[Mapping[str, BlockCtor]] = ContextVar(
    "tag_to_block_ctor", default=MappingProxyType({})
)


class Setting(Generic[T]):
    """A setting that is in force. As a context manager, it is undone at the end of `with`."""

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
    """Set how many elements of per-example gradients a block holds at once.

    Blocks that need per-example gradients compute them in chunks of examples. Larger chunks are
    faster and need more memory. The setting is read when an update is traced.

    Arguments:
        value: Maximum number of elements of a chunk.

    Returns:
        The setting, which can be used as a context manager.

    Raises:
        ValueError: If the value is less than one.

    Examples:
        >>> import curvax
        >>> with curvax.set_max_parallel_elements(10_000):
        ...     curvax.get_max_parallel_elements()
        10000
        >>> curvax.get_max_parallel_elements() == 2**23
        True
    """
    return Setting(_max_parallel_elements, _positive("set_max_parallel_elements", value))


def get_max_parallel_elements() -> int:
    """Return how many elements of per-example gradients a block holds at once.

    Returns:
        The value that `set_max_parallel_elements` set, by default 2**23.

    Examples:
        >>> import curvax
        >>> curvax.get_max_parallel_elements() == 2**23
        True
    """
    return _max_parallel_elements.get()


def set_default_eigen_decomposition_threshold(value: int) -> Setting[int]:
    """Set the maximum number of powers of a `Full` block that are cached one by one.

    If more powers are requested, the block caches eigenvalues and eigenvectors instead, from which
    any power follows. A block reads the setting when it is constructed.

    Arguments:
        value: Maximum number of powers.

    Returns:
        The setting, which can be used as a context manager.

    Raises:
        ValueError: If the value is less than one.

    Examples:
        >>> import curvax
        >>> with curvax.set_default_eigen_decomposition_threshold(2):
        ...     curvax.get_default_eigen_decomposition_threshold()
        2
        >>> curvax.get_default_eigen_decomposition_threshold()
        5
    """
    name = "set_default_eigen_decomposition_threshold"
    return Setting(_eigen_threshold, _positive(name, value))


def get_default_eigen_decomposition_threshold() -> int:
    """Return the maximum number of powers of a `Full` block that are cached one by one.

    Examples:
        >>> import curvax
        >>> curvax.get_default_eigen_decomposition_threshold()
        5
    """
    return _eigen_threshold.get()


def set_default_tag_to_block_ctor(
    tag_name: str, block_ctor: BlockCtor
) -> Setting[Mapping[str, BlockCtor]]:
    """Set the default class of blocks for the layers of a tag.

    Estimators use it for layers that neither `layer_tag_to_block_ctor` nor `index_to_block_ctor`
    names.

    Arguments:
        tag_name: Name of the tag, such as "dense_tag", or "dense" for short.
        block_ctor: A class of blocks, or a function from the equation of the layer's tag and a name
            to a block.

    Returns:
        The setting, which can be used as a context manager.

    Raises:
        TypeError: If `block_ctor` is not callable.

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
    return Setting(_user_ctors, {**_user_ctors.get(), full_name(tag_name): block_ctor})


def get_default_tag_to_block_ctor(tag_name: str) -> BlockCtor:
    """Return the default class of blocks for the layers of a tag.

    Arguments:
        tag_name: Name of the tag, such as "dense_tag", or "dense" for short.

    Returns:
        The class, or a function that makes blocks.

    Raises:
        ValueError: If there is none.

    Examples:
        >>> import curvax
        >>> curvax.get_default_tag_to_block_ctor("conv2d").__name__
        'Conv2DTwoKroneckerFactored'
    """
    from curvax.curvature.blocks.defaults import DEFAULT_BLOCKS

    known: dict[str, BlockCtor] = {**DEFAULT_BLOCKS, **_user_ctors.get()}
    name = full_name(tag_name)
    if name not in known:
        raise ValueError(
            f"curvax: no block is known for the tag {tag_name!r}, only for "
            f"{', '.join(sorted(known))}. Choose one with layer_tag_to_block_ctor or "
            f"curvax.set_default_tag_to_block_ctor."
        )
    return known[name]


def full_name(tag_name: str) -> str:
    """Return the full name of a tag whose suffix "_tag" may have been left out."""
    return tag_name if tag_name.endswith("_tag") else f"{tag_name}_tag"


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"curvax.{name}: expected a positive int, got {value!r}.")
    return value
