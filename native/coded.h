// Scores and sums of values computed on codes in integer arithmetic: queries and weights are
// rounded to 16-bit numbers, with an error far below that of the codes.
#pragma once
#include "codes.h"
#include "values.h"

namespace {

// -- scores ----------------------------------------------------------------------------------

// A query as 16-bit numbers, in the memory of padded(width) floats: the numbers in the order of the
// codes' lanes, each group's step, and each group's factor for a key's zero point.
struct CodedQuery {
    int16_t* codes;
    float *step, *zero;
    CodedQuery(float* memory, int64_t width, int64_t groups)
        : codes((int16_t*)memory), step(memory + width / 2), zero(step + groups) {}
};

template <int BITS>
void code_query(float* x, int64_t width, int64_t group, bool with_zero, CodedQuery to) {
    typedef Codes<BITS> C;
    int16_t ordered[MOST_WIDTH];
    for (int64_t g = 0; g < group_count(width, group); ++g) {
        const int64_t from = g * group, size = width - from < group ? width - from : group;
        const Rounded rounded = round16(x + from, size, ordered + from);
        to.step[g] = rounded.step;
        to.zero[g] = rounded.step * (float)rounded.sum * (with_zero ? 1 : -C::MIDDLE);
    }
    for (int64_t piece = 0; piece < width; piece += C::PIECE)
        for (int64_t k = 0; k < C::PARTS; ++k)
            for (int64_t i = 0; i < 16; ++i)
                to.codes[piece + k * 16 + i] = ordered[piece + i * C::PARTS + k];
}

// The products of MT queries with the loads of one unit of a key. LOADS: their number; 0:
// `any_loads`.
template <int BITS, int MT, int LOADS>
KV_INLINE void dot_unit(const char* key, const int16_t* q, int64_t q_stride, int64_t any_loads,
                        s32 (&sum)[MT]) {
    typedef Codes<BITS> C;
    const auto add = [&](s16 codes, int64_t at, bool first) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int m = 0; m < MT; ++m) {
            const s32 product = dot_pairs(codes, load<s16>(q + m * q_stride + at));
            sum[m] = first ? product : sum[m] + product;
        }
    };
    const auto piece = [&](int64_t i) __attribute__((always_inline)) {
        const s16 x = load<s16>(key + i * 32);
        add(C::template part<0>(x), i * C::PIECE, i == 0);
        add(C::template part<1>(x), i * C::PIECE + 16, false);
        if constexpr (BITS == 4) {
            add(C::template part<2>(x), i * C::PIECE + 32, false);
            add(C::template part<3>(x), i * C::PIECE + 48, false);
        }
    };
    piece(0);
    if (LOADS == 2) piece(1);
    if (LOADS == 0)
        for (int64_t i = 1; i < any_loads; ++i) piece(i);
}

// Adds a unit's contribution to the scores s (MT rows of BLOCK) of MT queries. `low` and `high`:
// scales of the groups in the unit's halves; `step`: steps of the queries (8 lanes each).
template <int BITS, int MT, int LOADS>
KV_OUTLINE void unit_scores(Rows keys, Ahead ahead, int64_t count, const int16_t* q,
                            int64_t q_stride, int64_t loads, const float* low, const float* high,
                            const v8* step, float* s) {
    typedef float v4 __attribute__((vector_size(16)));
    for (int64_t j = 0; j < count; j += 4) {
        Ahead::pass(ahead, 4);
        s32 pair[2][MT];
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            const int64_t slot = j + 2 * i < count ? j + 2 * i : count - 1;
            s32 a[MT], b[MT];
            dot_unit<BITS, MT, LOADS>(keys.at(slot), q, q_stride, loads, a);
            dot_unit<BITS, MT, LOADS>(keys.at(slot + (slot + 1 < count)), q, q_stride, loads, b);
#pragma GCC unroll 8
            for (int m = 0; m < MT; ++m) pair[i][m] = fold2(a[m], b[m]);
        }
        const v8 scale =
            __builtin_shufflevector(load<v4>(low + j), load<v4>(high + j), 0, 1, 2, 3, 4, 5, 6, 7);
#pragma GCC unroll 8
        for (int m = 0; m < MT; ++m) {
            const s32 sums = fold1(pair[0][m], pair[1][m]);
            const v8 x = __builtin_convertvector(sums, v8) * (scale * step[m]);
            const v4 both = __builtin_shufflevector(x, x, 0, 1, 2, 3) +
                            __builtin_shufflevector(x, x, 4, 5, 6, 7);
            float* to = s + m * BLOCK + j;
            store(to, load<v4>(to) + both);
        }
    }
}

constexpr int MOST_CODED_SCORES = W == 16 ? 8 : 4;

