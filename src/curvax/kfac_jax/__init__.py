"""kfac_jax 0.0.8, by its own module layout and names, over curvax."""

from curvax.kfac_jax import utils as utils
from curvax.kfac_jax.import_paths import install as install

# isort: split
from curvax.kfac_jax import _src as _src  # Last: it gives the modules above another path.
