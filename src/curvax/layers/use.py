"""`LayerUse`: one use of a layer's parameters, as detection finds it and blocks consume it.

A layer is used wherever an operation reads its parameters: once, several times in a program, or in
each step of a loop. Detection describes each use by a frozen `LayerUse`, with one subclass for each
kind of layer. It is a static parameter of the use's tag, so that a reader of the tag knows which
parameters are used and how, which examples the use is about, and what the layer computes.

Inputs and outputs of a use that detection finds are arranged alike for all layers of a kind:
`(positions, *heads, features)`. Positions are whatever the layer is applied at (examples, time,
pixels); heads are axes along which the weights differ. Convolutions, and layers that the user tags,
keep the shapes of the model.
"""

import enum
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from curvax import _jax
from curvax._types import Array
from curvax.layers.detection.axes import Arrangement, Axes

# The examples of a use.


class ProblemKind(enum.Enum):
    """What goes wrong with examples on their way from the arguments to the losses."""

    INTERACTION = "interaction"
    """What is computed for one example depends on others."""
    NOT_FOLLOWED = "not followed"
    """It is not known what an operation does to examples."""
    SEVERAL_ROWS = "several rows"
    """A loss has several rows for each example."""
    NOT_LOCATED = "not located"
    """It is not known where the examples are at a use."""


@dataclass(frozen=True)
class ExampleProblem:
    """Something that goes wrong with examples, and how to tell the user."""

    kind: ProblemKind
    text: str

    @classmethod
    def at_operation(cls, kind: ProblemKind, operation: str) -> "ExampleProblem":
        """Return an interaction by an operation, or that it cannot be followed through one."""
        is_interaction = kind is ProblemKind.INTERACTION
        what = "examples interact, by" if is_interaction else "they cannot be followed through"
        return cls(kind, f"{what} `{operation}`")

    @classmethod
    def not_located(cls, why: str) -> "ExampleProblem":
        """Return that it is not known where the examples are at a use."""
        return cls(ProblemKind.NOT_LOCATED, why)

    @property
    def makes_unknown(self) -> bool:
        """Whether, because of it, the examples of a use are not known."""
        return self.kind in (ProblemKind.NOT_FOLLOWED, ProblemKind.NOT_LOCATED)

    @property
    def remark(self) -> str:
        """What to tell the user."""
        return f"examples unknown: {self.text}" if self.makes_unknown else self.text


@dataclass(frozen=True)
class ExamplesAt:
    """Which examples a use is about, and where they are among its positions.

    Attributes:
        per_step: Number of examples in each step of the loops around the use.
        split: Splits the axis of positions (or the batch axis, where the model's shapes are kept)
            into `(examples, positions of each)`; None if it has examples only.
        loops: For each loop around the use, outermost first, an identifier of the loop if each of
            its steps is about different examples; None if all steps are about the same.
        total: Number of examples in the batch.
        first: Index of the first example of this use.
        count: Number of examples of this use, in all steps.
        in_order: Whether the examples are in order along the loops over examples, outermost first,
            and then within each step.
        unknown: Why none of this is known; None if it is.
        problem: Why one example does not stay apart from others on the way to the losses; None if
            it does.
    """

    per_step: int = 1
    split: Arrangement | None = None
    loops: tuple[int | None, ...] = ()
    total: int = 1
    first: int = 0
    count: int = 1
    in_order: bool = True
    unknown: ExampleProblem | None = None
    problem: ExampleProblem | None = None

    @classmethod
    def along_axis(cls, count: int, num_loops: int = 0) -> "ExamplesAt":
        """Return all examples along one axis, the same in each step of the loops around."""
        return cls(count, loops=(None,) * num_loops, total=count, count=count)

    @property
    def interaction(self) -> str:
        """How examples interact; empty if they do not, as far as is known."""
        if self.problem is None or self.problem.kind is not ProblemKind.INTERACTION:
            return ""
        return self.problem.text

    @property
    def remark(self) -> str:
        """What to tell the user about the examples; empty if all is well."""
        return "" if self.any_problem is None else self.any_problem.remark

    @property
    def any_problem(self) -> ExampleProblem | None:
        """Why the examples are not known, or do not stay apart; None if all is well."""
        return self.unknown or self.problem


