"""Arrays: what their types say beyond shape and dtype.

Meshes with `Explicit` axes (what `jax.make_mesh` makes by default) put the sharding of an array
into its type, and then JAX refuses an operation whose result it would have to communicate for.
`sharding_of`, `unsharded_along`, `filled_like` and `mesh_of` are what loops need to live with that.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax.core
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """What a program has to know of an argument, be it an array, a tracer, a number or a shape.

    An array says on which devices it lies. A tracer does not, whatever its type says of axes; a
    program for it alone is for one device.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    kind = jax.typeof(x)
    placed = isinstance(x, jax.Array) and not is_tracer(x) and x.committed
    sharding = x.sharding if placed else None
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding, weak_type=kind.weak_type)


def unplaced(x: Any) -> jax.ShapeDtypeStruct:
    """What a program has to know of an argument, but for where that lies."""
    kind = jax.typeof(x)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)


def resized(x: Any, shape: tuple[int, ...]) -> Any:
    """The type of `x` but for its shape, to trace with.

    It has the sharding over explicit mesh axes, and varies over manual axes, as `x` does.
    """
    return _type(x).update(shape=shape)


def is_tracer(x: Any) -> bool:
    """Whether `x` stands for a value that is not known yet."""
    return isinstance(x, jax.core.Tracer)


def is_tracing() -> bool:
    """Whether new arrays are traced: a program is being made."""
    return is_tracer(lax.full((), 0))


def is_key(x: Any) -> bool:
    """Whether `x` is an array of typed random keys, which have no numeric dtype."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def unwrap_keys(x: Array) -> Array:
    """The numbers behind typed random keys, along new last axes; other arrays as they are."""
    return jax.random.key_data(x) if is_key(x) else x


def wrap_keys(x: Array, like: Any) -> Array:
    """What `unwrap_keys` undid, for an array of the dtype of `like`."""
    if not is_key(like):
        return x
    implementations: list[Any] = []
    jax.eval_shape(lambda keys: implementations.append(jax.random.key_impl(keys)), like)
    return jax.random.wrap_key_data(x, impl=implementations[0])


def sharding_of(x: Any) -> NamedSharding | None:
    """The sharding in the type of `x`, or None where it has none to speak of."""
    sharding = getattr(_type(x), "sharding", None)
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return sharding


def unsharded_along(x: Array, axis: int) -> Array:
    """`x` itself, gathered along `axis` if its type says that it is sharded there."""
    sharding = sharding_of(x)
    if sharding is None:
        return x
    spec = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
    if spec[axis] is None:
        return x
    spec[axis] = None
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def can_transpose_gather(x: Array) -> bool:
    """Whether this JAX has a derivative for `lax.all_gather` of such an array.

    On a mesh that has `Explicit` axes besides, JAX 0.10 has none for an array that is sharded along
    these, and JAX 0.12 for no array at all.
    """
    sharding = sharding_of(x)
    return sharding is None or (jax.__version_info__ < (0, 11) and not any(sharding.spec))


def has_automatic_axes() -> bool:
    """Whether there is a mesh with `Auto` axes, along which the compiler shards as it likes."""
    return AxisType.Auto in jax.sharding.get_abstract_mesh().axis_types


def kept_replicated(x: Array) -> Array:
    """Constrain `x` to be replicated along the `Auto` axes of the mesh around, if there is one."""
    if not has_automatic_axes() or is_key(x):
        return x
    everywhere = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec())
    return lax.with_sharding_constraint(x, everywhere)


def filled_like(x: Any, value: Any = 0, shape: tuple[int, ...] | None = None) -> Array:
    """An array full of one value, of the type of `x` but for the given shape.

    The type includes the sharding over explicit mesh axes and the manual axes of a `shard_map`
    over which `x` varies, because a loop's carry must have the type that its body returns.
    """
    sharding = sharding_of(x)
    full = lax.full(x.shape if shape is None else shape, value, x.dtype, sharding=sharding)
    if sharding is not None and sharding_of(full) != sharding:
        full = jax.sharding.reshard(full, sharding)  # JAX 0.12 leaves it out without a mesh around.
    return varying_like(full, x)


def varying_like(x: Array, *like: Any) -> Array:
    """`x`, made to vary over the manual axes of a `shard_map` over which any of `like` varies.

    These are arrays, or types of such.
    """
    missing = varying_axes(*like) - _varying(x)
    return lax.pcast(x, tuple(sorted(missing, key=str)), to="varying") if missing else x


def varying_axes(*arrays: Any) -> frozenset[Any]:
    """The manual axes of a `shard_map` over which any of these arrays, or types, varies."""
    return frozenset().union(*map(_varying, arrays))


def _varying(x: Any) -> frozenset[Any]:
    manual = getattr(_type(x), "manual_axis_type", None)  # A mere shape may have none.
    return frozenset() if manual is None else manual.varying


def is_varying(x: Any) -> bool:
    """Whether an array differs between the devices of a `shard_map`, by its type."""
    return bool(_varying(x))


def mesh_of(arrays: Iterable[Any]) -> AbstractContextManager[Any]:
    """Return a context whose mesh is the one with explicit axes that `arrays` are sharded over.

    The types of arrays name that mesh, but new arrays are only put on the mesh of the context (the
    zeros of a loop's carry), and so are the zeros that JAX 0.12 makes to transpose an operation:
    it does that in the context in which the operation was traced.
    """
    if not jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    for x in arrays:
        sharding = sharding_of(x)
        if sharding is None:
            continue
        if is_tracing():
            return jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh)
        if not is_tracer(x):
            return jax.set_mesh(x.sharding.mesh)
    return nullcontext()


def no_mesh() -> AbstractContextManager[Any]:
    """A context in which functions are traced as they are without a mesh around."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def _type(x: Any) -> Any:
    known = jax.ShapeDtypeStruct | jax.core.AbstractValue
    return x if isinstance(x, known) else jax.typeof(x)
