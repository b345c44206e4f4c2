"""`build_layers`: from uses of parameters to layers, one for each parameter.

Uses of the same parameters in the same way form one layer. A bias stays with its weights if it goes
with them in all uses; otherwise it is a layer of its own. A parameter is generic if something else
also consumes it, or if its uses are not alike; the layer then says why.
"""

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from curvax.layers.detection.axes import Arrangement
from curvax.layers.detection.candidates import CandidateUse, ParamView, Reason
from curvax.layers.detection.program import Node
from curvax.layers.detection.uses import Consumer, Interpreter
from curvax.layers.patterns import Match
from curvax.layers.tags import dense_tag, embedding_tag, generic_tag, scale_and_shift_tag
from curvax.layers.use import ExampleProblem, LayerUse, Slice, group_by_examples

Consumers = dict[int, list[Consumer]]
"""For each parameter, by its index, the operations that consume it."""

_UNUSED = "no loss depends on it"
_NO_DERIVATIVE = "no loss has a derivative in it"


class ExistingTag(NamedTuple):
    """A tag that the program has already: its node and its parameters."""

    node: Node
    params: tuple[ParamView, ...]


UseSource = CandidateUse | Match | ExistingTag
"""Where a use comes from: detection, a user-supplied pattern, or a tag in the program."""


@dataclass(frozen=True, eq=False)
class FoundLayer:
    """Parameters that belong together, and their uses in a program.

    Attributes:
        tag_name: Name of the tag of the layer.
        params: Indices of the parameters.
        sources: Where each use comes from.
        uses: What the layer does in each use.
        reason: Why the layer is generic, if it is.
        uncovered: Number of uses of the parameters that the layer does not cover.
        why_uncovered: Why it does not cover them.
    """

    tag_name: str
    params: tuple[int, ...]
    sources: tuple[UseSource, ...] = ()
    uses: tuple[LayerUse, ...] = ()
    reason: Reason = ""
    uncovered: int = 0
    why_uncovered: str = ""

    @property
    def is_unused(self) -> bool:
        """Whether no loss depends on it."""
        return self.reason == _UNUSED

    @property
    def num_uses(self) -> int:
        """The number of uses."""
        return len(self.sources)

    @property
    def remark(self) -> str:
        """What to tell the user about a layer that is not generic."""
        remarks: list[str] = []
        if self.uncovered:
            why = f" ({self.why_uncovered})" if self.why_uncovered else ""
            uses = "use is" if self.uncovered == 1 else "uses are"
            remarks.append(f"{self.uncovered} more {uses} not covered by the layer{why}")
        if self.example_problem is not None:
            remarks.append(self.example_problem.remark)
        return "; ".join(remarks)

    @property
    def example_problem(self) -> ExampleProblem | None:
        """What is wrong with the examples that the layer is applied to; None if nothing is."""
        if self.is_generic:
            return None
        at = [use.examples for use in self.uses]
        groups = group_by_examples(at)
        if isinstance(groups, ExampleProblem):
            return groups
        return next((each.any_problem for each in at if each.any_problem is not None), None)

    @property
    def has_unknown_examples(self) -> bool:
        """Whether it is not known which examples it is applied to, or where these are."""
        return self.example_problem is not None and self.example_problem.makes_unknown

    @property
    def is_generic(self) -> bool:
        """Whether nothing is known of it but its parameter."""
        return self.tag_name == generic_tag.name


class TaggedUse(NamedTuple):
    """A use of a layer, and the node of its tag."""

    node: Node
    use: LayerUse


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer of a tagged program.

    Attributes:
        tag_name: Name of the tag of the layer.
        params: Indices of the parameters.
        tags: The tags of its uses.
    """

    tag_name: str
    params: tuple[int, ...]
    tags: tuple[TaggedUse, ...]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of its tags."""
        return tuple(tag.node for tag in self.tags)

    @property
    def uses(self) -> tuple[LayerUse, ...]:
        """Its uses."""
        return tuple(tag.use for tag in self.tags)

    @property
    def is_generic(self) -> bool:
        """Whether nothing is known of it but its parameter."""
        return self.tag_name == generic_tag.name


