"""A progress bar that a compiled program moves.

The program calls back after each block. The bar begins with the first block of a run and ends with
the last, so it is right also where one compiled program runs many times.
"""

from typing import Any

import jax

__all__ = ["Progress"]


class Progress:
    """A bar over `total` blocks, some of which may be done already."""

    def __init__(self, description: str, total: int = 0, done: int = 0) -> None:
        self.total = total
        self._done = done
        self._description = description
        self._bar: Any = None

    def tick(self) -> None:
        """Another block is done; to be called while a program is traced."""
        jax.debug.callback(self.advance)

    def advance(self) -> None:
        """Another block is done; to be called while it runs."""
        from tqdm.auto import tqdm  # Which takes as long to import as all of curvax.

        if self._bar is None:
            self._bar = tqdm(
                total=self.total, desc=self._description, unit="block", initial=self._done
            )
        self._bar.update()
        if self._bar.n >= self.total:
            self._bar.close()
            self._bar = None
