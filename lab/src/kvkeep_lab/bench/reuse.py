"""Reuse of stored documents: time to the first token, and the loss of quality."""

from __future__ import annotations

import random
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from torch import Tensor

from kvkeep.blocks import prefill
from kvkeep.blocks.join import windowed
from kvkeep.hf.attach import attach
from kvkeep.host import Host, ModelCache, host_of
from kvkeep.host.placement import device_named
from kvkeep.host.progress import Progress, Work, silent
from kvkeep.store import Backend, Disk, PrefixStore, Redis
from kvkeep_lab.bench.contenders import read
from kvkeep_lab.bench.options import Reuse
from kvkeep_lab.bench.random_model import model_named
from kvkeep_lab.bench.record import result
from kvkeep_lab.bench.workload import prompts

BLOCKS = "blocks:"
MODES = (
    *("cold", "prefix", "disk", "redis"),
    *("blocks:0", "blocks:boundary:32", "blocks:0.15", "blocks:all"),
)
REPAIRING = ("blocks:boundary:32", "blocks:0.15")
"""Modes that models with sliding windows lack."""

_QUESTION = "\n\nQuestion: What are the texts above about?\nAnswer:"
_ASKED = 16  # tokens of a question to a random model


def run(asked: Reuse, progress: Progress = silent) -> dict[str, Any]:
    """Prefill documents, in a new order each turn, followed by a question.

    The documents are cut from real text, or random tokens for a random model. Quality is measured
    over the greedy answer after a plain prefill. The mode "cold" computes everything; "prefix",
    "disk" and "redis" find the documents stored in this order, in memory or in a backend;
    "blocks:R" joins documents that were computed separately, with `recompute=R`. Without a `redis`
    server, one is started for the run if redis-server is installed, and otherwise the mode is left
    out; so are modes that recompute some tokens, if layers have a sliding window.

    Returns:
        `rows`: for each mode, medians over the turns of `ttft_s` and its `speedup` over cold; and,
        compared with the plain prefill, `kl` in nats, `top1`, the share of equal greedy choices,
        and `perplexity_ratio` of the answer.
    """
    draw = random.Random(0)
    lengths = [draw.randint(asked.shortest, asked.longest) for _ in range(asked.documents)]
    loaded, tokenizer = model_named(asked.model, asked.dtype, device_named(None))
    *texts, question = prompts(tokenizer, loaded.config.vocab_size, [*lengths, _ASKED])
    if tokenizer is not None:
        question = tokenizer(_QUESTION, return_tensors="pt", add_special_tokens=False).input_ids[0]
    attach(loaded)
    host = host_of(loaded)
    blocks = PrefixStore()
    prefill(loaded, texts, store=blocks)
    with ExitStack() as during:
        folder = during.enter_context(TemporaryDirectory())
        during.enter_context(torch.inference_mode())
        backends: dict[str, Backend] = {"disk": Disk(folder)}
        url = during.enter_context(_server(folder)) if asked.redis is None else asked.redis
        if url is not None:
            backends["redis"] = Redis(url, name=f"kvkeep-bench-{uuid4().hex}", ttl=3600)
        lacking = set(REPAIRING) if windowed(host.new_cache()) else set[str]()
        lacking |= {"redis"} - set(backends)
        modes = [mode for mode in MODES if mode not in lacking]
        found: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
        work = Work(progress, asked.turns)
        for turn in range(asked.turns):
            draw.shuffle(texts)
            work.stage(f"order {turn + 1} of {asked.turns}")
            whole = torch.cat([*texts, question])
            memory = PrefixStore()
            cache = memory.prefill(loaded, whole)
            for backend in backends.values():
                PrefixStore(backend=backend).learn(loaded, whole[:-1], cache)
            stores = {"prefix": memory, BLOCKS: blocks}
            reader = _Reader(host, texts, question, stores, backends)
            said = reader.answer(asked.answer)
            reference = reader.judged("cold", said)
            for mode in modes:
                judged = reference if mode == "cold" else reader.judged(mode, said)
                quality = _against(reference, judged, said)
                found[mode].append({"ttft_s": reader.seconds(mode)} | quality)
                work.part(1 / len(modes))
    cold = statistics.median(one["ttft_s"] for one in found["cold"])
    rows = []
    for mode, times in found.items():
        of = {name: statistics.median(one[name] for one in times) for name in times[0]}
        seconds = of.pop("ttft_s")
        rows.append({"mode": mode, "ttft_s": seconds, "speedup": cold / seconds, **of})
    tokens = sum(lengths) + len(question)
    return result("reuse", rows, **asked.some("model", "dtype"), tokens=tokens)


