"""Optional packages: kvkeep's core runs without them, and a missing one names its extra."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import kvkeep_lab
import pytest

import kvkeep
from kvkeep import named_models
from kvkeep.errors import KVKeepError, MissingPackageError
from kvkeep.extras import needed_by
from kvkeep.hf.models import resolve

ROOT = Path(kvkeep.__file__).parent
SOURCES = Path(__file__).parents[1]


def project(folder):
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


PROJECT, LAB = project(SOURCES), project(SOURCES / "lab")
EXTRAS = PROJECT["optional-dependencies"]
PACKAGES = {
    "kvkeep": (ROOT, EXTRAS),
    "kvkeep_lab": (Path(kvkeep_lab.__file__).parent, LAB["optional-dependencies"]),
}

# What stands in for packages that are not installed, to kvkeep's own modules only: transformers
# and torch import some of them too.
HIDE = """
import builtins, importlib, os, sys
hidden, real, real_module = {hidden!r}, builtins.__import__, importlib.import_module

def check(name, caller):
    if caller.split(".")[0] in ("kvkeep", "kvkeep_lab") and name.split(".")[0] in hidden:
        raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

def importing(name, globals=None, locals=None, fromlist=(), level=0):
    if not level:
        check(name, (globals or {{}}).get("__name__") or "")
    return real(name, globals, locals, fromlist, level)

def import_module(name, package=None):
    check(name, sys._getframe(1).f_globals.get("__name__") or "")
    return real_module(name, package)

builtins.__import__, importlib.import_module = importing, import_module
"""


def module_of(requirement):
    """The package that a requirement brings, as it is imported."""
    name = re.match(r"[\w.-]+", requirement)[0]
    return {"llama-cpp-python": "llama_cpp", "pillow": "PIL"}.get(name, name).replace("-", "_")


REQUIRED = {module_of(one) for one in PROJECT["dependencies"] if ";" not in one}
assert LAB["dependencies"] == ["kvkeep[cli,gguf]"]
REQUIRED_BY_LAB = {module_of(one) for extra in ("cli", "gguf") for one in EXTRAS[extra]}
OPTIONAL = {
    module_of(one)
    for extras in (EXTRAS, LAB["optional-dependencies"])
    for extra, requirements in extras.items()
    if extra not in ("all", "dev", "docs")
    for one in requirements
} - REQUIRED


def run(program, hidden=OPTIONAL, *, home=""):
    code = HIDE.format(hidden=sorted(hidden)) + program
    environment = {**os.environ, "KVKEEP_HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )


def optional_imports(path):
    """(module, extras around it) for each import in a file of what is not required."""

    def walk(node, extras):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.With):
            calls = [item.context_expr for item in node.items]
            extras = extras | {
                call.args[1].value
                for call in calls
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "needed_by"
            }
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "import_module":
            names = [one.value for one in node.args if isinstance(one, ast.Constant)]
        for name in {name.split(".")[0] for name in names}:
            if name not in sys.stdlib_module_names and name not in REQUIRED | {
                "kvkeep",
                "kvkeep_lab",
            }:
                yield name, extras
        for child in ast.iter_child_nodes(node):
            yield from walk(child, extras)

    yield from walk(ast.parse(path.read_text()), frozenset())


FOUND_WHERE_THEY_ARE = (
    "triton",
    "kvpress",
    "litgpt",
)


@pytest.mark.parametrize("package", PACKAGES)
def test_each_import_of_an_optional_package_names_an_extra_that_has_it(package):
    """In the module itself, or in the `__init__` of a package around it, which is imported first.
    Triton, what benchmarks compare with, and LitGPT, whose host serves a model of
    it, are found where they are, and in no extra."""
    root, offered = PACKAGES[package]
    has = {extra: {module_of(one) for one in needs} for extra, needs in offered.items()}
    found = {path: list(optional_imports(path)) for path in root.rglob("*.py")}
    bad, seen = [], set()
    for path, imports in found.items():
        around = {
            extra
            for parent in path.relative_to(root).parents
            for _, extras in found[root / parent / "__init__.py"]
            for extra in extras
        }
        for name, extras in imports:
            if name in FOUND_WHERE_THEY_ARE:
                continue
            if package == "kvkeep_lab" and name in REQUIRED_BY_LAB:
                continue
            seen.add(name)
            if not any(name in has[extra] for extra in extras | around):
                bad.append(f"{path.relative_to(root)}: {name}")
    assert not bad
    asked = {
        "kvkeep": {"typer", "gguf", "fsspec", "redis", "peft", "starlette"},
        "kvkeep_lab": {"matplotlib", "llama_cpp", "lm_eval"},
    }
    assert asked[package] <= seen


def test_all_has_every_extra_for_users_but_what_is_compiled_or_old():
    (everything,) = EXTRAS["all"]
    assert set(re.search(r"\[(.*)\]", everything)[1].split(",")) == set(EXTRAS) - {
        "all",
        "dev",
        "docs",
        "mellea",
        "weights",
    }


CORE = """
import torch, transformers, kvkeep
from kvkeep import store, train, blocks
config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = transformers.LlamaForCausalLM(config).eval()
kvkeep.attach(model, "h2o:8+int8")
ids = torch.arange(1, 13)[None]
model.generate(ids, max_new_tokens=3)
kvkeep.detach(model)
exact = kvkeep.Cache(model)
with torch.no_grad():
    model(ids, past_key_values=exact)
