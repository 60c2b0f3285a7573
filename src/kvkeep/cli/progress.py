"""What a command shows on stderr while it works."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from threading import RLock
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
)
from rich.table import Column
from rich.text import Text

if TYPE_CHECKING:
    from kvkeep.host import ModelCache


class Working:
    """Shows on stderr what is being done. On a terminal this is a bar with the time left, or the
    time since it began where the share done is not known. Otherwise it is a line for each activity.

    Args:
        doing: the first activity, which is shown on terminals only.
        shown: whether anything is shown.

    `live` says whether it is a terminal.
    """

    def __init__(self, doing: str, *, shown: bool = True) -> None:
        self._console = Console(stderr=True)
        self._shown, self._doing = shown, doing
        # FORCE_COLOR makes rich take any file for a terminal.
        self.live = self._console.is_interactive and self._console.file.isatty()
        self._lock = RLock()  # rich draws in a thread of its own
        self._asked: Callable[[], float] | None = None
        self._pace = _Pace()
        self._bar = _Bar(self._ask, self._pace, self._console, disable=not (shown and self.live))
        self._task = self._bar.add_task(doing, total=None)

    def __enter__(self) -> Working:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __call__(self, doing: str, share: float | None = None) -> None:
        """Show another activity, or another share of the whole, 0 to 1; None: not known."""
        with self._lock:
            self._asked = None
            self._show(doing, share)

    def reading(self, cache: ModelCache, tokens: int) -> None:
        """Show how much of a prompt's `tokens` a cache has been fed, from now on."""
        layers = max(1, len(cache.layers)) * max(1, tokens)
        with self._lock:
            self(f"reading {tokens:,} tokens", 0.0)
            self._asked = lambda: min(1.0, sum(layer.fed for layer in cache.layers) / layers)

    def stop(self) -> None:
        """Remove what is shown, before other output."""
        self._bar.stop()

    def _ask(self) -> None:
        # Who waited here could wait for ever: rich holds a lock that `_show` may need.
        if self._lock.acquire(blocking=False):
            try:
                if self._asked is not None:
                    self._show(self._doing, self._asked())
            finally:
                self._lock.release()

    def _show(self, doing: str, share: float | None) -> None:
        if self._pace.add(share, time.monotonic()):  # an indefinite bar has a task of its own
            self._bar.remove_task(self._task)
            self._task = self._bar.add_task(doing, total=None if share is None else 1.0)
        self._bar.update(self._task, description=doing, completed=share or 0.0)
        if self._shown and not self.live and doing != self._doing:
            done = f"{share:4.0%} " if share else ""
            self._console.print(f"{done}{doing} ...", style="dim", highlight=False, markup=False)
        self._doing = doing


class _Pace:
    """Estimates the time left from the shares that were done at two times."""

    def __init__(self) -> None:
        self._began = self._first = (time.monotonic(), 0.0)
        self._last: tuple[float, float] | None = None

    def add(self, share: float | None, now: float) -> bool:
        """Note a share; whether the share is known now and was not before, or the reverse."""
        changed = (share is None) != (self._last is None)
        if share is None:
            self._began = self._began if self._last is None else (now, 0.0)
            self._last = None
        else:
            if self._last is None or share <= self._first[1]:
                self._first = (now, share)  # no work was done until here
            if self._last is None or share != self._last[1]:
                self._last = (now, share)
        return changed

    def text(self, now: float) -> str:
        """The time left, or that since the beginning."""
        if self._last is not None and self._last[1] > self._first[1]:
            (began, first), (last, share) = self._first, self._last
            left = (last - began) / (share - first) * (1 - share) - (now - last)
            return f"{_clock(max(0.0, left))} left"
        return _clock(now - (self._began if self._last is None else self._first)[0])


class _Bar(Progress):
    """A progress bar that asks for the share done whenever it is drawn."""

    def __init__(
        self, ask: Callable[[], None], pace: _Pace, console: Console, *, disable: bool
    ) -> None:
        self._ask = ask
        super().__init__(
            SpinnerColumn("line" if console.options.ascii_only else "dots"),
            TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold")),
            _Known(BarColumn(bar_width=20)),
            _Known(TaskProgressColumn()),
            _Time(pace),
            console=console,
            refresh_per_second=5,
            transient=True,
            disable=disable,
        )

    def get_renderables(self) -> Any:
        """See `rich.progress.Progress`."""
        self._ask()
        return super().get_renderables()


class _Known(ProgressColumn):
    """Another column, if the share done is known."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: Task) -> RenderableType:
        """See `rich.progress.ProgressColumn`."""
        return "" if task.total is None else self._column(task)


class _Time(ProgressColumn):
    """The time left, or the time since the beginning."""

    def __init__(self, pace: _Pace) -> None:
        super().__init__(Column(no_wrap=True))
        self._pace = pace

    def render(self, task: Task) -> RenderableType:
        """See `rich.progress.ProgressColumn`."""
        return Text(self._pace.text(time.monotonic()), style="dim")


def _clock(seconds: float) -> str:
    """Whole seconds as 0:12, 3:07 or 1:02:33."""
    return str(timedelta(seconds=int(seconds))).removeprefix("0:").removeprefix("0")
