"""Statistics of a layer from its data, as `layer_tags_vjp` returns them or a user changed them.

A user-supplied block overrides `update_curvature_matrix_estimate`, changes the inputs and the
cotangents of the outputs in `estimation_data`, and passes them on to `super()`. What it passes is
used: for the layer as it is, if the shapes are those that the block was given, and otherwise as
(*stack, examples, *positions, *features). `given_data` makes what a block is given, with a record
by which `data_of_sites` tells what was changed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from curvax._types import Array
from curvax.layers.tracing.statistics import Sums
from curvax.layers.use import LayerUse

_RECORD = "given"
_WHOLE = ("inputs", "outputs_tangents")

Arrays = tuple[tuple[Array, ...], tuple[Array, ...]]
"""The inputs and the cotangents of the outputs, at a use or of a layer."""

Shapes = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
"""The shapes of such arrays."""


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class _Given:
    """What a block was given: the uses of its layer, the data themselves, and their number."""

    uses: tuple[LayerUse, ...]
    data: Mapping[str, Any]
    batch_size: ArrayLike

    def is_changed(self, data: Mapping[str, Any], *keys: str) -> bool:
        """Return whether arrays under a key are others; those that are left out are not."""
        new = jax.tree.leaves({key: data[key] for key in keys if key in data})
        old = jax.tree.leaves({key: self.data.get(key) for key in keys if key in data})
        return len(new) != len(old) or any(x is not y for x, y in zip(new, old, strict=True))


@dataclass(frozen=True, eq=False)
class _Expected:
    """A use, the shapes that its data have, and whether these are the model's own."""

    use: LayerUse
    shapes: Shapes
    is_in_model: bool

    def restored(self, arrays: Arrays) -> Arrays:
        """Return data of these shapes as the use has them."""
        if not self.is_in_model:
            return arrays
        inputs, cotangents = arrays
        return (
            tuple(self.use.as_at_tag(x, is_output=False) for x in inputs),
            tuple(self.use.as_at_tag(x, is_output=True) for x in cotangents),
        )


def given_data(
    data: Mapping[str, Any], uses: Sequence[LayerUse], batch_size: ArrayLike
) -> dict[str, Any]:
    """Return the data of a layer as its block is given them, in the model's own shapes."""
    shown = tuple(
        {key: tuple(_in_model(use, key, x) for x in arrays) for key, arrays in at.items()}
        for use, at in zip(uses, data["sites"], strict=True)
    )
    given = {**data, "sites": shown}
    for key in shown[0]:
        each = [at[key] for at in shown]
        if len(each) == 1:
            given[key] = each[0]
        elif len({tuple(x.shape[1:] for x in arrays) for arrays in each}) == 1:
            given[key] = tuple(map(jnp.concatenate, zip(*each, strict=True)))
    return {**given, _RECORD: _Given(tuple(uses), dict(given), batch_size)}


def _in_model(use: LayerUse, key: str, x: Array) -> Array:
    return use.as_in_model(x, is_output=key != "inputs")


def sums_of_data(
    block: Any, state: Any, data: Mapping[str, Any], uses: Sequence[LayerUse], arrays: Any
) -> Sums:
    """Return the sums that `layer_statistics` would, from inputs and cotangents at all places."""
    record = data.get(_RECORD)
    is_changed = record is not None and record.is_changed(data, "params_tangents")
    if block.sums_batch and (is_changed or not uses[0].is_known):
        return Sums(of_cotangents=list(data["params_tangents"]))
    totals = Sums({}, {})
    for use, (inputs, cotangents) in zip(uses, arrays, strict=True):
        for key, statistic in block.statistics(use, uses, state).items():
            compute = statistic.compute
            for _ in use.stacked:
                compute = jax.vmap(compute)
            kept = statistic.kept_loops(use.stacked)
            summed = tuple(axis for axis, has in enumerate(kept) if not has)
            value = jax.tree.map(lambda x, own=summed: jnp.sum(x, own), compute(inputs, cotangents))
            sums = totals[0 if statistic.depends_on == "inputs" else 1]
            sums[key] = jax.tree.map(jnp.add, sums[key], value) if key in sums else value
    return totals


def data_of_uses(
    block: Any, data: Mapping[str, Any], batch_size: ArrayLike
) -> tuple[tuple[LayerUse, ...], tuple[Arrays, ...]]:
    """Return the uses that the data are of, and the inputs and cotangents at each of them.

    Arguments:
        block: the block that takes them.
        data: `estimation_data`, as it was given or with changes by the user.
        batch_size: the number of examples, as passed with the data.

    Raises:
        ValueError: if data that were changed contradict the layer or each other.
    """
    record = data.get(_RECORD)
    if record is None:  # They are as `layer_tags_vjp` returns them.
        expected = [_Expected(use, _raw_shapes(use), False) for use in block.uses]
        whole, size = "sites" not in data or all(key in data for key in _WHOLE), batch_size
    else:
        pairs = zip(record.uses, record.data["sites"], strict=True)
        expected = [_Expected(use, _shapes_of(_arrays(at)), True) for use, at in pairs]
        whole = record.is_changed(data, *_WHOLE)
        size = None if batch_size is record.batch_size else batch_size
        if whole and record.is_changed(data, "sites"):
            raise _contradiction(
                block,
                "both the arrays of the layer (inputs, outputs_tangents) and those of its sites "
                "(sites) were changed. Change one of them, and leave the other as it was or leave "
                "it out",
            )
        data = {"sites": record.data["sites"], **data}
    if whole:
        if not all(key in data for key in _WHOLE):
            raise _contradiction(block, f"it lacks {' or '.join(_WHOLE)}")
        found = _of_whole(block, _arrays(data), expected, size)
    elif len(data["sites"]) != len(expected):
        raise _contradiction(
            block, f"it has data of {len(data['sites'])} sites, the layer has {len(expected)}"
        )
    else:
        each = zip(expected, map(_arrays, data["sites"]), strict=True)
        found = [_at_use(block, own, arrays, size) for own, arrays in each]
    return tuple(use for use, _ in found), tuple(arrays for _, arrays in found)


