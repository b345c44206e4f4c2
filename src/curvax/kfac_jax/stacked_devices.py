"""The convention of programs written for `jax.pmap`: a leading axis of local devices.

Every array, also of parameters and state, has one row for each local device. The row of a batch
holds the examples of that device, and those of parameters and state are equal. Underneath, rows are
the shards of a mesh with one axis: a program is a `jax.shard_map` in which each device sees its row
without the leading axis, and the axis has a name, so that the function can average over it.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from curvax import _jax
from curvax._errors import where
from curvax._tree import leaf_name
from curvax._types import Fun, PyTree
from curvax.devices.mesh_axis import MeshAxis
from curvax.optimizer.data_parallel import Devices

T = TypeVar("T")


class StackedDevices(Devices):
    """Run functions on local devices, with arguments and results that have a row for each.

    Equal to `jax.pmap`, except that arrays stay on the devices as shards of a mesh.

    Arguments:
        axis: The name of the axis, which is bound in the functions.
    """

    def __init__(self, axis: str) -> None:
        if jax.process_count() > 1:
            raise NotImplementedError(
                f"{where()}: multi_device=True with a leading axis of devices runs in one process, "
                f"but there are {jax.process_count()}. Use curvax.Optimizer(multi_device=True), "
                f"which takes parameters and state once, and the batch of each process."
            )
        self.axis = axis

    @functools.cached_property
    def _mesh_axis(self) -> MeshAxis:
        return MeshAxis(Mesh(np.asarray(jax.local_devices()), (self.axis,)), (self.axis,))

    @functools.cached_property
    def _sharding(self) -> NamedSharding:
        return self._mesh_axis.sharding(0)

    @property
    def scalar_shape(self) -> tuple[int, ...]:
        """The shape of a number for each device; of one number where the axis is bound."""
        return () if _jax.is_bound(self.axis) else (self._mesh_axis.count,)

    def check(self, args: Mapping[str, PyTree]) -> None:
        """Check that every array has a row for each device."""
        if _jax.is_bound(self.axis):
            return
        count = self._mesh_axis.count
        for name, tree in args.items():
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                if np.shape(leaf)[:1] != (count,):
                    raise ValueError(
                        f"{where()}: with multi_device=True every array has a leading axis of the "
                        f"{count} local devices, but {leaf_name(name, path)} has the shape "
                        f"{np.shape(leaf)}. Use utils.replicate_all_local_devices for parameters, "
                        f"reshape a batch to ({count}, examples per device, …), and use "
                        f"utils.make_different_rng_key_on_all_devices for random keys."
                    )

    def placed(self, program: str, args: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """Put each row on its device."""
        del program
        self.check(args)
        return {name: jax.tree.map(self._put, tree) for name, tree in args.items()}

    def _put(self, leaf: ArrayLike) -> ArrayLike:
        if isinstance(leaf, jax.Array) and leaf.sharding == self._sharding:
            return leaf
        return jax.device_put(leaf, self._sharding)

    def run(self, program: Fun, args: Mapping[str, PyTree]) -> PyTree:
        """Run a compiled program."""
        return program(*args.values())

    def shardings(self, results: PyTree, args: Mapping[str, PyTree]) -> PyTree:
        """Return the sharding of all results: one row for each device."""
        del results, args
        return self._sharding

    def shard_map(self, fun: Fun, names: Sequence[str], results: PyTree) -> Fun:
        """Return `fun` of the rows of one device, mapped over all devices."""
        del results

        def on_device(*args: PyTree) -> PyTree:
            out = fun(*jax.tree.map(lambda x: x[0], args))
            return jax.tree.map(lambda x: jnp.asarray(x)[None], out)

        rows = PartitionSpec(self.axis)
        return self._mesh_axis.shard_map(on_device, (rows,) * len(names), rows)

    def run_traced(self, fun: Fun, args: Mapping[str, PyTree], results: PyTree) -> PyTree:
        """Call the function while tracing: under `shard_map`, unless the caller is already."""
        if _jax.is_bound(self.axis):
            return fun(*args.values())
        return self.shard_map(fun, list(args), results)(*args.values())

    def trace(self, build: Callable[[Sequence[PyTree]], T], func_args: Sequence[PyTree]) -> T:
        """Return `build` of the arguments of one device, with the axis bound."""
        if _jax.is_bound(self.axis):
            return build(func_args)
        built: list[T] = []

        def on_device(*local_args: PyTree) -> None:
            built.append(build(local_args))

        jax.eval_shape(self.shard_map(on_device, [""] * len(func_args), None), *func_args)
        return built[0]
