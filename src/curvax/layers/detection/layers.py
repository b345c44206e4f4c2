"""From uses of parameters to layers: each parameter belongs to one.

Sites that use the same parameters in the same way are one layer, applied at several places. A bias
stays with its weights if it goes with them everywhere; otherwise it is a layer of its own. A
parameter with any use that is no site, or with uses that do not go together, is generic, and the
layer says why.
"""

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from curvax.layers.detection.axes import Arrangement
from curvax.layers.detection.program import Node
from curvax.layers.detection.sites import ParamView, Site
from curvax.layers.detection.uses import Encounter, Interpreter
from curvax.layers.patterns import Match
from curvax.layers.tags import generic_tag, scale_and_shift_tag
from curvax.layers.use import UNKNOWN, LayerUse, Slice, same_examples

Encounters = dict[int, list[Encounter]]
"""For each parameter, what meets it."""

_UNUSED = "no loss depends on it"
_NO_DERIVATIVE = "no loss has a derivative in it"


class Tagged(NamedTuple):
    """A use of a layer that the user tags: the node of the tag, and its parameters."""

    node: Node
    params: tuple[ParamView, ...]


@dataclass(frozen=True, eq=False)
class FoundLayer:
    """Parameters that belong together, by their numbers, and where a program uses them.

    Uses are found by detection, matched by a pattern, or tagged by the user. A generic layer has a
    reason for being that.
    """

    tag_name: str
    params: tuple[int, ...]
    sites: tuple[Site | Match | Tagged, ...] = ()
    uses: tuple[LayerUse, ...] = ()
    """What the layer does at each of these."""
    reason: str = ""
    uncovered: int = 0
    """How many uses of its parameters the layer does not cover."""
    why_uncovered: str = ""

    @property
    def is_unused(self) -> bool:
        """Whether no loss depends on it."""
        return self.reason == _UNUSED

    @property
    def num_sites(self) -> int:
        """How often it is used."""
        return len(self.sites)

    @property
    def remark(self) -> str:
        """What to tell the user about it if it is known."""
        uncovered = f"{self.uncovered} more uses are not covered by the layer"
        uncovered += f" ({self.why_uncovered})" if self.why_uncovered else ""
        remarks = [uncovered] * bool(self.uncovered) + [self.examples] * bool(self.examples)
        return "; ".join(remarks)

    @property
    def examples(self) -> str:
        """What to tell the user about the examples that it is applied to."""
        at = [use.examples for use in self.uses]
        groups = same_examples(at)
        if self.is_generic or not isinstance(groups, str):
            return next((each.remark for each in at if each.remark and not self.is_generic), "")
        return groups

    @property
    def has_unknown_examples(self) -> bool:
        """Whether it is not known which examples it is applied to, or where these are."""
        return self.examples.startswith(UNKNOWN)

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
    """A layer of a tagged program: its parameters, by their numbers, and its tags."""

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
    """Put the tags of a program together to layers, in the order of their parameters."""
    found: dict[tuple[str, tuple[int, ...]], list[TaggedUse]] = {}
    for tag in tags:
        params = tuple(param.index for param in tag.use.params)
        found.setdefault((tag.use.layer, params), []).append(tag)
    layers = [Layer(*key, tuple(own)) for key, own in found.items()]
    return sorted(layers, key=lambda layer: layer.params)


def build_layers(
    found: Interpreter,
    skipped: Collection[str] = (),
    only_generic: bool = False,
    matched: Sequence[Match] = (),
) -> list[FoundLayer]:
    """The layers, in the order of their first parameters.

    Those that the user tagged come before those that the user's patterns found, and these before
    all others.
    """
    uses = {param: list(of) for param, of in found.uses.items()}
    layers = _tagged_layers(found, uses)
    if not only_generic:
        layers += _matched_layers(found, uses, matched, layers)
    left = [param for param in uses if not any(param in layer.params for layer in layers)]
    _leave_what_is_taken(uses, left)
    if only_generic:
        layers += [_generic(param, "only generic layers were asked for") for param in left]
        return sorted(layers, key=lambda layer: layer.params)
    _separate_biases(uses, left, skipped)
    for param in left:
        if param in found.without_derivative:
            layers.append(_generic(param, _NO_DERIVATIVE))
            continue
        layer = _layer_of(param, uses, skipped)
        if layer is not None:
            layers.append(layer)
    return sorted(layers, key=lambda layer: layer.params)


