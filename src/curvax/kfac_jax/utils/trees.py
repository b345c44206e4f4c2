"""Pytrees as vectors: sums, inner products and norms; and small helpers for sequences."""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from curvax.kfac_jax.utils.types import Array, Numeric, PyTree
from curvax.maps.chunked_vmap import chunked_vmap

T = TypeVar("T")
S = TypeVar("S", list[Any], tuple[Any, ...])

InnerProduct = Callable[[PyTree, PyTree], Array]


def product(iterable_object: Iterable[Numeric]) -> Numeric:
    """Return the product of numbers, 1 of none."""
    result: Numeric = 1
    for x in iterable_object:
        result = result * x
    return result


def scalar_mul(obj: T, scalar: Numeric) -> T:
    """Multiply every leaf by a scalar."""
    return jax.tree.map(lambda x: x * scalar, obj)


def scalar_div(obj: T, scalar: Numeric) -> T:
    """Divide every leaf by a scalar."""
    return jax.tree.map(lambda x: x / scalar, obj)


def default_add_function(obj1: T, obj2: T, coeff1: Numeric, coeff2: Numeric) -> T:
    """Return `coeff1 * obj1 + coeff2 * obj2`."""
    return jax.tree.map(lambda x, y: coeff1 * x + coeff2 * y, obj1, obj2)


def weighted_sum_of_objects(objects: Sequence[T], coefficients: Sequence[Numeric]) -> T:
    """Return the sum of pytrees of one structure, each times its coefficient."""
    if len(objects) != len(coefficients):
        raise ValueError(
            f"The number of coefficients must equal the number of objects, but there are "
            f"{len(coefficients)} and {len(objects)}."
        )
    if not objects:
        raise ValueError("The objects' sequences can not be empty.")
    for other in objects[1:]:
        _check_alike(objects[0], other)
    total = scalar_mul(objects[0], coefficients[0])
    for x, coefficient in zip(objects[1:], coefficients[1:], strict=True):
        total = default_add_function(total, x, 1, coefficient)
    return total


def sum_of_objects(objects: Sequence[T]) -> T:
    """Return the sum of pytrees of one structure."""
    return weighted_sum_of_objects(objects, [1] * len(objects))


def abstract_objects_equal(obj1: PyTree, obj2: PyTree, check_dtype: bool = True) -> bool:
    """Return whether two pytrees have the same structure, shapes and (if asked) dtypes."""
    if jax.tree.structure(obj1) != jax.tree.structure(obj2):
        return False
    pairs = list(zip(jax.tree.leaves(obj1), jax.tree.leaves(obj2), strict=True))
    return all(
        jnp.shape(x) == jnp.shape(y)
        and (not check_dtype or jnp.result_type(x) == jnp.result_type(y))
        for x, y in pairs
    )


def _check_alike(obj1: PyTree, obj2: PyTree) -> None:
    if not abstract_objects_equal(obj1, obj2, check_dtype=False):
        described = [jax.tree.map(jnp.shape, x) for x in (obj1, obj2)]
        raise ValueError(
            f"The objects do not have identical abstract structure: their shapes are "
            f"{described[0]} and {described[1]}."
        )


def inner_product(obj1: PyTree, obj2: PyTree, in_float64: bool = False) -> Array:
    """Return the inner product of two pytrees as vectors.

    Args:
        obj1: A pytree of arrays.
        obj2: One of the same structure and shapes.
        in_float64: Whether to compute in float64; needs `jax_enable_x64`.
    """
    _check_alike(obj1, obj2)
    if in_float64 and not jax.config.read("jax_enable_x64"):
        raise NotImplementedError(
            "curvax.kfac_jax.utils.inner_product: in_float64=True needs float64. Switch it on with "
            "jax.config.update('jax_enable_x64', True), or leave in_float64 out."
        )
    leaves = zip(jax.tree.leaves(obj1), jax.tree.leaves(obj2), strict=True)
    cast = (lambda x: jnp.asarray(x, jnp.float64)) if in_float64 else jnp.asarray
    return sum((jnp.sum(cast(x) * cast(y)) for x, y in leaves), start=jnp.zeros(()))


def squared_norm(obj: PyTree) -> Array:
    """Return the squared Euclidean norm of a pytree as a vector."""
    return inner_product(obj, obj)


def norm(obj: PyTree) -> Array:
    """Return the Euclidean norm of a pytree as a vector."""
    return jnp.sqrt(squared_norm(obj))


def cosine_similarity(v1: PyTree, v2: PyTree) -> Array:
    """Return the cosine of the angle between two pytrees as vectors."""
    return inner_product(v1, v2) / (norm(v1) * norm(v2))


