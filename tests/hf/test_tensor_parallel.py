"""Two processes, each with half of a model's heads, find what one finds with the whole model."""

from __future__ import annotations

import pytest
import torch
from support import tensor_parallel as tp
from support.autograd_gradients import error
from support.tiny_models import tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_close(found, expected, rounding=1e-5):
    """Equal up to rounding in float32, of sums in another order."""
    atol = rounding * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def rounding_of(spec):
    """By which share of the largest one results may differ: sums are in another order, and worths
    have 16 bits. Where one process rounds a code up and the other rounds it down, an element of a
    key or value differs by a step, which moves these models' logits by up to 3e-3."""
    return 1e-2 if "int" in spec or "kivi" in spec else 3e-5


def evicted_by_all(found, heads):
    """What the processes evict, as each one says it: of all heads, where each has only some."""

    def joined(*decisions):
        apart = decisions[0].shape[1] < heads
        return [torch.cat(decisions, dim=1)] * len(decisions) if apart else decisions

    runs = []
    for run in zip(*(one["evicted"] for one in found), strict=True):
        layers = [
            [joined(*decisions) for decisions in zip(*layer, strict=True)]
            for layer in zip(*run, strict=True)
        ]
        runs.append(layers)
    return [
        [[[decisions[rank] for decisions in layer] for layer in run] for run in runs]
        for rank in range(len(found))
    ]


def assert_as_in_one_process(found, model, spec):
    """What both processes found with their heads is what one finds with all of them, that evicts
    and says the same and could have chosen to. Returns what that one found."""
    assert found[0]["said"].equal(found[1]["said"])
    rounding = rounding_of(spec)
    evicted = evicted_by_all(found, model.config.num_key_value_heads)
    for rank, one in enumerate(found):
        whole = tp.fed_alike(model, spec, one | {"evicted": evicted[rank]}, rounding)
        assert_close(one["logits"], whole["logits"], rounding)
        said = one["said"][:, tp.TOKENS :, None]
        last = whole["logits"][:, -said.shape[1] :]
        assert_close(last.gather(2, said), last.amax(dim=2, keepdim=True), rounding)
        for own, every in zip(one["kept"], whole["kept"], strict=True):
            first = rank * len(own) if len(own) < len(every) else 0
            assert own == every[first : first + len(own)]
        assert one["promised"] in (None, one["bytes"])
    return whole


def test_two_processes(tmp_path):
    specs = ["keep_all", "h2o:16", "h2o:16+int8"]
    model = tiny("llama")
    jobs = [*(("fed", {"spec": spec}) for spec in specs), ("trained", {}), ("saved", {})]
    (*fed, trained, saved), (*others, _, saved_too) = tp.run(model, str(tmp_path), *jobs)
    for spec, *found in zip(specs, fed, others, strict=True):
        whole = assert_as_in_one_process(found, model, spec)
        assert len(found[0]["kept"][0]) < len(whole["kept"][0]) or spec == "keep_all"
        shared = 4 * tp.TOKENS * 2 if spec == "keep_all" else 0  # positions, in both layers
        assert 2 * found[0]["bytes"] == whole["bytes"] + shared
    expected = tp.trained(model)
    torch.testing.assert_close(trained["loss"], expected["loss"])
    assert trained["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in trained["gradients"].items():
        assert error(gradient, expected["gradients"][name]) < 1e-5, name
    for one in (saved, saved_too):
        assert one["same"]
        assert "weights differ" in one["other"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "qwen2",  # biases
        "phi",  # as many kv heads as query heads
        "gemma2",  # softcap, windows
        "gpt-oss",  # sinks
        "mixtral",  # experts
        "phi3",  # transformers gathers its keys: each process has all heads
        "olmo2",  # also
        "deepseek-v3",
    ],
)
def test_families(family, tmp_path):
    model = tiny(family)
    specs = ["keep_all"] if family == "deepseek-v3" else ["keep_all", "h2o:16+int8", "window:12"]
    first, second = tp.run(model, str(tmp_path), *(("fed", {"spec": spec}) for spec in specs))
    for spec, *found in zip(specs, first, second, strict=True):
        assert_as_in_one_process(found, model, spec)


