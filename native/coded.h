// Scores and sums of values computed on codes in integer arithmetic: queries and weights are
// rounded to 16-bit numbers, or to bytes for codes of 4 bits, with an error far below that of the
// codes.
#pragma once
#include "codes.h"
#include "values.h"

namespace {

// -- scores ----------------------------------------------------------------------------------

// A query as factors of codes, in the memory of padded(width) floats: the numbers in the order of
// the codes' lanes; and for each group the step, the factor of a key's scale for codes that are not
// counted from their middle, and the query's sum, which is multiplied by a key's zero point.
template <int BITS>
struct CodedQuery {
    typename Codes<BITS>::Factor* codes;
    float *step, *middle, *total;
    CodedQuery(float* memory, int64_t width, int64_t groups)
        : codes((typename Codes<BITS>::Factor*)memory),
          step(memory + width / 2),
          middle(step + groups),
          total(middle + groups) {}
};

template <int BITS>
void code_query(float* x, int64_t width, int64_t group, CodedQuery<BITS> to) {
    typedef Codes<BITS> C;
    int16_t ordered[MOST_WIDTH];
    for (int64_t g = 0; g < group_count(width, group); ++g) {
        const int64_t from = g * group, size = width - from < group ? width - from : group;
        const Rounded rounded = round16(x + from, size, ordered + from, C::MOST_FACTOR);
        to.step[g] = rounded.step;
        to.middle[g] = -C::MIDDLE * (rounded.step * (float)rounded.sum);
        vf added{};
        for (int64_t i = from; i < from + size; i += W) added += load<vf>(x + i);
        to.total[g] = sum(added);
    }
    for (int64_t piece = 0; piece < width; piece += C::PIECE)
        for (int64_t i = 0; i < C::PIECE; ++i)
            to.codes[piece + i % 2 * C::PIECE / 2 + i / 2] =
                (typename C::Factor)ordered[piece + i];
}

// The products of MT queries with the loads of one unit of a key. LOADS: their number; 0:
// `any_loads`.
template <int BITS, int MT, int LOADS>
KV_INLINE void dot_unit(const char* key, const char* q, int64_t q_stride, int64_t any_loads,
                        s32 (&sum)[MT]) {
    typedef Codes<BITS> C;
    const auto piece = [&](int64_t i, bool first) __attribute__((always_inline)) {
        const s16 x = load<s16>(key + i * 32);
        const s16 even = C::template part<0>(x), odd = C::template part<1>(x);
#pragma GCC unroll 8
        for (int m = 0; m < MT; ++m) {
            const s32 product = C::dot(even, odd, q + m * q_stride + i * C::FACTORS);
            sum[m] = first ? product : sum[m] + product;
        }
    };
    piece(0, true);
    if (LOADS == 2) piece(1, false);
    if (LOADS == 0)
        for (int64_t i = 1; i < any_loads; ++i) piece(i, false);
}

// Adds a unit's contribution to the scores s (MT rows of BLOCK) of MT queries. `low` and `high`:
// scales of the groups in the unit's halves; `step`: steps of the queries (8 lanes each).
template <int BITS, int MT, int LOADS>
KV_OUTLINE void unit_scores(Rows keys, Lines ahead, int64_t count, const char* q,
                            int64_t q_stride, int64_t loads, const float* low, const float* high,
                            const v8* step, float* s) {
    typedef float v4 __attribute__((vector_size(16)));
    for (int64_t j = 0; j < count; j += 4) {
        Lines::pass(ahead);
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
// (groups, BLOCK); `zero` is null without zero points.
template <int BITS>
void coded_scores(Rows keys, Rows values, int64_t count, int64_t width, int64_t group,
                  const float* scale, const float* zero, float* queries, int64_t records,
                  float* s) {
    typedef Codes<BITS> C;
    const Units units = Units::of<BITS>(width, group);
    const int64_t groups = group_count(width, group), stride = padded(width);
    for (int64_t r = 0; r < records; ++r) {
        const CodedQuery<BITS> query(queries + r * stride, width, groups);
        for (int64_t j = 0; j < BLOCK; j += W) {
            vf sum{};
            for (int64_t g = 0; g < groups; ++g) {
                if (C::MIDDLE) sum += load<vf>(scale + g * BLOCK + j) * query.middle[g];
                if (zero) sum += load<vf>(zero + g * BLOCK + j) * query.total[g];
            }
            store(s + r * BLOCK + j, sum);
        }
    }
    for (int64_t unit = 0; unit < units.count; ++unit) {
        const int64_t loads = units.loads(unit), first = unit * units.each;
        const Lines lines(values, count, (count + 3) / 4, unit, units.count);
        const int64_t low = units.low(unit, C::PIECE), high = units.high(unit, C::PIECE);
        const Rows at = {keys.first + first * 32, keys.stride, keys.bytes};
        for_tiles<MOST_CODED_SCORES>(records, [&](int64_t from, auto tile) {
            constexpr int MT = tile.size;
            v8 step[MT];
            for (int m = 0; m < MT; ++m) {
                const CodedQuery<BITS> query(queries + (from + m) * stride, width, groups);
                step[m] = by_halves(query.step[low], query.step[high]);
            }
            const char* q = (const char*)(queries + from * stride) + first * C::FACTORS;
            Lines ahead = lines;
            if (from) ahead.some = 0;
            const auto run = [&](auto* tile_scores) {
                tile_scores(at, ahead, count, q, 4 * stride, loads, scale + low * BLOCK,
                            scale + high * BLOCK, step, s + from * BLOCK);
            };
            if (loads == 1) run(unit_scores<BITS, MT, 1>);
            else if (loads == 2) run(unit_scores<BITS, MT, 2>);
            else run(unit_scores<BITS, MT, 0>);
        });
    }
}

// -- values ----------------------------------------------------------------------------------

// One record's weights for the values of a unit, for the groups of the unit's halves: 16-bit
// numbers of two neighbouring slots, alternating, or bytes of four.
template <int BITS>
struct CodedWeights {
    static constexpr int64_t SLOTS = BITS == 4 ? 4 : 2;  // whose weights a vector repeats
    // The halves of a vector of 4-bit codes may have different groups and weights, so it is whole.
    typedef std::conditional_t<BITS == 4, s16, int32_t> Repeated;
    alignas(32) Repeated slots[BLOCK / SLOTS];
    v8 step, zero;  // the value of 1, and the zero points' contribution

    s16 of(int64_t j) const {
        if constexpr (BITS == 4) return slots[j / SLOTS];
        else return (s16)(slots[j / SLOTS] - s32{});
    }
};

// Added to weights before they are rounded to bytes, so that the sum of many small weights is kept.
struct Dither {
    alignas(64) float of[BLOCK];
    constexpr Dither() : of() {
        for (int64_t j = 0; j < BLOCK; ++j) {
            const double x = (double)(j + 1) * 0.6180339887498949;
            of[j] = (float)(x - (double)(int64_t)x - 0.5);
        }
    }
};

// A record's weights p (BLOCK) times the scales of a group (BLOCK), as factors. `zero`: null
// without zero points.
template <int BITS>
KV_INLINE void weigh_group(const float* p, const float* scale, const float* zero,
                           typename Codes<BITS>::Factor* to, float& step, float& added) {
    typedef Codes<BITS> C;
    static constexpr Dither dither;
    float weight[BLOCK];
    vf zeros{};
#pragma GCC unroll 8
    for (int64_t j = 0; j < BLOCK; j += W) {
        const vf x = load<vf>(p + j) * load<vf>(scale + j);
        store(weight + j, x);
        if (zero) zeros += load<vf>(p + j) * load<vf>(zero + j);
    }
    Rounded rounded;
    if constexpr (BITS == 4) {
        int16_t factors[BLOCK];
        rounded = round16(weight, BLOCK, factors, C::MOST_FACTOR, dither.of);
        for (int64_t j = 0; j < BLOCK; ++j) to[j] = (typename C::Factor)factors[j];
    } else {
        rounded = round16(weight, BLOCK, to);
    }
    step = rounded.step;
    added = sum(zeros) - C::MIDDLE * (step * (float)rounded.sum);
}

template <int BITS>
KV_OUTLINE void weigh_unit(const float* p, const float* scale, const float* zero, int64_t low,
                           int64_t high, CodedWeights<BITS>& to) {
    typename Codes<BITS>::Factor factors[2][BLOCK];
    float step[2], added[2];
    const int64_t group[2] = {low, high};
    const int other = low != high;
    for (int i = 0; i <= other; ++i)
        weigh_group<BITS>(p, scale + group[i] * BLOCK, zero ? zero + group[i] * BLOCK : nullptr,
                          factors[i], step[i], added[i]);
    if constexpr (BITS == 8) memcpy(to.slots, factors[0], sizeof to.slots);
    else for (int64_t j = 0; j < BLOCK; j += to.SLOTS) {
        const s32 first = load<int32_t>(factors[0] + j) - s32{};
        const s32 second = load<int32_t>(factors[other] + j) - s32{};
#if defined(__AVX2__)  // GCC 12 would build the shuffle lane by lane
        const __m256i both = _mm256_blend_epi32((__m256i)first, (__m256i)second, 0xf0);
        to.slots[j / to.SLOTS] = (s16)both;
#else
        to.slots[j / to.SLOTS] =
            (s16)__builtin_shufflevector(first, second, 0, 1, 2, 3, 12, 13, 14, 15);
#endif
    }
    to.step = by_halves(step[0], step[other]);
    to.zero = by_halves(added[0], added[other]);
}

// Interleaves the 16-bit lanes of slots a and b, from the first or the second half of each 128
// bits.
template <int HALF>
KV_INLINE s16 interleave(s16 a, s16 b) {
    if constexpr (HALF == 0)
        return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11,
                                       27);
    return __builtin_shufflevector(a, b, 4, 20, 5, 21, 6, 22, 7, 23, 12, 28, 13, 29, 14, 30, 15,
                                   31);
}

// The same for bytes.
template <int HALF>
KV_INLINE s16 interleave_bytes(s16 a, s16 b) {
#if defined(__AVX2__)
    const __m256i x = (__m256i)a, y = (__m256i)b;
    return (s16)(HALF ? _mm256_unpackhi_epi8(x, y) : _mm256_unpacklo_epi8(x, y));
#else
    const s16 x = interleave<HALF>(a, a), y = interleave<HALF>(b, b);  // each lane twice
    const s16 first{0, -1, 0, -1, 0, -1, 0, -1, 0, -1, 0, -1, 0, -1, 0, -1};
    const s16 low = (x & (int16_t)255) | (s16)((u16)y << 8);
    const s16 high = (s16)((u16)x >> 8) | (y & (int16_t)~255);
    return (low & ~first) | (high & first);
#endif
}

// The index of an element's sum: the 8 lanes of sum k are at k * 8 among the sums of its load.
template <int BITS>
int64_t coded_lane(int64_t element) {
    constexpr int64_t PARTS = Codes<BITS>::PARTS, PIECE = Codes<BITS>::PIECE;
    const int64_t k = element % PARTS, i = element % PIECE / PARTS;  // lane i of part k, see Codes
    const int64_t half = PIECE / 4, piece = element / PIECE * PIECE;
    return piece + (i % half / 4 * PARTS + k) * 8 + i / half * 4 + i % 4;
}

// acc = acc * alpha + weights . values, for sums FROM .. FROM + N - 1 of one load of each slot.
template <int BITS, int MT, int FROM, int N>
KV_OUTLINE void coded_columns(Rows values, Lines ahead, int64_t count,
                              const CodedWeights<BITS>* weights, const float* alpha, float* acc,
                              int64_t stride) {
    typedef Codes<BITS> C;
    constexpr int64_t SLOTS = CodedWeights<BITS>::SLOTS;
    constexpr int64_t APART = BITS == 4 ? 32 : BLOCK;  // slots whose sums of bytes fit 16 bits
    const char *at = values.first, *const last = values.at(count - 1);
    s32 sum[MT][N] = {};
    for (int64_t begin = 0; begin < count; begin += APART) {
        const int64_t end = begin + APART < count ? begin + APART : count;
        s16 some[MT][N] = {};  // of bytes
        for (int64_t j = begin; j < end; j += SLOTS, at += SLOTS * values.stride) {
            Lines::pass(ahead);
            s16 slot[SLOTS];  // after the last slot: its codes again, whose weight is 0
#pragma GCC unroll 4
            for (int i = 0; i < SLOTS; ++i)
                slot[i] = load<s16>(i && j + i >= count ? last : at + i * values.stride);
            const auto add = [&](auto index) __attribute__((always_inline)) {
                constexpr int I = decltype(index)::size;
                if constexpr (I < N) {
                    constexpr int K = (FROM + I) / C::PARTS, PART = (FROM + I) % C::PARTS;
                    s16 x;
                    if constexpr (BITS == 4)
                        x = interleave<K % 2>(interleave_bytes<K / 2>(slot[0], slot[1]),
                                              interleave_bytes<K / 2>(slot[2], slot[3]));
                    else
                        x = interleave<K>(slot[0], slot[1]);
                    const s16 codes = C::template part<PART>(x);
#pragma GCC unroll 8
                    for (int m = 0; m < MT; ++m) {
                        const s16 weight = weights[m].of(j);
                        if constexpr (BITS == 4) some[m][I] += dot_bytes(codes, weight);
                        else sum[m][I] += dot_pairs(codes, weight);
                    }
                }
            };
            add(Tile<0>{}), add(Tile<1>{}), add(Tile<2>{}), add(Tile<3>{});
            add(Tile<4>{}), add(Tile<5>{}), add(Tile<6>{}), add(Tile<7>{});
        }
        if constexpr (BITS == 4)
#pragma GCC unroll 8
            for (int m = 0; m < MT; ++m)
#pragma GCC unroll 8
                for (int i = 0; i < N; ++i) sum[m][i] += dot_pairs(some[m][i], s16{} + 1);
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
            constexpr int MT = tile.size, ALL = C::PIECE / 8, N = sums_at_once(ALL, MT);
            CodedWeights<BITS> weights[MT];
            for (int m = 0; m < MT; ++m)
                weigh_unit<BITS>(p + (from + m) * BLOCK, scale, zero, low, high, weights[m]);
            const int64_t passes = (count + weights->SLOTS - 1) / weights->SLOTS;
            for (int64_t piece = first; piece < first + loads; ++piece) {
                const Rows at = {values.first + piece * 32, values.stride, values.bytes};
                float* to = acc + from * stride + piece * C::PIECE;
                const auto columns = [&](auto index) {
                    constexpr int I = decltype(index)::size * N;
                    if constexpr (I < ALL) {
                        Lines ahead(next, count, passes, (piece * ALL + I) / N,
                                    units.pieces * ALL / N);
                        if (from) ahead.some = 0;
                        coded_columns<BITS, MT, I, N>(at, ahead, count, weights, alpha + from, to,
                                                      stride);
                    }
                };
                columns(Tile<0>{}), columns(Tile<1>{}), columns(Tile<2>{}), columns(Tile<3>{});
            }
        });
    }
}

}  // namespace
