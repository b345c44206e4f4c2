"""Curvature in JAX, within the memory you have.

The whole public API is listed in `__init__.pyi`, beside this file; everything else is private. A
name is loaded, with the room it lives in, when it is first asked for.
"""

from curvax import _compat as _compat  # It says so if the installed JAX is too old.
from curvax._lazy import names_of_stub

_ROOMS = names_of_stub(__file__)
__all__ = sorted(_ROOMS)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _ROOMS:
        raise AttributeError(f"module 'curvax' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_ROOMS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
