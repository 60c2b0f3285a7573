// One run: scores, online softmax and the sum of values, straight over the slots where they lie.
//
// The slots pass by once, in blocks: the scores of a block, its softmax, its values. A key or value
// that was loaded serves all queries of a tile before the next is loaded. Sources: online softmax
// (arXiv 1805.02867), FlashAttention (arXiv 2205.14135), Flash-Decoding for the split over slots.
//
// Compiled once per instruction set, which KV_RUN names.
#include "kernel.h"

#include <cmath>

#include "simd.h"

namespace {

constexpr int64_t BLOCK = KV_BLOCK;
constexpr int64_t STEP = 2 * W;  // elements of a Pair

int64_t padded(int64_t width) { return (width + STEP - 1) / STEP * STEP; }

// -- keys ------------------------------------------------------------------------------------

// Keys widened to float, and queries in the order of their lanes.
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

#if defined(__AVX512BF16__)
// Keys as they are: the processor multiplies pairs of bfloat16 exactly, for bfloat16 queries.
struct Dotted {
    typedef BF16 Type;
    typedef vi Key;
    typedef uint16_t Query;
    KV_INLINE Key read(const uint16_t* x) { return load<vi>(x); }
    KV_INLINE vf add(vf sum, Key key, const uint16_t* q) {
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)key, (__m512bh)load<vi>(q));
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

// Read 2 W elements of which only the first `valid` may be touched.
template <class K>
KV_INLINE typename K::Key read_end(const typename K::Type::Element* x, int64_t valid) {
    typename K::Type::Element copy[STEP] = {};
    memcpy(copy, x, valid * sizeof *x);
    return K::read(copy);
}

KV_INLINE void prefetch(const char* row, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
}

// A plane's slots of one row and head, as bytes, so that code that only prefetches needs no type.
struct Rows {
    const char* first;
    int64_t stride, bytes;
    const char* at(int64_t slot) const { return first + slot * stride; }
};

// Scores of MT queries (stride padded(width)) on `count` keys -> s (MT rows of BLOCK). WIDTH is the
// width where it is one of the usual ones, else 0.
template <class K, int MT, int WIDTH>
void score_tile(Rows keys, Rows values, int64_t count, int64_t any_width,
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
#pragma GCC unroll 16
            for (int line = 0; line < KEYS * STEP * (int)sizeof(Element); line += 64)
                __builtin_prefetch(ahead + line);
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
    const int64_t tiles = (records + 7) / 8, q_stride = padded(width);
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t from = records * tile / tiles, to = records * (tile + 1) / tiles;
        const auto run = [&](auto f) {
            f(keys, values, count, width, q + from * q_stride, s + from * BLOCK);
        };
        switch (to - from) {
            case 1: run(score_tile<K, 1, WIDTH>); break;
            case 2: run(score_tile<K, 2, WIDTH>); break;
            case 3: run(score_tile<K, 3, WIDTH>); break;
            case 4: run(score_tile<K, 4, WIDTH>); break;
            case 5: run(score_tile<K, 5, WIDTH>); break;
            case 6: run(score_tile<K, 6, WIDTH>); break;
            case 7: run(score_tile<K, 7, WIDTH>); break;
            default: run(score_tile<K, 8, WIDTH>); break;
        }
    }
}

template <class K>
void scores(Rows keys, Rows values, int64_t count, int64_t width, const void* queries,
            int64_t records, float* s) {
    const typename K::Query* q = (const typename K::Query*)queries;
    switch (width) {
        case 64: scores_of_width<K, 64>(keys, values, count, width, q, records, s); break;
        case 128: scores_of_width<K, 128>(keys, values, count, width, q, records, s); break;
        default: scores_of_width<K, 0>(keys, values, count, width, q, records, s); break;
    }
}

// -- values ----------------------------------------------------------------------------------

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

// -- one block -------------------------------------------------------------------------------

