"""`own_rows`: a loop on each device over those rows that are its own."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from curvax import _compat
from curvax._types import Array, PyTree
from curvax.parallel._whole import with_whole_arrays

__all__ = ["own_rows"]


def own_rows(
    each: Callable[[Array], PyTree], numbers: Sequence[Sequence[int]], device: Array, into: PyTree
) -> PyTree:
    """`into` with `each(number)` in the rows of which the numbers are a device's own.

    Devices run the same program for as long as they have rows to compute. It does not grow with
    their number, and there is no reverse derivative.

    Arguments:
        each: computes a row.
        numbers: for each device the numbers of its rows.
        device: the number of the device that asks; it may be traced.
        into: arrays with rows like those that are computed.
    """
    longest = max(map(len, numbers), default=0)
    if not longest:
        return into
    lengths = jnp.asarray([len(own) for own in numbers], jnp.int32)
    table = jnp.asarray([[*own, *[0] * (longest - len(own))] for own in numbers], jnp.int32)

    def body(turn: Array, rows: PyTree) -> PyTree:
        number = table[device, turn]
        write = lambda x, row: lax.dynamic_update_index_in_dim(x, row, number, 0)
        return jax.tree.map(write, rows, each(number))

    each = with_whole_arrays(each, table[device, 0])
    into = jax.tree.map(lambda x: _compat.undivided(_compat.varying_like(x, device)), into)
    found = lax.fori_loop(0, lengths[device], body, into)
    return jax.tree.map(_compat.undivided, found)
