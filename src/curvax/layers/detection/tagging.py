"""Putting tags where layers were found.

The program is run again with a tag at each use of a layer. Inputs and outputs are brought into the
form that all layers of a kind share, tagged, and brought back. A generic parameter is tagged before
anything is computed from it. Each tag carries the `LayerUse` that describes it.
"""

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from curvax import _jax
from curvax._types import Array
from curvax.layers.detection.axes import Arrangement, Atom, Axes, refined
from curvax.layers.detection.examples import Examples, Rows, find_examples
from curvax.layers.detection.layers import FoundLayer, Tagged, TaggedUse, checked_params
from curvax.layers.detection.lifting import Lifting, run_lifted
from curvax.layers.detection.program import (
    Collected,
    Given,
    Node,
    Operand,
    Program,
    Values,
    Variable,
    loop_lengths,
    reached_from,
    trace_program,
)
from curvax.layers.detection.sites import ParamView, Site
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
    ConvolutionUse,
    CustomUse,
    DenseUse,
    EmbeddingUse,
    ExamplesAt,
    GenericUse,
    LayerUse,
    Loop,
    ParamUse,
    ScaleAndShiftUse,
    convolution_arguments,
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


def is_loss(node: Node) -> bool:
    """Whether a node is the tag of a loss."""
    return isinstance(node.equation.primitive, LossTag)


def is_layer(node: Node) -> bool:
    """Whether a node is the tag of a layer."""
    return isinstance(node.equation.primitive, LayerTag)


# Which examples a layer is applied to where it is used, and where they are there.

_NOT_KNOWN = "no array has an axis of as many elements as a loss has rows"


@dataclass(frozen=True, eq=False)
class LocatedExamples:
    """What is known of the examples in a program, at the uses of its layers."""

    program: Program
    examples: Examples

    def at_site(self, site: Site) -> ExamplesAt:
        """Where a layer was found."""
        if site.lifted is not None:
            count = math.prod(site.output.shape[axis] for axis in site.positions)
            return self._lifted(site.node, site.lifted, count)
        rows = self._rows(site.output)
        if isinstance(rows, str):
            return self._unknown(rows)
        if site.convolution is not None:
            axis = site.convolution["dimension_numbers"].out_spec[0]
            return self._along_axis(site.node, rows, site.output.shape, axis)
        positions: list[tuple[Atom, Atom | None]] = []
        for axis, dim in enumerate(site.axes.dims):
            if not rows.has_examples(axis):
                positions += [(atom, None) for atom in dim if atom.origin in site.positions]
                continue
            pairs = refined(dim, rows.dims[axis])
            if pairs is None:
                return self._unknown("they share an axis with positions that cannot be told apart")
            own = [(a, b) for a, b in pairs if a.origin in site.positions]
            if any(b.origin is not None for a, b in pairs if a.origin not in site.positions):
                return self._unknown("they are along an axis that the parameters have, too")
            positions += own
        order = lambda pair: (site.positions.index(pair[0].origin), -pair[0].stride)
        positions.sort(key=order)
        sizes = [(atom.size, example) for atom, example in positions]
        return self._known(site.node, rows, sizes)

    def at_tag(self, node: Node, output: Operand, batch_axis: int = 0) -> ExamplesAt:
        """At a layer that the user tags, with examples along an axis of its output."""
        shape, count = output.shape, self.examples.batch_size
        if not self.examples.is_known:
            is_trusted = not self._loops[node] and not self.examples.lost
            if not is_trusted or shape[batch_axis : batch_axis + 1] != (count,):
                return self._unknown(self.examples.lost or _NOT_KNOWN)
            return ExamplesAt.along_axis(count)
        rows = self._rows(output)
        if isinstance(rows, str):
            return self._unknown(rows)
        return self._along_axis(node, rows, shape, batch_axis)

    def _along_axis(
        self, node: Node, rows: Rows, shape: Sequence[int], batch_axis: int
    ) -> ExamplesAt:
        if len(shape) <= batch_axis or rows.axes not in ((), (batch_axis,)):
            return self._unknown(f"they are not along axis {batch_axis} of its output")
        sizes = [(atom.size, atom) for atom in rows.dims[batch_axis]]
        return self._known(node, rows, sizes)

    def _lifted(self, node: Node, number: int, positions: int) -> ExamplesAt:
        """Where examples have a leading axis of their own."""
        return ExamplesAt(
            number=number,
            split=Arrangement(
                (number * positions,), (number, positions), (0, 1), (number, positions)
            ),
            loops=(None,) * len(self._loops[node]),
            total=number,
            count=number,
            problem=self.examples.problem,
        )

    @functools.cached_property
    def _loops(self) -> dict[Node, tuple[Node, ...]]:
        return _loops_around(self.program)

    def _rows(self, operand: Any) -> Rows | str:
        """The examples that a value is about; or why that is not known."""
        if not self.examples.is_known:
            return self.examples.lost or _NOT_KNOWN
        rows = self.examples.rows.get(operand)
        return rows or self.examples.lost or "what it computes is not about single ones"

    def _unknown(self, why: str) -> ExamplesAt:
        return ExamplesAt(unknown=why, problem=self.examples.problem)

    def _known(
        self, node: Node, rows: Rows, positions: Sequence[tuple[int, Atom | None]]
    ) -> ExamplesAt:
        """Return where examples are among positions, given as their sizes and what they count."""
        is_example = [atom is not None and atom.origin is not None for _, atom in positions]
        numbered = [k for k, own in enumerate(is_example) if own]
        numbered.sort(key=lambda k: -positions[k][1].stride)  # pyright: ignore[reportOptionalMemberAccess]
        rest = [k for k, own in enumerate(is_example) if not own]
        sizes = [size for size, _ in positions]
        number, others = (math.prod(sizes[k] for k in each) for each in (numbered, rest))
        split = Arrangement((number * others,), tuple(sizes), (*numbered, *rest), (number, others))
        taken: Mapping[Any, Any] = dict(rows.loops)
        numbers = tuple(self.examples.loops.get(loop) for loop in self._loops[node])
        return ExamplesAt(
            number=number,
            split=split,
            loops=tuple(n if n in taken else None for n in numbers),
            total=rows.total,
            first=rows.start,
            count=rows.count,
            in_order=rows.is_in_order,
            problem=self.examples.problem,
        )


