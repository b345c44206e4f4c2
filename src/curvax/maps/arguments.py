"""The arguments of a call to a map: which leaves are batched, and along which axis.

All errors about axes and lengths are raised here, by the names that the user gave parameters and
leaf paths. Downstream, a map sees a flat list of arrays, an axis for each, and one length.
"""

import inspect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from curvax._errors import as_integer, where
from curvax._tree import broadcast_prefix, leaf_name
from curvax._types import Array, Axes, Fun, PyTree, TreeDef


@dataclass(frozen=True)
class Batch:
    """The arguments of one call, with the batched leaves separated from the others.

    Attributes:
        arrays: The batched leaves.
        axes: The batch axis of each of them.
        length: The number of examples, which all of them have along their batch axis.
        leaves: All leaves of the call, as the user passed them.
        names: What error messages call these leaves.
        structure: The pytree structure of `(args, kwargs)`.
        indices: The indices of `arrays` among `leaves`.
        unbatched: The other leaves that are arrays, if separated by `with_unbatched`.
        unbatched_indices: Their indices among `leaves`.
    """

    arrays: tuple[Array, ...]
    axes: tuple[int, ...]
    length: int
    leaves: tuple[PyTree, ...]
    names: tuple[str, ...]
    structure: TreeDef
    indices: tuple[int, ...]
    unbatched: tuple[Array, ...] = ()
    unbatched_indices: tuple[int, ...] = ()

    def call(self, fun: Fun, arrays: Sequence[Array]) -> PyTree:
        """Call `fun` on the arguments, with `arrays` in place of the batched leaves."""
        leaves = list(self.leaves)
        indices, values = (*self.indices, *self.unbatched_indices), (*arrays, *self.unbatched)
        for index, value in zip(indices, values, strict=True):
            leaves[index] = value
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        return fun(*args, **kwargs)

    def with_unbatched(self) -> "Batch":
        """Return the batch with `unbatched` separated, to pass these arrays to `shard_map`."""
        indices = tuple(
            i
            for i, leaf in enumerate(self.leaves)
            if i not in self.indices and isinstance(leaf, jax.Array)
        )
        unbatched = tuple(self.leaves[i] for i in indices)
        return replace(self, unbatched=unbatched, unbatched_indices=indices)


def mapped_arguments(
    fun: Fun, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], in_axes: Axes
) -> Batch:
    """Return the batch of a call to a vectorised `fun`, with `in_axes` as `jax.vmap` takes them.

    A tuple has an entry for each argument in the order of the parameters of `fun`, whether it is
    passed by position or by keyword. Keyword arguments without an entry are mapped over axis 0.
    """
    if not isinstance(in_axes, tuple | list):
        return _batch(fun, args, kwargs, [in_axes] * len(args), dict.fromkeys(kwargs, 0))
    by_position, by_keyword = in_axes[: len(args)], in_axes[len(args) :]
    parameters = _positional_parameters(fun)[len(args) : len(in_axes)]
    keywords = [parameter.name for parameter in parameters if parameter.name in kwargs]
    if len(by_position) < len(args) or len(keywords) < len(by_keyword):
        raise ValueError(
            f"{where()}: in_axes has {len(in_axes)} entries but the function was called with "
            f"{len(args)} positional arguments and the keywords {sorted(kwargs)}. Give one entry "
            f"for each argument, in the order of the function's parameters, or one axis for all; "
            f"keyword arguments without an entry are mapped over axis 0."
        )
    named = dict(zip(keywords, by_keyword, strict=True))
    return _batch(fun, args, kwargs, by_position, dict.fromkeys(kwargs, 0) | named)


def batched_arguments(
    fun: Fun,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    argnums: int | Sequence[int],
    argnames: str | Sequence[str],
    in_axes: Axes,
) -> Batch:
    """Return the batch of a call to `fun`, some of whose arguments are batches.

    `argnums` and `argnames` say which, whether they are passed by position or by keyword. `in_axes`
    is one axis (or pytree prefix) for all of them, or a sequence with an entry for each of
    `argnums`, then of `argnames`.
    """
    indices = tuple(argnums) if isinstance(argnums, Sequence) else (operator.index(argnums),)
    names = (argnames,) if isinstance(argnames, str) else tuple(argnames)
    selected = (*indices, *names)
    if isinstance(in_axes, tuple | list):
        if len(in_axes) != len(selected):
            raise ValueError(
                f"{where()}: in_axes has {len(in_axes)} entries for {len(selected)} "
                f"batch arguments (argnums={argnums!r}, argnames={argnames!r}). Give one entry "
                f"for each, or one axis for all."
            )
        axes = list(in_axes)
    else:
        axes = [in_axes] * len(selected)

    axis_of: dict[int | str, Axes] = {}
    for argument, axis in zip(selected, axes, strict=True):
        passed_as = _position_or_keyword(argument, fun, len(args), kwargs)
        if passed_as in axis_of:
            raise ValueError(
                f"{where()}: the batch argument {argument!r} is named twice "
                f"(argnums={argnums!r}, argnames={argnames!r})."
            )
        if passed_as is not None:
            axis_of[passed_as] = axis
    args_axes = [axis_of.get(i) for i in range(len(args))]
    return _batch(fun, args, kwargs, args_axes, {k: axis_of.get(k) for k in kwargs})


