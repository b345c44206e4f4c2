"""Execute the examples of the documentation, as if pasted one by one.

    python -W error scripts/execute_docs.py markdown README.md
    python -W error scripts/execute_docs.py doctests curvax

The Python blocks of a markdown file share one namespace and run in order. They are compiled under
the file's own name and lines, so a traceback points into the markdown. A block whose info string
contains `no-run` is not executed. The last line printed counts what was executed and what was not.
"""

import argparse
import doctest
import importlib
import pkgutil
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FENCE = re.compile(r"^[ \t]*(?P<ticks>`{3,}|~{3,})[ \t]*(?P<info>[^`\n]*)$")


class Block(NamedTuple):
    """A fenced block: the line it opens on, the words of its info string, and its text."""

    line: int
    info: list[str]
    source: str


def fenced_blocks(text: str) -> Iterator[Block]:
    """Yield every fenced block of a markdown text, indented ones included."""
    lines = enumerate(text.splitlines(), start=1)
    for start, line in lines:
        opening = FENCE.match(line)
        if opening is None:
            continue
        body = []
        for _, inner in lines:
            if inner.strip().startswith(opening["ticks"]) and not inner.strip().strip("`~"):
                break
            body.append(inner)
        else:
            raise SyntaxError(f"the block opened on line {start} is never closed")
        yield Block(start, opening["info"].split(), textwrap.dedent("\n".join(body)))


def execute_markdown(name: str) -> str:
    """Run the Python blocks of a file; return the numbers of those run and skipped."""
    blocks = [b for b in fenced_blocks(Path(name).read_text()) if b.info[:1] == ["python"]]
    skipped = [b.line for b in blocks if "no-run" in b.info[1:]]
    namespace = {"__name__": "__main__"}
    for block in blocks:
        if block.line not in skipped:
            exec(compile("\n" * block.line + block.source, name, "exec"), namespace)
    lines = f" (lines {', '.join(map(str, skipped))})" if skipped else ""
    return f"{len(blocks) - len(skipped)} blocks executed, {len(skipped)} marked no-run{lines}"


def execute_doctests(name: str) -> str:
    """Run the doctests of a module, or of a package and its modules; return their number."""
    package = importlib.import_module(name)
    found = pkgutil.walk_packages(getattr(package, "__path__", []), name + ".")
    modules = [package, *(importlib.import_module(module.name) for module in found)]
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    results = [doctest.testmod(module, optionflags=flags) for module in modules]
    if failed := sum(result.failed for result in results):
        sys.exit(f"{failed} doctest examples failed")
    return f"{sum(result.attempted for result in results)} doctest examples executed"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=["markdown", "doctests"])
    parser.add_argument("name", help="a markdown file, or a module")
    arguments = parser.parse_args()
    execute = {"markdown": execute_markdown, "doctests": execute_doctests}[arguments.kind]
    print(execute(arguments.name))


if __name__ == "__main__":
    main()
