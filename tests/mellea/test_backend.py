"""KVKeepBackend: Mellea's sessions over kvkeep, with marked texts, chats, streams and tools."""

from __future__ import annotations

import asyncio
from threading import Thread
from typing import final

import pytest
import torch
from mellea import MelleaSession
from mellea.backends import ModelOption
from mellea.backends.huggingface import LocalHFBackend
from mellea.backends.tools import tool
from mellea.core import CBlock, Component, TemplateRepresentation
from mellea.stdlib.components import Instruction, SimpleComponent
from mellea.stdlib.context import ChatContext, SimpleContext
from mellea.stdlib.functional import aact
from pydantic import BaseModel
from support.lighthouse import DOCUMENTS, OPTIONS, QUESTION, ask, marked, prompt_of
from transformers import AutoTokenizer, GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

import kvkeep
from kvkeep.blocks import Block, Prompt
from kvkeep.errors import SpecError, StateError
from kvkeep.hf.models import resolve
from kvkeep.mellea import CACHING, Caching, KVKeepBackend, report_of

KEPT = CBlock(DOCUMENTS["storm"], cache=True)


def test_documents_in_another_order(model, tokenizer):
    plain = LocalHFBackend("x", custom_config=(tokenizer, model, model.device))
    wanted = prompt_of(ask(plain, "green", "built", cache=False, model_options=OPTIONS))
    with KVKeepBackend(model, tokenizer, model_options=OPTIONS) as backend:
        first = report_of(ask(backend, "built", "green"))
        answer = ask(backend, "green", "built")
    assert prompt_of(answer).equal(wanted)
    report = report_of(answer)
    for name, block in zip(["green", "built"], report.blocks, strict=True):
        assert not block.refused
        # Its first token may begin with the space before it, and is then not the block's own.
        text = tokenizer.decode(wanted[block.start : block.stop])
        assert DOCUMENTS[name].endswith(text)
        assert len(text) > len(DOCUMENTS[name]) - 5
    assert first.found == 0
    assert report.found == sum(block.stop - block.start for block in report.blocks)
    assert report.tokens == len(wanted) - 1
    details = answer.generation.usage["prompt_tokens_details"]
    assert details == {"cached_tokens": report.exact + report.found}


@pytest.mark.parametrize("size", ["tiny", pytest.param("real", marks=pytest.mark.slow)])
def test_the_plain_answer(model, tokenizer, request, size):
    """With nothing approximate, the answer is that of Mellea's own backend."""
    if size == "real":
        model, tokenizer = request.getfixturevalue("smollm2")
    options = OPTIONS | {ModelOption.MAX_NEW_TOKENS: 12}
    plain = LocalHFBackend("x", custom_config=(tokenizer, model, model.device))
    wanted = str(ask(plain, "built", "green", model_options=options))
    with KVKeepBackend(model, tokenizer, recompute="all", model_options=options) as backend:
        answer = ask(backend, "built", "green")
        assert str(answer) == wanted
        assert report_of(answer).approximate == 0
        again = ask(backend, "built", "green")
        assert str(again) == wanted
        assert report_of(again).exact == report_of(again).tokens


def test_chat(backend):
    session = MelleaSession(backend, ChatContext())
    session.ctx = session.ctx.add(CBlock(DOCUMENTS["built"], cache=True))
    reports, lengths = [], []
    for question in (QUESTION, "When?"):
        session.chat(question, model_options={ModelOption.SYSTEM_PROMPT: "You keep a lighthouse."})
        answer = session.ctx.last_output()
        reports.append(report_of(answer))
        lengths.append(answer.generation.usage["prompt_tokens"])
    assert [block.refused for report in reports for block in report.blocks] == ["", ""]
    assert reports[1].exact + reports[1].found >= reports[1].blocks[0].stop


def test_chat_without_marks(backend):
    session = MelleaSession(backend, ChatContext())
    session.chat("What do you see? " * 20)
    first = session.ctx.last_output()
    session.chat("Is it cold?")
    report = report_of(session.ctx.last_output())
    assert report_of(first).exact == 0
    assert report.exact >= first.generation.usage["prompt_tokens"]
    assert report.blocks == []


