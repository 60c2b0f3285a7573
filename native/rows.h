// Slots where they lie: addressing, prefetching and reading them.
#pragma once
#include "kernel.h"
#include "simd.h"

namespace {

constexpr int64_t BLOCK = KV_BLOCK;
constexpr int64_t STEP = 2 * W;  // elements of a Pair

int64_t padded(int64_t width) { return (width + STEP - 1) / STEP * STEP; }

// Read 2 W elements of which only the first `valid` may be touched.
template <class K>
KV_INLINE typename K::Key read_end(const typename K::Type::Element* x, int64_t valid) {
    typename K::Type::Element copy[STEP] = {};
    memcpy(copy, x, valid * sizeof *x);
    return K::read(copy);
}

// Into the second level: the first is full of the block at hand.
KV_INLINE void prefetch(const char* row, int64_t bytes) {
#pragma GCC unroll 16
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
}

// A plane's slots of one row and head, as bytes, so that code that only prefetches needs no type.
struct Rows {
    const char* first;
    int64_t stride, bytes;
    const char* at(int64_t slot) const { return first + slot * stride; }
};

}  // namespace
