"""Where the modules and names of kfac_jax are: `_src`, `install`, and hints for error messages.

A module has one object, whatever path it is imported by: a path is an entry of `sys.modules`.
"""

import importlib
import pkgutil
import sys
from types import ModuleType

_PACKAGE = "curvax.kfac_jax"
_THIS = sys.modules[__name__]


def install() -> None:
    """Register `curvax.kfac_jax` as `kfac_jax`, for programs that cannot be edited.

    Afterwards `import kfac_jax`, `from kfac_jax import utils` and `import kfac_jax._src.tracer`
    import the modules of `curvax.kfac_jax`, in this process and in every module of the program.
    Call it before the first of these imports; further calls have no effect.

    Raises:
        ImportError: If another kfac_jax is already imported.

    Examples:
        >>> import curvax.kfac_jax
        >>> curvax.kfac_jax.install()
        >>> from kfac_jax import utils
        >>> utils is curvax.kfac_jax.utils
        True
    """
    paths = {"kfac_jax": sys.modules[_PACKAGE], **_paths_below("kfac_jax")}
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] == "kfac_jax" and paths.get(name) is not module:
            raise ImportError(
                f"curvax.kfac_jax.install: {name} is already imported, from "
                f"{getattr(module, '__file__', None) or 'an unknown file'}, and parts of the "
                f"program may use it. Call install() before anything imports kfac_jax.",
                name=name,
            )
    sys.modules.update(paths)


def add_import_path(package: str) -> None:
    """Let the submodules of `curvax.kfac_jax` be imported as submodules of `package` too."""
    sys.modules.update(
        {
            path: module
            for path, module in _paths_below(package).items()
            if not path.startswith(f"{package}._src")
        }
    )


def path_of(name: str) -> str | None:
    """Return the path of a public name of kfac_jax below `curvax.kfac_jax`; None if it has none."""
    package = sys.modules[_PACKAGE]
    modules = [package, *(m for m in vars(package).values() if isinstance(m, ModuleType))]
    homes = [m.__name__ for m in modules if m is not _THIS and _has_own(m, name)]
    return f"{homes[0]}.{name}" if homes else None


def _has_own(module: ModuleType, name: str) -> bool:
    """Return whether a module has a name that it did not merely import from another library.

    `utils` also has names of JAX's types.
    """
    value = getattr(module, name, _THIS)
    if value is _THIS or module.__name__ == f"{_PACKAGE}.utils":
        return value is not _THIS
    home = getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", None)
    return home is None or home.partition(".")[0] == "curvax"


def _paths_below(package: str) -> dict[str, ModuleType]:
    """Import all submodules; return them by their paths below `package`."""
    prefix = f"{_PACKAGE}."
    for module in pkgutil.walk_packages(sys.modules[_PACKAGE].__path__, prefix):
        importlib.import_module(module.name)
    return {
        f"{package}.{name.removeprefix(prefix)}": module
        for name, module in [*sys.modules.items()]
        if name.startswith(prefix)
    }
