"""Saved caches: they go on to the last bit, and a file that is not whole is refused."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from zlib import crc32

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.process_group import execute, start
from support.two_layer_caches import SPECS as PARSED
from support.two_layer_caches import cache_of, filled, go_on, held, same

from kvkeep.cache import Cache
from kvkeep.errors import SavedCacheError, StateError
from kvkeep.files import snapshot
from kvkeep.files.snapshot import Saved
from kvkeep.spec import CacheSpec

pytestmark = pytest.mark.usefixtures("one_thread")

SPECS = list(map(str, PARSED))
HERE = Path(__file__).parents[1]


def save(cache, path, spec="keep_all", **options):
    specs, fingerprint = [spec] * len(cache), {"weights": "0"}
    snapshot.save(cache, path, specs=specs, fingerprint=fingerprint, **options)


def steps_of(spec):
    return 1 + crc32(spec.encode()) % 5


def python(code, *arguments, **options):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=HERE, text=True, check=True, **options)


GO_ON = """
import sys, torch
from pathlib import Path
from safetensors.torch import save_file
from kvkeep.files.snapshot import Saved
from support.two_layer_caches import cache_of, go_on
torch.set_num_threads(1)
outs = {}
for path in sorted(Path(sys.argv[1]).glob("*.kv")):
    saved = Saved(path)
    cache = cache_of(saved.header.specs[0])
    saved.restore_to(cache)
    outs |= {f"{path.stem}.{i}": x.contiguous() for i, x in enumerate(go_on(cache))}
save_file(outs, sys.argv[2])
"""


@pytest.mark.parametrize("ragged", [pytest.param(False, marks=pytest.mark.slow), True])
def test_another_process_goes_on_to_the_last_bit(tmp_path, ragged):
    for index, spec in enumerate(SPECS):
        save(filled(spec, steps_of(spec), ragged=ragged), tmp_path / f"{index}.kv", spec)
    start(execute, 1, GO_ON, [str(tmp_path), str(tmp_path / "outs")], [str(HERE)])
    outs = load_file(tmp_path / "outs")
    for index, spec in enumerate(SPECS):
        expected = go_on(filled(spec, steps_of(spec), ragged=ragged))
        assert same([outs[f"{index}.{i}"] for i in range(len(expected))], expected), spec


def test_a_fork_with_shared_rows_is_saved_as_what_it_holds(tmp_path):
    fork = filled("keep_all", 3, ragged=True).freeze().fork(rows=3)
    go_on(fork, rows=6)
    save(fork, tmp_path / "a.kv")
    loaded = cache_of("keep_all")
    Saved(tmp_path / "a.kv").restore_to(loaded)
    assert held(loaded) == held(fork)
    assert loaded.seen.equal(fork.seen)
    assert loaded.shared_bytes == 0
    assert same(go_on(loaded, rows=6), go_on(fork, rows=6))


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_frozen_is_saved(tmp_path, spec):
    cache, plain = filled(spec, 5, ragged=True), filled(spec, 5, ragged=True)
    fork = cache.freeze().fork()
    save(fork, tmp_path / "a.kv", spec)
    loaded = cache_of(spec)
    Saved(tmp_path / "a.kv").restore_to(loaded)
    assert held(loaded) == held(plain)
    assert same(go_on(loaded), go_on(plain))


def test_heads_keep_their_order(tmp_path):
    """A file's tensors are in the order of their names, where 10 comes before 2."""
    spec = "adakv(h2o:12)"
    cache, loaded = (Cache([CacheSpec.parse(spec).layer()]) for _ in range(2))
    cache.layers[0].step(*(torch.randn(1, 12, 30, 8) for _ in range(3)), scale=0.3)
    save(cache, tmp_path / "a.kv", spec)
    Saved(tmp_path / "a.kv").restore_to(loaded)
    assert held(loaded) == held(cache)


def test_tokens_and_size(tmp_path):
    cache = cache_of("keep_all+int8")
    layer_tokens = torch.randn(1, 2, 3000, 16)
    for layer in cache.layers:
        layer.extend(layer_tokens, layer_tokens)
        layer.settle()
    ids = torch.arange(3000)[None]
    save(cache, tmp_path / "a.kv", "keep_all+int8", tokens=ids)
    assert Saved(tmp_path / "a.kv").tokens.equal(ids)
    size = (tmp_path / "a.kv").stat().st_size - ids.nbytes
    assert 0 < size - cache.live_bytes < cache.live_bytes / 100
    planes = load_file(tmp_path / "a.kv")  # as the planes are, in a file that others read
    assert planes["0.slots.k"].equal(cache.layers[0].storage.read()["k"])