def test_stream(backend):
    action = Instruction(QUESTION, grounding_context=marked("built"))

    async def streamed():
        options = {ModelOption.STREAM: True}
        context = SimpleContext()
        answer, _ = await aact(action, context, backend, strategy=None, model_options=options)
        assert report_of(answer) is None  # not yet
        return [piece async for piece in answer], answer

    ask(backend, "green", "built")
    pieces, answer = asyncio.run(streamed())
    assert "".join(pieces) == str(answer)
    block = report_of(answer).blocks[0]
    assert not block.refused
    assert report_of(answer).found == block.stop - block.start


@pytest.mark.parametrize("sequences", [1, 2])
def test_the_error_of_a_stream(model, tokenizer, monkeypatch, sequences):
    """It is raised at once, not when the time for a piece of text is over."""

    def fail(*_, **__):
        raise RuntimeError("out of ink")

    async def streamed():
        options = {ModelOption.STREAM: True, ModelOption.STREAM_TIMEOUT: None}
        action = Instruction(QUESTION)
        answer, _ = await aact(
            action, SimpleContext(), backend, strategy=None, model_options=options
        )
        return [piece async for piece in answer]

    options = {"sequences": sequences, "model_options": OPTIONS}
    with KVKeepBackend(model, tokenizer, **options) as backend:
        with monkeypatch.context() as patch:
            patch.setattr(model.lm_head, "forward", fail)
            with pytest.raises(RuntimeError, match="out of ink"):
                asyncio.run(streamed())
        assert asyncio.run(streamed())


def test_calls_at_once(backend):
    """Each answer has the report of its own prompt."""
    names = list(DOCUMENTS)

    async def one(name):
        session = MelleaSession(backend)
        thunk = await session.ainstruct(QUESTION, grounding_context=marked(name), strategy=None)
        await thunk.avalue()
        return report_of(thunk)

    async def together():
        return await asyncio.gather(*map(one, [*names, *names]))

    reports = asyncio.run(together())
    wanted = [[DOCUMENTS[name][:40]] for name in [*names, *names]]
    assert [[block.text for block in report.blocks] for report in reports] == wanted
    assert all(report.exact + report.found >= 16 for report in reports[3:])
    backend.store.check()


def test_tools_and_structured_answers(model):
    class Answer(BaseModel):
        built: bool

    @tool
    def ring(hours: int) -> str:
        """Ring the bell.

        Args:
            hours: how long.
        """
        return "dong" * hours

    tokenizer = AutoTokenizer.from_pretrained(resolve("smollm2-135m"))
    with_tools = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    tokenizer.chat_template = with_tools + tokenizer.chat_template
    options = OPTIONS | {ModelOption.TOOLS: [ring]}
    with KVKeepBackend(model, tokenizer, model_options=options) as backend:
        ask(backend, "built")
        answer = ask(backend, "built", tool_calls=True)
        structured = ask(backend, "built", tool_calls=True, format=Answer)  # then without tools
    assert "Ring the bell." in tokenizer.decode(prompt_of(answer))
    assert structured.value.startswith("{")
    for report in map(report_of, (answer, structured)):
        assert not report.blocks[0].refused
        assert report.found == report.blocks[0].stop - report.blocks[0].start


@final
class Page(Component[str]):
    """A component of one's own, which has others in it."""

    def parts(self):
        return [Instruction(KEPT)]

    def format_for_llm(self):
        return TemplateRepresentation(self, {"page": self.parts()[0]}, template="# {{ page }}")

    def _parse(self, computed):
        return computed.value


def test_where_marks_are(backend):
    for action in (
        Instruction(KEPT),
        Instruction(QUESTION, prefix=KEPT),
        Instruction(QUESTION, icl_examples=[KEPT]),
        SimpleComponent(story=KEPT),
        Page(),
        KEPT,
    ):
        answer = MelleaSession(backend).act(action, strategy=None)
        (block,) = report_of(answer).blocks
        assert not block.refused
        assert block.stop - block.start >= 16


