"""The only package that depends on the version of JAX.

JAX's internals change with each release. What curvax needs beyond the documented API, or has to ask
for in different ways on different versions, is here and nowhere else; a test enforces that.
"""

import jax

if jax.__version_info__ < (0, 10):  # There is no upper bound: untested versions may work.
    raise ImportError(
        f"curvax needs JAX 0.10 or newer, but JAX {jax.__version__} is installed. "
        f"Upgrade it with: pip install --upgrade jax jaxlib"
    )

# isort: split
from curvax._jax.arrays import (
    can_transpose_gather as can_transpose_gather,
    filled_like as filled_like,
    has_automatic_axes as has_automatic_axes,
    is_key as is_key,
    is_tracer as is_tracer,
    is_tracing as is_tracing,
    is_varying as is_varying,
    kept_replicated as kept_replicated,
    mesh_of as mesh_of,
    no_mesh as no_mesh,
    resized as resized,
    shape_of as shape_of,
    sharding_of as sharding_of,
    unsharded_along as unsharded_along,
    unwrap_keys as unwrap_keys,
    varying_axes as varying_axes,
    varying_like as varying_like,
    without_sharding as without_sharding,
    wrap_keys as wrap_keys,
)
from curvax._jax.core import (
    AbstractValue as AbstractValue,
    Atom as Atom,
    ClosedJaxpr as ClosedJaxpr,
    Jaxpr as Jaxpr,
    JaxprEqn as JaxprEqn,
    Literal as Literal,
    Params as Params,
    Primitive as Primitive,
    Shaped as Shaped,
    ShapedArray as ShapedArray,
    Typed as Typed,
    Value as Value,
    Var as Var,
)
from curvax._jax.jaxprs import (
    Kind as Kind,
    Program as Program,
    Same as Same,
    ScanForm as ScanForm,
    as_function as as_function,
    as_program as as_program,
    call_key as call_key,
    callback_name as callback_name,
    checkpointed as checkpointed,
    closed as closed,
    default_device as default_device,
    equations_inside as equations_inside,
    exact_memory_options as exact_memory_options,
    function_name as function_name,
    has_effects as has_effects,
    inlined as inlined,
    inner_program as inner_program,
    is_bound as is_bound,
    is_jitted as is_jitted,
    is_literal as is_literal,
    kept_as_call as kept_as_call,
    operation_name as operation_name,
    parameters as parameters,
    passes_through as passes_through,
    program_key as program_key,
    reads_reference as reads_reference,
    returns_complex as returns_complex,
    run_equation as run_equation,
    run_now as run_now,
    trace as trace,
    trace_change as trace_change,
    trace_with_constants as trace_with_constants,
    tracing_context as tracing_context,
    unjitted as unjitted,
    untraced as untraced,
    value_key as value_key,
    with_constants as with_constants,
)
from curvax._jax.primitives import (
    Tag as Tag,
    define_linear_identity as define_linear_identity,
)
from curvax._jax.processes import (
    broadcast_from_first as broadcast_from_first,
    exchanged as exchanged,
    gathered as gathered,
    gathered_to_host as gathered_to_host,
    wait_for_all as wait_for_all,
)
