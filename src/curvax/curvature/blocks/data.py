"""Statistics of a layer from its data, as `layer_tags_vjp` returns them or a user changed them.

A user-supplied block overrides `update_curvature_matrix_estimate`, changes the inputs and the
cotangents of the outputs in `estimation_data`, and passes them on to `super()`. What it passes is
used: for the layer as it is, if the shapes are those that the block was given, and otherwise as
(*stack, examples, *positions, *features). `given_data` makes what a block is given, with a record
by which `data_of_sites` tells what was changed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from curvax._types import Array, PyTree
from curvax.layers.tracing.statistics import EachStep
from curvax.layers.use import LayerUse

__all__ = ["data_of_sites", "given_data", "statistics_of_data"]


_RECORD = "given"
_WHOLE = ("inputs", "outputs_tangents")

Arrays = tuple[tuple[Array, ...], tuple[Array, ...]]
"""The inputs and the cotangents of the outputs, at a site or of a layer."""


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class _Given:
    """What a block was given: the sites of its layer, their data, and the dictionary itself."""

    sites: tuple[LayerUse, ...]
    arrays: tuple[Arrays, ...]
    data: Mapping[str, Any]
    batch_size: ArrayLike

    def is_changed(self, data: Mapping[str, Any], *keys: str) -> bool:
        """Return whether arrays under a key are others; those that are left out are not."""
        new = {key: data[key] for key in keys if key in data}
        old = {key: self.data[key] for key in keys if key in data and key in self.data}
        leaves, before = jax.tree.leaves(new), jax.tree.leaves(old)
        return len(leaves) != len(before) or any(
            x is not y for x, y in zip(leaves, before, strict=True)
        )


def given_data(
    data: Mapping[str, Any], sites: Sequence[LayerUse], batch_size: ArrayLike
) -> dict[str, Any]:
    """Return the data of a layer as its block is given them, with an axis for positions."""
    shown = tuple(
        {key: tuple(_shown(site, key, x) for x in arrays) for key, arrays in at.items()}
        for site, at in zip(sites, data["sites"], strict=True)
    )
    given = {**data, "sites": shown}
    for key in shown[0]:
        each = [at[key] for at in shown]
        if len(each) == 1:
            given[key] = each[0]
        elif len({tuple(x.shape[1:] for x in arrays) for arrays in each}) == 1:
            given[key] = tuple(map(jnp.concatenate, zip(*each, strict=True)))
    arrays = tuple((at["inputs"], at["outputs_tangents"]) for at in data["sites"])
    record = _Given(tuple(sites), arrays, dict(given), batch_size)
    return {**given, _RECORD: record}


def statistics_of_data(
    block: Any, state: Any, data: Mapping[str, Any], sites: Sequence[LayerUse], arrays: Any
) -> dict[str, PyTree]:
    """The sums that `layer_statistics` would return, from inputs and cotangents at all places."""
    record = data.get(_RECORD)
    is_changed = record is not None and record.is_changed(data, "params_tangents")
    if block.sums_batch and (is_changed or not sites[0].is_known):
        return {"gradient": list(data["params_tangents"])}
    totals: dict[str, PyTree] = {}
    for site, (inputs, cotangents) in zip(sites, arrays, strict=True):
        for name, block_statistic in block.statistics(site, sites, state).items():
            statistic = block_statistic
            for _ in site.stacked:
                statistic = jax.vmap(statistic)
            value = statistic(inputs, cotangents)
            kept = site.stacked
            if isinstance(block_statistic, EachStep):
                pairs = zip(site.stacked, block_statistic.loops, strict=True)
                kept = tuple(has or own for has, own in pairs)
            shared = tuple(k for k, has in enumerate(kept) if not has)
            value = jax.tree.map(lambda x, axes=shared: jnp.sum(x, axes), value)
            before = totals.get(name)
            totals[name] = value if before is None else jax.tree.map(jnp.add, before, value)
    return totals


def data_of_sites(
    block: Any, data: Mapping[str, Any], batch_size: ArrayLike
) -> tuple[tuple[LayerUse, ...], tuple[Arrays, ...]]:
    """Return the sites that the data are of, and the inputs and cotangents at each of them.

    Arguments:
        block: the block that takes them.
        data: `estimation_data`, as it was given or with changes by the user.
        batch_size: the number of examples, as passed with the data.

    Raises:
        ValueError: if data that were changed contradict the layer or each other.
    """
    record = data.get(_RECORD)
    has_whole = all(key in data for key in _WHOLE)
    if record is None:
        if not has_whole and "sites" not in data:
            raise _contradiction(block, f"it lacks {' or '.join(_WHOLE)}")
        if has_whole:
            shapes = [_raw_shapes(site) for site in block.sites]
            return _of_whole(block, data, block.sites, shapes, batch_size)
        return block.sites, tuple(_arrays(at) for at in data["sites"])
    whole, parts = record.is_changed(data, *_WHOLE), record.is_changed(data, "sites")
    if whole and parts:
        raise _contradiction(
            block,
            "both the arrays of the layer (inputs, outputs_tangents) and those of its sites (sites)"
            " were changed. Change one of them, and leave the other as it was or leave it out",
        )
    if not whole and not parts:
        return record.sites, record.arrays
    shown = [_shapes_of(_arrays(at)) for at in record.data["sites"]]
    size = None if batch_size is record.batch_size else batch_size
    if whole and not has_whole:
        raise _contradiction(block, f"it lacks {' or '.join(_WHOLE)}")
    if whole:
        return _of_whole(block, data, record.sites, shown, size, is_shown=True)
    if len(data["sites"]) != len(record.sites):
        raise _contradiction(
            block, f"it has data of {len(data['sites'])} sites, the layer has {len(record.sites)}"
        )
    each = zip(record.sites, data["sites"], shown, strict=True)
    found = [_at_site(block, site, _arrays(at), shapes, size, True) for site, at, shapes in each]
    return tuple(site for site, _ in found), tuple(arrays for _, arrays in found)


def _of_whole(
    block: Any,
    data: Mapping[str, Any],
    sites: tuple[LayerUse, ...],
    shapes: Sequence[Any],
    batch_size: ArrayLike | None,
    is_shown: bool = False,
) -> tuple[tuple[LayerUse, ...], tuple[Arrays, ...]]:
    """The arrays of a layer at its sites, or of all of them together if their shape is another."""
    arrays = _arrays(data)
    if len(sites) == 1:
        site, own = _at_site(block, sites[0], arrays, shapes[0], batch_size, is_shown)
        return (site,), (own,)
    if _shapes_of(arrays) == _joined(shapes):
        split = [_split(x, [each[k][n][0] for each in shapes]) for k, n, x in _numbered(arrays)]
        count = len(arrays[0])
        parts = [(x[:count], x[count:]) for x in zip(*split, strict=True)]
        if is_shown:
            parts = [_raw(site, part) for site, part in zip(sites, parts, strict=True)]
        return sites, tuple(parts)
    forms = {(s.kind, s.stack, s.cuts, str([p.arrangement for p in s.params])) for s in sites}
    if len(forms) > 1 or block.needs_examples(sites):
        raise _contradiction(
            block,
            f"the layer is applied at {len(sites)} places, and data of all of them together must "
            f"keep their shapes, {_joined(shapes)}, got {_shapes_of(arrays)}. Change the data of "
            f"each place, under sites, instead",
        )
    site, own = _at_site(block, sites[0], arrays, None, batch_size, is_shown)
    return (site,), (own,)


def _at_site(
    block: Any,
    site: LayerUse,
    arrays: Arrays,
    shapes: Any,
    batch_size: ArrayLike | None,
    is_shown: bool,
) -> tuple[LayerUse, Arrays]:
    """A site for data of these shapes or of others."""
    if _shapes_of(arrays) == shapes:
        return site, _raw(site, arrays) if is_shown else arrays
    counts = len(site.inputs), len(site.outputs)
    if (len(arrays[0]), len(arrays[1])) != (1, 1) or counts != (1, 1):
        raise _contradiction(
            block,
            f"the layer has {counts[0]} inputs and {counts[1]} outputs of the shapes "
            f"{shapes}, got {_shapes_of(arrays)}",
        )
    ((x,), (g,)) = arrays
    if site.repeats > 1 and block.needs_examples((site,)):
        raise _contradiction(
            block,
            f"the layer is in a loop, and {type(block).__name__} needs the gradients of single "
            f"examples: its data must keep their shapes, {shapes}, got {_shapes_of(arrays)}",
        )
    rows = _num_rows(block, site, x, g)
    if isinstance(batch_size, int | np.integer) and (batch_size < 1 or rows % batch_size):
        raise _contradiction(
            block,
            f"the batch_size {batch_size} does not divide its {rows} rows. Pass the number of "
            f"examples, or that of rows if each of them counts as an example",
        )
    return site.of_data(x, g), arrays


def _num_rows(block: Any, site: LayerUse, x: Array, g: Array) -> int:
    """How many rows data of another shape have, which are checked against the layer."""
    skip = len(site.stack)
    rows, features = site.split_shape(x.shape[skip:], False)
    rows_out, features_out = site.split_shape(g.shape[skip:], True)
    expected = [
        site.split_shape(own.shape, is_output)[1]
        for own, is_output in ((site.input, False), (site.output, True))
    ]
    is_integer = [jnp.issubdtype(y.dtype, jnp.integer) for y in (x, site.input)]
    fits = (
        x.shape[:skip] == g.shape[:skip] == site.stack
        and [features, features_out] == expected
        and rows == rows_out
        and len(rows) > 0
        and is_integer[0] == is_integer[1]
    )
    if not fits:
        raise _contradiction(
            block,
            f"inputs and outputs_tangents have the shapes {x.shape} and {g.shape} and the dtypes "
            f"{x.dtype} and {g.dtype}. At the layer they are {(*site.lengths, *site.input.shape)} "
            f"and {(*site.lengths, *site.output.shape)}, {site.input.dtype} and "
            f"{site.output.dtype}; others must have as many rows each, and the features "
            f"{expected[0]} and {expected[1]}, after axes {site.stack} for stacked layers",
        )
    return math.prod(rows)


def _contradiction(block: Any, reason: str) -> ValueError:
    return ValueError(
        f"curvax.{type(block).__name__}: the estimation_data that were passed to "
        f"update_curvature_matrix_estimate of the block {block.name!r} contradict its layer: "
        f"{reason}."
    )


def _arrays(data: Mapping[str, Any]) -> Arrays:
    inputs, cotangents = (tuple(map(jnp.asarray, data[key])) for key in _WHOLE)
    return inputs, cotangents


def _raw(site: LayerUse, arrays: Arrays) -> Arrays:
    inputs, cotangents = arrays
    return (
        tuple(site.as_at_tag(x, is_output=False) for x in inputs),
        tuple(site.as_at_tag(x, is_output=True) for x in cotangents),
    )


def _shown(site: LayerUse, key: str, x: Array) -> Array:
    return site.as_in_model(x, is_output=key != "inputs")


def _shapes_of(arrays: Arrays) -> Any:
    return tuple(tuple(x.shape for x in each) for each in arrays)


def _raw_shapes(site: LayerUse) -> Any:
    return tuple(
        tuple((*site.lengths, *x.shape) for x in each) for each in (site.inputs, site.outputs)
    )


def _joined(shapes: Sequence[Any]) -> Any:
    """The shapes of the arrays of all sites along the first axis; None if they do not fit."""
    if len({tuple(tuple(s[1:] for s in each) for each in site) for site in shapes}) > 1:
        return None
    add = lambda *each: (sum(s[0] for s in each), *each[0][1:])
    return tuple(tuple(map(add, *kinds)) for kinds in zip(*shapes, strict=True))


def _numbered(arrays: Arrays) -> list[tuple[int, int, Array]]:
    return [(k, n, x) for k, each in enumerate(arrays) for n, x in enumerate(each)]


def _split(x: Array, sizes: Sequence[int]) -> list[Array]:
    return jnp.split(x, np.cumsum(sizes)[:-1].tolist())
