"""`TagUses`: run a program with a tag at each use of a layer.

Inputs and outputs of a use are arranged alike for all layers of a kind, tagged, and arranged back.
A generic parameter is tagged before anything is computed from it. Each tag carries the `LayerUse`
that describes the use.
"""

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from curvax import _jax
from curvax._types import Array
from curvax.layers.detection.axes import Arrangement, Atom, Axes, joined, refined
from curvax.layers.detection.candidates import CandidateUse, ParamView
from curvax.layers.detection.examples import ExampleAxes, Examples, find_examples
from curvax.layers.detection.layers import (
    ExistingTag,
    FoundLayer,
    TaggedUse,
    UseSource,
    checked_params,
)
from curvax.layers.detection.lifting import Lifting, run_lifted
from curvax.layers.detection.program import (
    Collected,
    Given,
    Node,
    Operand,
    Program,
    Values,
    Variable,
    reached_from,
    trace_program,
)
from curvax.layers.detection.uses import Interpreter, find_uses
from curvax.layers.patterns import Match
from curvax.layers.tags import (
    LayerTag,
    conv2d_tag,
    conv_tag,
    dense_tag,
    embedding_tag,
    generic_tag,
    scale_and_shift_tag,
)
from curvax.layers.use import (
    ConvolutionArguments,
    ConvolutionUse,
    CustomUse,
    DenseUse,
    EmbeddingUse,
    ExampleProblem,
    ExamplesAt,
    GenericUse,
    LayerUse,
    Loop,
    ParamUse,
    ScaleAndShiftUse,
)
from curvax.losses.tag import LossTag

KINDS: dict[str, type[LayerUse]] = {
    dense_tag.name: DenseUse,
    conv2d_tag.name: ConvolutionUse,
    conv_tag.name: ConvolutionUse,
    embedding_tag.name: EmbeddingUse,
    scale_and_shift_tag.name: ScaleAndShiftUse,
    generic_tag.name: GenericUse,
}
"""The descriptions of uses, by the name of their tag; any other is a `CustomUse`."""


def is_loss(node: Node) -> bool:
    """Return whether a node is the tag of a loss."""
    return isinstance(node.equation.primitive, LossTag)


def is_layer(node: Node) -> bool:
    """Return whether a node is the tag of a layer."""
    return isinstance(node.equation.primitive, LayerTag)


# The examples of a use.

_NOT_KNOWN = ExampleProblem.not_located(
    "no array has an axis of as many elements as a loss has rows"
)
_NO_AXIS = ExamplesAt(unknown=ExampleProblem.not_located("what is tagged has no axis for them"))


