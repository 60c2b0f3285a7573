// Scores and sums of values from plain bfloat16 by products of pairs (AVX512_BF16), for bfloat16
// queries. Weights are rounded to bfloat16 too, an error of at most 2^-9 each, as in the result.
#pragma once
#include <algorithm>

#include "lanes.h"
#if defined(KV_TILES)
#include "tiles.h"
#endif
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

// Pairs of the same element of two slots, for 32 elements, in the order of pair_lane.
KV_INLINE void interleave(u16x32 a, u16x32 b, vi (&pairs)[2]) {
    pairs[0] =
        (vi)__builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43,
                                    16, 48, 17, 49, 18, 50, 19, 51, 24, 56, 25, 57, 26, 58, 27, 59);
    pairs[1] = (vi)__builtin_shufflevector(a, b, 4, 36, 5, 37, 6, 38, 7, 39, 12, 44, 13, 45, 14, 46,
                                           15, 47, 20, 52, 21, 53, 22, 54, 23, 55, 28, 60, 29, 61,
                                           30, 62, 31, 63);
}

// Elements from one record's bfloat16 weights to the next.
constexpr int64_t NARROW_STEP = 2 * BLOCK;

// Replaces a record's weights (BLOCK) by weights rounded to bfloat16.
KV_INLINE void narrow_weights(float* p) {
    for (int64_t j = 0; j < BLOCK; j += 2 * W) narrow_pairs(p + j, (uint16_t*)p + j);
}

// acc = acc * alpha + weights . values, for N times 32 elements from `d` on, of which `valid`
// exist, for MT records. A pair is one element of two slots.
template <int MT, int N>
KV_INLINE void pair_columns(Rows values, Rows next, int64_t count, int64_t width, int64_t d,
                            int64_t valid, const uint16_t* weights, const float* alpha,
                            float* acc) {
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
        const uint16_t* w = opaque(weights + j);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            u16x32 a, b;
            if (N == 1 && valid < 32) {
                a = b = u16x32{};
                memcpy(&a, at, valid * 2), memcpy(&b, other, valid * 2);
            } else {
                a = load<u16x32>(at + n * 64), b = load<u16x32>(other + n * 64);
            }
            vi pairs[2];
            interleave(a, b, pairs);
#pragma GCC unroll 8
            for (int m = 0; m < MT; ++m) {
                add_pair(sum[m][n][0], pairs[0], w + m * NARROW_STEP);
                add_pair(sum[m][n][1], pairs[1], w + m * NARROW_STEP);
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
KV_OUTLINE void pair_values(Rows values, Rows next, int64_t count, int64_t width,
                            const uint16_t* weights, const float* alpha, float* acc) {
    constexpr int N = MT <= 3 ? 4 : MT <= 6 ? 2 : 1;  // as many as have sums in registers
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
                     const uint16_t* weights, const float* alpha, float* acc) {
    for_tiles<8>(records, [&](int64_t from, auto tile) {
        pair_values<tile.size>(values, next, count, width, weights + from * NARROW_STEP,
                               alpha + from, acc + from * padded(width));
    });
}

// -- many queries ----------------------------------------------------------------------------

// For many queries the keys and values of a block are shuffled once, to rows of COLUMNS lanes: a
// row of keys is one pair of elements of all slots, a row of values one pair of slots of all
// elements. Scores and sums are then the same product of matrices. Its sums have the order of
// lane_scores and pair_columns, so results do not depend on the number of queries.
constexpr int MOST_PACKED = 6;  // queries whose sums fit the registers
constexpr int COLUMNS = 4;      // vectors; BLOCK lanes

inline vi* aligned(float* memory) { return (vi*)(((uintptr_t)memory + 63) / 64 * 64); }

// sum[m] = rows of `a` (MT rows of pairs, `stride` elements apart) . rows of `b` (pairs, N vectors,
// `step` vectors apart).
template <int MT, int N>
KV_INLINE void multiply_pairs(const uint16_t* a, int64_t stride, int64_t pairs, const vi* b,
                              int64_t step, vf (&sum)[MT][N]) {
    for (int64_t p = 0; p < pairs; ++p, a += 2, b += step) {
        vi x[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) x[n] = b[n];
#pragma GCC unroll 8
        for (int m = 0; m < MT; ++m) {
            const vi one = load<int32_t>(a + m * stride) - vi{};
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) add_both(sum[m][n], x[n], one);
        }
    }
}

// Rows of a packed block come in multiples of PACKED_ROWS, padded with zeros.
constexpr int64_t PACKED_ROWS = 16;
constexpr int64_t packed_rows(int64_t rows) {
    return (rows + PACKED_ROWS - 1) / PACKED_ROWS * PACKED_ROWS;
}

// Keys in units of 32 bytes and groups of 16 slots -> (pairs, COLUMNS vectors).
void pack_keys(Rows keys, Lines ahead, int64_t count, vi* to) {
    const int64_t rows = keys.bytes / 4;
    memset(to + rows * COLUMNS, 0, (packed_rows(rows) - rows) * COLUMNS * sizeof *to);
    for (int64_t j = 0; j < count; j += 16)
        for (int64_t byte = 0; byte < keys.bytes; byte += 32) {
            vi x[2][4];
            Lines::pass(ahead);
            load_pieces(keys.at(j) + byte, keys.stride, x);
#pragma GCC unroll 2
            for (int c = 0; c < 2; ++c) {
                transpose_quads(x[c]);
#pragma GCC unroll 4
                for (int n = 0; n < 4; ++n)
                    to[(byte / 4 + c * 4 + n) * COLUMNS + j / 16] = x[c][n];
            }
        }
}

template <int MT>
KV_OUTLINE void packed_scores(const vi* keys, int64_t pairs, const uint16_t* q, int64_t stride,
                              float* s) {
    vf sum[MT][COLUMNS] = {};
    multiply_pairs<MT, COLUMNS>(q, stride, pairs, keys, COLUMNS, sum);
#pragma GCC unroll 8
    for (int m = 0; m < MT; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < COLUMNS; ++n) store(s + m * BLOCK + n * W, sum[m][n]);
}

// Values -> (pairs of slots, padded(width) / W vectors).
void pack_values(Rows values, Rows next, int64_t count, int64_t width, vi* to) {
    const auto read = [&](int64_t slot, int64_t d) {
        u16x32 x{};
        if (slot >= count) return x;  // see pair_columns
        const char* from = values.at(slot) + d * 2;
        if (d + 32 <= width) return load<u16x32>(from);
        memcpy(&x, from, (width - d) * 2);
        return x;
    };
    for (int64_t j = 0; j < count; j += 2) {
        prefetch(next.at(j), next.bytes), prefetch(next.at(j + 1), next.bytes);
        for (int64_t d = 0; d < width; d += 32, to += 2) {
            vi pairs[2];
            interleave(read(j, d), read(j + 1, d), pairs);
            memcpy(to, pairs, sizeof pairs);
        }
    }
    const int64_t rows = (count + 1) / 2;
    memset(to, 0, (packed_rows(rows) - rows) * (padded(width) / W) * sizeof *to);
}

// acc = acc * alpha + weights . values, for MT records.
template <int MT>
KV_OUTLINE void packed_values(const vi* values, int64_t count, int64_t width,
                              const uint16_t* weights, const float* alpha, float* acc) {
    const int64_t stride = padded(width), step = stride / W;
    const auto run = [&](int64_t d, auto size) __attribute__((always_inline)) {
        constexpr int N = decltype(size)::size;
        vf sum[MT][N] = {};
        multiply_pairs<MT, N>(weights, NARROW_STEP, (count + 1) / 2, values + d / W, step, sum);
#pragma GCC unroll 8
        for (int m = 0; m < MT; ++m)
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
                float* to = acc + m * stride + d + n * W;
                store(to, load<vf>(to) * alpha[m] + sum[m][n]);
            }
    };
    int64_t d = 0;
    for (; d + COLUMNS * W <= stride; d += COLUMNS * W) run(d, Tile<COLUMNS>{});
    if (d < stride) run(d, Tile<COLUMNS / 2>{});
}

