"""Linear layers: the kernel against float64, and which calls it is given."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
from support.instruction_sets import BEST, SETS
from support.tiny_models import tiny
from torch import nn
from torch.nn.functional import linear

import kvkeep
from kvkeep import choice, linears, native_library
from kvkeep.errors import UnsupportedError
from kvkeep.linears import product

pytestmark = pytest.mark.skipif(not native_library.available, reason=native_library.reason)

MOST_ROWS = 32  # that the kernel computes at once
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=SETS)
def instructions(request):
    native_library.use_instructions(request.param)
    yield request.param
    native_library.use_instructions(BEST)


def require_near(found, x, weight, bias=None):
    """As near to float64 as torch is, but for the last bits of a float32 sum."""
    exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
    theirs = linear(x, weight, bias)
    assert found.dtype == x.dtype
    assert found.shape == exact.shape
    size = linear(x.double().abs(), weight.double().abs())
    # Rounding to the dtype, and that of a sum of so many products in float32.
    bound = exact.abs() * torch.finfo(x.dtype).eps + size * 2e-7 * weight.shape[1] ** 0.5 + 1e-7
    assert ((found.double() - exact).abs() <= bound).all()
    mine, others = ((y.double() - exact).norm() for y in (found, theirs))
    assert mine <= 2 * others + 1e-6 * size.norm()


# -- the kernel -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(1, 1), (7, 50), (64, 97), (100, 48), (577, 33), (2049, 5), (4200, 3)]
)
@pytest.mark.usefixtures("instructions")
def test_against_float64(inputs, outputs, dtype):
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    x = torch.randn(MOST_ROWS, inputs).to(dtype)
    for rows in (1, 2, 3, 4, 5, 7, 16, MOST_ROWS):
        require_near(product(x[:rows], weight), x[:rows], weight)
    require_near(product(x[:3], weight, bias), x[:3], weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("instructions")
def test_a_row_does_not_depend_on_the_others(dtype):
    weight, x = torch.randn(70, 300).to(dtype), torch.randn(MOST_ROWS, 300).to(dtype)
    whole = product(x, weight)
    for first, end in ((0, 1), (3, 5), (8, 11), (4, 20)):
        assert product(x[first:end], weight).equal(whole[first:end])
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert product(x, weight).equal(whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [300, 20_000])  # x is copied at once, or 32 rows at a time
@pytest.mark.usefixtures("instructions")
def test_each_of_many_rows_is_as_alone(inputs, dtype):
    weight, bias = torch.randn(110, inputs).to(dtype), torch.randn(110).to(dtype)
    x = torch.randn(3 * MOST_ROWS + 5, 2 * inputs).to(dtype)[:, :inputs]
    found = product(x, weight, bias)
    for first in range(0, len(x), 19):
        assert product(x[first], weight, bias).equal(found[first])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("instructions")
def test_where_weights_lie(dtype):
    """In rows with gaps, at odd addresses, in the middle of others; inputs too."""
    buffer = torch.randn(60 * 90).to(dtype)
    for weight in (
        buffer.as_strided((50, 70), (90, 1), 0),
        buffer.as_strided((50, 70), (70, 1), 1),
        buffer.as_strided((50, 70), (0, 1), 3),
        buffer.as_strided((1, 70), (1, 1), 3),
        buffer.as_strided((50, 1), (3, 5), 2),
    ):
        x = torch.randn(weight.shape[1], 4).to(dtype).T
        require_near(product(x, weight), x, weight)
        require_near(product(x[1::2], weight), x[1::2], weight)
        batch = x.expand(2, 3, 4, -1)
        require_near(product(batch, weight), batch, weight)
        require_near(product(x[0], weight), x[0], weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("instructions")
def test_what_is_not_finite(dtype):
    weight, x = torch.randn(20, 83).to(dtype), torch.randn(5, 83).to(dtype)
    weight[3, 82], weight[4, 0], x[2, 80] = torch.nan, torch.inf, -torch.inf
    found, expected = product(x, weight), linear(x.double(), weight.double())
    assert expected.isnan().any()
    assert found.isnan().equal(expected.isnan())
    assert found.isinf().equal(expected.isinf())
    large = torch.full((1, 83), 3e38).to(torch.bfloat16)
    assert product(large, large).isinf().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 50), (100, 48), (577, 33), (2049, 5)])
@pytest.mark.usefixtures("instructions")
def test_codes_of_eight_bits_against_float64(inputs, outputs, dtype):
    codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    scale, bias = torch.rand(outputs, 1) / 100, torch.randn(outputs).to(dtype)
    x = torch.randn(MOST_ROWS, inputs).to(dtype)
    whole = product(x, codes, bias, scale)
    exact = linear(x.double(), codes * scale.double(), bias.double())
    size = linear(x.double().abs(), codes.double().abs() * scale)
    bound = exact.abs() * torch.finfo(dtype).eps + size * 2e-7 * inputs**0.5 + 1e-7
    assert ((whole.double() - exact).abs() <= bound).all()
    for rows in (1, 2, 3, 5, 8):
        assert product(x[:rows], codes, bias, scale).equal(whole[:rows])
    spread = torch.zeros(outputs, inputs + 3, dtype=torch.int8)[:, :inputs].copy_(codes)
    assert product(x[:3], spread, bias, scale).equal(whole[:3])


def test_what_the_kernel_does_not_take():
    weight, x = torch.randn(6, 8), torch.randn(2, 8)
    for other, weights, bias in (
        (x[:0], weight, None),
        (x[:, :7], weight, None),
        (x.bfloat16(), weight, None),
        (x.double(), weight.double(), None),
        (x.to("meta"), weight, None),
        (x, weight.T.contiguous().T, None),
        (x, weight[0], None),
        (x, weight, torch.randn(5)),
        (x, weight, torch.randn(6).half()),
        (torch.randn(2, 0), torch.randn(6, 0), None),
        (torch.tensor(1.0), weight, None),
    ):
        with pytest.raises(UnsupportedError, match="at least one row and weights on the CPU"):
            product(other, weights, bias)
    codes, scale = weight.to(torch.int8), torch.ones(6)
    for weights, scales in ((codes, None), (codes, scale[:5]), (codes, scale.half())):
        with pytest.raises(UnsupportedError, match="or int8 weights with float32 scales"):
            product(x, weights, None, scales)
    with pytest.raises(UnsupportedError):
        product(x, weight, None, scale)


def test_a_forked_process():
    """It has none of its parent's threads."""
    weight, x = torch.randn(512, 512), torch.randn(2, 512)
    expected = product(x, weight)
    child = os.fork()
    if not child:
        os._exit(0 if product(x, weight).equal(expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- routing --------------------------------------------------------------------------------


@pytest.fixture
def layer():
    return nn.Linear(200, 300)


@pytest.fixture
def computed(monkeypatch):
    """The shapes of what the kernel was given."""
    shapes = []
    product = linears.Weights.product

    def counted(self, x):
        out = product(self, x)
        if out is not None:
            shapes.append(tuple(x.shape))
        return out

    monkeypatch.setattr(linears.Weights, "product", counted)
    return shapes


def test_few_rows_go_to_the_kernel_and_all_others_to_torch(layer, computed):
    assert linears.route(nn.Sequential(layer)) == 1
    own = nn.Linear.forward
    x = torch.randn(2, 16, 200)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), own(layer, x))
        assert computed == [(2, 16, 200)]
        many = torch.randn(33, 200)
        assert layer(many).equal(own(layer, many))
        assert layer(x[:0]).shape == (0, 16, 300)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        handle = layer.register_forward_hook(lambda *_: None)
        assert layer(x).equal(own(layer, x))
        handle.remove()
    assert layer(x).requires_grad
    with torch.no_grad():
        assert layer(x.clone().requires_grad_()).equal(layer(x))
    assert len(computed) == 3
    layer.requires_grad_(False)
    layer(x)
    assert len(computed) == 4
    assert layer(x.clone().requires_grad_()).requires_grad
    linears.unroute(layer)
    assert "forward" not in layer.__dict__
    layer(x)
    assert len(computed) == 4


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_go_to_the_kernel_where_torch_lacks_instructions(
    layer, computed, instructions, dtype
):
    linears.route(layer.to(dtype))
    x = torch.randn(100, 200).to(dtype)
    torch.testing.assert_close(layer(x), nn.Linear.forward(layer, x), atol=1e-2, rtol=1e-2)
    assert len(computed) == (choice.is_slow(dtype) and instructions != "portable")


