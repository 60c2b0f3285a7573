// The scores of a block: products of queries and keys.
#pragma once
#include <algorithm>

#include "rows.h"

namespace {

// Keys widened to float, with queries in the order of the keys' lanes.
template <class T>
struct Widened {
    typedef T Type;
    typedef Pair Key;
    typedef float Query;
    KV_INLINE Key read(const typename T::Element* x) { return T::widen(x); }
    KV_INLINE vf add(vf sum, Key key, const float* q) {
        return sum + key.a * load<vf>(q) + key.b * load<vf>(q + W);
    }
    static int64_t lane(int64_t i) { return i / STEP * STEP + T::lane((int)(i % STEP)); }
    static float query(float x) { return x; }
};

#if defined(KV_BF16_PAIRS)
// bfloat16 keys and queries without widening: the processor multiplies pairs of bfloat16 exactly.
struct Dotted {
    typedef BF16 Type;
    typedef vi Key;
    typedef uint16_t Query;
    KV_INLINE Key read(const uint16_t* x) { return load<vi>(x); }
    KV_INLINE vf add(vf sum, Key key, const uint16_t* q) {
        return add_pairs(sum, key, load<vi>(q));
    }
    static int64_t lane(int64_t i) { return i; }
    static uint16_t query(float x) { return BF16::narrow1(x); }
};
#endif

constexpr int keys_at_once(int queries) {
    int keys = W;
    while (keys * queries > W) keys /= 2;
    return keys;
}

// Scores of MT queries (stride padded(width)) for `count` keys -> s (MT rows of BLOCK). WIDTH is
// the width if it is a common width, else 0.
template <class K, int MT, int WIDTH>
KV_OUTLINE void score_tile(Rows keys, Rows ahead, int64_t count, int64_t any_width,
                const typename K::Query* q, float* s) {
    const int64_t width = WIDTH ? WIDTH : any_width;
    typedef typename K::Type::Element Element;
    constexpr int KEYS = keys_at_once(MT);
    const int64_t q_stride = padded(width), whole = width / STEP * STEP;
    const bool compact = ahead.stride == ahead.bytes;
    // Of contiguous rows, each step prefetches its share.
    const int64_t pace = std::min<int64_t>(KEYS * STEP * ahead.bytes / width,
                                           KEYS * STEP * sizeof(Element));
    const char* next = ahead.first;
    for (int64_t j = 0; j < count; j += KEYS) {
        const Element* row[KEYS];
#pragma GCC unroll 16
        for (int i = 0; i < KEYS; ++i) {
            const int64_t slot = j + i < count ? j + i : count - 1;
            row[i] = (const Element*)keys.at(slot);
            if (!compact) prefetch(ahead.at(slot), ahead.bytes);
        }
        vf sum[W];
        each<W>([&](auto i) KV_LAMBDA { sum[i] = vf{}; });
        const auto add = [&](int64_t d, auto read) KV_LAMBDA {
            each<KEYS>([&](auto i) KV_LAMBDA {
                const typename K::Key key = read(row[i] + d);
                each<MT>([&](auto m) KV_LAMBDA {
                    vf& at = sum[place(m * KEYS + i)];
                    at = K::add(at, key, q + m * q_stride + d);
                });
            });
        };
        for (int64_t d = 0; d < whole; d += STEP) {
            prefetch(next, KEYS * STEP * sizeof(Element));
            next += pace;
            add(d, [](const Element* x) KV_LAMBDA { return K::read(x); });
        }
        if (whole < width)
            add(whole, [&](const Element* x) KV_LAMBDA { return read_end<K>(x, width - whole); });
        float out[W];
        store(out, sums(sum));
#pragma GCC unroll 8
        for (int m = 0; m < MT; ++m) memcpy(s + m * BLOCK + j, out + m * KEYS, KEYS * 4);
    }
}

template <class K, int WIDTH>
void scores_of_width(Rows keys, Rows ahead, int64_t count, int64_t width,
                     const typename K::Query* q, int64_t records, float* s) {
    for_tiles<8>(records, [&](int64_t from, auto tile) {
        score_tile<K, tile.size, WIDTH>(keys, ahead, count, width, q + from * padded(width),
                                        s + from * BLOCK);
    });
}

// The scores of `count` keys; `ahead` is prefetched meanwhile.
template <class K>
void scores(Rows keys, Rows ahead, int64_t count, int64_t width, const void* queries,
            int64_t records, float* s) {
    const typename K::Query* q = (const typename K::Query*)queries;
    switch (width) {
        case 64: scores_of_width<K, 64>(keys, ahead, count, width, q, records, s); break;
        case 128: scores_of_width<K, 128>(keys, ahead, count, width, q, records, s); break;
        default: scores_of_width<K, 0>(keys, ahead, count, width, q, records, s); break;
    }
}

// -- many queries ----------------------------------------------------------------------------

// With many queries no sums across lanes are needed if each lane holds a different query: queries
// are transposed, once for all blocks, and each element of a key is repeated in all lanes. Keys are
// floats, of which the values may be the first elements.

constexpr int64_t MANY = 16;             // number of records from which transposing pays
constexpr int64_t DEPTH = 4096 / STEP;  // elements of STEP queries that the first-level cache holds

// s (MT rows, `s_step` apart) = rows (MT, width) . columns (width, V W), whose rows are `step`
// apart; added to s if `more`. Products are added in the order of the elements, whatever MT is.
template <int MT, int V>
KV_OUTLINE void column_tile(Rows rows, int64_t width, const float* columns, int64_t step, bool more,
                            float* s, int64_t s_step) {
    vf sum[MT][V];
    const float* row[MT];
    each<MT>([&](auto m) KV_LAMBDA {
        row[m] = (const float*)rows.at(m);
        each<V>([&](auto v) KV_LAMBDA {
            sum[m][v] = more ? load<vf>(s + m * s_step + v * W) : vf{};
        });
    });
    for (int64_t d = 0; d < width; ++d, columns += step) {
        vf x[V];
        each<V>([&](auto v) KV_LAMBDA { x[v] = load<vf>(columns + v * W); });
        each<MT>([&](auto m) KV_LAMBDA {
            const vf repeated = all(row[m][d]);
            each<V>([&](auto v) KV_LAMBDA { add_product(sum[m][v], repeated, x[v]); });
        });
    }
    each<MT>([&](auto m) KV_LAMBDA {
        each<V>([&](auto v) KV_LAMBDA { store(s + m * s_step + v * W, sum[m][v]); });
    });
}

// Rows (count, width) -> columns (width, BLOCK).
[[maybe_unused]] void transpose(Rows rows, int64_t count, int64_t width, float* columns) {
    for (int64_t j = 0; j < count; j += 8) {
        const float* row[8];
        for (int i = 0; i < 8; ++i) row[i] = (const float*)rows.at(std::min(j + i, count - 1));
        int64_t d = 0;
        for (; d + 8 <= width; d += 8) {
            v8 square[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) square[i] = load<v8>(row[i] + d);
            transpose8(square);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) store(columns + (d + i) * BLOCK + j, square[i]);
        }
        for (; d < width; ++d)
            for (int i = 0; i < 8; ++i) columns[d * BLOCK + j + i] = row[i][d];
    }
}

