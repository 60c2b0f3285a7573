"""Changes of files, drawn at random: of their bytes, and of their headers under a right seal."""

from __future__ import annotations

import copy
import json
from contextlib import suppress

from kvkeep.files.headers import sealed

ABSURD = [
    *(None, True, False, -1, 0, 1, 2, 3, 7, 8, 16, 10**7, 2**31, 2**53, 2**63, 2**70, 1.5, 1e308),
    *(float("nan"), float("inf"), "", "x", "torch.int8", "torch.float64", "keep_all", "\ud800"),
    *("window:99999999999", "adakv(" * 80, "h2o:8@fixed:2000000000", "[" * 3000, [], [[]], {}),
    *({"a": 1}, [1, 2], [2**62, 2**62], [0, 0], [None] * 4, "F32", "I64", "BF16", "a\0b"),
]


def bytes_changed(data, draw):
    """Some bits, a part that is missing, doubled, moved or another, or another end."""
    data = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 3, 20])):
        place, length = draw.randrange(len(data) + 1), draw.choice([1, 2, 8, 64, 500])
        kind = draw.randrange(6)
        if kind == 0 and place < len(data):
            data[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[place : place + length]
        elif kind == 2:
            data[place:place] = data[: draw.randrange(length + 1)]
        elif kind == 3:
            data[place : place + length] = draw.randbytes(length)
        elif kind == 4:
            del data[place:]
        else:
            data[:8] = draw.choice([0, 1, 2**20, 2**62, 2**64 - 1, len(data)]).to_bytes(8, "little")
    return bytes(data)


def json_changed(part, draw):
    """One or a few parts of nested lists and objects, replaced, removed, doubled or swapped."""
    part = copy.deepcopy(part)
    for _ in range(draw.choice([1, 1, 2, 5])):
        place = part
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw.choice(keys)
            inner = place[key]
            if isinstance(inner, (dict, list)) and inner and draw.random() < 0.75:
                place = inner
                continue
            kind = draw.randrange(5)
            if kind == 0:
                del place[key]
            elif kind == 1:
                other = draw.choice(keys)
                place[key], place[other] = place[other], place[key]
            elif kind == 2 and isinstance(place, list):
                place.append(inner)
            elif kind == 2:
                place[str(draw.choice(ABSURD))] = inner
            elif type(inner) is int and draw.random() < 0.5:
                place[key] = inner + draw.choice([-8, -1, 1, 8, 2**32])
            else:
                place[key] = copy.deepcopy(draw.choice(ABSURD))
            break
    return part


def parted(data):
    """The header of a file of tensors, and what follows it."""
    size = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:size]), data[size:]


def joined(header, body):
    start = json.dumps(header).encode()
    start += b" " * (-len(start) % 8)
    return len(start).to_bytes(8, "little") + start + body


def damaged(data, draw):
    """A file of tensors whose bytes, or whose list of tensors and texts, are others."""
    if draw.random() < 0.6:
        return bytes_changed(data, draw)
    header, body = parted(data)
    return joined(json_changed(header, draw), body)


def resealed(data, name, draw):
    """A file of tensors whose header `name` is another, under a right checksum."""
    header, body = parted(data)
    inner = json_changed(json.loads(header["__metadata__"][name]), draw)
    with suppress(UnicodeEncodeError):
        header["__metadata__"] = sealed(name, inner)
    return joined(header, body)


def changed(data, name, draw):
    """A file of tensors that is damaged or has another header."""
    return damaged(data, draw) if draw.random() < 0.6 else resealed(data, name, draw)
