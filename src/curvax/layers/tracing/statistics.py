"""`layer_statistics`: sums over a layer's inputs and cotangents, made by the backward pass itself.

`layer_tags_vjp` returns the inputs and the cotangents of each layer, of all steps of a loop at
once. What an estimate of curvature needs of them is mostly much smaller: sums of outer products.
Here these are computed on the way, by a `probe` at each tag. Nothing is stacked, and what the user
checkpoints stays checkpointed.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from curvax import _jax
from curvax._errors import where
from curvax._types import Array, Fun, PyTree
from curvax.layers.detection.layers import Layer, TaggedUse
from curvax.layers.detection.program import Collected, Given, Node, loop_length
from curvax.layers.tracing.loss_map import (
    AtLosses,
    Losses,
    LossMap,
    LossTangents,
    TracedFunction,
    check_devices,
    like_dependants,
)

# A probe: does nothing to a layer's outputs, and computes statistics when it is differentiated.
#
# A probe returns the outputs as they are. It is also given zeros, one array for each statistic,
# that count for nothing. But it is linear in them, and their cotangents are the statistics:
# whatever a rule makes of the layer's inputs and of the cotangents of its outputs, which need not
# be linear. So the backward pass that brings the cotangents computes the statistics on the way;
# where many probes share the same zeros, at several places or in each step of a loop, it adds
# them up; and what is differentiated with a checkpoint, it does so after the forward pass was
# done again.

Rule = Callable[[Sequence[Array], Sequence[Array]], Sequence[Array]]
"""From inputs and cotangents of outputs to statistics."""

_probe_p = _jax.Primitive("probe")


def probe(
    outputs: Sequence[Array], inputs: Sequence[Array], zeros: Sequence[Array], rule: Rule
) -> list[Array]:
    """The outputs. The cotangents of `zeros` are `rule(inputs, cotangents of the outputs)`."""
    counts = {"num_kept": len(outputs), "num_known": len(inputs)}
    return _probe_p.bind(*outputs, *inputs, *zeros, rule=rule, mapped=(), **counts)


def _batch(
    args: Sequence[Array], axes: Sequence[int | None], *, mapped: Any, **params: Any
) -> tuple[list[Array], list[int]]:
    num_kept = params["num_kept"]
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    moved = [
        x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(args, axes, strict=True)
    ]
    has_axis = [axis is not None for axis in axes]
    for k in range(num_kept):  # Otherwise their cotangents could not differ from one to the next.
        if not has_axis[k]:
            moved[k] = jnp.broadcast_to(moved[k], (size, *moved[k].shape))
    known = tuple(has_axis[num_kept : num_kept + params["num_known"]])
    zeros = tuple(has_axis[num_kept + params["num_known"] :])
    outputs = _probe_p.bind(*moved, mapped=((known, zeros), *mapped), **params)
    return outputs, [0] * num_kept


def _pull_back(
    cotangents: Sequence[Array], inputs: Sequence[Array], *, rule: Rule, mapped: Any, **_: Any
) -> Sequence[Array]:
    """The statistics. `mapped` says, for each axis that vmap added, outermost first, who has it."""
    for known, zeros in reversed(mapped):
        rule = _vectorised(rule, known, zeros)
    return rule(inputs, cotangents)


def _vectorised(rule: Rule, known: Sequence[bool], zeros: Sequence[bool]) -> Rule:
    def vectorised(inputs: Sequence[Array], cotangents: Sequence[Array]) -> Sequence[Array]:
        axes = [0 if has_axis else None for has_axis in known]
        found = jax.vmap(rule, (axes, 0))(list(inputs), list(cotangents))
        pairs = zip(found, zeros, strict=True)
        return [x if has_axis else jnp.sum(x, 0) for x, has_axis in pairs]

    return vectorised


_jax.define_linear_identity(_probe_p, _batch, _pull_back)


Compute = Callable[[tuple[Array, ...], tuple[Array, ...]], PyTree]
"""From the inputs of a layer at one place, and the cotangents of its outputs, to arrays."""


@dataclass(frozen=True)
class Statistic:
    """What to sum over the places of a layer.

    Attributes:
        compute: From the inputs at one place, and the cotangents of the outputs, to arrays.
        depends_on: Which of both `compute` reads. What depends on inputs alone is the same in
            every backward pass.
        reduce: For each loop around the place, outermost first, whether to sum over its steps; None
            to sum over all. Steps that take slices of the parameters are never summed.
    """

    compute: Compute
    depends_on: Literal["inputs", "cotangents", "both"] = "both"
    reduce: tuple[bool, ...] | None = None

    @classmethod
    def of(cls, given: "Statistic | Compute") -> "Statistic":
        """Return a statistic that may be given as its function alone."""
        return given if isinstance(given, Statistic) else cls(given)

    def kept_loops(self, stacked: Sequence[bool]) -> tuple[bool, ...]:
        """Return which loops there is an axis for, where those that are `stacked` take slices."""
        reduce = self.reduce or (True,) * len(stacked)
        return tuple(has or not summed for has, summed in zip(stacked, reduce, strict=True))


class Sums(NamedTuple):
    """Sums of a layer, or what was made of them: apart by what they depend on.

    Attributes:
        of_inputs: What depends on inputs alone: it is the same in every backward pass.
        of_cotangents: All that is not.
    """

    of_inputs: Any = ()
    of_cotangents: Any = ()


LayerRule = Callable[[Layer, TaggedUse], Mapping[Any, Statistic | Compute]]
"""The statistics of a layer at one of its places, by name."""

LossArrays = Sequence[tuple[Array, ...]]
"""For each loss, some of the arrays that it is made of."""

PullBack = Callable[[LossTangents], tuple[list[dict[Any, PyTree]], PyTree]]


def layer_statistics(
    func: Fun,
    rule: LayerRule,
    params_index: int = 0,
    auto_register_tags: bool = True,
    raise_error_on_diff_jaxpr: bool = True,
    **auto_registration_kwargs: Any,
) -> Callable[[Sequence[PyTree]], tuple[Losses, PullBack]]:
    """A function for statistics of all layers of `func`, and its gradient.

    Equal to what `rule` makes of the inputs and cotangents that `layer_tags_vjp` returns, summed
    over the places where a layer is applied and over the steps of loops, except that these are
    never held, and that places from which nothing comes back are left out. For stacked layers that
    a `scan` goes through there is one statistic for each of them, along axes in front.

    Inside `jax.shard_map` statistics are those of each device, to be summed by the caller, and
    the cotangents of the parameters are as `jax.vjp` returns them: with `check_vma`, those of
    parameters that all devices share are sums over all devices. So are the cotangents at the tag of
    a generic layer, which is that of such a parameter itself.

    Arguments:
        func: a function that registers at least one loss.
        rule: says which statistics a layer has at one of its places, by name. What has the same
            name at several places is summed. Statistics that nobody reads are not computed, if
            this is compiled.
        params_index: which of its arguments are the parameters.
        auto_register_tags: as in `layer_tags_vjp`.
        raise_error_on_diff_jaxpr: as in `layer_tags_vjp`.
        auto_registration_kwargs: as in `curvax.auto_register_tags`.

    Returns:
        A function of the arguments of `func`, as one sequence. It returns `(losses, pull_back)`,
        where `pull_back` is a function of cotangents as that of `loss_tags_vjp`. It returns a list
        with the statistics of each layer, by name, in the order of `layer_tags_vjp`, and the
        cotangents of the parameters. It can be called several times: all calls share one forward
        pass.

    Raises:
        RegistrationError: as `auto_register_tags`.
        ValueError: if statistics of the same name differ in shape from place to place, or are not
            of a real type; or if a layer is the same on all devices, and its losses are not.
    """
    options = {"auto_register_tags": auto_register_tags, **auto_registration_kwargs}
    traced = TracedFunction.of(func, params_index, raise_error_on_diff_jaxpr, **options)

    def pull_back_at(func_args: Sequence[PyTree]) -> tuple[Losses, PullBack]:
        at = traced.at(func_args)
        operands, sums_of = statistics_at(at, rule)

        def pull_back(tangents: LossTangents) -> tuple[list[dict[Any, PyTree]], PyTree]:
            layers, gradient = sums_of(tangents)
            return [{**sums.of_inputs, **sums.of_cotangents} for sums in layers], gradient

        return at.losses(*operands), pull_back

    return pull_back_at


def statistics_at(
    at: LossMap, rule: LayerRule
) -> tuple[tuple[LossArrays, LossArrays], Callable[[LossTangents], tuple[list[Sums], PyTree]]]:
    """As what `layer_statistics` returns does, for a function that is traced already.

    In place of losses there is what they are made of: what depends on parameters, and the rest. The
    sums of a layer are apart by what they depend on.
    """
    check_devices(at)
    probes = _Probes(at, rule)

    def probed(params: Sequence[Array], zeros: Sequence[Sequence[Array]]) -> Any:
        dependants, (others, _) = at(params, probes, dict(zip(probes.keys, zeros, strict=True)))
        return dependants, others

    dependants, transposed, others = jax.vjp(probed, at.params, probes.zeros(), has_aux=True)

    def pull_back(tangents: LossTangents) -> tuple[list[Sums], PyTree]:
        params, found = transposed(like_dependants(tangents, dependants))
        gradient = jax.tree.unflatten(at.processed.params_tree, params)
        return probes.by_layer(found), gradient

    return (dependants, others), pull_back


@dataclass
class _Total:
    """A sum over all places that have a statistic of one name: its type, and what it has axes for.

    `loops` are those that take one slice of the layer's parameters in each step, or whose steps are
    not summed, `lengths` their lengths, and `cuts` which part of the parameters it is about.
    """

    is_of_inputs: bool
    shapes: Sequence[jax.ShapeDtypeStruct]
    tree: Any
    lengths: tuple[int, ...]
    loops: tuple[Node, ...]
    cuts: Any

    def zeros(self) -> list[Array]:
        return [jnp.zeros((*self.lengths, *x.shape), x.dtype) for x in self.shapes]


_Key = tuple[int, Hashable, tuple[Node, ...]]
"""The index of a layer, the name of a statistic, and the loops that it has axes for."""


class _Probes(AtLosses):
    """Hooks that put a probe at each tag of a layer."""

    def __init__(self, at: LossMap, rule: LayerRule) -> None:
        self._layers = at.processed.layers
        self._varying = [*at.leaves, *at.processed.consts]
        self._totals: dict[_Key, _Total] = {}
        self._at: dict[Node, dict[_Key, Statistic]] = {}
        for number, layer in enumerate(self._layers):
            for place in layer.tags:
                loops = at.processed.program.loops_around[place.node]
                self._at[place.node] = {}
                self._varying += [x.aval for x in place.node.equation.invars]
                for name, given in rule(layer, place).items():
                    statistic = Statistic.of(given)
                    kept = zip(loops, statistic.kept_loops(place.use.stacked), strict=True)
                    key = number, name, tuple(loop for loop, has in kept if has)
                    self._at[place.node][key] = statistic
                    self._add(key, self._total(key, statistic, place))

    @property
    def keys(self) -> list[_Key]:
        return list(self._totals)

    def zeros(self) -> list[list[Array]]:
        vary = lambda x: _jax.varying_like(x, *self._varying)
        return [list(map(vary, total.zeros())) for total in self._totals.values()]

    def by_layer(self, found: Sequence[Sequence[Array]]) -> list[Sums]:
        layers = [Sums({}, {}) for _ in self._layers]
        for (key, total), leaves in zip(self._totals.items(), found, strict=True):
            number, name, _ = key
            value = jax.tree.unflatten(total.tree, leaves)
            sums = layers[number][0 if total.is_of_inputs else 1]
            if name in sums:  # In other loops.
                value = jax.tree.map(jnp.add, sums[name], value)
            sums[name] = value
        return layers

    def keys_at_layer(self, node: Node) -> Collection[Any] | None:
        return self._at.get(node)

    def is_per_step(self, key: Any, loop: Node) -> bool:
        return loop in self._totals[key].loops

    def visit_layer(
        self, node: Node, operands: list[Array], given: Given
    ) -> tuple[list[Any], Collected]:
        num_outputs, statistics = len(node.outputs), self._at[node]
        num_inputs = node.equation.primitive.num_inputs
        zeros: list[Any] = [given[key] for key in statistics]

        def rule(inputs: Sequence[Array], cotangents: Sequence[Array]) -> list[Array]:
            found = [s.compute(tuple(inputs), tuple(cotangents)) for s in statistics.values()]
            return jax.tree.leaves(found)

        outputs, inputs = operands[:num_outputs], operands[num_outputs:][:num_inputs]
        return probe(outputs, inputs, jax.tree.leaves(zeros), rule), {}

    def _total(self, key: _Key, statistic: Statistic, place: TaggedUse) -> _Total:
        (_, name, loops), node = key, place.node
        num_inputs = node.equation.primitive.num_inputs
        shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in node.equation.invars]
        cut = len(node.outputs)
        inputs, outputs = tuple(shapes[cut : cut + num_inputs]), tuple(shapes[:cut])
        leaves, tree = jax.tree.flatten(jax.eval_shape(statistic.compute, inputs, outputs))
        if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in leaves):
            raise ValueError(
                f"{where()}: the statistic {name!r} of {node.name} is of the types "
                f"{[str(x.dtype) for x in leaves]}, but has to be of real ones."
            )
        lengths = tuple(map(loop_length, loops))
        is_of_inputs = statistic.depends_on == "inputs"
        return _Total(is_of_inputs, leaves, tree, lengths, loops, place.use.cuts)

    def _add(self, key: _Key, total: _Total) -> None:
        number, name, _ = key
        alike = [t for (n, other, _), t in self._totals.items() if (n, other) == (number, name)]
        self._totals.setdefault(key, total)
        types = lambda t: [(x.shape, x.dtype) for x in t.shapes]
        kind = lambda t: (t.is_of_inputs, t.tree, t.lengths, t.cuts, types(t))
        if any(kind(before) != kind(total) for before in alike):
            raise ValueError(
                f"{where()}: the statistic {name!r} of the layer with the parameters "
                f"{self._layers[number].params} is of the shapes {kind(alike[0])[2:]} at one place "
                f"and {kind(total)[2:]} at another, or of another part of the parameters. Give "
                f"them different names."
            )
