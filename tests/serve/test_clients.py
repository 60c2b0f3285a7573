"""Clients of OpenAI's API, as their packages are today, each in an environment of its own."""

from __future__ import annotations

import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
import venv
from functools import partial
from pathlib import Path

import pytest
from support.browser import browsing
from support.live_server import said, serving, small
from support.short_tokenizer import short_tokenizer

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
NPM, NODE = shutil.which("npm"), shutil.which("node")


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


@pytest.fixture(scope="module")
def javascript(tmp_path_factory):
    """A directory in which OpenAI's client for JavaScript is installed."""
    if not (NPM and NODE):
        pytest.skip("node and npm are not installed")
    place = tmp_path_factory.mktemp("javascript")
    (place / "package.json").write_text("{}")
    install = [NPM, "install", "--silent", "--no-fund", "openai"]
    subprocess.run(install, cwd=place, check=True, timeout=INSTALL_S)
    return place


def test_javascript_client(url, javascript):
    script = shutil.copy(CLIENTS / "openai_client.mjs", javascript)
    done = subprocess.run(
        [NODE, script, url], cwd=javascript, capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, done.stdout + done.stderr


IN_A_BROWSER = """
    const [baseURL, answered] = arguments;
    const messages = [{ role: "user", content: "Hello." }];
    async function said() {
        const { OpenAI } = await import("/node_modules/openai/index.mjs");
        const options = { apiKey: "none", maxRetries: 0, dangerouslyAllowBrowser: true };
        const client = new OpenAI({ baseURL, ...options });
        const chat = { model: "tiny", messages, temperature: 0, max_tokens: 6 };
        let streamed = "";
        for await (const chunk of await client.chat.completions.create({ ...chat, stream: true })) {
            streamed += chunk.choices[0].delta.content ?? "";
        }
        const asked = { model: "tiny", input: messages, temperature: 0, max_output_tokens: 6 };
        return [streamed, (await client.responses.create(asked)).output_text];
    }
    said().then(answered, (error) => answered(error.constructor.name));
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_javascript_client_in_a_browser(javascript):
    """A page of another origin than the server's, which has to allow it."""
    pages = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=javascript))
    allowed, other = (f"http://{host}:{pages.server_port}" for host in ("127.0.0.1", "localhost"))
    with (
        pages,
        browsing() as tab,
        serving(small(), short_tokenizer(), origins=[allowed]) as (_, client),
    ):
        threading.Thread(target=pages.serve_forever).start()
        try:
            found = {}
            for page in (allowed, other):
                tab.driver.get(f"{page}/package.json")
                found[page] = tab.driver.execute_async_script(IN_A_BROWSER, str(client.base_url))
        finally:
            pages.shutdown()
        expected = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hello."}],
            temperature=0,
            max_tokens=6,
        )
    assert found[allowed] == [said(expected)] * 2
    assert found[other] == "APIConnectionError"


@pytest.mark.parametrize(("at", "package"), [(0, "openai-agents"), (1, "smolagents[openai]")])
def test_the_agents_of_the_documents(url, python, tmp_path, at, package):
    examples = re.findall(r"```py\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(examples) == 2
    assert "http://127.0.0.1:8000/v1" in examples[at]
    script = tmp_path / "agent.py"
    script.write_text(examples[at].replace("http://127.0.0.1:8000/v1", url))
    assert python([package])(script).endswith("High tide at Rum: 14:30.\n")