def _layer_of(param: int, uses: Encounters, skipped: Collection[str]) -> FoundLayer | None:
    """The layer of which a parameter is the first; None if it is only its bias."""
    own = uses[param]
    if not own:
        return _generic(param, _UNUSED)
    counting = _counting(own)
    reasons = list(dict.fromkeys(use.reason for use in counting if use.site is None))
    if reasons:
        return _generic(param, "; ".join(reasons))
    sites = [use.site for use in counting if use.site is not None]
    if all(_is_bias(param, site) for site in sites):
        return None
    names = {pattern_of(site) for site in sites}
    if names & set(skipped):
        return _generic(param, f"the pattern {', '.join(sorted(names & set(skipped)))} is skipped")
    if not _go_together(sites):
        kinds = ", ".join(sorted({site.tag.name for site in sites}))
        return _generic(param, f"it is used in ways that do not go together ({kinds})")
    numbers = tuple(view.param for view in sites[0].params)
    # A table that is also a matrix is registered as the table, weights with a bias as the weights.
    order = lambda name: (name != "embedding_tag", name == scale_and_shift_tag.name)
    first = min((site.tag.name for site in sites), key=order)
    uncovered = [use.reason for use in own if use not in counting]
    return FoundLayer(
        first,
        numbers,
        tuple(sites),
        uncovered=len(uncovered),
        why_uncovered="; ".join(dict.fromkeys(uncovered)),
    )


def _counting(uses: Sequence[Encounter]) -> Sequence[Encounter]:
    """The uses that count: those that differ from example to example, if there are such.

    Others are there where a derivative of a network, in a direction that is the same for all
    examples, is part of a loss.
    """
    return [use for use in uses if not use.is_constant] or uses


def _generic(param: int, reason: str) -> FoundLayer:
    return FoundLayer(generic_tag.name, (param,), reason=reason)


def _is_bias(param: int, site: Site) -> bool:
    return site.params[0].param != param


def _go_together(sites: Sequence[Site]) -> bool:
    """Whether sites can be those of one layer.

    Each part of a parameter is one that has nothing in common with any other, and is used in the
    same way, with the same part of the bias, wherever it is used. Some parts may be weights and
    others scales or shifts: layers with their biases that are cut from one array.
    """
    parts = [tuple(view.cuts for view in site.params) for site in sites]
    roles = {(part, _role(site)) for part, site in zip(parts, sites, strict=True)}
    by_param = [list(dict.fromkeys(cuts)) for cuts in zip(*parts, strict=True)]
    alike = len({len(set(cuts)) for cuts in (parts, roles, *by_param)}) == 1
    kinds = {site.tag.name for site in sites} - {"embedding_tag", scale_and_shift_tag.name}
    pairs = [pair for cuts in by_param for pair in itertools.combinations(cuts, 2)]
    return alike and len(kinds) <= 1 and not any(itertools.starmap(_overlap, pairs))


def _overlap(one: Sequence[Slice], other: Sequence[Slice]) -> bool:
    """Whether two parts of a parameter have elements in common."""
    bounds = {axis: (start, stop) for axis, start, stop in other}
    return not any(
        axis in bounds and (stop <= bounds[axis][0] or bounds[axis][1] <= start)
        for axis, start, stop in one
    )


def _role(site: Site) -> tuple[bool | Arrangement, ...]:
    """What must be the same at all sites of a layer.

    Weights that are used once in one direction and once in the other have the same role: a table
    that also projects back, an autoencoder that mirrors itself.
    """
    weight, layout = site.params[0], site.layouts[0]
    arranged = [each.arrangement(weight.axes) for each in (layout, layout.swapped())]
    role = min(arranged, key=lambda a: (a.parts, a.permutation, a.groups))
    rest = zip(site.params[1:], site.layouts[1:], strict=True)
    biases = (layout.arrangement(view.axes) for view, layout in rest)
    return site.tag is scale_and_shift_tag, role, *biases


def _separate_biases(uses: Encounters, left: Sequence[int], skipped: Collection[str]) -> None:
    """Take biases away from sites where they cannot stay."""
    for param in left:
        sites = [use.site for use in uses[param] if use.site is not None]
        joined = [site for site in sites if len(site.params) > 1 and not _is_bias(param, site)]
        if not joined:
            continue
        biases = {site.params[1].param for site in joined}
        together = len(joined) == len(_counting(uses[param])) and len(biases) == 1
        (bias, *_) = biases
        complete = together and bias in left and _sites(uses[bias]) == set(joined)
        wanted = not any(pattern_of(site) in skipped for site in joined)
        if not (complete and wanted and _go_together(joined)):
            for site in joined:
                _take_apart(uses, site)


