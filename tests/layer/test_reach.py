"""What queries see: chunks of positions, blocks of tokens that see each other, all tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kvkeep.codec import Plain
from kvkeep.errors import ShapeError, UnsupportedError
from kvkeep.layer.layer import LayerCache
from kvkeep.planes import POSITION, Reach
from kvkeep.policy import Policy
from kvkeep.spec import CacheSpec
from kvkeep.storage import Growing
from kvkeep.testing import OracleLayer, check_layer, live_tokens

SIZE = 6
SCHEDULES = [[4, 1, 1, 1, 1, 13, 1, 1, 2], [1] * 14, [19, 1, 1, 1, 1, 1]]


def tokens(n, rows=1, width=8):
    return (torch.randn(rows, heads, n, width) for heads in (4, 2, 2))


class Both:
    """A layer and the oracle, which are fed the same; row 0 has `pads` columns of padding."""

    def __init__(self, layer: LayerCache, rows: int = 1, pads: int = 0) -> None:
        self.layer, self.rows, self.pads, self.fed = layer, rows, pads, 0
        own = layer.policy.reach
        self.oracle = OracleLayer(
            reach=None if own == Reach(layer.window or 0) else own,
            window=layer.window,
            chunked=layer.chunked,
        )
        self.dropped = layer.policy.evicts and own is None  # what the next query may see

    def feed(self, n: int, until=None, check: bool = True) -> None:
        q, k, v = tokens(n, self.rows)
        position = torch.arange(self.fed, self.fed + n).repeat(self.rows, 1)
        position[0] = (position[0] - self.pads).clamp(min=-1)
        self.fed += n
        live = [[set(held) for held, _, _ in row] for row in live_tokens(self.layer)]
        given = position if self.pads else position[0]
        out = self.layer.step(q, k, v, given, scale=0.5, until=until)
        wide = None if until is None else until.expand(self.rows, -1)
        expected = self.oracle.step(
            q, k, v, position, scale=0.5, until=wide, live=live or None if self.dropped else None
        )
        real = (position >= 0)[:, None, :, None]  # what padding sees depends on the policy
        torch.testing.assert_close(out * real, expected.float() * real, atol=2e-6, rtol=1e-5)
        if check:
            check_layer(self.layer, self.oracle)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=len)
@pytest.mark.parametrize("pads", [0, 3])
@pytest.mark.parametrize(
    "spec",
    ["keep_all", "keep_all@fixed:64", "h2o:4,recent=2", "window:4,sinks=1", "snapkv:5,window=2"],
)
def test_chunked_attention(spec, pads, schedule):
    rows = 2 if pads else 1
    layer = CacheSpec.parse(spec).layer(window=SIZE, chunked=True)
    both = Both(layer, rows, pads)
    for n in schedule:
        both.feed(n)


@dataclass(frozen=True)
class TheFirst(Policy):
    """Keeps the first tokens, whatever the layer's window."""

    name = "first"
    tokens: int

    @property
    def budget(self):
        return self.tokens

    def victims(self, count, planes, seen):
        return planes[POSITION].topk(count, dim=2).indices


def test_what_another_policy_keeps_of_earlier_chunks_is_hidden():
    layer = LayerCache(TheFirst(3), Plain(), Plain(), Growing(), window=SIZE, chunked=True)
    both = Both(layer)
    both.dropped = True
    for _ in range(2 * SIZE):
        both.feed(1, check=False)


def test_a_new_chunk_frees_the_slots_before_it():
    layer = CacheSpec.parse("keep_all").layer(window=SIZE, chunked=True)
    both, lengths = Both(layer), []
    for _ in range(2 * SIZE + 1):
        both.feed(1)
        lengths.append(layer.length)
    assert lengths == [*range(1, SIZE + 1)] * 2 + [1]


def test_a_step_within_a_chunk_needs_no_mask():
    layer = CacheSpec.parse("keep_all").layer(window=SIZE, chunked=True)
    views = []
    for n in (SIZE, 2, 1, 1):
        _, k, v = tokens(n)
        views.append(layer.extend(k, v))
        layer.settle()
    assert [view.dense for view in views] == [True, False, True, True]


