// Codes of 8 and 4 bits: their layout in vectors, their scales, and conversion to floats.
#pragma once
#include "packings.h"
#include "rows.h"

namespace {

// 32 bytes for every instruction set, so that queries have one layout.
typedef int16_t s16 __attribute__((vector_size(32)));
typedef uint16_t u16 __attribute__((vector_size(32)));
typedef int32_t s32 __attribute__((vector_size(32)));

constexpr int64_t MOST_WIDTH = 512;  // sums of 16-bit queries times codes must fit 32 bits
constexpr float MOST_CODE = 32767;   // largest 16-bit code of queries and weights

// Products of 16-bit lanes, adjacent products added. The result has twice as many lanes as floats,
// and its additions do not compete with multiplications for an execution port.
KV_INLINE s32 dot_pairs(s16 a, s16 b) {
#if defined(__AVX2__)
    return (s32)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    const s32 x = (s32)a, y = (s32)b;
    return (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

// Products of unsigned bytes, at most 15, and signed bytes; adjacent products added.
KV_INLINE s16 dot_bytes(s16 a, s16 b) {
#if defined(__AVX2__)
    return (s16)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
#else
    return (a & (int16_t)255) * ((s16)((u16)b << 8) >> 8) + (s16)((u16)a >> 8) * (b >> 8);
#endif
}

// The layout of codes in a 32-byte load: the lanes of part 0 are the elements with an even index,
// the lanes of part 1 the elements with an odd one, so that shifts and masks alone extract them.
// Lanes are 16-bit numbers, or bytes for codes of 4 bits; factors are as wide.
template <int BITS>
struct Codes {
    static constexpr int64_t PARTS = 2, PIECE = 256 / BITS;
    static constexpr int MIDDLE = BITS == 4 ? 8 : 0;  // code of 0 without a zero point
    static constexpr int64_t FACTORS = 64;            // bytes of the factors of a load
    typedef std::conditional_t<BITS == 4, int8_t, int16_t> Factor;
    static constexpr float MOST_FACTOR = BITS == 4 ? 127 : MOST_CODE;

    template <int K>
    KV_INLINE s16 part(s16 x) {
        if constexpr (BITS == 4) return (K ? (s16)((u16)x >> 4) : x) & 0x0f0f;
        return K ? x >> 8 : (s16)((u16)x << 8) >> 8;
    }

    // The products of a load's parts with their factors, summed in pairs or quads of lanes.
    KV_INLINE s32 dot(s16 even, s16 odd, const char* factors) {
        const s16 a = load<s16>(factors), b = load<s16>(factors + 32);
        if constexpr (BITS == 4)
            return dot_pairs(dot_bytes(even, a) + dot_bytes(odd, b), s16{} + 1);
        return dot_pairs(even, a) + dot_pairs(odd, b);
    }
};

KV_INLINE s32 fold2(s32 a, s32 b) {  // within halves: sums of 2 lanes of a, then of b
    return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
}
KV_INLINE s32 fold1(s32 a, s32 b) {
    return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
           __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}

KV_INLINE v8 by_halves(float low, float high) {
    return v8{low, low, low, low, high, high, high, high};
}

// -- groups ----------------------------------------------------------------------------------

int64_t group_count(int64_t width, int64_t group) { return (width + group - 1) / group; }

// A unit: the loads of a slot whose sums are scaled together. It is one group, or, for 4-bit codes,
// one load whose halves are a group each.
struct Units {
    int64_t pieces, each, group, count;  // loads of a slot; loads and elements of a unit; units

    template <int BITS>
    static Units of(int64_t width, int64_t group) {
        const int64_t piece = Codes<BITS>::PIECE, own = group < width ? group : width;
        const int64_t each = own < piece ? 1 : own / piece;
        return {width / piece, each, group, (width / piece + each - 1) / each};
    }
    int64_t loads(int64_t unit) const {
        return each < pieces - unit * each ? each : pieces - unit * each;
    }
    // The group of a unit's first or second half.
    int64_t low(int64_t unit, int64_t piece) const { return unit * each * piece / group; }
    int64_t high(int64_t unit, int64_t piece) const {
        return (unit * each * piece + piece / 2) / group;
    }
};

// Whether codes can be multiplied without decoding them to floats: units must cover the slot
// exactly.
[[maybe_unused]] bool fits(const KvEncoded& x, int64_t width) {
    if (x.plane.type < KV_I8 || x.block > 1) return false;
    const bool bytes = kv_read_type(x.plane.type) == KV_I8;
    const int64_t piece = bytes ? Codes<8>::PIECE : Codes<4>::PIECE;
    const bool whole = x.group >= width || x.group % piece == 0 || (!bytes && x.group == piece / 2);
    return width % piece == 0 && width <= MOST_WIDTH && whole;
}

// Splits floats (2 n) into even and odd indices (n each).
inline void part_pairs(const float* from, int64_t n, float* even, float* odd) {
    for (int64_t i = 0; i < n; i += 8) {
        const v8 a = load<v8>(from + 2 * i), b = load<v8>(from + 2 * i + 8);
        store(even + i, __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14));
        store(odd + i, __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15));
    }
}

// A scale or zero point.
[[maybe_unused]] float scale1(const KvPlane& plane, int64_t index) {
    if (plane.type == KV_HIGH_HALF)
        return F16::widen1((uint16_t)(((const uint8_t*)plane.data)[index] << 8));
    return F16::widen1(((const uint16_t*)plane.data)[index]);
}

// Loads the scales or zero points of a block: (BLOCK, groups) -> floats (groups, BLOCK), 0 from
// `count` on.
[[maybe_unused]] void load_scales(const KvPlane& plane, int64_t row, int64_t head, int64_t slot,
                                  int64_t count, int64_t groups, float* table) {
    uint16_t halves[BLOCK * MOST_WIDTH / 16];
    float flat[BLOCK * MOST_WIDTH / 16], pairs[4 * BLOCK];
    const int64_t first = row * plane.row + head * plane.head + slot * plane.slot;
    const uint16_t* from = (const uint16_t*)plane.data + first;
    if (plane.type == KV_HIGH_HALF) {
        const uint8_t* bytes = (const uint8_t*)plane.data + first;
        uint8_t together[BLOCK * MOST_WIDTH / 16];
        if (plane.slot != groups) {
            for (int64_t j = 0; j < count; ++j)
                memcpy(together + j * groups, bytes + j * plane.slot, groups);
            bytes = together;
        }
        for (int64_t i = 0; i < count * groups; ++i) halves[i] = (uint16_t)(bytes[i] << 8);
    } else if (plane.slot == groups) {
        memcpy(halves, from, count * groups * sizeof *halves);
    } else {
        for (int64_t j = 0; j < count; ++j)
            memcpy(halves + j * groups, from + j * plane.slot, groups * sizeof *halves);
    }
    memset(halves + count * groups, 0, (BLOCK - count) * groups * sizeof *halves);
    float* to = groups == 1 ? table : flat;
    for (int64_t i = 0; i < BLOCK * groups; i += W) store(to + i, F16::widen_half(halves + i));
    if (groups == 2) {
        part_pairs(flat, BLOCK, table, table + BLOCK);
    } else if (groups == 4) {
        part_pairs(flat, 2 * BLOCK, pairs, pairs + 2 * BLOCK);
        part_pairs(pairs, BLOCK, table, table + 2 * BLOCK);
        part_pairs(pairs + 2 * BLOCK, BLOCK, table + BLOCK, table + 3 * BLOCK);
    } else if (groups > 1) {
        for (int64_t g = 0; g < groups; ++g)
            for (int64_t j = 0; j < BLOCK; ++j) table[g * BLOCK + j] = flat[j * groups + g];
    }
}

// Adds the offset between a code and the number that kernels read to zero points; see
// kv_zero_offset.
[[maybe_unused]] void count_from_middle(const KvEncoded& x, const float* scale, int64_t count,
                                        float* zero) {
    const float offset = (float)kv_zero_offset(x.plane.type);
    for (int64_t i = 0; i < count; ++i) zero[i] += offset * scale[i];
}

// -- 16-bit numbers --------------------------------------------------------------------------

struct Rounded {
    float step;   // the value of 1; NaN if a number is not finite
    int32_t sum;  // of the 16-bit numbers
};

// Rounds numbers x (count, a multiple of 16) to multiples, -limit..limit, of a step. `dither`
// (count) is added in units of the step; null for none.
KV_INLINE Rounded round16(const float* x, int64_t count, int16_t* to, float limit = MOST_CODE,
                          const float* dither = nullptr) {
    vi most{}, added{};
    for (int64_t i = 0; i < count; i += W) {
        // The bits of non-negative floats sort like their values.
        const vi size = load<vi>(x + i) & 0x7fffffff;
        most = size > most ? size : most;
    }
    const int32_t bits = largest(most);
    float high;
    memcpy(&high, &bits, 4);
    const bool finite = bits < 0x7f800000;
    if (!finite || high < 1e-30f) {  // the inverse of a smaller number would overflow
        memset(to, 0, count * sizeof *to);
        return {finite ? 0.0f : high - high, 0};
    }
    const vf inverse = all(limit / high), magic = all(12582912.0f);
    for (int64_t i = 0; i < count; i += W) {
        const vf scaled = load<vf>(x + i) * inverse + (dither ? load<vf>(dither + i) : vf{});
        const vi rounded = (vi)(scaled + magic) - (vi)magic;
        added += rounded;
#if defined(__AVX2__) && KV_LANES == 8
        const __m256i wide = (__m256i)rounded;
        store(to + i,
              _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
#else
        typedef int16_t narrow __attribute__((vector_size(2 * W)));
        store(to + i, __builtin_convertvector(rounded, narrow));
#endif
    }
    return {high * (1 / limit), sum(added)};
}

// -- to floats -------------------------------------------------------------------------------

template <int BITS>
KV_INLINE v8 code8(const uint8_t* x) {  // 8 adjacent codes as floats
    typedef int8_t b8 __attribute__((vector_size(8)));
    typedef int32_t i8 __attribute__((vector_size(32)));
    if constexpr (BITS == 8) {
        return __builtin_convertvector(__builtin_convertvector(load<b8>(x), i8), v8);
    } else {
        const u8v both = load<uint32_t>(x) - u8v{};
        return __builtin_convertvector((i8)(both >> u8v{0, 4, 8, 12, 16, 20, 24, 28} & 15), v8);
    }
}

template <int BITS>
float code1(const uint8_t* x, int64_t i) {
    return BITS == 8 ? (float)(int8_t)x[i] : (float)(x[i / 2] >> i % 2 * 4 & 15);
}

// Decodes a block to floats, (count, padded(width)), and prefetches `next`.
template <int BITS>
void decode(const KvEncoded& x, int64_t row, int64_t head, int64_t slot, Rows codes, Rows next,
            int64_t count, int64_t width, float* wide) {
    const int64_t stride = padded(width), groups = group_count(width, x.group);
    const float offset = (float)kv_zero_offset(x.plane.type);
    const auto of = [&](const KvPlane& plane, int64_t j, int64_t g) {
        const int64_t at = row * plane.row + head * plane.head + (slot + j) * plane.slot;
        return scale1(plane, at + g);
    };
    for (int64_t j = 0; j < count; ++j) {
        const uint8_t* from = (const uint8_t*)codes.at(j);
        float* to = wide + j * stride;
        prefetch(next.at(j), next.bytes);
        for (int64_t g = 0; g < groups; ++g) {
            const float scale = of(x.scale, j, g);
            const float zero =
                (x.zero.data ? of(x.zero, j, g) + offset * scale : 0) - Codes<BITS>::MIDDLE * scale;
            const int64_t end = (g + 1) * x.group < width ? (g + 1) * x.group : width;
            int64_t d = g * x.group;
            for (; d + 8 <= end; d += 8)
                store(to + d, code8<BITS>(from + d * BITS / 8) * scale + zero);
            for (; d < end; ++d) to[d] = code1<BITS>(from, d) * scale + zero;
        }
    }
}

}  // namespace
