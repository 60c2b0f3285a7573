"""Together: one batch that answers the calls of several threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from threading import Condition, Lock, get_ident
from typing import Any, cast, final

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.utils import GenerateDecoderOnlyOutput

from kvkeep.batch import Answer, Batch, Reuse, Sampling, Settings
from kvkeep.extras import needed_by
from kvkeep.host import ModelCache, host_of
from kvkeep.host.compress import compresses
from kvkeep.host.sampling import Processor, repetition
from kvkeep.mellea.call import Call

with needed_by("kvkeep.mellea", "mellea"):
    from mellea.backends.huggingface import _EventStoppingCriteria

_PROMPT = {"inputs", "input_ids", "attention_mask"}
_SERVED = {"logits_processor", "stopping_criteria", "streamer", "tokenizer"}
"""Arguments of `generate`, besides a generation config, that a batch supports."""
_CONFIGURED = {
    "bos_token_id",
    "do_sample",
    "eos_token_id",
    "max_length",
    "max_new_tokens",
    "min_p",
    "pad_token_id",
    "repetition_penalty",
    "return_dict_in_generate",
    "stop_strings",
    "temperature",
    "top_k",
    "top_p",
    "transformers_version",
}
"""Fields of a generation config that a batch supports."""


@final
class FairLock:
    """A reentrant lock that threads get in the order of their requests, so that a thread that takes
    it repeatedly does not starve the rest."""

    def __init__(self) -> None:
        self._guard = Lock()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[int, Lock]] = deque()

    def __enter__(self) -> bool:
        me, turn = get_ident(), Lock()
        with self._guard:
            if self._owner in (None, me):
                self._owner = me
                self._depth += 1
                return True
            turn.acquire()
            self._waiting.append((me, turn))
        try:
            turn.acquire()  # until `__exit__` has made this thread the owner
        except BaseException:
            with self._guard:
                waits = (me, turn) in self._waiting
                if waits:
                    self._waiting.remove((me, turn))
            if not waits:
                self.__exit__()
            raise
        return True

    def __exit__(self, *raised: object) -> None:
        with self._guard:
            self._depth -= 1
            if self._depth:
                return
            self._owner = None
            if self._waiting:
                self._owner, turn = self._waiting.popleft()
                self._depth = 1
                turn.release()


@final
class Together:
    """Answers calls of `generate` from several threads with one batch. One of the waiting threads
    runs the batch's steps for all.

    Args:
        model: an attached model.
        tokenizer: the model's tokenizer.
        sequences: most answers generated at once; further ones wait.
        lock: held during each step.
        before: called before each step, with the lock held.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        sequences: int,
        lock: FairLock,
        before: Callable[[], None],
    ) -> None:
        self._model, self._lock, self._before = model, lock, before
        self._batch = Batch(model, tokenizer, spec="keep_all", sequences=sequences)
        self._listeners: dict[Answer, _Listener] = {}
        self._turn, self._led, self._closed = Condition(), False, False

    def generate(
        self, calls: Sequence[Call], options: Mapping[str, Any]
    ) -> GenerateDecoderOnlyOutput | None:
        """Generate for the prompts of `calls`; the result is that of the model's
        `generate(**options)`. None if a batch does not support the options, or this is closed.

        Raises:
            ShapeError, CapacityError: see `Batch.add`.
            Exception: the error that ended an answer, such as a logits processor's.
        """
        found = _settings(self._model, options)
        cache = host_of(self._model).new_cache(calls[0].caching.spec)
        if found is None or compresses(cache):
            return None
        settings, padding = found
        ids = _ids(options)
        answers: list[Answer] = []
        try:
            with self._lock, self._turn:  # no step runs before all prompts are added
                if self._closed:
                    return None
                for index, (prompt, call) in enumerate(zip(_prompts(options), calls, strict=True)):
                    answers += self._add(prompt, call, _of_row(settings, index, call.seed))
                    self._listeners[answers[-1]] = _Listener(options, ids[index])
            self._wait(answers)
        finally:
            for answer in answers:
                answer.cancel()  # no effect if it has ended
            with self._turn:
                for answer in answers:
                    self._listeners.pop(answer, None)
                self._turn.notify_all()
        for answer in answers:
            if answer.error is not None:
                raise answer.error
        if options.get("streamer") is not None:
            options["streamer"].end()
        return _as_generated(ids, answers, padding)

    def close(self) -> None:
        """Wait until all calls are answered, and take no further calls."""
        with self._turn:
            while self._listeners:
                self._turn.wait()
            self._closed = True

    def _add(self, prompt: Tensor, call: Call, settings: Settings) -> list[Answer]:
        caching = call.caching
        return self._batch.add(
            prompt,
            settings,
            spec=caching.spec,
            namespace=caching.namespace if caching.reuse else None,
            reuse=_CallReuse(self._model, call),
        )

    def _wait(self, answers: Sequence[Answer]) -> None:
        """Wait until the answers have ended; run the batch's steps if no other thread does."""
        while True:
            with self._turn:
                while self._led and not _ended(answers):
                    self._turn.wait()
                if _ended(answers):
                    return
                self._led = True
            try:
                self._lead(answers)
            finally:
                with self._turn:
                    self._led = False
                    self._turn.notify_all()

    def _lead(self, answers: Sequence[Answer]) -> None:
        while not _ended(answers):
            self._step()
            with self._turn:
                self._turn.notify_all()
        if any(answer.reason == "cancelled" for answer in answers):
            self._step()  # frees the memory of cancelled answers

    def _step(self) -> None:
        with self._lock:
            self._before()
            found = self._batch.step()
        for answer, token, _ in found:
            listener = self._listeners.get(answer)
            try:
                if listener is not None and listener.hear(token):
                    answer.cancel()
            except Exception as error:  # such as a streamer's
                answer.fail(error)


