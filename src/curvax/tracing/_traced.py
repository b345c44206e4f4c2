"""A function, traced once for each shape of its arguments: a map to what its losses depend on."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from curvax import _compat
from curvax._types import Array, PyTree
from curvax.graph import (
    Collected,
    Given,
    Node,
    Values,
    is_loss,
    run,
    stack_shape,
)
from curvax.tags import LayerTag
from curvax.tracing._operands import LossOperands
from curvax.tracing._processed_jaxpr import ProcessedJaxpr

__all__ = ["LossMap", "TracedFunction"]


@dataclass
class TracedFunction:
    """Keeps what was traced, by the shapes of the arguments."""

    trace: Callable[[Sequence[PyTree]], ProcessedJaxpr]
    where: str
    same_graph: bool = True
    """Whether other shapes must give the same operations."""
    known: dict[Any, ProcessedJaxpr] = field(default_factory=dict)

    def at(self, func_args: Sequence[PyTree]) -> "LossMap":
        """The function at these arguments."""
        leaves, tree = jax.tree.flatten(tuple(func_args))
        key = tree, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)
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
        names = lambda p: [node.name for node in p.program.all_nodes()]
        if names(before) != names(processed):
            raise ValueError(
                f"{self.where}: with these arguments the function does other things than with the "
                f"first ones, so that its layers are not the same. If that is meant, say "
                f"raise_error_on_diff_jaxpr=False."
            )


@dataclass(frozen=True)
class LossMap:
    """What the losses depend on, as a function of the parameters and of changes at layers."""

    processed: ProcessedJaxpr
    leaves: Sequence[Array]

    @property
    def params(self) -> list[Array]:
        """The parameters."""
        inside = self.processed.params_range
        return list(self.leaves[inside.start : inside.stop])

    def __call__(
        self, params: Sequence[Array], changes: Mapping[Any, Array] | None = None
    ) -> tuple[list[tuple[Array, ...]], tuple[list[tuple[Array, ...]], list[Any]]]:
        """For each loss, what depends on parameters; and the rest, and the operands of layers.

        `changes` are added to the outputs of layers, by node and number of output.
        """
        inside = self.processed.params_range
        inputs = [*self.leaves[: inside.start], *params, *self.leaves[inside.stop :]]
        hooks = _AtTags(changes is not None)
        _, collected = run(self.processed.program, inputs, hooks, changes or {})
        losses = [self._operands(node, collected[node]) for node in self.processed.losses]
        nodes = [node for layer in self.processed.layers for node in layer.tagged]
        layers = [] if changes is None else [collected[node] for node in nodes]
        others = [loss.others for loss in losses]
        return [loss.dependants for loss in losses], (others, layers)

    def losses(
        self, dependants: Sequence[Sequence[Array]], others: Sequence[Sequence[Array]]
    ) -> tuple[Any, ...]:
        """The losses, made of such arrays."""
        made = []
        for node, mine, rest in zip(self.processed.losses, dependants, others, strict=True):
            tag, names = node.equation.primitive, node.params["args_names"]
            made.append(tag.loss(*mine, *rest, args_names=names))
        return tuple(made)

    def no_changes(self) -> dict[Any, Array]:
        """Zeros to be added to the outputs of all layers."""
        changes: dict[Any, Array] = {}
        for layer in self.processed.layers:
            for node in layer.tagged:
                loops = stack_shape(self.processed.program, node) or ()
                for number, output in enumerate(node.outputs):
                    changes[node, number] = jnp.zeros((*loops, *output.shape), output.dtype)
        return changes

    def _operands(self, node: Node, operands: Sequence[Array]) -> LossOperands:
        loops = stack_shape(self.processed.program, node) or ()
        return LossOperands(node, operands, len(loops))


@dataclass(frozen=True)
class _AtTags:
    """Hooks that collect the operands of losses and, if wanted, of layers, which they change."""

    layers: bool

    def keys_at(self, node: Node) -> Collection[Any] | None:
        if self.layers and isinstance(node.equation.primitive, LayerTag):
            return [(node, number) for number in range(len(node.outputs))]
        return () if is_loss(node) else None

    def visit(
        self, node: Node, inputs: Sequence[Any], values: Values, given: Given
    ) -> tuple[list[Any], Collected]:
        del values
        operands = [jnp.asarray(x) for x in inputs]
        if is_loss(node):
            return _compat.run_equation(node.equation, inputs), {node: operands}
        outputs = operands[: len(node.outputs)]
        changed = [y + given[node, number] for number, y in enumerate(outputs)]
        return changed, {node: operands}
