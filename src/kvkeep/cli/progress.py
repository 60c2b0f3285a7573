"""Progress of a command on stderr."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

if TYPE_CHECKING:
    from kvkeep.host import ModelCache


class Working:
    """Shows the current activity on stderr: on a terminal as a bar with the elapsed time and, if
    the completed share is known, the time left; otherwise as one line per activity.

    Args:
        doing: the first activity, shown on terminals only.
        shown: False: show nothing.

    Attributes:
        live: whether stderr is a terminal.
    """

    def __init__(self, doing: str, *, shown: bool = True) -> None:
        self._console = Console(stderr=True)
        self._shown, self._doing = shown, doing
        # With FORCE_COLOR rich treats any file as a terminal.
        self.live = self._console.is_interactive and self._console.file.isatty()
        self._lock = RLock()  # rich draws in another thread
        self._asked: Callable[[], float] | None = None
        self._bar = _Bar(self._ask, self._console, disable=not (shown and self.live))
        self._task = self._bar.add_task(doing, total=None)

    def __enter__(self) -> Working:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __call__(self, doing: str, share: float | None = None) -> None:
        """Show an activity and the completed share, 0 to 1; None: not known."""
        with self._lock:
            self._asked = None
            self._show(doing, share)

    def reading(self, cache: ModelCache, tokens: int) -> None:
        """From now on, show the share of a prompt's `tokens` that a cache has been fed."""
        layers = max(1, len(cache.layers)) * max(1, tokens)
        with self._lock:
            self(f"reading {tokens:,} tokens", 0.0)
            self._asked = lambda: min(1.0, sum(layer.fed for layer in cache.layers) / layers)

    def stop(self) -> None:
        """Remove the bar before other output."""
        self._bar.stop()

    def _ask(self) -> None:
        # Do not block: rich holds a lock that `_show` may need.
        if self._lock.acquire(blocking=False):
            try:
                if self._asked is not None:
                    self._show(self._doing, self._asked())
            finally:
                self._lock.release()

    def _show(self, doing: str, share: float | None) -> None:
        total = None if share is None else 1.0
        if self._bar.tasks[0].total != total:  # a new task resets the times
            self._bar.remove_task(self._task)
            self._task = self._bar.add_task(doing, total=total)
        self._bar.update(self._task, description=doing, completed=share or 0.0)
        if self._shown and not self.live and doing != self._doing:
            done = f"{share:4.0%} " if share else ""
            self._console.print(f"{done}{doing} ...", style="dim", highlight=False, markup=False)
        self._doing = doing


class _Bar(Progress):
    """A progress bar that reads the completed share whenever it is drawn."""

    def __init__(self, ask: Callable[[], None], console: Console, *, disable: bool) -> None:
        self._ask = ask
        super().__init__(
            SpinnerColumn("line" if console.options.ascii_only else "dots"),
            TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold")),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
            refresh_per_second=5,
            transient=True,
            disable=disable,
        )

    def get_renderables(self) -> Any:
        """See `rich.progress.Progress`."""
        self._ask()
        return super().get_renderables()
