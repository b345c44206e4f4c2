"""The public names keep the signatures that users of these APIs already call.

`contract.json` lists, for each name, its parameters in order with their defaults as written (null
where any default will do), or the members of an enumeration; and the methods and properties of a
class. A signature may have more than the
contract says, but only as keywords: nothing a user passes by position may change its meaning.
"""

import ast
import dataclasses
import enum
import inspect
import json
from pathlib import Path

import pytest

import curvax

KEYWORDS = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
TEXT = (Path(__file__).parent / "contract.json").read_text()
CONTRACT = json.loads(TEXT)


def signature_differences(function, expected: list[tuple[str, str | None]]) -> list[str]:
    """How the signature of `function` departs from the `expected` names and defaults."""
    found = inspect.signature(function).parameters
    names = [name for name, _ in expected]
    missing = [f"{name} is missing" for name in names if name not in found]
    kept = [name for name in found if name in names]
    wanted = [name for name in names if name in found]
    disordered = [f"the order is {kept}, not {wanted}"] if kept != wanted else []
    intruders = [
        f"{name} is an addition and not keyword-only"
        for name, parameter in found.items()
        if name not in names and parameter.kind not in KEYWORDS
    ]
    defaults = [
        f"the default of {name} is {found[name].default!r}, not {text}"
        for name, text in expected
        if name in found and text is not None and not is_default(found[name], text)
    ]
    return missing + disordered + intruders + defaults


def is_default(parameter: inspect.Parameter, text: str) -> bool:
    """Whether the default is the one that `text` writes; `<...>` stands for any default."""
    if text.startswith("<"):
        return parameter.default is not parameter.empty
    if text.startswith("AccumulationType."):
        return parameter.default is curvax.AccumulationType[text.removeprefix("AccumulationType.")]
    value = ast.literal_eval(text)
    return type(parameter.default) is type(value) and parameter.default == value


@pytest.mark.parametrize("name", CONTRACT)
def test_name_keeps_its_contract(name):
    public = getattr(curvax, name)
    entry = CONTRACT[name]
    if "members" in entry:
        assert issubclass(public, enum.Enum)
        assert set(entry["members"]) <= public.__members__.keys()
    else:
        assert signature_differences(public, entry["parameters"]) == []
    for method, parameters in entry.get("methods", {}).items():
        found = getattr(public, method)
        bound = [] if inspect.ismethod(found) else [("self", None)]
        expected = bound + [(name.lstrip("*"), text) for name, text in parameters]
        assert signature_differences(found, expected) == []
    if "State" in entry:
        fields = [field.name for field in dataclasses.fields(public.State)]
        assert fields == [name for name, _ in entry["State"]]
    for name in entry.get("properties", []):
        assert isinstance(inspect.getattr_static(public, name), property)


@pytest.mark.parametrize(
    ("function", "difference"),
    [
        (lambda f, size=1, *, extra=None: 0, None),
        (lambda f: 0, "size is missing"),
        (lambda size=1, *, f: 0, "the order is ['size', 'f'], not ['f', 'size']"),
        (lambda f, extra=None, size=1: 0, "extra is an addition and not keyword-only"),
        (lambda f, size=2: 0, "the default of size is 2, not 1"),
        (lambda f, size=True: 0, "the default of size is True, not 1"),
    ],
)
def test_a_departure_from_the_contract_is_noticed(function, difference):
    found = signature_differences(function, [("f", None), ("size", "1")])
    assert found == ([difference] if difference else [])


def test_the_contract_can_be_reviewed_line_by_line():
    assert max(map(len, TEXT.splitlines())) <= 100