def test_text_that_is_escaped(backend):
    """SimpleComponent makes JSON of its parts, where a quotation mark is another text."""
    said = 'He said: "' + DOCUMENTS["storm"] + '"'
    action = SimpleComponent(story=CBlock(said, cache=True))
    answer = MelleaSession(backend).act(action, strategy=None)
    (block,) = report_of(answer).blocks
    assert not block.refused
    text = backend._tokenizer.decode(prompt_of(answer)[block.start : block.stop])
    assert text in 'He said: \\"' + DOCUMENTS["storm"] + '\\"'
    assert len(text) > len(said) - 8


@final
class Shouted(Component[str]):
    """A component that changes its part, beside one that it leaves out."""

    def parts(self):
        return [KEPT, CBlock(DOCUMENTS["green"], cache=True)]

    def format_for_llm(self):
        return f"{KEPT.value.upper()} {len(self.parts()[1].value)}"

    def _parse(self, computed):
        return computed.value


def test_mark_that_is_lost(backend):
    answer = MelleaSession(backend).act(Shouted(), strategy=None)
    report = report_of(answer)
    refused = {block.text: block.refused for block in report.blocks}
    assert refused == {
        DOCUMENTS["storm"][:40]: "the template changes its text",
        DOCUMENTS["green"][:40]: "the template changes its text",
    }
    assert report.approximate == report.found == 0
    assert report.tokens == len(prompt_of(answer)) - 1


def test_the_same_text_without_a_mark(backend):
    """A block is where its mark is, and nowhere else that its text stands."""
    text = DOCUMENTS["storm"]
    context = {"a": CBlock("It is told: " + text), "b": CBlock(text, cache=True)}
    answer = MelleaSession(backend).instruct(
        f"What is meant by: {text}", grounding_context=context, strategy=None
    )
    (block,) = report_of(answer).blocks
    assert not block.refused
    before = backend._tokenizer.decode(prompt_of(answer)[: block.start])
    assert before.rpartition("\n")[2].strip().startswith("*   [b] =")


def test_other_threads_read_plain_texts(backend):
    """While a prompt is rendered with marks around its blocks."""
    seen = []

    @final
    class Slow(Component[str]):
        def parts(self):
            return [KEPT]

        def format_for_llm(self):
            thread = Thread(target=lambda: seen.append(KEPT.value))
            thread.start()
            thread.join()
            return KEPT.value

        def _parse(self, computed):
            return computed.value

    answer = MelleaSession(backend).act(Slow(), strategy=None)
    (block,) = report_of(answer).blocks
    assert not block.refused
    assert set(seen) == {DOCUMENTS["storm"]}
    assert KEPT.value == DOCUMENTS["storm"]


def test_mark_inside_of_another(backend):
    both = CBlock(DOCUMENTS["built"] + "\n" + DOCUMENTS["green"] + "\n", cache=True)
    for context in ({"both": both, **marked("built")}, {"both": both, "": CBlock(" ", cache=True)}):
        answer = MelleaSession(backend).instruct(QUESTION, grounding_context=context, strategy=None)
        longest, *others = report_of(answer).blocks
        assert not any(block.refused for block in (longest, *others))
        assert longest.stop - longest.start > 30
        assert len(others) == ("built" in context)


def test_prompt_that_is_another_each_time(model):
    """kvkeep's rendering is another than Mellea's: Mellea's is what the model reads."""
    tokenizer = AutoTokenizer.from_pretrained(resolve("smollm2-135m"))
    tokenizer.chat_template += "{{ range(99999) | random }} {{ range(99999) | random }}"
    with KVKeepBackend(model, tokenizer, model_options=OPTIONS) as backend:
        answer = ask(backend, "built")
        report = report_of(answer)
        assert "differs from the prompt" in report.blocks[0].refused
        assert report.tokens == len(prompt_of(answer)) - 1
        assert report.approximate == report.found == 0
    with torch.no_grad():
        logits = model(prompt_of(answer)[None]).logits
    said = answer.raw.response.sequences[0, report.tokens + 1]
    assert logits[0, -1].argmax() == said


def test_no_gradients(backend, model):
    """Mellea generates in threads, and in each of them torch begins with gradients on."""
    seen = []
    hook = model.model.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    ask(backend, "built")
    ask(backend, "green", "built")
    hook.remove()
    assert seen
    assert not any(seen)


