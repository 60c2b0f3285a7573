"""Who is answered, and with whose prompts a client's may begin."""

from __future__ import annotations

import hmac
import re

import httpx2
import pytest
from starlette.testclient import TestClient
from support.live_server import JSON, asking, client, said, serving

import kvkeep
from kvkeep.errors import SpecError
from kvkeep.serve.app import application
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.gate import host_names, origin_names
from kvkeep.serve.keys import Keys, KeysError

HELLO = {"model": "tiny", "prompt": "Hello.", "max_tokens": 2, "temperature": 0}


def post(talk, headers=JSON, path="completions", body=HELLO):
    url = f"{talk.base_url}{path}"
    return httpx2.post(url, json=body, headers=headers, trust_env=False)


# -- pages and names -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["text/plain", "", "application/x-www-form-urlencoded", "application/json-seq"]
)
def test_what_a_page_may_send_without_asking_is_refused(served, kind):
    answer = post(served[1], {"content-type": kind})
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]
    assert post(served[1], {"content-type": "Application/JSON; charset=utf-8"}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1@evil.example", "[", ""]
)
def test_a_name_that_is_not_the_servers_is_refused(served, host):
    answer = post(served[1], JSON | {"host": host})
    assert answer.status_code == 421
    assert answer.json()["error"]["code"] == "unknown_host"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "[::1]:8000", "10.0.0.5"])
def test_localhost_and_addresses_are_the_servers(served, host):
    assert post(served[1], JSON | {"host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:9"])
def test_pages_are_refused(served, origin):
    answer = post(served[1], JSON | {"origin": origin})
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers
    asks = {"origin": origin, "access-control-request-method": "POST"}
    preflight = httpx2.options(f"{served[1].base_url}completions", headers=asks, trust_env=False)
    assert preflight.status_code == 403


@pytest.mark.parametrize(
    ("hosts", "host", "origin", "status"),
    [
        ([], "127.0.0.1:80", "http://127.0.0.1:80", 200),
        ([], "LocalHost", "http://localhost", 200),
        (["gpu.example"], "gpu.example:8000", "http://gpu.example:8000", 200),
        ([], "127.0.0.1", "http://127.0.0.1:8000", 403),
        ([], "127.0.0.1", "https://127.0.0.1", 403),
        ([], "evil.example", "http://evil.example", 421),
        (
            ["*"],
            "evil.example",
            "http://evil.example",
            403,
        ),  # it may have been bound to our address
        (["*"], "10.0.0.5:8000", "http://10.0.0.5:8000", 200),
    ],
)
def test_the_servers_own_page_is_let_in_under_a_known_name(
    model, tokenizer, hosts, host, origin, status
):
    app = application(Engine(model, tokenizer, name="tiny"), hosts=hosts)
    with TestClient(app, base_url="http://localhost") as talk:
        headers = {"host": host, "origin": origin}
        assert talk.post("/v1/completions", json=HELLO, headers=headers).status_code == status


def test_names_and_pages_that_are_let_in(model, tokenizer):
    page, host = "https://chat.example", "gpu.example"
    with serving(model, tokenizer, hosts=[host], origins=[page]) as (_, talk):
        answer = post(talk, JSON | {"origin": page, "host": host})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == page
        asks = {
            "origin": page,
            "access-control-request-method": "POST",
            # of OpenAI's JavaScript client
            "access-control-request-headers": "authorization,content-type,x-stainless-lang",
        }
        url = f"{talk.base_url}completions"
        preflight = httpx2.options(url, headers=asks, trust_env=False)
        assert preflight.status_code == 200
        allowed = preflight.headers["access-control-allow-headers"]
        assert allowed == asks["access-control-request-headers"]
        assert preflight.headers["access-control-allow-origin"] == page
        assert "retry-after" in answer.headers["access-control-expose-headers"]
        asks["origin"] = "https://evil.example"
        refused = httpx2.options(url, headers=asks, trust_env=False)
        assert refused.status_code == 403
        assert "access-control-allow-headers" not in refused.headers
        assert post(talk, JSON | {"origin": f"{page}.evil.example"}).status_code == 403
        assert post(talk, JSON | {"host": f"{host}.evil.example"}).status_code == 421


