// Shared by the scheduler (attend.cpp) and the kernels (kernel.cpp, one copy per instruction set).
#pragma once
#include "abi.h"

// Queries of one head and some rows against a range of slots of one chain, that is of a segment and
// the segments that follow it.
struct KvRun {
    int64_t segment, head;   // the chain's first segment; the kv head
    int64_t segments, past;  // segments of the chain; its slots before the chunk's own, if dense
    int64_t row0, row1;      // rows; more than one only if they share the slots
    int64_t query0, query1;  // tokens of the chunk
    int64_t slot0, slot1;
    // One record for each row, query head of the group and token, in that order: value_width sums
    // of p v, then the largest score, then the sum of p, where p = exp(score - largest score).
    float* partial;
    // For the mass, or null: the weights (record, slot1 - slot0), followed by a block that may be
    // read, and for each block the scores whose weight is 1 (blocks, record).
    float *weights, *tops;
    // The run's own mass (rows, slot1 - slot0); null: the weights are summed later, because other
    // runs have more of the same queries' slots.
    float* mass;
};

// `static`: see simd.h.
static inline int64_t kv_records(const KvCall& call, const KvRun& run) {
    return (run.row1 - run.row0) * call.group * (run.query1 - run.query0);
}

constexpr int64_t KV_BLOCK = 64;     // slots whose scores are computed at once
static inline int64_t kv_blocks(const KvRun& run) {
    return (run.slot1 - run.slot0 + KV_BLOCK - 1) / KV_BLOCK;
}

// Floats of a run's weights and tops.
static inline int64_t kv_kept(const KvCall& call, const KvRun& run) {
    return kv_records(call, run) * (run.slot1 - run.slot0 + kv_blocks(run)) + KV_BLOCK;
}

constexpr int64_t KV_RECORDS = 256;  // most records of a run, unless one token's group has more
constexpr int64_t KV_WIDTH_STEP = 32;  // scratch memory pads widths to a multiple of this

static inline int64_t kv_padded(int64_t width) {
    return (width + KV_WIDTH_STEP - 1) / KV_WIDTH_STEP * KV_WIDTH_STEP;
}

// Floats of scratch memory for a block gathered from several segments: elements, scales, zeros and
// positions.
static inline int64_t kv_gathered(const KvCall& call) {
    return KV_BLOCK * ((call.key_width + call.value_width) * 5 / 4 + 4);
}

// Floats of scratch memory for a block of spread codes, of at most 8 bits.
static inline int64_t kv_spread(int64_t padded) { return KV_BLOCK * padded / 4; }

// Numbers in a row of a centre's table.
static inline int64_t kv_turns(const KvCentre& centre, int64_t width) {
    return 2 * (centre.pairs + (2 * centre.pairs < width));
}

// Positions whose shares of a centre are held: a power of 2, at least two blocks. Few queries hold
// those of most texts, since slots of a policy's choice are in any order.
constexpr int64_t KV_MOST_SHARES = 512 * KV_BLOCK;
static inline int64_t kv_shares(const KvCall& call, int64_t records) {
    if (records >= 16) return 4 * KV_BLOCK;
    int64_t shares = 2 * KV_BLOCK;
    while (shares < call.centre->positions && shares < KV_MOST_SHARES) shares *= 2;
    return shares;
}

// Floats of scratch memory for a centre: coefficients of queries, the same turned, a row, shares, a
// block's rows of the table, and which shares are held.
static inline int64_t kv_centred(const KvCall& call, int64_t records) {
    if (!call.centre) return 0;
    const int64_t width = kv_padded(kv_turns(*call.centre, call.key_width));
    const int64_t shares = kv_shares(call, records);
    return (2 * records + 1 + KV_BLOCK) * width + records * shares + shares / KV_BLOCK;
}

// Records for which a run's scratch memory has rows: a multiple of the rows of a tile.
static inline int64_t kv_rows(int64_t records) { return (records + 15) / 16 * 16; }

// Floats of scratch memory that a run of `own` records needs.
static inline int64_t kv_scratch(const KvCall& call, int64_t own) {
    const int64_t records = kv_rows(own);
    const int64_t key = kv_padded(call.key_width), value = kv_padded(call.value_width);
    return records * (key + value + 2 * KV_BLOCK + 3) + KV_BLOCK * (2 * key + value + 33) + 64 +
           kv_gathered(call) + kv_spread(key) + kv_spread(value) + kv_centred(call, own);
}

// kv_attend, after the fields that the library sets are set.
int kv_attend_call(const KvCall& call);

typedef void KvKernel(const KvCall& call, const KvRun& run, float* scratch);
KvKernel kv_run_portable, kv_run_avx2, kv_run_avx512, kv_run_avx512vnni, kv_run_avx512bf16,
    kv_run_amx;
