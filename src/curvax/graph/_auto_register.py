"""`auto_register_tags`: a function with its layers tagged, at arguments of any shape."""

from collections.abc import Sequence
from typing import Any

import jax

from curvax import _compat
from curvax._types import Fun, PyTree
from curvax.graph._patterns import DEFAULT_GRAPH_PATTERNS, GraphMatcherComparator, GraphPattern
from curvax.graph._registration import Options, Registration, RegistrationError, register

__all__ = ["TaggedFunction", "auto_register_tags", "registration_options"]

_WHERE = "curvax.auto_register_tags"


class TaggedFunction:
    """A function whose layers are tagged. It is traced once for each shape of its arguments."""

    def __init__(
        self, func: Fun, params_index: int, options: Options, compute_only_loss_tags: bool
    ) -> None:
        self._func = func
        self._params_index = params_index
        self._options = options
        self._only_losses = compute_only_loss_tags
        self._known: dict[Any, Registration] = {}

    def registration(self, *func_args: PyTree) -> Registration:
        """What was found at arguments like these."""
        leaves, tree = jax.tree.flatten(func_args)
        key = tree, _compat.call_key(leaves)
        if key in self._known:
            return self._known[key]
        found = register(self._func, func_args, self._params_index, self._options, _WHERE)
        if not found.closes_over_tracers:  # Else it is good for this call only.
            self._known[key] = found
        return found

    def __call__(self, *func_args: PyTree) -> Any:
        """The result of the function, or what its losses depend on."""
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
    """A function with a tag for each of its layers.

    The layers are found by what is done with the parameters: contracted with an input, convolved
    with one, multiplied, added, used as a table. How the function is written, and what
    transformations are around it, makes no difference. See `explain_registration` for what is
    found.

    Arguments:
        func: a function that registers at least one loss.
        func_args: arguments to trace it with, as a sequence.
        params_index: which of them are the parameters.
        register_only_generic: whether to tag all parameters that the function does not tag itself
            as generic.
        compute_only_loss_tags: whether the result computes only what the losses depend on, and
            returns that, instead of what `func` returns.
        patterns_to_skip: the names of patterns not to look for; see `DEFAULT_GRAPH_PATTERNS`.
        allow_multiple_registrations: whether a parameter may be in several layers that the user
            tagged. (Uses that are found are put together, and never are several layers.)
        graph_matcher_rules: how to compare a program with the user's patterns.
        graph_patterns: patterns to look for, those that come first before others.
        strict: whether a parameter that is not part of a known kind of layer is an error.
        through_custom_derivatives: whether to look for layers inside of functions with derivatives
            of their own. These derivatives are then not used: the function is differentiated
            through.
        allow_unused_params: whether there may be parameters that no loss depends on. They are
            generic then.

    Returns:
        A function of arguments like `func_args`, of any shapes.

    Raises:
        RegistrationError: if no loss is registered, or one was lost or has a derivative in no
            parameter; if no loss depends on some parameter, or one is in several layers; or, with
            `strict`, if one is not part of a known kind of layer.
        ValueError: if an argument makes no sense, or a tag names one parameter twice.
    """
    options = registration_options(
        register_only_generic,
        patterns_to_skip,
        graph_matcher_rules,
        graph_patterns,
        strict,
        through_custom_derivatives,
        _WHERE,
    )
    tagged = TaggedFunction(func, params_index, options, compute_only_loss_tags)
    registration = tagged.registration(*func_args)
    if not allow_multiple_registrations:
        check_single(registration, _WHERE)
    if not allow_unused_params:
        check_used(registration, _WHERE)
    return tagged


def registration_options(
    register_only_generic: bool = False,
    patterns_to_skip: Sequence[str] = (),
    graph_matcher_rules: GraphMatcherComparator | None = None,
    graph_patterns: Sequence[GraphPattern] = DEFAULT_GRAPH_PATTERNS,
    strict: bool = False,
    through_custom_derivatives: bool = False,
    where: str = _WHERE,
) -> Options:
    """The options as the user gave them, checked."""
    known = {pattern.name for pattern in (*graph_patterns, *DEFAULT_GRAPH_PATTERNS)}
    known |= {"embedding", "conv_with_bias", "conv_no_bias"}
    unknown = sorted(set(patterns_to_skip) - known)
    if unknown or isinstance(patterns_to_skip, str):
        raise ValueError(
            f"{where}: patterns_to_skip has {', '.join(unknown) or patterns_to_skip!r}, but the "
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


def check_single(registration: Registration, where: str) -> None:
    """Each parameter is in one layer."""
    for number, name in enumerate(registration.names):
        layers = [layer.tag_name for layer in registration.layers if number in layer.params]
        if len(layers) > 1:
            raise RegistrationError(
                f"{where}: {name} is registered in {len(layers)} layers ({', '.join(layers)}). "
                f"Tag it once, or say allow_multiple_registrations=True."
            )


def check_used(registration: Registration, where: str) -> None:
    """Some loss depends on each parameter."""
    unused = [
        registration.names[layer.params[0]] for layer in registration.layers if layer.is_unused
    ]
    if unused:
        raise RegistrationError(
            f"{where}: no registered loss depends on {', '.join(unused)}. Register the loss that "
            f"does, take them out of the parameters, or say allow_unused_params=True."
        )
