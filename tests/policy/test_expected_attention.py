"""Expected attention against its formula in float64, and against attention that is then seen."""

from __future__ import annotations

import math

import pytest
import torch
from support.tiny_models import tiny

import kvkeep
from kvkeep.planes import POSITION
from kvkeep.policy.scored import SCORE
from kvkeep.rotary import Rotary
from kvkeep.spec import CacheSpec

HEADS, GROUP, DIM, FUTURE, SINKS = 2, 3, 8, 5, 2
ROTARIES = {
    "none": None,
    "halves": Rotary(torch.tensor([1.0, 0.3, 0.1, 0.02])),
    "interleaved, partial": Rotary(torch.tensor([1.0, 0.3]), interleaved=True),
    "the end of a latent": Rotary(torch.tensor([1.0, 0.3]), first=3),
}
CHUNKS = [([12] + [1] * 8, 0), ([1] * 20, 0), ([5, 9, 6], 0), ([12] + [1] * 12, 4), ([1] * 24, 3)]
"""Of a text, and how many of the newest tokens are kept."""


def rotation(position, rotary):
    """R(position), (D, D) float64, written out entry by entry."""
    matrix, half = torch.eye(DIM, dtype=torch.float64), rotary.inv_freq.shape[0]
    for i, frequency in enumerate(rotary.inv_freq.double().tolist()):
        a, b = (2 * i, 2 * i + 1) if rotary.interleaved else (i, i + half)
        a, b = rotary.first + a, rotary.first + b
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        matrix[a, a] = matrix[b, b] = cos
        matrix[a, b], matrix[b, a] = -sin, sin
    return matrix


def expected_scores(queries, keys, values, newest, rotary, scale):
    """queries {position: (G, D)}, keys, values {position: (D,)} of a head -> {position: score}."""
    turned = [
        torch.stack([rotation(-p, rotary) @ q for q in rows]) if rotary else rows
        for p, rows in queries.items()
        if p >= SINKS
    ]
    stacked = torch.stack(turned)  # (n, G, D)
    ahead = torch.eye(DIM, dtype=torch.float64)
    if rotary:
        matrices = [rotation(newest + 1 + i, rotary) for i in range(FUTURE)]
        ahead = torch.stack(matrices).mean(dim=0)
    scores = dict.fromkeys(keys, 0.0)
    for g in range(GROUP):
        mean = ahead @ stacked[:, g].mean(dim=0)
        centred = stacked[:, g] - stacked[:, g].mean(dim=0)
        spread = ahead @ (centred.T @ centred / len(centred)) @ ahead.T
        logits = {p: scale * (k @ mean) + scale**2 / 2 * (k @ spread @ k) for p, k in keys.items()}
        total = sum(math.exp(x) for p, x in logits.items() if p >= SINKS)
        for p in keys:
            scores[p] += math.exp(logits[p]) / total / GROUP * float(values[p].norm())
    return scores


@pytest.mark.parametrize(
    ("chunks", "recent", "rotary"),
    [
        *((*how, ROTARIES["halves"]) for how in CHUNKS),
        *((*CHUNKS[3], rotary) for name, rotary in ROTARIES.items() if name != "halves"),
    ],
)
def test_decisions(rotary, chunks, recent):
    text = f"expected_attention:8,recent={recent},future={FUTURE},sinks={SINKS}"
    layer = CacheSpec.parse(text).layer(rotary=rotary)
    n, pads = sum(chunks), 3
    q, k, v = torch.randn(2, HEADS * GROUP, n, DIM), *torch.randn(2, 2, HEADS, n, DIM)
    position = torch.stack([torch.arange(n) - pads, torch.arange(n)]).clamp(min=-1)
    live = {(b, h): set() for b in range(2) for h in range(HEADS)}
    observed, scores = {0: set(), 1: set()}, {key: {} for key in live}
    start = 0
    for chunk in chunks:
        part = slice(start, start + chunk)
        start += chunk
        layer.step(q[:, :, part], k[:, :, part], v[:, :, part], position[:, part], scale=0.7)
        place = layer.storage.read()[POSITION]
        for (b, h), kept in live.items():
            shift = pads if b == 0 else 0
            kept |= {p for p in position[b, part].tolist() if p >= 0}
            newest = start - 1 - shift
            due = chunk > 1 or (newest + 1) % max(1, recent) == 0
            if due:
                observed[b] |= {p for p in position[b, part].tolist() if p >= 0}
            if due and max(observed[b], default=-1) >= SINKS:
                heads = slice(h * GROUP, (h + 1) * GROUP)
                scores[b, h] = expected_scores(
                    {p: q[b, heads, p + shift].double() for p in observed[b]},
                    {p: k[b, h, p + shift].double() for p in kept},
                    {p: v[b, h, p + shift].double() for p in kept},
                    newest,
                    rotary,
                    0.7,
                )
            if len(kept) > 8:
                free = [p for p in kept if SINKS <= p <= newest - recent]
                free.sort(key=lambda p: (scores[b, h][p], p))
                kept -= set(free[: len(kept) - 8])
            assert {p for p in place[b, h].tolist() if p >= 0} == kept


