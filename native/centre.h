// Adds a centre's share to the scores of a block.
#pragma once
#include "methods.h"

namespace {

constexpr int64_t HALF = BLOCK / 2;
constexpr int64_t POWERS = 4;
constexpr int MOST_MIRRORED = 6;  // queries whose sums fit registers
constexpr int64_t MOST_FOR_A_SLOT = 5;  // positions whose shares take as long as a slot alone

// KvCentre.near: cosines and sines of 0.5, 1.5, ... 31.5 positions. Those of the last frequencies
// are sums of powers of the distance, in units of 32 positions; a row for each power stands for
// them all.
struct Near {
    int64_t frequencies, rows, exact;  // exact: the frequencies that have a row of their own
    const float* middle;               // (2, frequencies): the turn by 31.5 positions
    const float* turns;  // (2, rows, 32): cosines and even powers, sines and odd powers
    const float* factors;              // (2, POWERS, frequencies - exact)

    Near(const float* near, int64_t frequencies, int64_t rows)
        : frequencies(frequencies),
          rows(rows),
          exact(rows < frequencies ? rows - POWERS : rows),
          middle(near),
          turns(middle + 2 * frequencies),
          factors(turns + 2 * rows * HALF) {}

    // Replaces coefficients (2, frequencies) by those of the rows (2, rows).
    void gather(float* x) const {
        if (rows == frequencies) return;
        const int64_t others = frequencies - exact;  // a multiple of 8
        v8 sums[2 * POWERS] = {};
        for (int64_t i = 0; i < others; i += 8) {
            const v8 even = load<v8>(x + exact + i), odd = load<v8>(x + frequencies + exact + i);
#pragma GCC unroll 8
            for (int k = 0; k < 2 * POWERS; ++k)
                sums[k] += load<v8>(factors + k * others + i) * (k < POWERS ? even : odd);
        }
        const v8 all = totals(sums);
        store(x + exact, __builtin_shufflevector(all, all, 0, 1, 2, 3));
        memmove(x + rows, x + frequencies, exact * sizeof *x);
        store(x + rows + exact, __builtin_shufflevector(all, all, 4, 5, 6, 7));
    }