def _loops_around(program: Program, loops: tuple[Node, ...] = ()) -> dict[Node, tuple[Node, ...]]:
    """Return, for each node, the loops around it, outermost first."""
    found: dict[Node, tuple[Node, ...]] = {}
    for node in program.nodes:
        found[node] = loops
        if node.body is not None:
            inner = (*loops, node) if node.kind == "scan" else loops
            found |= _loops_around(node.body, inner)
    return found


# From what was found to the description that a tag carries.

_NO_AXIS = ExamplesAt(unknown="what is tagged has no axis for them")


def described(
    layers: Sequence[FoundLayer], located: LocatedExamples, found: Interpreter
) -> list[FoundLayer]:
    """The layers, with a description of each use."""
    lengths = loop_lengths(located.program)

    def use_of(layer: FoundLayer, site: Site | Match | Tagged) -> LayerUse:
        views = site.views if isinstance(site, Match) else site.params
        return _with_axes(_use_of(layer, site), found.params_of([x.operand for x in views]))

    def _use_of(layer: FoundLayer, site: Site | Match | Tagged) -> LayerUse:
        loops = lengths[site.node]
        if isinstance(site, Site):
            return _use_of_site(layer.tag_name, site, loops, located.at_site(site))
        if isinstance(site, Match):
            examples = located.at_tag(site.node, site.node.outputs[0])
            return _use_of_match(site, loops, examples)
        axis = _batch_axis(site.node.name, site.node.params)
        return _use_of_tag(site, loops, located.at_tag(site.node, site.node.inputs[0], axis))

    return [
        replace(
            layer,
            uses=tuple(
                replace(use_of(layer, x), number=k, uncovered=layer.uncovered)
                for k, x in enumerate(layer.sites)
            ),
        )
        for layer in layers
    ]


def _with_axes(use: LayerUse, views: Sequence[ParamView | None]) -> LayerUse:
    """The use with the axes of its operands, by which it is known again (`_use_of_tag`)."""
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
    """The tags in a program, with descriptions that are about these parameters."""
    found = find_uses(program, params, is_tagged=True)
    losses = [node for node in program.all_nodes() if is_loss(node)]
    reached = reached_from(losses, program)
    examples = find_examples(program, params, losses, reached) if losses else Examples()
    located = LocatedExamples(program, examples)
    lengths = loop_lengths(program)
    uses: list[TaggedUse] = []
    for number, (node, views) in enumerate(found.explicit):
        tagged = Tagged(node, checked_params(node.name, views))
        axis = _batch_axis(node.name, node.params)
        at = located.at_tag(node, node.inputs[0], axis) if losses else _first_axis(node, axis)
        use = _use_of_tag(tagged, lengths[node], at)
        uses.append(TaggedUse(node, replace(use, number=number)))
    return uses


