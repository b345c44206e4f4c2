"""Statistics of a layer from `estimation_data`: as `layer_tags_vjp` returns it, or as changed.

A user-supplied block overrides `update_curvature_matrix_estimate`, changes the inputs and the
cotangents of the outputs in `estimation_data`, and passes them on to `super()`, which uses them.
Arrays of the original shapes are read as those of the layer, others as
(*stack, examples, *positions, *features). `given_data` makes the `estimation_data` that a block is
passed. It contains a record, by which `data_of_uses` recognises what was changed.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, TypeAlias, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from curvax._types import Array, PyTree
from curvax.layers.tracing.statistics import Statistic, Sums
from curvax.layers.use import LayerUse

State = TypeVar("State")
State_contra = TypeVar("State_contra", contravariant=True)

_RECORD = "given"
_ARRAYS = ("inputs", "outputs_tangents")

EstimationData: TypeAlias = Mapping[str, PyTree]
"""Tuples of arrays of a layer by name, and under "sites" a dictionary of them for each use."""

Arrays: TypeAlias = tuple[tuple[Array, ...], tuple[Array, ...]]
"""The inputs and the cotangents of the outputs, of one use or of all uses of a layer."""

Shapes: TypeAlias = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
"""The shapes of `Arrays`."""


@runtime_checkable
class Block(Protocol):
    """A `CurvatureBlock`, as far as this module reads it."""

    @property
    def name(self) -> str:
        """The name of the block."""
        ...

    @property
    def uses(self) -> tuple[LayerUse, ...]:
        """The uses of the layer."""
        ...

    def needs_examples(self, uses: Sequence[LayerUse]) -> bool:
        """Return whether the estimate depends on which positions belong to one example."""
        ...


@runtime_checkable
class StatisticalBlock(Protocol[State_contra]):
    """A `CurvatureBlock` with states of some type, as far as its statistics are read."""

    sums_batch: ClassVar[bool]

    def statistics(
        self, use: LayerUse, uses: Sequence[LayerUse], state: State_contra
    ) -> Mapping[Hashable, Statistic]:
        """Return what to sum over one of the uses of the layer."""
        ...


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class _Given:
    """A record of what a block was passed: the uses of its layer, the data and the batch size."""

    uses: tuple[LayerUse, ...]
    data: EstimationData
    batch_size: ArrayLike

    def is_changed(self, data: EstimationData, *keys: str) -> bool:
        """Return whether any array under these keys was replaced. Missing keys do not count."""
        new = jax.tree.leaves({key: data[key] for key in keys if key in data})
        old = jax.tree.leaves({key: self.data.get(key) for key in keys if key in data})
        return len(new) != len(old) or any(x is not y for x, y in zip(new, old, strict=True))


@dataclass(frozen=True, eq=False)
class _Expected:
    """A use, the shapes of its data, and whether these are the model's shapes, not the tag's."""

    use: LayerUse
    shapes: Shapes
    is_in_model: bool

    def restored(self, arrays: Arrays) -> Arrays:
        """Return data of these shapes in the shapes of the tag."""
        if not self.is_in_model:
            return arrays
        inputs, cotangents = arrays
        return (
            tuple(self.use.as_at_tag(x, is_output=False) for x in inputs),
            tuple(self.use.as_at_tag(x, is_output=True) for x in cotangents),
        )


def given_data(
    data: EstimationData, uses: Sequence[LayerUse], batch_size: ArrayLike
) -> dict[str, PyTree]:
    """Return the `estimation_data` of a layer in the model's shapes, with a record of it."""
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
    block: StatisticalBlock[State],
    state: State,
    data: EstimationData,
    uses: Sequence[LayerUse],
    arrays: Sequence[Arrays],
) -> Sums:
    """Return the sums that `layer_statistics` would, from the inputs and cotangents of all uses."""
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
            axes = tuple(axis for axis, is_kept in enumerate(kept) if not is_kept)
            found = compute(inputs, cotangents)
            value = jax.tree.map(lambda x, axes=axes: jnp.sum(x, axes), found)
            sums = totals[0 if statistic.depends_on == "inputs" else 1]
            sums[key] = jax.tree.map(jnp.add, sums[key], value) if key in sums else value
    return totals


def data_of_uses(
    block: Block, data: EstimationData, batch_size: ArrayLike
) -> tuple[tuple[LayerUse, ...], tuple[Arrays, ...]]:
    """Return the uses that the data belong to, and the inputs and cotangents of each.

    Arguments:
        block: The block that the data are for.
        data: `estimation_data`, as it was given or with changes by the user.
        batch_size: The number of examples, as passed with the data.

    Raises:
        ValueError: If changed data contradict the layer or each other.
    """
    record = data.get(_RECORD)
    if record is None:  # The data come from `layer_tags_vjp`, not from `given_data`.
        expected = [_Expected(use, _shapes_at_tag(use), False) for use in block.uses]
        reads_layer = "sites" not in data or all(key in data for key in _ARRAYS)
        size = batch_size
    else:
        pairs = zip(record.uses, record.data["sites"], strict=True)
        expected = [_Expected(use, _shapes_of(_arrays(at)), True) for use, at in pairs]
        reads_layer = record.is_changed(data, *_ARRAYS)
        size = None if batch_size is record.batch_size else batch_size
        if reads_layer and record.is_changed(data, "sites"):
            raise _contradiction(
                block,
                "both the arrays of the layer (inputs, outputs_tangents) and those of its uses "
                "(sites) were changed. Change one of them, and leave the other as it was or leave "
                "it out",
            )
        data = {"sites": record.data["sites"], **data}
    if reads_layer:
        if not all(key in data for key in _ARRAYS):
            raise _contradiction(block, f"it lacks {' or '.join(_ARRAYS)}")
        found = _of_layer(block, _arrays(data), expected, size)
    elif len(data["sites"]) != len(expected):
        raise _contradiction(
            block, f"it has data of {len(data['sites'])} sites, the layer has {len(expected)} uses"
        )
    else:
        pairs = zip(expected, map(_arrays, data["sites"]), strict=True)
        found = [_of_use(block, each, arrays, size) for each, arrays in pairs]
    return tuple(use for use, _ in found), tuple(arrays for _, arrays in found)


