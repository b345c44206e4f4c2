"""Curvature of the mean loss over a batch, in the parameters of a model.

`ImplicitExactCurvature` multiplies vectors by exact matrices that are never formed.
`ExplicitExactCurvature` forms them. `BlockDiagonalCurvature` has a block for each layer. The latter
two estimate: `_modes` says what is pulled back from the losses, `_passes` what is summed then.
"""

from curvax.curvature._batch_size import (
    default_batch_size_extractor as default_batch_size_extractor,
)
from curvax.curvature._block_diagonal import BlockDiagonalCurvature as BlockDiagonalCurvature
from curvax.curvature._estimator import CurvatureEstimator as CurvatureEstimator
from curvax.curvature._explicit import ExplicitExactCurvature as ExplicitExactCurvature
from curvax.curvature._implicit import ImplicitExactCurvature as ImplicitExactCurvature
from curvax.curvature._report import CurvatureReport as CurvatureReport
