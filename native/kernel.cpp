// Computes one run: scores, online softmax and the sum of values, without copying the slots.
//
// The slots are read once, in blocks: the scores of a block, its softmax, its values. Each loaded
// key or value is used for all queries of a tile before the next is loaded. Sources:
// online softmax (arXiv 1805.02867), FlashAttention (arXiv 2205.14135), Flash-Decoding for the
// split over slots.
//
// Compiled once per instruction set, which KV_RUN names.
#include "kernel.h"

#include <cmath>

#include "centre.h"
#include "mass.h"
#include "visibility.h"

namespace {

// -- one block -------------------------------------------------------------------------------

// What a query's scores are increased by: `slope` times the positions from the query to a slot, and
// the bias for the positions from the slot to the query, in a table whose last index is `last`.
struct Bias {
    const int32_t* place = nullptr;  // (BLOCK); null: nothing
    int32_t query = 0;
    float slope = 0;
    const float* table = nullptr;  // null: no table
    int32_t last = 0;
};

// Scales a record's scores s (BLOCK) unless `raw`, caps them, adds the bias, masks them by `mask`
// (BLOCK; -1: the slot is seen; null: all are seen), and returns the largest of each lane.
KV_INLINE vf finish_scores(const KvCall& call, bool raw, float* s, int64_t count, Bias bias,
                           const int32_t* mask) {
    const vf scale = all((float)call.scale), lowest = all(-INFINITY);
    if (call.softcap != 0) {
        const float cap = (float)call.softcap;
        for (int64_t j = 0; j < count; j += W)
            store(s + j, tanh(load<vf>(s + j) * scale * (1 / cap)) * cap);
    } else if (!raw) {
#pragma GCC unroll 8
        for (int64_t j = 0; j < BLOCK; j += W) store(s + j, load<vf>(s + j) * scale);
    }
    if (call.slopes)
        for (int64_t j = 0; j < BLOCK; j += W) {
            const vf distance = __builtin_convertvector(load<vi>(bias.place + j) - bias.query, vf);
            store(s + j, load<vf>(s + j) + distance * bias.slope);
        }
    if (bias.table)
        for (int64_t j = 0; j < count; ++j)
            s[j] += bias.table[std::clamp(bias.query - bias.place[j], 0, bias.last)];
    for (int64_t j = count; j < BLOCK; ++j) s[j] = -INFINITY;
    if (mask)
        for (int64_t j = 0; j < BLOCK; j += W)
            store(s + j, pick(load<vi>(mask + j), load<vf>(s + j), lowest));
    vf high = lowest;
#pragma GCC unroll 8
    for (int64_t j = 0; j < BLOCK; j += W) high = larger(load<vf>(s + j), high);
    return high;
}

// Replaces a record's scores s (BLOCK) by weights and returns their sum in each lane.
KV_INLINE vf weigh(float* s, float scale, float base) {
    vf added{};
#pragma GCC unroll 2
    for (int64_t j = 0; j < BLOCK; j += W) {
        const vf weight = exp_down(load<vf>(s + j) * scale - base);
        store(s + j, weight);
        added += weight;
    }
    return added;
}

#if defined(KV_BF16_PAIRS)
// As weigh, with weights as bfloat16.
KV_INLINE vf weigh_narrow(float* s, float scale, float base) {
    constexpr float LOG2_E = 1.44269504088896341f;
    vf weights[BLOCK / W], added{};
#pragma GCC unroll 8
    for (int64_t j = 0; j < BLOCK / W; ++j) {
        weights[j] = exp2_narrow(load<vf>(s + j * W) * (scale * LOG2_E) - base * LOG2_E);
        added += weights[j];
    }
#pragma GCC unroll 8
    for (int64_t j = 0; j < BLOCK / W; j += 2)
        narrow_pairs((const float*)(weights + j), (uint16_t*)s + j * W);
    return added;
}
#endif

// Replaces the scores of a block by weights (records, BLOCK), and computes the factors `alpha` for
// earlier sums. W records at a time, whose reductions over lanes are shared. `mask_of(r)` is null
// if the record sees all slots. With `narrow`, weights are stored as bfloat16.
template <class BiasOf, class Mask>
void softmax(const KvCall& call, [[maybe_unused]] bool narrow, int64_t records, float* s,
             int64_t count, BiasOf bias_of, Mask mask_of, float* alpha, float* top, float* total) {
    // Without a cap or a bias, scores are scaled as weights are computed.
    const bool raw = call.scale > 0 && call.softcap == 0 && !call.slopes && !call.biases;
    const float scale = raw ? (float)call.scale : 1.0f;
    vf of_lanes[W] = {};
    for (int64_t first = 0; first < records; first += W, s += W * BLOCK) {
        const int64_t some = records - first < W ? records - first : W;
        for (int64_t i = 0; i < some; ++i) {
            const int64_t r = first + i;
            of_lanes[place(i)] =
                finish_scores(call, raw, s + i * BLOCK, count, bias_of(r), mask_of(r));
        }
        const vf high = sums<Largest>(of_lanes) * scale;
        // Scratch memory has rows for whole groups of W records.
        const vf old = load<vf>(top + first);
        const vf now = larger(high, old);
        const vf factor = exp_down(pick(now == old, vf{}, old - now));
        store(alpha + first, factor);
        store(top + first, now);
        alignas(64) float base[W];
        store(base, pick(now == all(-INFINITY), vf{}, now));
#if defined(KV_BF16_PAIRS)
        if (narrow)
            for (int64_t i = 0; i < some; ++i)
                of_lanes[place(i)] = weigh_narrow(s + i * BLOCK, scale, base[i]);
        else
#endif
            for (int64_t i = 0; i < some; ++i)
                of_lanes[place(i)] = weigh(s + i * BLOCK, scale, base[i]);
        store(total + first, load<vf>(total + first) * factor + sums(of_lanes));
    }
}

// -- the run ---------------------------------------------------------------------------------

Rows rows_of(const KvPlane& plane, int64_t row, int64_t head, int64_t width) {
    const int64_t size = element_bytes(plane);
    return {(const char*)plane.data + (row * plane.row + head * plane.head) * size,
            plane.slot * size, slot_bytes(plane, width)};
}

// Divides rows into halves, each to be prefetched alone.
void halve(Rows rows, Rows& first, Rows& second) {
    const int64_t half = rows.bytes / 2;
    if (rows.stride == rows.bytes) {
        first = {rows.first, half, half};
        second = {rows.first + BLOCK * half, half, half};
    } else {
        first = {rows.first, rows.stride, half};
        second = {rows.first + half, rows.stride, rows.bytes - half};
    }
}

// Loads the positions of a block's slots. Rows of a run share them.
void load_places(const Work& work) {
    const KvPlane& plane = work.segment().position;
    const int32_t* from = (const int32_t*)plane.data + work.run.row0 * plane.row +
                          work.run.head * plane.head + work.at() * plane.slot;
    memset(work.place, 0, BLOCK * sizeof *work.place);
    if (plane.slot == 1) memcpy(work.place, from, work.count * sizeof *from);
    else for (int64_t j = 0; j < work.count; ++j) work.place[j] = from[j * plane.slot];
}

}  // namespace

