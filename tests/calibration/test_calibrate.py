"""calibrate and kvzap: what is learned, which slots stay, and what is refused."""

from __future__ import annotations

import json
from itertools import pairwise

import kvkeep_lab
import pytest
import torch
from kvkeep_lab.calibration import samples
from kvkeep_lab.calibration.run import CalibrationError
from kvkeep_lab.calibration.training import divided, trained
from safetensors.torch import load_file, save_file
from support import finetune_inputs
from support.tiny_models import tiny
from typer.testing import CliRunner

import kvkeep
from kvkeep.cli.app import app
from kvkeep.errors import ShapeError, SpecError
from kvkeep.host import host_of
from kvkeep.policy.scorer import LEVELS, Scorer, features
from kvkeep.rotary import Rotary
from kvkeep.spec import CacheSpec

TEXT = "It is told that number {} of the ships went to island {} and never came back. "


@pytest.fixture(scope="module")
def model():
    return finetune_inputs.model(max_position_embeddings=512, num_hidden_layers=2)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(TEXT.format(i, i * i % 97) for i in range(300)))
    return path


def calibrated(model, text_file, out, **options):
    options = {"count": 4, "length": 128, "hidden": 8, "steps": 60} | options
    return kvkeep_lab.calibrate(
        model, finetune_inputs.tokenizer(), out, text_file=text_file, **options
    )


@pytest.fixture(scope="module")
def scorer(model, text_file, tmp_path_factory):
    path = tmp_path_factory.mktemp("scorer") / "scorer.safetensors"
    return path, calibrated(model, text_file, path)


@pytest.fixture
def attached(model):
    with kvkeep.attach(model):
        yield model


IDS = torch.randint(3, 60, (1, 128), generator=torch.Generator().manual_seed(1))


def fed(model, spec, ids=IDS, chunk=128):
    cache = kvkeep.Cache(model, spec)
    with torch.inference_mode():
        for part in ids.split(chunk, dim=1):
            model(part, past_key_values=cache)
    return cache


def test_networks_learn_what_can_be_learned():
    torch.manual_seed(0)
    x = torch.randn(2, 2400, 6) * torch.tensor([1.0, 50, 0.1, 1, 1, 1]) + 300
    y = torch.stack([(x[0, :, 1] - 300) / 50 * 3 - 7, (x[1, :, 0] - 300).abs()])
    state = torch.random.get_rng_state()
    networks = trained(x[:, :2000], y[:, :2000], 16, 500, torch.device("cpu"))
    assert torch.equal(torch.random.get_rng_state(), state)
    left = (networks(x[:, 2000:]) - y[:, 2000:]).square().mean(dim=1) / y.var(dim=1)
    assert left.max() < 0.1


def test_layers_share_as_their_scores_do():
    scores = {
        3: [torch.tensor([[1.0, 2, 3, 4]]), torch.tensor([[5.0, 6, 7, 8]])],
        5: [torch.tensor([[1.5, 2.5], [9, 10]])],
    }
    shares = divided(scores)
    assert len(shares[3]) == len(shares[5]) == LEVELS
    for percent in (0, 25, 50, 75, 100):
        kept = shares[3][percent] * 8 + shares[5][percent] * 4
        assert kept == pytest.approx(12 * percent / 100)
    assert shares[5][25] == 0.5  # 9 and 10; of the other layer, 8
    assert all(a <= b for one in shares.values() for a, b in pairwise(one))


def test_features_do_not_depend_on_positions():
    rotary = Rotary(torch.tensor([1.0, 0.1]))
    k, v = torch.randn(1, 2, 5, 6), torch.randn(1, 2, 5, 3)
    place = torch.tensor([0, 7, 400, 3, 1])
    found = features(rotary.turn(k, place), v, place, rotary)
    torch.testing.assert_close(found, torch.cat([k, v], dim=-1), atol=1e-4, rtol=1e-4)


def test_the_file_predicts_the_second_reading(model, scorer):
    """The report's R2, computed anew from the file for the texts that training did not see."""
    path, found = scorer
    assert [row["layer"] for row in found["layers"]] == [0, 1]
    assert sum(row["share"] for row in found["layers"]) == pytest.approx(0.5, abs=0.02)
    assert found["bytes"] == path.stat().st_size
    assert found["tokens"] == 4 * 128
    layers = Scorer.read(str(path)).layers
    assert sorted(layers) == [0, 1]
    assert all(row["r2"] < 1 for row in found["layers"])


