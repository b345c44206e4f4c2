"""What is found of parameters: their uses, and what is on the way to these."""

from dataclasses import dataclass, field, replace

from curvax.graph._axes import Axes
from curvax.graph._program import Node, Operand
from curvax.graph._sites import ParamView, Site

__all__ = ["Found", "SiteView", "Use"]


@dataclass(frozen=True, eq=False)
class Use:
    """One use of a parameter by a node: a site, or the reason why it is none.

    A bias is also a site of its own, `alone`, should it not be able to stay with what it joined.
    """

    node: Node
    site: Site | None = None
    reason: str = ""
    alone: Site | None = None


@dataclass(frozen=True)
class SiteView:
    """The output of a site, re-arranged. `only` if nothing else reads it on the way."""

    site: Site
    axes: Axes
    only: bool


@dataclass
class Found:
    """What became of the parameters of a program: the uses of each."""

    uses: dict[int, list[Use]] = field(default_factory=dict)
    explicit: list[tuple[Node, list[ParamView | None]]] = field(default_factory=list)
    """The layers that were tagged by hand: the node of each tag, and its parameters."""
    covered: dict[Node, set[Node]] = field(default_factory=dict)
    """What lies between the inputs and the outputs of each of these tags."""
    views: dict[Operand, ParamView] = field(default_factory=dict)
    """All operands that are parameters, at most re-arranged."""

    def add(self, param: int, use: Use) -> None:
        self.uses.setdefault(param, []).append(use)

    def replace_site(self, old: Site, new: Site) -> None:
        """Put a site in the place of another wherever that is used."""
        for uses in self.uses.values():
            uses[:] = [replace(use, site=new) if use.site is old else use for use in uses]
