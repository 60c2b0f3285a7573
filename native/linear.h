// Shared by linear.cpp (the scheduler) and linear_kernel.cpp (one copy per instruction set).
#pragma once
#include "abi.h"

constexpr int64_t KV_LINEAR_ROWS = 32;  // most rows of a call of the kernel

// Makes the kernel's own copy of x: rows of `kv_linear_stride` elements, 4 bytes each, in the order
// in which the kernel reads weights, padded with zeros.
typedef void KvLinearLoad(const KvLinear& linear, const void* x, int64_t x_row, int64_t rows,
                          void* loaded);

// Computes outputs [first, end) of all rows. `loaded`: the copy of x; `out_row`: the row stride of
// `out` in elements.
typedef void KvLinearRun(const KvLinear& linear, const void* loaded, int64_t rows, int64_t first,
                         int64_t end, void* out, int64_t out_row);

struct KvLinearKernel {
    KvLinearLoad* load;
    KvLinearRun* run;
};
extern const KvLinearKernel kv_linear_portable, kv_linear_avx2, kv_linear_avx512,
    kv_linear_avx512vnni, kv_linear_avx512bf16, kv_linear_amx;

// Whether weights are prefetched past the second-level cache, where they would evict the data that
// Python needs between two steps. Faster on AMD's processors; Intel's have too few buffers for it.
extern const bool kv_bypasses_cache;

constexpr int64_t KV_LINEAR_OUTPUTS = 48;  // outputs of a block
constexpr int64_t KV_LINEAR_STEP = 32;  // largest STEP of any instruction set

// Row stride of the copy of x, in elements.
static inline int64_t kv_linear_stride(int64_t inputs) {
    return (inputs + KV_LINEAR_STEP - 1) / KV_LINEAR_STEP * KV_LINEAR_STEP;
}
