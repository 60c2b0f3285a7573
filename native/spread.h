// Spreads 2-bit codes to 4 bits, for the code that reads 4-bit codes.
#pragma once
#include "rows.h"

namespace {

// A block of 2-bit codes (count, width / 4 bytes) as 4-bit codes in `memory`.
inline Rows spread(Rows codes, int64_t count, void* memory) {
    typedef uint8_t bytes __attribute__((vector_size(16)));
    typedef uint16_t words __attribute__((vector_size(32)));
    // The four codes of a byte become the four half-bytes of a 16-bit word.
    const auto four = [](auto x) { return (x & 0x0f) | (x & 0xf0) << 4; };
    const auto apart = [](auto x) { return (x & 0x0303) | (x & 0x0c0c) << 2; };
    const int64_t stride = 2 * codes.bytes;
    for (int64_t j = 0; j < count; ++j) {
        const char* from = codes.at(j);
        char* to = (char*)memory + j * stride;
        int64_t i = 0;
        for (; i + 16 <= codes.bytes; i += 16) {
            const words x = __builtin_convertvector(load<bytes>(from + i), words);
            store(to + 2 * i, apart(four(x)));
        }
        for (; i < codes.bytes; ++i) store(to + 2 * i, (uint16_t)apart(four((int)(uint8_t)from[i])));
    }
    return {(const char*)memory, stride, stride};
}

}  // namespace