@dataclass(frozen=True, eq=False)
class LocatedExamples:
    """What is known of the examples in a program, at the uses of its layers."""

    program: Program
    examples: Examples

    def at_candidate(self, use: CandidateUse) -> ExamplesAt:
        """Return the examples of a use that detection found."""
        if use.lifted_examples is not None:
            num_positions = math.prod(use.output.shape[axis] for axis in use.positions)
            return self._lifted(use.node, use.lifted_examples, num_positions)
        examples = self._of(use.output)
        if isinstance(examples, ExampleProblem):
            return self._unknown(examples)
        if use.convolution is not None:
            batch_axis = use.convolution.dimension_numbers.out_spec[0]
            return self._along_axis(use.node, examples, use.output.shape, batch_axis)
        positions: list[tuple[Atom, Atom | None]] = []
        for axis, dim in enumerate(use.axes.dims):
            if not examples.has_examples(axis):
                positions += [(atom, None) for atom in dim if atom.origin in use.positions]
                continue
            pairs = refined(dim, examples.dims[axis])
            if pairs is None:
                return self._not_located(
                    "they share an axis with positions that cannot be told apart"
                )
            if any(b.origin is not None for a, b in pairs if a.origin not in use.positions):
                return self._not_located("they are along an axis that the parameters also have")
            positions += [(a, b) for a, b in pairs if a.origin in use.positions]
        order = lambda pair: (use.positions.index(pair[0].origin), -pair[0].stride)
        positions.sort(key=order)
        return self._known(use.node, examples, [(atom.size, digit) for atom, digit in positions])

    def at_tag(self, node: Node, output: Operand, batch_axis: int = 0) -> ExamplesAt:
        """Return the examples of a use that the user tagged, along an axis of its output."""
        shape, count = output.shape, self.examples.batch_size
        if not self.examples.is_known:
            is_trusted = not self.program.loops_around[node] and self.examples.lost is None
            if not is_trusted or shape[batch_axis : batch_axis + 1] != (count,):
                return self._unknown(self.examples.lost or _NOT_KNOWN)
            return ExamplesAt.along_axis(count)
        examples = self._of(output)
        if isinstance(examples, ExampleProblem):
            return self._unknown(examples)
        return self._along_axis(node, examples, shape, batch_axis)

    def _of(self, operand: Operand) -> ExampleAxes | ExampleProblem:
        """Return the examples that a value is about, or why they are not known."""
        if not self.examples.is_known:
            return self.examples.lost or _NOT_KNOWN
        found = self.examples.axes.get(operand) or self.examples.lost
        return found or ExampleProblem.not_located("what it computes is not about single ones")

    def _along_axis(
        self, node: Node, examples: ExampleAxes, shape: Sequence[int], batch_axis: int
    ) -> ExamplesAt:
        if len(shape) <= batch_axis or examples.axes not in ((), (batch_axis,)):
            return self._not_located(f"they are not along axis {batch_axis} of its output")
        return self._known(
            node, examples, [(atom.size, atom) for atom in examples.dims[batch_axis]]
        )

    def _lifted(self, node: Node, count: int, num_positions: int) -> ExamplesAt:
        """Return examples along a leading axis that the program does not have."""
        split = count, num_positions
        return ExamplesAt(
            per_step=count,
            split=Arrangement((count * num_positions,), split, (0, 1), split),
            loops=(None,) * len(self.program.loops_around[node]),
            total=count,
            count=count,
            problem=self.examples.problem,
        )

    def _unknown(self, why: ExampleProblem) -> ExamplesAt:
        return ExamplesAt(unknown=why, problem=self.examples.problem)

    def _not_located(self, why: str) -> ExamplesAt:
        return self._unknown(ExampleProblem.not_located(why))

    def _known(
        self, node: Node, examples: ExampleAxes, positions: Sequence[tuple[int, Atom | None]]
    ) -> ExamplesAt:
        """Return the examples among positions: the size of each, and the digit that it counts."""
        strides = {
            k: digit.stride
            for k, (_, digit) in enumerate(positions)
            if digit is not None and digit.origin is not None
        }
        of_examples = sorted(strides, key=lambda k: -strides[k])
        others = [k for k in range(len(positions)) if k not in strides]
        sizes = tuple(size for size, _ in positions)
        per_step, rest = (math.prod(sizes[k] for k in each) for each in (of_examples, others))
        split = Arrangement((per_step * rest,), sizes, (*of_examples, *others), (per_step, rest))
        example_loops = {loop_id for loop_id, _ in examples.loops}
        loop_ids = [self.examples.loops.get(loop) for loop in self.program.loops_around[node]]
        return ExamplesAt(
            per_step=per_step,
            split=split,
            loops=tuple(loop_id if loop_id in example_loops else None for loop_id in loop_ids),
            total=examples.total,
            first=examples.start,
            count=examples.count,
            in_order=examples.is_in_order,
            problem=self.examples.problem,
        )


# From what was found to the description that a tag carries.


def describe_uses(
    layers: Sequence[FoundLayer], located: LocatedExamples, found: Interpreter
) -> list[FoundLayer]:
    """Return the layers with a `LayerUse` for each use."""

    def describe(layer: FoundLayer, index: int, source: UseSource) -> LayerUse:
        use = _describe(layer, source, located)
        views = source.views if isinstance(source, Match) else source.params
        use = _with_axes(use, found.params_of([view.operand for view in views]))
        return replace(use, index=index, uncovered=layer.uncovered)

    return [
        replace(
            layer,
            uses=tuple(describe(layer, k, source) for k, source in enumerate(layer.sources)),
        )
        for layer in layers
    ]


