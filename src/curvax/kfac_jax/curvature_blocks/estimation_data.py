"""What a block is updated from: a `LayerVjpData` that is also a mapping.

kfac_jax 0.0.8 passes a `LayerVjpData` to blocks. Releases before it passed a dictionary, with the
cotangents of the outputs under "outputs_tangent" or "outputs_tangents". `LayerEstimationData` is
both, so that a block written for either can read it. Such a block passes data on to `super()`, in
the form that it knows, with changes or without: `as_curvax_data` reads both forms.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from curvax._types import Array, PyTree
from curvax.kfac_jax.layers_and_loss_tags import LayerData
from curvax.kfac_jax.tracer import LayerVjpData

_PARTS = {
    "inputs": ("primals", "inputs"),
    "outputs": ("primals", "outputs"),
    "params": ("primals", "params"),
    "outputs_tangents": ("tangents", "outputs"),
    "params_tangents": ("tangents", "params"),
}
"""The names of curvax, and where 0.0.8 has the same."""

_OLDER_NAMES = {"outputs_tangent": "outputs_tangents", "params_tangent": "params_tangents"}
"""Names of older releases, and those of curvax for the same."""

_RECORD = "given"
"""The name under which curvax records what a block was passed."""


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, kw_only=True, eq=False)
class LayerEstimationData(LayerVjpData[Array], Mapping[str, PyTree]):
    """The values of a layer and their cotangents, as attributes and as items.

    Arguments:
        primals: Inputs, outputs and parameters of the layer.
        tangents: The derivative of the losses with respect to outputs and parameters.
        curvax_data: The same in curvax's form, with a record by which changes are recognised.

    Examples:
        >>> import jax.numpy as jnp
        >>> data = LayerEstimationData.of({"inputs": (jnp.ones((4, 3)),), "params": ()})
        >>> data.primals.inputs[0].shape, data["inputs"][0].shape
        ((4, 3), (4, 3))
    """

    curvax_data: Mapping[str, PyTree] | None = None

    @classmethod
    def of(cls, data: Mapping[str, PyTree]) -> "LayerEstimationData":
        """Return curvax's `estimation_data` in this form."""
        arrays = {name: tuple(data.get(name, ())) for name in _PARTS}
        return cls(
            primals=LayerData(
                inputs=arrays["inputs"], outputs=arrays["outputs"], params=arrays["params"]
            ),
            tangents=LayerData(
                inputs=(), outputs=arrays["outputs_tangents"], params=arrays["params_tangents"]
            ),
            curvax_data=data,
        )

    def __getitem__(self, name: str) -> PyTree:
        name = _OLDER_NAMES.get(name, name)
        if name not in _PARTS:
            return (self.curvax_data or {})[name]
        found = _part(self, name)
        if not found:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        names = [name for name in _PARTS if _part(self, name)]
        older = [name for name, newer in _OLDER_NAMES.items() if newer in names]
        rest = [name for name in self.curvax_data or {} if name not in _PARTS]
        return iter([*names, *older, *rest])

    def __len__(self) -> int:
        return len(list(iter(self)))


def as_curvax_data(data: LayerVjpData[Any] | Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Return `estimation_data` in curvax's form, from the form of any release of kfac_jax.

    Of two names for the same arrays, the one that was changed counts.
    """
    if isinstance(data, LayerVjpData):
        record = dict(getattr(data, "curvax_data", None) or {})
        arrays = {name: _part(data, name) for name in _PARTS}
        return record | {name: found for name, found in arrays.items() if found}
    found = dict(data)
    record = found.get(_RECORD)
    for older, name in _OLDER_NAMES.items():
        if older not in found:
            continue
        arrays = found.pop(older)
        if record is None or record.is_changed({name: arrays}, name):
            found[name] = arrays
    return found


def _part(data: LayerVjpData[Any], name: str) -> tuple[Array, ...]:
    part, field = _PARTS[name]
    return getattr(getattr(data, part), field)
