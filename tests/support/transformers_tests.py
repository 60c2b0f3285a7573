"""transformers' own tests, with every model attached to kvkeep.

A tool to run by hand; pytest does not collect it. It needs a checkout of transformers at (or near)
the installed version, and the package `parameterized`, which its tests import:

    python tests/support/transformers_tests.py PATH/TO/transformers --families llama mistral gemma3

runs each family's tests twice, as they are and with every model attached, and prints a table, what
passes in the first run and fails in the second, and which models `kvkeep.attach` refused. `--spec`
is what they are attached with; `--keyword EXPR` is pytest's `-k`, by default what generates or has
to do with caches and masks.

It is also the pytest plugin of those runs: `pytest -p support.transformers_tests --kvkeep-spec
keep_all`. A model is attached when it is first called, with a config of its own.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

import kvkeep
from kvkeep.errors import KVKeepError

FAMILIES = ("llama", "mistral", "qwen2", "phi3", "gpt_oss", "gemma3")
KEYWORD = (
    "ModelTest and not export and (generat or decoding or cache or past_key or attention or padding"
    " or sliding or logits_to_keep or equivalence)"
)


# -- the plugin -----------------------------------------------------------------------------------


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--kvkeep-spec", help="attach every model with this spec")
    parser.addoption("--kvkeep-report", help="write outcomes to this JSON file")


def pytest_configure(config: Any) -> None:
    spec, path = config.getoption("--kvkeep-spec"), config.getoption("--kvkeep-report")
    runs = Runs(spec)
    if path:
        config.pluginmanager.register(Report(Path(path), runs))
    if spec:
        runs.install()


class Runs:
    """Calls of models, each of which is attached before the first."""

    def __init__(self, spec: str | None) -> None:
        self.spec = spec
        self.active: list[PreTrainedModel] = []
        self.refused: dict[str, str] = {}
        self.updates = 0
        self.attaching = False  # kvkeep tries a model before it attaches it

    def install(self) -> None:
        """Attach models from now on."""
        runs = self

        def entered(original: Any) -> Any:
            @functools.wraps(original)
            def call(model: Any, *args: Any, **kwargs: Any) -> Any:
                inside = any(model is part for root in runs.active for part in root.modules())
                if not isinstance(model, PreTrainedModel) or inside or runs.attaching:
                    return original(model, *args, **kwargs)
                runs.active.append(model)
                try:
                    if runs.attach(model) and original.__name__ == "generate":
                        return model.generate(*args, **kwargs)  # attached, it has its own
                    return original(model, *args, **kwargs)
                finally:
                    runs.active.pop()

            return call

        GenerationMixin.generate = entered(GenerationMixin.generate)  # type: ignore[method-assign]
        PreTrainedModel.__call__ = entered(PreTrainedModel.__call__)  # type: ignore[method-assign]
        update = kvkeep.Cache.update

        def counted(cache: Any, *args: Any, **kwargs: Any) -> Any:
            runs.updates += 1
            return update(cache, *args, **kwargs)

        kvkeep.Cache.update = counted  # type: ignore[method-assign]

    def attach(self, model: PreTrainedModel) -> bool:
        """Attach a decoder, unless it is or cannot be; whether it was."""
        decodes = hasattr(model.config.get_text_config(decoder=True), "use_cache")
        if not decodes or "_kvkeep_attachment" in model.__dict__:
            return False
        for part in model.modules():  # one that was called by itself before
            if "_kvkeep_attachment" in part.__dict__:
                kvkeep.detach(part)
        _own_config(model)
        self.attaching = True
        try:
            kvkeep.attach(model, self.spec or "keep_all")
        except KVKeepError as error:
            self.refused[type(model).__name__] = str(error)
            return False
        finally:
            self.attaching = False
        return True


def _own_config(model: PreTrainedModel) -> None:
    """Tests build several models of one config; kvkeep tells attached models by theirs."""
    copies: dict[int, Any] = {}
    config = copy.deepcopy(model.config, copies)
    for module in model.modules():
        own = getattr(module, "config", None)
        if isinstance(own, PreTrainedConfig):
            module.config = config if own is model.config else copies.get(id(own), own)


class Report:
    """What became of each test, whether a kvkeep cache took part, and which models did not."""

    def __init__(self, path: Path, runs: Runs) -> None:
        self.path, self.runs = path, runs
        self.tests: dict[str, dict[str, Any]] = {}
        self.before = 0

    def pytest_runtest_setup(self, item: Any) -> None:
        self.before = self.runs.updates

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            self.tests[report.nodeid] = {
                "outcome": report.outcome,
                "cached": self.runs.updates > self.before,
                "error": "" if crash is None else crash.message.splitlines()[0],
            }

    def pytest_sessionfinish(self) -> None:
        found = {"tests": self.tests, "refused": self.runs.refused}
        self.path.write_text(json.dumps(found, indent=1))


# -- the comparison -------------------------------------------------------------------------------


def run(
    checkout: Path,
    tests: str,
    keyword: str,
    spec: str | None,
    extra: list[str],
    settings: dict[str, str] | None = None,
) -> Any:
    """The report of a file of tests; with models attached if a spec is given. `settings`: further
    environment variables."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "support.transformers_tests"]
        command += ["-W", "ignore", "-p", "no:cacheprovider"]
        command += [f"--kvkeep-report={path}", "-k", keyword, *extra]
        command += [] if spec is None else [f"--kvkeep-spec={spec}"]
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        done = subprocess.run(
            [*command, tests],
            cwd=checkout,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
            | (settings or {}),
            capture_output=True,
            text=True,
        )
        report = json.loads(path.read_text()) if path.exists() else {}
        if not report.get("tests"):  # the file could not be imported, for example
            raise SystemExit(done.stdout + done.stderr)
        return report


def compared(name: str, reports: list[Any]) -> list[str]:
    """Print a row of the table; returns what is lost by attaching.

    Args:
        reports: of the tests as they are, and of the tests with every model attached.
    """
    plain, attached = (report["tests"] for report in reports)
    passed = [
        sum(test["outcome"] == "passed" for test in tests.values()) for tests in (plain, attached)
    ]
    ran = sum(test["outcome"] != "skipped" for test in plain.values())
    cached = sum(test["cached"] for test in attached.values())
    print(f"| {name} | {ran} | {passed[0]} | {passed[1]} | {cached} |", flush=True)
    lost = []
    for test, before in plain.items():
        now = attached.get(test, {"outcome": "missing", "error": ""})
        if before["outcome"] == "passed" and now["outcome"] != "passed":
            lost.append(f"{test.split('::', 1)[1]} ({name}): {now['error']}")
    refused = reports[1]["refused"].items()
    return lost + [f"{model} ({name}) is not attached: {reason}" for model, reason in refused]


HEAD = """| tests | cases | pass unattached | pass attached | with a kvkeep cache |
|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(description="transformers' tests with models attached")
    parser.add_argument("checkout", type=Path, help="a checkout of transformers")
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--keyword", default=KEYWORD)
    parser.add_argument("--spec", default="keep_all")
    options, extra = parser.parse_known_args()
    print(HEAD)
    lost = []
    for family in options.families:
        tests = f"tests/models/{family}/test_modeling_{family}.py"
        reports = [
            run(options.checkout, tests, options.keyword, spec, extra)
            for spec in (None, options.spec)
        ]
        lost += compared(family, reports)
    print(*lost, sep="\n")


if __name__ == "__main__":
    main()
