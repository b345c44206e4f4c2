"""A function, traced once for each shape of its arguments: a map to what its losses depend on."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from curvax import _jax
from curvax._errors import where
from curvax._types import Array, Fun, PyTree, TreeDef
from curvax.layers.detection.axes import REARRANGED
from curvax.layers.detection.layers import Layer, TaggedUse, layers_of_tags
from curvax.layers.detection.program import (
    Collected,
    Given,
    Node,
    Program,
    Values,
    read,
    run,
)
from curvax.layers.detection.tagging import is_layer, is_loss, tagged_uses
from curvax.layers.registration import (
    RegistrationError,
    auto_register_tags as tag_layers,
    check_reached,
    check_tags,
)
from curvax.losses.tag import LossTag

Losses = tuple[Any, ...]
LossTangents = Sequence[Sequence[Array]]
"""For each loss, tangents or cotangents of what depends on parameters."""


# From the operands of a loss tag to the loss.
#
# Inside loops and of `jax.vmap`, a loss is registered many times at once: its arrays have axes
# in front. All of it is one loss, with these axes merged into that of the batch. Inside
# `jax.vmap`, predictions with two axes and more are a batch, and with fewer those of a single
# example.

_NUMBERS = ("weight", "variance")
"""Arguments of losses that are numbers, unless they are given for each example."""


class LossOperands:
    """The arrays of one loss: those that depend on parameters, and the others.

    `operands` have `num_loops` axes in front, one for each loop around the tag.
    """

    def __init__(self, node: Node, operands: Sequence[Any], num_loops: int) -> None:
        tag: LossTag = node.equation.primitive
        count = len(tag.parameter_dependants_names)
        in_loops = ((True,) * len(operands),) * num_loops
        stacked = (*in_loops, *node.params["stacked"])
        # A vector inside vmap is one example's, and not a batch of numbers.
        least_axes = max(tag.least_axes, 2 if node.params["stacked"] else 1)
        shared = {k for k, name in enumerate(node.params["args_names"]) if name in _NUMBERS}
        arrays = _merged(list(map(jnp.asarray, operands)), stacked, count, least_axes, shared)
        self.dependants = tuple(arrays[:count])
        self.others = tuple(arrays[count:])


def mapped_lengths(node: Node) -> tuple[int, ...]:
    """The lengths of the axes of `jax.vmap` that the operands of a loss tag have in front."""
    stacked = node.params["stacked"]
    return tuple(_size(node.inputs, stacked, level) for level in range(len(stacked)))


def _merged(
    arrays: list[Array],
    stacked: Sequence[Sequence[bool]],
    num_dependants: int,
    least_axes: int,
    shared: Collection[int],
) -> list[Array]:
    """All arrays with the axes in front merged into one, along which each has its own part.

    `stacked` says for each such axis which arrays have it. Those that are `shared` may also be
    numbers that are the same everywhere.
    """
    if not stacked:
        return arrays
    sizes = [_size(arrays, stacked, level) for level in range(len(stacked))]
    count = [sum(level[k] for level in stacked) for k in range(len(arrays))]
    full = [_with_all_axes(x, stacked, k, sizes) for k, x in enumerate(arrays)]
    # An example alone, inside vmap, has no axis of its own for a batch.
    first = full[0]
    has_batch = first.ndim - len(sizes) >= least_axes
    batch = first.shape[len(sizes) : len(sizes) + 1] if has_batch else ()
    merged = []
    for number, (x, own) in enumerate(zip(full, arrays, strict=True)):
        plain = own.ndim - count[number] == 0
        if plain and number >= num_dependants:
            if not count[number] and number in shared:
                merged.append(own)  # A number that is the same everywhere.
                continue
            x = jnp.broadcast_to(x.reshape(*x.shape, *[1] * len(batch)), (*sizes, *batch))
        keep = len(sizes) + (1 if has_batch else 0)
        merged.append(x.reshape(-1, *x.shape[keep:]))
    return merged


def _size(arrays: Sequence[Any], stacked: Sequence[Sequence[bool]], level: int) -> int:
    """The length of an axis in front, from an array that has it."""
    number = stacked[level].index(True)
    before = sum(outer[number] for outer in stacked[:level])
    return arrays[number].shape[before]


def _with_all_axes(
    x: Array, stacked: Sequence[Sequence[bool]], number: int, sizes: Sequence[int]
) -> Array:
    """An array with all axes in front, repeated along those that it does not have."""
    own = [level[number] for level in stacked]
    rest = x.shape[sum(own) :]
    x = jnp.expand_dims(x, [axis for axis, has in enumerate(own) if not has])
    return jnp.broadcast_to(x, (*sizes, *rest))


# `ProcessedJaxpr`: a traced function, with its losses and layers read from the tags in it.


class ProcessedJaxpr:
    """A traced function whose losses and layers are tagged.

    Arguments:
        jaxpr: the jaxpr of the function.
        consts: its constants.
        in_tree: the structure of the arguments of the function.
        params_index: which of them are the parameters.
        allow_left_out_params: whether there may be parameters that are in no layer.
        describes_own_params: whether all tags are those that `auto_register_tags` put into this
            function, so that they say which of its parameters they are about.

    Attributes:
        jaxpr: as given.
        consts: as given.
        in_tree: as given.
        params_index: as given.
        loss_tags: the equations that tag losses, in order.
        layer_tags: an equation for each layer, sorted by the numbers of their parameters. A layer
            that is applied at several places has several; this is the first.
        layer_indices: the numbers of the parameters of each layer.
        interaction: the operation by which what is computed for one example depends on others, as
            far as such is found.

    Raises:
        RegistrationError: if a parameter is in no layer and that is not allowed.
    """

    def __init__(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        in_tree: TreeDef,
        params_index: int,
        allow_left_out_params: bool = False,
        *,
        describes_own_params: bool = False,
    ) -> None:
        self.jaxpr = jaxpr
        self.consts = tuple(consts)
        self.in_tree = in_tree
        self.params_index = params_index
        self.interaction: str | None = None
        self.program: Program = read(_jax.closed(jaxpr, consts))
        self.losses: Sequence[Node] = [n for n in self.program.all_nodes() if is_loss(n)]
        params = self.program.inputs[self.params_range.start : self.params_range.stop]
        # The descriptions that tags carry are about the parameters of the function that has them.
        self.layers: Sequence[Layer] = layers_of_tags(
            _carried(self.program) if describes_own_params else tagged_uses(self.program, params)
        )
        self.loss_tags = tuple(node.equation for node in self.losses)
        self.layer_tags = tuple(layer.nodes[0].equation for layer in self.layers)
        self.layer_indices = tuple(layer.params for layer in self.layers)
        if not allow_left_out_params:
            self._check_complete()

    @property
    def params_range(self) -> range:
        """Which of the flat arguments are parameters."""
        sizes = [child.num_leaves for child in self.in_tree.children()]
        start = sum(sizes[: self.params_index])
        return range(start, start + sizes[self.params_index])

    @property
    def in_vars_flat(self) -> list[Any]:
        """The variables of the arguments."""
        return list(self.jaxpr.invars)

    @property
    def in_vars(self) -> PyTree:
        """The variables of the arguments, in the structure of these."""
        return jax.tree.unflatten(self.in_tree, self.in_vars_flat)

    @property
    def params_vars(self) -> PyTree:
        """The variables of the parameters, in the structure of these."""
        return self.in_vars[self.params_index]

    @property
    def params_vars_flat(self) -> list[Any]:
        """The variables of the parameters."""
        return jax.tree.leaves(self.params_vars)

    @property
    def params_tree(self) -> TreeDef:
        """The structure of the parameters."""
        return jax.tree.structure(self.params_vars)

    @classmethod
    def make_from_func(
        cls,
        func: Fun,
        func_args: Sequence[PyTree],
        params_index: int = 0,
        auto_register_tags: bool = True,
        allow_left_out_params: bool = False,
        **auto_registration_kwargs: Any,
    ) -> "ProcessedJaxpr":
        """Trace a function, with its layers tagged.

        Arguments:
            func: a function that registers at least one loss.
            func_args: arguments to trace it with.
            params_index: which of them are the parameters.
            auto_register_tags: whether to look for layers; otherwise there are only those that the
                function tags itself.
            allow_left_out_params: whether there may be parameters that are in no layer, or that no
                loss depends on.
            auto_registration_kwargs: as in `curvax.auto_register_tags`.

        Returns:
            The processed jaxpr.
        """
        args = tuple(func_args)
        interaction = None
        if auto_register_tags:
            options: dict[str, Any] = {"allow_unused_params": allow_left_out_params}
            options |= auto_registration_kwargs
            tagged = tag_layers(func, args, params_index, **options)
            func, interaction = tagged, tagged.registration(*args).interaction
        traced = jax.make_jaxpr(func)(*args)
        through_custom = auto_registration_kwargs.get("through_custom_derivatives", False)
        tree = jax.tree.structure(args)
        index = params_index % len(args)
        processed = cls(
            traced.jaxpr,
            traced.consts,
            tree,
            index,
            allow_left_out_params,
            describes_own_params=auto_register_tags,
        )
        processed.interaction = interaction
        check_tags(processed.program, through_custom)
        if not auto_register_tags:  # Otherwise it was checked where layers were looked for.
            inside = processed.params_range
            params = processed.program.inputs[inside.start : inside.stop]
            check_reached(processed.program, processed.losses, params, through_custom)
        return processed

    def _check_complete(self) -> None:
        registered = {number for layer in self.layers for number in layer.params}
        paths, _ = jax.tree_util.tree_flatten_with_path(self.params_vars)
        missing = [
            jax.tree_util.keystr(path)
            for number, (path, _) in enumerate(paths)
            if number not in registered
        ]
        if missing:
            raise RegistrationError(
                f"curvax.ProcessedJaxpr: {', '.join(missing)} are in no layer. Tag them, let "
                f"auto_register_tags look for layers, or say allow_left_out_params=True."
            )


def _carried(program: Program) -> list[TaggedUse]:
    """The tags in a program, with the descriptions that they carry."""
    return [TaggedUse(node, node.params["use"]) for node in program.all_nodes() if is_layer(node)]


@dataclass
class TracedFunction:
    """Keeps what was traced, by the shapes of the arguments."""

    trace: Callable[[Sequence[PyTree]], ProcessedJaxpr]
    same_graph: bool = True
    """Whether other shapes must give the same operations."""
    known: dict[Any, ProcessedJaxpr] = field(default_factory=dict)

    @classmethod
    def of(cls, func: Fun, params_index: int, same_graph: bool, **options: Any) -> "TracedFunction":
        """A function whose layers are to be found, as `ProcessedJaxpr.make_from_func` does."""
        trace = lambda args: ProcessedJaxpr.make_from_func(func, args, params_index, **options)
        return cls(trace, same_graph)

    def at(self, func_args: Any) -> "LossMap":
        """The function at these arguments."""
        if not isinstance(func_args, tuple | list):
            raise TypeError(
                f"{where()}: the arguments of the function are given as one sequence, such as "
                f"(params, batch), got {type(func_args).__name__}."
            )
        leaves, tree = jax.tree.flatten(tuple(func_args))
        key = tree, _jax.call_key(leaves)
        if key in self.known:
            return LossMap(self.known[key], leaves)
        processed = self.trace(func_args)
        self._check(processed)
        if not any(map(_jax.is_tracer, processed.consts)):  # Else it is good for this call only.
            self.known[key] = processed
        return LossMap(processed, leaves)

    def _check(self, processed: ProcessedJaxpr) -> None:
        if not (self.same_graph and self.known):
            return
        before = next(iter(self.known.values()))
        if _outline(before) != _outline(processed):
            raise ValueError(
                f"{where()}: with these arguments the function does other things than with the "
                f"first ones, so that its layers are not the same. If that is meant, say "
                f"raise_error_on_diff_jaxpr=False."
            )


def _outline(processed: ProcessedJaxpr) -> Any:
    """What a function does, but for what it only does to fit shapes."""
    layers = [(layer.tag_name, layer.params, len(layer.tags)) for layer in processed.layers]
    names = [node.name for node in processed.program.all_nodes()]
    return layers, [name for name in names if name not in (*REARRANGED, "slice", "split")]


@dataclass(frozen=True)
class LossMap:
    """What the losses depend on, as a function of the parameters."""

    processed: ProcessedJaxpr
    leaves: Sequence[Any]
    """Arrays, or shapes, where nothing is computed."""

    @property
    def params(self) -> list[Any]:
        """The parameters."""
        inside = self.processed.params_range
        return list(self.leaves[inside.start : inside.stop])

    @property
    def stacks(self) -> list[tuple[int, ...]]:
        """For each loss, the lengths of the axes of loops and of `vmap` among its rows."""
        program = self.processed.program
        return [
            (*program.loop_lengths(node), *mapped_lengths(node)) for node in self.processed.losses
        ]

    def __call__(
        self, params: Sequence[Array], hooks: "AtLosses | None" = None, given: Given | None = None
    ) -> tuple[list[tuple[Array, ...]], tuple[list[tuple[Array, ...]], Collected]]:
        """For each loss, what depends on parameters; and the rest, and what else was collected.

        Hooks say what is done at layers, with what they are given for it.
        """
        inside = self.processed.params_range
        inputs = [*self.leaves[: inside.start], *params, *self.leaves[inside.stop :]]
        _, collected = run(self.processed.program, inputs, hooks or AtLosses(), given)
        losses = [self._operands(node, collected.pop(node)) for node in self.processed.losses]
        others = [loss.others for loss in losses]
        return [loss.dependants for loss in losses], (others, collected)

    def losses(
        self, dependants: Sequence[Sequence[Array]], others: Sequence[Sequence[Array]]
    ) -> tuple[Any, ...]:
        """The losses, made of such arrays."""
        made = []
        for node, mine, rest in zip(self.processed.losses, dependants, others, strict=True):
            tag, names = node.equation.primitive, node.params["args_names"]
            made.append(tag.loss(*mine, *rest, args_names=names))
        return tuple(made)

    def _operands(self, node: Node, operands: Sequence[Any]) -> LossOperands:
        return LossOperands(node, operands, len(self.processed.program.loops_around[node]))


class AtLosses:
    """Hooks that collect the operands of losses. Those that do something at layers extend them."""

    def keys_at(self, node: Node) -> Collection[Any] | None:
        """The keys of what is given for a node; None if there is nothing to do at it."""
        return () if is_loss(node) else self.keys_at_layer(node) if is_layer(node) else None

    def is_per_step(self, key: Any, loop: Node) -> bool:
        """Whether what is given under a key has a part for each step of a loop."""
        del key, loop
        return True

    def visit(
        self, node: Node, inputs: Sequence[Any], values: Values, given: Given
    ) -> tuple[list[Any], Collected]:
        """The outputs of a node, and what is collected there."""
        del values
        operands = [jnp.asarray(x) for x in inputs]
        if is_loss(node):
            return _jax.run_equation(node.equation, inputs), {node: operands}
        return self.visit_layer(node, operands, given)

    def keys_at_layer(self, node: Node) -> Collection[Any] | None:
        """As `keys_at`, for a layer."""
        del node

    def visit_layer(
        self, node: Node, operands: list[Array], given: Given
    ) -> tuple[list[Any], Collected]:
        """As `visit`, for a layer."""
        raise NotImplementedError


def like_dependants(tangents: LossTangents, dependants: Sequence[Any]) -> list[tuple[Array, ...]]:
    """Cotangents as the user gave them, checked; those of each device's own are its own, too."""
    given = [tuple(map(jnp.shape, each)) for each in tangents]
    expected = [tuple(x.shape for x in each) for each in dependants]
    if given != expected:
        raise ValueError(
            f"{where()}: for each loss there is one array for each of its parameter_dependants, of "
            f"the shapes {expected}, got {given}."
        )
    pairs = zip(tangents, dependants, strict=True)
    alike = lambda each, like: zip(map(jnp.asarray, each), like, strict=True)
    return [tuple(_jax.varying_like(x, y) for x, y in alike(*pair)) for pair in pairs]


def check_devices(at: LossMap) -> None:
    """With examples on several devices of a `shard_map`, layers put out something else on each.

    Otherwise JAX sums the cotangents of different examples, before they get to the layer.
    """
    kinds = lambda node: [x.aval for x in node.equation.outvars]
    axes = _jax.varying_axes(*(kind for loss in at.processed.losses for kind in kinds(loss)))
    for layer in at.processed.layers:
        for node in () if layer.is_generic else layer.nodes:
            missing = sorted(map(str, axes - _jax.varying_axes(*kinds(node))))
            if missing:
                raise ValueError(
                    f"{where()}: inside of shard_map, the losses differ between the devices along "
                    f"{', '.join(missing)}, but {node.name} of the parameters {layer.params} gives "
                    f"the same on all of them, so that its cotangents would be summed over "
                    f"different examples. Say of its input, such as the first state of a loop, "
                    f"that it varies: jax.lax.pcast(x, {tuple(missing)}, to='varying')."
                )
