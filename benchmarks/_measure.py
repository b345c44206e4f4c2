"""Programs side by side: compile them, check them, time them in turn, and say what is claimed.

A time on a shared machine means little by itself, so nothing here is timed by itself. All programs
of a comparison take turns, the order changes from round to round, and each is judged by its best
round: what other work on the machine does to a round only ever makes it slower. One program, the
baseline, is in the comparison twice. The ratio of its two times should be one; by how much it is
not is the noise, and every claim about time allows for it.

Memory is what the compiler sets aside for temporaries, beside inputs and outputs. It is exact and
does not depend on the machine's load.
"""

import argparse
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

MEGABYTE = 1e6

TOLERATED_SLOWDOWN = 1.05
"""How much slower than the best peer a program may be, before noise."""

MORE_ROUNDS = 2
"""How often a comparison whose claims about time do not hold yet is continued, for all alike."""

# On CPU, XLA may turn a chain of matrix products into one library call whose scratch memory is
# not in its account. Compiled without that the account is true; time is measured with it.
_TRUE_ACCOUNT = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}


@dataclass
class Report:
    """What a benchmark prints, kept so that it can be written to a file as well."""

    title: str
    quick: bool = False
    path: Path | None = None
    """Where it is to be written, if it is."""
    lines: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    num_claims: int = 0

    def say(self, text: str = "") -> None:
        """Print a line of Markdown."""
        print(text, flush=True)
        self.lines.append(text)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table, the first column to the left and the others to the right."""
        cells = [list(header), *[list(row) for row in rows]]
        widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
        for number, row in enumerate(cells):
            padded = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            self.say(f"| {' | '.join([row[0].ljust(widths[0]), *padded])} |")
            if number == 0:
                marks = ["-" * widths[0], *["-" * (width - 1) + ":" for width in widths[1:]]]
                self.say(f"| {' | '.join(marks)} |")
        self.say()

    def claim(self, text: str, ok: bool) -> None:
        """State something that is to be true; `finish` fails if it is not."""
        self.num_claims += 1
        if not ok:
            self.failed.append(text)
        self.say(f"- {'PASS' if ok else 'FAIL'}: {text}")

    def claim_time(self, text: str, ok: bool) -> None:
        """As `claim`, for times; sizes that are only for a quick try claim nothing about time."""
        if self.quick:
            self.say(f"- not judged in a quick run: {text}")
        else:
            self.claim(text, ok)

    def finish(self) -> None:
        """Count the claims, write the report if that was asked for, and exit."""
        self.say(f"\n{self.num_claims - len(self.failed)} of {self.num_claims} claims hold.")
        for text in self.failed:
            self.say(f"- FAIL: {text}")
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text("\n".join([f"# {self.title}", "", *self.lines]) + "\n")
        sys.exit(1 if self.failed else 0)


@dataclass(frozen=True)
class Candidate:
    """A way to write a program. `role` is "ours", "peer", or "reference": shown, not a rival."""

    name: str
    fun: Callable[..., Any]
    role: str = "peer"


@dataclass
class Result:
    """What came of a candidate. `verdict` is empty, "cannot" or "wrong", for that `reason`."""

    candidate: Candidate
    verdict: str = ""
    reason: str = ""
    program: Callable[..., Any] | None = None
    temporaries: int = 0
    seconds: float = float("inf")


@dataclass(frozen=True)
class Comparison:
    """Several ways to write one program, the first of which says what is right.

    `chunk_bytes` is what one chunk reads, computes on the way and puts out: so much more than the
    leanest of its peers a program of ours may need. `baseline` is the candidate to which the table
    relates the others.
    """

    title: str
    candidates: Sequence[Candidate]
    args: tuple[Any, ...]
    baseline: str
    chunk_bytes: int

    def run(self, report: Report, seconds: float) -> None:
        """Check, measure and print, in about that many seconds, and state the claims."""
        report.say(f"## {self.title}\n")
        results = self._compile_and_check()
        able = {r.candidate.name: r for r in results if not r.verdict}
        calls = {name: (lambda r=r: r.program(*self.args)) for name, r in able.items()}
        again = f"{self.baseline}, again"
        calls[again] = calls[self.baseline]
        keep = {self.baseline, again} | {n for n, r in able.items() if r.candidate.role == "ours"}
        clock = Clock(calls, keep)
        clock.run(seconds)
        for _ in range(0 if report.quick else MORE_ROUNDS):
            if self._too_slow(able, clock, again):
                clock.run(seconds)
        for name, result in able.items():
            result.seconds = clock.best[name]
        noise = clock.ratio(self.baseline, again)
        self._print(report, results, noise)
        self._claim(report, able, noise)
        report.say()

    def _compile_and_check(self) -> list[Result]:
        results = [Result(candidate) for candidate in self.candidates]
        with ThreadPoolExecutor() as pool:
            waiting = [pool.submit(compile_program, c.fun, self.args) for c in self.candidates]
        truth = None
        for result, program in zip(results, waiting, strict=True):
            try:
                result.program, result.temporaries = program.result()
            except (TypeError, ValueError) as error:
                result.verdict, result.reason = "cannot", str(error).splitlines()[0]
                continue
            value = jax.tree.map(np.asarray, result.program(*self.args))
            truth = value if truth is None else truth
            if not agree(value, truth):
                result.verdict, result.reason = "wrong", f"{shapes(value)}, not {shapes(truth)}"
        for result in results:
            if result.verdict and result.candidate.role != "peer":
                who, what = result.candidate.name, f"{result.verdict}: {result.reason}"
                raise SystemExit(f"{self.title}: {who} {what}")
        return results

    def _rivals(self, able: Mapping[str, Result]) -> list[Result]:
        """Whom programs of ours are measured against: the peers, or if none is able, the rest."""
        others = [r for r in able.values() if r.candidate.role != "ours"]
        return [r for r in others if r.candidate.role == "peer"] or others

    def _too_slow(self, able: Mapping[str, Result], clock: "Clock", again: str) -> bool:
        """Whether a claim about time would fail now: then all get more rounds."""
        limit = TOLERATED_SLOWDOWN * clock.ratio(self.baseline, again)
        return any(
            clock.best[r.candidate.name] > limit * clock.best[rival.candidate.name]
            for r in able.values()
            if r.candidate.role == "ours"
            for rival in self._rivals(able)
        )

    def _print(self, report: Report, results: Sequence[Result], noise: float) -> None:
        base = next(r for r in results if r.candidate.name == self.baseline)
        rows = []
        for r in results:
            if r.verdict:
                rows.append([r.candidate.name, r.verdict, "", "", ""])
                continue
            share = r.temporaries / base.temporaries if base.temporaries > 1e5 else None
            rows.append(
                [
                    r.candidate.name,
                    f"{1e3 * r.seconds:.2f}",
                    f"{r.seconds / base.seconds:.2f}",
                    f"{r.temporaries / MEGABYTE:.2f}",
                    "" if share is None else f"{share:.2f}",
                ]
            )
        header = ["", "time [ms]", "ratio", "temporaries [MB]", "ratio"]
        report.table(header, rows)
        report.say(f"Ratios to {self.baseline}; timed twice, it differs by {noise:.3f}.")
        for r in results:
            if r.verdict:
                report.say(f"{r.candidate.name}, {r.verdict}: {r.reason}")
        report.say()

    def _claim(self, report: Report, able: Mapping[str, Result], noise: float) -> None:
        limit = TOLERATED_SLOWDOWN * max(1.0, noise)
        fastest = min(self._rivals(able), key=lambda r: r.seconds)
        leanest = min(self._rivals(able), key=lambda r: r.temporaries)
        for ours in (r for r in able.values() if r.candidate.role == "ours"):
            ratio = ours.seconds / fastest.seconds
            report.claim_time(
                f"{self.title}: {ours.candidate.name} takes {ratio:.2f} of the time of "
                f"{fastest.candidate.name} (allowed {limit:.2f})",
                ratio <= limit,
            )
            allowed = leanest.temporaries + self.chunk_bytes
            report.claim(
                f"{self.title}: {ours.candidate.name} needs {ours.temporaries / MEGABYTE:.2f} MB, "
                f"{leanest.candidate.name} {leanest.temporaries / MEGABYTE:.2f} MB "
                f"(allowed {allowed / MEGABYTE:.2f})",
                ours.temporaries <= allowed,
            )


class Clock:
    """Times calls in turn and keeps the best of each.

    A call that takes more than twice as long as the fastest is timed twice only, unless it is one
    of `keep`.
    """

    min_rounds = 6

    def __init__(self, calls: Mapping[str, Callable[[], Any]], keep: set[str]) -> None:
        self.calls = calls
        self.keep = keep
        self.best = dict.fromkeys(calls, float("inf"))
        self.rounds = 0

    def run(self, seconds: float) -> None:
        """More rounds, for so many seconds; for up to twice as many if the rounds are long."""
        begin, done = time.perf_counter(), 0
        passed = lambda: time.perf_counter() - begin
        while passed() < seconds or (done < self.min_rounds and passed() < 2 * seconds):
            self._round()
            done += 1

    def ratio(self, one: str, other: str) -> float:
        """How many times the best of one is the best of the other, the larger by the smaller."""
        ratio = self.best[one] / self.best[other]
        return max(ratio, 1 / ratio)

    def _round(self) -> None:
        names = list(self.calls)
        turn = self.rounds % len(names)
        limit = 2 * min(self.best.values())
        for name in names[turn:] + names[:turn]:
            if self.rounds >= 2 and self.best[name] > limit and name not in self.keep:
                continue
            begin = time.perf_counter()
            jax.block_until_ready(self.calls[name]())
            self.best[name] = min(self.best[name], time.perf_counter() - begin)
        self.rounds += 1


def compile_program(fun: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, int]:
    """The compiled program, and the bytes of temporaries that it needs."""
    lowered = jax.jit(fun).lower(*args)
    program = lowered.compile()
    accountable = program
    if "ynn_fusion" in (program.as_text() or ""):
        accountable = lowered.compile(compiler_options=_TRUE_ACCOUNT)
    analysis = accountable.memory_analysis()
    if analysis is None:
        raise SystemExit("This backend does not say how much memory its programs need.")
    return program, analysis.temp_size_in_bytes


def agree(value: Any, truth: Any, tolerance: float = 2e-4) -> bool:
    """Whether all leaves have equal shapes, and values that differ by rounding only."""
    if jax.tree.structure(value) != jax.tree.structure(truth):
        return False
    pairs = zip(jax.tree.leaves(value), jax.tree.leaves(truth), strict=True)
    return all(
        a.shape == b.shape and np.max(np.abs(a - b), initial=0) <= tolerance * _scale(b)
        for a, b in pairs
    )


def shapes(value: Any) -> str:
    """What arrays a pytree holds."""
    return ", ".join(str(leaf.shape) for leaf in jax.tree.leaves(value))


def _scale(x: np.ndarray) -> float:
    return float(np.max(np.abs(x), initial=1e-30))


def import_seconds(statements: Sequence[str], rounds: int) -> dict[str, float]:
    """The best time that a fresh Python needs for each of some import statements, in turn.

    Bytecode is cached, as it is for packages that pip has installed.
    """
    env = {name: x for name, x in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    best = dict.fromkeys(statements, float("inf"))
    for _ in range(rounds):
        for statement in statements:
            code = (
                f"import time; s = time.perf_counter(); {statement}; print(time.perf_counter()-s)"
            )
            output = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
            ).stdout
            best[statement] = min(best[statement], float(output))
    return best


def begin(
    title: str, script: str, description: str | None, packages: Sequence[str]
) -> tuple[Report, str]:
    """The report of a benchmark, as the command line asks for it, and what it is restricted to.

    It begins with the machine and the versions of some packages.
    """
    arguments = parse_arguments(description or "")
    path = Path(script).parent / "results" / f"{Path(script).stem}.md"
    report = Report(title, arguments.quick, path if arguments.write else None)
    for line in describe_machine(packages):
        report.say(f"- {line}")
    report.say()
    return report, arguments.only


def parse_arguments(description: str) -> argparse.Namespace:
    """`--quick` and `--write`, which all benchmarks know."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small sizes, no claims about time")
    parser.add_argument("--write", action="store_true", help="write the report to results/")
    parser.add_argument("--only", default="", help="only comparisons whose title contains this")
    return parser.parse_args()


def describe_machine(packages: Sequence[str]) -> list[str]:
    """Which machine and which versions the figures are for."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return [
        f"{os.cpu_count()} cores, {_cpu_model()}, {memory:.0f} GB; {jax.default_backend()} backend",
        f"Python {platform.python_version()}, {versions}",
    ]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
