"""Measuring and printing, for all parts of the demonstration."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

# On CPU, XLA may fuse operations into a library call whose scratch memory `memory_analysis` omits.
# Without such fusions the analysis is exact, and the program hardly slower.
_TRUE_ACCOUNT = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}


def compiled(fun: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], float]:
    """Return the compiled `fun`, and the megabytes it needs besides its inputs and outputs."""
    options = _TRUE_ACCOUNT if jax.default_backend() == "cpu" else None
    program = jax.jit(fun).lower(*args).compile(compiler_options=options)
    return program, program.memory_analysis().temp_size_in_bytes / 1e6


def agreement(one: Any, other: Any) -> str:
    """Describe how closely two pytrees of arrays agree; raise if not to rounding."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in pairs]
    gap = max(np.abs(a - b).max() / (np.abs(b).max() + 1e-30) for a, b in pairs)
    if gap > 1e-4:
        raise AssertionError(f"results differ by {gap:.0e} of the largest")
    return f"to within {gap:.0e} of the largest" if gap else "to the last bit"


def text(words: str) -> None:
    """Print a paragraph."""
    print()
    for line in words.strip().splitlines():
        print(f"  {line.strip()}")


def memory(rows: Sequence[tuple[str, float, float]], naive: str, ours: str) -> None:
    """Print the memory that programs need, written naively and with curvax."""
    print(f"\n  {'temporary memory':34}{naive:>18}{ours:>30}")
    for name, before, after in rows:
        print(f"  {name:34}{before:15.1f} MB{after:27.1f} MB")


def pictures(fields: Sequence[np.ndarray], captions: Sequence[str], width: int = 22) -> None:
    """Print square fields side by side in shades of their absolute value."""
    shades = np.array(list(" .:-=+*#%@"))
    columns = []
    for field in fields:
        down, across = (
            np.linspace(0, size - 1, count).round().astype(int)
            for size, count in zip(field.shape, (width // 2, width), strict=True)
        )
        cells = np.abs(field)[down][:, across]
        levels = np.clip(cells / max(cells.max(), 1e-30) * 9.99, 0, 9).astype(int)
        columns.append(["".join(line) for line in shades[levels]])
    print()
    print("  " + "   ".join(f"{caption:{width + 2}}" for caption in captions))
    edge = "+" + "-" * width + "+"
    print("  " + "   ".join(edge for _ in columns))
    for lines in zip(*columns, strict=True):
        print("  " + "   ".join(f"|{line}|" for line in lines))
    print("  " + "   ".join(edge for _ in columns))
