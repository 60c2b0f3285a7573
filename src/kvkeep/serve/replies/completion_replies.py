"""Replies to chat and completion requests."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from typing import Any, final

from kvkeep.serve.events import Picture, Scored, TextDelta, Usage
from kvkeep.serve.prompts.parts import CONTENT, REASONING, Call, Parts, Said
from kvkeep.serve.refused import RequestError
from kvkeep.serve.replies.reply import Reply, sent, with_bytes

_Object = dict[str, Any]


@final
class CompletionReply(Reply):
    """A chat or completion: choices of one object, or of a stream of chunks."""

    async def whole(self) -> _Object:
        pieces: list[list[TextDelta]] = [[] for _ in self._parts]
        said = defaultdict[int, list[Said | Call]](list)
        async for event in self._events():
            if isinstance(event, TextDelta):
                pieces[event.index].append(event)
                if self.request.chat:
                    said[event.index] += self._said(event)
            elif isinstance(event, RequestError):
                raise event
            elif isinstance(event, Usage):
                usage = self._usage(event)
        answers = self.request.answers
        groups = (pieces[at : at + answers] for at in range(0, len(pieces), answers))
        best = [one for group in groups for one in self._best(group)]
        choices = [self._choice(index, own, said[own[0].index]) for index, own in enumerate(best)]
        return self._object("chat.completion", choices) | {"usage": usage}

    def _best(self, answers: list[list[TextDelta]]) -> list[list[TextDelta]]:
        """The `n` answers to a prompt that the client receives."""

        def mean(pieces: list[TextDelta]) -> float:
            tokens = [one for piece in pieces if not piece.echo for one in piece.logprobs]
            return sum(one.chosen.logprob or 0 for one in tokens) / max(len(tokens), 1)

        if len(answers) == self.request.n:
            return answers
        return sorted(answers, key=mean, reverse=True)[: self.request.n]

    async def chunks(self) -> AsyncIterator[str]:
        """The answers as server-sent events."""
        if self.request.chat:
            for index in range(len(self._parts)):
                role = {"delta": {"role": "assistant", "content": ""}}
                yield self._chunk([{"index": index, **role, **_NOTHING}])
        async for event in self._events():
            if isinstance(event, TextDelta):
                for choice in self._deltas(event):
                    yield self._chunk([choice])
            elif isinstance(event, Picture):
                yield self._chunk([], cache=event.json)
                event.received()
            elif isinstance(event, RequestError):
                yield sent(json.dumps(event.body()))
            elif isinstance(event, Usage):
                if self.request.stream_options.include_usage:
                    yield self._chunk([], usage=self._usage(event))
                yield sent("[DONE]")

    def _chunk(self, choices: list[_Object], usage: _Object | None = None, cache: str = "") -> str:
        """A chunk of a stream; `cache` is JSON."""
        chunk = self._object("chat.completion.chunk", choices)
        if self.request.stream_options.include_usage:
            chunk["usage"] = usage
        # Escaped to ASCII because some clients treat U+2028 as a line break.
        text = json.dumps(chunk)
        return sent(f'{text[:-1]}, "cache": {cache}}}' if cache else text)

    def _object(self, name: str, choices: Iterable[_Object]) -> _Object:
        chat = self.request.chat
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self._id}",
            "object": name if chat else "text_completion",
            "created": self._created,
            "model": self.request.model,
            "choices": list(choices),
        }

    def _choice(self, index: int, pieces: list[TextDelta], said: list[Said | Call]) -> _Object:
        """A complete answer as a choice."""
        own: _Object = {"text": "".join(piece.text for piece in pieces)}
        if self.request.chat:
            own = {"message": _message(said)}
        return {"index": index, **own, **self._about(pieces, self._parts[pieces[0].index])}

    def _deltas(self, piece: TextDelta) -> list[_Object]:
        """A piece of an answer as choices of stream chunks."""
        said: list[_Object]
        if self.request.chat:
            said = [{"delta": one} for one in _message_deltas(self._said(piece))]
        else:
            said = [{"text": piece.text}] if piece.text else []
        if not said and (piece.logprobs or piece.finish_reason):
            said = [{"delta": {}} if self.request.chat else {"text": ""}]
        choices = [{"index": piece.index, **one, **_NOTHING} for one in said]
        for choice in choices[-1:]:
            choice |= self._about([piece], self._parts[piece.index])
        return choices

    def _about(self, pieces: list[TextDelta], parts: Parts) -> _Object:
        """The logprobs of an answer's pieces, and its finish reason."""
        about: _Object = dict(_NOTHING)
        reason = pieces[-1].finish_reason
        if self.request.top_logprobs is not None:
            tokens = [one for piece in pieces for one in piece.logprobs]
            scores = _chat_logprobs if self.request.chat else _completion_logprobs
            about["logprobs"] = scores(tokens)
        if reason:
            about["finish_reason"] = "tool_calls" if parts.calls and reason == "stop" else reason
        return about

    def _usage(self, usage: Usage) -> _Object:
        about: _Object = {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.completion,
            "total_tokens": usage.prompt + usage.completion,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
        }
        if self.request.chat:
            about["completion_tokens_details"] = {"reasoning_tokens": self._reasoned}
        return about


def _message(said: list[Said | Call]) -> _Object:
    """An assistant's message."""
    text = dict.fromkeys((CONTENT, REASONING), "")
    for one in said:
        if isinstance(one, Said):
            text[one.part] += one.text
    calls = [_call(one) for one in said if isinstance(one, Call)]
    content = None if calls and not text[CONTENT] else text[CONTENT]
    message: _Object = {"role": "assistant", "content": content, "refusal": None}
    if text[REASONING]:
        message[REASONING] = text[REASONING]
    return message | ({"tool_calls": calls} if calls else {})


def _message_deltas(said: list[Said | Call]) -> list[_Object]:
    """An assistant's message in parts for a stream: a call's name precedes its arguments."""
    deltas: list[_Object] = []
    for one in said:
        if isinstance(one, Said):
            deltas.append({one.part: one.text})
            continue
        begun = _call(one._replace(arguments="")) | {"index": one.number}
        deltas.append({"tool_calls": [begun]})
        arguments = {"index": one.number, "function": {"arguments": one.arguments}}
        deltas.append({"tool_calls": [arguments]})
    return deltas


def _call(call: Call) -> _Object:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


_NOTHING = {"logprobs": None, "finish_reason": None}


def _chat_logprobs(tokens: list[Scored]) -> _Object:
    content = [
        with_bytes(one.chosen) | {"top_logprobs": [*map(with_bytes, one.top)]} for one in tokens
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(tokens: list[Scored]) -> _Object:
    return {
        "tokens": [one.chosen.token.text for one in tokens],
        "token_logprobs": [one.chosen.logprob for one in tokens],
        "top_logprobs": [_by_name(one) for one in tokens],
        "text_offset": [one.offset for one in tokens],
    }


def _by_name(one: Scored) -> dict[str, float | None] | None:
    """The likeliest tokens, and the chosen token even if it is not among them, by name."""
    if one.chosen.logprob is None:
        return None
    every = (*one.top, one.chosen) if one.top else ()
    return {each.token.text: each.logprob for each in reversed(every)}
