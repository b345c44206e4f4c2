"""Print the versions of Python and JAX in one line."""

import platform
from importlib.metadata import version

print(f"    Python {platform.python_version()} with JAX {version('jax')}")
