"""Several processes that run one program, as `jax.distributed` starts them."""

from typing import Any

import jax
import numpy as np

__all__ = ["gathered", "sent_by_first", "wait_for_all"]


def sent_by_first(value: Any) -> Any:
    """What process 0 has for this pytree of numbers and NumPy arrays. All processes must ask."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils  # Only here, as it takes long to load.

    return multihost_utils.broadcast_one_to_all(value)


def gathered(numbers: Any) -> Any:
    """The numbers of all processes, an array with one row for each. All processes must ask."""
    numbers = np.asarray(numbers)
    if jax.process_count() == 1:
        return numbers[None]
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(numbers))


def wait_for_all(name: str) -> None:
    """Wait until all processes are here. Those that wait are stopped if one of them dies."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)
