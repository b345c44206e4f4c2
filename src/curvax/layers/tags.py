"""`LayerTag`: says which part of a program is a layer, and of which kind."""

from typing import Any

import jax.numpy as jnp

from curvax._errors import where
from curvax._jax import Tag
from curvax._types import Array


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


# The kinds of layers that curvax knows, and the functions that tag one by hand.

generic_tag = LayerTag("generic_tag", num_inputs=0, num_outputs=1)
dense_tag = LayerTag("dense_tag", num_inputs=1, num_outputs=1)
conv2d_tag = LayerTag("conv2d_tag", num_inputs=1, num_outputs=1)
conv_tag = LayerTag("conv_tag", num_inputs=1, num_outputs=1)
scale_and_shift_tag = LayerTag("scale_and_shift_tag", num_inputs=1, num_outputs=1)
embedding_tag = LayerTag("embedding_tag", num_inputs=1, num_outputs=1)


def register_generic(parameter: Array) -> Array:
    """Tag a parameter of which nothing is known but that it is one.

    Arguments:
        parameter: the parameter, before anything is computed from it.

    Returns:
        The parameter. Compute with what is returned: what is done with the argument is not seen.
    """
    return generic_tag.bind(parameter, parameter)


def register_dense(y: Array, x: Array, w: Array, b: Array | None = None) -> Array:
    """Tag a dense layer: `y = x @ w + b`.

    Arguments:
        y: the output, (..., m).
        x: the input, (..., n), with the same leading axes.
        w: the weights, (n, m).
        b: the bias, (m,), if there is one.

    Returns:
        The output. Go on with what is returned.

    Raises:
        ValueError: if the shapes are not those of a dense layer.
    """
    _check("w", w, w.ndim == 2, "(inputs, outputs)")
    _check("x", x, x.shape[-1:] == w.shape[:1], f"(..., {w.shape[0]})")
    _check("y", y, y.shape == (*x.shape[:-1], w.shape[1]), f"{(*x.shape[:-1], w.shape[1])}")
    if b is not None:
        _check("b", b, b.shape == w.shape[1:], f"{w.shape[1:]}")
    return dense_tag.bind(y, x, w, *_given(b))


def register_conv2d(y: Array, x: Array, w: Array, b: Array | None = None, **params: Any) -> Array:
    """Tag a convolution with two spatial axes: `y = lax.conv_general_dilated(x, w, …) + b`.

    Arguments:
        y: the output.
        x: the input, a batch of images.
        w: the kernel.
        b: the bias, if there is one.
        params: what `lax.conv_general_dilated` was called with; NHWC images, HWIO kernels, strides
            of one and "SAME" padding unless it says something else.

    Returns:
        The output. Go on with what is returned.

    Raises:
        ValueError: if there are not two spatial axes.
    """
    _check("w", w, w.ndim == 4, "two spatial axes and two of channels")
    return conv2d_tag.bind(y, x, w, *_given(b), **params)


def register_conv(y: Array, x: Array, w: Array, b: Array | None = None, **params: Any) -> Array:
    """Tag a convolution of any number of spatial axes, or in groups, as `register_conv2d` does."""
    return conv_tag.bind(y, x, w, *_given(b), **params)


def register_scale_and_shift(
    y: Array, x: Array, scale: Array | None = None, shift: Array | None = None
) -> Array:
    """Tag a layer `y = x * scale + shift`, of which one of the two may be missing.

    Arguments:
        y: the output.
        x: the input, of the same shape.
        scale: what `x` is multiplied with; it broadcasts to the shape of `x`.
        shift: what is added; it broadcasts alike.

    Returns:
        The output. Go on with what is returned.

    Raises:
        ValueError: if both are missing, or do not broadcast.
    """
    if scale is None and shift is None:
        raise ValueError(f"{where()}: give scale or shift or both, got neither.")
    _check("y", y, y.shape == x.shape, f"{x.shape}, as x")
    for name, parameter in (("scale", scale), ("shift", shift)):
        if parameter is not None:
            fits = _broadcasts(parameter.shape, x.shape)
            _check(name, parameter, fits, f"one that broadcasts to {x.shape}")
    return scale_and_shift_tag.bind(
        y,
        x,
        *_given(scale),
        *_given(shift),
        has_scale=scale is not None,
        has_shift=shift is not None,
    )


def register_embedding(y: Array, indices: Array, table: Array) -> Array:
    """Tag a layer that looks up rows: `y = table[indices]`.

    Arguments:
        y: the output, of shape `indices.shape + table.shape[1:]`.
        indices: which rows, integers; one that is the number of rows stands for no row.
        table: the rows.

    Returns:
        The output. Go on with what is returned.

    Raises:
        ValueError: if the shapes are not those, or the indices no integers.
    """
    _check("indices", indices, jnp.issubdtype(indices.dtype, jnp.integer), "integers")
    expected = (*indices.shape, *table.shape[1:])
    _check("y", y, y.shape == expected, f"{expected}")
    return embedding_tag.bind(y, indices, table)


def _given(parameter: Array | None) -> list[Array]:
    return [] if parameter is None else [parameter]


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    pairs = zip(shape[::-1], to[::-1], strict=False)
    return len(shape) <= len(to) and all(size in (1, other) for size, other in pairs)


def _check(name: str, x: Array, fits: bool, expected: str) -> None:
    if not fits:
        raise ValueError(
            f"{where()}: {name} has the shape {x.shape} and the type {x.dtype}, expected "
            f"{expected}."
        )