@torch.no_grad()
def test_weights_that_are_replaced(layer, computed):
    linears.route(layer)
    x = torch.randn(2, 200)
    layer(x)
    for change in (
        lambda: layer.weight.mul_(2),
        lambda: setattr(layer.weight, "data", torch.randn(300, 200)),
        lambda: setattr(layer, "weight", nn.Parameter(torch.randn(300, 200))),
        lambda: setattr(layer, "bias", nn.Parameter(torch.randn(300))),
        lambda: layer.load_state_dict(nn.Linear(200, 300).state_dict()),
    ):
        change()
        torch.testing.assert_close(layer(x), linear(x, layer.weight, layer.bias))
    assert len(computed) == 6
    layer.bias = None
    torch.testing.assert_close(layer(x), linear(x, layer.weight))
    layer.half()
    torch.testing.assert_close(
        layer(x.half()), linear(x.half(), layer.weight), atol=1e-2, rtol=1e-2
    )
    assert len(computed) == 8
    layer.double()
    assert layer(x.double()).equal(linear(x.double(), layer.weight))
    layer.to("meta")
    assert layer(x.to("meta")).is_meta
    assert len(computed) == 8


@torch.no_grad()
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_have_weights_of_their_own(layer, copied):
    model = nn.Sequential(layer)
    linears.route(model)
    x = torch.randn(2, 200)
    before = model(x)
    other = copied(model)
    other[0].weight.zero_()
    assert other(x).equal(layer.bias.expand(2, -1))
    assert model(x).equal(before)
    linears.unroute(model)
    assert other(x).equal(layer.bias.expand(2, -1))


