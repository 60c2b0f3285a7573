"""A model whose heads two processes share; in a module that they can import."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import kvkeep
from kvkeep.blocks import prefill
from kvkeep.errors import KVKeepError
from kvkeep.generate import Batch, SamplingParams
from kvkeep.host import host_of
from kvkeep.host.fingerprint import sampled
from kvkeep.policy.scorer import LEVELS, HeadNetworks, LayerScorer, Scorer
from kvkeep.store import Disk
from kvkeep.train import backward
from support.autograd_gradients import texts
from support.decisions import follow, recorded
from support.process_group import join, start

PROCESSES = 2
CHUNK, TOKENS, NEW = 8, 40, 8


def prompt():
    return texts(1, TOKENS, seed=1)[0]


# -- jobs: what each process does with its part of a model, and one process with the whole --------


def fed(model: PreTrainedModel, spec: str, **options: Any) -> dict[str, Any]:
    """A prompt fed in chunks; what `generate` says after it, fed at once; what both evict."""
    ids = prompt()
    with kvkeep.attach(model, spec, **options), torch.inference_mode():
        cache, other = kvkeep.Cache(model, spec), kvkeep.Cache(model, spec)
        evicted = [recorded(cache), recorded(other)]
        promised = cache.bytes_for(TOKENS)
        chunks = [model(part, past_key_values=cache).logits for part in ids.split(CHUNK, dim=1)]
        generated = model.generate(
            ids,
            past_key_values=other,
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return {
            "logits": torch.cat([*chunks, torch.stack(generated.logits, dim=1)], dim=1),
            "said": generated.sequences,
            "evicted": evicted,
            "bytes": cache.live_bytes,
            "promised": promised,
            "kept": [kept(layer) for layer in cache.layers],
        }


def fed_alike(
    model: PreTrainedModel, spec: str, found: dict[str, Any], rounding: float
) -> dict[str, Any]:
    """The same of one process with the whole model, which says and evicts what was `found`, and
    checks that by its own worths it may."""
    ids, said = prompt(), found["said"]
    with kvkeep.attach(model, spec), torch.inference_mode():
        cache, other = kvkeep.Cache(model, spec), kvkeep.Cache(model, spec)
        for one, evicted in zip((cache, other), found["evicted"], strict=True):
            follow(one, evicted, rounding)
        chunks = [model(part, past_key_values=cache).logits for part in ids.split(CHUNK, dim=1)]
        steps = [said[:, :TOKENS], *said[:, TOKENS:-1].split(1, dim=1)]
        steps = [model(part, past_key_values=other).logits[:, -1:] for part in steps]
        return {
            "logits": torch.cat([*chunks, *steps], dim=1),
            "bytes": cache.live_bytes,
            "kept": [kept(layer) for layer in cache.layers],
        }


def kept(layer: kvkeep.LayerCache) -> list[list[int]]:
    """The positions that each head keeps, in ascending order."""
    return [[x for x in head if x >= 0] for head in layer.held().position[0].tolist()]


def trained(model: PreTrainedModel) -> dict[str, Any]:
    """A loss and its gradients, through a cache that evicts."""
    ids = prompt()
    value = backward(model, ids, ids, cache="h2o:8", chunk=7)
    found = {
        name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for name, p in model.named_parameters()
    }
    model.zero_grad()
    return {"loss": value, "gradients": found}


def stored(model: PreTrainedModel) -> dict[str, Any]:
    """One prompt twice, with a store; and what is refused."""
    store = kvkeep.PrefixStore()
    with kvkeep.attach(model, store=store), torch.inference_mode():
        said = [model.generate(prompt(), max_new_tokens=NEW, do_sample=False) for _ in range(2)]
        outside = kvkeep.PrefixStore(backend=Disk(os.environ["PLACE"]))
        return {
            "said": torch.cat(said),
            "hits": store.stats().hit_tokens,
            "outside": refusal(lambda: outside.read(model, prompt()[0])),
            "compressed": refusal(lambda: store.read(model, prompt()[0], spec="kvzip:50%")),
        }


def batched(model: PreTrainedModel) -> list[list[int]]:
    """Three answers in packed forwards."""
    with kvkeep.attach(model):
        batch = Batch(model, spec="keep_all", max_bytes=1 << 20, chunk=16)
        params = SamplingParams(max_new_tokens=NEW)
        answers = [batch.add(prompt()[0, :n], params)[0] for n in (20, 31, TOKENS)]
        assert not host_of(model).unpackable
        while batch.step():
            pass
        return [answer.ids.tolist() for answer in answers]


def joined(model: PreTrainedModel) -> dict[str, Any]:
    """Logits after texts computed separately, some of whose tokens were then computed again."""
    parts = prompt()[0, :-1].split(CHUNK)
    with kvkeep.attach(model), torch.inference_mode():
        cache = prefill(model, parts, recompute="boundary:3")
        return {
            "logits": model(prompt()[:, -1:], past_key_values=cache).logits,
            "share": refusal(lambda: prefill(model, parts, recompute=0.5)),
        }


def compressed(model: PreTrainedModel, spec: str) -> dict[str, Any]:
    """What is kept of a prompt that is read twice."""
    with kvkeep.attach(model, spec), torch.inference_mode():
        cache = kvkeep.Cache(model, spec)
        model(prompt(), past_key_values=cache)
        cache.compress(model, prompt())
        return {"kept": [kept(layer) for layer in cache.layers]}


def refused(model: PreTrainedModel) -> list[str]:
    """What is said of a calibrated policy, of an export, and of a text that they share."""
    shares = tuple(i / (LEVELS - 1) for i in range(LEVELS))
    scorers = {i: LayerScorer(HeadNetworks(1, 16, 2), shares, "") for i in range(2)}
    tensors, metadata = Scorer(scorers, sampled(model), 2).content()
    place = f"{os.environ['PLACE']}/{dist.get_rank()}.scorer"
    save_file(tensors, place, metadata)
    return [
        refusal(lambda: kvkeep.Cache(model, f"kvzap:50%,scorer={place}")),
        refusal(lambda: kvkeep.export(model, "keep_all@fixed:64")),
        refusal(lambda: backward(model, prompt(), prompt(), group=dist.group.WORLD)),
    ]


def saved(model: PreTrainedModel) -> dict[str, Any]:
    """Whether a process loads what it saved, and what it says of another's."""
    place, rank = os.environ["PLACE"], dist.get_rank()
    with kvkeep.attach(model), torch.inference_mode():
        cache = kvkeep.Cache(model)
        model(prompt()[:, :-1], past_key_values=cache)
        cache.save(f"{place}/{rank}.kv")
        dist.barrier()
        own = kvkeep.load(f"{place}/{rank}.kv", model)
        other = refusal(lambda: kvkeep.load(f"{place}/{1 - rank}.kv", model))
        logits = [model(prompt()[:, -1:], past_key_values=x).logits for x in (cache, own)]
        return {"same": logits[0].equal(logits[1]), "other": other}


