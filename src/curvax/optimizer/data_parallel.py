"""Data parallelism of the optimizer: batches are sharded along one axis of a mesh.

Parameters and state are replicated along that axis, except for the rows of a sharded state.
Parameters may be sharded along other axes of the mesh, which the compiler handles: internally all
axes of the mesh are `Auto`, and results are returned on the mesh that the user gave.
"""

import abc
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import ArrayLike

from curvax import _jax
from curvax._errors import where
from curvax._tree import leaf_name
from curvax._types import Fun, PyTree
from curvax.curvature.batch import axes_of
from curvax.curvature.state_sharding import state_specs
from curvax.devices.agreement import NewShapes
from curvax.devices.mesh_axis import MeshAxis, check_is_mesh, is_committed

T = TypeVar("T")

_BATCH = "batch"
_REPLICATED = PartitionSpec()

Result = str | PartitionSpec | None
"""The sharding of a result: that of the argument of this name, a spec, or None for replicated."""


def check_mesh(mesh: Mesh | None, pmap_axis_name: str) -> None:
    """Check that `mesh` is a mesh with an axis along which to shard batches, or None."""
    if mesh is None:
        return
    check_is_mesh(mesh)
    names = mesh.axis_names
    if len(names) != 1 and pmap_axis_name not in names:
        raise ValueError(
            f"{where()}: the mesh has the axes {names}, none of which is "
            f"pmap_axis_name={pmap_axis_name!r}. Name the axis along which batches are sharded by "
            f"pmap_axis_name."
        )


def axis_of(mesh: Mesh | None, pmap_axis_name: str) -> str:
    """Return the axis along which batches are sharded: the only one of the mesh, or the named."""
    if mesh is None or len(mesh.axis_names) != 1:
        return pmap_axis_name
    return mesh.axis_names[0]


def num_devices(mesh: Mesh | None, axis: str) -> int:
    """Return the number of devices along the axis of a mesh; without a mesh, of all devices."""
    return jax.device_count() if mesh is None else mesh.shape[axis]


def without_shardings(tree: PyTree) -> PyTree:
    """Return shapes in place of arrays, without their shardings; enough to trace a function."""
    shape = lambda x: _jax.without_sharding(x) if isinstance(x, jax.Array) else x
    return jax.tree.map(shape, tree)


