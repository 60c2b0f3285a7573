"""Every format that kvkeep reads of others' making: a file of it, changes, and what it holds."""

from __future__ import annotations

import copy
import io
import json
import os
import resource
import signal
import warnings
import zipfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_of
from safetensors.torch import save

import kvkeep
from kvkeep.hf import models, session
from kvkeep.hf.loading.adapter_files import with_adapter
from kvkeep.hf.session import Session, info
from kvkeep.policy import scorer
from kvkeep.policy.scorer import Scorer
from support import finetune_inputs, tiny_gguf, tiny_scorer
from support.mutations import bytes_changed, damaged, json_changed, parted, resealed
from support.tiny_models import tiny

_MOST_BYTES, _MOST_SECONDS = 1 << 30, 60


@dataclass
class Format:
    """A file of one format.

    Args:
        path: where `read` looks for it.
        damage: changes it as a broken disk or network might.
        reseal: changes what it says, under right checksums.
        read: its content, as something to compare; raises only kvkeep's errors.
        sealed: whether its checksums tell damage, so that what can be read is what was written.
        resealed: the share of changes that are under right checksums, which take long to refuse.
    """

    path: Path
    damage: Callable[[bytes, Random], bytes]
    reseal: Callable[[bytes, Random], bytes]
    read: Callable[[], Any]
    sealed: bool = True
    resealed: float = 0.4


@contextmanager
def bounded():
    """Nothing in it may take long, or more memory than any of the files needs."""

    def late(*_):
        raise AssertionError(f"it did not end within {_MOST_SECONDS} s")

    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    held = pages * os.sysconf("SC_PAGE_SIZE")
    handler = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (held + 4 * _MOST_BYTES, before[1]))
    signal.alarm(_MOST_SECONDS)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) < peak + _MOST_BYTES


def session_file(place, patch):
    """A conversation of two turns, opened as `kvkeep chat --session` opens it."""
    patch.setattr(session, "home", lambda: place)
    model, tokenizer = finetune_inputs.model(), finetune_inputs.tokenizer()
    talk = Session(model, tokenizer, cache="h2o:12,recent=3+int8", name="a")
    for text in ("Who?", "Where?"):
        talk.ask(text, max_new_tokens=3)
    talk.save()
    talk.close()

    def read():
        said = info("a")
        opened = Session(model, tokenizer, name="a")
        opened.close()
        states = [layer.state() for layer in opened.cache.layers]
        held = [x for state in states for part in state.parts.values() for x in part.values()]
        return [said.messages, said.spec, opened.messages, opened._ids, opened._marks, held]

    return Format(
        session.path_of("a"), damaged, lambda data, draw: resealed(data, "kvkeep", draw), read
    )


def scorer_file(place, patch):
    model = finetune_inputs.model()
    path = tiny_scorer.write(place / "a.scorer", model)

    def reseal(data, draw):
        header, body = parted(data)
        tensors = {name: field for name, field in header.items() if name != "__metadata__"}
        texts = header["__metadata__"]
        if draw.random() < 0.5:
            tensors = json_changed(tensors, draw)
        else:
            texts = json_changed(texts, draw)
        data = json.dumps({**tensors, "__metadata__": texts}).encode()
        data = len(data).to_bytes(8, "little") + data + body
        try:
            held = tensors_of(data)
            texts["checksum"] = scorer.checksum(held, texts)
            return save(held, texts)
        except (SafetensorError, KeyError, TypeError, ValueError):
            return data

    def read():
        scorer._read.cache_clear()
        found = Scorer.read(str(path))
        layers = found.layers.items()
        held = [x for _, layer in layers for x in layer.networks.state_dict().values()]
        return [found.model, found.count, [layer.shares for _, layer in layers], held]

    return Format(path, damaged, reseal, read)


def gguf_file(place, patch):
    """It has no checksums: what its bytes say is what is loaded."""
    path = tiny_gguf.write(place / "a.gguf")
    header = path.read_bytes().index(b"blk.1.ffn_norm.weight") + 64

    def damage(data, draw):
        if draw.random() < 0.3:
            return bytes_changed(data, draw)
        return bytes_changed(data[:header], draw) + data[header:]

    def reseal(data, draw):
        """One number of the header, of 4 bytes or of 8, becomes another."""
        at, size = draw.randrange(header), draw.choice([4, 8])
        number = draw.choice([0, 1, 2, 3, 5, 64, 2**16, 2**24, 2**31, 2**32 - 1, 2**40, 2**63])
        return data[:at] + number.to_bytes(8, "little")[:size] + data[at + size :]

    def read():
        model, _ = models.load(str(path), "float32", "cpu")
        return list(model.state_dict().values())

    return Format(path, damage, reseal, read, sealed=False)


def program_file(place, patch):
    path = place / "a.pt2"
    kvkeep.export(tiny("llama", num_hidden_layers=1), "h2o:8,recent=2+int8@fixed:16").save(path)
    ids = torch.arange(3, 8)[None]

    def reseal(data, draw):
        found = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(found, "w") as new:
            names = old.namelist()
            chosen = draw.choice([n for n in names if n.endswith(".json")] * 3 + names)
            other = draw.choice(names)
            for name in names:
                part = old.read(name)
                if name == chosen and name.endswith(".json"):
                    part = json.dumps(json_changed(json.loads(part), draw)).encode()
                elif name == chosen:
                    part = old.read(other) if draw.random() < 0.5 else bytes_changed(part, draw)
                new.writestr(name, part)
        return found.getvalue()

    def read():
        program = kvkeep.Program.load(path)
        logits = [program(ids), program(ids[:, :1])]
        return [*logits, *program._traced.state_dict.values()]

    return Format(path, bytes_changed, reseal, read, resealed=0.06)


def adapter_files(place, patch):
    """Its weights have no checksums, and its config is text."""
    from peft import LoraConfig, get_peft_model

    model = tiny("llama")
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(place)
    path = place / "adapter"
    names = ("adapter_config.json", "adapter_model.safetensors")
    config, weights = (place.joinpath(name).read_bytes() for name in names)
    path.write_bytes(len(config).to_bytes(8, "little") + config + weights)  # both in one

    def halves(data):
        size = 8 + int.from_bytes(data[:8], "little")
        return data[8:size], data[size:]

    def both(config, weights):
        return len(config).to_bytes(8, "little") + config + weights

    def damage(data, draw):
        config, weights = halves(data)
        if draw.random() < 0.5:
            return both(bytes_changed(config, draw), weights)
        return both(config, damaged(weights, draw))

    def reseal(data, draw):
        config, weights = halves(data)
        return both(json.dumps(json_changed(json.loads(config), draw)).encode(), weights)

    def read():
        for name, part in zip(names, halves(path.read_bytes()), strict=True):
            place.joinpath(name).write_bytes(part)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's, of keys it does not know
            found = with_adapter(copy.deepcopy(model), str(place))
        assert not any(x.is_meta for x in (*found.parameters(), *found.buffers()))
        return list(found.state_dict().values())

    return Format(path, damage, reseal, read, sealed=False)


FORMATS = {
    "session": (session_file, 3_000),
    "scorer": (scorer_file, 3_500),
    "gguf": (gguf_file, 1_000),
    "program": (program_file, 1_500),
    "adapter": (adapter_files, 1_000),
}
"""What makes a file of each format, and how many changes of it the long run draws: 10,000."""