void KV_RUN(const KvCall& call, const KvRun& run, float* scratch) {
#if defined(KV_TILES)
    const Tiles tiles;
#endif
    Work work(call, run, scratch);
    const int64_t records = work.records, per_row = call.group * work.tokens;
    // Whatever the size of the run, so that all queries of a call are computed in one way.
    const bool many = std::max(records, work.asked) >= MANY;
    const KeyMethod keys = key_method(work, many);
    const ValueMethod values = value_method(work, many);
    const bool narrow = values.narrow && !run.weights;  // kept weights are floats
    keys.load(work);
    const Centred centred(work);
    memset(work.acc, 0, kv_rows(records) * work.value_stride * sizeof *work.acc);
    for (int64_t r = 0; r < kv_rows(records); ++r) work.top[r] = -INFINITY, work.total[r] = 0;

    for (int64_t slot = run.slot0; slot < run.slot1; slot += BLOCK) {
        work.slot = slot;
        work.count = run.slot1 - slot < BLOCK ? run.slot1 - slot : BLOCK;
        work.chain.go(slot, work.count);
        const Visibility seen = visibility_of_rows(work);
        if (seen != NONE) {
            const Rows key = rows_of(work.segment().k.plane, run.row0, run.head, call.key_width);
            const Rows value =
                rows_of(work.segment().v.plane, run.row0, run.head, call.value_width);
            work.key = {key.at(work.at()), key.stride, key.bytes};
            work.value = {value.at(work.at()), value.stride, value.bytes};
            work.ahead = work.value;
            work.next = {key.at(work.at() + BLOCK), key.stride, key.bytes};
            work.within = keys.floats && in_keys(work.segment());
            if (key.first == value.first) halve(work.next, work.ahead, work.next);
            const auto mask_of = [&](int64_t r) -> const int32_t* {
                if (seen == ALL) return nullptr;
                return work.mask + (r / per_row * work.tokens + r % work.tokens) * BLOCK;
            };
            if (call.slopes || call.biases || call.centre) load_places(work);
            const auto bias_of = [&](int64_t r) -> Bias {
                if (!call.slopes && !call.biases) return {};
                const int64_t row = run.row0 + r / per_row, token = run.query0 + r % work.tokens;
                const int64_t head = run.head * call.group + r % per_row / work.tokens;
                Bias bias = {work.place, call.position[row * call.position_row + token]};
                if (call.slopes) bias.slope = call.slopes[head];
                if (call.biases) {
                    bias.table = call.biases + row * call.bias_row + head * call.bias_head +
                                 token * call.bias_query;
                    bias.last = (int32_t)call.extent - 1;
                }
                return bias;
            };
            work.key = readable(work.segment().k, work.key, work.count, call.key_width,
                                work.spread_key);
            keys.score(work);
            if (call.centre) centred.add();
            softmax(call, narrow, records, work.s, work.count, bias_of, mask_of, work.alpha,
                    work.top, work.total);
            work.value = readable(work.segment().v, work.value, work.count, call.value_width,
                                  work.spread_value);
            if (run.weights) {
                keep_weights(work, true);
#if defined(KV_BF16_PAIRS)
                for (int64_t r = 0; r < records && values.narrow; ++r)
                    narrow_weights(work.s + r * BLOCK);
#endif
            }
            values.add(work);
        } else if (run.weights) {
            keep_weights(work, false);
        }
    }
    if (run.mass) sum_weights(work);
    values.write_sums(work);
    float* out = run.partial;
    for (int64_t r = 0; r < records; ++r) {
        if (work.segment().v.rotated) rotate(out, call.value_width);
        out[call.value_width] = work.top[r];
        out[call.value_width + 1] = work.total[r];
        out += call.value_width + 2;
    }
}
