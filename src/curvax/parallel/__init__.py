"""Work that is shared out among devices."""

from curvax.parallel._share import share_out as share_out, shares as shares
