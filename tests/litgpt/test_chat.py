"""LitGPT's own chat and batch loops, unchanged, with an attached model."""

from __future__ import annotations

import builtins

import lightning
import pytest
import torch
from litgpt.chat.base import interact
from litgpt.generate.base import batched_generate_fn, generate
from litgpt.generate.sequentially import sequential
from litgpt.generate.speculative_decoding import generate as speculative
from litgpt.prompts import Default
from litgpt.tokenizer import Tokenizer
from support import finetune_inputs
from support.tiny_litgpt import tiny_gpt

import kvkeep
from kvkeep.host import host_of

TURNS = ["how are you today, and where do you go?", "why is that", "tell me about the sea"]
NEW = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with a tokenizer of letters, as LitGPT reads it."""
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = finetune_inputs.tokenizer()
    tokenizer.eos_token = "<e>"
    tokenizer.save_pretrained(path)
    return path


def gpt_of_letters():
    return tiny_gpt(padded_vocab_size=98)


class Stops(Default):
    """Stops where one of some texts was written."""

    def __init__(self, *texts):
        self.texts = texts

    def stop_tokens(self, tokenizer):
        return tuple(tokenizer.encode(text).tolist() for text in self.texts)


@pytest.fixture
def chat(folder, monkeypatch, capsys):
    """Hold a conversation in `litgpt chat`; returns the reply of each turn."""

    def held(gpt, *stops, most=NEW):
        fabric = lightning.Fabric(devices=1, accelerator="cpu")
        tokenizer, style = Tokenizer(folder), Stops(*stops)
        said = iter([*TURNS, ""])
        monkeypatch.setattr(builtins, "input", lambda _: next(said))
        with torch.inference_mode():
            interact(
                False,
                fabric.setup_module(gpt),
                tokenizer,
                style,
                fabric,
                temperature=0.0,
                max_new_tokens=most,
                top_k=None,
                top_p=0.0,
                stop_tokens=style.stop_tokens(tokenizer),
            )
        replies = capsys.readouterr().out.split(">> Reply: ")[1:]
        return [reply.removesuffix("\n") for reply in replies]

    return held


@torch.inference_mode()
def by_hand(gpt, spec, folder, new):
    """The reply to each turn through the host, without LitGPT's loop."""
    tokenizer, host, replies = Tokenizer(folder), host_of(gpt), []
    for said in TURNS:
        fed, cache, reply = tokenizer.encode(said)[None].long(), host.new_cache(spec), []
        for _ in range(new):
            fed = host.forward(fed, cache)[:, -1:].argmax(-1)
            reply.append(tokenizer.decode(fed[0]))
        replies.append("".join(reply))
    return replies


def test_a_conversation_is_that_of_litgpts_own_cache(chat):
    own = chat(gpt_of_letters())
    gpt = gpt_of_letters()
    with kvkeep.attach(gpt, "keep_all") as attachment:
        assert chat(gpt) == own
        assert attachment.cache.fed == len(TURNS[-1]) + NEW - 1
    assert len(set(own)) == len(TURNS)


def test_a_conversation_ends_at_the_same_stops(chat):
    """A text of two tokens stops a reply, which is held back until it is known not to come."""
    own = chat(gpt_of_letters())
    stops = own[0][7:9], own[1][20:22]
    with kvkeep.attach(gpt := gpt_of_letters()):
        stopped = chat(gpt, *stops)
    assert stopped == chat(gpt_of_letters(), *stops)
    assert all(reply.startswith(one) for reply, one in zip(own, stopped, strict=True))
    assert len(stopped[0]) <= 7
    assert len(stopped[1]) <= 20


@pytest.mark.parametrize("spec", ["h2o:16+int8", "window:12"])
def test_a_conversation_within_a_budget(spec, chat, folder):
    gpt = gpt_of_letters()
    with kvkeep.attach(gpt, spec) as attachment:
        found = chat(gpt)
        assert found == by_hand(gpt, spec, folder, NEW)
        assert attachment.cache.length <= 16
    assert found != chat(gpt_of_letters())


