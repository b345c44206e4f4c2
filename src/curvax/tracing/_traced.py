"""A function, traced once for each shape of its arguments: a map to what its losses depend on."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from curvax import _compat
from curvax._types import Array, Fun, PyTree
from curvax.graph import (
    REARRANGED,
    Collected,
    Given,
    Node,
    Values,
    is_loss,
    run,
    stack_shape,
)
from curvax.tags import LayerTag
from curvax.tracing._operands import LossOperands, mapped_lengths
from curvax.tracing._processed_jaxpr import ProcessedJaxpr

__all__ = ["AtLosses", "LossMap", "TracedFunction"]


@dataclass
class TracedFunction:
    """Keeps what was traced, by the shapes of the arguments."""

    trace: Callable[[Sequence[PyTree]], ProcessedJaxpr]
    where: str
    same_graph: bool = True
    """Whether other shapes must give the same operations."""
    known: dict[Any, ProcessedJaxpr] = field(default_factory=dict)

    @classmethod
    def of(
        cls, func: Fun, params_index: int, where: str, same_graph: bool, **options: Any
    ) -> "TracedFunction":
        """A function whose layers are to be found, as `ProcessedJaxpr.make_from_func` does."""
        trace = lambda args: ProcessedJaxpr.make_from_func(func, args, params_index, **options)
        return cls(trace, where, same_graph)

    def at(self, func_args: Any) -> "LossMap":
        """The function at these arguments."""
        if not isinstance(func_args, tuple | list):
            raise TypeError(
                f"{self.where}: the arguments of the function are given as one sequence, such as "
                f"(params, batch), got {type(func_args).__name__}."
            )
        leaves, tree = jax.tree.flatten(tuple(func_args))
        key = tree, _compat.call_key(leaves)
        if key in self.known:
            return LossMap(self.known[key], leaves)
        processed = self.trace(func_args)
        self._check(processed)
        if not any(map(_compat.is_tracer, processed.consts)):  # Else it is good for this call only.
            self.known[key] = processed
        return LossMap(processed, leaves)

    def _check(self, processed: ProcessedJaxpr) -> None:
        if not (self.same_graph and self.known):
            return
        before = next(iter(self.known.values()))
        if _outline(before) != _outline(processed):
            raise ValueError(
                f"{self.where}: with these arguments the function does other things than with the "
                f"first ones, so that its layers are not the same. If that is meant, say "
                f"raise_error_on_diff_jaxpr=False."
            )


def _outline(processed: ProcessedJaxpr) -> Any:
    """What a function does, but for what it only does to fit shapes."""
    layers = [(layer.tag_name, layer.params, layer.num_sites) for layer in processed.layers]
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
            (*stack_shape(program, node), *mapped_lengths(node)) for node in self.processed.losses
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
        return LossOperands(node, operands, len(stack_shape(self.processed.program, node)))


class AtLosses:
    """Hooks that collect the operands of losses. Those that do something at layers extend them."""

    def keys_at(self, node: Node) -> Collection[Any] | None:
        """The keys of what is given for a node; None if there is nothing to do at it."""
        return () if is_loss(node) else self.keys_at_layer(node) if is_layer(node) else None

    def is_split(self, key: Any, loop: Node) -> bool:
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
            return _compat.run_equation(node.equation, inputs), {node: operands}
        return self.visit_layer(node, operands, given)

    def keys_at_layer(self, node: Node) -> Collection[Any] | None:
        """As `keys_at`, for a layer."""
        del node

    def visit_layer(
        self, node: Node, operands: list[Array], given: Given
    ) -> tuple[list[Any], Collected]:
        """As `visit`, for a layer."""
        raise NotImplementedError


def is_layer(node: Node) -> bool:
    """Whether a node is the tag of a layer."""
    return isinstance(node.equation.primitive, LayerTag)
