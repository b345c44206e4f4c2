"""kfac_jax's `tag_graph_matcher`: patterns of layers, and functions with their layers tagged.

curvax finds layers by what is done with the parameters, and matches only user-supplied patterns
operation by operation. The default patterns stand for what it finds by meaning; with kfac_jax's,
dense layers with several axes of positions get the blocks of the variant "repeated_dense".
"""

import functools
import inspect
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from curvax import _jax
from curvax._types import Array, Fun, PyTree, TreeDef
from curvax.kfac_jax.layers_and_loss_tags import (
    LayerMetaData,
    LayerTag,
    layer_eqn_data,
    layer_eqn_name,
    layer_tag,
    tag_of_variant,
    variant_name,
)
from curvax.layers import patterns, registration, tags
from curvax.layers.detection.layers import Layer
from curvax.layers.tracing.loss_map import ProcessedJaxpr
from curvax.losses.tag import LossTag

T = TypeVar("T")
J = TypeVar("J", bound=_jax.Jaxpr | _jax.ClosedJaxpr)

HIGHER_ORDER_NAMES = ("cond", "while", "scan", "pjit", "jit", "xla_call", "xla_pmap")
ITERATIVE_HIGHER_ORDER_NAMES = ("while", "scan")

EquivalenceRule = Callable[[Any, Any], bool]


# Which operations of a program are those of a pattern.


def reshape_equivalent(equation1: Any, equation2: Any) -> bool:
    """Return whether both equations are a `reshape`; a pattern has sizes of its own."""
    return _are_both("reshape", equation1, equation2)


def broadcast_in_dim_equivalent(equation1: Any, equation2: Any) -> bool:
    """Return whether both equations are a `broadcast_in_dim`; a pattern has sizes of its own."""
    return _are_both("broadcast_in_dim", equation1, equation2)


def conv_general_dilated_equivalent(equation1: Any, equation2: Any) -> bool:
    """Return whether both equations are a convolution with as many spatial axes."""
    both = _are_both("conv_general_dilated", equation1, equation2)
    return both and len(equation1.params["padding"]) == len(equation2.params["padding"])


def dot_general_equivalent(equation1: Any, equation2: Any) -> bool:
    """Return whether both equations contract the same axes."""
    both = _are_both("dot_general", equation1, equation2)
    numbers = [eqn.params["dimension_numbers"] for eqn in (equation1, equation2)] if both else []
    return both and numbers[0] == numbers[1]


def _are_both(name: str, equation1: Any, equation2: Any) -> bool:
    return equation1.primitive.name == equation2.primitive.name == name


_RULES: Mapping[str, EquivalenceRule] = {
    "reshape": reshape_equivalent,
    "broadcast_in_dim": broadcast_in_dim_equivalent,
    "conv_general_dilated": conv_general_dilated_equivalent,
    "dot_general": dot_general_equivalent,
}


class GraphMatcherComparator(patterns.GraphMatcherComparator):
    """Comparison of an operation of a program with one of a pattern.

    Arguments:
        commutative_ops_names: Names of operations whose operands may be in either order.
        special_eqn_equivalence_rules: Functions of two equations of the same name that return
            whether they are the same operation, by that name. Other operations are the same if
            they have the same name and the same parameters.
    """

    def __init__(
        self,
        commutative_ops_names: Sequence[str] = ("add", "mul"),
        special_eqn_equivalence_rules: Mapping[str, EquivalenceRule] = _RULES,
    ) -> None:
        self.commuting = frozenset(commutative_ops_names)
        self._rules = dict(special_eqn_equivalence_rules)

    @property
    def commutative_ops_names(self) -> set[str]:
        """The names of operations whose operands may be in either order."""
        return set(self.commuting)

    @property
    def special_eqn_equivalence_rules(self) -> Mapping[str, EquivalenceRule]:
        """The rules by the names of operations."""
        return self._rules

    def add_commutative_op_name(self, name: str) -> None:
        """Add the name of an operation whose operands may be in either order."""
        if name in self.commuting:
            raise ValueError(f"Commutative op {name!r} has already been added.")
        self.commuting = self.commuting | {name}

    def add_special_equivalence_rule(self, name: str, equivalence_rule: EquivalenceRule) -> None:
        """Add the rule of an operation."""
        if name in self._rules:
            raise ValueError(f"Special equation equivalence rule already exists for {name!r}.")
        self._rules[name] = equivalence_rule

    def are_equivalent(self, equation1: Any, equation2: Any) -> bool:
        """Return whether two equations are the same operation."""
        name = equation1.primitive.name
        if name == equation2.primitive.name and name in self._rules:
            return self._rules[name](equation1, equation2)
        return super().are_alike(equation1, equation2)

    def are_alike(self, pattern: Any, equation: Any) -> bool:
        """Return whether two equations are the same operation; `are_equivalent` by curvax's name.

        Arguments:
            pattern: Equation of the pattern.
            equation: Equation of the program.
        """
        return self.are_equivalent(pattern, equation)


