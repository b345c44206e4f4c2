"""Programs side by side: compile, check and time them alternately, and state the claims.

A time on a shared machine means little by itself, so programs are timed in comparisons only. They
run alternately, in an order that changes from round to round, and each is judged by its best round:
other work on the machine can only make a round slower. One program, the baseline, is in the
comparison twice. The ratio of its two times should be one; its deviation from one is the noise, and
every claim about time allows for it.

Memory is that of temporaries in the compiler's memory analysis, besides inputs and outputs. It is
exact and does not depend on the machine's load.
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
"""Allowed slowdown relative to the best peer, without noise."""

MORE_ROUNDS = 2
"""Number of times that a comparison is continued, for all programs, until its claims hold."""

# On CPU, XLA may fuse matrix products into a library call whose scratch memory its analysis omits.
# Memory is measured without such fusions, so that it is exact, and time with them.
_TRUE_ACCOUNT = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}


@dataclass
class Report:
    """The output of a benchmark, which is printed and kept, to be written to a file as well."""

    title: str
    quick: bool = False
    path: Path | None = None
    """The file to write the report to, or None."""
    lines: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    num_claims: int = 0

    def say(self, text: str = "") -> None:
        """Print a line of Markdown."""
        print(text, flush=True)
        self.lines.append(text)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table, with the first column left-aligned and the others right-aligned."""
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
        """State a claim; `finish` fails unless all of them hold."""
        self.num_claims += 1
        if not ok:
            self.failed.append(text)
        self.say(f"- {'PASS' if ok else 'FAIL'}: {text}")

    def claim_time(self, text: str, ok: bool) -> None:
        """Equal to `claim`, except that a quick run, with its small sizes, does not judge times."""
        if self.quick:
            self.say(f"- not judged in a quick run: {text}")
        else:
            self.claim(text, ok)

    def finish(self) -> None:
        """Count the claims, write the report if requested, and exit."""
        self.say(f"\n{self.num_claims - len(self.failed)} of {self.num_claims} claims hold.")
        for text in self.failed:
            self.say(f"- FAIL: {text}")
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text("\n".join([f"# {self.title}", "", *self.lines]) + "\n")
        sys.exit(1 if self.failed else 0)


@dataclass(frozen=True)
class Candidate:
    """An implementation. `role` is "ours", "peer", or "reference", which is shown only."""

    name: str
    fun: Callable[..., Any]
    role: str = "peer"


@dataclass
class Result:
    """The result of a candidate. `verdict` is empty, "cannot" or "wrong", with its `reason`."""

    candidate: Candidate
    verdict: str = ""
    reason: str = ""
    program: Callable[..., Any] | None = None
    temporaries: int = 0
    seconds: float = float("inf")


@dataclass(frozen=True)
class Comparison:
    """Several implementations of one program, the first of which is the oracle.

    `chunk_bytes` is the size of the inputs, intermediates and outputs of one chunk; a program of
    ours may need that much more memory than its leanest peer. `baseline` is the candidate relative
    to which the table shows the others.
    """

    title: str
    candidates: Sequence[Candidate]
    args: tuple[Any, ...]
    baseline: str
    chunk_bytes: int

    def run(self, report: Report, seconds: float) -> None:
        """Check, measure and print, in about `seconds`, and state the claims."""
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
        """Return the candidates to compare with: the peers, or if none of them works, the rest."""
        others = [r for r in able.values() if r.candidate.role != "ours"]
        return [r for r in others if r.candidate.role == "peer"] or others

    def _too_slow(self, able: Mapping[str, Result], clock: "Clock", again: str) -> bool:
        """Return whether a claim about time would fail now; then all get more rounds."""
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
    """A clock that times calls alternately and keeps the best time of each.

    A call that takes more than twice as long as the fastest is timed only twice, unless it is in
    `keep`.
    """

    min_rounds = 6

    def __init__(self, calls: Mapping[str, Callable[[], Any]], keep: set[str]) -> None:
        self.calls = calls
        self.keep = keep
        self.best = dict.fromkeys(calls, float("inf"))
        self.rounds = 0

    def run(self, seconds: float) -> None:
        """Run more rounds for `seconds`, or up to twice as long if rounds are long."""
        begin, done = time.perf_counter(), 0
        passed = lambda: time.perf_counter() - begin
        while passed() < seconds or (done < self.min_rounds and passed() < 2 * seconds):
            self._round()
            done += 1

    def ratio(self, one: str, other: str) -> float:
        """Return the ratio of two best times, the larger by the smaller."""
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
    """Return the compiled program, and the bytes of temporaries that it needs."""
    lowered = jax.jit(fun).lower(*args)
    program = lowered.compile()
    accountable = program
    if "ynn_fusion" in (program.as_text() or ""):
        accountable = lowered.compile(compiler_options=_TRUE_ACCOUNT)
    analysis = accountable.memory_analysis()
    if analysis is None:
        raise SystemExit("This backend does not report the memory of its programs.")
    return program, analysis.temp_size_in_bytes


def agree(value: Any, truth: Any, tolerance: float = 2e-4) -> bool:
    """Return whether all leaves have equal shapes, and values that are equal to rounding."""
    if jax.tree.structure(value) != jax.tree.structure(truth):
        return False
    pairs = zip(jax.tree.leaves(value), jax.tree.leaves(truth), strict=True)
    return all(
        a.shape == b.shape and np.max(np.abs(a - b), initial=0) <= tolerance * _scale(b)
        for a, b in pairs
    )


def shapes(value: Any) -> str:
    """Describe the arrays of a pytree."""
    return ", ".join(str(leaf.shape) for leaf in jax.tree.leaves(value))


def _scale(x: np.ndarray) -> float:
    return float(np.max(np.abs(x), initial=1e-30))


def import_seconds(statements: Sequence[str], rounds: int) -> dict[str, float]:
    """Return the best time of import statements, each in a new interpreter, alternately.

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
    """Parse the command line; return the report of a benchmark, and the words of `--only`.

    The report begins with the machine and the versions of some packages.
    """
    arguments = parse_arguments(description or "")
    path = Path(script).parent / "results" / f"{Path(script).stem}.md"
    report = Report(title, arguments.quick, path if arguments.write else None)
    for line in describe_machine(packages):
        report.say(f"- {line}")
    report.say()
    return report, arguments.only


def parse_arguments(description: str) -> argparse.Namespace:
    """Return a parser of the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small sizes, no claims about time")
    parser.add_argument("--write", action="store_true", help="write the report to results/")
    parser.add_argument("--only", default="", help="only comparisons whose title contains this")
    return parser.parse_args()


def describe_machine(packages: Sequence[str]) -> list[str]:
    """Describe the machine and the versions of packages."""
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
