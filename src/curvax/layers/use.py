"""`LayerUse`: one use of a layer's parameters, as detection found it and blocks consume it.

A layer is used wherever an operation meets its parameters: once, at several places of a program,
or in each step of a loop. Detection describes each use by a frozen `LayerUse`, with one class for
each kind of layer. It travels with the tag of the use: whoever reads the tag knows which parameters
are used and how, which examples the use is about, and what the layer computes, and has nothing to
search for.

Inputs and outputs of a use that was found are brought into the form that all layers of a kind
share: `(positions, *heads, features)`. Positions are whatever the layer is applied at (examples,
time, pixels), heads are axes along which weights differ. Convolutions, and layers that the user
tags, keep the shapes of the model.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from curvax import _jax
from curvax._types import Array
from curvax.layers.detection.axes import Arrangement, Axes

UNKNOWN = "examples unknown"
"""How a remark begins on a layer of which it is not known which examples it is applied to."""

INTERACT = "examples interact, by"
NOT_FOLLOWED = "they cannot be followed through"


# The examples of a use.


@dataclass(frozen=True)
class ExamplesAt:
    """Which examples a use is about, and where they are among its positions.

    Attributes:
        number: the number of examples in each step of the loops around.
        split: splits the axis of positions (or that of the batch, where the model's shapes are
            kept) into `(examples, positions of each)`; None if it has examples alone.
        loops: for each loop around, outermost first, a number of its own if its steps are about
            different examples; None if they are about the same.
        total: the number of all examples.
        first: the first example of this use.
        count: the number of examples of this use, in all steps.
        in_order: whether they are in order along all loops over examples, outermost first, and then
            in each step.
        unknown: why none of this is known, if so.
        problem: why one example does not stay apart from others on the way to the losses, if so.
    """

    number: int = 1
    split: Arrangement | None = None
    loops: tuple[int | None, ...] = ()
    total: int = 1
    first: int = 0
    count: int = 1
    in_order: bool = True
    unknown: str = ""
    problem: str = ""

    @classmethod
    def along_axis(cls, number: int, num_loops: int = 0) -> "ExamplesAt":
        """All examples along one axis, the same in each step of the loops around."""
        return cls(number, loops=(None,) * num_loops, total=number, count=number)

    @property
    def interaction(self) -> str:
        """By what examples interact, if that is known."""
        return self.problem if self.problem.startswith(INTERACT) else ""

    @property
    def remark(self) -> str:
        """What to tell the user about it."""
        if self.unknown:
            interact = self.unknown.startswith(INTERACT)
            return self.unknown if interact else f"{UNKNOWN}: {self.unknown}"
        not_followed = self.problem.startswith(NOT_FOLLOWED)
        return f"{UNKNOWN}: {self.problem}" if not_followed else self.problem


def same_examples(at: Sequence[ExamplesAt]) -> dict[Any, list[int]] | str:
    """Group uses, by number, that are about the same examples; or say why that is not known.

    No two groups have an example in common.
    """
    unknown = next((each.remark for each in at if each.unknown), "")
    if unknown:
        return unknown
    groups: dict[Any, list[int]] = {}
    for number, each in enumerate(at):
        order = () if each.in_order else each.loops
        groups.setdefault((each.total, each.first, each.count, order), []).append(number)
    pairs = [(a, b) for a, b in itertools.combinations(groups, 2) if a[0] == b[0]]
    if any(a[1] < b[1] + b[2] and b[1] < a[1] + a[2] for a, b in pairs):
        return f"{UNKNOWN}: they are in another order at another place"
    return groups


# The parameters and the loops of a use.

Slice = tuple[int, int, int]
"""A part of a parameter: along which axis, from where, to where."""


@dataclass(frozen=True)
class ParamUse:
    """A parameter as a layer uses it.

    Attributes:
        index: which of the function's parameters it is.
        shape: its shape, as the function has it.
        slices: the part that is used, if it is not all of the parameter.
        arrangement: brings that part into the form that all layers of a kind share: a leading axis
            for the steps of the loops that take slices of it, then `(*heads, inputs, outputs)`.
            None if it is in that form already.
        axes: the axes of the operand of the tag, by those of the parameter.
        scale: the number that the operand was multiplied with, if it is known.
    """

    index: int
    shape: tuple[int, ...]
    slices: tuple[Slice, ...] = ()
    arrangement: Arrangement | None = None
    axes: Axes | None = None
    scale: float | None = None

    @property
    def sliced_shape(self) -> tuple[int, ...]:
        """The shape of the part that is used."""
        sizes = list(self.shape)
        for axis, start, stop in self.slices:
            sizes[axis] = stop - start
        return tuple(sizes)

    def take(self, param: Array) -> Array:
        """The part that is used, arranged."""
        for axis, start, stop in self.slices:
            param = lax.slice_in_dim(param, start, stop, axis=axis)
        return param if self.arrangement is None else self.arrangement.apply(param)

    def put(self, part: Array) -> Array:
        """Transpose of `take`: zero where the parameter is not used."""
        shape = self.sliced_shape
        param = part.reshape(shape) if self.arrangement is None else self.arrangement.undo(part)
        for axis, start, stop in reversed(self.slices):
            pads = [(0, 0, 0)] * param.ndim
            pads[axis] = (start, self.shape[axis] - stop, 0)
            param = lax.pad(param, jnp.zeros((), param.dtype), pads)
        return param


@dataclass(frozen=True)
class Loop:
    """A loop around a use: its length, and whether its steps take slices of the parameters."""

    length: int
    takes_slices: bool = False


# Uses of layers.


@dataclass(frozen=True)
class LayerUse:
    """One use of a layer.

    Attributes:
        kind: the name of the tag.
        layer: the name of the tag of the layer, which is another one for a table that is also used
            as a matrix.
        params: the parameters, in the order of the tag.
        inputs: the shapes and dtypes of the inputs at the tag, in each step of the loops around.
        outputs: those of the outputs.
        loops: the loops around, outermost first.
        examples: the examples that the use is about.
        input_arrangement: brings an input of the model into the form of the tag; None if the tag
            has it as it is.
        output_arrangement: the same for an output.
        number: tells the uses of a layer apart that are alike in all else.
        uncovered: how many further uses of its parameters the layer does not cover.
    """

    kind: str
    layer: str
    params: tuple[ParamUse, ...]
    inputs: tuple[jax.ShapeDtypeStruct, ...] = ()
    outputs: tuple[jax.ShapeDtypeStruct, ...] = ()
    loops: tuple[Loop, ...] = ()
    examples: ExamplesAt = field(default_factory=ExamplesAt)
    input_arrangement: Arrangement | None = None
    output_arrangement: Arrangement | None = None
    number: int = 0
    uncovered: int = 0

    @property
    def is_conv(self) -> bool:
        """Whether images are convolved with a kernel."""
        return isinstance(self, ConvolutionUse)

    @property
    def is_known(self) -> bool:
        """Whether it is known what layers of its kind compute."""
        return True

    @property
    def is_arranged(self) -> bool:
        """Whether inputs and outputs have all positions along their first axis."""
        return self.output_arrangement is not None

    @property
    def remark_on_coverage(self) -> str:
        """What to tell the user about uses of the parameters that are not those of the layer."""
        count = self.uncovered
        return f"{count} more uses of its parameters are not covered by the layer" * bool(count)

    @property
    def stacked(self) -> tuple[bool, ...]:
        """Which of the loops around take slices of the parameters."""
        return tuple(loop.takes_slices for loop in self.loops)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of the loops around."""
        return tuple(loop.length for loop in self.loops)

    @property
    def stack(self) -> tuple[int, ...]:
        """The lengths of the loops that take slices of the parameters."""
        return tuple(loop.length for loop in self.loops if loop.takes_slices)

    @property
    def repeats(self) -> int:
        """The number of steps of loops that use the same parameters."""
        return math.prod(loop.length for loop in self.loops if not loop.takes_slices)

    @property
    def cuts(self) -> tuple[tuple[Slice, ...], ...]:
        """The part of each parameter that is used."""
        return tuple(param.slices for param in self.params)

    def of_part(self) -> "LayerUse":
        """Return the use as one of parameters that are just the parts which are used here."""
        return replace(
            self,
            params=tuple(replace(p, shape=p.sliced_shape, slices=()) for p in self.params),
        )

    @property
    def input(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of the first input, in each step."""
        return self.inputs[0]

    @property
    def output(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of the first output, in each step."""
        return self.outputs[0]

    @property
    def num_examples(self) -> int | None:
        """The number of examples in each step; None if that is not known."""
        return None if self.examples.unknown else self.examples.number

    @property
    def num_counted(self) -> int:
        """The number of examples in each step; that of positions, if the former is not known."""
        count = self.num_examples
        return self.output.shape[self.batch_axis(is_output=True)] if count is None else count

    @property
    def example_loops(self) -> tuple[bool, ...]:
        """Which of the loops around are about other examples in each step.

        Where that is not known, all that share the parameters count as such.
        """
        if self.examples.unknown:
            return tuple(not has for has in self.stacked)
        return tuple(number is not None for number in self.examples.loops)

    # Parameters.

    def take(self, params: Sequence[Array]) -> list[Array]:
        """Parameters as the layer uses them, with leading axes for stacks."""
        taken = [own.take(param) for own, param in zip(self.params, params, strict=True)]
        return [x.reshape(*self.stack, *x.shape[1:]) for x in taken] if self.stack else taken

    def put(self, taken: Sequence[Array]) -> list[Array]:
        """Transpose of `take`: zero where the layer does not use a parameter."""
        if self.stack:
            taken = [x.reshape(-1, *x.shape[len(self.stack) :]) for x in taken]
        return [own.put(x) for own, x in zip(self.params, taken, strict=True)]

    @functools.cached_property
    def slice_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the parameters as the layer uses them, in each step."""
        shapes = [jax.ShapeDtypeStruct(param.shape, jnp.float32) for param in self.params]
        taken = jax.eval_shape(self.take, shapes)
        return [x.shape[len(self.stack) :] for x in taken]

    # Examples.

    def batch_axis(self, is_output: bool) -> int:
        """The axis of an input or output along which there are examples."""
        del is_output
        return 0

    def split_examples(self, x: Array, axis: int = 0) -> Array:
        """Split the axis of positions into `(examples, positions of each)`.

        Where it is not known which positions belong to one example, each counts as one.
        """
        split = self.examples.split
        if self.examples.unknown or split is None:
            return jnp.expand_dims(x, axis + 1)
        return split.with_axes(x.shape[:axis], x.shape[axis + 1 :]).apply(x)

    def by_example(self, x: Array, is_output: bool) -> Array:
        """Return an input or output with a leading axis of examples."""
        axis = self.batch_axis(is_output)
        return jnp.moveaxis(self.split_examples(jnp.moveaxis(x, axis, 0)), 1, 1 + axis)

    def as_in_model(self, x: Array, is_output: bool) -> Array:
        """Return an input or output in the model's own shape; axes of loops stay in front."""
        arrangement = self.output_arrangement if is_output else self.input_arrangement
        if arrangement is None:
            return x
        return arrangement.with_axes(x.shape[: len(self.loops)]).undo(x)

    def as_at_tag(self, x: Array, is_output: bool) -> Array:
        """Inverse of `as_in_model`."""
        arrangement = self.output_arrangement if is_output else self.input_arrangement
        if arrangement is None:
            return x
        return arrangement.with_axes(x.shape[: len(self.loops)]).apply(x)

    def split_shape(
        self, shape: Sequence[int], is_output: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Split a shape of inputs or outputs into examples and positions, and features."""
        cut = max(len(shape) - self._num_feature_axes(is_output), 0)
        return tuple(shape[:cut]), tuple(shape[cut:])

    def _num_feature_axes(self, is_output: bool) -> int:
        del is_output  # One of the axes of weights is that of the outputs, or of the inputs.
        return max(map(len, self.slice_shapes)) - 1

    def of_data(self, x: Array, cotangent: Array) -> "LayerUse":
        """Return the use for data of another shape: axes of stacks, then examples and positions."""
        skip = len(self.stack)
        shapes = [jax.ShapeDtypeStruct(y.shape[skip:], y.dtype) for y in (x, cotangent)]
        axis = self.batch_axis(is_output=True)
        return replace(
            self,
            inputs=(shapes[0],),
            outputs=(shapes[1],),
            loops=tuple(Loop(length, takes_slices=True) for length in self.stack),
            examples=ExamplesAt.along_axis(shapes[1].shape[axis], skip),
            input_arrangement=None,
            output_arrangement=None,
        )

    # What the layer computes.

    def compute(self, x: Array, params: Sequence[Array]) -> Array:
        """Compute one step of the layer, from its input and parameters as `take` has them."""
        del x, params
        raise NotImplementedError(
            f"curvax: nothing is known of what a layer tagged {self.kind} computes. Use a block "
            f"that needs only its gradient, such as curvax.NaiveDiagonal, or one of your own that "
            f"overrides update_curvature_matrix_estimate."
        )

    def gradients(self, x: Array, cotangent: Array) -> list[Array]:
        """Return per-example gradients of one step: `(examples, *shape of the parameter)`."""
        return self.gradients_by_example(
            self.by_example(x, is_output=False), self.by_example(cotangent, is_output=True)
        )

    def gradients_by_example(self, x: Array, cotangent: Array) -> list[Array]:
        """Return `gradients`, from inputs and cotangents with a leading axis of examples."""
        zeros = [jnp.zeros(shape, cotangent.dtype) for shape in self.slice_shapes]
        # Else their gradients would be summed over the devices of a `shard_map`.
        params = [_jax.varying_like(zero, x, cotangent) for zero in zeros]

        def of_example(x: Array, cotangent: Array) -> list[Array]:
            if jnp.issubdtype(x.dtype, jnp.floating):
                x = x.astype(cotangent.dtype)
            return jax.vjp(lambda params: self.compute(x, params), params)[1](cotangent)[0]

        return jax.vmap(of_example)(x, cotangent)


@dataclass(frozen=True)
class DenseUse(LayerUse):
    """A product with weights: `(positions, *heads, inputs)` to `(positions, *heads, outputs)`."""

    def compute(self, x: Array, params: Sequence[Array]) -> Array:
        weight, *bias = params
        y = jnp.einsum("...hi,hio->...ho", x, weight) if weight.ndim == 3 else x @ weight
        return y + jnp.broadcast_to(bias[0], y.shape) if bias else y


@dataclass(frozen=True)
class EmbeddingUse(LayerUse):
    """A table of which rows are looked up; an index that is the number of rows is none of them."""

    def compute(self, x: Array, params: Sequence[Array]) -> Array:
        return jnp.take(params[0], x, axis=0, mode="fill", fill_value=0)

    def _num_feature_axes(self, is_output: bool) -> int:
        return super()._num_feature_axes(is_output) if is_output else 0


@dataclass(frozen=True)
class ScaleAndShiftUse(LayerUse):
    """A scale, a shift or both, of the shape of the features."""

    has_scale: bool = True
    has_shift: bool = True

    def compute(self, x: Array, params: Sequence[Array]) -> Array:
        rest = list(params)
        if self.has_scale:
            x = x * jnp.broadcast_to(rest.pop(0), x.shape)
        return x + jnp.broadcast_to(rest.pop(0), x.shape) if self.has_shift else x

    def _num_feature_axes(self, is_output: bool) -> int:
        del is_output
        return max(map(len, self.slice_shapes))


@dataclass(frozen=True)
class ConvolutionUse(LayerUse):
    """A convolution, with the arguments of `lax.conv_general_dilated` that it is computed by."""

    window_strides: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    lhs_dilation: tuple[int, ...] = ()
    rhs_dilation: tuple[int, ...] = ()
    dimension_numbers: Any = None
    feature_group_count: int = 1
    batch_group_count: int = 1

    @property
    def convolution(self) -> dict[str, Any]:
        """The arguments of `lax.conv_general_dilated`."""
        return {name: getattr(self, name) for name in CONVOLUTION_ARGUMENTS}

    def batch_axis(self, is_output: bool) -> int:
        numbers = self.dimension_numbers
        return (numbers.out_spec if is_output else numbers.lhs_spec)[0]

    def split_shape(
        self, shape: Sequence[int], is_output: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        axis = self.batch_axis(is_output)
        return tuple(shape[axis : axis + 1]), (*shape[:axis], *shape[axis + 1 :])

    def compute(self, x: Array, params: Sequence[Array]) -> Array:
        kernel, *bias = params
        y = lax.conv_general_dilated(x, kernel, **self.convolution)
        channel = self.dimension_numbers.out_spec[1]
        return y + lax.broadcast_in_dim(bias[0], y.shape, (channel,)) if bias else y

    def gradients_by_example(self, x: Array, cotangent: Array) -> list[Array]:
        if self.batch_group_count != 1:
            raise NotImplementedError(
                "curvax: a convolution with batch_group_count has no gradients of single examples. "
                "Use a Kronecker-factored block for it."
            )
        return super().gradients_by_example(x, cotangent)


CONVOLUTION_ARGUMENTS = (
    "window_strides",
    "padding",
    "lhs_dilation",
    "rhs_dilation",
    "dimension_numbers",
    "feature_group_count",
    "batch_group_count",
)


def convolution_arguments(
    constants: dict[str, Any], images: Sequence[int], kernel: Sequence[int]
) -> dict[str, Any]:
    """Complete the arguments of a convolution that a tag was given, as `register_conv2d` says.

    Arguments:
        constants: The parameters of the tag.
        images: The shape of the input.
        kernel: The shape of the kernel.
    """
    spatial = len(images) - 2
    numbers = constants.get("dimension_numbers")
    if not isinstance(numbers, lax.ConvDimensionNumbers):
        letters = "DHW"[3 - spatial :]
        numbers = numbers or (f"N{letters}C", f"{letters}IO", f"N{letters}C")
        numbers = lax.conv_dimension_numbers(tuple(images), tuple(kernel), numbers)
    ones = (1,) * spatial
    strides = tuple(constants.get("window_strides") or constants.get("strides") or ones)
    rhs_dilation = tuple(constants.get("rhs_dilation") or ones)
    padding = constants.get("padding", "SAME")
    if isinstance(padding, str):
        sizes = [kernel[axis] for axis in numbers.rhs_spec[2:]]
        dilated = [(k - 1) * d + 1 for k, d in zip(sizes, rhs_dilation, strict=True)]
        pixels = [images[axis] for axis in numbers.lhs_spec[2:]]
        padding = lax.padtype_to_pads(pixels, dilated, strides, padding)
    return {
        "window_strides": strides,
        "padding": tuple(map(tuple, padding)),
        "lhs_dilation": tuple(constants.get("lhs_dilation") or ones),
        "rhs_dilation": rhs_dilation,
        "dimension_numbers": numbers,
        "feature_group_count": constants.get("feature_group_count", 1),
        "batch_group_count": constants.get("batch_group_count", 1),
    }


@dataclass(frozen=True)
class GenericUse(LayerUse):
    """A parameter of which nothing is known: what is tagged is the parameter itself."""


@dataclass(frozen=True)
class CustomUse(LayerUse):
    """A layer of a kind that the user defines.

    Attributes:
        function: what the layer computes, from its input and its parameters, if that is known, from
            the pattern that it was found by, and linear in the parameters: gradients do not depend
            on these then.
    """

    function: Callable[[Array, Sequence[Array]], Array] | None = None

    @property
    def is_known(self) -> bool:
        return self.function is not None

    def compute(self, x: Array, params: Sequence[Array]) -> Array:
        return super().compute(x, params) if self.function is None else self.function(x, params)
