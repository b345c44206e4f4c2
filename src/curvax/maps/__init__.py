"""Maps over the examples of a batch, run in chunks: `chunked_vmap`, microbatches, accumulators."""