def _leave_what_is_taken(uses: Encounters, left: Sequence[int]) -> None:
    """Take biases apart from weights that are in a layer already, and weights from biases."""
    for param in left:
        for use in list(uses[param]):
            if use.site is not None and not {v.param for v in use.site.params} <= set(left):
                _take_apart(uses, use.site)


def _sites(uses: Sequence[Encounter]) -> set[Site | None]:
    return {use.site for use in uses}


def _take_apart(uses: Encounters, site: Site) -> None:
    for param, own in uses.items():
        for number, use in enumerate(own):
            if use.site is site:
                alone = use.alone if _is_bias(param, site) else site.unbiased
                own[number] = replace(use, site=alone, alone=None)


def pattern_of(site: Site) -> str:
    """The name of the default pattern that a site would match."""
    if site.tag is scale_and_shift_tag:
        broadcast = 1 if site.positions else 0
        normalised = len(site.factors) > 1
        if site.has_scale and site.has_shift:
            kind = "normalization_haiku" if normalised else "scale_and_shift"
        else:
            kind = "scale_only" if site.has_scale else "shift_only"
        return f"{kind}_broadcast_{broadcast}"
    kind = {"dense_tag": "dense", "conv2d_tag": "conv2d", "conv_tag": "conv"}.get(site.tag.name)
    if kind is None:
        return site.tag.name.removesuffix("_tag")
    return f"{kind}_{'with' if len(site.params) > 1 else 'no'}_bias"


def _tagged_layers(found: Interpreter, uses: Encounters) -> list[FoundLayer]:
    """The layers that the user tagged. Uses that a tag covers are taken away."""
    layers: dict[tuple[str, tuple[int, ...]], FoundLayer] = {}
    for node, views in found.explicit:
        own: LayerUse | None = node.params.get("use")
        name = node.name if own is None else own.layer
        tagged = Tagged(node, checked_params(name, views))
        params = tuple(view.param for view in tagged.params)
        key = name, params
        before = layers.get(key, FoundLayer(name, params))
        bypassed = before.uncovered + found.read_elsewhere(found.covered[node], node)
        layers[key] = replace(before, sites=(*before.sites, tagged), uncovered=bypassed)
        for param in params:
            uses[param] = [use for use in uses[param] if use.node not in found.covered[node]]
    return _with_uncovered(layers.values(), uses)


def checked_params(name: str, views: Sequence[ParamView | None]) -> tuple[ParamView, ...]:
    """Check that a tag was called with parameters of the function, each once."""
    params = tuple(view for view in views if view is not None)
    if len(params) < len(views) or not params:
        missing = [str(k) for k, view in enumerate(views) if view is None]
        raise ValueError(
            f"curvax: {name} was called with something else than parameters of the function as "
            f"its parameters ({', '.join(missing) or 'with none'}). Tag the parameters themselves, "
            f"at most cast or re-arranged."
        )
    _check_once(name, [view.param for view in params])
    return params


def _check_once(name: str, params: Sequence[int]) -> None:
    """Check that a tag has each parameter once; its block would count that one's elements twice."""
    for param in dict.fromkeys(params):
        places = [str(k) for k, other in enumerate(params) if other == param]
        if len(places) > 1:
            raise ValueError(
                f"curvax: {name} was called with one parameter of the function more than once: its "
                f"parameters {' and '.join(places)} are the same array or cut from it. A layer has "
                f"each parameter once. Leave the tag out (a weight and a bias that are cut from "
                f"one array are found), make them arrays of their own, or, in a tag of your own, "
                f"give the parameter once."
            )


def _matched_layers(
    found: Interpreter,
    uses: Encounters,
    matched: Sequence[Match],
    before: Sequence[FoundLayer],
) -> list[FoundLayer]:
    """The layers that patterns of the user's found. Uses that a match covers are taken away."""
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
        layer = layers.get(key, FoundLayer(match.pattern.tag_primitive.name, params))
        # What the whole puts out is tagged, and read from the tag.
        bypassed = layer.uncovered + found.read_elsewhere(match.nodes)
        bypassed -= found.readers[match.nodes[0].outputs[0]] > 0
        match = replace(match, views=tuple(view for view in views if view is not None))
        layers[key] = replace(layer, sites=(*layer.sites, match), uncovered=bypassed)
        for param in params:
            uses[param] = [use for use in uses[param] if use.node not in match.nodes]
    return _with_uncovered(layers.values(), uses)


def _with_uncovered(layers: Iterable[FoundLayer], uses: Encounters) -> list[FoundLayer]:
    counted = lambda layer: sum(len(uses[param]) for param in layer.params)
    return [replace(layer, uncovered=layer.uncovered + counted(layer)) for layer in layers]
