"""What benchmarks measure on a device: limits, rows that are skipped, others' attention."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kvkeep_lab.bench import append, decode, device, op, rivals
from kvkeep_lab.bench.decode_loop import new_cache
from kvkeep_lab.bench.device import Limits, bandwidth, because, device_named, with_values
from kvkeep_lab.bench.options import DYNAMIC, STATIC, Append, Decode, Op
from kvkeep_lab.bench.random_model import fill, random_model
from kvkeep_lab.bench.systems import labels, named

import kvkeep
from kvkeep import environment
from kvkeep.errors import ModelError, SpecError, UnsupportedError
from kvkeep.hf.cache import Cache
from kvkeep.host.progress import Work, silent

CPU = torch.device("cpu")
# A device on which nothing can be computed, as CUDA is after a failure.
META = torch.device("meta")
REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("quick_bounds")


def by(result, *keys):
    return {tuple(row[key] for key in keys): row for row in result["rows"]}


# -- limits --------------------------------------------------------------------------------------


def test_limits_of_memory(monkeypatch):
    monkeypatch.setattr(device, "free_bytes", lambda where: 1000)
    limits = Limits(CPU)
    assert limits.refuse() is limits.refuse(500) is None
    assert limits.refuse(501) == "needs 501 bytes, more than half of the 1000 that are free"


def test_limits_of_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(device, "time", SimpleNamespace(monotonic=lambda: now[0]))
    limits = Limits(CPU, 30)
    assert limits.refuse() is limits.refuse(seconds=29) is None
    now[0] = 110.0
    assert limits.refuse() is None
    assert (
        limits.refuse(seconds=25) == "20 s of 30 are left; this takes about 25; allow more seconds"
    )
    now[0] = 131.0
    assert limits.refuse() == "0 s of 30 are left; allow more seconds"


def test_reasons_are_one_short_line():
    assert because(ValueError("\nfirst\nsecond")) == "ValueError: first"
    assert len(because(ValueError("x" * 999))) == 200


def test_columns_without_a_value_are_left_out():
    rows = [{"a": 0.0, "b": None, "c": None}, {"a": False, "c": 1}]
    assert with_values(rows) == [{"a": 0.0, "c": None}, {"a": False, "c": 1}]


def test_bandwidth():
    name, rate = bandwidth(CPU)
    assert name == "read_gb_per_s"
    assert rate > 0
    assert bandwidth(META)[0] == "copy_gb_per_s"


def test_devices():
    assert device_named("cpu") == CPU
    assert device_named().type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ModelError, match="no device 'abacus' here; there is cpu"):
        device_named("abacus")


# -- attention -----------------------------------------------------------------------------------

SHAPE = {"rows": 2, "heads": (4,), "kv_heads": 2, "head_dim": 64}


@pytest.mark.slow
def test_op_of_all_systems():
    result = op.run(
        Op(
            device="cpu",
            **SHAPE,
            lengths=(64, 96),
            codecs=("plain", "int8"),
            against=("torch-sdpa", "torch-folded"),
            turns=1,
        )
    )
    rows = by(result, "backend", "codec", "length")
    for length in (64, 96):
        assert rows["torch-folded", "plain", length]["error"] < 1e-2
        assert rows["sdpa", "plain", length]["median_us"] > 0
    for (name, codec, _), row in rows.items():
        if name == "native":
            assert row["error"] < 2e-2
            size = 2 * 2 * 2 * row["length"] * (128 if codec == "plain" else 66)
            assert row["gb_per_s"] == pytest.approx(size / row["median_us"] / 1e3)
    assert result["shape"] == {"dtype": "bfloat16", "B": 2, "Hq": 4, "H": 2, "D": 64, "n": 1}
    assert not {"graph_us", "of_copy"} & set(result["rows"][0])


def test_op_without_time_or_memory(monkeypatch):
    result = op.run(Op(device="cpu", **SHAPE, lengths=(64,), seconds=-1))
    assert all("are left" in row["skipped"] for row in result["rows"])
    monkeypatch.setattr(device, "free_bytes", lambda where: 1000)
    result = op.run(Op(device="cpu", **SHAPE, lengths=(64,)))
    assert all("more than half" in row["skipped"] for row in result["rows"])


def test_op_where_nothing_works():
    result = op.run(Op(device="meta", **SHAPE, lengths=(64,), turns=1))
    assert {row["backend"] for row in result["rows"]} >= {"sdpa", "torch-sdpa", "flex"}
    assert all(row["skipped"] for row in result["rows"])
    assert result["copy_gb_per_s"] > 0


def test_op_in_graphs(monkeypatch):
    """What a graph cannot hold keeps its other figures."""

    def capture(call):
        if call is calls["b"]:
            raise RuntimeError("not in a stream")
        return call

    monkeypatch.setattr(op, "captured", capture)
    calls = {"a": list, "b": dict}
    case = op._Case(Limits(torch.device("cuda")), {}, calls, torch.float32)
    assert case._replays(calls) == {"a": list}
    assert case.rows["b"]["skipped"] == "in a CUDA graph: RuntimeError: not in a stream"
    figures = op._figures([4e-6, 2e-6, 3e-6], [2e-6, 1e-6, 1e-6], 5000, 8000)
    assert figures["median_us"] == pytest.approx(3)
    assert figures["graph_us"] == pytest.approx(1)
    assert figures["gb_per_s"] == pytest.approx(5)
    assert figures["gflop_per_s"] == pytest.approx(8)


@pytest.mark.parametrize("name", ["torch-folded", "torch-expanded", "torch-math", "flex"])
@pytest.mark.parametrize("n", [1, 5, 48])
def test_rivals_do_the_same(monkeypatch, name, n):
    monkeypatch.setattr(rivals, "_compiled", lambda attention: attention)
    q, k, v = torch.randn(2, 8, n, 16), torch.randn(2, 2, 48, 16), torch.randn(2, 2, 48, 16)
    expected = rivals.torch_sdpa(q, k, v)()
    torch.testing.assert_close(rivals.RIVALS[name](q, k, v)(), expected)


# -- appends -------------------------------------------------------------------------------------


def test_append_of_all_layouts():
    layouts = ("concat", "growing", "fixed")
    result = append.run(Append((8, 40), device="cpu", batches=(1, 2), layouts=layouts, turns=1))
    rows = by(result, "rows", "tokens")
    assert set(rows) == {(1, 8), (1, 40), (2, 8), (2, 40)}
    for row in rows.values():
        assert all(row[f"{x}_{what}_us"] > 0 for x in layouts for what in ("update", "step"))
        costs = {x: row[f"{x}_step_us"] for x in layouts}
        costs["growing"] += row["growth_us"]
        assert row["winner"] == min(costs, key=costs.get)
    assert result["shape"]["B"] == [1, 2]


def test_append_by_the_devices_own_time(monkeypatch):
    """As on CUDA, by a clock that says who is slow."""
    costs = {"concat": 3.0, "growing": 1.0, "fixed": 2.0}

    class Case(append._Case):
        def _call(self, what, layer):
            layout = layer.storage.name
            return lambda: costs[layout]

        def _growth(self, timer):
            return 0.5

    def timer_for(where, *, queued=False):
        return lambda call: call() / (4 if queued else 1)

    monkeypatch.setattr(append, "timer_for", timer_for)
    case = Case(CPU, 1, 8)
    case.device = SimpleNamespace(type="cuda")
    monkeypatch.setattr(case, "_filled", lambda layout, turns: layer_of(layout))
    row = case.row(append.LAYOUTS, 2, Limits(CPU), Work(silent, 1))
    assert row["growing_step_us"] == 1e6
    assert row["growing_step_device_us"] == 0.25e6
    assert row["winner"] == "growing"
    assert row["device_winner"] == "fixed"  # for growing there costs 0.25 + 0.5
    assert row["step_ratio"] == 3


def layer_of(layout):
    return append._Case(CPU, 1, 8)._filled(layout, 2)


def test_append_without_memory(monkeypatch):
    monkeypatch.setattr(device, "free_bytes", lambda where: 1000)
    rows = append.run(Append((8,), device="cpu"))["rows"]
    assert [set(row) for row in rows] == [{"tokens", "skipped"}]
    assert "more than half" in rows[0]["skipped"]


# -- decoding ------------------------------------------------------------------------------------


COMPILED = (("eager", "graph", "compiled"), (DYNAMIC, STATIC))


@pytest.mark.parametrize(
    ("ways", "against"),
    [(("eager", "graph"), (DYNAMIC,)), pytest.param(*COMPILED, marks=pytest.mark.slow)],
)
def test_decode_of_a_random_model(ways, against):
    specs = ("keep_all", "window:8")
    result = decode.run(
        Decode(
            "random-tiny",
            device="cpu",
            dtype="float32",
            contexts=(16, 40),
            specs=specs,
            ways=ways,
            against=against,
            turns=1,
            burst=2,
        )
    )
    rows = by(result, "system", "spec", "context")
    ours = [labels(named(spec, way)) for spec in specs for way in ways]
    systems = [*((one["system"], one["spec"]) for one in ours), *((name, None) for name in against)]
    assert set(rows) == {(*system, n) for system in systems for n in (16, 40)}
    for (_, spec, _), row in rows.items():
        assert row["median_ms"] > 0
        assert row["agrees"] is (spec != "window:8")
        assert row["error"] < 1e-5 or spec == "window:8"
    assert all(slope is not None for slope in result["slope_us_per_token"].values())


def test_decode_goes_on_without_graphs(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvkeep.hf.steps.cuda_graph", None)
    sizes = {"contexts": (16,), "turns": 1, "ways": ("eager", "graph")}
    rows = by(decode.run(Decode("random-tiny", device="cpu", **sizes)), "system")
    assert "ModuleNotFoundError" in rows["kvkeep+graph",]["skipped"]
    assert rows["kvkeep-linears",]["agrees"]


def test_decode_without_time_or_a_device():
    result = decode.run(Decode("random-tiny", device="cpu", contexts=(16, 20), seconds=-1))
    assert all("are left" in row["skipped"] for row in result["rows"])
    sizes = {"contexts": (16,), "turns": 1, "burst": 2, "seconds": 30}
    rows = by(
        decode.run(Decode("random-tiny", device="cpu", against=(DYNAMIC, STATIC), **sizes)),
        "system",
    )
    assert "takes about" in rows[STATIC,]["skipped"]
    assert rows[DYNAMIC,]["median_ms"] > 0
    rows = by(decode.run(Decode("random-tiny", device="meta", contexts=(16,), turns=1)), "system")
    assert len(rows) == 5
    assert all(row["skipped"] for row in rows.values())
    assert rows[DYNAMIC,]["skipped"] == "the device has failed"


def test_what_agrees():
    theirs = torch.randn(2, 1000)
    rounded = theirs.bfloat16().float()
    assert decode.compared([rounded], [theirs]) == (pytest.approx(0, abs=0.01), True)
    first, second = theirs.topk(2, dim=1).indices.unbind(1)
    tied = theirs.clone()
    rows = torch.arange(2)
    tied[rows, second] = tied[rows, first] + 0.001
    apart = tied[rows, first] - theirs[rows, second]
    assert decode.compared([tied], [theirs])[1] is bool((apart <= 0.1 * theirs.std(dim=1)).all())
    error, agrees = decode.compared([torch.randn(2, 1000)], [theirs])
    assert error > 1
    assert not agrees


@pytest.mark.parametrize("system", ["keep_all", "keep_all@fixed:9", DYNAMIC, STATIC])
def test_caches_are_filled_alike(system):
    model = random_model("random-tiny", torch.float32, CPU)
    ours, other = fill(Cache(model), model, 5), fill(new_cache(system, model, 9), model, 5)
    for index, layer in enumerate(ours.layers):
        planes = layer.state().parts["slots"]
        if isinstance(other, Cache):
            found = other.layers[index].state().parts["slots"]
            keys, values = found["k"], found["v"]
        else:
            keys, values = other.layers[index].keys, other.layers[index].values
        assert keys[:, :, :5].equal(planes["k"])
        assert values[:, :, :5].equal(planes["v"])


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"ways": ("fast",)}, SpecError, "no way 'fast'; there is default, eager"),
        ({"dtype": "bits"}, ModelError, "no dtype 'bits'"),
        ({"against": ("llama.cpp",)}, UnsupportedError, "llama.cpp needs a prompt"),
    ],
)
def test_bad_input(options, kind, says):
    with pytest.raises(kind, match=says):
        decode.run(Decode("random-tiny", device="cpu", **options))


# -- the machine ---------------------------------------------------------------------------------


def test_the_environment_without_an_install(monkeypatch):
    def version(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(environment, "version", version)
    found = environment.environment()
    assert found["kvkeep"] == kvkeep.__version__
    assert found["transformers"] == found["triton"] == "none"


def test_the_environment_names_the_accelerator(monkeypatch):
    properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, total_memory=140 << 30, multi_processor_count=132
    )
    cuda = SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: 0,
        get_device_properties=lambda index: properties,
    )
    monkeypatch.setattr(environment.torch, "cuda", cuda)
    monkeypatch.setattr(environment.torch.version, "cuda", "13.0")
    told = SimpleNamespace(stdout="580.159.04\n")
    monkeypatch.setattr(environment.subprocess, "run", lambda *a, **k: told)
    found = environment.environment()
    about = "NVIDIA H200, capability 9.0, 140.0 GiB, 132 multiprocessors"
    assert (found["accelerator"], found["cuda"]) == (about, "13.0")
    assert found["driver"] == "580.159.04"

    def nothing(*arguments, **options):
        raise FileNotFoundError

    monkeypatch.setattr(environment.subprocess, "run", nothing)
    assert environment.environment()["driver"] == "unknown"


@pytest.mark.skipif(shutil.which("bash") is None, reason="a script for bash")
@pytest.mark.slow
def test_the_script(tmp_path):
    script = REPOSITORY / "benchmarks" / "cuda.sh"
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    chosen = {"DEVICE": "cpu", "TINY": "1", "PARTS": "tests append", "PYTHON": sys.executable}
    chosen |= {"LIMIT_TESTS": "300", "LIMIT_APPEND": "300"}
    done = subprocess.run(
        ["bash", str(script), str(tmp_path / "out")],
        env=os.environ | chosen,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "== tests: exit 0" in done.stdout
    assert "concat_step_us" in done.stdout
    found = json.loads((tmp_path / "out" / "append-cuda.json").read_text())
    assert {row["winner"] for row in found["rows"]} <= {"concat", "growing", "fixed"}
    assert not (tmp_path / "out" / "decode-cuda.json").exists()


@pytest.mark.slow
def test_the_whole_script(tmp_path):
    script = REPOSITORY / "benchmarks" / "cuda.sh"
    chosen = {"DEVICE": "cpu", "TINY": "1", "PYTHON": sys.executable}
    command = ["bash", str(script), str(tmp_path)]
    done = subprocess.run(command, env=os.environ | chosen, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("op", "append", "decode"):
        assert json.loads((tmp_path / f"{name}-cuda.json").read_text())["rows"]
