// Slots in the lanes of vectors: 16 slots at once, four bytes of each in a lane. No sums across
// lanes are needed then, and queries and weights are read from memory as they are multiplied.
#pragma once
#include "rows.h"

#if KV_LANES == 16
namespace {

typedef uint16_t u16x32 __attribute__((vector_size(64)));

// The rows of a block in 32-byte units and groups of 16 slots: in place, or a copy padded with
// zeros.
[[maybe_unused]] Rows even_rows(Rows rows, int64_t count, char* memory) {
    const int64_t bytes = (rows.bytes + 31) / 32 * 32;
    if (bytes == rows.bytes && count % 16 == 0) return rows;
    memset(memory, 0, (count + 15) / 16 * 16 * bytes);
    for (int64_t j = 0; j < count; ++j) memcpy(memory + j * bytes, rows.at(j), rows.bytes);
    return {memory, bytes, bytes};
}

// 32 bytes of slot a, then 32 of slot b.
KV_INLINE vi two_slots(const char* a, const char* b) {
#if defined(__AVX512F__)
    return (vi)_mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(load<__m256i>(a)),
                                        load<__m256i>(b), 1);
#else
    vi both;
    memcpy(&both, a, 32), memcpy((char*)&both + 32, b, 32);
    return both;
#endif
}

// Transposes a 4 x 4 matrix of 32-bit numbers in each 128 bits.
KV_INLINE void transpose_quads(vi (&x)[4]) {
    const auto low = [](vi a, vi b) __attribute__((always_inline)) {
        return __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13,
                                       29);
    };
    const auto high = [](vi a, vi b) __attribute__((always_inline)) {
        return __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15,
                                       31);
    };
    const vi a = low(x[0], x[2]), b = low(x[1], x[3]), c = high(x[0], x[2]), d = high(x[1], x[3]);
    x[0] = low(a, b), x[1] = high(a, b), x[2] = low(c, d), x[3] = high(c, d);
}

// Two 16-byte pieces of 16 slots: x[c][n] has piece c of slots n, n + 4, n + 8 and n + 12.
KV_INLINE void load_pieces(const char* at, int64_t stride, vi (&x)[2][4]) {
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n, at += stride) {
        const vi a = two_slots(at, at + 4 * stride);
        const vi b = two_slots(at + 8 * stride, at + 12 * stride);
        x[0][n] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25,
                                          26, 27);
        x[1][n] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29,
                                          30, 31);
    }
}

}  // namespace
#endif
