"""`curvax.kfac_jax` has the public names of kfac_jax 0.0.8, with its parameters and defaults.

`contract.json` was made by `scripts/kfac_jax_contract.py` in the benchmark environment, by
`inspect`. Here the same functions describe `curvax.kfac_jax`. A signature may have more than the
contract says, but only as keywords. `EXCEPTIONS` is exactly what differs.
"""

import ast
import importlib.util
import inspect
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

import curvax.kfac_jax as kfac_jax

ROOT = Path(__file__).parents[2]
CONTRACT = json.loads(Path(__file__).with_name("contract.json").read_text())
MODULES = [name for name in CONTRACT if name]

# What differs, and why.
_MATCHING = "a step of kfac_jax's own matching, which its documentation does not describe"
_EARLIER = "also takes the arguments of earlier releases, in which programs make tags of their own"
EXCEPTIONS = {
    "layers_and_loss_tags.LayerTag": _EARLIER,
    "layers_and_loss_tags.LossTag": _EARLIER,
    "tag_graph_matcher.GraphMatch.create_eqns_and_update_env": _MATCHING,
    "tag_graph_matcher.GraphMatch.name": _MATCHING,
    "tag_graph_matcher.GraphMatch.output_var": _MATCHING,
    "tag_graph_matcher.GraphMatch.param_graph_variables": _MATCHING,
    "tag_graph_matcher.auto_register_tags": "None in place of an object for the default rules",
    "utils.WithStagedMethods.StagingContext": "the class behind `staging_context`, which is there",
}


def script() -> ModuleType:
    path = ROOT / "scripts" / "kfac_jax_contract.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


described_by = script()


def parameters(signature: str) -> list[tuple[str, str, str | None]]:
    """The name, kind and default of each parameter, as the contract writes them."""
    (function,) = ast.parse(f"def f{signature}: ...").body
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + [*map(ast.unparse, given.defaults)]
    kinds = ["positional"] * len(given.posonlyargs) + ["plain"] * len(given.args)
    found = [(arg.arg, kind, text) for arg, kind, text in zip(plain, kinds, defaults, strict=True)]
    if given.vararg is not None:
        found.append(("*", "variadic", None))
    for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append((arg.arg, "keyword", default and ast.unparse(default)))
    return found + ([("**", "variadic", None)] if given.kwarg is not None else [])


def is_compatible(theirs: str, ours: str) -> bool:
    """Whether every call that `theirs` allows means the same with `ours`."""
    expected, found = parameters(theirs), parameters(ours)
    names = {name for name, _, _ in expected}
    additions = [p for p in found if p[0] not in names]
    return (
        all(kind in ("keyword", "variadic") for _, kind, _ in additions)
        and [p for p in found if p[0] in names] == expected
    )


def difference(theirs: str | dict[str, str], value: object) -> str | None:
    """How a function, class or other value departs from its entry in the contract."""
    if isinstance(theirs, dict):
        return None if inspect.isclass(value) else "not a class"
    if inspect.isclass(value) and not theirs.startswith("("):
        return None  # A type variable there, a type here.
    ours = described_by.described(value)
    if not theirs.startswith("("):
        return None if ours == theirs else f"{ours}, not {theirs}"
    if not isinstance(ours, str) or not ours.startswith("("):
        return "not a function"
    return None if is_compatible(theirs, ours) else f"{ours}, not {theirs}"


def member_difference(theirs: str, cls: type, name: str) -> str | None:
    """How a member of a class, or its constructor, departs from its entry in the contract."""
    if not name:
        ours = described_by.signature(cls)
        return None if is_compatible(theirs, ours) else f"{ours}, not {theirs}"
    if not hasattr(cls, name):
        is_field = any(name in vars(base).get("__annotations__", ()) for base in cls.__mro__)
        return None if theirs == "attribute" and is_field else "missing"
    ours = described_by.member(inspect.getattr_static(cls, name))
    if not theirs.startswith("("):
        return None if ours == theirs else f"{ours}, not {theirs}"
    is_method = ours.startswith("(") and is_compatible(theirs, ours)
    return None if is_method else f"{ours}, not {theirs}"


