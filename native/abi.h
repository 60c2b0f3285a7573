// The C interface of the native library: pointers and strides, no torch types. Every field has 8
// bytes; src/kvkeep/attention/native.py packs them in this order and must be changed with them.
#pragma once
#include <cstdint>

#define KV_PUBLIC __attribute__((visibility("default")))

extern "C" {

// The version of this interface. Increase it with every change; src/kvkeep/native_library.py checks
// it.
constexpr int KV_ABI = 14;
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
    const KvSegment* segments;  // these four, `masses` and `slots_of` are set by the library
    const KvReach* reaches;
    const KvRows* holders;      // for each segment, the rows whose slots it holds; null: all rows
    void* const* outs;          // where each row's output begins, or null: `out` has all rows
    const int32_t* position;  // the queries' positions
    const int32_t* bounds;    // (rows, 2, queries): the first and the last position that each query
                              // sees, where `reaches` allow it; null: 0 and its own
    const float* sinks;       // sink logits (heads * group), or null
    void* out;                // (rows, heads * group, queries, value_width), width contiguous
    float* mass;              // (rows, heads, slots of all segments), zeroed, or null
    float* const* masses;     // in place of `mass`, for each row: (heads, its slots), zeroed, or null;
    const int64_t* slots_of;  // and how many slots the row has. Set by the library
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
    float* errors;     // (rows, heads, slots) contiguous, to which the squared distance of each token
                       // to its decoded form is added; or null
};

// Returns 0, or 1 if memory cannot be allocated.
KV_PUBLIC int kv_encode(const KvEncoding* encoding);

// Computes attention. Returns 0, or 1 if scratch memory cannot be allocated.
KV_PUBLIC int kv_attend(const KvCall* call, const KvSegment* segments, const KvReach* reaches);

// What a plane of a policy holds for a new token.
enum KvEnter : int64_t {
    KV_ENTER_ZERO = 0,
    KV_ENTER_KEY_NORM = 1,    // minus the norm of its key
    KV_ENTER_VALUE_NORM = 2,  // the norm of its value
    KV_ENTER_ERROR = 3,       // how far encoding moved its key and its value, added
    KV_ENTER_GIVEN = 4,       // what the caller gives
    KV_ENTER_HASH = 5,        // a hash of its position, its head and `seed`
};

// What a policy learns of a step from the mass m of its one query.
enum KvLearn : int64_t {
    KV_LEARN_NOTHING = 0,
    KV_LEARN_SUM = 1,       // score += m
    KV_LEARN_MEAN = 2,      // score = the mean of m over heads
    KV_LEARN_FADE = 3,      // score = score * (1 - fade) + m * fade
    KV_LEARN_WEIGHTED = 4,  // score += m * other / sum(m * other), where `other` is its last plane
};

// A plane (rows, heads, slots) of float32 that a policy keeps; slots are contiguous.
struct KvScores {
    float* data;
    int64_t row, head;  // strides in elements
    int64_t heads;
    int64_t enter;
};

constexpr int64_t KV_SCORES = 3;  // the most planes of a policy

// A policy's part of a step.
struct KvRule {
    KvScores planes[KV_SCORES];  // the score first; for `mixes` the encoding error is the second
    int64_t count;
    int64_t learn;     // KvLearn
    int64_t by_query;  // 1: scores are ranked divided by the number of queries that saw the slot
    int64_t by_keys;   // 1: ranked by minus the cosine between a key, which is not encoded, and the
                       // mean direction of its head's keys
    int64_t mixes;     // 1: as mix * score - (1 - mix) * error, both scaled to 0..1 over a head
    int64_t seed;      // of KV_ENTER_HASH
    double fade, mix;
};

// How the slots of a layer, of some of its rows or of one of its heads take a token. All rows have
// the same slots in use.
struct KvStep {
    KvCall call;         // with one query a row
    KvEncoding key, value;  // one token to slot 0; bits are 0 if it is copied as it is
    KvPlane position;    // positions of all slots
    int64_t position_heads;
    KvRanking ranking;   // which slots are freed
    KvRule rule;
    const int64_t* pads;  // (rows): how many columns of padding each row had; null: none
    KvReach reaches[2];   // which apply where the query does not see all slots
    int64_t reach_count;
    int64_t* left;        // receives the number of slots in use after a step
};

// Tokens, whose positions are contiguous. Token t of part p of a layer, such as a head, lies t and p
// strides, in bytes, behind each address.
struct KvTokens {
    const char *q, *k, *v;
    char* out;
    const int32_t* positions;  // as the caller has them, which are compared; or null
    int64_t position_count;    // 1: all tokens have the same
    int64_t q_token, k_token, v_token, out_token;
    int64_t q_part, k_part, v_part, out_part;
};