def _of_whole(
    block: Any, arrays: Arrays, expected: Sequence[_Expected], batch_size: ArrayLike | None
) -> list[tuple[LayerUse, Arrays]]:
    """The arrays of a layer at its uses, or of all of them together if their shape is another."""
    first, uses = expected[0], [own.use for own in expected]
    if len(uses) == 1:
        return [_at_use(block, first, arrays, batch_size)]
    shapes = _joined([own.shapes for own in expected])
    if _shapes_of(arrays) == shapes:
        lengths = lambda k, n: np.cumsum([own.shapes[k][n][0] for own in expected])[:-1].tolist()
        split = [
            zip(*(jnp.split(x, lengths(k, n)) for n, x in enumerate(each)), strict=True)
            for k, each in enumerate(arrays)
        ]
        parts = zip(expected, *split, strict=True)
        return [(own.use, own.restored((inputs, rest))) for own, inputs, rest in parts]
    forms = {(s.kind, s.stack, s.cuts, str([p.arrangement for p in s.params])) for s in uses}
    if len(forms) > 1 or block.needs_examples(uses):
        raise _contradiction(
            block,
            f"the layer is applied at {len(uses)} places, and data of all of them together must "
            f"keep their shapes, {shapes}, got {_shapes_of(arrays)}. Change the data of each "
            f"place, under sites, instead",
        )
    return [_at_use(block, replace(first, shapes=((), ())), arrays, batch_size)]


def _at_use(
    block: Any, expected: _Expected, arrays: Arrays, batch_size: ArrayLike | None
) -> tuple[LayerUse, Arrays]:
    """A use for data of these shapes or of others."""
    use, shapes = expected.use, expected.shapes
    if _shapes_of(arrays) == shapes:
        return use, expected.restored(arrays)
    counts = len(use.inputs), len(use.outputs)
    if (len(arrays[0]), len(arrays[1])) != (1, 1) or counts != (1, 1):
        raise _contradiction(
            block,
            f"the layer has {counts[0]} inputs and {counts[1]} outputs of the shapes "
            f"{shapes}, got {_shapes_of(arrays)}",
        )
    ((x,), (g,)) = arrays
    if use.repeats > 1 and block.needs_examples((use,)):
        raise _contradiction(
            block,
            f"the layer is in a loop, and {type(block).__name__} needs the gradients of single "
            f"examples: its data must keep their shapes, {shapes}, got {_shapes_of(arrays)}",
        )
    rows = _num_rows(block, use, x, g)
    if isinstance(batch_size, int | np.integer) and (batch_size < 1 or rows % batch_size):
        raise _contradiction(
            block,
            f"the batch_size {batch_size} does not divide its {rows} rows. Pass the number of "
            f"examples, or that of rows if each of them counts as an example",
        )
    return use.of_data(x, g), arrays


def _num_rows(block: Any, use: LayerUse, x: Array, g: Array) -> int:
    """How many rows data of another shape have, which are checked against the layer."""
    skip = len(use.stack)
    rows, features = use.split_shape(x.shape[skip:], False)
    rows_out, features_out = use.split_shape(g.shape[skip:], True)
    expected = [
        use.split_shape(own.shape, is_output)[1]
        for own, is_output in ((use.input, False), (use.output, True))
    ]
    is_integer = [jnp.issubdtype(y.dtype, jnp.integer) for y in (x, use.input)]
    fits = (
        x.shape[:skip] == g.shape[:skip] == use.stack
        and [features, features_out] == expected
        and rows == rows_out
        and len(rows) > 0
        and is_integer[0] == is_integer[1]
    )
    if not fits:
        raise _contradiction(
            block,
            f"inputs and outputs_tangents have the shapes {x.shape} and {g.shape} and the dtypes "
            f"{x.dtype} and {g.dtype}. At the layer they are {(*use.lengths, *use.input.shape)} "
            f"and {(*use.lengths, *use.output.shape)}, {use.input.dtype} and "
            f"{use.output.dtype}; others must have as many rows each, and the features "
            f"{expected[0]} and {expected[1]}, after axes {use.stack} for stacked layers",
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


def _shapes_of(arrays: Arrays) -> Shapes:
    inputs, cotangents = (tuple(x.shape for x in each) for each in arrays)
    return inputs, cotangents


def _raw_shapes(use: LayerUse) -> Shapes:
    inputs, outputs = (
        tuple((*use.lengths, *x.shape) for x in each) for each in (use.inputs, use.outputs)
    )
    return inputs, outputs


def _joined(shapes: Sequence[Shapes]) -> Shapes | None:
    """The shapes of the arrays of all uses along the first axis; None if they do not fit."""
    if len({tuple(tuple(s[1:] for s in each) for each in use) for use in shapes}) > 1:
        return None
    add = lambda *each: (sum(s[0] for s in each), *each[0][1:])
    inputs, cotangents = (tuple(map(add, *kinds)) for kinds in zip(*shapes, strict=True))
    return inputs, cotangents