def differences(module_name: str) -> dict[str, str]:
    """What differs in a module, by dotted name."""
    module = getattr(kfac_jax, module_name, None)
    if module is None:
        return {module_name: "missing"}
    found: dict[str, str | None] = {}
    for name, entry in CONTRACT[module_name].items():
        path = f"{module_name}.{name}"
        if not hasattr(module, name):
            found[path] = "missing"
            continue
        value = getattr(module, name)
        found[path] = difference(entry, value)
        if isinstance(entry, dict) and inspect.isclass(value):
            for member, theirs in entry.items():
                key = f"{path}.{member}".rstrip(".")
                found[key] = member_difference(theirs, value, member)
    return {path: text for path, text in found.items() if text is not None}


@pytest.mark.parametrize("module", MODULES)
def test_module_keeps_the_contract(module):
    found = differences(module)
    unlisted = {path: text for path, text in found.items() if path not in EXCEPTIONS}
    assert not unlisted, "\n" + "\n".join(f"{path}: {text}" for path, text in unlisted.items())


def test_every_name_of_the_package_is_there():
    missing = [name for name in CONTRACT[""] if not hasattr(kfac_jax, name)]
    assert [name for name in missing if name not in EXCEPTIONS] == []


def test_a_name_of_the_package_is_that_of_its_module():
    for name in CONTRACT[""]:
        homes = [getattr(kfac_jax, module) for module in MODULES if name in CONTRACT[module]]
        assert homes
        assert all(getattr(home, name) is getattr(kfac_jax, name) for home in homes), name


def test_every_exception_is_needed():
    found = {path for module in MODULES for path in differences(module)}
    found |= {name for name in CONTRACT[""] if not hasattr(kfac_jax, name)}
    assert [path for path in EXCEPTIONS if path not in found] == []
    assert all(len(reason) > 20 for reason in EXCEPTIONS.values())


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ("(x, size=1)", True),
        ("(x, size=1, *, extra=None)", True),
        ("(x, size=1, **options)", True),
        ("(x)", False),
        ("(size=1, x=...)", False),
        ("(x, size=2)", False),
        ("(x, size)", False),
        ("(x, *, size=1)", False),
        ("(x, /, size=1)", False),
        ("(x, extra=None, size=1)", False),
    ],
)
def test_a_departure_is_noticed(ours, expected):
    assert is_compatible("(x, size=1)", ours) is expected


def test_defaults_are_written_by_value_or_by_name():
    def function(a, b=1, c=(1, "x"), *, d=max, e=ROOT, f=None): ...

    written = described_by.signature(function)
    assert written == "(a, b=1, c=(1, 'x'), *, d=max, e=..., f=None)"


PAGE = (ROOT / "docs" / "migrate" / "kfac_jax.md").read_text()


def test_every_name_is_on_the_migration_page():
    written = set(re.findall(r"`([\w.]+)`", PAGE))
    names = {name for module in MODULES for name in CONTRACT[module]}
    assert names - written == set()


def undetermined() -> set[str]:
    """The names with which messages of `NotImplementedError` begin."""
    found = set()
    for path in (ROOT / "src" / "curvax" / "kfac_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "NotImplementedError":
                found |= set(re.findall(r"curvax\.kfac_jax\.([\w.]+):", ast.unparse(node)))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "_not_made":
                found |= {ast.literal_eval(node.args[0])}
    return found


def test_what_is_not_determined_is_on_the_migration_page():
    section = PAGE.split("## What is not determined")[1].split("\n## ")[0]
    assert len(undetermined()) > 10
    assert [name for name in undetermined() if name.split(".")[-1] not in section] == []
