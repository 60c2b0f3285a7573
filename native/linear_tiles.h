// Linear layers of bfloat16 on AMX tiles. 16 outputs and 32 inputs of the weights, where they lie,
// are the first operand of a product; rows of x, as pairs, are the second. Every output is summed
// in the order of the inputs, whatever the number of rows.
#pragma once
#include <algorithm>

#include "linear.h"
#include "rows.h"
#include "tiles.h"

#if defined(KV_TILES)
namespace {

constexpr int64_t TILE_INPUTS = 2 * TILE_PAIRS;
constexpr int64_t PAIR_OF_TILES = 2 * TILE_ROWS;  // outputs, or most rows of x

// Whether a layer is computed on tiles, whatever the number of rows.
bool on_tiles(const KvLinear& linear) {
    return linear.type == KV_BF16 && !linear.scale && linear.outputs >= PAIR_OF_TILES;
}

// Rows of x in the left and in the right tile.
struct RowTiles {
    int64_t left, right;

    explicit RowTiles(int64_t rows) : left(std::min(rows, TILE_ROWS)), right(rows - left) {}
};

// x as pairs (left or right, inputs / 2, rows of that side), padded with zeros.
void load_pairs(const KvLinear& linear, const void* from, int64_t x_row, int64_t rows, void* to) {
    const int64_t stride = kv_linear_stride(linear.inputs), whole = linear.inputs / 2;
    const RowTiles split(rows);
    for (int64_t m = 0; m < rows; ++m) {
        const bool is_left = m < split.left;
        const int64_t step = is_left ? split.left : split.right;
        const uint16_t* x = (const uint16_t*)from + m * x_row;
        uint32_t* own = (uint32_t*)to + (is_left ? m : split.left * stride / 2 + m - split.left);
        for (int64_t p = 0; p < whole; ++p) own[p * step] = load<uint32_t>(x + 2 * p);
        for (int64_t p = whole; p < stride / 2; ++p) own[p * step] = 0;
        if (linear.inputs % 2) own[whole * step] = x[linear.inputs - 1];
    }
}

// The products of 16 outputs, or 32 if BOTH, and all rows -> `sums` (outputs, TILE_ROWS) for the
// rows of the left tile and, if RIGHT, of the right tile. `next`, the weights of the outputs that
// follow, are prefetched in memory order.
template <bool BOTH, bool RIGHT>
void multiply_outputs(const uint16_t* weight, int64_t weight_row, int64_t inputs, const uint32_t* x,
                      RowTiles split, const char* next, float (*sums)[PAIR_OF_TILES][TILE_ROWS]) {
    constexpr int64_t OUTPUTS = BOTH ? PAIR_OF_TILES : TILE_ROWS;
    const int64_t bytes = weight_row * 2, padded = kv_linear_stride(inputs);
    const uint32_t *left = x, *right = x + split.left * padded / 2;
    tile_zero<0>(), tile_zero<2>();
    if constexpr (RIGHT) tile_zero<1>(), tile_zero<3>();
    for (int64_t i = 0; i < padded; i += TILE_INPUTS) {
        const uint16_t* from = weight + i;
        int64_t stride = bytes;
        alignas(64) uint16_t end[PAIR_OF_TILES][TILE_INPUTS];
        if (i + TILE_INPUTS > inputs) {
            memset(end, 0, sizeof end);
            for (int64_t n = 0; n < OUTPUTS; ++n)
                memcpy(end[n], from + n * weight_row, (inputs - i) * 2);
            from = end[0], stride = sizeof *end;
        }
        prefetch(next, OUTPUTS * TILE_BYTES);
        next += OUTPUTS * TILE_BYTES;
        tile_load<4>(from, stride);
        tile_load<6>(left, split.left * 4);
        tile_multiply<0, 4, 6>();
        if constexpr (RIGHT) {
            tile_load<7>(right, split.right * 4);
            tile_multiply<1, 4, 7>();
        }
        if constexpr (BOTH) {
            tile_load<5>((const char*)from + TILE_ROWS * stride, stride);
            tile_multiply<2, 5, 6>();
            if constexpr (RIGHT) tile_multiply<3, 5, 7>();
        }
        left += TILE_PAIRS * split.left, right += TILE_PAIRS * split.right;
    }
    tile_store<0>(sums[0][0], TILE_BYTES);
    if constexpr (RIGHT) tile_store<1>(sums[1][0], TILE_BYTES);
    if constexpr (BOTH) {
        tile_store<2>(sums[0][TILE_ROWS], TILE_BYTES);
        if constexpr (RIGHT) tile_store<3>(sums[1][TILE_ROWS], TILE_BYTES);
    }
}

void run_pairs(const KvLinear& linear, const void* loaded, int64_t rows, int64_t first, int64_t end,
               void* out, int64_t out_row) {
    const RowTiles split(rows);
    const Tiles tiles(split.left, split.right);
    const int64_t weight_row = linear.weight_row, inputs = linear.inputs;
    const uint16_t* const weight = (const uint16_t*)linear.weight;
    const uint16_t* const bias = (const uint16_t*)linear.bias;
    alignas(64) float sums[2][PAIR_OF_TILES][TILE_ROWS] = {};
    alignas(64) float turned[PAIR_OF_TILES][PAIR_OF_TILES];  // (rows, outputs)
    for (int64_t n = first; n < end; n += PAIR_OF_TILES) {
        const bool both = end - n > TILE_ROWS;
        const int64_t group = both ? PAIR_OF_TILES : TILE_ROWS;
        // The layer's last group may begin among outputs of the group before it.
        const int64_t begin = std::min(n, linear.outputs - group);
        const int64_t outputs = std::min(end, begin + group) - n;
        const uint16_t* from = weight + begin * weight_row;
        const char* next = (const char*)(from + group * weight_row);
        const bool right = split.right > 0;
        const auto multiply =
            both ? (right ? multiply_outputs<true, true> : multiply_outputs<true, false>)
                 : (right ? multiply_outputs<false, true> : multiply_outputs<false, false>);
        multiply(from, weight_row, inputs, (const uint32_t*)loaded, split, next, sums);
        for (int64_t m = 0; m < rows; m += 8)
            for (int64_t j = 0; j < PAIR_OF_TILES; j += 8) {
                v8 square[8];
                for (int i = 0; i < 8; ++i)
                    square[i] = load<v8>(&sums[m / TILE_ROWS][j + i][m % TILE_ROWS]);
                transpose8(square);
                for (int i = 0; i < 8; ++i) store(&turned[m + i][j], square[i]);
            }
        for (int64_t m = 0; m < rows; ++m) {
            if (bias)
                for (int64_t j = 0; j < outputs; ++j)
                    turned[m][n - begin + j] += BF16::widen1(bias[n + j]);
            uint16_t narrow[PAIR_OF_TILES];
            narrow_pairs(turned[m], narrow);
            memcpy((uint16_t*)out + m * out_row + n, narrow + n - begin, outputs * 2);
        }
    }
}

}  // namespace
#endif
