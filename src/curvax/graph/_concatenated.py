"""Parameters that are put together before they are used: fused gates, fused projections.

`concatenate` of parameters is followed like a single one. Where it is contracted with an input, and
the axis along which it was put together is one of the output's, each parameter is a dense layer of
the same input whose output is its own part. A bias that is put together alike joins part by part.
A parameter beside data, as a token of its own at the start of a sequence, is a shift of that part.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from curvax.graph._axes import Axes
from curvax.graph._program import Constant, Node, Operand, Variable
from curvax.graph._sites import ParamView, Site, dense_site, elementwise_site, join

__all__ = ["ConcatView", "Parts", "concat_shape", "dense_parts", "put_beside", "shift_parts"]


@dataclass(frozen=True)
class ConcatView:
    """Parameters, re-arranged, one after the other along an axis."""

    params: tuple[ParamView, ...]
    axis: int

    @property
    def sizes(self) -> list[int]:
        """The length of each along the axis."""
        return [view.axes.shape[self.axis] for view in self.params]

    def rearranged(
        self,
        name: str,
        move: Callable[[Axes, dict[str, Any]], Axes | None],
        params: dict[str, Any],
        output: Variable,
    ) -> "ConcatView | None":
        """What an operation makes of it; None if the parts are not one after the other any more."""
        old, new = concat_shape(self), tuple(output.shape)
        axis = _moved_axis(name, params, self.axis, old, new)
        if axis is None:
            return None
        moved: list[ParamView] = []
        for view, size in zip(self.params, self.sizes, strict=True):
            own = {**params}
            resized = (*new[:axis], size, *new[axis + 1 :])
            for key in ("shape", "new_sizes"):
                if key in own:
                    own[key] = resized
            axes = move(view.axes, own)
            if axes is None:
                return None
            moved.append(replace(view, axes=axes))
        return ConcatView(tuple(moved), axis)


def concat_shape(view: ConcatView) -> tuple[int, ...]:
    """The shape of all parts together."""
    shape = view.params[0].axes.shape
    return (*shape[: view.axis], sum(view.sizes), *shape[view.axis + 1 :])


def _moved_axis(
    name: str, params: dict[str, Any], axis: int, old: Sequence[int], new: Sequence[int]
) -> int | None:
    if name == "transpose":
        return list(params["permutation"]).index(axis)
    if name == "broadcast_in_dim":
        return int(params["broadcast_dimensions"][axis])
    before, size = math.prod(old[:axis]), old[axis]
    found = [k for k in range(len(new)) if math.prod(new[:k]) == before and new[k] == size]
    return found[0] if found else None


@dataclass(frozen=True)
class Parts:
    """Sites that are the parts of one output."""

    sites: tuple[Site, ...]


def dense_parts(node: Node, view: ConcatView, number: int) -> Parts | str:
    """A contraction of concatenated parameters with an input; or why it is no dense layer."""
    contracted, batched = node.params["dimension_numbers"]
    own = (*contracted[number], *batched[number])
    if view.axis in own:
        return "it is put together with others along an axis that is not of the outputs"
    free = [axis for axis in range(len(concat_shape(view))) if axis not in own]
    sites: list[Site] = []
    start = 0
    for param, size in zip(view.params, view.sizes, strict=True):
        site = dense_site(node, param, is_left=number == 0)
        if isinstance(site, str):
            return site
        axis = site.features[free.index(view.axis)]
        sites.append(_part(site, axis, start, start + size))
        start += size
    return Parts(tuple(sites))


def shift_parts(
    node: Node, view: ConcatView, other: Operand, before: Parts | None
) -> tuple[Parts, Parts] | str:
    """Biases that are added to parts, and the same as shifts of their own; or why that cannot be.

    `before` is what they are added to, if that is the parts of a layer.
    """
    (output,) = node.outputs
    if len(output.shape) != len(concat_shape(view)):
        return "it is put together with others and added in another shape"
    alone: list[Site] = []
    start = 0
    for param, size in zip(view.params, view.sizes, strict=True):
        shape = list(output.shape)
        shape[view.axis] = size
        spread = replace(param, axes=param.axes.broadcast(shape, range(len(shape))))
        site = elementwise_site(node, spread, other, "shift")
        if isinstance(site, str):
            return site
        alone.append(_part(replace(site, params=(spread,)), view.axis, start, start + size))
        start += size
    joined: list[Site] = []
    if before is not None and [s.part for s in before.sites] == [s.part for s in alone]:
        for site, shift in zip(before.sites, alone, strict=True):
            one = join(site, node, site.axes, shift.params[0])
            if one is not None and not site.params[1:]:
                joined.append(one)
    apart = Parts(tuple(alone))
    return (Parts(tuple(joined)) if len(joined) == len(alone) else apart), apart


def put_beside(node: Node, views: Sequence[ParamView | None]) -> dict[int, Site | str]:
    """Parameters beside data: each is a shift, of nothing, in its own part of the output."""
    axis, start = int(node.params["dimension"]), 0
    sites: dict[int, Site | str] = {}
    for operand, view in zip(node.inputs, views, strict=True):
        stop = start + operand.shape[axis]
        if view is not None:
            nothing = Constant(np.zeros((), node.outputs[0].dtype))
            site = elementwise_site(node, view, nothing, "shift")
            if view.scale is not None:
                site = "it is multiplied with a constant before it is put beside data"
            if view.param in sites:
                site = "it is put beside data more than once"
            sites[view.param] = site if isinstance(site, str) else _part(site, axis, start, stop)
        start = stop
    return sites


def _part(site: Site, axis: int, start: int, stop: int) -> Site:
    shape = list(site.output.shape)
    shape[axis] = stop - start
    return replace(site, axes=Axes.of(shape), part=(axis, start, stop))