exact.save(os.environ["KVKEEP_HOME"] + "/cache")
kvkeep.load(os.environ["KVKEEP_HOME"] + "/cache", model)
kept = kvkeep.PrefixStore(backend=store.open_store(os.environ["KVKEEP_HOME"] + "/store"))
kvkeep.attach(model, store=kept)
model.generate(ids, max_new_tokens=2)
kvkeep.detach(model)
train.backward(model, ids, labels=ids, cache="h2o:8", chunk=4)
print("done without", *hidden)
"""

MISSING = [
    ("import kvkeep.cli", "typer", "cli"),
    ("import kvkeep.cli", "rich", "cli"),
    ("import kvkeep.environment", "psutil", "cli"),
    ("home()", "platformdirs", "cli"),
    ("load(gguf_file)", "gguf", "gguf"),
    ("load(gguf_file)", "accelerate", "gguf"),
    ("open_store('memory://here')", "fsspec", "remote"),
    ("Location('memory://here')", "fsspec", "remote"),
    ("import kvkeep.serve.requests.completions", "uvicorn", "serve"),
    ("import kvkeep.finetune.run", "peft", "finetune"),
    ("import kvkeep_lab.bench.llama_cpp", "gguf", "llama-cpp"),
    ("import kvkeep_lab.evals.harness", "lm_eval", "lm-eval"),
    ("import kvkeep.mellea", "mellea", "mellea"),
]
"""A program, a package that is missing, and the extra that its error names."""

EACH_MISSING = f"""
from kvkeep.hf.models import load
from kvkeep.home import home
from kvkeep.store import Location, open_store
gguf_file = os.environ["KVKEEP_HOME"] + "/model.gguf"
open(gguf_file, "w").close()
for program, name, extra in {MISSING}:
    hidden[:] = [name]
    there = os.environ.pop("KVKEEP_HOME") if name == "platformdirs" else os.environ["KVKEEP_HOME"]
    try:
        exec(program, globals() | {{"__name__": "kvkeep.of_a_test"}})
    except kvkeep.UnsupportedError as error:
        print(f"{{program}}: {{error}}")
    os.environ["KVKEEP_HOME"] = there
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """The lines of both programs, in one process because it takes seconds to begin."""
    home = tmp_path_factory.mktemp("home")
    ran = run(CORE + EACH_MISSING, home=home)
    assert ran.returncode == 0, ran.stderr
    assert sorted(path.name for path in home.iterdir()) == ["cache", "model.gguf", "store"]
    return ran.stdout.splitlines()


def test_a_cache_needs_no_optional_package(printed):
    assert printed[0] == " ".join(["done without", *sorted(OPTIONAL)])


def test_a_missing_package_names_its_extra(printed):
    for line, (program, name, extra) in zip(printed[1:], MISSING, strict=True):
        assert line.startswith(program)
        package = "kvkeep-lab" if "kvkeep_lab" in program else "kvkeep"
        remedy = f"pip install '{package}[{extra}]'"
        assert line.endswith(f" needs {name}, which is not installed; {remedy}")


def test_the_command_says_what_is_missing():
    ran = run("import runpy; runpy.run_module('kvkeep', run_name='__main__')", {"typer"})
    assert ran.returncode == 2
    assert ran.stderr == (
        "error: The command kvkeep needs typer, which is not installed; pip install 'kvkeep[cli]'\n"
    )


WITHOUT_LAB = """
import importlib.metadata, runpy
find = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **asked: (
    [] if asked.get("group", "").startswith("kvkeep.") else find(**asked)
)
sys.argv[1:] = ["bench", "op"]
runpy.run_module("kvkeep", run_name="__main__")
"""


def test_the_command_without_kvkeep_lab():
    ran = run(WITHOUT_LAB, ())
    assert ran.returncode == 2
    assert ran.stderr == (
        "error: kvkeep bench is a command of kvkeep-lab; pip install kvkeep-lab\n"
    )


def test_models_without_kvkeep_lab(monkeypatch):
    monkeypatch.setattr(named_models, "entry_points", lambda **asked: [])
    with pytest.raises(MissingPackageError) as refused:
        resolve("smollm2-135m")
    assert str(refused.value) == (
        "smollm2-135m is a model of kvkeep-lab; pip install kvkeep-lab, or give a directory, a "
        "GGUF file or a hub name (owner/name)"
    )


def test_a_package_that_cannot_be_imported():
    """Its error is told, and can be caught as kvkeep's and as Python's."""
    with (
        pytest.raises(MissingPackageError, match=r"cannot import name.*kvkeep\[x\]") as caught,
        needed_by("A feature", "x"),
    ):
        raise ImportError("cannot import name 'y'")
    assert isinstance(caught.value, KVKeepError)
    assert isinstance(caught.value, ImportError)


BROKEN = """
import importlib.metadata, runpy
class Broken:
    value = "broken:add_to"
    def load(self):
        raise ImportError("no such name")
importlib.metadata.entry_points = lambda **_: (Broken(),)
sys.argv[1:] = ["--version"]
runpy.run_module("kvkeep", run_name="__main__")
"""


def test_commands_of_a_package_that_cannot_be_loaded():
    ran = run(BROKEN, ())
    assert ran.returncode == 0
    assert ran.stderr == ("warning: the commands of broken:add_to cannot be loaded: no such name\n")
