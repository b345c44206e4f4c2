"""Among which devices columns are split, as the user says with `mesh`, `axis` and `replicated`."""

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType

from curvax import _compat
from curvax._types import Array, Fun, PyTree
from curvax.diffops._agreement import check_agreement, shapes_in_words
from curvax.parallel import MeshAxis

__all__ = ["Devices"]


@dataclass(frozen=True)
class Devices:
    """The devices along an axis of a mesh, or without one that which JAX takes by default."""

    axis: MeshAxis | None
    replicated: bool
    """Whether results are to be whole on every device."""
    to_disk: bool
    """Whether results go to disk. Then devices take blocks in turn, and have no shares."""

    @classmethod
    def of(
        cls, mesh: Any, axis: Any, replicated: bool, where: str, *, to_disk: bool = False
    ) -> "Devices":
        """Check what the user gave."""
        along = MeshAxis.of(mesh, axis, where, replicated)
        if replicated and to_disk:
            raise ValueError(
                f"{where}: replicated=True asks for results in the memory of every device, and "
                f"out= for results on disk. Leave one of them out."
            )
        if along is not None:
            along.check_outside(where)
            _check_processes(along, where)
        return cls(along, replicated, to_disk)

    @property
    def count(self) -> int:
        """How many devices there are."""
        return 1 if self.axis is None else self.axis.count

    @property
    def is_shared(self) -> bool:
        """Whether they are those of several processes."""
        return self.axis is not None and self.axis.is_shared

    def share(self, length: int) -> int:
        """How many of so many columns each of them computes, at most."""
        return length if self.to_disk else -(-length // self.count)

    def checked(self, name: str, tree: PyTree, where: str) -> PyTree:
        """Arrays that the user gave, if they can be used on these devices.

        Those of which the type says that they are split are made whole: unit vectors are not split,
        and tangents must be of the types of what they are tangent to.
        """
        axis = self.axis
        if axis is None:
            return tree
        if axis.is_shared and not any(map(_compat.is_tracer, jax.tree.leaves(tree))):
            check_agreement(shapes_in_words(name, tree), where)
        axis.check_placement(name, tree, where)
        return jax.tree.map(lambda leaf: _unsplit(leaf, axis), tree)

    def placed(self, tree: PyTree) -> PyTree:
        """Arrays that are whole on every device; those that are on the mesh stay as they are."""
        if self.axis is None:
            return tree
        whole = self.axis.sharding(None)
        stays = lambda leaf: _compat.is_tracer(leaf) or leaf.committed
        return jax.tree.map(lambda x: x if stays(x) else jax.device_put(x, whole), tree)

    def check_closed_over(self, fun: Fun, x: PyTree, where: str) -> None:
        """Check that what a function closes over can get to where it runs."""
        if self.axis is None or AxisType.Explicit not in self.axis.mesh.axis_types:
            return
        for const in jax.make_jaxpr(fun)(x).consts:
            if _compat.sharding_of(const) is not None:
                raise ValueError(
                    f"{where}: f closes over an array {const.dtype}{list(const.shape)} that is on "
                    f"a mesh with Explicit axes, which JAX does not let into what runs on the "
                    f"devices of a mesh. Let it close over numpy.asarray(array), or use a mesh "
                    f"with Auto axes."
                )

    def check_progress(self, where: str) -> None:
        """Check that a program can call back from there, for a progress bar."""
        if self.axis is None:
            return
        kinds = dict(zip(self.axis.mesh.axis_names, self.axis.mesh.axis_types, strict=True))
        if any(kinds[n] is AxisType.Explicit for n in kinds if n not in self.axis.names):
            raise ValueError(
                f"{where}: progress=True calls back from the devices, which JAX does not do where "
                f"a mesh has other Explicit axes than those along which work is split. Leave it "
                f"out, or make these axes Auto."
            )


def _unsplit(x: Array, axis: MeshAxis) -> Array:
    """An array that is whole by its type; there is nothing to do but on explicit mesh axes."""
    if _compat.sharding_of(x) is None:
        return x
    move = jax.sharding.reshard if _compat.is_tracer(x) else jax.device_put
    return move(x, axis.sharding(None))


def _check_processes(axis: MeshAxis, where: str) -> None:
    """Check that a mesh belongs to one process or to all, since all those there are are asked."""
    found = {device.process_index for device in axis.mesh.devices.flat}
    if 1 < len(found) < jax.process_count():
        raise ValueError(
            f"{where}: the mesh has devices of the processes {sorted(found)}, but there are "
            f"{jax.process_count()} processes. Use a mesh with devices of all of them, or of one."
        )
