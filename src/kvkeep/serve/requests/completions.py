"""Requests: the bodies that OpenAI's API defines, as pydantic models."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic import model_validator as validator

from kvkeep.errors import SpecError
from kvkeep.generate.sampling import SamplingParams, at_least, bias, penalty, repetition
from kvkeep.serve.refused import RequestError
from kvkeep.serve.requests.fields import (
    Bias,
    Count,
    Exact,
    FirstError,
    Flag,
    Ignored,
    Integer,
    Lenient,
    Number,
    Penalty,
    Refused,
    Stops,
    Text,
    Token,
    TokenId,
    at_most,
    object_tag,
    only,
    tag,
)
from kvkeep.serve.requests.messages import ImageURL, Message
from kvkeep.serve.requests.structures import ResponseFormat, Structure, StructureKind

_LEAST_TEMPERATURE = 1e-4  # below it decoding is greedy: dividing logits by it would overflow
_MOST_ANSWERS = 256  # per request: each answer takes memory while it waits


def _named(tool: dict[Any, Any]) -> dict[Any, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("give a function with a name")
    return tool


def _each_prompt(given: Any) -> Any:
    """A text, or the token ids of one, as a list of prompts."""
    one = isinstance(given, str) or (
        isinstance(given, list) and given and not isinstance(given[0], str | list)
    )
    return [given] if one else given


class Padding(Exact):
    """Padding that hides the lengths of a stream's pieces."""

    include_obfuscation: Annotated[Any, only(False)] = None
    """Only false: streams are not padded."""


class StreamOptions(Padding):
    """Options of a stream."""

    include_usage: Flag = False
    """Send a last chunk with the token counts."""
    include_cache: Flag = False
    """Send pictures of the cache of a single answer; see [the page](#the-page)."""


class _FunctionName(Exact):
    name: Text


class NamedTool(Lenient):
    """The choice of one tool."""

    type: Literal["function"]
    function: _FunctionName


class SampledRequest(Exact):
    """Fields of all requests for answers. `SamplingParams` checks top_p, top_k and min_p."""

    model: Text
    """The server's name for the model."""
    min_tokens: Annotated[Integer, Field(ge=0)] = 0
    """Until an answer has this many tokens, only stop strings end it."""
    temperature: Annotated[Number, Field(ge=0, le=2)] = 1.0
    """0 is greedy."""
    top_p: Number = 1.0
    """From 0 to 1."""
    top_k: Annotated[Integer, AfterValidator(lambda k: 0 if k == -1 else k)] = 0
    """0 and -1 turn it off."""
    min_p: Number = 0.0
    """From 0 to 1."""
    repetition_penalty: Annotated[Number, Field(gt=0)] = 1.0
    """Penalises tokens of the prompt and the answer, as transformers defines it."""
    presence_penalty: Penalty = 0.0
    """From -2 to 2, for tokens that the answer contains; the prompt does not count."""
    frequency_penalty: Penalty = 0.0
    """From -2 to 2, per occurrence of the token in the answer."""
    logit_bias: Annotated[dict[TokenId, Bias], at_most(1024, "tokens")] = {}
    """Up to 1,024 token ids, each with a bias from -100 to 100."""
    stop: Stops = []
    """Up to four strings of 1,000 characters; the text ends before the first complete match, which
    may span tokens."""
    stop_token_ids: Annotated[list[Token], Field(max_length=1024), FirstError] = []
    """Token ids that end an answer like the model's end tokens; not part of its text."""
    ignore_eos: Flag = False
    """Whether the model's own end tokens are ignored."""
    seed: Integer | None = None
    """The answers to a prompt use the seeds `seed`, `seed` + 1, and so on."""
    stream: Flag = False
    """Pieces are whole characters and contain no part of a stop string."""
    user: Ignored = None
    guided_json: dict[Any, Any] | Text | None = None
    """A JSON schema that the answer follows. This field and the next three have vLLM's names."""
    guided_regex: Text | None = None
    """A regular expression that the answer matches."""
    guided_choice: Annotated[list[Text], Field(min_length=1, max_length=1024), FirstError] = []
    """Texts, one of which is the answer."""
    guided_grammar: Text | None = None
    """A Lark or GBNF grammar that the answer follows."""


