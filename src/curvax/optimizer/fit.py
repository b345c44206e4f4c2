"""Training: a loop of steps with a progress bar, which Ctrl-C stops between steps."""

import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import jax

from curvax._errors import where
from curvax._types import Array, PyTree
from curvax.optimizer.state import StepResult, StepResultWithFuncState, step_result


class NoMoreBatches(ValueError):
    """An iterator ended."""


Callback = Callable[[PyTree, Any, dict[str, Any]], Any]
"""Called after a step with parameters, state and statistics; a truthy result stops."""
_SECONDS_BETWEEN_REPORTS = 0.2


def fit(
    step: Callable[..., tuple[Any, ...]],
    carried: tuple[PyTree, Any, PyTree],
    rng: Array,
    data_iterator: Iterable[PyTree],
    num_steps: int,
    callback: Callback | None,
    progress: bool,
    has_state: bool,
) -> StepResult | StepResultWithFuncState:
    """Call `step` a number of times; see `Optimizer.fit`.

    An interrupt must not come between the donation of buffers and the result that replaces them.
    So while this runs, the first Ctrl-C only asks to stop.
    """
    params, state, func_state = carried
    batches = iter(data_iterator)
    stats: dict[str, Any] = {}
    reached = lambda: step_result(params, state, func_state, stats, has_func_state=has_state)
    with _Interrupts() as interrupts, _Bar(num_steps, progress) as bar:
        for number in range(num_steps):
            key = jax.random.fold_in(rng, state.step_counter)
            named = {"func_state": func_state} if has_state else {}
            try:
                found = step(params, state, key, data_iterator=batches, **named)
                params, state, *rest, stats = found
                func_state = rest[0] if has_state else None
                bar.show(stats)
                wants_end = callback is not None and callback(params, state, stats)
            except NoMoreBatches as error:
                warnings.warn(
                    f"{where()}: data_iterator ended after {number} of {num_steps} "
                    f"steps ({error}) For more epochs, give an iterator that goes on.",
                    stacklevel=3,
                )
                break
            except Exception as error:
                # The caller's own arrays were donated.
                error.reached = reached()  # pyright: ignore[reportAttributeAccessIssue]
                raise
            if interrupts.asked or wants_end:
                break
    return reached()


class _Bar:
    """A progress bar with the loss, the damping and the time of a step.

    To show numbers is to wait for them, so it is not done in every step.
    """

    def __init__(self, total: int, is_shown: bool) -> None:
        from tqdm.auto import tqdm  # Which takes as long to import as all of curvax.

        self._bar = tqdm(total=total, disable=not is_shown, unit="step")
        self._shown = (0, time.perf_counter())

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, stats: dict[str, Any]) -> None:
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


class _Interrupts:
    """Notes a first Ctrl-C instead of raising it; a second one is raised."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> "_Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
