// Shared by step_expected.cpp and expected.cpp (one copy per instruction set).
#pragma once
#include "kernel.h"

// What is known of the queries of one head's group that will attend to its slots: they are normally
// distributed before the rotary embedding, which their mean rotation stands for.
struct KvExpected {
    // (group, width), (group, width, width), symmetric; see KvQueries
    const float *sums, *products;
    const float *cosines, *sines;   // (pairs): the mean rotation of each pair of dimensions
    int64_t group, width;
    int64_t pairs, first, interleaved;  // see KvQueries
    float count, scale;
};

struct KvExpectedKernel {
    // Loads the statistics to `memory`: kv_expected_memory floats, aligned to 64 bytes.
    void (*load)(const KvExpected& call, float* memory);
    // Computes the logarithm of the expectation of exp(scale * q . k) for at most KV_BLOCK keys
    // (count, width) and each query head, after `load`. `out`: (group, count), heads `stride`
    // apart.
    void (*logits)(const KvExpected& call, const float* keys, int64_t count, float* memory,
                   float* out, int64_t stride);
    // The norms of values (count, width).
    void (*norms)(const float* values, int64_t count, int64_t width, float* out);
    // Stores each slot's share of softmax over the slots from position `sinks` on, of which the
    // others have none, averaged over the group, times the norm of its value. `logits`: (group,
    // slots).
    void (*scores)(const float* logits, int64_t group, const int32_t* position, int64_t sinks,
                   const float* norms, int64_t slots, float* out);
};
extern const KvExpectedKernel kv_expected_portable, kv_expected_avx2, kv_expected_avx512,
    kv_expected_avx512vnni, kv_expected_avx512bf16, kv_expected_amx;

// For the products of the group's queries and their sums, a block of keys, and the products of some
// of its rows.
static inline int64_t kv_expected_memory(const KvExpected& call) {
    const int64_t width = kv_padded(call.width);
    return call.group * width * (width + 1) + KV_BLOCK * (width + 8);
}
