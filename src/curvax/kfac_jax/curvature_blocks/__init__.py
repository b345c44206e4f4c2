"""kfac_jax's `curvature_blocks`: one kind of curvature block per file."""

from curvax.curvature.blocks.settings import (
    get_default_eigen_decomposition_threshold as get_default_eigen_decomposition_threshold,
    get_max_parallel_elements as get_max_parallel_elements,
    set_default_eigen_decomposition_threshold as set_default_eigen_decomposition_threshold,
    set_max_parallel_elements as set_max_parallel_elements,
)
from curvax.kfac_jax.curvature_blocks import utils as utils
from curvax.kfac_jax.curvature_blocks.block import (
    CurvatureBlock as CurvatureBlock,
    to_real_set as to_real_set,
)
from curvax.kfac_jax.curvature_blocks.diagonal import (
    Conv2DDiagonal as Conv2DDiagonal,
    DenseDiagonal as DenseDiagonal,
    Diagonal as Diagonal,
    NaiveDiagonal as NaiveDiagonal,
    ScaleAndShiftDiagonal as ScaleAndShiftDiagonal,
)
from curvax.kfac_jax.curvature_blocks.full import (
    Conv2DFull as Conv2DFull,
    DenseFull as DenseFull,
    Full as Full,
    NaiveFull as NaiveFull,
    ScaleAndShiftFull as ScaleAndShiftFull,
)
from curvax.kfac_jax.curvature_blocks.kronecker import (
    Conv2DTwoKroneckerFactored as Conv2DTwoKroneckerFactored,
    DenseTwoKroneckerFactored as DenseTwoKroneckerFactored,
    KroneckerFactored as KroneckerFactored,
    TwoKroneckerFactored as TwoKroneckerFactored,  # A name of older releases.
)
from curvax.kfac_jax.curvature_blocks.repeated_dense import (
    RepeatedDenseKroneckerFactored as RepeatedDenseKroneckerFactored,
)
from curvax.kfac_jax.curvature_blocks.scaled_identity import ScaledIdentity as ScaledIdentity
from curvax.kfac_jax.curvature_blocks.tnt import (
    Conv2DTNT as Conv2DTNT,
    DenseTNT as DenseTNT,
    NaiveTNT as NaiveTNT,
)
