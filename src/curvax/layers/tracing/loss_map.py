"""`LossMap`: a traced function as a map from its parameters to what its losses depend on."""

from collections.abc import Callable, Collection, Hashable, Sequence
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
    Variable,
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
from curvax.losses.tag import LossTag, least_axes_of_batch

Losses = tuple[Any, ...]
"""`LossFunction`s, or objects of the class that a user-supplied `LossTag` has."""
LossArrays = Sequence[tuple[Array, ...]]
"""For each loss, some of its operands."""
LossTangents = Sequence[Sequence[Array]]
"""For each loss, tangents or cotangents of the operands that depend on parameters."""


# From the operands of a loss tag to the loss.
#
# Inside loops and `jax.vmap`, a loss is registered many times at once: its arrays have leading
# axes. All of it is one loss, with these axes merged into the batch axis. Inside `jax.vmap`,
# predictions with two axes and more are a batch, and those with fewer a single example.

_SCALARS = ("weight", "variance")
"""Arguments of losses that may be scalars, or arrays with an element for each example."""


class LossOperands:
    """The operands of one loss: those that depend on parameters, and the others.

    Arguments:
        node: The loss tag.
        operands: Its operands, with a leading axis for each loop around the tag.
        num_loops: Number of these loops.
    """

    def __init__(self, node: Node, operands: Sequence[Any], num_loops: int) -> None:
        tag: LossTag = node.equation.primitive
        count = len(tag.parameter_dependants_names)
        in_loops = ((True,) * len(operands),) * num_loops
        stacked = (*in_loops, *node.params["stacked"])
        least_axes = least_axes_of_batch(tag, node.params)
        shared = {k for k, name in enumerate(node.params["args_names"]) if name in _SCALARS}
        arrays = _merged(list(map(jnp.asarray, operands)), stacked, count, least_axes, shared)
        self.dependants = tuple(arrays[:count])
        self.others = tuple(arrays[count:])


def mapped_lengths(node: Node) -> tuple[int, ...]:
    """Return the lengths of the leading axes of `jax.vmap` of a loss tag's operands."""
    stacked = node.params["stacked"]
    return tuple(_size(node.inputs, stacked, level) for level in range(len(stacked)))


def _merged(
    arrays: list[Array],
    stacked: Sequence[Sequence[bool]],
    num_dependants: int,
    least_axes: int,
    shared: Collection[int],
) -> list[Array]:
    """Merge the leading axes of all arrays, and their batch axes, into one.

    Arguments:
        arrays: The arrays.
        stacked: For each leading axis, which arrays have it; others are broadcast.
        num_dependants: Number of arrays that depend on parameters.
        least_axes: Least number of axes of the predictions of a batch.
        shared: Indices of arrays that stay scalars if they have no leading axis.
    """
    if not stacked:
        return arrays
    sizes = [_size(arrays, stacked, level) for level in range(len(stacked))]
    count = [sum(level[k] for level in stacked) for k in range(len(arrays))]
    full = [_with_all_axes(x, stacked, k, sizes) for k, x in enumerate(arrays)]
    # A single example, inside vmap, has no batch axis.
    first = full[0]
    has_batch = first.ndim - len(sizes) >= least_axes
    batch = first.shape[len(sizes) : len(sizes) + 1] if has_batch else ()
    merged = []
    for k, (x, given) in enumerate(zip(full, arrays, strict=True)):
        is_scalar = given.ndim - count[k] == 0
        if is_scalar and k >= num_dependants:
            if not count[k] and k in shared:
                merged.append(given)
                continue
            x = jnp.broadcast_to(x.reshape(*x.shape, *[1] * len(batch)), (*sizes, *batch))
        keep = len(sizes) + (1 if has_batch else 0)
        merged.append(x.reshape(-1, *x.shape[keep:]))
    return merged


def _size(arrays: Sequence[Any], stacked: Sequence[Sequence[bool]], level: int) -> int:
    """Return the length of a leading axis, from an array that has it."""
    k = stacked[level].index(True)
    before = sum(outer[k] for outer in stacked[:level])
    return arrays[k].shape[before]


def _with_all_axes(
    x: Array, stacked: Sequence[Sequence[bool]], k: int, sizes: Sequence[int]
) -> Array:
    """Broadcast the k-th array along the leading axes that it does not have."""
    has_axis = [level[k] for level in stacked]
    rest = x.shape[sum(has_axis) :]
    x = jnp.expand_dims(x, [axis for axis, has in enumerate(has_axis) if not has])
    return jnp.broadcast_to(x, (*sizes, *rest))


# `ProcessedJaxpr`: a traced function, with its losses and layers read from the tags in it.