def _describe(layer: FoundLayer, source: UseSource, located: LocatedExamples) -> LayerUse:
    lengths = located.program.loop_lengths(source.node)
    if isinstance(source, CandidateUse):
        return _use_of_candidate(layer.tag_name, source, lengths, located.at_candidate(source))
    if isinstance(source, Match):
        return _use_of_match(source, lengths, located.at_tag(source.node, source.output))
    return _use_of_tag(source, lengths, _examples_at_tag(source.node, located))


def _with_axes(use: LayerUse, views: Sequence[ParamView | None]) -> LayerUse:
    """Return the use with the axes of its operands, by which `_check_unchanged` recognises it."""
    pairs = zip(use.params, views, strict=False)
    return replace(
        use,
        params=tuple(
            param if view is None else replace(param, axes=view.axes, scale=_scale_of(view))
            for param, view in pairs
        ),
    )


def _scale_of(view: ParamView) -> float | None:
    return None if view.scale is None or _jax.is_tracer(view.scale) else float(view.scale)


def tagged_uses(program: Program, params: Sequence[Variable]) -> list[TaggedUse]:
    """Return the tags in a program, with descriptions that refer to these parameters."""
    found = find_uses(program, params, is_tagged=True)
    losses = [node for node in program.all_nodes() if is_loss(node)]
    located: LocatedExamples | None = None
    if losses:
        reached = reached_from(losses, program)
        located = LocatedExamples(program, find_examples(program, params, losses, reached))
    uses: list[TaggedUse] = []
    for index, (node, views) in enumerate(found.explicit):
        tag = ExistingTag(node, checked_params(node.name, views))
        use = _use_of_tag(tag, program.loop_lengths(node), _examples_at_tag(node, located))
        uses.append(TaggedUse(node, replace(use, index=index)))
    return uses


def _examples_at_tag(node: Node, located: LocatedExamples | None) -> ExamplesAt:
    """Return the examples of a tag; without losses, all along the batch axis of its output."""
    axis = _batch_axis(node.name, node.params)
    output = node.inputs[0]
    if located is not None:
        return located.at_tag(node, output, axis)
    return _all_along_axis(output.shape, axis)


def _all_along_axis(shape: Sequence[int], axis: int) -> ExamplesAt:
    return ExamplesAt.along_axis(shape[axis]) if len(shape) > axis else _NO_AXIS


def use_of_equation(equation: Any) -> LayerUse:
    """Return the use that a tag outside loops stands for, of the parameters that it is given."""
    known: LayerUse | None = equation.params.get("use")
    if known is not None:
        return known
    tag = equation.primitive
    views = [
        ParamView(index, v.aval.shape, Axes.of(v.aval.shape), Variable(v.aval.shape, v.aval.dtype))
        for index, v in enumerate(equation.invars[tag.num_outputs + tag.num_inputs :])
    ]
    axis = _batch_axis(tag.name, equation.params)
    examples = _all_along_axis(equation.invars[0].aval.shape, axis)
    return _use_as_tagged(equation, equation.params, views, (), examples)


def _use_of_candidate(
    layer_tag: str, candidate: CandidateUse, lengths: Sequence[int], examples: ExamplesAt
) -> LayerUse:
    """Return the use that detection found.

    Its inputs and outputs are arranged as (positions, heads, features). `layer_tag` is the name of
    the layer's tag, `lengths` are those of the loops around, outermost first.
    """
    details: dict[str, Any] = {}
    # Images are not rearranged: the tag has the arguments of the convolution.
    if candidate.convolution is not None:
        details["arguments"] = candidate.convolution
    else:
        details |= candidate.tag_constants
        output = candidate.output_arrangement
        arrangements = [output, candidate.input_arrangement or output]
        if candidate.lifted_examples is not None:
            count = candidate.lifted_examples
            arrangements = [_with_examples(each, count) for each in arrangements]
        details["output_arrangement"], details["input_arrangement"] = arrangements
    return KINDS[candidate.tag.name](
        kind=candidate.tag.name,
        layer=layer_tag,
        params=candidate.param_uses(),
        loops=_loops(lengths, candidate.params[0]),
        examples=examples,
        **details,
    )


