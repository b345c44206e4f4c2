"""Curvature blocks: the curvature of the parameters of one layer, estimated and inverted.

`_block` says what a block is; there is a module for each kind of them. `_layer` is what a block
sees of its layer, `_factors` and `_gradients` what is made of inputs and cotangents there.
"""

from curvax.blocks._block import CurvatureBlock as CurvatureBlock
from curvax.blocks._cache import (
    MatrixPower as MatrixPower,
    Powers as Powers,
    finished as finished,
    in_step as in_step,
    power_key as power_key,
    powers_of as powers_of,
)
from curvax.blocks._conv import (
    Conv2DTwoKroneckerFactored as Conv2DTwoKroneckerFactored,
    ConvTwoKroneckerFactored as ConvTwoKroneckerFactored,
)
from curvax.blocks._data import given_data as given_data
from curvax.blocks._defaults import (
    default_block_ctor as default_block_ctor,
    make_block as make_block,
)
from curvax.blocks._dense import (
    DenseTwoKroneckerFactored as DenseTwoKroneckerFactored,
    EmbeddingTwoKroneckerFactored as EmbeddingTwoKroneckerFactored,
)
from curvax.blocks._diagonal import (
    Conv2DDiagonal as Conv2DDiagonal,
    DenseDiagonal as DenseDiagonal,
    Diagonal as Diagonal,
    NaiveDiagonal as NaiveDiagonal,
    ScaleAndShiftDiagonal as ScaleAndShiftDiagonal,
)
from curvax.blocks._ekfac import Conv2DEKFAC as Conv2DEKFAC, DenseEKFAC as DenseEKFAC
from curvax.blocks._full import (
    Conv2DFull as Conv2DFull,
    DenseFull as DenseFull,
    Full as Full,
    NaiveFull as NaiveFull,
    ScaleAndShiftFull as ScaleAndShiftFull,
    products_of_gradients as products_of_gradients,
)
from curvax.blocks._kronecker import (
    TwoKroneckerFactored as TwoKroneckerFactored,
    multiplied as multiplied,
)
from curvax.blocks._layer import LayerEquation as LayerEquation, LayerSite as LayerSite
from curvax.blocks._parts import Parts as Parts
from curvax.blocks._scaled_identity import ScaledIdentity as ScaledIdentity
from curvax.blocks._settings import (
    full_name as full_name,
    get_default_eigen_decomposition_threshold as get_default_eigen_decomposition_threshold,
    get_default_tag_to_block_ctor as get_default_tag_to_block_ctor,
    get_max_parallel_elements as get_max_parallel_elements,
    set_default_eigen_decomposition_threshold as set_default_eigen_decomposition_threshold,
    set_default_tag_to_block_ctor as set_default_tag_to_block_ctor,
    set_max_parallel_elements as set_max_parallel_elements,
)
from curvax.blocks._state import copied as copied
