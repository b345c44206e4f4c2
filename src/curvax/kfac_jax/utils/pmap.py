"""A leading axis of devices, as programs written for `jax.pmap` pass arrays.

Such an array has one row for each local device. It is sharded along that axis, so that every
device holds its own row; nothing here needs `jax.pmap` itself.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from curvax import _jax
from curvax.kfac_jax.utils.trees import copy_array
from curvax.kfac_jax.utils.types import Array, Numeric

T = TypeVar("T")

_AXIS = "kfac_axis"


def using_legacy_pmap() -> bool:
    """Return False: nothing here is built on `jax.pmap`."""
    return False


def in_pmap(axis_name: str | None) -> bool:
    """Return whether an axis of this name is mapped around the caller, by `pmap` or `shard_map`."""
    if axis_name is None:
        return False
    try:
        lax.axis_index(axis_name)
    except NameError:
        return False
    return True


def wrap_if_pmap(p_func: Callable[[T, str], T]) -> Callable[[T, str | None], T]:
    """Return a function that applies `p_func` inside a mapped axis, and nothing outside of one."""

    def wrapped(obj: T, axis_name: str | None) -> T:
        return p_func(obj, axis_name) if axis_name is not None and in_pmap(axis_name) else obj

    wrapped.__name__ = f"{getattr(p_func, '__name__', 'collective')}_if_pmap"
    return wrapped


pmean_if_pmap = wrap_if_pmap(lax.pmean)
"""Average over the devices of a mapped axis; outside of one, return the argument."""

psum_if_pmap = wrap_if_pmap(lax.psum)
"""Sum over the devices of a mapped axis; outside of one, return the argument."""


def _sharding(axis_name: str | None) -> NamedSharding:
    axis_name = axis_name or _AXIS
    mesh = Mesh(np.asarray(jax.local_devices()), (axis_name,))
    return NamedSharding(mesh, PartitionSpec(axis_name))


def broadcast_all_local_devices(obj: T, axis_name: str | None = None) -> T:
    """Shard arrays that have a row for each local device, so that each device holds its row.

    Args:
        obj: A pytree of arrays, each with a leading axis as long as there are local devices.
        axis_name: The name of the mesh axis; any will do.
    """
    sharding = _sharding(axis_name)
    return jax.tree.map(lambda x: jax.device_put(x, sharding), obj)


def replicate_all_local_devices(obj: T, axis_name: str | None = None) -> T:
    """Give arrays a leading axis of local devices, along which they are repeated.

    Args:
        obj: A pytree of arrays.
        axis_name: The name of the mesh axis; any will do.
    """
    count = jax.local_device_count()
    repeated = jax.tree.map(lambda x: np.broadcast_to(x, (count, *np.shape(x))), obj)
    return broadcast_all_local_devices(repeated, axis_name)


def make_different_rng_key_on_all_devices(rng: Array) -> Array:
    """Return a different random key for each device of each process, along a leading axis."""
    rng = jax.random.fold_in(rng, jax.process_index())
    return broadcast_all_local_devices(jax.random.split(rng, jax.local_device_count()))


def _split(key: Array, num: int) -> tuple[Array, ...]:
    keys = jax.vmap(lambda k: jax.random.split(k, num))(key)
    return tuple(keys[:, k] for k in range(num))


p_split = jax.jit(functools.partial(_split, num=2))
"""Split a key for each device into two: two arrays with a leading axis of devices."""

p_split_num = jax.jit(_split, static_argnums=1)
"""Split a key for each device into several: as many arrays with a leading axis of devices."""


def get_first(obj: T) -> T:
    """Return what the first device has: the first row of every array."""
    return jax.tree.map(lambda x: x[0], obj)


def get_mean(obj: T) -> T:
    """Return the average over the leading axis of devices."""
    return jax.tree.map(lambda x: jnp.mean(x, axis=0), obj)


def get_sum(obj: T) -> T:
    """Return the sum over the leading axis of devices."""
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), obj)


def _repeated(total: Array, like: Array) -> Array:
    return jnp.broadcast_to(total, like.shape)


def pmap_mean(x: T) -> T:
    """Return the average over the leading axis of devices, repeated along it."""
    return jax.tree.map(lambda a: _repeated(jnp.mean(a, axis=0), a), x)


def pmap_sum(x: T) -> T:
    """Return the sum over the leading axis of devices, repeated along it."""
    return jax.tree.map(lambda a: _repeated(jnp.sum(a, axis=0), a), x)


pmap_zeros_like = jax.jit(lambda x: jax.tree.map(jnp.zeros_like, x))
"""Return zeros like arrays with a leading axis of devices, sharded as these are."""


def pmap_copy_obj(x: T | None) -> T | None:
    """Return a copy of arrays with a leading axis of devices; None of None."""
    return None if x is None else jax.tree.map(copy_array, x)


def jit_sync_and_divide_value(value: T, counter: Numeric, axis_name: str | None = None) -> T:
    """Divide by a counter, averaged over the devices of a mapped axis if there is one."""
    return jax.tree.map(lambda x: pmean_if_pmap(x / counter, axis_name), value)


def pmap_sync_and_divide_value(value: T, counter: Array) -> T:
    """Divide rows of devices by their counters, and average them over the devices."""
    divided = jax.tree.map(lambda x: x / jnp.reshape(counter, (-1, *(1,) * (x.ndim - 1))), value)
    return pmap_mean(divided)


def host_all_gather(x: T) -> T:
    """Return the arrays of all processes along a new leading axis; of one process, as they are."""
    if jax.process_count() == 1:
        return x
    return jax.tree.map(_jax.gathered, x)


def host_mean(x: T) -> T:
    """Return the average over all processes."""
    if jax.process_count() == 1:
        return x
    return jax.tree.map(lambda a: np.mean(_jax.gathered(a), axis=0), x)


def host_sync(obj: T, sync_op: Callable[[T, str], T]) -> T:
    """Reduce over all processes by an operation such as `jax.lax.pmean`."""
    if jax.process_count() == 1:
        return obj
    gathered = jax.tree.map(_jax.gathered, obj)
    return jax.tree.map(
        lambda x: x[0], jax.vmap(lambda x: sync_op(x, _AXIS), axis_name=_AXIS)(gathered)
    )


def distribute_thunks(thunks: Sequence[Callable[[], T]], pmap_axis_name: str) -> tuple[T, ...]:
    """Run functions on different devices of a mapped axis, and return all results on all of them.

    Args:
        thunks: Functions without arguments that return pytrees of arrays, the same on all devices.
        pmap_axis_name: The mapped axis.
    """
    device, count = lax.axis_index(pmap_axis_name), _axis_size(pmap_axis_name)
    results = []
    for index, thunk in enumerate(thunks):
        shapes = jax.eval_shape(thunk)
        zeros = lambda shapes=shapes: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        own = lax.cond(device == index % count, thunk, zeros)
        results.append(lax.psum(own, pmap_axis_name))
    return tuple(results)


def _axis_size(axis_name: str) -> int:
    size: Any = lax.psum(1, axis_name)
    return int(size)