class _Reader(NamedTuple):
    """One order of the documents, which can be prefilled in every mode."""

    host: Host
    texts: Sequence[Tensor]
    question: Tensor
    stores: Mapping[str, PrefixStore]
    backends: Mapping[str, Backend]

    def seconds(self, mode: str) -> float:
        """Seconds until the logits after the question."""
        start = time.perf_counter()
        cache = self._documents(mode)
        self.host.forward(self._rest(cache)[None], cache)
        return time.perf_counter() - start

    def answer(self, count: int) -> Tensor:
        """The model's greedy answer after a plain prefill, token ids (count,)."""
        cache = self._documents("cold")
        fed, said = self._rest(cache)[None], list[Tensor]()
        for _ in range(count):
            fed = self.host.forward(fed, cache).argmax(dim=-1)
            said.append(fed[0])
        return torch.cat(said)

    def judged(self, mode: str, answer: Tensor) -> Tensor:
        """Log-probabilities (n, V) at the n tokens of an answer."""
        cache = self._documents(mode)
        fed = torch.cat([self._rest(cache), answer[:-1]])
        logits = self.host.forward(fed[None], cache, last=len(answer))[0]
        return logits.double().log_softmax(dim=-1)

    def _rest(self, cache: ModelCache) -> Tensor:
        """The tokens of the question that the cache does not hold yet, (n,)."""
        return self.question[cache.fed - sum(map(len, self.texts)) :]

    def _documents(self, mode: str) -> ModelCache:
        """A cache of the documents, which may include part of the question."""
        if mode == "cold":
            return read(self.host.model, torch.cat(list(self.texts)))[1]
        if mode.startswith(BLOCKS):
            how = mode.removeprefix(BLOCKS)
            share: float | str = float(how) if how.replace(".", "", 1).isdigit() else how
            store = None if how == "all" else self.stores[BLOCKS]
            return prefill(self.host.model, self.texts, recompute=share, store=store)
        store = self.stores.get(mode) or PrefixStore(backend=self.backends[mode])
        return store.prefill(self.host.model, torch.cat([*self.texts, self.question]))


@contextmanager
def _server(folder: str) -> Iterator[str | None]:
    """The URL of a Redis server that runs within this context; None if none is installed."""
    socket, program = Path(folder) / "redis.sock", which("redis-server") or which("valkey-server")
    if program is None:
        yield None
        return
    options = ("--port", "0", "--unixsocket", socket, "--dir", folder, "--save", "")
    with subprocess.Popen([program, *options], stdout=subprocess.DEVNULL) as process:
        try:
            while not socket.exists() and process.poll() is None:
                time.sleep(0.01)
            yield f"unix://{socket}"
        finally:
            process.terminate()


def _against(reference: Tensor, found: Tensor, answer: Tensor) -> dict[str, float]:
    """Measures of how predictions of an answer differ from reference predictions."""
    at = answer[:, None]
    return {
        "kl": float((reference.exp() * (reference - found)).sum(dim=-1).mean()),
        "top1": float((reference.argmax(dim=-1) == found.argmax(dim=-1)).float().mean()),
        "perplexity_ratio": float((reference.gather(1, at) - found.gather(1, at)).mean().exp()),
    }
