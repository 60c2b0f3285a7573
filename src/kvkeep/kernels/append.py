"""Encodes new tokens and writes them to their slots in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from kvkeep.kernels.codes import FP8, INT4, INT8, PLAIN, half_precision, rounded

_PLAIN, _INT8, _INT4, _FP8 = (tl.constexpr(x) for x in (PLAIN, INT8, INT4, FP8))


@triton.jit
def _of_groups(x, d, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Gathers x (COUNT,), one number per group, for every element d."""
    own = (d // SIZE)[None, :] == tl.arange(0, COUNT)[:, None]
    return tl.sum(tl.where(own, x[:, None], 0.0), axis=0)


@triton.jit
def _extreme(x, d, D: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """The largest element of each group, (COUNT,)."""
    own = ((d // SIZE)[None, :] == tl.arange(0, COUNT)[:, None]) & (d < D)[None, :]
    return tl.max(tl.where(own, x[None, :], -float("inf")), axis=1)


@triton.jit
def _codes(x, scale, zero, d, CODE: tl.constexpr, AFFINE: tl.constexpr, COUNT: tl.constexpr,
           SIZE: tl.constexpr):  # fmt: skip
    """Codes int32 of x, one per element; the code of 0 where the scale is 0 or NaN."""
    if AFFINE:
        x -= _of_groups(zero, d, COUNT, SIZE)
    by = _of_groups(scale, d, COUNT, SIZE)
    q = tl.div_rn(x, tl.where(by == 0, 1.0, by))
    q = tl.where((by == 0) | (q != q) | (tl.abs(q) == float("inf")), 0.0, q)
    if CODE == _INT8:
        return rounded(tl.minimum(tl.maximum(q, -127.0), 127.0)).to(tl.int32)
    if CODE == _INT4:
        if not AFFINE:
            q += 8.0
        return rounded(tl.minimum(tl.maximum(q, 0.0), 15.0)).to(tl.int32)
    # E4M3 has the bits of float32 with a shorter mantissa; below 2**-6 its step is 2**-9.
    q = tl.minimum(tl.maximum(q, -448.0), 448.0)
    bits = tl.abs(q).to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = rounded(tl.abs(q) * 512.0).to(tl.int32)
    sign = (q.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(tl.abs(q) < 0.015625, small, normal) | sign


@triton.jit
def _products(x, codes, scale, d, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """The products of each group, in units of its scale, with itself and with its codes, (COUNT,);
    0 where the scale is 0 or NaN. See `Ints`: its scales are unbiased."""
    by = _of_groups(scale, d, COUNT, SIZE)
    x = tl.where((by == 0) | (by != by), 0.0, x / tl.where(by == 0, 1.0, by))
    own = (d // SIZE)[None, :] == tl.arange(0, COUNT)[:, None]
    squares = tl.sum(tl.where(own, (x * x)[None, :], 0.0), axis=1)
    products = tl.sum(tl.where(own, (x * codes.to(tl.float32))[None, :], 0.0), axis=1)
    return squares, products


@triton.jit
def _rotated(X, at, d, ROTATION, D: tl.constexpr, WIDE: tl.constexpr, ROTATED: tl.constexpr):
    """Elements d of a token in float32, multiplied by ROTATION (D, D) if ROTATED."""
    if ROTATED:
        y = tl.zeros((WIDE,), tl.float32)
        for first in range(0, D, 16):  # 16 rows at a time, limited by registers
            i = first + tl.arange(0, 16)
            x = tl.load(X + at + i, mask=i < D, other=0.0).to(tl.float32)
            mask = (i < D)[:, None] & (d < D)[None, :]
            r = tl.load(ROTATION + i[:, None] * D + d[None, :], mask=mask, other=0.0)
            y += tl.sum(x[:, None] * r, axis=0)
        return y
    else:
        return tl.load(X + at + d, mask=d < D, other=0.0).to(tl.float32)


@triton.jit
def _write(X, PLANE, SCALE, ZERO, ROTATION, at, to, to_scale, CODE: tl.constexpr,
           AFFINE: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr,
           COUNT: tl.constexpr, WHOLE: tl.constexpr, ROTATED: tl.constexpr):  # fmt: skip
    """Encodes and writes one token's key or value."""
    if CODE == _PLAIN:
        d = tl.arange(0, WHOLE)
        tl.store(PLANE + to + d, tl.load(X + at + d, mask=d < D), mask=d < D)
    else:
        parts: tl.constexpr = 2 if CODE == _INT4 else 1
        d = parts * tl.arange(0, WHOLE // parts)
        x = _rotated(X, at, d, ROTATION, D, WHOLE // parts, ROTATED)
        high = _extreme(x, d, D, COUNT, SIZE)
        low = -_extreme(-x, d, D, COUNT, SIZE)
        odd = x
        if CODE == _INT4:
            odd = _rotated(X, at, d + 1, ROTATION, D, WHOLE // parts, ROTATED)
            high = tl.maximum(high, _extreme(odd, d + 1, D, COUNT, SIZE))
            low = tl.minimum(low, -_extreme(-odd, d + 1, D, COUNT, SIZE))
        bad = _of_groups_bad(x, odd, d, COUNT, SIZE)
        g = tl.arange(0, COUNT)
        zero = tl.zeros((COUNT,), tl.float32)
        if CODE == _INT8:
            scale = tl.div_rn(tl.maximum(high, -low), zero + 127.0)
        elif CODE == _FP8:
            scale = tl.div_rn(tl.maximum(high, -low), zero + 448.0)
        elif AFFINE:
            half = half_precision(tl.where(bad, float("nan"), low))
            tl.store(ZERO + to_scale + g, half, mask=g < GROUPS)
            zero = half.to(tl.float32)
            scale = tl.div_rn(high - zero, zero * 0.0 + 15.0)
        else:
            scale = tl.where(high > -low, high, low) * -0.125
        half = half_precision(tl.where(bad, float("nan"), scale))
        scale = half.to(tl.float32)
        codes = _codes(x, scale, zero, d, CODE, AFFINE, COUNT, SIZE)
        if CODE == _INT4:
            odds = _codes(odd, scale, zero, d + 1, CODE, AFFINE, COUNT, SIZE)
            if not AFFINE:
                squares, products = _products(x, codes - 8, scale, d, COUNT, SIZE)
                more, most = _products(odd, odds - 8, scale, d + 1, COUNT, SIZE)
                products += most
                found = scale * tl.div_rn(squares + more, tl.where(products == 0, 1.0, products))
                kept = (products == 0) | (found != found) | (tl.abs(found) == float("inf"))
                half = tl.where(kept, half, half_precision(found))
            codes = codes | (odds << 4)
        tl.store(SCALE + to_scale + g, half, mask=g < GROUPS)
        j = tl.arange(0, WHOLE // parts)
        tl.store(PLANE + to + j, codes.to(PLANE.dtype.element_ty), mask=d < D)


@triton.jit
def _of_groups_bad(x, odd, d, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Which groups hold a non-finite number, bool (COUNT,)."""
    own = (d // SIZE)[None, :] == tl.arange(0, COUNT)[:, None]
    good = (tl.abs(x) < float("inf")) & (tl.abs(odd) < float("inf"))
    return tl.max(tl.where(own & (good == 0)[None, :], 1, 0), axis=1) > 0


@triton.jit(do_not_specialize=["first"])
def append(
    K, V, POSITION, CURSOR, PK, PKS, PKZ, PV, PVS, PVZ, PP, K_ROTATION, V_ROTATION,
    k_row, k_head, k_token, v_row, v_head, v_token, position_row, cursor_row, cursor_head, first,
    pk_row, pk_head, pk_slot, pks_row, pks_head, pks_slot,
    pv_row, pv_head, pv_slot, pvs_row, pvs_head, pvs_slot, pp_row, pp_head, pp_slot,
    K_CODE: tl.constexpr, K_AFFINE: tl.constexpr, DK: tl.constexpr, K_SIZE: tl.constexpr,
    K_GROUPS: tl.constexpr, K_COUNT: tl.constexpr, WIDE_K: tl.constexpr, K_ROTATED: tl.constexpr,
    V_CODE: tl.constexpr, V_AFFINE: tl.constexpr, DV: tl.constexpr, V_SIZE: tl.constexpr,
    V_GROUPS: tl.constexpr, V_COUNT: tl.constexpr, WIDE_V: tl.constexpr, V_ROTATED: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """Writes token i of each row and head to slot CURSOR + `first` + i of all planes.

    Grid: (n, H, B). CURSOR: int64 (B|1, H|1), or None for 0. PLACES: heads of the position plane.
    """
    token, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = (first + token).to(tl.int64)
    if CURSOR is not None:
        slot += tl.load(CURSOR + row * cursor_row + head * cursor_head)
    _write(K, PK, PKS, PKZ, K_ROTATION, row * k_row + head * k_head + token.to(tl.int64) * k_token,
           row * pk_row + head * pk_head + slot * pk_slot,
           row * pks_row + head * pks_head + slot * pks_slot,
           K_CODE, K_AFFINE, DK, K_SIZE, K_GROUPS, K_COUNT, WIDE_K, K_ROTATED)  # fmt: skip
    _write(V, PV, PVS, PVZ, V_ROTATION, row * v_row + head * v_head + token.to(tl.int64) * v_token,
           row * pv_row + head * pv_head + slot * pv_slot,
           row * pvs_row + head * pvs_head + slot * pvs_slot,
           V_CODE, V_AFFINE, DV, V_SIZE, V_GROUPS, V_COUNT, WIDE_V, V_ROTATED)  # fmt: skip
    if head < PLACES:
        place = tl.load(POSITION + row * position_row + token)
        tl.store(PP + row * pp_row + head * pp_head + slot * pp_slot, place)
