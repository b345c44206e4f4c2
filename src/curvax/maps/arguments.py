"""What a map is called with: which leaves of the arguments are batched, along which axis.

Everything a caller can get wrong about axes and lengths is found here, once, and reported in the
caller's own words: parameter names and leaf paths, with the sizes that disagree. Past this point
a map knows a flat list of arrays, an axis for each, and one length.
"""

import inspect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from curvax._errors import as_integer, where
from curvax._tree import broadcast_prefix, leaf_name
from curvax._types import Array, Axes, Fun, PyTree, TreeDef


@dataclass(frozen=True)
class Batch:
    """The arguments of one call, with their batched leaves set apart.

    `arrays` and `axes` are those of the batched leaves, whose positions among all `leaves` are
    `positions`. All other leaves stay what the caller passed, arrays or not, unless their arrays
    are set apart too: `unbatched`. `names` are what errors call the leaves.
    """

    arrays: tuple[Array, ...]
    axes: tuple[int, ...]
    length: int
    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    structure: TreeDef
    positions: tuple[int, ...]
    unbatched: tuple[Array, ...] = ()
    unbatched_positions: tuple[int, ...] = ()

    def call(self, fun: Fun, arrays: Sequence[Array]) -> Any:
        """`fun` on the call's arguments, with these arrays for the batched leaves."""
        filled = list(self.leaves)
        pairs = zip(
            (*self.positions, *self.unbatched_positions), (*arrays, *self.unbatched), strict=True
        )
        for position, array in pairs:
            filled[position] = array
        args, kwargs = jax.tree.unflatten(self.structure, filled)
        return fun(*args, **kwargs)

    def with_unbatched(self) -> "Batch":
        """Return the batch with the arrays that are not batched set apart, too."""
        others = [i for i in range(len(self.leaves)) if i not in self.positions]
        positions = [i for i in others if isinstance(self.leaves[i], jax.Array)]
        unbatched = tuple(self.leaves[i] for i in positions)
        return replace(self, unbatched=unbatched, unbatched_positions=tuple(positions))


def mapped_arguments(
    fun: Fun, args: Sequence[Any], kwargs: Mapping[str, Any], in_axes: Axes
) -> Batch:
    """The batch of a call to a mapped `fun`: `in_axes` as in `jax.vmap`, keywords over axis 0."""
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    if isinstance(in_axes, tuple) and len(in_axes) != len(args):
        raise ValueError(
            f"{where()}: in_axes has {len(in_axes)} entries but the function was called with "
            f"{len(args)} positional arguments. Give one entry for each, or one axis for all; "
            f"keyword arguments are always mapped over axis 0."
        )
    if not isinstance(in_axes, tuple):
        in_axes = (in_axes,) * len(args)
    return _batch(fun, args, kwargs, in_axes, dict.fromkeys(kwargs, 0))


def batched_arguments(
    fun: Fun,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    argnums: int | Sequence[int],
    argnames: str | Sequence[str],
    in_axes: Axes,
) -> Batch:
    """The batch of a call to `fun`, some of whose arguments are batches.

    They are named by `argnums` and `argnames`, however they are passed. `in_axes` is one axis (or
    prefix) for all of them, or a sequence with an entry for each of `argnums`, then `argnames`.
    """
    numbers = tuple(argnums) if isinstance(argnums, Sequence) else (operator.index(argnums),)
    names = (argnames,) if isinstance(argnames, str) else tuple(argnames)
    if isinstance(in_axes, tuple | list):
        if len(in_axes) != len(numbers) + len(names):
            raise ValueError(
                f"{where()}: in_axes has {len(in_axes)} entries for {len(numbers) + len(names)} "
                f"batch arguments (argnums={argnums!r}, argnames={argnames!r}). Give one entry "
                f"for each, or one axis for all."
            )
        axes = list(in_axes)
    else:
        axes = [in_axes] * (len(numbers) + len(names))

    found: dict[int | str, Axes] = {}
    for who, axis in zip((*numbers, *names), axes, strict=True):
        place = _locate(who, fun, len(args), kwargs)
        if place in found:
            raise ValueError(
                f"{where()}: the batch argument {who!r} is named twice "
                f"(argnums={argnums!r}, argnames={argnames!r})."
            )
        if place is not None:
            found[place] = axis
    args_axes = [found.get(i) for i in range(len(args))]
    return _batch(fun, args, kwargs, args_axes, {k: found.get(k) for k in kwargs})


