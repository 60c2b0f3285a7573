// Divides the outputs of the linear layers of one input among threads.
#include "linear.h"

#include <algorithm>

#include "machine.h"

namespace {

constexpr int64_t TOGETHER = KV_LINEAR_OUTPUTS;

int64_t tiles_of(const KvLinear& linear) { return (linear.outputs + TOGETHER - 1) / TOGETHER; }

}  // namespace

int kv_linear(const KvLinear* linears, int64_t count, const void* x, int64_t x_row, int64_t rows,
              void* out) {
    const KvLinearKernel& kernel = *instructions().linear;
    const int64_t size = linears->type == KV_F32 ? 4 : 2, own_size = linears->scale ? 1 : size;
    float* loaded = scratch(2, rows * kv_linear_stride(linears->inputs));
    if (!loaded) return 1;
    kernel.load(*linears, x, x_row, rows, loaded);
    int64_t outputs = 0, tiles = 0;
    for (int64_t l = 0; l < count; ++l) outputs += linears[l].outputs, tiles += tiles_of(linears[l]);
    const int64_t threads = threads_for(outputs * linears->inputs * own_size, linears->threads);
    const int64_t shares = std::min(threads, std::max<int64_t>(1, tiles));
    share(threads, shares, [&](int64_t i) {
        // The share's tiles, counted over all layers.
        int64_t first = tiles * i / shares, end = tiles * (i + 1) / shares;
        char* to = (char*)out;
        for (int64_t l = 0; l < count && end > 0; ++l) {
            const KvLinear& linear = linears[l];
            const int64_t own = tiles_of(linear);
            if (first < own)
                kernel.run(linear, loaded, rows, first * TOGETHER,
                           std::min(std::min(end, own) * TOGETHER, linear.outputs), to, outputs);
            to += linear.outputs * size;
            first = std::max<int64_t>(0, first - own), end -= own;
        }
    });
    return 0;
}