def small(path):
    cache = filled("h2o:12,recent=3+int8", 4, ragged=True)
    save(cache, path, "h2o:12,recent=3+int8")
    return cache


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_flipped_bytes_are_found(tmp_path, every):
    small(tmp_path / "a.kv")
    whole = (tmp_path / "a.kv").read_bytes()
    Saved(tmp_path / "a.kv")
    bits = random.Random(0)
    for at in range(0, len(whole), every):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << bits.randrange(8)
        (tmp_path / "b.kv").write_bytes(flipped)
        with pytest.raises(SavedCacheError):
            Saved(tmp_path / "b.kv")


def test_every_truncation_is_found(tmp_path):
    small(tmp_path / "a.kv")
    whole = (tmp_path / "a.kv").read_bytes()
    for length in range(0, len(whole), 7):
        (tmp_path / "b.kv").write_bytes(whole[:length])
        with pytest.raises(SavedCacheError):
            Saved(tmp_path / "b.kv")
    (tmp_path / "b.kv").write_bytes(whole + b"more")
    with pytest.raises(SavedCacheError):
        Saved(tmp_path / "b.kv")


def rewritten(path, tensors=None, **changes):
    """The file with another header, whose checksums are right: what malice would make of it."""
    saved = Saved(path)
    from dataclasses import asdict

    import xxhash

    from kvkeep.files import tensor_file

    tensors = load_file(path) | (tensors or {})
    checksums = {name: tensor_file.checksum(x) for name, x in tensors.items()}
    text = json.dumps(asdict(saved.header) | {"checksums": checksums} | changes)
    metadata = {"kvkeep": text, "kvkeep_checksum": xxhash.xxh3_128_hexdigest(text.encode())}
    save_file(tensors, path, metadata)


def layers_with(path, **changes):
    from dataclasses import asdict

    return [asdict(layer) | changes for layer in Saved(path).header.layers]


@pytest.mark.parametrize(
    "change",
    [
        {"columns": 3},
        {"floor": 99},
        {"rows": 10**12},
        {"heads": 1},
        {"key_width": 24},
        {"dtype": "torch.int8"},
        {"kind": "another"},
        {"columns": -1},
        {"columns": "17"},
        {"rows": True},
    ],
    ids=str,
)
def test_headers_that_do_not_fit_change_nothing(tmp_path, change):
    path = tmp_path / "a.kv"
    small(path)
    rewritten(path, layers=layers_with(path, **change))
    cache = filled("h2o:12,recent=3+int8", 2, ragged=False)
    before = held(cache)
    with pytest.raises(SavedCacheError):
        Saved(path).restore_to(cache)
    assert held(cache) == before


def test_widths_that_a_codec_refuses(tmp_path):
    """int4 has no codes of 3 elements."""
    path = tmp_path / "a.kv"
    cache = filled("keep_all+int4:recent=0,sinks=0", 2, ragged=False)
    save(cache, path)
    rewritten(path, layers=layers_with(path, key_width=3))
    before = held(cache)
    with pytest.raises(SavedCacheError, match=r"a\.kv, layer 0: .*save it again"):
        Saved(path).restore_to(cache)
    assert held(cache) == before


def test_tensors_that_do_not_fit_change_nothing(tmp_path):
    path = tmp_path / "a.kv"
    cache = filled("h2o:12,recent=3+int8", 2, ragged=False)
    before = held(cache)
    small(path)
    planes = {n[8:]: x for n, x in load_file(path).items() if n.startswith("1.slots.")}
    scale = planes["k_scale"]
    for tensors in (
        {"1.slots.k_scale": scale[:, :, 1:].clone()},
        {"1.slots.k_scale": scale.float()},
        {"1.slots.more": scale},
        {"1.slots.position": torch.full((2, 2, 12), 10**6, dtype=torch.int32)},
        {"1.pads": torch.zeros(5, dtype=torch.int64)},
        {"1.pads": torch.full((2,), 10**6)},
        {f"1.nothing.{name}": x for name, x in planes.items()},
        {f"1.head.0.{name}": x for name, x in planes.items()},
    ):
        small(path)
        rewritten(path, tensors)
        with pytest.raises(SavedCacheError):
            Saved(path).restore_to(cache)
        assert held(cache) == before


