"""Arrays that are put on the devices of a mesh: whole on each, or split among them.

What is there already stays as it is. Of the rest, a program with one process has the whole; with
several, each process has its own part of what is split, and all of them the same of what is not.
Processes that have parts of different shapes would wait for each other forever, so shapes that are
new to a process are compared with those of the others, which must be new to them, too.
"""

import hashlib
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from curvax import _jax
from curvax._tree import leaf_name
from curvax._types import PyTree
from curvax.devices.mesh_axis import MeshAxis

__all__ = ["Agreement", "gathered", "is_placed", "placed"]


SECONDS = 300
"""For how long to wait for other processes to have new shapes, too."""


def is_placed(leaf: Any) -> bool:
    """Whether an array says on which devices it is, or will, once it has a value."""
    return _jax.is_tracer(leaf) or (isinstance(leaf, jax.Array) and leaf.committed)


def placed(along: MeshAxis, leaf: Any, position: int | None, *, has_all: bool = False) -> Any:
    """An array on the devices of a mesh, split along an axis of its own, or whole on each.

    With `has_all`, each process has all of it, also of what is split. A Python number stays one: it
    has no dtype yet.
    """
    if is_placed(leaf) or isinstance(leaf, bool | int | float | complex):
        return leaf
    sharding = along.sharding(position)
    if not along.is_shared:
        return jax.device_put(leaf, sharding)
    own = np.asarray(_jax.unwrap_keys(leaf) if isinstance(leaf, jax.Array) else leaf)
    shape = own.shape if has_all else None
    whole = jax.make_array_from_process_local_data(sharding, own, shape)
    return _jax.wrap_keys(whole, leaf)


def gathered(leaf: Any) -> Any:
    """An array that is on devices, also of other processes, as one of NumPy's; else as it is."""
    if not isinstance(leaf, jax.Array):
        return leaf
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding) and not leaf.is_fully_addressable:
        leaf = jax.device_put(leaf, NamedSharding(sharding.mesh, PartitionSpec()))
    return np.asarray(leaf)


class Agreement:
    """Knows on which shapes all processes have agreed."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def check(self, program: str, arguments: Mapping[str, PyTree], where: str) -> None:
        """Check that all processes run a program on the same shapes, if these are new here."""
        described = "\n".join([f"the program is {program}", *_described(arguments)])
        if described in self._known:
            return
        digests = _jax.exchanged(hashlib.sha256(described.encode()).hexdigest(), SECONDS)
        absent = [process for process, digest in enumerate(digests) if digest is None]
        must = f"{where}: all processes must be given arrays of the same shapes, each its own part"
        if absent:
            raise ValueError(
                f"{must} of a batch. In process {jax.process_index()} there are new ones, but not, "
                f"for {SECONDS} seconds, in process {', '.join(map(str, absent))}."
            )
        if len(set(digests)) > 1:
            texts = [text or "" for text in _jax.exchanged(described, SECONDS)]
            raise ValueError(f"{must} of a batch, but {_difference(texts)}.")
        self._known.add(described)


def _described(arguments: Mapping[str, PyTree]) -> list[str]:
    """A line for each array."""
    return [
        f"{leaf_name(name, path)} is {np.result_type(leaf) if np.isscalar(leaf) else leaf.dtype}"
        f"{list(np.shape(leaf))}"
        for name, tree in arguments.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _difference(texts: list[str]) -> str:
    """The first array that differs, for each process."""
    lines = [text.split("\n") for text in texts]
    rows = itertools.zip_longest(*lines, fillvalue="nothing more is there")
    first = next(row for row in rows if len(set(row)) > 1)
    return ", ".join(f"in process {number} {line}" for number, line in enumerate(first))