def _with_examples(arrangement: Arrangement, count: int) -> Arrangement:
    """Return the arrangement of arrays with a leading axis of examples, merged into positions."""
    lifted = arrangement.with_axes((count,))
    first, *rest = arrangement.groups
    return replace(lifted, groups=(count * first, *rest))


def _use_of_tag(tag: ExistingTag, lengths: Sequence[int], examples: ExamplesAt) -> LayerUse:
    """Return a use that the user tagged, or that is tagged in a function of other parameters."""
    node, views = tag
    known: LayerUse | None = node.params.get("use")
    if known is None:
        return _use_as_tagged(node.equation, node.params, views, lengths, examples)
    _check_unchanged(known, tag)
    pairs = zip(known.params, views, strict=True)
    return replace(known, params=tuple(replace(param, index=v.param) for param, v in pairs))


def _check_unchanged(use: LayerUse, tag: ExistingTag) -> None:
    """Check that a use is given parameters like those that it was found with."""
    node, views = tag
    outputs = [v.aval.shape for v in node.equation.outvars]
    is_unchanged = outputs == [x.shape for x in use.outputs] and all(
        (view.shape, view.slices, view.axes, _scale_of(view))
        == (param.shape, param.slices, param.axes, param.scale)
        for param, view in zip(use.params, views, strict=True)
    )
    if not is_unchanged:
        raise ValueError(
            f"curvax: a function whose layers are tagged (by auto_register_tags) is called with "
            f"parameters that are sliced, transposed or scaled, or inside a loop or vmap, so that "
            f"{node.name} does not describe what is computed. Tag the function that is called from "
            f"outside, with its own parameters, and call the untagged one in it."
        )


def _use_of_match(match: Match, lengths: Sequence[int], examples: ExamplesAt) -> LayerUse:
    """Return a use that a user-supplied pattern found, as the pattern's tag has it."""
    pattern = match.pattern
    views, inputs = match.views, match.inputs
    if pattern.in_values_preprocessor is not None:
        views, inputs = _preprocessed(match)
    is_complex = _is_complex(match.output)
    shape = _shape_of_parts if is_complex else _shape
    shapes = list(map(shape, inputs)), [shape(match.output)]
    use = _custom(match.tag, match.constants, views, lengths, examples, *shapes)
    is_as_found = pattern.in_values_preprocessor is None and len(match.inputs) == 1
    compute = functools.partial(_compute_parts, match) if is_complex else pattern.compute
    if isinstance(use, CustomUse) and is_as_found and _is_linear(compute, use):
        return replace(use, function=compute)
    return use


# A layer with complex inputs and outputs, linear in its inputs, and with real parameters is a real
# layer that is applied to the real and to the imaginary parts: `x @ w` has the real part
# `real(x) @ w`. Its tag has both, along an axis after that of examples.


def can_tag(match: Match) -> bool:
    """Return whether what a pattern found is a layer of real numbers, or of parts of complex ones.

    With a bias it is not: the imaginary parts have none.
    """
    if not _is_complex(match.output):
        return True
    is_single = match.pattern.in_values_preprocessor is None and len(match.inputs) == 1
    if not is_single or not match.output.shape or not _is_complex(match.inputs[0]):
        return False
    # With the small arrays of the example, and parameters that are not zero.
    x, params = match.pattern.example_args
    ones = jax.tree.map(jnp.ones_like, params)
    of_input = lambda x: match.pattern.compute_func(x, ones)
    if not _can_transpose(of_input, x):
        return False
    with jax.ensure_compile_time_eval():  # What is added to a linear function is its value at zero.
        return not np.any(of_input(jax.tree.map(jnp.zeros_like, x)))


def _is_complex(operand: Operand) -> bool:
    return jnp.issubdtype(_shape(operand).dtype, jnp.complexfloating)


