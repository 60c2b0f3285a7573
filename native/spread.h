// Spreads codes of 2 and 3 bits to 4 bits, and of 5 and 6 bits to 8 bits, for the code that reads
// codes of 4 and 8 bits.
#pragma once
#include "packings.h"
#include "rows.h"

namespace {

typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

template <int C>
struct Bytes;  // C bytes in a vector
template <>
struct Bytes<32> {
    typedef uint8_t chars __attribute__((vector_size(32)));
    typedef uint64_t words __attribute__((vector_size(32)));
};
template <>
struct Bytes<64> {
    typedef uint8_t chars __attribute__((vector_size(64)));
    typedef uint64_t words __attribute__((vector_size(64)));
};

// SOME bytes, as often as they fit C bytes.
template <int SOME, int C>
KV_INLINE typename Bytes<C>::words repeated(const char* x) {
    typedef typename Bytes<C>::words words;
    if constexpr (SOME == C) return load<words>(x);
    if constexpr (SOME == 8) return load<uint64_t>(x) - words{};
#if defined(__AVX512F__)  // GCC 12 would build the vectors element by element
    if constexpr (SOME == 32) return (words)_mm512_maskz_broadcast_i64x4(0xff, load<__m256i>(x));
    if constexpr (SOME == 16 && C == 64)
        return (words)_mm512_maskz_broadcast_i32x4(0xffff, load<__m128i>(x));
#endif
#if defined(__AVX2__)
    if constexpr (SOME == 16 && C == 32)
        return (words)_mm256_broadcastsi128_si256(load<__m128i>(x));
#endif
    words out;
    for (int i = 0; i < C; i += SOME) memcpy((char*)&out + i, x, SOME);
    return out;
}

// How far 8 bytes of a row of R bytes are shifted whose parts of N bytes share a plane.
template <int BITS, int N, int R>
struct Shifts {
    alignas(64) uint64_t of[R / 8] = {};
    constexpr Shifts() {
        for (int i = 0; i < R / 8; ++i) of[i] = 8 * i / N * BITS;
    }
};

// Codes of 2 bits, four in a byte, to the four half-bytes of a 16-bit word.
KV_INLINE void spread_pairs(const char* from, int64_t bytes, int added, char* to) {
    const auto four = [](auto x) { return (x & 0x0f) | (x & 0xf0) << 4; };
    const auto apart = [](auto x) { return (x & 0x0303) | (x & 0x0c0c) << 2; };
    int64_t i = 0;
    for (; i + 16 <= bytes; i += 16) {
        const u16x16 x = __builtin_convertvector(load<u8x16>(from + i), u16x16);
        store(to + 2 * i, apart(four(x)) + (uint16_t)(added * 0x101));
    }
    for (; i < bytes; ++i)
        store(to + 2 * i, (uint16_t)(apart(four((int)(uint8_t)from[i])) + added * 0x101));
}

// One plane of BITS bits a code: a row of spread codes is divided into WIDE / BITS equal parts, and
// byte i of the plane has the bits of byte i of each part, those of the first part lowest.
template <int BITS, int WIDE>
struct Folded {
    static constexpr int PARTS = WIDE / BITS;
    static constexpr uint8_t MASK = (WIDE == 4 ? 0x11 : 1) * ((1 << BITS) - 1);

