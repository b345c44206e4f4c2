"""One side of `kfac_step.py`: optimizers of curvax or of kfac-jax, which take steps on request.

The two need different versions of JAX, so each runs in a process and an environment of its own.
Both use this file and `_models.py`. It answers each line of its input with one line of JSON:

- `ready`: nothing, once everything is imported and the model is constructed;
- `first NAME ...`: construct each of these, the gradient or an optimizer, and take one step; the
  time from the constructor to the first result, and the size of the state;
- `turn`: the time of each step in one period of each optimizer, of as many gradients, and the loss;
- `memory`: the temporaries of the gradient, and of a step where its program is accessible;
- `check PATH`: write losses and parameters of a few deterministic steps.
"""

import functools
import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _models import MODELS, Model

PERIOD = 5
"""Number of steps between updates of the inverses."""

CHECKED_STEPS = PERIOD + 2
SETTINGS = {
    "l2_reg": 0.0,
    "estimation_mode": "fisher_gradients",
    "curvature_ema": 0.95,
    "inverse_update_period": PERIOD,
    "num_burnin_steps": 0,
}
GIVEN = {"learning_rate": 1e-3, "momentum": 0.9, "damping": 1e-1}


class Gradient:
    """The loss and its gradient, compiled: the unit of time."""

    def __init__(self, model: Model) -> None:
        loss, self.params, self.batch = model
        self.state = ()
        self.compute = jax.jit(jax.value_and_grad(loss))

    def step(self) -> Any:
        return self.compute(self.params, self.batch)


class Adam:
    """Adam, which costs hardly more than the gradient."""

    def __init__(self, model: Model) -> None:
        loss, self.params, self.batch = model
        rule = optax.adam(1e-3)
        self.state = rule.init(self.params)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def compute(params: Any, state: Any, batch: Any) -> Any:
            value, gradient = jax.value_and_grad(loss)(params, batch)
            updates, state = rule.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, value

        self.compute = compute

    def step(self) -> Any:
        self.params, self.state, value = self.compute(self.params, self.state, self.batch)
        return value


class Kfac:
    """The optimizer of either library, with equal settings."""

    def __init__(self, model: Model, library: Any, **options: Any) -> None:
        loss, self.params, self.batch = model
        self.key = jax.random.PRNGKey(0)
        self.number = 0
        self.given = {name: jnp.asarray(value) for name, value in GIVEN.items()}
        self.optimizer = library.Optimizer(jax.value_and_grad(loss), **(SETTINGS | options))
        self.state = self.optimizer.init(self.params, self.key, self.batch)

    def step(self) -> Any:
        self.params, self.state, stats = self.optimizer.step(
            self.params,
            self.state,
            jax.random.fold_in(self.key, self.number),
            batch=self.batch,
            global_step_int=self.number,
            **self.given,
        )
        self.number += 1
        return stats["loss"]

    def lowered(self) -> Any:
        """Return the lowered program of a step, as the optimizer compiles it; curvax only.

        kfac-jax compiles its steps internally and asks not to compile them inside other functions,
        so its program is not accessible.
        """
        core = self.optimizer.finalize(self.params, self.key, self.batch)

        def step(params: Any, state: Any, key: Any, batch: Any, given: Any) -> Any:
            return core.step(params, state, key, batch, None, **given)

        args = (self.params, self.state, self.key, self.batch, self.given)
        return jax.jit(step, donate_argnums=(0, 1)).lower(*args)


class Side:
    """A model, and the optimizers that were constructed for it so far."""

    def __init__(self, library: Any, model: Model) -> None:
        loss, params, batch = model
        self.library = library
        self.loss, self.params, self.batch = loss, params, jax.device_put(batch)
        self.made: dict[str, Any] = {}

    @property
    def makers(self) -> dict[str, Callable[[Model], Any]]:
        """Constructors of the gradient and the optimizers, by name."""
        staggered = {"stagger_inverses": True}
        return {
            "gradient": Gradient,
            "adam": Adam,
            "kfac": functools.partial(Kfac, library=self.library),
            "staggered": functools.partial(Kfac, library=self.library, **staggered),
        }

    def model(self) -> Model:
        """Return the model with a copy of its parameters, which optimizers donate."""
        params = jax.tree_util.tree_map(jnp.array, self.params)
        return self.loss, jax.block_until_ready(params), self.batch

    def first(self, names: list[str]) -> dict[str, Any]:
        """Construct each and take a step; return the time and the bytes of the state."""
        found = {}
        for name in names:
            model = self.model()
            begin = time.perf_counter()
            self.made[name] = self.makers[name](model)
            step_taken(self.made[name])
            seconds = time.perf_counter() - begin
            found[name] = {"seconds": seconds, "state": size_of(self.made[name].state)}
        return found

    def turn(self) -> dict[str, Any]:
        """Return the times of one period of each, from the second step of the period."""
        seconds: dict[str, list[float]] = {}
        losses = {}
        for name, optimizer in self.made.items():
            seconds[name] = []
            for _ in range(PERIOD):
                begin = time.perf_counter()
                value = step_taken(optimizer)
                seconds[name].append(time.perf_counter() - begin)
            losses[name] = float(jax.tree_util.tree_leaves(value)[0])
        return {"seconds": seconds, "losses": losses}

    def memory(self) -> dict[str, int]:
        """Return the bytes of temporaries of the programs that are accessible."""
        loss, params, batch = self.model()
        lowered = {"gradient": jax.jit(jax.value_and_grad(loss)).lower(params, batch)}
        options = {}
        if self.library.__name__ == "curvax":
            from curvax import _jax

            lowered["kfac"] = self.made["kfac"].lowered()
            # Makes the memory analysis exact; the older JAX of kfac-jax does not need it.
            options = _jax.exact_memory_options("cpu")
        return {
            name: program.compile(options).memory_analysis().temp_size_in_bytes
            for name, program in lowered.items()
        }

    def check(self) -> list[Any]:
        """Return the losses of a few steps, and the parameters after them.

        With the exact Fisher matrix nothing is sampled, so both libraries should agree. That mode
        needs a backward pass for each output, so this is for small models.
        """
        optimizer = Kfac(self.model(), self.library, estimation_mode="fisher_exact")
        losses = [step_taken(optimizer) for _ in range(CHECKED_STEPS)]
        return [jnp.stack(losses), *jax.tree_util.tree_leaves(optimizer.params)]


def step_taken(optimizer: Any) -> Any:
    """Take a step, block until it is done, and return the loss."""
    value = optimizer.step()
    return jax.block_until_ready((value, optimizer.params, optimizer.state))[0]


def size_of(tree: Any) -> int:
    """Return the bytes of all arrays in a pytree."""
    return sum(leaf.nbytes for leaf in jax.tree_util.tree_leaves(tree) if hasattr(leaf, "nbytes"))


def main() -> None:
    name, model, size = sys.argv[1:]
    library = importlib.import_module(name)
    side = Side(library, MODELS[model](library, size == "small"))
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "ready":
            answer: Any = "ready"
        elif command == "first":
            answer = side.first(arguments)
        elif command == "turn":
            answer = side.turn()
        elif command == "memory":
            answer = side.memory()
        else:
            np.savez(arguments[0], *map(np.asarray, side.check()))
            answer = "written"
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
