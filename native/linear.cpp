// Divides the outputs of a linear layer among threads.
#include "linear.h"

#include <algorithm>

#include "machine.h"

int kv_linear(const KvLinear* given, const void* x, int64_t x_row, int64_t rows, void* out) {
    const KvLinear& linear = *given;
    constexpr int64_t TOGETHER = KV_LINEAR_OUTPUTS;
    const KvLinearKernel& kernel = *instructions().linear;
    float* loaded = scratch(2, rows * kv_linear_stride(linear.inputs));
    if (!loaded) return 1;
    kernel.load(linear, x, x_row, rows, loaded);
    const int64_t bytes = linear.outputs * linear.inputs * (linear.type == KV_F32 ? 4 : 2);
    const int64_t tiles = (linear.outputs + TOGETHER - 1) / TOGETHER;
    const int64_t threads =
        std::min(threads_for(bytes, linear.threads), std::max<int64_t>(1, tiles));
    share(threads, threads, [&](int64_t i) {
        const int64_t first = tiles * i / threads * TOGETHER;
        const int64_t end = std::min(tiles * (i + 1) / threads * TOGETHER, linear.outputs);
        kernel.run(linear, loaded, rows, first, end, out);
    });
    return 0;
}
