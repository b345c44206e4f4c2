"""What a model of the zoo is, and what all of them share: numbers, losses, and taps.

Each loss registers itself and is then written by hand, summed over the examples. The gradient of
that is what everything that curvax computes must amount to.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import curvax


@dataclass(frozen=True)
class Model:
    """A loss of parameters and a batch, with what is known about it.

    `generic` has the parameters that are in no layer of a known kind, or not with all that is done
    with them, with a piece of the reason.
    `tapped(params, changes, *batch)` is the loss with the changes added to the outputs of its
    layers, and what these layers met. `unrolled` are the loss and the parameters of the same model
    with a loop in Python in place of a scan, and the path of the parameters that it loops over.
    """

    loss: Callable[..., Any]
    params: Any
    batch: tuple[Any, ...]
    generic: dict[str, str] = field(default_factory=dict)
    tapped: Callable[..., Any] | None = None
    unrolled: tuple[Callable[..., Any], Any, str] | None = None
    independent: bool = True  # Whether the examples have nothing to do with each other.
    accuracy: float = 1e-9

    @property
    def args(self) -> tuple[Any, ...]:
        return (self.params, *self.batch)


@dataclass(frozen=True)
class Entry:
    """A model that is made when it is first asked for."""

    name: str
    get: Callable[[], Model]
    tapped: bool
    scanned: bool


class Family(list[Entry]):
    """The models of one framework; a function that makes one joins by `add`.

    It says whether its taps are to be compared with, and whether it has an unrolled twin.
    """

    def __init__(self, framework: str) -> None:
        super().__init__()
        self.framework = framework

    def add(self, tapped: bool = False, scanned: bool = False) -> Callable[..., Any]:
        def add(make: Callable[[], Model]) -> Callable[[], Model]:
            name = f"{self.framework} {make.__name__.replace('_', ' ')}"
            self.append(Entry(name, functools.cache(make), tapped, scanned))
            return make

        return add


def random_like(shapes: Any) -> Any:
    """Random parameters in the shapes of a pytree.

    What a framework starts with has zeros and ones in it, which hide mistakes, and takes long.
    """
    leaves, treedef = jax.tree.flatten(shapes)
    return treedef.unflatten([_random(seed, leaf.shape) for seed, leaf in enumerate(leaves)])


def draw(**shapes: tuple[int, ...]) -> dict[str, Any]:
    """Random parameters of these shapes."""
    return {name: _random(10 + n, shape) for n, (name, shape) in enumerate(shapes.items())}


def _random(seed: int, shape: tuple[int, ...]) -> Any:
    z = np.random.default_rng(seed).standard_normal(shape)
    if len(shape) < 2:
        return jnp.asarray(0.8 + 0.2 * z)
    return jnp.asarray(z * (max(shape[-2:]) / z.size) ** 0.5)


def tokens(seed: int, high: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(high, size=shape))


def chances(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).uniform(size=shape))


def squared_error(y: Any, targets: Any) -> Any:
    y = curvax.register_squared_error_loss(y, targets)
    return jnp.sum((y - targets) ** 2)


def normal_errors(y: Any, targets: Any, variance: float = 0.7) -> Any:
    y = curvax.register_normal_predictive_distribution(y, targets, variance=variance)
    return jnp.sum((y - targets) ** 2) / (2 * variance)


def one_class(logits: Any, labels: Any) -> Any:
    logits = curvax.register_softmax_cross_entropy_loss(logits, labels)
    return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1))


def yes_or_no(logits: Any, answers: Any) -> Any:
    logits = curvax.register_sigmoid_cross_entropy_loss(logits, answers)
    return jnp.sum(jnp.logaddexp(0.0, logits) - answers * logits)


def tapped_by(intercept_methods: Any, kinds: Any, norms: Any, path: Any) -> Callable[..., Any]:
    """What puts taps at all layers of a loss, by a framework's own means to intercept calls.

    `path` of a module is that of its parameters. The inputs of norms are not those of a layer.
    """

    def tapped(loss: Callable[..., Any]) -> Callable[..., Any]:
        def with_taps(params: Any, changes: Any, *batch: Any) -> tuple[Any, Any]:
            taps = Taps(changes)

            def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
                y, module = call(*args, **kwargs), context.module
                if context.method_name != "__call__" or not isinstance(module, kinds + norms):
                    return y
                return taps(path(module), None if isinstance(module, norms) else args[0], y)

            with intercept_methods(intercept):
                return loss(params, *batch), taps.met

        return with_taps

    return tapped


class Taps:
    """Adds changes to what layers compute, by their names, and keeps what these layers met.

    A name is the path of the parameters of a layer, with the number of the call.
    """

    def __init__(self, changes: dict[str, Any]) -> None:
        self.changes, self.met, self._calls = changes, {}, {}

    def __call__(self, name: str, x: Any, y: Any) -> Any:
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        key = f"{name}#{call}"
        self.met[key] = {"outputs": y} if x is None else {"inputs": x, "outputs": y}
        return y + self.changes[key] if key in self.changes else y