def use_of_equation(equation: Any) -> LayerUse:
    """The use that a tag stands for, outside of loops, whose parameters are as it has them."""
    known: LayerUse | None = equation.params.get("use")
    if known is not None:
        return known
    tag = equation.primitive
    shapes = [_shape(v.aval) for v in equation.invars]
    cut, end = tag.num_outputs, tag.num_outputs + tag.num_inputs
    views = [
        ParamView(number, x.shape, Axes.of(x.shape), Variable(x.shape, x.dtype))
        for number, x in enumerate(shapes[end:])
    ]
    axis = _batch_axis(tag.name, equation.params)
    known_axis = len(shapes[0].shape) > axis
    examples = ExamplesAt.along_axis(shapes[0].shape[axis]) if known_axis else _NO_AXIS
    return _custom(tag, equation.params, views, (), examples, shapes[cut:end], shapes[:cut])


def _use_of_site(layer: str, site: Site, lengths: Sequence[int], examples: ExamplesAt) -> LayerUse:
    details: dict[str, Any] = dict(site.convolution or {})
    if site.tag is scale_and_shift_tag:
        details = {"has_scale": site.has_scale, "has_shift": site.has_shift}
    if not site.is_conv:  # Images and kernels stay as they are.
        output = site.output_arrangement
        arrangements = [output, site.input_arrangement or output]
        if site.lifted is not None:
            arrangements = [_with_examples(each, site.lifted) for each in arrangements]
        details["output_arrangement"], details["input_arrangement"] = arrangements
    return KINDS[site.tag.name](
        kind=site.tag.name,
        layer=layer,
        params=site.param_uses(),
        loops=_loops(lengths, site.params[0]),
        examples=examples,
        **details,
    )


def _with_examples(arrangement: Arrangement, number: int) -> Arrangement:
    """The same with examples along a leading axis, as the first of the positions."""
    lifted = arrangement.with_axes((number,))
    first, *rest = arrangement.groups
    return replace(lifted, groups=(number * first, *rest))


def _use_of_tag(tagged: Tagged, lengths: Sequence[int], examples: ExamplesAt) -> LayerUse:
    """A use that the user tags, or that was tagged before in a function of other parameters."""
    node, views = tagged
    known: LayerUse | None = node.params.get("use")
    if known is not None:
        _check_known(known, tagged)
        pairs = zip(known.params, views, strict=True)
        return replace(known, params=tuple(replace(own, index=view.param) for own, view in pairs))
    tag = node.equation.primitive
    shapes = [_shape(v.aval) for v in node.equation.invars]
    cut, end = tag.num_outputs, tag.num_outputs + tag.num_inputs
    return _custom(tag, node.params, views, lengths, examples, shapes[cut:end], shapes[:cut])


def _check_known(use: LayerUse, tagged: Tagged) -> None:
    """Check that a use that was tagged before is given parameters as it was found with."""
    node, views = tagged
    outputs = [v.aval.shape for v in node.equation.outvars]
    as_before = outputs == [x.shape for x in use.outputs] and all(
        (view.shape, view.cuts, view.axes, _scale_of(view))
        == (own.shape, own.slices, own.axes, own.scale)
        for own, view in zip(use.params, views, strict=True)
    )
    if not as_before:
        raise ValueError(
            f"curvax: a function whose layers are tagged (by auto_register_tags) is called with "
            f"parameters that are cut, transposed or scaled, or inside of a loop or vmap, so that "
            f"{node.name} says something else than what is done. Tag the function that is called "
            f"from outside, with its own parameters, and call the untagged one in it."
        )


def _use_of_match(match: Match, lengths: Sequence[int], examples: ExamplesAt) -> LayerUse:
    """A use that a pattern of the user found, as the tag of the pattern has it."""
    tag = match.pattern.tag_primitive
    views, inputs = match.views, match.inputs
    if match.pattern.in_values_preprocessor is not None:
        views, inputs = _preprocessed(match)
    constants = match.pattern.parameters_extractor_func([node.equation for node in match.nodes])
    inputs, outputs = list(map(_shape, inputs)), [_shape(match.output)]
    use = _custom(tag, dict(constants), views, lengths, examples, inputs, outputs)
    is_as_found = match.pattern.in_values_preprocessor is None and len(match.inputs) == 1
    if isinstance(use, CustomUse) and is_as_found and _is_linear(match.pattern.compute, use):
        return replace(use, function=match.pattern.compute)
    return use