def layers_of_tags(tags: Iterable[TaggedUse]) -> list[Layer]:
    """Group the tags of a program into layers, sorted by the indices of their parameters."""
    found: dict[tuple[str, tuple[int, ...]], list[TaggedUse]] = {}
    for tag in tags:
        params = tuple(param.index for param in tag.use.params)
        found.setdefault((tag.use.layer, params), []).append(tag)
    layers = [Layer(*key, tuple(of_layer)) for key, of_layer in found.items()]
    return sorted(layers, key=lambda layer: layer.params)


def build_layers(
    found: Interpreter,
    skipped: Collection[str] = (),
    only_generic: bool = False,
    matched: Sequence[Match] = (),
    repeated_dense: str = dense_tag.name,
) -> list[FoundLayer]:
    """Group uses into layers, sorted by the indices of their parameters.

    Layers that the user tagged come before those that user-supplied patterns found, and these
    before all others.

    Arguments:
        found: The consumers of each parameter, and the tags in the program.
        skipped: Names of the patterns not to look for.
        only_generic: Whether all parameters that are not tagged are generic.
        matched: The matches of user-supplied patterns.
        repeated_dense: Name of the tag of dense layers with several axes of positions.
    """
    consumers = {param: list(of_param) for param, of_param in found.consumers.items()}
    layers = _tagged_layers(found, consumers)
    if not only_generic:
        layers += _matched_layers(found, consumers, matched, layers)
    left = [param for param in consumers if not any(param in layer.params for layer in layers)]
    _separate_taken(consumers, left)
    if only_generic:
        layers += [_generic(param, "only generic layers were asked for") for param in left]
        return sorted(layers, key=lambda layer: layer.params)
    _separate_biases(consumers, left, skipped)
    for param in left:
        if param in found.without_derivative:
            layers.append(_generic(param, _NO_DERIVATIVE))
            continue
        layer = _layer_of(param, consumers, skipped)
        if layer is None:
            continue
        is_repeated = repeated_dense != dense_tag.name and _is_repeated(layer)
        layers += _as_repeated(layer, repeated_dense, skipped) if is_repeated else [layer]
    return sorted(layers, key=lambda layer: layer.params)


def _layer_of(param: int, consumers: Consumers, skipped: Collection[str]) -> FoundLayer | None:
    """Return the layer of which a parameter is the first; None if it is only a bias."""
    of_param = consumers[param]
    if not of_param:
        return _generic(param, _UNUSED)
    counting = _counting(of_param)
    reasons = list(dict.fromkeys(each.reason for each in counting if each.use is None))
    if reasons:
        return _generic(param, "; ".join(reasons))
    uses = [each.use for each in counting if each.use is not None]
    if all(_is_bias(param, use) for use in uses):
        return None
    names = {pattern_of(use) for use in uses}
    if names & set(skipped):
        return _generic(param, f"the pattern {', '.join(sorted(names & set(skipped)))} is skipped")
    if not _form_one_layer(uses):
        kinds = ", ".join(sorted({use.tag.name for use in uses}))
        return _generic(param, f"it is used in ways that do not go together ({kinds})")
    # An embedding that is also a matrix is an embedding; weights with a bias are weights.
    order = lambda name: (name != embedding_tag.name, name == scale_and_shift_tag.name)
    uncovered = [each.reason for each in of_param if each not in counting]
    return FoundLayer(
        min((use.tag.name for use in uses), key=order),
        tuple(view.param for view in uses[0].params),
        tuple(uses),
        uncovered=len(uncovered),
        why_uncovered="; ".join(dict.fromkeys(uncovered)),
    )


def _is_repeated(layer: FoundLayer) -> bool:
    """Return whether a layer is dense, with several axes of positions in some use."""
    uses = [source for source in layer.sources if isinstance(source, CandidateUse)]
    return layer.tag_name == dense_tag.name and any(len(use.positions) > 1 for use in uses)


def _as_repeated(layer: FoundLayer, tag_name: str, skipped: Collection[str]) -> list[FoundLayer]:
    """Return a repeated dense layer under its own tag, or generic ones if that is skipped."""
    names = {f"repeated_{pattern_of(s)}" for s in layer.sources if isinstance(s, CandidateUse)}
    if names & set(skipped):
        reason = f"the pattern {', '.join(sorted(names))} is skipped"
        return [_generic(param, reason) for param in layer.params]
    return [replace(layer, tag_name=tag_name)]


def _counting(consumers: Sequence[Consumer]) -> Sequence[Consumer]:
    """Return the consumers that differ from example to example; all if there are none.

    Others occur where a derivative of a network, in a direction that is the same for all examples,
    is part of a loss.
    """
    return [each for each in consumers if not each.is_constant] or consumers


