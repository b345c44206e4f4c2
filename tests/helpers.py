"""Case generators and comparisons that the tests share.

`MAPPED` lists functions of one example; a new line there joins every test of a map. `derivatives`
computes everything a program must agree with its naive equivalent on, in one compiled program.
"""

import contextlib
import gc
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh


def mesh_of(count: int, kind: AxisType = AxisType.Auto, name: str = "data") -> Mesh:
    """A mesh of the first `count` of the eight devices that tests have, with one axis."""
    return Mesh(np.array(jax.devices()[:count]), (name,), axis_types=(kind,))


def key(seed: int = 0) -> jax.Array:
    return jax.random.key(seed)


# Programs run once and on a few numbers, so it is compiling that takes time.
COMPILED_QUICKLY = "--xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):  # Later versions have no other way to compile fusions.
    COMPILED_QUICKLY += " --xla_cpu_use_fusion_emitters=false"


def as_users_run(*, is_compiled_quickly: bool = False) -> dict[str, str]:
    """The environment of a process with JAX's default configuration, and not with ours.

    Compiled quickly, programs take half the time, as their machine code is not optimised.
    """
    others = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    quickly = {"XLA_FLAGS": COMPILED_QUICKLY, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return others | {"JAX_PLATFORMS": "cpu"} | (quickly if is_compiled_quickly else {})


def slow_but(quick: Collection[tuple[Any, ...]], *case: Any) -> Any:
    """A case of `parametrize` that is slow unless it is one of the quick ones."""
    return pytest.param(*case, marks=[] if case in quick else pytest.mark.slow)


@contextlib.contextmanager
def started_processes(
    program: Path, count: int, *arguments: str, devices: int = 1
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of one program; those that are still there in the end are killed.

    Its arguments are what `jax.distributed.initialize` takes (an address, how many there are, and
    which it is), then the others. What it writes, also of errors, is in `stdout`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(program), address, str(count), str(number), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(count)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def run_processes(program: Path, count: int, *arguments: str, devices: int = 1) -> list[str]:
    """What each of several processes writes, if none of them fails or takes minutes."""
    with started_processes(program, count, *arguments, devices=devices) as started:
        written = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0] * count, "\n\n".join(written)
    return written


def random_like(tree: Any, seed: int = 0) -> Any:
    """Normal random numbers in the shapes and dtypes of a pytree.

    NumPy's, for which nothing has to be compiled.
    """
    leaves, treedef = jax.tree.flatten(tree)
    draw = np.random.default_rng(seed).standard_normal
    return treedef.unflatten([jnp.asarray(draw(x.shape), x.dtype) for x in leaves])


class Mapped(NamedTuple):
    """A function of one example: `fun(params, example)`, with the shapes of both."""

    name: str
    fun: Callable[[Any, Any], Any]
    params: Any
    example: Any

    def arguments(self, length: int, dtype: Any = jnp.float64) -> tuple[Any, Any]:
        """Parameters, and a batch of examples along leading axes."""
        like = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
        params = jax.tree.map(lambda shape: like(*shape), self.params, **TUPLE)
        batch = jax.tree.map(lambda shape: like(length, *shape), self.example, **TUPLE)
        return random_like(params, 1), random_like(batch, 2)


# Shapes are tuples, which would otherwise be pytrees.
TUPLE = {"is_leaf": lambda x: isinstance(x, tuple)}


def _layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(w @ x)


def _tree(params: Any, example: Any) -> Any:
    a = jnp.sin(example["a"]) * params["scale"] + example["b"]
    return {"vector": a, "pair": (jnp.sum(a**2), jnp.outer(a, example["a"]))}


def _scan(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda carry, x: (jnp.tanh(carry * w + x), carry * x), x[0], x)[1]


MAPPED = [
    Mapped("layer", _layer, (2, 3), (3,)),
    Mapped("tree", _tree, {"scale": ()}, {"a": (2,), "b": ()}),
    Mapped("scan", _scan, (), (4,)),
    Mapped("constant", lambda w, x: w * jnp.ones(2, x.dtype), (), ()),
]
MAPPED_BY_NAME = {case.name: case for case in MAPPED}


def total(tree: Any) -> jax.Array:
    """A scalar on which every entry of a pytree of numbers has its own influence."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    weigh = lambda x: jnp.sum(jnp.sin(jnp.real(x).ravel() + jnp.arange(x.size, dtype=x.real.dtype)))
    return sum((weigh(x) for x in leaves), start=jnp.zeros(()))


def derivatives(fun: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """The values of a function with its reverse, forward and second derivatives, under jit."""

    def compute(*args: Any) -> dict[str, Any]:
        tangents = jax.tree.map(jnp.cos, args)
        gradient = jax.grad(lambda args: total(fun(*args)))
        return {
            "value": fun(*args),
            "gradient": gradient(args),
            "tangent": jax.jvp(fun, args, tangents)[1],
            "forward over reverse": jax.jvp(gradient, (args,), (tangents,))[1],
        }

    return jax.jit(compute)


def assert_same(actual: Any, expected: Any, rtol: float = 1e-12, atol: float = 1e-12) -> None:
    """The same structure, shapes, dtypes, and numbers to rounding."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    paths = jax.tree_util.tree_leaves_with_path(expected)
    for (path, want), got in zip(paths, jax.tree.leaves(actual), strict=True):
        name = jax.tree_util.keystr(path)
        assert got.dtype == want.dtype, f"{name}: {got.dtype} is not {want.dtype}"
        assert got.shape == want.shape, f"{name}: {got.shape} is not {want.shape}"
        if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        if want.dtype == jnp.bfloat16:
            got, want = got.astype(jnp.float32), want.astype(jnp.float32)
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol, err_msg=name)


@contextlib.contextmanager
def checking_leaks() -> Iterator[None]:
    """As `jax.checking_leaks`, which collects garbage all the time: only among what is new."""
    gc.freeze()
    try:
        with jax.checking_leaks():
            yield
    finally:
        gc.unfreeze()


class CountTraces:
    """A function that counts how often Python runs it."""

    def __init__(self, fun: Callable[..., Any]) -> None:
        self.fun, self.count = fun, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.fun(*args, **kwargs)


# How XLA compiles fusions decides on a few copies; `conftest.py` takes the quicker of two ways.
BUFFERS_OF_USERS = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}


def temporaries(fun: Callable[..., Any], *args: Any) -> int:
    """The bytes a compiled function needs besides its arguments and results."""
    compiled = jax.jit(fun).lower(*args).compile(BUFFERS_OF_USERS)
    return compiled.memory_analysis().temp_size_in_bytes


def num_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
