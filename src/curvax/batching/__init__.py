"""Maps that stay within bounds: a vectorised function, or one of a batch, a chunk at a time.

From the bottom: `_plan` deals examples out to chunks and `_shares` to devices, `_reducers` says
what becomes of outputs, `_loop` runs the chunks, `_on_mesh` does so on several devices,
`_arguments` reads a call. The public functions are a few lines on these: `chunked_vmap`,
`micro_vmap` and `micro_grad` through `_map`, and `microbatch`.
"""

from curvax.batching._accumulators import (
    AccumulationType as AccumulationType,
    Accumulator as Accumulator,
)
from curvax.batching._chunked_vmap import chunked_vmap as chunked_vmap
from curvax.batching._map import map_indices as map_indices, reduce_indices as reduce_indices
from curvax.batching._micro_grad import PerExample as PerExample, micro_grad as micro_grad
from curvax.batching._micro_vmap import micro_vmap as micro_vmap
from curvax.batching._microbatch import microbatch as microbatch
from curvax.batching._plan import Chunk as Chunk
from curvax.batching._reducers import Reducer as Reducer
from curvax.batching._reshape import reshape_batch_axis as reshape_batch_axis
