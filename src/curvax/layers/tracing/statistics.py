"""`layer_statistics`: sums over a layer's inputs and cotangents, computed by the backward pass.

`layer_tags_vjp` returns the inputs and the cotangents of each layer, of all steps of a loop at
once. What an estimate of curvature needs of them is mostly much smaller: sums of outer products, as
for the Kronecker factors of Martens & Grosse (2015), Optimizing Neural Networks with
Kronecker-factored Approximate Curvature. Here these are computed on the way, by a `probe` at each
tag. Nothing is stacked, and what the user checkpoints stays checkpointed.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from curvax import _jax
from curvax._errors import where
from curvax._types import Array, Fun, PyTree, TreeDef
from curvax.layers.detection.layers import Layer, TaggedUse
from curvax.layers.detection.program import Collected, Given, Node, loop_length
from curvax.layers.tracing.loss_map import (
    AtLosses,
    LossArrays,
    Losses,
    LossMap,
    LossTangents,
    TracedFunction,
    check_devices,
    like_dependants,
)
from curvax.layers.use import Slice

# A probe: the identity on a layer's outputs, which computes statistics when it is differentiated.
#
# A probe returns the outputs. It is also given zeros, one array for each statistic, which do not
# affect its value. But it is linear in them, and their cotangents are the statistics: any function,
# linear or not, of the layer's inputs and of the cotangents of its outputs (the rule). So the
# backward pass computes the statistics where it has the cotangents. Where many probes share the
# same zeros, in several uses or in each step of a loop, JAX adds the statistics up. Inside a
# checkpoint they are computed after the forward pass was rematerialised.

Rule = Callable[[Sequence[Array], Sequence[Array]], Sequence[Array]]
"""From inputs and cotangents of outputs to statistics."""

_probe_p = _jax.Primitive("probe")


def probe(
    outputs: Sequence[Array], inputs: Sequence[Array], zeros: Sequence[Array], rule: Rule
) -> list[Array]:
    """Return the outputs. The cotangents of `zeros` are `rule(inputs, cotangents of outputs)`."""
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
    for k in range(num_kept):  # Their cotangents may differ from one to the next.
        if not has_axis[k]:
            moved[k] = jnp.broadcast_to(moved[k], (size, *moved[k].shape))
    known = tuple(has_axis[num_kept : num_kept + params["num_known"]])
    zeros = tuple(has_axis[num_kept + params["num_known"] :])
    outputs = _probe_p.bind(*moved, mapped=((known, zeros), *mapped), **params)
    return outputs, [0] * num_kept


def _pull_back(
    cotangents: Sequence[Array], inputs: Sequence[Array], *, rule: Rule, mapped: Any, **_: Any
) -> Sequence[Array]:
    """Return the statistics.

    `mapped` says, for each axis that vmap added, outermost first, which inputs and zeros have it.
    """
    for known, zeros in reversed(mapped):
        rule = _vectorised(rule, known, zeros)
    return rule(inputs, cotangents)


def _vectorised(rule: Rule, known: Sequence[bool], zeros: Sequence[bool]) -> Rule:
    def vectorised(inputs: Sequence[Array], cotangents: Sequence[Array]) -> Sequence[Array]:
        axes = [0 if has_axis else None for has_axis in known]
        statistics = jax.vmap(rule, (axes, 0))(list(inputs), list(cotangents))
        pairs = zip(statistics, zeros, strict=True)
        return [x if has_axis else jnp.sum(x, 0) for x, has_axis in pairs]

    return vectorised


_jax.define_linear_identity(_probe_p, _batch, _pull_back)


Compute = Callable[[tuple[Array, ...], tuple[Array, ...]], PyTree]
"""From the inputs of one use of a layer, and the cotangents of its outputs, to arrays."""


@dataclass(frozen=True)
class Statistic:
    """What to sum over the uses of a layer.

    Attributes:
        compute: Function from the inputs of one use, and the cotangents of its outputs, to arrays.
        depends_on: Which of both `compute` reads. What depends on inputs only is the same in every
            backward pass.
        reduce: For each loop around the use, outermost first, whether to sum over its steps; None
            to sum over all. Loops that scan over the parameters are never summed.
    """

    compute: Compute
    depends_on: Literal["inputs", "cotangents", "both"] = "both"
    reduce: tuple[bool, ...] | None = None

    @classmethod
    def of(cls, given: "Statistic | Compute") -> "Statistic":
        """Return a statistic, given as such or as its `compute` function."""
        return given if isinstance(given, Statistic) else cls(given)

    def kept_loops(self, stacked: Sequence[bool]) -> tuple[bool, ...]:
        """Return which loops are not summed, given which of them scan over the parameters."""
        reduce = self.reduce or (True,) * len(stacked)
        return tuple(scans or not summed for scans, summed in zip(stacked, reduce, strict=True))


class Sums(NamedTuple):
    """Sums of a layer, or what is computed from them, grouped by what they depend on.

    Attributes:
        of_inputs: What depends on inputs only, and is the same in every backward pass.
        of_cotangents: Everything else.
    """

    of_inputs: Any = ()
    of_cotangents: Any = ()


LayerRule = Callable[[Layer, TaggedUse], Mapping[Any, Statistic | Compute]]
"""The statistics of one use of a layer, by name."""

PullBack = Callable[[LossTangents], tuple[list[dict[Any, PyTree]], PyTree]]
"""From cotangents of what each loss depends on to statistics, and cotangents of the parameters."""


def layer_statistics(
    func: Fun,
    rule: LayerRule,
    params_index: int = 0,
    auto_register_tags: bool = True,
    raise_error_on_diff_jaxpr: bool = True,
    **auto_registration_kwargs: Any,
) -> Callable[[Sequence[PyTree]], tuple[Losses, PullBack]]:
    """Return a function for statistics of all layers of `func`, and its gradient.

    Equal to `rule` applied to the inputs and cotangents that `layer_tags_vjp` returns, summed over
    the uses of a layer and over the steps of loops, except that these arrays are never held, and
    that uses to which no cotangents come back are left out. Stacked layers that a `scan` runs
    through have one statistic each, along leading axes.

    Inside `jax.shard_map` statistics are those of each device, to be summed by the caller, and
    the cotangents of the parameters are as `jax.vjp` returns them: with `check_vma`, those of
    replicated parameters are sums over all devices. So are the cotangents at the tag of a generic
    layer, whose output is such a parameter.

    Arguments:
        func: Function that registers at least one loss.
        rule: Function `rule(layer, tagged_use)` that returns the statistics of one use of a layer
            by name: functions from inputs and cotangents of outputs, both tuples of arrays, to
            arrays. Statistics of the same name are summed over uses. Under `jit`, statistics that
            nothing reads are not computed.
        params_index: Index of the argument that holds the parameters.
        auto_register_tags: Whether to look for layers; otherwise there are only those that the
            function tags itself.
        raise_error_on_diff_jaxpr: Whether to raise if a later call traces to a different jaxpr.
        auto_registration_kwargs: Keyword arguments of `curvax.auto_register_tags`, such as
            `strict`, `patterns_to_skip` or `allow_unused_params`.

    Returns:
        A function of the arguments of `func`, as one sequence. It returns `(losses, pull_back)`,
        where `losses` is a tuple of `LossFunction`s. `pull_back` takes cotangents: for each loss, a
        sequence with one array for each of its `parameter_dependants`. It returns a list with the
        statistics of each layer, by name, sorted by the indices of their parameters, and the
        cotangents of the parameters. It can be called several times: all calls share one forward
        pass.

    Raises:
        RegistrationError: If no loss is registered, or one was dropped or has no derivative in any
            parameter; if no loss depends on some parameter, or one is in several layers.
        ValueError: If statistics of the same name differ in shape from use to use, or are not of a
            real type; or if the outputs of a layer are replicated while its losses differ from
            device to device.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def func(w, x):
        ...     curvax.register_squared_error_loss(x @ w)
        >>> def rule(layer, tagged_use):
        ...     return {"inputs": lambda inputs, cotangents: inputs[0].T @ inputs[0]}
        >>> args = jnp.ones((2, 1)), jnp.ones((3, 2))
        >>> losses, pull_back = curvax.layer_statistics(func, rule)(args)
        >>> (layer,), gradient = pull_back([losses[0].parameter_dependants])
        >>> layer["inputs"]
        Array([[3., 3.],
               [3., 3.]], dtype=float32)
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
    """Return the statistics of the layers of a traced function.

    Equal to the function that `layer_statistics` returns, except that in place of losses there are
    their operands (those that depend on parameters, and the others), and that the sums of a layer
    are grouped by what they depend on.
    """
    check_devices(at)
    probes = _Probes(at, rule)

    def probed(params: Sequence[Array], zeros: Sequence[Sequence[Array]]) -> Any:
        dependants, (others, _) = at(params, probes, dict(zip(probes.keys, zeros, strict=True)))
        return dependants, others

    dependants, transposed, others = jax.vjp(probed, at.params, probes.zeros(), has_aux=True)

    def pull_back(tangents: LossTangents) -> tuple[list[Sums], PyTree]:
        params, statistics = transposed(like_dependants(tangents, dependants))
        gradient = jax.tree.unflatten(at.processed.params_tree, params)
        return probes.by_layer(statistics), gradient

    return (dependants, others), pull_back


