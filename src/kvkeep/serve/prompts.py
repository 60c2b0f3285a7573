"""Prompts: a request's messages or text as token ids, within the server's limits."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor

from kvkeep.generate import SamplingParams, TokenTexts
from kvkeep.host import Host
from kvkeep.serve.limits import Limits
from kvkeep.serve.requests import ChatCompletionRequest, Request, RequestError

_AT_ONCE = 512  # token ids that are turned to text while nothing is tokenised


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
        self._host, self._tokenizer, self._name = host, tokenizer, name
        self._limits, self.context = limits, context
        self.most_bytes = limits.prompt_of(context)
        self._encoding = threading.Lock()  # tokenizers are not safe for several threads at once

    def encode(self, request: Request) -> tuple[Tensor, SamplingParams]:
        """The token ids of a request's prompt, int64 (n,), and how its answers are generated.

        Raises:
            RequestError: the chat template or the tokenizer refuses the prompt, it is longer than
                the model's context, the answers could be longer than the limit, an option of
                sampling is out of its range, or the request names tokens that do not exist.
        """
        param = request.prompt_field
        with self._encoding:
            ids = self._ids(request)
        if self.context is not None and len(ids) >= self.context:
            raise RequestError(
                f"this model's context is {self.context} tokens, but {param} takes {len(ids)}, and "
                "an answer at least 1; shorten it",
                param=param,
                code="context_length_exceeded",
            )
        if not ids:
            raise RequestError(f"{param}: no tokens; give some text", param=param)
        known = self._host.embeddings
        if known is not None and not all(0 <= token < known for token in ids):
            raise RequestError(f"{param} has token ids outside of 0 to {known - 1}", param=param)
        largest = max(map(int, request.logit_bias), default=0)
        if largest >= self._host.vocabulary:
            raise RequestError(
                f"logit_bias has token {largest}; this model's are 0 to "
                f"{self._host.vocabulary - 1}",
                param="logit_bias",
            )
        return torch.tensor(ids), request.params(len(ids), self._most_tokens(request, len(ids)))

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

    def _most_tokens(self, request: Request, length: int) -> int:
        """The most tokens that each answer to a prompt of `length` tokens may have."""
        limit, most = self._limits.answer_tokens, request.max_tokens
        most = max(1, limit // request.n) if most is None else most
        if self.context is not None:
            most = min(most, self.context - length)
        if request.n * most > limit:
            raise RequestError(
                f"{request.n} answers of up to {most} tokens are {request.n * most} tokens, but "
                f"this server gives {limit} to a request; ask for fewer (max_tokens, n)",
                param="n" if request.n > 1 else "max_tokens",
            )
        return most

    def _ids(self, request: Request) -> list[int]:
        if isinstance(request, ChatCompletionRequest):
            text, chat = self._rendered(request), True
        elif isinstance(request.prompt, list):
            return request.prompt
        else:
            text, chat = request.prompt, False
        if len(text) > self.most_bytes or len(text.encode()) > self.most_bytes:
            raise self._too_large(request)
        ids: list[int] = self._tokenizer(text, add_special_tokens=not chat)["input_ids"]
        return ids

    def _rendered(self, request: ChatCompletionRequest) -> str:
        """The text that the chat template makes of messages and tools."""
        if self._tokenizer.chat_template is None:
            raise RequestError(
                f"{self._name} has no chat template; use /v1/completions",
                param=request.prompt_field,
                code="no_chat_template",
            )
        tools = request.tools if request.tools and request.tool_choice != "none" else None
        messages = [message.for_template() for message in request.messages]
        template = self._tokenizer.get_chat_template(tools=tools)
        calls = any("tool_calls" in message for message in messages)
        for used, field in ((tools, "tools"), (calls, "tool_calls")):
            if used and field not in template:  # it would silently leave them out
                raise RequestError(
                    f"the chat template of {self._name} does not render {field}", param=field
                )
        try:
            if _is_larger([messages, tools], self.most_bytes):
                raise self._too_large(request)
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=False
            )
            text.encode()
            return text
        except RequestError:
            raise
        except Exception as error:  # templates are programs, and raise errors of any class
            reason = " ".join(str(error).split())[:300]
            raise RequestError(
                f"the chat template of {self._name} cannot render these messages: {reason}",
                param=request.prompt_field,
            ) from error

    def _too_large(self, request: Request) -> RequestError:
        return RequestError(
            f"{request.prompt_field} takes more than the {self.most_bytes} bytes that this server "
            "reads of a prompt; shorten it",
            param=request.prompt_field,
            code="context_length_exceeded",
        )


def _is_larger(given: Any, limit: int) -> bool:
    """Whether a template that writes its input as indented JSON would write more than `limit`
    bytes. Deeply nested input becomes long by indentation, so it is counted without writing it."""
    pieces = json.JSONEncoder(indent=4, ensure_ascii=False).iterencode(given)
    return any(total > limit for total in accumulate(len(piece.encode()) for piece in pieces))
