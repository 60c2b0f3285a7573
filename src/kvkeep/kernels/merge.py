"""Merges the results of splits and segments, and adds up the mass of each slot."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["parts"])
def merge(PART, PART_LSE, OUT, LSE, parts, queries, DV: tl.constexpr, WIDE: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """Adds up one query's partial results, each weighted by its share of the probability.

    Grid: (queries,). Reads PART (parts, queries, DV) and PART_LSE (parts, queries); writes OUT
    (queries, DV) and LSE (queries,), in base 2.
    """
    query = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDE)
    top = -float("inf")
    total = 0.0
    acc = tl.zeros((WIDE,), tl.float32)
    for first in range(0, parts, BLOCK):
        part = (first + tl.arange(0, BLOCK)).to(tl.int64)
        here = part < parts
        lse = tl.load(PART_LSE + part * queries + query, mask=here, other=-float("inf"))
        higher = tl.maximum(top, tl.max(lse, axis=0))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        share = tl.exp2(lse - base)
        at = (part * queries + query) * DV
        # Parts that were never written have no share, but their memory may hold NaN.
        some = here & (lse != -float("inf"))
        x = tl.load(PART + at[:, None] + d[None, :], mask=some[:, None] & (d < DV)[None, :],
                    other=0.0)  # fmt: skip
        fade = tl.exp2(top - base)
        acc = acc * fade + tl.sum(x * share[:, None], axis=0)
        total = total * fade + tl.sum(share, axis=0)
        top = higher
    seen = total != 0  # NaN is propagated
    acc = tl.where(seen, acc / tl.where(seen, total, 1.0), 0.0)
    tl.store(OUT + query * DV + d, acc, mask=d < DV)
    tl.store(LSE + query, tl.where(seen, top + tl.log2(total), -float("inf")))


@triton.jit(do_not_specialize=["n", "slots", "mass_slots", "mass_first", "top_first", "tops",
                               "seen_row"])  # fmt: skip
def receive(SHARE, TOP, LSE, SEEN, USED, MASS, n, slots, mass_slots, mass_first, top_first, tops,
            seen_row, HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """Computes the mass of one segment's slots from the weights that `attend` wrote.

    Grid: (blocks of slots, B * H). SEEN (B|1, n): the queries that count; None: all. Writes MASS
    (B, H, mass_slots) from slot `mass_first` on.
    """
    pair = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = slot < slots
    live = here
    if USED is not None:
        live = here & (slot < tl.load(USED).to(tl.int32))
    row, head = pair // HEADS, pair % HEADS
    mass = tl.zeros((BLOCK,), tl.float32)
    for m in range(0, n * GROUP):
        at = pair * (n * GROUP) + m
        p = tl.load(SHARE + at * mass_slots + mass_first + slot, mask=live, other=0.0)
        base = tl.load(TOP + at * tops + top_first + slot // TILE, mask=live, other=0.0)
        token = m // GROUP
        lse = tl.load(LSE + (row * n + token) * (HEADS * GROUP) + head * GROUP + m % GROUP)
        share = tl.where(lse == -float("inf"), 0.0, tl.exp2(base - lse))
        if SEEN is not None:
            share = share * tl.load(SEEN + row * seen_row + token).to(tl.float32)
        mass += p.to(tl.float32) * share
    tl.store(MASS + pair * mass_slots + mass_first + slot, mass / GROUP, mask=here)
