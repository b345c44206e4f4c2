"""Meshes of devices: what runs on all of them, and who does what."""

from curvax.parallel._mesh import Axis as Axis, MeshAxis as MeshAxis
from curvax.parallel._own_rows import own_rows as own_rows
from curvax.parallel._placement import (
    Agreement as Agreement,
    gathered as gathered,
    is_placed as is_placed,
    placed as placed,
)
from curvax.parallel._share import share_out as share_out, shares as shares
