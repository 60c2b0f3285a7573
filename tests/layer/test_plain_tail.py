"""Codecs of single tokens that leave the newest tokens plain for a while."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvkeep.layer.layer import LayerCache
from kvkeep.spec import CacheSpec
from kvkeep.testing import live_tokens

TEXT = 300


@pytest.fixture
def text() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, TEXT, 32, generator=generator) for heads in (4, 2, 2)]


def made(spec: str) -> LayerCache:
    return CacheSpec.parse(spec).layer(capacity=TEXT)


def fed(layer: LayerCache, text: list[Tensor], stop: int, chunk: int) -> Tensor:
    """The outputs of the text's tokens up to `stop` that the layer was not fed yet."""
    found = []
    while layer.fed < stop:
        at = slice(layer.fed, min(stop, layer.fed + chunk))
        found.append(layer.step(*(x[:, :, at] for x in text), scale=0.2))
    return torch.cat(found, dim=2)


def plain_positions(layer: LayerCache) -> list[int]:
    plain = [segment.position[0, 0] for segment in layer.slots.segments() if segment.plain]
    return sorted(torch.cat(plain).tolist())


@pytest.mark.parametrize("centre", [0, 256])
@pytest.mark.parametrize("chunk", [1, 70])
def test_plain_tokens_are_as_computed(text: list[Tensor], chunk: int, centre: int) -> None:
    layer, exact = made(f"keep_all+int4:recent=1000,centre={centre}"), made("keep_all")
    torch.testing.assert_close(fed(layer, text, TEXT, chunk), fed(exact, text, TEXT, chunk))


def test_first_and_newest_tokens_stay_plain(text: list[Tensor]) -> None:
    layer, exact = made("keep_all+int4:recent=64,sinks=4"), made("keep_all")
    first = fed(layer, text, 200, 200)
    torch.testing.assert_close(first, fed(exact, text, 200, 200))  # a chunk reads its own tokens
    for stop in range(201, TEXT, 7):
        fed(layer, text, stop, 1)
        plain = plain_positions(layer)
        assert plain[:4] == [0, 1, 2, 3]
        assert plain[4:] == list(range(plain[4], stop))
        assert 64 <= stop - plain[4] < 64 + 32
        assert sorted(layer.positions()[0, 0].tolist()) == list(range(stop))


@pytest.mark.parametrize("back", [10, 60, 100, 229])
def test_a_crop_reaches_encoded_tokens(text: list[Tensor], back: int) -> None:
    layer, exact = made("keep_all+int4:recent=32,sinks=4"), made("keep_all")
    fed(layer, text, 150, 150)
    fed(layer, text, 230, 1)
    before = dict(zip(*live_tokens(layer)[0][1][:2], strict=True))
    layer.crop(-back)
    assert sorted(layer.positions()[0, 0].tolist()) == list(range(230 - back))
    for position, key in zip(*live_tokens(layer)[0][1][:2], strict=True):
        assert key.equal(before[position])
    expected = fed(exact, text, TEXT, TEXT)[:, :, 230 - back :]
    found = fed(layer, text, TEXT, 9)
    assert float((found - expected).norm() / expected.norm()) < 0.2
    assert sorted(layer.positions()[0, 0].tolist()) == list(range(TEXT))


@pytest.mark.parametrize(
    "spec", ["h2o:64+{}", "window:64+{}", "keep_all+{}@fixed", "keep_all+{}@host"]
)
def test_other_layers_encode_tokens_as_they_arrive(text: list[Tensor], spec: str) -> None:
    late, once = made(spec.format("int4:recent=64")), made(spec.format("int4:recent=0,sinks=0"))
    for layer in (late, once):
        fed(layer, text, 100, 100)
    assert fed(late, text, 120, 1).equal(fed(once, text, 120, 1))


def test_drafts_taken_back_change_nothing(text: list[Tensor]) -> None:
    layer, alone = (made("keep_all+int4:recent=32,sinks=4") for _ in range(2))
    for one in (layer, alone):
        fed(one, text, 150, 150)
    layer.record_past = True
    for stop in range(151, 260, 3):
        fed(layer, text, stop + 4, 5)
        layer.crop(stop - layer.fed)
    layer.record_past = False
    fed(alone, text, layer.fed, 1)
    assert plain_positions(layer) == plain_positions(alone)
    out, expected = (fed(one, text, TEXT, 1) for one in (layer, alone))
    torch.testing.assert_close(out, expected)
