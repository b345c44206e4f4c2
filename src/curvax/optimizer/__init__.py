"""The K-FAC optimizer.

`_step` is the algorithm, one pure step; `_preconditioner`, `_quadratic` and `_rules` are its parts,
and `_function` is the user's function. `_optimizer` is the object around it that compiles,
`_construction` and `_arguments` make the parts from its arguments, `_fit` trains.
"""

from curvax.optimizer._optimizer import Optimizer as Optimizer
