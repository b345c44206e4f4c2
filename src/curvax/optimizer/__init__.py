"""The K-FAC optimizer.

`_step` is the algorithm, one pure step; `_preconditioner`, `_quadratic` and `_rules` are its parts,
and `_function` is the user's function. `_optimizer` is the object around it that compiles,
`_construction` and `_arguments` make the parts from its arguments, `_fit` trains, and `_optax` has
the same algorithm for those who use optax.
"""

from curvax.optimizer._optax import (
    KFACState as KFACState,
    ScaleByKFACState as ScaleByKFACState,
    kfac as kfac,
    scale_by_kfac as scale_by_kfac,
)
from curvax.optimizer._optimizer import Optimizer as Optimizer
