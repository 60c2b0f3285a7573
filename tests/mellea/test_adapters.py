"""Mellea's adapters over kvkeep's caches: requirements checked by a LoRA, activated or not."""

from __future__ import annotations

import asyncio
import json
from copy import deepcopy

import huggingface_hub
import pytest
import torch
import yaml
from mellea import MelleaSession
from mellea.backends import ModelOption
from mellea.backends.adapters import (
    Adapter,
    AdapterType,
    Identity,
    LocalFileBinding,
    fetch_intrinsic_metadata,
    get_io_contract,
)
from mellea.core import CBlock
from mellea.formatters.granite.base import util
from mellea.stdlib.components import Document, Intrinsic, Message
from mellea.stdlib.context import ChatContext
from mellea.stdlib.functional import aact, act
from mellea.stdlib.requirements import ALoraRequirement
from peft import LoraConfig, PeftModel, get_peft_model
from support.adapters import needs_peft_of_transformers
from support.lighthouse import DOCUMENTS, OPTIONS, QUESTION, prompt_of

from kvkeep.mellea import CACHING, Caching, KVKeepBackend, cached, report_of

pytestmark = needs_peft_of_transformers()

NAME = "requirement-check"
BASE = "tiny-base"
INPUT_OUTPUT = {
    "model": None,
    "response_format": json.dumps(
        {
            "type": "object",
            "properties": {
                "requirement_check": {
                    "type": "object",
                    "properties": {"score": {"enum": [0.25, 0.75]}},
                    "required": ["score"],
                    "additionalProperties": False,
                }
            },
            "required": ["requirement_check"],
            "additionalProperties": False,
        }
    ),
    "transformations": None,
    "instruction": "Is this satisfied: {requirement}",
    "parameters": {},
    "sentence_boundaries": None,
    "docs_as_message": None,
}
REQUIREMENT = {"requirement": "It names the builder."}
CHECK = {ModelOption.RAW_LOGITS: True, ModelOption.TEMPERATURE: 0.0, ModelOption.MAX_NEW_TOKENS: 40}


@pytest.fixture(scope="module")
def repository(tmp_path_factory, model, tokenizer):
    """A directory of tiny random adapters, as in Mellea's repositories."""
    return adapters_of(model, tokenizer, tmp_path_factory.mktemp("adapters"))


def adapters_of(model, tokenizer, root):
    invocation = tokenizer("<|im_start|>assistant\n")["input_ids"]
    torch.manual_seed(5)
    for kind, options in (("alora", {"alora_invocation_tokens": invocation}), ("lora", {})):
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=4,
            target_modules=["q_proj", "k_proj", "v_proj"],
            init_lora_weights=False,
            **options,
        )
        folder = root / NAME / BASE / kind
        get_peft_model(deepcopy(model), config).save_pretrained(folder)
        (folder / "io.yaml").write_text(yaml.safe_dump(INPUT_OUTPUT))
    return root


@pytest.fixture(autouse=True)
def no_download(monkeypatch, repository):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda **_: str(repository))
    # A random model would fill its answer with white space.
    monkeypatch.setitem(util._LLGUIDANCE_GRAMMAR_DEFAULTS, "whitespace_pattern", " ?")


@pytest.fixture
def backend(request, model, tokenizer):
    own = deepcopy(model)  # PEFT changes it
    sequences = getattr(request, "param", 1)
    options = {"model_id": BASE, "sequences": sequences, "model_options": OPTIONS}
    with KVKeepBackend(own, tokenizer, **options) as made:
        yield made


def adapter(kind="alora"):
    return Adapter(
        identity=Identity(NAME, kind, fetch_intrinsic_metadata(NAME).effective_capability),
        io_contract=get_io_contract(NAME),
        weights=LocalFileBinding(NAME, AdapterType(kind), "local/adapters", "main"),
    )


def conversation(backend, *context):
    """A session in which a question was answered."""
    session = MelleaSession(backend, ChatContext())
    for part in context:
        session.ctx = session.ctx.add(part)
    session.chat(QUESTION)
    return session


def checked(session, kind="alora", **options):
    """What an adapter says of the last answer."""
    action = Intrinsic(NAME, REQUIREMENT, adapter_types=(AdapterType(kind),))
    answer, _ = act(
        action, session.ctx, session.backend, strategy=None, model_options=CHECK | options
    )
    return answer


def expected(model, repository, answer, kind="alora"):
    """The logits of each token of an answer, by PEFT's own forward of the whole text."""
    tuned = PeftModel.from_pretrained(deepcopy(model), repository / NAME / BASE / kind).eval()
    sequence = answer.raw.response.sequences
    with torch.no_grad():  # the answer invokes nothing, so the last invocation is the prompt's
        logits = tuned(input_ids=sequence[:, :-1]).logits[0]
    return logits[len(prompt_of(answer)) - 1 :]


def require_close(answer, wanted, tolerance=1e-4):
    got = torch.stack(answer.generation.raw_logits)
    allowed = got.isfinite()  # by the grammar
    torch.testing.assert_close(got[allowed], wanted[allowed], atol=tolerance, rtol=tolerance)


