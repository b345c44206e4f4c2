"""Which operations are layers: dense, convolution, embedding, scale and shift.

A `Site` is one place where an operation meets parameters in a way that is known: contracted with an
input, convolved with one, multiplied, added, indexed. It says which values are the input and the
output there, and how to bring these, and the parameters, into the order that all layers of a kind
share: positions first (examples, time, pixels: whatever the layer is applied at), then, for
weights that differ from head to head or expert to expert, that axis, and features last.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp

from curvax._types import Array
from curvax.layers.detection.axes import Arrangement, Atom, Axes
from curvax.layers.detection.program import Node, Operand, Variable
from curvax.layers.tags import (
    LayerTag,
    conv2d_tag,
    conv_tag,
    dense_tag,
    embedding_tag,
    scale_and_shift_tag,
)
from curvax.layers.use import CONVOLUTION_ARGUMENTS, ParamUse, Slice


class Lookup(NamedTuple):
    """How rows of a table are looked up: by which column of indices, if these have several.

    An index outside of the table stands for the nearest row if it is `clipped`, else for no row.
    """

    number: int
    clipped: bool = False
    column: int | None = None

    def indices(self, x: Array) -> Array:
        """Return the indices of rows; those outside of the table are the number of rows."""
        if self.column is not None:
            x = x[..., self.column]
        if self.clipped:
            return jnp.clip(x, 0, self.number - 1)
        return jnp.where((x >= 0) & (x < self.number), x, self.number)


@dataclass(frozen=True)
class ParamView:
    """A parameter, re-arranged: its number, where its axes have gone, and the operand it is.

    `cuts` say which part of it, if it is not the whole, and `scale` which constant it was
    multiplied with.
    """

    param: int
    shape: tuple[int, ...]
    axes: Axes
    operand: Operand
    cuts: tuple[Slice, ...] = ()
    scale: Any = None


@dataclass(frozen=True)
class Layout:
    """The axes of a parameter that play a part: for loops, heads, inputs and outputs, in order.

    A bias or a scale has none for inputs.
    """

    loops: tuple[Atom, ...] = ()
    heads: tuple[Atom, ...] = ()
    inputs: tuple[Atom, ...] | None = None
    outputs: tuple[Atom, ...] = ()

    def arrangement(self, axes: Axes) -> Arrangement:
        """How to bring the parameter as it started into (loops, heads, inputs, outputs).

        Without loops and heads it has no axes for them, and a bias none for inputs.
        """
        groups = [group for group in (self.loops, self.heads) if group]
        groups += [] if self.inputs is None else [self.inputs]
        return Arrangement.of(axes.origin_dims(), [*groups, self.outputs])

    def swapped(self) -> "Layout":
        """With inputs for outputs."""
        if self.inputs is None:
            return self
        return replace(self, inputs=self.outputs, outputs=self.inputs)


@dataclass(frozen=True, eq=False)
class Site:
    """A place where a layer is applied.

    `output` is what the layer computes there, `axes` says where the axes of what the operation
    itself returned are in it. `positions`, `heads` and `features` number these axes.
    """

    tag: LayerTag
    node: Node
    factors: tuple[Operand, ...]
    """The input is the product of these; there is more than one only for a scale."""
    output: Variable
    axes: Axes
    positions: tuple[int, ...]
    heads: tuple[int, ...]
    features: tuple[int, ...]
    input_arrangement: Arrangement | None
    params: tuple[ParamView, ...]
    layouts: tuple[Layout, ...]
    convolution: Mapping[str, Any] | None = None
    """The arguments of a convolution."""
    kernel: Arrangement | None = None
    """How to bring the kernel of a convolution into the shape that it is used in."""
    rows: "Lookup | None" = None
    """How rows of a table are looked up."""
    has_scale: bool = False
    has_shift: bool = False
    lifted: int | None = None
    """The number of examples, if their axis is to be given to the use (`Lifting`)."""
    part: tuple[int, int, int] | None = None
    """Of what is computed there, what is along an axis from one number to another; None for all."""
    unbiased: "Site | None" = None
    """The same site before a bias joined it."""

    @property
    def is_conv(self) -> bool:
        """Whether it is a convolution."""
        return self.convolution is not None

    @property
    def output_arrangement(self) -> Arrangement:
        """How to bring the output into (positions, heads, features)."""
        groups = [self._atoms(self.positions), self._atoms(self.heads), self._atoms(self.features)]
        if not self.heads:
            del groups[1]
        return Arrangement.of(self.axes.dims, groups)

    def param_uses(self) -> tuple[ParamUse, ...]:
        """The parameters, as the use of the layer has them."""
        found: list[ParamUse] = []
        for number, (view, layout) in enumerate(zip(self.params, self.layouts, strict=True)):
            is_kernel = self.kernel is not None and number == 0
            arrangement = self.kernel if is_kernel else layout.arrangement(view.axes)
            plain = arrangement is None or arrangement.is_trivial
            found.append(
                ParamUse(view.param, view.shape, view.cuts, None if plain else arrangement)
            )
        return tuple(found)

    def _atoms(self, axes: Sequence[int]) -> list[Atom]:
        found = [atom for atom in self.axes.atoms if atom.origin in axes]
        return sorted(found, key=lambda atom: (axes.index(atom.origin), -atom.stride))


def dense_site(node: Node, weight: ParamView, is_left: bool) -> Site | str:
    """The product of a weight with an input; or why it is not a dense layer."""
    left, right = node.inputs
    other = right if is_left else left
    contracted, batched = node.params["dimension_numbers"]
    (mine, theirs) = contracted if is_left else contracted[::-1]
    (my_batch, their_batch) = batched if is_left else batched[::-1]
    mine, theirs, my_batch, their_batch = (
        tuple(map(int, axes)) for axes in (mine, theirs, my_batch, their_batch)
    )
    dims = weight.axes.dims
    free = [axis for axis in range(len(dims)) if axis not in (*mine, *my_batch)]
    used = [atom for axis in (*mine, *free) for atom in dims[axis]]
    if any(atom.origin is None for atom in used):
        return "it is repeated along an axis before it is multiplied with an input"
    is_head = [_is_own(dims[axis]) for axis in my_batch]
    if None in is_head:
        return "an axis of it is merged with one along which it is repeated"
    # The axes of the result: batched ones, those of the left that are left, those of the right.
    others = [axis for axis in range(len(other.shape)) if axis not in (*theirs, *their_batch)]
    num_batch = len(my_batch)
    my_start = num_batch + (0 if is_left else len(others))
    their_start = num_batch + (len(free) if is_left else 0)
    features = range(my_start, my_start + len(free))
    heads = [k for k in range(num_batch) if is_head[k]]
    positions = [k for k in range(num_batch) if not is_head[k]]
    their_axes = Axes.of(other.shape).dims
    at_position = [their_axes[their_batch[k]] for k in positions]
    at_position += [their_axes[axis] for axis in others]
    positions += range(their_start, their_start + len(others))
    groups = [_joined(at_position), _joined([their_axes[their_batch[k]] for k in heads])]
    groups.append(_joined([their_axes[axis] for axis in theirs]))
    layout = Layout(
        loops=_joined(weight.axes.looped),
        heads=_joined([dims[my_batch[k]] for k in heads]),
        inputs=_joined([dims[axis] for axis in mine]),
        outputs=_joined([dims[axis] for axis in free]),
    )
    if not heads:
        del groups[1]
    (output,) = node.outputs
    return Site(
        dense_tag,
        node,
        (other,),
        output,
        Axes.of(output.shape),
        tuple(positions),
        tuple(heads),
        tuple(features),
        Arrangement.of(their_axes, groups),
        (weight,),
        (layout,),
    )


def elementwise_site(node: Node, param: ParamView, other: Operand, kind: str) -> Site | str:
    """A parameter that is multiplied with or added to an input; or why that is no layer."""
    (output,) = node.outputs
    features: list[int] = []
    for axis, dim in enumerate(param.axes.dims):
        own = _is_own(dim)
        if own is None:
            return "an axis of it is merged with one along which it is repeated"
        if own:
            features.append(axis)
    positions = tuple(axis for axis in range(len(output.shape)) if axis not in features)
    layout = Layout(
        loops=_joined(param.axes.looped),
        outputs=_joined([param.axes.dims[axis] for axis in features]),
    )
    return Site(
        scale_and_shift_tag,
        node,
        (other,),
        output,
        Axes.of(output.shape),
        positions,
        (),
        tuple(features),
        None,
        (param,),
        (layout,),
        has_scale=kind == "scale",
        has_shift=kind == "shift",
    )


def embedding_site(node: Node, table: ParamView) -> Site | str:
    """Rows that are looked up in a table; or why that is no embedding."""
    _, indices = node.inputs
    (output,) = node.outputs
    numbers, sizes = node.params["dimension_numbers"], node.params["slice_sizes"]
    dims = table.axes.dims
    cut = [axis for axis, full in enumerate(table.axes.shape) if sizes[axis] != full]
    starts = tuple(map(int, numbers.start_index_map))
    if len(cut) != 1 or sizes[cut[0]] != 1 or cut[0] not in starts or numbers.operand_batching_dims:
        return "parts of it are cut out, not whole rows looked up"
    if any(atom.origin is None for dim in dims for atom in dim):
        return "it is repeated along an axis before it is indexed"
    (row,) = cut
    # Axes that are not collapsed are in the result, one after the other; a row has size one there.
    kept = [axis for axis in range(len(dims)) if axis not in numbers.collapsed_slice_dims]
    features = tuple(
        int(place) for axis, place in zip(kept, numbers.offset_dims, strict=True) if axis != row
    )
    positions = tuple(axis for axis in range(len(output.shape)) if axis not in numbers.offset_dims)
    layout = Layout(
        loops=_joined(table.axes.looped),
        inputs=dims[row],
        outputs=_joined([dims[axis] for axis in range(len(dims)) if axis != row]),
    )
    their_axes = Axes.of(indices.shape[:-1]).dims
    return Site(
        embedding_tag,
        node,
        (indices,),
        output,
        Axes.of(output.shape),
        positions,
        (),
        features,
        Arrangement.of(their_axes, [_joined(their_axes)]),
        (table,),
        (layout,),
        rows=Lookup(table.axes.shape[row], _is_clipped(node), starts.index(row)),
    )


def _is_clipped(node: Node) -> bool:
    """Whether an index outside of a table stands for the nearest row."""
    return "clip" in str(node.params.get("mode")).lower()


def conv_site(node: Node, kernel: ParamView) -> Site | str:
    """A convolution of an input with a kernel; or why it is not one."""
    images, _ = node.inputs
    (output,) = node.outputs
    numbers, dims = node.params["dimension_numbers"], kernel.axes.dims
    if any(atom.origin is None for dim in dims for atom in dim):
        return "it is repeated along an axis before it is convolved"
    out_axis, in_axis, *spatial = numbers.rhs_spec
    layout = Layout(
        loops=_joined(kernel.axes.looped),
        inputs=_joined([dims[axis] for axis in (*spatial, in_axis)]),
        outputs=dims[out_axis],
    )
    feature = numbers.out_spec[1]
    positions = tuple(axis for axis in range(len(output.shape)) if axis != feature)
    grouped = node.params["feature_group_count"] != 1 or node.params["batch_group_count"] != 1
    stacked = [layout.loops] if layout.loops else []
    return Site(
        conv2d_tag if len(spatial) == 2 and not grouped else conv_tag,
        node,
        (images,),
        output,
        Axes.of(output.shape),
        positions,
        (),
        (feature,),
        None,
        (kernel,),
        (layout,),
        convolution={name: node.params[name] for name in CONVOLUTION_ARGUMENTS},
        kernel=Arrangement.of(kernel.axes.origin_dims(), [*stacked, *dims]),
    )


def scaled_further(site: Site, node: Node, axes: Axes, other: Operand) -> Site | None:
    """A scale whose output is multiplied with something: `(r * s) * v` is `(r * v) * s`.

    `axes` are those of the scale's output there.
    """
    (output,) = node.outputs
    moved = [dim for dim in axes.dims if dim]
    if moved != [dim for dim in site.axes.dims if dim] or len(axes.dims) != len(site.axes.dims):
        return None
    features = tuple(
        place for place, dim in enumerate(axes.dims) if dim and dim[0].origin in site.features
    )
    positions = tuple(axis for axis in range(len(output.shape)) if axis not in features)
    return replace(
        site,
        node=node,
        factors=(*site.factors, other),
        output=output,
        axes=Axes.of(output.shape),
        positions=positions,
        features=features,
    )


def join(site: Site, node: Node, axes: Axes, bias: ParamView) -> Site | None:
    """The site with a bias that is added to its output by that node; None if it is not one.

    `axes` are those of the output there. A bias has the features for its axes, and the heads too
    if there are some. It is of another parameter than the weights: what is cut from the same one
    stays a site of its own, so that no layer has a parameter twice.
    """
    if any(view.param == bias.param for view in site.params):
        return None
    matched: dict[Atom, Atom] = {}
    for mine, theirs in zip(axes.dims, bias.axes.dims, strict=True):
        own = _is_own(theirs)
        if own is None:
            return None
        pairs = _match(mine, theirs) if own else {}
        if pairs is None:
            return None
        matched |= pairs
    heads = _ordered(axes, site.heads)
    features = _ordered(axes, site.features)
    if set(matched) != {*heads, *features}:
        return None
    loops = _joined(bias.axes.looped)
    lengths = lambda view: [[atom.size for atom in dim] for dim in view.axes.looped]
    if lengths(bias) != lengths(site.params[0]):
        return None
    own = tuple(matched[atom] for atom in (*heads, *features))
    cut = len(heads)
    refined = replace(bias.axes, dims=(own,))
    layout = Layout(loops=loops, heads=own[:cut], outputs=own[cut:])
    (output,) = node.outputs
    return replace(
        site,
        node=node,
        output=output,
        axes=axes,
        params=(*site.params, replace(bias, axes=refined)),
        layouts=(*site.layouts, layout),
        has_shift=site.tag is scale_and_shift_tag,
        unbiased=site,
    )


def _match(mine: Sequence[Atom], theirs: Sequence[Atom]) -> dict[Atom, Atom] | None:
    """Each of my atoms with its own part of theirs, which are split where need be."""
    rest, pairs = list(theirs), {}
    for atom in mine:
        if not rest or not atom.size or rest[0].size % atom.size:
            return None
        part = rest.pop(0)
        if part.size > atom.size:
            part, minor = part.split(atom.size)
            rest.insert(0, minor)
        pairs[atom] = part
    return None if rest else pairs


def _ordered(axes: Axes, numbers: Sequence[int]) -> list[Atom]:
    found = [atom for atom in axes.atoms if atom.origin in numbers]
    return sorted(found, key=lambda atom: (numbers.index(atom.origin), -atom.stride))


def _is_own(dim: Sequence[Atom]) -> bool | None:
    """Whether an axis is one of the parameter: False if it is repeated along it, None if both."""
    own = {atom.origin is not None for atom in dim}
    return None if len(own) == 2 else own == {True}


def _joined(dims: Sequence[Sequence[Atom]]) -> tuple[Atom, ...]:
    return tuple(atom for dim in dims for atom in dim)
