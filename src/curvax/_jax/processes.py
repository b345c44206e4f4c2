"""Communication between the processes of a multi-process program."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from curvax._types import ArrayLike

T = TypeVar("T")


def broadcast_from_first(value: T) -> T:
    """Return what process 0 has for this pytree of numbers and NumPy arrays.

    A collective: all processes must call it. They may do so while a program is being traced.
    """
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils  # Imported here, because it takes long to load.

    # Transformations and meshes are thread-local, so another thread is free of them.
    with ThreadPoolExecutor(1) as other_thread:
        return other_thread.submit(multihost_utils.broadcast_one_to_all, value).result()


def gathered(numbers: ArrayLike) -> NDArray[Any]:
    """Return the numbers of all processes, stacked along a new leading axis.

    A collective: all processes must call it.
    """
    local = np.asarray(numbers)
    if jax.process_count() == 1:
        return local[None]
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(local))


_EXCHANGES = itertools.count()


def exchanged(text: str, seconds: float) -> list[str | None]:
    """Return the texts of all processes, in order; None for those that do not call it in time.

    This does not involve devices, so that it does not matter what they are computing.
    """
    if jax.process_count() == 1:
        return [text]
    from jax._src import distributed  # No public function has a timeout.

    client: Any = distributed.global_state.client
    key = f"curvax/{next(_EXCHANGES)}"
    client.key_value_set(f"{key}/{jax.process_index()}", text)

    def received(process: int) -> str | None:
        try:
            return client.blocking_key_value_get(f"{key}/{process}", int(1000 * seconds))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None

    return [received(process) for process in range(jax.process_count())]


def gathered_to_host(x: T) -> T | NDArray[Any]:
    """Return an array that is not fully addressable as a NumPy array, gathered; others as they are.

    A collective: all processes must call it.
    """
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return x
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def wait_for_all(name: str) -> None:
    """Wait until all processes call this. If one of them dies, JAX stops those that wait."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)
