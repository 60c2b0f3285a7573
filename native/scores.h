// The scores of a block: products of queries and keys.
#pragma once
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
KV_OUTLINE void score_tile(Rows keys, Rows values, int64_t count, int64_t any_width,
                const typename K::Query* q, float* s) {
    const int64_t width = WIDTH ? WIDTH : any_width;
    typedef typename K::Type::Element Element;
    constexpr int KEYS = keys_at_once(MT);
    const int64_t q_stride = padded(width), whole = width / STEP * STEP;
    const bool compact = values.stride == values.bytes;
    for (int64_t j = 0; j < count; j += KEYS) {
        const Element* row[KEYS];
#pragma GCC unroll 16
        for (int i = 0; i < KEYS; ++i) {
            const int64_t slot = j + i < count ? j + i : count - 1;
            row[i] = (const Element*)keys.at(slot);
            if (!compact) prefetch(values.at(slot), values.bytes);
        }
        const char* ahead = values.at(j);
        vf sum[W] = {};
        for (int64_t d = 0; d < whole; d += STEP) {
            prefetch(ahead, KEYS * STEP * sizeof(Element));
            ahead += KEYS * STEP * sizeof(Element);
#pragma GCC unroll 16
            for (int i = 0; i < KEYS; ++i) {
                const typename K::Key key = K::read(row[i] + d);
#pragma GCC unroll 8
                for (int m = 0; m < MT; ++m) {
                    vf& at = sum[place(m * KEYS + i)];
                    at = K::add(at, key, q + m * q_stride + d);
                }
            }
        }
        if (whole < width) {
#pragma GCC unroll 16
            for (int i = 0; i < KEYS; ++i) {
                const typename K::Key key = read_end<K>(row[i] + whole, width - whole);
#pragma GCC unroll 8
                for (int m = 0; m < MT; ++m) {
                    vf& at = sum[place(m * KEYS + i)];
                    at = K::add(at, key, q + m * q_stride + whole);
                }
            }
        }
        float out[W];
        store(out, sums(sum));
#pragma GCC unroll 8
        for (int m = 0; m < MT; ++m) memcpy(s + m * BLOCK + j, out + m * KEYS, KEYS * 4);
    }
}

template <class K, int WIDTH>
void scores_of_width(Rows keys, Rows values, int64_t count, int64_t width,
                     const typename K::Query* q, int64_t records, float* s) {
    for_tiles<8>(records, [&](int64_t from, auto tile) {
        score_tile<K, tile.size, WIDTH>(keys, values, count, width, q + from * padded(width),
                                        s + from * BLOCK);
    });
}

template <class K>
void scores(K, Rows keys, Rows values, int64_t count, int64_t width, const void* queries,
            int64_t records, float* s, float*) {
    const typename K::Query* q = (const typename K::Query*)queries;
    switch (width) {
        case 64: scores_of_width<K, 64>(keys, values, count, width, q, records, s); break;
        case 128: scores_of_width<K, 128>(keys, values, count, width, q, records, s); break;
        default: scores_of_width<K, 0>(keys, values, count, width, q, records, s); break;
    }
}

// -- many queries ----------------------------------------------------------------------------

// With many queries it pays to transpose the keys of a block once: each lane then holds a different
// key, and no sums across lanes are needed.
template <class T>
struct Columns {
    typedef T Type;
    typedef float Query;
    static int64_t lane(int64_t i) { return i; }
    static float query(float x) { return x; }
};

constexpr int64_t MANY = 16;  // number of records from which transposing pays

// Keys (count, width) -> columns (width, BLOCK).
template <class T>
void turn(Rows keys, Rows values, int64_t count, int64_t width, float* columns) {
    for (int64_t j = 0; j < count; j += 8) {
        const typename T::Element* row[8];
        for (int i = 0; i < 8; ++i) {
            const int64_t slot = j + i < count ? j + i : count - 1;
            row[i] = (const typename T::Element*)keys.at(slot);
            prefetch(values.at(slot), values.bytes);
        }
        int64_t d = 0;
        for (; d + 8 <= width; d += 8) {
            v8 square[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) square[i] = widen8<T>(row[i] + d);
            transpose8(square);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) store(columns + (d + i) * BLOCK + j, square[i]);
        }
        for (; d < width; ++d)
            for (int i = 0; i < 8; ++i) columns[d * BLOCK + j + i] = T::widen1(row[i][d]);
    }
}

template <int MT>
KV_OUTLINE void column_tile(const float* columns, int64_t count, int64_t width, const float* q,
                            int64_t q_stride, float* s) {
    for (int64_t j = 0; j < count; j += STEP) {
        vf sum[MT][2] = {};
        for (int64_t d = 0; d < width; ++d) {
            const vf a = load<vf>(columns + d * BLOCK + j), b = load<vf>(columns + d * BLOCK + j + W);
#pragma GCC unroll 8
            for (int m = 0; m < MT; ++m) {
                const vf weight = all(q[m * q_stride + d]);
                add_product(sum[m][0], weight, a);
                add_product(sum[m][1], weight, b);
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < MT; ++m) {
            store(s + m * BLOCK + j, sum[m][0]);
            store(s + m * BLOCK + j + W, sum[m][1]);
        }
    }
}

template <class T>
void scores(Columns<T>, Rows keys, Rows values, int64_t count, int64_t width, const void* queries,
            int64_t records, float* s, float* columns) {
    const float* q = (const float*)queries;
    turn<T>(keys, values, count, width, columns);
    for_tiles<MOST_SUMS>(records, [&](int64_t from, auto tile) {
        column_tile<tile.size>(columns, count, width, q + from * padded(width), padded(width),
                               s + from * BLOCK);
    });
}

}  // namespace