// Turn a record's scores s (BLOCK) into weights, and say by what the sums before it shrink.
// `mask` (BLOCK) is -1 where a slot is seen; null where all are.
float softmax(const KvCall& call, float* s, int64_t count, const int32_t* mask, float* keep,
              float& top, float& total) {
    constexpr int VECTORS = BLOCK / W;
    const vf scale = all((float)call.scale), lowest = all(-INFINITY);
    for (int64_t j = count; j < BLOCK; ++j) s[j] = 0;  // else whatever lay there
    vf x[VECTORS], high = lowest;
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; ++i) x[i] = load<vf>(s + i * W) * scale;
    if (call.softcap != 0) {
        const float cap = (float)call.softcap;
        for (int i = 0; i < VECTORS; ++i) x[i] = tanh(x[i] * (1 / cap)) * cap;
    }
    if (mask) {
        for (int i = 0; i < VECTORS; ++i) x[i] = pick(load<vi>(mask + i * W), x[i], lowest);
    } else if (count < BLOCK) {
        for (int i = 0; i < VECTORS; ++i) store(s + i * W, x[i]);
        for (int64_t j = count; j < BLOCK; ++j) s[j] = -INFINITY;
        for (int i = 0; i < VECTORS; ++i) x[i] = load<vf>(s + i * W);
    }
    if (keep) {
        for (int i = 0; i < VECTORS; ++i) store(s + i * W, x[i]);
        memcpy(keep, s, count * sizeof *s);
    }
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; ++i) high = larger(x[i], high);
    const float block_top = largest(high);
    const float new_top = block_top > top ? block_top : top;
    const float base = new_top == -INFINITY ? 0.0f : new_top;
    vf added{};
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; ++i) {
        const vf weight = exp_down(x[i] - base);
        store(s + i * W, weight);
        added += weight;
    }
    const float alpha = new_top == top ? 1.0f : exp_down(all(top - base))[0];
    total = total * alpha + sum(added);
    top = new_top;
    return alpha;
}

enum Sight { NONE, SOME, ALL };

// Which slots of a block the tokens of a run see: a mask (tokens, BLOCK) for one row when only some.
Sight sight(const KvCall& call, const KvRun& run, int64_t row, int64_t slot0, int64_t count,
            int32_t* mask) {
    const KvSegment& segment = call.segments[run.segment];
    const int64_t tokens = run.query1 - run.query0;
    if (call.dense) {
        if (run.segment + 1 < call.segment_count) return ALL;
        const int64_t past = segment.slots - call.queries;  // token i sees slots 0..past + i
        if (slot0 + count <= past + run.query0 + 1) return ALL;
        if (slot0 > past + run.query1 - 1) return NONE;
        for (int64_t t = 0; t < tokens; ++t)
            for (int64_t j = 0; j < BLOCK; ++j)
                mask[t * BLOCK + j] = -(slot0 + j <= past + run.query0 + t);
        return SOME;
    }
    const KvPlane& plane = segment.position;
    const int32_t* place = (const int32_t*)plane.data + row * plane.row + run.head * plane.head;
    const int32_t* now = call.position + row * call.position_row;
    bool any = false, every = true;
    for (int64_t t = 0; t < tokens; ++t) {
        const int64_t query = now[run.query0 + t];
        for (int64_t j = 0; j < BLOCK; ++j) {
            const int64_t slot = j < count ? place[(slot0 + j) * plane.slot] : -1;
            bool seen = slot >= 0 && slot <= query;
            for (int64_t r = 0; r < call.reach_count; ++r)
                seen &= query - slot < call.reaches[r].size || slot < call.reaches[r].sinks;
            mask[t * BLOCK + j] = -(int32_t)seen;
            any |= seen;
            every &= seen || j >= count;
        }
    }
    return every ? ALL : any ? SOME : NONE;
}

// -- the run ---------------------------------------------------------------------------------

template <class F>
void with_type(int64_t type, F f) {
    switch (type) {
        case KV_F32: f(F32{}); break;
        case KV_BF16: f(BF16{}); break;
        default: f(F16{}); break;
    }
}

template <class K>
void load_queries(const KvCall& call, const KvRun& run, void* queries) {
    const KvPlane& plane = call.segments[run.segment].queries;
    const int64_t stride = padded(call.key_width);
    typename K::Query* q = (typename K::Query*)queries;
    memset(q, 0, kv_records(call, run) * stride * sizeof *q);
    with_type(plane.type, [&](auto type) {
        typedef decltype(type) T;
        for (int64_t row = run.row0; row < run.row1; ++row)
            for (int64_t g = 0; g < call.group; ++g)
                for (int64_t t = run.query0; t < run.query1; ++t, q += stride) {
                    const auto* x = (const typename T::Element*)plane.data + row * plane.row +
                                    (run.head * call.group + g) * plane.head + t * plane.slot;
                    for (int64_t i = 0; i < call.key_width; ++i)
                        q[K::lane(i)] = K::query(T::widen1(x[i]));
                }
    });
}

