"""Reading traced programs: which parts of one are layers, and why others are not.

From the bottom: `_program` is a traced function in a form that is easy to read, `_run` runs it
again with something done on the way, `_axes` keeps track of axes. `_find` follows parameters to
their uses, `_sites` says what a use is a site of, `_patterns` finds layers of the user's own,
`_examples` finds the examples among the arguments, `_follow_examples` follows them from there,
`_layers` puts sites together, `_tagging` puts tags there. `_registration` is the whole, and the
public functions are on top of it.
"""

from curvax.graph._auto_register import (
    TaggedFunction as TaggedFunction,
    auto_register_tags as auto_register_tags,
)
from curvax.graph._examples_at import (
    ExamplesAt as ExamplesAt,
    same_examples as same_examples,
)
from curvax.graph._layers import (
    EachStep as EachStep,
    Layer as Layer,
    Place as Place,
    tagged_layers as tagged_layers,
)
from curvax.graph._patterns import (
    DEFAULT_GRAPH_PATTERNS as DEFAULT_GRAPH_PATTERNS,
    GraphMatcherComparator as GraphMatcherComparator,
    GraphPattern as GraphPattern,
)
from curvax.graph._program import Node as Node, Program as Program, read as read
from curvax.graph._rearranged import REARRANGED as REARRANGED
from curvax.graph._registration import (
    RegistrationError as RegistrationError,
    check_reached as check_reached,
    check_tags as check_tags,
    registers_loss as registers_loss,
)
from curvax.graph._report import (
    ParameterRow as ParameterRow,
    RegistrationReport as RegistrationReport,
    explain_registration as explain_registration,
)
from curvax.graph._run import (
    Collected as Collected,
    Given as Given,
    Values as Values,
    loops_around as loops_around,
    run as run,
    stack_shape as stack_shape,
)
from curvax.graph._tagging import is_loss as is_loss
