"""Backends of every kind for tests of stores, and the bytes that lie in them."""

from __future__ import annotations

import random
import uuid

import fsspec
import torch

from kvkeep import store
from kvkeep.store import Disk, Location, Memory, ModelGeometry, PrefixStore, Redis
from support.redis_server import Server
from support.token_caches import fed, holds, new_cache

BACKENDS = {
    "memory": lambda path: store.Memory(),
}
"""Backends of one process, by name: each is given an empty directory."""

WITH_BUDGETS = ["disk", "location-file", "location-memory"]
"""Kinds that limit their bytes by themselves."""

KINDS = [*WITH_BUDGETS, "redis"]
"""Kinds that other processes, or other objects of this one, can open again."""

_QUARANTINE = "kvkeep:quarantine:"


class Place:
    """A place for blocks. `open` gives another backend for it each time."""

    def __init__(self, kind, path):
        self.kind, self.path = kind, path
        self.server = Server(path) if kind == "redis" else None
        name = uuid.uuid4().hex
        self.url = {
            "disk": f"{path}/store",
            "redis": self.server and self.server.url,
            "location-file": f"file://{path}/store",
            "location-memory": f"memory://{name}",
        }[kind]

    def open(self, budget=None, **options):
        kind = {"disk": Disk, "redis": Redis}.get(self.kind, Location)
        return kind(self.url, budget, **options)

    def blocks(self):
        """The names of what is kept, as the backend's users never see them."""
        if self.kind == "redis":
            return sorted(name.decode() for name in self.server.client().keys("kvkeep:block:*"))
        return self._files("blocks")

    def set_aside(self):
        """How many blocks are in quarantine."""
        if self.kind == "redis":
            return len(self.server.client().keys(_QUARANTINE + "*"))
        return len(self._files("quarantine"))

    def read(self, name):
        if self.kind == "redis":
            return self.server.client().get(name)
        return self._filesystem()[0].cat_file(name)

    def write(self, name, data):
        if self.kind == "redis":
            self.server.client().set(name, data)
        else:
            self._filesystem()[0].pipe_file(name, data)

    def remove(self, name):
        if self.kind == "redis":
            self.server.client().delete(name)
        else:
            self._filesystem()[0].rm_file(name)

    def clear(self):
        if self.kind == "redis":
            self.server.client().flushall()
        else:
            filesystem, root = self._filesystem()
            if filesystem.exists(root):
                filesystem.rm(root, recursive=True)

    def close(self):
        if self.server is not None:
            self.server.kill()

    def _filesystem(self):
        url = self.url if "://" in self.url else f"file://{self.url}"
        return fsspec.core.url_to_fs(url)

    def _files(self, part):
        filesystem, root = self._filesystem()
        return [name for name in filesystem.find(f"{root}/{part}") if ".safetensors" in name]


def put(backend, tokens, identity="m", block=8):
    """Store a text as another process would."""
    kept = PrefixStore(backend=backend, block=block)
    return kept.insert(identity, torch.tensor(tokens), fed(tokens))


def found(backend, tokens, identity="m", block=8):
    """How many tokens of a text are found, after seeing that their slots are right."""
    return found_in(PrefixStore(backend=backend, block=block), tokens, identity)


def found_in(store, tokens, identity="m"):
    """The same, of a store."""
    cache = new_cache()
    with store.match(identity, torch.tensor(tokens), geometry) as hit:
        hit.fill(cache)
        assert holds(cache, tokens[: hit.length])
    store.check()
    return hit.length


def geometry():
    """What the slots of these texts are like."""
    return ModelGeometry.of_cache(fed([1]))


def blocks_of(*texts, identity="m", block=8):
    """The blocks of texts."""
    memory = Memory()
    for tokens in texts:
        put(memory, tokens, identity, block)
    return [memory.get(key) for key in memory.scan()]


def damaged(data, draw):
    """Bytes that are not what they were."""
    place = draw.randrange(len(data))
    if draw.random() < 0.2:
        return data[:place]
    flipped = bytearray(data)
    flipped[place] ^= 1 << draw.randrange(8)
    return bytes(flipped)


def text(draw, letters=50):
    """One of twelve texts."""
    texts = random.Random(draw.randrange(12))
    return [texts.randrange(letters) for _ in range(texts.randrange(4, 40))]
