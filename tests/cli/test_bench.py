"""`kvkeep bench`, as a user calls it; what is measured is the benchmarks' own affair."""

from __future__ import annotations

import sys
from functools import partial
from itertools import product
from mmap import PAGESIZE
from pathlib import Path
from shutil import which

import pytest
import torch
from kvkeep_lab.bench.random_model import RANDOM
from kvkeep_lab.bench.resident import in_core
from support import command_line, finetune_inputs
from support.command_line import last_line
from support.demo_stand_in import LAYERS, stand_in

from kvkeep.attention import native
from kvkeep.errors import UnsupportedError
from kvkeep.storage.allocate import reserve

run = partial(command_line.run, "bench")

RECORDED = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.usefixtures("quick_bounds")


@pytest.fixture
def _model(stand_in_home, monkeypatch):
    """A fast demo model."""
    monkeypatch.setenv("KVKEEP_HOME", stand_in_home)


def test_append():
    options = ("--device", "cpu", "--tokens", "8,16", "--turns", "1", "--json")
    result = last_line(run("append", *options))
    assert [row["tokens"] for row in result["rows"]] == [8, 16]
    assert all(row["update_ratio"] > 0 and row["step_ratio"] > 0 for row in result["rows"])
    assert result["shape"] == {"dtype": "float32", "B": 1, "Hq": 8, "H": 8, "D": 128}
    chosen = ("--batches", "1,2", "--layouts", "growing,fixed")
    rows = last_line(run("append", *options, *chosen))["rows"]
    assert [(row["tokens"], row["rows"]) for row in rows] == [(8, 1), (16, 1), (8, 2), (16, 2)]
    assert all(row["fixed_step_us"] > 0 and "update_ratio" not in row for row in rows)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's counters")
@pytest.mark.slow
def test_memory_of_specs_for_types_of_layers(tmp_path, monkeypatch):
    finetune_inputs.model("gemma3").save_pretrained(tmp_path)
    finetune_inputs.tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr("kvkeep_lab.bench.memory.together", lambda calls: [f() for f in calls])
    typed = "full_attention=keep_all;sliding_attention=window:6"
    sizes = ("--tokens", "16", "--prompt", "12", "--chunk", "8", "--model", str(tmp_path))
    rows = last_line(run("memory", "--specs", f"{typed}; hf-dynamic", *sizes, "--json"))["rows"]
    assert [row["spec"] for row in rows] == [typed] * 2 + ["hf-dynamic"] * 2
    assert all(row["live_bytes"] > 0 for row in rows)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's counters")
