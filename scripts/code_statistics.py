"""Print the figures of `docs/design.md` about the size and the annotations of the source.

    python scripts/code_statistics.py [src/curvax]

Lines of code are those with a token that is neither a comment nor part of a docstring. An
annotation counts as `Any` if it contains `Any` or an alias of `_types.py` that stands for it.
"""

import ast
import io
import statistics
import sys
import tokenize
from pathlib import Path

LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
ALIASES = {"Any", "PyTree", "TreeDef", "Carry"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the lines of all docstrings, those of attributes included."""
    texts = [
        node
        for parent in ast.walk(tree)
        if isinstance(parent, DOCUMENTED)
        for node in parent.body
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    return {line for node in texts for line in range(node.lineno, (node.end_lineno or 0) + 1)}


def code_lines(text: str) -> int:
    """Return the number of lines that hold code."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT and token.type != tokenize.ENDMARKER:
            found |= set(range(token.start[0], token.end[0] + 1))
    return len(found - docstring_lines(ast.parse(text)))


def annotations(tree: ast.Module) -> list[ast.expr]:
    """Return the annotations of parameters, results and variables."""
    found: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            found.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(node.returns)
    return [annotation for annotation in found if annotation is not None]


def says(annotation: ast.expr, names: set[str]) -> bool:
    """Return whether an annotation contains one of these names."""
    return any(isinstance(node, ast.Name) and node.id in names for node in ast.walk(annotation))


def main(root: Path) -> None:
    texts = [path.read_text() for path in sorted(root.rglob("*.py"))]
    trees = [ast.parse(text) for text in texts]
    lengths = [len(text.splitlines()) for text in texts]
    annotated = [annotation for tree in trees for annotation in annotations(tree)]
    any_alone = sum(says(annotation, {"Any"}) for annotation in annotated)
    any_alias = sum(says(annotation, ALIASES) for annotation in annotated)
    classes = sum(isinstance(node, ast.ClassDef) for tree in trees for node in ast.walk(tree))
    print(f"files                      {len(texts)}")
    print(f"lines, median and longest  {statistics.median(lengths):.0f}, {max(lengths)}")
    print(f"lines in all               {sum(lengths)}")
    print(f"lines of code              {sum(map(code_lines, texts))}")
    print(f"classes                    {classes}")
    print(f"annotations                {len(annotated)}")
    print(f"of these with Any          {any_alone} ({any_alone / len(annotated):.1%})")
    print(f"  or with an alias of it   {any_alias} ({any_alias / len(annotated):.1%})")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "src/curvax"))
