"""Structured output: answers that follow a schema or a grammar, or that are tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, final

from kvkeep.errors import MissingPackageError
from kvkeep.generate import Processor
from kvkeep.serve.prompts.formats import forced_calls
from kvkeep.serve.refused import RequestError
from kvkeep.serve.requests.completions import ChatCompletionRequest, Request

if TYPE_CHECKING:
    from kvkeep.serve.prompts.grammars import Grammars


@final
class Structured:
    """Selects the logits processors for structured output.

    Args:
        vocabulary: the model's vocabulary size.
        ends: returns the ids of the tokens that end an answer.
    """

    def __init__(
        self, tokenizer: Any, vocabulary: int, ends: Callable[[], Collection[int]]
    ) -> None:
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, ends
        self._made: Grammars | None = None

    def processors(
        self,
        request: Request,
        template: str = "",
        tools: list[dict[Any, Any]] | None = None,
        after: str = "",
    ) -> list[Callable[[], Processor]]:
        """The value of `SamplingParams.own_processors` for a request.

        Args:
            template: the chat template.
            tools: tools that may be called.
            after: the mark that ends an answer's reasoning; empty: no reasoning.

        Raises:
            RequestError: a grammar is not valid, or cannot be enforced.
        """
        structure, forced = request.structure, False
        if isinstance(request, ChatCompletionRequest):
            forced = request.tool_choice not in ("auto", "none")
        field = "tool_choice" if forced or structure is None else structure.field
        if structure is None and not forced:
            return []
        grammars = self._grammars(field, request)
        if not tools and structure is not None:
            return [grammars.following(structure.kind, structure.text, field, after=after)]
        calls = forced_calls(template, tools or [])
        if calls is None:
            why = "requires a call, but this model's call format is unknown; leave it out"
            raise RequestError.of(field, why)
        if structure is not None and not forced:
            if structure.kind != "json_schema":
                why = "with tools is not supported; give tool_choice none, or a JSON schema"
                raise RequestError.of(field, why)
            calls.append([_schema(structure.text, field)])
        return [grammars.following("lark", grammars.one_of(calls), "tools", after=after)]

    def _grammars(self, field: str, request: Request) -> Grammars:
        """The grammar compiler.

        Raises:
            RequestError: llguidance is not installed or does not support the tokenizer, or another
                field of the request would keep answers from ending with the grammar.
        """
        if request.ignore_eos or request.min_tokens:
            other = "ignore_eos" if request.ignore_eos else "min_tokens"
            why = f"keeps an answer from ending where {field} ends it; leave out one of them"
            raise RequestError.of(other, why)
        if self._made is None:
            try:
                from kvkeep.serve.prompts.grammars import Grammars  # noqa: PLC0415 (of an extra)

                self._made = Grammars(self._tokenizer, self._vocabulary, self._ends())
            except (MissingPackageError, ValueError) as error:
                raise RequestError.of(field, f"cannot be followed: {error}") from error
        return self._made


def _schema(text: str, field: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except ValueError:
        schema = None
    if not isinstance(schema, dict):
        raise RequestError.of(field, "is no JSON schema; give an object")
    return schema
