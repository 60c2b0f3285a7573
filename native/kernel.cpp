// One run: scores, online softmax and the sum of values, straight over the slots where they lie.
//
// The slots pass by once, in blocks: the scores of a block, its softmax, its values. A key or value
// that was loaded serves all queries of a tile before the next is loaded. Sources: online softmax
// (arXiv 1805.02867), FlashAttention (arXiv 2205.14135), Flash-Decoding for the split over slots.
//
// Compiled once per instruction set, which KV_RUN names.
#include "kernel.h"

#include <cmath>

#include "scores.h"
#include "values.h"

namespace {

// -- one block -------------------------------------------------------------------------------

// Scale a record's scores s (BLOCK), cap them, hide those `mask` (BLOCK) hides (-1 where a slot is
// seen; null where all are), and give the largest.
KV_INLINE float finish_scores(const KvCall& call, float* s, int64_t count, const int32_t* mask,
                              float* keep) {
    const vf scale = all((float)call.scale), lowest = all(-INFINITY);
    vf high = lowest;
    if (call.softcap != 0) {
        const float cap = (float)call.softcap;
        for (int64_t j = 0; j < count; j += W)
            store(s + j, tanh(load<vf>(s + j) * scale * (1 / cap)) * cap);
    } else {
#pragma GCC unroll 8
        for (int64_t j = 0; j < BLOCK; j += W) store(s + j, load<vf>(s + j) * scale);
    }
    for (int64_t j = count; j < BLOCK; ++j) s[j] = -INFINITY;
    if (mask)
        for (int64_t j = 0; j < BLOCK; j += W)
            store(s + j, pick(load<vi>(mask + j), load<vf>(s + j), lowest));
    if (keep) memcpy(keep, s, count * sizeof *s);
#pragma GCC unroll 8
    for (int64_t j = 0; j < BLOCK; j += W) high = larger(load<vf>(s + j), high);
    return largest(high);
}

// Turn a record's scores s (BLOCK) into weights; returns their sum.
KV_INLINE float weigh(float* s, float base) {
    vf added{};
#pragma GCC unroll 2
    for (int64_t j = 0; j < BLOCK; j += W) {
        const vf weight = exp_down(load<vf>(s + j) - base);
        store(s + j, weight);
        added += weight;
    }
    return sum(added);
}

// Turn the scores of a block into weights (records, BLOCK), and say by what earlier sums shrink
// (alpha). In two rounds, so that no record waits for another's reductions. `mask_of(r)` is null
// where the record sees all.
template <class Mask>
void softmax(const KvCall& call, int64_t records, float* s, int64_t count, Mask mask_of,
             float* keep, int64_t keep_stride, float* alpha, float* top, float* total) {
    for (int64_t r = 0; r < records; ++r) {
        const float high = finish_scores(call, s + r * BLOCK, count, mask_of(r),
                                         keep ? keep + r * keep_stride : nullptr);
        const float new_top = high > top[r] ? high : top[r];
        alpha[r] = new_top == top[r] ? 0.0f : top[r] - new_top;
        top[r] = new_top;
    }
    for (int64_t r = 0; r < records; r += W) {
        const int64_t some = records - r < W ? records - r : W;
        vf x{};
        memcpy(&x, alpha + r, some * sizeof *alpha);
        x = exp_down(x);
        memcpy(alpha + r, &x, some * sizeof *alpha);
    }
    for (int64_t r = 0; r < records; ++r) {
        const float base = top[r] == -INFINITY ? 0.0f : top[r];
        total[r] = total[r] * alpha[r] + weigh(s + r * BLOCK, base);
    }
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
    float* columns = total + records;
    float* wide = columns + BLOCK * padded(call.key_width);  // (BLOCK, value_stride)
    int32_t* mask = (int32_t*)(wide + BLOCK * value_stride);  // (rows, tokens, BLOCK)
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
        scores(K{}, key, value, count, call.key_width, queries, records, s, columns);
        const auto mask_of = [&](int64_t r) -> const int32_t* {
            return every ? nullptr : mask + (r / per_row * tokens + r % tokens) * BLOCK;
        };
        float* keep = run.scores ? run.scores + slot - run.slot0 : nullptr;
        softmax(call, records, s, count, mask_of, keep, run.slot1 - run.slot0, alpha, top, total);
        const Rows next = {keys.at(slot + BLOCK), keys.stride, keys.bytes};
        if (K::KEEPS_WIDE) {
            // Widened once for all tiles of queries.
            widen<V>(value, next, count, call.value_width, wide);
            const Rows rows = {(const char*)wide, value_stride * 4, call.value_width * 4};
            add_values<F32>(rows, rows, count, call.value_width, records, s, alpha, acc);
            continue;
        }
        add_values<V>(value, next, count, call.value_width, records, s, alpha, acc);
    }
    float* out = run.partial;
    for (int64_t r = 0; r < records; ++r) {
        for (int64_t i = 0; i < call.value_width; ++i)
            out[i] = acc[r * value_stride + (K::KEEPS_WIDE ? i : Widened<V>::lane(i))];
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
        const bool many = kv_records(call, run) >= MANY;
#if defined(__AVX512BF16__)
        if (segment.k.type == KV_BF16 && segment.queries.type == KV_BF16 && !many)
            return attend<Dotted, V>(call, run, scratch);
#endif
        with_type(segment.k.type, [&](auto key) {
            typedef decltype(key) T;
            if (many) return attend<Columns<T>, V>(call, run, scratch);
            attend<Widened<T>, V>(call, run, scratch);
        });
    });
}
