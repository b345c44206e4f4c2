"""`with_whole_arrays`: functions that only some devices run, or not all equally often.

Along automatic axes of a mesh the compiler splits arrays as it likes, and sends parts of them where
they are needed. But devices that do not run the same must not wait for each other there.
"""

from collections.abc import Callable
from typing import Any

import jax

from curvax import _compat

__all__ = ["with_whole_arrays"]


def with_whole_arrays(fun: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """`fun`, in which nothing is sent: the arrays it closes over are put together here.

    Arguments:
        fun: a function of arrays that are whole, if any.
        args: such arguments, or their shapes. It is traced for these.
    """
    if not _compat.has_automatic_axes():
        return fun
    program, shapes = _compat.trace_with_constants(fun, *args)
    traced = _compat.with_constants(program)
    arrays = [_compat.undivided(x) for x in program.consts]

    def with_these(*args: Any) -> Any:
        # Said again within: otherwise what becomes of the result could have them split.
        found = traced(*map(_compat.undivided, arrays), *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), map(_compat.undivided, found))

    return with_these
