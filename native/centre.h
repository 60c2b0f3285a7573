// Adds a centre's share to the scores of a block.
#pragma once
#include "methods.h"

namespace {

// The coefficients of a run's queries for the rows of a centre's table. If the positions of a
// block's slots are consecutive, as without evictions, the coefficients are turned to the first one,
// and multiplied by the first rows of the table, which stay in the first-level cache.
class Centred {
    const Work& work;
    const int64_t width, stride;  // of a row of the table, and of coefficients
    float *coefficients, *turned, *share, *rows;

  public:
    explicit Centred(const Work& work)
        : work(work),
          width(work.call.centre ? kv_turns(*work.call.centre, work.call.key_width) : 0),
          stride(padded(width)),
          coefficients((float*)(work.place + BLOCK)),
          turned(coefficients + work.records * stride),
          share(turned + work.records * stride),
          rows(share + work.records * BLOCK) {
        if (work.call.centre) set_all();
    }

    // Adds to the scores of the current block, whose positions are loaded.
    void add() const {
        const KvCentre& centre = *work.call.centre;
        const int32_t* place = work.place;
        const int64_t first = place[0];
        bool consecutive = first >= 0 && first + work.count <= centre.positions;
        for (int64_t j = 1; j < work.count; ++j) consecutive &= place[j] == first + j;
        if (consecutive) {
            turn(centre.table + first * width);
            for_tiles<MOST_SUMS>(work.records, [&](int64_t from, auto tile) {
                column_tile<tile.size>(centre.near, work.count, width, turned + from * stride,
                                       share + from * BLOCK);
            });
        } else {
            for (int64_t j = 0; j < work.count; ++j)
                memcpy(rows + j * stride,
                       centre.table +
                           std::clamp<int64_t>(place[j], 0, centre.positions - 1) * width,
                       width * sizeof *rows);
            const Rows turns = rows_of_floats(rows, width);
            if (work.records >= MANY)
                scores(Columns<F32>{}, turns, turns, work.count, width, coefficients, work.records,
                       share, work.columns);
            else
                scores(Widened<F32>{}, turns, turns, work.count, width, coefficients, work.records,
                       share, nullptr);
        }
        for (int64_t i = 0; i < work.records * BLOCK; i += BLOCK)
            for (int64_t j = 0; j < work.count; j += W)
                store(work.s + i + j, load<vf>(work.s + i + j) + load<vf>(share + i + j));
    }

  private:
    void set_all() {
        const KvCall& call = work.call;
        const KvRun& run = work.run;
        const KvCentre& centre = *call.centre;
        const KvPlane& plane = centre.queries;
        static_assert(F32::lane(1) == 1, "coefficients are in the order of the table");
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
        for (int64_t i = 0; i < pairs; ++i) {
            const int64_t a = centre.interleaved ? 2 * i : i;
            const int64_t b = centre.interleaved ? a + 1 : i + pairs;
            to[i] = q(a) * mean[a] + q(b) * mean[b];
            to[frequencies + i] = q(b) * mean[a] - q(a) * mean[b];
        }
        if (pairs == frequencies) return;
        to[pairs] = to[width - 1] = 0;
        for (int64_t i = 2 * pairs; i < work.call.key_width; ++i) to[pairs] += q(i) * mean[i];
    }

    // Turns all coefficients to the position of a row of the table.
    void turn(const float* row) const {
        const int64_t frequencies = width / 2;
        const float *cos = row, *sin = row + frequencies;
        for (int64_t r = 0; r < work.records; ++r) {
            const float *a = coefficients + r * stride, *b = a + frequencies;
            float *to = turned + r * stride, *other = to + frequencies;
            for (int64_t i = 0; i < frequencies; ++i) {
                to[i] = a[i] * cos[i] + b[i] * sin[i];
                other[i] = b[i] * cos[i] - a[i] * sin[i];
            }
        }
    }
};

}  // namespace
