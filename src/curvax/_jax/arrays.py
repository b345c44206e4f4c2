"""Arrays: what their types say beyond shape and dtype.

A mesh with `Explicit` axes (the default of `jax.make_mesh`) puts the sharding of an array into its
type. JAX then rejects an operation whose result would need communication. `sharding_of`,
`unsharded_along`, `filled_like` and `mesh_of` are what loops need on such a mesh.
"""

from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from curvax._jax.core import AbstractValue, HasDType, Shaped, ShapedArray, Tracer, Typed, Value
from curvax._types import ArrayLike


def shape_of(x: Value | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the shape to compile a program with for an array, a tracer, a number or a shape.

    That of a committed array has its sharding. That of a tracer has none, whatever its type says of
    mesh axes: a program for it alone is for one device.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    kind = jax.typeof(x)
    sharding = None
    if isinstance(x, jax.Array) and not is_tracer(x) and x.committed:
        sharding = x.sharding
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding, weak_type=kind.weak_type)


def without_sharding(x: Value) -> jax.ShapeDtypeStruct:
    """Return the shape of an array without its sharding."""
    kind = jax.typeof(x)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)


def resized(x: Typed, shape: tuple[int, ...]) -> ShapedArray | jax.ShapeDtypeStruct:
    """Return the type of `x` with another shape, to trace with.

    The sharding over explicit mesh axes and the manual axes that `x` varies over are kept.
    """
    return _type(x).update(shape=shape)


def is_tracer(x: object) -> bool:
    """Return whether `x` is a tracer: its value is not known yet."""
    return isinstance(x, Tracer)


def is_tracing() -> bool:
    """Return whether new arrays are tracers, because a program is being traced."""
    return is_tracer(lax.full((), 0))


def is_key(x: HasDType) -> bool:
    """Return whether `x` is an array of typed random keys, which have no numeric dtype."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def unwrap_keys(x: Array) -> Array:
    """Return the data of typed random keys, along new trailing axes; other arrays as they are."""
    return jax.random.key_data(x) if is_key(x) else x


def wrap_keys(x: Array, like: HasDType) -> Array:
    """Return keys from their data if `like` has keys. Inverse of `unwrap_keys`."""
    if not is_key(like):
        return x
    implementations: list[str | Hashable] = []
    jax.eval_shape(lambda keys: implementations.append(jax.random.key_impl(keys)), like)
    return jax.random.wrap_key_data(x, impl=implementations[0])


def sharding_of(x: Typed) -> NamedSharding | None:
    """Return the sharding in the type of `x`, or None if the mesh has no explicit axes."""
    sharding = getattr(_type(x), "sharding", None)
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return sharding


def unsharded_along(x: Array, axis: int) -> Array:
    """Return `x`, gathered along `axis` if it is sharded there by its type."""
    sharding = sharding_of(x)
    if sharding is None:
        return x
    spec = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
    if spec[axis] is None:
        return x
    spec[axis] = None
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def can_transpose_gather(x: Array) -> bool:
    """Return whether this JAX can differentiate `lax.all_gather` of such an array.

    On a mesh that also has `Explicit` axes, JAX 0.10 cannot for an array that is sharded along
    these, and JAX 0.12 cannot for any array.
    """
    sharding = sharding_of(x)
    return sharding is None or (jax.__version_info__ < (0, 11) and not any(sharding.spec))


def has_automatic_axes() -> bool:
    """Return whether the current mesh has `Auto` axes, along which the compiler may shard."""
    return AxisType.Auto in jax.sharding.get_abstract_mesh().axis_types


def kept_replicated(x: Array) -> Array:
    """Constrain `x` to be replicated along the `Auto` axes of the current mesh, if any."""
    if not has_automatic_axes() or is_key(x):
        return x
    replicated = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec())
    return lax.with_sharding_constraint(x, replicated)


def filled_like(x: Shaped, value: ArrayLike = 0, shape: tuple[int, ...] | None = None) -> Array:
    """Return an array filled with one value, of the type of `x` except for the given shape.

    The type includes the sharding over explicit mesh axes and the manual axes of a `shard_map`
    that `x` varies over, because a loop's carry must have the type that its body returns.
    """
    sharding = sharding_of(x)
    full = lax.full(x.shape if shape is None else shape, value, x.dtype, sharding=sharding)
    if sharding is not None and sharding_of(full) != sharding:
        full = jax.sharding.reshard(full, sharding)  # JAX 0.12 drops it where no mesh is set.
    return varying_like(full, x)


def varying_like(x: Array, *like: Typed) -> Array:
    """Return `x`, cast to vary over the manual axes of a `shard_map` that any of `like` vary over.

    `like` are arrays or types of arrays.
    """
    missing = varying_axes(*like) - _varying(x)
    return lax.pcast(x, tuple(sorted(missing, key=str)), to="varying") if missing else x


def varying_axes(*arrays: Typed) -> frozenset[Hashable]:
    """Return the manual axes of a `shard_map` that any of these arrays, or types, vary over."""
    return frozenset().union(*map(_varying, arrays))


def _varying(x: Typed) -> frozenset[Hashable]:
    manual = getattr(_type(x), "manual_axis_type", None)  # A `ShapeDtypeStruct` may have none.
    return frozenset() if manual is None else manual.varying


def is_varying(x: Typed) -> bool:
    """Return whether an array differs between the devices of a `shard_map`, by its type."""
    return bool(_varying(x))


def mesh_of(arrays: Iterable[Typed]) -> AbstractContextManager[object]:
    """Return a context that sets the mesh with explicit axes that `arrays` are sharded over.

    The types of arrays name that mesh, but new arrays, such as the zeros of a loop's carry, go to
    the mesh of the context. So do the zeros that JAX 0.12 makes to transpose an operation: it makes
    them in the context in which the operation was traced.
    """
    if not jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    for x in arrays:
        sharding = sharding_of(x)
        if sharding is None:
            continue
        if is_tracing():
            return jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh)
        if isinstance(x, jax.Array) and not is_tracer(x):
            mesh = getattr(x.sharding, "mesh", None)
            assert isinstance(mesh, Mesh)
            return jax.set_mesh(mesh)
    return nullcontext()


def no_mesh() -> AbstractContextManager[object]:
    """Return a context in which functions are traced as if no mesh were set."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def _type(x: Typed) -> Any:
    known = jax.ShapeDtypeStruct | AbstractValue
    return x if isinstance(x, known) else jax.typeof(x)
