"""The architecture of `src/curvax`, read from the source.

A folder is an entry of the documentation's navigation, a file a noun that a user would search for.
`MAY_USE` says which packages a package may import from; nothing points back up. The base, a
few modules next to the packages, is open to all of them. Modules are imported from where they are
defined: the `__init__.py` of a package is its docstring, and only `curvax` itself re-exports names.
"""

import ast
import importlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import curvax

PACKAGE = Path(__file__).parents[1] / "src" / "curvax"

BASE = {
    "_types": set(),
    "_errors": set(),
    "_reports": set(),
    "_jax": {"_types"},
    "_tree": {"_types", "_jax"},
    "_slicing": {"_types", "_jax"},
    "_cpu": {"_types", "_jax"},
}
PACKAGES = {
    "memory": set(),
    "devices": set(),
    "maps": {"memory", "devices"},
    "loops": {"memory"},
    "derivatives": {"maps", "memory", "devices"},
    "losses": set(),
    "layers": {"losses"},
    "curvature": {"layers", "losses", "maps", "devices"},
    "optimizer": {"curvature", "layers", "maps", "memory", "devices"},
    "microbatching": {"maps"},
    "kfac_jax": {"optimizer", "curvature", "layers", "losses", "maps", "devices"},
}
# Subpackages that know nothing of the package around them, but for what is named here.
SUBPACKAGES = {
    "curvature.linalg": set(),
    "curvature.patches": set(),
    "curvature.blocks": {"curvature.linalg", "curvature.patches"},
}
# The public API may use everything; nothing may use the public API.
ROOT = "__init__"
MAY_USE = (
    BASE
    | {package: uses | BASE.keys() for package, uses in PACKAGES.items()}
    | {ROOT: BASE.keys() | PACKAGES.keys()}
)

# What moves from one JAX release to the next, and the one package that may know about it.
UNSTABLE_JAX = {"_src", "core", "experimental", "extend", "version", "__version__"}
KNOWS_JAX = "_jax"
# Packages whose `__init__.py` re-exports names: the public API, the door to JAX, and the layout of
# another library's modules.
RE_EXPORT = {
    "",
    KNOWS_JAX,
    "kfac_jax",
    "kfac_jax._src",
    "kfac_jax.utils",
    "kfac_jax.curvature_blocks",
    "kfac_jax.curvature_estimator",
}
# Part of that layout, and imported by programs that use it.
NOT_PRIVATE = {"curvax.kfac_jax._src"}


class Import(NamedTuple):
    """One imported dotted name."""

    line: int
    name: str


def imports(tree: ast.Module, package: list[str]) -> Iterator[Import]:
    """Every name `tree` imports, relative ones resolved against the `package` it lies in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, node.module] if node.module else base
            for alias in node.names:
                yield Import(node.lineno, ".".join([*base, alias.name]))


def package_of(dotted: list[str]) -> str:
    """The package of a path below `curvax`; names that are in no package belong to the root."""
    return dotted[0] if dotted and dotted[0] in MAY_USE else ROOT


def wrong_directions(root: Path, path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Imports of our own that the table does not allow."""
    inside = path.relative_to(root).with_suffix("").parts
    own = inside[0]
    if own not in MAY_USE:
        yield 1, f"'{own}' is in no table; add it to the architecture or put its code in a package"
        return
    subpackage = ".".join(inside[:2])
    for line, name in imports(tree, [root.name, *inside[:-1]]):
        package, *target = name.split(".")
        if package != root.name:
            continue
        used = package_of(target)
        if used != own and used not in MAY_USE[own]:
            allowed = ", ".join(sorted(MAY_USE[own])) or "nothing"
            yield line, f"imports {name}, but '{own}' may use only: {allowed}"
        sibling = ".".join(target[:2])
        known = {subpackage} | SUBPACKAGES.get(subpackage, {sibling})
        if used == own and sibling not in known:
            yield line, f"imports {name}, but '{subpackage}' may not use '{sibling}'"


