"""`MemoryUsage`: what a compiled program needs, as its compiler accounts for it."""

from dataclasses import dataclass
from typing import Any

import jax

from curvax import _compat
from curvax.memory._bytes import format_bytes

__all__ = ["MemoryUsage"]


@dataclass(frozen=True)
class MemoryUsage:
    """The memory of a compiled program, in bytes.

    On several devices, that of one of them.
    """

    argument_bytes: int
    """What it is given: its arguments, and the arrays that it closes over."""

    output_bytes: int
    """What it returns."""

    temp_bytes: int
    """What it allocates on the way, at the worst moment."""

    alias_bytes: int = 0
    """Of the output, what is written into donated arguments."""

    scratch_bytes: int = 0
    """What libraries that it calls allocate themselves, which is not in the compiler's account: a
    bound by formulas that were fitted to measurements. Less than half a MiB counts as nothing."""

    @property
    def added_bytes(self) -> int:
        """What a call allocates beside what is there already: output + temp + scratch - alias."""
        return self.output_bytes + self.temp_bytes + self.scratch_bytes - self.alias_bytes

    @classmethod
    def of(cls, compiled: Any) -> "MemoryUsage":
        """As a compiled program tells."""
        account = compiled.memory_analysis()
        if account is None:
            raise NotImplementedError(
                "curvax.memory_usage: the compiler for this device does not tell how much memory a "
                "program needs. Give sizes instead of memory budgets."
            )
        return cls(
            argument_bytes=account.argument_size_in_bytes,
            output_bytes=account.output_size_in_bytes,
            temp_bytes=account.temp_size_in_bytes,
            alias_bytes=account.alias_size_in_bytes,
            scratch_bytes=_compat.library_scratch(compiled, jax.default_backend()),
        )

    def __str__(self) -> str:
        rows = [
            ("arguments", self.argument_bytes),
            ("output", self.output_bytes),
            ("temporaries", self.temp_bytes),
            ("library scratch", self.scratch_bytes),
            ("aliased", self.alias_bytes),
            ("added by a call", self.added_bytes),
        ]
        return "\n".join(f"{name:<15} {format_bytes(count):>12}" for name, count in rows)
