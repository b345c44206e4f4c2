"""What mkdocs does to each page before it renders it."""

import re
from typing import Any

NO_RUN = re.compile(r"^([ \t]*`{3,}python) no-run$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Drop `no-run` from the opening of a block: it is for our tests and unknown to mkdocs."""
    return NO_RUN.sub(r"\1", markdown)