def _is_linear(compute: Any, use: LayerUse) -> bool:
    """Whether what a layer computes is linear in its parameters."""
    params = [jax.ShapeDtypeStruct(shape, use.output.dtype) for shape in use.slice_shapes]
    x = jnp.zeros(use.input.shape, use.input.dtype)
    of_params = lambda params: compute(x, params)
    try:
        transposed = jax.linear_transpose(of_params, params)
        jax.eval_shape(transposed, jax.eval_shape(of_params, params))
    except (NotImplementedError, AssertionError, TypeError):  # An operation that is not linear.
        return False
    return True


def _preprocessed(match: Match) -> tuple[tuple[ParamView, ...], Sequence[Operand]]:
    """The parameters and the inputs that the tag of a pattern is called with."""
    preprocess = match.pattern.in_values_preprocessor or list
    operands = [*match.inputs, *match.params]
    program, _ = trace_program(lambda *xs: list(preprocess(xs)), *map(_shape, operands))
    state = Interpreter(Examples(), is_tagged=True)
    state.uses = {view.param: [] for view in match.views}
    inputs = program.inputs[len(match.inputs) :]
    state.views.update(
        {x: replace(view, operand=x) for x, view in zip(inputs, match.views, strict=True)}
    )
    state.walk(program)
    cut = match.pattern.tag_primitive.num_inputs
    views = state.params_of(program.outputs[cut:])
    return checked_params(match.pattern.name, views), program.outputs[:cut]


def _custom(
    tag: LayerTag,
    constants: dict[str, Any],
    views: Sequence[ParamView],
    lengths: Sequence[int],
    examples: ExamplesAt,
    inputs: Sequence[jax.ShapeDtypeStruct],
    outputs: Sequence[jax.ShapeDtypeStruct],
) -> LayerUse:
    """A use of which inputs, outputs and parameters are as the user tags them."""
    details: dict[str, Any] = {}
    if tag.name in (conv2d_tag.name, conv_tag.name):
        if len(inputs[0].shape) != len(views[0].axes.shape):
            raise ValueError(
                f"curvax: {tag.name} was called with images {inputs[0].shape} and a kernel "
                f"{views[0].axes.shape}, which must have as many axes. Inside of jax.vmap, where "
                f"images have more, leave the tag out: convolutions are found there."
            )
        details = convolution_arguments(constants, inputs[0].shape, views[0].axes.shape)
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
    looped = [[atom for dim in view.axes.looped for atom in dim]] if any(view.axes.looped) else []
    arrangement = None
    if all(atom.origin is not None for atom in view.axes.atoms):
        arrangement = Arrangement.of(view.axes.origin_dims(), [*looped, *view.axes.dims])
    plain = arrangement is None or arrangement.is_trivial
    return ParamUse(view.param, view.shape, view.cuts, None if plain else arrangement)


def _loops(lengths: Sequence[int], view: ParamView) -> tuple[Loop, ...]:
    pairs = zip(lengths, view.axes.looped, strict=True)
    return tuple(Loop(length, bool(looped)) for length, looped in pairs)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    dtype = getattr(x, "dtype", None)
    return jax.ShapeDtypeStruct(x.shape, jnp.result_type(x.value) if dtype is None else dtype)


def _batch_axis(name: str, constants: dict[str, Any]) -> int:
    """The axis of the output of a user's tag along which there are examples."""
    if name in (conv2d_tag.name, conv_tag.name):
        numbers = constants.get("dimension_numbers")
        if isinstance(numbers, lax.ConvDimensionNumbers):
            return numbers.out_spec[0]
        if numbers is not None:
            return str(numbers[2]).index("N")
    return 0


def _first_axis(node: Node, axis: int) -> ExamplesAt:
    """The examples of a tag in a program without losses, from which nothing is known of them."""
    shape = node.inputs[0].shape
    return ExamplesAt.along_axis(shape[axis]) if len(shape) > axis else _NO_AXIS


# Running a program with tags.


@dataclass(frozen=True)
class TagSites:
    """Hooks that put a tag at each use of some layers, and collect what losses are made of."""

    layers: Sequence[FoundLayer]
    lifting: Lifting

    def keys_at(self, node: Node) -> Collection[Any] | None:
        found = node in self._uses or is_loss(node) or self.lifting.reads(node)
        return () if found else None

    def is_split(self, key: Any, loop: Node) -> bool:
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
        for site, use in self._uses.get(node, ()):
            if isinstance(site, Match):
                output = _tag_match(site, use, output, values)
            elif isinstance(site, Site) and site.lifted is not None:
                _tag_lifted(site, use, output, values)
            elif isinstance(site, Site):
                output = _tag_part(site, use, output, values)
        return [output, *outputs[1:]], {}

    @functools.cached_property
    def _uses(self) -> dict[Node, list[tuple[Site | Match | Tagged, LayerUse]]]:
        found: dict[Node, list[tuple[Site | Match | Tagged, LayerUse]]] = {}
        for layer in self.layers:
            for site, use in zip(layer.sites, layer.uses, strict=True):
                found.setdefault(site.node, []).append((site, use))
        return found