# Patterns.


@dataclass(frozen=True, eq=False)
class GraphPattern(patterns.GraphPattern):
    """A kind of layer to look for, as `curvax.GraphPattern` describes it.

    `tag_primitive` may be `layer_tag`: the variant is then that of the `LayerMetaData` that
    `parameters_extractor_func` returns under "meta". Arrays in `example_args` have the same number
    of axes as in the program; their sizes do not matter. `in_values_preprocessor` is a function of
    arrays to arrays.

    Examples:
        >>> import curvax
        >>> pattern = GraphPattern(
        ...     name="my_repeated_dense",
        ...     tag_primitive=layer_tag,
        ...     compute_func=jax.vmap(
        ...         functools.partial(_dense, axes=1, with_reshape=False), in_axes=[0, [None, None]]
        ...     ),
        ...     parameters_extractor_func=functools.partial(
        ...         _dense_parameter_extractor, variant="repeated_dense"
        ...     ),
        ...     example_args=[np.ones((2, 3, 4)), [np.ones((4, 5)), np.ones(5)]],
        ... )
        >>> def loss(params, x):
        ...     y = jnp.tanh(x @ params["w"] + params["b"])
        ...     return curvax.register_squared_error_loss(y.sum(axis=1))
        >>> args = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}, jnp.ones((4, 5, 3))
        >>> found = curvax.explain_registration(loss, args, graph_patterns=(pattern,))
        >>> [row.tag for row in found.rows]
        ['repeated_dense_tag', 'repeated_dense_tag']
    """

    def __post_init__(self) -> None:
        preprocess = self.in_values_preprocessor
        if preprocess is not None and _num_required(preprocess) != 1:
            raise NotImplementedError(
                f"curvax.kfac_jax.GraphPattern: the in_values_preprocessor of {self.name!r} takes "
                f"variables of a jaxpr and returns equations. Here it is a function of one "
                f"sequence, the inputs and the parameters as arrays, and returns the arrays that "
                f"the tag is called with."
            )

    def tag_of(self, constants: Mapping[str, Any]) -> tags.LayerTag:
        tag = self.tag_primitive
        if not (isinstance(tag, LayerTag) and tag.has_variants):
            return tag
        meta = constants.get("meta")
        if not isinstance(meta, LayerMetaData):
            raise ValueError(
                f"curvax.kfac_jax.GraphPattern: the pattern {self.name!r} has the tag layer_tag, "
                f"so its parameters_extractor_func must return a LayerMetaData under 'meta', got "
                f"{meta!r}. Or give it a LayerTag with a name."
            )
        return tag_of_variant(meta)

    @cached_property
    def graph(self) -> "JaxprGraph":
        """The program to look for."""
        closed, shapes = jax.make_jaxpr(self.compute_func, return_shape=True)(*self.example_args)
        num_inputs = len(jax.tree.leaves(self.example_args[0]))
        return JaxprGraph(
            name=self.name,
            closed_jaxpr=closed,
            params_tree=jax.tree.structure(self.example_args[1]),
            params_vars=list(closed.jaxpr.invars[num_inputs:]),
            out_tree=jax.tree.structure(shapes),
            tag_ctor=None,
        )

    @property
    def jaxpr(self) -> _jax.Jaxpr:
        """The jaxpr of the program to look for."""
        return self.graph.jaxpr

    @property
    def param_vars(self) -> Sequence[_jax.Var]:
        """The variables of the parameters."""
        return self.graph.params_vars

    def tag_ctor(
        self,
        in_vars: Sequence[Any],
        out_vars: Sequence[Any],
        graph_eqns: Sequence[Any],
        make_var_func: Fun,
    ) -> Sequence[Any]:
        """Raise: curvax runs a program with tags, and makes no equations."""
        del in_vars, out_vars, graph_eqns, make_var_func
        raise _not_made("GraphPattern.tag_ctor")


