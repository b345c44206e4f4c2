"""Curvature against kfac-jax: the cost of updating factors and inverses.

The claims, on a deep autoencoder and on a small ResNet: both libraries compute the same; an update
of the factors is at least 1.5 times as fast, beyond the gradient that is computed anyway; and so is
a refresh of the inverses. "Beyond the gradient" is the time of one program that computes the
gradient and updates the factors, less that of the gradient alone, each compiled and run by the same
library. So what an update can share with the gradient is not counted, for both.

kfac-jax 0.0.8 needs an older JAX than curvax, so it has an environment of its own, `.venv-kfac`,
which `make bench` sets up; `_curvature_side.py` runs in both. The two processes alternate, and the
best time of each counts.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _measure import Report, agree, begin

PACKAGES = ["curvax", "jax", "jaxlib"]
HERE = Path(__file__).parent
PEER_PYTHON = HERE.parent / ".venv-kfac" / "bin" / "python"
PEER = "kfac-jax"

PYTHONS = {"curvax": sys.executable, PEER: str(PEER_PYTHON)}
MODELS = {
    "autoencoder": "Autoencoder 784-1000-500-250-30-250-500-1000-784, batch 500",
    "resnet": "ResNet 16-32-64, two blocks each, 64 images of 32 by 32",
}
TURNS = {"autoencoder": 24, "resnet": 4}
"""Number of rounds of each side; one round of kfac-jax with the ResNet takes a minute."""

PROGRAMS = {
    "gradient": "gradient",
    "update": "update of the factors alone",
    "both": "gradient and update",
    "beyond": "update beyond the gradient",
    "refresh": "refresh of the inverses",
    "multiply": "product with the inverse",
}
REMARKS = {
    "autoencoder": "How much faster an update can be is a matter of counting here. Beyond the "
    "gradient there are 1.0e9 multiplications for the sampled backward pass, for which nothing is "
    "saved, and 3.2e9 for the factors. With one triangle of each factor that is a ratio of 1.6 at "
    "most. What is left of it goes to cutting inputs into panels and to the averages, which are "
    "bound by memory.",
    "resnet": "kfac-jax computes moments of patches by convolutions with four spatial axes, for "
    "which there is no fast program on CPUs: nearly all of its update is that.",
}
CLAIMED = ("beyond", "refresh")
WANTED = 1.5


class Side:
    """A process with one of the libraries, which works only on request."""

    def __init__(self, name: str, model: str, small: bool) -> None:
        script = str(HERE / "_curvature_side.py")
        arguments = [name.replace("-", "_"), model, "small" if small else "whole"]
        self._process = subprocess.Popen(
            [PYTHONS[name], script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.turns: list[dict[str, float]] = []

    def ask(self, command: str) -> Any:
        """Send a command and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"A side of the benchmark failed at {command!r}; see above.")
        return json.loads(line)

    def take_turn(self, seconds: float) -> None:
        """Time all programs for about `seconds`."""
        self.turns.append(self.ask(f"time {seconds}"))

    def best(self, turns: slice = slice(None)) -> dict[str, float]:
        """Return the best time of each program in some rounds; "beyond" is both less gradient."""
        some = self.turns[turns]
        best = {name: min(turn[name] for turn in some) for name in some[0]}
        return best | {"beyond": best["both"] - best["gradient"]}

    def noise(self, name: str) -> float:
        """Return the ratio of the best time of even rounds to that of odd rounds."""
        one, other = (self.best(slice(k, None, 2))[name] for k in range(2))
        return max(one / other, other / one)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def sides_of(model: str, small: bool) -> Iterator[list[Side]]:
    """Start both sides, ours first, and end them on exit."""
    sides = [Side(name, model, small) for name in PYTHONS]
    try:
        yield sides
    finally:
        for side in sides:
            side.close()


def check(report: Report, model: str) -> None:
    """Check that both compute the same, on a small model of the kind."""
    with sides_of(model, small=True) as sides, tempfile.TemporaryDirectory() as folder:
        found = []
        for number, side in enumerate(sides):
            path = Path(folder) / f"{number}.npz"
            side.ask(f"check {path}")
            with np.load(path) as arrays:
                found.append(list(arrays.values()))
    ours, theirs = found
    largest = max(
        float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(ours, theirs, strict=True)
    )
    report.claim(
        f"{model}, small, exact Fisher: the damped inverse times the gradient is the same, to "
        f"{largest:.0e} of each parameter",
        agree(ours, theirs, 1e-3),
    )


def ratio(sides: Sequence[Side], name: str) -> float:
    """Return our speedup."""
    ours, theirs = (side.best()[name] for side in sides)
    return theirs / ours


def measure(report: Report, model: str) -> None:
    """Measure both sides alternately, and state the claims."""
    with sides_of(model, report.quick) as sides:
        for side in sides:  # Neither starts while the other compiles.
            side.ask("ready")
        made = [side.ask("compile") for side in sides]
        turns, seconds = (2, 0.2) if report.quick else (TURNS[model], 1.0)
        for turn in range(turns):
            for side in sides if turn % 2 else sides[::-1]:
                side.take_turn(seconds)
    for name, each in zip(PYTHONS, made, strict=True):
        kinds = ", ".join(f"{count} {kind}" for kind, count in each["blocks"].items())
        report.say(f"- {name}: {each['parameters']} parameters in {kinds}")
    report.say()
    rows = []
    for name, title in PROGRAMS.items():
        times = [side.best()[name] for side in sides]
        noise = [f"{side.noise(name):.2f}" for side in sides]
        compiled = [f"{x['seconds'][name]:.1f} s" if name != "beyond" else "" for x in made]
        cells = [f"{1e3 * seconds:.2f} ms" for seconds in times]
        rows.append([title, *cells, f"{times[1] / times[0]:.2f}", " ".join(noise), *compiled])
    header = ["", *PYTHONS, "ratio", "noise", *(f"{name} compiles" for name in PYTHONS)]
    report.table(header, rows)
    turns = len(sides[0].turns)
    report.say(
        f"Best of {turns} rounds each. The noise is, for each side, the ratio of the best time of "
        f"even rounds to that of odd rounds. {REMARKS[model]}\n"
    )
    for name in CLAIMED:
        report.claim_time(
            f"{model}: {PROGRAMS[name]} is {ratio(sides, name):.2f} times as fast (at least "
            f"{WANTED})",
            ratio(sides, name) >= WANTED,
        )


def peer_versions() -> str:
    """Return the versions of the other side."""
    packages = ["kfac-jax", "jax", "jaxlib"]
    code = f"import importlib.metadata as m; print(*(m.version(p) for p in {packages}))"
    if not PEER_PYTHON.exists():
        raise SystemExit(f"There is no {PEER_PYTHON}. Run `make .venv-kfac/.kfac-jax`.")
    output = subprocess.run(
        [str(PEER_PYTHON), "-c", code], capture_output=True, text=True, check=True
    ).stdout
    pairs = zip(packages, output.split(), strict=True)
    return ", ".join(f"{name} {version}" for name, version in pairs)


def main() -> None:
    report, only = begin("Curvature", __file__, __doc__, PACKAGES)
    report.say(f"The other side: {peer_versions()}\n")
    for model, title in MODELS.items():
        if only in model:
            report.say(f"## {title}{', made small' if report.quick else ''}\n")
            measure(report, model)
            check(report, model)
            report.say()
    report.finish()


if __name__ == "__main__":
    main()
