"""Print which Python and which JAX this is, in one line."""

import platform
from importlib.metadata import version

print(f"    Python {platform.python_version()} with JAX {version('jax')}")
