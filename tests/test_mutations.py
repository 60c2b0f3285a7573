"""Bytes that were changed anyhow, also under a right seal: refused by kvkeep's own errors, or a
miss; and what is served is right."""

from __future__ import annotations

import copy
import json
import random
import shutil
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load, save
from support.store_places import blocks_of, found, put
from support.two_layer_caches import cache_of, filled, held

from kvkeep.errors import KVKeepError
from kvkeep.files import snapshot
from kvkeep.files.headers import sealed
from kvkeep.files.snapshot import Saved
from kvkeep.store import Disk, Label, Redis, StoredBlock, remote

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = list(range(24))
ABSURD = [
    *(None, True, False, -1, 0, 1, 2, 3, 7, 8, 16, 10**7, 2**31, 2**53, 2**63, 2**70, 1.5, 1e308),
    *(float("nan"), float("inf"), "", "x", "torch.int8", "torch.float64", "keep_all", "\ud800"),
    *("window:99999999999", "adakv(" * 80, "h2o:8@fixed:2000000000", "[" * 3000, [], [[]], {}),
    *({"a": 1}, [1, 2], [2**62, 2**62], [0, 0], [None] * 4, "F32", "I64", "BF16", "a\0b"),
]


def bytes_changed(data, draw):
    """Some bits, a part that is missing, doubled, moved or another, or another end."""
    data = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 3, 20])):
        place, length = draw.randrange(len(data) + 1), draw.choice([1, 2, 8, 64, 500])
        kind = draw.randrange(6)
        if kind == 0 and place < len(data):
            data[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[place : place + length]
        elif kind == 2:
            data[place:place] = data[: draw.randrange(length + 1)]
        elif kind == 3:
            data[place : place + length] = draw.randbytes(length)
        elif kind == 4:
            del data[place:]
        else:
            data[:8] = draw.choice([0, 1, 2**20, 2**62, 2**64 - 1, len(data)]).to_bytes(8, "little")
    return bytes(data)


def json_changed(part, draw):
    """One or a few parts of nested lists and objects, replaced, removed, doubled or swapped."""
    part = copy.deepcopy(part)
    for _ in range(draw.choice([1, 1, 2, 5])):
        place = part
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw.choice(keys)
            inner = place[key]
            if isinstance(inner, (dict, list)) and inner and draw.random() < 0.75:
                place = inner
                continue
            kind = draw.randrange(5)
            if kind == 0:
                del place[key]
            elif kind == 1:
                other = draw.choice(keys)
                place[key], place[other] = place[other], place[key]
            elif kind == 2 and isinstance(place, list):
                place.append(inner)
            elif kind == 2:
                place[str(draw.choice(ABSURD))] = inner
            elif type(inner) is int and draw.random() < 0.5:
                place[key] = inner + draw.choice([-8, -1, 1, 8, 2**32])
            else:
                place[key] = copy.deepcopy(draw.choice(ABSURD))
            break
    return part


def changed(data, name, draw):
    """A file of tensors whose bytes, header or sealed header is another."""
    if draw.random() < 0.4:
        return bytes_changed(data, draw)
    size = 8 + int.from_bytes(data[:8], "little")
    outer, body = json.loads(data[8:size]), data[size:]
    if draw.random() < 0.3:
        outer = json_changed(outer, draw)
    else:
        inner = json_changed(json.loads(outer["__metadata__"][name]), draw)
        with suppress(UnicodeEncodeError):
            outer["__metadata__"] = sealed(name, inner)
    start = json.dumps(outer).encode()
    start += b" " * (-len(start) % 8)
    return len(start).to_bytes(8, "little") + start + body


def counts(few, many):
    """A quick run, and the long one."""
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.slow)])


@counts(400, 46_000)
def test_blocks(count):
    draw, blocks = random.Random(count), blocks_of(TOKENS)
    whole = {block.key: block.to_bytes() for block in blocks}
    refused = 0
    for _ in range(count):
        key = draw.choice(list(whole))
        data = changed(whole[key], "kvkeep_block", draw)
        for read in (StoredBlock.from_bytes, Label.read):
            try:
                assert read(data, key).key == key
            except ValueError:
                refused += 1
    assert refused > count


