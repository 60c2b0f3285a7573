// The weighted sum of a block's values.
#pragma once
#include "scores.h"

namespace {

// acc (MT rows of padded(width)) = acc * alpha + p (MT rows of BLOCK) . values, for PAIRS * 2 W
// elements from `d` on, of which `valid` exist. Slots are added in order, whatever MT is, so that a
// row of a batch equals the row alone.
template <class T, int MT, int PAIRS>
KV_INLINE void value_columns(Rows values, Rows next, int64_t count, int64_t width, int64_t d,
                             int64_t valid, const float* p, const float* alpha, float* acc) {
    typedef typename T::Element Element;
    constexpr int64_t BYTES = PAIRS * STEP * sizeof(Element);
    // In memory order if the rows are contiguous: the hardware prefetcher recognises that.
    const bool compact = next.stride == next.bytes;
    const char* ahead = next.first + d * sizeof(Element) * (compact ? count : 1);
    const int64_t ahead_step = compact ? BYTES : next.stride;
    const char* at = values.first + d * sizeof(Element);
    vf sum[MT][2 * PAIRS] = {};
    for (int64_t j = 0; j < count; ++j) {
        prefetch(ahead, BYTES);
        Pair value[PAIRS];
#pragma GCC unroll 4
        for (int t = 0; t < PAIRS; ++t)
            value[t] = valid < PAIRS * STEP ? read_end<Widened<T>>((const Element*)at, valid)
                                            : T::widen((const Element*)at + t * STEP);
#pragma GCC unroll 8
        for (int m = 0; m < MT; ++m) {
            const vf weight = all(p[m * BLOCK + j]);
#pragma GCC unroll 4
            for (int t = 0; t < PAIRS; ++t) {
                add_product(sum[m][2 * t], value[t].a, weight);
                add_product(sum[m][2 * t + 1], value[t].b, weight);
            }
        }
        ahead += ahead_step;
        at += values.stride;
    }
    const int64_t stride = padded(width);
#pragma GCC unroll 8
    for (int m = 0; m < MT; ++m) {
#pragma GCC unroll 8
        for (int t = 0; t < 2 * PAIRS; ++t) {
            float* to = acc + m * stride + d + t * W;
            store(to, load<vf>(to) * alpha[m] + sum[m][t]);
        }
    }
}

// Number of column pairs summed at once: enough sums to hide the latency of the multiply-add, and few
// enough to fit the registers.
constexpr int pairs_at_once(int queries) {
    return queries == 1 ? 4 : queries == 2 ? (W == 16 ? 4 : 2) : queries <= (W == 16 ? 6 : 3) ? 2 : 1;
}

template <class T, int MT>
KV_OUTLINE void value_tile(Rows values, Rows next, int64_t count, int64_t width, const float* p,
                           const float* alpha, float* acc) {
    constexpr int PAIRS = pairs_at_once(MT);
    int64_t d = 0;
    for (; d + PAIRS * STEP <= width; d += PAIRS * STEP)
        value_columns<T, MT, PAIRS>(values, next, count, width, d, PAIRS * STEP, p, alpha, acc);
    if (PAIRS > 1)
        for (; d + STEP <= width; d += STEP)
            value_columns<T, MT, 1>(values, next, count, width, d, STEP, p, alpha, acc);
    if (d < width)
        value_columns<T, MT, 1>(values, next, count, width, d, width - d, p, alpha, acc);
}

template <class T>
void add_values(Rows values, Rows next, int64_t count, int64_t width, int64_t records,
                const float* p, const float* alpha, float* acc) {
    const int64_t stride = padded(width);
    for_tiles<MOST_SUMS>(records, [&](int64_t from, auto tile) {
        value_tile<T, tile.size>(values, next, count, width, p + from * BLOCK, alpha + from,
                                 acc + from * stride);
    });
}

// Widens the values of a block to floats, (count, padded(width)), in order.
template <class T>
void widen(Rows values, Rows next, int64_t count, int64_t width, float* wide) {
    const int64_t stride = padded(width);
    for (int64_t j = 0; j < count; ++j) {
        const typename T::Element* row = (const typename T::Element*)values.at(j);
        float* to = wide + j * stride;
        prefetch(next.at(j), next.bytes);
        int64_t d = 0;
        for (; d + 8 <= width; d += 8) store(to + d, widen8<T>(row + d));
        for (; d < width; ++d) to[d] = T::widen1(row[d]);
    }
}

}  // namespace