def private_names(root: Path, path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Imports of what another module keeps to itself."""
    inside = path.relative_to(root).with_suffix("").parts
    for line, name in imports(tree, [root.name, *inside[:-1]]):
        *module, last = name.split(".")
        is_private = last.startswith("_") and name not in NOT_PRIVATE
        if module and module[0] == root.name and is_private and len(module) > 1:
            yield line, f"imports {name}, which is private to {'.'.join(module)}"


def re_exports(root: Path, path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Packages that hold more than a docstring, so that a name could hide a module."""
    package = path.parent.relative_to(root).as_posix().replace("/", ".").strip(".")
    if path.name == "__init__.py" and package not in RE_EXPORT and len(tree.body) > 1:
        yield (
            tree.body[1].lineno,
            "has more than a docstring; import from the module itself",
        )


def unstable_jax(root: Path, path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Uses of what JAX does not promise to keep, imported or reached as an attribute."""
    inside = path.relative_to(root).with_suffix("").parts
    if inside[0] == KNOWS_JAX:
        return
    names = [*imports(tree, [root.name, *inside[:-1]])]
    names += [(node.lineno, ast.unparse(node)) for node in ast.walk(tree) if is_chain(node)]
    for line, name in names:
        package, _, rest = name.partition(".")
        if package == "jax" and rest.split(".")[0] in UNSTABLE_JAX:
            yield line, f"uses {name}, which only {KNOWS_JAX} may"


def is_chain(node: ast.AST) -> bool:
    """Whether `node` is an attribute of a plain name, as in `jax.core`."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)


def undescribed(_root: Path, _path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Modules that do not open with what they are for."""
    if not (ast.get_docstring(tree) or "").strip():
        yield 1, "does not start with a docstring"


def violations(root: Path, rule) -> list[str]:
    """What `rule` finds in the package at `root`, one line each: file, line, reason."""
    return [
        f"{path.relative_to(root.parent)}:{line}: {reason}"
        for path in sorted(root.rglob("*.py"))
        for line, reason in rule(root, path, ast.parse(path.read_text(), str(path)))
    ]


RULES = [wrong_directions, private_names, re_exports, unstable_jax, undescribed]


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps_the_rule(rule):
    assert list(PACKAGE.rglob("*.py")), f"no modules in {PACKAGE}"
    found = violations(PACKAGE, rule)
    assert not found, "\n" + "\n".join(found)


def test_no_two_packages_use_each_other():
    left = dict(PACKAGES)
    while leaves := [name for name, uses in left.items() if not uses & left.keys()]:
        for name in leaves:
            del left[name]
    assert not left


def modules() -> list[str]:
    paths = [path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py")]
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in paths)


@pytest.mark.parametrize("name", modules())
def test_no_function_has_the_path_of_a_module(name):
    """`curvax.derivatives.hessian` is a file, `curvax.hessian` a function, neither is both."""
    importlib.import_module(name)
    found = curvax
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    assert isinstance(found, ModuleType)
    assert found.__name__ == name


def test_the_map_for_contributors_is_that_of_the_tree():
    text = (PACKAGE.parents[1] / "CONTRIBUTING.md").read_text()
    section = text.split("## Find your way")[1].split("\n## ")[0]
    mapped = set(re.findall(r"^\| `([^`]+)` \|", section, re.M))
    here = {path.name for path in PACKAGE.iterdir() if path.suffix == ".py"}
    here |= {
        f"{path.relative_to(PACKAGE).as_posix()}/"
        for path in PACKAGE.rglob("*")
        if path.is_dir() and path.name != "__pycache__"
    }
    assert {name for name in mapped if not (PACKAGE.parents[1] / name).is_dir()} == here


TESTS = Path(__file__).parent
# Tests speak the public API, or that of a package. The private names that they use nevertheless.
PRIVATE_IN_TESTS = {
    "conftest.py": {"curvax._jax": "measured programs are compiled as users compile them"},
    "curvature/linalg/test_finite.py": {"curvax._cpu.all_finite": "a workaround is tested alone"},
    "curvature/linalg/test_plain.py": {
        "curvax._cpu": "workarounds are switched off",
        "curvax._jax": "equations are read in the same way for all versions of JAX",
    },
    "curvature/linalg/test_symmetric.py": {
        "curvax._cpu": "tiles are made small",
        "curvax._cpu.inverse_root": "a workaround is tested alone",
        "curvax._cpu.positive_inverse": "a workaround is tested alone",
        "_cpu._plain_positive_inverse": "both formulations are tested",
    },
    "drop_in/test_clients.py": {
        "kfac_jax.tag_graph_matcher._dense_parameter_extractor": "programs use it",
    },
    "derivatives/test_compilation.py": {
        "compiled._executables": "what is kept is counted",
        "compiled._executables._entries": "what is kept is counted",
    },
    "loops/test_loop_memory.py": {
        "curvax._jax": "scans are read in the same way for all versions of JAX"
    },
    "loops/test_sliced_scan.py": {
        "curvax.loops.sliced_scan._Kept": "all slices of all lengths, without compiling"
    },
    "losses/test_losses.py": {"loss._weight": "an assignment that is rejected"},
    "losses/test_register_loss.py": {"function_loss._tags": "what is kept is counted"},
    "maps/test_plan.py": {"curvax._slicing.Column": "rows of a chunk may be strided"},
    "memory/test_available.py": {"curvax.memory.budget._of_host": "files below another root"},
    "drop_in/tags_cases.py": {"k.tag_graph_matcher._dense": "clients of kfac_jax call it"},
    "drop_in/test_patterns.py": {
        "matcher._dense": "clients of kfac_jax call it",
        "matcher._dense_parameter_extractor": "clients of kfac_jax call it",
        "matcher._normalization_haiku_preprocessor": "clients of kfac_jax pass it",
        "matcher._scale_and_shift_parameter_extractor": "clients of kfac_jax call it",
        "tagged._func_graph": "tests of clients read it",
        "tagged._param_labels": "tests of clients read it",
    },
    "memory/test_cache.py": {"cache._entries": "what is kept is counted"},
    "memory/test_usage.py": {"curvax._jax": "the same compiler option as for users"},
    "test_errors.py": {
        "curvax._errors.check_size": "a check without a public caller",
        "curvax._errors.where": "a name without a public caller",
    },
}
# Of named tuples, and of the system.
PUBLIC_NEVERTHELESS = {"_replace", "_fields", "_asdict", "_exit"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC_NEVERTHELESS


def private_uses(tree: ast.Module) -> Iterator[str]:
    """The private names of curvax that a test imports, and the private attributes that it reads."""
    for _, name in imports(tree, []):
        public = name.removeprefix("curvax.kfac_jax._src")
        if name.startswith("curvax.") and any(map(is_private, public.split("."))):
            yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls", "super()"):
                yield f"{owner}.{node.attr}"


def test_tests_use_no_private_names_but_those_listed():
    found = {
        path.relative_to(TESTS).as_posix(): set(private_uses(ast.parse(path.read_text())))
        for path in TESTS.rglob("*.py")
    }
    listed = {path: set(reasons) for path, reasons in PRIVATE_IN_TESTS.items()}
    assert {path: names for path, names in found.items() if names} == listed


def test_private_uses_are_found():
    source = "from curvax import _jax, hessian\nhessian._f(x._replace())"
    assert [*private_uses(ast.parse(source))] == ["curvax._jax", "hessian._f"]


def write_package(root: Path, modules: dict[str, str]) -> Path:
    for name, source in modules.items():
        path = root / "curvax" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('"""A module."""\n' + textwrap.dedent(source))
    return root / "curvax"


ALLOWED = {
    "__init__.py": "from curvax.maps.vmap import chunked_vmap as chunked_vmap",
    "_jax.py": "import jax.extend.core\nfrom jax._src import core\nfrom ._types import Tree",
    "_tree.py": "from ._jax import jaxpr_types",
    "maps/__init__.py": "",
    "maps/vmap.py": "from .. import _tree, memory\nfrom .plan import ChunkPlan\nimport jax",
    "maps/plan.py": "from curvax import _slicing\ndef plot():\n    from curvax import _reports",
    "curvature/blocks/full.py": "from curvax.curvature.linalg.psd import power",
}


def test_the_checker_accepts_what_the_table_allows(tmp_path):
    package = write_package(tmp_path, ALLOWED)
    assert [line for rule in RULES for line in violations(package, rule)] == []


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("loops/scan.py", "import curvax.maps.plan", "imports curvax.maps.plan"),
        ("loops/scan.py", "from curvax.maps import plan", "imports curvax.maps.plan"),
        ("loops/scan.py", "from ..maps.plan import f", "imports curvax.maps.plan.f"),
        ("loops/scan.py", "from .. import maps", "imports curvax.maps"),
        ("loops/deep/scan.py", "from ... import maps", "imports curvax.maps"),
        ("loops/scan.py", "from curvax import chunked_vmap", "imports curvax.chunked_vmap"),
        ("loops/scan.py", "import curvax", "imports curvax,"),
        ("_tree.py", "def show():\n    from curvax import _reports", "imports curvax._reports"),
        ("_types.py", "from curvax import _jax", "imports curvax._jax"),
        ("_tree.py", "from ._slicing import read", "imports curvax._slicing.read"),
        ("_jax.py", "from .memory import plan", "imports curvax.memory.plan"),
        (
            "curvature/blocks/full.py",
            "from curvax.curvature.explicit import f",
            "'curvature.blocks' may not use 'curvature.explicit'",
        ),
        (
            "curvature/linalg/psd.py",
            "from curvax.curvature.blocks.full import f",
            "'curvature.linalg' may not use 'curvature.blocks'",
        ),
        ("loops/scan.py", "from curvax.memory.plan import _f", "which is private to"),
        ("loops/__init__.py", "from curvax.loops.scan import f", "has more than a docstring"),
        ("shed/tools.py", "import jax", "'shed' is in no table"),
        ("_helpers.py", "import jax", "'_helpers' is in no table"),
        ("loops/scan.py", "import jax.extend.core as jex", "uses jax.extend.core"),
        ("loops/scan.py", "from jax import core", "uses jax.core"),
        ("loops/scan.py", "from jax._src.core import Jaxpr", "uses jax._src.core.Jaxpr"),
        ("loops/scan.py", "from jax.experimental import io", "uses jax.experimental.io"),
        ("loops/_jax.py", "import jax.extend", "uses jax.extend"),
        ("loops/scan.py", "import jax\nx = jax.core.Tracer", "uses jax.core"),
        ("loops/scan.py", "import jax\nx = jax.__version__", "uses jax.__version__"),
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
    assert violations(package, undescribed) == [
        "curvax/_tree.py:1: does not start with a docstring"
    ]