class GenerationRequest(SampledRequest):
    """Fields of chat and completion requests."""

    chat: ClassVar[bool]
    prompt_field: ClassVar[str]

    max_tokens: Count | None = None
    """Most tokens of an answer; the context limits it too. All answers together have at most
    `--answer-tokens`, which is also the default."""
    top_logprobs: int | None = None
    n: Annotated[Count, Field(le=128)] = 1
    """Number of answers to each prompt. They are computed together and share the prompt."""
    stream_options: StreamOptions = StreamOptions()
    """`include_usage`; `include_cache` for pictures of the cache of a single answer, see
    [the page](#the-page)."""
    response_format: ResponseFormat | None = None
    """`text`, `json_object`, or `json_schema` with a schema; see
    [structured output](#structured-output)."""

    @property
    def structure(self) -> Structure | None:
        """The schema or grammar that the answers follow; None: no restriction."""
        return next(iter(self._structures()), None)

    def _structures(self) -> list[Structure]:
        form, schema = self.response_format, None
        if form is not None and form.type != "text":
            schema = {"type": "object"} if form.json_schema is None else form.json_schema.given
        given: list[tuple[str, StructureKind, Any]] = [
            ("response_format", "json_schema", schema),
            ("guided_json", "json_schema", self.guided_json),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_choice", "choice", self.guided_choice or None),
            ("guided_grammar", "grammar", self.guided_grammar),
        ]
        return [
            Structure(field, kind, x if isinstance(x, str) else json.dumps(x))
            for field, kind, x in given
            if x is not None
        ]

    @validator(mode="after")
    def _check_structure(self) -> Self:
        form, several = self.response_format, self._structures()[1:]
        if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
            why = "needs json_schema with type json_schema, and with no other type"
            raise RequestError.of("response_format", why)
        if several:
            raise RequestError.of(several[0].field, "is one of several grammars; give only one")
        return self

    @property
    def answers(self) -> int:
        """Number of answers to each prompt."""
        return self.n

    @property
    def prompts(self) -> int:
        """Number of prompts."""
        return 1

    @property
    def extent(self) -> tuple[int | None, bool]:
        """The client's limit of tokens per answer, and whether it wants only the prompt."""
        return self.max_tokens, False

    @validator(mode="after")
    def _check_include_cache(self) -> Self:
        several = self.answers * self.prompts > 1
        if self.stream_options.include_cache and (several or not self.stream):
            why = "needs a single streamed answer; give stream true and n 1, or leave it out"
            raise RequestError.of("stream_options.include_cache", why)
        return self

    def without_prompt(self) -> Self:
        """A copy without the prompt, which may be large and is not needed after tokenisation."""
        return self.model_copy(update={self.prompt_field: [], "tools": []})

    def params(
        self, prompt_tokens: int, max_new_tokens: int, ends: Collection[int], **further: Any
    ) -> SamplingParams:
        """The sampling parameters of the answers to a prompt.

        Args:
            ends: ids of the model's own end tokens.
            further: other fields of the result.

        Raises:
            RequestError: a sampling option is out of range.
        """
        if self.min_tokens > max_new_tokens:
            why = f"is {self.min_tokens}, but an answer has at most {max_new_tokens}; ask for fewer"
            raise RequestError.of("min_tokens", why)
        end_tokens = frozenset(self.stop_token_ids) | (set() if self.ignore_eos else {*ends})
        processors = []
        if self.repetition_penalty != 1:
            processors.append(repetition(self.repetition_penalty))
        presence, frequency = self.presence_penalty, self.frequency_penalty
        if presence or frequency:
            processors.append(penalty(prompt_tokens, presence=presence, frequency=frequency))
        if self.logit_bias:
            processors.append(bias({int(token): added for token, added in self.logit_bias.items()}))
        if self.min_tokens and end_tokens:
            processors.append(at_least(self.min_tokens, prompt_tokens, sorted(end_tokens)))
        temperature = self.temperature if self.temperature >= _LEAST_TEMPERATURE else 0.0
        try:
            return SamplingParams(
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                seed=self.seed,
                processors=processors,
                stop=self.stop,
                end_tokens=end_tokens,
                logprobs=self.top_logprobs is not None or self.answers > self.n,
                top_logprobs=self.top_logprobs or 0,
                **further,
            )
        except SpecError as error:  # the message begins with the option's name
            raise RequestError(str(error), str(error).partition(" ")[0]) from None


class Conversation(Exact):
    """The part of a request that a chat template renders."""

    messages: Annotated[list[Message], Field(min_length=1), FirstError]
    """Messages of the roles system, developer, user, assistant and tool. Content is text, or a list
    of parts: text, and for the user [images](#images). If the chat template has no such role,
    developer becomes system, and the text of system is put before the next user message. Tool calls
    may lack names, ids and some of their arguments."""
    tools: Annotated[list[Annotated[dict[Any, Any], AfterValidator(_named)]], FirstError] = []
    """Passed to the chat template; see [tools](#tools)."""
    tool_choice: Annotated[
        Annotated[Literal["auto", "none", "required"], Tag("(text)")]
        | Annotated[NamedTool, Tag("(object)")],
        Discriminator(object_tag),
    ] = "auto"
    """`auto`, `none`, `required`, or a tool by name; see [tools](#tools)."""
    add_generation_prompt: Flag | None = None
    """Whether the template begins an answer; true by default, except with
    `continue_final_message`."""
    continue_final_message: Flag = False
    """Whether the answer continues the last message instead of starting a new one."""
    chat_template_kwargs: dict[Text, Any] = {}
    """Variables for the chat template, such as `enable_thinking`; the template must read them."""
    reasoning_effort: Text | None = None
    """A variable for the chat template. If the template reads `enable_thinking` instead, `none`
    turns thinking off and any other value turns it on."""

    @property
    def images(self) -> list[ImageURL]:
        """The images of all messages, in order."""
        return [image for message in self.messages for image in message.pictures]

    @property
    def remote_images(self) -> list[ImageURL]:
        """The images that must be fetched."""
        return [image for image in self.images if not image.url.startswith("data:")]

    @validator(mode="after")
    def _check_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            why = "begins a message, and continue_final_message continues one; give one of them"
            raise RequestError.of("add_generation_prompt", why)
        return self


