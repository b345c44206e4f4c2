"""optax.microbatching's names: `from curvax import microbatching` in place of `from optax`."""

from curvax.maps.accumulators import AccumulationType, Accumulator
from curvax.maps.micro_grad import micro_grad
from curvax.maps.micro_vmap import micro_vmap
from curvax.maps.microbatch import microbatch, reshape_batch_axis

__all__ = [
    "AccumulationType",
    "Accumulator",
    "micro_grad",
    "micro_vmap",
    "microbatch",
    "reshape_batch_axis",
]
