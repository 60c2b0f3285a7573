"""Training is held to a plain loop of torch and PEFT, and its figures to a plain forward."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from support import finetune_inputs
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

import kvkeep.finetune.trainer
from kvkeep import train
from kvkeep.errors import LossError, ShapeError, SpecError
from kvkeep.finetune.data import DataError, batched, order, pieces, read
from kvkeep.finetune.options import OptionError, Options
from kvkeep.finetune.processes import Processes
from kvkeep.finetune.run import finetune
from kvkeep.host import host_of

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH = 48


@pytest.fixture
def data(tmp_path):
    return finetune_inputs.write(tmp_path / "texts.jsonl", *finetune_inputs.texts())


@pytest.fixture(scope="module")
def tokenizer():
    return finetune_inputs.tokenizer()


def tuned(data, out, tokenizer, model=None, evaluation=None, holdout=None, **options):
    """A run, and the adapter's weights."""
    options = {"cache": "keep_all", "length": LENGTH, "lr": 1e-2, "rank": 4} | options
    given = finetune_inputs.model() if model is None else model
    options |= {"evaluation": evaluation, "holdout": holdout}
    result = finetune(given, tokenizer, data, out, Options(**options))
    return result, load_file(out / "adapter_model.safetensors")


def mean_loss(model, texts):
    """Of all learned tokens, by a forward without any cache."""
    total, count = 0.0, 0
    for ids, labels, _ in batched(texts, 1):
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[:, :-1]
        total += float(cross_entropy(logits[0], labels[0, 1:], reduction="sum"))
        count += int((labels[0, 1:] != -100).sum())
    return total / count


def test_the_weights_are_those_of_a_plain_loop(data, tmp_path, tokenizer):
    options = {"steps": 4, "batch": 2, "accumulate": 2, "warmup": 1, "clip": 0.5, "chunk": 16}
    result, weights = tuned(data, tmp_path / "out", tokenizer, **options, holdout=0)

    texts = pieces(read(data, tokenizer), LENGTH)
    assert len(texts) < 16  # the second epoch begins in the middle of a step
    model = finetune_inputs.model()
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=32, target_modules="all-linear"))
    parameters = [p for p in model.parameters() if p.requires_grad]
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0)
    places = [index for epoch in range(2) for index in order(len(texts), 0, epoch)]
    for step, share in enumerate([1 / 2, 1, 2 / 3, 1 / 3]):
        chosen = [texts[index] for index in places[4 * step : 4 * step + 4]]
        summed = 0.0
        for ids, labels, _ in batched(chosen, 1):
            logits = model(ids, use_cache=False).logits[0, :-1]
            summed = summed + cross_entropy(logits, labels[0, 1:], reduction="sum")
        mean = summed / sum(text.learned for text in chosen)
        optimizer.zero_grad()
        mean.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.param_groups[0]["lr"] = 1e-2 * share
        optimizer.step()
        assert result["train_loss"][step]["step"] == step + 1
        assert result["train_loss"][step]["loss"] == pytest.approx(mean.item(), rel=1e-4)
    assert result["tokens"] == sum(len(texts[index].ids) for index in places[:16])
    moved = 0.0
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(
                weights[name.replace(".default", "")], p.detach(), atol=1e-3, rtol=1e-3
            )
            moved = max(moved, (p - start[name]).abs().max().item())
    assert moved > 1e-2


def test_losses_of_texts_that_are_not_trained_on(data, tmp_path, tokenizer):
    options = {"steps": 5, "eval_every": 2, "batch": 2}
    result, _ = tuned(data, tmp_path / "out", tokenizer, **options, holdout=2)
    held = pieces(read(data, tokenizer)[-2:], LENGTH)
    assert len(held) == 3
    assert [one["step"] for one in result["eval_loss"]] == [2, 4, 5]
    assert result["untuned_loss"] == pytest.approx(
        mean_loss(finetune_inputs.model(), held), rel=1e-4
    )
    adapted = PeftModel.from_pretrained(finetune_inputs.model(), tmp_path / "out").eval()
    assert result["tuned_loss"] == result["eval_loss"][-1]["loss"]
    assert result["tuned_loss"] == pytest.approx(mean_loss(adapted, held), rel=1e-4)
    assert (result["out"], result["cache"]) == (
        str(tmp_path / "out"),
        "keep_all+plain@growing",
    )


