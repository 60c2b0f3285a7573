"""Prompts: a request's messages or texts as token ids, within the server's limits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from kvkeep.generate import SamplingParams, TokenTexts
from kvkeep.host import Host
from kvkeep.serve.formats import (
    reasoning_marks,
    response_template,
    shown_tokens,
)
from kvkeep.serve.limits import Limits
from kvkeep.serve.parts import Parts
from kvkeep.serve.refused import RequestError
from kvkeep.serve.rendering import Rendered, Rendering
from kvkeep.serve.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    Request,
    TokenizeRequest,
)
from kvkeep.serve.structured import Structured

_AT_ONCE = 512  # token ids that are turned to text while nothing is tokenised


class Echo(NamedTuple):
    """A prompt that begins the text of its answers, and where each of its tokens begins.

    Attributes:
        only: whether nothing follows it.
    """

    text: str
    tokens: list[int]
    offsets: list[int]
    only: bool


class Asked(NamedTuple):
    """A prompt: its token ids, int64 (n,), how its answers are generated, and the prompt's text if
    that begins them."""

    ids: Tensor
    params: SamplingParams
    echo: Echo | None = None


class Encoded(NamedTuple):
    """A request's prompts, and what makes the parser of an answer's parts; None: answers are plain
    text."""

    prompts: list[Asked]
    parts: Callable[[], Parts] | None = None


@final
class Prompts:
    """Turns prompts into token ids. Threads may share one; it serves one at a time.

    Args:
        host: of the model.
        tokenizer: the model's.
        name: the model's name for clients.
        context: most tokens of a prompt and its answer; None: no limit.
        limits: of each request.
    """

    def __init__(
        self, host: Host, tokenizer: Any, name: str, context: int | None, limits: Limits
    ) -> None:
        self._host, self._tokenizer = host, tokenizer
        self._limits, self.context = limits, context
        self.most_bytes = limits.prompt_of(context)
        self._rendering = Rendering(tokenizer, name, self.most_bytes)
        self._structured = Structured(tokenizer, host.vocabulary, lambda: self._end_tokens)
        self._encoding = threading.Lock()  # tokenizers are not safe for several threads at once

    def encode(self, request: Request) -> Encoded:
        """The prompts of a request, and how their answers are generated and read.

        Raises:
            RequestError: the chat template or the tokenizer refuses a prompt, it is longer than the
                model's context, the answers could be longer than the limit, an option of sampling
                is out of its range, or the request names tokens that do not exist.
        """
        self._check_tokens(request)
        with self._encoding:
            if isinstance(request, ChatCompletionRequest):
                return self._chat(request)
            size = sum(map(len, request.prompt))  # a token is at least a byte
            if size > self.most_bytes:
                raise self._rendering.too_large("prompt")
            return Encoded([self._completion(request, prompt) for prompt in request.prompt])

    def tokenize(self, request: TokenizeRequest) -> list[int]:
        """The token ids of a text or a conversation.

        Raises:
            RequestError: as `encode`.
        """
        special = request.add_special_tokens
        with self._encoding:
            if request.prompt is not None:
                return self._ids(request.prompt, "prompt", special=special is not False)
            text = self._rendering.render(request).text
            return self._ids(text, "messages", special=bool(special))

    def detokenize(self, tokens: list[int]) -> str:
        """The text of token ids, special tokens as they are written."""
        self._check_known(tokens, "tokens")
        with self._encoding:
            text: str = self._tokenizer.decode(tokens)
            return text

    def texts(self) -> Callable[[Sequence[int]], list[str]]:
        """Returns a function that takes the next token ids of one text and returns the text of
        each. Requests that are tokenised need not wait for all of them."""
        texts = TokenTexts(self._tokenizer)

        def following(ids: Sequence[int]) -> list[str]:
            found: list[str] = []
            for first in range(0, len(ids), _AT_ONCE):
                with self._encoding:
                    found += texts.push(ids[first : first + _AT_ONCE])
            return found

        return following

    def _chat(self, request: ChatCompletionRequest) -> Encoded:
        rendered = self._rendering.render(request)
        ids = self._ids(rendered.text, "messages", special=False)
        form, prefix, after = self._form(rendered)
        template, tools = self._template(rendered), rendered.tools
        grammar = self._structured.processors(request, template, tools, after)
        if form is None:
            return Encoded([self._asked(request, ids, own_processors=grammar)])
        parser = self._tokenizer.get_response_parser
        names = {tool["function"]["name"] for tool in tools}
        most = None if request.parallel_tool_calls else 1
        shown = shown_tokens(self._tokenizer, form)
        closed = form["fields"].get("tool_calls", {}).get("content") != "json"
        return Encoded(
            [self._asked(request, ids, own_processors=grammar, shown_tokens=shown)],
            lambda: Parts(
                parser(form, prefix=prefix, tools=tools), names, most_calls=most, closed=closed
            ),
        )

    def _form(self, rendered: Rendered) -> tuple[dict[str, Any] | None, str, str]:
        """The format of the answers, the text from which their parser goes on, and what ends the
        reasoning that they begin with, if any."""
        template = self._template(rendered)
        marks, begun = reasoning_marks(template) or ("", ""), rendered.begun
        if begun.rfind(marks[0]) <= begun.rfind(marks[1]):
            marks = ("", "")
        own = getattr(self._tokenizer, "response_template", None)
        if own is not None:
            return own, rendered.text, marks[1]
        return response_template(template, bool(rendered.tools)), *marks

    def _template(self, rendered: Rendered) -> str:
        template: str = self._tokenizer.get_chat_template(tools=rendered.tools or None)
        return template

    def _completion(self, request: CompletionRequest, prompt: str | list[int]) -> Asked:
        ids = self._ids(prompt, "prompt") if isinstance(prompt, str) else prompt
        echo = None
        if request.echo:
            texts = TokenTexts(self._tokenizer).push(ids)
            text = prompt if isinstance(prompt, str) else "".join(texts)
            echo = Echo(text, ids, _offsets(text, texts), request.extent[1])
        scored = request.echo and request.top_logprobs is not None
        grammar = self._structured.processors(request)
        return self._asked(request, ids, echo, prompt_logprobs=scored, own_processors=grammar)

    def _asked(
        self, request: Request, ids: list[int], echo: Echo | None = None, **further: Any
    ) -> Asked:
        """A prompt, checked.

        Args:
            further: fields of its `SamplingParams`.
        """
        param, length = request.prompt_field, len(ids)
        if self.context is not None and length >= self.context:
            raise RequestError(
                f"this model's maximum context length is {self.context} tokens, but {param} takes "
                f"{length}, and an answer at least 1; shorten it",
                param=param,
                code="context_length_exceeded",
            )
        if not ids:
            raise RequestError(f"{param}: no tokens; give some text", param=param)
        self._check_known(ids, param)
        most = self._most_tokens(request, length)
        params = request.params(length, most, self._end_tokens, **further)
        return Asked(torch.tensor(ids), params, echo)

    @property
    def _end_tokens(self) -> set[int]:
        return {token for token in self._host.end_tokens() if token is not None}

    def _check_known(self, ids: list[int], param: str) -> None:
        known = self._host.embeddings
        if known is not None and not all(0 <= token < known for token in ids):
            raise RequestError(f"{param} has token ids outside of 0 to {known - 1}", param=param)

    def _check_tokens(self, request: Request) -> None:
        for field, tokens in (
            ("logit_bias", map(int, request.logit_bias)),
            ("stop_token_ids", request.stop_token_ids),
        ):
            largest = max(tokens, default=0)
            if largest >= self._host.vocabulary:
                raise RequestError(
                    f"{field} has token {largest}; this model's are 0 to "
                    f"{self._host.vocabulary - 1}",
                    param=field,
                )

    def _most_tokens(self, request: Request, length: int) -> int:
        """The most tokens that each answer to a prompt of `length` tokens may have."""
        limit, answers = self._limits.answer_tokens, request.answers * request.prompts
        most = request.extent[0]
        most = max(1, limit // answers) if most is None else most
        if self.context is not None:
            most = min(most, self.context - length)
        if answers * most > limit:
            raise RequestError(
                f"{answers} answers of up to {most} tokens are {answers * most} tokens, but this "
                f"server gives {limit} to a request; ask for fewer (max_tokens, n)",
                param="n" if request.answers > 1 else "max_tokens",
            )
        return most

    def _ids(self, text: str, field: str, *, special: bool = True) -> list[int]:
        if len(text) > self.most_bytes or len(text.encode()) > self.most_bytes:
            raise self._rendering.too_large(field)
        ids: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids


def _offsets(text: str, pieces: Sequence[str]) -> list[int]:
    """Where in a text each token begins. A token that the tokenizer added takes no characters."""
    offsets, at = [], 0
    for piece in pieces:
        offsets.append(at)
        at += len(piece) if text.startswith(piece, at) else 0
    return offsets
