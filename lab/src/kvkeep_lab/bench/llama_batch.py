"""llama.cpp with many sequences in one batch, by the low-level functions of llama-cpp-python."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import KVKeepError
from kvkeep_lab.bench.decode_loop import bytes_per_token
from kvkeep_lab.bench.llama_cpp import TYPES, written
from kvkeep_lab.extras import needed_by

with needed_by("Measuring llama.cpp", "llama-cpp"):
    import llama_cpp
    import numpy as np

_CHUNK, _STEP_TOKENS = 256, 512  # as `kvkeep.Batch` has them


@dataclass
class _Sequence:
    index: int
    new: int  # tokens that are still to come
    unfed: deque[int]  # of the prompt, or the last new token
    fed: int = 0


class LlamaSession:
    """One context with room for some sequences. Each step is one `llama_decode` of the next token
    of each sequence that is being generated, and of chunks of the prompts that are being read, with
    the limits of `kvkeep.Batch`. A prompt for which there is no room waits.

    Args:
        model: a Llama that passed `kvkeep_lab.bench.llama_cpp.require`.
        sequences: most sequences at once.
        room: most tokens of a sequence.
        directory: directory for the GGUF file, which is written once.
        prefix: first tokens of all prompts, (n,): it is read at once, and all sequences share it.
        unified: one buffer for the slots of all sequences.
    """

    def __init__(
        self,
        model: Any,
        sequences: int,
        room: int,
        directory: Path,
        *,
        prefix: Tensor | None = None,
        unified: bool = False,
    ) -> None:
        logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)  # warnings come as errors
        llama_cpp.llama_backend_init()
        path = str(written(model, directory)).encode()
        defaults = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(path, defaults)
        slots = sequences + (prefix is not None)
        most = max(_STEP_TOKENS, slots + _CHUNK)
        room = math.ceil(room / _CHUNK) * _CHUNK  # llama.cpp would round it down
        it = llama_cpp.llama_context_default_params()
        it.n_ctx, it.n_seq_max, it.n_batch = slots * room, slots, most
        it.n_threads = it.n_threads_batch = torch.get_num_threads()
        it.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        # Its attention over bfloat16 is slower than over float16, which has as many bytes.
        dtype = torch.float16 if model.dtype is torch.bfloat16 else model.dtype
        it.type_k = it.type_v = int(TYPES[dtype])
        # Sequences can share slots only in one buffer for all. Otherwise each has its own, and its
        # attention does not pass over slots of other sequences: reading is faster, but decoding
        # slower.
        it.kv_unified = unified or prefix is not None
        self._context = llama_cpp.llama_init_from_model(self._model, it)
        if not self._context:
            raise KVKeepError(f"llama.cpp made no context of {slots} sequences of {room} tokens")
        self._batch = llama_cpp.llama_batch_init(most, 0, 1)
        self._vocabulary = model.config.vocab_size
        self._slot_bytes = bytes_per_token(model)
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[int, _Sequence] = {}  # by sequence id
        self._free = list(range(sequences))
        self._prefix, self._source = 0, sequences
        if prefix is not None:
            self._running[sequences] = _Sequence(0, 2, deque(prefix.tolist()))
            while not self.step():
                pass
            del self._running[sequences]  # its slots stay, for `_admit` to copy
            self._prefix = len(prefix)

    def close(self) -> None:
        """Free everything."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def cleared(self) -> LlamaSession:
        """The session without sequences, but with the prefix."""
        self._waiting.clear()
        for slot in list(self._running):
            self._leave(slot)
        return self

    def add(self, index: int, ids: Tensor, new: int) -> None:
        self._waiting.append(_Sequence(index, new, deque(ids.tolist())))

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    def held(self) -> int:
        own = sum(sequence.fed - self._prefix for sequence in self._running.values())
        return (own + self._prefix) * self._slot_bytes

    def step(self) -> Sequence[tuple[int, int]]:
        while self._waiting and self._free:
            self._admit(self._waiting.popleft(), self._free.pop())
        due, found = self._fill(), list[tuple[int, int]]()
        if code := llama_cpp.llama_decode(self._context, self._batch):
            raise KVKeepError(f"llama_decode returned {code} for {self._batch.n_tokens} tokens")
        if not due:
            return found
        rows = np.ctypeslib.as_array(
            llama_cpp.llama_get_logits(self._context), (len(due), self._vocabulary)
        )
        for slot, token in zip(due, rows.argmax(axis=1).tolist(), strict=True):
            sequence = self._running[slot]
            sequence.new -= 1
            sequence.unfed.append(token)
            found.append((sequence.index, token))
            if not sequence.new:
                self._leave(slot)
        return found

    def _admit(self, sequence: _Sequence, slot: int) -> None:
        self._running[slot] = sequence
        if self._prefix:
            memory = llama_cpp.llama_get_memory(self._context)
            llama_cpp.llama_memory_seq_cp(memory, self._source, slot, 0, self._prefix)
            sequence.unfed = deque(list(sequence.unfed)[self._prefix :])
            sequence.fed = self._prefix

    def _leave(self, slot: int) -> None:
        del self._running[slot]
        self._free.append(slot)
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_seq_rm(memory, slot, -1, -1)

    def _fill(self) -> list[int]:
        """Put the step's tokens into the batch; returns the sequences that get a new one, in the
        order of their logits."""
        self._batch.n_tokens, due = 0, []
        by_age = sorted(self._running.items(), key=lambda item: len(item[1].unfed) > 1)
        reading = False
        for slot, sequence in by_age:
            count = min(len(sequence.unfed), _CHUNK)
            if reading and self._batch.n_tokens + count > _STEP_TOKENS:
                break
            reading |= len(sequence.unfed) > 1
            for _ in range(count):
                self._put(sequence.unfed.popleft(), sequence.fed, slot)
                sequence.fed += 1
            if not sequence.unfed:
                self._batch.logits[self._batch.n_tokens - 1] = True
                due.append(slot)
        return due

    def _put(self, token: int, place: int, slot: int) -> None:
        batch, at = self._batch, self._batch.n_tokens
        batch.token[at], batch.pos[at], batch.logits[at] = token, place, False
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, slot
        batch.n_tokens += 1
