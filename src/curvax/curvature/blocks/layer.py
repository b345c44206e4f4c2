"""A layer as a block sees it: its parameters, and each place where it is applied as a function.

A tag in a program says which arrays are a layer's inputs, outputs and parameters at one place. A
`LayerSite` reads it: it brings parameters into the form that all layers of a kind share and back,
says where the examples are, and computes the layer alone. A `LayerEquation` is all places of a
layer together; it can be used in place of the equation of its first tag.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from curvax import _jax
from curvax._types import Array
from curvax.layers.detection.example_axes import ExamplesAt
from curvax.layers.detection.layers import Layer, Place

__all__ = ["LayerEquation", "LayerSite", "wide"]


_CONV = ("conv2d_tag", "conv_tag")
_KNOWN = (*_CONV, "dense_tag", "embedding_tag", "scale_and_shift_tag", "generic_tag")


def wide(*dtypes: Any) -> Any:
    """The dtype in which curvature is kept for arrays of some dtypes: at least float32."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes, jnp.float32)


@dataclass(frozen=True, eq=False)
class _Operand:
    """In place of a variable of an equation."""

    aval: Any


@dataclass(frozen=True, eq=False)
class _Equation:
    """In place of the equation of a tag, for data of other shapes."""

    primitive: Any
    params: dict[str, Any]
    invars: list[Any]