def refusal(do: Callable[[], object]) -> str:
    """What kvkeep says; empty if it does it."""
    try:
        do()
    except KVKeepError as error:
        return str(error)
    return ""


_JOBS = {
    job.__name__: job for job in (fed, trained, stored, batched, joined, compressed, refused, saved)
}


# -- two processes --------------------------------------------------------------------------------


def loaded_in_parts(place: str) -> PreTrainedModel:
    parts = DistributedConfig(tp_size=PROCESSES)
    return AutoModelForCausalLM.from_pretrained(place, distributed_config=parts)


def split(place: str) -> PreTrainedModel:
    """A whole model of which each process then keeps a part."""
    model = AutoModelForCausalLM.from_pretrained(place)
    mesh = dist.init_device_mesh("cpu", (PROCESSES,))
    inputs = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel())
    for layer in model.model.layers:
        parallelize_module(layer.self_attn, mesh, {**inputs, "o_proj": RowwiseParallel()})
    return model


def work(rank: int, place: str, by: str, jobs: list[tuple[str, dict[str, Any]]]) -> None:
    join(rank, PROCESSES, place)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES)}
    os.environ["PLACE"] = place
    model = {"transformers": loaded_in_parts, "torch": split}[by](f"{place}/model")
    found = [_JOBS[name](model.eval(), **options) for name, options in jobs]
    torch.save(found, f"{place}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # see distributed_gradient.py


def run(
    model: PreTrainedModel,
    place: str,
    *jobs: tuple[str, dict[str, Any]],
    by: str = "transformers",
) -> list[list[Any]]:
    """What each process found in each job, by process. `by`: whose means split the model."""
    model.save_pretrained(f"{place}/model")
    start(work, PROCESSES, place, by, list(jobs))
    return [torch.load(f"{place}/{rank}.pt", weights_only=True) for rank in range(PROCESSES)]
