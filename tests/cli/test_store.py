"""`kvkeep store`: what it says of stores of each kind, and what it does to them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support import command_line
from support.command_line import last_line
from support.store_places import KINDS, Place, put
from support.tiny_models import tiny

import kvkeep
from kvkeep.store import Disk, PrefixStore

run = partial(command_line.run, "store")


@pytest.fixture(params=KINDS)
def place(request, tmp_path):
    """A store of two texts and six blocks, of which the first two are shared."""
    made = Place(request.param, tmp_path)
    backend = made.open()
    for end in range(2):
        put(backend, [*range(16), 90 + end])
    put(backend, list(range(100, 113)), identity="another [bold] text")
    yield made
    made.close()


def test_ls(place):
    shown = last_line(run("ls", place.url, "--json"))
    assert not shown["more"]
    rows = shown["blocks"]
    assert len(rows) == 6
    assert sum(row["tokens"] for row in rows) == 16 + 1 + 1 + 13
    assert {row["model"] for row in rows} == {"m", "another [bold] text"}
    assert {(row["layers"], row["dtype"]) for row in rows} == {(2, "float32")}
    names = place.blocks()
    assert sum(row["bytes"] for row in rows) == sum(len(place.read(name)) for name in names)
    assert {row["key"] for row in rows} == set(place.open().scan())
    few = last_line(run("ls", place.url, "--limit", "2", "--json"))
    assert (few["blocks"], few["more"]) == (rows[:2], True)
    table = run("ls", place.url)
    assert table.exit_code == 0
    assert table.stdout.count("float32") == 6


def test_stats(place):
    name = next(name for name in place.blocks())
    place.write(name, b"damaged")
    shown = last_line(run("stats", place.url, "--json"))
    assert (shown["blocks"], shown["damaged"], shown["failures"]) == (5, 1, 0)
    assert sum(row["blocks"] for row in shown["identities"]) == 5
    assert shown["bytes"] == place.open().nbytes
    text = run("stats", place.url)
    assert "5 blocks" in text.stdout
    assert "[bold]" in text.stdout


def test_verify(place):
    assert last_line(run("verify", place.url, "--json")) == {
        "blocks": 6,
        "whole": 6,
        "damaged": 0,
        "gone": 0,
    }
    name = place.blocks()[3]
    data = bytearray(place.read(name))
    data[-1] ^= 1
    place.write(name, bytes(data))
    result = last_line(run("verify", place.url, "--json"), code=1)
    assert (result["whole"], result["damaged"], result["gone"]) == (5, 1, 0)
    assert place.set_aside() == 1
    again = run("verify", place.url)
    assert again.exit_code == 0
    assert "5 of 5 blocks are intact" in again.stdout


def test_gc(place):
    size = max(len(place.read(name)) for name in place.blocks())
    if place.kind == "redis":
        assert "maxmemory 2000" in run("gc", place.url, "--budget", "2000").stderr
    else:
        result = last_line(run("gc", place.url, "--budget", f"{2 * size}", "--json"))
        assert 1 <= result["blocks"] <= 3
        assert result["freed"] > 0
        assert place.open().nbytes <= 2 * size
    place.write(place.blocks()[0], b"damaged")
    run("verify", place.url)
    assert place.set_aside() == 1
    assert last_line(run("gc", place.url, "--json"))["freed"] == 0
    run("gc", place.url, "--older-than", "0")
    assert place.set_aside() == 0


def test_export(place, tmp_path):
    target = tmp_path / "copy"
    name = place.blocks()[0]
    whole = place.read(name)
    place.write(name, whole[:-1])
    result = last_line(run("export", place.url, target, "--json"), code=1)
    assert result == {"copied": 5, "present": 0, "left": 1, "damaged": 1}
    result = last_line(run("export", place.url, target, "--json"))
    assert result == {"copied": 0, "present": 5, "left": 0, "damaged": 0}
    back = last_line(run("export", target, place.url, "--json"))
    assert back["present"] == 5
    assert sorted(Disk(target).scan()) == sorted(place.open().scan())


def test_models(tmp_path):
    """What it says of a model's entries."""
    store = PrefixStore(backend=Disk(tmp_path / "store"), block=16)
    model = tiny("llama")
    for spec, namespace in (("keep_all", ""), ("keep_all+int8", "tenant")):
        store.prefill(model, torch.arange(2, 22), spec=spec, namespace=namespace)
    rows = last_line(run("stats", tmp_path / "store", "--json"))["identities"]
    weights = kvkeep.fingerprint(model)["weights"][:8]
    rows.sort(key=lambda row: row["namespace"])
    assert [(row["model"], row["namespace"], row["tokens"]) for row in rows] == [
        (f"{weights} float32", "", 19),
        (f"{weights} float32", "tenant", 19),
    ]
    assert [row["codecs"].partition("(")[0] for row in rows] == ["Plain", "Int8"]


@pytest.mark.parametrize("command", ["ls", "stats", "verify", "gc"])
def test_a_typo_makes_no_store(tmp_path, command):
    for where in (tmp_path / "typo", f"file://{tmp_path}/typo", "memory://typo"):
        result = run(command, where)
        assert result.exit_code == 2
        assert "there is no store at" in result.stderr
    assert run("export", tmp_path / "typo", tmp_path / "copy").exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_errors(tmp_path):
    put(Disk(tmp_path / "store"), [1])
    for arguments, message in (
        (("ls", "redis://:secret@127.0.0.1:1"), "does not answer"),
        (("export", tmp_path / "store", "redis://:secret@127.0.0.1:1"), "the store failed"),
        (("ls", "s4://bucket"), "give a directory"),
        (("gc", tmp_path / "store", "--budget", "much"), "2GB"),
        (("gc", tmp_path / "store", "--budget", "0"), "at least 1"),
        (("ls", tmp_path / "store", "--limit", "0"), "--limit"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.stderr.split())
        assert "secret" not in result.output


def test_an_empty_store(tmp_path):
    Disk(tmp_path / "store")
    assert run("ls", tmp_path / "store").stdout == "no blocks\n"
    assert last_line(run("stats", tmp_path / "store", "--json"))["blocks"] == 0
    assert last_line(run("verify", tmp_path / "store", "--json"))["whole"] == 0


@pytest.mark.parametrize(
    ("text", "count"),
    [("2GB", 2 * 10**9), ("500MiB", 500 * 2**20), ("1.5k", 1500), ("77", 77), ("3 tb", 3 * 10**12)],
)
def test_byte_counts(text, count):
    from kvkeep.cli.output import size_in_bytes

    assert size_in_bytes(text, "--budget") == count
