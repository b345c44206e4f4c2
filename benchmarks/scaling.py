"""The cost of a step of K-FAC per device, on 1 to 256 devices: operations, bytes sent, memory.

Two problems that are trained on many devices: a ResNet-50 with 4096 images, and a transformer of a
billion parameters with 512 sequences of 2048 tokens. Nothing of that size is run. Shapes are enough
for curvax to detect the layers and to distribute the work, and `_scaling.py` sums the costs.

The claims: the predictions for small models equal, to the byte, what compiled programs on 2, 4 and
8 devices send and hold; the bytes that a device sends are bounded for any number of devices;
distributing work and sharding the state reduce operations and memory; and the limits of their
scaling are where they are predicted to be: the largest matrix, the work that every device does, and
communication.

`--write` also draws the plot of the documentation.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _measure import Report, begin
from _scaling import PLANS, Passes, Plan, Step
from _scaling_models import Model, resnet, transformer
from _scaling_picture import draw

PACKAGES = ["curvax", "jax", "jaxlib"]
SIDE = Path(__file__).parent / "_scaling_side.py"
PICTURE = Path(__file__).parents[1] / "docs" / "scaling.svg"
COUNTS = [2**k for k in range(9)]
SHOWN = [1, 4, 16, 64, 256]
BALANCE = 3000
"""Operations that a device performs while it sends a byte: 150 TFLOP/s against 50 GB/s."""
PERIOD = 5
"""Number of steps between updates of the inverses: the default of the optimizer."""


@dataclass(frozen=True)
class Problem:
    """A model, and the number of examples of a global batch."""

    title: str
    model: Model
    batch_size: int


PROBLEMS = [
    Problem("ResNet-50, 4096 images", resnet((3, 4, 6, 3), 64, 224, 1000), 4096),
    Problem(
        "Transformer of a billion parameters, 512 sequences of 2048 tokens",
        transformer(2048, 18, 8192, 32000, 2048, 128),
        512,
    ),
]


@dataclass(frozen=True)
class Costs:
    """The operations, bytes sent and bytes held of a device in a step, by purpose."""

    flops: dict[str, float]
    sent: dict[str, float]
    memory: dict[str, int]

    @classmethod
    def of(cls, step: Step, passes: Passes, batch_size: int) -> "Costs":
        """Return the cost of a step with inverses."""
        sent: dict[str, float] = {}
        for each in step.collectives():
            sent[each.phase] = sent.get(each.phase, 0) + each.sent(step.count)
        return cls(step.flops(passes, batch_size), sent, step.memory())

    def mean(self, costs: dict[str, float]) -> float:
        """Return the mean cost of steps with and without inverses."""
        return sum(x / PERIOD if phase == "inverses" else x for phase, x in costs.items())

    @property
    def balance(self) -> float:
        """The number of operations per byte sent, in a mean step."""
        sent = self.mean(self.sent)
        return self.mean(self.flops) / sent if sent else float("inf")


Curves = dict[str, dict[int, Costs]]
"""Costs of each plan by the number of devices."""


def curves_of(problem: Problem) -> Curves:
    """Return the costs of each plan for all numbers of devices."""
    passes = Passes.of(problem.model)

    def costs(plan: Plan, count: int) -> Costs:
        return Costs.of(Step.of(problem.model, plan, count), passes, problem.batch_size)

    return {name: {n: costs(plan, n) for n in COUNTS} for name, plan in PLANS.items()}


def check_small(report: Report) -> None:
    """Compare predictions for small models with compiled programs."""
    report.say("## Small models: predictions and compiled programs\n")
    counts = "2,4" if report.quick else "2,4,8"
    found: list[dict[str, Any]] = [
        {"model": model, **each}
        for model in ("transformer", "resnet")
        for each in on_devices(model, counts, ",".join(PLANS))
    ]
    kinds = ("all-reduce", "reduce-scatter", "all-gather")
    rows = [
        [f"{each['model']}, {each['plan']}, {each['devices']} devices"]
        + [f"{each['found'].get(kind, 0):,}" for kind in kinds]
        + [f"{each['found state']:,}"]
        for each in found
    ]
    report.table(["operands in the compiled program [bytes]", *kinds, "state on a device"], rows)
    for model in ("transformer", "resnet"):
        own = [each for each in found if each["model"] == model]
        same = sum(each["predicted"] == each["found"] for each in own)
        report.claim(
            f"small {model}: in {same} of {len(own)} compiled programs the operands of collective "
            f"operations are those that are predicted, to the byte",
            same == len(own),
        )
        same = sum(each["predicted state"] == each["found state"] for each in own)
        report.claim(
            f"small {model}: so is what a device keeps, in {same} of {len(own)}", same == len(own)
        )
    report.say()


def on_devices(model: str, counts: str, plans: str) -> list[dict[str, Any]]:
    """Run `_scaling_side.py` in a process with eight devices, and return its results."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, str(SIDE), model, counts, plans],
        env=os.environ | flags | quick,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(run.stdout)