def per_parameter_norm(obj: PyTree, key_prefix: str) -> dict[str, Array]:
    """Return the norm of every leaf, under keys such as `prefix(layer/w)`."""
    name = lambda path: "/".join(jax.tree_util.keystr((key,), simple=True) for key in path)
    return {
        f"{key_prefix}({name(path)})": jnp.linalg.norm(jnp.ravel(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(obj)
    }


def symmetric_matrix_inner_products(
    vectors1: Sequence[PyTree],
    vectors2: Sequence[PyTree],
    ip_function: InnerProduct = inner_product,
) -> Array:
    """Return the matrix of inner products `m[i, j] = <vectors1[i], vectors2[j]>`, `i <= j`.

    It is assumed to be symmetric: the rest is its mirror image.
    """
    entries: dict[tuple[int, int], Array] = {}
    for i, j in itertools.combinations_with_replacement(range(len(vectors1)), 2):
        entries[i, j] = entries[j, i] = ip_function(vectors1[i], vectors2[j])
    return _matrix(entries, len(vectors1), len(vectors2))


def asymmetric_matrix_inner_products(
    vectors1: Sequence[PyTree],
    vectors2: Sequence[PyTree],
    ip_function: InnerProduct = inner_product,
) -> Array:
    """Return the matrix of inner products `m[i, j] = <vectors1[i], vectors2[j]>`."""
    entries = {
        (i, j): ip_function(x, y) for i, x in enumerate(vectors1) for j, y in enumerate(vectors2)
    }
    return _matrix(entries, len(vectors1), len(vectors2))


def _matrix(entries: dict[tuple[int, int], Array], rows: int, columns: int) -> Array:
    return jnp.asarray([[entries[i, j] for j in range(columns)] for i in range(rows)])


def matrix_of_inner_products(
    vectors: Sequence[PyTree], ip_function: InnerProduct = inner_product
) -> Array:
    """Return the matrix of inner products of pytrees with each other."""
    return symmetric_matrix_inner_products(vectors, vectors, ip_function)


def vector_of_inner_products(
    base: PyTree, vectors: Sequence[PyTree], ip_function: InnerProduct = inner_product
) -> Array:
    """Return the inner products of one pytree with each of several."""
    return jnp.asarray([ip_function(base, v) for v in vectors])


def pytree_size(pytree: PyTree) -> int:
    """Return the number of elements of all leaves."""
    return sum(math.prod(jnp.shape(x)) for x in jax.tree.leaves(pytree))


def tree_is_empty(obj: PyTree) -> bool:
    """Return whether a pytree has no leaves."""
    return not jax.tree.leaves(obj)


def get_float_dtype_and_check_consistency(obj: PyTree) -> Any:
    """Return the float dtype that all leaves have; None of a pytree without leaves."""
    dtypes = {jnp.result_type(x) for x in jax.tree.leaves(obj)}
    if any(not jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        raise ValueError(f"Non-float dtype detected: the leaves have {sorted(map(str, dtypes))}.")
    if len(dtypes) > 1:
        raise ValueError(f"Inconsistent dtypes detected: {sorted(map(str, dtypes))}.")
    return next(iter(dtypes), None)


def copy_array(x: Array) -> Array:
    """Return a copy of an array, which may be donated."""
    return jnp.array(x, copy=True)


copy_obj = jax.jit(lambda x: jax.tree.map(copy_array, x))
"""Copy the arrays of a pytree."""

jit_zeros_like = jax.jit(lambda x: jax.tree.map(jnp.zeros_like, x))
"""Return a pytree of zeros like another one."""


def first_dim_is_size(size: int, *args: Array) -> bool:
    """Return whether the leading axis of every array has this size."""
    return all(x.shape[0] == size for x in args)


def to_tuple_or_repeat(x: Numeric | Sequence[Numeric], length: int) -> tuple[Numeric, ...]:
    """Return a tuple of a given length.

    Args:
        x: A number, which is repeated; an array, which is split along its last axis; or a
            sequence of that length.
        length: The length of the tuple.
    """
    if isinstance(x, Sequence):
        if len(x) != length:
            raise ValueError(f"Expected {length} elements, but got {len(x)}.")
        return tuple(x)
    if jnp.ndim(x) == 0:
        return (x,) * length
    if jnp.shape(x)[-1] != length:
        raise ValueError(f"Expected {length} elements along the last axis of {jnp.shape(x)}.")
    return tuple(jnp.asarray(x)[..., k] for k in range(length))


def filter_sequence(unfiltered_sequence: S, bool_sequence: Sequence[bool]) -> S:
    """Return the elements whose flag is True, in a sequence of the same type."""
    kept = [x for x, keep in zip(unfiltered_sequence, bool_sequence, strict=False) if keep]
    return type(unfiltered_sequence)(kept)


def replace_char(original: str, new_str: str, index: int) -> str:
    """Return a string with one character replaced."""
    return original[:index] + new_str + original[index + 1 :]


def default_batch_size_extractor(batch: PyTree) -> int:
    """Return the size of the leading axis of the first leaf."""
    return jax.tree.leaves(batch)[0].shape[0]


def fake_element_from_iterator(iterator: Iterator[T]) -> tuple[T, Iterator[T]]:
    """Return zeros like the next element, and an iterator that still yields that element."""
    element = next(iterator)
    zeros = jax.tree.map(jnp.zeros_like, element)
    return zeros, itertools.chain([element], iterator)


def call_func_with_conditional_kwargs(func: Callable[..., T], *func_args: Any, **kwargs: Any) -> T:
    """Call a function with those keyword arguments that it names."""
    known = inspect.signature(func).parameters
    return func(*func_args, **{name: x for name, x in kwargs.items() if name in known})


def loop_and_parallelize_average(
    func: Callable[..., PyTree], max_parallel_size: int
) -> Callable[..., PyTree]:
    """Return a function that averages `func` over the leading axis of its arguments.

    Equal to `jax.tree.map(lambda x: x.mean(0), jax.vmap(func)(*args))`, except that at most
    `max_parallel_size` elements are evaluated at once.
    """

    def average(*args: PyTree) -> PyTree:
        values = chunked_vmap(func, chunk_size=max_parallel_size)(*args)
        return jax.tree.map(lambda x: jnp.mean(x, axis=0), values)

    return average


def auto_scope_function(func: Callable[..., T]) -> Callable[..., T]:
    """Run a function under a `jax.named_scope` of its name."""
    return jax.named_scope(func.__name__)(func)


def auto_scope_method(method: Callable[..., T]) -> Callable[..., T]:
    """Run a method under a `jax.named_scope` of its class and name, as `Class_method`."""

    @functools.wraps(method)
    def scoped(self: Any, *args: Any, **kwargs: Any) -> T:
        with jax.named_scope(f"{type(self).__name__}_{method.__name__}"):
            return method(self, *args, **kwargs)

    return scoped