def _generic(param: int, reason: Reason) -> FoundLayer:
    return FoundLayer(generic_tag.name, (param,), reason=reason)


def _is_bias(param: int, use: CandidateUse) -> bool:
    return use.params[0].param != param


def _form_one_layer(uses: Sequence[CandidateUse]) -> bool:
    """Return whether uses can be those of one layer.

    The slices of a parameter that are used do not overlap, and each is used in the same way, with
    the same slice of the bias, wherever it is used. Some slices may be weights and others scales or
    shifts: layers and their biases that are sliced from one array.
    """
    slices = [tuple(view.slices for view in use.params) for use in uses]
    roles = {(of_use, _role(use)) for of_use, use in zip(slices, uses, strict=True)}
    by_param = [list(dict.fromkeys(of_param)) for of_param in zip(*slices, strict=True)]
    # Slices of weights, of biases, their pairs and their roles correspond one to one.
    are_alike = len({len(set(each)) for each in (slices, roles, *by_param)}) == 1
    kinds = {use.tag.name for use in uses} - {embedding_tag.name, scale_and_shift_tag.name}
    pairs = [pair for of_param in by_param for pair in itertools.combinations(of_param, 2)]
    return are_alike and len(kinds) <= 1 and not any(itertools.starmap(_overlap, pairs))


def _overlap(one: Sequence[Slice], other: Sequence[Slice]) -> bool:
    """Return whether two slices of a parameter have elements in common."""
    bounds = {axis: (start, stop) for axis, start, stop in other}
    return not any(
        axis in bounds and (stop <= bounds[axis][0] or bounds[axis][1] <= start)
        for axis, start, stop in one
    )


def _role(use: CandidateUse) -> tuple[bool | Arrangement, ...]:
    """Return what must be the same in all uses of a layer.

    Weights have the same role in both directions: an embedding that also projects back, an
    autoencoder with tied weights.
    """
    weight, layout = use.params[0], use.layouts[0]
    both = [each.arrangement(weight.axes) for each in (layout, layout.swapped())]
    role = min(both, key=lambda a: (a.parts, a.permutation, a.groups))
    rest = zip(use.params[1:], use.layouts[1:], strict=True)
    biases = (layout.arrangement(view.axes) for view, layout in rest)
    return use.tag is scale_and_shift_tag, role, *biases


def _separate_biases(consumers: Consumers, left: Sequence[int], skipped: Collection[str]) -> None:
    """Separate biases from uses where they cannot stay."""
    for param in left:
        uses = [each.use for each in consumers[param] if each.use is not None]
        biased = [use for use in uses if len(use.params) > 1 and not _is_bias(param, use)]
        if not biased:
            continue
        biases = {use.params[1].param for use in biased}
        (bias, *_) = biases
        has_one_bias = len(biased) == len(_counting(consumers[param])) and len(biases) == 1
        uses_of_bias = {each.use for each in consumers[bias]}
        is_complete = has_one_bias and bias in left and uses_of_bias == set(biased)
        is_wanted = not any(pattern_of(use) in skipped for use in biased)
        if not (is_complete and is_wanted and _form_one_layer(biased)):
            for use in biased:
                _separate(consumers, use)


def _separate_taken(consumers: Consumers, left: Sequence[int]) -> None:
    """Separate biases from weights if one of them is in a layer already."""
    for param in left:
        for each in list(consumers[param]):
            if each.use is not None and not {v.param for v in each.use.params} <= set(left):
                _separate(consumers, each.use)


def _separate(consumers: Consumers, use: CandidateUse) -> None:
    """Replace a use by one without the bias, and one of the bias alone."""
    for param, of_param in consumers.items():
        for k, each in enumerate(of_param):
            if each.use is use:
                separate = each.alone if _is_bias(param, use) else use.unbiased
                of_param[k] = replace(each, use=separate, alone=None)


def pattern_of(use: CandidateUse) -> str:
    """Return the name of the default pattern that a use would match."""
    if use.tag is scale_and_shift_tag:
        broadcast = 1 if use.positions else 0
        is_normalised = len(use.factors) > 1
        if use.has_scale and use.has_shift:
            kind = "normalization_haiku" if is_normalised else "scale_and_shift"
        else:
            kind = "scale_only" if use.has_scale else "shift_only"
        return f"{kind}_broadcast_{broadcast}"
    kind = {"dense_tag": "dense", "conv2d_tag": "conv2d", "conv_tag": "conv"}.get(use.tag.name)
    if kind is None:
        return use.tag.name.removesuffix("_tag")
    return f"{kind}_{'with' if len(use.params) > 1 else 'no'}_bias"


