"""lm-evaluation-harness with kvkeep: its `hf` model, the model `kvkeep`, and a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from support.live_server import serving
from support.short_tokenizer import SIZE, short_tokenizer
from support.tiny_models import tiny

import kvkeep
from kvkeep.errors import UnsupportedError

lm_eval = pytest.importorskip("lm_eval")

pytestmark = pytest.mark.slow  # lm_eval takes seconds to import

TASKS = {
    "local_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "local_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{choices[answer]}}"
metric_list: [{metric: word_perplexity}]
""",
    "local_answer": r"""
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\n\n"], max_gen_toks: 6}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}
QUESTIONS = [
    ("The lamp of the tower burns", ["green", "red and bright", "no more"], 0),
    ("The keeper has", ["a cat", "two small boats", "three"], 1),
    ("Ships come in the morning and leave", ["at night", "never", "in the fog"], 0),
]
STEP = "h2o:12,recent=6,step=4"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    rows = [dict(zip(("question", "choices", "answer"), one, strict=True)) for one in QUESTIONS]
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    about = f"dataset_path: json\ndataset_kwargs: {{data_files: {data}}}\ntest_split: train\n"
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{about}{task}")
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    tiny("llama", vocab_size=SIZE, max_position_embeddings=512, eos_token_id=2).save_pretrained(
        folder
    )
    short_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(model_folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_folder).eval()


def answers(lm, tasks, names=tuple(TASKS), model_args=None):
    """The answers to all requests of each task, and the results."""
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        lm,
        model_args=model_args,
        tasks=list(names),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        num_fewshot=2,
        bootstrap_iters=0,
    )
    said = {name: [row["filtered_resps"] for row in found["samples"][name]] for name in names}
    return said, found


def numbers(said):
    choices = [number for row in said["local_choice"] for number, _ in row]
    return [*choices, *(row[0] for row in said["local_text"])]


def hf(model, batch_size=1):
    from lm_eval.models.huggingface import HFLM

    return HFLM(
        pretrained=model, tokenizer=short_tokenizer(), batch_size=batch_size, max_length=256
    )


@pytest.fixture(scope="module")
def plain(model, tasks):
    return answers(hf(model), tasks)[0]


@pytest.mark.parametrize("batch_size", [1, 4, "auto:2"])
def test_an_attached_model_in_hf(model, tasks, plain, batch_size):
    with kvkeep.attach(model):
        said, _ = answers(hf(model, batch_size), tasks)
    assert numbers(said) == pytest.approx(numbers(plain), abs=2e-4)
    assert said["local_answer"] == plain["local_answer"]


@torch.inference_mode()
def in_pieces(model, ids, context, size):
    """The loglikelihood of the tokens after a context, fed in pieces of some tokens."""
    cache, logits = kvkeep.Cache(model, STEP), []
    for piece in torch.split(ids[:, :-1], size, dim=1):
        logits.append(model(piece, past_key_values=cache).logits[0])
    scores = torch.cat(logits).float().log_softmax(-1)
    return float(scores[range(context - 1, ids.shape[1] - 1), ids[0, context:]].sum())


def test_a_budget_with_a_step_is_told_apart(model, tasks, plain):
    tokenizer = short_tokenizer()
    with kvkeep.attach(model, STEP):
        said, found = answers(hf(model, 4), tasks)
        (first, *_) = found["samples"]["local_choice"]
        expected = []
        for text, choice in first["arguments"]:
            ids = tokenizer(text + choice, return_tensors="pt").input_ids
            expected.append(in_pieces(model, ids, len(tokenizer(text).input_ids), 4))
    assert numbers(said)[:3] == pytest.approx(expected, abs=2e-4)
    assert numbers(said) != pytest.approx(numbers(plain), abs=1e-2)


@pytest.mark.parametrize("spec", ["keep_all", STEP])
def test_local_completions_of_a_server(model, tasks, spec):
    """Several requests at once, of several prompts each, say what the attached model says."""
    with kvkeep.attach(model, spec):
        expected, _ = answers(hf(model), tasks)
    with serving(model, short_tokenizer(), cache=spec) as (_, client):
        about = {
            "model": "tiny",
            "tokenizer": model.name_or_path,
            "base_url": f"{client.base_url}completions",
            "num_concurrent": 3,
            "batch_size": 2,
            "max_retries": 1,
        }
        said, found = answers("local-completions", tasks, model_args=about)
    assert numbers(said) == pytest.approx(numbers(expected), abs=2e-4)
    assert said["local_answer"] == expected["local_answer"]
    assert found["config"]["model_args"]["model"] == "tiny"


def test_the_model_kvkeep(model_folder, model, tasks):
    from kvkeep_lab.evals import harness  # registers it

    assert lm_eval.api.registry.get_model("kvkeep") is harness.KVKeepLM
    with kvkeep.attach(model, STEP):
        expected, _ = answers(hf(model), tasks)
    about = {"pretrained": str(model_folder), "cache": STEP, "device": "cpu", "batch_size": 3}
    said, found = answers("kvkeep", tasks, model_args=about)
    assert numbers(said) == pytest.approx(numbers(expected), abs=2e-4)
    assert found["config"]["kvkeep_cache"] == STEP


@pytest.mark.parametrize("spec", ["h2o:12", "window:25%", "kvzip:25%"])
def test_a_policy_that_evicts_after_a_text_only_generates(model, tasks, spec):
    from kvkeep_lab.evals.harness import KVKeepLM

    lm = KVKeepLM(model, spec, tokenizer=short_tokenizer(), max_length=256)
    try:
        with pytest.raises(UnsupportedError, match=r"those of keep_all; give a step"):
            answers(lm, tasks, ["local_choice"])
        with pytest.raises(UnsupportedError, match=r"those of keep_all; give a step"):
            answers(lm, tasks, ["local_text"])
        said, _ = answers(lm, tasks, ["local_answer"])
    finally:
        kvkeep.detach(model)
    assert len(said["local_answer"]) == len(QUESTIONS)


def test_the_command(model_folder, tasks, tmp_path):
    model_args = json.dumps({"pretrained": str(model_folder), "cache": "window:8,sinks=1"})
    command = f"run --model kvkeep --tasks local_choice --include_path {tasks} --device cpu"
    command = f"-m kvkeep_lab.evals.harness {command} --output_path {tmp_path} --model_args"
    ran = subprocess.run(
        [sys.executable, *command.split(), model_args],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    (file,) = tmp_path.rglob("results_*.json")
    results = json.loads(file.read_text())
    assert results["config"]["kvkeep_cache"] == "window:8,sinks=1"
    assert results["config"]["model_args"]["cache"] == "window:8,sinks=1"
    assert 0 <= results["results"]["local_choice"]["acc,none"] <= 1