def _parts(x: Array) -> Array:
    return jnp.stack([jnp.real(x), jnp.imag(x)], axis=1)


def _shape_of_parts(operand: Operand) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(_parts, _shape(operand))


def _compute_parts(match: Match, x: Array, params: Sequence[Array]) -> Array:
    """Compute a layer with complex inputs from their parts, along the second axis."""
    dtype = _shape(match.inputs[0]).dtype
    of_part = lambda part: jnp.real(match.pattern.compute(part.astype(dtype), params))
    return jax.vmap(of_part, in_axes=1, out_axes=1)(x)


def _is_linear(compute: Callable[[Array, list[Array]], Array], use: LayerUse) -> bool:
    """Return whether what a layer computes is linear in its parameters."""
    params = [jax.ShapeDtypeStruct(shape, use.output.dtype) for shape in use.slice_shapes]
    x = jnp.zeros(use.input.shape, use.input.dtype)
    return _can_transpose(lambda params: compute(x, params), params)


def _can_transpose(fun: Callable[[Any], Any], argument: Any) -> bool:
    """Return whether a function of arrays of these shapes is linear."""
    try:
        transposed = jax.linear_transpose(fun, argument)
        jax.eval_shape(transposed, jax.eval_shape(fun, argument))
    except (NotImplementedError, AssertionError, TypeError):  # An operation that is not linear.
        return False
    return True


def _preprocessed(match: Match) -> tuple[tuple[ParamView, ...], Sequence[Operand]]:
    """Return the parameters and the inputs that the tag of a pattern is called with."""
    preprocess = match.pattern.in_values_preprocessor or list
    operands = [*match.inputs, *match.params]
    program, _ = trace_program(lambda *xs: list(preprocess(xs)), *map(_shape, operands))
    params = program.inputs[len(match.inputs) :]
    views: dict[Operand, ParamView] = {
        x: replace(view, operand=x) for x, view in zip(params, match.views, strict=True)
    }
    state = Interpreter.of(program, views, Examples(), is_tagged=True)
    state.walk(program)
    num_inputs = match.tag.num_inputs
    found = state.params_of(program.outputs[num_inputs:])
    return checked_params(match.pattern.name, found), program.outputs[:num_inputs]


def _use_as_tagged(
    equation: Any,
    constants: Mapping[str, Any],
    views: Sequence[ParamView],
    lengths: Sequence[int],
    examples: ExamplesAt,
) -> LayerUse:
    """Return a use with inputs and outputs as the equation of its tag has them."""
    tag: LayerTag = equation.primitive
    shapes = [_shape(v.aval) for v in equation.invars]
    if any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in shapes):
        raise ValueError(
            f"curvax: {tag.name} was called with complex arrays, but a layer is one of real "
            f"numbers. If it is linear in its inputs, tag the real and the imaginary parts as two "
            f"positions, stacked along an axis after that of examples; or leave the tag out."
        )
    outputs = shapes[: tag.num_outputs]
    inputs = shapes[tag.num_outputs : tag.num_outputs + tag.num_inputs]
    return _custom(tag, constants, views, lengths, examples, inputs, outputs)


def _custom(
    tag: LayerTag,
    constants: Mapping[str, Any],
    views: Sequence[ParamView],
    lengths: Sequence[int],
    examples: ExamplesAt,
    inputs: Sequence[jax.ShapeDtypeStruct],
    outputs: Sequence[jax.ShapeDtypeStruct],
) -> LayerUse:
    """Return a use whose inputs, outputs and parameters are arranged as the user has them."""
    details: dict[str, Any] = {}
    if tag.name in (conv2d_tag.name, conv_tag.name):
        images, kernel = inputs[0].shape, views[0].axes.shape
        if len(images) != len(kernel):
            raise ValueError(
                f"curvax: {tag.name} was called with images {images} and a kernel {kernel}, which "
                f"must have as many axes. Inside jax.vmap, where images have more, leave the tag "
                f"out: convolutions are found there."
            )
        details["arguments"] = ConvolutionArguments.of_tag(constants, images, kernel)
    if tag is scale_and_shift_tag:
        details = {name: constants.get(name, True) for name in ("has_scale", "has_shift")}
    return KINDS.get(tag.name, CustomUse)(
        kind=tag.name,
        layer=tag.name,
        params=tuple(map(_param_use, views)),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        loops=_loops(lengths, views[0]),
        examples=examples,
        **details,
    )


