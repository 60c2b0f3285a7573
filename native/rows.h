// Slots where they lie: addressing, prefetching and reading them; and tiles of queries.
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

// -- tiles -----------------------------------------------------------------------------------

constexpr int MOST_SUMS = W == 16 ? 8 : 6;  // queries whose sums, two vectors each, stay in registers

template <int N>
struct Tile {
    static constexpr int size = N;
};

// Split the records into tiles of at most `most` (8 or fewer), as even as can be, and call
// f(first record, Tile<size>) for each.
template <class F>
void for_tiles(int64_t records, int64_t most, F f) {
    const int64_t tiles = (records + most - 1) / most;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t from = records * tile / tiles, to = records * (tile + 1) / tiles;
        switch (to - from) {
            case 1: f(from, Tile<1>{}); break;
            case 2: f(from, Tile<2>{}); break;
            case 3: f(from, Tile<3>{}); break;
            case 4: f(from, Tile<4>{}); break;
            case 5: f(from, Tile<5>{}); break;
            case 6: f(from, Tile<6>{}); break;
            case 7: f(from, Tile<7>{}); break;
            default: f(from, Tile<8>{}); break;
        }
    }
}

}  // namespace
