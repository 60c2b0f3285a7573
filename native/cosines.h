// Shared by policy.cpp and cosines.cpp (one copy per instruction set).
#pragma once
#include "kernel.h"

// What is known of one key.
struct KvDirected {
    float length;
    float least;  // its score is not less
};

// What is known of one head's keys from step to step, at KvRule.memory.
struct KvDirections {
    int64_t slots;       // measured; 0: nothing is known
    int64_t live;        // of them, with a token
    int64_t id;          // of the code that measured them, which chose the order of the sums
    float moved;         // how far the mean direction moved before the last ranking
    float lowest;        // worth that was found in it

    // The sum of the keys' directions, padded to KV_WIDTH_STEP.
    int64_t* sums() { return (int64_t*)(this + 1); }
    // The direction of the sum when slots were last ranked, of length 1, padded in the same way.
    float* mean(int64_t width) { return (float*)(sums() + kv_padded(width)); }
    KvDirected* keys(int64_t width) { return (KvDirected*)(mean(width) + kv_padded(width)); }
};

// The keys of one head.
struct KvKeys {
    const KvEncoded& slots;
    const KvCentre* centre;   // that the slots lack; or null
    const int32_t* position;  // of each slot
    int64_t width, row, head;
};

// The score of a slot is minus the cosine between its key and the mean direction of the head's
// keys. Empty slots do not count. `scratch`: kv_cosine_scratch floats, aligned to 64 bytes.
struct KvCosineKernel {
    // Measures the slots that are not known yet, and stores their scores. Stores a number that the
    // score of each earlier slot is not less than.
    void (*bound)(const KvKeys& keys, int64_t slots, KvDirections& known, float* scratch,
                  float* out);
    // Stores the scores of `count` slots after `bound`.
    void (*score)(const KvKeys& keys, const int32_t* slots, int64_t count, KvDirections& known,
                  float* scratch, float* out);
    // Takes a slot's key out of the sum.
    void (*forget)(const KvKeys& keys, int64_t slot, KvDirections& known, float* scratch);
    // Decodes the keys of `count` slots, at most KV_BLOCK, with their centre, to (count, width).
    void (*decode)(const KvKeys& keys, int64_t slot, int64_t count, float* scratch, float* out);
};
extern const KvCosineKernel kv_cosines_portable, kv_cosines_avx2, kv_cosines_avx512,
    kv_cosines_avx512vnni, kv_cosines_avx512bf16, kv_cosines_amx;

// For the factors of the centre, one key, and a decoded block.
static inline int64_t kv_cosine_scratch(int64_t width) {
    return (2 + KV_BLOCK) * kv_padded(width + 2);
}