@pytest.mark.parametrize("spec", ["keep_all", "h2o:4", "window:9,sinks=1"])
@pytest.mark.parametrize("pads", [0, 2])
@pytest.mark.parametrize("own", [{}, {"window": 5}, {"window": 5, "chunked": True}], ids=str)
def test_blocks_see_each_other(spec, pads, own):
    """Blocks of 4 tokens in three chunks, one of them longer than the window is from its end."""
    both = Both(CacheSpec.parse(spec).layer(**own), 2 if pads else 1, pads)
    for n in (8, 1, 11, 4, 1):
        place = torch.arange(both.fed, both.fed + n).repeat(both.rows, 1)
        place[0] -= both.pads
        until = (place // 4 * 4 + 3).clamp(max=both.fed + n - 1)
        both.feed(n, until if pads else until[0])


@pytest.mark.parametrize("spec", ["keep_all", "keep_all+int8", "h2o:6", "adakv(h2o:6)"])
def test_not_causal(spec):
    """Every query sees all slots held and its whole chunk."""
    layer = CacheSpec.parse(spec).layer()
    for n in (5, 3, 1):
        q, k, v = tokens(n)
        held = live_tokens(layer)
        out = layer.step(q, k, v, scale=0.5, causal=False)
        for head in range(4):
            past = held[0][head // 2][1:] if held else [k[0, 0, :0].double()] * 2
            own = (x[0, head // 2].double() for x in (k, v))
            keys, values = (torch.cat(pair) for pair in zip(past, own, strict=True))
            weights = torch.softmax(q[0, head].double() @ keys.T * 0.5, dim=-1)
            atol = 0.05 if "int8" in spec else 2e-6
            torch.testing.assert_close(
                out[0, head].double(), weights @ values, atol=atol, rtol=1e-5
            )


def test_the_mass_counts_what_is_not_causal():
    """Padding neither sees nor counts, whatever it is told to see."""
    layer = CacheSpec.parse("h2o:64").layer()
    q, k, v = tokens(4, rows=2)
    position = torch.tensor([[-1, -1, 0, 1], [0, 1, 2, 3]])
    out = layer.step(q, k, v, position, scale=0.5, causal=False)
    assert out[0, :, :2].eq(0).all()
    held = layer.slots.positions()
    for row, first in ((0, 2), (1, 0)):
        own = q[row, :, first:].unflatten(0, (2, 2)), k[row, :, first:]
        scores = torch.einsum("hgnd,hsd->hgns", *own) * 0.5
        mass = scores.softmax(-1).sum(2).mean(1)
        found = layer.slots.evictable()["score"][row][held[row].expand(2, -1) >= 0].view(2, -1)
        torch.testing.assert_close(found / found.sum(), mass / mass.sum(), atol=1e-5, rtol=1e-4)


def test_gradients_where_tokens_see_later_ones():
    layer = CacheSpec.parse("keep_all@concat").layer()
    q, k, v = (x.requires_grad_() for x in tokens(6))
    out = layer.step(q, k, v, scale=0.5, causal=False)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.5, enable_gqa=True)
    grads = (torch.autograd.grad(one.sum(), (q, k, v)) for one in (out, expected))
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


def test_what_needs_an_order_says_so():
    q, k, v = tokens(3)
    for spec, own, what in (
        ("window:4", {}, "policy window drops"),
        ("keep_all", {"window": 4}, "a sliding window of 4 tokens drops"),
        ("h2o:2", {"window": 4, "chunked": True}, "chunked attention of 4 tokens drops"),
    ):
        layer = CacheSpec.parse(spec).layer(**own)
        with pytest.raises(UnsupportedError, match=what):
            layer.step(q, k, v, scale=0.5, causal=False)
        assert layer.fed == 0


@pytest.mark.parametrize("until", [torch.zeros(2), torch.zeros(3), torch.zeros(2, 3).int()])
def test_until_that_does_not_fit(until):
    layer = CacheSpec.parse("keep_all").layer()
    q, k, v = tokens(3)
    with pytest.raises(ShapeError, match=r"until .* give integers"):
        layer.step(q, k, v, scale=0.5, until=until)
    assert layer.fed == 0


def test_a_window_and_a_chunk_are_of_different_kinds():
    one, other = (
        CacheSpec.parse("keep_all").layer(window=SIZE, chunked=chunked) for chunked in (False, True)
    )
    assert one.kind != other.kind
