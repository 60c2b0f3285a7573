// Adds a centre's share to the scores of a block.
#pragma once
#include "methods.h"

namespace {

// The coefficients of a run's queries for the rows of a centre's table, and the scratch memory to
// multiply them.
class Centred {
    const Work& work;
    const int64_t width, stride;
    float *coefficients, *scores_of_block;
    uint16_t* rows;

  public:
    explicit Centred(const Work& work)
        : work(work),
          width(work.call.centre ? kv_turns(*work.call.centre, work.call.key_width) : 0),
          stride(padded(width)),
          coefficients((float*)(work.place + BLOCK)),
          scores_of_block(coefficients + work.records * stride),
          rows((uint16_t*)(scores_of_block + work.records * BLOCK)) {
        if (work.call.centre) set_all();
    }

    // Adds to the scores of the current block, whose positions are loaded.
    void add() const {
        const Rows turns = rows_of_block();
        if (work.records >= MANY)
            scores(Columns<F16>{}, turns, turns, work.count, width, coefficients, work.records,
                   scores_of_block, work.columns);
        else
            scores(Widened<F16>{}, turns, turns, work.count, width, coefficients, work.records,
                   scores_of_block, nullptr);
        for (int64_t i = 0; i < work.records * BLOCK; i += BLOCK)
            for (int64_t j = 0; j < work.count; j += W)
                store(work.s + i + j,
                      load<vf>(work.s + i + j) + load<vf>(scores_of_block + i + j));
    }

  private:
    void set_all() {
        const KvCall& call = work.call;
        const KvRun& run = work.run;
        const KvCentre& centre = *call.centre;
        const KvPlane& plane = centre.queries;
        memset(coefficients, 0, work.records * stride * sizeof *coefficients);
        float* to = coefficients;
        with_type(plane.type, [&](auto type) {
            typedef decltype(type) T;
            for (int64_t row = run.row0; row < run.row1; ++row)
                for (int64_t g = 0; g < call.group; ++g)
                    for (int64_t t = run.query0; t < run.query1; ++t, to += stride) {
                        const auto* q = (const typename T::Element*)plane.data + row * plane.row +
                                        (run.head * call.group + g) * plane.head + t * plane.slot;
                        set(centre.mean + row * centre.row + run.head * centre.head,
                            [q](int64_t i) { return T::widen1(q[i]); }, to);
                    }
        });
    }

    template <class Query>
    void set(const float* mean, Query q, float* to) const {
        const KvCentre& centre = *work.call.centre;
        const int64_t pairs = centre.pairs, frequencies = width / 2;
        const auto put = [&](int64_t i, float x) {
            to[work.records >= MANY ? i : Widened<F16>::lane(i)] = x;
        };
        for (int64_t i = 0; i < pairs; ++i) {
            const int64_t a = centre.interleaved ? 2 * i : i;
            const int64_t b = centre.interleaved ? a + 1 : i + pairs;
            put(i, q(a) * mean[a] + q(b) * mean[b]);
            put(frequencies + i, q(b) * mean[a] - q(a) * mean[b]);
        }
        if (pairs == frequencies) return;
        float constant = 0;
        for (int64_t i = 2 * pairs; i < work.call.key_width; ++i) constant += q(i) * mean[i];
        put(pairs, constant);
    }

    // The rows of the table for the block's slots: in place if their positions are consecutive.
    Rows rows_of_block() const {
        const KvCentre& centre = *work.call.centre;
        const int32_t* place = work.place;
        const int64_t bytes = width * sizeof(uint16_t), first = place[0];
        bool consecutive = first >= 0 && first + work.count <= centre.positions;
        for (int64_t j = 1; j < work.count; ++j) consecutive &= place[j] == first + j;
        if (consecutive) return {(const char*)(centre.table + first * width), bytes, bytes};
        for (int64_t j = 0; j < work.count; ++j)
            memcpy(rows + j * width,
                   centre.table + std::clamp<int64_t>(place[j], 0, centre.positions - 1) * width,
                   bytes);
        return {(const char*)rows, bytes, bytes};
    }
};

}  // namespace
