"""The only place that knows which JAX is running.

JAX's internals move with each release. Whatever curvax needs beyond the documented API, or needs
in different words on different versions, is asked for here and nowhere else; a test holds the
other modules to that.
"""

from curvax._compat._arrays import (
    filled_like,
    is_key,
    is_tracer,
    is_varying,
    made_up,
    mesh_of,
    shape_of,
    sharding_of,
    unsharded_along,
    unwrap_keys,
    varying_like,
    wrap_keys,
)
from curvax._compat._functions import (
    default_device,
    has_effects,
    is_jitted,
    trace,
    trace_with_constants,
    tracing_context,
    true_account,
    unjitted,
)
from curvax._compat._primitives import (
    Primitive,
    define_identity,
    define_linear_identity,
)
from curvax._compat._programs import (
    Kind,
    ScanForm,
    as_function,
    as_program,
    checkpointed,
    closed,
    function_name,
    inner_program,
    is_literal,
    passes_through,
    primitives_inside,
    returns_complex,
    run_equation,
    run_now,
)

__all__ = [
    "Kind",
    "Primitive",
    "ScanForm",
    "as_function",
    "as_program",
    "checkpointed",
    "closed",
    "default_device",
    "define_identity",
    "define_linear_identity",
    "filled_like",
    "function_name",
    "has_effects",
    "inner_program",
    "is_jitted",
    "is_key",
    "is_literal",
    "is_tracer",
    "is_varying",
    "made_up",
    "mesh_of",
    "passes_through",
    "primitives_inside",
    "returns_complex",
    "run_equation",
    "run_now",
    "shape_of",
    "sharding_of",
    "trace",
    "trace_with_constants",
    "tracing_context",
    "true_account",
    "unjitted",
    "unsharded_along",
    "unwrap_keys",
    "varying_like",
    "wrap_keys",
]