def test_a_reply_up_to_the_model_s_context(chat):
    """As `litgpt chat --compile` asks for it: no maximum of new tokens."""
    gpt = gpt_of_letters()
    with kvkeep.attach(gpt, "window:12") as attachment:
        found = chat(gpt, most=None)
        assert attachment.cache.fed == gpt.config.block_size - 1
    assert all(len(one) > NEW for one in found)


@pytest.mark.parametrize("spec", ["keep_all", "h2o:16+int8"])
def test_a_batch_is_its_rows_alone(spec):
    gpt = gpt_of_letters()
    prompts = torch.randint(2, 96, (3, 20), generator=torch.Generator().manual_seed(3))
    options = {"temperature": 0.0, "top_p": 0.0}
    given = {"sample_args": options, "include_prompt": False, "include_eos": True}
    with kvkeep.attach(gpt, spec):
        alone = [generate(gpt, row, 25, **options) for row in prompts]
        steps = list(batched_generate_fn(gpt, prompts, 25, **given))
        together = torch.stack([torch.cat(step) for step in steps], dim=1)
        assert torch.cat([prompts, together], dim=1).equal(torch.stack(alone))
    if spec == "keep_all":
        gpt.set_kv_cache(batch_size=1)
        assert all(
            generate(gpt, row, 25, **options).equal(own)
            for row, own in zip(prompts, alone, strict=True)
        )


@pytest.mark.parametrize("spec", ["keep_all", "window:64"])
def test_drafts_that_are_rejected_are_removed(spec):
    """LitGPT's speculative decoding feeds the right token at the position of a wrong one."""
    prompt = torch.randint(2, 96, (20,), generator=torch.Generator().manual_seed(3))

    def written(draft, target):
        torch.manual_seed(1)
        with torch.inference_mode():
            return speculative(draft, target, prompt, 50, temperature=0.8, speculative_k=4)

    models = [tiny_gpt(seed=0), tiny_gpt(seed=0)]
    for name, weight in models[0].named_parameters():  # so that some drafts are right
        weight.data += 0.3 * weight.std() * torch.randn(weight.shape) * ("norm" not in name)
    with kvkeep.attach(models[0], spec), kvkeep.attach(models[1], spec) as attachment:
        found, accepted = written(*models)
        assert 0.1 < accepted < 0.9
        assert 45 < attachment.cache.fed <= 50
    for gpt in models:
        gpt.set_kv_cache(batch_size=1)
    expected, _ = written(*models)
    assert found.equal(expected)


def test_drafts_that_an_eviction_has_used_are_refused():
    models = [tiny_gpt(seed=0), tiny_gpt(seed=1)]
    prompt = torch.randint(2, 96, (20,), generator=torch.Generator().manual_seed(3))
    with (
        kvkeep.attach(models[0]),
        kvkeep.attach(models[1], "h2o:16"),
        pytest.raises(kvkeep.RollbackError),
        torch.inference_mode(),
    ):
        speculative(*models, prompt, 50, temperature=0.0, speculative_k=4)


def test_a_model_placed_by_layers():
    """By LitGPT's `sequential`, which makes each layer's cache and the mask itself."""
    gpt = gpt_of_letters()
    prompt = torch.randint(2, 96, (20,), generator=torch.Generator().manual_seed(3))
    options = {"temperature": 0.0, "top_p": 0.0}
    gpt.set_kv_cache(batch_size=1)
    expected = generate(gpt, prompt, 25, **options)
    gpt.clear_kv_cache()
    gpt = sequential(gpt, torch.device("cpu"), 64, 1)
    with kvkeep.attach(gpt):
        assert generate(gpt, prompt, 25, **options).equal(expected)
    assert generate(gpt, prompt, 25, **options).equal(expected)
