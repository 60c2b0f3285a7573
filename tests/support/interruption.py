"""Interrupts at chosen lines of kvkeep."""

from __future__ import annotations

import sys
from collections import Counter
from dis import opname
from pathlib import Path

import kvkeep

OWN = str(Path(kvkeep.__file__).parent)


class Interruption:
    """Raises KeyboardInterrupt at one of the lines of kvkeep that run meanwhile. It may be entered
    again, and raises once.

    Args:
        at: how many lines run before.
        within: count only lines of files whose path in kvkeep begins so.
        line: count only this line, a file and a number; None: all lines.

    Attributes:
        met: whether the line was reached.
        leaving: whether it ended the block of a `with`. There a signal would be handled only after
            `__exit__` was called, which is not called now.
    """

    def __init__(self, at: int, within: str = "", line: tuple[str, int] | None = None) -> None:
        self.left, self.met, self.leaving = at, False, False
        self._own, self._line = f"{OWN}/{within}", line

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(self._own):
            return None
        if event == "line" and self._line in (None, _line_of(frame)):
            self.left -= 1
            if self.left < 0 and not self.met:
                self.met, self.leaving = True, _leaves(frame)
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


def _leaves(frame):
    """Whether the line that a frame begins calls `__exit__` with three times None."""
    code = [opname[number] for number in frame.f_code.co_code[frame.f_lasti :: 2]]
    first = code[1:] if code[0] == "SWAP" else code  # keeps what is returned
    return first[:3] == ["LOAD_CONST"] * 3
