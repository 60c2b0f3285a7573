"""kvpress on the same prompts, in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file

from kvkeep.errors import SpecError, UnsupportedError
from kvkeep.host.progress import Progress, silent
from kvkeep_lab import programs
from kvkeep_lab.checks import require_known
from kvkeep_lab.evals.answers import Answer, scored
from kvkeep_lab.evals.figures import Measured
from kvkeep_lab.evals.names import PRESSES
from kvkeep_lab.evals.samples import row_of

_SCRIPT = Path(__file__).parents[1] / "bench" / "kvpress_script.py"


@dataclass(frozen=True)
class Kvpress:
    """Presses that are compared with the full cache.

    Args:
        place: the directory of a virtual environment with kvpress and the torch of this one.
        presses: names in `PRESSES`.
        kept: the share of keys and values that each keeps, above 0 and at most 1.

    Raises:
        SpecError: a press or the share does not exist.
        UnsupportedError: the environment does not exist.
    """

    late: ClassVar[bool] = True
    """Whether all questions come late."""

    place: Path
    presses: Sequence[str] = PRESSES
    kept: float = 0.25

    def __post_init__(self) -> None:
        require_known("press", self.presses, PRESSES)
        if not self.presses:
            raise SpecError(f"no press; give some of {', '.join(PRESSES)}")
        if not 0 < self.kept <= 1:
            raise SpecError(f"a kept share of {self.kept}; give one above 0 and at most 1")
        if not _python(self.place).exists():
            same = torch.__version__.partition("+")[0]
            raise UnsupportedError(
                f"no environment in {self.place}; make it: python -m venv {self.place} && "
                f"{_python(self.place)} -m pip install torch=={same} kvpress==0.5.5"
            )

    def require(self, model: Any) -> None:
        """Check that kvpress can load what this model was loaded from, and supports its class.

        Raises:
            UnsupportedError: it is not a directory with a model of transformers, or kvpress
                refuses it.
        """
        where = getattr(model, "name_or_path", "")
        found = where and (Path(where) / "config.json").exists()
        if not found or hasattr(model, "peft_config"):
            raise UnsupportedError(
                f"kvpress loads a model from a directory with config.json, not from {where!r}; "
                "save it there with save_pretrained(), an adapter merged into it"
            )
        with tempfile.TemporaryDirectory() as name:
            self._run(model, Path(name), {"presses": []}, silent)

    def rows(self, asked: Measured, progress: Progress = silent) -> list[dict[str, Any]]:
        """A row for each press, of the figures that `kvkeep_lab.evals.run.evaluate` has for a spec.
        The questions of prompts are fed after the text was compressed."""
        prompts = [
            {"ids": one.ids[0].tolist(), "text": one.text, "steps": one.steps}
            for one in chain.from_iterable(asked.prompts.values())
        ]
        request = {"presses": list(self.presses), "kept": self.kept, "context": asked.context}
        request |= {"windows": asked.text.tolist(), "prompts": prompts}
        request |= {"end": asked.tokenizer.eos_token_id}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            try:
                answers = self._run(asked.model, folder, request, progress)
            except UnsupportedError as error:  # kvkeep's own figures are not lost
                return [{"spec": "kvpress", "context": asked.context, "failed": str(error)}]
            return [
                self._row(one, folder, asked) | {"versions": answers["versions"]}
                for one in answers["rows"]
            ]

    def _run(
        self, model: Any, folder: Path, request: Mapping[str, Any], progress: Progress
    ) -> dict[str, Any]:
        """The script's answer; its logits are in the folder."""
        place = folder / "request.json"
        about = {"model": model.name_or_path, "threads": torch.get_num_threads()}
        dtype = str(model.dtype).removeprefix("torch.")
        place.write_text(json.dumps({**about, "dtype": dtype, **request}))
        _run([str(_python(self.place)), "-I", str(_SCRIPT), str(place), str(folder)], progress)
        answers: dict[str, Any] = json.loads((folder / "answers.json").read_text())
        return answers

    def _row(self, found: Mapping[str, Any], folder: Path, asked: Measured) -> dict[str, Any]:
        spec, context = f"kvpress {found['press']}", asked.context
        if "failed" in found:
            return {"spec": spec, "context": context, "failed": found["failed"]}
        logits = load_file(folder / f"{found['press']}.safetensors")["logits"]
        left, answers = iter(found["answers"]), dict[str, list[Answer]]()
        for task, some in asked.prompts.items():
            answers[task] = [scored(asked.tokenizer, one, next(left)) for one in some]
            for sample, (prompt, answer) in enumerate(zip(some, answers[task], strict=True)):
                asked.record(row_of(spec, context, task, sample, prompt, answer))
        held = {name: found[name] for name in ("bytes", "kept")}
        step = found["step_s"]
        return asked.row(spec, logits.unbind(1), answers, **held, tokens_per_s=step and 1 / step)


def _python(place: Path) -> Path:
    return place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _run(command: Sequence[str], progress: Progress = silent) -> None:
    """Run a command; each line that it prints is progress.

    Raises:
        UnsupportedError: it failed; with the last line of its errors.
    """

    def attend(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            progress(line.strip(), None)

    if reason := programs.run(command, attend, stdout=subprocess.PIPE):
        raise UnsupportedError(f"kvpress: {reason}")