@dataclass
class _Total:
    """A sum over the uses that have a statistic of one name.

    Attributes:
        is_of_inputs: Whether it depends on inputs only.
        shapes: Shapes and dtypes of the leaves of the statistic.
        tree: Its structure.
        lengths: Lengths of the loops that are not summed; leading axes of the sum.
        loops: These loops.
        slices: The slices of the parameters that the use is about.
    """

    is_of_inputs: bool
    shapes: Sequence[jax.ShapeDtypeStruct]
    tree: TreeDef
    lengths: tuple[int, ...]
    loops: tuple[Node, ...]
    slices: tuple[tuple[Slice, ...], ...]

    def zeros(self) -> list[Array]:
        return [jnp.zeros((*self.lengths, *x.shape), x.dtype) for x in self.shapes]


_Key = tuple[int, Hashable, tuple[Node, ...]]
"""The index of a layer, the name of a statistic, and the loops that are not summed."""


class _Probes(AtLosses):
    """Hooks that place a probe at each tag of a layer."""

    def __init__(self, at: LossMap, rule: LayerRule) -> None:
        self._layers = at.processed.layers
        self._varying = [*at.leaves, *at.processed.consts]
        self._totals: dict[_Key, _Total] = {}
        self._at: dict[Node, dict[_Key, Statistic]] = {}
        for index, layer in enumerate(self._layers):
            for tagged in layer.tags:
                loops = at.processed.program.loops_around[tagged.node]
                self._at[tagged.node] = {}
                self._varying += [x.aval for x in tagged.node.equation.invars]
                for name, given in rule(layer, tagged).items():
                    statistic = Statistic.of(given)
                    kept = zip(loops, statistic.kept_loops(tagged.use.stacked), strict=True)
                    key = index, name, tuple(loop for loop, is_kept in kept if is_kept)
                    self._at[tagged.node][key] = statistic
                    self._add(key, self._total(key, statistic, tagged))

    @property
    def keys(self) -> list[_Key]:
        return list(self._totals)

    def zeros(self) -> list[list[Array]]:
        vary = lambda x: _jax.varying_like(x, *self._varying)
        return [list(map(vary, total.zeros())) for total in self._totals.values()]

    def by_layer(self, statistics: Sequence[Sequence[Array]]) -> list[Sums]:
        layers = [Sums({}, {}) for _ in self._layers]
        for (key, total), leaves in zip(self._totals.items(), statistics, strict=True):
            index, name, _ = key
            value = jax.tree.unflatten(total.tree, leaves)
            layer = layers[index]
            sums = layer.of_inputs if total.is_of_inputs else layer.of_cotangents
            if name in sums:  # Of uses in other loops.
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
            each = [s.compute(tuple(inputs), tuple(cotangents)) for s in statistics.values()]
            return jax.tree.leaves(each)

        outputs, inputs = operands[:num_outputs], operands[num_outputs:][:num_inputs]
        return probe(outputs, inputs, jax.tree.leaves(zeros), rule), {}

    def _total(self, key: _Key, statistic: Statistic, tagged: TaggedUse) -> _Total:
        (_, name, loops), node = key, tagged.node
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
        return _Total(is_of_inputs, leaves, tree, lengths, loops, tagged.use.cuts)

    def _add(self, key: _Key, total: _Total) -> None:
        index, name, _ = key
        alike = [t for (k, other, _), t in self._totals.items() if (k, other) == (index, name)]
        self._totals.setdefault(key, total)
        types = lambda t: [(x.shape, x.dtype) for x in t.shapes]
        kind = lambda t: (t.is_of_inputs, t.tree, t.lengths, t.slices, types(t))
        if any(kind(before) != kind(total) for before in alike):
            raise ValueError(
                f"{where()}: the statistic {name!r} of the layer with the parameters "
                f"{self._layers[index].params} is of the shapes {kind(alike[0])[2:]} in one use "
                f"and {kind(total)[2:]} in another, or of another part of the parameters. Give "
                f"them different names."
            )