class ProcessedJaxpr:
    """A traced function whose losses and layers are tagged.

    Arguments:
        jaxpr: Jaxpr of the function.
        consts: Constants of the jaxpr.
        in_tree: Structure of the arguments of the function.
        params_index: Index of the argument that holds the parameters.
        allow_left_out_params: Whether there may be parameters that are in no layer.
        describes_own_params: Whether `auto_register_tags` placed all tags in this function, so that
            they refer to its parameters.

    Attributes:
        jaxpr: Jaxpr of the function.
        consts: Constants of the jaxpr.
        in_tree: Structure of the arguments of the function.
        params_index: Index of the argument that holds the parameters.
        loss_tags: The equations that tag losses, in order.
        layer_tags: The equation of the first tag of each layer, sorted by the indices of their
            parameters.
        layer_indices: The indices of the parameters of each layer.
        interaction: Name of the operation by which examples interact, if one was found.

    Raises:
        RegistrationError: If a parameter is in no layer and that is not allowed.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def loss(params, x):
        ...     return curvax.register_squared_error_loss(x @ params["w"] + params["b"])
        >>> args = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}, jnp.ones((4, 3))
        >>> processed = curvax.ProcessedJaxpr.make_from_func(loss, args)
        >>> [tag.primitive.name for tag in processed.layer_tags], processed.layer_indices
        (['dense_tag'], ((1, 0),))
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
        # The descriptions that tags carry refer to the parameters of the function they are in.
        self.layers: Sequence[Layer] = layers_of_tags(
            _carried_uses(self.program)
            if describes_own_params
            else tagged_uses(self.program, self._params)
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
        """Variables of the arguments."""
        return list(self.jaxpr.invars)

    @property
    def in_vars(self) -> PyTree:
        """Variables of the arguments, in their structure."""
        return jax.tree.unflatten(self.in_tree, self.in_vars_flat)

    @property
    def params_vars(self) -> PyTree:
        """Variables of the parameters, in their structure."""
        return self.in_vars[self.params_index]

    @property
    def params_vars_flat(self) -> list[Any]:
        """Variables of the parameters."""
        return jax.tree.leaves(self.params_vars)

    @property
    def params_tree(self) -> TreeDef:
        """Structure of the parameters."""
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
        """Trace a function with its layers tagged.

        Arguments:
            func: Function that registers at least one loss.
            func_args: Sequence of arguments to trace it with.
            params_index: Index of the argument that holds the parameters.
            auto_register_tags: Whether to look for layers; otherwise there are only those that the
                function tags itself.
            allow_left_out_params: Whether there may be parameters that are in no layer, or that no
                loss depends on.
            auto_registration_kwargs: Keyword arguments of `curvax.auto_register_tags`, such as
                `strict`, `patterns_to_skip` or `through_custom_derivatives`.

        Returns:
            The processed jaxpr.

        Raises:
            RegistrationError: If no loss is registered, or one was dropped or has no derivative in
                any parameter; or if a parameter is in no layer and that is not allowed.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> loss = lambda w, x: curvax.register_squared_error_loss(x @ w)
            >>> args = jnp.ones((3, 2)), jnp.ones((4, 3))
            >>> processed = curvax.ProcessedJaxpr.make_from_func(loss, args)
            >>> len(processed.loss_tags), len(processed.layer_tags)
            (1, 1)
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
            check_reached(processed.program, processed.losses, processed._params, through_custom)
        return processed

    @property
    def _params(self) -> Sequence[Variable]:
        return self.program.inputs[self.params_range.start : self.params_range.stop]

    def _check_complete(self) -> None:
        registered = {index for layer in self.layers for index in layer.params}
        paths, _ = jax.tree_util.tree_flatten_with_path(self.params_vars)
        missing = [
            jax.tree_util.keystr(path)
            for index, (path, _) in enumerate(paths)
            if index not in registered
        ]
        if missing:
            raise RegistrationError(
                f"curvax.ProcessedJaxpr: {', '.join(missing)} are in no layer. Tag them, let "
                f"auto_register_tags look for layers, or pass allow_left_out_params=True."
            )


def _carried_uses(program: Program) -> list[TaggedUse]:
    """Return the tags in a program, with the descriptions that they carry."""
    return [TaggedUse(node, node.params["use"]) for node in program.all_nodes() if is_layer(node)]


