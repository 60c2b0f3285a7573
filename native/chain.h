// Chains: consecutive segments that are read as one. Runs and blocks count the slots of a chain, so
// results are bitwise independent of how slots are divided into segments.
#pragma once
#include <algorithm>
#include <cstring>

#include "kernel.h"

namespace {

int64_t element_bytes(const KvPlane& plane) {
    return plane.type == KV_F32 ? 4 : plane.type >= KV_I8 ? 1 : 2;
}

// The slots of the current block: in place, or, if the block spans several segments, gathered in
// scratch memory.
class Chain {
    const KvCall& call;
    const KvRun& run;
    int64_t index, first = 0;  // the current segment, and its first slot, counted in the chain
    KvSegment gathered;
    char* memory;

  public:
    const KvSegment* segment;
    int64_t at;  // the block's first slot in that segment

    Chain(const KvCall& call, const KvRun& run, float* scratch)
        : call(call), run(run), index(run.segment), memory((char*)scratch),
          segment(call.segments + run.segment), at(0) {}

    // Move to slots `slot` to `slot + count` of the chain; blocks must be requested in order.
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
        collect(&gathered.k.plane, call.key_width, count, to);
        collect(&gathered.v.plane, call.value_width, count, to);
        collect(&gathered.k.scale, groups(gathered.k, call.key_width), count, to);
        collect(&gathered.k.zero, groups(gathered.k, call.key_width), count, to);
        collect(&gathered.v.scale, groups(gathered.v, call.value_width), count, to);
        collect(&gathered.v.zero, groups(gathered.v, call.value_width), count, to);
        if (!call.dense) collect(&gathered.position, 1, count, to);
        segment = &gathered;
        at = 0;
    }

    static int64_t groups(const KvEncoded& x, int64_t width) {
        return x.group ? (width + x.group - 1) / x.group : 0;
    }

    // Copies the block's slots of `plane`, a plane of `gathered`, to scratch memory and points it
    // there.
    void collect(KvPlane* plane, int64_t width, int64_t count, char*& to) {
        if (!plane->data || !width) return;
        if (plane->type == KV_I4) width /= 2;
        const int64_t bytes = element_bytes(*plane), offset = (char*)plane - (char*)&gathered;
        to += -(intptr_t)to & (element_bytes(*plane) - 1);
        char* const start = to;
        int64_t from = at, left = count;
        for (int64_t i = index; left; ++i, from = 0) {
            const KvPlane& source = *(const KvPlane*)((const char*)(call.segments + i) + offset);
            const int64_t some = std::min(left, call.segments[i].slots - from);
            const char* data = (const char*)source.data +
                               (run.row0 * source.row + run.head * source.head) * bytes;
            for (int64_t j = 0; j < some; ++j, to += width * bytes)
                memcpy(to, data + (from + j) * source.slot * bytes, width * bytes);
            left -= some;
        }
        *plane = {start, 0, 0, width, plane->type};  // holds only this run's rows and head
    }
};

}  // namespace