class AnswerFields(Exact):
    """Fields with the same meaning in chats and responses."""

    parallel_tool_calls: Flag = True
    """Whether an answer may have several calls; otherwise only the first call is returned."""
    moderation: Refused = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Any = None
    """Ignored: cached prompts are found by their tokens."""
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None


class ChatCompletionRequest(Conversation, GenerationRequest, AnswerFields):
    """The body of a request to /v1/chat/completions."""

    chat, prompt_field = True, "messages"

    max_completion_tokens: Count | None = None
    """The newer name of `max_tokens`."""
    logprobs: Flag = False
    """Log-probabilities of each generated token, the end token included, at temperature 1 before
    penalties and biases."""
    top_logprobs: Annotated[Integer, Field(ge=0, le=20)] | None = None
    """With `logprobs`: number of likeliest tokens returned for each position."""
    store: Annotated[Any, only(False)] = None
    """Only false: the server keeps no chats."""
    modalities: Annotated[Any, only(["text"])] = None
    """Only `["text"]`."""
    verbosity: Annotated[Any, only("medium")] = None
    """Only `medium`."""
    audio: Refused = None
    web_search_options: Refused = None
    functions: Annotated[Any, only([])] = None
    """Refused; use `tools`."""
    function_call: Annotated[Any, only("none")] = None
    """Only `none`; use `tool_choice`."""
    prediction: Ignored = None
    metadata: Ignored = None

    @validator(mode="after")
    def _join_options(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            why = f"is {self.top_logprobs}, but logprobs is false; give logprobs true too"
            raise RequestError.of("top_logprobs", why)
        self.top_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        return self


class CompletionRequest(GenerationRequest):
    """The body of a request to /v1/completions."""

    chat, prompt_field = False, "prompt"

    prompt: Annotated[
        list[
            Annotated[
                Annotated[Text, Field(min_length=1), Tag("(text)")]
                | Annotated[list[Integer], Field(min_length=1), FirstError, Tag("(list)")],
                Discriminator(tag),
            ]
        ],
        Field(min_length=1, max_length=_MOST_ANSWERS),
        FirstError,
        BeforeValidator(_each_prompt),
    ]
    """A text, the token ids of one, or a list of either; at most 256 answers together."""
    max_tokens: Annotated[Integer, Field(ge=0)] | None = 16
    """As for chats; with `echo`, 0 returns the prompt alone."""
    top_logprobs: Annotated[Integer, Field(ge=0, le=5)] | None = Field(None, alias="logprobs")
    """Return the log-probability of each token and of this many likeliest tokens at its position, 0
    to 5; as for chats. With `echo`, prompt tokens are included, and the prompt does not read from
    the prefix store."""
    echo: Flag = False
    """Whether the text starts with the prompt."""
    best_of: Annotated[Count, Field(le=128)] | None = None
    """Number of computed answers, of which the `n` with the highest mean log-probability are
    returned; `n` by default. Not with `stream`."""
    suffix: Annotated[Any, only("")] = None
    """Refused."""

    @property
    def answers(self) -> int:
        return self.best_of or self.n

    @property
    def prompts(self) -> int:
        return len(self.prompt)

    @property
    def extent(self) -> tuple[int | None, bool]:
        return self.max_tokens or 1, self.max_tokens == 0

    @validator(mode="after")
    def _check_options(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            why = "is 0: give at least 1, or echo true for the prompt alone"
            raise RequestError.of("max_tokens", why)
        if self.answers * self.prompts > _MOST_ANSWERS:
            asked = f"{self.prompts} prompts of {self.answers} answers"
            raise RequestError(
                f"{asked}: ask for at most {_MOST_ANSWERS} answers at once", "prompt"
            )
        if self.answers < self.n or (self.stream and self.answers > self.n):
            why = f"is {self.best_of}: give at least n, which is {self.n}, and in a stream not more"
            raise RequestError.of("best_of", why)
        return self


class TokenizeRequest(Conversation):
    """The body of a request to /tokenize: a text, or a conversation."""

    model: Text | None = None
    messages: Annotated[list[Message], FirstError] = []
    prompt: Text | None = None
    add_special_tokens: Flag | None = None
    return_token_strs: Flag = False

    @validator(mode="after")
    def _check_prompt(self) -> Self:
        if bool(self.messages) == (self.prompt is not None):
            raise RequestError("give either prompt or messages", "prompt")
        return self


class DetokenizeRequest(Exact):
    """The body of a request to /detokenize."""

    model: Text | None = None
    tokens: Annotated[list[Token], FirstError]


Request = ChatCompletionRequest | CompletionRequest