def test_several_prompts_without_a_template(model, tokenizer):
    """`generate` reads their common beginning once, and stores it."""
    actions = [CBlock(f"{DOCUMENTS['storm']} {end}") for end in ("Why?", "How?")]

    def read(backend):
        answers = backend.generate_from_raw(actions, SimpleContext(), model_options=OPTIONS)
        return list(map(str, asyncio.run(answers)))

    wanted = read(LocalHFBackend("x", custom_config=(tokenizer, model, model.device)))
    with KVKeepBackend(model, tokenizer) as backend:
        assert read(backend) == wanted
        assert backend.store.stats().tokens > 16


@pytest.mark.parametrize("sequences", [1, 3])
def test_a_granite_hybrid(tokenizer, sequences):
    """Its recurrent layers have states beside the slots."""
    config = GraniteMoeHybridConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=48,
        shared_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention"],
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        pad_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = GraniteMoeHybridForCausalLM(config).eval()
    plain = LocalHFBackend("x", custom_config=(tokenizer, model, model.device))
    wanted = str(ask(plain, "built", cache=False, model_options=OPTIONS))
    options = {"sequences": sequences, "model_options": OPTIONS}
    with KVKeepBackend(model, tokenizer, **options) as backend:
        alone = ask(backend, "built", model_options={CACHING: Caching(reuse=False)})
        first, second = ask(backend, "built"), ask(backend, "built")
    assert [str(answer) for answer in (alone, first, second)] == [wanted] * 3
    assert report_of(second).exact == report_of(second).tokens > 0
    (block,) = report_of(second).blocks
    assert block.refused  # a state cannot be moved


def test_close(model, tokenizer):
    backend = KVKeepBackend(model, tokenizer, model_options=OPTIONS)
    ask(backend, "built")
    backend.close()
    backend.close()
    asyncio.run(backend.aclose())
    with pytest.raises(StateError, match="not attached"):
        kvkeep.detach(model)
    answer = ask(backend, "built")  # as Mellea does it
    assert report_of(answer) is None
    assert "prompt_tokens_details" not in answer.generation.usage


def test_shared_store(model, tokenizer):
    store = kvkeep.PrefixStore()
    with KVKeepBackend(model, tokenizer, store=store, model_options=OPTIONS) as backend:
        first = prompt_of(MelleaSession(backend).instruct(QUESTION, strategy=None))
    with kvkeep.attach(model, store=store):
        model.generate(first[None], max_new_tokens=2, do_sample=False)
    assert store.stats().hit_tokens == len(first) - 1
    with KVKeepBackend(model, tokenizer, store=store, model_options=OPTIONS) as backend:
        again = MelleaSession(backend).instruct(QUESTION, strategy=None)
    assert report_of(again).exact == len(first) - 1
    options = {"namespace": "others", "model_options": OPTIONS}
    with KVKeepBackend(model, tokenizer, store=store, **options) as backend:
        other = MelleaSession(backend).instruct(QUESTION, strategy=None)
    assert report_of(other).exact == 0
    store.check()


def test_block_prompt_of_the_models_own(backend, model, tokenizer):
    """The model that a backend attached takes prompts with blocks as any attached one."""
    ask(backend, "green", "storm")
    prompt = Prompt(["It is told:", " ", Block(DOCUMENTS["storm"]), "\n", QUESTION])
    encoded = prompt.encode(tokenizer)
    model.generate(encoded, max_new_tokens=2, do_sample=False)
    block = encoded.report.blocks[0]
    assert not block.refused
    assert encoded.report.found == block.stop - block.start


def test_errors(model, tokenizer):
    with pytest.raises(SpecError, match="half"):
        KVKeepBackend(model, tokenizer, recompute="half")
    with pytest.raises(SpecError, match="no_such"):
        KVKeepBackend(model, tokenizer, spec="no_such")
    with kvkeep.attach(model):
        with pytest.raises(StateError, match=r"kvkeep\.detach\(model\)"):
            KVKeepBackend(model, tokenizer)
        assert model.generate(torch.ones(1, 4, dtype=torch.int64), max_new_tokens=1).shape == (1, 5)
    KVKeepBackend(model, tokenizer).close()
