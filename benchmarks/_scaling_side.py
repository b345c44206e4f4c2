"""Predictions of `_scaling.py` compared with real programs: run by `scaling.py` and the tests.

It runs with several devices, virtual ones on a CPU. For each plan it compiles a step of K-FAC on a
small model, reads the collectives in the compiled program, runs it, and measures what each device
holds.
"""

import json
import math
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _scaling import PLANS, Step, size
from _scaling_models import Model, resnet, transformer
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from curvax.curvature.state_sharding import state_specs

MODELS = {
    "transformer": transformer(width=32, depth=3, inner=64, vocabulary=40, length=4, head=8),
    "resnet": resnet(stages=(1, 1), width=4, size=8, classes=5),
}
AXIS = "d"
_BYTES = {"f32": 4, "s32": 4, "u32": 4}
_RESULT = re.compile(r"= (.*?) (all-reduce|all-gather|reduce-scatter)(?:-start)?\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]+)\]")


def compare(model: Model, name: str, count: int) -> dict[str, Any]:
    """Return predicted and measured figures of a plan on `count` devices."""
    step = Step.of(model, PLANS[name], count)
    ones = lambda tree: jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), tree)
    params, batch = ones(model.params), ones(model.batch(2 * count))
    state = step.estimator.init(jax.random.key(0), (params, batch), None, -1)
    program = compiled(step, model, state, params, batch)
    after, _ = program(state, params, batch)
    predicted: dict[str, int] = {}
    for each in step.collectives():
        predicted[each.kind] = predicted.get(each.kind, 0) + each.operand
    return {
        "plan": name,
        "devices": count,
        "predicted": predicted,
        "found": operands(program.as_text(), count),
        "predicted state": sum(step.state_bytes().values()),
        "found state": max(bytes_on(after, device) for device in jax.devices()[:count]),
    }


def compiled(step: Step, model: Model, state: Any, params: Any, batch: Any) -> Any:
    """Return a step by the methods of the estimator, under `shard_map`."""
    estimator, axis = step.estimator, AXIS
    whole, split = PartitionSpec(), PartitionSpec(axis)
    specs = state_specs(state, axis) if step.plan.splits_state else whole

    def run(state: Any, params: Any, batch: Any) -> Any:
        gradient = lax.pmean(jax.grad(model.loss)(params, batch), axis)
        new = (0.9, 1.0, len(batch[0]), jax.random.key(1), (params, batch), axis)
        state = estimator.update_curvature_matrix_estimate(state, *new)
        state = estimator.update_cache(state, 0.1, None, -1, False, axis)
        how = (0.1, -1, False, True, axis)
        return state, estimator.multiply_matpower(state, gradient, *how)

    mapped = jax.shard_map(
        run,
        mesh=Mesh(np.array(jax.devices()[: step.count]), (axis,)),
        in_specs=(specs, whole, split),
        out_specs=(specs, whole),
        check_vma=False,
    )
    return jax.jit(mapped).lower(state, params, batch).compile()


def operands(text: str, count: int) -> dict[str, int]:
    """Return the bytes of operands of each kind of collective on a device, without scalars."""
    totals: dict[str, int] = {}
    for types, kind in _RESULT.findall(text):
        found = sum(
            _BYTES[dtype] * math.prod(map(int, shape.split(",")))
            for dtype, shape in _ARRAY.findall(re.sub(r"\{[^}]*\}", "", types))
        )
        scale = {"all-reduce": 1, "all-gather": 1 / count, "reduce-scatter": count}[kind]
        totals[kind] = totals.get(kind, 0) + round(found * scale)
    return {kind: total for kind, total in totals.items() if total}


def bytes_on(state: Any, device: Any) -> int:
    """Return the bytes of all arrays on a device."""
    parts = [
        part.data
        for x in jax.tree.leaves(state)
        for part in x.addressable_shards
        if part.device == device
    ]
    return size(parts)


if __name__ == "__main__":
    name, counts, plans = sys.argv[1], sys.argv[2], sys.argv[3]
    found = [
        compare(MODELS[name], plan, int(count))
        for count in counts.split(",")
        for plan in plans.split(",")
    ]
    json.dump(found, sys.stdout)
