"""`CandidateUse`: an operation that may be a use of a layer, and of which kind.

An operation that contracts, convolves, multiplies, adds or indexes a parameter is a candidate for a
use of a dense layer, a convolution, a scale, a shift or an embedding. A `CandidateUse` says which
values are the input and the output, and how to arrange them and the parameters alike for all layers
of a kind: positions first (examples, time, pixels), then heads (axes along which the weights
differ), then features. It becomes a `LayerUse` once it is known which uses form a layer.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from curvax._types import Array
from curvax.layers.detection.axes import Arrangement, Atom, Axes, joined, refined
from curvax.layers.detection.program import Node, Operand, Variable, dot_operands
from curvax.layers.tags import (
    LayerTag,
    conv2d_tag,
    conv_tag,
    dense_tag,
    embedding_tag,
    scale_and_shift_tag,
)
from curvax.layers.use import ConvolutionArguments, ParamUse, Slice

Reason = str
"""Why an operation on a parameter is not a use of a layer of a known kind."""


class Lookup(NamedTuple):
    """How rows of an embedding are looked up.

    Attributes:
        num_rows: Number of rows of the embedding.
        clipped: Whether an index out of range stands for the nearest row; otherwise for no row.
        column: Which column of the indices to use, if these have a trailing axis.
    """

    num_rows: int
    clipped: bool = False
    column: int | None = None

    def indices(self, x: Array) -> Array:
        """Return the indices of rows, with `num_rows` in place of those that stand for no row."""
        if self.column is not None:
            x = x[..., self.column]
        if self.clipped:
            return jnp.clip(x, 0, self.num_rows - 1)
        return jnp.where((x >= 0) & (x < self.num_rows), x, self.num_rows)


@dataclass(frozen=True)
class ParamView:
    """An operand that is a parameter, at most rearranged, sliced and scaled by a constant.

    Attributes:
        param: Index of the parameter.
        shape: Shape of the parameter.
        axes: Where the axes of the parameter are in the operand.
        operand: The operand.
        slices: Which part of the parameter it is; () for all of it.
        scale: The constant that it was multiplied with; None for one.
    """

    param: int
    shape: tuple[int, ...]
    axes: Axes
    operand: Operand
    slices: tuple[Slice, ...] = ()
    scale: Any = None

    def as_use(self, arrangement: Arrangement | None) -> ParamUse:
        """Return the `ParamUse` of a layer that arranges the parameter in this way."""
        if arrangement is not None and arrangement.is_trivial:
            arrangement = None
        return ParamUse(self.param, self.shape, self.slices, arrangement)


@dataclass(frozen=True)
class Layout:
    """The axes of a parameter by their role: loops, heads, inputs and outputs.

    A bias and a scale have no inputs (None).
    """

    loops: tuple[Atom, ...] = ()
    heads: tuple[Atom, ...] = ()
    inputs: tuple[Atom, ...] | None = None
    outputs: tuple[Atom, ...] = ()

    def arrangement(self, axes: Axes) -> Arrangement:
        """Return how to arrange the original parameter as (loops, heads, inputs, outputs).

        Roles that the parameter does not have get no axis.
        """
        groups = [group for group in (self.loops, self.heads) if group]
        groups += [] if self.inputs is None else [self.inputs]
        return Arrangement.of(axes.origin_dims(), [*groups, self.outputs])

    def swapped(self) -> "Layout":
        """Exchange inputs and outputs."""
        if self.inputs is None:
            return self
        return replace(self, inputs=self.outputs, outputs=self.inputs)


@dataclass(frozen=True, eq=False)
class CandidateUse:
    """An operation that may be a use of a layer.

    Attributes:
        tag: Tag of the kind of layer.
        node: The operation that computes the output.
        factors: Operands whose product is the input. Only a scale has more than one.
        output: Output of the layer.
        axes: Where the axes of the contraction, convolution, product, sum or lookup are in the
            output, which may have been rearranged since, before a bias was added.
        positions: Origins of `axes` that are positions.
        heads: Origins of `axes` that are heads.
        features: Origins of `axes` that are features.
        params: The parameters, in the order of the tag.
        layouts: The roles of the axes of each parameter.
        input_arrangement: Arranges the input; None if it is arranged like the output.
        convolution: The arguments of a convolution.
        kernel_arrangement: Arranges the kernel of a convolution as it is used.
        lookup: How an embedding is looked up.
        has_scale: Whether a `scale_and_shift_tag` has a scale.
        has_shift: Whether a `scale_and_shift_tag` has a shift.
        lifted_examples: Number of examples if the use is given an axis of examples that the program
            does not have (`Lifting`).
        output_slice: The slice of the node's output that is the output of the layer; None for all.
        unbiased: The same use before a bias was added.
    """

    tag: LayerTag
    node: Node
    factors: tuple[Operand, ...]
    output: Variable
    axes: Axes
    positions: tuple[int, ...]
    features: tuple[int, ...]
    params: tuple[ParamView, ...]
    layouts: tuple[Layout, ...]
    heads: tuple[int, ...] = ()
    input_arrangement: Arrangement | None = None
    convolution: ConvolutionArguments | None = None
    kernel_arrangement: Arrangement | None = None
    lookup: Lookup | None = None
    has_scale: bool = False
    has_shift: bool = False
    lifted_examples: int | None = None
    output_slice: Slice | None = None
    unbiased: "CandidateUse | None" = None

    @property
    def is_conv(self) -> bool:
        """Whether it is a convolution."""
        return self.convolution is not None

    @property
    def output_arrangement(self) -> Arrangement:
        """Arranges the output as (positions, heads, features)."""
        groups = [self.axes.atoms_of(self.positions), self.axes.atoms_of(self.features)]
        if self.heads:
            groups.insert(1, self.axes.atoms_of(self.heads))
        return Arrangement.of(self.axes.dims, groups)

    @property
    def tag_constants(self) -> dict[str, Any]:
        """The static parameters of the tag."""
        if self.convolution is not None:
            return self.convolution._asdict()
        if self.tag is scale_and_shift_tag:
            return {"has_scale": self.has_scale, "has_shift": self.has_shift}
        return {}

    def param_uses(self) -> tuple[ParamUse, ...]:
        """Return the parameters as the `LayerUse` describes them."""
        arrangements = [
            layout.arrangement(view.axes)
            for view, layout in zip(self.params, self.layouts, strict=True)
        ]
        if self.kernel_arrangement is not None:
            arrangements[0] = self.kernel_arrangement
        pairs = zip(self.params, arrangements, strict=True)
        return tuple(view.as_use(arrangement) for view, arrangement in pairs)


_BROADCAST = "it is broadcast along an axis before it is"
_MERGED = "one of its axes is merged with a broadcast one"


def dense_use(node: Node, weight: ParamView, index: int) -> CandidateUse | Reason:
    """Return the dense layer that a `dot_general` computes, or why it is none.

    `index` says which of the operands is the weight.
    """
    sides = dot_operands(node)
    side, input_side = sides[index], sides[1 - index]
    dims = weight.axes.dims
    if any(atom.origin is None for k in (*side.contracted, *side.free) for atom in dims[k]):
        return f"{_BROADCAST} multiplied with an input"
    # The weight is not broadcast along a batch axis of heads, and is along one of positions.
    is_head = [_is_param_axis(dims[axis]) for axis in side.batch]
    if None in is_head:
        return _MERGED
    num_batch = len(side.batch)
    heads = [k for k in range(num_batch) if is_head[k]]
    batch_positions = [k for k in range(num_batch) if not is_head[k]]
    # The output has the batch axes, then the free axes of the first operand and of the second.
    is_first = index == 0
    features = _range(num_batch + (0 if is_first else len(input_side.free)), len(side.free))
    positions = _range(num_batch + (len(side.free) if is_first else 0), len(input_side.free))
    x = node.inputs[1 - index]
    input_dims = Axes.of(x.shape).dims
    input_groups = [
        [*(input_side.batch[k] for k in batch_positions), *input_side.free],
        [input_side.batch[k] for k in heads],
        input_side.contracted,
    ]
    if not heads:
        del input_groups[1]
    of_input = [joined([input_dims[axis] for axis in group]) for group in input_groups]
    layout = Layout(
        loops=joined(weight.axes.looped),
        heads=joined([dims[side.batch[k]] for k in heads]),
        inputs=joined([dims[axis] for axis in side.contracted]),
        outputs=joined([dims[axis] for axis in side.free]),
    )
    (output,) = node.outputs
    return CandidateUse(
        tag=dense_tag,
        node=node,
        factors=(x,),
        output=output,
        axes=Axes.of(output.shape),
        positions=(*batch_positions, *positions),
        heads=tuple(heads),
        features=tuple(features),
        input_arrangement=Arrangement.of(input_dims, of_input),
        params=(weight,),
        layouts=(layout,),
    )


def _range(start: int, count: int) -> range:
    return range(start, start + count)


def elementwise_use(
    node: Node, param: ParamView, x: Operand, kind: Literal["scale", "shift"]
) -> CandidateUse | Reason:
    """Return the scale or shift of `x` that a product or sum computes, or why it is none.

    The parameter has been broadcast to the shape of the output.
    """
    (output,) = node.outputs
    features: list[int] = []
    for axis, dim in enumerate(param.axes.dims):
        is_feature = _is_param_axis(dim)
        if is_feature is None:
            return _MERGED
        if is_feature:
            features.append(axis)
    layout = Layout(
        loops=joined(param.axes.looped),
        outputs=joined([param.axes.dims[axis] for axis in features]),
    )
    return CandidateUse(
        tag=scale_and_shift_tag,
        node=node,
        factors=(x,),
        output=output,
        axes=Axes.of(output.shape),
        positions=tuple(axis for axis in range(len(output.shape)) if axis not in features),
        features=tuple(features),
        params=(param,),
        layouts=(layout,),
        has_scale=kind == "scale",
        has_shift=kind == "shift",
    )


def embedding_use(node: Node, embedding: ParamView) -> CandidateUse | Reason:
    """Return the embedding lookup that a `gather` computes, or why it is none."""
    _, indices = node.inputs
    (output,) = node.outputs
    numbers, sizes = node.params["dimension_numbers"], node.params["slice_sizes"]
    dims = embedding.axes.dims
    sliced = [axis for axis, size in enumerate(embedding.axes.shape) if sizes[axis] != size]
    starts = tuple(map(int, numbers.start_index_map))
    takes_rows = len(sliced) == 1 and sizes[sliced[0]] == 1 and sliced[0] in starts
    if not takes_rows or numbers.operand_batching_dims:
        return "slices of it are taken instead of whole rows"
    if any(atom.origin is None for dim in dims for atom in dim):
        return f"{_BROADCAST} indexed"
    (row,) = sliced
    # Axes that are not collapsed are in the output, in order; that of rows has size one there.
    kept = [axis for axis in range(len(dims)) if axis not in numbers.collapsed_slice_dims]
    pairs = zip(kept, map(int, numbers.offset_dims), strict=True)
    features = tuple(out_axis for axis, out_axis in pairs if axis != row)
    index_dims = Axes.of(indices.shape[:-1]).dims
    layout = Layout(
        loops=joined(embedding.axes.looped),
        inputs=dims[row],
        outputs=joined([dims[axis] for axis in range(len(dims)) if axis != row]),
    )
    is_clipped = "clip" in str(node.params.get("mode")).lower()
    return CandidateUse(
        tag=embedding_tag,
        node=node,
        factors=(indices,),
        output=output,
        axes=Axes.of(output.shape),
        positions=tuple(k for k in range(len(output.shape)) if k not in numbers.offset_dims),
        features=features,
        input_arrangement=Arrangement.of(index_dims, [joined(index_dims)]),
        params=(embedding,),
        layouts=(layout,),
        lookup=Lookup(embedding.axes.shape[row], is_clipped, starts.index(row)),
    )


def conv_use(node: Node, kernel: ParamView) -> CandidateUse | Reason:
    """Return the convolution that a `conv_general_dilated` computes, or why it is none."""
    images, _ = node.inputs
    (output,) = node.outputs
    arguments = ConvolutionArguments.of_equation(node.params)
    numbers, dims = arguments.dimension_numbers, kernel.axes.dims
    if any(atom.origin is None for dim in dims for atom in dim):
        return f"{_BROADCAST} convolved"
    out_axis, in_axis, *spatial = numbers.rhs_spec
    layout = Layout(
        loops=joined(kernel.axes.looped),
        inputs=joined([dims[axis] for axis in (*spatial, in_axis)]),
        outputs=dims[out_axis],
    )
    feature = numbers.out_spec[1]
    is_grouped = arguments.feature_group_count != 1 or arguments.batch_group_count != 1
    stacked = [layout.loops] if layout.loops else []
    return CandidateUse(
        tag=conv2d_tag if len(spatial) == 2 and not is_grouped else conv_tag,
        node=node,
        factors=(images,),
        output=output,
        axes=Axes.of(output.shape),
        positions=tuple(axis for axis in range(len(output.shape)) if axis != feature),
        features=(feature,),
        params=(kernel,),
        layouts=(layout,),
        convolution=arguments,
        kernel_arrangement=Arrangement.of(kernel.axes.origin_dims(), [*stacked, *dims]),
    )


def with_factor(use: CandidateUse, node: Node, axes: Axes, factor: Operand) -> CandidateUse | None:
    """Return a scale whose output is multiplied by a factor: `(r * s) * v` is `(r * v) * s`.

    Arguments:
        use: The scale.
        node: The product.
        axes: Where the axes of the scale's output are in the operand of the product.
        factor: The other operand.

    Returns:
        The scale with a further factor of its input; None if the operand is transposed or reshaped.
    """
    (output,) = node.outputs
    moved = [dim for dim in axes.dims if dim]
    if moved != [dim for dim in use.axes.dims if dim] or len(axes.dims) != len(use.axes.dims):
        return None
    features = tuple(
        axis for axis, dim in enumerate(axes.dims) if dim and dim[0].origin in use.features
    )
    return replace(
        use,
        node=node,
        factors=(*use.factors, factor),
        output=output,
        axes=Axes.of(output.shape),
        positions=tuple(axis for axis in range(len(output.shape)) if axis not in features),
        features=features,
    )


def with_bias(use: CandidateUse, node: Node, axes: Axes, bias: ParamView) -> CandidateUse | None:
    """Return a use with a bias that is added to its output.

    The axes of a bias are the features, and the heads if there are any. It belongs to a parameter
    that the use does not have yet: slices of one parameter stay separate uses, so that no layer has
    a parameter twice.

    Arguments:
        use: The use without a bias.
        node: The sum.
        axes: Where the axes of the use's output are in the operand of the sum.
        bias: The parameter, broadcast to the shape of the sum.

    Returns:
        The use with the bias; None if the parameter is not a bias of the use.
    """
    if any(view.param == bias.param for view in use.params):
        return None
    matched: dict[Atom, Atom] = {}
    for output_dim, bias_dim in zip(axes.dims, bias.axes.dims, strict=True):
        is_param_axis = _is_param_axis(bias_dim)
        if is_param_axis is None:
            return None
        if not is_param_axis:
            continue
        pairs = refined(output_dim, bias_dim)
        if pairs is None or [of_output for of_output, _ in pairs] != list(output_dim):
            return None
        matched.update(pairs)
    heads, features = axes.atoms_of(use.heads), axes.atoms_of(use.features)
    if set(matched) != {*heads, *features}:
        return None
    loop_sizes = lambda view: [[atom.size for atom in dim] for dim in view.axes.looped]
    if loop_sizes(bias) != loop_sizes(use.params[0]):
        return None
    of_heads, of_features = (tuple(matched[atom] for atom in atoms) for atoms in (heads, features))
    refined_axes = replace(bias.axes, dims=((*of_heads, *of_features),))
    layout = Layout(loops=joined(bias.axes.looped), heads=of_heads, outputs=of_features)
    (output,) = node.outputs
    return replace(
        use,
        node=node,
        output=output,
        axes=axes,
        params=(*use.params, replace(bias, axes=refined_axes)),
        layouts=(*use.layouts, layout),
        has_shift=use.tag is scale_and_shift_tag,
        unbiased=use,
    )


def _is_param_axis(dim: tuple[Atom, ...]) -> bool | None:
    """Return whether an axis is one of the parameter; False if broadcast, None if partly."""
    kinds = {atom.origin is not None for atom in dim}
    return None if len(kinds) == 2 else kinds == {True}
