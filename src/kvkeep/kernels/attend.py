"""Attention over the slots of one segment, a tile at a time, for all queries of a kv head. The
slots are divided into splits; `merge` combines their results.

Source: online softmax arXiv 1805.02867; tiles FlashAttention-2 (arXiv 2307.08691); splits over the
keys Flash-Decoding (2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvkeep.kernels.codes import INT2, INT4, PLAIN, numbers, product, within

_PLAIN, _INT4, _INT2 = tl.constexpr(PLAIN), tl.constexpr(INT4), tl.constexpr(INT2)
_LOG2_E = tl.constexpr(1.4426950408889634)
COLUMNS = 16  # int64 numbers per item of a TABLE; 15 are used
_COLUMNS = tl.constexpr(COLUMNS)


@triton.jit
def _centre(CODE: tl.constexpr, AFFINE: tl.constexpr):
    """The number to subtract from decoded codes: for 4-bit codes their middle, 8, plus the 16 that
    `numbers` adds; for 2-bit codes relative to 1.5, as `numbers` returns them."""
    if CODE == _INT4:
        return 24.0
    elif AFFINE:
        return 0.0
    else:
        return 0.5


@triton.jit
def _middle(CODE: tl.constexpr):
    """The 4-bit or 2-bit code that decodes to zero."""
    if CODE == _INT4:
        return 8.0
    else:
        return 1.5


@triton.jit
def _query_indices(block, pair, rows, n, HEADS: tl.constexpr, GROUP: tl.constexpr,
                   SHARED: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    """The row, token and query head of each query of a tile, and whether the query exists. A tile
    enumerates (row,) token and query head of the group, the last fastest."""
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    token = m // GROUP
    if SHARED:
        row, head = token // n, pair
        token = token % n
        real = row < rows
    else:
        row, head = pair // HEADS + m * 0, pair % HEADS
        real = token < n
    return row.to(tl.int64), token, head * GROUP + m % GROUP, real


@triton.jit
def _queries(Q, row, token, query_head, real, q_row, q_head, q_token, GROUPS: tl.constexpr,
             SIZE: tl.constexpr, DK: tl.constexpr, WIDE: tl.constexpr, STEP: tl.constexpr,
             FIRST: tl.constexpr, BLOCK_M: tl.constexpr, TYPE: tl.constexpr):  # fmt: skip
    """Queries (GROUPS * BLOCK_M, WIDE), once for each group of elements with a scale, zero in all
    other groups: one product then gives the contribution of each group."""
    d = FIRST + STEP * tl.arange(0, WIDE)
    at = row * q_row + query_head.to(tl.int64) * q_head + token.to(tl.int64) * q_token
    q = tl.load(Q + at[:, None] + d[None, :], mask=real[:, None] & (d < DK)[None, :], other=0.0)
    if GROUPS == 1:
        return q.to(TYPE)
    own = (d // SIZE)[None, None, :] == tl.arange(0, GROUPS)[:, None, None]
    apart = tl.where(own, q[None, :, :], 0.0)
    return tl.reshape(apart, (GROUPS * BLOCK_M, WIDE)).to(TYPE)


@triton.jit
def _part(X, d, row: tl.constexpr, BITS: tl.constexpr, SPREAD: tl.constexpr):
    """Bytes d of a row of `row` bytes with SPREAD bits per code, of which BITS come from this plane;
    see `kvkeep.packing.Packing`."""
    part: tl.constexpr = row * BITS // SPREAD
    mask: tl.constexpr = ((1 << BITS) - 1) * (17 if SPREAD == 4 else 1)
    x = tl.load(X + d % part).to(tl.int32)
    return (x >> (d // part * BITS)) & mask


@triton.jit
def _tile(X, slot, here, x_slot, CODE: tl.constexpr, AFFINE: tl.constexpr, LOW: tl.constexpr,
          HIGH: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Loads words (slots, WIDE). If LOW, codes are split into planes of LOW and HIGH bits, and are
    returned as bytes of one 8-bit code or two 4-bit codes, which `numbers` can read."""
    d = tl.arange(0, WIDE)
    if LOW > 0:
        spread: tl.constexpr = 4 if CODE == _INT4 else 8
        middle: tl.constexpr = 1 << (LOW + HIGH - 1)
        at = X + tl.where(here, slot, 0)[:, None].to(tl.int64) * x_slot
        byte = tl.where(d < D, d, 0)[None, :]
        low = _part(at, byte, D, LOW, spread)
        words = low | (_part(at + D * LOW // spread, byte, D, HIGH, spread) << LOW)
        if spread == 8:
            words -= middle
        elif not AFFINE:
            words += (8 - middle) * 17
        return tl.where(here[:, None] & (d < D)[None, :], words, 0)
    else:
        at = X + slot[:, None].to(tl.int64) * x_slot + d[None, :]
        if D == WIDE:
            return tl.load(at, mask=here[:, None], other=0)
        else:
            return tl.load(at, mask=here[:, None] & (d < D)[None, :], other=0)


@triton.jit
def _scales(X, slot, here, x_slot, COUNT: tl.constexpr, GROUPS: tl.constexpr):
    """Loads scales (GROUPS, slots) as float32."""
    g = tl.arange(0, GROUPS)
    at = X + slot[None, :].to(tl.int64) * x_slot + g[:, None]
    x = tl.load(at, mask=here[None, :] & (g < COUNT)[:, None], other=0)
    if X.dtype.element_ty == tl.uint8:  # the higher byte of a float16
        x = (x.to(tl.int16) << 8).to(tl.float16, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _times_scales(q, KS, KZ, at, FIRST: tl.constexpr, CODE: tl.constexpr, PARTS: tl.constexpr,
                  AFFINE: tl.constexpr, WORDS: tl.constexpr, WIDE: tl.constexpr,
                  TYPE: tl.constexpr):  # fmt: skip
    """One part of the queries times the scales of its channels, and the terms to add to the scores
    for zero points and for the middle of codes."""
    word = tl.arange(0, WIDE)
    d = at + FIRST + PARTS * word
    scale = tl.load(KS + d, mask=word < WORDS, other=0.0).to(tl.float32)
    wide = q.to(tl.float32)
    scaled = (wide * scale[None, :]).to(TYPE)
    middle = tl.zeros((WIDE,), tl.float32)
    if AFFINE:
        middle = tl.load(KZ + d, mask=word < WORDS, other=0.0).to(tl.float32)
        if CODE == _INT4 or CODE == _INT2:  # noqa: SIM109 - not Triton
            middle += _middle(CODE) * scale
    added = tl.sum(wide * middle[None, :], axis=1)
    if CODE == _INT4:
        added -= _centre(CODE, AFFINE) * tl.sum(scaled.to(tl.float32), axis=1)
    return scaled, added


@triton.jit
def _scores(q0, q1, q2, q3, q_sum, K, KS, KZ, first, slot, here, k_slot, ks_slot, scale, cap,
            CODE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, PARTS: tl.constexpr, AFFINE: tl.constexpr, COUNT: tl.constexpr,
            GROUPS: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr, WIDE: tl.constexpr,
            SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
            TYPE: tl.constexpr):  # fmt: skip
    """Scores (BLOCK_M, BLOCK_N), in base-2 logarithmic units, of the slots from `first` on. If
    BLOCK > 1, scales are per channel and shared by all of these slots."""
    words = _tile(K, slot, here, k_slot, CODE, AFFINE, LOW, HIGH, WORDS, WIDE)
    added = tl.zeros((BLOCK_M,), tl.float32)
    if BLOCK > 1:
        at = (tl.zeros((1,), tl.int64) + first // BLOCK) * ks_slot
        q0, added = _times_scales(q0, KS, KZ, at, 0, CODE, PARTS, AFFINE, WORDS, WIDE, TYPE)
        if PARTS > 1:
            q1, more = _times_scales(q1, KS, KZ, at, 1, CODE, PARTS, AFFINE, WORDS, WIDE, TYPE)
            added += more
        if PARTS > 2:
            q2, more = _times_scales(q2, KS, KZ, at, 2, CODE, PARTS, AFFINE, WORDS, WIDE, TYPE)
            added += more
            q3, more = _times_scales(q3, KS, KZ, at, 3, CODE, PARTS, AFFINE, WORDS, WIDE, TYPE)
            added += more
    s = product(q0, tl.trans(numbers(words, CODE, 0, TYPE)), TYPE)
    if PARTS > 1:
        s += product(q1, tl.trans(numbers(words, CODE, 1, TYPE)), TYPE)
    if PARTS > 2:
        s += product(q2, tl.trans(numbers(words, CODE, 2, TYPE)), TYPE)
        s += product(q3, tl.trans(numbers(words, CODE, 3, TYPE)), TYPE)
    if BLOCK > 1:
        s += added[:, None]
    elif CODE != _PLAIN:
        s = tl.reshape(s, (GROUPS, BLOCK_M, BLOCK_N))
        ks = _scales(KS, slot, here, ks_slot, COUNT, GROUPS)
        if CODE == _INT4 or CODE == _INT2:  # noqa: SIM109 - not Triton
            s -= _centre(CODE, AFFINE) * q_sum[:, :, None]
        s *= ks[:, None, :]
        if AFFINE:
            middle = _scales(KZ, slot, here, ks_slot, COUNT, GROUPS) + _middle(CODE) * ks
            s += q_sum[:, :, None] * middle[:, None, :]
        s = tl.sum(s, axis=0)
    s *= scale
    if SOFTCAP:
        s = cap * (2.0 / (1.0 + tl.exp2(s / cap * (-2.0 * _LOG2_E))) - 1.0)
    return s * _LOG2_E


@triton.jit
def _query_parts(Q, row, token, query_head, real, q_row, q_head, q_token, CODE: tl.constexpr,
                 PARTS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, DK: tl.constexpr,
                 WIDE: tl.constexpr, BLOCK_M: tl.constexpr, TYPE: tl.constexpr):  # fmt: skip
    """Queries in up to four parts, one for each element of a word of keys; for 4-bit and 2-bit keys
    also the sum of each group (GROUPS, BLOCK_M)."""
    q0 = _queries(Q, row, token, query_head, real, q_row, q_head, q_token, GROUPS, SIZE, DK, WIDE,
                  PARTS, 0, BLOCK_M, TYPE)  # fmt: skip
    q1, q2, q3 = q0, q0, q0
    total = q0.to(tl.float32)
    if PARTS > 1:
        q1 = _queries(Q, row, token, query_head, real, q_row, q_head, q_token, GROUPS, SIZE, DK,
                      WIDE, PARTS, 1, BLOCK_M, TYPE)  # fmt: skip
        total += q1.to(tl.float32)
    if PARTS > 2:
        q2 = _queries(Q, row, token, query_head, real, q_row, q_head, q_token, GROUPS, SIZE, DK,
                      WIDE, PARTS, 2, BLOCK_M, TYPE)  # fmt: skip
        q3 = _queries(Q, row, token, query_head, real, q_row, q_head, q_token, GROUPS, SIZE, DK,
                      WIDE, PARTS, 3, BLOCK_M, TYPE)  # fmt: skip
        total += q2.to(tl.float32) + q3.to(tl.float32)
    q_sum = tl.zeros((GROUPS, BLOCK_M), tl.float32)
    if CODE == _INT4 or CODE == _INT2:  # noqa: SIM109 - not Triton
        q_sum = tl.reshape(tl.sum(total, axis=1), (GROUPS, BLOCK_M))
    return q0, q1, q2, q3, q_sum


@triton.jit
def _seen(slot, here, position, q_position, low, high, token, before, real, n,
          size0, first0, from0, to0, size1, first1, from1, to1, size2, first2, from2, to2,
          DENSE: tl.constexpr, BOUNDED: tl.constexpr, REACHES: tl.constexpr):  # fmt: skip
    """Which slots each query sees: bool (queries, slots). A query sees positions from `low` if
    BOUNDED, else 0, up to `high`."""
    seen = here[None, :] & real[:, None]
    if DENSE:
        return seen & (slot[None, :] <= before + token[:, None])
    p, t = position[None, :], q_position[:, None]
    seen = seen & (p >= 0) & (p <= high[:, None])
    if BOUNDED:
        seen = seen & (p >= low[:, None])
    if REACHES > 0:
        seen = seen & within(t, p, size0, first0, from0, to0)
    if REACHES > 1:
        seen = seen & within(t, p, size1, first1, from1, to1)
    if REACHES > 2:
        seen = seen & within(t, p, size2, first2, from2, to2)
    return seen


@triton.jit
def biased(s, slope, position, q_position):
    """Scores (queries, slots) plus each query's slope, in base-2 logarithmic units, times the
    positions by which the slots follow the query."""
    distance = position[None, :] - q_position[:, None]
    return s + slope[:, None] * distance.to(tl.float32)


@triton.jit
def with_bias(s, BIAS, at, extent, real, position, q_position):
    """Scores (queries, slots), in base-2 logarithmic units, plus each query's bias for the positions
    from a slot to the query: BIAS, float32, from `at` on."""
    distance = q_position[:, None] - position[None, :]
    distance = tl.minimum(tl.maximum(distance, 0), extent - 1)
    return s + tl.load(BIAS + at[:, None] + distance, mask=real[:, None], other=0.0) * _LOG2_E


@triton.jit
def _store(OUT, acc, more, norm, real, FIRST: tl.constexpr, STEP: tl.constexpr,
           CODE: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, DV: tl.constexpr,
           WIDE: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    """Stores acc (GROUPS * BLOCK_M, WIDE) + more to every STEP-th element from FIRST on. Each group
    of elements has its own rows of acc."""
    d = FIRST + STEP * tl.arange(0, WIDE)
    if CODE == _INT4 or CODE == _INT2:  # noqa: SIM109 - not Triton
        acc += more[:, None]
    if CODE != _PLAIN:
        own = (d // SIZE)[None, None, :] == tl.arange(0, GROUPS)[:, None, None]
        acc = tl.sum(tl.where(own, tl.reshape(acc, (GROUPS, BLOCK_M, WIDE)), 0.0), axis=0)
    tl.store(OUT + d[None, :], acc * norm[:, None], mask=real[:, None] & (d < DV)[None, :])


@triton.jit
def _column(TABLE, item, column: tl.constexpr, ALIGNED: tl.constexpr):
    """A number of a table item; ALIGNED asserts a multiple of 16, which allows wide loads."""
    x = tl.load(TABLE + item * _COLUMNS + column)
    return tl.multiple_of(x, 16) if ALIGNED else x


@triton.jit(do_not_specialize=["n", "extent", "slots", "before", "splits", "first_part", "mass_slots",
                               "mass_first", "top_first", "tops",
                               "first0", "from0", "to0", "first1", "from1", "to1", "first2",
                               "from2", "to2", "size0", "size1", "size2"])  # fmt: skip
def attend(
    Q, K, KS, KZ, V, VS, VZ, POSITION, Q_POSITION, BOUNDS, USED, SINKS, SLOPES, BIAS, TABLE, ROWS,
    OUT, LSE, SHARE, TOP,
    q_row, q_head, q_token, k_row, k_head, k_slot, ks_row, ks_head, ks_slot,
    v_row, v_head, v_slot, vs_row, vs_head, vs_slot,
    position_row, position_head, position_slot, q_position_row, bounds_row,
    rows, n, bias_row, bias_head, bias_token, extent, slots, before, splits, first_part, mass_slots, mass_first, top_first, tops, scale, cap,
    size0, first0, from0, to0, size1, first1, from1, to1, size2, first2, from2, to2,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, WIDE_K: tl.constexpr, WIDE_V: tl.constexpr,
    K_CODE: tl.constexpr, K_LOW: tl.constexpr, K_HIGH: tl.constexpr, K_PARTS: tl.constexpr, K_SIZE: tl.constexpr, K_COUNT: tl.constexpr,
    K_GROUPS: tl.constexpr, K_AFFINE: tl.constexpr, K_BLOCK: tl.constexpr,
    V_CODE: tl.constexpr, V_LOW: tl.constexpr, V_HIGH: tl.constexpr, V_PARTS: tl.constexpr, V_SIZE: tl.constexpr, V_COUNT: tl.constexpr,
    V_GROUPS: tl.constexpr, V_AFFINE: tl.constexpr,
    DENSE: tl.constexpr, REACHES: tl.constexpr, SOFTCAP: tl.constexpr, MASS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TYPE: tl.constexpr,
    ALIGNED: tl.constexpr = False,
):  # fmt: skip
    """Computes one split of the slots for one tile of queries.

    Grid: (tiles of queries, splits, B * H, or H if the segment is SHARED by all rows). Codes are
    packed in words of PARTS elements, with one product for each element of a word, so words are
    not unpacked in memory.

    Writes the partial results OUT (parts, B, n, Hq, DV) and LSE (parts, B, n, Hq), in base 2. With
    MASS it also writes the weights SHARE (B, H, n * GROUP, mass_slots), relative to the largest
    score so far, which goes to TOP (B, H, n * GROUP, tops).

    With a TABLE, the splits are its items: int64 (items, COLUMNS). An item holds, in order: the
    offsets of its slots in K, KS, KZ, V, VS and VZ, in elements; the strides of heads of K, KS, V
    and VS; its first slot and the slot after its last; the part to write; and the range of ROWS,
    int32, that attend to it: first, count. `n` is 1, every row sees all slots, and SHARED is set.
    """
    block, split, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    part, count = first_part + split, rows
    if TABLE is not None:
        count = _column(TABLE, split, 14, False).to(tl.int32)
    row, token, query_head, real = _query_indices(
        block, pair, count, n, HEADS, GROUP, SHARED, BLOCK_M
    )
    if TABLE is not None:
        part = _column(TABLE, split, 12, False).to(tl.int32)
        ROWS += _column(TABLE, split, 13, False)
        row = tl.load(ROWS + row, mask=real, other=0).to(tl.int64)
        K += _column(TABLE, split, 0, ALIGNED)
        KS += _column(TABLE, split, 1, ALIGNED)
        KZ += _column(TABLE, split, 2, ALIGNED)
        V += _column(TABLE, split, 3, ALIGNED)
        VS += _column(TABLE, split, 4, ALIGNED)
        VZ += _column(TABLE, split, 5, ALIGNED)
        k_head = _column(TABLE, split, 6, ALIGNED)
        ks_head = _column(TABLE, split, 7, ALIGNED)
        v_head = _column(TABLE, split, 8, ALIGNED)
        vs_head = _column(TABLE, split, 9, ALIGNED)
    q0, q1, q2, q3, q_sum = _query_parts(
        Q, row, token, query_head, real, q_row, q_head, q_token, K_CODE, K_PARTS, K_GROUPS, K_SIZE,
        DK, WIDE_K, BLOCK_M, TYPE,
    )  # fmt: skip
    owner = (pair * 0 if SHARED else pair // HEADS).to(tl.int64)
    head = (pair if SHARED else pair % HEADS).to(tl.int64)
    K += owner * k_row + head * k_head
    V += owner * v_row + head * v_head
    KS += owner * ks_row + head * ks_head
    KZ += owner * ks_row + head * ks_head
    VS += owner * vs_row + head * vs_head
    VZ += owner * vs_row + head * vs_head
    q_position = token
    if not DENSE:
        POSITION += owner * position_row + head * position_head
        q_position = tl.load(Q_POSITION + row * q_position_row + token, mask=real, other=-1)
    low, high = q_position, q_position
    if BOUNDS is not None:
        at_bounds = BOUNDS + row * bounds_row + token
        low = tl.load(at_bounds, mask=real, other=0)
        high = tl.load(at_bounds + n, mask=real, other=-1)
    if USED is not None:
        slots = tl.minimum(slots, tl.load(USED).to(tl.int32))
    each = tl.cdiv(tl.cdiv(slots, BLOCK_N), splits) * BLOCK_N
    start = split * each
    stop = tl.minimum(start + each, slots)
    if TABLE is not None:
        start = _column(TABLE, split, 10, False).to(tl.int32)
        stop = _column(TABLE, split, 11, False).to(tl.int32)
    if DENSE and not MASS and not SHARED:  # no query of the tile sees later slots
        last = tl.minimum(n - 1, (block * BLOCK_M + BLOCK_M - 1) // GROUP)
        stop = tl.minimum(stop, before + last + 1)

    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS is not None:
        sink = tl.load(SINKS + query_head).to(tl.float32) * _LOG2_E
        top = tl.where(split == 0, sink, top)
        total = tl.where(split == 0, 1.0, total)
    slope = top
    if SLOPES is not None:
        slope = tl.load(SLOPES + query_head).to(tl.float32) * _LOG2_E
    at_bias = row * bias_row + query_head.to(tl.int64) * bias_head + token * bias_token
    acc0 = tl.zeros((V_GROUPS * BLOCK_M, WIDE_V), tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    # Sums of the weights, to correct the offset of 4-bit and 2-bit values.
    weight = tl.zeros((V_GROUPS * BLOCK_M,), tl.float32)
    middles = tl.zeros((V_GROUPS, BLOCK_M), tl.float32)
    at_mass = ((row * HEADS + head) * n + token) * GROUP + query_head % GROUP

    for first in tl.range(start, stop, BLOCK_N):
        slot = first + tl.arange(0, BLOCK_N)
        here = slot < stop
        s = _scores(q0, q1, q2, q3, q_sum, K, KS, KZ, first, slot, here, k_slot, ks_slot, scale,
                    cap, K_CODE, K_LOW, K_HIGH, K_PARTS, K_AFFINE, K_COUNT, K_GROUPS, K_BLOCK, DK // K_PARTS,
                    WIDE_K, SOFTCAP, BLOCK_M, BLOCK_N, TYPE)  # fmt: skip
        position = slot
        if not DENSE:
            position = tl.load(POSITION + slot.to(tl.int64) * position_slot, mask=here, other=-1)
        if SLOPES is not None:
            s = biased(s, slope, position, q_position)
        if BIAS is not None:
            s = with_bias(s, BIAS, at_bias, extent, real, position, q_position)
        seen = _seen(slot, here, position, q_position, low, high, token, before, real, n,
                     size0, first0, from0, to0, size1, first1, from1, to1,
                     size2, first2, from2, to2, DENSE, BOUNDS is not None, REACHES)  # fmt: skip
        s = tl.where(seen, s, -float("inf"))
        higher = tl.maximum(top, tl.max(s, axis=1))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        p = tl.exp2(s - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(p, axis=1)
        top = higher
        if MASS:
            at = at_mass * mass_slots + mass_first
            tl.store(SHARE + at[:, None] + slot[None, :], p,
                     mask=real[:, None] & here[None, :])  # fmt: skip
            tl.store(TOP + at_mass * tops + top_first + first // BLOCK_N, base, mask=real)
        words = _tile(V, slot, here, v_slot, V_CODE, V_AFFINE, V_LOW, V_HIGH, DV // V_PARTS, WIDE_V)
        fades = fade
        scaled = p
        if V_CODE != _PLAIN:
            vs = _scales(VS, slot, here, vs_slot, V_COUNT, V_GROUPS)
            fades = tl.reshape(
                tl.broadcast_to(fade[None, :], (V_GROUPS, BLOCK_M)), (V_GROUPS * BLOCK_M,)
            )
            scaled = tl.reshape(p[None, :, :] * vs[:, None, :], (V_GROUPS * BLOCK_M, BLOCK_N))
        scaled = scaled.to(TYPE)
        acc0 = acc0 * fades[:, None] + product(scaled, numbers(words, V_CODE, 0, TYPE), TYPE)
        if V_PARTS > 1:
            acc1 = acc1 * fades[:, None] + product(scaled, numbers(words, V_CODE, 1, TYPE), TYPE)
        if V_PARTS > 2:
            acc2 = acc2 * fades[:, None] + product(scaled, numbers(words, V_CODE, 2, TYPE), TYPE)
            acc3 = acc3 * fades[:, None] + product(scaled, numbers(words, V_CODE, 3, TYPE), TYPE)
        if V_CODE == _INT4 or V_CODE == _INT2:  # noqa: SIM109 - not Triton
            weight = weight * fades + tl.sum(scaled.to(tl.float32), axis=1)
        if V_AFFINE:
            middle = _scales(VZ, slot, here, vs_slot, V_COUNT, V_GROUPS) + _middle(V_CODE) * vs
            middles = middles * fade[None, :] + tl.sum(p[None, :, :] * middle[:, None, :], axis=2)

    some = total != 0  # NaN is propagated
    norm = tl.where(some, 1.0 / total, 0.0)
    at = ((part * rows + row) * n + token) * (HEADS * GROUP) + query_head
    tl.store(LSE + at, tl.where(some, top + tl.log2(total), -float("inf")), mask=real)
    more = weight * 0.0
    if V_CODE == _INT4 or V_CODE == _INT2:  # noqa: SIM109 - not Triton
        more = weight * -_centre(V_CODE, V_AFFINE)
    if V_AFFINE:
        more += tl.reshape(middles, (V_GROUPS * BLOCK_M,))
    OUT += at[:, None] * DV
    _store(OUT, acc0, more, norm, real, 0, V_PARTS, V_CODE, V_GROUPS, V_SIZE, DV, WIDE_V, BLOCK_M)
    if V_PARTS > 1:
        _store(OUT, acc1, more, norm, real, 1, V_PARTS, V_CODE, V_GROUPS, V_SIZE, DV, WIDE_V,
               BLOCK_M)  # fmt: skip
    if V_PARTS > 2:
        _store(OUT, acc2, more, norm, real, 2, V_PARTS, V_CODE, V_GROUPS, V_SIZE, DV, WIDE_V,
               BLOCK_M)  # fmt: skip
        _store(OUT, acc3, more, norm, real, 3, V_PARTS, V_CODE, V_GROUPS, V_SIZE, DV, WIDE_V,
               BLOCK_M)  # fmt: skip