  private:
    // Lane k: the sum of x[k].
    KV_INLINE v8 totals(const v8 (&x)[8]) {
        const auto fold = [](v8 a, v8 b) __attribute__((always_inline)) {  // pairs of neighbours
            return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
                   __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
        };
        const v8 low = fold(fold(x[0], x[1]), fold(x[2], x[3]));
        const v8 high = fold(fold(x[4], x[5]), fold(x[6], x[7]));
        return __builtin_shufflevector(low, high, 0, 1, 2, 3, 8, 9, 10, 11) +
               __builtin_shufflevector(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
    }
};

KV_INLINE vf reversed(vf x) {
#if KV_LANES == 16
    return __builtin_shufflevector(x, x, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#else
    return __builtin_shufflevector(x, x, 7, 6, 5, 4, 3, 2, 1, 0);
#endif
}

// Shares s (MT rows, `s_stride` apart) of the BLOCK positions around the position that the
// coefficients q are turned to. Cosines are alike on both sides of it, and sines opposite.
template <int MT>
KV_OUTLINE void mirrored_tile(const Near& near, const float* q, int64_t stride, float* s,
                              int64_t s_stride) {
    const int64_t rows = near.rows;
    constexpr int N = W == 16 ? 2 : 1;
    for (int64_t k = 0; k < HALF; k += N * W) {
        vf even[MT][N] = {}, odd[MT][N] = {};
        const float *cos = near.turns + k, *sin = cos + rows * HALF;
        for (int64_t d = 0; d < rows; ++d, cos += HALF, sin += HALF)
#pragma GCC unroll 8
            for (int m = 0; m < MT; ++m) {
                const float* own = q + m * stride + d;
                const vf a = all(own[0]), b = all(own[rows]);
#pragma GCC unroll 2
                for (int n = 0; n < N; ++n) {
                    add_product(even[m][n], a, load<vf>(cos + n * W));
                    add_product(odd[m][n], b, load<vf>(sin + n * W));
                }
            }
#pragma GCC unroll 8
        for (int m = 0; m < MT; ++m)
#pragma GCC unroll 2
            for (int n = 0; n < N; ++n) {
                float* middle = s + m * s_stride + HALF;
                const int64_t from = k + n * W;
                store(middle + from, even[m][n] + odd[m][n]);
                store(middle - from - W, reversed(even[m][n] - odd[m][n]));
            }
    }
}

// The coefficients of a run's queries for the rows of a centre's table, and the latest shares.
// Shares are computed for BLOCK adjacent positions at once: the coefficients are turned to their
// middle, and multiplied by the cosines and sines of the distances from it, which stay in the
// first-level cache.
class Centred {
    const Work& work;
    const int64_t width, stride;  // of a row of the table, and of coefficients
    const int64_t size;           // positions whose shares are held; a power of 2
    int64_t slots = 0;            // of the chain
    const Near near;
    float *coefficients, *turned, *row, *share, *rows;
    int32_t* held;  // for each BLOCK of shares, the positions / BLOCK that they belong to

  public:
    explicit Centred(const Work& work)
        : work(work),
          width(work.call.centre ? kv_turns(*work.call.centre, work.call.key_width) : 0),
          stride(padded(width)),
          size(work.call.centre ? kv_shares(work.call, work.records) : 0),
          near(work.call.centre ? work.call.centre->near : nullptr, width / 2,
               work.call.centre ? work.call.centre->near_rows : 0),
          coefficients((float*)(work.place + BLOCK)),
          turned(coefficients + work.records * stride),
          row(turned + work.records * stride),
          share(row + stride),
          rows(share + work.records * size),
          held((int32_t*)(rows + BLOCK * stride)) {
        if (!work.call.centre) return;
        for (int64_t i = 0; i < work.run.segments; ++i)
            slots += work.call.segments[work.run.segment + i].slots;
        set_all();
    }

    // Adds to the scores of the current block, whose positions are loaded.
    void add() const {
        const int32_t last = (int32_t)work.call.centre->positions - 1;
        int32_t place[BLOCK], apart = 0;
        for (int64_t j = 0; j < BLOCK; ++j) place[j] = std::clamp(work.place[j], 0, last);
        for (int64_t j = 0; j < work.count; ++j) apart |= place[j] - place[0] - (int32_t)j;
        const int64_t from = place[0] & (size - 1);
        if (!apart && from + BLOCK <= size) {
            hold(place[0]), hold(place[work.count - 1]);
            add_shares(share + from, size);
        } else if (apart && (many() || far_apart(place))) {
            add_rows(place);
        } else {
            int64_t begin = 0;
            for (int64_t j = 0; j < work.count; ++j) {
                if (holds(place[j])) continue;
                look_up(place, begin, j);
                begin = j;
                hold(place[j]);
            }
            look_up(place, begin, work.count);
        }
    }

  private:
    // Whether a row and head has many queries. It depends on no other row.
    bool many() const { return work.asked >= MANY; }

    // Whether the chain's slots have so few of the positions that the shares of all would take
    // longer than those of the slots. It depends on no other row, nor on how the chain is divided.
    bool far_apart(const int32_t* place) const {
        const auto [low, high] = std::minmax_element(place, place + work.count);
        const int64_t span = *high - *low;
        return span >= KV_MOST_SHARES || span > MOST_FOR_A_SLOT * slots;
    }

    bool holds(int64_t position) const {
        return held[position / BLOCK & (size / BLOCK - 1)] == position / BLOCK;
    }

    // Computes the shares of a position and its neighbours, unless they are held.
    void hold(int64_t position) const {
        if (holds(position)) return;
        const KvCentre& centre = *work.call.centre;
        const int64_t place = position / BLOCK;
        held[place & (size / BLOCK - 1)] = (int32_t)place;
        turn(centre.table + place * BLOCK * width);
        if ((place + 1) * BLOCK < centre.positions)
            prefetch((const char*)(centre.table + (place + 1) * BLOCK * width), width * 4);
        for_tiles<MOST_MIRRORED>(work.records, [&](int64_t from, auto tile) {
            mirrored_tile<tile.size>(near, turned + from * stride, stride,
                                     share + from * size + (place * BLOCK & (size - 1)), size);
        });
    }

    // Adds held shares of the slots from `begin` to `end` - 1.
    void look_up(const int32_t* place, int64_t begin, int64_t end) const {
        for (int64_t i = 0; i < work.records; ++i)
            for (int64_t j = begin; j < end; ++j)
                work.s[i * BLOCK + j] += share[i * size + (place[j] & (size - 1))];
    }

    void add_shares(const float* from, int64_t step) const {
        for (int64_t i = 0; i < work.records; ++i, from += step)
            for (int64_t j = 0; j < BLOCK; j += W) {
                float* to = work.s + i * BLOCK + j;
                store(to, load<vf>(to) + load<vf>(from + j));
            }
    }

    // For positions that are not adjacent, and many queries or positions far apart.
    void add_rows(const int32_t* place) const {
        for (int64_t j = 0; j < work.count; ++j)
            memcpy(rows + j * stride, work.call.centre->table + place[j] * width, width * 4);
        const Rows turns = rows_of_floats(rows, width), own = rows_of_floats(coefficients, width);
        if (many()) {
            transpose(turns, work.count, width, work.columns);
            for_tiles<MOST_SUMS>(work.records, [&](int64_t from, auto tile) {
                for (int64_t j = 0; j < work.count; j += STEP)
                    column_tile<tile.size, 2>({own.at(from), own.stride, own.bytes}, width,
                                              work.columns + j, BLOCK, false,
                                              share + from * BLOCK + j, BLOCK);
            });
        } else {
            scores<Widened<F32>>(turns, turns, work.count, width, coefficients, work.records, share);
        }
        add_shares(share, BLOCK);
        forget();
    }

    void forget() const {
        for (int64_t i = 0; i < size / BLOCK; ++i) held[i] = -1;
    }

    void set_all() {
        const KvCall& call = work.call;
        const KvRun& run = work.run;
        const KvCentre& centre = *call.centre;
        const KvPlane& plane = centre.queries;
        forget();
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

    // Turns all coefficients to the middle of the positions from that of a row of the table on.
    void turn(const float* first) const {
        multiply(near.middle, first, 1, row);
        for (int64_t r = 0; r < work.records; ++r) {
            multiply(row, coefficients + r * stride, -1, turned + r * stride);
            near.gather(turned + r * stride);
        }
    }

    // The product of complex numbers, or if `sign` is -1 of conjugates of a and numbers b.
    void multiply(const float* __restrict a, const float* __restrict b, float sign,
                  float* __restrict to) const {
        const int64_t n = width / 2;
        for (int64_t i = 0; i < n; ++i) to[i] = a[i] * b[i] - sign * a[n + i] * b[n + i];
        for (int64_t i = 0; i < n; ++i) to[n + i] = a[i] * b[n + i] + sign * a[n + i] * b[i];
    }
};

}  // namespace
