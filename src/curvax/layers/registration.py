"""`register`: the layers and losses of a function.

`register` traces a function, keeps what its losses are computed from, finds the layers in that and
checks that nothing was lost. Everything else in this package and above it starts from a
`Registration`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from curvax import _jax
from curvax._errors import where
from curvax._jax import Tag
from curvax._types import Array, Fun, PyTree, TreeDef
from curvax.layers.detection.examples import Examples, find_examples
from curvax.layers.detection.layers import FoundLayer, build_layers
from curvax.layers.detection.lifting import Lifting
from curvax.layers.detection.program import (
    Node,
    Operand,
    Program,
    Variable,
    needed_for,
    reached_from,
    read,
    run,
)
from curvax.layers.detection.tagging import (
    LocatedExamples,
    TagUses,
    can_tag,
    describe_uses,
    is_loss,
    tag_generic,
)
from curvax.layers.detection.uses import find_uses
from curvax.layers.patterns import (
    DEFAULT_GRAPH_PATTERNS,
    GraphMatcherComparator,
    GraphPattern,
    matches,
)
from curvax.layers.tags import dense_tag
from curvax.losses.tag import noted_registrations


class RegistrationError(ValueError):
    """Parameters or losses could not be registered as requested.

    Whatever traces a function that registers losses raises it: `auto_register_tags`,
    `explain_registration`, `layer_tags_vjp`, `loss_tags_vjp`, `Optimizer` and the curvature
    estimators. The causes:

    - The function registers no loss, or JAX dropped one from a traced gradient.
    - A loss has no derivative in any parameter, or is computed from mutable references.
    - A loss or a layer is registered inside a `cond`, a `while` loop, a `shard_map`, or a function
      with custom derivatives.
    - No loss depends on some parameter, and `allow_unused_params` is False.
    - A parameter is in several tagged layers, and `allow_multiple_registrations` is False.
    - With `strict`, a parameter is not part of a known kind of layer.
    - Without `auto_register_tags`, a parameter is in no tagged layer.

    Examples:
        >>> import textwrap
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> try:
        ...     curvax.explain_registration(lambda w, x: x @ w, (jnp.ones(3), jnp.ones((2, 3))))
        ... except curvax.RegistrationError as error:
        ...     print(textwrap.fill(str(error), 80))
        curvax.explain_registration: the function registers no loss. Call one of
        curvax.register_* (such as curvax.register_squared_error_loss) on its
        predictions. If it does and a gradient is traced, JAX may have dropped it inside
        `jit`, `checkpoint` or `scan` (which are traced only once): register outside
        them.
    """


@dataclass(frozen=True)
class Options:
    """How to look for layers, with the meanings of the arguments of `auto_register_tags`."""

    only_generic: bool = False
    skipped: tuple[str, ...] = ()
    patterns: tuple[GraphPattern, ...] = DEFAULT_GRAPH_PATTERNS
    comparator: GraphMatcherComparator = field(default_factory=GraphMatcherComparator)
    through_custom: bool = False
    strict: bool = False

    @property
    def all_skipped(self) -> set[str]:
        """Names of the patterns not to look for, including those that were left out."""
        given = {pattern.name for pattern in self.patterns}
        missing = {pattern.name for pattern in DEFAULT_GRAPH_PATTERNS} - given
        further = set() if any(p.is_default for p in self.patterns) else _WITHOUT_PATTERN
        return {*self.skipped, *missing, *further}

    @property
    def repeated_dense(self) -> str:
        """Name of the tag of dense layers with several axes of positions.

        A default pattern whose name begins with "repeated_dense" gives them a tag of their own.
        """
        own = [p for p in self.patterns if p.is_default and p.name.startswith("repeated_dense")]
        return own[0].tag_primitive.name if own else dense_tag.name


_WITHOUT_PATTERN = {"embedding", "conv_with_bias", "conv_no_bias"}
"""Kinds of layers that detection finds and no default pattern describes."""


@dataclass(frozen=True, eq=False)
class Registration:
    """The layers and losses of a function, for arguments of certain shapes.

    Attributes:
        program: The program of the function.
        needed: The part of it that computes the losses.
        in_tree: Structure of the arguments.
        out_tree: Structure of the result.
        params_range: Which of the inputs are parameters.
        names: The paths of the parameters.
        layers: The layers, sorted by the indices of their parameters.
        losses: The loss tags.
        lifting: The values that are given an axis of examples.
        interaction: Name of the operation by which examples interact, if any does.
        closes_over_tracers: Whether the function closes over values of an outer trace, so that the
            registration is valid in that trace only.
    """

    program: Program
    needed: Program
    in_tree: TreeDef
    out_tree: TreeDef
    params_range: range
    names: tuple[str, ...]
    layers: Sequence[FoundLayer]
    losses: Sequence[Node]
    lifting: Lifting
    interaction: str | None
    closes_over_tracers: bool

    @property
    def params(self) -> Sequence[Variable]:
        """The inputs that are parameters."""
        return [self.program.inputs[index] for index in self.params_range]

    def run(self, leaves: Sequence[Array]) -> PyTree:
        """Run the function with its layers tagged."""
        outputs, _ = run(self.program, self._tagged(leaves), TagUses(self.layers, self.lifting))
        return jax.tree.unflatten(self.out_tree, outputs)

    def run_losses(self, leaves: Sequence[Array]) -> tuple[tuple[Array, ...], ...]:
        """Run what the losses are computed from; return what each loss depends on.

        Inside loops, that has a leading axis of steps.
        """
        _, collected = run(self.needed, self._tagged(leaves), TagUses(self.layers, self.lifting))
        return tuple(tuple(collected[node]) for node in self.losses)

    def _tagged(self, leaves: Sequence[Array]) -> list[Array]:
        start, stop = self.params_range.start, self.params_range.stop
        params = tag_generic(self.layers, leaves[start:stop])
        return [*leaves[:start], *params, *leaves[stop:]]


def register(
    func: Fun, func_args: Sequence[PyTree], params_index: int, options: Options
) -> Registration:
    """Find the layers and losses of `func` for arguments like these.

    Raises:
        RegistrationError: If no loss is registered, or one was dropped or has no derivative in any
            parameter; or, with `strict`, if a parameter is not in a layer of a known kind.
        ValueError: If `params_index` is out of range, or a tag has one parameter twice.
        TypeError: If a parameter is not an array of real numbers.
    """
    args = tuple(func_args)
    if not -len(args) <= params_index < len(args):
        raise ValueError(
            f"{where()}: params_index={params_index} is out of range of {len(args)} arguments."
        )
    params_index %= len(args)
    _check_real(args[params_index])
    with noted_registrations() as noted:
        closed, shapes = jax.make_jaxpr(func, return_shape=True)(*args)
    program = read(closed)
    losses = [node for node in program.all_nodes() if is_loss(node)]
    check_tags(program, options.through_custom)
    _check_losses(losses, noted)
    before = sum(len(jax.tree.leaves(arg)) for arg in args[:params_index])
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(args[params_index])]
    needed = needed_for(program, is_loss)
    _check_references(needed)
    params_range = range(before, before + len(paths))
    params = [program.inputs[index] for index in params_range]
    reached = check_reached(needed, losses, params, options.through_custom)
    examples = Examples()
    if not options.only_generic:
        examples = find_examples(needed, params, losses, reached)
    found = find_uses(needed, params, options.through_custom, examples)
    found.drop_unreached(reached)
    lifting = found.lift(needed, reached)
    matched = [
        match
        for pattern in options.patterns
        if not pattern.is_default and pattern.name not in options.skipped
        for match in matches(pattern, needed, found.is_param, options.comparator)
        if can_tag(match)
    ]
    layers = build_layers(
        found, options.all_skipped, options.only_generic, matched, options.repeated_dense
    )
    registration = Registration(
        program,
        needed,
        jax.tree.structure(args),
        jax.tree.structure(shapes),
        params_range,
        tuple(map(jax.tree_util.keystr, paths)),
        describe_uses(layers, LocatedExamples(needed, examples), found),
        losses,
        lifting,
        examples.interaction or None,
        any(map(_jax.is_tracer, closed.consts)),
    )
    if options.strict:
        _check_structured(registration)
    return registration


def registers_loss(func: Fun, func_args: Sequence[PyTree]) -> bool:
    """Return whether a function registers a loss, or tries to, when it is called."""
    with noted_registrations() as noted:
        closed = jax.make_jaxpr(func)(*func_args)
    return bool(noted) or any(is_loss(node) for node in read(closed).all_nodes())


def _check_real(params: PyTree) -> None:
    """Check that all parameters are arrays of real numbers, which have derivatives."""
    dtype: Any = lambda leaf: float if isinstance(leaf, float) else getattr(leaf, "dtype", None)
    kinds = {
        jax.tree_util.keystr(path): dtype(leaf) or type(leaf).__name__
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if dtype(leaf) is None or not jnp.issubdtype(dtype(leaf), jnp.floating)
    }
    of_kinds = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    complex_ones = [kind for kind in kinds.values() if str(kind).startswith("complex")]
    if complex_ones and len(complex_ones) == len(kinds):
        raise TypeError(
            f"{where()}: parameters are arrays of real numbers, but {of_kinds} are complex. Make "
            f"the real and the imaginary part two parameters, and combine them in the model with "
            f"jax.lax.complex(real, imaginary); predictions may be complex."
        )
    if kinds:
        raise TypeError(
            f"{where()}: parameters are arrays of real numbers, but {of_kinds} are not. Keep them "
            f"out of the parameters, as with equinox.partition."
        )


def check_tags(program: Program, through_custom: bool) -> None:
    """Check that tags are only where they can be used."""
    for node in program.all_nodes():
        hidden = node.kind == "opaque" or (node.kind == "custom" and not through_custom)
        inner = _jax.equations_inside(node.equation) if hidden else ()
        tags = {_name_of_tag(x.primitive, x.params) for x in inner if isinstance(x.primitive, Tag)}
        if not tags:
            continue
        inside = f"{where()}: {', '.join(sorted(tags))} is inside"
        if node.kind == "opaque":
            raise RegistrationError(
                f"{inside} `{node.name}`, where it cannot be used. Register losses and layers "
                f"outside `cond`, `while` and `shard_map`; wrap a `shard_map` around curvax's "
                f"functions instead."
            )
        raise RegistrationError(
            f"{inside} `{_jax.function_name(node.equation)}`, which has derivatives of its own. "
            f"Tag what it is called with and what it returns, or pass "
            f"through_custom_derivatives=True, which differentiates through its body."
        )


def _check_references(needed: Program) -> None:
    """Check that no loss is computed from references: values are not followed through them."""
    names = {node.name for node in needed.all_nodes() if _jax.reads_reference(node.equation)}
    if names:
        raise RegistrationError(
            f"{where()}: a loss is computed from mutable references (in "
            f"{', '.join(sorted(names))}), which jax.new_ref creates, and loops under the setting "
            f"jax_scan3. Layers cannot be found behind these: compute with arrays, and leave "
            "jax_scan3 off."
        )


def check_reached(
    program: Program, losses: Sequence[Node], params: Sequence[Variable], through_custom: bool
) -> set[Operand]:
    """Check that each loss has a derivative in some parameter.

    Returns:
        The values in which any loss has a derivative.
    """
    reached: set[Operand] = set()
    constant: list[str] = []
    for node in losses:
        of_loss = reached_from([node], program, through_custom)
        reached |= of_loss
        if params and of_loss.isdisjoint(params):
            constant.append(_name_of_tag(node.equation.primitive, node.params))
    if constant:
        raise RegistrationError(
            f"{where()}: the predictions of {', '.join(constant)} have no derivative in any "
            f"parameter, so that there is no curvature. Register what is computed from the "
            f"parameters, before `stop_gradient`, rounding or a conversion to integers; a loss "
            f"that is meant to be constant needs no registration."
        )
    return reached


def _name_of_tag(tag: Tag, params: dict[str, Any]) -> str:
    return f"{tag.name} (registered at {params['where']})" if "where" in params else tag.name


def _check_losses(losses: Sequence[Node], noted: Sequence[str]) -> None:
    found = {node.params["where"] for node in losses}
    lost = [location for location in dict.fromkeys(noted) if location not in found]
    if lost:
        raise RegistrationError(
            f"{where()}: a loss that was registered at {', '.join(lost)} is not in the traced "
            f"program. Where a gradient is traced, JAX drops what the gradient does not need "
            f"inside `jit`, `checkpoint` and `scan`: compute with what register_* returns, or "
            f"pass the function itself instead."
        )
    if not losses:
        raise RegistrationError(
            f"{where()}: the function registers no loss. Call one of curvax.register_* (such as "
            f"curvax.register_squared_error_loss) on its predictions. If it does and a gradient is "
            f"traced, JAX may have dropped it inside `jit`, `checkpoint` or `scan` (which are "
            f"traced only once): register outside them."
        )


def _check_structured(registration: Registration) -> None:
    wrong = [
        f"\n  {registration.names[layer.params[0]]}: {layer.reason or layer.remark}"
        for layer in registration.layers
        if layer.is_generic or layer.uncovered or layer.has_unknown_examples
    ]
    if wrong:
        raise RegistrationError(
            f"{where()}: with strict=True every parameter must belong to a layer of a known kind "
            f"that covers all its uses, with known examples, but {len(wrong)} of "
            f"{len(registration.names)} do not:"
            f"{''.join(wrong)}"
        )


# `auto_register_tags`: a function with its layers tagged, at arguments of any shape.


class TaggedFunction:
    """A function whose layers are tagged, as `auto_register_tags` returns it.

    It is traced once for each combination of shapes of its arguments.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def loss(w, x):
        ...     return jnp.mean(curvax.register_squared_error_loss(x @ w))
        >>> args = jnp.ones((3, 2)), jnp.ones((4, 3))
        >>> tagged = curvax.auto_register_tags(loss, args, compute_only_loss_tags=False)
        >>> isinstance(tagged, curvax.TaggedFunction), float(tagged(*args))
        (True, 3.0)
    """

    def __init__(
        self, func: Fun, params_index: int, options: Options, compute_only_loss_tags: bool
    ) -> None:
        self._func = func
        self._params_index = params_index
        self._options = options
        self._only_losses = compute_only_loss_tags
        self._known: dict[Any, Registration] = {}

    def registration(self, *func_args: PyTree) -> Registration:
        """Return the layers and losses that were found for arguments like these.

        Arguments:
            func_args: Arguments of the function.

        Returns:
            An internal description; `names` are the paths of the parameters, `layers` the layers.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def loss(w, x):
            ...     return curvax.register_squared_error_loss(x @ w)
            >>> args = jnp.ones((3, 2)), jnp.ones((4, 3))
            >>> found = curvax.auto_register_tags(loss, args).registration(*args)
            >>> [layer.tag_name for layer in found.layers]
            ['dense_tag']
        """
        leaves, tree = jax.tree.flatten(func_args)
        key = tree, _jax.call_key(leaves)
        if key in self._known:
            return self._known[key]
        found = register(self._func, func_args, self._params_index, self._options)
        if not found.closes_over_tracers:  # Otherwise it is valid in this trace only.
            self._known[key] = found
        return found

    def __call__(self, *func_args: PyTree) -> PyTree:
        """Return the result of the function, or what its losses depend on."""
        registration = self.registration(*func_args)
        leaves = jax.tree.leaves(func_args)
        return registration.run_losses(leaves) if self._only_losses else registration.run(leaves)


def auto_register_tags(
    func: Fun,
    func_args: Sequence[PyTree],
    params_index: int = 0,
    register_only_generic: bool = False,
    compute_only_loss_tags: bool = True,
    patterns_to_skip: Sequence[str] = (),
    allow_multiple_registrations: bool = False,
    graph_matcher_rules: GraphMatcherComparator | None = None,
    graph_patterns: Sequence[GraphPattern] = DEFAULT_GRAPH_PATTERNS,
    *,
    strict: bool = False,
    through_custom_derivatives: bool = False,
    allow_unused_params: bool = False,
) -> TaggedFunction:
    """Return a function with a tag for each of its layers.

    Layers are found by what is done with the parameters: they are contracted or convolved with an
    input, multiplied, added, or indexed as an embedding. How the function is written, and which
    transformations are around it, makes no difference. See `explain_registration` for what is
    found.

    Arguments:
        func: Function that registers at least one loss.
        func_args: Sequence of arguments to trace it with.
        params_index: Index of the argument that holds the parameters.
        register_only_generic: Whether to tag as generic all parameters that the function does not
            tag itself.
        compute_only_loss_tags: Whether the result computes only what the losses depend on, and
            returns that instead of what `func` returns.
        patterns_to_skip: Names of the patterns not to look for; see `DEFAULT_GRAPH_PATTERNS`.
        allow_multiple_registrations: Whether a parameter may be in several layers that the user
            tagged. (Uses that are found always form one layer.)
        graph_matcher_rules: How to compare a program with user-supplied patterns.
        graph_patterns: Patterns to look for, in order of precedence.
        strict: Whether to raise if a parameter is not part of a known kind of layer.
        through_custom_derivatives: Whether to look for layers inside functions with custom
            derivatives. Their rules are then not used: JAX differentiates through their bodies.
        allow_unused_params: Whether there may be parameters that no loss depends on. They are then
            generic.

    Returns:
        A function of arguments like `func_args`, of any shapes.

    Raises:
        RegistrationError: If no loss is registered, or one was dropped or has no derivative in any
            parameter; if no loss depends on some parameter, or one is in several layers; or, with
            `strict`, if one is not part of a known kind of layer.
        ValueError: If an argument is invalid, or a tag has one parameter twice.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import curvax
        >>> def loss(w, x):
        ...     return jnp.mean(curvax.register_squared_error_loss(jnp.tanh(x @ w)))
        >>> args = jnp.ones((3, 2)), jnp.ones((4, 3))
        >>> tagged = curvax.auto_register_tags(loss, args, compute_only_loss_tags=False)
        >>> "dense_tag" in str(jax.make_jaxpr(tagged)(*args))
        True
    """
    options = registration_options(
        register_only_generic,
        patterns_to_skip,
        graph_matcher_rules,
        graph_patterns,
        strict,
        through_custom_derivatives,
    )
    tagged = TaggedFunction(func, params_index, options, compute_only_loss_tags)
    registration = tagged.registration(*func_args)
    if not allow_multiple_registrations:
        check_single(registration)
    if not allow_unused_params:
        check_used(registration)
    return tagged


def registration_options(
    register_only_generic: bool = False,
    patterns_to_skip: Sequence[str] = (),
    graph_matcher_rules: GraphMatcherComparator | None = None,
    graph_patterns: Sequence[GraphPattern] = DEFAULT_GRAPH_PATTERNS,
    strict: bool = False,
    through_custom_derivatives: bool = False,
) -> Options:
    """Check the arguments of `auto_register_tags` that say how to look for layers."""
    known = {pattern.name for pattern in (*graph_patterns, *DEFAULT_GRAPH_PATTERNS)}
    known |= _WITHOUT_PATTERN
    unknown = sorted(set(patterns_to_skip) - known)
    if unknown or isinstance(patterns_to_skip, str):
        raise ValueError(
            f"{where()}: patterns_to_skip has {', '.join(unknown) or patterns_to_skip!r}, but the "
            f"patterns are {', '.join(sorted(known))}. Give a sequence of these names."
        )
    return Options(
        only_generic=register_only_generic,
        skipped=tuple(patterns_to_skip),
        patterns=tuple(graph_patterns),
        comparator=graph_matcher_rules or GraphMatcherComparator(),
        through_custom=through_custom_derivatives,
        strict=strict,
    )


def check_single(registration: Registration) -> None:
    """Check that each parameter is in one layer."""
    for index, name in enumerate(registration.names):
        layers = [layer.tag_name for layer in registration.layers if index in layer.params]
        if len(layers) > 1:
            raise RegistrationError(
                f"{where()}: {name} is registered in {len(layers)} layers ({', '.join(layers)}). "
                f"Tag it once, or pass allow_multiple_registrations=True."
            )


def check_used(registration: Registration) -> None:
    """Check that some loss depends on each parameter."""
    unused = [
        registration.names[layer.params[0]] for layer in registration.layers if layer.is_unused
    ]
    if unused:
        raise RegistrationError(
            f"{where()}: no registered loss depends on {', '.join(unused)}. Register the loss that "
            f"does, take them out of the parameters, or pass allow_unused_params=True (in "
            f"curvax.Optimizer: auto_register_kwargs={{'allow_unused_params': True}})."
        )
