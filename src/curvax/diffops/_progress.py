"""A progress bar that a compiled program moves.

The program calls back after each block. The bar begins with the first block of a run and ends with
the last, so it is right also where one compiled program runs many times. Of several devices, which
compute as many blocks each, the first moves it; of several processes, the first shows it.
"""

from typing import Any

import jax

from curvax._types import Array

__all__ = ["Progress"]


class Progress:
    """A bar over `total` blocks, some of which may be done already."""

    def __init__(self, description: str, total: int = 0, done: int = 0) -> None:
        self.total = total
        self._done = done
        self._description = description
        self._bar: Any = None

    def tick(self, device: Array | None = None) -> None:
        """Another block is done, by this one of several devices; while a program is traced."""
        if device is None:
            jax.debug.callback(self.advance)
        else:
            jax.debug.callback(self._advance_on_first, device)

    def _advance_on_first(self, device: Any) -> None:
        if int(device) == 0:
            self.advance()

    def advance(self, blocks: int = 1) -> None:
        """So many more blocks are done; to be called while it runs."""
        if not blocks or jax.process_index() > 0:
            return
        from tqdm.auto import tqdm  # Which takes as long to import as all of curvax.

        if self._bar is None:
            self._bar = tqdm(
                total=self.total, desc=self._description, unit="block", initial=self._done
            )
        self._bar.update(blocks)
        if self._bar.n >= self.total:
            self._bar.close()
            self._bar = None