// A step: its records, and what changes from step to step.
struct KvSequence {
    const KvStep* step;
    const KvSegment* segments;
    const KvSlots* planes;     // of the last segment, as for kv_evict
    int64_t plane_count;
    int64_t token, part;       // its first row's, in KvTokens
    int64_t position;          // the column of the token: a row's position, less its padding
    int64_t slots;             // in use, of the last segment
    int64_t drops;             // 1: first frees the oldest slot that is not protected
    int64_t evicts;            // how many slots it frees after attention; in a contest, all together
    int64_t recent;            // how many of the newest positions are protected then
    int64_t dense;             // 1: the query sees all slots
    int64_t contest;           // heads of one row that compete for slots have the same number; 0: none
    int64_t safe;              // of the heads of a contest, each keeps this many of its slots
    const float* given;        // (rows, heads), for KV_ENTER_GIVEN; or null
};

enum KvStepResult : int {
    KV_STEP_DONE = 0,
    KV_STEP_FAILED = 1,
    KV_STEP_UNLIKE = 2,
    KV_STEP_RAISED = 3,  // of a program's step alone
};

// Makes `count` steps: each frees a slot if asked to, writes its tokens to the slots after those in
// use, attends, learns, and frees slots. Several steps have one row each, and their calls the same
// widths, types and scale; threads share the work of all, and segments that several begin with are
// read once for them. The last segment's `slots`, and the data of all queries, are not read.
//
// Returns KV_STEP_FAILED if memory cannot be allocated: slots may have been freed, if a step drops or
// evicts. KV_STEP_UNLIKE, with nothing changed, if the positions are others.
KV_PUBLIC int kv_step(const KvSequence* steps, int64_t count, const KvTokens* tokens);

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

// -- programs that torch's AOTInductor compiles ---------------------------------------------------
// They call the functions of native/program.cpp, which use the C interface of torch that such
// programs use too. It is given here, so that this library needs nothing of torch to be built.

struct KvAtenTensor;  // torch's AtenTensorHandle refers to one

// The last argument of each receives the result. All return 0, or else an error.
struct KvTorch {
    int32_t (*data)(KvAtenTensor*, void**);
    int32_t (*dim)(KvAtenTensor*, int64_t*);
    int32_t (*sizes)(KvAtenTensor*, int64_t**);
    int32_t (*strides)(KvAtenTensor*, int64_t**);
    int32_t (*type)(KvAtenTensor*, int32_t*);
    int32_t (*empty_strided)(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t type,
                             int32_t device, int32_t index, KvAtenTensor**);
    int32_t (*drop)(KvAtenTensor*);
    int32_t (*threads)(uint32_t*);
    int32_t (*step)(const struct KvTracedStep*);  // makes a step that is not prepared: KV_MADE, or
                                                  // any other number if it raised
};

// Not 0, which Python returns if an interrupt came before its first instruction.
constexpr int32_t KV_MADE = 1;

KV_PUBLIC void kv_use_torch(const KvTorch* torch);

// A tensor on the CPU. `type` is the number of torch's ScalarType. data is null if there is none.
struct KvTensor {
    void* data;
    const int64_t *sizes, *strides;
    int64_t dim, type;
};

// The arguments of kvkeep::step, and where its result goes: contiguous.
struct KvTracedStep {
    int64_t number;
    KvTensor q, k, v, position, sinks, until, out;
    double scale;
    double softcap;  // 0 for none
};

// Strides in elements. `row` is 0 if any stride will do.
struct KvLayout {
    int64_t heads, width, row, head;
};

// The inputs that a prepared step takes: the elements of their last axis are side by side.
struct KvKind {
    KvLayout q, k, v;
    int64_t type;  // KvType
    double scale, softcap;
};

// The memory of a ticket, a tensor that names a layer in a program.
struct KvTicket {
    const KvTicket* self;         // a copy of a ticket has no step
    int64_t number;               // names the layer for KvTorch.step
    int64_t fed;                  // columns
    const KvSequence* sequences;  // of the prepared step
    int64_t count;                // 0: none is prepared
    int64_t rows;                 // how many it has; rows behind them are spare, and become 0
    const KvKind* kind;
    int64_t result;               // of the prepared step: KvStepResult, or -1 if it was not made;
                                  // KV_STEP_RAISED if one that was not prepared raised
};

// The instruction set in use: "avx512bf16", "avx512vnni", "avx512", "avx2" or "portable".
KV_PUBLIC const char* kv_instructions();

// Uses the instruction set `name` from now on. Returns 0, or 1 if this processor lacks it.
KV_PUBLIC int kv_use_instructions(const char* name);
}