def test_what_can_be_learned_is_learned(tmp_path, tokenizer):
    data = finetune_inputs.write(tmp_path / "d", *["abcdefgh" * 12] * 3)
    options = {"cache": "h2o:16", "length": 96, "steps": 8, "lr": 4e-2}
    result, _ = tuned(data, tmp_path / "out", tokenizer, **options)
    assert result["untuned_loss"] > 4
    assert result["tuned_loss"] < 1
    assert result["train_loss"][-1]["loss"] < 1


def test_the_loss_is_that_of_the_cache(data, tmp_path, tokenizer):
    result, _ = tuned(data, tmp_path / "a", tokenizer, cache="window:8", chunk=4, steps=1)
    held = pieces(read(data, tokenizer)[-1:], LENGTH)
    items = sum(text.learned for text in held)
    found = sum(
        float(
            train.loss(finetune_inputs.model(), b.ids, b.labels, cache="window:8", chunk=4,
                       num_items=items)
        )
        for b in batched(held, 1)
    )  # fmt: skip
    assert result["untuned_loss"] == pytest.approx(found, rel=1e-5)
    assert abs(found - mean_loss(finetune_inputs.model(), held)) > 1e-2


def test_dropout_is_drawn_from_the_seed(data, tmp_path, tokenizer):
    found = {}
    for name, options in {
        "none": {},
        "some": {"dropout": 0.3},
        "again": {"dropout": 0.3},
        "other": {"dropout": 0.3, "seed": 1},
    }.items():
        model = finetune_inputs.model()
        torch.rand(1)
        state = torch.get_rng_state()
        result, _ = tuned(data, tmp_path / name, tokenizer, model, steps=2, **options)
        found[name] = result["train_loss"]
        assert torch.get_rng_state().equal(state)
    assert found["some"] == found["again"]
    assert found["none"] != found["some"] != found["other"]


def test_what_each_batch_draws(data, tmp_path, tokenizer, monkeypatch):
    """Random numbers depend on step and batch, not on what was drawn before."""
    drawn, whole = [], kvkeep.finetune.trainer.backward

    def recording(*args, **options):
        drawn.append((torch.initial_seed(), options["chunk"]))
        torch.rand(len(drawn))
        return whole(*args, **options)

    monkeypatch.setattr(kvkeep.finetune.trainer, "backward", recording)
    options = {"steps": 6, "accumulate": 2, "cache": "h2o:16", "chunk": 14, "least_chunk": 5}
    options |= {"length": 16, "holdout": 0, "targets": "q_proj"}
    tuned(data, tmp_path / "a", tokenizer, **options)
    seeds, chunks = zip(*drawn, strict=True)
    assert len(set(seeds)) == 12
    assert chunks[::2] == chunks[1::2]
    assert len(set(chunks)) > 3
    assert set(chunks) <= set(range(5, 15))
    first = drawn.copy()
    drawn.clear()
    tuned(data, tmp_path / "b", tokenizer, **options)
    assert drawn == first
    with pytest.raises(OptionError, match="least_chunk is 17, but chunks have at most 16"):
        tuned(data, tmp_path / "c", tokenizer, cache="h2o:16", least_chunk=17)


def test_offloading_is_refused_where_nothing_can_be_offloaded(data, tmp_path, tokenizer):
    with pytest.raises(OptionError, match="nothing can be offloaded from the CPU"):
        tuned(data, tmp_path / "out", tokenizer, offload=True)
    with pytest.raises(OptionError, match=r"needs torch\.distributed; call init_process_group"):
        Processes(torch.device("meta"), Options(offload=True))


def test_evaluation_has_no_dropout(data, tmp_path, tokenizer):
    plain, _ = tuned(data, tmp_path / "a", tokenizer, steps=1)
    dropped, _ = tuned(data, tmp_path / "b", tokenizer, steps=1, dropout=0.5)
    assert plain["untuned_loss"] == dropped["untuned_loss"]
    model = finetune_inputs.model()
    result, _ = tuned(data, tmp_path / "c", tokenizer, model, steps=1, dropout=0.5)
    held = pieces(read(data, tokenizer)[-1:], LENGTH)
    assert not model.training
    assert result["tuned_loss"] == pytest.approx(mean_loss(model, held), rel=1e-4)


