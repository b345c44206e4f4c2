"""The oldest JAX that curvax runs on. A newer one than any that was tested is tried as it is."""

import jax

__all__ = ["OLDEST"]


OLDEST = (0, 10)
"""The first series of JAX that is supported."""

if jax.__version_info__ < OLDEST:
    raise ImportError(
        f"curvax needs JAX {'.'.join(map(str, OLDEST))} or newer, but JAX {jax.__version__} is "
        f"installed. Upgrade it with: pip install --upgrade jax jaxlib"
    )