// Scores s (records, BLOCK) for the keys of a block with scales and zero points `scale` and `zero`
// (groups, BLOCK); without zero points `zero` equals `scale`.
template <int BITS>
void coded_scores(Rows keys, Rows values, int64_t count, int64_t width, int64_t group,
                  const float* scale, const float* zero, float* queries, int64_t records,
                  float* s) {
    typedef Codes<BITS> C;
    const Units units = Units::of<BITS>(width, group);
    const int64_t groups = group_count(width, group), stride = padded(width);
    for (int64_t r = 0; r < records; ++r) {
        const CodedQuery query(queries + r * stride, width, groups);
        for (int64_t j = 0; j < BLOCK; j += W) {
            vf sum{};
            if (C::MIDDLE)
                for (int64_t g = 0; g < groups; ++g)
                    sum += load<vf>(zero + g * BLOCK + j) * query.zero[g];
            store(s + r * BLOCK + j, sum);
        }
    }
    for (int64_t unit = 0; unit < units.count; ++unit) {
        const int64_t loads = units.loads(unit), first = unit * units.each;
        const Ahead ahead(values, count, unit, units.count);
        const int64_t low = units.low(unit, C::PIECE), high = units.high(unit, C::PIECE);
        const Rows at = {keys.first + first * 32, keys.stride, keys.bytes};
        for_tiles<MOST_CODED_SCORES>(records, [&](int64_t from, auto tile) {
            constexpr int MT = tile.size;
            v8 step[MT];
            for (int m = 0; m < MT; ++m) {
                const CodedQuery query(queries + (from + m) * stride, width, groups);
                step[m] = by_halves(query.step[low], query.step[high]);
            }
            const auto* q = (const int16_t*)(queries + from * stride) + first * C::PIECE;
            const auto run = [&](auto* tile_scores) {
                tile_scores(at, ahead, count, q, 2 * stride, loads, scale + low * BLOCK,
                            scale + high * BLOCK, step, s + from * BLOCK);
            };
            if (loads == 1) run(unit_scores<BITS, MT, 1>);
            else if (loads == 2) run(unit_scores<BITS, MT, 2>);
            else run(unit_scores<BITS, MT, 0>);
        });
    }
}

// -- values ----------------------------------------------------------------------------------

// One record's weights for the values of a unit, for the groups of the unit's halves.
struct CodedWeights {
    int16_t slot[2][BLOCK];
    v8 step, zero;  // the value of 1, and the zero points' contribution

    // The weights of two neighbouring slots, alternating.
    template <bool SPLIT>
    KV_INLINE s16 pair(const CodedWeights& weights, int64_t slot) {
        const s32 low = load<int32_t>(weights.slot[0] + slot) - s32{};
        if (!SPLIT) return (s16)low;
        const s32 high = load<int32_t>(weights.slot[1] + slot) - s32{};
#if defined(__AVX2__)  // GCC 12 would build the shuffle lane by lane
        return (s16)_mm256_blend_epi32((__m256i)low, (__m256i)high, 0xf0);
#endif
        return (s16)__builtin_shufflevector(low, high, 0, 1, 2, 3, 12, 13, 14, 15);
    }
};

// A record's weights p (BLOCK) times the scales of a group (BLOCK), as 16-bit numbers. `zero`: null
// without zero points.
template <int BITS>
KV_INLINE void weigh_group(const float* p, const float* scale, const float* zero, int16_t* to,
                           float& step, float& added) {
    float weight[BLOCK];
    vf exact{}, zeros{};
#pragma GCC unroll 8
    for (int64_t j = 0; j < BLOCK; j += W) {
        const vf x = load<vf>(p + j) * load<vf>(scale + j);
        store(weight + j, x);
        if (zero) exact += x, zeros += load<vf>(p + j) * load<vf>(zero + j);
    }
    const Rounded rounded = round16(weight, BLOCK, to);
    step = rounded.step;
    // Codes are counted from their middle, which halves the error of rounding the weights.
    const float middle = -Codes<BITS>::MIDDLE * (step * (float)rounded.sum);
    added = zero ? sum(zeros) + (middle + Codes<BITS>::MIDDLE * sum(exact)) : middle;
}

template <int BITS>
KV_OUTLINE void weigh_unit(const float* p, const float* scale, const float* zero, int64_t low,
                           int64_t high, CodedWeights& to) {
    float step[2], added[2];
    const int64_t group[2] = {low, high};
    const int other = low != high;
    for (int i = 0; i <= other; ++i)
        weigh_group<BITS>(p, scale + group[i] * BLOCK, zero ? zero + group[i] * BLOCK : nullptr,
                          to.slot[i], step[i], added[i]);
    if (BITS == 4 && !other) memcpy(to.slot[1], to.slot[0], sizeof to.slot[0]);
    to.step = by_halves(step[0], step[other]);
    to.zero = by_halves(added[0], added[other]);
}

