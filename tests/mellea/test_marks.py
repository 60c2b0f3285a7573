"""Components that are marked for reuse: messages, documents, instructions."""

from __future__ import annotations

from copy import deepcopy

import pytest
from mellea import MelleaSession
from mellea.backends import ModelOption
from mellea.core import CBlock
from mellea.stdlib.components import Document, Instruction, Message
from mellea.stdlib.context import ChatContext
from support.lighthouse import DOCUMENTS, OPTIONS, QUESTION, prompt_of

from kvkeep.errors import SpecError
from kvkeep.mellea import KVKeepBackend, cached, report_of


def built():
    return Document(DOCUMENTS["built"], title="History", doc_id="7")


def with_content_marked():
    message = Message("user", DOCUMENTS["storm"])
    message.parts()[0].cache = True
    return message


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (lambda: cached(Message("user", DOCUMENTS["storm"])), DOCUMENTS["storm"]),
        (with_content_marked, DOCUMENTS["storm"]),
        (lambda: Message("user", QUESTION, documents=[cached(built())]), DOCUMENTS["built"]),
        (
            lambda: Instruction(QUESTION, grounding_context={"a": cached(built())}),
            DOCUMENTS["built"],
        ),
        (lambda: cached(Instruction(QUESTION, prefix=DOCUMENTS["green"])), DOCUMENTS["green"]),
        (lambda: deepcopy(cached(Message("user", DOCUMENTS["storm"]))), DOCUMENTS["storm"]),
        (lambda: cached(CBlock(DOCUMENTS["storm"])), DOCUMENTS["storm"]),
    ],
    ids=["message", "content", "document", "grounding", "instruction", "copy", "CBlock"],
)
def test_what_can_be_marked(backend, action, text):
    """Each is a block, found again behind another beginning."""
    first = MelleaSession(backend).act(action(), strategy=None)
    later = MelleaSession(backend, ChatContext())
    later.ctx = later.ctx.add(Message("user", "Listen.")).add(Message("assistant", "Yes?"))
    second = later.act(action(), strategy=None)
    for answer in (first, second):
        (block,) = report_of(answer).blocks
        assert not block.refused
        covered = backend._tokenizer.decode(prompt_of(answer)[block.start : block.stop])
        assert text[1:] in covered
    assert report_of(second).found == block.stop - block.start
    backend.store.check()


def test_parts_inside_of_marked_ones(backend):
    action = cached(Message("user", DOCUMENTS["storm"], documents=[cached(built())]))
    answer = MelleaSession(backend).act(action, strategy=None)
    whole, inner = report_of(answer).blocks
    assert not whole.refused
    assert inner.refused == "it is inside a block that is reused"
    assert whole.start <= inner.start < inner.stop <= whole.stop


def test_the_prompt_is_that_of_unmarked_parts(backend):
    marks = Message("user", QUESTION, documents=[cached(built())])
    plain = Message("user", QUESTION, documents=[built()])
    first, second = (
        prompt_of(MelleaSession(backend).act(action, strategy=None)) for action in (marks, plain)
    )
    assert first.equal(second)


def test_a_part_that_is_not_rendered(backend):
    hidden = cached(Message("user", "I am not rendered. " * 8))

    class Around(Message):
        def parts(self):
            return [hidden]

    answer = MelleaSession(backend).act(Around("user", QUESTION), strategy=None)
    (block,) = report_of(answer).blocks
    assert block.refused == "no message of the prompt contains it"


def test_what_cannot_be_marked():
    with pytest.raises(SpecError, match="str is not a prompt's part; give a CBlock"):
        cached("text")


@pytest.mark.slow
def test_a_real_model_with_everything_computed_again(smollm2):
    """The answer is that over parts without marks."""
    model, tokenizer = smollm2
    marks = Message("user", QUESTION, documents=[cached(built())])
    plain = Message("user", QUESTION, documents=[built()])
    options = OPTIONS | {ModelOption.MAX_NEW_TOKENS: 12}
    with KVKeepBackend(model, tokenizer, recompute="all", model_options=options) as backend:
        answer = MelleaSession(backend).act(marks, strategy=None)
    with KVKeepBackend(model, tokenizer, model_options=options) as backend:
        wanted = MelleaSession(backend).act(plain, strategy=None)
    assert str(answer) == str(wanted)