def tabulate(report: Report, problem: Problem, curves: Curves) -> None:
    """Print the numbers of the plot."""
    report.say(f"## {problem.title} ({problem.model.num_params:,} parameters)\n")
    for name, plan in PLANS.items():
        report.say(f"{name}: {plan.title}\n")
        shown = [curves[name][n] for n in SHOWN]
        line = lambda label, unit, of, shown=shown: [
            label,
            *[number(of(costs) / unit) for costs in shown],
        ]
        phases, kinds = shown[0].flops, shown[0].memory
        report.table(
            ["on each device", *[f"{n} device{'s' * (n > 1)}" for n in SHOWN]],
            [
                *[line(f"TFLOP, {p}", 1e12, lambda c, p=p: c.flops[p]) for p in phases],
                line("TFLOP, mean step", 1e12, lambda c: c.mean(c.flops)),
                line("TFLOP, worst step", 1e12, lambda c: sum(c.flops.values())),
                *[line(f"GB sent, {p}", 1e9, lambda c, p=p: c.sent.get(p, 0)) for p in phases],
                line("GB sent, mean step", 1e9, lambda c: c.mean(c.sent)),
                line("FLOP for a byte that is sent", 1, lambda c: c.balance),
                *[line(f"GB kept, {k}", 1e9, lambda c, k=k: c.memory[k]) for k in kinds],
                line("GB kept, all", 1e9, lambda c: sum(c.memory.values())),
            ],
        )


def number(x: float) -> str:
    """Format with three digits, or all before the point."""
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


def claim(report: Report, problem: Problem, curves: Curves) -> None:
    """State the claims about scaling and its limits."""
    name, last = problem.title.split(",")[0], COUNTS[-1]
    shared, split, alone = curves["shared"], curves["split"], curves["replicated"]
    largest = largest_inverse(problem.model)
    for plan in ("shared", "split"):
        most = curves[plan][last].flops["inverses"]
        report.claim(
            f"{name}, {plan}: on {last} devices the most that one inverts is {most / largest:.2f} "
            f"times what the largest pair of factors takes by itself (allowed 1.3)",
            most <= 1.3 * largest,
        )
    work = {n: own.mean(own.flops) for n, own in shared.items()}
    ideal = lambda n: work[1] / n
    good = max(n for n in COUNTS if work[n] <= 2 * ideal(n))
    report.claim(
        f"{name}: on {good} devices a mean step takes {work[good] / ideal(good):.2f} times the "
        f"operations of an even share, and without sharing out "
        f"{alone[good].mean(alone[good].flops) / ideal(good):.2f} times",
        work[good] <= alone[good].mean(alone[good].flops),
    )
    of_gradient = lambda own: own.flops["gradient"] / max(own.sent.get("gradient", 0), 1)
    several = {n: own for n, own in shared.items() if n > 1}
    most = [
        max(n for n, own in several.items() if of(own) >= BALANCE)
        for of in (lambda own: own.balance, of_gradient)
    ]
    report.claim(
        f"{name}: where {BALANCE} operations take as long as it takes to send a byte, computing a "
        f"mean step takes longer than sending on up to {most[0]} devices; a gradient on {most[1]}",
        most[0] < most[1],
    )
    for plan in PLANS:
        sent = [own.mean(own.sent) for own in curves[plan].values()]
        limit = 2 * sum(bound(problem.model, plan).values())
        report.claim(
            f"{name}, {plan}: at most {max(sent) / 1e9:.2f} GB are sent, on any number of devices "
            f"(twice what there is to send is {limit / 1e9:.2f})",
            max(sent) <= limit,
        )
    state = lambda own: own.memory["averages"] + own.memory["inverses"]
    ratio = state(shared[last]) / state(split[last])
    report.claim(
        f"{name}: on {last} devices a split state takes {1 / ratio:.3f} of the memory of a whole "
        f"one, and on 8 {state(split[8]) / state(shared[8]):.3f}",
        state(split[last]) <= state(split[8]) < state(shared[8]),
    )
    report.say()


def largest_inverse(model: Model) -> float:
    """Return the operations of inverting the largest pair of factors."""
    shards = Step.of(model, PLANS["split"], 2).shards
    return max(sum(side.work for side in shard.sides) for shard in shards)


def bound(model: Model, plan: str) -> dict[str, float]:
    """Return the bytes of gradient, factors, inverses (in a mean step) and products."""
    step = Step.of(model, PLANS["replicated"], 1)
    memory = step.memory()
    found: dict[str, float] = {"gradient": memory["gradient"], "statistics": memory["averages"]}
    if plan != "replicated":
        found["products"] = memory["gradient"]
    if plan == "shared":  # Padded to a few sizes.
        found["inverses"] = 1.1 * memory["inverses"] / PERIOD
    return found


def main() -> None:
    """Print the tables and claims."""
    report, only = begin("Scaling", __file__, __doc__, PACKAGES)
    if only in "small":
        check_small(report)
    found = {}
    for problem in PROBLEMS:
        if only.lower() in problem.title.lower():
            found[problem.title] = curves = curves_of(problem)
            tabulate(report, problem, curves)
            claim(report, problem, curves)
    if report.path is not None and len(found) == len(PROBLEMS):
        draw(found, PICTURE)
        report.say(f"The plot is in docs/{PICTURE.name}.")
    report.finish()


if __name__ == "__main__":
    main()