@pytest.mark.parametrize(
    ("host", "origin", "sent"),
    [
        ("GPU.example:8000", "https://Chat.Example/", "https://chat.example"),
        ("gpu.example.", "https://chat.example:443", "https://chat.example"),
        ("*", "http://chat.example:8080", "http://chat.example:8080"),
        ("gpu.example", "*", "https://chat.example"),
        ("gpu.example", "null", "null"),
        ("gpu.example", "http://[::1]:3000", "http://[::1]:3000"),
    ],
)
def test_names_and_pages_however_they_are_written(model, tokenizer, host, origin, sent):
    engine = Engine(model, tokenizer, name="tiny")
    app = application(engine, hosts=[host], origins=[origin])
    with TestClient(app, base_url="http://gpu.example") as talk:
        answer = talk.post("/v1/completions", json=HELLO, headers={"origin": sent})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] in (sent, "*")
        asks = {"origin": sent, "access-control-request-method": "POST"}
        assert talk.options("/v1/completions", headers=asks).status_code == 200


def test_names_and_pages_that_no_client_sends():
    for wrong in ("", "gpu.example/v1", "http://gpu.example", "a b", ".", "é.example"):
        with pytest.raises(SpecError, match="give a name such as"):
            host_names([wrong])
    for wrong in ("", "chat.example", "https://chat.example/app", "https://é.example", "//a"):
        with pytest.raises(SpecError, match="give a scheme and a host"):
            origin_names([wrong])
    assert host_names(["::1", "10.0.0.5", "[::1]:80"]) == ["::1", "10.0.0.5", "::1"]


def test_query_strings_are_not_logged(model, tokenizer, capsys):
    with serving(model, tokenizer) as (_, talk):
        url = str(talk.base_url).replace("/v1/", "/health?key=secret")
        assert httpx2.get(url, trust_env=False).status_code == 200
    assert "GET /health HTTP" in (logged := capsys.readouterr().err)
    assert "secret" not in logged


# -- the page -----------------------------------------------------------------------------------


def test_the_page_needs_no_key_and_may_use_its_own_server_only(model, tokenizer):
    engine = Engine(model, tokenizer, name="tiny")
    app = application(engine, keys=Keys.single("secret"))
    with TestClient(app, base_url="http://localhost") as talk:
        page = talk.get("/")
        files = re.findall(r'(?:src|href)="([^"]*)"', page.text)
        assert len(files) > 4
        for path in ("/", *files):
            found = talk.get(path)
            assert found.status_code == 200
            policy = found.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; ")
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert found.headers["x-content-type-options"] == "nosniff"
            assert found.headers["referrer-policy"] == "no-referrer"
            assert found.headers["cache-control"] == "no-cache"
            assert talk.head(path).headers["content-length"] == str(len(found.content))
            known = {"if-none-match": found.headers["etag"]}
            assert talk.get(path, headers=known).status_code == 304
        for path in (
            "/assets/",
            "/assets/../picture.py",
            "/assets/%2e%2e/picture.py",
            "/assets/chat.html",
            "/assets/inspect.html",
            "/assets/eval.js",
            "/chat.html",
        ):
            assert talk.get(path).status_code == 404
        assert talk.post("/").status_code == 405
        assert talk.get("/", headers={"host": "evil.example"}).status_code == 421


# -- keys ----------------------------------------------------------------------------------------


