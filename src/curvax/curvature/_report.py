"""What each block of an estimate is, as a table."""

from collections.abc import Sequence
from dataclasses import dataclass

from curvax._table import table
from curvax.blocks import CurvatureBlock

__all__ = ["BlockRow", "CurvatureReport", "report_of"]


@dataclass(frozen=True)
class BlockRow:
    """One block."""

    params: tuple[str, ...]
    block: str
    dim: int
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class CurvatureReport:
    """All blocks of an estimate; it prints as a table."""

    rows: tuple[BlockRow, ...]

    def __str__(self) -> str:
        rows = [
            (row.block, str(row.dim), ", ".join(row.params), "; ".join(row.remarks))
            for row in self.rows
        ]
        return table(("block", "elements", "parameters", "remarks"), rows)


def report_of(blocks: Sequence[CurvatureBlock], params: Sequence[Sequence[str]]) -> CurvatureReport:
    """The table of some blocks and the names of their parameters."""
    rows = [
        BlockRow(tuple(names), type(block).__name__, block.dim, block.remarks)
        for block, names in zip(blocks, params, strict=True)
    ]
    return CurvatureReport(tuple(rows))