    // C bytes from `at` on of a row of R bytes.
    template <int C, int R>
    KV_INLINE auto bytes(const char* plane, int at) {
        typedef typename Bytes<C>::words words;
        constexpr int N = R / PARTS, SOME = N < C ? N : C;  // bytes of a part; bytes to load
        static constexpr Shifts<BITS, N, R> shifts;
        const words x = repeated<SOME, C>(plane + at % N), shift = load<words>(shifts.of + at / 8);
        return (x >> shift) & (words{} + 0x0101010101010101u * MASK);
    }
    KV_INLINE uint8_t byte(const char* plane, int64_t at, int64_t row) {
        const int64_t part = row / PARTS;
        return (uint8_t)plane[at % part] >> at / part * BITS & MASK;
    }
};

// One slot's codes in two planes, the second behind the first, as WIDE bits each, with `added`
// added to each byte. R: bytes of the result, or 0 for any number, `row`.
template <int LOW, int HIGH, int WIDE, int R>
KV_INLINE void unfold(const char* from, int64_t row, uint8_t added, char* to) {
    typedef Folded<LOW, WIDE> Low;
    typedef Folded<HIGH, WIDE> High;
    if constexpr (R != 0) {
        // Longer vectors than the registers would go through memory.
        constexpr int MOST = KV_LANES == 16 ? 64 : 32, C = R < MOST ? R : MOST;
        typedef typename Bytes<C>::chars chars;
#pragma GCC unroll 8
        for (int at = 0; at < R; at += C) {
            const auto low = Low::template bytes<C, R>(from, at);
            const auto high = High::template bytes<C, R>(from + R / Low::PARTS, at);
            store(to + at, (chars)(low | high << LOW) + added);
        }
    } else {
        const char* const second = from + row / Low::PARTS;
        for (int64_t at = 0; at < row; ++at)
            to[at] =
                (char)((Low::byte(from, at, row) | High::byte(second, at, row) << LOW) + added);
    }
}

#if defined(__AVX512F__)
// Two adjacent slots of 64 codes in 3 bits.
KV_INLINE void unfold_two(const char* from, uint8_t added, char* to) {
    typedef Bytes<64>::words words;
    const words x = (words)_mm512_maskz_loadu_epi64(0x3f, from);
    const words low = __builtin_shufflevector(x, x, 0, 1, 0, 1, 3, 4, 3, 4);
    const words high = __builtin_shufflevector(x, x, 2, 2, 2, 2, 5, 5, 5, 5);
    const words codes = (low >> words{0, 0, 2, 2, 0, 0, 2, 2} & 0x3333333333333333u) |
                        (high >> words{0, 1, 2, 3, 0, 1, 2, 3} & 0x1111111111111111u) << 2;
    store(to, (Bytes<64>::chars)codes + added);
}
#endif

template <int LOW, int HIGH, int WIDE, int R>
KV_OUTLINE void unfold_block(Rows codes, int64_t count, int64_t row, uint8_t added, char* to) {
    int64_t j = 0;
#if defined(__AVX512F__)
    if (LOW == 2 && HIGH == 1 && R == 32 && codes.stride == 24)
        for (; j + 2 <= count; j += 2, to += 2 * row) unfold_two(codes.at(j), added, to);
#endif
    for (; j < count; ++j, to += row) unfold<LOW, HIGH, WIDE, R>(codes.at(j), row, added, to);
}

template <int LOW, int HIGH, int WIDE>
void unfold_rows(Rows codes, int64_t count, int64_t row, uint8_t added, char* to) {
    switch (row) {
        case 32:
            return unfold_block<LOW, HIGH, WIDE, WIDE == 4 ? 32 : 0>(codes, count, row, added, to);
        case 64: return unfold_block<LOW, HIGH, WIDE, 64>(codes, count, row, added, to);
        case 128: return unfold_block<LOW, HIGH, WIDE, 128>(codes, count, row, added, to);
        case 256: return unfold_block<LOW, HIGH, WIDE, 256>(codes, count, row, added, to);
        default: return unfold_block<LOW, HIGH, WIDE, 0>(codes, count, row, added, to);
    }
}

// The codes of a block, spread in `memory`, and shifted to the middle of the wider ones.
inline Rows spread(const KvEncoded& x, Rows codes, int64_t count, int64_t width, void* memory) {
    const KvPacking packing = kv_packing(x.plane.type);
    const int64_t row = width * packing.wide / 8;
    const int64_t shift = packing.wide == 8 ? -packing.middle() : 8 - packing.middle();
    const uint8_t added = (uint8_t)(packing.wide == 8 ? shift : 0x11 * shift);
    char* const to = (char*)memory;
    switch (x.plane.type) {
        case KV_I3: unfold_rows<2, 1, 4>(codes, count, row, added, to); break;
        case KV_I5: unfold_rows<4, 1, 8>(codes, count, row, added, to); break;
        case KV_I6: unfold_rows<4, 2, 8>(codes, count, row, added, to); break;
        default:
            for (int64_t j = 0; j < count; ++j)
                spread_pairs(codes.at(j), codes.bytes, added, to + j * row);
    }
    return {to, row, row};
}

// The codes of a block as the kernels read them: in place, or spread in `memory`.
inline Rows readable(const KvEncoded& x, Rows codes, int64_t count, int64_t width, void* memory) {
    const bool narrow = x.plane.type >= KV_I8 && kv_packing(x.plane.type).spread();
    return narrow ? spread(x, codes, count, width, memory) : codes;
}

}  // namespace