def normal_axis(axis: Any, ndim: int, what: str) -> int:
    """`axis` counted from the front, for an array with `ndim` axes that errors call `what`."""
    number = as_integer(axis)
    if number is None:
        raise TypeError(f"{where()}: the axis of {what} must be an integer or None, got {axis!r}.")
    if not -ndim <= number < ndim:
        raise ValueError(f"{where()}: axis {number} is out of range for {what} with {ndim} axes.")
    return number % ndim


def _batch(
    fun: Fun,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    args_axes: Sequence[Axes],
    kwargs_axes: Mapping[str, Axes],
) -> Batch:
    names, leaves, axes = [], [], []
    arguments = [*zip(_names(fun, len(args)), args, args_axes, strict=True)]
    arguments += [(name, kwargs[name], kwargs_axes[name]) for name in sorted(kwargs)]
    for name, argument, prefix in arguments:
        paths = jax.tree_util.tree_leaves_with_path(argument)
        names += [leaf_name(name, path) for path, _ in paths]
        leaves += [leaf for _, leaf in paths]
        axes += _axes_of(argument, prefix, name)

    mapped = [i for i, axis in enumerate(axes) if axis is not None]
    arrays = tuple(_array(leaves[i], names[i]) for i in mapped)
    for i, array in zip(mapped, arrays, strict=True):
        axes[i] = normal_axis(axes[i], array.ndim, f"{names[i]} of shape {array.shape}")
    lengths = [(names[i], array.shape[axes[i]]) for i, array in zip(mapped, arrays, strict=True)]
    return Batch(
        arrays=arrays,
        axes=tuple(axes[i] for i in mapped),
        length=_common_length(lengths),
        leaves=tuple(leaves),
        names=tuple(names),
        structure=jax.tree.structure((tuple(args), dict(kwargs))),
        positions=tuple(mapped),
    )


def _axes_of(argument: PyTree, prefix: Axes, name: str) -> list[Any]:
    try:
        return broadcast_prefix(prefix, argument)
    except ValueError as error:
        raise ValueError(
            f"{where()}: the axes {prefix!r} given for {name} are not a prefix of its structure "
            f"{jax.tree.structure(argument)}: {error}"
        ) from None


def _array(leaf: Any, name: str) -> Array:
    try:
        array = jnp.asarray(leaf)
    except TypeError:
        raise TypeError(
            f"{where()}: {name} is to be split but is no array: {type(leaf).__name__} {leaf!r}. "
            f"Set its axis to None to pass it as it is."
        ) from None
    if array.ndim == 0:
        raise ValueError(
            f"{where()}: {name} has no axis to split: it is zero-dimensional. Give it a batch "
            f"axis, or set its axis to None to pass it whole each time."
        )
    return array


def _common_length(lengths: Sequence[tuple[str, int]]) -> int:
    if not lengths:
        raise ValueError(
            f"{where()}: there is nothing to map over: no argument has a batched leaf. Pass at "
            f"least one array whose axis is not None."
        )
    if len({length for _, length in lengths}) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths)
        raise ValueError(
            f"{where()}: all batched arrays must have the same size along their batch axis, "
            f"but {listed}."
        )
    return lengths[0][1]


def _positions(fun: Fun) -> list[inspect.Parameter]:
    """The parameters of `fun` that can be passed by position, if Python can tell."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _names(fun: Fun, count: int) -> list[str]:
    known = [p.name for p in _positions(fun)][:count]
    return known + [f"argument {i}" for i in range(len(known), count)]


def _locate(who: int | str, fun: Fun, num_args: int, kwargs: Mapping[str, Any]) -> int | str | None:
    """The position or the keyword under which a batch argument was passed.

    None if it was left out and is None by default.
    """
    parameters = _positions(fun)
    names = [p.name for p in parameters]
    if isinstance(who, str):
        position, keyword = (names.index(who) if who in names else None), who
    else:
        count = max(num_args, len(names)) if kwargs else num_args
        position = who if who >= 0 else who + count
        named = 0 <= position < len(names)
        keyword = names[position] if named else None
        if named and parameters[position].kind is inspect.Parameter.POSITIONAL_ONLY:
            keyword = None
    if position is not None and 0 <= position < num_args:
        return position
    if keyword is not None and keyword in kwargs:
        return keyword
    if keyword is not None and _defaults_to_none(fun, keyword):
        return None
    raise ValueError(
        f"{where()}: the batch argument {who if keyword is None else keyword!r} is missing: the "
        f"function was called with {num_args} positional arguments and the keywords "
        f"{sorted(kwargs)}."
    )


def _defaults_to_none(fun: Fun, keyword: str) -> bool:
    try:
        parameter = inspect.signature(fun).parameters.get(keyword)
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.default is None
