"""Jacobians, Hessians and their parts, in blocks, to a byte budget, in memory or on disk.

From the bottom: `_point` numbers the coordinates of a pytree, `_problem` computes columns of linear
maps in blocks of which `_options` says how large, `_triangle` spares the Hessian half of that,
`_split` shares them out among devices (`_devices` says which), and `_solve` makes one program of
it. `_stream` does it on disk: `_disk` keeps the blocks (`_store_metadata`: what a store says of
itself), `_fingerprint` says whose they are,
`_blocks` computes them, `_team` deals them out to processes. Each public function says what a
column is.
"""

from curvax.diffops._disk import DamagedStoreWarning as DamagedStoreWarning
from curvax.diffops._fisher_information import fisher_information as fisher_information
from curvax.diffops._gauss_newton import gauss_newton as gauss_newton
from curvax.diffops._hessian import hessian as hessian
from curvax.diffops._hessian_blocks import hessian_blocks as hessian_blocks
from curvax.diffops._hessian_diagonal import hessian_diagonal as hessian_diagonal
from curvax.diffops._jacobian import jacobian as jacobian
from curvax.diffops._trees import (
    hessian_to_pytree as hessian_to_pytree,
    jacobian_to_pytree as jacobian_to_pytree,
)
