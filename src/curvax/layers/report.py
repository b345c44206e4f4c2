"""What was recognised of a model, parameter by parameter, and why some of it was not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from curvax._reports import table
from curvax._types import Fun, PyTree
from curvax.layers.detection.layers import FoundLayer
from curvax.layers.registration import Registration, register, registration_options


@dataclass(frozen=True)
class ParameterRow:
    """What a parameter is registered as."""

    path: str
    shape: tuple[int, ...]
    size: int
    layer: str
    tag: str
    sites: int
    reason: str
    uncovered: int = 0
    """How many further uses of the parameter the layer does not cover."""


@dataclass(frozen=True)
class RegistrationReport:
    """What every parameter of a function is registered as; it prints as a table."""

    rows: tuple[ParameterRow, ...]
    losses: tuple[str, ...]

    @property
    def coverage(self) -> float:
        """The fraction of the parameters' elements, and of their uses, that known layers cover.

        A parameter of which a layer covers three of four uses counts by three quarters.
        """
        total = sum(row.size for row in self.rows)
        known = [row for row in self.rows if row.tag != "generic_tag"]
        covered = sum(row.size * row.sites / (row.sites + row.uncovered) for row in known)
        return covered / total if total else 1.0

    def __str__(self) -> str:
        rows = [
            (row.path, str(row.shape), row.layer, row.tag, str(row.sites), row.reason)
            for row in self.rows
        ]
        text = table(("parameter", "shape", "layer", "tag", "sites", "remark"), rows)
        known = f"{100 * self.coverage:.4g} % of the elements are in layers of a known kind"
        if any(row.uncovered for row in self.rows):
            known += ", counting uses"
        return "\n".join([text, "", f"losses: {', '.join(self.losses)}", known])


def explain_registration(
    func: Fun, func_args: Sequence[PyTree], params_index: int = 0, **auto_register_kwargs: Any
) -> RegistrationReport:
    """What `auto_register_tags` makes of each parameter of a function, and why.

    Arguments:
        func: a function that registers at least one loss.
        func_args: arguments to trace it with, as a sequence.
        params_index: which of them are the parameters.
        auto_register_kwargs: as in `auto_register_tags`.

    Returns:
        A report with a row for each parameter.

    Raises:
        RegistrationError, ValueError: as `auto_register_tags`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def loss(params, x):
        ...     hidden = jnp.tanh(x @ params["w"] + params["b"])
        ...     prediction = hidden * jnp.exp(params["log_scale"])
        ...     curvax.register_squared_error_loss(prediction)
        ...     return jnp.mean(prediction**2)
        >>> params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2), "log_scale": jnp.zeros(())}
        >>> report = curvax.explain_registration(loss, (params, jnp.ones((4, 3))))
        >>> [row.tag for row in report.rows]
        ['dense_tag', 'generic_tag', 'dense_tag']
    """
    for name in ("compute_only_loss_tags", "allow_multiple_registrations", "allow_unused_params"):
        auto_register_kwargs.pop(name, None)
    options = registration_options(**auto_register_kwargs)
    registration = register(func, func_args, params_index, options)
    leaves = jax.tree.leaves(tuple(func_args)[params_index])
    rows = tuple(
        _row(registration, number, jax.numpy.shape(leaf)) for number, leaf in enumerate(leaves)
    )
    losses = tuple(node.name.removesuffix("_tag") for node in registration.losses)
    return RegistrationReport(rows, losses)


def _row(registration: Registration, number: int, shape: tuple[int, ...]) -> ParameterRow:
    (layer, *_) = [layer for layer in registration.layers if number in layer.params]
    return ParameterRow(
        registration.names[number],
        shape,
        int(np.prod(shape)),
        name_of(registration, layer),
        layer.tag_name,
        layer.num_uses,
        layer.reason or layer.remark,
        layer.uncovered,
    )


def name_of(registration: Registration, layer: FoundLayer) -> str:
    """The part of their paths that the parameters of a layer share."""
    names = [registration.names[number] for number in layer.params]
    if len(names) == 1:
        return names[0]
    shared = ""
    for parts in zip(*(_parts(name) for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared += parts[0]
    return shared or "+".join(names)


def _parts(name: str) -> list[str]:
    """A path as `jax.tree_util.keystr` prints it, step by step."""
    parts: list[str] = []
    for character in name:
        if character in "[." or not parts:
            parts.append(character)
        else:
            parts[-1] += character
    return parts