@dataclass
class TracedFunction:
    """A function, traced once for each combination of shapes of its arguments.

    Attributes:
        trace: Traces the function for arguments, given as one sequence.
        same_graph: Whether other shapes must give the same operations.
        known: What was traced, by the shapes of the arguments.
    """

    trace: Callable[[Sequence[PyTree]], ProcessedJaxpr]
    same_graph: bool = True
    known: dict[Hashable, ProcessedJaxpr] = field(default_factory=dict)

    @classmethod
    def of(cls, func: Fun, params_index: int, same_graph: bool, **options: Any) -> "TracedFunction":
        """Return a function that `ProcessedJaxpr.make_from_func` traces with these options."""
        trace = lambda args: ProcessedJaxpr.make_from_func(func, args, params_index, **options)
        return cls(trace, same_graph)

    def at(self, func_args: Any) -> "LossMap":
        """Return the map from parameters to losses at these arguments."""
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
        if not any(map(_jax.is_tracer, processed.consts)):  # Otherwise it is valid here only.
            self.known[key] = processed
        return LossMap(processed, leaves)

    def _check(self, processed: ProcessedJaxpr) -> None:
        if not (self.same_graph and self.known):
            return
        before = next(iter(self.known.values()))
        if _outline(before) != _outline(processed):
            raise ValueError(
                f"{where()}: with these arguments the function traces to a different jaxpr than "
                f"with the first ones, so that its layers are not the same. If that is intended, "
                f"pass raise_error_on_diff_jaxpr=False."
            )


def _outline(
    processed: ProcessedJaxpr,
) -> tuple[list[tuple[str, tuple[int, ...], int]], list[str]]:
    """Return the layers and the operations of a function, except for those that only rearrange."""
    layers = [(layer.tag_name, layer.params, len(layer.tags)) for layer in processed.layers]
    names = [node.name for node in processed.program.all_nodes()]
    return layers, [name for name in names if name not in (*REARRANGED, "slice", "split")]


@dataclass(frozen=True)
class LossMap:
    """What the losses depend on, as a function of the parameters.

    Attributes:
        processed: The traced function.
        leaves: The leaves of its arguments; shapes suffice where nothing is computed.
    """

    processed: ProcessedJaxpr
    leaves: Sequence[Any]

    @property
    def params(self) -> list[Any]:
        """The leaves that are parameters."""
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
        """Run the function.

        Arguments:
            params: The leaves of the parameters.
            hooks: What to do at layers.
            given: Arrays for the hooks.

        Returns:
            For each loss, the operands that depend on parameters; and, as auxiliary output, the
            other operands of each loss and what the hooks collected at layers.
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
        """Return the losses with these operands."""
        found = []
        for node, of_params, rest in zip(self.processed.losses, dependants, others, strict=True):
            tag, names = node.equation.primitive, node.params["args_names"]
            found.append(tag.loss(*of_params, *rest, args_names=names))
        return tuple(found)

    def _operands(self, node: Node, operands: Sequence[Any]) -> LossOperands:
        return LossOperands(node, operands, len(self.processed.program.loops_around[node]))


class AtLosses:
    """Hooks that collect the operands of losses. Subclasses do something at layers."""

    def keys_at(self, node: Node) -> Collection[Any] | None:
        """Return the keys of what is given for a node; None to run the node as it is."""
        return () if is_loss(node) else self.keys_at_layer(node) if is_layer(node) else None

    def is_per_step(self, key: Any, loop: Node) -> bool:
        """Return whether what is given under a key has a leading axis of the steps of a loop."""
        del key, loop
        return True

    def visit(
        self, node: Node, inputs: Sequence[Any], values: Values, given: Given
    ) -> tuple[list[Any], Collected]:
        """Return the outputs of a node, and what to collect there."""
        del values
        operands = [jnp.asarray(x) for x in inputs]
        if is_loss(node):
            return _jax.run_equation(node.equation, inputs), {node: operands}
        return self.visit_layer(node, operands, given)

    def keys_at_layer(self, node: Node) -> Collection[Any] | None:
        """Return the keys of what is given for a layer; None to run its tag as it is."""
        del node

    def visit_layer(
        self, node: Node, operands: list[Array], given: Given
    ) -> tuple[list[Any], Collected]:
        """Return the outputs of a layer's tag, and what to collect there."""
        raise NotImplementedError


def like_dependants(tangents: LossTangents, dependants: Sequence[Any]) -> list[tuple[Array, ...]]:
    """Check user-supplied cotangents, and mark as device-varying those of device-varying arrays."""
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
    """Check that the outputs of layers vary over the devices of a `shard_map` if the losses do.

    Otherwise JAX sums the cotangents of different examples before they get to the layer.
    """
    kinds = lambda node: [x.aval for x in node.equation.outvars]
    axes = _jax.varying_axes(*(kind for loss in at.processed.losses for kind in kinds(loss)))
    for layer in at.processed.layers:
        for node in () if layer.is_generic else layer.nodes:
            missing = sorted(map(str, axes - _jax.varying_axes(*kinds(node))))
            if missing:
                raise ValueError(
                    f"{where()}: inside shard_map, the losses differ between the devices along "
                    f"{', '.join(missing)}, but the output of {node.name} of the parameters "
                    f"{layer.params} is replicated, so that its cotangents would be summed over "
                    f"different examples. Declare that its input, such as the initial carry of a "
                    f"loop, varies: jax.lax.pcast(x, {tuple(missing)}, to='varying')."
                )
