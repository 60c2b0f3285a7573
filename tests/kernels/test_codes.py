"""The instructions that make codes into numbers, by a few lines that do what PTX says they do."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

from kvkeep.kernels.codes import FP8, INT4, INT8, PTX  # noqa: E402

WORDS = np.arange(1 << 16, dtype=np.uint32)
PAIRS = WORDS | (WORDS[::-1] << np.uint32(16))  # every word, low and high


def halves(x, kind):
    """A register of two 16-bit numbers, as float64."""
    pair = torch.from_numpy(x.astype(np.uint32).view(np.int16).reshape(-1, 2))
    return pair.view(kind).double()


def register(pair, kind):
    return pair.to(kind).view(torch.int16).numpy().view(np.uint32).reshape(-1)


def look_up(a, b, c, table):
    """lop3: bit by bit, entry 4 a + 2 b + c of the table."""
    out = np.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            terms = [x if index & bit else ~x for x, bit in ((a, 4), (b, 2), (c, 1))]
            out |= terms[0] & terms[1] & terms[2]
    return out


def permute(a, b, selector):
    """prmt: any four of eight bytes."""
    both = [*a.view(np.uint8).reshape(-1, 4).T, *b.view(np.uint8).reshape(-1, 4).T]
    chosen = [both[selector >> 4 * i & 7] for i in range(4)]
    return np.stack(chosen, axis=1).copy().view(np.uint32).reshape(-1)


def executed(ptx, word):
    registers = {"$1": word}

    def value(name):
        if name in registers:
            return registers[name]
        number = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return np.full_like(word, number)

    for line in re.findall(r"^\s*(\w[\w.]+) ([^;]+);", ptx, re.M):
        operation, (into, *names) = line[0], [x.strip() for x in line[1].split(",")]
        if operation.startswith("reg"):
            continue
        constants = [int(names.pop(), 0)] if operation in ("lop3.b32", "prmt.b32") else []
        x = [value(name) for name in names]
        with np.errstate(all="ignore"):
            match operation:
                case "mov.b32":
                    (out,) = x
                case "xor.b32":
                    out = x[0] ^ x[1]
                case "and.b32":
                    out = x[0] & x[1]
                case "shl.b32":
                    out = x[0] << x[1]
                case "shr.b32":
                    out = x[0] >> x[1]
                case "lop3.b32":
                    out = look_up(*x, *constants)
                case "prmt.b32":
                    out = permute(*x, *constants)
                case "sub.f32":
                    out = (x[0].view(np.float32) - x[1].view(np.float32)).view(np.uint32)
                case "cvt.rn.bf16x2.f32":  # the first operand becomes the high half
                    pair = np.stack([x[1].view(np.float32), x[0].view(np.float32)], axis=1)
                    out = register(torch.from_numpy(pair.copy()), torch.bfloat16)
                case "sub.f16x2":
                    a, b = (halves(y, torch.float16) for y in x)
                    out = register(a - b, torch.float16)
                case "mul.f16x2":
                    a, b = (halves(y, torch.float16) for y in x)
                    out = register(a * b, torch.float16)
                case "fma.rn.bf16x2":
                    a, b, c = (halves(y, torch.bfloat16) for y in x)
                    out = register(a * b + c, torch.bfloat16)
                case _:
                    raise AssertionError(operation)
        registers[into] = out
    return registers["$0"]


def meant(code, part, word):
    """What a word's part stands for."""
    if code == INT4:
        return 16.0 + (word >> 4 * part & 15)
    byte = (word >> 8 * part & 255).to(torch.uint8)
    return byte.view(torch.int8 if code == INT8 else torch.float8_e4m3fn).double()


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("code", [INT8, INT4, FP8])
def test_every_word(code, kind):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    for part, ptx in enumerate(PTX[code, kind]):
        found = halves(executed(ptx, PAIRS), dtype)
        low = torch.from_numpy((PAIRS & 0xFFFF).astype(np.int64))
        high = torch.from_numpy((PAIRS >> 16).astype(np.int64))
        for half, word in ((found[:, 0], low), (found[:, 1], high)):
            expected = meant(code, part, word)
            real = ~expected.isnan()
            assert half[real].equal(expected[real].double())
    assert part == (3 if code == INT4 else 1)
