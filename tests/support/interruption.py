"""Interruption: a KeyboardInterrupt at any executed line of kvkeep."""

from __future__ import annotations

import sys
from dis import opname
from pathlib import Path

import kvkeep

OWN = str(Path(kvkeep.__file__).parent)


class Interruption:
    """Raises KeyboardInterrupt at one of the lines of kvkeep that run meanwhile.

    Args:
        at: the number of the line, counted from 0.
        within: only lines of files whose path in kvkeep begins so.

    Attributes:
        met: whether that line was reached.
        leaving: whether it ended the block of a `with`. There a signal would be handled only after
            `__exit__` was called, which is not called now.
    """

    def __init__(self, at: int, within: str = "") -> None:
        self.left, self.met, self.leaving = at, False, False
        self._own = f"{OWN}/{within}"

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(self._own):
            return None
        if event == "line":
            self.left -= 1
            if self.left < 0 and not self.met:
                self.met, self.leaving = True, _leaves(frame)
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    def __enter__(self):
        sys.settrace(self)
        return self

    def __exit__(self, *error):
        sys.settrace(None)
        return error[0] is KeyboardInterrupt


def _leaves(frame):
    """Whether the line that a frame begins calls `__exit__` with three times None."""
    code = [opname[number] for number in frame.f_code.co_code[frame.f_lasti :: 2]]
    first = code[1:] if code[0] == "SWAP" else code  # keeps what is returned
    return first[:3] == ["LOAD_CONST"] * 3
