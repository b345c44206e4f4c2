"""A multi-process program: a Hessian in one store on disk, and steps of K-FAC.

`python -m examples.multi_process` starts two processes on this machine, which connect by
`jax.distributed`, and compares their results with those of a single process. On a cluster, run the
same file in each process, with a folder that all of them can access:

    python -m examples.multi_process --coordinator 10.0.0.1:9876 --processes 2 --process 0 --out …

or, where JAX detects the cluster (Slurm, a TPU pod):

    srun python -m examples.multi_process --cluster --out …

Only `connect` and `own_part` differ from a single-process program: each process loads its local
shard of the batch.
"""

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import curvax
from examples import _show

PROCESSES = 2
EXAMPLES = 64
STEPS = 10
SECONDS = 300
"""Seconds to wait for the processes."""
HEARTBEAT = 20
"""Seconds without a heartbeat of one process after which the others end, too."""


def connect(arguments: argparse.Namespace) -> None:
    """Connect to the other processes. This must precede any other use of JAX."""
    others: dict[str, Any] = {}
    if not arguments.cluster:
        others = {
            "coordinator_address": arguments.coordinator,
            "num_processes": arguments.processes,
            "process_id": arguments.process,
        }
    jax.distributed.initialize(**others, heartbeat_timeout_seconds=HEARTBEAT)


def own_part(batch: Any) -> Any:
    """Return the local shard of a global batch: the examples that this process would load."""
    count, number = jax.process_count(), jax.process_index()
    rows = slice(number * EXAMPLES // count, (number + 1) * EXAMPLES // count)
    return jax.tree.map(lambda x: x[rows], batch)


def first_guess() -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(0).normal
    layer = lambda inputs, outputs: {
        "weight": (draw(size=(inputs, outputs)) / inputs**0.5).astype(np.float32),
        "bias": np.zeros(outputs, np.float32),
    }
    return [layer(3, 12), layer(12, 2)]


def all_examples() -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(1).normal(size=(EXAMPLES, 3)).astype(np.float32)
    return inputs, np.stack([np.sin(inputs.sum(1)), np.cos(inputs[:, 0])], axis=1)


def loss(params: Any, batch: Any) -> jax.Array:
    """Return the squared error of a small network, averaged over examples."""
    inputs, targets = batch
    hidden = jnp.tanh(inputs @ params[0]["weight"] + params[0]["bias"])
    outputs = hidden @ params[1]["weight"] + params[1]["bias"]
    curvax.register_squared_error_loss(outputs, targets, weight=0.5)
    return jnp.mean(jnp.sum((outputs - targets) ** 2, axis=1)) / 2


def compute(folder: Path) -> None:
    """Run the program, which is the same in each process, for any number of them."""
    mesh = jax.make_mesh((jax.device_count(),), ("devices",))
    batch = all_examples()
    # Rows are sharded over all devices, and each process writes its local shard to the store.
    hessian_of = lambda params: loss(params, batch)
    curvax.hessian(hessian_of, first_guess(), mesh=mesh, batch_size=8, out=folder / "hessian")

    optimizer = curvax.Optimizer(
        jax.value_and_grad(loss), l2_reg=0.0, multi_device=True, inverse_update_period=5
    )
    params, own, key = first_guess(), own_part(batch), jax.random.key(0)
    state = optimizer.init(params, key, own)
    values: Any = {"learning_rate": 0.3, "momentum": 0.5, "damping": 0.1}
    losses = []
    for step in range(STEPS):
        key = jax.random.fold_in(key, step)
        params, state, stats = optimizer.step(params, state, key, batch=own, **values)
        losses.append(float(stats["loss"]))
    # Parameters are replicated, so one process saves them.
    if jax.process_index() == 0:
        np.savez(folder / "trained.npz", *jax.tree.leaves(params), losses=losses)
    _show.text(
        f"process {jax.process_index()} of {jax.process_count()}, {jax.local_device_count()} of "
        f"{jax.device_count()} devices: loss {losses[0]:.4f} → {losses[-1]:.4f}"
    )


def main(given: Sequence[str] | None = None) -> None:
    """Run as one of several processes, or start them and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinator", help="address and port of process 0, reachable by all")
    parser.add_argument("--processes", type=int, help="number of processes")
    parser.add_argument("--process", type=int, help="index of this process, from 0")
    parser.add_argument("--cluster", action="store_true", help="let JAX detect the three above")
    parser.add_argument("--out", type=Path, help="a folder that all processes can access")
    arguments = parser.parse_args(given)
    if arguments.coordinator or arguments.cluster:
        if arguments.out is None:
            parser.error("give a folder for the results: --out")
        connect(arguments)
        compute(arguments.out)
    else:
        start_and_compare()


def start_and_compare() -> None:
    """Check that several processes compute the same as one."""
    with tempfile.TemporaryDirectory() as name:
        several, one = Path(name) / "several", Path(name) / "one"
        several.mkdir()
        one.mkdir()
        with started(PROCESSES, several) as processes:
            wait_for(processes)
        _show.text("and in this process alone:")
        compute(one)
        _show.text(f"The Hessian is the same, {_show.agreement(*map(stored, (several, one)))}.")
        trained = [dict(np.load(folder / "trained.npz")) for folder in (several, one)]
        _show.text(f"So are parameters after {STEPS} steps, {_show.agreement(*trained)}.")


@contextlib.contextmanager
def started(count: int, folder: Path) -> Generator[list[subprocess.Popen[bytes]], None, None]:
    """Start processes of this program on this machine, and kill them on exit."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    program = [sys.executable, "-m", "examples.multi_process", "--out", str(folder)]
    program += ["--coordinator", address, "--processes", str(count)]
    # On CPU, processes on one machine share its cores; on GPU, assign devices to each of them.
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    processes = []
    try:
        for number in range(count):
            own = [*program, "--process", str(number)]
            processes.append(subprocess.Popen(own, env=environment))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def wait_for(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all processes have succeeded; raise as soon as one has failed."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if any(codes):
            raise SystemExit(f"a process failed: their exit codes are {codes}")
        if codes == [0] * len(codes):
            return
        time.sleep(0.1)
    raise SystemExit(f"the processes took more than {SECONDS} seconds")


def stored(folder: Path) -> np.ndarray:
    """Read the Hessian from disk."""
    import zarr

    return np.asarray(zarr.open_array(folder / "hessian", mode="r"))


if __name__ == "__main__":
    main()
