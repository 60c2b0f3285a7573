// The C interface of the native library: pointers and strides, no torch types. Every field has 8
// bytes; src/kvkeep/attention/native.py packs them in this order and must be changed with them.
#pragma once
#include <cstdint>

#define KV_PUBLIC __attribute__((visibility("default")))

extern "C" {

// The version of this interface. Increase it with every change; src/kvkeep/native_library.py checks
// it.
constexpr int KV_ABI = 9;
KV_PUBLIC int kv_abi();

// The type of a plane's elements; src/kvkeep/packing.py has the numbers of codes too. Codes of 4 and
// 2 bits are packed in bytes, the first in the low bits; the strides of their planes count bytes.
enum KvType : int32_t { KV_F32 = 0, KV_BF16 = 1, KV_F16 = 2, KV_I8 = 3, KV_I4 = 4, KV_I2 = 6 };

// A tensor (rows, heads, slots or queries, width). Strides are in elements; that of the width is 1,
// that of a shared axis 0. Any alignment is allowed.
struct KvPlane {
    const void* data;
    int64_t row, head, slot;
    int64_t type;  // KvType; ignored for positions, which are int32
};

// Encoded keys or values. Each `group` elements of a slot share a float16 scale: 8-bit codes mean
// code * scale, 4-bit codes (code - 8) * scale, or code * scale + zero; 2-bit codes have zeros. If
// `block` is more than 1, scales are by channel: each element has its own, which `block` slots share.
struct KvEncoded {
    KvPlane plane;
    KvPlane scale, zero;  // (rows, heads, slots, groups) of float16; data is null if there is none.
                          // By channel (rows, heads, slots / block, width)
    int64_t group;        // a multiple of 8; a slot's last group may be shorter
    int64_t block;        // 1: each slot has scales of its own; slots are a multiple of it
    int64_t rotated;      // 1: keys are Hadamard-rotated, so queries must be rotated too
};

// A run of slots with one encoding. `queries` already include this segment's rotary offset, which
// is applied to queries instead of keys.
struct KvSegment {
    KvEncoded k, v;
    KvPlane position, queries;
    int64_t slots;
    int64_t shared;   // 1: all rows read the same slots
    int64_t follows;  // 1: continues the previous segment, with the same encoding and queries
};

// A query at position t sees a slot at position p if t - p < size or p < sinks, or if
// keep_from <= p < keep_to.
struct KvReach {
    int64_t size, sinks, keep_from, keep_to;
};

// Rows `first` to `end` - 1.
struct KvRows {
    int64_t first, end;
};

struct KvCall {
    const KvSegment* segments;  // these four are set by the library
    const KvReach* reaches;
    const KvRows* holders;      // for each segment, the rows whose slots it holds; null: all rows
    void* const* outs;          // where each row's output begins, or null: `out` has all rows
    const int32_t* position;  // the queries' positions
    const int32_t* bounds;    // (rows, 2, queries): the first and the last position that each query
                              // sees, where `reaches` allow it; null: 0 and its own
    const float* sinks;       // sink logits (heads * group), or null
    void* out;                // (rows, heads * group, queries, value_width), width contiguous
    float* mass;              // (rows, heads, slots of all segments), zeroed, or null
    const uint8_t* observed;  // (rows, queries): the queries whose mass counts; null: all
    int64_t segment_count, reach_count;
    int64_t position_row;  // stride; 0 if the rows share the positions
    int64_t bounds_row;    // likewise
    int64_t observed_row;  // likewise
    int64_t observed_from;  // the first query that is observed in some row
    int64_t peak;           // 1: the mass is the largest weight of a slot, not a sum
    int64_t out_row, out_head, out_query, out_type;
    int64_t rows, heads, group, queries, key_width, value_width;
    int64_t dense;  // 1: no positions; query i of n sees all but the last n - 1 - i slots
    int64_t threads;
    double scale;
    double softcap;  // 0 for none
};

// The slots of one layer, to be ranked. A slot's worth is its score, rounded to 16 significant
// bits; infinity if it is protected (the newest `recent` positions, the first `sinks`, those from
// keep_from to below keep_to); minus infinity if it is empty, outside the window, or its score is
// NaN. The window is that of the next query; if `chunked`, it begins at a multiple of its size.
struct KvRanking {
    const float* score;       // (rows, heads, slots), or null if all scores are equal
    const int32_t* position;  // (rows, heads, slots); the slots are contiguous in both
    const int64_t* newests;   // the newest position of each row, or null: `newest` for all
    int64_t* out;             // (rows, heads, count) contiguous
    int64_t score_row, score_head, position_row, position_head;
    int64_t newest;
    int64_t rows, heads, slots, count;
    int64_t recent, sinks, keep_from, keep_to;
    int64_t window;  // 0 for none
    int64_t chunked;
};

// Finds the `count` slots of least worth, the oldest first among equals. Returns 0, or 1 if memory
// cannot be allocated.
KV_PUBLIC int kv_lowest(const KvRanking* ranking);

// A plane in which slots are moved. Strides are in bytes; a slot is `bytes` long, and so is its
// stride.
struct KvSlots {
    void* data;
    int64_t row, head, bytes, heads;
};

// Frees the slots `victims` (rows or 1, heads or 1, count): surviving slots from the end are moved
// to the holes, in order. Returns 0; 1 if memory cannot be allocated; 2, with nothing changed, if
// the victims are not `count` different slots.
KV_PUBLIC int kv_evict(const KvSlots* planes, int64_t plane_count, int64_t rows,
                       const int64_t* victims, int64_t victim_rows, int64_t victim_heads,
                       int64_t count, int64_t length);

// Tokens to encode in 8 or 4 bits; src/kvkeep/codec/int8.py and int4.py define the codes.
struct KvEncoding {
    KvPlane x, codes, scale, zero;  // zero.data is null unless codes are affine
    int64_t rows, heads, slots, width;
    int64_t bits, group;
    int64_t hadamard;  // 1: rotate tokens by the Hadamard matrix first
};

// Returns 0, or 1 if memory cannot be allocated.
KV_PUBLIC int kv_encode(const KvEncoding* encoding);

// Computes attention. Returns 0, or 1 if scratch memory cannot be allocated.
KV_PUBLIC int kv_attend(const KvCall* call, const KvSegment* segments, const KvReach* reaches);

// A step of one layer, of one token a row. All rows have the same positions, without padding, and
// the query sees all slots. What changes from step to step is in KvToken.
struct KvStep {
    KvCall call;              // with one query; dense
    KvEncoding key, value;    // one token to slot 0; bits are 0 if it is copied as it is
    KvPlane position;         // positions of all slots
    int64_t position_heads;
    KvRanking ranking;        // which slot is freed
};

struct KvToken {
    const void *q, *k, *v;
    void* out;
    const int32_t* positions;  // of the tokens as the caller has them, which are compared
    int64_t position_count;
    int64_t position;          // what they must be
    int64_t slots;             // in use, of the last segment
    int64_t drops;             // 1: first frees the oldest slot that is not protected
};

enum KvStepResult : int { KV_STEP_DONE = 0, KV_STEP_FAILED = 1, KV_STEP_UNLIKE = 2 };

// Frees a slot if asked to, writes the token to the slot after those in use, and attends. `planes`
// are those of the last segment, as for kv_evict. The last segment's `slots`, and the data of all
// queries, are not read. Returns KV_STEP_FAILED if memory cannot be allocated, where a slot may
// have been freed; KV_STEP_UNLIKE, with nothing changed, if the positions are others.
KV_PUBLIC int kv_step(const KvStep* step, const KvSegment* segments, const KvSlots* planes,
                      int64_t plane_count, const KvToken* token);

// Tokens of several sequences, side by side: token i is `i` strides, in bytes, behind each address.
struct KvTokens {
    const char *q, *k, *v;
    char* out;
    const int32_t* positions;  // contiguous
    int64_t q_stride, k_stride, v_stride, out_stride;
};

// The step of one sequence, of one row: the arguments of kv_step, with the token at `index`.
struct KvSequence {
    const KvStep* step;
    const KvSegment* segments;
    const KvSlots* planes;
    int64_t plane_count;
    int64_t index, position, slots, drops;
};

// Makes the steps of `count` sequences, whose calls have the same heads, widths, types and scale.
// Threads share the work of all. Segments that several sequences begin with are read once for them.
// Returns what kv_step returns, for all together.
KV_PUBLIC int kv_step_packed(const KvSequence* sequences, int64_t count, const KvTokens* tokens);

// A linear layer: weights (outputs, inputs) with elements of one row side by side, and a bias
// (outputs) or null, of one KvType: F32, BF16 or F16. Any alignment is allowed.
struct KvLinear {
    const void *weight, *bias;
    int64_t type, inputs, outputs;
    int64_t weight_row;  // stride in elements
    int64_t threads;
};

constexpr int64_t KV_LINEAR_ROWS = 32;  // the most rows of a call

// Computes x W^T + b for x (rows, inputs) and `count` layers of the same type, inputs and threads,
// whose outputs lie side by side in out (rows, all outputs) contiguous, of the same type, with sums
// in float32. `x_row` is a stride in elements. Returns 0, or 1 if memory cannot be allocated.
KV_PUBLIC int kv_linear(const KvLinear* linears, int64_t count, const void* x, int64_t x_row,
                        int64_t rows, void* out);

// A call to repeat.
enum KvRecordedKind : int64_t {
    KV_RECORDED_OTHER = 0,   // made by the caller of kv_repeat
    KV_RECORDED_KERNEL = 1,  // `function`, which returns nothing, with `count` pointers
    KV_RECORDED_LINEAR = 2,  // kv_linear
    KV_RECORDED_STEP = 3,    // kv_step; after four arguments there is the KvToken itself
    KV_RECORDED_PACKED = 4,  // kv_step_packed
};

constexpr int64_t KV_ARGUMENTS = 16;  // the most of a kernel

struct KvRecorded {
    int64_t kind;
    const void* function;
    int64_t count;
    int64_t arguments[KV_ARGUMENTS];
};

// Makes the calls `first` to `end` - 1, in order. Returns `end`; or the first call that did not
// succeed, and in `result` a KvStepResult: KV_STEP_FAILED also for other calls, KV_STEP_UNLIKE also
// for KV_RECORDED_OTHER.
KV_PUBLIC int64_t kv_repeat(const KvRecorded* calls, int64_t first, int64_t end, int64_t* result);

// The instruction set in use: "avx512bf16", "avx512vnni", "avx512", "avx2" or "portable".
KV_PUBLIC const char* kv_instructions();

// Uses the instruction set `name` from now on. Returns 0, or 1 if this processor lacks it.
KV_PUBLIC int kv_use_instructions(const char* name);
}