def _of_layer(
    block: Block, arrays: Arrays, expected: Sequence[_Expected], batch_size: ArrayLike | None
) -> list[tuple[LayerUse, Arrays]]:
    """Split the arrays of a layer among its uses; arrays of a new shape count as one use."""
    first, uses = expected[0], [each.use for each in expected]
    if len(uses) == 1:
        return [_of_use(block, first, arrays, batch_size)]
    shapes = _joined([each.shapes for each in expected])
    if _shapes_of(arrays) == shapes:
        lengths = lambda k, n: np.cumsum([each.shapes[k][n][0] for each in expected])[:-1].tolist()
        split = [
            zip(*(jnp.split(x, lengths(k, n)) for n, x in enumerate(each)), strict=True)
            for k, each in enumerate(arrays)
        ]
        parts = zip(expected, *split, strict=True)
        return [(each.use, each.restored((inputs, rest))) for each, inputs, rest in parts]
    forms = {(s.kind, s.stack, s.cuts, str([p.arrangement for p in s.params])) for s in uses}
    if len(forms) > 1 or block.needs_examples(uses):
        raise _contradiction(
            block,
            f"the layer has {len(uses)} uses, and data of all of them together must keep their "
            f"shapes, {shapes}, got {_shapes_of(arrays)}. Change the data of each use, under "
            f"sites, instead",
        )
    return [_of_use(block, replace(first, shapes=((), ())), arrays, batch_size)]


def _of_use(
    block: Block, expected: _Expected, arrays: Arrays, batch_size: ArrayLike | None
) -> tuple[LayerUse, Arrays]:
    """Return the arrays of one use, and the use itself, adapted if their shapes are new."""
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
            f"the layer is in a loop, and {type(block).__name__} needs per-example gradients: its "
            f"data must keep their shapes, {shapes}, got {_shapes_of(arrays)}",
        )
    rows = _num_rows(block, use, x, g)
    if isinstance(batch_size, int | np.integer) and (batch_size < 1 or rows % batch_size):
        raise _contradiction(
            block,
            f"the batch_size {batch_size} does not divide its {rows} rows. Pass the number of "
            f"examples, or that of rows if each of them counts as an example",
        )
    return use.of_data(x, g), arrays


def _num_rows(block: Block, use: LayerUse, x: Array, g: Array) -> int:
    """Return the number of rows of data of a new shape; check it against the layer."""
    skip = len(use.stack)
    rows, features = use.split_shape(x.shape[skip:], False)
    rows_out, features_out = use.split_shape(g.shape[skip:], True)
    expected = [
        use.split_shape(array.shape, is_output)[1]
        for array, is_output in ((use.input, False), (use.output, True))
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
            f"{use.output.dtype}; others must have the same number of rows each, and the features "
            f"{expected[0]} and {expected[1]}, after axes {use.stack} for stacked layers",
        )
    return math.prod(rows)


def _contradiction(block: Block, reason: str) -> ValueError:
    return ValueError(
        f"curvax.{type(block).__name__}: the estimation_data that were passed to "
        f"update_curvature_matrix_estimate of the block {block.name!r} contradict its layer: "
        f"{reason}."
    )


def _arrays(data: EstimationData) -> Arrays:
    inputs, cotangents = (tuple(map(jnp.asarray, data[key])) for key in _ARRAYS)
    return inputs, cotangents


def _shapes_of(arrays: Arrays) -> Shapes:
    inputs, cotangents = (tuple(x.shape for x in each) for each in arrays)
    return inputs, cotangents


def _shapes_at_tag(use: LayerUse) -> Shapes:
    inputs, outputs = (
        tuple((*use.lengths, *x.shape) for x in each) for each in (use.inputs, use.outputs)
    )
    return inputs, outputs


def _joined(shapes: Sequence[Shapes]) -> Shapes | None:
    """Return the shapes of the uses' arrays concatenated along the first axis; None if unequal."""
    if len({tuple(tuple(s[1:] for s in each) for each in use) for use in shapes}) > 1:
        return None
    add = lambda *each: (sum(s[0] for s in each), *each[0][1:])
    inputs, cotangents = (tuple(map(add, *kinds)) for kinds in zip(*shapes, strict=True))
    return inputs, cotangents
