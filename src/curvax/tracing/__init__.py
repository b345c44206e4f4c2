"""Traced functions, seen from their losses and layers.

`ProcessedJaxpr` reads the tags of a traced function. `_traced` turns it into a map from parameters
to what the losses depend on, with something done at the layers; `LossDerivatives`, `loss_tags_*`
and `layer_tags_vjp` are derivatives of that map, and `layer_statistics` sums what there is at
layers while the derivative is computed.
"""

from curvax.tracing._layer_tags import (
    layer_data_at as layer_data_at,
    layer_tags_vjp as layer_tags_vjp,
)
from curvax.tracing._loss_derivatives import (
    LossDerivatives as LossDerivatives,
    Losses as Losses,
    LossTangents as LossTangents,
)
from curvax.tracing._loss_tags import (
    loss_tags_hvp as loss_tags_hvp,
    loss_tags_jvp as loss_tags_jvp,
    loss_tags_vjp as loss_tags_vjp,
)
from curvax.tracing._processed_jaxpr import ProcessedJaxpr as ProcessedJaxpr
from curvax.tracing._statistics import (
    LayerRule as LayerRule,
    PullBack as PullBack,
    Statistic as Statistic,
    layer_statistics as layer_statistics,
    statistics_at as statistics_at,
)
from curvax.tracing._traced import LossMap as LossMap, TracedFunction as TracedFunction
