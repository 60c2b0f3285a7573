// Scores and sums of values from plain bfloat16 by products of pairs (AVX512_BF16), for bfloat16
// queries. Weights are rounded to bfloat16 too, an error of at most 2^-9 each, as in the result.
#pragma once
#include "lanes.h"
#include "values.h"

#if defined(KV_BF16_PAIRS)
namespace {

// -- scores by lanes -------------------------------------------------------------------------

constexpr int MOST_LANE_SCORES = 8;

// Whether to shuffle keys, once for a tile of queries, instead of adding up lanes for each query.
// All queries are of one row, so that a row of a batch equals the row alone.
inline bool by_lanes(int64_t width, int64_t queries) {
    return queries >= 5 || (queries >= 3 && width <= 64);
}

// Stores query m of a tile in the memory of padded(width) floats each: for each pair, all queries
// side by side. Its elements x(i) are bfloat16 values, so their high halves are exact.
template <class X>
void set_lane_query(float* queries, int64_t tile, int64_t m, int64_t width, X x) {
    const auto bits = [&](int64_t i) {
        const float element = x(i);
        return load<uint32_t>(&element);
    };
    uint32_t* to = (uint32_t*)queries + m;
    int64_t i = 0;
    for (; i + 2 <= width; i += 2, to += tile) *to = bits(i) >> 16 | (bits(i + 1) & 0xffff0000);
    if (i < width) *to = bits(i) >> 16;
}

template <int MT>
KV_OUTLINE void lane_scores(Rows keys, Lines ahead, int64_t count, const float* queries, float* s) {
    for (int64_t j = 0; j < count; j += 16) {
        const char* at = keys.at(j);
        const uint16_t* q = (const uint16_t*)queries;
        vf sum[MT] = {};
        vi next[2][4];
        load_pieces(at, keys.stride, next);
        for (int64_t byte = 0; byte < keys.bytes; byte += 32) {
            // The next pieces are shuffled while the current ones are multiplied.
            vi x[2][4];
            memcpy(x, next, sizeof x);
            Lines::pass(ahead);
            load_pieces(at + (byte + 32 < keys.bytes ? byte + 32 : byte), keys.stride, next);
#pragma GCC unroll 2
            for (int c = 0; c < 2; ++c) {
                transpose_quads(x[c]);
                const uint16_t* pairs = opaque(q);
#pragma GCC unroll 4
                for (int n = 0; n < 4; ++n)
#pragma GCC unroll 8
                    for (int m = 0; m < MT; ++m)
                        add_pair(sum[m], x[c][n], pairs + (n * MT + m) * 2);
                q += 4 * MT * 2;
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < MT; ++m) store(s + m * BLOCK + j, sum[m]);
    }
}

// -- values ----------------------------------------------------------------------------------

// The index of an element's sum: see pair_columns.
inline int64_t pair_lane(int64_t element) {
    return element / 32 * 32 + element % 8 / 4 * 16 + element % 32 / 8 * 4 + element % 4;
}

// acc = acc * alpha + weights . values, for N times 32 elements from `d` on, of which `valid`
// exist, for MT records. A pair is one element of two slots.
template <int MT, int N>
KV_INLINE void pair_columns(Rows values, Rows next, int64_t count, int64_t width, int64_t d,
                            int64_t valid, const uint16_t (&weights)[MT][BLOCK],
                            const float* alpha, float* acc) {
    constexpr int64_t BYTES = N * 64;
    // As in value_columns: in memory order if the rows are contiguous.
    const bool compact = next.stride == next.bytes;
    const char* ahead = next.first + d * 2 * (compact ? count : 1);
    const int64_t ahead_step = compact ? BYTES : next.stride;
    vf sum[MT][N][2] = {};
    const char* at = values.first + d * 2;
    for (int64_t j = 0; j < count; j += 2, at += 2 * values.stride) {
        // If the number of slots is odd, the last slot is paired with zeros: its own numbers may be
        // infinite, which a weight of 0 would not cancel.
        static const uint16_t zeros[N * 32] = {};
        const char* other = j + 1 < count ? at + values.stride : (const char*)zeros;
        prefetch(ahead, BYTES), prefetch(ahead + ahead_step, BYTES);
        ahead += 2 * ahead_step;
        const uint16_t* w = opaque(weights[0] + j);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            u16x32 a, b;
            if (valid < N * 32) {
                a = b = u16x32{};
                memcpy(&a, at, valid * 2), memcpy(&b, other, valid * 2);
            } else {
                a = load<u16x32>(at + n * 64), b = load<u16x32>(other + n * 64);
            }
            const vi low = (vi)__builtin_shufflevector(
                a, b, 0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43, 16, 48, 17, 49, 18,
                50, 19, 51, 24, 56, 25, 57, 26, 58, 27, 59);
            const vi high = (vi)__builtin_shufflevector(
                a, b, 4, 36, 5, 37, 6, 38, 7, 39, 12, 44, 13, 45, 14, 46, 15, 47, 20, 52, 21, 53,
                22, 54, 23, 55, 28, 60, 29, 61, 30, 62, 31, 63);
#pragma GCC unroll 8
            for (int m = 0; m < MT; ++m) {
                add_pair(sum[m][n][0], low, w + m * BLOCK);
                add_pair(sum[m][n][1], high, w + m * BLOCK);
            }
        }
    }
    const int64_t stride = padded(width);
#pragma GCC unroll 8
    for (int m = 0; m < MT; ++m)
#pragma GCC unroll 8
        for (int n = 0; n < 2 * N; ++n) {
            float* to = acc + m * stride + d + n * 16;
            store(to, load<vf>(to) * alpha[m] + sum[m][n / 2][n % 2]);
        }
}

template <int MT>
KV_OUTLINE void pair_values(Rows values, Rows next, int64_t count, int64_t width, const float* p,
                            const float* alpha, float* acc) {
    constexpr int N = MT <= 3 ? 4 : MT <= 6 ? 2 : 1;  // as many as have sums in registers
    alignas(64) uint16_t weights[MT][BLOCK];
    for (int m = 0; m < MT; ++m)
        for (int64_t j = 0; j < BLOCK; j += 2 * W) narrow_pairs(p + m * BLOCK + j, weights[m] + j);
    int64_t d = 0;
    const auto run = [&](auto size) __attribute__((always_inline)) {
        constexpr int SIZE = decltype(size)::size;
        for (; d + SIZE * 32 <= width; d += SIZE * 32)
            pair_columns<MT, SIZE>(values, next, count, width, d, SIZE * 32, weights, alpha, acc);
    };
    run(Tile<N>{});
    if constexpr (N > 2) run(Tile<2>{});
    if constexpr (N > 1) run(Tile<1>{});
    if (d < width)
        pair_columns<MT, 1>(values, next, count, width, d, width - d, weights, alpha, acc);
}

void add_pair_values(Rows values, Rows next, int64_t count, int64_t width, int64_t records,
                     const float* p, const float* alpha, float* acc) {
    for_tiles<8>(records, [&](int64_t from, auto tile) {
        pair_values<tile.size>(values, next, count, width, p + from * BLOCK, alpha + from,
                               acc + from * padded(width));
    });
}

}  // namespace
#endif
