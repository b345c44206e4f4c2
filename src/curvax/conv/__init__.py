"""Moments of the patches that a convolution multiplies with its kernel.

From the bottom: `_geometry` says which patches there are, `_patches` takes them from the inputs,
`_sums` sums their outer products without holding them all. `_arguments` reads what users give, and
`_moments` has the two public functions, `patches_moments` and `patches_moments_explicit`.
"""

from curvax.conv._geometry import ConvGeometry as ConvGeometry
from curvax.conv._moments import (
    patches_moments as patches_moments,
    patches_moments_explicit as patches_moments_explicit,
)
from curvax.conv._patches import extract_patches as extract_patches
from curvax.conv._sums import patch_moment_sums as patch_moment_sums