Rows rows_of(const KvPlane& plane, int64_t row, int64_t head, int64_t width) {
    const int64_t size = plane.type == KV_F32 ? 4 : 2;
    return {(const char*)plane.data + (row * plane.row + head * plane.head) * size,
            plane.slot * size, width * size};
}

template <class K, class V>
void attend(const KvCall& call, const KvRun& run, float* scratch) {
    const int64_t records = kv_records(call, run), tokens = run.query1 - run.query0;
    const int64_t per_row = call.group * tokens, value_stride = padded(call.value_width);
    const KvSegment& segment = call.segments[run.segment];
    float* queries = scratch;
    float* s = queries + records * padded(call.key_width);
    float* acc = s + records * BLOCK;
    float* alpha = acc + records * value_stride;
    float* top = alpha + records;
    float* total = top + records;
    int32_t* mask = (int32_t*)(total + records);  // (rows, tokens, BLOCK)
    load_queries<K>(call, run, queries);
    memset(acc, 0, records * value_stride * sizeof *acc);
    for (int64_t r = 0; r < records; ++r) top[r] = -INFINITY, total[r] = 0;

    const Rows keys = rows_of(segment.k, run.row0, run.head, call.key_width);
    const Rows values = rows_of(segment.v, run.row0, run.head, call.value_width);
    for (int64_t slot = run.slot0; slot < run.slot1; slot += BLOCK) {
        const int64_t count = run.slot1 - slot < BLOCK ? run.slot1 - slot : BLOCK;
        bool any = false, every = true;
        for (int64_t row = run.row0; row < run.row1; ++row) {
            int32_t* own = mask + (row - run.row0) * tokens * BLOCK;
            const Sight seen = sight(call, run, row, slot, count, own);
            any |= seen != NONE;
            every &= seen == ALL;
            if (call.dense) {  // the rows are alike
                for (int64_t i = tokens * BLOCK; i < (run.row1 - row) * tokens * BLOCK; ++i)
                    own[i] = own[i - tokens * BLOCK];
                break;
            }
        }
        if (!any) {
            if (run.scores)
                for (int64_t r = 0; r < records; ++r)
                    for (int64_t j = 0; j < count; ++j)
                        run.scores[r * (run.slot1 - run.slot0) + slot - run.slot0 + j] = -INFINITY;
            continue;
        }
        const Rows key = {keys.at(slot), keys.stride, keys.bytes};
        const Rows value = {values.at(slot), values.stride, values.bytes};
        scores<K>(key, value, count, call.key_width, queries, records, s);
        for (int64_t r = 0; r < records; ++r) {
            const int64_t owner = r / per_row * tokens + r % tokens;
            float* keep = run.scores;
            if (keep) keep += r * (run.slot1 - run.slot0) + slot - run.slot0;
            alpha[r] = softmax(call, s + r * BLOCK, count, every ? nullptr : mask + owner * BLOCK,
                               keep, top[r], total[r]);
        }
        const Rows next = {keys.at(slot + BLOCK), keys.stride, keys.bytes};
        add_values<V>(value, next, count, call.value_width, records, s, alpha, acc);
    }
    float* out = run.partial;
    for (int64_t r = 0; r < records; ++r) {
        for (int64_t i = 0; i < call.value_width; ++i)
            out[i] = acc[r * value_stride + Widened<V>::lane(i)];
        out[call.value_width] = top[r];
        out[call.value_width + 1] = total[r];
        out += call.value_width + 2;
    }
}

}  // namespace

void KV_RUN(const KvCall& call, const KvRun& run, float* scratch) {
    const KvSegment& segment = call.segments[run.segment];
    with_type(segment.v.type, [&](auto value) {
        typedef decltype(value) V;
#if defined(__AVX512BF16__)
        if (segment.k.type == KV_BF16 && segment.queries.type == KV_BF16)
            return attend<Dotted, V>(call, run, scratch);
#endif
        with_type(segment.k.type, [&](auto key) {
            attend<Widened<decltype(key)>, V>(call, run, scratch);
        });
    });
}