@dataclass(frozen=True, eq=False)
class LayerSite:
    """A layer at one place.

    Attributes:
        equation: that of the tag.
        param_shapes: the shapes of the parameters as the function has them.
        stacked: which of the loops around take one slice of the parameters in each step.
        lengths: how many steps these loops have.
        cuts: which part of each parameter is used.
    """

    equation: Any
    param_shapes: tuple[tuple[int, ...], ...]
    stacked: tuple[bool, ...] = ()
    lengths: tuple[int, ...] = ()
    cuts: tuple[tuple[tuple[int, int, int], ...], ...] = ()

    @classmethod
    def of(cls, place: Place, param_shapes: Sequence[tuple[int, ...]]) -> "LayerSite":
        """What a place of a traced program says."""
        shapes = tuple(param_shapes)
        return cls(place.node.equation, shapes, place.stacked, place.lengths, place.cuts)

    @property
    def kind(self) -> str:
        """The name of the tag."""
        return self.equation.primitive.name

    @property
    def constants(self) -> dict[str, Any]:
        """Return the parameters of the tag, without its operands."""
        return dict(self.equation.params)

    @property
    def stack(self) -> tuple[int, ...]:
        """The lengths of the loops that take slices of the parameters."""
        return tuple(n for n, has in zip(self.lengths, self.stacked, strict=True) if has)

    @property
    def repeats(self) -> int:
        """In how many steps of loops the same parameters are used."""
        return math.prod(n for n, has in zip(self.lengths, self.stacked, strict=True) if not has)

    @property
    def output(self) -> jax.ShapeDtypeStruct:
        """The shape of the (first) output, in each step."""
        aval = self.equation.invars[0].aval
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

    @property
    def input(self) -> jax.ShapeDtypeStruct:
        """The shape of the (first) input, in each step."""
        aval = self.equation.invars[self.equation.primitive.num_outputs].aval
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

    @property
    def is_conv(self) -> bool:
        """Whether images are convolved with a kernel."""
        return self.kind in _CONV

    @property
    def is_known(self) -> bool:
        """Whether it is known what layers of its kind compute."""
        return self.kind in _KNOWN

    @property
    def is_arranged(self) -> bool:
        """Whether inputs and outputs have all positions along their first axis."""
        return "examples" in self.constants and not self.is_conv

    @functools.cached_property
    def examples(self) -> ExamplesAt:
        """Which examples it is applied to here, and where they are."""
        constants = self.constants
        found = constants.get("examples") or constants.get("tagged_examples")
        if found is not None:
            return found
        shape = self.output.shape  # Tagged by hand: the first axis is that of the examples.
        if not shape:
            return ExamplesAt(unknown="what is tagged has no axis for them")
        if self.repeats > 1:
            return ExamplesAt(unknown="it is tagged inside of a loop, of which nothing is known")
        number = shape[self._batch_axis(True)]
        return ExamplesAt(1, number, 1, (None,) * len(self.lengths), number, 0, number)

    @property
    def has_positions(self) -> bool:
        """Whether examples and several positions of each share an axis."""
        if not self.is_arranged or self.kind == "generic_tag" or self.num_examples is None:
            return False
        return self.examples.before * self.examples.after != 1

    @property
    def num_examples(self) -> int | None:
        """How many examples there are in each step; None if that is not known."""
        return None if self.examples.unknown else self.examples.number

    @property
    def example_loops(self) -> tuple[bool, ...]:
        """Which of the loops around are about other examples in each step.

        Where that is not known, all that share the parameters count as such.
        """
        if self.examples.unknown:
            return tuple(not has for has in self.stacked)
        return tuple(number is not None for number in self.examples.loops)

    @property
    def num_counted(self) -> int:
        """How many examples there are in each step; how many positions, if that is not known."""
        count = self.num_examples
        return self.output.shape[self._batch_axis(True)] if count is None else count

    @property
    def convolution(self) -> dict[str, Any]:
        """The parameters of `lax.conv_general_dilated` that the tag says or stands for."""
        constants = self.constants
        spatial = self.input.ndim - 2
        numbers = constants.get("dimension_numbers")
        if not isinstance(numbers, lax.ConvDimensionNumbers):
            letters = "DHW"[3 - spatial :]
            numbers = numbers or (f"N{letters}C", f"{letters}IO", f"N{letters}C")
            kernel = self.equation.invars[-2 if len(self.param_shapes) > 1 else -1].aval.shape
            numbers = lax.conv_dimension_numbers(self.input.shape, kernel, numbers)
        kernel_shape = tuple(self._kernel_shape[axis] for axis in numbers.rhs_spec[2:])
        images = tuple(self.input.shape[axis] for axis in numbers.lhs_spec[2:])
        strides = tuple(
            constants.get("window_strides") or constants.get("strides") or [1] * spatial
        )
        rhs_dilation = tuple(constants.get("rhs_dilation") or [1] * spatial)
        lhs_dilation = tuple(constants.get("lhs_dilation") or [1] * spatial)
        padding = constants.get("padding", "SAME")
        if isinstance(padding, str):
            dilated = [(k - 1) * d + 1 for k, d in zip(kernel_shape, rhs_dilation, strict=True)]
            padding = lax.padtype_to_pads(images, dilated, strides, padding)
        return {
            "window_strides": strides,
            "padding": tuple(map(tuple, padding)),
            "lhs_dilation": lhs_dilation,
            "rhs_dilation": rhs_dilation,
            "dimension_numbers": numbers,
            "feature_group_count": constants.get("feature_group_count", 1),
            "batch_group_count": constants.get("batch_group_count", 1),
        }

    def take(self, params: Sequence[Array]) -> list[Array]:
        """Parameters as the layer uses them here, with axes for stacks in front."""
        taken = []
        for number, param in enumerate(params):
            for axis, start, stop in self._cuts(number):
                param = lax.slice_in_dim(param, start, stop, axis=axis)
            layout = self._layout(number)
            param = param if layout is None else layout.apply(param)
            if self.stack:
                param = param.reshape(*self.stack, *param.shape[1:])
            taken.append(param)
        return taken

    def put(self, taken: Sequence[Array]) -> list[Array]:
        """What is like `take`, as the function has it; zero where the layer does not use it."""
        params = []
        for number, (param, whole) in enumerate(zip(taken, self.param_shapes, strict=True)):
            if self.stack:
                param = param.reshape(-1, *param.shape[len(self.stack) :])
            layout = self._layout(number)
            shape = list(whole)
            for axis, start, stop in self._cuts(number):
                shape[axis] = stop - start
            param = param.reshape(shape) if layout is None else layout.undo(param)
            for axis, start, stop in reversed(self._cuts(number)):
                pads = [(0, 0, 0)] * param.ndim
                pads[axis] = (start, whole[axis] - stop, 0)
                param = lax.pad(param, jnp.zeros((), param.dtype), pads)
            params.append(param)
        return params

    @functools.cached_property
    def slice_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the parameters as the layer uses them, in each step."""
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in self.param_shapes]
        taken = jax.eval_shape(self.take, shapes)
        return [x.shape[len(self.stack) :] for x in taken]

    def compute(self, x: Array, params: Sequence[Array]) -> Array:
        """The layer alone, from its input and parameters as `take` has them, in one step."""
        weight, *rest = params
        if self.kind == "embedding_tag":
            return jnp.take(weight, x, axis=0, mode="fill", fill_value=0)
        if self.kind == "scale_and_shift_tag":
            return self._scale_and_shift(x, params)
        if self.is_conv:
            settings = self.convolution
            y = lax.conv_general_dilated(x, weight, **settings)
            channel = settings["dimension_numbers"].out_spec[1]
            return y + lax.broadcast_in_dim(rest[0], y.shape, (channel,)) if rest else y
        if self.kind == "dense_tag":
            y = jnp.einsum("...hi,hio->...ho", x, weight) if weight.ndim == 3 else x @ weight
            return y + jnp.broadcast_to(rest[0], y.shape) if rest else y
        raise NotImplementedError(
            f"curvax: nothing is known of what a layer tagged {self.kind} computes. Use a block "
            f"that needs only its gradient, such as curvax.NaiveDiagonal, or one of your own that "
            f"overrides update_curvature_matrix_estimate."
        )

    def by_example(self, x: Array, is_output: bool) -> Array:
        """An input or an output, with an axis for the examples in front of all others.

        Where it is not known which these are, each position counts as one.
        """
        if not self.is_arranged:
            axis = self._batch_axis(is_output)
            return jnp.expand_dims(jnp.moveaxis(x, axis, 0), 1 + axis)
        if self.num_examples is None:
            return x[:, None]
        before, number, after = self.examples.around
        x = jnp.moveaxis(x.reshape(before, number, after, *x.shape[1:]), 1, 0)
        return x.reshape(number, before * after, *x.shape[3:])

    def split_shape(
        self, shape: Sequence[int], is_output: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Split a shape of inputs or outputs: examples and positions, and all that is not these."""
        if self.is_conv:
            axis = self._batch_axis(is_output)
            return tuple(shape[axis : axis + 1]), (*shape[:axis], *shape[axis + 1 :])
        number = max(map(len, self.slice_shapes))
        if self.kind == "embedding_tag":
            number = number - 1 if is_output else 0
        elif self.kind != "scale_and_shift_tag":
            number -= 1  # One of the axes of weights is that of the outputs, or of the inputs.
        cut = max(len(shape) - number, 0)
        return tuple(shape[:cut]), tuple(shape[cut:])

    def with_positions(self, x: Array) -> Array:
        """Return an input or output with examples and positions along two axes, if both are known.

        Axes of loops stay in front.
        """
        if not self.has_positions:
            return x
        before, number, after = self.examples.around
        axis = len(self.lengths)
        loops, rest = x.shape[:axis], x.shape[axis + 1 :]
        x = jnp.moveaxis(x.reshape(*loops, before, number, after, *rest), axis + 1, axis)
        return x.reshape(*loops, number, before * after, *rest)

    def without_positions(self, x: Array) -> Array:
        """Inverse of `with_positions`."""
        if not self.has_positions:
            return x
        before, number, after = self.examples.around
        axis = len(self.lengths)
        loops, rest = x.shape[:axis], x.shape[axis + 2 :]
        x = jnp.moveaxis(x.reshape(*loops, number, before, after, *rest), axis, axis + 1)
        return x.reshape(*loops, before * number * after, *rest)

    def of_data(self, x: Array, cotangent: Array) -> "LayerSite":
        """Return this site for data of another shape: axes of stacks, then examples, positions."""
        tag, constants, skip = self.equation.primitive, self.constants, len(self.stack)
        shapes = [jax.ShapeDtypeStruct(y.shape[skip:], y.dtype) for y in (cotangent, x)]
        known = constants.pop("examples", None)
        constants.pop("tagged_examples", None)
        if known is not None and self.is_conv:
            count = shapes[0].shape[self._batch_axis(True)]
            constants["examples"] = ExamplesAt(1, count, 1, (None,) * skip, count, 0, count)
        params = self.equation.invars[tag.num_outputs + tag.num_inputs :]
        equation = _Equation(tag, constants, [*map(_Operand, shapes), *params])
        stacked = (True,) * skip
        return replace(self, equation=equation, stacked=stacked, lengths=self.stack)

    def gradients(self, x: Array, cotangent: Array) -> list[Array]:
        """The gradient of each example, in one step: (examples, *shape of the parameter)."""
        return self.gradients_by_example(
            self.by_example(x, False), self.by_example(cotangent, True)
        )

    def gradients_by_example(self, x: Array, cotangent: Array) -> list[Array]:
        """As `gradients`, of inputs and cotangents with an axis for examples in front."""
        if self.is_conv and self.convolution["batch_group_count"] != 1:
            raise NotImplementedError(
                "curvax: a convolution with batch_group_count has no gradients of single examples. "
                "Use a Kronecker-factored block for it."
            )
        zeros = [jnp.zeros(shape, cotangent.dtype) for shape in self.slice_shapes]
        # Else their gradients would be summed over the devices of a `shard_map`.
        params = [_jax.varying_like(zero, x, cotangent) for zero in zeros]

        def of_example(x: Array, cotangent: Array) -> list[Array]:
            if jnp.issubdtype(x.dtype, jnp.floating):
                x = x.astype(cotangent.dtype)
            return jax.vjp(lambda params: self.compute(x, params), params)[1](cotangent)[0]

        return jax.vmap(of_example)(x, cotangent)

    def _batch_axis(self, is_output: bool) -> int:
        if not self.is_conv:
            return 0
        numbers = self.convolution["dimension_numbers"]
        return (numbers.out_spec if is_output else numbers.lhs_spec)[0]

    @property
    def _kernel_shape(self) -> tuple[int, ...]:
        return self.slice_shapes[0]

    def _cuts(self, number: int) -> tuple[tuple[int, int, int], ...]:
        return self.cuts[number] if self.cuts else ()

    def _layout(self, number: int) -> Any:
        layouts = self.constants.get("layouts")
        return None if layouts is None else layouts[number]

    def _scale_and_shift(self, x: Array, params: Sequence[Array]) -> Array:
        params = list(params)
        if self.constants["has_scale"]:
            x = x * jnp.broadcast_to(params.pop(0), x.shape)
        return x + jnp.broadcast_to(params.pop(0), x.shape) if self.constants["has_shift"] else x