def _num_required(fun: Fun) -> int:
    """Return the number of arguments that a function cannot be called without."""
    given = inspect.signature(fun).parameters.values()
    return sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in given)


def num_unique_inputs(eqns: Sequence[Any]) -> int:
    """Return the number of variables that equations read and do not compute."""
    computed = {v for eqn in eqns for v in eqn.outvars}
    read = {v for eqn in eqns for v in eqn.invars if not _jax.is_literal(v)}
    return len(read - computed)


def _meta(variant: str, num_params: int) -> LayerMetaData:
    params = tuple(range(2, 2 + num_params))
    return LayerMetaData(
        variant=variant, outputs_index=(0,), inputs_index=(1,), params_index=params
    )


def _dense(x: Array, params: Sequence[Array], axes: int, with_reshape: bool) -> Array:
    """Compute a dense layer that contracts the last `axes` of the input."""
    w, *b = params
    y = jnp.tensordot(x, w, axes=axes)
    if not b:
        return y
    bias = b[0].reshape((1, *b[0].shape)) if with_reshape else b[0]
    return y + jnp.broadcast_to(bias, y.shape)


def _dense_parameter_extractor(
    reversed_eqns: Sequence[Any], variant: str = "dense"
) -> dict[str, Any]:
    """Return the static parameters of the tag of a dense layer, from the last equation on."""
    for eqn in reversed_eqns:
        if eqn.primitive.name == "dot_general":
            has_bias = any(eqn.primitive.name in ("add", "add_any") for eqn in reversed_eqns)
            return {"meta": _meta(variant, 2 if has_bias else 1), **eqn.params}
    raise ValueError("There is no `dot_general` among the equations of a dense layer.")


def _make_general_dense_pattern(  # pyright: ignore[reportUnusedFunction]  Clients call it.
    with_bias: bool,
    with_reshape: bool,
    num_repeated_axes: int,
    num_in_dims: int,
    num_out_dims: int,
) -> GraphPattern:
    """Return the pattern of a dense layer, or of a repeated one."""
    inputs, outputs = (tuple(range(2, 2 + n)) for n in (num_in_dims, num_out_dims))
    params = [inputs + outputs, outputs] if with_bias else [inputs + outputs]
    name = f"dense_{'with' if with_bias else 'no'}_bias"
    variant = "repeated_dense" if num_repeated_axes else "dense"
    prefix = f"repeated[{num_repeated_axes}]_" if num_repeated_axes else ""
    return GraphPattern(
        name=f"{prefix}{name}_{'with' if with_reshape else 'no'}_reshape",
        tag_primitive=layer_tag,
        compute_func=functools.partial(_dense, axes=num_in_dims, with_reshape=with_reshape),
        parameters_extractor_func=functools.partial(_dense_parameter_extractor, variant=variant),
        example_args=_zeros((2, *(7,) * num_repeated_axes, *inputs), *params),
    )


def _zeros(inputs: tuple[int, ...], *params: tuple[int, ...]) -> list[Any]:
    return [np.zeros(inputs, np.float32), [np.zeros(shape, np.float32) for shape in params]]


