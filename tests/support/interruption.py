"""Interrupts at chosen lines of kvkeep."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import kvkeep

OWN = str(Path(kvkeep.__file__).parent)


class Interruption:
    """Raises KeyboardInterrupt at one of the lines of kvkeep that run meanwhile. It may be entered
    again, and raises once.

    Args:
        at: how many lines run before.
        line: count only this line, a file and a number; None: all lines.
    """

    def __init__(self, at: int, line: tuple[str, int] | None = None) -> None:
        self.left, self.met, self._line = at, False, line

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(OWN):
            return None
        if event == "line" and self._line in (None, _line_of(frame)):
            self.left -= 1
            if self.left < 0 and not self.met:
                self.met = True
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    def __enter__(self):
        if not self.met:
            sys.settrace(self)
        return self

    def __exit__(self, *error):
        sys.settrace(None)
        return error[0] is KeyboardInterrupt


class Lines:
    """Counts how often each line of kvkeep runs meanwhile. It may be entered again."""

    def __init__(self) -> None:
        self.met = Counter[tuple[str, int]]()

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(OWN):
            return None
        if event == "line":
            self.met[_line_of(frame)] += 1
        return self

    def __enter__(self):
        sys.settrace(self)
        return self

    def __exit__(self, *error):
        sys.settrace(None)


def _line_of(frame):
    return frame.f_code.co_filename, frame.f_lineno
