// Expected attention: scores of slots, from statistics of a layer's queries.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <new>
#include <vector>

#include "machine.h"
#include "simd.h"
#include "step.h"

using namespace kv;

namespace {

// The cosines and sines of each pair of dimensions: of a rotation, or means over several.
struct Turns {
    std::vector<float> cosines, sines;

    void add(float angle, double size) {
        cosines.push_back((float)(std::cos(angle) * size));
        sines.push_back((float)(std::sin(angle) * size));
    }
};

// The rotation from a position back to 0.
Turns back_from(const KvQueries& known, int64_t position) {
    Turns turns;
    for (int64_t i = 0; i < known.pairs; ++i) turns.add((float)-position * known.frequencies[i], 1);
    return turns;
}

// The mean rotation to the positions that follow; `MeanRotation` of normal_queries.py defines it.
Turns ahead_of(const KvQueries& known, int64_t position) {
    Turns turns;
    const double count = (double)known.future;
    for (int64_t i = 0; i < known.pairs; ++i) {
        const float frequency = known.frequencies[i];
        const double half = frequency / 2;
        const double size = half == 0 ? 1 : std::sin(count * half) / (count * std::sin(half));
        turns.add(((float)position + (float)((count + 1) / 2)) * frequency, size);
    }
    return turns;
}

float element(const KvPlane& plane, int64_t i) {
    switch (plane.type) {
        case KV_F32: return ((const float*)plane.data)[i];
        case KV_BF16: return BF16::widen1(((const uint16_t*)plane.data)[i]);
        default: return F16::widen1(((const uint16_t*)plane.data)[i]);
    }
}

// Adds a query, turned back, to the sums over earlier queries of a query head of a row.
void add_query(const KvSequence& step, const KvPlane& q, int64_t row, int64_t head,
               const Turns& back) {
    const KvQueries& known = *step.queries;
    const int64_t width = step.step->call.key_width, index = row * known.heads + head;
    std::vector<float> own(width);
    for (int64_t i = 0; i < width; ++i) own[i] = element(q, row * q.row + head * q.head + i);
    for (int64_t i = 0; i < known.pairs; ++i) {
        const int64_t first = known.first + (known.interleaved ? 2 * i : i);
        float &a = own[first], &b = own[first + (known.interleaved ? 1 : known.pairs)];
        const float x = a, y = b, cosine = back.cosines[i], sine = back.sines[i];
        a = x * cosine - y * sine;
        b = y * cosine + x * sine;
    }
    float *sums = known.sums + index * width, *products = known.products + index * width * width;
    for (int64_t i = 0; i < width; ++i) {
        sums[i] += own[i];
        for (int64_t j = 0; j < width; ++j) products[i * width + j] += own[i] * own[j];
    }
}

float* scratch_of(int piece, int64_t floats) {
    float* memory = scratch(piece, floats);
    if (!memory) throw std::bad_alloc();
    return memory;
}

// Decodes the keys of `count` slots.
void decode(const KvKeys& keys, int64_t slot, int64_t count, float* out) {
    float* memory = scratch_of(0, kv_cosine_scratch(keys.width));
    instructions().cosines->decode(keys, slot, count, memory, out);
}

// Renews the scores of one row and head, which has `own` slots that are not behind it.
void renew(const KvSequence& step, int64_t row, int64_t head, int64_t own, const Turns& ahead) {
    const KvStep& s = *step.step;
    const KvQueries& known = *step.queries;
    const int64_t width = s.call.key_width, value_width = s.call.value_width, group = s.call.group;
    const int64_t behind = step.behind ? slots_behind(step) : 0, slots = behind + own;
    std::vector<float> logits(slots * group), norms(slots), scores(slots);
    std::vector<int32_t> position(slots);
    const auto each = [&](auto f) {
        if (step.behind) f(*step.behind->step, *step.behind, 0, behind);
        f(s, step, behind, own);
    };
    const int64_t index = row * known.heads + head * group;
    const KvExpected call{
        known.sums + index * width, known.products + index * width * width, ahead.cosines.data(),
        ahead.sines.data(), group, width, known.pairs, known.first, known.interleaved,
        known.counts[row], (float)s.call.scale};
    const KvExpectedKernel& kernel = *instructions().expected;
    const int64_t most = kv_expected_memory(call);
    float* const memory = scratch_of(1, most + KV_BLOCK * (width + value_width));
    float *const keys = memory + most, *const values = keys + KV_BLOCK * width;
    kernel.load(call, memory);
    each([&](const KvStep& part, const KvSequence& sequence, int64_t at, int64_t count) {
        const KvSegment& segment = sequence.segments[part.call.segment_count - 1];
        const int32_t* place = part.ranking.position + row * part.ranking.position_row +
                               head * part.ranking.position_head;
        std::copy_n(place, count, position.begin() + at);
        KvEncoded value = segment.v;
        value.rotated = 0;  // which changes no norm
        const KvKeys from{segment.k, s.call.centre, place, width, row, head};
        const KvKeys values_from{value, nullptr, place, value_width, row, head};
        for (int64_t block = 0; block < count; block += KV_BLOCK, at += KV_BLOCK) {
            const int64_t some = std::min(KV_BLOCK, count - block);
            decode(from, block, some, keys);
            decode(values_from, block, some, values);
            kernel.logits(call, keys, some, memory, logits.data() + at, slots);
            kernel.norms(values, some, value_width, norms.data() + at);
        }
    });
    kernel.scores(logits.data(), group, position.data(), s.ranking.sinks, norms.data(), slots,
                  scores.data());
    each([&](const KvStep& part, const KvSequence&, int64_t at, int64_t count) {
        const KvScores& plane = part.rule.planes[0];
        std::copy_n(scores.begin() + at, count, plane.data + row * plane.row + head * plane.head);
    });
}

}  // namespace

int64_t kv::cost_of_renewal(const KvSequence& step) {
    const KvCall& call = step.step->call;
    if (!step.queries) return 0;
    // Each key is multiplied by a matrix for each query head.
    const int64_t queries = call.rows * call.heads * call.group;
    return queries * all_slots(step) * call.key_width * call.key_width / 4;
}

bool kv::renew_scores(const KvSequence& step, const char* queries) {
    const KvCall& call = step.step->call;
    std::atomic<bool> failed{false};
    KvPlane q = step.segments->queries;
    q.data = queries;
    for (int64_t row = 0; row < call.rows; ++row) {
        const int64_t position = kv_position(step, row);
        if (position < 0 || (position + 1) % step.queries->interval) continue;
        const Turns back = back_from(*step.queries, position);
        const Turns ahead = ahead_of(*step.queries, position);
        const int64_t threads = threads_for(cost_of_renewal(step) / call.rows, call.threads);
        share(std::min(threads, call.heads), call.heads, [&](int64_t head) {
            try {
                if (position >= step.step->ranking.sinks)
                    for (int64_t g = 0; g < call.group; ++g)
                        add_query(step, q, row, head * call.group + g, back);
                renew(step, row, head, slots_after(step), ahead);
            } catch (const std::bad_alloc&) {
                failed = true;
            }
        });
    }
    return !failed;
}
