"""The house rules of `src/curvax`, read from the source.

Each folder is a room. `MAY_USE` says which rooms a room may import from; nothing points back up.
The foundation, a few modules beside the rooms, is open to all of them. Rooms that are not built
yet are in the table already, so a new folder is either one of these or a decision to take here.
"""

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "curvax"

FOUNDATION = {
    "_lazy": set(),
    "_types": set(),
    "_checks": set(),
    "_table": set(),
    "_compat": {"_types"},
    "_tree": {"_types", "_compat"},
    "_rows": {"_types", "_compat"},
}
ROOMS = {
    "memory": set(),
    "parallel": set(),
    "batching": {"memory", "parallel"},
    "loops": {"memory"},
    "diffops": {"batching", "memory", "parallel"},
    "linalg": {"parallel"},
    "tags": set(),
    "losses": {"tags"},
    "graph": {"tags"},
    "tracing": {"tags", "losses", "graph"},
    "conv": {"batching"},
    "blocks": {"linalg", "conv", "graph"},
    "curvature": {"blocks", "linalg", "tags", "graph", "tracing", "batching", "parallel"},
    "optimizer": {"curvature", "batching", "graph", "linalg", "memory", "parallel"},
    "report": set(),
}
# The public API may use everything; nothing may use the public API.
ROOT = "__init__"
MAY_USE = (
    FOUNDATION
    | {room: uses | FOUNDATION.keys() for room, uses in ROOMS.items()}
    | {ROOT: FOUNDATION.keys() | ROOMS.keys()}
)
# A result's `plot()` imports the plots when it is called, from wherever the result lives.
ANYONE_MAY_USE_LAZILY = {"report"}

# What moves from one JAX release to the next, and the one module that may know about it.
UNSTABLE_JAX = {"_src", "core", "experimental", "extend", "version", "__version__"}
KNOWS_JAX = "_compat"

LONGEST_MODULE = 450


class Import(NamedTuple):
    """One imported dotted name, and whether only a function body imports it."""

    line: int
    name: str
    lazy: bool


def imports(tree: ast.Module, package: list[str]) -> Iterator[Import]:
    """Every name `tree` imports, relative ones resolved against the `package` it lies in."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    inside_functions = {
        node for f in ast.walk(tree) if isinstance(f, functions) for node in ast.walk(f)
    }
    for node in ast.walk(tree):
        lazy = node in inside_functions
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, node.module] if node.module else base
            for alias in node.names:
                yield Import(node.lineno, ".".join([*base, alias.name]), lazy)


def room_of(dotted: list[str]) -> str:
    """The room of a path below the package; names that are in no room belong to the root."""
    return dotted[0] if dotted and dotted[0] in MAY_USE else ROOT


def wrong_directions(root: Path, path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Imports of our own that the table does not allow."""
    inside = path.relative_to(root).with_suffix("").parts
    room = inside[0]
    if room not in MAY_USE:
        yield 1, f"'{room}' is in no table; add it to the house or put its code in a room"
        return
    for line, name, lazy in imports(tree, [root.name, *inside[:-1]]):
        package, *target = name.split(".")
        if package != root.name:
            continue
        used = room_of(target)
        lazily_allowed = lazy and used in ANYONE_MAY_USE_LAZILY
        if used != room and used not in MAY_USE[room] and not lazily_allowed:
            allowed = ", ".join(sorted(MAY_USE[room])) or "nothing"
            yield line, f"imports {name}, but '{room}' may use only: {allowed}"


