"""A chunk is divided into steps: it keeps, and gives, what it would if it were fed in pieces."""

from __future__ import annotations

import pytest
import torch
from support.tiny_models import tiny

import kvkeep
from kvkeep.errors import CapacityError, SpecError, StateError, UnsupportedError
from kvkeep.generate import SamplingParams
from kvkeep.layer.layer import LayerCache
from kvkeep.planes import POSITION
from kvkeep.policy import ReplayPolicy
from kvkeep.spec import CacheSpec
from kvkeep.storage import Growing

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, HEADS, DIM = 32, 2, 8
SPECS = {  # a spec, to which the options of a step are added; the layer's window; query heads
    "h2o": ("h2o:8{}", None, 4),
    "h2o normalised": ("h2o:8,recent=2,normalize=1{}@fixed:12", None, 2),
    "vlen": ("vlen:8,sinks=1{}", None, 6),
    "qh2o": ("qh2o:8,recent=2{}+int8", None, 4),
    "qvlen": ("qvlen:8{}+int8/int4", None, 4),
    "tova": ("tova:8{}@fixed", None, 4),
    "snapkv": ("snapkv:8,window=4,pool=3{}", None, 4),
    "knorm": ("knorm:8,recent=1{}", None, 4),
    "keydiff": ("keydiff:8{}@host", None, 4),
    "expected attention": ("expected_attention:8,sinks=2,future=16{}", None, 4),
    "in a window": ("h2o:8{}", 12, 4),
    "a share": ("h2o:25%,least=6{}", None, 4),
    "pyramid": ("pyramid:2(h2o:8{})", None, 4),
    "adakv": ("adakv:0.3(h2o:8,recent=2{})", None, 4),
    "adakv of keys": ("adakv:0(knorm:8{})", None, 4),
}
PADDED = {"none": [], "left": [(0, 0, 20)], "within": [(0, 0, 5), (1, 13, 19), (1, 30, 32)]}


def layer_of(name, step=""):
    text, window, heads = SPECS[name]
    return CacheSpec.parse(text.format(step)).layer(window=window), heads


def fed(layer, heads, pieces, holes, attend=None):
    """Feed the same tokens in these pieces: the outputs (B, Hq, n, D) of those that are real."""
    make = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, h, TOKENS, DIM, generator=make) for h in (heads, HEADS, HEADS))
    real = torch.ones(2, TOKENS, dtype=torch.bool)
    for row, start, stop in holes:
        real[row, start:stop] = False
    outs, start = [], 0
    for n in pieces:
        part = slice(start, start + n)
        position = layer.next_positions(n, q.device, real[:, part]) if holes else None
        given = (x[:, :, part] for x in (q, k, v))
        outs.append(layer.step(*given, position, scale=0.4, attend=attend))
        start += n
    return torch.cat(outs, dim=2) * real[:, None, :, None]