@pytest.mark.slow
def test_policies_that_decide_for_each_head(tmp_path):
    names = ["h2o:16,normalize=1", "vlen:16", "knorm:16,recent=4", "keydiff:16,recent=4"]
    names += ["expected_attention:16,recent=4", "snapkv:16,window=4", "streaming:16"]
    names += ["pyramid(h2o:16)", "h2o:40%,least=12"]
    specs = [*names, "qh2o:16+int8", "keep_all+int8/int4", "keep_all+kivi", "h2o:16@host"]
    model = tiny("llama")
    first, second = tp.run(model, str(tmp_path), *(("fed", {"spec": spec}) for spec in specs))
    for spec, *found in zip(specs, first, second, strict=True):
        assert_as_in_one_process(found, model, spec)


@pytest.mark.slow
def test_split_by_torch(tmp_path):
    model, spec = tiny("llama"), "h2o:16+int8"
    jobs = [("fed", {"spec": spec}), ("trained", {})]
    found = tp.run(model, str(tmp_path), *jobs, by="torch")
    for one, _ in found:
        one["promised"] = one["bytes"]  # it is not known what arrives
    assert_as_in_one_process([one for one, _ in found], model, spec)
    expected = tp.trained(model)["gradients"]
    for name, gradient in found[0][1]["gradients"].items():
        assert error(gradient, expected[name]) < 1e-5, name


@pytest.mark.slow
def test_compiled(tmp_path):
    model, options = tiny("llama"), {"spec": "h2o:16", "compile": True, "linears": True}
    found = tp.run(model, str(tmp_path), ("fed", options))
    assert_as_in_one_process([one for (one,) in found], model, "h2o:16")


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["tova:16", "adakv(h2o:16)", "kvzip:50%"])
def test_policies_that_compare_heads_compare_those_of_a_process(spec, tmp_path):
    """In the first layer, what a process keeps is what is kept of a model with only its heads."""
    model = tiny("llama", num_hidden_layers=1)
    job = ("compressed" if spec.startswith("kvzip") else "fed", {"spec": spec})
    found = tp.run(model, str(tmp_path), job)
    alone = [getattr(tp, job[0])(with_heads_of(model, rank), spec) for rank in range(tp.PROCESSES)]
    assert [one["kept"] for (one,) in found] == [one["kept"] for one in alone]
    whole = getattr(tp, job[0])(model, spec)["kept"]
    assert [one["kept"] for (one,) in found] != [whole, whole]


def with_heads_of(model, rank):
    """A model of one layer with the heads of one process only."""
    part = tiny(
        "llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8
    )
    weights = model.state_dict()
    for name in ("q", "k", "v", "o"):
        key = f"model.layers.0.self_attn.{name}_proj.weight"
        weights[key] = weights[key].chunk(tp.PROCESSES, dim=1 if name == "o" else 0)[rank]
    part.load_state_dict(weights)
    return part


@pytest.mark.slow
def test_stores_batches_blocks_and_refusals(tmp_path):
    model = tiny("llama")
    names = ["stored", "batched", "joined", "refused"]
    found = tp.run(model, str(tmp_path), *((name, {}) for name in names))
    for stored, batched, joined, refused in found:
        assert stored["said"].equal(tp.fed(model, "keep_all")["said"].expand(2, -1))
        assert stored["hits"] == tp.TOKENS - 1
        assert "a backend may lose blocks of one process" in stored["outside"]
        assert "different numbers of slots" in stored["compressed"]
        assert batched == tp.batched(model)
        expected = tp.joined(model)
        assert_close(joined["logits"], expected["logits"])
        assert not expected["share"]
        assert "choose different tokens" in joined["share"]
        for said, expected in zip(
            refused, ("a whole model", "loaded whole", "is sharded"), strict=True
        ):
            assert expected in said