def test_a_file_must_hold_what_was_fed_and_fit(tmp_path):
    path = tmp_path / "a.kv"
    save(filled("keep_all", 5, ragged=False), path)
    planes = {n: x for n, x in load_file(path).items() if n.startswith("1.slots.")}
    rewritten(path, {name: x[:, :, 3:].clone() for name, x in planes.items()})
    with pytest.raises(SavedCacheError, match=r"holds \[14\] of 17"):
        Saved(path).restore_to(cache_of("keep_all"))
    save(filled("keep_all", 5, ragged=False), path)
    with pytest.raises(SavedCacheError, match="17 slots needed"):
        Saved(path).restore_to(cache_of("keep_all@fixed:9"))


def test_foreign_files(tmp_path):
    path = tmp_path / "a.kv"
    with pytest.raises(SavedCacheError, match="no file"):
        Saved(path)
    save_file({"x": torch.zeros(3)}, path)
    with pytest.raises(SavedCacheError, match="no kvkeep header"):
        Saved(path)
    path.write_bytes((2**62).to_bytes(8, "little") + b"{}")
    with pytest.raises(SavedCacheError, match="cannot be read"):
        Saved(path)
    path.write_bytes(b"\x80\x04K\x01.")  # a pickle
    with pytest.raises(SavedCacheError, match="cannot be read"):
        Saved(path)
    small(path)
    rewritten(path, format=2, version="9.9")
    with pytest.raises(
        SavedCacheError, match=r"format 2, this kvkeep reads 1; install kvkeep 9\.9"
    ):
        Saved(path)
    small(path)
    rewritten(path, specs=[[[]]])
    with pytest.raises(SavedCacheError, match="specs"):
        Saved(path)
    small(path)
    rewritten(path, layers=[])
    with pytest.raises(SavedCacheError, match="0 layers"):
        Saved(path)
    small(path)
    with pytest.raises(SavedCacheError, match="layers"):
        Saved(path).restore_to(Cache([CacheSpec.parse("keep_all").layer()]))
    with pytest.raises(StateError, match="empty"):
        save(cache_of("keep_all"), path)


def forked(function):
    """Run it in another process, which ends with status 0 if it returns: its id."""
    child = os.fork()
    if not child:
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def test_a_full_disk_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.kv"
    small(path)
    before = path.read_bytes()
    larger = filled("keep_all", 5, ragged=False)

    def full():
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        with pytest.raises(SavedCacheError, match="the previous file is unchanged"):
            save(larger, path)

    assert os.waitpid(forked(full), 0)[1] == 0
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.kv"]
    with pytest.raises(SavedCacheError, match="No such file or directory"):
        small(tmp_path / "missing" / "a.kv")
    small(tmp_path / ("漢" * 80 + ".kv"))


def test_kill_at_any_moment_leaves_the_old_file_or_the_new_one(tmp_path):
    path, caches = tmp_path / "a.kv", [filled("keep_all", n, ragged=False) for n in (2, 5)]
    for cache in caches:
        cache.repeat(40)
    start = time.perf_counter()
    save(caches[0], path)
    took = time.perf_counter() - start

    moments, seen = random.Random(0), set()
    for _ in range(25):
        told, tells = os.pipe()

        def write(tells=tells):
            while True:
                for cache in caches:
                    save(cache, path, sync=False)
                    os.write(tells, b".")

        child = forked(write)
        os.close(tells)  # so that reading ends if the child does
        for _ in range(1 + moments.randrange(2)):
            assert os.read(told, 1)
        time.sleep(moments.uniform(0, 3 * took))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)
        seen.add(Saved(path).header.layers[0].columns)
    save(caches[0], path)
    assert seen == {10, 17}
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "what was half-written is left"


def test_two_processes_save_to_one_name(tmp_path):
    def saver(cache):
        def write():
            for _ in range(60):
                save(cache, tmp_path / "a.kv", sync=False)

        return write

    children = [forked(saver(filled("keep_all", n, ragged=False))) for n in (2, 5)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert Saved(tmp_path / "a.kv").header.layers[0].columns in (10, 17)
    assert [p.name for p in tmp_path.iterdir()] == ["a.kv"]
