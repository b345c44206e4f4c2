"""Curvature of the mean loss over a batch, in the parameters of a model.

`ImplicitExactCurvature` multiplies vectors by exact matrices that are never formed.
`ExplicitExactCurvature` forms them. `BlockDiagonalCurvature` has a block for each layer. The latter
two estimate: `_modes` says what is pulled back from the losses, `_passes` what is summed then.
`verify_curvature` compares one with the other, and `as_linear_operator` takes any of them.
"""

from curvax.curvature._batch_size import (
    default_batch_size_extractor as default_batch_size_extractor,
)
from curvax.curvature._block_diagonal import BlockDiagonalCurvature as BlockDiagonalCurvature
from curvax.curvature._estimator import CurvatureEstimator as CurvatureEstimator
from curvax.curvature._explicit import ExplicitExactCurvature as ExplicitExactCurvature
from curvax.curvature._implicit import ImplicitExactCurvature as ImplicitExactCurvature
from curvax.curvature._microbatches import axes_of as axes_of, length_of as length_of
from curvax.curvature._modes import check_mode as check_mode
from curvax.curvature._operators import (
    CurvatureOperator as CurvatureOperator,
    as_linear_operator as as_linear_operator,
)
from curvax.curvature._report import CurvatureReport as CurvatureReport
from curvax.curvature._shard_state import by_leaf as by_leaf
from curvax.curvature._sharded import (
    ShardedCurvature as ShardedCurvature,
    check_split as check_split,
    split_state as split_state,
    whole_state as whole_state,
)
from curvax.curvature._spectrum import (
    SpectralDensity as SpectralDensity,
    spectral_density as spectral_density,
)
from curvax.curvature._verify import (
    VerificationReport as VerificationReport,
    verify_curvature as verify_curvature,
)
