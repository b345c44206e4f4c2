"""Several processes that run one program, as `jax.distributed` starts them."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np


def sent_by_first(value: Any) -> Any:
    """What process 0 has for this pytree of numbers and NumPy arrays. All processes must ask.

    They may do so while a program is being traced.
    """
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils  # Only here, as it takes long to load.

    # Transformations and meshes around the caller are not around another thread.
    with ThreadPoolExecutor(1) as other_thread:
        return other_thread.submit(multihost_utils.broadcast_one_to_all, value).result()


def gathered(numbers: Any) -> Any:
    """The numbers of all processes, an array with one row for each. All processes must ask."""
    numbers = np.asarray(numbers)
    if jax.process_count() == 1:
        return numbers[None]
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(numbers))


_EXCHANGES = itertools.count()


def exchanged(text: str, seconds: float) -> list[str | None]:
    """The texts of all processes, in order; None for those that were not asked within this time.

    Devices have no part in it, so it does not matter what they do meanwhile.
    """
    if jax.process_count() == 1:
        return [text]
    from jax._src import distributed  # There is no other way that does not wait forever.

    client: Any = distributed.global_state.client
    key = f"curvax/{next(_EXCHANGES)}"
    client.key_value_set(f"{key}/{jax.process_index()}", text)

    def told(process: int) -> str | None:
        try:
            return client.blocking_key_value_get(f"{key}/{process}", int(1000 * seconds))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None

    return [told(process) for process in range(jax.process_count())]


def gathered_whole(x: Any) -> Any:
    """An array as it is if this process has all of it, else all of it, as an array of NumPy's.

    All processes must ask.
    """
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return x
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def wait_for_all(name: str) -> None:
    """Wait until all processes are here. Those that wait are stopped if one of them dies."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)
