"""Compiled programs of the pure functions, which take over the buffers of what they replace."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from curvax import _compat
from curvax._types import PyTree
from curvax.curvature import axes_of, length_of

__all__ = ["Programs", "check_alive"]


class Programs:
    """Runs functions, compiled when they are first run, or as they are.

    Arguments:
        is_compiled: whether to compile them.
        is_donating: whether they may use the buffers of those arguments that are to be replaced.
        axis: the name of an axis of all devices, along which batches are split; None for one
            device.
    """

    def __init__(self, is_compiled: bool, is_donating: bool, axis: str | None) -> None:
        self._is_compiled, self._is_donating, self._axis = is_compiled, is_donating, axis
        self._known: dict[Any, Callable[..., Any]] = {}

    def run(
        self,
        name: str,
        fun: Callable[..., Any],
        args: Sequence[Any],
        replaced: Sequence[int] = (),
        batch: int | None = None,
    ) -> Any:
        """`fun(*args)`, where some arguments are replaced by the result, and one is the batch."""
        if not self._is_compiled:
            return fun(*args)
        donated = tuple(replaced) if self._is_donating else ()
        key, whole = name, fun
        if self._axis is not None and batch is not None:
            specs = self._specs(args, batch)
            key = name, *jax.tree.leaves(specs), jax.tree.structure(args[batch])
            whole = self._on_devices(fun, specs)
        if key not in self._known:
            self._known[key] = jax.jit(whole, donate_argnums=donated)
        args = [jax.tree.map(_strong, x) if k in replaced else x for k, x in enumerate(args)]
        return self._known[key](*_without_aliases(args, donated))

    def traced(self, fun: Callable[..., Any], args: Sequence[Any], batch: int) -> Any:
        """As `run`, inside of a trace: on all devices, unless it is there already."""
        if self._axis is None or not self._is_compiled or _compat.is_bound(self._axis):
            return fun(*args)
        return self._on_devices(fun, self._specs(args, batch))(*args)

    def _specs(self, args: Sequence[Any], batch: int) -> tuple[Any, ...]:
        """How the arguments are split among devices: the batch is, by examples."""
        _check_divisible(args[batch], len(jax.devices()))
        spec = lambda axis: PartitionSpec() if axis is None else PartitionSpec(self._axis)
        specs: list[Any] = [PartitionSpec()] * len(args)
        specs[batch] = jax.tree.map(spec, axes_of(args[batch]), is_leaf=_is_none)
        return tuple(specs)

    def _on_devices(self, fun: Callable[..., Any], specs: tuple[Any, ...]) -> Any:
        """The function on all devices, each with its part of the batch."""
        mesh = Mesh(np.array(jax.devices()), (self._axis,))
        options: dict[str, Any] = {"out_specs": PartitionSpec(), "check_vma": False}
        return jax.shard_map(fun, mesh=mesh, in_specs=specs, **options)


def _is_none(x: Any) -> bool:
    return x is None


def _check_divisible(batch: PyTree, count: int) -> None:
    length = length_of(batch)
    if length % count:
        raise ValueError(
            f"curvax.Optimizer: with multi_device=True a batch is split among the {count} devices, "
            f"but it has {length} examples, which {count} does not divide. Use a batch of "
            f"{length - length % count} or {length + count - length % count}."
        )


def _strong(leaf: Any) -> Any:
    """Without the weak type of a Python number.

    What replaces it has none, and the next call would compile another program for that.
    """
    is_weak = isinstance(leaf, float) or getattr(leaf, "weak_type", False)
    return jnp.asarray(leaf, jnp.result_type(leaf)) if is_weak else leaf


def check_alive(tree: PyTree) -> None:
    """No array was given away before."""
    leaves = jax.tree.leaves(tree)
    if any(
        isinstance(x, jax.Array) and not _compat.is_tracer(x) and x.is_deleted() for x in leaves
    ):
        raise ValueError(
            "curvax.Optimizer: params or state were given to a step before, which took over their "
            "buffers. Go on with what that step returned; or say donate_buffers=False."
        )


def _without_aliases(args: Sequence[Any], donated: Sequence[int]) -> list[Any]:
    """The arguments, with copies of arrays that are there twice: a buffer is donated only once."""
    seen = {id(x) for k, arg in enumerate(args) if k not in donated for x in jax.tree.leaves(arg)}

    def own(leaf: Any) -> Any:
        if id(leaf) in seen:
            return jnp.array(leaf)
        seen.add(id(leaf))
        return leaf

    return [jax.tree.map(own, arg) if k in donated else arg for k, arg in enumerate(args)]
