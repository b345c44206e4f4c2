"""Names that are loaded when they are asked for, listed where type checkers read them."""

import ast
from pathlib import Path

__all__ = ["names_of_stub"]


def names_of_stub(file: str) -> dict[str, str]:
    """Each name that the stub beside a module imports, and the module it comes from."""
    tree = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}