def _conv2d(x: Array, params: Sequence[Array], flax_style: bool) -> Array:
    """Compute a convolution with two spatial axes."""
    w, *b = params
    y = lax.conv_general_dilated(
        x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=1
    )
    if not b:
        return y
    bias = b[0].reshape((1, 1, 1, -1)) if flax_style else b[0]
    return y + jnp.broadcast_to(bias, y.shape)


def _conv2d_parameter_extractor(
    reversed_eqns: Sequence[Any], variant: str = "conv2d"
) -> dict[str, Any]:
    """Return the static parameters of the tag of a convolution, from the last equation on."""
    for eqn in reversed_eqns:
        if eqn.primitive.name == "conv_general_dilated":
            has_bias = any(eqn.primitive.name in ("add", "add_any") for eqn in reversed_eqns)
            return {"meta": _meta(variant, 2 if has_bias else 1), **eqn.params}
    raise ValueError("There is no `conv_general_dilated` among the equations of a convolution.")


def _make_conv2d_pattern(  # pyright: ignore[reportUnusedFunction]  Clients call it.
    with_bias: bool, flax_style: bool
) -> GraphPattern:
    """Return the pattern of a convolution with two spatial axes."""
    params = [(3, 3, 5, 4), (4,)] if with_bias else [(3, 3, 5, 4)]
    return GraphPattern(
        name=f"conv2d_{'with' if with_bias else 'no'}_bias",
        tag_primitive=layer_tag,
        compute_func=functools.partial(_conv2d, flax_style=flax_style),
        parameters_extractor_func=_conv2d_parameter_extractor,
        example_args=_zeros((2, 8, 8, 5), *params),
    )


def _scale_and_shift(x: Array, params: Sequence[Array], has_scale: bool, has_shift: bool) -> Array:
    """Compute a scale, a shift or both."""
    if not (has_scale or has_shift):
        raise ValueError("You must have either `has_scale` or `has_shift` set to True.")
    rest = list(params)
    y = x * jnp.broadcast_to(rest.pop(0), x.shape) if has_scale else x
    return y + jnp.broadcast_to(rest.pop(0), x.shape) if has_shift else y


def _scale_and_shift_parameter_extractor(
    reversed_eqns: Sequence[Any], variant: str = "scale_and_shift"
) -> dict[str, Any]:
    """Return the static parameters of the tag of a scale and shift, from the last equation on."""
    names = {eqn.primitive.name for eqn in reversed_eqns}
    has = {"has_scale": "mul" in names, "has_shift": not names.isdisjoint(("add", "add_any"))}
    return {"meta": _meta(variant, sum(has.values())), **has}


def _make_scale_and_shift_pattern(  # pyright: ignore[reportUnusedFunction]  Clients call it.
    broadcast_ndim: int, has_scale: bool, has_shift: bool, p_dim: int = 13
) -> GraphPattern:
    """Return the pattern of a scale, a shift or both."""
    kind = "scale_and_shift" if has_scale and has_shift else "scale_only"
    kind = kind if has_scale else "shift_only"
    x = (*range(2, 2 + broadcast_ndim), p_dim)
    return GraphPattern(
        name=f"{kind}_broadcast_{broadcast_ndim}",
        tag_primitive=layer_tag,
        compute_func=functools.partial(_scale_and_shift, has_scale=has_scale, has_shift=has_shift),
        parameters_extractor_func=_scale_and_shift_parameter_extractor,
        example_args=_zeros(x, *[(p_dim,)] * (has_scale + has_shift)),
    )


def _normalization_haiku_flax(
    inputs: Sequence[Array],
    params: Sequence[Array],
    has_scale: bool,
    has_shift: bool,
    has_reshape: bool,
) -> Array:
    """Compute the end of a normalisation: the centred input, its inverse deviation, the scale."""
    x, inverse = inputs
    if has_reshape:
        params = [param.reshape((1,) * (x.ndim - 1) + (-1,)) for param in params]
    rest = [jnp.broadcast_to(param, x.shape) for param in params]
    factor = inverse * rest.pop(0) if has_scale else inverse
    return x * factor + rest.pop(0) if has_shift else x * factor


