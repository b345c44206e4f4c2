"""Every example in the README, the documentation and the docstrings runs, as a user would run it.

That is: in a process of its own, with JAX's default configuration instead of the tests' strict one,
and with warnings as errors. Only the machine code is less optimised, so that it compiles quickly.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import curvax
from helpers import as_users_run

ROOT = Path(__file__).parents[1]
EXECUTE = ROOT / "scripts" / "execute_docs.py"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def execute(kind: str, name: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", EXECUTE, kind, name],
        env=as_users_run(is_compiled_quickly=True),
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )


def closing_line(run: subprocess.CompletedProcess[str]) -> str:
    assert run.returncode == 0, f"\n{run.stdout}\n{run.stderr}"
    return run.stdout.splitlines()[-1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page_runs(page, tmp_path, record_property):
    count = closing_line(execute("markdown", str(page), tmp_path))
    record_property("documentation", f"{page.relative_to(ROOT)}: {count}")


def written_examples(path: Path) -> int:
    files = path.rglob("*.py") if path.is_dir() else [path]
    return len(re.findall(r"^\s*>>> ", "".join(file.read_text() for file in files), re.M))


PACKAGE = ROOT / "src" / "curvax"
EXAMPLES = {path.stem: written_examples(path) for path in sorted(PACKAGE.iterdir())}
MODULES = [name for name, count in EXAMPLES.items() if count]


@pytest.mark.parametrize("module", MODULES)
def test_every_docstring_example_runs(module, tmp_path, record_property):
    """As many as are written: none is in a place where it is not found."""
    count = closing_line(execute("doctests", f"curvax.{module}", tmp_path))
    record_property("documentation", f"docstrings of curvax.{module}: {count}")
    assert int(count.split()[0]) == EXAMPLES[module]


def test_every_public_name_is_in_the_reference():
    reference = (ROOT / "docs" / "api.md").read_text().split()
    assert [name for name in curvax.__all__ if f"curvax.{name}" not in reference] == []


PAGE = """# A page

```python
x = 1
```

```bash
not python
```

!!! note
    ```python
    y = x + 1
    ```

```python no-run
launch()
```

```python
{last}
```
"""


def test_blocks_share_a_namespace_and_the_skipped_are_counted(tmp_path):
    (tmp_path / "page.md").write_text(PAGE.format(last="assert y == 2"))
    run = execute("markdown", "page.md", tmp_path)
    assert closing_line(run) == "3 blocks executed, 1 marked no-run (lines 16)"


@pytest.mark.parametrize(
    "last", ["y / 0", "import warnings; warnings.warn('old')", "import jax.numpy as jnp; jnp.foo"]
)
def test_a_failing_block_names_its_file_and_line(tmp_path, last):
    (tmp_path / "page.md").write_text(PAGE.format(last=last))
    run = execute("markdown", "page.md", tmp_path)
    assert run.returncode != 0
    assert 'File "page.md", line 21' in run.stderr
    assert last in run.stderr