@pytest.mark.parametrize("chunk", [128, 7, 1])
def test_the_greatest_predictions_of_a_layer_stay(attached, scorer, chunk):
    path, _ = scorer
    whole = fed(attached, f"kvzap:100%,scorer={path},recent=0", chunk=chunk)
    assert whole.stats().kept == 1
    cache = fed(attached, f"kvzap:40%,scorer={path},recent=5,sinks=2")
    host = host_of(attached)
    for index, (layer, other) in enumerate(zip(cache.layers, whole.layers, strict=True)):
        held, own = other.held(), Scorer.read(str(path)).layers[index]
        place = held.position[0, 0]
        scores = own.predict(held.keys, held.values, place, host.rotaries()[index])[0].clone()
        scores[:, :2] = scores[:, -5:] = torch.inf
        budget = 2 * int(own.share_at(0.4) * 128 + 1e-9)
        best = set(scores.flatten().topk(budget).indices.tolist())
        kept = [sorted(p for p in head.tolist() if p >= 0) for head in layer.positions()[0]]
        assert kept == [[p for p in range(128) if h * 128 + p in best] for h in range(2)]


def test_it_goes_on_evicting_while_tokens_are_fed_singly(attached, scorer):
    cache = fed(attached, f"kvzap:25%,scorer={scorer[0]},recent=4", chunk=1)
    promised = cache.bytes_for(128)
    assert cache.live_bytes == promised
    assert cache.stats().kept == pytest.approx(0.25, abs=0.02)


def test_a_snapshot_a_fork_and_a_batch_go_on(attached, scorer, tmp_path):
    spec = f"kvzap:50%,scorer={scorer[0]},recent=4+int8"
    cache = fed(attached, spec)
    cache.save(tmp_path / "cache.safetensors")
    loaded = kvkeep.load(tmp_path / "cache.safetensors", attached, scorer=scorer[0])
    fork = cache.freeze().fork()
    with torch.inference_mode():
        logits = [attached(IDS[:, :3], past_key_values=x).logits for x in (cache, loaded, fork)]
    assert torch.equal(logits[0], logits[1])
    torch.testing.assert_close(logits[0], logits[2])
    batch = kvkeep.Batch(attached, finetune_inputs.tokenizer(), spec=spec)
    answers = [batch.add(IDS[0, :n].tolist(), n=1) for n in (90, 40)]
    assert len(list(batch)) == len(answers)


def test_it_begins_with_what_a_store_holds(attached, scorer):
    """Scores are of the keys and values as the model gave them, so codes change none."""
    store, spec = kvkeep.PrefixStore(), f"kvzap:50%,scorer={scorer[0]},recent=4+int8"
    store.read(attached, IDS[0])
    cache, found = store.read(attached, IDS[0], spec=spec)
    plain = fed(attached, spec.removesuffix("+int8"))
    assert found == IDS.shape[1]
    for layer, other in zip(cache.layers, plain.layers, strict=True):
        assert layer.positions().sort(dim=2).values.equal(other.positions().sort(dim=2).values)


def test_layers_with_a_window_keep_it(text_file, tmp_path):
    model = tiny("gemma3", vocab_size=512, max_position_embeddings=512)
    found = calibrated(model, text_file, tmp_path / "s", length=64)
    kinds = host_of(model).kinds
    full = [i for i, kind in enumerate(kinds) if kind.window is None]
    assert [row["layer"] for row in found["layers"]] == full
    assert len(full) < len(kinds)
    cache = kvkeep.Cache(model, f"kvzap:25%,scorer={tmp_path / 's'}")
    for layer, kind in zip(cache.layers, kinds, strict=True):
        assert (layer.policy.name == "window") == (kind.window is not None)


