"""Print the modules of curvax that its headline calls pass through.

    python scripts/modules_visited.py [-v]

A module is visited if one of its functions is called between the beginning and the end of the call,
tracing and compilation included; `_jax` and the other base modules count as well.
"""

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import curvax

ROOT = str(Path(curvax.__file__).parent)


def visited(call: Callable[[], Any]) -> list[str]:
    """Return the modules of curvax in which `call` runs a function, in order of the first visit."""
    found: dict[str, None] = {}

    def note(frame: Any, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(ROOT):
            found[path.removeprefix(ROOT + "/").removesuffix(".py")] = None

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(found)


def show(title: str, modules: list[str], verbose: bool) -> None:
    print(f"{title:45} {len(modules)}")
    if verbose:
        print("   ", ", ".join(modules))


def main(verbose: bool) -> None:
    widths = (8, 16, 16, 3)
    keys = jax.random.split(jax.random.key(0), 4)
    x, y = jax.random.normal(keys[0], (32, 8)), jax.random.normal(keys[1], (32, 3))
    params = [
        (jax.random.normal(keys[2], size) / 4, jnp.zeros(size[1])) for size in pairwise(widths)
    ]

    def predict(params: Any, x: Any) -> Any:
        for w, b in params[:-1]:
            x = jnp.tanh(x @ w + b)
        return x @ params[-1][0] + params[-1][1]

    def loss(params: Any, batch: Any) -> Any:
        z = predict(params, batch[0])
        curvax.register_squared_error_loss(z, batch[1], weight=0.5)
        return 0.5 * jnp.mean(jnp.sum((z - batch[1]) ** 2, axis=1))

    plain = lambda params: jnp.mean((predict(params, x) - y) ** 2)
    show(
        "hessian(memory_budget='1MB'), first call",
        visited(lambda: curvax.hessian(plain, params, memory_budget="1MB")),
        verbose,
    )
    show(
        "hessian(memory_budget='1MB'), second call",
        visited(lambda: curvax.hessian(plain, params, memory_budget="1MB")),
        verbose,
    )
    show(
        "explain_registration",
        visited(lambda: curvax.explain_registration(loss, (params, (x, y)))),
        verbose,
    )
    estimator = curvax.BlockDiagonalCurvature(loss)
    own = estimator.init(keys[3], (params, (x, y)), None, None)
    update = lambda: estimator.update_curvature_matrix_estimate(
        own, 0.0, 1.0, len(x), keys[3], (params, (x, y)), None
    )
    show("BlockDiagonalCurvature.update…", visited(update), verbose)
    optimizer = curvax.Optimizer(
        jax.value_and_grad(loss), l2_reg=0.0, num_burnin_steps=0, donate_buffers=False
    )
    state = optimizer.init(params, keys[3], (x, y))
    numbers = {"learning_rate": 0.1, "momentum": 0.9, "damping": 1.0}
    step = lambda: optimizer.step(params, state, keys[3], batch=(x, y), **numbers)
    show("Optimizer.step, first call (traced)", visited(step), verbose)
    show("Optimizer.step, second call", visited(step), verbose)


if __name__ == "__main__":
    main("-v" in sys.argv[1:])
