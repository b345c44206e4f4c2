"""Matrices of curvature: moving averages, PSD powers and inverses, Kronecker products.

Nothing here knows of layers.
"""

from curvax.linalg._finite import all_finite as all_finite
from curvax.linalg._kronecker import (
    Eigen as Eigen,
    Kronecker as Kronecker,
    from_basis as from_basis,
    to_basis as to_basis,
)
from curvax.linalg._moving_average import WeightedMovingAverage as WeightedMovingAverage
from curvax.linalg._psd import (
    add_identity as add_identity,
    diagonal as diagonal,
    per_matrix as per_matrix,
    psd_eigh as psd_eigh,
    psd_power as psd_power,
    spectral_power as spectral_power,
    told_from_zero as told_from_zero,
)
from curvax.linalg._sides import (
    DenseSide as DenseSide,
    DiagonalSide as DiagonalSide,
    Side as Side,
)
from curvax.linalg._symmetric import symmetric_product as symmetric_product
from curvax.linalg._together import (
    Eigenvectors as Eigenvectors,
    MatrixTask as MatrixTask,
    Power as Power,
    computed as computed,
)
