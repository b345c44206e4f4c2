"""`LayerTag`: says which part of a program is a layer, and of which kind."""

from typing import Any

from curvax.tags._tag import Tag

__all__ = ["LayerTag"]


class LayerTag(Tag):
    """A primitive that tags a layer: its outputs, its inputs and its parameters.

    It is called as

        outputs = tag.bind(*outputs, *inputs, *parameters, **constants)

    and does nothing: the outputs are returned as they are, an array if there is one of them, else
    a list. All operands are arrays, and all constants are hashable.

    Arguments:
        name: what the kind of layer is called. Blocks are chosen by it.
        num_inputs: how many inputs a layer has.
        num_outputs: how many outputs a layer has.

    Raises:
        ValueError: if there is no output to tag.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> squared_dense = curvax.LayerTag("squared_dense_tag", num_inputs=1, num_outputs=1)
        >>> x, w = jnp.ones((2, 3)), jnp.ones((3, 1))
        >>> squared_dense.bind((x @ w) ** 2, x, w)
        Array([[9.],
               [9.]], dtype=float32)
    """

    def __init__(self, name: str, num_inputs: int, num_outputs: int) -> None:
        if num_outputs < 1 or num_inputs < 0:
            raise ValueError(
                f"curvax.LayerTag: a layer has at least one output and no negative number of "
                f"inputs, got num_outputs={num_outputs} and num_inputs={num_inputs}."
            )
        super().__init__(name, num_outputs, multiple_results=num_outputs > 1)
        self._num_inputs = num_inputs

    @property
    def num_outputs(self) -> int:
        """The number of outputs of the layer."""
        return self._num_kept

    @property
    def num_inputs(self) -> int:
        """The number of inputs of the layer."""
        return self._num_inputs

    def bind(self, *args: Any, **constants: Any) -> Any:
        """Tag a layer: its outputs, its inputs and its parameters, in this order."""
        least = self._num_kept + self._num_inputs
        if len(args) < least:
            raise ValueError(
                f"curvax: {self.name} is called with {self._num_kept} outputs, {self._num_inputs} "
                f"inputs, and parameters, but got {len(args)} arrays."
            )
        return super().bind(*args, **constants)