@dataclass(frozen=True, eq=False)
class LayerEquation:
    """A layer: its tags, and the shapes and dtypes of its parameters as the function has them.

    It has what the equation of its first tag has.
    """

    layer: Layer | None
    sites: tuple[LayerSite, ...]
    dtypes: tuple[Any, ...]

    @classmethod
    def of(cls, equation: Any) -> "LayerEquation":
        """From an equation alone: a layer that is applied at one place, outside of loops."""
        if isinstance(equation, cls):
            return equation
        tag = equation.primitive
        params = equation.invars[tag.num_outputs + tag.num_inputs :]
        layouts = equation.params.get("layouts")
        shapes = tuple(
            v.aval.shape if layouts is None else layouts[k].shape for k, v in enumerate(params)
        )
        return cls(None, (LayerSite(equation, shapes),), tuple(v.aval.dtype for v in params))

    @classmethod
    def of_layer(cls, layer: Layer, params: Sequence[Any]) -> "LayerEquation":
        """From a layer of a traced function, and the variables of all parameters of it."""
        own = [params[number].aval for number in layer.params]
        shapes = [x.shape for x in own]
        sites = tuple(LayerSite.of(place, shapes) for place in layer.places)
        return cls(layer, sites, tuple(x.dtype for x in own))

    @property
    def param_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the parameters as the function has them."""
        return self.sites[0].param_shapes

    @property
    def primitive(self) -> Any:
        """The tag."""
        return self.sites[0].equation.primitive

    @property
    def params(self) -> dict[str, Any]:
        """The constants of the tag."""
        return self.sites[0].constants

    @property
    def invars(self) -> list[Any]:
        """The operands of the tag: outputs, inputs and parameters."""
        return list(self.sites[0].equation.invars)

    @property
    def outvars(self) -> list[Any]:
        """The results of the tag."""
        return list(self.sites[0].equation.outvars)
