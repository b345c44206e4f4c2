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
from curvax.diffops import (
    fisher_information as fisher_information,
    gauss_newton as gauss_newton,
    hessian as hessian,
    hessian_blocks as hessian_blocks,
    hessian_diagonal as hessian_diagonal,
    hessian_to_pytree as hessian_to_pytree,
    jacobian as jacobian,
    jacobian_to_pytree as jacobian_to_pytree,
)
from curvax.loops import (
    checkpoint_chunked_scan as checkpoint_chunked_scan,
    checkpointed_scan as checkpointed_scan,
    sliced_scan as sliced_scan,
)
from curvax.memory import (
    MemoryBudgetError as MemoryBudgetError,
    MemoryPlan as MemoryPlan,
    MemoryUsage as MemoryUsage,
    available_memory as available_memory,
    memory_usage as memory_usage,
    parse_memory as parse_memory,
    plan_batch_size as plan_batch_size,
    recorded_plans as recorded_plans,
)
