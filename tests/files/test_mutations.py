"""Bytes that were changed anyhow, also under a right seal: refused by kvkeep's own errors, or a
miss; and what is served is right."""

from __future__ import annotations

import random
import shutil
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load, save
from support.foreign_formats import FORMATS, bounded
from support.mutations import changed
from support.slow import slow_unless
from support.store_places import blocks_of, found, put
from support.two_layer_caches import cache_of, filled, held

from kvkeep.errors import KVKeepError
from kvkeep.files import snapshot
from kvkeep.files.snapshot import Saved
from kvkeep.store import Disk, Label, Redis, StoredBlock
from kvkeep.store import backend as backend_module

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = list(range(24))


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


@counts(16, 4_000)
def test_blocks_on_disk(tmp_path, count):
    """What is found is right, and what was lost is put again."""
    draw = random.Random(count)
    put(Disk(tmp_path / "whole"), TOKENS)
    for turn in range(count):
        path = tmp_path / f"store{turn % 4}"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", path)
        files = sorted((path / "blocks").rglob("*.safetensors"))
        for file in draw.sample(files, draw.randrange(3)):
            file.write_bytes(changed(file.read_bytes(), "kvkeep_block", draw))
        disk = Disk(path)
        for _ in range(4):  # what is damaged is seen when it is read, and then put again
            found(disk, TOKENS)
            put(disk, TOKENS)
        assert found(disk, TOKENS) == 24
        disk.gc(older_than=0)
        assert found(Disk(path), TOKENS) == 24
        assert disk.failures == 0, disk.last_error


@counts(120, 20_000)
def test_values_in_redis(monkeypatch, count):
    """As a server would send them; that they are put aside is asked of it, too."""
    pytest.importorskip("redis")
    monkeypatch.setattr(backend_module, "REST_S", 0.0)
    draw = random.Random(count)
    whole = {block.key: block.to_bytes() for block in blocks_of(TOKENS)}
    backend = Redis("redis://127.0.0.1:1/0")
    values, aside = {}, []

    def answers(commands):
        given = []
        for name, *arguments in commands:
            some = [values.get(str(one).removeprefix("kvkeep:block:")) for one in arguments]
            if name == "MGET":
                given.append(some)
            elif name in ("STRLEN", "GETRANGE"):
                given.append(len(some[0] or b"") if name == "STRLEN" else some[0])
            else:
                aside.extend([1] * (name == "RENAME" and "quarantine" in arguments[1]))
                given.append([b""])
        return given

    monkeypatch.setattr(backend._server, "pipeline", answers)
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


def same(one, other):
    """Whether two nested lists hold the same, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.equal(other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_unless(lambda name: name != "program", FORMATS))
def test_foreign_formats(tmp_path, monkeypatch, name, few):
    """Each changed file is refused by kvkeep's own error, or holds what was written."""
    pytest.importorskip({"gguf": "gguf", "adapter": "peft"}.get(name, "torch"))
    make, count = FORMATS[name]
    draw, found = random.Random(count + few), make(tmp_path, monkeypatch)
    whole, right = found.path.read_bytes(), found.read()
    refused = 0
    count = 16 if few else count
    for turn in range(count):
        resealed = draw.random() < found.resealed
        data = (found.reseal if resealed else found.damage)(whole, draw)
        found.path.write_bytes(data)
        try:
            with bounded():
                held = found.read()
        except KVKeepError:
            refused += 1
            continue
        except BaseException as error:
            error.add_note(f"change {turn} of {name}, resealed: {resealed}")
            raise
        if found.sealed and not resealed:
            assert same(held, right), f"change {turn} of {name}"
    assert refused > count // 8
    found.path.write_bytes(whole)
    assert same(found.read(), right)


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
