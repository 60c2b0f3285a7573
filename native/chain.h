// Chains: adjacent segments that are read as one. Runs and blocks count the slots of a chain, so
// results do not depend, to the last bit, on how slots are divided into segments.
#pragma once
#include <algorithm>
#include <cstring>

#include "kernel.h"
#include "packings.h"

namespace {

int64_t element_bytes(const KvPlane& plane) {
    return plane.type == KV_F32 ? 4 : plane.type >= KV_I8 ? 1 : 2;
}

// Bytes of a slot in a plane.
int64_t slot_bytes(const KvPlane& plane, int64_t width) {
    if (plane.type >= KV_I8) return kv_packing(plane.type).bytes(width);
    return width * element_bytes(plane);
}

// The slots of the current block: in place, or gathered in scratch memory if the block spans
// several segments.
class Chain {
    const KvCall& call;
    const KvRun& run;
    int64_t index, first = 0;  // the current segment, and the chain's slot index of its first slot
    KvSegment gathered;
    char* memory;

  public:
    const KvSegment* segment;
    int64_t at;  // offset of the block's first slot in that segment

    Chain(const KvCall& call, const KvRun& run, float* scratch)
        : call(call), run(run), index(run.segment), memory((char*)scratch),
          segment(call.segments + run.segment), at(0) {}

    // Moves to slots `slot` to `slot + count` of the chain; blocks must be requested in order.
    void go(int64_t slot, int64_t count) {
        while (slot - first >= call.segments[index].slots) first += call.segments[index++].slots;
        segment = call.segments + index;
        at = slot - first;
        if (at + count > segment->slots) gather(count);
    }

  private:
    void gather(int64_t count) {
        char* to = memory;
        gathered = *segment;
        // With scales by channel, the gathered block must have the same offset from the first of
        // its scales as in its segment.
        const int64_t skipped = at % std::max(gathered.k.block, gathered.v.block);
        const auto slots = [&](KvPlane& plane, int64_t width) {
            collect(&plane, width, 1, at, count, skipped, to);
        };
        const auto encoded = [&](KvEncoded& x, int64_t width) {
            slots(x.plane, width);
            for (KvPlane* plane : {&x.scale, &x.zero}) {
                if (x.block > 1)
                    collect(plane, width, x.block, at / x.block,
                            (skipped + count + x.block - 1) / x.block, 0, to);
                else if (x.group) slots(*plane, (width + x.group - 1) / x.group);
            }
        };
        encoded(gathered.k, call.key_width);
        encoded(gathered.v, call.value_width);
        slots(gathered.position, 1);
        segment = &gathered;
        at = skipped;
    }

    // Copies `count` entries of `plane`, a plane of `gathered` with one entry per `block` slots, to
    // scratch memory, and points the plane there so that the first copied entry has index `into`.
    void collect(KvPlane* plane, int64_t width, int64_t block, int64_t from, int64_t count,
                 int64_t into, char*& to) {
        if (!plane->data) return;
        const int64_t element = element_bytes(*plane), bytes = slot_bytes(*plane, width);
        const int64_t offset = (char*)plane - (char*)&gathered;
        to += -(intptr_t)to & (element - 1);
        char* const start = to;
        for (int64_t i = index, left = count; left; ++i, from = 0) {
            const KvPlane& source = *(const KvPlane*)((const char*)(call.segments + i) + offset);
            const int64_t some = std::min(left, call.segments[i].slots / block - from);
            const char* data = (const char*)source.data +
                               (run.row0 * source.row + run.head * source.head) * element;
            for (int64_t j = 0; j < some; ++j, to += bytes)
                memcpy(to, data + (from + j) * source.slot * element, bytes);
            left -= some;
        }
        // The copy holds only this run's rows and head.
        *plane = {start - into * bytes, 0, 0, bytes / element, plane->type};
    }
};

}  // namespace