def test_what_the_sinks_receive_does_not_weigh_the_heads_of_a_group():
    """Nearly all that is expected of the first head goes to the sink. Among the other tokens it
    prefers the odd ones more than the second head prefers the even ones."""
    n = 12
    k = torch.zeros(1, 1, n, DIM)
    k[..., 0, 0], k[..., 1::2, 1], k[..., 2::2, 2] = 1, 1, 1
    q = torch.zeros(1, 2, n, DIM)
    q[:, 0, :, 0], q[:, 0, :, 1], q[:, 1, :, 2] = 20, 3, 2
    layer = CacheSpec.parse("expected_attention:6,recent=0,sinks=1").layer()
    layer.step(q, k, torch.ones(1, 1, n, DIM), scale=1.0)
    assert sorted(layer.positions()[0, 0].tolist()) == [0, 3, 5, 7, 9, 11]


def test_a_chunk_of_sinks_only():
    layer = CacheSpec.parse("expected_attention:6,recent=2,sinks=4").layer()
    for n in (3, 6):
        layer.step(torch.randn(1, 2, n, DIM), *torch.randn(2, 1, 1, n, DIM), scale=1.0)
    kept = sorted(layer.positions()[0, 0].tolist())
    assert kept == [0, 1, 2, 3, 7, 8]


def test_rotary_turns_as_the_matrix_does():
    for rotary in (Rotary(torch.tensor([1.0, 0.3, 0.1, 0.02])), Rotary(torch.tensor([1.0]), True)):
        x = torch.randn(3, DIM, dtype=torch.float64)
        place = torch.tensor([0, 5, -7])
        expected = torch.stack(
            [rotation(int(p), rotary) @ row for p, row in zip(place, x, strict=True)]
        )
        torch.testing.assert_close(rotary.turn(x, place), expected)


@torch.no_grad()
def test_each_type_of_layer_has_its_own_rotation():
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
    }
    model = tiny("gemma3", rope_parameters=rope, sliding_window=64)
    with kvkeep.attach(model):
        cache = kvkeep.Cache(model, "expected_attention:16,sinks=1")
        model(torch.randint(2, 96, (1, 40)), past_key_values=cache)
    assert [layer.length for layer in cache.layers] == [16, 16]
    x, place = torch.randn(1, 1, 5, 8), torch.arange(5)
    for layer, kind in zip(cache.layers, model.config.layer_types, strict=True):
        cos, sin = model.model.rotary_emb(x, place[None], layer_type=kind)
        expected = x * cos + torch.cat([-x[..., 4:], x[..., :4]], dim=-1) * sin
        torch.testing.assert_close(layer.rotary.turn(x, place), expected)


@pytest.mark.filterwarnings("ignore::kvkeep.errors.PrecisionWarning")
@pytest.mark.parametrize(
    ("codec", "width", "dtype"),
    [
        ("plain", 64, torch.bfloat16),
        ("plain", 7, torch.float16),
        ("plain", 40, torch.float32),
        ("int8", 64, torch.bfloat16),
        ("int4:recent=20,sinks=2", 64, torch.bfloat16),
        ("int6/int8", 40, torch.float32),
    ],
)
@pytest.mark.parametrize("wrapped", ["{}", "adakv({})"])
def test_native_scores(codec, width, dtype, wrapped):
    """Slots of several blocks, widths that fill no vector, and codecs that rotate keys."""
    spec = wrapped.format("expected_attention:150,recent=3,sinks=2,future=16") + f"+{codec}"
    rotary = Rotary(0.5 ** torch.arange(width // 3), interleaved=width == 40, first=1)
    layers = [CacheSpec.parse(spec).layer(rotary=rotary) for _ in range(2)]
    layers[1].plans = False
    draw = torch.Generator().manual_seed(0)
    mean = torch.randn(1, 2, 1, width, generator=draw)
    for n in (140, *[1] * 30):
        q, k, v = (torch.randn(1, h, n, width, generator=draw) for h in (6, 2, 2))
        for layer in layers:
            layer.step(*(x.to(dtype) for x in (q + 0.5, k + mean, v)), scale=0.2)
    assert layers[0].plan is not None
    native, by_parts = (x.slots.observed().planes for x in layers)
    assert native[POSITION].equal(by_parts[POSITION])
    torch.testing.assert_close(native[SCORE], by_parts[SCORE], rtol=2e-3, atol=1e-5)
    for name, sums in layers[1].history.memory.items():
        torch.testing.assert_close(layers[0].history.memory[name], sums, rtol=1e-4, atol=1e-4)