def unstable_jax(root: Path, path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Uses of what JAX does not promise to keep, imported or reached as an attribute."""
    inside = path.relative_to(root).with_suffix("").parts
    if inside[0] == KNOWS_JAX:
        return
    names = [(line, name) for line, name, _ in imports(tree, [root.name, *inside[:-1]])]
    names += [(node.lineno, ast.unparse(node)) for node in ast.walk(tree) if is_chain(node)]
    for line, name in names:
        package, _, rest = name.partition(".")
        if package == "jax" and rest.split(".")[0] in UNSTABLE_JAX:
            yield line, f"uses {name}, which only {KNOWS_JAX} may"


def is_chain(node: ast.AST) -> bool:
    """Whether `node` is an attribute of a plain name, as in `jax.core`."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)


def unlike_a_page(_root: Path, path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Modules that do not open with what they are for, or are too long to be one idea."""
    if not (ast.get_docstring(tree) or "").strip():
        yield 1, "does not start with a docstring"
    length = len(path.read_text().splitlines())
    if length > LONGEST_MODULE:
        yield length, f"has {length} lines; past {LONGEST_MODULE} a module is more than one idea"


def violations(root: Path, rule) -> list[str]:
    """What `rule` finds in the package at `root`, one line each: file, line, reason."""
    return [
        f"{path.relative_to(root.parent)}:{line}: {reason}"
        for path in sorted(root.rglob("*.py"))
        for line, reason in rule(root, path, ast.parse(path.read_text(), str(path)))
    ]


RULES = [wrong_directions, unstable_jax, unlike_a_page]


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps_the_rule(rule):
    assert list(PACKAGE.rglob("*.py")), f"no modules in {PACKAGE}"
    found = violations(PACKAGE, rule)
    assert not found, "\n" + "\n".join(found)


def test_no_two_rooms_use_each_other():
    open_rooms = dict(ROOMS)
    while leaves := [room for room, uses in open_rooms.items() if not uses & open_rooms.keys()]:
        for room in leaves:
            del open_rooms[room]
    assert not open_rooms


def write_package(root: Path, modules: dict[str, str]) -> Path:
    for name, source in modules.items():
        path = root / "curvax" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('"""A module."""\n' + textwrap.dedent(source))
    return root / "curvax"


ALLOWED = {
    "__init__.py": "from curvax.batching.maps import chunked_vmap as chunked_vmap",
    "_compat.py": "import jax.extend.core\nfrom jax._src import core\nfrom ._types import Tree",
    "_tree.py": "from ._compat import jaxpr_types",
    "batching/__init__.py": "from . import maps",
    "batching/maps.py": "from .. import _tree, memory\nfrom .plan import ChunkPlan\nimport jax",
    "batching/plan.py": "from curvax._rows import rows\ndef plot():\n    from curvax import report",
}


def test_the_checker_accepts_what_the_table_allows(tmp_path):
    package = write_package(tmp_path, ALLOWED)
    assert [line for rule in RULES for line in violations(package, rule)] == []


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("loops/scan.py", "import curvax.batching.maps", "imports curvax.batching.maps"),
        ("loops/scan.py", "from curvax.batching import maps", "imports curvax.batching.maps"),
        ("loops/scan.py", "from ..batching.maps import f", "imports curvax.batching.maps.f"),
        ("loops/scan.py", "from .. import batching", "imports curvax.batching"),
        ("loops/deep/scan.py", "from ... import batching", "imports curvax.batching"),
        ("loops/scan.py", "from curvax import chunked_vmap", "imports curvax.chunked_vmap"),
        ("loops/scan.py", "import curvax", "imports curvax,"),
        ("loops/scan.py", "from curvax import report", "imports curvax.report"),
        ("_types.py", "from curvax import _compat", "imports curvax._compat"),
        ("_tree.py", "from ._rows import rows", "imports curvax._rows.rows"),
        ("_compat.py", "from .memory import plan", "imports curvax.memory.plan"),
        ("shed/tools.py", "import jax", "'shed' is in no table"),
        ("_helpers.py", "import jax", "'_helpers' is in no table"),
        ("loops/scan.py", "import jax.extend.core as jex", "uses jax.extend.core"),
        ("loops/scan.py", "from jax import core", "uses jax.core"),
        ("loops/scan.py", "from jax._src.core import Jaxpr", "uses jax._src.core.Jaxpr"),
        ("loops/scan.py", "from jax.experimental import io", "uses jax.experimental.io"),
        ("loops/_compat.py", "import jax.extend", "uses jax.extend"),
        ("loops/scan.py", "import jax\nx = jax.core.Tracer", "uses jax.core"),
        ("loops/scan.py", "import jax\nx = jax.__version__", "uses jax.__version__"),
        ("loops/scan.py", "x = 1\n" * LONGEST_MODULE, "has 451 lines"),
    ],
)
def test_the_checker_catches_a_violation(tmp_path, name, source, message):
    package = write_package(tmp_path, {name: source})
    found = [line for rule in RULES for line in violations(package, rule)]
    last_line = 1 if "in no table" in message else len(source.splitlines()) + 1
    assert len(found) == 1
    assert found[0].startswith(f"curvax/{name}:{last_line}: ")
    assert message in found[0]


def test_the_checker_catches_a_missing_docstring(tmp_path):
    package = write_package(tmp_path, {})
    package.mkdir()
    (package / "_tree.py").write_text("import jax\n")
    assert violations(package, unlike_a_page) == [
        "curvax/_tree.py:1: does not start with a docstring"
    ]
