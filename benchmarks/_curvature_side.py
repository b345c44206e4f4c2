"""One side of `curvature.py`: the same programs with curvax or with kfac-jax, timed when asked to.

The two need different versions of JAX, so each runs in a process and an environment of its own,
which has this file in common: the models, the data, and the programs. It imports nothing else of
ours, and what it calls has the same name in both libraries. It answers each line of its input with
one line of JSON:

- `ready`: nothing, once all is imported and the estimator is made;
- `compile`: compiles the programs and says how long that took, and what blocks there are;
- `time SECONDS`: the best time of each program, from at least one round of all of them;
- `check PATH`: writes what the curvature makes of a gradient, for both sides to be compared.
"""

import importlib
import inspect
import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

OLD, NEW, DAMPING = 0.95, 0.05, 1e-2

Model = tuple[Callable[..., Any], Any, Any]
"""A loss as a function of parameters and a batch, and these two."""


def autoencoder(library: Any, small: bool) -> Model:
    """The deep autoencoder that K-FAC was introduced with; 500 images of 784 pixels."""
    widths = [784, 1000, 500, 250, 30, 250, 500, 1000, 784]
    if small:
        widths = [64, 48, 16, 48, 64]
    draw = np.random.default_rng(0)
    params = [dense(draw, *pair) for pair in itertools.pairwise(widths)]
    images = draw.uniform(size=(50 if small else 500, widths[0])) > 0.8

    def loss(params: Any, images: Any) -> Any:
        x = images
        for number, p in enumerate(params):
            x = (jnp.tanh(x) if number else x) @ p["weight"] + p["bias"]
        library.register_sigmoid_cross_entropy_loss(x, images)
        return jnp.mean(jnp.sum(jnp.logaddexp(x, 0.0) - images * x, axis=1))

    return loss, params, images.astype(np.float32)


def resnet(library: Any, small: bool) -> Model:
    """A ResNet of three stages with two blocks each, for 64 images of 32 by 32 pixels."""
    widths = [4, 8] if small else [16, 32, 64]
    draw = np.random.default_rng(0)
    stages = []
    for before, width in zip([widths[0], *widths[:-1]], widths, strict=True):
        first = {"one": kernel(draw, 3, before, width), "two": kernel(draw, 3, width, width)}
        if before != width:
            first["beside"] = kernel(draw, 1, before, width)
        last = {"one": kernel(draw, 3, width, width), "two": kernel(draw, 3, width, width)}
        stages.append([first, last])
    stem, head = kernel(draw, 3, 3, widths[0]), dense(draw, widths[-1], 10)
    params = {"stem": stem, "stages": stages, "head": head}
    number, size = (8, 8) if small else (64, 32)
    images = draw.normal(size=(number, size, size, 3)).astype(np.float32)
    classes = draw.integers(10, size=number).astype(np.int32)

    def conv(p: Any, x: Any, stride: int = 1) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(
            x, p["weight"], (stride, stride), "SAME", dimension_numbers=numbers
        )
        return y + p["bias"]

    def block(p: Any, x: Any) -> Any:
        stride = 2 if "beside" in p else 1
        y = conv(p["two"], jax.nn.relu(conv(p["one"], x, stride)))
        return jax.nn.relu(y + (conv(p["beside"], x, stride) if "beside" in p else x))

    def loss(params: Any, batch: Any) -> Any:
        images, classes = batch
        x = jax.nn.relu(conv(params["stem"], images))
        for stage in params["stages"]:
            for p in stage:
                x = block(p, x)
        p = params["head"]
        logits = jnp.mean(x, axis=(1, 2)) @ p["weight"] + p["bias"]
        library.register_softmax_cross_entropy_loss(logits, classes)
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(classes)), classes])

    return loss, params, (images, classes)


def dense(draw: Any, inputs: int, outputs: int) -> Any:
    """Weights and a bias that keep the size of what goes through them."""
    weight = draw.normal(size=(inputs, outputs)) / inputs**0.5
    return {"weight": weight.astype(np.float32), "bias": np.zeros(outputs, np.float32)}


def kernel(draw: Any, size: int, inputs: int, outputs: int) -> Any:
    """A square kernel and a bias, of half the size so that residual blocks add little."""
    weight = draw.normal(size=(size, size, inputs, outputs)) / (2 * size**2 * inputs) ** 0.5
    return {"weight": weight.astype(np.float32), "bias": np.zeros(outputs, np.float32)}


MODELS = {"autoencoder": autoencoder, "resnet": resnet}


class Side:
    """A model with a library's estimator: its programs, compiled, and the state that they pass on.

    Programs that return a new state are given the old one to overwrite, as an optimiser does.
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
        """The best time of each program."""
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
        """The damped inverse of the Fisher matrix of one batch, times the gradient.

        Nothing in that is random, so both libraries should agree. The exact mode takes a pass for
        each output, so this is for small models.
        """

        def compute(state: Any, params: Any, batch: Any, key: Any) -> Any:
            options = {"ema_old": 0.0, "ema_new": 1.0, "estimation_mode": "fisher_exact"}
            state = self.refresh(self.update(state, params, batch, key, **options))
            return self.multiply(state, self.gradient(params, batch))

        return jax.jit(compute)(self.state, self.params, self.batch, self.key)

    def compile(self) -> dict[str, Any]:
        """Compile all programs; how long it took, and what the estimator is made of."""
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