def _normalization_haiku_preprocessor(in_values: Sequence[Array]) -> tuple[Array, ...]:
    """Return the normalised input and the parameters, for the tag of a scale and shift."""
    x, inverse, *params = in_values
    return (x * inverse, *params)


def _make_normalization_haiku_flax_pattern(  # pyright: ignore[reportUnusedFunction]  Clients call it.
    broadcast_ndim: int, has_reshape: bool, p_dim: int = 13, has_shift: bool = True
) -> GraphPattern:
    """Return the pattern of the end of a normalisation, as Haiku and Flax write it."""
    x = np.zeros((*range(2, 2 + broadcast_ndim), p_dim), np.float32)
    params = [np.zeros((p_dim,), np.float32)] * (1 + has_shift)
    return GraphPattern(
        name=f"normalization_haiku_broadcast_{broadcast_ndim}",
        tag_primitive=layer_tag,
        compute_func=functools.partial(
            _normalization_haiku_flax,
            has_scale=True,
            has_shift=has_shift,
            has_reshape=has_reshape,
        ),
        parameters_extractor_func=_scale_and_shift_parameter_extractor,
        example_args=[[x, x], params],
        in_values_preprocessor=_normalization_haiku_preprocessor,
    )


_REPEATED_DENSE = tag_of_variant(_meta("repeated_dense", num_params=1))

DENSE_GRAPH_PATTERNS: tuple[patterns.GraphPattern, ...] = (
    *(
        GraphPattern(
            name=f"repeated_dense_{'with' if with_bias else 'no'}_bias",
            tag_primitive=_REPEATED_DENSE,
            compute_func=functools.partial(_dense, axes=1, with_reshape=False),
            parameters_extractor_func=functools.partial(
                _dense_parameter_extractor, variant="repeated_dense"
            ),
            example_args=_zeros((2, 7, 3), *[(3, 4), (4,)][: 1 + with_bias]),
            is_default=True,
        )
        for with_bias in (True, False)
    ),
    *(p for p in patterns.DEFAULT_GRAPH_PATTERNS if p.tag_primitive is tags.dense_tag),
)
"""Dense layers, the repeated ones under a tag of their own."""

NORMALIZATION_GRAPH_PATTERNS: tuple[patterns.GraphPattern, ...] = tuple(
    p for p in patterns.DEFAULT_GRAPH_PATTERNS if p.name.startswith("normalization")
)
"""Ends of normalisations, which curvax finds by meaning."""

DEFAULT_GRAPH_PATTERNS: tuple[patterns.GraphPattern, ...] = (
    *DENSE_GRAPH_PATTERNS,
    *(p for p in patterns.DEFAULT_GRAPH_PATTERNS if p.tag_primitive is not tags.dense_tag),
)
"""All default patterns, in order of precedence. Prepend your own."""


