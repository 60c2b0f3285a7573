// Divides the outputs of the linear layers of one input among threads.
#include "linear.h"

#include <algorithm>

#include "machine.h"

namespace {

constexpr int64_t ROWS = KV_LINEAR_ROWS;
constexpr int64_t TOGETHER = 16;  // outputs of a tile; threads get whole tiles
constexpr int64_t TILES = KV_LINEAR_OUTPUTS / TOGETHER;  // of a block
constexpr int64_t MOST_COPIED = 1 << 20;  // floats of x that are copied at once, if ROWS rows fit

int64_t tiles_of(const KvLinear& linear) { return (linear.outputs + TOGETHER - 1) / TOGETHER; }

}  // namespace

int kv_linear(const KvLinear* linears, int64_t count, const void* x, int64_t x_row, int64_t rows,
              void* out) {
    const KvLinearKernel& kernel = *instructions().linear;
    const int64_t size = linears->type == KV_F32 ? 4 : 2, own_size = linears->scale ? 1 : size;
    const int64_t stride = kv_linear_stride(linears->inputs);
    int64_t outputs = 0, tiles = 0;
    for (int64_t l = 0; l < count; ++l)
        outputs += linears[l].outputs, tiles += tiles_of(linears[l]);
    const int64_t copied = std::max(ROWS, MOST_COPIED / stride / ROWS * ROWS);
    float* loaded = scratch(2, std::min(rows, copied) * stride);
    if (!loaded) return 1;
    for (int64_t begin = 0; begin < rows; begin += copied) {
        const int64_t some = std::min(rows - begin, copied), groups = (some + ROWS - 1) / ROWS;
        const auto group_of = [&](int64_t g) { return std::min(ROWS, some - g * ROWS); };
        for (int64_t g = 0; g < groups; ++g)
            kernel.load(*linears, (const char*)x + (begin + g * ROWS) * x_row * size, x_row,
                        group_of(g), loaded + g * ROWS * stride);
        const int64_t bytes = groups * outputs * linears->inputs * own_size;
        const int64_t threads = threads_for(bytes, linears->threads);
        const int64_t shares = std::min(threads, std::max<int64_t>(1, tiles));
        share(threads, shares, [&](int64_t i) {
            // The share's tiles, counted over all layers.
            int64_t first = tiles * i / shares, end = tiles * (i + 1) / shares;
            char* to = (char*)out + begin * outputs * size;
            for (int64_t l = 0; l < count && end > 0; ++l) {
                const KvLinear& linear = linears[l];
                const int64_t own = tiles_of(linear), last = std::min(end, own);
                // All groups of rows read a block's weights before the next block is read.
                for (int64_t at = first, next; at < last; at = next) {
                    next = groups > 1 ? std::min(at + TILES, last) : last;
                    for (int64_t g = 0; g < groups; ++g)
                        kernel.run(linear, loaded + g * ROWS * stride, group_of(g), at * TOGETHER,
                                   std::min(next * TOGETHER, linear.outputs),
                                   to + g * ROWS * outputs * size, outputs);
                }
                to += linear.outputs * size;
                first = std::max<int64_t>(0, first - own), end -= own;
            }
        });
    }
    return 0;
}
