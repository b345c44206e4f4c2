"""Consistency checks of multi-process programs.

In a multi-process program every process must run the same computations on arrays of the same
shapes. If one does not, the others wait for it forever. So all compare a description first.
"""

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np

from curvax import _jax
from curvax._errors import where
from curvax._tree import leaf_name
from curvax._types import PyTree

SECONDS = 300
"""Seconds to wait for the other processes to make a call with shapes that are new here."""

_HOUR = 3600


def describe(name: str, tree: PyTree) -> list[str]:
    """Return one line for each array of a pytree, such as `x['w'] is float32[3, 2]`."""
    return [
        f"{leaf_name(name, path)} is {np.result_type(x) if np.isscalar(x) else x.dtype}"
        f"{list(np.shape(x))}"
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    ]


def check_agreement(lines: Iterable[str], seconds: float = _HOUR) -> None:
    """Check that all processes pass the same lines; every process must make this call."""
    text = "\n".join(lines)
    digests = _jax.exchanged(hashlib.sha256(text.encode()).hexdigest(), seconds)
    absent = [process for process, digest in enumerate(digests) if digest is None]
    if absent:
        raise ValueError(
            f"{where()}: all processes must make the same calls on arrays of the same shapes, but "
            f"within {seconds} seconds not all have made this one, which is new in process "
            f"{jax.process_index()}. Missing are the processes {', '.join(map(str, absent))}."
        )
    if len(set(digests)) > 1:
        texts = [text or "" for text in _jax.exchanged(text, seconds)]
        raise ValueError(
            f"{where()}: all processes must compute the same, but {_first_difference(texts)}. Give "
            f"all of them the same function and options, and arrays of the same shapes; of a "
            f"batch, each process has its own examples."
        )


class NewShapes:
    """A check of the shapes of a program's arguments whenever they are new to this process.

    Processes compare shapes once, and then run without waiting for each other.
    """

    def __init__(self) -> None:
        self._known: set[tuple[str, ...]] = set()

    def check(self, program: str, arguments: Mapping[str, PyTree]) -> None:
        """Check that all processes call a program with arguments of the same shapes."""
        description = (
            f"the program is {program}",
            *(line for name, tree in arguments.items() for line in describe(name, tree)),
        )
        if description not in self._known:
            check_agreement(description, SECONDS)
            self._known.add(description)


def _first_difference(texts: Sequence[str]) -> str:
    """Return the first line that differs between processes, as each of them has it."""
    lines = [text.split("\n") for text in texts]
    rows = itertools.zip_longest(*lines, fillvalue="there is nothing more")
    first = next(row for row in rows if len(set(row)) > 1)
    return ", ".join(f"in process {process} {line}" for process, line in enumerate(first))
