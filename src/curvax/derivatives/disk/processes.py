"""The processes that write one store together, and the devices that each of them computes with.

Each process computes different blocks on its local devices, and no process waits for another while
it does. They synchronise at the beginning, where the first process opens the store and says which
blocks are missing, and at the end. If one fails at the beginning all do, so that none waits for it
forever. If one dies, `jax.distributed` stops the others.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from curvax import _jax
from curvax._errors import where
from curvax._types import PyTree
from curvax.devices.mesh_axis import MeshAxis

T = TypeVar("T")

LONGEST_PAUSE = 1.0
"""Maximum number of seconds between two checks whether the other processes are done."""


@dataclass(frozen=True)
class ProcessGroup:
    """This process, with index `index` among `count` processes that write together."""

    index: int
    count: int
    axis: MeshAxis | None
    """The local devices that compute; None for JAX's default device."""

    @classmethod
    def of(cls, axis: MeshAxis | None) -> "ProcessGroup":
        """Return the group of all processes, or of this one if the mesh has only local devices."""
        index, count = jax.process_index(), jax.process_count()
        if count == 1 or (axis is not None and not axis.is_multi_process):
            return cls(0, 1, axis)
        local = [_jax.default_device()] if axis is None else list(axis.mesh.local_devices)
        axis = MeshAxis(Mesh(np.array(local), ("devices",)), ("devices",))
        return cls(index, count, axis)

    @property
    def is_first(self) -> bool:
        """Whether this is the process that opens the store."""
        return self.index == 0

    def local_mesh(self) -> AbstractContextManager[object]:
        """Return a context in which this process computes on its local devices only."""
        if self.count == 1 or self.axis is None:
            return nullcontext()
        return jax.set_mesh(self.axis.mesh)

    def replicate_locally(self, x: PyTree) -> PyTree:
        """Gather arrays and replicate them on the local devices. All processes must call this."""
        if self.count == 1 or self.axis is None:
            return x
        replicated = self.axis.sharding(None)
        put = lambda leaf: jax.device_put(_jax.gathered_to_host(leaf), replicated)
        return jax.tree.map(put, x)

    def all_or_none(self, step: Callable[[], T], what: str) -> T:
        """Return `step()`, after checking that it failed in no process."""
        if self.count == 1:
            return step()
        result: T | None = None
        error: Exception | None = None
        try:
            result = step()
        except Exception as raised:  # noqa: BLE001  Raised below, once all processes know of it.
            error = raised
        failed = np.flatnonzero(_jax.gathered(np.int32(error is not None)))
        if error is not None:
            raise error
        if failed.size:
            raise RuntimeError(
                f"{where()}: {what} failed in process {', '.join(map(str, failed))}, whose error "
                f"says why; so process {self.index} also gives up."
            )
        return cast(T, result)

    def broadcast_from_first(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Return the numbers of the first process; those of the others must have the same shape."""
        return numbers if self.count == 1 else np.asarray(_jax.broadcast_from_first(numbers))

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait until all blocks are done, and all processes know it.

        Some processes may be hours behind, which exceeds the timeout of collectives. So this polls.
        """
        if self.count == 1:
            return
        pause = 0.01
        while not is_done():
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        _jax.wait_for_all("curvax: finished")
