"""The processes that write one store together, and the devices that each of them computes with.

Each process computes blocks of its own on its own devices, so no process waits for another on the
way. They meet at the beginning, where the first opens the store and says what is to be done, and at
the end. Where one fails at the beginning all do, so that none waits for it forever. If one dies,
`jax.distributed` stops the others.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from curvax import _jax
from curvax._errors import where
from curvax._types import PyTree
from curvax.devices.mesh_axis import MeshAxis

T = TypeVar("T")

LONGEST_PAUSE = 1.0
"""Seconds between two looks at whether the others are done."""


@dataclass(frozen=True)
class Team:
    """This process, the `number`-th of `count` that work together."""

    number: int
    count: int
    axis: MeshAxis | None
    """The devices of this process that compute; None for the one that JAX takes by default."""

    @classmethod
    def of(cls, axis: MeshAxis | None) -> "Team":
        """All processes, or this one alone if it is alone or the mesh has no devices of others."""
        number, count = jax.process_index(), jax.process_count()
        if count == 1 or (axis is not None and not axis.is_multi_process):
            return cls(0, 1, axis)
        own = [_jax.default_device()] if axis is None else list(axis.mesh.local_devices)
        axis = MeshAxis(Mesh(np.array(own), ("devices",)), ("devices",))
        return cls(number, count, axis)

    @property
    def is_first(self) -> bool:
        """Whether this is the process that opens the store."""
        return self.number == 0

    def by_itself(self) -> AbstractContextManager[Any]:
        """A context in which this process computes without the others, whatever mesh is around."""
        if self.count == 1 or self.axis is None:
            return nullcontext()
        return jax.set_mesh(self.axis.mesh)

    def own(self, x: PyTree) -> PyTree:
        """Arrays whole on each of this process's devices. All processes must ask."""
        if self.count == 1 or self.axis is None:
            return x
        whole = self.axis.sharding(None)
        return jax.tree.map(lambda leaf: jax.device_put(_jax.gathered_whole(leaf), whole), x)

    def all_or_none(self, step: Callable[[], T], what: str) -> T:
        """What `step` returns, if it fails in no process."""
        if self.count == 1:
            return step()
        error: Exception | None = None
        result: Any = None
        try:
            result = step()
        except Exception as found:  # noqa: BLE001  It is raised below, when all know of it.
            error = found
        failed = np.flatnonzero(_jax.gathered(np.int32(error is not None)))
        if error is not None:
            raise error
        if failed.size:
            raise RuntimeError(
                f"{where()}: {what} failed in process {', '.join(map(str, failed))}, which says "
                f"why; so it is given up in process {self.number}, too."
            )
        return result

    def sent_by_first(self, numbers: Any) -> Any:
        """The numbers that the first process has; the others give some of the same shape."""
        return numbers if self.count == 1 else _jax.sent_by_first(numbers)

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait until all that was shared out is done, and all processes know it.

        Some may be hours behind, which is longer than devices of several processes wait for each
        other. So this looks from time to time.
        """
        if self.count == 1:
            return
        pause = 0.01
        while not is_done():
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        _jax.wait_for_all("curvax: finished")