def _tagged_layers(found: Interpreter, consumers: Consumers) -> list[FoundLayer]:
    """Return the layers of the tags in the program; remove the consumers that these cover."""
    layers: dict[tuple[str, tuple[int, ...]], FoundLayer] = {}
    for node, views in found.explicit:
        use: LayerUse | None = node.params.get("use")
        name = node.name if use is None else use.layer
        tag = ExistingTag(node, checked_params(name, views))
        params = tuple(view.param for view in tag.params)
        before = layers.get((name, params), FoundLayer(name, params))
        bypassed = before.uncovered + found.read_elsewhere(found.covered[node], node)
        layers[name, params] = replace(before, sources=(*before.sources, tag), uncovered=bypassed)
        _remove_covered(consumers, params, found.covered[node])
    return _with_uncovered(layers.values(), consumers)


def checked_params(name: str, views: Sequence[ParamView | None]) -> tuple[ParamView, ...]:
    """Check that a tag was called with parameters of the function, each once."""
    params = tuple(view for view in views if view is not None)
    if len(params) < len(views) or not params:
        missing = [str(k) for k, view in enumerate(views) if view is None]
        raise ValueError(
            f"curvax: {name} was called with something else than parameters of the function as "
            f"its parameters ({', '.join(missing) or 'with none'}). Tag the parameters themselves, "
            f"at most cast or rearranged."
        )
    _check_once(name, [view.param for view in params])
    return params


def _check_once(name: str, params: Sequence[int]) -> None:
    """Check that a tag has each parameter once; its block would count elements twice."""
    for param in dict.fromkeys(params):
        positions = [str(k) for k, other in enumerate(params) if other == param]
        if len(positions) > 1:
            raise ValueError(
                f"curvax: {name} was called with one parameter of the function more than once: its "
                f"parameters {' and '.join(positions)} are the same array or slices of it. A layer "
                f"has each parameter once. Leave the tag out (a weight and a bias that are sliced "
                f"from one array are found), make them separate arrays, or, in a tag of your own, "
                f"give the parameter once."
            )


def _matched_layers(
    found: Interpreter,
    consumers: Consumers,
    matched: Sequence[Match],
    before: Sequence[FoundLayer],
) -> list[FoundLayer]:
    """Return the layers that user-supplied patterns found; remove the consumers they cover."""
    layers: dict[tuple[str, tuple[int, ...]], FoundLayer] = {}
    taken = {param for layer in before for param in layer.params}
    covered: set[Node] = set()
    for match in matched:
        views = found.params_of(match.params)
        params = tuple(view.param for view in views if view is not None)
        key = match.pattern.name, params
        others = taken - (set(params) if key in layers else set())
        if not covered.isdisjoint(match.nodes) or not others.isdisjoint(params):
            continue
        if len(set(params)) < len(params):  # Not the layer that the pattern describes.
            continue
        covered.update(match.nodes)
        taken.update(params)
        layer = layers.get(key, FoundLayer(match.tag.name, params))
        # The output of the match is tagged, and read from the tag.
        bypassed = layer.uncovered + found.read_elsewhere(match.nodes)
        bypassed -= found.readers[match.nodes[0].outputs[0]] > 0
        match = replace(match, views=tuple(view for view in views if view is not None))
        layers[key] = replace(layer, sources=(*layer.sources, match), uncovered=bypassed)
        _remove_covered(consumers, params, match.nodes)
    return _with_uncovered(layers.values(), consumers)


def _remove_covered(consumers: Consumers, params: Sequence[int], nodes: Collection[Node]) -> None:
    for param in params:
        consumers[param] = [each for each in consumers[param] if each.node not in nodes]


def _with_uncovered(layers: Iterable[FoundLayer], consumers: Consumers) -> list[FoundLayer]:
    """Count the remaining consumers of the parameters as uncovered."""
    remaining = lambda layer: sum(len(consumers[param]) for param in layer.params)
    return [replace(layer, uncovered=layer.uncovered + remaining(layer)) for layer in layers]
