"""One side of `curvature.py`: the same programs with curvax or with kfac-jax, timed on request.

The two need different versions of JAX, so each runs in a process and an environment of its own.
Both use this file and `_models.py`: the programs, the models and the data. The functions that it
calls have the same names in both libraries. It answers each line of its input with a line of JSON:

- `ready`: nothing, once everything is imported and the estimator is constructed;
- `compile`: compile the programs; the compile times, and the number of blocks of each kind;
- `time SECONDS`: the best time of each program, from at least one round of all of them;
- `check PATH`: write the preconditioned gradient, for the comparison of both sides.
"""

import importlib
import inspect
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from _models import MODELS, Model

OLD, NEW, DAMPING = 0.95, 0.05, 1e-2


class Side:
    """A model with a library's estimator: its compiled programs, and the state that they update.

    Programs that return a new state donate the buffers of the old one, as an optimizer does.
    """

    def __init__(self, library: Any, model: Model) -> None:
        loss, params, batch = model
        self.params, self.batch = jax.device_put((params, batch))
        self.key = jax.random.PRNGKey(0)
        self.size = len(jax.tree_util.tree_leaves(batch)[0])
        self.estimator = library.BlockDiagonalCurvature(loss)
        begin = time.perf_counter()
        self.state = self.estimator.init(self.key, (self.params, self.batch), None, -1, False)
        self.seconds = {"init": time.perf_counter() - begin}
        self.vector = self.params
        self.gradient = jax.grad(loss)
        self.calls: dict[str, Callable[[], Any]] = {}

    def update(self, state: Any, params: Any, batch: Any, key: Any, **options: Any) -> Any:
        given = {"ema_old": OLD, "ema_new": NEW, "estimation_mode": "fisher_gradients"} | options
        compute = self.estimator.update_curvature_matrix_estimate
        if "identity_weight" in inspect.signature(compute).parameters:  # In newer kfac-jax.
            given["identity_weight"] = DAMPING
        return compute(
            state=state,
            batch_size=self.size,
            rng=key,
            func_args=(params, batch),
            pmap_axis_name=None,
            **given,
        )

    def refresh(self, state: Any) -> Any:
        return self.estimator.update_cache(state, DAMPING, None, -1, False, None)

    def multiply(self, state: Any, vector: Any) -> Any:
        return self.estimator.multiply_inverse(state, vector, DAMPING, False, True, None)

    def both(self, state: Any, params: Any, batch: Any, key: Any) -> Any:
        return self.update(state, params, batch, key), self.gradient(params, batch)

    def time(self, seconds: float) -> dict[str, float]:
        """Return the best time of each program."""
        best = dict.fromkeys(self.calls, float("inf"))
        begin, rounds = time.perf_counter(), 0
        while rounds == 0 or time.perf_counter() - begin < seconds:
            for name, call in self.calls.items():
                start = time.perf_counter()
                jax.block_until_ready(call())
                best[name] = min(best[name], time.perf_counter() - start)
            rounds += 1
        return best

    def check(self) -> Any:
        """Return the damped inverse of the Fisher matrix of one batch, times the gradient.

        Nothing is sampled, so both libraries should agree. The exact mode needs a backward pass for
        each output, so this is for small models.
        """

        def compute(state: Any, params: Any, batch: Any, key: Any) -> Any:
            options = {"ema_old": 0.0, "ema_new": 1.0, "estimation_mode": "fisher_exact"}
            state = self.refresh(self.update(state, params, batch, key, **options))
            return self.multiply(state, self.gradient(params, batch))

        return jax.jit(compute)(self.state, self.params, self.batch, self.key)

    def compile(self) -> dict[str, Any]:
        """Compile all programs; return compile times, and the blocks of the estimator."""
        args = (self.params, self.batch)
        compiled = {
            "gradient": self._compiled("gradient", self.gradient, args),
            "update": self._compiled("update", self.update, (self.state, *args, self.key), True),
            "both": self._compiled("both", self.both, (self.state, *args, self.key), True),
            "refresh": self._compiled("refresh", self.refresh, (self.state,), True),
            "multiply": self._compiled("multiply", self.multiply, (self.state, self.vector)),
        }

        def gradient() -> Any:
            return compiled["gradient"](*args)

        def update() -> Any:
            self.state = compiled["update"](self.state, *args, self.key)
            return self.state

        def both() -> Any:
            self.state, gradient = compiled["both"](self.state, *args, self.key)
            return self.state, gradient

        def refresh() -> Any:
            self.state = compiled["refresh"](self.state)
            return self.state

        def multiply() -> Any:
            return compiled["multiply"](self.state, self.vector)

        self.calls = {call.__name__: call for call in (gradient, update, both, refresh, multiply)}
        blocks = [type(block).__name__ for block in self.estimator.blocks]
        return {
            "seconds": self.seconds,
            "blocks": {kind: blocks.count(kind) for kind in sorted(set(blocks))},
            "parameters": int(self.estimator.dim),
        }

    def _compiled(self, name: str, fun: Any, args: Any, takes_state: bool = False) -> Any:
        begin = time.perf_counter()
        jitted = jax.jit(fun, donate_argnums=(0,) if takes_state else ())
        program = jitted.lower(*args).compile()
        self.seconds[name] = time.perf_counter() - begin
        return program


def main() -> None:
    name, model, size = sys.argv[1:]
    library = importlib.import_module(name)
    side = Side(library, MODELS[model](library, size == "small"))
    for line in sys.stdin:
        command, *arguments = line.split(maxsplit=1)
        if command == "ready":
            answer: Any = "ready"
        elif command == "compile":
            answer = side.compile()
        elif command == "time":
            answer = side.time(float(arguments[0]))
        else:
            leaves = jax.tree_util.tree_leaves(side.check())
            np.savez(arguments[0].strip(), *map(np.asarray, leaves))
            answer = "written"
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