// Interleaves slots a and b, from the first or the second half of each 128-bit lane.
template <int HALF>
KV_INLINE s16 interleave(s16 a, s16 b) {
    if constexpr (HALF == 0)
        return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11,
                                       27);
    return __builtin_shufflevector(a, b, 4, 20, 5, 21, 6, 22, 7, 23, 12, 28, 13, 29, 14, 30, 15, 31);
}

// The index of an element's sum: the 8 lanes of part k of half h are at (h * PARTS + k) * 8 among
// the sums of its load.
template <int BITS>
int64_t coded_lane(int64_t element) {
    constexpr int64_t PARTS = Codes<BITS>::PARTS, PIECE = Codes<BITS>::PIECE;
    const int64_t k = element % PARTS, i = element % PIECE / PARTS;  // lane i of part k, see Codes
    return element / PIECE * PIECE + (i % 8 / 4 * PARTS + k) * 8 + i / 8 * 4 + i % 4;
}

// acc = acc * alpha + weights . values, for sums FROM .. FROM + N - 1 of one load of each slot.
template <int BITS, int MT, int FROM, int N>
KV_OUTLINE void coded_columns(Rows values, Ahead ahead, int64_t count,
                              const CodedWeights* weights, const float* alpha, float* acc,
                              int64_t stride) {
    typedef Codes<BITS> C;
    s32 sum[MT][N] = {};
    const char* at = values.first;
    for (int64_t j = 0; j < count; j += 2) {
        Ahead::pass(ahead, 2);
        // If the number of slots is odd, the last slot is paired with itself at a weight of 0.
        const s16 a = load<s16>(at), b = load<s16>(j + 1 < count ? at + values.stride : at);
        at += 2 * values.stride;
        s16 weight[MT];
#pragma GCC unroll 8
        for (int m = 0; m < MT; ++m)
            weight[m] = CodedWeights::template pair<BITS == 4>(weights[m], j);
        const auto add = [&](auto index) __attribute__((always_inline)) {
            constexpr int I = decltype(index)::size;
            if constexpr (I < N) {
                const s16 x = interleave<(FROM + I) / C::PARTS>(a, b);
                const s16 codes = C::template part<(FROM + I) % C::PARTS>(x);
#pragma GCC unroll 8
                for (int m = 0; m < MT; ++m) sum[m][I] += dot_pairs(codes, weight[m]);
            }
        };
        add(Tile<0>{}), add(Tile<1>{}), add(Tile<2>{}), add(Tile<3>{});
        add(Tile<4>{}), add(Tile<5>{}), add(Tile<6>{}), add(Tile<7>{});
    }
#pragma GCC unroll 8
    for (int m = 0; m < MT; ++m)
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) {
            float* to = acc + m * stride + (FROM + i) * 8;
            store(to, load<v8>(to) * alpha[m] + weights[m].zero +
                          __builtin_convertvector(sum[m][i], v8) * weights[m].step);
        }
}

// Number of sums of a load that fit the registers for MT records.
constexpr int sums_at_once(int all, int records) {
    int sums = all;
    while (sums * records > (W == 16 ? 24 : 12)) sums /= 2;
    return sums;
}

constexpr int MOST_CODED_VALUES = 6;

// acc = acc * alpha + p . values, with acc (records, padded(width)) in the order of coded_lane and
// p (records, BLOCK). `zero`: null without zero points.
template <int BITS>
void add_coded_values(Rows values, Rows next, int64_t count, int64_t width, int64_t group,
                      const float* scale, const float* zero, int64_t records, const float* p,
                      const float* alpha, float* acc) {
    typedef Codes<BITS> C;
    const Units units = Units::of<BITS>(width, group);
    const int64_t stride = padded(width);
    for (int64_t unit = 0; unit < units.count; ++unit) {
        const int64_t low = units.low(unit, C::PIECE), high = units.high(unit, C::PIECE);
        const int64_t first = unit * units.each, loads = units.loads(unit);
        for_tiles<MOST_CODED_VALUES>(records, [&](int64_t from, auto tile) {
            constexpr int MT = tile.size, ALL = 2 * C::PARTS, N = sums_at_once(ALL, MT);
            CodedWeights weights[MT];
            for (int m = 0; m < MT; ++m)
                weigh_unit<BITS>(p + (from + m) * BLOCK, scale, zero, low, high, weights[m]);
            for (int64_t piece = first; piece < first + loads; ++piece) {
                const Rows at = {values.first + piece * 32, values.stride, values.bytes};
                const Ahead ahead(next, count, piece, units.pieces);
                float* to = acc + from * stride + piece * C::PIECE;
                const auto columns = [&](auto index) {
                    constexpr int I = decltype(index)::size * N;
                    if constexpr (I < ALL)
                        coded_columns<BITS, MT, I, N>(at, ahead, count, weights, alpha + from, to,
                                                      stride);
                };
                columns(Tile<0>{}), columns(Tile<1>{}), columns(Tile<2>{}), columns(Tile<3>{});
            }
        });
    }
}

}  // namespace
