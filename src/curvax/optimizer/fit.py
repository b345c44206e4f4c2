"""The training loop of `Optimizer.fit`: a progress bar, and Ctrl-C between steps."""

import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from types import FrameType

import jax

from curvax._errors import where
from curvax._types import Array, PyTree
from curvax.optimizer.state import OptimizerState, Stats, StepResult, StepResultWithFuncState


class NoMoreBatches(ValueError):
    """The error of a data iterator that is exhausted."""


Callback = Callable[[PyTree, OptimizerState, Stats], object]
"""Called after each step with parameters, state and statistics; a truthy result stops training."""

_SECONDS_BETWEEN_REPORTS = 0.2


def fit(
    step: Callable[..., StepResult | StepResultWithFuncState],
    latest: StepResult | StepResultWithFuncState,
    rng: Array,
    data_iterator: Iterable[PyTree],
    num_steps: int,
    callback: Callback | None,
    progress: bool,
) -> StepResult | StepResultWithFuncState:
    """Call `step` repeatedly, from `latest`, and return its last result; see `Optimizer.fit`.

    An interrupt between the donation of buffers and the assignment of their replacements would lose
    the parameters. So the first Ctrl-C only requests a stop after the current step.
    """
    batches = iter(data_iterator)
    with _DeferredInterrupt() as interrupt, _ProgressBar(num_steps, progress) as bar:
        for index in range(num_steps):
            key = jax.random.fold_in(rng, latest.state.step_counter)
            named = {}
            if isinstance(latest, StepResultWithFuncState):
                named = {"func_state": latest.func_state}
            try:
                found = step(latest.params, latest.state, key, data_iterator=batches, **named)
                latest = type(latest)._make(
                    found
                )  # A user-supplied `step` may return a plain tuple.
                bar.show(latest.stats)
                is_stopped = callback is not None and callback(
                    latest.params, latest.state, latest.stats
                )
            except NoMoreBatches as error:
                warnings.warn(
                    f"{where()}: data_iterator ended after {index} of {num_steps} "
                    f"steps ({error}) For more epochs, give an iterator that goes on.",
                    stacklevel=3,
                )
                break
            except Exception as error:
                # The caller's arrays were donated, so this is the only copy of the parameters.
                error.reached = latest  # pyright: ignore[reportAttributeAccessIssue]
                raise
            if interrupt.is_requested or is_stopped:
                break
    return latest


class _ProgressBar:
    """A progress bar with the loss, the damping and the time per step.

    Reading the loss blocks until the step has run, so the numbers are updated a few times a second
    and not in every step.
    """

    def __init__(self, total: int, is_shown: bool) -> None:
        from tqdm.auto import tqdm  # Importing tqdm takes as long as importing curvax.

        self._bar = tqdm(total=total, disable=not is_shown, unit="step")
        self._shown = (0, time.perf_counter())

    def __enter__(self) -> "_ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, stats: Stats) -> None:
        """Advance by one step."""
        if self._bar.disable:
            return
        self._bar.update()
        count, (before, then) = self._bar.n, self._shown
        seconds = time.perf_counter() - then
        if count in (1, self._bar.total) or seconds > _SECONDS_BETWEEN_REPORTS:
            loss, damping = float(stats["loss"]), float(stats["damping"])
            ms = 1e3 * (time.perf_counter() - then) / (count - before)
            self._bar.set_postfix_str(f"loss={loss:.4g}, damping={damping:.2g}, {ms:.0f} ms/step")
            self._shown = (count, time.perf_counter())


class _DeferredInterrupt:
    """A context in which the first Ctrl-C sets `is_requested`; a second one raises."""

    def __init__(self) -> None:
        self.is_requested = False
        self._previous: Callable[[int, FrameType | None], object] | int | None = None

    def __enter__(self) -> "_DeferredInterrupt":
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True