class Devices(abc.ABC):
    """Several devices on which programs run: the form of their arguments and of their results.

    Functions run under `shard_map` over an axis called `axis`. They take their arguments by name.
    `results` describes what they return: a pytree prefix with a `Result` for each leaf.
    """

    axis: str

    @property
    def scalar_shape(self) -> tuple[int, ...]:
        """The shape in which programs take learning rate, momentum and damping."""
        return ()

    @abc.abstractmethod
    def check(self, args: Mapping[str, PyTree]) -> None:
        """Check the form of arguments, before any program is compiled for them."""

    @abc.abstractmethod
    def placed(self, program: str, args: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """Put the arguments of a program on the devices."""

    @abc.abstractmethod
    def run(self, program: Fun, args: Mapping[str, PyTree]) -> PyTree:
        """Run a compiled program."""

    @abc.abstractmethod
    def shardings(self, results: PyTree, args: Mapping[str, PyTree]) -> PyTree:
        """Return the shardings of results, as `out_shardings` of `jax.jit`."""

    @abc.abstractmethod
    def shard_map(self, fun: Fun, names: Sequence[str], results: PyTree) -> Fun:
        """Return `jax.shard_map` of a function whose arguments have these names."""

    @abc.abstractmethod
    def run_traced(self, fun: Fun, args: Mapping[str, PyTree], results: PyTree) -> PyTree:
        """Call the function while tracing: under `shard_map`, unless the caller is already."""

    @abc.abstractmethod
    def trace(self, build: Callable[[Sequence[PyTree]], T], func_args: Sequence[PyTree]) -> T:
        """Return `build` of arguments that suffice to trace the user-supplied function."""


class DataParallel(Devices):
    """Run functions with batches sharded along an axis of a mesh, or over all devices.

    Functions take their arguments by name; the one called "batch" is sharded. `results` describes
    the shardings of what they return: a pytree prefix with a `Result` for each leaf.
    """

    def __init__(self, mesh: Mesh | None, axis: str) -> None:
        self.axis = axis
        self._given_mesh = mesh
        self._new_shapes = NewShapes()

    @functools.cached_property
    def _mesh(self) -> Mesh:
        """The mesh on which results are returned."""
        if self._given_mesh is not None:
            return self._given_mesh
        return Mesh(np.array(jax.devices()), (self.axis,))

    @functools.cached_property
    def _auto(self) -> MeshAxis:
        """The batch axis of the same devices, in a mesh all of whose axes are `Auto`."""
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

    def check(self, args: Mapping[str, PyTree]) -> None:
        """Check that no argument has a leading axis for devices."""
        self.check_not_stacked(args)

    def trace(self, build: Callable[[Sequence[PyTree]], T], func_args: Sequence[PyTree]) -> T:
        """Return `build` of the arguments; of their shapes outside of `shard_map`."""
        return build(func_args if _jax.is_bound(self.axis) else without_shardings(func_args))

    def check_not_stacked(self, args: Mapping[str, PyTree]) -> None:
        """Check that no argument has a leading axis for devices, as `jax.pmap` expects it."""
        rng, state, count = args.get("rng"), args.get("state"), self._auto.count
        is_stacked = rng is not None and np.ndim(rng) > (0 if _jax.is_key(rng) else 1)
        problem = "rng is an array of random keys" if is_stacked else None
        if state is not None and np.ndim(state.step_counter):
            problem = f"state.step_counter has the shape {np.shape(state.step_counter)}"
        elif state is not None and "params" in args:
            shapes = lambda tree: [np.shape(leaf) for leaf in jax.tree.leaves(tree)]
            given, known = shapes(args["params"]), shapes(state.velocities)
            if known and given == [(count, *shape) for shape in known]:
                problem = f"params have a first axis of {count} that those of init had not"
        if problem is not None:
            raise ValueError(
                f"{where()}: {problem}. Parameters, state and random key are given once, without "
                f"an axis for the {count} devices, and a batch as one array of all examples."
            )

    def placed(self, program: str, args: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """Put the arguments of a program on the devices, the batch sharded."""
        self._check(program, args)

        def put(name: str, spec: PartitionSpec, leaf: ArrayLike) -> ArrayLike:
            array = self._auto.put(leaf, spec, is_process_local=name == _BATCH)
            return self._with_auto_axes(array)

        return {
            name: jax.tree.map(functools.partial(put, name), self._specs(name, tree), tree)
            for name, tree in args.items()
        }

    def run(self, program: Fun, args: Mapping[str, PyTree]) -> PyTree:
        """Run a compiled program, and return its results on the mesh that the user gave."""
        is_traced = _jax.is_tracing()
        context_mesh = jax.sharding.get_abstract_mesh()
        is_other = not context_mesh.empty and context_mesh != self._auto.mesh.abstract_mesh
        needs_mesh = is_other and not is_traced
        with jax.set_mesh(self._auto.mesh) if needs_mesh else contextlib.nullcontext():
            results = program(*args.values())
        if not self._is_explicit or is_traced:
            return results
        on_given_mesh = lambda x: jax.device_put(x, NamedSharding(self._mesh, x.sharding.spec))
        return jax.tree.map(on_given_mesh, results)

    def shardings(self, results: PyTree, args: Mapping[str, PyTree]) -> PyTree:
        """Return the shardings of results, as `out_shardings` of `jax.jit`."""

        def of_leaf(spec: PartitionSpec, leaf: ArrayLike) -> Sharding:
            if self.has_other_axes and isinstance(leaf, jax.Array):
                return leaf.sharding
            return NamedSharding(self._auto.mesh, spec)

        def of_result(result: Result) -> PyTree:
            if not isinstance(result, str):
                return NamedSharding(self._auto.mesh, result or _REPLICATED)
            return jax.tree.map(of_leaf, self._specs(result, args[result]), args[result])

        return jax.tree.map(of_result, results, is_leaf=_is_result)

    def shard_map(self, fun: Fun, names: Sequence[str], results: PyTree) -> Fun:
        """Return `jax.shard_map` of a function whose arguments have these names."""

        def run(*args: PyTree) -> PyTree:
            specs = {n: self._specs(n, tree) for n, tree in zip(names, args, strict=True)}
            of = lambda result: specs[result] if isinstance(result, str) else result or _REPLICATED
            out_specs = jax.tree.map(of, results, is_leaf=_is_result)
            return self._auto.shard_map(fun, tuple(specs.values()), out_specs)(*args)

        return run

    def _specs(self, name: str, tree: PyTree) -> PyTree:
        """Return the partition specs of an argument."""
        if name != _BATCH:
            return state_specs(tree, self._auto.names)
        return jax.tree.map(lambda leaf: self._auto.spec(axes_of(leaf)), tree)

    def run_traced(self, fun: Fun, args: Mapping[str, PyTree], results: PyTree) -> PyTree:
        """Call the function while tracing: under `shard_map`, unless the caller is already."""
        if _jax.is_bound(self.axis):
            return fun(*args.values())
        self._check_batch(args)
        run = self.shard_map(fun, list(args), results)
        if not self._is_explicit:
            return run(*args.values())
        # With explicit axes shardings are part of types; a result has that of what it replaces.
        replicated = NamedSharding(self._mesh, _REPLICATED)
        of_leaf = lambda x: _jax.sharding_of(x) or replicated

        def of_result(result: Result) -> PyTree:
            if not isinstance(result, str):
                return NamedSharding(self._mesh, result or _REPLICATED)
            return jax.tree.map(of_leaf, args[result])

        shardings = jax.tree.map(of_result, results, is_leaf=_is_result)
        return jax.sharding.auto_axes(run, out_sharding=shardings)(*args.values())

    def _with_auto_axes(self, leaf: ArrayLike) -> ArrayLike:
        """Return an array of the given mesh on that with `Auto` axes; the buffers are the same."""
        if not self._is_explicit or _jax.is_tracer(leaf) or not isinstance(leaf, jax.Array):
            return leaf
        names = list(getattr(leaf.sharding, "spec", ()))
        while names and names[-1] is None:  # As in results, which would compile again otherwise.
            names.pop()
        return jax.device_put(leaf, NamedSharding(self._auto.mesh, PartitionSpec(*names)))

    def _check(self, program: str, args: Mapping[str, PyTree]) -> None:
        for name, tree in args.items():
            self._auto.check_placement(name, tree)
        self.check_not_stacked(args)
        self._check_batch(args)
        if self._auto.is_multi_process:
            self._new_shapes.check(program, args)

    def _check_batch(self, args: Mapping[str, PyTree]) -> None:
        """Check that there are examples, and that the number of devices divides theirs."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(args.get(_BATCH)):
            if axes_of(leaf) is not None:
                is_local = self._auto.is_multi_process and not is_committed(leaf)
                name, length = leaf_name(_BATCH, path), np.shape(leaf)[0]
                if not length:
                    raise ValueError(
                        f"{where()}: {name} has no examples, so that there is nothing to average "
                        f"over. Leave empty batches out."
                    )
                self._auto.check_divides(length, name, is_of_process=is_local)


def _is_result(x: PyTree) -> bool:
    return x is None or isinstance(x, PartitionSpec)
