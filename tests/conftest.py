"""Fixtures for all tests."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.testing
from support import process_group

from kvkeep import choice

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

# Ways that somebody has measured here would be taken.
choice.measured_file = lambda: Path(os.devnull + ".none")  # type: ignore[assignment]

os.environ["KVKEEP_STEPS"] = ""  # compiled steps of earlier processes would be used
# Read when torch's compiler is imported: programs run slower, and are compiled in half of the time.
os.environ["AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL"] = "O0"

if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    # Torch's compiler finds code for another capability in its cache, whose results are wrong.
    place = os.path.join(tempfile.gettempdir(), f"kvkeep-tests-inductor-{capability}")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = place


# Typer would make all commands anew for each call of one: a third of the time of a test.
typer.testing._get_command = cache(typer.testing._get_command)


def pytest_configure() -> None:
    """Workers share the cores, or their threads would wait for each other. Python's collector rests
    until the tests are collected: it would look through what is imported again and again."""
    gc.disable()
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    threads = max(1, torch.get_num_threads() // workers)
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # of the processes that tests start


def pytest_collection_finish() -> None:
    """Python's collector leaves out what was imported, which would take it half a second each time
    that it looks for garbage."""
    gc.collect()
    gc.freeze()
    gc.enable()
    process_group.prepare()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """It also leaves out what a module's tests leave, such as torch's caches of graphs."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Without a GPU not by torch.manual_seed, which formats a traceback for the day it is used."""
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests of many small tensors, which more threads only slow down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def without_gradients() -> Iterator[None]:
    """For tests that feed a model by itself."""
    with torch.no_grad():
        yield


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty KVKEEP_HOME."""
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in float32, and its tokenizer; leave it detached."""
    from kvkeep.hf.models import load

    return load("smollm2-135m", "float32", "cpu")


@pytest.fixture(scope="session")
def stand_in_home(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A KVKEEP_HOME whose demo model is random, narrow, of few layers and fast; its heads are the
    real ones."""
    from support.demo_stand_in import LAYERS, stand_in

    shape = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    home = tmp_path_factory.mktemp("home")
    return stand_in(home, num_hidden_layers=LAYERS, **shape)["KVKEEP_HOME"]


@pytest.fixture
def quick_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks measure what memory and arithmetic allow with small tensors."""
    from kvkeep_lab.bench import device

    monkeypatch.setattr(device, "READ_MEBIBYTES", 4)
    monkeypatch.setattr(device, "SQUARE", 64)


@pytest.fixture
def fresh_graphs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing compiled before or after the test, on disk neither, and torch's counters at zero."""
    from kvkeep.hf.steps import saved_steps

    monkeypatch.setattr(saved_steps, "directory", lambda: tmp_path)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def saved_graphs(
    fresh_graphs: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    pytestconfig: pytest.Config,
) -> None:
    """Like `fresh_graphs`, with the compiled steps of other tests, and of earlier runs in pytest's
    cache: the name of a program says what it depends on, kvkeep's own sources included."""
    from kvkeep.hf.steps import saved_steps

    cache = getattr(pytestconfig, "cache", None)
    found = tmp_path_factory.getbasetemp() / "steps" if cache is None else cache.mkdir("steps")
    found.mkdir(exist_ok=True)
    monkeypatch.setattr(saved_steps, "directory", lambda: found)
