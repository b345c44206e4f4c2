"""kfac_jax's modules by the paths that many programs import them from: the same module objects."""

from curvax.kfac_jax import utils as utils
from curvax.kfac_jax.import_paths import add_import_path

add_import_path(__name__)
