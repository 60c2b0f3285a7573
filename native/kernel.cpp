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
#pragma GCC unroll 2
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
        for (int64_t r = 0; r < records; ++r) {
            const int64_t owner = r / per_row * tokens + r % tokens;
            float* keep = run.scores;
            if (keep) keep += r * (run.slot1 - run.slot0) + slot - run.slot0;
            alpha[r] = softmax(call, s + r * BLOCK, count, every ? nullptr : mask + owner * BLOCK,
                               keep, top[r], total[r]);
        }
        const Rows next = {keys.at(slot + BLOCK), keys.stride, keys.bytes};
        if (K::KEEPS_WIDE) {
            // Widened once for all tiles of queries.
            widen<V>(value, count, call.value_width, wide);
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
