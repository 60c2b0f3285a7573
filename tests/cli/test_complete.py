"""What shells suggest."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys

import pytest
from kvkeep_lab.evals import names as lab_names
from kvkeep_lab.evals.tasks import GROUPS, TASKS

from kvkeep.cli import complete
from kvkeep.codec import CODECS
from kvkeep.policy import ALIASES, POLICIES
from kvkeep.spec import CacheSpec
from kvkeep.storage import STORAGES


def test_the_names_are_those_of_the_library():
    assert complete.specs("keep_all+") == [f"keep_all+{name}" for name in CODECS]
    assert complete.specs("keep_all@") == [f"keep_all@{name}" for name in STORAGES]
    suggested = complete.specs("")
    names = [spec.partition(":")[0] for spec in suggested]
    assert sorted(names) == sorted({*POLICIES, *ALIASES} - {"pyramid", "adakv"})
    for spec in suggested:
        CacheSpec.parse(spec)
        assert shlex.quote(spec) == spec  # bash inserts it as it is
    assert (*GROUPS, *TASKS) == lab_names.TASKS


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("win", ["window:1024"]),
        ("keep_all;ke", ["keep_all;keep_all", "keep_all;keydiff:1024"]),
        ("keep_all+int", [f"keep_all+int{bits}" for bits in (8, 6, 5, 4, 3, 2)]),
        ("keep_all+int8/k", ["keep_all+int8/kivi"]),
        ("window:9+int8@f", ["window:9+int8@fixed"]),
        ("nothing", []),
    ],
)
def test_specs(typed, suggested):
    assert complete.specs(typed) == suggested


def test_models_and_adapters_in_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in ("smart/config.json", "small/a.gguf", "smooth/adapter_config.json", "smell/x"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).touch()
    assert complete.models("sm") == ["smollm2-135m", "small", "smart", "smooth"]
    assert complete.models("./sma") == ["./small", "./smart"]
    assert complete.models(f"{tmp_path}/smart") == [f"{tmp_path}/smart"]
    assert complete.models("nowhere/x") == []
    assert complete.adapters("") == ["smooth"]


def test_sessions(tmp_path, monkeypatch):
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))
    assert complete.sessions("") == []
    (tmp_path / "sessions").mkdir()
    for name in ("work.kv", "home.kv", ".work.lock"):
        (tmp_path / "sessions" / name).touch()
    assert complete.sessions("") == ["home", "work"]
    assert complete.sessions("w") == ["work"]


def script(shell):
    """What `kvkeep --show-completion` prints in a shell."""
    code = (
        "import sys; from kvkeep.__main__ import main; "
        f"sys.argv = ['kvkeep', '--show-completion', '{shell}']; main()"
    )
    env = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    return subprocess.run([sys.executable, "-c", code], stdout=-1, text=True, env=env).stdout


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts(shell):
    assert f"_KVKEEP_COMPLETE=complete_{shell}" in script(shell)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash(tmp_path):
    """The script completes in bash, without torch."""
    program = tmp_path / "bin" / "kvkeep"
    program.parent.mkdir()
    watch = "import atexit, sys; atexit.register(lambda: 'torch' in sys.modules and print('TORCH'))"
    program.write_text(f"#!{sys.executable}\n{watch}\nfrom kvkeep.__main__ import main\nmain()\n")
    program.chmod(0o755)
    lines = [
        "kvkeep gene",
        "kvkeep generate --cache keep_all+in",
        "kvkeep models show gem",
        "kvkeep eval --tasks qa,nee",
    ]
    ask = "\n".join(
        f"COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
        '_kvkeep_completion kvkeep; echo "${COMPREPLY[*]}"'
        for line in lines
    )
    env = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        ["bash", "--norc", "-c", f"{script('bash')}\n{ask}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=env,
    )
    assert ran.stdout.splitlines() == [
        "generate",
        " ".join(f"keep_all+int{bits}" for bits in (8, 6, 5, 4, 3, 2)),
        "gemma3-270m",
        "qa,needle",
    ], ran.stderr
