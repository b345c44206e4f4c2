"""Loops that stay within bounds: scans that keep less, of their outputs or for their gradient.

`_program` checks a scan and takes it apart into steps; each loop puts them together in its way.
"""

from curvax.loops._checkpoint_chunked_scan import (
    checkpoint_chunked_scan as checkpoint_chunked_scan,
)
from curvax.loops._checkpointed_scan import checkpointed_scan as checkpointed_scan
from curvax.loops._sliced_scan import sliced_scan as sliced_scan
