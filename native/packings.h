// How codes of each width lie in a slot; src/kvkeep/packing.py has the same table.
#pragma once
#include "abi.h"

struct KvPacking {
    int64_t bits;  // of a code
    int64_t wide;  // of the codes that kernels read: 8 or 4
    int64_t low;   // of a code's lower bits, if its bits lie in two planes; otherwise 0

    bool spread() const { return bits != wide; }
    int64_t bytes(int64_t width) const { return width * bits / 8; }
    // The code of 0 without a zero point, as an unsigned number.
    int64_t middle() const { return (int64_t)1 << (bits - 1); }
};

// `static`: see simd.h.
static inline constexpr KvPacking kv_packing(int64_t type) {
    switch (type) {
        case KV_I2: return {2, 4, 0};
        case KV_I3: return {3, 4, 2};
        case KV_I4: return {4, 4, 0};
        case KV_I5: return {5, 8, 4};
        case KV_I6: return {6, 8, 4};
        default: return {8, 8, 0};
    }
}

// What the middle code stands for, in scales above the zero point. Kernels count codes from the
// middle.
static inline constexpr int64_t kv_zero_offset(int64_t type) {
    return type == KV_I8 ? 0 : kv_packing(type).middle();
}

// The type that kernels see: spread codes are those of 8 or 4 bits.
static inline int64_t kv_read_type(int64_t type) {
    if (type < KV_I8) return type;
    return kv_packing(type).wide == 8 ? KV_I8 : KV_I4;
}
