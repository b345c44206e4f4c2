"""Print the public names of kfac_jax with their parameters and defaults, as JSON.

    .venv-kfac/bin/python scripts/kfac_jax_contract.py > tests/drop_in/contract.json

Runs in the benchmark environment. `tests/drop_in/test_contract.py` describes `curvax.kfac_jax` by
the same functions and compares. A name belongs to a module if it is public there and kfac_jax
defines it (names that a module merely imports from elsewhere are left out). Read by `inspect`
alone.
"""

import importlib
import inspect
import json
import types
from collections.abc import Iterator

PLAIN = (type(None), bool, int, float, complex, str)


def signature(function: object) -> str:
    """Return the parameters of a function with their defaults, without annotations.

    A default is written out if it is a plain value or a tuple of such. Functions and classes are
    written by name, and any other object is an ellipsis.
    """
    try:
        given = inspect.signature(function)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        return "(*args, **kwargs)"
    parameters = [
        p.replace(
            annotation=p.empty,
            default=p.empty if p.default is p.empty else Written(p.default),
        )
        for p in given.parameters.values()
    ]
    return str(given.replace(parameters=parameters, return_annotation=given.empty))


class Written:
    """A default value, by the text that stands for it."""

    def __init__(self, value: object):
        self.value = value

    def __repr__(self) -> str:
        if is_plain(self.value):
            return repr(self.value)
        return getattr(self.value, "__name__", "...") if callable(self.value) else "..."


def is_plain(value: object) -> bool:
    """Return whether a value can be written out: a number, a string, None, or a tuple of such."""
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(map(is_plain, value)))


def members(cls: type) -> dict[str, str]:
    """Return the public members that a class defines itself: signatures of methods, or kinds."""
    return {n: member(v) for n, v in sorted(vars(cls).items()) if not n.startswith("_")}


def member(value: object) -> str:
    """Return what a test compares of a member of a class, as found in its dictionary."""
    function = getattr(value, "__func__", value)
    if inspect.isclass(function):
        return "class"
    return signature(function) if callable(function) else "attribute"


def described(value: object) -> str | dict[str, str]:
    """Return what a test compares of a public name."""
    if inspect.isclass(value):
        return {"": signature(value), **members(value)}
    return signature(value) if callable(value) else type(value).__name__


def names(module: types.ModuleType) -> Iterator[str]:
    """Yield the public names that kfac_jax defines, of a module."""
    for name in sorted(dir(module)):
        value = getattr(module, name)
        if name.startswith("_") or isinstance(value, types.ModuleType):
            continue
        home = getattr(value, "__module__", None) or ""
        if home.split(".")[0] == "kfac_jax" or (not home and name.isupper()):
            yield name


def main() -> None:
    kfac_jax = importlib.import_module("kfac_jax")
    modules = {n: m for n, m in vars(kfac_jax).items() if isinstance(m, types.ModuleType)}
    contract: dict[str, object] = {"": [*names(kfac_jax)]}
    for name, module in sorted(modules.items()):
        if not name.startswith("_"):
            contract[name] = {name: described(getattr(module, name)) for name in names(module)}
    print(json.dumps(contract, indent=1))


if __name__ == "__main__":
    main()
