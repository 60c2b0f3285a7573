"""keep_until: the beginning of a prompt stays, and nothing else about the cache changes."""

from __future__ import annotations

import pytest
import torch
from support.tiny_models import tiny

import kvkeep
from kvkeep import CacheSpec, keep_until
from kvkeep.errors import ShapeError, SpecError
from kvkeep.generate import SamplingParams
from kvkeep.testing import live_tokens

PIECES = ["<s>", "Be b", "rief.#", "##\n\nWhy", " ###", "?", "#"]


class Pieces:
    """A tokenizer of a few tokens, whose text is anything."""

    def decode(self, ids):
        return "".join(PIECES[i] for i in ids)


class Bytes:
    """A tokenizer of one token a byte."""

    def __call__(self, text):
        return {"input_ids": list(text.encode())}

    def decode(self, ids, skip_special_tokens=False):
        return bytes(ids).decode(errors="replace")


def kept(spec, ids, marker, tokenizer=None, **options):
    """The kept positions' end."""
    found = keep_until(spec, ids, marker, tokenizer, **options)
    assert isinstance(found, CacheSpec)
    return found.policy.keep_to


@pytest.mark.parametrize(
    ("marker", "stop"),
    [
        ("brief", 3),  # begins in one token and ends within another
        ("ief.###", 4),  # its last token holds other text too
        ("brief.#", 3),
        ("###", 4),  # of two places the first
        ("<s>", 1),
        ("Why ###?", 6),
        ([1, 2], 3),
        (torch.tensor([[6, 6]]), 8),
        ([3], 4),
    ],
)
def test_the_end_of_the_marker(marker, stop):
    ids = [0, 1, 2, 3, 4, 5, 6, 6, 3]
    assert kept("window:40", ids, marker, Pieces()) == stop
    assert kept("window:40", torch.tensor([ids]), marker, Pieces()) == stop


def test_a_character_of_several_tokens_is_kept_whole():
    text = "Antworte knapp → auf Französisch. Wie heißt der Fluß?"
    ids = Bytes()(text)["input_ids"]
    for marker in ("→", "Französ", "ß"):
        stop = len(text[: text.index(marker) + len(marker)].encode())
        assert kept("h2o:200", ids, marker, Bytes()) == stop


SPECS = [
    "window:16",
    "window:12,sinks=4+int8",
    "window:30%,least=3",
    "h2o:16",
    "h2o:30%,least=3",
    "snapkv:30%,least=12,recent=8,window=4",
    "adakv:0(knorm:16,recent=2)",
    "pyramid(tova:16)",
    "qvlen:16,recent=2,keep_to=2+int8",
]


def positions(layer):
    """Those held, of each row and head."""
    return [place for row in live_tokens(layer) for place, _, _ in row]


@pytest.mark.parametrize("text", SPECS)
def test_the_beginning_stays_and_the_budget_too(text):
    spec = CacheSpec.parse(text)
    found = keep_until(spec, range(20), [4, 5])
    layer, without = found.layer(), spec.layer()
    for n in (20, *[1] * 20, 9):
        step = torch.randn(3, 2, 2, n, 8)
        layer.step(*step, scale=0.4)
        without.step(*step, scale=0.4)
        held, others = (positions(one) for one in (layer, without))
        assert all(set(range(6)) <= set(place) for place in held)
        if spec.policy.share is None:
            assert sum(map(len, held)) == sum(map(len, others))
    assert str(CacheSpec.parse(str(found))) == str(found)


def test_specs_of_several_layers():
    ids, marker = range(30), [3]
    types = {"sliding_attention": "keep_all", "full_attention": "h2o:16"}
    expected = "full_attention=h2o:16,keep_to=4+plain@growing;sliding_attention=keep_all+plain"
    for given in (types, ";".join(f"{kind}={one}" for kind, one in types.items())):
        assert str(keep_until(given, ids, marker)) == f"{expected}@growing"
    found = keep_until(["keep_all", CacheSpec.parse("window:16,keep_to=9")], ids, marker)
    assert list(map(str, found)) == [
        "keep_all+plain@growing",
        "window:16,keep_to=9+plain@growing",  # it keeps more already
    ]


@pytest.mark.parametrize(
    ("spec", "marker", "options", "message"),
    [
        ("window:16", "Why not", {}, "'Why not' is not in the prompt of 32 tokens"),
        ("window:16", [7, 9], {}, r"\[7, 9\] is not in the prompt"),
        ("window:16", "", {}, "empty"),
        ("window:16", [], {}, "empty"),
        ("window:16", [3], {"most": 1.0}, "most is 1.0; give .* below 1"),
        ("window:16", [8], {}, "9 tokens, more than 50% of the 16 .* of 18 or more.*keep_to=9"),
        ("adakv(h2o:16)", [4], {"most": 0.25}, "5 tokens, more than 25% of the 16.* of 20 or"),
        ("h2o:10%,least=6", [3], {}, "4 tokens, more than 50% of the 6 "),
        ("keep_all+int8", [3], {}, r"keep_all\+int8@growing keeps every token"),
        ([], [3], {}, r"spec \[\]; give text"),
        (7, [3], {}, "spec 7; give text"),
        ("kvzip:50%", [3], {}, "kvzip cannot be told"),
        ("kvzap:50%,scorer=none", [3], {}, "kvzap cannot be told"),
        ("h2o:16,keep_from=2,keep_to=4", [3], {}, "2 to 4 are already kept"),
        ("snapkv:16,window=12", [4], {}, "keeps 16 tokens, but protects 17"),
    ],
)
def test_refused(spec, marker, options, message):
    with pytest.raises(SpecError, match=message):
        keep_until(spec, range(32), marker, Bytes(), **options)


def test_what_is_no_prompt():
    with pytest.raises(ShapeError, match="one prompt"):
        keep_until("window:16", torch.zeros(2, 9, dtype=torch.int64), [3])
    with pytest.raises(ShapeError, match="no tokenizer"):
        keep_until("window:16", range(9), "text")


def test_each_prompt_of_a_batch_has_its_own():
    torch.manual_seed(0)
    model, params = tiny("llama", vocab_size=256), SamplingParams(max_new_tokens=6)
    kvkeep.attach(model)
    prompts = ["Be brief. " + "What is a lighthouse? " * 3, "Sing. " + "Who rang the bell? " * 4]
    options = {"tokenizer": Bytes(), "progress": False}

    def answered(prompts, spec, **more):
        many = kvkeep.generate_many(model, prompts, params, spec=spec, **options, **more)
        return [answer.tokens for (answer,) in many]

    found = answered(prompts, "window:24", keep_until=".")
    explicit = [
        answered([prompt], f"window:{24 - stop},keep_to={stop}")[0]
        for prompt, stop in zip(prompts, (9, 5), strict=True)
    ]
    assert found == explicit
    assert all(a != b for a, b in zip(found, answered(prompts, "window:24"), strict=True))
