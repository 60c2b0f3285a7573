"""Every legal storage x codec x policy x backend does what the oracle does; illegal ones raise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from kvkeep.attention import Options, attend, backends
from kvkeep.codec import Codec, Plain
from kvkeep.errors import SpecError
from kvkeep.layer import LayerCache
from kvkeep.policy import POLICIES, KeepAll, Window
from kvkeep.spec import CacheSpec
from kvkeep.storage import Fixed, Growing
from kvkeep.testing import EXAMPLES, OracleLayer, check_layer, conformance_specs

TOKENS, HEADS, DIM = 24, 2, 8
SPECS = list(conformance_specs())
PADDING = {"none": [], "left": [(0, 0, 5)], "middle": [(0, 9, 12), (1, 20, 24)]}


def test_every_policy_has_an_example():
    assert set(EXAMPLES) == set(POLICIES)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("chunk", [1, 7, TOKENS])
@pytest.mark.parametrize("backend", [b.name for b in backends()])
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(("group", "width"), [(1, DIM), (3, DIM), (2, 5)])
def test_against_the_oracle(spec, backend, chunk, padding, group, width):
    layer = spec.layer()
    oracle = OracleLayer(reach=spec.policy.reach)
    real = torch.ones(2, TOKENS, dtype=torch.bool)
    for row, start, stop in PADDING[padding]:
        real[row, start:stop] = False
    q = torch.randn(2, HEADS * group, TOKENS, DIM)
    k, v = torch.randn(2, HEADS, TOKENS, DIM), torch.randn(2, HEADS, TOKENS, width)
    for start in range(0, TOKENS, chunk):
        part = slice(start, start + chunk)
        position = oracle.next_positions(real[:, part])
        given = None if padding == "none" else position
        view = layer.extend(k[:, :, part], v[:, :, part], given)
        # Where a backend refuses a call, the one that attend chooses answers for it.
        named = next(b for b in backends() if b.name == backend)
        refused = named.refuses(q[:, :, part], view, Options(scale=0.4))
        out, _ = attend(q[:, :, part], view, scale=0.4, backend=None if refused else backend)
        layer.settle()
        expected = oracle.step(q[:, :, part], k[:, :, part], v[:, :, part], position, scale=0.4)
        if spec.policy.reach is not None:
            out = out.masked_fill((position < 0)[:, None, :, None], 0.0)
            expected = expected.masked_fill((position < 0)[:, None, :, None], 0.0)
        torch.testing.assert_close(out, expected.float(), atol=2e-6, rtol=1e-5)
        check_layer(layer, oracle)


@dataclass(frozen=True)
class Blocked(Codec):
    """A codec whose slots cannot be rewritten one by one."""

    name: ClassVar[str] = "blocked"
    rewritable: ClassVar[bool] = False
    planes = Plain.planes
    encode = Plain.encode
    decode = Plain.decode


ILLEGAL = {
    "a ring smaller than its window": (Window(8, 2), Plain(), Fixed(9), "10 slots.*holds 9"),
    "single slots of a block codec": (Window(8), Blocked(), Growing(), "window.*blocked"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_combinations_raise(name):
    policy, codec, storage, message = ILLEGAL[name]
    with pytest.raises(SpecError, match=message):
        LayerCache(policy, codec, Plain(), storage)


def test_a_block_codec_may_keep_all():
    layer = LayerCache(KeepAll(), Blocked(), Plain(), Growing())
    layer.extend(torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4))
    assert layer.length == 3


@pytest.mark.parametrize("text", ["keep_all@fixed", "window:8@fixed:7"])
def test_illegal_specs_raise(text):
    with pytest.raises(SpecError, match="@fixed"):
        CacheSpec.parse(text).layer()
