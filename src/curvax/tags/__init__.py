"""Primitives that say which parts of a program are layers and losses, and what registers layers.

A tag does nothing when it runs. It is there to be found in a traced program.
"""

from curvax.tags._layer_tag import LayerTag as LayerTag
from curvax.tags._loss_tag import (
    LossTag as LossTag,
    noted_registrations as noted_registrations,
)
from curvax.tags._register import (
    conv2d_tag as conv2d_tag,
    conv_tag as conv_tag,
    dense_tag as dense_tag,
    embedding_tag as embedding_tag,
    generic_tag as generic_tag,
    register_conv as register_conv,
    register_conv2d as register_conv2d,
    register_dense as register_dense,
    register_embedding as register_embedding,
    register_generic as register_generic,
    register_scale_and_shift as register_scale_and_shift,
    scale_and_shift_tag as scale_and_shift_tag,
)
from curvax.tags._tag import Tag as Tag
