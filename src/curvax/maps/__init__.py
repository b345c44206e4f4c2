"""Maps over a batch that run a chunk at a time: `chunked_vmap`, microbatches, accumulators."""