def _ids(options: Mapping[str, Any]) -> Tensor:
    ids: Tensor = options["inputs"] if "inputs" in options else options["input_ids"]
    return ids


def _prompts(options: Mapping[str, Any]) -> list[Tensor]:
    """The token ids of each prompt, (n,), without padding."""
    ids, mask = _ids(options).cpu(), options.get("attention_mask")
    if mask is None:
        return list(ids)
    return [row[real] for row, real in zip(ids, mask.bool().cpu(), strict=True)]


def _as_generated(
    ids: Tensor, answers: Sequence[Answer], padding: int
) -> GenerateDecoderOnlyOutput:
    """Prompts (B, n) and their answers, padded to the longest, in the format of `generate`."""
    longest = max(len(answer.tokens) for answer in answers)
    said = torch.full((len(answers), longest), padding, dtype=ids.dtype, device=ids.device)
    for answer, row in zip(answers, said, strict=True):
        row[: len(answer.tokens)] = torch.tensor(answer.tokens)
    sequences = cast(torch.LongTensor, torch.cat([ids, said], dim=1))
    return GenerateDecoderOnlyOutput(sequences=sequences)


def _ended(answers: Sequence[Answer]) -> bool:
    return all(answer.ended for answer in answers)


@final
class _Listener:
    """Passes each token to a call's streamer, and checks the call's stopping criteria."""

    def __init__(self, options: Mapping[str, Any], prompt: Tensor) -> None:
        self._streamer = options.get("streamer")
        self._criteria = options.get("stopping_criteria") or []
        self._ids = prompt[None]
        if self._streamer is not None:
            self._streamer.put(self._ids.cpu())

    def hear(self, token: int) -> bool:
        """Pass on a token; return whether to stop."""
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token]))
        return any(stop(self._ids, None) for stop in self._criteria)


@final
class _CallReuse(Reuse):
    """The batch's access to a call's store."""

    def __init__(self, model: PreTrainedModel, call: Call) -> None:
        super().__init__(model, call.caching.store)
        self._call = call

    def _joins(self, answer: Answer) -> bool:
        return self._call.caching.reuse and self._call.blocks_of(answer.prompt) is not None

    def ready(self, answer: Answer, *, ask: bool) -> bool:
        return self._joins(answer) or super().ready(answer, ask=ask)

    def begin(self, answer: Answer) -> ModelCache:
        call = self._call
        if self._joins(answer):
            cache = call.join(self._model)
            answer.cached = 0 if call.report is None else call.report.cached
            return cache
        cache = super().begin(answer)
        if answer.origin.namespace is not None:  # the store was asked
            call.read(cache, len(answer.prompt) - 1, answer.cached)
        return cache


def _settings(model: PreTrainedModel, options: Mapping[str, Any]) -> tuple[Settings, int] | None:
    """The settings of an answer and the id of padding tokens, from the arguments of `generate`;
    None if an argument is not supported."""
    chosen = {k: v for k, v in options.items() if k not in _PROMPT | _SERVED}
    config, others = cast(Any, model)._prepare_generation_config(None, **chosen)
    plain = GenerationConfig()
    plain.update(**plain._get_default_generation_params(), defaults_only=True)
    usual = plain.to_dict()
    special = {
        name
        for name, value in config.to_dict().items()
        if value != usual.get(name) and (value or usual.get(name)) and name[0] != "_"
    }
    processors, criteria = (
        list(options.get(name) or []) for name in ("logits_processor", "stopping_criteria")
    )
    if (
        others
        or special - _CONFIGURED
        or config.max_new_tokens is None
        or not all(isinstance(one, _EventStoppingCriteria) for one in criteria)
    ):
        return None
    penalised = config.repetition_penalty not in (None, 1.0)
    sampling = Sampling(
        config.temperature if config.do_sample else 0.0,
        config.top_k or 0,
        config.top_p,
        config.min_p or 0.0,
        processors=[
            *([repetition(config.repetition_penalty)] if penalised else []),
            *map(_Float32, processors),
        ],
    )
    ends = config.eos_token_id
    ends = {*ends} if isinstance(ends, list) else {ends} - {None}
    stop = config.stop_strings or ()
    settings = Settings(
        config.max_new_tokens,
        sampling,
        (stop,) if isinstance(stop, str) else tuple(stop),
        end_tokens=frozenset(ends),
    )
    return settings, config.pad_token_id if config.pad_token_id is not None else min(
        ends, default=0
    )


def _of_row(settings: Settings, index: int, seed: int | None) -> Settings:
    """The settings of one of several prompts: logits processors may have state, so each prompt has
    its own copies."""
    sampling = settings.sampling
    own = replace(
        sampling,
        processors=[copy(one) for one in sampling.processors],
        seed=None if seed is None else seed + index,
    )
    return replace(settings, sampling=own)


@dataclass
class _Float32:
    """A logits processor that is given float32 logits, as in `generate`."""

    process: Processor

    def __copy__(self) -> _Float32:
        return _Float32(copy(self.process))

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        return self.process(ids, logits.float())