def curvax_pattern_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of patterns to skip, with curvax's for those of kfac_jax 0.0.8.

    kfac_jax has patterns with and without a reshape of the bias, and for each number of further
    axes. Layers are found by meaning here, so skipping one of them skips all.

    Examples:
        >>> curvax_pattern_names(["dense_with_bias_no_reshape", "conv2d_no_bias", "my_pattern"])
        ('dense_with_bias', 'conv2d_no_bias', 'my_pattern')
    """
    plain = [re.sub(r"_(no|with)_reshape$", "", name) for name in names]
    return tuple(dict.fromkeys(re.sub(r"^repeated\[\d\]_", "repeated_", x) for x in plain))


# Tagged functions.


@dataclass(frozen=True)
class JaxprGraph:
    """A traced function.

    Arguments:
        name: Name of the function.
        closed_jaxpr: Its jaxpr.
        params_tree: Structure of the parameters.
        params_vars: Variables of the parameters.
        out_tree: Structure of the result.
        tag_ctor: Always None here.
    """

    name: str
    closed_jaxpr: _jax.ClosedJaxpr
    params_tree: TreeDef
    params_vars: Sequence[_jax.Var]
    out_tree: TreeDef
    tag_ctor: Fun | None

    @property
    def jaxpr(self) -> _jax.Jaxpr:
        """The jaxpr of the function."""
        return self.closed_jaxpr.jaxpr

    @property
    def consts(self) -> Sequence[Any]:
        """The constants of the jaxpr."""
        return self.closed_jaxpr.consts

    @property
    def outvars(self) -> Sequence[_jax.Atom]:
        """The variables of the result."""
        return self.jaxpr.outvars

    @cached_property
    def losses_eqns(self) -> tuple[_jax.JaxprEqn, ...]:
        """The equations that register losses."""
        return tuple(e for e in self.jaxpr.eqns if isinstance(e.primitive, LossTag))

    @cached_property
    def manual_registrations(self) -> tuple[_jax.JaxprEqn, ...]:
        """The equations that tag layers."""
        return tuple(e for e in self.jaxpr.eqns if isinstance(e.primitive, tags.LayerTag))

    @cached_property
    def var_to_creation_op(self) -> dict[_jax.Var, _jax.JaxprEqn]:
        """The equation that computes each variable."""
        return {v: eqn for eqn in self.jaxpr.eqns for v in eqn.outvars}

    def sub_graph_eqns(
        self, root_vars: Sequence[_jax.Var], leaf_vars: Sequence[_jax.Var]
    ) -> list[_jax.JaxprEqn]:
        """Return the equations that compute `leaf_vars` from `root_vars`, in order."""
        needed, found = set(leaf_vars) - set(root_vars), []
        for eqn in reversed(self.jaxpr.eqns):
            if not needed.isdisjoint(eqn.outvars):
                found.append(eqn)
                needed |= {v for v in eqn.invars if not _jax.is_literal(v)} - set(root_vars)
        return found[::-1]


@dataclass(frozen=True)
class TagLocation:
    """A tag of a layer, and the parameters of the function that it is about.

    Arguments:
        tag_eqn: The equation of the tag.
        parent_equations: Always () here.
        name: Name of the layer; None for that of the equation.
        params: Variables of the function's parameters; None for those of the equation.
    """

    tag_eqn: Any
    parent_equations: Sequence[tuple[Any, int]] = ()
    name: str | None = field(default=None, kw_only=True)
    params: tuple[Any, ...] | None = field(default=None, kw_only=True)

    @property
    def base_name(self) -> str:
        """The name of the layer."""
        return layer_eqn_name(self.tag_eqn) if self.name is None else self.name

    @property
    def full_name(self) -> str:
        """The name of the layer."""
        return self.base_name

    @property
    def bottom_level_parameters(self) -> tuple[Any, ...]:
        """The variables of the parameters in the equation of the tag."""
        data = layer_eqn_data(self.tag_eqn)
        return () if data is None else data.params

    @property
    def top_level_parameters(self) -> tuple[Any, ...]:
        """The variables of the parameters of the function."""
        return self.bottom_level_parameters if self.params is None else self.params

    def add_parent_eqn(self, eqn: Any, counter: int) -> None:
        """Raise: not available here."""
        raise _not_made("TagLocation.add_parent_eqn")


class TaggedFunction:
    """A function whose layers are tagged, for arguments of certain shapes.

    Arguments:
        func_graph: The function.
        tag_locations: Its tags.
    """

    def __init__(self, func_graph: JaxprGraph, tag_locations: Sequence[TagLocation]) -> None:
        self._func_graph = func_graph
        self._tag_locations = tag_locations
        self._param_labels: dict[Any, list[str]] = {}
        for location in tag_locations:
            for variable in location.top_level_parameters:
                self._param_labels.setdefault(variable, []).append(location.full_name)

    def __call__(self, *args: PyTree) -> PyTree:
        """Return what the function returns."""
        outputs = _jax.as_function(self._func_graph.closed_jaxpr)(*jax.tree.leaves(args))
        return jax.tree.unflatten(self._func_graph.out_tree, outputs)

    def check_multiple_registrations(self) -> None:
        """Raise a ValueError if a parameter is in several layers."""
        for name, labels in self._labels().items():
            if len(labels) > 1:
                raise ValueError(
                    f"Parameter {name} has been registered to several tags: {', '.join(labels)}."
                )

    def print_parameter_tags(self) -> None:
        """Log the layers of each parameter."""
        for name, labels in self._labels().items():
            logging.getLogger("curvax").info("%s: %s", name, "|".join(labels) or "Orphan")

    def _labels(self) -> dict[str, list[str]]:
        """Return the layers of each parameter, by its path."""
        graph = self._func_graph
        tree = jax.tree.unflatten(graph.params_tree, list(graph.params_vars))
        paths = jax.tree_util.tree_leaves_with_path(tree)
        return {
            jax.tree_util.keystr(path): self._param_labels.get(variable, [])
            for path, variable in paths
        }


def _locations(layers: Sequence[Layer], params_vars: Sequence[Any]) -> list[TagLocation]:
    """Return where the layers of a function are, with a number for each layer of a variant."""
    counts: Counter[str] = Counter()
    found: list[TagLocation] = []
    for layer in layers:
        variant = variant_name(layer.tag_name)
        name = f"Auto[tag_variant={variant}({counts[variant]})]"
        counts[variant] += 1
        params = tuple(params_vars[k] for k in layer.params)
        found.append(TagLocation(layer.nodes[0].equation, name=name, params=params))
    return found


def auto_register_tags(
    func: Fun,
    func_args: Sequence[PyTree],
    params_index: int = 0,
    register_only_generic: bool = False,
    compute_only_loss_tags: bool = True,
    patterns_to_skip: Sequence[str] = (),
    graph_matcher_rules: patterns.GraphMatcherComparator | None = None,
    graph_patterns: Sequence[patterns.GraphPattern] = DEFAULT_GRAPH_PATTERNS,
) -> TaggedFunction:
    """Return a function with a tag for each of its layers.

    Equal to `curvax.auto_register_tags`, except that dense layers with further axes have the
    variant "repeated_dense".

    Arguments:
        func: Function that registers at least one loss.
        func_args: Sequence of arguments to trace it with.
        params_index: Index of the argument that holds the parameters.
        register_only_generic: Whether to tag as generic all parameters that the function does not
            tag itself.
        compute_only_loss_tags: Whether the result computes only what the losses depend on, and
            returns that instead of what `func` returns.
        patterns_to_skip: Names of the patterns not to look for.
        graph_matcher_rules: How to compare a program with user-supplied patterns.
        graph_patterns: Patterns to look for, in order of precedence.

    Returns:
        A function of arguments of the shapes of `func_args`.
    """
    tagged = registration.auto_register_tags(
        func,
        func_args,
        params_index,
        register_only_generic,
        compute_only_loss_tags,
        curvax_pattern_names(patterns_to_skip),
        graph_matcher_rules=graph_matcher_rules or GraphMatcherComparator(),
        graph_patterns=tuple(graph_patterns),
        allow_unused_params=True,
    )
    args = tuple(func_args)
    closed, shapes = jax.make_jaxpr(tagged, return_shape=True)(*args)
    processed = ProcessedJaxpr(
        closed.jaxpr,
        closed.consts,
        jax.tree.structure(args),
        params_index % len(args),
        allow_left_out_params=True,
        describes_own_params=True,
    )
    params_vars = processed.params_vars_flat
    graph = JaxprGraph(
        name="main",
        closed_jaxpr=closed,
        params_tree=processed.params_tree,
        params_vars=params_vars,
        out_tree=jax.tree.structure(shapes),
        tag_ctor=None,
    )
    return TaggedFunction(graph, _locations(processed.layers, params_vars))


# Jaxprs.


def to_closed_jaxpr(jaxpr: Any) -> _jax.ClosedJaxpr:
    """Return a jaxpr without constants as a closed one; a closed one as it is."""
    return jaxpr if hasattr(jaxpr, "consts") else _jax.closed(jaxpr, ())


def to_jaxpr_or_closed_jaxpr(closed_jaxpr: Any, original: J) -> J:
    """Return a closed jaxpr as it is, or without its constants, like the original."""
    return closed_jaxpr if hasattr(original, "consts") else closed_jaxpr.jaxpr


def eval_jaxpr_eqn(eqn: _jax.JaxprEqn, in_values: Sequence[Any]) -> list[Any]:
    """Return the outputs of an equation for these values of its operands."""
    return list(_jax.run_equation(eqn, in_values))


def read_env(env: Mapping[Any, T], variables: Sequence[Any]) -> list[T]:
    """Return the values of variables; literals are their own values."""
    return [v.val if _jax.is_literal(v) else env[v] for v in variables]


def write_env(env: dict[Any, T], variables: Sequence[Any], values: Sequence[T]) -> None:
    """Set the values of variables."""
    if len(variables) != len(values):
        raise ValueError("Variables and values are of different lengths.")
    env.update(zip(variables, values, strict=True))


# kfac_jax's own matching works on jaxprs of its own making. Of it, 0.0.8's documentation says
# nothing; curvax matches in another way.


def _not_made(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"curvax.kfac_jax.tag_graph_matcher.{name}: this is a step of kfac_jax's own matching that "
        f"its documentation does not describe. Give patterns to auto_register_tags as "
        f"graph_patterns, and see curvax.explain_registration for what is found."
    )


class GraphMatch:
    """A match of kfac_jax's own; not available here."""

    def __init__(self, pattern: Any, variables_map: Any, graph_eqns: Any) -> None:
        raise _not_made("GraphMatch")


