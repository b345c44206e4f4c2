"""kfac_jax's modules by the paths that many programs import them from: the same module objects."""

from curvax.kfac_jax import (
    curvature_blocks as curvature_blocks,
    curvature_estimator as curvature_estimator,
    layers_and_loss_tags as layers_and_loss_tags,
    loss_functions as loss_functions,
    optimizer as optimizer,
    patches_second_moment as patches_second_moment,
    tag_graph_matcher as tag_graph_matcher,
    tracer as tracer,
    utils as utils,
)
from curvax.kfac_jax.import_paths import add_import_path

add_import_path(__name__)