def test_white_space_around_a_key_does_not_count(model, tokenizer):
    with serving(model, tokenizer, keys=Keys.single(" secret\n"), key="secret") as (_, talk):
        assert talk.models.list().data
        for header in ("bearer   secret", "Bearer \tsecret"):
            assert post(talk, JSON | {"authorization": header}).status_code == 200
        for header in (
            "Bearer secre",
            "Bearer secrets",
            "Bearer",
            "Basic secret",
            "secret",
            "Bearer \xff",
        ):
            answer = post(talk, JSON | {"authorization": header.encode("latin-1")})
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"


def test_every_key_is_compared_whichever_fits(monkeypatch):
    keys = Keys({"first": "a", "second": "b", "third": "a"})
    compared = []
    monkeypatch.setattr(
        hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or a == b
    )
    for given, name in ((b"first", "a"), (b"second", "b"), (b"third", "a"), (b"x" * 999, None)):
        compared.clear()
        assert keys.name(given) == name
        assert compared == [(32, 32)] * 3


def test_files_of_keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# who: key\n\n ada : key:with:colons \nbob:b\nada:c\r\n")
    keys = Keys.read(path)
    assert [keys.name(key) for key in (b"key:with:colons", b"b", b"c", b"", b"ada")] == [
        "ada",
        "bob",
        "ada",
        None,
        None,
    ]
    for text, message in (
        ("", "no API keys"),
        ("secret", "line 1 of .* is not `name:key`"),
        (":secret", "line 1"),
        ("ada:", "the API key of ada is empty"),
        ("ada:a b", "not printable ASCII"),
        ("ada:é", "not printable ASCII"),
        ("a/b:c", "name 'a/b'"),
        ("ada:same\nbob:same", "line 2 of .* repeats a key"),
        (b"\xff", "cannot read keys"),
    ):
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(KeysError, match=message):
            Keys.read(path)
    with pytest.raises(KeysError, match="cannot read keys"):
        Keys.read(tmp_path)


# -- tenants -------------------------------------------------------------------------------------


def found(talk, messages):
    answer = talk.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=2, seed=1
    )
    return answer.usage.prompt_tokens_details.cached_tokens, said(answer)


SECRET = [{"role": "system", "content": "The code is 31415926."}, {"role": "user", "content": "?"}]


def test_a_tenant_learns_nothing_of_anothers_prompts(model, tokenizer):
    strangers = [f"stranger{i}" for i in range(4)]
    names = {"a1": "ada", "a2": "ada", **{f"key-of-{who}": who for who in strangers}}
    with serving(model, tokenizer, keys=Keys(names)) as (_, talk):
        ada, also_ada, *others = (client(str(talk.base_url), key) for key in names)
        nothing, text = found(ada, SECRET)
        assert nothing == 0
        for other, digits in zip(others, ("31415926", "3141592", "314", "2"), strict=True):
            guess = [SECRET[0] | {"content": f"The code is {digits}."}, SECRET[1]]
            cached, answer = found(other, guess)
            assert cached == 0
            assert (answer == text) == (digits == "31415926")
        assert found(also_ada, SECRET)[0] > 10
        assert found(others[0], SECRET)[0] > 10  # its own


@pytest.mark.parametrize("share", [False, True])
def test_without_keys_prompts_are_shared_only_if_the_operator_says_so(model, tokenizer, share):
    with serving(model, tokenizer, share=share) as (engine, talk):
        first, text = found(talk, SECRET)
        again, same = found(talk, SECRET)
        assert (first, again > 10, same) == (0, share, text)
        several = talk.chat.completions.create(
            model="tiny", messages=asking("Hello."), temperature=0, max_tokens=4, n=3
        )
        assert len({choice.message.content for choice in several.choices}) == 1
        assert bool(engine.store.stats().tokens) == share


def test_an_application_without_keys_shares_nothing_by_itself(model, tokenizer):
    engine = Engine(model, tokenizer, name="tiny", store=kvkeep.PrefixStore())
    with TestClient(application(engine), base_url="http://localhost") as talk:
        for _ in range(2):
            usage = talk.post("/v1/completions", json=HELLO).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
