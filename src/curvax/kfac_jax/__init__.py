"""kfac_jax 0.0.8, by its own module layout and names, over curvax."""

from curvax.kfac_jax import utils as utils
