"""Steps of K-FAC by curvax and kfac-jax, and of Adam, in units of the time of a gradient.

The claims: both libraries, and `curvax.kfac_jax`, take the same steps; a step of ours, averaged
over the period in which inverses are computed once, takes at most 3 gradients for the autoencoder
with 500 images, and is for each model at least 1.7 times as fast as one of kfac-jax; with staggered
inverses the worst step takes at most 1.5 times the median; the first step, from the constructor to
its result, takes at most 0.6 of the time; and the temporaries of a step are at most 1.3 times those
of the gradient plus the size of the state.

Settings are the same on both sides: fixed learning rate, momentum and damping, sampled Fisher
matrix in each step, inverses in every fifth, no burn-in.

kfac-jax 0.0.8 needs an older JAX than curvax, so it has an environment of its own, `.venv-kfac`,
which `make bench` sets up; `_kfac_side.py` runs in both. The two processes alternate, one period at
a time, in changing order. Other work on the machine can only make a step slower, so the best time
for each phase of the period counts, and first steps are taken in several new processes, of which
the best counts. The table shows the mean of all steps, too.
"""

import contextlib
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from _measure import MEGABYTE, Report, agree, begin

from curvature import PEER, PYTHONS, peer_versions

PACKAGES = ["curvax", "jax", "jaxlib", "optax"]
SCRIPT = Path(__file__).parent / "_kfac_side.py"
OWN = "curvax"
DROP_IN = "curvax.kfac_jax"


@dataclass(frozen=True)
class Plan:
    """A model, and the numbers of measurements of each side."""

    title: str
    firsts: int
    """Number of new processes in which a first step is taken."""
    turns: int
    peer_turns: int
    remark: str = ""
    most_gradients: float | None = None
    """Allowed time of a step in gradients; None for no claim."""
    checked: str | None = None
    """The small model with which the steps of both are compared; None for no comparison."""
    tolerance: float = 1e-3


PLANS = {
    "autoencoder": Plan(
        "Autoencoder 784-1000-500-250-30-250-500-1000-784, batch 500",
        firsts=3,
        turns=10,
        peer_turns=10,
        most_gradients=3.0,
        checked="autoencoder",
    ),
    "autoencoder-2000": Plan("The same autoencoder, batch 2,000", firsts=1, turns=4, peer_turns=4),
    "resnet": Plan(
        "ResNet 16-32-64, two blocks each, 64 images of 32 by 32",
        firsts=1,
        turns=4,
        peer_turns=1,
        remark="A step of kfac-jax takes half a minute here, so only one period is measured.",
        checked="resnet",
    ),
    "transformer": Plan(
        "Transformer of 6 layers, width 128, 4 heads, 32 sequences of 64 tokens",
        firsts=1,
        turns=4,
        peer_turns=4,
        remark="Steps are compared with sequences of one token. With longer ones the two do not "
        "agree, in parameters through which tokens interact: keys, values and the layers before "
        "them. Also, layer norms agree less well than the rest, from the second step on; "
        "so the tolerance is larger here.",
        checked="transformer-apart",
        tolerance=1e-2,
    ),
}
NAMES = {OWN: ["gradient", "adam", "kfac", "staggered"], PEER: ["gradient", "kfac"]}
TITLES = {
    (OWN, "gradient"): "gradient",
    (OWN, "adam"): "optax.adam",
    (OWN, "kfac"): "curvax",
    (OWN, "staggered"): "curvax, staggered",
    (PEER, "gradient"): "gradient, older JAX",
    (PEER, "kfac"): "kfac-jax",
}
LEAST_SPEEDUP, MOST_UNEVENNESS, MOST_OF_FIRST, MOST_OF_TEMPORARIES = 1.7, 1.5, 0.6, 1.3