def test_activated(backend, model, repository):
    """The adapter computes what follows its invocation; the slots before it are the base model's,
    which the conversation left there."""
    session = conversation(backend)
    before = session.ctx.last_output()
    backend.add_adapter(adapter())
    assert backend.list_adapters() == [f"{NAME}_alora"]
    answer = checked(session)
    require_close(answer, expected(model, repository, answer))
    base = model(answer.raw.response.sequences[:, :-1]).logits[0, len(prompt_of(answer)) - 1 :]
    with pytest.raises(AssertionError):
        require_close(answer, base)
    report = report_of(answer)
    assert report.exact >= before.generation.usage["prompt_tokens"]
    assert answer.generation.usage["prompt_tokens_details"] == {"cached_tokens": report.exact}
    again = report_of(checked(session))
    assert again.exact == again.tokens
    # The base model's own prompts are found as before: the adapter takes no part in them.
    assert str(session.ctx.last_output()) == str(before)
    later = MelleaSession(backend, ChatContext()).chat(QUESTION)
    assert later.content == str(before)
    backend.store.check()


@pytest.mark.parametrize("options", [{CACHING: Caching(reuse=False)}, {}], ids=["alone", "stored"])
def test_activated_without_what_others_left(backend, model, repository, options):
    """An adapter is in charge from its invocation on, whether or not there is a store."""
    backend.add_adapter(adapter())
    session = MelleaSession(backend, ChatContext())
    session.ctx = session.ctx.add(Message("user", QUESTION)).add(Message("assistant", "Ida."))
    answer = checked(session, **options)
    require_close(answer, expected(model, repository, answer))
    assert (report_of(answer) is None) == bool(options)


def test_a_lora_shares_nothing(backend, model, repository):
    """A LoRA computes all tokens, so its slots are its own."""
    session = conversation(backend)
    backend.add_adapter(adapter("lora"))
    answer = checked(session, "lora")
    require_close(answer, expected(model, repository, answer, "lora"))
    assert report_of(answer).exact == 0
    again = report_of(checked(session, "lora"))
    assert again.exact == again.tokens


@pytest.mark.parametrize(
    "context",
    [
        CBlock(DOCUMENTS["storm"], cache=True),
        cached(Message("user", DOCUMENTS["storm"])),
        Message("user", "Read.", documents=[cached(Document(DOCUMENTS["storm"]))]),
    ],
    ids=["CBlock", "message", "document"],
)
def test_blocks_before_the_invocation(backend, context):
    """What is joined is not stored as what reading gives, so the check joins the blocks again."""
    session = conversation(backend, context)
    backend.add_adapter(adapter())
    with_template = "{% for document in documents or [] %}{{ document.text }}\n{% endfor %}"
    backend._tokenizer = deepcopy(backend._tokenizer)
    backend._tokenizer.chat_template = with_template + backend._tokenizer.chat_template
    checked(session)
    answer = checked(session)
    (block,) = report_of(answer).blocks
    assert not block.refused
    assert report_of(answer).cached >= block.stop - block.start
    covered = backend._tokenizer.decode(prompt_of(answer)[block.start : block.stop])
    assert DOCUMENTS["storm"][1:].endswith(covered[-60:])


def test_requirements(backend):
    """Validation goes through the adapter, and judges as Mellea does: by its contract."""
    backend.add_adapter(adapter())
    session = conversation(backend)
    requirement = ALoraRequirement("It names the builder.", NAME)
    (result,) = session.validate(requirement, model_options=CHECK)
    score = json.loads(result.thunk.value)["requirement_check"]["score"]
    assert bool(result) == (score > 0.5)
    assert report_of(result.thunk).exact > 0


def test_loading_and_unloading(backend):
    own = adapter()
    backend.add_adapter(own)
    name = f"{NAME}_alora"
    backend.unload_peft_adapter(name)
    backend.load_peft_adapter(name)
    assert checked(conversation(backend)).is_computed()
    own.weights.release()
    assert backend.list_adapters() == []
    with pytest.raises(ValueError, match="no adapter"):
        checked(conversation(backend))


@pytest.mark.parametrize("backend", [1, 3], indirect=True)
def test_checks_beside_other_calls(backend):
    """An adapter is active in its own calls only."""
    backend.add_adapter(adapter())
    alone = conversation(backend)
    wanted = str(alone.ctx.last_output()), str(checked(alone))
    session = conversation(backend)
    action = Intrinsic(NAME, REQUIREMENT, adapter_types=(AdapterType.ALORA,))

    async def together():
        calls = []
        for _ in range(3):
            message = Message("user", QUESTION)
            calls.append(aact(message, ChatContext(), backend, strategy=None))
            calls.append(aact(action, session.ctx, backend, strategy=None, model_options=CHECK))
        found = await asyncio.gather(*calls)
        return [str(await answer.avalue()) for answer, _ in found]

    assert asyncio.run(together()) == [*wanted] * 3
    backend.store.check()


@pytest.mark.slow
def test_a_real_model(smollm2, tmp_path, monkeypatch):
    """Its conversation is found, and the logits are those of PEFT's own forward."""
    model, tokenizer = smollm2
    repository = adapters_of(model, tokenizer, tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda **_: str(repository))
    options = {"model_id": BASE, "sequences": 2, "model_options": OPTIONS}
    with KVKeepBackend(deepcopy(model), tokenizer, **options) as backend:
        session = conversation(backend)
        backend.add_adapter(adapter())
        answer = checked(session)
        before = session.ctx.last_output().generation.usage["prompt_tokens"]
        assert report_of(answer).exact >= before
    require_close(answer, expected(model, repository, answer), 1e-3)
