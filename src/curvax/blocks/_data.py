"""Statistics of a layer from its data, as `layer_tags_vjp` returns them."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from curvax._types import PyTree
from curvax.blocks._layer import LayerSite
from curvax.graph import EachStep

__all__ = ["statistics_of_data"]


def statistics_of_data(
    block: Any, state: Any, data: Mapping[str, Any], sites: Sequence[LayerSite]
) -> dict[str, PyTree]:
    """The sums that `layer_statistics` would return, from inputs and cotangents at all places."""
    if block.sums_batch and not sites[0].is_known:
        return {"gradient": list(data["params_tangents"])}
    totals: dict[str, PyTree] = {}
    for site, at in zip(sites, data["sites"], strict=True):
        for name, block_statistic in block.statistics(site, sites, state).items():
            statistic = block_statistic
            for _ in site.stacked:
                statistic = jax.vmap(statistic)
            value = statistic(at["inputs"], at["outputs_tangents"])
            kept = site.stacked
            if isinstance(block_statistic, EachStep):
                pairs = zip(site.stacked, block_statistic.loops, strict=True)
                kept = tuple(has or own for has, own in pairs)
            shared = tuple(k for k, has in enumerate(kept) if not has)
            value = jax.tree.map(lambda x, axes=shared: jnp.sum(x, axes), value)
            before = totals.get(name)
            totals[name] = value if before is None else jax.tree.map(jnp.add, before, value)
    return totals
