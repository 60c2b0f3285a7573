"""Clients that are slow, silent, too many, or gone."""

from __future__ import annotations

import json
import resource
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import httpx2
import pytest
from support.live_server import serving, until

from kvkeep.serve.limits import Limits

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
BODY = json.dumps({"model": "tiny", "prompt": "Hello.", "max_tokens": 2}).encode()


def asking_for(body):
    return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


@contextmanager
def connected(talk, sent=b"", receive_buffer=None):
    """A connection to a client's server, over which something was sent."""
    with socket.socket() as end:
        if receive_buffer is not None:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        end.settimeout(60)
        end.connect((talk.base_url.host, talk.base_url.port))
        end.sendall(sent)
        yield end


def rest(end):
    """All that comes until the server closes the connection."""
    got = b""
    with suppress(ConnectionError):
        while part := end.recv(65536):
            got += part
    return got


@pytest.fixture(scope="module")
def hasty(tokenizer):
    """A server that waits half a second for what a client owes it."""
    from support.live_server import small

    model = small()
    model.generation_config.eos_token_id = None
    limits = Limits(timeout_s=0.5, answer_tokens=10**6)
    with serving(model, tokenizer, limits=limits, sending=4096) as both:
        yield both


def test_who_does_not_go_on_is_not_waited_for(hasty):
    """All of them at once, because each waits for what the server does not get."""
    statuses = {
        b"": b"",
        b"POST /v1/comp": b"",
        HEAD: b"",
        HEAD + b"content-length: 100\r\n\r\n{": b"408",
        HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n{": b"408",
        HEALTH + b"G": b"200",
        HEAD.replace(b"json", b"xml") + b"content-length: 100\r\n\r\n{": b"415",
        HEAD + b"content-length: 99999999\r\n\r\n{": b"413",
    }
    with ExitStack() as stack:
        ends = {sent: stack.enter_context(connected(hasty[1], sent)) for sent in statuses}
        assert {sent: rest(end)[9:12] for sent, end in ends.items()} == statuses
    with connected(hasty[1], asking_for(BODY)) as end:
        assert end.recv(12)[9:] == b"200"


def trickle(talk, begun):
    with connected(talk, begun) as end:
        end.settimeout(0.1)
        with suppress(ConnectionError):
            for _ in range(600):
                end.sendall(b"x")
                with suppress(TimeoutError):
                    if not end.recv(1000):
                        break
            else:
                raise AssertionError("it was waited for a minute")


def test_who_trickles_is_not_waited_for(hasty):
    begun = [b"", HEALTH, HEAD + b"content-length: 1000\r\n\r\n"]
    with ThreadPoolExecutor(len(begun)) as threads:
        for one in [threads.submit(trickle, hasty[1], sent) for sent in begun]:
            one.result()


def test_a_refused_request_is_not_read_without_end(hasty):
    begun = HEAD + b"content-length: 99999999999\r\n\r\n"

    def send(end):
        for _ in range(10**6):
            end.sendall(b" " * 10**5)

    with connected(hasty[1], begun) as end, pytest.raises(ConnectionError):
        send(end)


def test_a_stream_that_nobody_reads_ends(hasty):
    engine, talk = hasty
    body = {"model": "tiny", "prompt": "A story.", "max_tokens": 4000, "n": 100, "stream": True}
    with connected(talk, asking_for(json.dumps(body).encode()), receive_buffer=4096) as end:
        assert end.recv(12)[9:] == b"200"
        answer = httpx2.post(
            f"{talk.base_url}completions",
            json=json.loads(BODY),
            timeout=120,
            trust_env=False,
        )
        assert answer.status_code == 200  # its turn came, though the first client is still there
        assert b"[DONE]" not in rest(end)
    until(lambda: not engine.waiting)


def test_more_connections_than_the_limit(model, tokenizer):
    with serving(model, tokenizer, limits=Limits(connections=20)) as (_, talk):
        ends = [connected(talk) for _ in range(40)]
        opened = [end.__enter__() for end in ends]
        answers = []
        for end in opened[:20]:
            end.sendall(HEALTH)
            answers.append(end.recv(12)[9:])
        assert answers == [b"200"] * 20
        assert all(rest(end)[9:12] == b"503" for end in opened[20:])
        for end in ends:
            end.__exit__(None, None, None)

        def answered():
            with connected(talk, HEALTH) as end:
                return end.recv(12)[9:] == b"200"

        until(answered)


@pytest.mark.slow
def test_five_hundred_connections(model, tokenizer):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    try:
        with serving(model, tokenizer, limits=Limits(queue=63)) as (engine, talk):
            ends = [connected(talk, asking_for(BODY)) for _ in range(500)]
            opened = [end.__enter__() for end in ends]
            statuses = [end.recv(12)[9:] for end in opened]
            assert set(statuses) <= {b"200", b"429"}
            assert statuses.count(b"200") >= 64
            for end in ends:
                end.__exit__(None, None, None)
            until(lambda: engine.waiting == 0)
            with connected(talk, asking_for(BODY)) as end:
                assert end.recv(12)[9:] == b"200"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
