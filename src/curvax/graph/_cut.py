"""Parts that are cut out of a parameter before they are used: fused weights that are split.

Each part is followed like a parameter of its own. What remembers where it came from is its view.
"""

import itertools
from dataclasses import replace

from curvax.graph._program import Node
from curvax.graph._sites import Cut, ParamView

__all__ = ["cut_out", "cut_piece"]


def cut_out(node: Node, view: ParamView) -> list[ParamView] | str:
    """What `slice` or `split` leaves of a parameter, one view for each output; or why it cannot."""
    if node.name == "split":
        axis, stops = int(node.params["axis"]), [0]
        for size in node.params["sizes"]:
            stops.append(stops[-1] + int(size))
        pieces = [{axis: bounds} for bounds in itertools.pairwise(stops)]
    else:
        if any(stride != 1 for stride in node.params["strides"] or ()):
            return "parts of it are cut out that are not in one piece"
        bounds = zip(node.params["start_indices"], node.params["limit_indices"], strict=True)
        pieces = [{axis: (int(a), int(b)) for axis, (a, b) in enumerate(bounds)}]
    views = [cut_piece(view, piece) for piece in pieces]
    found = [v for v in views if v is not None]
    if len(found) < len(views):
        return "parts of it are cut out that are not in one piece"
    return [replace(v, operand=output) for v, output in zip(found, node.outputs, strict=True)]


def cut_piece(view: ParamView, bounds: dict[int, tuple[int, int]]) -> ParamView | None:
    """What is within bounds along some axes; None if that is not in one piece."""
    for axis, (start, stop) in bounds.items():
        if (start, stop) == (0, view.axes.shape[axis]):
            continue
        found = view.axes.cut(axis, start, stop)
        if found is None:
            return None
        axes, own = found
        view = replace(view, axes=axes)
        if own is not None:
            view = _cut_further(view, own)
    return view


def _cut_further(view: ParamView, cut: Cut) -> ParamView:
    """What is left of a parameter if a piece is cut out of what was left already."""
    axis, start, stop = cut
    before = {a: first for a, first, _ in view.cuts}.get(axis, 0)
    rest = [other for other in view.cuts if other[0] != axis]
    return replace(view, cuts=tuple(sorted([*rest, (axis, before + start, before + stop)])))
