"""What is shown while a command works."""

from __future__ import annotations

import os
import pty
import time
from contextlib import contextmanager, suppress
from threading import Thread
from types import SimpleNamespace

import pytest

from kvkeep.cli.progress import Working
from kvkeep.host.progress import Work


@contextmanager
def terminal(monkeypatch, encoding="utf-8"):
    """Stderr is a terminal of 80 columns; yields a function that reads what was written."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with open(theirs, "w", encoding=encoding) as stream, monkeypatch.context() as patched:
        patched.setattr("sys.stderr", stream)

        def written():
            stream.flush()
            with suppress(BlockingIOError):
                return os.read(ours, 1 << 16).decode()
            return ""

        yield written
    os.close(ours)


def test_a_terminal_gets_a_bar_and_is_left_clean(monkeypatch):
    with terminal(monkeypatch) as written:
        with Working("starting") as working:
            time.sleep(0.3)
            begin = written()
            working("half", 0.5)
            time.sleep(0.3)
            middle = written()
        end = written()
    assert "starting" in begin
    assert "half" in middle
    assert "50%" in middle
    assert "━" in middle
    assert "\x1b[?25h" in end  # the cursor is back
    assert end.endswith("\x1b[2K")  # and the line erased


def test_a_bar_follows_a_cache(monkeypatch):
    cache = SimpleNamespace(layers=[SimpleNamespace(fed=0), SimpleNamespace(fed=0)])
    with terminal(monkeypatch) as written, Working("starting") as working:
        working.reading(cache, 1000)
        cache.layers[0].fed = 1000
        cache.layers[1].fed = 500
        time.sleep(0.5)
        shown = written()
    assert "reading 1,000 tokens" in shown
    assert "75%" in shown


def test_a_terminal_that_is_not_utf8(monkeypatch):
    with terminal(monkeypatch, "ascii") as written, Working("half") as working:
        working("half", 0.5)
        shown = written()
    assert "half" in shown
    assert shown.isascii()


def test_what_is_drawn_while_the_activity_changes(monkeypatch):
    """A share that was asked for before does not return."""
    with terminal(monkeypatch):
        working = Working("starting")
        changes = Thread(target=working, args=("writing",))

        class Layer:
            @property
            def fed(self):
                changes.start()
                changes.join(0.1)  # it waits, or would have changed the activity already
                return 5

        working.reading(SimpleNamespace(layers=[Layer()]), 10)
        working._bar.get_renderables()
        changes.join()
    assert working._doing == "writing"


def test_drawing_does_not_wait(monkeypatch):
    """It holds a lock of rich's, for which the change of an activity may wait."""
    with terminal(monkeypatch):
        working = Working("starting")
        with working._lock:
            draws = Thread(target=working._bar.get_renderables, daemon=True)
            draws.start()
            draws.join(10)
            assert not draws.is_alive()


@pytest.mark.parametrize("colour", [False, True])
def test_a_file_gets_a_line_for_each_activity(capsys, monkeypatch, colour):
    """Also if FORCE_COLOR is set, since a bar would fill a file."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if colour:
        monkeypatch.setenv("FORCE_COLOR", "1")
    with Working("starting") as working:
        for share in (0.0, 0.25, 0.5):
            working("reading [bold]", share)
        working("writing", 0.75)
    said = capsys.readouterr().err
    assert said.count("reading [bold] ...") == 1
    assert " 75% writing ..." in said
    assert said.count("\n") == 2
    assert ("\x1b[" in said) == colour
    with Working("starting", shown=False) as working:
        working("reading")
    assert capsys.readouterr().err == ""


def test_work():
    said = []
    work = Work(lambda doing, share: said.append((doing, share)), 10)
    work.stage("a", 4)
    work.part(0.5)
    work.tick(99)  # no more than the stage
    work.stage("b", 6)
    work.tick(3)
    assert said == [("a", 0), ("a", 0.2), ("a", 0.4), ("b", 0.4), ("b", 0.7)]
    work.stage("c", 6)  # it was complete, and the total too small
    work.part(1)
    assert said[-2:] == [("c", 1.0), ("c", 1.0)]
