"""Print the public names of kfac_jax with their parameters and defaults, as JSON.

    .venv-kfac/bin/python scripts/kfac_jax_contract.py > tests/drop_in/contract.json

Runs in the benchmark environment. `tests/drop_in/test_contract.py` compares `curvax.kfac_jax` with
the result. A name belongs to a module if it is public there and kfac_jax defines it (names that a
module merely imports from elsewhere are left out). Read by `inspect` alone.
"""

import inspect
import json
import types

import kfac_jax


def signature(function: object) -> str:
    """Return the parameters of a function with their defaults, without annotations."""
    try:
        given = inspect.signature(function)
    except (TypeError, ValueError):
        return "(...)"
    plain = [p.replace(annotation=p.empty) for p in given.parameters.values()]
    named = [
        p.replace(default=_Named(p.default))
        if callable(p.default) and p.default is not p.empty
        else p
        for p in plain
    ]
    return str(given.replace(parameters=named, return_annotation=given.empty))


class _Named:
    """Stands for a function among defaults, by its name."""

    def __init__(self, function: object):
        self.name = getattr(function, "__name__", type(function).__name__)

    def __repr__(self) -> str:
        return self.name


def members(cls: type) -> dict[str, str]:
    """Return the public methods and properties that a class defines itself."""
    found: dict[str, str] = {}
    for name, value in sorted(vars(cls).items()):
        if not name.startswith("_"):
            function = getattr(value, "__func__", value)
            is_method = callable(function) and not inspect.isclass(function)
            found[name] = signature(function) if is_method else type(value).__name__
    return found


def described(value: object) -> object:
    """Return what a test compares of a public name."""
    if inspect.isclass(value):
        return {"": signature(value), **members(value)}
    return signature(value) if callable(value) else type(value).__name__


def names(module: types.ModuleType) -> dict[str, object]:
    """Return the public names that kfac_jax defines, of a module."""
    found: dict[str, object] = {}
    for name in sorted(dir(module)):
        value = getattr(module, name)
        if name.startswith("_") or isinstance(value, types.ModuleType):
            continue
        home = getattr(value, "__module__", None) or ""
        if home.split(".")[0] == "kfac_jax" or (not home and name.isupper()):
            found[name] = described(value)
    return found


def main() -> None:
    modules = {n: m for n, m in vars(kfac_jax).items() if isinstance(m, types.ModuleType)}
    contract: dict[str, object] = {"": sorted(names(kfac_jax))}
    contract |= {n: names(m) for n, m in sorted(modules.items()) if not n.startswith("_")}
    print(json.dumps(contract, indent=1))


if __name__ == "__main__":
    main()