def apply_to_higher_order_primitives(eqn: Any, func: Any) -> Any:
    """Raise: not available here."""
    raise _not_made("apply_to_higher_order_primitives")


def clean_jaxpr(
    jaxpr: Any, preserve_tags: bool = True, outvar_is_dep: tuple[bool, ...] | None = None
) -> Any:
    """Raise: not available here."""
    raise _not_made("clean_jaxpr")


def clean_layer_tags_jaxpr(jaxpr: Any, only_remove_auto_tags: bool = False) -> Any:
    """Raise: not available here."""
    raise _not_made("clean_layer_tags_jaxpr")


def merge_broadcasts_jaxpr(jaxpr: Any) -> Any:
    """Raise: not available here."""
    raise _not_made("merge_broadcasts_jaxpr")


def make_jax_graph(
    func: Any,
    func_args: Any,
    params_index: Any,
    name: str,
    compute_only_loss_tags: bool,
    clean_broadcasts: bool,
    tag_ctor: Any = None,
) -> Any:
    """Raise: not available here."""
    raise _not_made("make_jax_graph")


def match_equations(
    graph: Any,
    current_variables_map: Any,
    reversed_eqns_to_match: Any,
    input_vars: Any,
    param_variables: Any,
    graph_matcher_rules: Any,
    matchable_graph_params: Any,
) -> Any:
    """Raise: not available here."""
    raise _not_made("match_equations")


def match_pattern(
    graph: Any, root_eqn: Any, pattern: Any, graph_matcher_rules: Any, matchable_graph_params: Any
) -> Any:
    """Raise: not available here."""
    raise _not_made("match_pattern")


def find_layer_tags_and_patterns(
    graph: Any,
    eqns_for_patterns: Any,
    graph_matcher_rules: Any,
    graph_patterns: Any,
    matchable_params: Any,
) -> Any:
    """Raise: not available here."""
    raise _not_made("find_layer_tags_and_patterns")
