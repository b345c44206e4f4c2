"""`explain_registration`: the layer that each parameter belongs to, or why none was found."""

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
    """What a parameter is registered as: a row of a `RegistrationReport`.

    Attributes:
        path: Path of the parameter, as `jax.tree_util.keystr` prints it.
        shape: Shape of the parameter.
        size: Number of its elements.
        layer: The part of their paths that the parameters of the layer share.
        tag: Name of the tag of the layer; "generic_tag" if no layer was found.
        sites: Number of uses of the layer in the program.
        reason: Why no layer was found, or a remark on the layer; "" if there is nothing to say.
        uncovered: Number of further uses of the parameter that the layer does not cover.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def loss(w, x):
        ...     return curvax.register_squared_error_loss(jnp.exp(x @ w) @ w)
        >>> report = curvax.explain_registration(loss, (jnp.ones((3, 3)), jnp.ones((4, 3))))
        >>> row = report.rows[0]
        >>> row.tag, row.shape, row.sites
        ('dense_tag', (3, 3), 2)
    """

    path: str
    shape: tuple[int, ...]
    size: int
    layer: str
    tag: str
    sites: int
    reason: str
    uncovered: int = 0


@dataclass(frozen=True)
class RegistrationReport:
    """What each parameter of a function is registered as; it prints as a table.

    Attributes:
        rows: A row for each parameter.
        losses: Names of the losses.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def loss(params, x):
        ...     y = x @ params["w"] * jnp.exp(params["s"])
        ...     return curvax.register_squared_error_loss(y)
        >>> params = {"w": jnp.ones((3, 2)), "s": jnp.zeros(2)}
        >>> report = curvax.explain_registration(loss, (params, jnp.ones((4, 3))))
        >>> report.coverage
        0.75
        >>> report.rows[0].reason
        'it is used by `exp`, of which no layer is known'
    """

    rows: tuple[ParameterRow, ...]
    losses: tuple[str, ...]

    @property
    def coverage(self) -> float:
        """The fraction of the parameters' elements that are in layers of a known kind.

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
    """Report the layer in which each parameter of a function was detected, or why it is in none.

    Arguments:
        func: Function that registers at least one loss.
        func_args: Sequence of arguments to trace it with.
        params_index: Index of the argument that holds the parameters.
        auto_register_kwargs: Keyword arguments of `curvax.auto_register_tags`, such as `strict`,
            `patterns_to_skip`, `graph_patterns` or `through_custom_derivatives`.

    Returns:
        A report that prints as a table. Its `rows` are in the order of `jax.tree.leaves(params)`;
        `ParameterRow` describes them. A parameter that is in no layer of a known kind is "generic".

    Raises:
        RegistrationError: If no loss is registered, or one was dropped or has no derivative in any
            parameter; or, with `strict`, if a parameter is not in a layer of a known kind.
        ValueError: If an argument is invalid, or a tag has one parameter twice.

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
        _row(registration, index, jax.numpy.shape(leaf)) for index, leaf in enumerate(leaves)
    )
    losses = tuple(node.name.removesuffix("_tag") for node in registration.losses)
    return RegistrationReport(rows, losses)


def _row(registration: Registration, index: int, shape: tuple[int, ...]) -> ParameterRow:
    (layer, *_) = [layer for layer in registration.layers if index in layer.params]
    return ParameterRow(
        registration.names[index],
        shape,
        int(np.prod(shape)),
        name_of(registration, layer),
        layer.tag_name,
        layer.num_uses,
        layer.reason or layer.remark,
        layer.uncovered,
    )


def name_of(registration: Registration, layer: FoundLayer) -> str:
    """Return the part of their paths that the parameters of a layer share."""
    names = [registration.names[index] for index in layer.params]
    if len(names) == 1:
        return names[0]
    shared = ""
    for keys in zip(*(_split_path(name) for name in names), strict=False):
        if len(set(keys)) > 1:
            break
        shared += keys[0]
    return shared or "+".join(names)


def _split_path(name: str) -> list[str]:
    """Split a path that `jax.tree_util.keystr` printed into its keys."""
    keys: list[str] = []
    for character in name:
        if character in "[." or not keys:
            keys.append(character)
        else:
            keys[-1] += character
    return keys
