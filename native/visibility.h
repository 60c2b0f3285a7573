// Which slots of a block each token of a run sees.
#pragma once
#include <algorithm>
#include <cstring>

#include "methods.h"

namespace {

enum Visibility { NONE, SOME, ALL };

// The lowest and the highest of some positions.
struct Range {
    int32_t low = INT32_MAX, high = INT32_MIN;

    void add(int32_t x) { low = std::min(low, x), high = std::max(high, x); }
};

KV_INLINE int32_t clamped(int64_t position) {
    return (int32_t)std::clamp<int64_t>(position, INT32_MIN, INT32_MAX);
}

// What one row's tokens see of slots with these positions, as far as the lowest and highest tell:
// SOME if it depends on the slot or the token. An empty slot has a negative position.
KV_INLINE Visibility visibility_of(const KvCall& call, Range slot, Range query, Range first,
                                   Range last) {
    if (slot.high < first.low || slot.low > last.high) return NONE;
    bool every = slot.low >= first.high && slot.high <= last.low;
    for (int64_t i = 0; i < call.reach_count; ++i) {
        const KvReach& reach = call.reaches[i];
        const int64_t nearest = (int64_t)query.low - slot.high;
        const int64_t farthest = (int64_t)query.high - slot.low;
        if (farthest < reach.size || slot.high < reach.sinks) continue;
        if (slot.low >= reach.keep_from && slot.high < reach.keep_to) continue;
        every = false;
        if (nearest >= reach.size && slot.low >= reach.sinks &&
            (slot.high < reach.keep_from || slot.low >= reach.keep_to))
            return NONE;
    }
    return every ? ALL : SOME;
}

// The mask of one token: -1 for each slot at `place` (BLOCK) that it sees.
KV_INLINE void mask_token(const KvCall& call, const int32_t* place, int32_t query, int32_t first,
                          int32_t last, int32_t* mask) {
    for (int64_t j = 0; j < BLOCK; j += W) {
        const vi slot = load<vi>(place + j);
        vi seen = (slot >= first) & (slot <= last);
        for (int64_t i = 0; i < call.reach_count; ++i) {
            const KvReach& reach = call.reaches[i];
            seen &= (query - slot < clamped(reach.size)) | (slot < clamped(reach.sinks)) |
                    ((slot >= clamped(reach.keep_from)) & (slot < clamped(reach.keep_to)));
        }
        store(mask + j, seen);
    }
}

// Which slots of a block a run's tokens see in one row; if SOME, fills `mask` (tokens, BLOCK).
Visibility visibility(const Work& work, int64_t row, int32_t* mask) {
    const KvCall& call = work.call;
    const KvRun& run = work.run;
    const int64_t tokens = run.query1 - run.query0, count = work.count;
    if (call.dense) {
        if (run.segment + run.segments < call.segment_count) return ALL;
        const int64_t past = run.past, slot0 = work.slot;  // token i sees slots 0..past + i
        if (slot0 + count <= past + run.query0 + 1) return ALL;
        if (slot0 > past + run.query1 - 1) return NONE;
        for (int64_t t = 0; t < tokens; ++t)
            for (int64_t j = 0; j < BLOCK; ++j)
                mask[t * BLOCK + j] = -(slot0 + j <= past + run.query0 + t);
        return SOME;
    }
    const KvPlane& plane = work.segment().position;
    const int32_t* from = (const int32_t*)plane.data + row * plane.row + run.head * plane.head +
                          work.at() * plane.slot;
    int32_t place[BLOCK];
    Range slot, query, first, last;
    for (int64_t j = 0; j < count; ++j) slot.add(place[j] = from[j * plane.slot]);
    std::fill(place + count, place + BLOCK, -1);
    const int32_t* now = call.position + row * call.position_row + run.query0;
    const int32_t* bounds =
        call.bounds ? call.bounds + row * call.bounds_row + run.query0 : nullptr;
    const auto first_of = [&](int64_t t) { return bounds ? std::max(bounds[t], 0) : 0; };
    const auto last_of = [&](int64_t t) { return bounds ? bounds[call.queries + t] : now[t]; };
    for (int64_t t = 0; t < tokens; ++t)
        query.add(now[t]), first.add(first_of(t)), last.add(last_of(t));
    const Visibility seen = visibility_of(call, slot, query, first, last);
    if (seen == SOME)
        for (int64_t t = 0; t < tokens; ++t)
            mask_token(call, place, now[t], first_of(t), last_of(t), mask + t * BLOCK);
    return seen;
}

// Which slots of a block a run's rows see; fills the mask.
Visibility visibility_of_rows(Work& work) {
    const KvRun& run = work.run;
    const int64_t row_size = work.tokens * BLOCK;
    bool any = false, every = true;
    for (int64_t row = run.row0; row < run.row1; ++row) {
        int32_t* own = work.mask + (row - run.row0) * row_size;
        const Visibility seen = visibility(work, row, own);
        if (seen != SOME && run.row1 - run.row0 > 1) std::fill(own, own + row_size, -(seen == ALL));
        any |= seen != NONE;
        every &= seen == ALL;
        if (work.call.dense) {  // all rows see the same slots
            for (int64_t i = row_size; i < (run.row1 - row) * row_size; ++i)
                own[i] = own[i - row_size];
            break;
        }
    }
    return every ? ALL : any ? SOME : NONE;
}

}  // namespace
