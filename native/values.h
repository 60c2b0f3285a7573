// The sum of a block's values, weighted.
#pragma once
#include "scores.h"

namespace {

// acc (MT rows of padded(width)) = acc * alpha + p (MT rows of BLOCK) . values, for PAIRS * 2 W
// elements from `d` on, of which `valid` exist.
template <class T, int MT, int PAIRS>
KV_INLINE void value_columns(Rows values, Rows next, int64_t count, int64_t width, int64_t d, int64_t valid,
                             const float* p, const float* alpha, float* acc) {
    typedef typename T::Element Element;
    vf sum[MT][2 * PAIRS] = {};
    for (int64_t j = 0; j < count; ++j) {
        const Element* row = (const Element*)values.at(j) + d;
#pragma GCC unroll 8
        for (int line = 0; line < PAIRS * STEP * (int)sizeof(Element); line += 64)
            __builtin_prefetch(next.at(j) + d * sizeof(Element) + line);
        Pair value[PAIRS];
#pragma GCC unroll 4
        for (int t = 0; t < PAIRS; ++t)
            value[t] = valid < PAIRS * STEP ? read_end<Widened<T>>(row, valid) : T::widen(row + t * STEP);
#pragma GCC unroll 8
        for (int m = 0; m < MT; ++m) {
            const vf weight = all(p[m * BLOCK + j]);
#pragma GCC unroll 4
            for (int t = 0; t < PAIRS; ++t) {
                sum[m][2 * t] += weight * value[t].a;
                sum[m][2 * t + 1] += weight * value[t].b;
            }
        }
    }
    const int64_t stride = padded(width);
#pragma GCC unroll 8
    for (int m = 0; m < MT; ++m) {
#pragma GCC unroll 8
        for (int t = 0; t < 2 * PAIRS; ++t) {
            float* at = acc + m * stride + d + t * W;
            store(at, load<vf>(at) * alpha[m] + sum[m][t]);
        }
    }
}

// How many pairs of columns are summed at once: enough sums to hide the latency of the multiply-add,
// few enough to stay in registers.
constexpr int pairs_at_once(int queries) {
    return queries == 1 ? 4 : queries == 2 ? (W == 16 ? 4 : 2) : queries <= 6 && W == 16 ? 2
           : queries == 3                  ? 2
                                           : 1;
}

template <class T, int MT>
void value_tile(Rows values, Rows next, int64_t count, int64_t width, const float* p, const float* alpha,
                float* acc) {
    constexpr int PAIRS = pairs_at_once(MT);
    int64_t d = 0;
    for (; d + PAIRS * STEP <= width; d += PAIRS * STEP)
        value_columns<T, MT, PAIRS>(values, next, count, width, d, PAIRS * STEP, p, alpha, acc);
    if (PAIRS > 1)
        for (; d + STEP <= width; d += STEP)
            value_columns<T, MT, 1>(values, next, count, width, d, STEP, p, alpha, acc);
    if (d < width) value_columns<T, MT, 1>(values, next, count, width, d, width - d, p, alpha, acc);
}

template <class T>
void add_values(Rows values, Rows next, int64_t count, int64_t width, int64_t records, const float* p,
                const float* alpha, float* acc) {
    constexpr int64_t MOST = W == 16 ? 8 : 6;  // sums for more would not stay in registers
    const int64_t tiles = (records + MOST - 1) / MOST, stride = padded(width);
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t from = records * tile / tiles, to = records * (tile + 1) / tiles;
        const auto run = [&](auto f) {
            f(values, next, count, width, p + from * BLOCK, alpha + from, acc + from * stride);
        };
        switch (to - from) {
            case 1: run(value_tile<T, 1>); break;
            case 2: run(value_tile<T, 2>); break;
            case 3: run(value_tile<T, 3>); break;
            case 4: run(value_tile<T, 4>); break;
            case 5: run(value_tile<T, 5>); break;
            case 6: run(value_tile<T, 6>); break;
            case 7: run(value_tile<T, 7>); break;
            default: run(value_tile<T, 8>); break;
        }
    }
}

// Values of a block as floats in order, (count, padded(width)).
template <class T>
void widen(Rows values, int64_t count, int64_t width, float* wide) {
    const int64_t stride = padded(width);
    for (int64_t j = 0; j < count; ++j) {
        const typename T::Element* row = (const typename T::Element*)values.at(j);
        float* to = wide + j * stride;
        int64_t d = 0;
        for (; d + 8 <= width; d += 8) store(to + d, widen8<T>(row + d));
        for (; d < width; ++d) to[d] = T::widen1(row[d]);
    }
}

}  // namespace
