// The C interface of the kernel: pointers and strides, no torch types. Every field has 8 bytes;
// src/kvkeep/attention/native.py packs them in this order and must change with it.
#pragma once
#include <cstdint>

#define KV_PUBLIC __attribute__((visibility("default")))

extern "C" {

// To be raised by whoever changes what follows; src/kvkeep/native_library.py asks for it.
constexpr int KV_ABI = 2;
KV_PUBLIC int kv_abi();

// What one element of a plane is. Codes of 4 bits lie two in a byte, the first in its low half; the
// strides of their planes count bytes.
enum KvType : int32_t { KV_F32 = 0, KV_BF16 = 1, KV_F16 = 2, KV_I8 = 3, KV_I4 = 4 };

// A tensor (rows, heads, slots or queries, width). Strides in elements; the width's is 1, and an
// axis that is shared has stride 0. Any alignment.
struct KvPlane {
    const void* data;
    int64_t row, head, slot;
    int64_t type;  // KvType; positions are int32 whatever it says
};

// Keys or values as they are encoded. Every `group` elements of a slot share a scale, a float16: 8
// bits stand for code * scale, 4 bits for (code - 8) * scale, or for code * scale + zero.
struct KvEncoded {
    KvPlane plane;
    KvPlane scale, zero;  // (rows, heads, slots, groups) of float16; data is null where there is none
    int64_t group;        // a multiple of 8; a slot's last group may be shorter
    int64_t rotated;      // 1: keys stand for themselves rotated, so queries are rotated to meet them
};

// A run of slots with one encoding. `queries` are as these keys need them: a rotary offset turns
// the queries, not the keys.
struct KvSegment {
    KvEncoded k, v;
    KvPlane position, queries;
    int64_t slots;
    int64_t shared;   // 1 when all rows read the same slots
    int64_t follows;  // 1: goes on where the segment before it ends, with the same encoding and queries
};

// A query at position t sees a slot at position p if t - p < size or p < sinks, or if
// keep_from <= p < keep_to.
struct KvReach {
    int64_t size, sinks, keep_from, keep_to;
};

struct KvCall {
    const KvSegment* segments;  // these two are set by kv_attend
    const KvReach* reaches;
    const int32_t* position;  // the queries' positions
    const float* sinks;       // (heads * group), or null
    void* out;                // (rows, heads * group, queries, value_width), width contiguous
    float* mass;              // (rows, heads, slots of all segments), zeroed, or null
    const uint8_t* observed;  // (rows, queries): the queries whose mass counts; null: all
    int64_t segment_count, reach_count;
    int64_t position_row;  // stride; 0 when the rows share them
    int64_t observed_row;  // likewise
    int64_t observed_from;  // no query before this one is observed in any row
    int64_t out_row, out_head, out_query, out_type;
    int64_t rows, heads, group, queries, key_width, value_width;
    int64_t dense;  // 1: no positions; query i of n sees all but the last n - 1 - i slots
    int64_t threads;
    double scale;
    double softcap;  // 0 for none
};

// One layer's slots to choose from. A slot's worth is its score, to 16 significant bits; infinite if it is protected (the
// newest `recent` positions, the first `sinks`, those from keep_from to below keep_to), minus infinity
// if it is empty, out of the window or without a number.
struct KvRanking {
    const float* score;       // (rows, heads, slots), or null when all are worth the same
    const int32_t* position;  // likewise; slots contiguous in both
    const int64_t* newests;   // the newest position of each row, or null when that is `newest`
    int64_t* out;             // (rows, heads, count) contiguous
    int64_t score_row, score_head, position_row, position_head;
    int64_t newest;
    int64_t rows, heads, slots, count;
    int64_t recent, sinks, keep_from, keep_to;
    int64_t window;  // 0 for none
};

// The `count` slots of the least worth, the oldest first among equals. 0, or 1 without memory.
KV_PUBLIC int kv_lowest(const KvRanking* ranking);

// A plane to move slots in; strides in bytes, slots `bytes` apart and as long.
struct KvSlots {
    void* data;
    int64_t row, head, bytes, heads;
};

// Free the slots `victims` (rows or 1, heads or 1, count): survivors from behind fill the holes, in
// their order. 0; 1 without memory; 2, with nothing changed, unless they are `count` slots each.
KV_PUBLIC int kv_evict(const KvSlots* planes, int64_t plane_count, int64_t rows,
                       const int64_t* victims, int64_t victim_rows, int64_t victim_heads,
                       int64_t count, int64_t length);

// Tokens to encode in 8 or 4 bits, as src/kvkeep/codec/int8.py and int4.py say.
struct KvEncoding {
    KvPlane x, codes, scale, zero;  // zero's data is null unless the code is affine
    int64_t rows, heads, slots, width;
    int64_t bits, group;
    int64_t hadamard;  // 1: rotate first
};

// 0, or 1 without memory.
KV_PUBLIC int kv_encode(const KvEncoding* encoding);

// 0, or 1 when scratch memory could not be had.
KV_PUBLIC int kv_attend(const KvCall* call, const KvSegment* segments, const KvReach* reaches);

// The instruction set in use: "avx512bf16", "avx512", "avx2" or "portable".
KV_PUBLIC const char* kv_instructions();

// Take the instruction set `name` from now on; 0, or 1 when this processor lacks it.
KV_PUBLIC int kv_use_instructions(const char* name);
}
