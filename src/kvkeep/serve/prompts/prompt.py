"""Prompts: the messages or texts of a request as token ids, within the server's limits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from kvkeep.generate import SamplingParams, TokenTexts
from kvkeep.host import Host
from kvkeep.serve.limits import Limits
from kvkeep.serve.prompts.formats import reasoning_marks, response_template, shown_tokens
from kvkeep.serve.prompts.images import Images, fetched
from kvkeep.serve.prompts.parts import Parts
from kvkeep.serve.prompts.rendering import Rendered, Rendering
from kvkeep.serve.prompts.structured import Structured
from kvkeep.serve.refused import RequestError
from kvkeep.serve.requests.completions import (
    ChatCompletionRequest,
    CompletionRequest,
    Conversation,
    DetokenizeRequest,
    Request,
    TokenizeRequest,
)

_AT_ONCE = 512  # token ids decoded per acquisition of the lock
_JSON_PER_BYTE = 4  # most bytes of JSON per byte of the prompt: characters may be escaped
_JSON_BESIDE = 2**16  # most bytes of a request without its prompt


class Echo(NamedTuple):
    """A prompt that is repeated at the start of its answers, and the offset of each of its tokens.

    Attributes:
        only: whether no answer follows the prompt.
    """

    text: str
    tokens: list[int]
    offsets: list[int]
    only: bool


class Asked(NamedTuple):
    """A prompt: token ids, int64 (n,), sampling parameters, the echo if the answers start with the
    prompt, and the model's inputs besides the ids."""

    ids: Tensor
    params: SamplingParams
    echo: Echo | None = None
    media: Mapping[str, Tensor] = {}


class Encoded(NamedTuple):
    """A request's prompts, and a function that makes the parser of an answer."""

    prompts: list[Asked]
    parts: Callable[[], Parts] = Parts


class _Form(NamedTuple):
    """The format of a chat's answers.

    Attributes:
        template: template of the tokenizer's parser; None: answers are plain text.
        prefix: text that the parser has read before the answer.
        after: the mark that ends an answer's reasoning; empty: answers do not start with reasoning.
        closed: whether a call counts only with its end mark.
    """

    template: dict[str, Any] | None
    prefix: str
    after: str
    closed: bool = False