def test_what_watches_torchs_operations_sees_them(layer, computed):
    layer.requires_grad_(False)
    linears.route(layer)
    x, tangent = torch.randn(2, 200), torch.randn(2, 200)
    expected = linear(x, layer.weight, layer.bias)
    found, slope = torch.func.jvp(layer, (x,), (tangent,))
    assert found.equal(expected)
    torch.testing.assert_close(slope, linear(tangent, layer.weight))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        assert torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent is not None
    torch.testing.assert_close(torch.func.vmap(layer)(x), expected)
    traced = torch.jit.trace(layer, (x,), check_trace=False)
    assert traced(2 * x).equal(linear(2 * x, layer.weight, layer.bias))
    assert computed == []
    with torch.device("meta"):  # the device of new tensors
        assert layer(input=x).device == x.device
    assert computed == [(2, 200)]


@torch.inference_mode()
def test_one_row_of_a_small_layer_goes_to_torch(computed):
    layer = nn.Linear(128, 128)
    assert linears.route(layer) == 1
    layer(torch.randn(1, 1, 128))
    assert computed == []
    layer(torch.randn(1, 2, 128))
    assert computed == [(1, 2, 128)]


def test_what_is_not_routed(layer):
    class Own(nn.Linear):
        pass

    replaced = nn.Linear(200, 300)
    replaced.forward = lambda x: x
    wrapper = nn.Module()
    wrapper.base_layer = nn.Linear(200, 300)
    parts = [
        Own(200, 300),
        nn.Linear(20, 30),
        nn.Linear(200, 300, dtype=torch.float64),
        nn.utils.parametrizations.weight_norm(nn.Linear(200, 300)),
        nn.Linear(200, 300, device="meta"),
        replaced,
        wrapper,
        layer,
    ]
    assert linears.route(nn.ModuleList(parts)) == 1
    assert "forward" in layer.__dict__
    linears.unroute(nn.ModuleList(parts))
    assert "forward" in replaced.__dict__


# -- models ---------------------------------------------------------------------------------

WIDE = {"hidden_size": 256, "intermediate_size": 384}


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_attached_models_say_the_same(family, computed):
    model = tiny(family, **WIDE)
    ids = torch.randint(3, 96, (3, 9))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    asked = {"max_new_tokens": 30, "do_sample": False, "attention_mask": mask}
    expected = model.generate(ids, **asked)
    before = {name: set(part.__dict__) for name, part in model.named_modules()}
    with kvkeep.attach(model, "window:100", linears=True) as attachment:
        assert attachment.linears >= 3 * model.config.num_hidden_layers
        assert model.generate(ids, **asked).equal(expected)
        assert {shape[0] for shape in computed} == {3}
    assert {name: set(part.__dict__) for name, part in model.named_modules()} == before
    with kvkeep.attach(model, linears=False) as attachment:
        assert attachment.linears == 0


def test_bfloat16_logits_are_as_near_as_torchs():
    model = tiny("llama", tie_word_embeddings=True, **WIDE)
    ids = torch.randint(3, 96, (1, 24))
    with torch.inference_mode():
        exact = model(ids).logits
        half = model.bfloat16()
        theirs = half(ids).logits
        with kvkeep.attach(half, linears=True):
            ours = half(ids).logits
    mine, others = ((x.float() - exact).norm() for x in (ours, theirs))
    assert mine < 1.2 * others


def test_a_compiled_model_has_no_graph_breaks():
    torch._dynamo.reset()
    model = tiny("llama", **WIDE)
    ids = torch.randint(3, 96, (1, 5))
    with kvkeep.attach(model, linears=True), torch.no_grad():
        step = torch.compile(model.forward, fullgraph=True, backend="eager")
        expected = model(ids, past_key_values=kvkeep.Cache(model)).logits
        found = step(ids, past_key_values=kvkeep.Cache(model)).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
