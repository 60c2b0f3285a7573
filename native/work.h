// A run of queries against slots: its scratch memory, and the block of slots that is computed.
#pragma once
#include "chain.h"
#include "codes.h"
#include "rotate.h"

namespace {

// A run, its scratch memory, and the current block.
struct Work {
    const KvCall& call;
    const KvRun& run;
    Chain chain;
    const int64_t records, tokens, value_stride;
    const int64_t asked;  // queries of a row and head in the call, which is divided among runs
    float *queries, *s, *acc, *alpha, *top, *total;
    float* columns;                     // (BLOCK, padded(width)); or scales of coded planes
    float *wide_keys, *wide;            // (BLOCK, apart(width)); or scales of coded planes
    float *spread_key, *spread_value;   // a block of spread codes
    int32_t* mask;                      // (rows, tokens, BLOCK)
    int32_t* place;                     // (BLOCK): positions of the slots, if scores have biases
    int64_t slot, count;
    Rows key, value;      // of the block
    bool within;          // whether the values are the first elements of the keys
    Rows ahead, next;     // prefetched while keys are scored, and while values are summed

    Work(const KvCall& call, const KvRun& run, float* scratch)
        : call(call),
          run(run),
          chain(call, run, scratch),
          records(kv_records(call, run)),
          tokens(run.query1 - run.query0),
          value_stride(padded(call.value_width)),
          asked(call.group * call.queries) {
        const int64_t key_stride = padded(call.key_width), rows = kv_rows(records);
        queries = scratch + kv_gathered(call);
        s = queries + rows * key_stride;
        acc = s + rows * BLOCK;
        columns = acc + rows * value_stride;
        wide_keys = columns + BLOCK * key_stride;
        wide = wide_keys + BLOCK * (key_stride + 16);
        spread_key = wide + BLOCK * (value_stride + 16);
        spread_value = spread_key + kv_spread(key_stride);
        alpha = spread_value + kv_spread(value_stride);
        top = alpha + rows;
        total = top + rows;
        mask = (int32_t*)(total + rows);
        place = mask + rows * BLOCK;
    }

    // The segment of the current block, and the block's first slot in it.
    const KvSegment& segment() const { return *chain.segment; }
    int64_t at() const { return chain.at; }
};

template <class F>
void with_type(int64_t type, F f) {
    switch (type) {
        case KV_F32: f(F32{}); break;
        case KV_BF16: f(BF16{}); break;
        default: f(F16{}); break;
    }
}

// Calls f(record, function from an index to an element as float) for each query.
template <class F>
void each_query(const Work& work, F f) {
    const KvCall& call = work.call;
    const KvRun& run = work.run;
    const KvPlane& plane = work.segment().queries;
    int64_t record = 0;
    with_type(plane.type, [&](auto type) {
        typedef decltype(type) T;
        for (int64_t row = run.row0; row < run.row1; ++row)
            for (int64_t g = 0; g < call.group; ++g)
                for (int64_t t = run.query0; t < run.query1; ++t) {
                    const auto* from = (const typename T::Element*)plane.data + row * plane.row +
                                       (run.head * call.group + g) * plane.head + t * plane.slot;
                    if (!work.segment().k.rotated) {
                        f(record++, [from](int64_t i) { return T::widen1(from[i]); });
                        continue;
                    }
                    float turned[MOST_WIDTH];
                    for (int64_t i = 0; i < call.key_width; ++i) turned[i] = T::widen1(from[i]);
                    rotate(turned, call.key_width);
                    f(record++, [&turned](int64_t i) { return turned[i]; });
                }
    });
}

}  // namespace
