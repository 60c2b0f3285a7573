"""transformers with many sequences at once: a padded batch, and its continuous batching."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from kvkeep.errors import KVKeepError
from kvkeep_lab.bench.decode_loop import live_bytes
from kvkeep_lab.bench.workload import Request, Served

_STEP_TOKENS = 512  # as `kvkeep.Batch` has it
_PAGE = 256


class _Times(BaseStreamer):
    """Notes when `generate` has the next tokens of all rows; it shows the prompt first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def padded(model: Any, requests: Sequence[Request], new: int) -> Served:
    """`model.generate` on one batch, padded on the left. All requests arrive at once."""
    texts = [request.ids for request in requests]
    ids, mask = (
        pad_sequence(rows, batch_first=True, padding_side="left").to(model.device)
        for rows in (texts, [torch.ones_like(text) for text in texts])
    )
    config = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0)
    options = {"generation_config": config, "return_dict_in_generate": True}
    times, start = _Times(), time.perf_counter()
    out = model.generate(ids, attention_mask=mask, streamer=times, **options)
    each = [[at - start for at in times.times[1:]]] * len(requests)
    tokens, held = out.sequences[:, ids.shape[1] :].tolist(), live_bytes(out.past_key_values)
    return Served(requests, each, tokens, bytes=held).require(new)


def continuous(
    model: Any, requests: Sequence[Request], new: int, prefix: Tensor | None = None
) -> Served:
    """The continuous batching behind `model.generate_batch`, whose manager takes requests as they
    arrive. It has room for all requests, and computes at most as many tokens in a step as
    `kvkeep.Batch`.

    Args:
        prefix: first tokens of all prompts; it is read before the first prompt arrives.

    Raises:
        KVKeepError: an answer failed.
    """
    texts = [request.ids for request in requests]
    pages = sum(math.ceil((len(text) + new) / _PAGE) + 1 for text in texts)
    room = ContinuousBatchingConfig(
        page_size=_PAGE,
        num_blocks=2 * pages,  # some are kept free
        max_batch_tokens=_STEP_TOKENS,
        max_requests_per_batch=len(requests),
        allow_block_sharing=prefix is not None,
        auto_switch_to_flash=False,
    )
    context = model.continuous_batching_context_manager(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),  # -1: none
        continuous_batching_config=room,
    )
    with context as manager:
        if prefix is not None:
            _finish(manager, [Request(prefix)], 1)
        return _finish(manager, requests, new).require(new)


def _finish(manager: Any, requests: Sequence[Request], new: int) -> Served:
    coming, names, found = deque(requests), list[str](), dict[str, Any]()
    start, peak = time.perf_counter(), 0
    while len(found) < len(requests):
        while coming and coming[0].at <= time.perf_counter() - start:
            ids = coming.popleft().ids.tolist()
            names.append(manager.add_request(ids, max_new_tokens=new, record_timestamps=True))
        result = manager.get_result(timeout=0.01)
        cache = manager.batch_processor.cache
        used = 1 - cache.compute_free_capacity(relative=True)
        peak = max(peak, round(used * cache.num_sectors * cache.bytes_per_sector))
        if result is not None and result.error:
            raise KVKeepError(f"transformers' continuous batching failed: {result.error}")
        if result is not None and result.is_finished():
            found[result.request_id] = result
        elif not manager.is_running():
            raise KVKeepError("transformers' continuous batching ended without its answers")
    answers = [found[name] for name in names]
    times = [[at - start for at in answer.timestamps] for answer in answers]
    return Served(requests, times, [answer.generated_tokens for answer in answers], bytes=peak)