def canonicalize_axis(axis: object, ndim: int, what: str) -> int:
    """Return `axis` as a non-negative int, for an array of `ndim` axes that errors call `what`."""
    index = as_integer(axis)
    if index is None:
        raise TypeError(f"{where()}: the axis of {what} must be an integer or None, got {axis!r}.")
    if not -ndim <= index < ndim:
        raise ValueError(f"{where()}: axis {index} is out of range for {what} with {ndim} axes.")
    return index % ndim


def _batch(
    fun: Fun,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    args_axes: Sequence[Axes],
    kwargs_axes: Mapping[str, Axes],
) -> Batch:
    names, leaves, axes = [], [], []
    arguments = [*zip(_argument_names(fun, len(args)), args, args_axes, strict=True)]
    arguments += [(name, kwargs[name], kwargs_axes[name]) for name in sorted(kwargs)]
    for name, argument, prefix in arguments:
        paths = jax.tree_util.tree_leaves_with_path(argument)
        names += [leaf_name(name, path) for path, _ in paths]
        leaves += [leaf for _, leaf in paths]
        axes += _leaf_axes(argument, prefix, name)

    batched = [i for i, axis in enumerate(axes) if axis is not None]
    arrays = tuple(_as_array(leaves[i], names[i]) for i in batched)
    for i, array in zip(batched, arrays, strict=True):
        axes[i] = canonicalize_axis(axes[i], array.ndim, f"{names[i]} of shape {array.shape}")
    lengths = [(names[i], array.shape[axes[i]]) for i, array in zip(batched, arrays, strict=True)]
    return Batch(
        arrays=arrays,
        axes=tuple(axes[i] for i in batched),
        length=_common_length(lengths),
        leaves=tuple(leaves),
        names=tuple(names),
        structure=jax.tree.structure((tuple(args), dict(kwargs))),
        indices=tuple(batched),
    )


def _leaf_axes(argument: PyTree, prefix: Axes, name: str) -> list[Axes]:
    try:
        return broadcast_prefix(prefix, argument)
    except ValueError as error:
        raise ValueError(
            f"{where()}: the axes {prefix!r} given for {name} are not a prefix of its structure "
            f"{jax.tree.structure(argument)}: {error}"
        ) from None


def _as_array(leaf: PyTree, name: str) -> Array:
    try:
        array = jnp.asarray(leaf)
    except TypeError:
        raise TypeError(
            f"{where()}: {name} must be batched but is not an array: {type(leaf).__name__} "
            f"{leaf!r}. Set its axis to None to pass it unchanged."
        ) from None
    if array.ndim == 0:
        raise ValueError(
            f"{where()}: {name} has no batch axis: it is zero-dimensional. Give it one, or set its "
            f"axis to None to pass it unchanged each time."
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


def _positional_parameters(fun: Fun) -> list[inspect.Parameter]:
    """Return the parameters of `fun` that accept positional arguments, [] without a signature."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _argument_names(fun: Fun, count: int) -> list[str]:
    known = [p.name for p in _positional_parameters(fun)][:count]
    return known + [f"argument {i}" for i in range(len(known), count)]


def _position_or_keyword(
    argument: int | str, fun: Fun, num_args: int, kwargs: Mapping[str, PyTree]
) -> int | str | None:
    """Return the position or the keyword that a batch argument was passed by.

    None if it was omitted and defaults to None.
    """
    parameters = _positional_parameters(fun)
    names = [p.name for p in parameters]
    if isinstance(argument, str):
        position, keyword = (names.index(argument) if argument in names else None), argument
    else:
        count = max(num_args, len(names)) if kwargs else num_args
        position = argument if argument >= 0 else argument + count
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
        f"{where()}: the batch argument {argument if keyword is None else keyword!r} is missing: "
        f"the function was called with {num_args} positional arguments and the keywords "
        f"{sorted(kwargs)}."
    )


def _defaults_to_none(fun: Fun, keyword: str) -> bool:
    try:
        parameter = inspect.signature(fun).parameters.get(keyword)
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.default is None
