"""Models with sliding windows and backends: another process finds what left a window, too."""

from __future__ import annotations

import random

import pytest
import torch
from support.random_ids import row
from support.store_places import BACKENDS, Place, damaged
from support.tiny_models import tiny

import kvkeep
from kvkeep import PrefixStore
from kvkeep.planes import POSITION, slot_count
from kvkeep.store import Memory, StoredBlock
from kvkeep.store.block import digest
from kvkeep.store.borders import plain_identity
from kvkeep.store.layer_slices import Stretch

WINDOW = 8
"""Of the tiny models."""

BLOCK = 5
"""Tokens of a block: the windows contain a full block and parts of two more."""

BORDER = 46
"""Tokens after which windows hold a full block and a part of the block before."""

TEXT = row(10 * WINDOW + 3)
MORE = row(6, 5)


@torch.no_grad()
def logits(model, tokens, cache):
    return model(tokens[None], past_key_values=cache).logits[0]


@pytest.fixture(params=["mistral", "gemma3", "gpt-oss", "llama4"])
def model(request):
    """All layers with a window, some, with attention sinks, and in chunks."""
    found = tiny(request.param)
    with kvkeep.attach(found):
        yield found


@pytest.fixture(scope="module")
def gemma():
    found = tiny("gemma3")
    with kvkeep.attach(found):
        yield found


def opened(backend, block=BLOCK):
    return PrefixStore(backend=backend, block=block)


def found(model, backend, text, **options):
    store = opened(backend)
    hit = store.find(model, text, **options)
    store.check()
    return hit.found


def kinds(backend):
    return [plain_identity(label.identity)[1] for label in backend.labels([*backend.scan()])]


def slots(memory):
    """Slots in blocks: of layers without a window, and of layers with one."""
    counts = {True: 0, False: 0}
    for block in memory._blocks.values():
        for kind, planes in zip(WINDOWED, block.content.layers, strict=True):
            counts[kind] += slot_count(planes)
    return counts[False], counts[True]


WINDOWED = [layer.window is not None for layer in kvkeep.Cache(tiny("gemma3")).layers]


@pytest.mark.parametrize(
    ("name", "spec", "kind"),
    [
        *((name, "keep_all", "disk") for name in ("mistral", "gemma3", "gpt-oss")),
        ("gemma3", "keep_all+int8", "redis"),
    ],
)
def test_another_process_continues_bit_for_bit(place_of, name, kind, spec):
    place, memory = place_of(kind), PrefixStore()
    model = tiny(name)
    with kvkeep.attach(model):
        for store in (memory, opened(place.open())):
            store.read(model, TEXT, spec=spec)
        expected = memory.read(model, TEXT, spec=spec)
        hit = opened(place.open()).read(model, TEXT, spec=spec)
        assert hit.found == expected.found == len(TEXT)
        for part in MORE.split([1, 5]):
            assert logits(model, part, hit.cache).equal(logits(model, part, expected.cache))


@pytest.mark.parametrize(
    ("model", "block"),
    [
        *((name, BLOCK) for name in ("mistral", "gemma3", "gpt-oss", "llama4")),
        *(("gemma3", block) for block in (3, 16, 256)),
    ],
    indirect=["model"],
)
def test_hits_end_where_those_in_memory_end(model, block):
    """Texts that continue others, and that leave others in the middle of a block; and a text that
    leaves a longer one before its end, but after a border."""
    system, chat = TEXT[:38], row(40, 7)
    texts = [
        TEXT,
        torch.cat([system, chat]),
        torch.cat([system, row(20, 8)]),  # the border is where the second one left the first
        torch.cat([system, chat, row(33, 9)]),
        torch.cat([TEXT[:70], row(3, 10)]),
        torch.cat([TEXT[:60], row(3, 11)]),
        torch.cat([system, chat[:30], row(3, 12)]),
        TEXT[:38],
    ]
    memory, backend = PrefixStore(), Memory()
    for text in texts:
        expected = memory.read(model, text)
        store = opened(backend, block)
        hit = store.read(model, text)
        store.check()
        assert hit.found == expected.found
    assert memory.read(model, texts[5]).found == len(texts[5])


def test_the_next_turn_of_a_conversation(model):
    """Prompts and answers, each of a process of its own, written by a thread."""
    backend, text = Memory(), row(5)
    for turn in range(5):
        store = opened(backend)
        cache, known = store.read(model, text)
        assert turn == 0 or known == len(text) - 12
        answer = row(7, 20 + turn)
        logits(model, answer, cache)
        text = torch.cat([text, answer])
        assert store.learn(model, text, cache, wait=False) == len(text)
        store.flush()
        assert found(model, backend, text) == len(text)
        text = torch.cat([text, row(12, 40 + turn)])


def test_bytes_written(gemma):
    """Slots of other layers are written once. A window is written once at each border, except
    slots that are there."""
    backend = Memory()
    opened(backend).read(gemma, TEXT)
    full, windowed = (WINDOWED.count(kind) for kind in (False, True))
    assert slots(backend)[0] == full * len(TEXT)
    once = slots(backend)[1]
    assert once == windowed * WINDOW
    opened(backend).read(gemma, torch.cat([TEXT[:BORDER], MORE]))
    assert slots(backend)[0] == full * (len(TEXT) + 1 + 1 + len(MORE))  # both from token 45 on
    assert slots(backend)[1] - once <= 2 * windowed * WINDOW
    for seed in range(3):  # the border is known
        opened(backend).read(gemma, torch.cat([TEXT[:BORDER], row(6, seed + 60)]))
    assert kinds(backend).count("slots in windows") == kinds(backend).count("windows at ends") == 1
    before = len(backend._blocks)
    opened(backend).read(gemma, TEXT)
    assert len(backend._blocks) == before