_OTHER_ORDER = ExampleProblem.not_located("they are in another order at another use")


def same_examples(at: Sequence[ExamplesAt]) -> dict[Hashable, list[int]] | str:
    """Group uses that are about the same examples.

    Returns:
        The indices of the uses in each group, where no two groups share an example; or a remark why
        that is not known.
    """
    groups = group_by_examples(at)
    return groups.remark if isinstance(groups, ExampleProblem) else groups


def group_by_examples(at: Sequence[ExamplesAt]) -> dict[Hashable, list[int]] | ExampleProblem:
    """Group uses as `same_examples` does, or return why that is not known."""
    unknown = next((each.unknown for each in at if each.unknown), None)
    if unknown is not None:
        return unknown
    groups: dict[tuple[int, int, int, tuple[int | None, ...]], list[int]] = {}
    for index, each in enumerate(at):
        order = () if each.in_order else each.loops
        groups.setdefault((each.total, each.first, each.count, order), []).append(index)
    for one, other in itertools.combinations(groups, 2):
        same_batch = one[0] == other[0]
        if same_batch and one[1] < other[1] + other[2] and other[1] < one[1] + one[2]:
            return _OTHER_ORDER
    return {**groups}


# The parameters and the loops of a use.

Slice = tuple[int, int, int]
"""A slice of a parameter: `(axis, start, stop)`."""