#if defined(KV_TILES)
// -- on tiles --------------------------------------------------------------------------------

// The product of groups of 16 records (`stride` elements apart) with rows of pairs (`step` vectors
// apart), for `columns` vectors, written or added to the records of `out`, `width` floats apart.
template <bool ADD>
void multiply_groups(const uint16_t* a, int64_t stride, int64_t pairs, const vi* b, int64_t step,
                     int64_t columns, int64_t records, float* out, int64_t width) {
    for (int64_t r = 0; r < records; r += 2 * TILE_ROWS) {
        const bool both = records - r > TILE_ROWS;
        const auto multiply = both ? multiply_tiles<true, ADD> : multiply_tiles<false, ADD>;
        const uint16_t* first = a + r * stride;
        float* to = out + r * width;
        for (int64_t n = 0; n < columns; n += 2)
            multiply(first, first + TILE_ROWS * stride, stride * 2, pairs, b + n, step * sizeof *b,
                     to + n * W, to + TILE_ROWS * width + n * W, width);
    }
}

void tile_scores(const vi* keys, int64_t pairs, const uint16_t* q, int64_t stride, int64_t records,
                 float* s) {
    multiply_groups<false>(q, stride, pairs, keys, COLUMNS, COLUMNS, records, s, BLOCK);
}

// acc = acc * alpha + weights . values.
void tile_values(const vi* values, int64_t count, int64_t width, const uint16_t* weights,
                 const float* alpha, int64_t records, float* acc) {
    const int64_t stride = padded(width), step = stride / W;
    for (int64_t r = 0; r < records; ++r) {
        if (alpha[r] == 1.0f) continue;
        for (int64_t d = 0; d < stride; d += W) {
            float* to = acc + r * stride + d;
            store(to, load<vf>(to) * alpha[r]);
        }
    }
    multiply_groups<true>(weights, NARROW_STEP, packed_rows((count + 1) / 2), values, step, step,
                          records, acc, stride);
}
#endif

}  // namespace
#endif