def state(layer):
    """Positions and the policy's planes, by row and head, in the order of positions and without
    empty slots."""
    planes = layer.slots.evictable()
    order = planes[POSITION].argsort(dim=2, stable=True)
    live = planes[POSITION].gather(2, order) >= 0
    return {
        name: [
            [x[shown] for x, shown in zip(*row, strict=True)]
            for row in zip(planes[name].gather(2, order), live, strict=True)
        ]
        for name in (POSITION, *layer.policy.planes)
    }


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name in wanted:
        for row, other in zip(found[name], wanted[name], strict=True):
            for x, y in zip(row, other, strict=True):
                torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "padded"),
    [(name, "within") for name in SPECS]
    + [(name, how) for name in ("h2o", "snapkv", "a share", "adakv") for how in ("none", "left")],
)
def test_a_chunk_keeps_what_its_pieces_keep(name, padded):
    """Positions, scores and outputs. With step=1 that is what token by token gives, for every
    chunking; with step=4, what pieces of 4 give, for chunks of multiples of 4."""
    for most, chunkings in ((1, ([TOKENS], [7, 1, 1, 14, 9])), (4, ([TOKENS], [8, 24]))):
        apart, heads = layer_of(name)
        expected = fed(apart, heads, [most] * (TOKENS // most), PADDED[padded])
        for chunks in chunkings:
            whole, _ = layer_of(name, f",step={most}")
            out = fed(whole, heads, chunks, PADDED[padded])
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
            assert_same(state(whole), state(apart))
            assert whole.fed == TOKENS
            assert whole.length < TOKENS
            assert whole.rollback_limit == apart.rollback_limit


def test_steps_begin_where_a_chunk_begins():
    """The last one of a chunk may be shorter."""
    whole, apart = (layer_of("h2o", step)[0] for step in (",step=4", ""))
    out = fed(whole, 4, [14, 18], [])
    torch.testing.assert_close(out, fed(apart, 4, [4, 4, 4, 2, 4, 4, 4, 4, 2], []))
    assert_same(state(whole), state(apart))


def test_without_a_step_chunks_decide():
    """Or the test above would show nothing."""
    for name in ("h2o", "vlen", "tova", "snapkv", "keydiff", "adakv"):
        layers = [layer_of(name) for _ in range(2)]
        for (layer, heads), pieces in zip(layers, ([TOKENS], [1] * TOKENS), strict=True):
            fed(layer, heads, pieces, [])
        assert not layers[0][0].positions().equal(layers[1][0].positions()), name


def test_rows_are_parted_after_all_steps():
    layers = [CacheSpec.parse(f"h2o:64{step}").layer() for step in ("", ",step=1")]
    for layer in layers:
        fed(layer, 4, [TOKENS], PADDED["left"])
    assert layers[0].stats().live_bytes == layers[1].stats().live_bytes
    assert layers[0].storage.length < 2 * TOKENS  # of both rows


def test_recorded_decisions_are_repeated():
    made = CacheSpec.parse("h2o:8,recent=2,step=3").layer()
    made.cursor.evicted = []
    out = fed(made, 4, [20, 12], [])
    assert len(made.cursor.evicted) > 2
    again = CacheSpec.parse("h2o:8").layer()
    policy = ReplayPolicy(made.policy, made.cursor.evicted)
    again = LayerCache(policy, again.key_codec, again.value_codec, Growing())
    torch.testing.assert_close(fed(again, 4, [20, 12], []), out)
    assert again.positions().sort().values.equal(made.positions().sort().values)


def failing(at):
    """Attention that raises in its call number `at`."""
    left = [at]

    def attend(q, view, options):
        left[0] -= 1
        if not left[0]:
            raise MemoryError
        return kvkeep.attention.dispatch(q, view, options)

    return attend


@pytest.mark.parametrize("before", [0, 5])
def test_a_chunk_that_fails_in_a_later_step_is_taken_back(before):
    layer = CacheSpec.parse("knorm:40,step=4").layer()
    chunk = [torch.randn(1, h, 12, DIM) for h in (4, 2, 2)]
    if before:
        layer.step(*(x[:, :, :before] for x in chunk), scale=1.0)
    with pytest.raises(MemoryError):
        layer.step(*chunk, scale=1.0, attend=failing(3))
    assert layer.fed == layer.length == before
    layer.step(*chunk, scale=1.0)
    assert layer.positions()[0, 0].tolist() == list(range(before + 12))


@pytest.mark.parametrize("spec", ["knorm:5,step=4", "h2o:40,step=4"])
def test_a_chunk_that_fails_after_a_lasting_step_is_refused(spec):
    """A step that has evicted, or changed scores, cannot be undone."""
    layer = CacheSpec.parse(spec).layer()
    chunk = [torch.randn(1, h, 12, DIM) for h in (4, 2, 2)]
    with pytest.raises(MemoryError):
        layer.step(*chunk, scale=1.0, attend=failing(3))
    with pytest.raises(StateError, match="a chunk after its first step"):
        layer.step(*chunk, scale=1.0)
    layer.reset()
    layer.step(*chunk, scale=1.0)
    assert layer.fed == 12


def test_what_does_not_fit_is_refused_before_the_first_step():
    layer = CacheSpec.parse("h2o:50%,step=4@fixed:16").layer()
    with pytest.raises(CapacityError):
        fed(layer, 4, [TOKENS], [])
    assert not layer.fed


def test_tokens_that_see_later_ones_are_one_step():
    """Those that they see must be there; such as those of an image."""
    layers = [CacheSpec.parse(f"h2o:8{step}").layer() for step in ("", ",step=4")]
    chunk = [torch.randn(1, h, 12, DIM) for h in (4, 2, 2)]
    until = torch.arange(12).clamp(min=7)
    outs = [layer.step(*chunk, scale=1.0, until=until) for layer in layers]
    assert outs[0].equal(outs[1])
    assert layers[0].positions().equal(layers[1].positions())


def test_slots_that_other_layers_read_have_no_steps():
    with pytest.raises(SpecError, match=r"steps of 4.*leave out step"):
        CacheSpec.parse("h2o:8,step=4").layer(readers=1)


def test_the_option():
    for text in ("h2o:8,step=1", "adakv(h2o:8,step=2)", "pyramid(tova:25%,step=64)"):
        spec = CacheSpec.parse(text)
        assert CacheSpec.parse(str(spec)) == spec
        assert str(spec).startswith(text)
    assert CacheSpec.parse("pyramid(h2o:8,step=3)").policy.step == 3
    for tokens in ("8", "25%"):
        with pytest.raises(SpecError, match=r"h2o step 0.*use step=1"):
            CacheSpec.parse(f"h2o:{tokens},step=0")
    with pytest.raises(SpecError, match="no option 'step'"):
        CacheSpec.parse("window:8,step=1")


def test_states_fit_only_caches_with_the_same_step(tmp_path):
    model = tiny("llama")
    kvkeep.attach(model)
    cache = kvkeep.Cache(model, "h2o:8,step=2")
    with torch.inference_mode():
        model(ids(1, 12), past_key_values=cache)
    cache.save(tmp_path / "saved")
    for spec in ("h2o:8", "h2o:8,step=1"):
        other = kvkeep.Cache(model, spec)
        with pytest.raises(SpecError, match="step=2"):
            other.restore(cache.snapshot())
    again = kvkeep.load(tmp_path / "saved", model)
    assert again.layers[0].policy.step == 2
    assert again.layers[0].positions().equal(cache.layers[0].positions())


# -- models ---------------------------------------------------------------------------------


def ids(rows, n, seed=0):
    return torch.randint(2, 96, (rows, n), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def prompted(model, spec, pieces, mask=None):
    """Logits, and positions by layer, row and head, after a prompt in these pieces and a token."""
    cache, given, start, logits = kvkeep.Cache(model, spec), ids(2, 30), 0, []
    for n in [*pieces, 1]:
        stop = start + n
        more = {} if mask is None else {"attention_mask": mask[:, :stop]}
        found = model(given[:, start:stop], past_key_values=cache, **more).logits
        logits.append(found if mask is None else found * mask[:, start:stop, None])
        start = stop
    kept = [
        [[sorted(p for p in head if p >= 0) for head in row] for row in layer.positions().tolist()]
        for layer in cache.layers
    ]
    return torch.cat(logits, dim=1), kept


@pytest.mark.parametrize(
    ("family", "spec", "padded"),
    [
        ("llama", "h2o:8,recent=2{}", False),
        ("llama", "tova:8{}+int8", True),
        ("gemma3", "snapkv:6,window=2,pool=3{}", True),  # one layer has a window of its own
        ("qwen3", "pyramid:2(keydiff:8,recent=1{})", False),
        ("gpt2", "adakv(h2o:8,recent=1{})", True),
    ],
)
def test_a_prompt_in_chunks_equals_token_by_token(family, spec, padded):
    model = tiny(family)
    kvkeep.attach(model)
    mask = torch.ones(2, 30, dtype=torch.int64)
    mask[0, :9] = 0
    mask = mask if padded else None
    expected, kept = prompted(model, spec.format(""), [1] * 29, mask)
    for pieces in ([29], [5, 1, 23]):
        logits, found = prompted(model, spec.format(",step=1"), pieces, mask)
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-3)
        assert found == kept


def test_prompts_that_are_packed():
    """Of a batch, each prompt is divided by itself, also beside tokens of other sequences."""
    model = tiny("llama")
    kvkeep.attach(model)
    prompts = [ids(1, n, seed=n)[0].tolist() for n in (20, 13, 9)]
    params = SamplingParams(max_new_tokens=6)
    found = kvkeep.generate_many(model, prompts, params, spec="tova:8,step=1")
    for prompt, (answer,) in zip(prompts, found, strict=True):
        cache, given = kvkeep.Cache(model, "tova:8"), torch.tensor([prompt])
        with torch.inference_mode():
            for token in given.split(1, dim=1):
                logits = model(token, past_key_values=cache).logits
            assert len(answer.tokens) == 6
            for chosen in answer.tokens:
                assert chosen == int(logits[0, -1].argmax())
                logits = model(torch.tensor([[chosen]]), past_key_values=cache).logits


@pytest.mark.slow
def test_a_prompt_in_a_compiled_graph():
    model = tiny("llama")
    kvkeep.attach(model)
    expected, kept = prompted(model, "tova:8", [1] * 29)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    cache, given, logits = kvkeep.Cache(model, "tova:8,step=1"), ids(2, 30), []
    with torch.no_grad():
        for part in given.split([20, 9, 1], dim=1):
            logits.append(compiled(part, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, atol=2e-4, rtol=1e-3)
    assert cache.layers[1].positions()[0, 0].sort().values.tolist() == kept[1][0][0]


def test_attention_weights_are_refused():
    """The steps of a chunk attend to different slots."""
    model = tiny("llama")
    kvkeep.attach(model)
    cache = kvkeep.Cache(model, "h2o:64,step=4")
    with pytest.raises(UnsupportedError, match=r"steps of 4 .*keep_all"), torch.no_grad():
        model(ids(1, 12), past_key_values=cache, output_attentions=True)
    assert not cache.fed
