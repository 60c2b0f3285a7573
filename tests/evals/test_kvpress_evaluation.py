"""kvpress's own evaluation of specs, on texts in the format of its data sets. Its package lacks the
evaluation, so this needs a checkout of its repository, and the packages that its scorers import:

    pip install --no-deps rouge bert-score jieba fuzzywuzzy
    KVPRESS_CHECKOUT=PATH pytest -m slow tests/evals/test_kvpress_evaluation.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvkeep.hf.models import resolve

CHECKOUT = os.environ.get("KVPRESS_CHECKOUT")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="KVPRESS_CHECKOUT names no checkout of kvpress"),
]
PRESSES = {"kvkeep_all": "keep_all", "kvkeep_kvzip_75": "kvzip:25%"}
TEXT = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
CITIES = {"Oslo": "4719", "Lima": "8302", "Cairo": "1556"}


def row(context, city):
    """As of RULER, with a number to find. A context's questions have the same prefix."""
    return {
        "context": context,
        "question": f"What is the special number for {city}?",
        "answer_prefix": " The special number is",
        "answer": [CITIES[city]],
        "task": "niah_multikey_1" if city == "Cairo" else "qa_1",
        "max_new_tokens": 8,
    }


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory):
    """The evaluation with a line for each spec, and with its own data."""
    assert CHECKOUT is not None
    folder = tmp_path_factory.mktemp("kvpress")
    shutil.copytree(Path(CHECKOUT) / "evaluation", folder / "evaluation")
    (folder / "data" / "4096").mkdir(parents=True)
    told = [f"The special number for {city} is {number}. " for city, number in CITIES.items()]
    contexts = [TEXT * 2 + told[0] + TEXT * 3 + told[1] + TEXT, TEXT + told[2] + TEXT * 4]
    rows = [row(contexts[0], "Oslo"), row(contexts[0], "Lima"), row(contexts[1], "Cairo")]
    data = folder / "data" / "4096" / "test.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in rows))
    lines = ["", "from kvkeep_lab.evals.press import KVKeepPress"]
    lines += [f'PRESS_REGISTRY["{name}"] = KVKeepPress("{spec}")' for name, spec in PRESSES.items()]
    lines += [f'DATASET_REGISTRY["ruler"] = {str(folder / "data")!r}', ""]
    with (folder / "evaluation" / "evaluate_registry.py").open("a") as registry:
        registry.write("\n".join(lines))
    return folder


def results(folder, press):
    """The rows and the metrics of an evaluation."""
    pandas = pytest.importorskip("pandas")
    options = {"model": resolve("smollm2-135m"), "data_dir": 4096, "press_name": press}
    options |= {"compression_ratio": 0.75, "output_dir": folder / "results", "device": "cpu"}
    command = [sys.executable, "evaluate.py", *(f"--{name}={x}" for name, x in options.items())]
    place = folder / "evaluation"
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = (folder / "results").glob(f"*{press}*")
    metrics = json.loads((found / "metrics.json").read_text())
    return pandas.read_csv(found / "predictions.csv"), metrics


def test_specs_are_evaluated_as_presses(evaluation):
    plain, plain_metrics = results(evaluation, "no_press")
    exact, exact_metrics = results(evaluation, "kvkeep_all")
    assert exact.predicted_answer.tolist() == plain.predicted_answer.tolist()
    assert exact_metrics == plain_metrics
    assert exact.compression_ratio.tolist() == [0, 0, 0]
    few, metrics = results(evaluation, "kvkeep_kvzip_75")
    assert few.compression_ratio.tolist() == pytest.approx([0.75] * 3, abs=0.01)
    assert metrics.keys() == plain_metrics.keys() == {"niah_multikey_1", "qa_1"}
    assert plain_metrics["niah_multikey_1"]["string_match"] == 100
