"""Curvature in JAX, within the memory you have.

The whole public API is on this page; everything else is private.
"""

from curvax._tree import Static as Static
from curvax.batching import (
    AccumulationType as AccumulationType,
    Accumulator as Accumulator,
    PerExample as PerExample,
    chunked_vmap as chunked_vmap,
    micro_grad as micro_grad,
    micro_vmap as micro_vmap,
    microbatch as microbatch,
    reshape_batch_axis as reshape_batch_axis,
)
from curvax.loops import (
    checkpoint_chunked_scan as checkpoint_chunked_scan,
    sliced_scan as sliced_scan,
)
