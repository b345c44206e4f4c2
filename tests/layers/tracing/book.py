"""By the book: what must come out at layers, from the inputs and cotangents of all of them."""

import jax
import jax.numpy as jnp

from curvax import ProcessedJaxpr, auto_register_tags, layer_statistics, layer_tags_vjp
from layers.layers import recompute


def rows(x):
    x = jax.nn.one_hot(x, 29, dtype=jnp.float64) if jnp.issubdtype(x.dtype, jnp.integer) else x
    return x.reshape(x.shape[0] if x.ndim else 1, -1).astype(jnp.float64)


def moment(x):
    return rows(x).T @ rows(x)


def moments(layer, place):
    """Second moments of inputs and cotangents, and products of both; of each kind of place."""
    node = place.node
    kind = f"{node.name}, {[x.aval.shape for x in node.equation.invars]}, {place.use.cuts}: "
    outputs = {kind + "outputs": lambda _, g: {"moment": moment(g[0])}}
    if node.equation.primitive.num_inputs == 0:
        return outputs
    inputs = {kind + "inputs": lambda x, _: moment(x[0])}
    return inputs | outputs | {kind + "both": lambda x, g: rows(x[0]).sum() * rows(g[0])[0]}


def from_layer_data(processed, layers):
    """The same, by the book: from all inputs and cotangents, summed over loops that share."""
    found = []
    for layer, data in zip(processed.layers, layers, strict=True):
        totals = {}
        for place, site in zip(layer.tags, data["sites"], strict=True):
            for name, statistic in moments(layer, place).items():
                for _ in place.use.stacked:
                    statistic = jax.vmap(statistic)
                value = statistic(site["inputs"], site["outputs_tangents"])
                shared = tuple(k for k, is_own in enumerate(place.use.stacked) if not is_own)
                value = jax.tree.map(lambda x: jnp.sum(x, shared), value)  # noqa: B023
                before = totals.get(name)
                totals[name] = value if before is None else jax.tree.map(jnp.add, before, value)
        found.append(totals)
    return found


def gradients(processed, layers):
    """The gradient of each layer's parameters: its cotangents, put through the layer alone."""
    found = []
    for layer, data in zip(processed.layers, layers, strict=True):
        total = [jnp.zeros_like(p) for p in data["params"]]
        for place, site in zip(layer.tags, data["sites"], strict=True):
            pull_back = _alone(place, site, data["params"])
            total = [a + b for a, b in zip(total, pull_back, strict=True)]
        found.append(tuple(total))
    return found


def _alone(place, site, params):
    (g,) = site["outputs_tangents"]
    if not site["inputs"]:
        return (g,)
    (x,) = site["inputs"]
    compute = lambda *params: recompute(place.node, x, place.use.stacked, params, place.use.cuts)
    _, pull_back = jax.vjp(compute, *params)
    return pull_back(g.astype(jnp.float64))


def at_layers(f, *args):
    """Statistics and gradients at layers, ours and by the book, to be compiled as one program."""
    tagged = auto_register_tags(f, args)
    done = {"auto_register_tags": False}
    processed = ProcessedJaxpr.make_from_func(tagged, args, **done)

    def compute(*args):
        losses, pull_back = layer_statistics(tagged, moments, **done)(args)
        cotangents = [jax.tree.map(lambda y: jnp.cos(3 * y), losses[0].parameter_dependants)]
        statistics, gradient = pull_back(cotangents)
        leaves = jax.tree.leaves(gradient)
        ours = [tuple(leaves[n] for n in params) for params in processed.layer_indices]
        data = layer_tags_vjp(tagged, **done)(args)[1](cotangents)
        tangents = [layer["params_tangents"] for layer in data]
        alone = gradients(processed, data)
        return (statistics, ours, ours), (from_layer_data(processed, data), tangents, alone)

    return jax.jit(compute)(*args)
