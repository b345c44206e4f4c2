"""`LayerTag`: a primitive that marks which part of a program is a layer, and of which kind."""

from typing import Any

import jax.numpy as jnp

from curvax._errors import where
from curvax._jax import Tag
from curvax._types import Array

TAG_NAMES: set[str] = set()
"""The names of all tags that have been made. JAX keeps primitives alive for ever as well."""


class LayerTag(Tag):
    """A primitive that tags a layer: its outputs, its inputs and its parameters.

    It is called as

        outputs = tag.bind(*outputs, *inputs, *parameters, **constants)

    and is the identity on the outputs: it returns an array if there is one output, otherwise a
    list. All operands are arrays, and all constants are hashable.

    Arguments:
        name: Name of the kind of layer. Blocks are chosen by it.
        num_inputs: Number of inputs of a layer.
        num_outputs: Number of outputs of a layer.

    Raises:
        ValueError: If there is no output to tag.

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
        TAG_NAMES.add(name)

    @property
    def num_outputs(self) -> int:
        """The number of outputs of the layer."""
        return self._num_kept

    @property
    def num_inputs(self) -> int:
        """The number of inputs of the layer."""
        return self._num_inputs

    def bind(self, *args: Any, **constants: Any) -> Any:
        """Tag a layer.

        Arguments:
            args: The outputs, inputs and parameters, in this order.
            constants: Static parameters of the tag; hashable.

        Returns:
            The outputs: an array if there is one, otherwise a list. Compute with these.

        Raises:
            ValueError: If there are fewer arrays than outputs and inputs.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> tag = curvax.LayerTag("sum_tag", num_inputs=1, num_outputs=1)
            >>> x, w = jnp.ones(3), jnp.arange(3.0)
            >>> tag.bind(x + w, x, w)
            Array([1., 2., 3.], dtype=float32)
        """
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
    """Tag a parameter as belonging to no known layer.

    Detection then skips it, and it gets the generic block (`NaiveDiagonal` by default).

    Arguments:
        parameter: The parameter, before anything is computed from it.

    Returns:
        The tagged parameter. Use it in place of the argument.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def loss(w, x):
        ...     w = curvax.register_generic(w)
        ...     return curvax.register_squared_error_loss(x @ w)
        >>> report = curvax.explain_registration(loss, (jnp.ones((3, 2)), jnp.ones((4, 3))))
        >>> report.rows[0].tag
        'generic_tag'
    """
    return generic_tag.bind(parameter, parameter)


def register_dense(y: Array, x: Array, w: Array, b: Array | None = None) -> Array:
    """Tag a dense layer: `y = x @ w + b`.

    Arguments:
        y: Output, of shape `(..., m)`.
        x: Input, of shape `(..., n)`, with the same leading axes.
        w: Weights, of shape `(n, m)`.
        b: Bias, of shape `(m,)`, if there is one.

    Returns:
        The output. Compute with what is returned.

    Raises:
        ValueError: If the shapes are not those of a dense layer.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def loss(params, x):
        ...     y = jnp.sin(x) @ params["w"] + params["b"]
        ...     y = curvax.register_dense(y, jnp.sin(x), params["w"], params["b"])
        ...     return curvax.register_squared_error_loss(y)
        >>> params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
        >>> report = curvax.explain_registration(loss, (params, jnp.ones((4, 3))))
        >>> [(row.path, row.tag) for row in report.rows]
        [("['b']", 'dense_tag'), ("['w']", 'dense_tag')]
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
        y: Output, a batch of images.
        x: Input, a batch of images.
        w: Kernel.
        b: Bias, of shape `(output channels,)`, if there is one.
        params: Keyword arguments that `lax.conv_general_dilated` was called with. Defaults: NHWC
            images, an HWIO kernel, strides of one and "SAME" padding.

    Returns:
        The output. Compute with what is returned.

    Raises:
        ValueError: If there are not two spatial axes.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax import lax
        >>> import curvax
        >>> settings = {"window_strides": (2, 2), "padding": "VALID"}
        >>> def loss(w, x):
        ...     layout = ("NHWC", "HWIO", "NHWC")
        ...     y = lax.conv_general_dilated(x, w, dimension_numbers=layout, **settings)
        ...     y = curvax.register_conv2d(y, x, w, dimension_numbers=layout, **settings)
        ...     return curvax.register_squared_error_loss(y.reshape(len(x), -1))
        >>> args = jnp.ones((3, 3, 2, 4)), jnp.ones((5, 7, 7, 2))
        >>> curvax.explain_registration(loss, args).rows[0].tag
        'conv2d_tag'
    """
    _check("w", w, w.ndim == 4, "two spatial axes and two of channels")
    return conv2d_tag.bind(y, x, w, *_given(b), **params)


def register_conv(y: Array, x: Array, w: Array, b: Array | None = None, **params: Any) -> Array:
    """Tag a convolution with one to three spatial axes, or in groups.

    Equal to `register_conv2d` except for the number of spatial axes and for groups.

    Arguments:
        y: Output, a batch of signals, images or volumes.
        x: Input, of as many axes.
        w: Kernel, of as many axes.
        b: Bias, of shape `(output channels,)`, if there is one.
        params: Keyword arguments that `lax.conv_general_dilated` was called with, such as
            `feature_group_count`. Defaults: the batch axis first and channels last in `x` and `y`,
            input and output channels last in `w`, strides of one and "SAME" padding.

    Returns:
        The output. Compute with what is returned.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax import lax
        >>> import curvax
        >>> def loss(w, x):
        ...     layout = ("NWC", "WIO", "NWC")
        ...     y = lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=layout)
        ...     y = curvax.register_conv(y, x, w)
        ...     return curvax.register_squared_error_loss(y.reshape(len(x), -1))
        >>> args = jnp.ones((3, 2, 4)), jnp.ones((5, 7, 2))
        >>> curvax.explain_registration(loss, args).rows[0].tag
        'conv_tag'
    """
    return conv_tag.bind(y, x, w, *_given(b), **params)


def register_scale_and_shift(
    y: Array, x: Array, scale: Array | None = None, shift: Array | None = None
) -> Array:
    """Tag a layer `y = x * scale + shift`, of which either may be missing.

    Arguments:
        y: Output, of the shape of `x`.
        x: Input.
        scale: What `x` is multiplied with. It broadcasts to the shape of `x`.
        shift: What is added. It broadcasts to the shape of `x`.

    Returns:
        The output. Compute with what is returned.

    Raises:
        ValueError: If both are missing, or do not broadcast.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def loss(scale, x):
        ...     x = x - jnp.mean(x, axis=-1, keepdims=True)
        ...     y = curvax.register_scale_and_shift(x * scale, x, scale=scale)
        ...     return curvax.register_squared_error_loss(y)
        >>> curvax.explain_registration(loss, (jnp.ones(3), jnp.ones((4, 3)))).rows[0].tag
        'scale_and_shift_tag'
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
    """Tag an embedding: `y = table[indices]`.

    Arguments:
        y: Output, of shape `indices.shape + table.shape[1:]`.
        indices: Indices of rows, integers. One that equals the number of rows stands for no row.
        table: The embedding, a row for each index.

    Returns:
        The output. Compute with what is returned.

    Raises:
        ValueError: If the shapes do not fit, or the indices are not integers.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def loss(table, tokens):
        ...     y = curvax.register_embedding(table[tokens], tokens, table)
        ...     return curvax.register_squared_error_loss(y)
        >>> args = jnp.ones((10, 2)), jnp.array([3, 1, 4])
        >>> curvax.explain_registration(loss, args).rows[0].tag
        'embedding_tag'
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
