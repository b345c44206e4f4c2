"""Hooks that mkdocs applies to each page before rendering."""

import re
from typing import Any

NO_RUN = re.compile(r"^([ \t]*`{3,}python) no-run$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Drop `no-run` from the info string of a block: our tests use it, mkdocs does not know it."""
    return NO_RUN.sub(r"\1", markdown)
