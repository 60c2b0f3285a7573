// Chains: segments that go on where the one before them ends, as if they were one. Runs and blocks
// count a chain's slots, so that a result does not depend, to the last bit, on where slots lie.
#pragma once
#include <algorithm>
#include <cstring>

#include "kernel.h"

namespace {

int64_t element_bytes(const KvPlane& plane) {
    return plane.type == KV_F32 ? 4 : plane.type >= KV_I8 ? 1 : 2;
}

// A block's slots where they lie, or, where the block crosses from one segment into the next, side
// by side in scratch memory.
class Chain {
    const KvCall& call;
    const KvRun& run;
    int64_t index, first = 0;  // a segment of the chain, and the chain's slot it begins with
    KvSegment seam;
    char* memory;

  public:
    const KvSegment* segment;
    int64_t at;  // the block's first slot in it

    Chain(const KvCall& call, const KvRun& run, float* scratch)
        : call(call), run(run), index(run.segment), memory((char*)scratch),
          segment(call.segments + run.segment), at(0) {}

    // Slots `slot` to `slot + count` of the chain; blocks are asked for in order.
    void go(int64_t slot, int64_t count) {
        while (slot - first >= call.segments[index].slots) first += call.segments[index++].slots;
        segment = call.segments + index;
        at = slot - first;
        if (at + count > segment->slots) gather(count);
    }

  private:
    void gather(int64_t count) {
        char* to = memory;
        seam = *segment;
        collect(&seam.k.plane, call.key_width, count, to);
        collect(&seam.v.plane, call.value_width, count, to);
        collect(&seam.k.scale, groups(seam.k, call.key_width), count, to);
        collect(&seam.k.zero, groups(seam.k, call.key_width), count, to);
        collect(&seam.v.scale, groups(seam.v, call.value_width), count, to);
        collect(&seam.v.zero, groups(seam.v, call.value_width), count, to);
        if (!call.dense) collect(&seam.position, 1, count, to);
        segment = &seam;
        at = 0;
    }

    static int64_t groups(const KvEncoded& x, int64_t width) {
        return x.group ? (width + x.group - 1) / x.group : 0;
    }

    // `plane` is a plane of `seam`, and becomes one in scratch memory.
    void collect(KvPlane* plane, int64_t width, int64_t count, char*& to) {
        if (!plane->data || !width) return;
        if (plane->type == KV_I4) width /= 2;
        const int64_t bytes = element_bytes(*plane), offset = (char*)plane - (char*)&seam;
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
        *plane = {start, 0, 0, width, plane->type};  // of this run's rows and head alone
    }
};

}  // namespace