def _param_use(view: ParamView) -> ParamUse:
    """Return a parameter that a tag uses in the order of axes that the operand has."""
    looped = [joined(view.axes.looped)] if any(view.axes.looped) else []
    if any(atom.origin is None for atom in view.axes.atoms):
        return view.as_use(None)
    return view.as_use(Arrangement.of(view.axes.origin_dims(), [*looped, *view.axes.dims]))


def _loops(lengths: Sequence[int], view: ParamView) -> tuple[Loop, ...]:
    """Return the loops around a use, and whether the parameter differs between their steps."""
    pairs = zip(lengths, view.axes.looped, strict=True)
    return tuple(Loop(length, bool(looped)) for length, looped in pairs)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    dtype = getattr(x, "dtype", None)
    return jax.ShapeDtypeStruct(x.shape, jnp.result_type(x.value) if dtype is None else dtype)


def _batch_axis(name: str, constants: Mapping[str, Any]) -> int:
    """Return the batch axis of the output of a tag that the user placed."""
    if name in (conv2d_tag.name, conv_tag.name):
        numbers = constants.get("dimension_numbers")
        if isinstance(numbers, lax.ConvDimensionNumbers):
            return numbers.out_spec[0]
        if numbers is not None:
            return str(numbers[2]).index("N")
    return 0


# Running a program with tags.


@dataclass(frozen=True)
class TagUses:
    """Hooks that tag each use of some layers, and collect the operands of losses."""

    layers: Sequence[FoundLayer]
    lifting: Lifting

    def keys_at(self, node: Node) -> Collection[Any] | None:
        is_hooked = node in self._uses or is_loss(node) or self.lifting.reads(node)
        return () if is_hooked else None

    def is_per_step(self, key: Any, loop: Node) -> bool:
        raise NotImplementedError  # Nothing is given.

    def visit(
        self, node: Node, inputs: Sequence[Any], values: Values, given: Given
    ) -> tuple[list[Any], Collected]:
        del given
        if is_layer(node):
            ((_, use),) = self._uses[node]
            tag = node.equation.primitive
            tagged = tag.bind(*inputs, **{**node.params, "use": use})
            return (tagged if tag.multiple_results else [tagged]), {}
        if is_loss(node):
            outputs = _jax.run_equation(node.equation, inputs)
            return outputs, {node: outputs}
        outputs = run_lifted(self.lifting, node, inputs, values.lifted)
        output = outputs[0]
        for source, use in self._uses.get(node, ()):
            if isinstance(source, Match):
                output = _tag_match(source, use, output, values)
            elif isinstance(source, CandidateUse) and source.lifted_examples is not None:
                _tag_lifted(source, source.lifted_examples, use, output, values)
            elif isinstance(source, CandidateUse):
                output = _tag_slice(source, use, output, values)
        return [output, *outputs[1:]], {}

    @functools.cached_property
    def _uses(self) -> dict[Node, list[tuple[UseSource, LayerUse]]]:
        found: dict[Node, list[tuple[UseSource, LayerUse]]] = {}
        for layer in self.layers:
            for source, use in zip(layer.sources, layer.uses, strict=True):
                found.setdefault(source.node, []).append((source, use))
        return found


def tag_generic(layers: Sequence[FoundLayer], params: Sequence[Array]) -> list[Array]:
    """Tag the parameters of generic layers; return all parameters."""
    generic = {layer.params[0] for layer in layers if layer.is_generic and not layer.sources}
    return [_tag_param(x, index) if index in generic else x for index, x in enumerate(params)]


