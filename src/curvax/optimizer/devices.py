"""The devices of an optimizer: those of a mesh, along one axis of which batches are split.

Each device has its own examples, and all have the same parameters and states, but for rows of a
state that is split as well. Along other axes of the mesh parameters may be split; what runs there
is left to the compiler. For that all axes are made automatic ones inside, and results are put back
on the mesh that was given.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from curvax import _jax
from curvax._tree import leaf_name
from curvax._types import PyTree
from curvax.curvature.microbatching import axes_of
from curvax.curvature.sharded import by_leaf
from curvax.devices.mesh_axis import MeshAxis
from curvax.devices.placement import Agreement, is_placed, placed

__all__ = ["SPLIT", "Devices", "axis_of", "check_mesh", "num_devices", "without_places"]


_WHERE = "curvax.Optimizer"
_BATCH = "batch"

SPLIT = object()
"""In place of the name of a result: that it is split among devices along its first axis."""


def check_mesh(mesh: Any, pmap_axis_name: str) -> None:
    """What was given as a mesh is one, with an axis along which to split batches."""
    if mesh is None:
        return
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"{_WHERE}: mesh must be a jax.sharding.Mesh, such as jax.make_mesh((8,), ('data',)) "
            f"makes; got {type(mesh).__name__}."
        )
    names = mesh.axis_names
    if len(names) != 1 and pmap_axis_name not in names:
        raise ValueError(
            f"{_WHERE}: the mesh has the axes {names}, none of which is "
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
    """Shapes in place of arrays, which would say where they are; enough to trace a function."""

    def shape(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=jax.typeof(x).weak_type)

    return jax.tree.map(shape, tree)


class Devices:
    """The devices of a mesh, or all there are.

    Functions have their arguments by name; that which is called "batch" is split.
    """

    def __init__(self, mesh: Mesh | None, axis: str) -> None:
        self.axis = axis
        self._given = mesh
        self._agreement = Agreement()

    @functools.cached_property
    def _mesh(self) -> Mesh:
        """The mesh that results are on."""
        return Mesh(np.array(jax.devices()), (self.axis,)) if self._given is None else self._given

    @functools.cached_property
    def _along(self) -> MeshAxis:
        """The same devices, with automatic axes."""
        names = self._mesh.axis_names
        types = (AxisType.Auto,) * len(names)
        return MeshAxis(Mesh(self._mesh.devices, names, axis_types=types), (self.axis,))

    @property
    def _is_explicit(self) -> bool:
        return AxisType.Explicit in self._mesh.axis_types

    @property
    def has_other_axes(self) -> bool:
        """Whether arrays may be split along other axes of the mesh."""
        return len(self._mesh.axis_names) > 1

    def check_plain(self, args: Mapping[str, Any]) -> None:
        """Nothing has a leading axis for devices, as `jax.pmap` would have it."""
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
                f"{_WHERE}: {what}. Parameters, state and random key are given once, without an "
                f"axis for the {count} devices, and a batch as one array of all examples."
            )

    def placed(self, program: str, args: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a program on the devices, the batch split and all others whole."""
        self._check(program, args)

        def put(name: str, leaf: Any, position: int | None) -> Any:
            return self._moved(placed(self._along, leaf, position, has_all=name != _BATCH))

        return {n: _by_leaf(functools.partial(put, n), n, tree) for n, tree in args.items()}

    def run(self, program: Callable[..., Any], args: Mapping[str, Any]) -> Any:
        """The results of a compiled program, on the mesh that was given."""
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
        """Where results are to be: as the arguments of those names, or whole on each device."""

        def of_leaf(leaf: Any, position: int | None) -> Any:
            is_elsewhere = self.has_other_axes and isinstance(leaf, jax.Array)
            return leaf.sharding if is_elsewhere else self._along.sharding(position)

        return self._of_results(of_leaf, results, args)

    def on_all(
        self, fun: Callable[..., Any], names: Sequence[str], results: Any
    ) -> Callable[..., Any]:
        """The function of arguments of these names, on all devices, each with its own examples."""
        spec = lambda _, position: self._along.spec(position)

        def run(*given: Any) -> Any:
            args = dict(zip(names, given, strict=True))
            specs = tuple(_by_leaf(spec, name, tree) for name, tree in args.items())
            return self._along.on_all(fun, specs, self._of_results(spec, results, args))(*given)

        return run

    def _of_results(
        self,
        of_leaf: Callable[[Any, int | None], Any],
        results: Any,
        args: Mapping[str, Any],
    ) -> Any:
        """A function of each result: of the leaves of the argument that it replaces, if any."""

        def of(name: Any) -> Any:
            if name is None or name is SPLIT:
                return of_leaf(None, None if name is None else 0)
            return _by_leaf(of_leaf, name, args[name])

        return jax.tree.map(of, results, is_leaf=_is_none)

    def inside(self, fun: Callable[..., Any], args: Mapping[str, Any], results: Any) -> Any:
        """What the function returns, inside of a trace: on all devices, unless it runs there."""
        if _jax.is_bound(self.axis):
            return fun(*args.values())
        self._check_batch(args)
        run = self.on_all(fun, list(args), results)
        if not self._is_explicit:
            return run(*args.values())
        # Types say how arrays are split. Those of results are the types of what they replace.
        whole = NamedSharding(self._mesh, PartitionSpec())
        of_leaf = lambda x: _jax.sharding_of(x) or whole
        like = lambda name: whole if name is None else jax.tree.map(of_leaf, args[name])
        shardings = jax.tree.map(like, results, is_leaf=_is_none)
        return jax.sharding.auto_axes(run, out_sharding=shardings)(*args.values())

    def _moved(self, leaf: Any) -> Any:
        """An array of the mesh that was given, with automatic axes; the same buffers."""
        if not self._is_explicit or _jax.is_tracer(leaf) or not isinstance(leaf, jax.Array):
            return leaf
        names = list(getattr(leaf.sharding, "spec", ()))
        while names and names[-1] is None:  # As results have it, so that nothing is compiled anew.
            names.pop()
        return jax.device_put(leaf, NamedSharding(self._along.mesh, PartitionSpec(*names)))

    def _check(self, program: str, args: Mapping[str, Any]) -> None:
        for name, tree in args.items():
            self._along.check_placement(name, tree, _WHERE)
        self.check_plain(args)
        self._check_batch(args)
        if self._along.is_shared:
            self._agreement.check(program, args, _WHERE)

    def _check_batch(self, args: Mapping[str, Any]) -> None:
        """The devices have as many examples each."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(args.get(_BATCH)):
            if axes_of(leaf) is not None:
                is_own = self._along.is_shared and not is_placed(leaf)
                name, length = leaf_name(_BATCH, path), np.shape(leaf)[0]
                self._along.check_divides(length, name, _WHERE, is_of_process=is_own)


def _by_leaf(fun: Callable[[Any, int | None], Any], name: str, tree: PyTree) -> PyTree:
    """A function of each leaf of an argument, and of the axis along which that is split, if any."""
    if name == _BATCH:
        return jax.tree.map(lambda leaf: fun(leaf, axes_of(leaf)), tree)
    return by_leaf(fun, tree)


def _is_none(x: Any) -> bool:
    return x is None