@dataclass(frozen=True)
class ParamUse:
    """A parameter as a layer uses it.

    Attributes:
        index: Index of the parameter among those of the function.
        shape: Shape of the parameter of the function.
        slices: The part that is used; () for all of the parameter.
        arrangement: Arranges that part alike for all layers of a kind: a leading axis for the steps
            of the loops that scan over it, then `(*heads, inputs, outputs)`. None if it is arranged
            so already.
        axes: Where the axes of the parameter are in the operand of the tag.
        scale: The constant that the operand was multiplied with, if it is known.
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
        """Return the part that is used, arranged."""
        for axis, start, stop in self.slices:
            param = lax.slice_in_dim(param, start, stop, axis=axis)
        return param if self.arrangement is None else self.arrangement.apply(param)

    def put(self, part: Array) -> Array:
        """Apply the transpose of `take`: zero where the parameter is not used."""
        shape = self.sliced_shape
        param = part.reshape(shape) if self.arrangement is None else self.arrangement.undo(part)
        for axis, start, stop in reversed(self.slices):
            pads = [(0, 0, 0)] * param.ndim
            pads[axis] = (start, self.shape[axis] - stop, 0)
            param = lax.pad(param, jnp.zeros((), param.dtype), pads)
        return param


@dataclass(frozen=True)
class Loop:
    """A loop around a use: its length, and whether it scans over the parameters."""

    length: int
    takes_slices: bool = False


# Uses of layers.


@dataclass(frozen=True)
class LayerUse:
    """One use of a layer.

    Attributes:
        kind: Name of the tag of this use.
        layer: Name of the tag of the layer. It differs from `kind` where an embedding is also used
            as a matrix.
        params: The parameters, in the order of the tag.
        inputs: Shapes and dtypes of the inputs at the tag, in each step of the loops around.
        outputs: Shapes and dtypes of the outputs at the tag, in each step of the loops around.
        loops: The loops around, outermost first.
        examples: The examples that the use is about.
        input_arrangement: Arranges an input of the model as the tag has it; None if the tag has the
            input of the model.
        output_arrangement: Arranges an output of the model as the tag has it; None likewise.
        index: Index among the uses of the layer. It distinguishes uses that are otherwise equal.
        uncovered: Number of further uses of the parameters that the layer does not cover.
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
    index: int = 0
    uncovered: int = 0

    @property
    def is_conv(self) -> bool:
        """Whether the layer is a convolution."""
        return isinstance(self, ConvolutionUse)

    @property
    def is_known(self) -> bool:
        """Whether it is known what the layer computes."""
        return True

    @property
    def is_arranged(self) -> bool:
        """Whether all positions of inputs and outputs are along their first axis."""
        return self.output_arrangement is not None

    @property
    def remark_on_coverage(self) -> str:
        """What to tell the user about uses of the parameters that the layer does not cover."""
        count = self.uncovered
        if not count:
            return ""
        uses, verb = ("use", "is") if count == 1 else ("uses", "are")
        return f"{count} more {uses} of its parameters {verb} not covered by the layer"

    @property
    def stacked(self) -> tuple[bool, ...]:
        """Which of the loops around scan over the parameters."""
        return tuple(loop.takes_slices for loop in self.loops)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of the loops around."""
        return tuple(loop.length for loop in self.loops)

    @property
    def stack(self) -> tuple[int, ...]:
        """The lengths of the loops that scan over the parameters."""
        return tuple(loop.length for loop in self.loops if loop.takes_slices)

    @property
    def repeats(self) -> int:
        """The number of loop steps that use the same parameters."""
        return math.prod(loop.length for loop in self.loops if not loop.takes_slices)

    @property
    def cuts(self) -> tuple[tuple[Slice, ...], ...]:
        """The slices of each parameter that are used."""
        return tuple(param.slices for param in self.params)

    def of_part(self) -> "LayerUse":
        """Return the same use of parameters that consist of the used slices only."""
        return replace(
            self,
            params=tuple(replace(p, shape=p.sliced_shape, slices=()) for p in self.params),
        )

    @property
    def input(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the first input, in each step."""
        return self.inputs[0]

    @property
    def output(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the first output, in each step."""
        return self.outputs[0]

    @property
    def num_examples(self) -> int | None:
        """The number of examples in each step; None if that is not known."""
        return None if self.examples.unknown else self.examples.per_step

    @property
    def num_counted(self) -> int:
        """The number of examples in each step, or of positions if the former is not known."""
        count = self.num_examples
        return self.output.shape[self.batch_axis(is_output=True)] if count is None else count

    @property
    def example_loops(self) -> tuple[bool, ...]:
        """Which of the loops around are about different examples in each step.

        Where that is not known, these are all loops that do not scan over the parameters.
        """
        if self.examples.unknown:
            return tuple(not scans for scans in self.stacked)
        return tuple(loop is not None for loop in self.examples.loops)

    # Parameters.

    def take(self, params: Sequence[Array]) -> list[Array]:
        """Return parameters as the layer uses them, with a leading axis for each stacking loop."""
        taken = [use.take(param) for use, param in zip(self.params, params, strict=True)]
        return [x.reshape(*self.stack, *x.shape[1:]) for x in taken] if self.stack else taken

    def put(self, taken: Sequence[Array]) -> list[Array]:
        """Apply the transpose of `take`: zero where the layer does not use a parameter."""
        if self.stack:
            taken = [x.reshape(-1, *x.shape[len(self.stack) :]) for x in taken]
        return [use.put(x) for use, x in zip(self.params, taken, strict=True)]

    @functools.cached_property
    def slice_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the parameters as the layer uses them, in each step."""
        shapes = [jax.ShapeDtypeStruct(param.shape, jnp.float32) for param in self.params]
        taken = jax.eval_shape(self.take, shapes)
        return [x.shape[len(self.stack) :] for x in taken]

    # Examples.

    def batch_axis(self, is_output: bool) -> int:
        """Return the axis of an input or output along which the examples are."""
        del is_output
        return 0

    def split_examples(self, x: Array, axis: int = 0) -> Array:
        """Split the axis of positions into `(examples, positions of each)`.

        Where it is not known which positions belong to an example, each position counts as one.
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
        """Return an input or output in the model's shape, after the leading axes of loops."""
        arrangement = self.output_arrangement if is_output else self.input_arrangement
        if arrangement is None:
            return x
        return arrangement.with_axes(x.shape[: len(self.loops)]).undo(x)

    def as_at_tag(self, x: Array, is_output: bool) -> Array:
        """Invert `as_in_model`."""
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
        del is_output  # Weights have one further axis: that of the other side.
        return max(map(len, self.slice_shapes)) - 1

    def of_data(self, x: Array, cotangent: Array) -> "LayerUse":
        """Return the use for data with axes of stacking loops, then one axis of examples."""
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
        """Compute one step of the layer, from its input and parameters as `take` returns them.

        Raises:
            NotImplementedError: If it is not known what layers of this kind compute.
        """
        del x, params
        raise NotImplementedError(
            f"curvax: nothing is known of what a layer tagged {self.kind} computes. Use a block "
            f"that needs only its gradient, such as curvax.NaiveDiagonal, or write one that "
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
        # Otherwise their gradients would be summed over the devices of a `shard_map`.
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
    """A lookup of rows in an embedding; an index equal to the number of rows stands for no row."""

    def compute(self, x: Array, params: Sequence[Array]) -> Array:
        return jnp.take(params[0], x, axis=0, mode="fill", fill_value=0)

    def _num_feature_axes(self, is_output: bool) -> int:
        return super()._num_feature_axes(is_output) if is_output else 0


@dataclass(frozen=True)
class ScaleAndShiftUse(LayerUse):
    """A scale, a shift or both, each of the shape of the features."""

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


class ConvolutionArguments(NamedTuple):
    """The arguments of `lax.conv_general_dilated` besides images and kernel."""

    window_strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    dimension_numbers: lax.ConvDimensionNumbers
    feature_group_count: int = 1
    batch_group_count: int = 1

    @classmethod
    def of_equation(cls, params: Mapping[str, Any]) -> "ConvolutionArguments":
        """Read the arguments from the parameters of a `conv_general_dilated` equation."""
        return cls(*(params[name] for name in cls._fields))

    @classmethod
    def of_tag(
        cls, constants: Mapping[str, Any], images: Sequence[int], kernel: Sequence[int]
    ) -> "ConvolutionArguments":
        """Complete the arguments that a tag was given by the defaults of `register_conv2d`.

        Arguments:
            constants: Static parameters of the tag.
            images: Shape of the input.
            kernel: Shape of the kernel.
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
        return cls(
            window_strides=strides,
            padding=tuple((low, high) for low, high in padding),
            lhs_dilation=tuple(constants.get("lhs_dilation") or ones),
            rhs_dilation=rhs_dilation,
            dimension_numbers=numbers,
            feature_group_count=constants.get("feature_group_count", 1),
            batch_group_count=constants.get("batch_group_count", 1),
        )


@dataclass(frozen=True)
class ConvolutionUse(LayerUse):
    """A convolution of images with a kernel."""

    arguments: ConvolutionArguments = field(kw_only=True)

    @property
    def convolution(self) -> dict[str, Any]:
        """The keyword arguments of `lax.conv_general_dilated`."""
        return self.arguments._asdict()

    @property
    def dimension_numbers(self) -> lax.ConvDimensionNumbers:
        """The layout of images, kernel and outputs."""
        return self.arguments.dimension_numbers

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
        if self.arguments.batch_group_count != 1:
            raise NotImplementedError(
                "curvax: a convolution with batch_group_count has no gradients of single examples. "
                "Use a Kronecker-factored block for it."
            )
        return super().gradients_by_example(x, cotangent)


@dataclass(frozen=True)
class GenericUse(LayerUse):
    """A parameter of which nothing is known; the tag's output is the parameter itself."""


@dataclass(frozen=True)
class CustomUse(LayerUse):
    """A layer of a user-defined kind.

    Attributes:
        function: What the layer computes from its input and its parameters; None if that is not
            known. It is known for layers that a pattern found if it is linear in the parameters, so
            that gradients do not depend on these.
    """

    function: Callable[[Array, Sequence[Array]], Array] | None = None

    @property
    def is_known(self) -> bool:
        return self.function is not None

    def compute(self, x: Array, params: Sequence[Array]) -> Array:
        return super().compute(x, params) if self.function is None else self.function(x, params)