@counts(200, 30_000)
@pytest.mark.parametrize("spec", ["keep_all", "h2o:12,recent=3+int8", "adakv(h2o:12)"])
def test_saved_caches(tmp_path, spec, count):
    draw, cache = random.Random(count), filled(spec, 4, ragged=True)
    path = tmp_path / "a.kv"
    specs = [spec] * len(cache)
    tokens = torch.arange(4)[None]
    snapshot.save(cache, path, specs=specs, fingerprint={"weights": "0"}, tokens=tokens, sync=False)
    whole, right = path.read_bytes(), held(cache)
    target = filled(spec, 2, ragged=False)
    before, refused = held(target), 0
    for _ in range(count // 3):
        path.write_bytes(changed(whole, "kvkeep", draw))
        try:
            saved = Saved(path, verify=draw.random() < 0.8)
            assert saved.tokens is None or saved.tokens.dtype == torch.int64
            saved.restore_to(target)
        except KVKeepError:
            refused += 1
            assert held(target) == before
            continue
        if saved._verify:
            assert held(target) == right
        k = torch.randn(2, 2, 1, 16)
        with suppress(KVKeepError):  # it holds something that fits its layers, and goes on
            target.layers[0].extend(k, k)
        target = filled(spec, 2, ragged=False)
    assert refused > count // 6


@counts(30, 4_000)
def test_blocks_and_index_on_disk(tmp_path, count):
    """What is found is right, and what was lost is put again."""
    draw = random.Random(count)
    put(Disk(tmp_path / "whole"), TOKENS)
    for turn in range(count):
        path = tmp_path / f"store{turn % 4}"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", path)
        files = sorted((path / "blocks").iterdir())
        for file in draw.sample(files, draw.randrange(3)):
            file.write_bytes(changed(file.read_bytes(), "kvkeep_block", draw))
        if draw.random() < 0.5:
            index = path / "index.sqlite"
            index.write_bytes(bytes_changed(index.read_bytes(), draw))
        disk = Disk(path)
        for _ in range(4):  # what is damaged is seen when it is read, and then put again
            found(disk, TOKENS)
            put(disk, TOKENS)
        assert found(disk, TOKENS) == 24
        disk.gc(older_than=0)
        assert found(Disk(path), TOKENS) == 24
        assert disk.failures == 0, disk.last_error


@counts(200, 20_000)
def test_values_in_redis(monkeypatch, count):
    """As a server would send them; that they are put aside is asked of it, too."""
    pytest.importorskip("redis")
    monkeypatch.setattr(remote, "REST_S", 0.0)
    draw = random.Random(count)
    whole = {block.key: block.to_bytes() for block in blocks_of(TOKENS)}
    backend = Redis("redis://127.0.0.1:1/0")
    values, aside = {}, []

    def answers(commands):
        given = []
        for name, *arguments in commands:
            key = str(arguments[0]).removeprefix("kvkeep:block:")
            if name in ("GET", "STRLEN", "GETRANGE"):
                value = values.get(key)
                given.append(len(value or b"") if name == "STRLEN" else value)
            else:
                aside.extend([1] * (len(arguments) > 5 and "quarantine" in str(arguments[-2])))
                given.append([b""])
        return given

    monkeypatch.setattr(backend, "_pipeline", answers)
    wrong = 0
    for _ in range(count):
        values.clear()
        values.update(whole)
        key = draw.choice(list(whole))
        values[key] = changed(whole[key], "kvkeep_block", draw)
        wrong += values[key] != whole[key]
        backend.labels([key])
        assert found(backend, TOKENS) in (0, 8, 16, 24)
    assert backend.damaged > wrong // 2
    assert len(aside) == backend.damaged


def test_the_changes_are_such_as_are_meant():
    """Some are noticed by their seal, some only behind it, and the file is one that is read."""
    (block, *_) = blocks_of(TOKENS)
    data, draw = block.to_bytes(), random.Random(0)
    assert load(save(load(data)))["tokens"].equal(block.tokens)
    reasons = set()
    for _ in range(300):
        try:
            StoredBlock.from_bytes(changed(data, "kvkeep_block", draw), block.key)
        except ValueError as error:
            reasons.add(str(error)[:45])
    assert len(reasons) > 15
    assert any("checksum" in reason for reason in reasons)
    assert cache_of("keep_all").fed == 0
