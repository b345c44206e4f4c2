"""What is found of parameters: their uses, and what is on the way to these."""

from collections import Counter
from collections.abc import Collection, Set
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
    readers: Counter[Operand] = field(default_factory=Counter)
    """How often each operand is read."""
    order: dict[Node, int] = field(default_factory=dict)
    """The nodes, in the order in which they are computed."""
    doubtful: set[Site] = field(default_factory=set)
    """Sites that met nothing so far that differs from example to example."""
    views: dict[Operand, ParamView] = field(default_factory=dict)
    """All operands that are parameters, at most re-arranged."""
    without_derivative: set[int] = field(default_factory=set)
    """Parameters with uses, all of which were left out as no loss has a derivative there."""

    def is_param(self, operand: Operand) -> bool:
        """Whether an operand is a parameter, at most re-arranged."""
        return operand in self.views and self.views[operand].scale is None

    def read_elsewhere(self, nodes: Collection[Node], tag: Node | None = None) -> int:
        """How many values that some nodes compute from parameters are read by others, too.

        What is tagged is not read by others: they read the tag.
        """
        if not nodes:
            return 0
        inside: Counter[Operand] = Counter(tag.inputs) if tag is not None else Counter()
        for node in nodes:
            inside.update(node.inputs)
        computed: set[Operand] = set(self.views)
        for node in sorted(nodes, key=lambda node: self.order.get(node, 0)):
            if not computed.isdisjoint(node.inputs):
                computed.update(node.outputs)
        outputs = {out for node in nodes for out in node.outputs}
        found = (outputs & computed) - set(self.views)
        return sum(self.readers[operand] > inside[operand] for operand in found)

    def add(self, param: int, use: Use) -> None:
        self.uses.setdefault(param, []).append(use)

    def give_up(self, reason: str) -> None:
        """Let no site be doubtful any more: none of these is one."""
        for uses in self.uses.values():
            uses[:] = [
                Use(use.node, reason=reason) if use.site in self.doubtful else use for use in uses
            ]

    def leave_out(self, reached: Set[Operand]) -> None:
        """Leave out the uses that return nothing that is reached: there is no curvature there."""
        for param, uses in self.uses.items():
            kept = [use for use in uses if not reached.isdisjoint(use.node.outputs)]
            if uses and not kept:
                self.without_derivative.add(param)
            uses[:] = kept

    def replace_site(self, old: Site, new: Site) -> None:
        """Put a site in the place of another wherever that is used."""
        for uses in self.uses.values():
            uses[:] = [replace(use, site=new) if use.site is old else use for use in uses]
