"""Placement of arrays on the devices of a mesh, replicated or sharded.

Committed arrays stay where they are. Of others, a program with one process has all; in a
multi-process program each process has its own examples of a batch, and the same values of all else.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from curvax import _jax
from curvax.devices.mesh_axis import MeshAxis

__all__ = ["is_committed", "put", "to_host"]


def is_committed(leaf: Any) -> bool:
    """Return whether an array is committed to devices. Tracers are: they go where they run."""
    return _jax.is_tracer(leaf) or (isinstance(leaf, jax.Array) and leaf.committed)


def put(axis: MeshAxis, leaf: Any, spec: PartitionSpec, *, is_process_local: bool = False) -> Any:
    """Put an array on the devices of a mesh, unless it is committed.

    With `is_process_local`, each process of several has its own part of what is sharded; otherwise
    each has all of it. A Python number stays one: it has no dtype yet.
    """
    if is_committed(leaf) or isinstance(leaf, bool | int | float | complex):
        return leaf
    sharding = NamedSharding(axis.mesh, spec)
    if not axis.is_multi_process:
        return jax.device_put(leaf, sharding)
    local = np.asarray(_jax.unwrap_keys(leaf) if isinstance(leaf, jax.Array) else leaf)
    shape = None if is_process_local else local.shape
    return _jax.wrap_keys(jax.make_array_from_process_local_data(sharding, local, shape), leaf)


def to_host(leaf: Any) -> Any:
    """Return all of a JAX array, also what other processes have of it, as a NumPy array.

    All processes must call this. What is not a JAX array is returned as it is.
    """
    return np.asarray(_jax.gathered_whole(leaf)) if isinstance(leaf, jax.Array) else leaf
