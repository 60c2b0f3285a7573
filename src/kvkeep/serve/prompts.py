"""Prompts: a request's messages or text as token ids, within the server's limits."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor

from kvkeep.host import Host, TokenTexts
from kvkeep.serve.limits import Limits
from kvkeep.serve.requests import Asked, RequestError

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

    def encode(self, asked: Asked) -> Tensor:
        """The token ids of a request's prompt, int64 (n,).

        Raises:
            RequestError: the chat template or the tokenizer refuses it, it is longer than the
                model's context, its answers could be longer than the limit, or it names tokens that
                do not exist.
        """
        if isinstance(asked.prompt, list):
            ids = asked.prompt
            self._require_context(asked, len(ids))
            known = self._host.embeddings
            if known is not None and not all(0 <= token < known for token in ids):
                raise RequestError(
                    f"prompt has token ids outside of 0 to {known - 1}", param=asked.param
                )
        else:
            with self._encoding:
                ids = self._chat_ids(asked) if asked.chat else self._text_ids(asked.prompt, asked)
            self._require_context(asked, len(ids))
        if not ids:
            raise RequestError(f"{asked.param}: no tokens; give some text", param=asked.param)
        self.most_of(asked, len(ids))
        largest = max(asked.logit_bias, default=0)
        if largest >= self._host.vocabulary:
            raise RequestError(
                f"logit_bias has token {largest}; this model's are 0 to "
                f"{self._host.vocabulary - 1}",
                param="logit_bias",
            )
        return torch.tensor(ids)

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

    def most_of(self, asked: Asked, length: int) -> int:
        """The most tokens that each answer to a prompt of `length` tokens may have.

        Raises:
            RequestError: all answers together could exceed the limit.
        """
        limit = self._limits.answer_tokens
        most = max(1, limit // asked.n) if asked.max_tokens is None else asked.max_tokens
        if self.context is not None:
            most = min(most, self.context - length)
        if asked.n * most > limit:
            raise RequestError(
                f"{asked.n} answers of up to {most} tokens are {asked.n * most} tokens, but this "
                f"server gives {limit} to a request; ask for fewer (max_tokens, n)",
                param="n" if asked.n > 1 else "max_tokens",
            )
        return most

    def _require_context(self, asked: Asked, length: int) -> None:
        if self.context is not None and length >= self.context:
            raise RequestError(
                f"this model's context is {self.context} tokens, but {asked.param} takes "
                f"{length}, and an answer at least 1; shorten it",
                param=asked.param,
                code="context_length_exceeded",
            )

    def _text_ids(self, text: str, asked: Asked, **options: Any) -> list[int]:
        if len(text) > self.most_bytes or len(text.encode()) > self.most_bytes:
            raise self._too_large(asked)
        ids: list[int] = self._tokenizer(text, **options)["input_ids"]
        return ids

    def _chat_ids(self, asked: Asked) -> list[int]:
        if self._tokenizer.chat_template is None:
            raise RequestError(
                f"{self._name} has no chat template; use /v1/completions",
                param=asked.param,
                code="no_chat_template",
            )
        template = self._tokenizer.get_chat_template(tools=asked.tools)
        calls = any("tool_calls" in message for message in asked.messages)
        for used, field in ((asked.tools, "tools"), (calls, "tool_calls")):
            if used and field not in template:  # it would silently leave them out
                raise RequestError(
                    f"the chat template of {self._name} does not render {field}", param=field
                )
        try:
            if _is_larger([asked.messages, asked.tools], self.most_bytes):
                raise self._too_large(asked)
            text: str = self._tokenizer.apply_chat_template(
                asked.messages, tools=asked.tools, add_generation_prompt=True, tokenize=False
            )
            return self._text_ids(text, asked, add_special_tokens=False)
        except RequestError:
            raise
        except Exception as error:  # templates are programs, and raise errors of any class
            reason = " ".join(str(error).split())[:300]
            raise RequestError(
                f"the chat template of {self._name} cannot render these messages: {reason}",
                param=asked.param,
            ) from error

    def _too_large(self, asked: Asked) -> RequestError:
        return RequestError(
            f"{asked.param} takes more than the {self.most_bytes} bytes that this server reads "
            "of a prompt; shorten it",
            param=asked.param,
            code="context_length_exceeded",
        )


def _is_larger(given: Any, limit: int) -> bool:
    """Whether a template that writes its input as indented JSON would write more than `limit`
    bytes. Deeply nested input becomes long by indentation, so it is counted without writing it."""
    pieces = json.JSONEncoder(indent=4, ensure_ascii=False).iterencode(given)
    return any(total > limit for total in accumulate(len(piece.encode()) for piece in pieces))