@pytest.mark.slow
@pytest.mark.parametrize("size", ["small", "real"])
def test_memory(tmp_path, monkeypatch, size):
    layers, heads, width = 30, 3, 64
    if size == "small":  # but its slots outweigh what else comes and goes
        layers, heads, width = 4, 8, 128
        shape = {"num_attention_heads": 8, "num_key_value_heads": heads, "head_dim": width}
        home = stand_in(tmp_path, num_hidden_layers=layers, **shape)["KVKEEP_HOME"]
        monkeypatch.setenv("KVKEEP_HOME", home)
    specs = ["keep_all"]  # each takes a process, twice
    if size == "real":
        specs += ["adakv(h2o:256)", "h2o:256", "h2o:256+int4", "window:256", "hf-dynamic"]
    sizes = ("--tokens", "630", "--prompt", "600", "--chunk", "250")
    rows = last_line(run("memory", "--specs", ";".join(specs), *sizes, "--json"))["rows"]
    expected = [(spec, chunked) for spec in specs for chunked in (False, True)]
    assert [(row["spec"], row["chunked"]) for row in rows] == expected
    for row in rows:
        assert 0.95 * row["live_bytes"] < row["resident_bytes"]
        assert row["live_bytes"] <= row["allocated_bytes"]
        assert row["ratio"] == row["resident_bytes"] / row["live_bytes"]
        if row["spec"] == "keep_all":
            assert row["live_bytes"] == layers * 630 * (2 * heads * width * 4 + 4)
            assert row["ratio"] < 1.05
        else:
            # Each of up to 8 planes takes whole pages, which counts where slots are few bytes.
            pages = layers * 8 * PAGESIZE if "+" in row["spec"] else 0
            assert row["resident_bytes"] < 1.25 * row["live_bytes"] + pages
            assert row["allocated_bytes"] < 1.25 * row["live_bytes"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's counters")
def test_pages_in_core():
    def reserved(megabytes: int) -> torch.Tensor:
        return reserve((megabytes << 20,), torch.uint8, torch.device("cpu"))

    untouched, touched = reserved(64), reserved(8)
    touched[: 4 << 20] = 1
    assert in_core([untouched]) < 1 << 20
    assert abs(in_core([untouched, touched, touched[5:9]]) - (4 << 20)) < 1 << 20


@pytest.mark.usefixtures("_model")
def test_save(tmp_path):
    options = ("--tokens", "60", "--turns", "1", "--directory", str(tmp_path), "--json")
    rows = last_line(run("save", *options))["rows"]
    assert [row["system"] for row in rows] == ["keep_all", "keep_all+int8"]
    assert all(0.9 < row["file_ratio"] < 1.5 and row["first_token_s"] > 0 for row in rows)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("_model")
def test_fork():
    sizes = ("--tokens", "100", "--forks", "3", "--new", "4", "--rows", "5")
    result = last_line(run("fork", *sizes, "--turns", "1", "--json"))
    one = LAYERS * (2 * 3 * 64 * 4 + 4)
    assert result["forks"]["bytes"] >= 112 * one
    shared, separate = result["rows"]
    assert shared["bytes"] == (100 + 5) * one
    assert separate["bytes"] == 5 * 101 * one
    assert all(row["step_ms"] > 0 < row["attention_ms"] for row in result["rows"])


@pytest.mark.slow
@pytest.mark.usefixtures("_model")
def test_reuse():
    sizes = ("--documents", "3", "--shortest", "20", "--longest", "40", "--answer", "5")
    rows = {
        row["mode"]: row
        for row in last_line(run("reuse", *sizes, "--turns", "1", "--json"))["rows"]
    }
    redis = [mode for mode in ("redis",) if which("redis-server") or which("valkey-server")]
    assert list(rows) == [
        "cold",
        "prefix",
        "disk",
        *redis,
        "blocks:0",
        "blocks:boundary:32",
        "blocks:0.15",
        "blocks:all",
    ]
    for mode in ("cold", "prefix", "disk", *redis, "blocks:all"):
        assert rows[mode]["kl"] < 1e-5
        assert rows[mode]["top1"] == 1
    assert rows["blocks:0"]["kl"] > 1e-3
    assert all(row["ttft_s"] > 0 and row["speedup"] > 0 for row in rows.values())


def test_reuse_with_a_random_model_of_sliding_windows(monkeypatch):
    tiny = {"hidden_size": 32, "head_dim": 8, "intermediate_size": 48, "sliding_window": 8}
    monkeypatch.setitem(RANDOM, "random-windowed", RANDOM["random-windowed"] | tiny)
    sizes = ("--documents", "3", "--shortest", "20", "--longest", "40", "--answer", "3")
    found = last_line(run("reuse", "--model", "random-windowed", *sizes, "--turns", "1", "--json"))
    rows = {row["mode"]: row for row in found["rows"]}
    assert list(rows)[:2] == ["cold", "prefix"]
    assert list(rows)[-2:] == ["blocks:0", "blocks:all"]
    assert rows["prefix"]["kl"] < 1e-5


@pytest.mark.parametrize(
    ("dtype", "queries"), [pytest.param("bf16", "1", marks=pytest.mark.slow), ("float32", "5,20")]
)
def test_op(dtype, queries):
    shape = ("--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--queries", queries)
    sizes = ("--lengths", "16,300", "--turns", "1", "--device", "cpu")
    result = last_line(run("op", "--dtype", dtype, *shape, *sizes, "--json"))
    assert {"sdpa", "torch-sdpa"} <= {row["backend"] for row in result["rows"]}
    asked = {(row.get("queries"), row["length"]) for row in result["rows"]}
    listed = {(5, 16), (5, 300), (20, 300)}  # 20 queries do not fit 16 tokens
    assert asked == ({(None, 16), (None, 300)} if queries == "1" else listed)
    for row in result["rows"]:
        size = 2 if dtype == "bf16" else 4
        bytes_read = 2 * 2 * row["length"] * 16 * size
        assert row["gb_per_s"] == pytest.approx(bytes_read / row["median_us"] / 1e3)
    assert result["read_gb_per_s"] > 0


@pytest.mark.skipif(not native.available, reason=native.reason)
def test_op_of_latents():
    shape = ("--heads", "4,6", "--kv-heads", "1", "--head-dim", "48", "--latent", "32")
    options = ("--lengths", "300", "--turns", "1", "--device", "cpu", "--json")
    result = last_line(run("op", *shape, *options))
    systems = ["native", "sdpa", "torch-folded", "torch-math"]
    assert [(row["heads"], row["backend"]) for row in result["rows"]] == [
        (heads, system) for heads in (4, 6) for system in systems
    ]
    for row in result["rows"]:
        assert row["error"] < 1e-2
        assert row["gb_per_s"] * row["median_us"] == pytest.approx(300 * 48 * 2 / 1e3)
        operations = 2 * row["heads"] * 300 * (48 + 32)
        assert row["gflop_per_s"] * row["median_us"] == pytest.approx(operations / 1e3)
        shares = (
            row["gb_per_s"] / result["read_gb_per_s"],
            (row["gflop_per_s"] / result["product_gflop_per_s"]),
        )
        assert row["of_bound"] == pytest.approx(max(shares))


@pytest.mark.skipif(not native.available, reason=native.reason)
def test_op_of_codecs():
    shape = ("--heads", "4", "--kv-heads", "2", "--head-dim", "64", "--lengths", "300")
    options = (
        "--codecs",
        "plain,int8,int8/int4,int4,kivi",
        "--turns",
        "1",
        "--device",
        "cpu",
        "--json",
    )
    rows = last_line(run("op", *shape, *options))["rows"]
    sizes = {  # of 2 heads x 300 slots
        row["codec"]: row["gb_per_s"] * row["median_us"] * 1e3 / 600
        for row in rows
        if row["backend"] == "native"
    }
    blocks = (256 * 76 + 44 * 256) / 300  # eight blocks of 32 tokens, and the others plain
    assert sizes == pytest.approx(
        {"plain": 256, "int8": 2 * 66, "int8/int4": 66 + 36, "int4": 2 * 36, "kivi": blocks}
    )
    assert all(row["error"] < 0.02 for row in rows)  # with the centre of int4's keys
    assert [row["codec"] for row in rows if row["backend"] != "native"] == ["plain"] * 4


@pytest.mark.slow
@pytest.mark.skipif(not native.available, reason=native.reason)
def test_linear():
    options = ("--shapes", "576x192,300x400", "--rows", "1,3", "--turns", "1", "--json")
    result = last_line(run("linear", *options))
    assert [
        (row["inputs"], row["outputs"], row["rows"], row["system"]) for row in result["rows"]
    ] == [
        (*shape, rows, system)
        for shape in ((576, 192), (300, 400))
        for rows in (1, 3)
        for system in ("kvkeep", "torch")
    ]
    for row in result["rows"]:
        size = row["inputs"] * row["outputs"] * 2
        assert row["gb_per_s"] == pytest.approx(size / row["median_us"] / 1e3)
        assert row["of_read"] == pytest.approx(row["gb_per_s"] / result["read_gb_per_s"])
        assert (row["of_one"] == 1) == (row["rows"] == 1)


@pytest.mark.skipif(not native.available, reason=native.reason)
def test_op_with_the_mass():
    options = ("--heads", "8", "--rows", "2", "--lengths", "300", "--turns", "1", "--device", "cpu")
    rows = last_line(run("op", "--mass", "--against", "torch-folded", *options, "--json"))["rows"]
    assert [(row["backend"], row["mass"]) for row in rows] == [
        ("native", True),
        ("torch-folded", False),
    ]


@pytest.mark.slow
def test_decode_with_random_weights():
    sizes = ("--model", "random-tiny", "--contexts", "8,20", "--turns", "1")
    result = run("decode", *sizes, "--device", "cpu", "--ways", "default,graph")
    assert result.exit_code == 0
    assert "microseconds per token held: kvkeep" in result.stdout
    assert "kvkeep+graph" in result.stdout


@pytest.mark.usefixtures("_model")
def test_decode():
    options = ("--dtype", "bf16", "--contexts", "8,200", "--turns", "1", "--device", "cpu")
    options += ("--ways", "default", "--json")  # test_decode_of_several_specs compiles
    result = last_line(run("decode", *options))
    assert [(row["system"], row["context"]) for row in result["rows"]] == [
        (system, context) for context in (8, 200) for system in ("kvkeep", "hf-dynamic")
    ]
    assert all(row["agrees"] for row in result["rows"])
    median = {(row["system"], row["context"]): row["median_ms"] for row in result["rows"]}
    for system, slope in result["slope_us_per_token"].items():
        rise = (median[system, 200] - median[system, 8]) * 1e3
        assert slope == pytest.approx(rise / 192)
    per_token = 2 * LAYERS * 3 * 64 * 2
    floor = per_token / result["read_gb_per_s"] / 1e3
    assert result["bandwidth_floor_us_per_token"] == pytest.approx(floor)


@pytest.mark.slow
@pytest.mark.usefixtures("_model")
def test_decode_by_litgpt():
    pytest.importorskip("litgpt")
    options = ("--host", "litgpt", "--contexts", "8,200", "--turns", "1", "--device", "cpu")
    result = last_line(run("decode", *options, "--specs", "keep_all;h2o:64", "--json"))
    assert result["host"] == "litgpt"
    rows = {(row["system"], row["spec"], row["context"]): row for row in result["rows"]}
    ours = product(("kvkeep", "kvkeep-linears"), ("keep_all", "h2o:64"))
    assert set(rows) == {(*name, held) for name in (*ours, ("litgpt", None)) for held in (8, 200)}
    for held in (8, 200):
        assert rows["kvkeep", "keep_all", held]["agrees"]
        assert rows["litgpt", None, held]["error"] == 0
        assert rows["litgpt", None, held]["median_ms"] > 0
    for wrong in (("--ways", "graph"), ("--against", "hf-dynamic"), ("--host", "jax")):
        assert run("decode", *options, *wrong).exit_code == 2


@pytest.mark.slow
@pytest.mark.usefixtures("_model")
def test_decode_of_several_specs():
    specs = ("--specs", "h2o:8+int8;keep_all", "--device", "cpu")
    rows = last_line(run("decode", "--contexts", "20", "--turns", "1", *specs, "--json"))["rows"]
    ours = product(("kvkeep", "kvkeep+compile"), ("h2o:8+int8", "keep_all"))
    found = {(row["system"], row["spec"]) for row in rows}
    assert found == {*ours, ("hf-dynamic", None)}


@pytest.mark.usefixtures("_model")
def test_prefill():
    result = last_line(run("prefill", "--lengths", "32", "--turns", "1", "--json"))
    ours, theirs = result["rows"]
    assert (ours["system"], theirs["system"]) == ("kvkeep", "hf-dynamic")
    assert ours["ratio"] == pytest.approx(theirs["median_s"] / ours["median_s"])
    assert theirs["ratio"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_plot(tmp_path, suffix):
    picture = tmp_path / f"append.{suffix}"
    options = ("--device", "cpu", "--turns", "1", "--plot", str(picture))
    assert run("append", "--tokens", "8,16", *options).exit_code == 0
    assert picture.read_bytes().startswith((b"\x89PNG", b"<?xml"))
    picture.unlink()
    assert run("op", "--lengths", "16,32", "--against", "torch-sdpa", *options).exit_code == 0
    assert picture.exists()


def test_recorded_results_are_drawn(tmp_path):
    """Also what was printed behind other lines; a panel for each chosen figure of each record."""
    picture = tmp_path / "recorded.svg"
    record = tmp_path / "op.json"
    record.write_text("a line before\n" + (RECORDED / "op.json").read_text())
    records = (str(RECORDED / "decode.json"), str(record))
    result = run("draw", *records, "--columns", "median_ms,median_us", "--plot", str(picture))
    assert result.exit_code == 0, result.stderr
    assert picture.read_text().count('<g id="axes_') == 2
    every = tmp_path / "every.svg"
    assert run("draw", str(record), "--plot", str(every)).exit_code == 0
    assert every.read_text().count('<g id="axes_') == 2  # median_us, gb_per_s


@pytest.mark.parametrize(
    ("record", "options", "says"),
    [
        ("{}", (), "is no recorded benchmark (KeyError"),
        ("text", (), "is no recorded benchmark (JSONDecodeError"),
        ('{"rows": [], "environment": {}}', (), "(ValueError: it has no rows)"),
        (None, (), "is no recorded benchmark (FileNotFoundError"),
        ((RECORDED / "op.json").read_text(), ("--columns", "median_ms"), "it has backend, length"),
    ],
)
def test_what_is_no_record_is_not_drawn(tmp_path, record, options, says):
    path, picture = tmp_path / "record.json", tmp_path / "picture.svg"
    if record is not None:
        path.write_text(record)
    result = run("draw", str(path), "--plot", str(picture), *options)
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.replace("│", " ").split())
    assert not picture.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("append", "--tokens", "8,x"), "whole numbers"),
        (("memory", "--prompt", "9", "--tokens", "9"), "must be below"),
        (("memory", "--specs", "full_attention=h3o:5;sliding_attention=keep_all"), "no policy"),
        (("memory", "--prompt", "500"), "--chunk 500 must be below"),
        (("op", "--heads", "7", "--kv-heads", "2"), "must be a multiple"),
        (("op", "--queries", "4,300", "--lengths", "256"), "300 queries; give 1 to 256"),
        (("op", "--head-dim", "64", "--latent", "64"), "--latent 64 must be below --head-dim 64"),
        (("op", "--latent", "64", "--codecs", "int8/int4"), "give int8 alone"),
        (("op", "--dtype", "int3"), "no dtype 'int3'"),
        (("op", "--codecs", "int9"), "no codec 'int9'"),
        (("op", "--plot", "x.foo"), "must end in ."),
        (("op", "--plot", "nowhere/x.png"), "nowhere/x.png cannot be written"),
        (("decode", "--contexts", "0"), "whole numbers"),
        (("linear", "--shapes", "5x"), "give layers such as"),
        (("linear", "--dtype", "float64"), "no "),
        (("op", "--device", "abacus"), "no device 'abacus' here"),
        (("op", "--against", "abacus"), "no attention 'abacus'; there is torch-sdpa"),
        (("decode", "--against", "vllm"), "no system 'vllm'"),
        (("decode", "--ways", "fast"), "no way 'fast'"),
        (("decode", "--specs", "h3o:5"), "did you mean 'h2o'"),
        (("prefill", "--lengths", ""), "whole numbers"),
        (("prefill", "--model", "smollm2-135n"), "did you mean 'smollm2-135m'"),
    ],
)
def test_bad_input(arguments, says):
    result = run(*arguments)
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.replace("│", " ").split())


