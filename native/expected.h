// Shared by step_expected.cpp and expected.cpp (one copy per instruction set).
#pragma once
#include "kernel.h"

// The slots of one head, and what is known of the queries that will attend to them: they are
// normally distributed before the rotary embedding, which their mean rotation stands for.
struct KvExpected {
    const float* keys;              // (slots, width)
    const float *sums, *products;   // (group, width), (group, width, width), symmetric; see KvQueries
    const float *cosines, *sines;   // (pairs): the mean rotation of each pair of dimensions
    float* out;                     // (group, slots)
    int64_t slots, group, width;
    int64_t pairs, first, interleaved;  // see KvQueries
    float count, scale;
};

struct KvExpectedKernel {
    // Computes the logarithm of the expectation of exp(scale * q . k) for each slot and query head.
    // `scratch`: kv_expected_scratch floats, aligned to 64 bytes.
    void (*run)(const KvExpected& call, float* scratch);
    // Stores each slot's share of softmax over the slots from position `sinks` on, of which the
    // others have none, averaged over the group, times the norm of its value. `logits` (group,
    // slots), `values` (slots, width).
    void (*scores)(const float* logits, int64_t group, const int32_t* position, int64_t sinks,
                   const float* values, int64_t width, int64_t slots, float* out);
};
extern const KvExpectedKernel kv_expected_portable, kv_expected_avx2, kv_expected_avx512,
    kv_expected_avx512vnni, kv_expected_avx512bf16, kv_expected_amx;

// For the products of the group's queries and their sums, a block of keys, and the products of some
// of its rows.
static inline int64_t kv_expected_scratch(const KvExpected& call) {
    const int64_t width = kv_padded(call.width);
    return call.group * width * (width + 1) + KV_BLOCK * (width + 8);
}