def test_a_text_within_the_window_is_written_once(gemma):
    backend = Memory()
    opened(backend).read(gemma, TEXT[:7])
    assert slots(backend) == tuple(7 * WINDOWED.count(kind) for kind in (False, True))
    assert sorted(kinds(backend)) == ["", "", "places of ends"]
    assert found(gemma, backend, torch.cat([TEXT[:7], MORE])) == 7


def test_blocks_of_texts_within_the_window_are_still_read(gemma):
    """Blocks with all slots, which earlier versions wrote, and which had no other blocks."""
    backend = Memory()
    opened(backend).read(gemma, TEXT[:WINDOW])
    for key, block in [*backend._blocks.items()]:
        if plain_identity(block.identity)[1]:
            backend.delete(key)
    assert found(gemma, backend, TEXT) == WINDOW
    opened(backend).read(gemma, TEXT)
    assert found(gemma, backend, TEXT) == len(TEXT)


@pytest.mark.parametrize("kind", ["slots in windows", "windows at ends", "places of ends"])
def test_without_a_block_there_is_no_hit(gemma, tmp_path, kind):
    """Of a block that is missing or damaged, until it was written again."""
    place = Place("disk", tmp_path)
    backend, draw = place.open(), random.Random(1)
    opened(backend).read(gemma, TEXT)
    text = torch.cat([TEXT[:BORDER], MORE])
    opened(backend).read(gemma, text)
    wanted = torch.cat([TEXT[:BORDER], row(3, 77)])
    assert found(gemma, backend, wanted) == BORDER
    keys = [*backend.scan()]
    own = [
        key
        for key, label in zip(keys, backend.labels(keys), strict=True)
        if plain_identity(label.identity)[1] == kind
    ]
    assert own
    for key in own:
        name = next(name for name in place.blocks() if key.replace("/", "-") in name)
        if kind == "places of ends":
            place.remove(name)
        else:
            place.write(name, damaged(place.read(name), draw))
    assert found(gemma, backend, wanted) == 0
    hit = opened(backend).read(gemma, wanted)
    alone = kvkeep.Cache(gemma)
    logits(gemma, wanted, alone)
    expected = logits(gemma, MORE, alone)
    torch.testing.assert_close(logits(gemma, MORE, hit.cache), expected, atol=1e-5, rtol=1e-4)
    assert found(gemma, backend, wanted) == len(wanted)


def changed(block, change):
    layers = [{name: change(name, x) for name, x in one.items()} for one in block.content.layers]
    content = Stretch(layers, len(block.tokens))
    return StoredBlock(
        block.identity, block.prefix, block.tokens, content, block.routed, block.geometries
    )


@pytest.mark.parametrize("kind", ["slots in windows", "windows at ends"])
@pytest.mark.parametrize(
    "change",
    [
        lambda name, x: x + 1 if name == POSITION else x,
        lambda name, x: x[:, :, 1:],
        lambda name, x: x.double() if x.is_floating_point() else x,
    ],
    ids=["other positions", "a slot fewer", "another dtype"],
)
def test_wrong_slots_are_put_aside(gemma, kind, change):
    """Intact blocks that whoever may write to a backend has made."""
    backend = Memory()
    opened(backend).read(gemma, TEXT)
    opened(backend).read(gemma, torch.cat([TEXT[:BORDER], MORE]))
    wanted = torch.cat([TEXT[:BORDER], row(3, 77)])
    assert found(gemma, backend, wanted) == BORDER
    before = len(backend._blocks)
    for key, block in backend._blocks.items():
        if plain_identity(block.identity)[1] == kind:
            backend._blocks[key] = changed(block, change)
    assert found(gemma, backend, wanted) == 0
    assert backend.damaged == before - len(backend._blocks) > 0


def test_tokens_that_are_not_in_memory(gemma, tmp_path):
    """The store in memory has the tokens, but no windows; only these are read."""
    backend = BACKENDS["memory"](tmp_path)
    store = opened(backend)
    store.read(gemma, TEXT)
    opened(backend).read(gemma, torch.cat([TEXT[:BORDER], MORE]))
    asked = []
    backend.get = lambda key, get=backend.get, **used: asked.append(key) or get(key, **used)
    assert store.find(gemma, torch.cat([TEXT[:BORDER], row(3, 77)])).found == BORDER
    blocks = [backend._blocks[key] for key in asked if key in backend._blocks]
    plain = {block.prefix for block in blocks if not plain_identity(block.identity)[1]}
    assert plain == {digest(TEXT[: BORDER - 1])}  # of the last block
    store.check()


def test_a_budget_in_memory(gemma):
    """Windows that do not fit are not added."""
    backend, whole = Memory(), PrefixStore()
    whole.read(gemma, TEXT)
    opened(backend).read(gemma, TEXT)
    tight = PrefixStore(whole.nbytes // 2, backend=backend, block=BLOCK)
    assert tight.find(gemma, TEXT).found < len(TEXT)
    tight.check()