def test_epochs_take_each_piece_as_often(data, tmp_path, tokenizer):
    texts = pieces(read(data, tokenizer), LENGTH)
    options = {"epochs": 2, "batch": 2, "accumulate": 2}
    result, _ = tuned(data, tmp_path / "out", tokenizer, **options, holdout=0)
    assert result["tokens"] == 2 * sum(len(text.ids) for text in texts)
    assert result["steps"] == len(result["train_loss"]) == -(-2 * len(texts) // 4)
    assert 2 * len(texts) % 4  # the last step has fewer
    once, _ = tuned(data, tmp_path / "once", tokenizer, holdout=0)
    assert once["steps"] == len(texts)
    assert once["untuned_loss"] is once["tuned_loss"] is None
    assert once["eval_loss"] == []


def test_what_waits_in_a_file(data, tmp_path, tokenizer, monkeypatch):
    spilled, directory = [], tmp_path / "spill"
    directory.mkdir()
    write = kvkeep.files.offload.Offload._write
    monkeypatch.setattr(
        kvkeep.files.offload.Offload,
        "_write",
        lambda self, x: spilled.append(self._directory) or write(self, x),
    )
    options = {"steps": 2, "cache": "h2o:16"}
    _, held = tuned(data, tmp_path / "a", tokenizer, **options)
    assert not spilled
    _, found = tuned(data, tmp_path / "b", tokenizer, **options, host_bytes=0, spill=str(directory))
    assert set(spilled) == {str(directory)}
    assert found.keys() == held.keys()
    assert all(found[name].equal(held[name]) for name in held)


def test_another_file_to_evaluate_on(data, tmp_path, tokenizer):
    other = finetune_inputs.write(tmp_path / "other", "Quite another text.")
    result, _ = tuned(data, tmp_path / "out", tokenizer, evaluation=other, steps=1)
    held = pieces(read(other, tokenizer), LENGTH)
    assert result["untuned_loss"] == pytest.approx(
        mean_loss(finetune_inputs.model(), held), rel=1e-4
    )
    with pytest.raises(OptionError, match="give one of them"):
        tuned(data, tmp_path / "b", tokenizer, evaluation=other, holdout=1)


def test_a_single_document_is_trained_on(tmp_path, tokenizer):
    data = finetune_inputs.write(tmp_path / "d", "One document.")
    result, _ = tuned(data, tmp_path / "out", tokenizer, steps=1)
    assert result["tuned_loss"] is None
    assert result["tokens"] == 13
    with pytest.raises(OptionError, match=r"a holdout of 1 documents, but .* has 1; .* at most 0"):
        tuned(data, tmp_path / "b", tokenizer, holdout=1)


def test_a_loss_that_is_not_finite_ends_the_run(data, tmp_path, tokenizer):
    options = {"steps": 4, "save_every": 1, "lr": 1e30}
    with pytest.raises(LossError, match=r"^step 2: the loss is nan in chunk 0, columns"):
        tuned(data, tmp_path / "out", tokenizer, **options, holdout=0)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoint-1"]
    weights = load_file(tmp_path / "out/checkpoint-1/adapter_model.safetensors")
    assert all(bool(x.isfinite().all()) for x in weights.values())
    with pytest.raises(LossError, match="evaluation after step 1: the loss is nan"):
        tuned(data, tmp_path / "b", tokenizer, **options, eval_every=1)


def test_a_gradient_that_is_not_finite_changes_nothing(data, tmp_path, tokenizer, monkeypatch):
    model, calls, weights = finetune_inputs.model(), [], []
    whole = kvkeep.finetune.trainer.backward

    def failing(tuned, *args, **options):
        found = whole(tuned, *args, **options)
        trained = [p for p in tuned.parameters() if p.requires_grad]
        calls.append(1)
        if len(calls) == 2:
            weights.extend(p.detach().clone() for p in trained)
            trained[0].grad[0] = torch.inf
        return found

    monkeypatch.setattr(kvkeep.finetune.trainer, "backward", failing)
    with pytest.raises(LossError, match="step 2: the norm of the gradients is inf"):
        tuned(data, tmp_path / "out", tokenizer, model, steps=4)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.equal(before) for p, before in zip(trained, weights, strict=True))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"steps": 0}, OptionError, "steps is 0; give at least 1"),
        ({"batch": -1}, OptionError, "batch is -1"),
        ({"clip": float("nan")}, OptionError, "clip is nan"),
        ({"lr": 0.0}, OptionError, "lr is 0.0; give a number above 0"),
        ({"dropout": 1.0}, OptionError, "dropout is 1.0"),
        ({"decay": "step"}, OptionError, "decay is 'step'; give linear or cosine"),
        ({"targets": ","}, OptionError, "no targets"),
        ({"full": True}, OptionError, "rank of LoRA, but all weights are trained; leave LoRA"),
        ({"targets": "q_prj"}, OptionError, "no LoRA for targets 'q_prj'.*use all-linear"),
        ({"steps": 1, "epochs": 1}, OptionError, "give one of them"),
        ({"offload": True, "context_parallel": 2}, OptionError, "give either offload or context"),
        ({"context_parallel": 2}, OptionError, "2 processes for each text, but there are 1"),
        ({"steps": 3, "warmup": 3}, OptionError, "there are 3 in all; use a warm-up of at most 2"),
        ({"length": 300}, OptionError, "the model holds 256"),
        ({"length": 9, "cache": "windw:8"}, SpecError, "did you mean 'window'"),
        ({"cache": "h2o:8", "chunk": 9}, ShapeError, "use chunk=8 or less"),
    ],
)
def test_options_that_cannot_be(data, tmp_path, tokenizer, options, error, says):
    with pytest.raises(error, match=says):
        tuned(data, tmp_path / "out", tokenizer, **options)