def tag_generic(layers: Sequence[FoundLayer], params: Sequence[Array]) -> list[Array]:
    """The parameters, those of generic layers tagged."""
    generic = {layer.params[0] for layer in layers if layer.is_generic and not layer.sites}
    return [_tag_param(x, number) if number in generic else x for number, x in enumerate(params)]


def _tag_param(x: Array, number: int) -> Array:
    shape = jnp.shape(x)
    use = GenericUse(
        generic_tag.name,
        generic_tag.name,
        (ParamUse(number, shape, axes=Axes.of(shape)),),
        outputs=(jax.ShapeDtypeStruct(shape, jnp.result_type(x)),),
        examples=ExamplesAt.along_axis(shape[0]) if shape else _NO_AXIS,
    )
    return generic_tag.bind(x, x, use=use)


def _tag_part(site: Site, use: LayerUse, output: Array, values: Values) -> Array:
    """The output, with the part of it tagged that the use is about."""
    if site.part is None:
        return _tag(site, use, output, values)
    axis, start, stop = site.part
    before, own, after = (
        lax.slice_in_dim(output, first, last, axis=axis)
        for first, last in ((0, start), (start, stop), (stop, output.shape[axis]))
    )
    return jnp.concatenate([before, _tag(site, use, own, values), after], axis)


def _tag(site: Site, use: LayerUse, output: Array, values: Values) -> Array:
    factors = [jnp.asarray(values[operand]) for operand in site.factors]
    params = [values[view.operand] for view in site.params]
    scale = site.params[0].scale
    if scale is not None:
        factors[0] = factors[0] * jnp.asarray(scale, factors[0].dtype)
    if site.rows is not None:
        factors = [site.rows.indices(factors[0])]
    constants: dict[str, Any] = dict(site.convolution or {})
    if site.tag is scale_and_shift_tag:
        constants = {"has_scale": site.has_scale, "has_shift": site.has_shift}
        factors = [_product(factors, output.shape, site.part)]
    x, y = factors[0], output
    if use.output_arrangement is not None and use.input_arrangement is not None:
        x, y = use.input_arrangement.apply(x), use.output_arrangement.apply(y)
    use = replace(use, inputs=(_shape(x),), outputs=(_shape(y),))
    tagged = site.tag.bind(y, x, *params, **constants, use=use)
    return tagged if use.output_arrangement is None else use.output_arrangement.undo(tagged)


def _tag_lifted(site: Site, use: LayerUse, output: Array, values: Values) -> None:
    """Tag the lifted output of a use, with a leading axis of examples."""
    (operand,) = site.factors
    repeated = lambda x: jnp.broadcast_to(x, (site.lifted, *jnp.shape(x)))
    x = values.lifted.get(operand)
    x = repeated(jnp.asarray(values[operand])) if x is None else x
    y = values.lifted.get(site.output, repeated(output))
    scale = site.params[0].scale
    if scale is not None:
        x = x * jnp.asarray(scale, x.dtype)
    before, after = use.input_arrangement, use.output_arrangement
    assert before is not None
    assert after is not None
    x, y = before.apply(x), after.apply(y)
    use = replace(use, inputs=(_shape(x),), outputs=(_shape(y),))
    params = [values[view.operand] for view in site.params]
    values.lifted[site.output] = after.undo(site.tag.bind(y, x, *params, use=use))


def _tag_match(match: Match, use: LayerUse, output: Array, values: Values) -> Array:
    pattern = match.pattern
    operands = [values[operand] for operand in (*match.inputs, *match.params)]
    if pattern.in_values_preprocessor is not None:
        operands = list(pattern.in_values_preprocessor(operands))
    constants = pattern.parameters_extractor_func([node.equation for node in match.nodes])
    return pattern.tag_primitive.bind(output, *operands, **{**constants, "use": use})


def _product(
    factors: Sequence[Array], shape: Sequence[int], part: tuple[int, int, int] | None
) -> Array:
    """The product of all factors, or that part of it, in the shape."""
    if part is not None:
        axis, start, stop = part
        factors = [
            x if x.ndim == 0 or x.shape[axis] == 1 else lax.slice_in_dim(x, start, stop, axis=axis)
            for x in factors
        ]
    product = jnp.broadcast_to(factors[0], shape)
    for factor in factors[1:]:
        product = product * jnp.broadcast_to(factor, shape).astype(product.dtype)
    return product
