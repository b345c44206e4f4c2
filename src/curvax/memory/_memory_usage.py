"""`memory_usage`: what a function needs, without running it."""

from typing import Any

import jax
import numpy as np

from curvax import _compat
from curvax._types import Fun
from curvax.memory._program import Program
from curvax.memory._usage import MemoryUsage

__all__ = ["memory_usage"]

# As under `jax.jit`, numbers are traced too.
_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, int, float, complex)


def memory_usage(fun: Fun, *args: Any, **kwargs: Any) -> MemoryUsage:
    """What `fun` needs when it is compiled for arguments like these, without running it.

    Nearly

        jax.jit(fun).lower(*args, **kwargs).compile().memory_analysis()

    except that the account is true. The program is compiled without library calls whose scratch
    memory would be in no account. Arrays that `fun` closes over count as arguments, because they
    are there already, not as temporaries. And it may close over tracers: this can be called
    inside of `jit` and other transformations.

    Arguments:
        fun: a function, already jitted or not. Of a jitted one, static and donated arguments
            are what they are.
        args: arrays, `jax.ShapeDtypeStruct`s, tracers or pytrees of these.
        kwargs: the same.

    Returns:
        A `MemoryUsage`. Print it for a table; `added_bytes` is what a call allocates.

    Raises:
        NotImplementedError: if the compiler for this device does not tell.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from curvax import memory_usage
        >>> matrix = jax.ShapeDtypeStruct((512, 512), jnp.float32)
        >>> print(memory_usage(lambda a: jnp.sin(a @ a) @ a, matrix))
        arguments           1.00 MiB
        output              1.00 MiB
        temporaries         1.00 MiB
        library scratch          0 B
        aliased                  0 B
        added by a call     2.00 MiB
    """
    if _compat.is_jitted(fun):
        return _of_jitted(fun, args, kwargs)
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]

    def call(*given: Any) -> Any:
        filled = list(leaves)
        for i, array in zip(arrays, given, strict=True):
            filled[i] = array
        args, kwargs = jax.tree.unflatten(structure, filled)
        return fun(*args, **kwargs)

    return Program.of(call, [leaves[i] for i in arrays]).compile().usage


def _of_jitted(fun: Any, args: Any, kwargs: Any) -> MemoryUsage:
    traced = fun.trace(*args, **kwargs)
    if not traced.jaxpr.consts:
        platform = jax.default_backend()
        return MemoryUsage.of(traced.lower().compile(_compat.true_account(platform)))
    infos = jax.tree.leaves(traced.args_info)
    donated = [i for i, info in enumerate(infos) if info.donated]
    shapes = [jax.ShapeDtypeStruct(info.shape, info.dtype) for info in infos]
    program = Program.of(_compat.as_function(traced.jaxpr), shapes, donated)
    return program.compile().usage


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, _ARRAYS)
