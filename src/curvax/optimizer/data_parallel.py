"""Data parallelism of an optimizer: batches are sharded along one axis of a mesh.

Parameters and states are replicated along that axis, except for the rows of a sharded state. Along
other axes of the mesh parameters may be sharded, which is left to the compiler. For that all axes
of the mesh are `Auto` inside, and results are put back on the mesh that was given.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from curvax import _jax
from curvax._errors import where
from curvax._tree import leaf_name
from curvax._types import PyTree
from curvax.curvature.batch import axes_of
from curvax.curvature.state_sharding import state_specs
from curvax.devices.agreement import NewShapes
from curvax.devices.mesh_axis import MeshAxis, check_is_mesh, is_committed

_BATCH = "batch"
_REPLICATED = PartitionSpec()


def check_mesh(mesh: Any, pmap_axis_name: str) -> None:
    """Check that what was given as a mesh is one, with an axis along which to shard batches."""
    if mesh is None:
        return
    check_is_mesh(mesh)
    names = mesh.axis_names
    if len(names) != 1 and pmap_axis_name not in names:
        raise ValueError(
            f"{where()}: the mesh has the axes {names}, none of which is "
            f"pmap_axis_name={pmap_axis_name!r}. Say by pmap_axis_name along which of them batches "
            f"are split."
        )


def axis_of(mesh: Mesh | None, pmap_axis_name: str) -> str:
    """The axis along which batches are split: that of this name, or the only one of a mesh."""
    if mesh is None or len(mesh.axis_names) != 1:
        return pmap_axis_name
    return mesh.axis_names[0]


def num_devices(mesh: Mesh | None, axis: str) -> int:
    """How many devices there are along the axis; without a mesh all there are."""
    return jax.device_count() if mesh is None else mesh.shape[axis]


def without_places(tree: PyTree) -> PyTree:
    """Return shapes in place of arrays, without their shardings; enough to trace a function."""
    shape = lambda x: _jax.unplaced(x) if isinstance(x, jax.Array) else x
    return jax.tree.map(shape, tree)


class DataParallel:
    """Run functions with batches sharded along an axis of a mesh, or along all devices there are.

    Functions have their arguments by name; the one called "batch" is sharded. Their results are
    described by a pytree prefix with, for each, the name of the argument that it replaces and is
    sharded like, a partition spec, or None for a replicated result.
    """

    def __init__(self, mesh: Mesh | None, axis: str) -> None:
        self.axis = axis
        self._given = mesh
        self._new_shapes = NewShapes()

    @functools.cached_property
    def _mesh(self) -> Mesh:
        """The mesh that results are on."""
        return Mesh(np.array(jax.devices()), (self.axis,)) if self._given is None else self._given

    @functools.cached_property
    def _along(self) -> MeshAxis:
        """The same devices, with `Auto` axes."""
        names = self._mesh.axis_names
        types = (AxisType.Auto,) * len(names)
        return MeshAxis(Mesh(self._mesh.devices, names, axis_types=types), (self.axis,))

    @property
    def _is_explicit(self) -> bool:
        return AxisType.Explicit in self._mesh.axis_types

    @property
    def has_other_axes(self) -> bool:
        """Whether arrays may be sharded along other axes of the mesh."""
        return len(self._mesh.axis_names) > 1

    def check_plain(self, args: Mapping[str, Any]) -> None:
        """Check that nothing has a leading axis of devices, as `jax.pmap` would have it."""
        rng, state, count = args.get("rng"), args.get("state"), self._along.count
        is_stacked = rng is not None and np.ndim(rng) > (0 if _jax.is_key(rng) else 1)
        what = "rng is an array of random keys" if is_stacked else None
        if state is not None and np.ndim(state.step_counter):
            what = f"state.step_counter has the shape {np.shape(state.step_counter)}"
        elif state is not None and "params" in args:
            shapes = lambda tree: [np.shape(leaf) for leaf in jax.tree.leaves(tree)]
            given, known = shapes(args["params"]), shapes(state.velocities)
            if known and given == [(count, *shape) for shape in known]:
                what = f"params have a first axis of {count} that those of init had not"
        if what is not None:
            raise ValueError(
                f"{where()}: {what}. Parameters, state and random key are given once, without an "
                f"axis for the {count} devices, and a batch as one array of all examples."
            )

    def placed(self, program: str, args: Mapping[str, Any]) -> dict[str, Any]:
        """Put the arguments of a program on the devices, the batch sharded."""
        self._check(program, args)

        def place(name: str, spec: PartitionSpec, leaf: Any) -> Any:
            found = self._along.put(leaf, spec, is_process_local=name == _BATCH)
            return self._with_automatic_axes(found)

        return {
            name: jax.tree.map(functools.partial(place, name), self._specs(name, tree), tree)
            for name, tree in args.items()
        }

    def run(self, program: Callable[..., Any], args: Mapping[str, Any]) -> Any:
        """Run a compiled program, and put its results on the mesh that was given."""
        is_inside = _jax.is_tracing()
        set_already = jax.sharding.get_abstract_mesh()
        is_other = not set_already.empty and set_already != self._along.mesh.abstract_mesh
        needs_mesh = is_other and not is_inside
        with jax.set_mesh(self._along.mesh) if needs_mesh else contextlib.nullcontext():
            found = program(*args.values())
        if not self._is_explicit or is_inside:
            return found
        back = lambda x: jax.device_put(x, NamedSharding(self._mesh, x.sharding.spec))
        return jax.tree.map(back, found)

    def shardings(self, results: Any, args: Mapping[str, Any]) -> Any:
        """Return the shardings of results: those of the arguments of their names, or replicated."""

        def of_leaf(spec: PartitionSpec, leaf: Any) -> Any:
            is_elsewhere = self.has_other_axes and isinstance(leaf, jax.Array)
            return leaf.sharding if is_elsewhere else NamedSharding(self._along.mesh, spec)

        def of(result: Any) -> Any:
            if not isinstance(result, str):
                return NamedSharding(self._along.mesh, result or _REPLICATED)
            return jax.tree.map(of_leaf, self._specs(result, args[result]), args[result])

        return jax.tree.map(of, results, is_leaf=_is_result)

    def shard_map(
        self, fun: Callable[..., Any], names: Sequence[str], results: Any
    ) -> Callable[..., Any]:
        """Return a function of arguments of these names, run on all devices by `jax.shard_map`."""

        def run(*given: Any) -> Any:
            specs = {n: self._specs(n, tree) for n, tree in zip(names, given, strict=True)}
            of = lambda result: specs[result] if isinstance(result, str) else result or _REPLICATED
            out_specs = jax.tree.map(of, results, is_leaf=_is_result)
            return self._along.shard_map(fun, tuple(specs.values()), out_specs)(*given)

        return run

    def _specs(self, name: str, tree: PyTree) -> PyTree:
        """Return the partition specs of an argument."""
        if name != _BATCH:
            return state_specs(tree, self._along.names)
        return jax.tree.map(lambda leaf: self._along.spec(axes_of(leaf)), tree)

    def inside(self, fun: Callable[..., Any], args: Mapping[str, Any], results: Any) -> Any:
        """Call the function inside a trace: by `shard_map`, unless that is around already."""
        if _jax.is_bound(self.axis):
            return fun(*args.values())
        self._check_batch(args)
        run = self.shard_map(fun, list(args), results)
        if not self._is_explicit:
            return run(*args.values())
        # Types say how arrays are sharded. Those of results are the types of what they replace.
        replicated = NamedSharding(self._mesh, _REPLICATED)
        of_leaf = lambda x: _jax.sharding_of(x) or replicated

        def of(result: Any) -> Any:
            if not isinstance(result, str):
                return NamedSharding(self._mesh, result or _REPLICATED)
            return jax.tree.map(of_leaf, args[result])

        shardings = jax.tree.map(of, results, is_leaf=_is_result)
        return jax.sharding.auto_axes(run, out_sharding=shardings)(*args.values())

    def _with_automatic_axes(self, leaf: Any) -> Any:
        """Return an array of the mesh that was given on that with `Auto` axes; the same buffers."""
        if not self._is_explicit or _jax.is_tracer(leaf) or not isinstance(leaf, jax.Array):
            return leaf
        names = list(getattr(leaf.sharding, "spec", ()))
        while names and names[-1] is None:  # As results have it, so that nothing is compiled again.
            names.pop()
        return jax.device_put(leaf, NamedSharding(self._along.mesh, PartitionSpec(*names)))

    def _check(self, program: str, args: Mapping[str, Any]) -> None:
        for name, tree in args.items():
            self._along.check_placement(name, tree)
        self.check_plain(args)
        self._check_batch(args)
        if self._along.is_multi_process:
            self._new_shapes.check(program, args)

    def _check_batch(self, args: Mapping[str, Any]) -> None:
        """Check that there are examples, and that all devices have the same number of them."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(args.get(_BATCH)):
            if axes_of(leaf) is not None:
                is_own = self._along.is_multi_process and not is_committed(leaf)
                name, length = leaf_name(_BATCH, path), np.shape(leaf)[0]
                if not length:
                    raise ValueError(
                        f"{where()}: {name} has no examples, so that there is nothing to average "
                        f"over. Leave empty batches out."
                    )
                self._along.check_divides(length, name, is_of_process=is_own)


def _is_result(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec)
