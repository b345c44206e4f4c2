"""What each kind of layer computes, from what its tag says: the oracle of detection and tracing."""

import functools

import jax
import jax.numpy as jnp
from jax import lax


def dense(node, x, w, b=None):
    product = jnp.einsum("phi,hio->pho", x, w) if w.ndim == 3 else x @ w
    return product if b is None else product + jnp.broadcast_to(b, product.shape)


def convolution(node, x, w, b=None):
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers")
    names += ("feature_group_count", "batch_group_count")
    product = lax.conv_general_dilated(x, w, **{name: node.params[name] for name in names})
    if b is None:
        return product
    channel = node.params["dimension_numbers"].out_spec[1]
    return product + lax.broadcast_in_dim(b, product.shape, (channel,))


def scale_and_shift(node, x, *params):
    params = [jnp.broadcast_to(p.reshape(1, -1), x.shape) for p in params]
    scale = params.pop(0) if node.params["has_scale"] else jnp.ones_like(x)
    return x * scale + (params.pop(0) if node.params["has_shift"] else 0)


def embedding(node, x, table):
    return jnp.take(table, x, axis=0, mode="fill", fill_value=0)


COMPUTED = {
    "dense_tag": dense,
    "conv2d_tag": convolution,
    "conv_tag": convolution,
    "scale_and_shift_tag": scale_and_shift,
    "embedding_tag": embedding,
}


def part(param, cuts):
    """The part of a parameter that is used at a place."""
    for axis, start, stop in cuts:
        param = lax.slice_in_dim(param, start, stop, axis=axis)
    return param


def recompute(node, x, stacked, params, cuts=None):
    """The output of a tagged layer, from its input and the parameters as the function has them.

    Inside loops the input has a leading axis for each. `stacked` says for each of them whether
    the parameters have it too, or are the same in all steps.
    """
    params = list(params)
    if cuts is not None:
        params = [part(p, own) for p, own in zip(params, cuts, strict=True)]
    for number, own in enumerate(node.params["use"].params):
        if own.arrangement is not None:
            params[number] = own.arrangement.apply(params[number])
    if any(stacked):
        lengths = [size for size, has in zip(x.shape, stacked, strict=False) if has]
        params = [p.reshape(*lengths, *p.shape[1:]) for p in params]
    compute = functools.partial(COMPUTED[node.name], node)
    for has in reversed(stacked):
        compute = jax.vmap(compute, (0, *(0 if has else None for _ in params)))
    x = x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return compute(x, *params)