class Side:
    """A process with one of the libraries, which works only on request."""

    def __init__(self, name: str, model: str, small: bool) -> None:
        self.name = name
        arguments = [name.replace("-", "_"), model, "small" if small else "whole"]
        self._process = subprocess.Popen(
            [PYTHONS[OWN if name == DROP_IN else name], str(SCRIPT), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # No compilation cache of earlier runs.
            env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"},
        )
        self.ask("ready")

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

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def side_of(name: str, model: str, small: bool) -> Iterator[Side]:
    """Start a side, and end it on exit."""
    side = Side(name, model, small)
    try:
        yield side
    finally:
        side.close()


@dataclass
class Outcome:
    """The measurements of one optimizer, or of the gradient. Times are in seconds."""

    firsts: list[float]
    state: int
    periods: list[list[float]]
    """The times of steps of each period."""
    loss: float
    temporaries: int | None

    @property
    def first(self) -> float:
        return min(self.firsts)

    @property
    def places(self) -> list[float]:
        """The best time of each phase of the period."""
        return [min(times) for times in zip(*self.periods, strict=True)]

    @property
    def amortised(self) -> float:
        return statistics.mean(self.places)

    @property
    def median(self) -> float:
        return statistics.median(self.places)

    @property
    def worst(self) -> float:
        return max(self.places)

    @property
    def mean(self) -> float:
        """The mean over all steps."""
        return statistics.mean(time for period in self.periods for time in period)


Outcomes = dict[tuple[str, str], Outcome]
"""Measurements by side and name."""


def measured(model: str, plan: Plan, small: bool) -> Outcomes:
    """Measure both sides alternately: first steps in new processes, then periods in the last."""
    firsts: dict[Any, list[float]] = {key: [] for key in TITLES}
    for number in range(plan.firsts - 1):
        for name in list(PYTHONS)[:: 1 if number % 2 else -1]:
            with side_of(name, model, small) as side:
                for what, found in side.ask("first gradient kfac").items():
                    firsts[name, what].append(found["seconds"])
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(side_of(name, model, small)) for name in PYTHONS]
        made = {side.name: side.ask(f"first {' '.join(NAMES[side.name])}") for side in sides}
        turns: dict[str, list[Any]] = {side.name: [] for side in sides}
        wanted = {OWN: plan.turns, PEER: plan.peer_turns}
        for turn in range(max(wanted.values())):
            for side in sides if turn % 2 else sides[::-1]:
                if turn < wanted[side.name]:
                    turns[side.name].append(side.ask("turn"))
        memory = {side.name: side.ask("memory") for side in sides}
    outcomes = {}
    for side, name in TITLES:
        own = made[side][name]
        outcomes[side, name] = Outcome(
            [*firsts[side, name], own["seconds"]],
            own["state"],
            [turn["seconds"][name] for turn in turns[side]],
            turns[side][-1]["losses"][name],
            memory[side].get(name),
        )
    return outcomes


def show(report: Report, outcomes: Outcomes) -> None:
    """Print a row for each, in milliseconds, and in gradients of the same process."""
    rows = []
    for (side, name), title in TITLES.items():
        found, gradient = outcomes[side, name], outcomes[side, "gradient"]
        is_gradient = name == "gradient"
        temporaries = found.temporaries
        rows.append(
            [
                title,
                f"{found.first:.1f}",
                f"{1e3 * found.median:.1f}",
                f"{1e3 * found.worst:.1f}",
                f"{1e3 * found.amortised:.1f}",
                "1" if is_gradient else f"{found.amortised / best(gradient):.2f}",
                f"{1e3 * found.mean:.1f}",
                str(len(found.periods)),
                "" if temporaries is None else f"{temporaries / MEGABYTE:.1f}",
                "" if is_gradient else f"{found.state / MEGABYTE:.1f}",
                "" if is_gradient else f"{found.loss:.4g}",
            ]
        )
    header = ["", "first [s]", "median [ms]", "worst [ms]", "amortised [ms]", "in gradients"]
    header += ["mean of all [ms]", "periods", "temporaries [MB]", "state [MB]", "last loss"]
    report.table(header, rows)


def best(gradient: Outcome) -> float:
    """Return the time of the gradient: the mean of the best times of each phase.

    The best of all gradients would be the best of five times as many as for a phase of a step.
    """
    return gradient.amortised


