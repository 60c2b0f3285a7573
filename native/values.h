// The weighted sum of a block's values.
#pragma once
#include "scores.h"

namespace {

// What to prefetch while the columns of a block are summed, STEP elements of each slot at a time:
// in memory order if the rows are contiguous, which the hardware prefetcher recognises.
struct Passed {
    const char* first;
    int64_t slot, step;  // bytes per slot, of rows that are apart; bytes per slot and step

    Passed(Rows rows, int64_t bytes, int64_t steps)
        : first(rows.first), slot(rows.stride == rows.bytes ? 0 : rows.stride),
          step(slot ? bytes / steps : std::min(rows.bytes, bytes) / steps) {}
    const char* at(int64_t done, int64_t count) const {
        return first + done * step * (slot ? 1 : count);
    }
    int64_t bytes(int64_t steps) const { return slot ? slot : steps * step; }
};

// acc (MT rows of padded(width)) = acc * alpha + p (MT rows of BLOCK) . values, for PAIRS * 2 W
// elements from `d` on, of which `valid` exist. Slots are added in order, whatever MT is, so that a
// row of a batch equals the row alone. Prefetches `next` if AHEAD.
template <class T, int MT, int PAIRS, bool AHEAD = true>
KV_INLINE void value_columns(Rows values, const char* ahead, int64_t ahead_step, int64_t count,
                             int64_t width, int64_t d, int64_t valid, const float* p,
                             const float* alpha, float* acc) {
    typedef typename T::Element Element;
    constexpr int64_t BYTES = PAIRS * STEP * sizeof(Element);
    const char* at = values.first + d * sizeof(Element);
    vf sum[MT][2 * PAIRS];
    each<MT * 2 * PAIRS>([&](auto i) KV_LAMBDA { sum[i / (2 * PAIRS)][i % (2 * PAIRS)] = vf{}; });
    for (int64_t j = 0; j < count; ++j) {
        if constexpr (AHEAD) prefetch(ahead, BYTES);
        Pair value[PAIRS];
        each<PAIRS>([&](auto t) KV_LAMBDA {
            value[t] = valid < PAIRS * STEP ? read_end<Widened<T>>((const Element*)at, valid)
                                            : T::widen((const Element*)at + t * STEP);
        });
        each<MT>([&](auto m) KV_LAMBDA {
            const vf weight = all(p[m * BLOCK + j]);
            each<PAIRS>([&](auto t) KV_LAMBDA {
                add_product(sum[m][2 * t], value[t].a, weight);
                add_product(sum[m][2 * t + 1], value[t].b, weight);
            });
        });
        ahead += ahead_step;
        at += values.stride;
    }
    const int64_t stride = padded(width);
    each<MT>([&](auto m) KV_LAMBDA {
        each<2 * PAIRS>([&](auto t) KV_LAMBDA {
            float* to = acc + m * stride + d + t * W;
            store(to, load<vf>(to) * alpha[m] + sum[m][t]);
        });
    });
}

// Number of column pairs summed at once: enough sums to hide the latency of the multiply-add, and
// few enough to fit the registers.
constexpr int pairs_at_once(int queries) {
    if (queries <= 2) return queries == 1 || W == 16 ? 4 : 2;
    return queries <= (W == 16 ? 6 : 3) ? 2 : 1;
}

template <class T, int MT>
KV_OUTLINE void value_tile(Rows values, Rows next, int64_t count, int64_t width, const float* p,
                           const float* alpha, float* acc) {
    constexpr int PAIRS = pairs_at_once(MT);
    const Passed ahead(next, width * sizeof(typename T::Element), (width + STEP - 1) / STEP);
    int64_t d = 0;
    const auto add = [&](auto pairs, int64_t valid) KV_LAMBDA {
        value_columns<T, MT, pairs.size>(values, ahead.at(d / STEP, count), ahead.bytes(pairs.size),
                                         count, width, d, valid, p, alpha, acc);
        d += pairs.size * STEP;
    };
    while (d + PAIRS * STEP <= width) add(Tile<PAIRS>{}, PAIRS * STEP);
    if (PAIRS > 1)
        while (d + STEP <= width) add(Tile<1>{}, STEP);
    if (d < width) add(Tile<1>{}, width - d);
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

// The elements from `d` to `end` - 1.
template <int MT>
KV_OUTLINE void float_tile(Rows values, int64_t count, int64_t width, int64_t d, int64_t end,
                           const float* p, const float* alpha, float* acc) {
    const auto add = [&](int64_t valid) KV_LAMBDA {
        value_columns<F32, MT, 1, false>(values, nullptr, 0, count, width, d, valid, p, alpha, acc);
    };
    for (; d + STEP <= end; d += STEP) add(STEP);
    if (d < end) add(end - d);
}

// As add_values, for many queries and values that are floats: 64 elements of all values stay in the
// first-level cache while all records are added.
[[maybe_unused]] void add_floats(Rows values, Rows next, int64_t count, int64_t width,
                                 int64_t records, const float* p, const float* alpha, float* acc) {
    constexpr int64_t COLUMNS = 64;
    const int64_t stride = padded(width), tiles = (records + MOST_SUMS - 1) / MOST_SUMS;
    Lines ahead(next, count, (width + COLUMNS - 1) / COLUMNS * tiles);
    for (int64_t first = 0; first < width; first += COLUMNS)
        for_tiles<MOST_SUMS>(records, [&](int64_t from, auto tile) {
            Lines::pass(ahead);
            float_tile<tile.size>(values, count, width, first, std::min(first + COLUMNS, width),
                                  p + from * BLOCK, alpha + from, acc + from * stride);
        });
}

// Floats from one row of widened slots to the next: an odd number of cache lines, so that adjacent
// elements of all slots fit the first-level cache.
inline int64_t apart(int64_t width) { return padded(width) | 16; }

// Widens the slots of a block to floats, in order.
template <class T>
Rows widen(Rows slots, int64_t count, int64_t width, float* wide) {
    const int64_t stride = apart(width);
    for (int64_t j = 0; j < count; ++j) {
        const typename T::Element* row = (const typename T::Element*)slots.at(j);
        float* to = wide + j * stride;
        int64_t d = 0;
        for (; d + 8 <= width; d += 8) store(to + d, widen8<T>(row + d));
        for (; d < width; ++d) to[d] = T::widen1(row[d]);
    }
    return {(const char*)wide, stride * (int64_t)sizeof(float), width * (int64_t)sizeof(float)};
}

}  // namespace
