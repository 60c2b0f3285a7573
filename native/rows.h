// Addressing, prefetching and reading slots; and tiles of queries.
#pragma once
#include "kernel.h"
#include "simd.h"

namespace {

constexpr int64_t BLOCK = KV_BLOCK;
constexpr int64_t STEP = 2 * W;  // elements of a Pair

[[maybe_unused]] int64_t padded(int64_t width) { return (width + STEP - 1) / STEP * STEP; }

// Reads 2 W elements; only the first `valid` may be accessed.
template <class K>
KV_INLINE typename K::Key read_end(const typename K::Type::Element* x, int64_t valid) {
    typename K::Type::Element copy[STEP] = {};
    memcpy(copy, x, valid * sizeof *x);
    return K::read(copy);
}

// Prefetches into the second-level cache; the first level holds the current block.
KV_INLINE void prefetch(const char* row, int64_t bytes) {
#pragma GCC unroll 16
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
}

// A plane's slots of one row and head, as bytes, so that prefetching needs no element type.
struct Rows {
    const char* first;
    int64_t stride, bytes;
    const char* at(int64_t slot) const { return first + slot * stride; }
};

// What to prefetch in the `round`-th of several rounds over a block, spread over the calls of
// `pass`, because many prefetches in a row delay later loads. In memory order if the rows are
// contiguous.
struct Lines {
    const char* at;
    int64_t step, each, some;  // bytes between places; lines per place; places per pass

    Lines(Rows rows, int64_t count, int64_t passes, int64_t round = 0, int64_t rounds = 1) {
        const auto share = [](int64_t all, int64_t parts) { return (all + parts - 1) / parts; };
        if (rows.stride == rows.bytes) {
            const int64_t lines = share(share(count * rows.bytes, 64), rounds);
            at = rows.first + round * lines * 64, step = 64, each = 1, some = share(lines, passes);
        } else {
            at = rows.first, step = rows.stride, each = share(rows.bytes, 64);
            some = round ? 0 : share(count, passes);
        }
    }
    KV_INLINE void pass(Lines& lines) {
        for (int64_t i = 0; i < lines.some; ++i, lines.at += lines.step) {
            __builtin_prefetch(lines.at, 0, 2);
            if (__builtin_expect(lines.each > 1, false))
                prefetch(lines.at + 64, 64 * lines.each - 64);
        }
    }
};

// -- tiles -----------------------------------------------------------------------------------

constexpr int MOST_SUMS = W == 16 ? 8 : 6;  // queries whose sums (two vectors each) fit registers

template <int N>
struct Tile {
    static constexpr int size = N;
};

// The tile of for_tiles that contains a record.
struct TileOf {
    int64_t first, size;
    TileOf(int64_t record, int64_t records, int64_t most) {
        const int64_t tiles = (records + most - 1) / most;
        int64_t tile = record * tiles / records;
        while (records * (tile + 1) / tiles <= record) ++tile;
        first = records * tile / tiles;
        size = records * (tile + 1) / tiles - first;
    }
};

// Divides the records into tiles of at most MOST (8 or fewer) records, of nearly equal size, and
// calls f(first record, Tile<size>) for each.
template <int MOST, class F>
void for_tiles(int64_t records, F f) {
    const auto call = [&](int64_t from, auto tile) {
        if constexpr (tile.size <= MOST) f(from, tile);
    };
    const int64_t tiles = (records + MOST - 1) / MOST;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t from = records * tile / tiles, to = records * (tile + 1) / tiles;
        switch (to - from) {
            case 1: call(from, Tile<1>{}); break;
            case 2: call(from, Tile<2>{}); break;
            case 3: call(from, Tile<3>{}); break;
            case 4: call(from, Tile<4>{}); break;
            case 5: call(from, Tile<5>{}); break;
            case 6: call(from, Tile<6>{}); break;
            case 7: call(from, Tile<7>{}); break;
            default: call(from, Tile<8>{}); break;
        }
    }
}

}  // namespace