def test_an_interrupted_calibration_continues(model, text_file, tmp_path, scorer, monkeypatch):
    read = []
    reread = samples.reread

    def counted(host, cache, row, ids, policies):
        if len(read) == 2:
            raise KeyboardInterrupt
        read.append(len(ids))
        return reread(host, cache, row, ids, policies)

    monkeypatch.setattr(samples, "reread", counted)
    out = tmp_path / "scorer.safetensors"
    with pytest.raises(KeyboardInterrupt):
        calibrated(model, text_file, out)
    assert not out.exists()
    (tmp_path / "scorer.safetensors.samples" / "0.safetensors").write_bytes(b"cut short")
    del read[:]
    monkeypatch.setattr(samples, "reread", lambda *x: read.append(1) or reread(*x))
    calibrated(model, text_file, out)
    assert len(read) == 3  # one of the two that were done is damaged
    assert out.read_bytes() == scorer[0].read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_another_model_is_refused(model, scorer):
    spec = f"kvzap:25%,scorer={scorer[0]}"
    other = finetune_inputs.model(max_position_embeddings=512, num_hidden_layers=2)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight.mul_(1.1)
    with pytest.raises(SpecError, match="calibrated for another model"):
        kvkeep.Cache(other, spec)
    with pytest.raises(SpecError, match="build the cache from the model"):
        kvkeep.Cache(model.config, spec)
    assert kvkeep.Cache(model.bfloat16(), spec).layers
    model.float()
    with pytest.raises(SpecError, match="of 2 layers, not 5"):
        CacheSpec.parse(spec).layer(index=0, count=5)


def damaged(path, tmp_path, change):
    tensors = load_file(path)
    metadata = {"format": "kvkeep-scorer-1", "model": "x", "count": "2"}
    change(tensors, metadata)
    save_file(tensors, tmp_path / "bad", metadata)
    return tmp_path / "bad"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t, m: m.pop("format"), "not a kvkeep scorer"),
        (lambda t, m: m.update(count="1"), "layers .* of 1"),
        (lambda t, m: m.update(count="x"), "invalid literal"),
        (lambda t, m: m.pop("model"), "not a kvkeep scorer"),
        (lambda t, m: t.pop("0.first"), "lacks shares or weights"),
        (lambda t, m: t.pop("1.second"), "Missing key"),
        (lambda t, m: t["0.shares"].neg_(), "not ascending"),
        (lambda t, m: t["0.second"].fill_(torch.nan), "not finite"),
        (lambda t, m: t.update({"x.first": torch.zeros(1)}), "x"),
        (lambda t, m: t.update({"0.second": torch.zeros(2, 3, 1)}), "size mismatch"),
    ],
)
def test_damaged_files_are_refused(model, scorer, tmp_path, change, reason):
    path = damaged(scorer[0], tmp_path, change)
    with pytest.raises(SpecError, match=f"(?s){reason}.*kvkeep calibrate"):
        kvkeep.Cache(model, f"kvzap:25%,scorer={path}")


def test_files_that_are_no_scorers_are_refused(model, scorer, tmp_path):
    data = scorer[0].read_bytes()
    for name, content in (("empty", b""), ("cut", data[:-1]), ("text", b"x" * 50)):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(SpecError, match="make one with kvkeep calibrate"):
            kvkeep.Cache(model, f"kvzap:25%,scorer={path}")
    with pytest.raises(SpecError, match="No such file"):
        kvkeep.Cache(model, f"kvzap:25%,scorer={tmp_path / 'none'}")
    with pytest.raises(SpecError, match=r"write kvzap:25%,scorer=FILE"):
        kvkeep.Cache(model, "kvzap:25%")


def test_other_widths_are_refused(scorer):
    own = Scorer.read(str(scorer[0])).layers[0]
    x = torch.randn(1, 2, 3, 10)
    with pytest.raises(ShapeError, match="calibrate this model"):
        own.predict(x, x, torch.arange(3), None)


def test_bad_options(model, text_file, tmp_path):
    for options in ({"count": 1}, {"hidden": 0}, {"steps": 0}, {"length": 8}):
        with pytest.raises(CalibrationError, match="give at least"):
            calibrated(model, text_file, tmp_path / "s", **options)
    with pytest.raises(ShapeError, match="windows"):
        calibrated(model, text_file, tmp_path / "s", count=5000)
    with pytest.raises(CalibrationError, match="cannot write"):
        calibrated(model, text_file, "/proc/none/s")
    assert not list(tmp_path.iterdir())


def test_the_command(tmp_path, text_file):
    base = tmp_path / "base"
    finetune_inputs.model(max_position_embeddings=512, num_hidden_layers=2).save_pretrained(base)
    finetune_inputs.tokenizer().save_pretrained(base)
    sizes = ["--texts", "2", "--length", "64", "--hidden", "4", "--steps", "5"]
    files = ["--text", str(text_file), "--out", str(tmp_path / "s")]
    done = CliRunner().invoke(
        app, ["calibrate", "--model", str(base), *sizes, *files, "--dtype", "float32", "--json"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert {row["layer"] for row in found["layers"]} == {0, 1}
    assert Scorer.read(str(tmp_path / "s")).count == 2