def claim(report: Report, model: str, plan: Plan, outcomes: Outcomes) -> None:
    """State the claims."""
    gradient, ours, theirs = (
        outcomes[key] for key in ((OWN, "gradient"), (OWN, "kfac"), (PEER, "kfac"))
    )
    staggered = outcomes[OWN, "staggered"]
    if plan.most_gradients is not None:
        count = ours.amortised / best(gradient)
        peer_count = theirs.amortised / best(outcomes[PEER, "gradient"])
        report.claim_time(
            f"{model}: a step takes {count:.2f} gradients, amortised (at most "
            f"{plan.most_gradients}); one of kfac-jax {peer_count:.2f}",
            count <= plan.most_gradients,
        )
    speedup = theirs.amortised / ours.amortised
    report.claim_time(
        f"{model}: a step is {speedup:.2f} times as fast as one of kfac-jax, amortised (at least "
        f"{LEAST_SPEEDUP})",
        speedup >= LEAST_SPEEDUP,
    )
    unevenness = staggered.worst / staggered.median
    report.claim_time(
        f"{model}: with staggered inverses the worst step takes {unevenness:.2f} times the median "
        f"(at most {MOST_UNEVENNESS})",
        unevenness <= MOST_UNEVENNESS,
    )
    share = ours.first / theirs.first
    report.claim_time(
        f"{model}: the first step is there in {share:.2f} of the time of kfac-jax (at most "
        f"{MOST_OF_FIRST})",
        share <= MOST_OF_FIRST,
    )
    assert gradient.temporaries is not None
    assert ours.temporaries is not None
    allowed = MOST_OF_TEMPORARIES * gradient.temporaries + ours.state
    text = (
        f"{model}: a step has {ours.temporaries / MEGABYTE:.1f} MB of temporaries (at most "
        f"{allowed / MEGABYTE:.1f}, which is {MOST_OF_TEMPORARIES} times the gradient's and the "
        f"state)"
    )
    # In a quick run sizes are so small that constant costs dominate.
    report.claim_time(text, ours.temporaries <= allowed)


def check(report: Report, model: str, tolerance: float) -> None:
    """Check that all take the same steps, on a small model of the kind."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (OWN, DROP_IN, PEER):
            path = Path(folder) / f"{name}.npz"
            with side_of(name, model, small=True) as side:
                side.ask(f"check {path}")
            with np.load(path) as arrays:
                found[name] = list(arrays.values())
    theirs = found.pop(PEER)
    for name, ours in found.items():
        largest = max(difference(a, b) for a, b in zip(ours, theirs, strict=True))
        report.claim(
            f"{model}, small, exact Fisher: losses and parameters of seven steps are the same with "
            f"{name}, to {largest:.0e} of each (at most {tolerance:.0e})",
            agree(ours, theirs, tolerance),
        )


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Return the relative difference of two arrays."""
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


def selected(only: str, quick: bool) -> Sequence[tuple[str, Plan]]:
    """Return the models of the command line; in a quick run, with few periods."""
    few = {"firsts": 1, "turns": 2, "peer_turns": 2} if quick else {}
    return [(model, replace(plan, **few)) for model, plan in PLANS.items() if only in model]


def main() -> None:
    report, only = begin("Steps of K-FAC", __file__, __doc__, PACKAGES)
    report.say(f"The other side: {peer_versions()}\n")
    report.say(
        "Times of steps are the best for each phase of the period of five; of these the median, "
        "the worst and the mean. Gradients are those of the same process. First steps are from the "
        "constructor to the result, including compilation. kfac-jax does not give access to the "
        "program of a step, so its temporaries are not known.\n"
    )
    for model, plan in selected(only, report.quick):
        report.say(f"## {plan.title}{', made small' if report.quick else ''}\n")
        outcomes = measured(model, plan, report.quick)
        show(report, outcomes)
        if plan.remark:
            report.say(f"{plan.remark}\n")
        claim(report, model, plan, outcomes)
        if plan.checked is not None:
            check(report, plan.checked, plan.tolerance)
        report.say()
    report.finish()


if __name__ == "__main__":
    main()
