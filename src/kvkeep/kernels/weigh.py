"""Computes the mass of long chunks, or the largest weights, in a second pass over the keys, without
storing scores."""

from __future__ import annotations

import triton
import triton.language as tl

from kvkeep.kernels.attend import (
    _LOG2_E,
    _query_indices,
    _query_parts,
    _scores,
    _seen,
    biased,
    with_bias,
)


@triton.jit(do_not_specialize=["n", "extent", "slots", "before", "mass_slots", "mass_first", "seen_row",
                               "first0", "from0", "to0", "first1", "from1", "to1", "first2",
                               "from2", "to2", "size0", "size1", "size2"])  # fmt: skip
def weigh(
    Q, K, KS, KZ, POSITION, Q_POSITION, BOUNDS, USED, SLOPES, BIAS, LSE, SEEN, MASS,
    q_row, q_head, q_token, k_row, k_head, k_slot, ks_row, ks_head, ks_slot,
    position_row, position_head, position_slot, q_position_row, bounds_row, owned,
    n, bias_row, bias_head, bias_token, extent, slots, before, mass_slots, mass_first, seen_row, scale, cap,
    size0, first0, from0, to0, size1, first1, from1, to1, size2, first2, from2, to2,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, WIDE_K: tl.constexpr,
    K_CODE: tl.constexpr, K_LOW: tl.constexpr, K_HIGH: tl.constexpr, K_PARTS: tl.constexpr, K_SIZE: tl.constexpr, K_COUNT: tl.constexpr,
    K_GROUPS: tl.constexpr, K_AFFINE: tl.constexpr, K_BLOCK: tl.constexpr,
    DENSE: tl.constexpr, REACHES: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TYPE: tl.constexpr,
    PEAK: tl.constexpr,
):  # fmt: skip
    """Computes one tile of slots, for all queries of one row and kv head.

    Grid: (tiles of slots, B * H). `owned`: 0 if all rows share the segment, else 1. LSE (B, n, Hq)
    is in base 2. Writes MASS (B, H, mass_slots) from slot `mass_first` on.
    """
    pair = tl.program_id(1)
    row, head = (pair // HEADS).to(tl.int64), (pair % HEADS).to(tl.int64)
    K += row * owned * k_row + head * k_head
    KS += row * owned * ks_row + head * ks_head
    KZ += row * owned * ks_row + head * ks_head
    if USED is not None:
        slots = tl.minimum(slots, tl.load(USED).to(tl.int32))
    start = tl.program_id(0) * BLOCK_N
    slot = start + tl.arange(0, BLOCK_N)
    here = slot < slots
    position = slot
    if not DENSE:
        POSITION += row * owned * position_row + head * position_head
        position = tl.load(POSITION + slot.to(tl.int64) * position_slot, mask=here, other=-1)
    mass = tl.zeros((BLOCK_N,), tl.float32)
    begin = 0
    if DENSE:  # earlier queries see none of the tile's slots
        begin = tl.maximum(0, start - before) * GROUP // BLOCK_M
    for block in range(begin, tl.cdiv(n * GROUP, BLOCK_M)):
        rows_, token, query_head, real = _query_indices(
            block, pair, 0, n, HEADS, GROUP, False, BLOCK_M
        )
        q0, q1, q2, q3, q_sum = _query_parts(
            Q, rows_, token, query_head, real, q_row, q_head, q_token, K_CODE, K_PARTS, K_GROUPS,
            K_SIZE, DK, WIDE_K, BLOCK_M, TYPE,
        )  # fmt: skip
        q_position = token
        if not DENSE:
            q_position = tl.load(Q_POSITION + rows_ * q_position_row + token, mask=real, other=-1)
        low, high = q_position, q_position
        if BOUNDS is not None:
            at_bounds = BOUNDS + rows_ * bounds_row + token
            low = tl.load(at_bounds, mask=real, other=0)
            high = tl.load(at_bounds + n, mask=real, other=-1)
        s = _scores(q0, q1, q2, q3, q_sum, K, KS, KZ, start, slot, here, k_slot, ks_slot, scale,
                    cap, K_CODE, K_LOW, K_HIGH, K_PARTS, K_AFFINE, K_COUNT, K_GROUPS, K_BLOCK, DK // K_PARTS,
                    WIDE_K, SOFTCAP, BLOCK_M, BLOCK_N, TYPE)  # fmt: skip
        if SLOPES is not None:
            slope = tl.load(SLOPES + query_head).to(tl.float32) * _LOG2_E
            s = biased(s, slope, position, q_position)
        if BIAS is not None:
            at_bias = rows_ * bias_row + query_head.to(tl.int64) * bias_head + token * bias_token
            s = with_bias(s, BIAS, at_bias, extent, real, position, q_position)
        seen = _seen(slot, here, position, q_position, low, high, token, before, real, n,
                     size0, first0, from0, to0, size1, first1, from1, to1,
                     size2, first2, from2, to2, DENSE, BOUNDS is not None, REACHES)  # fmt: skip
        at = (rows_ * n + token) * (HEADS * GROUP) + query_head
        lse = tl.load(LSE + at, mask=real, other=-float("inf"))
        seen = seen & (lse > -float("inf"))[:, None]
        if SEEN is not None:
            counts = tl.load(SEEN + rows_ * seen_row + token, mask=real, other=0)
            seen = seen & (counts != 0)[:, None]
        p = tl.exp2(tl.where(seen, s - lse[:, None], -float("inf")))
        if PEAK:
            mass = tl.maximum(mass, tl.max(p, axis=0))
        else:
            mass += tl.sum(p, axis=0)
    within = slot < mass_slots - mass_first
    if not PEAK:
        mass = mass / GROUP
    tl.store(MASS + pair.to(tl.int64) * mass_slots + mass_first + slot, mass,
             mask=here & within)  # fmt: skip
