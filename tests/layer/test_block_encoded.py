"""Layers whose codec encodes several tokens together: blocks, and the plain tail before them."""

from __future__ import annotations

import pytest
import torch

from kvkeep.codec import Kivi
from kvkeep.errors import ShapeError
from kvkeep.layer.layer import LayerCache
from kvkeep.layer.stats import promised_bytes
from kvkeep.policy import KeepAll
from kvkeep.spec import CacheSpec
from kvkeep.storage import Growing
from kvkeep.testing import live_tokens


def fed(layer, *chunks, rows=1):
    for n in chunks:
        layer.step(*torch.randn(3, rows, 2, n, 16), scale=0.25)


@pytest.mark.parametrize("storage", ["concat", "growing"])
def test_kivi_takes_rows_while_its_tail_is_empty(storage):
    layer = CacheSpec.parse(f"keep_all+kivi:4,together=4,recent=0@{storage}").layer()
    fed(layer, 8, rows=2)
    layer.take_rows(torch.tensor([1]))
    fed(layer, 3)
    assert layer.length == 11


def test_kivi_encodes_after_each_crop_while_recording():
    layer = CacheSpec.parse("keep_all+kivi:4,together=4,recent=2,sinks=2").layer()
    layer.record_past = True
    for _ in range(5):
        fed(layer, 9)
        layer.crop(-1)
    assert layer.storage.length < 8


def test_the_first_and_the_newest_tokens_of_each_row_stay_plain():
    layer = CacheSpec.parse("keep_all+kivi:4,together=8,recent=3,sinks=2").layer()
    columns = torch.arange(32)
    position = torch.stack([columns, columns - 9]).clamp(min=-1)
    for n in (slice(24), slice(24, 32)):
        k = torch.randn(2, 1, 32, 16)[:, :, n]
        layer.extend(k, k, position[:, n])
        layer.settle()
        newest = [list(range(int(last) - 5, int(last) + 1)) for last in position[:, n.stop - 1]]
        held = layer.storage.read()["position"][:, 0].sort().values.tolist()
        assert held == [[0, 1, *own] for own in newest]


@pytest.mark.parametrize("tokens", [13, 14, 37, 38])
def test_promised_bytes_count_what_stays_plain(tokens):
    layer = CacheSpec.parse("keep_all+kivi:4,together=8,recent=3,sinks=3").layer()
    fed(layer, tokens)
    geometry = layer.history.geometry
    own = layer.policy, layer.key_codec, layer.value_codec
    assert promised_bytes(*own, tokens, geometry) == layer.stats().live_bytes


def test_padding_does_not_widen_the_block_it_is_in():
    layer = CacheSpec.parse("keep_all+kivi:4,together=8,recent=0").layer()
    k = torch.rand(1, 1, 24, 16)
    k[:, :, :5] = 1e3
    position = torch.arange(24)[None] - 5
    layer.extend(k, k, position.clamp(min=-1))
    layer.settle()
    place, keys, values = live_tokens(layer)[0][0]
    for found in (keys, values):
        torch.testing.assert_close(found.float(), k[0, 0, 5:][place], atol=0.04, rtol=0)


def test_kivi_is_not_widened_by_padding():
    codec = "keep_all+kivi:4,together=8,recent=0"
    both, alone = (CacheSpec.parse(codec).layer() for _ in range(2))
    k = torch.randn(1, 1, 16, 16)
    padded = torch.cat([torch.full((1, 1, 8, 16), 1e3), k], dim=2)
    position = torch.arange(24)[None] - 8
    both.extend(padded, padded, position.clamp(min=-1))
    both.settle()
    alone.extend(k, k)
    alone.settle()
    ours, expected = (live_tokens(x)[0][0] for x in (both, alone))
    assert ours[0] == expected[0]
    torch.testing.assert_close(ours[1], expected[1])


def test_widths_that_do_not_fit_raise_before_anything_is_held():
    layer = LayerCache(KeepAll(), Kivi(2, together=4), Kivi(2, together=4), Growing())
    with pytest.raises(ShapeError, match="width is 6"):
        layer.extend(torch.randn(1, 1, 1, 6), torch.randn(1, 1, 1, 6))
    assert layer.length == layer.fed == 0
