// The weights of a run's queries, kept for the mass of its slots.
#pragma once
#include <cstring>

#include "methods.h"

namespace {

// Stores the block's weights; zeros if no query sees the block.
void keep_weights(const Work& work, bool seen) {
    const KvRun& run = work.run;
    const int64_t from = work.slot - run.slot0, slots = run.slot1 - run.slot0;
    for (int64_t r = 0; r < work.records; ++r) {
        float* to = run.weights + r * slots + from;
        if (seen) memcpy(to, work.s + r * BLOCK, work.count * sizeof *to);
        else memset(to, 0, work.count * sizeof *to);
    }
    memcpy(run.tops + from / BLOCK * work.records, work.top, work.records * sizeof *work.top);
}

// The score whose probability is `inverse`, and that probability, of each record; 0 for queries
// that are not observed or see nothing.
void find_softmax(const Work& work, float* base, float* inverse) {
    const KvCall& call = work.call;
    for (int64_t r = 0; r < work.records; ++r) {
        const int64_t query = r / work.tokens % call.group;
        const int64_t token = work.run.query0 + r % work.tokens;
        const int64_t row = work.run.row0 + r / (work.tokens * call.group);
        const float sink = call.sinks ? call.sinks[work.run.head * call.group + query] : -INFINITY;
        const bool counts = !call.observed || call.observed[row * call.observed_row + token];
        const float top = std::max(sink, work.top[r]);
        base[r] = top == -INFINITY ? 0.0f : top;
        const float total =
            work.total[r] * std::exp(work.top[r] - base[r]) + std::exp(sink - base[r]);
        inverse[r] = counts && total > 0 ? 1 / total : 0.0f;
    }
}

// Computes the run's own mass (rows, slots): the sum over its records, or the largest weight.
void sum_weights(const Work& work) {
    const KvCall& call = work.call;
    const KvRun& run = work.run;
    const int64_t records = work.records, slots = run.slot1 - run.slot0;
    const int64_t of_row = call.group * work.tokens;
    float *base = work.s, *inverse = base + records, *factor = inverse + records;
    find_softmax(work, base, inverse);
    const float share = call.peak ? 1.0f : 1.0f / call.group;
    for (int64_t from = 0; from < slots; from += BLOCK) {
        const int64_t count = std::min<int64_t>(BLOCK, slots - from);
        const float* top = run.tops + from / BLOCK * records;
        for (int64_t r = 0; r < records; r += W) {
            const int64_t bytes = std::min<int64_t>(W, records - r) * sizeof *factor;
            vf of_block{}, of_query{}, part{};
            memcpy(&of_block, top + r, bytes);
            memcpy(&of_query, base + r, bytes);
            memcpy(&part, inverse + r, bytes);
            part *= exp_down(of_block - of_query) * share;
            memcpy(factor + r, &part, bytes);
        }
        for (int64_t row = 0; row < run.row1 - run.row0; ++row) {
            vf sums[BLOCK / W] = {};
            for (int64_t r = row * of_row; r < (row + 1) * of_row; ++r) {
                const float* weight = run.weights + r * slots + from;
#pragma GCC unroll 4
                for (int64_t i = 0; i < BLOCK / W; ++i) {
                    const vf added = load<vf>(weight + i * W) * factor[r];
                    sums[i] = call.peak ? larger(added, sums[i]) : sums[i] + added;
                }
            }
            memcpy(run.mass + row * slots + from, sums, count * sizeof(float));
        }
    }
}

}  // namespace
