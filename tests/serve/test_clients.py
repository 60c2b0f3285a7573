"""Clients of OpenAI's API, as their packages are today, each in an environment of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CLIENTS = Path(__file__).parent / "clients"
PAGE = Path(__file__).parents[2] / "docs" / "serve.md"
PACKAGES = {
    "openai": ["openai"],
    "litellm": ["litellm"],
    "langchain": ["langchain-openai"],
    "instructor": ["instructor"],
    "llm": ["llm"],
}
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
INSTALL_S, RUN_S = 600, 600


@pytest.fixture(scope="module")
def url():
    """Of a server of the demo model."""
    command = [sys.executable, "-m", "kvkeep", "serve", "--port", "0", "--no-compile"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield server.stdout.readline().split()[-1]
        finally:
            server.terminate()


@pytest.fixture
def python(tmp_path):
    """Makes an environment with packages; returns what runs a script in it, which must end well."""

    def made(packages):
        place = tmp_path / "environment"
        venv.create(place, with_pip=True)
        own = str(place / "bin" / "python")
        install = [own, "-m", "pip", "install", "--quiet", *packages]
        subprocess.run(install, check=True, timeout=INSTALL_S)

        def run(script, *arguments):
            environment = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
            command = [own, str(script), *arguments]
            done = subprocess.run(
                command, env=environment | QUIET, capture_output=True, text=True, timeout=RUN_S
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        return run

    return made


@pytest.mark.parametrize("name", PACKAGES)
def test_python_clients(url, python, name):
    python(PACKAGES[name])(CLIENTS / f"{name}_client.py", url)


def test_javascript_client(url, tmp_path):
    npm, node = shutil.which("npm"), shutil.which("node")
    if not (npm and node):
        pytest.skip("node and npm are not installed")
    script = shutil.copy(CLIENTS / "openai_client.mjs", tmp_path)
    (tmp_path / "package.json").write_text("{}")
    install = [npm, "install", "--silent", "--no-fund", "openai"]
    subprocess.run(install, cwd=tmp_path, check=True, timeout=INSTALL_S)
    done = subprocess.run(
        [node, script, url], cwd=tmp_path, capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("at", "package"), [(0, "openai-agents"), (1, "smolagents[openai]")])
def test_the_agents_of_the_documents(url, python, tmp_path, at, package):
    examples = re.findall(r"```py\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(examples) == 2
    assert "http://127.0.0.1:8000/v1" in examples[at]
    script = tmp_path / "agent.py"
    script.write_text(examples[at].replace("http://127.0.0.1:8000/v1", url))
    assert python([package])(script).endswith("High tide at Rum: 14:30.\n")