// The queries that are side by side in memory: STEP of them, or W if no more are left. Those from
// record `from` on (a multiple of STEP) begin at queries + from * padded(width).
constexpr int64_t side_by_side(int64_t from, int64_t records) {
    return records - from > W ? STEP : W;
}

// s (records, BLOCK) = products of transposed queries and keys, which are floats. `memory`
// (BLOCK, STEP).
[[maybe_unused]] void scores_of_many(Rows keys, Rows next, int64_t count, int64_t width,
                                     const float* queries, int64_t records, float* s,
                                     float* memory) {
    const int64_t panels = (records + STEP - 1) / STEP, depths = (width + DEPTH - 1) / DEPTH;
    const int64_t tiles = (count + MOST_SUMS - 1) / MOST_SUMS;
    Lines ahead(next, count, panels * depths * tiles);
    for (int64_t from = 0; from < records; from += STEP) {
        const float* panel = queries + from * padded(width);
        const int64_t own = side_by_side(from, records);
        for (int64_t d = 0; d < width; d += DEPTH) {
            const int64_t depth = std::min(DEPTH, width - d);
            for_tiles<MOST_SUMS>(count, [&](int64_t j, auto tile) {
                const Rows rows = {keys.at(j) + d * sizeof(float), keys.stride, keys.bytes};
                Lines::pass(ahead);
                (own == STEP ? column_tile<tile.size, 2> : column_tile<tile.size, 1>)(
                    rows, depth, panel + d * own, own, d > 0, memory + j * STEP, STEP);
            });
        }
        for (int64_t i = 0; i < own; i += 8)
            for (int64_t j = 0; j < count; j += 8) {
                v8 square[8];
#pragma GCC unroll 8
                for (int k = 0; k < 8; ++k) square[k] = load<v8>(memory + (j + k) * STEP + i);
                transpose8(square);
#pragma GCC unroll 8
                for (int k = 0; k < 8; ++k) store(s + (from + i + k) * BLOCK + j, square[k]);
            }
    }
}

}  // namespace