@final
class Prompts:
    """Turns requests into token ids. Threads may share it; it serves one at a time.

    Args:
        processor: the model's processor for images; None: prompts are text only.
        name: the model's name for clients.
        context: most tokens of a prompt and its answer; None: no limit.
    """

    def __init__(
        self,
        host: Host,
        tokenizer: Any,
        processor: Any,
        name: str,
        context: int | None,
        limits: Limits,
    ) -> None:
        self._host, self._tokenizer = host, tokenizer
        self._limits, self.context = limits, context
        self._images = Images(processor) if processor is not None else None
        self.most_bytes = limits.prompt_of(context)
        sees = self._images is not None
        self.most_body = _JSON_PER_BYTE * self.most_bytes + _JSON_BESIDE
        self.most_body += limits.image_bytes * 4 // 3 if sees else 0  # in base64
        self._rendering = Rendering(tokenizer, name, self.most_bytes, sees=sees)
        self._structured = Structured(tokenizer, host.vocabulary, lambda: self._end_tokens)
        self._encoding = threading.Lock()  # tokenizers are not thread-safe

    def encode(self, request: Request) -> Encoded:
        """Tokenise the prompts of a request; return them with the parameters and parser of their
        answers.

        Raises:
            RequestError: the chat template or the tokenizer refuses a prompt, the prompt is longer
                than the model's context, the answers could exceed the limit, a sampling option is
                out of range, or the request contains token ids that do not exist.
        """
        self._check_tokens(request)
        with self._encoding:
            if isinstance(request, ChatCompletionRequest):
                return self._chat(request)
            return self._completions(request)

    def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:
        """The token ids of a text or a conversation, in the format of vLLM's /tokenize.

        Raises:
            RequestError: as `encode`.
        """
        special = request.add_special_tokens
        with self._encoding:
            if request.prompt is not None:
                ids = self._ids(request.prompt, "prompt", special=special is not False)
            else:
                ids = self._rendered(request, special=bool(special))[1]
            found = {"count": len(ids), "max_model_len": self.context, "tokens": ids}
            if request.return_token_strs:
                found["token_strs"] = self._tokenizer.convert_ids_to_tokens(ids)
            return found

    def fetch(self, request: Conversation) -> None:
        """Fetch the remote images of a request.

        Raises:
            RequestError: an image may not be fetched, or cannot be.
        """
        left = self._limits.image_bytes
        for image in request.remote_images:
            image.url = fetched(image.url, self._limits.image_hosts, left, self._limits.timeout_s)
            left -= len(image.url) * 3 // 4

    def detokenize(self, request: DetokenizeRequest) -> dict[str, Any]:
        """The text of token ids, special tokens included, in the format of vLLM's /detokenize."""
        self._check_known(request.tokens, "tokens")
        with self._encoding:
            return {"prompt": self._tokenizer.decode(request.tokens)}

    def texts(self) -> Callable[[Sequence[int]], list[str]]:
        """Return a function that takes the next token ids of one text and returns each token's
        text. It releases the lock between pieces, so that requests need not wait for a long
        text."""
        texts = TokenTexts(self._tokenizer)

        def following(ids: Sequence[int]) -> list[str]:
            found: list[str] = []
            for first in range(0, len(ids), _AT_ONCE):
                with self._encoding:
                    found += texts.push(ids[first : first + _AT_ONCE])
            return found

        return following

    def _rendered(
        self, request: Conversation, *, special: bool = False
    ) -> tuple[Rendered, list[int], Mapping[str, Tensor]]:
        """A conversation's text, its token ids, and the model's further inputs."""
        rendered = self._rendering.render(request)
        if self._images is None or not request.images:
            return rendered, self._ids(rendered.text, "messages", special=special), {}
        self._check_size(rendered.text, "messages")
        urls = [image.url for image in request.images]
        return rendered, *self._images.read(rendered.text, urls, special=special)

    def _chat(self, request: ChatCompletionRequest) -> Encoded:
        rendered, ids, media = self._rendered(request)
        self._checked(ids, "messages")
        tools, form = rendered.tools, self._form(rendered)
        grammar = self._structured.processors(request, rendered.template, tools, form.after)
        template = form.template
        shown = frozenset[int]() if template is None else shown_tokens(self._tokenizer, template)
        asked = self._asked(request, ids, own_processors=grammar, shown_tokens=shown)
        asked = asked._replace(media=media)
        if template is None:
            return Encoded([asked])
        parser = self._tokenizer.get_response_parser
        names = {tool["function"]["name"] for tool in tools}
        most = None if request.parallel_tool_calls else 1
        return Encoded(
            [asked],
            lambda: Parts(
                parser(template, prefix=form.prefix, tools=tools),
                names,
                most_calls=most,
                closed=form.closed,
            ),
        )

    def _form(self, rendered: Rendered) -> _Form:
        chat_template = rendered.template
        marks, begun = reasoning_marks(chat_template) or ("", ""), rendered.begun
        if begun.rfind(marks[0]) <= begun.rfind(marks[1]):
            marks = ("", "")
        own = getattr(self._tokenizer, "response_template", None)
        if own is not None:
            return _Form(own, rendered.text, marks[1])
        template = response_template(chat_template, bool(rendered.tools))
        calls = {} if template is None else template["fields"].get("tool_calls", {})
        return _Form(template, *marks, closed=calls.get("content") == "xml-inline")

    def _completions(self, request: CompletionRequest) -> Encoded:
        read = [one for one in request.prompt if isinstance(one, str) or request.echo]
        if sum(map(len, read)) > self.most_bytes:  # a token is at least a byte
            raise self._rendering.too_large("prompt")
        scored = request.echo and request.top_logprobs is not None
        grammar = self._structured.processors(request)
        prompts = []
        for prompt in request.prompt:
            ids = self._ids(prompt, "prompt") if isinstance(prompt, str) else prompt
            echo = self._echo(request, prompt, self._checked(ids, "prompt"))
            prompts.append(
                self._asked(request, ids, echo, prompt_logprobs=scored, own_processors=grammar)
            )
        return Encoded(prompts)

    def _echo(
        self, request: CompletionRequest, prompt: str | list[int], ids: list[int]
    ) -> Echo | None:
        if not request.echo:
            return None
        texts = TokenTexts(self._tokenizer).push(ids)
        text = prompt if isinstance(prompt, str) else "".join(texts)
        return Echo(text, ids, _offsets(text, texts), request.extent[1])

    def _asked(
        self, request: Request, ids: list[int], echo: Echo | None = None, **further: Any
    ) -> Asked:
        """A prompt. `further`: fields of its `SamplingParams`."""
        most = self._most_tokens(request, len(ids))
        params = request.params(len(ids), most, self._end_tokens, **further)
        return Asked(torch.tensor(ids), params, echo)

    def _checked(self, ids: list[int], param: str) -> list[int]:
        length = len(ids)
        if self.context is not None and length >= self.context:
            most = f"this model's maximum context length is {self.context} tokens"
            message = f"{most}, but {param} takes {length}, and an answer at least 1; shorten it"
            raise RequestError(message, param, "context_length_exceeded")
        if not ids:
            raise RequestError.of(param, "has no tokens; give some text")
        self._check_known(ids, param)
        return ids

    @property
    def _end_tokens(self) -> set[int]:
        return {token for token in self._host.end_tokens() if token is not None}

    def _check_known(self, ids: list[int], param: str) -> None:
        known = self._host.embeddings
        if known is not None and not all(0 <= token < known for token in ids):
            raise RequestError.of(param, f"has token ids outside of 0 to {known - 1}")

    def _check_tokens(self, request: Request) -> None:
        for field, tokens in (
            ("logit_bias", map(int, request.logit_bias)),
            ("stop_token_ids", request.stop_token_ids),
        ):
            largest = max(tokens, default=0)
            if largest >= self._host.vocabulary:
                last = self._host.vocabulary - 1
                raise RequestError.of(field, f"has token {largest}; this model's are 0 to {last}")

    def _most_tokens(self, request: Request, length: int) -> int:
        """The most tokens of each answer to a prompt of `length` tokens."""
        limit, answers = self._limits.answer_tokens, request.answers * request.prompts
        most = request.extent[0]
        most = max(1, limit // answers) if most is None else most
        if self.context is not None:
            most = min(most, self.context - length)
        if answers * most > limit:
            asked = f"{answers} answers of up to {most} tokens are {answers * most} tokens"
            message = f"{asked}, but a request may have {limit}; ask for fewer (max_tokens, n)"
            raise RequestError(message, "n" if request.answers > 1 else "max_tokens")
        return most

    def _ids(self, text: str, field: str, *, special: bool = True) -> list[int]:
        self._check_size(text, field)
        ids: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def _check_size(self, text: str, field: str) -> None:
        if len(text) > self.most_bytes or len(text.encode()) > self.most_bytes:
            raise self._rendering.too_large(field)


def _offsets(text: str, pieces: Sequence[str]) -> list[int]:
    """The offset of each token in a text. A token that the tokenizer added has no characters."""
    offsets, at = [], 0
    for piece in pieces:
        offsets.append(at)
        at += len(piece) if text.startswith(piece, at) else 0
    return offsets
