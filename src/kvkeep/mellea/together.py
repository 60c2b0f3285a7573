"""Together: one batch that serves the calls of several threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from threading import Condition, get_ident
from typing import Any, cast, final

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.utils import GenerateDecoderOnlyOutput

from kvkeep.errors import UnsupportedError
from kvkeep.extras import needed_by
from kvkeep.generate import Answer, Batch, Reuse, SamplingParams
from kvkeep.generate.reuse import Reusing
from kvkeep.hf.sampling_params import sampling_params
from kvkeep.host import ModelCache, host_of
from kvkeep.host.compress import compresses
from kvkeep.mellea.call import Call

with needed_by("kvkeep.mellea", "mellea"):
    from mellea.backends.huggingface import _EventStoppingCriteria

_SERVED = {
    "inputs",
    "input_ids",
    "attention_mask",
    "return_dict_in_generate",
    "stopping_criteria",
    "streamer",
    "tokenizer",
}
"""Arguments of `generate` that do not affect sampling and are handled here."""


@final
class FairLock:
    """A reentrant lock that threads acquire in the order of their requests, so that a thread that
    acquires it repeatedly does not starve others."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[int] = deque()

    def __enter__(self) -> bool:
        me = get_ident()
        with self._changed:
            if self._owner != me:
                self._waiting.append(me)
                try:
                    self._changed.wait_for(lambda: self._owner is None and self._waiting[0] == me)
                    self._owner = me
                finally:
                    self._waiting.remove(me)
                    self._changed.notify_all()
            self._depth += 1
        return True

    def __exit__(self, *raised: object) -> None:
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                self._changed.notify_all()


@final
class Together:
    """Serves calls of `generate` from several threads with one batch. One of the waiting threads
    runs the batch's steps for all threads.

    Args:
        model: an attached model.
        tokenizer: the model's tokenizer.
        sequences: most answers generated at once; further answers wait.
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
        cache = host_of(self._model).new_cache(calls[0].caching.spec)
        criteria = options.get("stopping_criteria") or ()
        if compresses(cache) or not all(isinstance(x, _EventStoppingCriteria) for x in criteria):
            return None
        if "inputs" not in options and "input_ids" not in options:
            return None
        prompts = _prompts(options)
        chosen = {name: x for name, x in options.items() if name not in _SERVED}
        # Unlike on the command line, a temperature alone does not enable sampling.
        chosen.setdefault("do_sample", bool(self._model.generation_config.do_sample))
        processors = chosen.pop("logits_processor", None) or []
        try:
            each = [
                sampling_params(
                    self._model,
                    len(prompt),
                    seed=None if call.seed is None else call.seed + index,
                    # Processors may keep state from earlier calls.
                    logits_processor=[copy(one) for one in processors],
                    **chosen,
                )
                for index, (prompt, call) in enumerate(zip(prompts, calls, strict=True))
            ]
        except UnsupportedError:
            return None
        ids = _ids(options)
        answers: list[Answer] = []
        try:
            with self._lock, self._turn:  # no step runs before all prompts are added
                if self._closed:
                    return None
                for row, prompt, call, params in zip(ids, prompts, calls, each, strict=True):
                    answers += self._add(prompt, call, params)
                    self._listeners[answers[-1]] = _Listener(options, row)
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
        padding = options.get("pad_token_id", self._model.generation_config.pad_token_id)
        if padding is None:
            padding = min(each[0].end_tokens or (), default=0)
        return _as_generated(ids, answers, padding)

    def close(self) -> None:
        """Wait until all calls are answered; refuse further calls."""
        with self._turn:
            while self._listeners:
                self._turn.wait()
            self._closed = True

    def _add(self, prompt: Tensor, call: Call, params: SamplingParams) -> list[Answer]:
        caching = call.caching
        return self._batch.add(
            prompt,
            params,
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
            except Exception as error:  # e.g. from a streamer
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

    def _joins(self, answer: Reusing) -> bool:
        return self._call.caching.reuse and self._call.blocks_of(answer.prompt) is not None

    def ready(self, answer: Reusing, *, ask: bool) -> bool:
        return self._joins(answer) or super().ready(answer, ask=ask)

    def begin(self, answer: Reusing) -> ModelCache:
        call = self._call
        if self._joins(answer):
            cache = call.join(self._model)
            answer.cached = 0 if call.report is None else call.report.cached
            return cache
        cache = super().begin(answer)
        if answer.origin.namespace is not None:  # the store was asked
            call.read(cache, len(answer.prompt) - 1, answer.cached)
        return cache
