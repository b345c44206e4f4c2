"""`GraphPattern`: a user-defined kind of layer, given as a small function to look for in a program.

A pattern is found where the program computes what the pattern's function computes, operation by
operation, from values of the program and parameters, in whatever steps these are broadcast. A
`GraphMatcherComparator` decides which operations are the same. The default patterns are not matched
in this way: they name what detection finds by meaning (`detection/uses.py`), so that it can be
skipped.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from curvax._types import Array, Fun, PyTree
from curvax.layers.detection.program import (
    Constant,
    Node,
    Operand,
    Program,
    Variable,
    trace_program,
)
from curvax.layers.tags import LayerTag, conv2d_tag, dense_tag, scale_and_shift_tag


class GraphMatcherComparator:
    """Comparison of an operation of a program with one of a pattern.

    Two operations are the same if they have the same name and the same parameters, except for sizes
    of arrays, precision and sharding (`ignored`). The operands of operations that commute
    (`commuting`) may be in either order. Subclass it to compare in another way.

    Examples:
        >>> import curvax
        >>> class AlsoSubtractions(curvax.GraphMatcherComparator):
        ...     commuting = curvax.GraphMatcherComparator.commuting | {"sub"}
        >>> sorted(AlsoSubtractions().commuting)
        ['add', 'add_any', 'max', 'min', 'mul', 'sub']
    """

    ignored: frozenset[str] = frozenset(
        {
            "shape",
            "new_sizes",
            "sharding",
            "out_sharding",
            "out_type",
            "preferred_element_type",
            "precision",
            "accuracy",
            "weak_type",
            "slice_sizes",
            "limit_indices",
            "stacked",
        }
    )
    commuting: frozenset[str] = frozenset({"add", "mul", "max", "min", "add_any"})

    def are_alike(self, pattern: Any, equation: Any) -> bool:
        """Return whether two equations of jaxprs are the same operation.

        Arguments:
            pattern: Equation of the pattern.
            equation: Equation of the program.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import curvax
            >>> first = lambda f: jax.make_jaxpr(f)(jnp.ones(3)).eqns[0]
            >>> compare = curvax.GraphMatcherComparator().are_alike
            >>> compare(first(jnp.sin), first(jnp.sin)), compare(first(jnp.sin), first(jnp.cos))
            (True, False)
        """
        if pattern.primitive is not equation.primitive:
            return False
        names = {*pattern.params, *equation.params} - self.ignored
        return all(_same(pattern.params.get(name), equation.params.get(name)) for name in names)


@dataclass(frozen=True, eq=False)
class GraphPattern:
    """A kind of layer to look for.

    Arguments:
        name: Name of the pattern, in reports and in `patterns_to_skip`.
        tag_primitive: `LayerTag` of the layer.
        compute_func: Function `compute_func(inputs, params)` to look for. `params` is a sequence of
            parameters. It returns the output of the layer.
        parameters_extractor_func: Function from the equations that were matched, last one first, to
            the static parameters of the tag.
        example_args: Example values of `inputs` and `params`. Only their numbers of axes matter.
        in_values_preprocessor: Function from the inputs and the parameters that were matched, in
            one sequence, to the sequence of arrays that the tag is called with after the output.
            By default these arrays themselves.
        is_default: Whether detection finds the layer by meaning, without matching.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> tag = curvax.LayerTag("sine_tag", num_inputs=1, num_outputs=1)
        >>> pattern = curvax.GraphPattern(
        ...     name="sine",
        ...     tag_primitive=tag,
        ...     compute_func=lambda x, params: jnp.sin(x * params[0]),
        ...     parameters_extractor_func=lambda equations: {},
        ...     example_args=(jnp.ones((2, 3)), [jnp.ones((2, 3))]),
        ... )
        >>> loss = lambda w, x: curvax.register_squared_error_loss(jnp.sin(x * w))
        >>> args = jnp.ones((4, 3)), jnp.ones((4, 3))
        >>> report = curvax.explain_registration(loss, args, graph_patterns=[pattern])
        >>> report.rows[0].tag
        'sine_tag'
    """

    name: str
    tag_primitive: LayerTag
    compute_func: Fun
    parameters_extractor_func: Callable[[Sequence[Any]], Mapping[str, Any]]
    example_args: Sequence[PyTree]
    in_values_preprocessor: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    is_default: bool = field(default=False, kw_only=True)

    def compute(self, x: Array, params: Sequence[Array]) -> Array:
        """Compute a layer that has a single input.

        Arguments:
            x: The input, an array.
            params: The parameters, in the order of their leaves.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> pattern = curvax.DEFAULT_GRAPH_PATTERNS[0]
            >>> pattern.name
            'dense_with_bias'
            >>> pattern.compute(jnp.ones((2, 3)), [jnp.ones((3, 1)), jnp.ones(1)])
            Array([[4.],
                   [4.]], dtype=float32)
        """
        trees = [jax.tree.structure(example) for example in self.example_args]
        inputs = jax.tree.unflatten(trees[0], [x])
        return self.compute_func(inputs, jax.tree.unflatten(trees[1], list(params)))

    def tag_of(self, constants: Mapping[str, Any]) -> LayerTag:
        """Return the tag of a layer that the pattern found: `tag_primitive`.

        Override it if the tag depends on what was found.

        Arguments:
            constants: What `parameters_extractor_func` returned.

        Examples:
            >>> import curvax
            >>> curvax.DEFAULT_GRAPH_PATTERNS[0].tag_of({})
            dense_tag
        """
        del constants
        return self.tag_primitive

    def program(self) -> tuple[Program, int]:
        """Return the program to look for, and the number of its inputs that are not parameters.

        Examples:
            >>> import curvax
            >>> program, num_inputs = curvax.DEFAULT_GRAPH_PATTERNS[1].program()
            >>> [node.name for node in program.nodes], num_inputs
            (['dot_general'], 1)
        """
        return self._program, len(jax.tree.leaves(self.example_args[0]))

    @cached_property
    def _program(self) -> Program:
        program, _ = trace_program(self.compute_func, *self.example_args)
        return program


@dataclass(frozen=True, eq=False)
class Match:
    """A use of a layer that a pattern found.

    Attributes:
        pattern: The pattern.
        nodes: The nodes that compute the layer, the last one first.
        output: Output of the layer.
        inputs: Inputs of the layer.
        params: Operands that are the parameters of the layer.
        views: The `ParamView`s of these, once they are known.
    """

    pattern: GraphPattern
    nodes: Sequence[Node]
    output: Variable
    inputs: Sequence[Operand]
    params: Sequence[Operand]
    views: tuple[Any, ...] = ()

    @property
    def node(self) -> Node:
        """The node that computes the output."""
        return self.nodes[0]

    @cached_property
    def constants(self) -> dict[str, Any]:
        """The static parameters of the tag."""
        extract = self.pattern.parameters_extractor_func
        return dict(extract([node.equation for node in self.nodes]))

    @cached_property
    def tag(self) -> LayerTag:
        """The tag of the layer."""
        return self.pattern.tag_of(self.constants)


def matches(
    pattern: GraphPattern,
    program: Program,
    params: Callable[[Operand], bool],
    comparator: GraphMatcherComparator,
) -> list[Match]:
    """Find a pattern in a program, bodies included.

    Arguments:
        pattern: The pattern.
        program: The program.
        params: Function that says whether an operand is a parameter.
        comparator: How to compare operations.
    """
    wanted, num_inputs = pattern.program()
    (last,) = wanted.outputs
    found: list[Match] = []
    pattern_made_by: dict[Operand, Node] = {o: node for node in wanted.nodes for o in node.outputs}
    bodies = [program, *(n.body for n in program.all_nodes() if n.body is not None)]
    for body in bodies:
        made_by: dict[Operand, Node] = {o: node for node in body.nodes for o in node.outputs}
        for node in body.nodes:
            if len(node.outputs) != 1:
                continue
            matcher = _Matcher(pattern_made_by, made_by, comparator)
            bound = matcher.unify(last, node.outputs[0], _Bound({}, ()))
            if bound is None or not all(v in bound.operands for v in wanted.inputs):
                continue
            operands = [bound.operands[v] for v in wanted.inputs]
            if all(map(params, operands[num_inputs:])):
                found.append(
                    Match(
                        pattern,
                        bound.nodes,
                        node.outputs[0],
                        operands[:num_inputs],
                        operands[num_inputs:],
                    )
                )
    return found


@dataclass(frozen=True)
class _Bound:
    """The operands that stand for those of the pattern, and the nodes matched so far."""

    operands: dict[Operand, Operand]
    nodes: tuple[Node, ...]

    def with_operand(self, wanted: Operand, operand: Operand) -> "_Bound":
        return _Bound({**self.operands, wanted: operand}, self.nodes)

    def with_nodes(self, nodes: Sequence[Node]) -> "_Bound":
        return _Bound(self.operands, (*self.nodes, *nodes))


@dataclass(frozen=True)
class _Broadcast:
    """How an operand is broadcast from another, by any number of operations.

    The same array is broadcast in one step or in several, by `broadcast_in_dim` or by a `reshape`
    that adds axes of length one, depending on how a model is written and on the transformations
    around it. Casts between real types count as well.

    Attributes:
        source: What is broadcast.
        axes: The axis of the source that each axis of the result is; None for a new one.
        nodes: The operations, the last one first.
    """

    source: Operand
    axes: tuple[int | None, ...]
    nodes: tuple[Node, ...]

    @classmethod
    def to(cls, operand: Operand, made_by: Mapping[Operand, Node]) -> "_Broadcast":
        """Return how an operand of a program is broadcast, from as far back as it is."""
        axes: tuple[int | None, ...] = tuple(range(len(operand.shape)))
        nodes: list[Node] = []
        while (node := made_by.get(operand)) is not None:
            step = _broadcast_axes(node)
            if step is None:
                break
            axes = tuple(None if axis is None else step[axis] for axis in axes)
            nodes.append(node)
            operand = node.inputs[0]
        return cls(operand, axes, tuple(nodes))

    @property
    def is_cast(self) -> bool:
        """Whether the operand is the source in another type, not broadcast."""
        is_same = self.axes == tuple(range(len(self.source.shape)))
        return bool(self.nodes) and is_same


def _broadcast_axes(node: Node) -> tuple[int | None, ...] | None:
    """Return the axis of the input that each axis of the output is; None if it is no broadcast."""
    if node.name not in ("convert_element_type", "broadcast_in_dim", "reshape"):
        return None
    (source, *others), (output,) = node.inputs, node.outputs
    if others or not all(map(_is_real, (source, output))):
        return None
    before, after = source.shape, output.shape
    if node.name == "convert_element_type":
        return tuple(range(len(after)))
    if node.name == "broadcast_in_dim":
        dims = node.params["broadcast_dimensions"]
        kept = {dim: axis for axis, dim in enumerate(dims) if before[axis] == after[dim]}
        return tuple(kept.get(dim) for dim in range(len(after)))
    if [n for n in before if n != 1] != [n for n in after if n != 1]:
        return None
    # Axes of length one are added or removed; a scalar or a feature is at the end.
    left, axes = list(range(len(before))), []
    for size in reversed(after):
        while left and before[left[-1]] == 1 != size:
            left.pop()
        axes.append(left.pop() if left and before[left[-1]] == size else None)
    return tuple(reversed(axes))


def _is_real(operand: Operand) -> bool:
    dtype = jnp.result_type(operand.value) if isinstance(operand, Constant) else operand.dtype
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


@dataclass(frozen=True)
class _Matcher:
    pattern_made_by: dict[Operand, Node]
    made_by: dict[Operand, Node]
    comparator: GraphMatcherComparator

    def unify(self, wanted: Operand, operand: Operand, bound: _Bound) -> _Bound | None:
        """Return `bound` with an operand for the wanted one; None if they do not match."""
        if isinstance(wanted, Constant):
            known = isinstance(operand, Constant) and _same(wanted.value, operand.value)
            return bound if known else None
        if wanted in bound.operands:
            return bound if bound.operands[wanted] is operand else None
        here = bound.with_operand(wanted, operand)
        made = self.pattern_made_by.get(wanted)
        if made is None:  # An input of the pattern.
            return here if len(wanted.shape) == len(operand.shape) else None
        in_pattern = _Broadcast.to(wanted, self.pattern_made_by)
        in_program = _Broadcast.to(operand, self.made_by)
        if in_pattern.nodes:
            is_same = in_pattern.axes == in_program.axes
            here = here.with_nodes(in_program.nodes)
            return self.unify(in_pattern.source, in_program.source, here) if is_same else None
        if in_program.is_cast:
            return self.unify(wanted, in_program.source, bound.with_nodes(in_program.nodes))
        return self._unify_nodes(made, self.made_by.get(operand), here)

    def _unify_nodes(self, made: Node, node: Node | None, bound: _Bound) -> _Bound | None:
        """Return `bound` with the operands of a node for those of a node of the pattern."""
        if node is None or not self.comparator.are_alike(made.equation, node.equation):
            return None
        orders = [node.inputs]
        if node.name in self.comparator.commuting:
            orders.append(node.inputs[::-1])
        for order in orders:
            result: _Bound | None = bound.with_nodes((node,))
            for wanted_input, node_input in zip(made.inputs, order, strict=True):
                result = None if result is None else self.unify(wanted_input, node_input, result)
            if result is not None:
                return result
        return None


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    arrays = [isinstance(x, np.ndarray | np.generic | jax.Array) for x in (a, b)]
    if any(arrays):
        return jnp.shape(a) == jnp.shape(b) and bool(np.all(np.asarray(a) == np.asarray(b)))
    return type(a) is type(b) and a == b


def _default(
    name: str, tag: LayerTag, compute: Fun, inputs: tuple[int, ...], *params: tuple[int, ...]
) -> GraphPattern:
    example = np.zeros(inputs, np.float32), [np.zeros(shape, np.float32) for shape in params]
    return GraphPattern(name, tag, compute, lambda _: {}, example, is_default=True)


def _dense(x: Array, params: Sequence[Array]) -> Array:
    w, *b = params
    return jnp.dot(x, w) + b[0] if b else jnp.dot(x, w)


def _conv2d(x: Array, params: Sequence[Array]) -> Array:
    w, *b = params
    layout = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=layout)
    return y + b[0] if b else y


def _scale_and_shift(x: Array, params: Sequence[Array]) -> Array:
    scale, shift = params
    return x * scale + shift


def _normalization_haiku(x: Array, params: Sequence[Array]) -> Array:
    scale, shift = params
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    inverse = lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5)
    return (scale * inverse) * centred + shift


DEFAULT_GRAPH_PATTERNS: tuple[GraphPattern, ...] = (
    _default("dense_with_bias", dense_tag, _dense, (11, 13), (13, 7), (7,)),
    _default("dense_no_bias", dense_tag, _dense, (11, 13), (13, 7)),
    _default("conv2d_with_bias", conv2d_tag, _conv2d, (2, 8, 8, 5), (3, 3, 5, 4), (4,)),
    _default("conv2d_no_bias", conv2d_tag, _conv2d, (2, 8, 8, 5), (3, 3, 5, 4)),
    *(
        _default(f"{name}_broadcast_{k}", scale_and_shift_tag, compute, (2,) * k + (13,), *shapes)
        for name, compute, shapes in (
            ("scale_and_shift", _scale_and_shift, ((13,), (13,))),
            ("normalization_haiku", _normalization_haiku, ((13,), (13,))),
            ("scale_only", lambda x, params: x * params[0], ((13,),)),
            ("shift_only", lambda x, params: x + params[0], ((13,),)),
        )
        for k in (1, 0)
    ),
)
"""The kinds of layers that detection finds, under the names that `patterns_to_skip` takes."""