def test_float16_is_refused(data, tmp_path, tokenizer):
    with pytest.raises(OptionError, match="load it in bfloat16 or float32"):
        tuned(data, tmp_path / "out", tokenizer, finetune_inputs.model().half())


def test_answers_out_of_reach(tmp_path, tokenizer):
    ends = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "A"}]
    data = finetune_inputs.write(tmp_path / "d", ends, "x")
    with pytest.raises(DataError, match="d: nothing to learn in pieces of 48 tokens"):
        tuned(data, tmp_path / "out", tokenizer)  # the holdout is of a single token
    found = finetune_inputs.write(tmp_path / "e", ends, "xy")
    assert tuned(found, tmp_path / "out", tokenizer)[0]["steps"] == 1


def test_modules_by_name(data, tmp_path, tokenizer):
    _, weights = tuned(data, tmp_path / "out", tokenizer, targets="q_proj, v_proj", steps=1)
    assert {name.split(".")[-3] for name in weights} == {"q_proj", "v_proj"}


def test_chunk_and_length_fit_cache_and_model():
    model = finetune_inputs.model()
    found = Options(cache="h2o:64").checked().for_model(host_of(model))
    assert (found.chunk, found.length) == (64, 256)
    found = Options(cache="keep_all", length=9).checked().for_model(host_of(model))
    assert (found.chunk, found.length) == (1024, 9)
    assert Options(cache="h2o:2048").for_model(host_of(model)).chunk == 1024


def test_rates(data, tmp_path, tokenizer, monkeypatch):
    rates, step = [], torch.optim.AdamW.step

    def recording(optimizer, *args):
        rates.append(optimizer.param_groups[0]["lr"])
        return step(optimizer, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", recording)
    options = {"targets": "q_proj", "holdout": 0, "length": 16}
    tuned(data, tmp_path / "linear", tokenizer, lr=1.0, warmup=2, steps=6, **options)
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25])
    rates.clear()
    tuned(data, tmp_path / "cosine", tokenizer, lr=2.0, decay="cosine", steps=4, **options)
    assert rates == pytest.approx([2, 1 + 0.5**0.5, 1, 1 - 0.5**0.5])


def test_where_figures_are_sent(data, tmp_path, tokenizer, monkeypatch):
    sent = []

    class Noting(TrainerCallback):
        def on_log(self, args, state, control, logs, **_):
            sent.append(logs)

    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "notes", Noting)
    result, _ = tuned(data, tmp_path / "a", tokenizer, steps=2, report_to="notes")
    assert [x["loss"] for x in sent if "loss" in x] == [x["loss"] for x in result["train_loss"]]
    assert [x["eval_loss"] for x in sent if "eval_loss" in x][-1] == result["tuned_loss"]
    with pytest.raises(ValueError, match="nowhere is not supported, only"):
        tuned(data, tmp_path / "b", tokenizer, report_to="nowhere")
