"""Every legal storage x codec x policy x backend does what the oracle does; illegal ones raise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from support.pairwise import covering, pairwise
from support.slow import slow_unless

from kvkeep.attention import Options, backends, dispatch
from kvkeep.codec import CODECS, Codec, Plain
from kvkeep.errors import SpecError
from kvkeep.layer.layer import LayerCache
from kvkeep.packing import PACKINGS
from kvkeep.policy import POLICIES, KeepAll, Need, Observation, Window
from kvkeep.spec import CacheSpec
from kvkeep.storage import STORAGES, Fixed, Growing
from kvkeep.testing import (
    CODEC_ERRORS,
    EXAMPLES,
    OracleLayer,
    check_layer,
    conformance_specs,
    live_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, HEADS, DIM = 18, 2, 8
SPECS = list(conformance_specs())
PADDING = {"none": [], "left": [(0, 0, 5)], "middle": [(0, 9, 12), (1, 14, 18)]}
GEOMETRIES = [(1, DIM), (3, DIM), (2, 5)]


def cases():
    """Every spec, but of the narrow codes one width for each policy and storage, with ragged rows,
    single tokens or other widths in turns; with every two of backends, chunks, padding and geometry
    for the exact policies in plain and growing storage."""
    narrow = {name: at for at, name in enumerate(("int6", "int5", "int4", "int3", "int2"))}
    places = [(policy, storage) for policy in EXAMPLES for storage in STORAGES]
    for index, spec in enumerate(SPECS):
        turn = places.index((spec.policy.name, spec.storage.name)) % len(narrow)
        if narrow.get(spec.key_codec.name, turn) != turn:
            continue
        exact = spec.policy.budget is None or spec.policy.reach is not None
        growing = spec.storage.name == "growing"
        if exact and growing and spec.key_codec == Plain():
            names = [b.name for b in backends()]
            chosen = pairwise([spec], names, (1, 7, TOKENS), list(PADDING), GEOMETRIES)
            # Single tokens take Triton's interpreter a second.
            yield from (case for case in chosen if case[1:3] != ("triton", 1))
            continue
        turns = [(7, "middle", (3, DIM)), (1, "left", (2, 5)), (7, "middle", (3, DIM))]
        yield spec, "native", *[*turns, (TOKENS, "none", (2, 5))][index % 4]
        if growing:
            yield (
                spec,
                *[("reference", 7, "left", (3, DIM)), ("sdpa", 7, "none", (1, DIM))][index % 2],
            )


def features(case):
    spec, *beside = case
    return spec.policy.name, spec.key_codec.name, spec.storage.name, *beside


CASES = list(cases())
QUICK = covering(CASES, features)
"""Every two of a policy, a codec, a storage, a backend, chunks, padding and a geometry that one of
`CASES` has."""


def test_every_policy_and_codec_has_an_example():
    assert set(EXAMPLES) == set(POLICIES) - {"kvzap"}
    assert set(CODEC_ERRORS) == set(CODECS)


def test_all_that_is_legal_is_here():
    """Only blocks of tokens, and heads of different lengths, leave combinations out."""
    built = {(s.policy.name, s.key_codec.name, s.storage.name) for s in SPECS}
    for policy in EXAMPLES:
        for codec in CODECS:
            for storage in STORAGES:
                blocks = CODECS[codec]().block > 1
                fixed, lasting = STORAGES[storage].fixed_addresses, STORAGES[storage].lasting
                legal = not (blocks and (policy != "keep_all" or fixed or not lasting))
                legal = legal and not (CacheSpec.parse(EXAMPLES[policy]).policy.ragged and fixed)
                assert ((policy, codec, storage) in built) == legal


@pytest.mark.parametrize(
    ("spec", "backend", "chunk", "padding", "geometry"),
    slow_unless(QUICK.__contains__, CASES),
    ids=str,
)
def test_against_the_oracle(spec, backend, chunk, padding, geometry):
    group, width = geometry
    width += -width % PACKINGS[spec.value_codec.layout.packing].together
    layer = spec.layer()
    oracle, stored = (OracleLayer(reach=spec.policy.reach) for _ in range(2))
    real = torch.ones(2, TOKENS, dtype=torch.bool)
    for row, start, stop in PADDING[padding]:
        real[row, start:stop] = False
    q = torch.randn(2, HEADS * group, TOKENS, DIM)
    k, v = torch.randn(2, HEADS, TOKENS, DIM), torch.randn(2, HEADS, TOKENS, width)
    need = Need.MASS in layer.policy.needs
    for start in range(0, TOKENS, chunk):
        part = slice(start, start + chunk)
        position = oracle.next_positions(real[:, part])
        given = None if padding == "none" else position
        evicts = spec.policy.budget is not None and spec.policy.reach is None
        live = None
        if evicts:
            before = live_tokens(layer) if start else [[([], k, v)] * HEADS] * 2
            live = [[set(place) for place, _, _ in row] for row in before]
        queries, *new = (x[:, :, part].to(DEVICE) for x in (q, k, v))
        view = layer.extend(*new, None if given is None else given.to(DEVICE))
        # What attention reads is what was encoded; of a block, that is another thing each time.
        keys, values = encoded(layer, *new, position.to(DEVICE))
        # Where a backend refuses a call, the one that attend chooses answers for it.
        named = next(b for b in backends() if b.name == backend)
        observed, centre = layer.policy.observed, layer.writer.centre
        options = Options(0.4, need_mass=need, observed=observed, centre=centre)
        refused = not named.available or named.refuses(queries, view, options)
        chosen = None if refused else backend
        out, mass = dispatch(queries, view, options, chosen)
        out = out.cpu()
        layer.settle(Observation(mass, queries=queries))
        oracle.step(q[:, :, part], k[:, :, part], v[:, :, part], position, scale=0.4)
        if not layer.slots.late:
            expected = stored.step(q[:, :, part], keys, values, position, scale=0.4, live=live)
            if spec.policy.budget is not None:
                out = out.masked_fill((position < 0)[:, None, :, None], 0.0)
                expected = expected.masked_fill((position < 0)[:, None, :, None], 0.0)
            torch.testing.assert_close(out, expected.float(), atol=3e-6, rtol=1e-5)
        check_layer(layer, oracle)


def encoded(layer, k, v, position):
    """What the codecs make of keys and values at `position`."""
    if layer.slots.late:
        return k.cpu(), v.cpu()
    centre = layer.writer.centre
    lacking = k if centre is None else centre.without(k, position)
    pairs = (layer.key_codec, lacking), (layer.value_codec, v)
    keys, values = (codec.decode(codec.encode(x), torch.float64) for codec, x in pairs)
    keys = keys if centre is None else centre.added(keys, position.reshape(-1, 1, k.shape[2]))
    return keys.cpu(), values.cpu()


@dataclass(frozen=True)
class Blocked(Codec):
    """A codec whose slots cannot be rewritten one by one."""

    name: ClassVar[str] = "blocked"
    rewritable: ClassVar[bool] = False
    planes = Plain.planes
    encode = Plain.encode
    decode = Plain.decode


class Uncut(Blocked):
    """A codec that keeps the newest tokens plain, and cannot keep fewer."""

    name: ClassVar[str] = "uncut"
    rewritable: ClassVar[bool] = True
    tail: ClassVar[int] = 8  # type: ignore[assignment, misc]


ILLEGAL = {
    "a ring smaller than its window": (Window(8, 2), Plain(), Fixed(9), "10 slots.*holds 9"),
    "a tail longer than half of a window": (Window(8), Uncut(), Growing(), "with_tail"),
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
