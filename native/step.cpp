// A decode step of one layer: one token a row is written, and attended to. In Python the parts of
// a step cost more time than the step itself.
#include <cstring>
#include <new>
#include <vector>

#include "abi.h"

namespace {

int64_t element_bytes(int64_t type) { return type == KV_F32 ? 4 : 2; }

// Copies or encodes x to slot `slot`.
bool write(const KvEncoding& written, const void* x, int64_t slot) {
    KvEncoding e = written;
    e.x.data = x;
    if (e.bits) {
        const auto at = [&](KvPlane& plane, int64_t size) {
            if (plane.data) plane.data = (const char*)plane.data + slot * plane.slot * size;
        };
        at(e.codes, 1), at(e.scale, 2), at(e.zero, 2);
        return !kv_encode(&e);
    }
    const int64_t size = element_bytes(e.x.type), bytes = e.width * size;
    for (int64_t row = 0; row < e.rows; ++row)
        for (int64_t head = 0; head < e.heads; ++head) {
            const int64_t from = row * e.x.row + head * e.x.head;
            const int64_t to = row * e.codes.row + head * e.codes.head + slot * e.codes.slot;
            memcpy((char*)e.codes.data + to * size, (const char*)x + from * size, bytes);
        }
    return true;
}

// Frees the oldest slot that is not protected.
bool drop(const KvStep& step, const KvToken& token, const KvSlots* planes, int64_t plane_count) {
    KvRanking ranking = step.ranking;
    std::vector<int64_t> victims(ranking.rows * ranking.heads);
    ranking.out = victims.data();
    ranking.newest = token.position - 1;
    ranking.slots = token.slots;
    ranking.count = 1;
    return !kv_lowest(&ranking) &&
           !kv_evict(planes, plane_count, step.call.rows, victims.data(), ranking.rows,
                     ranking.heads, 1, token.slots);
}

int run(const KvStep& step, const KvSegment* given, const KvSlots* planes, int64_t plane_count,
        const KvToken& token) {
    for (int64_t i = 0; i < token.position_count; ++i)
        if (token.positions[i] != token.position) return KV_STEP_UNLIKE;
    // All memory is reserved before anything is changed.
    std::vector<KvSegment> segments(given, given + step.call.segment_count);
    for (KvSegment& segment : segments) segment.queries.data = token.q;
    int64_t slot = token.slots;
    if (token.drops) {
        if (!drop(step, token, planes, plane_count)) return KV_STEP_FAILED;
        --slot;
    }
    if (!write(step.key, token.k, slot) || !write(step.value, token.v, slot))
        return KV_STEP_FAILED;
    const KvPlane& place = step.position;
    for (int64_t row = 0; row < step.call.rows; ++row)
        for (int64_t head = 0; head < step.position_heads; ++head)
            ((int32_t*)place.data)[row * place.row + head * place.head + slot * place.slot] =
                (int32_t)token.position;
    segments.back().slots = slot + 1;
    KvCall call = step.call;
    call.out = token.out;
    return kv_attend(&call, segments.data(), nullptr) ? KV_STEP_FAILED : KV_STEP_DONE;
}

}  // namespace

int kv_step(const KvStep* step, const KvSegment* segments, const KvSlots* planes,
            int64_t plane_count, const KvToken* token) {
    try {
        return run(*step, segments, planes, plane_count, *token);
    } catch (const std::bad_alloc&) {
        return KV_STEP_FAILED;
    }
}