def test_llama_cpp_refuses_other_architectures():
    llama_cpp = pytest.importorskip("kvkeep_lab.bench.llama_cpp")
    pytest.importorskip("llama_cpp")
    from transformers import GPT2Config, GPT2LMHeadModel

    with pytest.raises(UnsupportedError, match="Llama models"):
        llama_cpp.require(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1)))


def test_what_llama_cpp_is_given(tmp_path):
    import gguf
    import torch
    from kvkeep_lab.bench.llama_cpp import write_gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=48,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).bfloat16()
    write_gguf(model, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == len(list(model.parameters()))
    rotated = model.model.layers[1].self_attn.k_proj.weight.detach()
    stored = torch.from_numpy(tensors["blk.1.attn_k.weight"].data.copy()).view(torch.bfloat16)
    # Rows i and i + 4 of a head of width 8 are a pair in transformers, neighbours in llama.cpp.
    pairs = stored.view(2, 4, 2, 32)
    assert pairs[:, :, 0].equal(rotated.view(2, 2, 4, 32)[:, 0])
    assert pairs[:, :, 1].equal(rotated.view(2, 2, 4, 32)[:, 1])
    kept = torch.from_numpy(tensors["output.weight"].data.copy()).view(torch.bfloat16)
    assert kept.view(48, 32).equal(model.lm_head.weight.detach())