def _tag_param(x: Array, index: int) -> Array:
    shape = jnp.shape(x)
    use = GenericUse(
        generic_tag.name,
        generic_tag.name,
        (ParamUse(index, shape, axes=Axes.of(shape)),),
        outputs=(jax.ShapeDtypeStruct(shape, jnp.result_type(x)),),
        examples=_all_along_axis(shape, 0),
    )
    return generic_tag.bind(x, x, use=use)


def _tag_slice(candidate: CandidateUse, use: LayerUse, output: Array, values: Values) -> Array:
    """Tag the slice of an output that is the output of the use; return the whole output."""
    if candidate.output_slice is None:
        return _tag(candidate, use, output, values)
    axis, start, stop = candidate.output_slice
    before, of_use, after = (
        lax.slice_in_dim(output, first, last, axis=axis)
        for first, last in ((0, start), (start, stop), (stop, output.shape[axis]))
    )
    return jnp.concatenate([before, _tag(candidate, use, of_use, values), after], axis)


def _tag(candidate: CandidateUse, use: LayerUse, output: Array, values: Values) -> Array:
    factors = [jnp.asarray(values[operand]) for operand in candidate.factors]
    x = _scaled(factors[0], candidate)
    if candidate.lookup is not None:
        x = candidate.lookup.indices(x)
    if candidate.tag is scale_and_shift_tag:
        x = _product([x, *factors[1:]], output.shape, candidate.output_slice)
    return _bind(candidate, use, x, output, values)


def _tag_lifted(
    candidate: CandidateUse, count: int, use: LayerUse, output: Array, values: Values
) -> None:
    """Tag the lifted output of a use, with a leading axis of examples."""
    (operand,) = candidate.factors
    repeat = lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x)))
    x = values.lifted.get(operand)
    x = repeat(jnp.asarray(values[operand])) if x is None else x
    y = values.lifted.get(candidate.output, repeat(output))
    tagged = _bind(candidate, use, _scaled(x, candidate), y, values)
    values.lifted[candidate.output] = tagged


def _scaled(x: Array, candidate: CandidateUse) -> Array:
    """Scale an input in place of the weights, so that the tag has these as they are."""
    scale = candidate.params[0].scale
    return x if scale is None else x * jnp.asarray(scale, x.dtype)


def _bind(candidate: CandidateUse, use: LayerUse, x: Array, y: Array, values: Values) -> Array:
    """Tag an input and an output in the arrangement of the use; return the output as it was."""
    params = [values[view.operand] for view in candidate.params]
    if use.input_arrangement is not None and use.output_arrangement is not None:
        x, y = use.input_arrangement.apply(x), use.output_arrangement.apply(y)
    use = replace(use, inputs=(_shape(x),), outputs=(_shape(y),))
    tagged = candidate.tag.bind(y, x, *params, **candidate.tag_constants, use=use)
    return tagged if use.output_arrangement is None else use.output_arrangement.undo(tagged)


def _tag_match(match: Match, use: LayerUse, output: Array, values: Values) -> Array:
    pattern = match.pattern
    operands = [values[operand] for operand in (*match.inputs, *match.params)]
    if pattern.in_values_preprocessor is not None:
        operands = list(pattern.in_values_preprocessor(operands))
    constants = {**match.constants, "use": use}
    if not _is_complex(match.output):
        return match.tag.bind(output, *operands, **constants)
    (x, *params) = operands
    tagged = match.tag.bind(_parts(output), _parts(x), *params, **constants)
    return lax.complex(tagged[:, 0], tagged[:, 1])


def _product(
    factors: Sequence[Array], shape: Sequence[int], output_slice: tuple[int, int, int] | None
) -> Array:
    """Return the product of all factors, or a slice of it, broadcast to the shape."""
    if output_slice is not None:
        axis, start, stop = output_slice
        factors = [
            x if x.ndim == 0 or x.shape[axis] == 1 else lax.slice_in_dim(x, start, stop, axis=axis)
            for x in factors
        ]
    product = jnp.broadcast_to(factors[0], shape)
    for factor in factors[1:]:
        product = product * jnp.broadcast_to(factor, shape).astype(product.dtype)
    return product
