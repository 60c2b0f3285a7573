// Codes with scales by channel: each element of the width has its own scale, which the tokens of a
// block share. Queries are multiplied by the scales once for each block.
#pragma once
#include "coded.h"

namespace {

constexpr int64_t FEWEST_TOKENS = 16;  // tokens of a block for which multiplying the queries pays

// Calls f(block, from, to) for each block of tokens that overlaps slots `slot` to `slot + count`;
// its slots are from .. to - 1, counted from `slot`.
template <class F>
void each_channel_block(int64_t tokens, int64_t slot, int64_t count, F f) {
    for (int64_t from = 0; from < count;) {
        const int64_t block = (slot + from) / tokens, end = (block + 1) * tokens - slot;
        const int64_t to = end < count ? end : count;
        f(block, from, to);
        from = to;
    }
}

const uint16_t* scales_of_block(const KvPlane& plane, int64_t row, int64_t head, int64_t block) {
    if (!plane.data) return nullptr;
    return (const uint16_t*)plane.data + row * plane.row + head * plane.head + block * plane.slot;
}

// -- to floats -------------------------------------------------------------------------------

// Like `decode`, with scales by channel.
template <int BITS>
void decode_channels(const KvEncoded& x, int64_t row, int64_t head, int64_t slot, Rows codes,
                     Rows next, int64_t count, int64_t width, float* wide) {
    const int64_t stride = padded(width);
    const float offset = (float)kv_zero_offset(x.plane.type);
    for (int64_t j = 0; j < count; ++j) prefetch(next.at(j), next.bytes);
    each_channel_block(x.block, slot, count, [&](int64_t block, int64_t from, int64_t to) {
        const uint16_t* scales = scales_of_block(x.scale, row, head, block);
        const uint16_t* zeros = scales_of_block(x.zero, row, head, block);
        int64_t d = 0;
        for (; d + 8 <= width; d += 8) {
            const v8 scale = widen8<F16>(scales + d);
            const v8 zero = (zeros ? widen8<F16>(zeros + d) + scale * offset : v8{}) -
                            scale * (float)Codes<BITS>::MIDDLE;
            for (int64_t j = from; j < to; ++j) {
                const uint8_t* own = (const uint8_t*)codes.at(j) + d * BITS / 8;
                store(wide + j * stride + d, code8<BITS>(own) * scale + zero);
            }
        }
        for (; d < width; ++d) {
            const float scale = F16::widen1(scales[d]);
            const float zero = (zeros ? F16::widen1(zeros[d]) + scale * offset : 0) -
                               scale * (float)Codes<BITS>::MIDDLE;
            for (int64_t j = from; j < to; ++j)
                wide[j * stride + d] = code1<BITS>((const uint8_t*)codes.at(j), d) * scale + zero;
        }
    });
}

// -- scores ----------------------------------------------------------------------------------

// Whether codes by channel can be multiplied without decoding them to floats.
template <int BITS>
bool channels_fit(const KvEncoded& x, int64_t width) {
    return x.block >= FEWEST_TOKENS && width % Codes<BITS>::PIECE == 0 && width <= MOST_WIDTH;
}

// Reorders numbers x (width) to the lanes of the codes.
template <int BITS>
void in_lanes(const float* x, int64_t width, float* to) {
    constexpr int64_t PIECE = Codes<BITS>::PIECE;
    for (const float* end = x + width; x < end; x += PIECE, to += PIECE)
        part_pairs(x, PIECE / 2, to, to + PIECE / 2);
}

// Scales or zero points of a block, in the order of the codes' lanes.
template <int BITS>
void channels_in_lanes(const uint16_t* halves, int64_t width, float* to) {
    float x[MOST_WIDTH];
    for (int64_t d = 0; d < width; d += W) store(x + d, F16::widen_half(halves + d));
    in_lanes<BITS>(x, width, to);
}

// A query times the scales of a block, as factors of codes; returns their step. `added` is the
// contribution of zero points and of the middle of the codes to each score.
template <int BITS>
KV_INLINE float code_by_channel(const float* query, const float* scale, const float* middle,
                                int64_t width, char* to, float& added) {
    typedef Codes<BITS> C;
    float product[MOST_WIDTH];
    int16_t factors[MOST_WIDTH];
    vf exact{};
    for (int64_t d = 0; d < width; d += W) {
        const vf q = load<vf>(query + d);
        store(product + d, q * load<vf>(scale + d));
        exact += q * load<vf>(middle + d);
    }
    const Rounded rounded = round16(product, width, factors, C::MOST_FACTOR);
    for (int64_t d = 0; d < width; ++d)
        ((typename C::Factor*)to)[d] = (typename C::Factor)factors[d];
    // Codes are counted from their middle, which halves the rounding error.
    added = sum(exact) - C::MIDDLE * (rounded.step * (float)rounded.sum);
    return rounded.step;
}

// Scores s (records, BLOCK) for `count` keys with scales by channel, from slot `slot` on. `queries`
// (records, padded(width)) are floats in the order of the codes' lanes; `coded` is scratch memory
// of the same size, `some` of the size of s.
template <int BITS>
void channel_scores(const KvEncoded& x, int64_t row, int64_t head, int64_t slot, Rows keys,
                    Rows values, int64_t count, int64_t width, const float* queries,
                    int64_t records, float* s, float* coded, float* some) {
    typedef Codes<BITS> C;
    const int64_t stride = padded(width), loads = width / C::PIECE;
    float ones[BLOCK], scale[MOST_WIDTH], middle[MOST_WIDTH];
    for (float& one : ones) one = 1;
    each_channel_block(x.block, slot, count, [&](int64_t block, int64_t from, int64_t to) {
        const uint16_t* zeros = scales_of_block(x.zero, row, head, block);
        channels_in_lanes<BITS>(scales_of_block(x.scale, row, head, block), width, scale);
        if (zeros) {
            channels_in_lanes<BITS>(zeros, width, middle);
            count_from_middle(x, scale, width, middle);
        } else {
            memset(middle, 0, width * sizeof *middle);
        }
        const Rows own = {keys.at(from), keys.stride, keys.bytes};
        const Rows next = {values.at(from), values.stride, values.bytes};
        for_tiles<MOST_CODED_SCORES>(records, [&](int64_t first, auto tile) {
            constexpr int MT = tile.size;
            char* q = (char*)(coded + first * stride);
            v8 step[MT];
            for (int m = 0; m < MT; ++m) {
                float added;
                step[m] = v8{} + code_by_channel<BITS>(queries + (first + m) * stride, scale,
                                                       middle, width, q + m * 4 * stride, added);
                for (int64_t j = 0; j < to - from; j += W) store(some + m * BLOCK + j, all(added));
            }
            const int64_t passes = first ? 0 : (to - from + 3) / 4;
            const Lines ahead(next, first ? 0 : to - from, std::max<int64_t>(passes, 1));
            const auto run = [&](auto* tile_scores) {
                tile_scores(own, ahead, to - from, q, 4 * stride, loads, ones, ones, step, some);
            };
            if (loads == 1) run(unit_scores<BITS, MT, 1>);
            else if (loads == 2) run(unit_scores<BITS, MT, 2>);
            else run(unit_scores<BITS, MT, 0>);
            for (int m = 0; m < MT; ++m)
                memcpy(s + (first + m) * BLOCK + from, some + m * BLOCK,
                       (to - from) * sizeof *some);
        });
    });
}

}  // namespace
