// The C interface of the native library: pointers and strides, no torch types. Every field has 8
// bytes; src/kvkeep/attention/native.py packs the fields in this order. Change both together.
#pragma once
#include <cstddef>
#include <cstdint>

#define KV_PUBLIC __attribute__((visibility("default")))

extern "C" {

// Version of this interface, checked by src/kvkeep/native_library.py. Increase it with every
// change.
constexpr int KV_ABI = 28;
KV_PUBLIC int kv_abi();

// Element types of a plane; src/kvkeep/packing.py has the same numbers for codes. 4-bit and 2-bit
// codes are packed in bytes, the first in the low bits; codes of 6, 5 and 3 bits in two planes
// (spread.h). The strides of their planes count bytes.
enum KvType : int32_t {
    KV_F32 = 0, KV_BF16 = 1, KV_F16 = 2,
    KV_I8 = 3, KV_I4 = 4, KV_I2 = 6, KV_I6 = 7, KV_I5 = 8, KV_I3 = 9,
    KV_HIGH_HALF = 10,  // of scales only: the higher byte of a float16, which is E5M2
};

// A tensor (rows, heads, slots or queries, width). Strides are in elements: 1 along the width, 0
// along a shared axis. Any alignment is allowed.
struct KvPlane {
    const void* data;
    int64_t row, head, slot;
    int64_t type;  // KvType; ignored for positions, which are int32
};

// Encoded keys or values. Each `group` elements of a slot share a scale. 8-bit codes mean
// code * scale; unsigned codes of b bits (code - 2**(b - 1)) * scale, or code * scale + zero, which
// codes of 6 and 5 bits never do. If `block` > 1, scales are by channel: each element has its own
// scale, shared by `block` slots.
struct KvEncoded {
    KvPlane plane;
    KvPlane scale, zero;  // (rows, heads, slots, groups) of float16, scales by slot also of
                          // KV_HIGH_HALF; by channel (rows, heads,
                          // slots / block, width). Null data: no scales, or no zero points
    int64_t group;        // a multiple of 8; a slot's last group may be shorter
    int64_t block;        // 1: scales by slot; otherwise the number of slots is a multiple of it
    int64_t rotated;      // 1: Hadamard-rotated, so queries, or the sums of values, must be too
};

// A run of slots with one encoding. `queries` already include the segment's rotary offset, which is
// applied to queries instead of keys.
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

// The scales of each head's channels, and the mean of its scaled keys. A slot holds the key divided
// by the scales, less the mean turned by the slot's position. src/kvkeep/attention/centre.py
// defines it.
struct KvCentre {
    const float* mean;      // (rows, heads, 2, key_width): the mean, then the scales, contiguous
    int64_t row, head;      // strides in elements
    const float* table;     // (positions, 2 frequencies) contiguous: cosines, then sines; greater
                            // positions use the last row
    const float* near;      // see Near in centre.h: the turns of 0.5, 1.5, ... 31.5 positions
    int64_t near_rows;      // cosines, or sines, of `near`
    int64_t positions;
    int64_t pairs;          // pairs of dimensions that turn; if not all dimensions do, the table
                            // has one more frequency, 0
    int64_t interleaved;    // 1: pairs are (0, 1), (2, 3), ...; 0: (i, i + pairs)
    KvPlane queries;        // as KvSegment.queries, but without a rotary offset; all are multiplied
                            // by the scales, in a step by the library
};

// Rows `first` to `end` - 1.
struct KvRows {
    int64_t first, end;
};

struct KvCall {
    const KvSegment* segments;  // the library sets these four fields, `masses` and `slots_of`
    const KvReach* reaches;
    const KvRows* holders;      // for each segment, the rows that have it; null: all rows
    void* const* outs;          // start of each row's output; null: `out` has all rows
    const int32_t* position;  // positions of the queries
    const int32_t* bounds;    // (rows, 2, queries): first and last position that each query sees,
                              // within `reaches`; null: 0 and the query's own position
    const float* sinks;       // sink logits (heads * group), or null
    const float* slopes;      // (heads * group): added to a query's scores for each position by
                              // which a slot follows the query, for which `position` and the
                              // segments' positions are set even if `dense`; or null
    const float* biases;      // (rows, heads * group, queries, extent), extent contiguous: added to
                              // a query's scores by the positions from a slot to the query, the
                              // last one from extent - 1 on; positions are set as for slopes; or
                              // null
    const KvCentre* centre;   // for which the segments' positions are set even if `dense`; or null
    void* out;                // (rows, heads * group, queries, value_width), width contiguous
    float* mass;              // (rows, heads, slots of all segments), zeroed, or null
    float* const* masses;     // in place of `mass`, for each row: (heads, its slots), zeroed
    const int64_t* slots_of;  // number of slots of each row of `masses`
    const uint8_t* observed;  // (rows, queries): 1 for queries that count for the mass; null: all
    int64_t segment_count, reach_count;
    int64_t position_row;  // stride; 0 if the rows share the positions
    int64_t bounds_row;    // stride; 0 if the rows share the bounds
    int64_t observed_row;  // stride; 0 if the rows share `observed`
    int64_t observed_from;  // index of the first query observed in any row
    int64_t peak;           // 1: the mass is the largest weight of a slot, not a sum
    int64_t bias_row, bias_head, bias_query, extent;  // strides and extent of `biases`
    int64_t out_row, out_head, out_query, out_type;
    int64_t rows, heads, group, queries, key_width, value_width;
    int64_t dense;  // 1: whatever the positions, query i of n sees all but the last n - 1 - i slots
    int64_t threads;
    double scale;
    double softcap;  // 0 for none
};

// The slots of one layer, to be ranked. A slot's worth is its score, rounded to 16 significant
// bits. It is infinity if the slot is protected (the newest `recent` positions, the first `sinks`,
// and keep_from <= position < keep_to), and minus infinity if the slot is empty, outside the window
// of the next query, or has a NaN score. If `chunked`, the window begins at a multiple of its size.
struct KvRanking {
    const float* score;       // (rows, heads, slots), or null if all scores are equal
    const int32_t* position;  // (rows, heads, slots); the slots are contiguous in both
    const int64_t* newests;   // newest position of each row; null: `newest` for all rows
    int64_t* out;             // (rows, heads, count) contiguous
    int64_t score_row, score_head, position_row, position_head;
    int64_t newest;
    int64_t rows, heads, slots, count;
    int64_t recent, sinks, keep_from, keep_to;
    int64_t window;  // 0: none
    int64_t chunked;
};

// Finds the `count` slots of lowest worth, the oldest first among equals. Returns 0, or 1 if memory
// cannot be allocated.
KV_PUBLIC int kv_lowest(const KvRanking* ranking);

// A plane in which slots are moved. Strides are in bytes; `bytes` is both the size and the stride
// of a slot.
struct KvSlots {
    void* data;
    int64_t row, head, bytes, heads;
};

// Frees the slots `victims` (rows or 1, heads or 1, count) of `length`: moves surviving slots from
// the end to the holes, in order. The slots from `own` on lie in the planes `behind`, from which
// they are copied if they stay; null: all lie in `planes`. Returns 0; 1 if memory cannot be
// allocated; 2, with nothing changed, if the victims are not `count` distinct slots.
KV_PUBLIC int kv_evict(const KvSlots* planes, int64_t plane_count, int64_t rows,
                       const int64_t* victims, int64_t victim_rows, int64_t victim_heads,
                       int64_t count, int64_t length, const KvSlots* behind, int64_t own);

// Tokens to encode; src/kvkeep/codec/ints.py defines the codes. `codes.type` is their packing, or
// the type of x for tokens that are copied.
struct KvEncoding {
    KvPlane x, codes, scale, zero;  // zero.data is null unless codes are affine
    int64_t rows, heads, slots, width;
    int64_t group;
    int64_t hadamard;  // 1: rotate tokens by the Hadamard matrix first
    float* errors;     // (rows, heads, slots) contiguous: the squared distance of each token to its
                       // decoded form is added here; or null
};

// Returns 0, or 1 if memory cannot be allocated.
KV_PUBLIC int kv_encode(const KvEncoding* encoding);

// Computes attention. Returns 0, or 1 if scratch memory cannot be allocated.
KV_PUBLIC int kv_attend(const KvCall* call, const KvSegment* segments, const KvReach* reaches);

// Attention over one plain segment, of which each query sees all slots but those after its own.
// Tensors are torch's: addresses of their at::TensorImpl (`Tensor._cdata`).
struct KvPlainCall {
    void *q, *k, *v;    // (rows, heads * group, queries, width), (rows or 1, heads, slots, width)
    void* place;        // int32 (rows or 1, heads or 1, slots)
    void* position;     // int32 (queries) or (rows, queries)
    void* out;          // its data: (rows, queries, heads * group, value width), contiguous
    int64_t slots;      // in use of the planes; -1: all
    double scale;
};

enum KvPlainResult : int {
    KV_PLAIN_DONE = 0,
    KV_PLAIN_FAILED = 1,  // scratch memory cannot be allocated
    KV_PLAIN_OTHER = 2,   // nothing is computed: a tensor has another form, or exceeds its memory
};

// Needs kv_use_torch.
KV_PUBLIC int kv_attend_plain(const KvPlainCall* call);

// Initial value of a policy's plane for a new token.
enum KvEnter : int64_t {
    KV_ENTER_ZERO = 0,
    KV_ENTER_KEY_NORM = 1,    // minus the norm of its key
    KV_ENTER_VALUE_NORM = 2,  // the norm of its value
    KV_ENTER_ERROR = 3,       // the encoding errors of its key and its value, added
    KV_ENTER_GIVEN = 4,       // the caller's value, KvSequence.given
    KV_ENTER_HASH = 5,        // a hash of its position, its head and `seed`
};

// How a step's mass m, from its one query, changes a policy's planes.
enum KvLearn : int64_t {
    KV_LEARN_NOTHING = 0,
    KV_LEARN_SUM = 1,       // score += m
    KV_LEARN_MEAN = 2,      // score = the mean of m over heads
    KV_LEARN_FADE = 3,      // score = score * (1 - fade) + m * fade
    KV_LEARN_WEIGHTED = 4,  // score += m * other / sum(m * other), where `other` is its last plane
};

// A float32 plane (rows, heads, slots) of a policy; slots are contiguous.
struct KvScores {
    float* data;
    int64_t row, head;  // strides in elements
    int64_t heads;
    int64_t enter;
};

constexpr int64_t KV_SCORES = 3;  // most planes of a policy

// A policy's part of a step.
struct KvRule {
    KvScores planes[KV_SCORES];  // the score first; if `mixes`, the encoding error second
    int64_t count;
    int64_t learn;     // KvLearn
    int64_t by_query;  // 1: rank by score divided by the number of queries that saw the slot
    int64_t by_keys;   // 1: rank by minus the cosine between a key and the mean direction of its
                       // head's keys
    int64_t mixes;     // 1: rank by mix * score - (1 - mix) * error, each scaled to 0..1 by head
    int64_t seed;      // for KV_ENTER_HASH
    double fade, mix;
    int64_t* memory;   // if `by_keys`: (rows, heads, memory_head), which the library keeps from
                       // step to step. The caller sets it to 0 whenever slots change otherwise
    int64_t memory_head;  // at least 4 + 1.5 width, rounded up to a multiple of 32, + capacity
};

// How a layer's slots, or those of some rows or one head, take a token. All rows have the same
// number of slots in use.
struct KvStep {
    KvCall call;         // one query a row; the data of its centre's queries is ignored
    KvEncoding key, value;  // encode one token to slot 0; bits are 0 if it is copied unencoded
    KvPlane position;    // positions of all slots
    int64_t position_heads;
    KvRanking ranking;   // determines the slots to free
    KvRule rule;
    const int64_t* pads;  // (rows): padding columns of each row; null: none
    KvReach reaches[2];   // applied if the query does not see all slots
    int64_t reach_count;
    int64_t* left;        // receives the number of slots in use after a step
};

// Tokens. Token t of part p of a layer, such as a head, is t token strides and p part strides, in
// bytes, after each address. Positions are contiguous.
struct KvTokens {
    const char *q, *k, *v;
    char* out;
    const int32_t* positions;  // the caller's, checked against the expected positions; or null
    int64_t position_count;    // 1: all tokens have the same position
    int64_t q_token, k_token, v_token, out_token;
    int64_t q_part, k_part, v_part, out_part;
};

// The queries of a step's rows and heads that a policy has observed before, with which the step
// renews its scores: the score of a slot is the attention expected from queries at the next
// `future` positions, divided among the slots that are no sinks, times the norm of its value.
// Queries are normally distributed before the rotary embedding. Tensors are float32 and contiguous.
struct KvQueries {
    const float* counts;       // (rows): number of observed queries, with the step's
    float* sums;               // (rows, query heads, width): of queries q. The step's are added, if
                               // they are no sinks
    float* products;           // (rows, query heads, width, width): of q q^T, in the same way
    int64_t heads;             // query heads from a row to the next in sums and products
    const float* frequencies;  // (pairs): radians per position
    int64_t pairs, first, interleaved;  // of dimensions; from dimension `first` on; (0, 1), (2, 3),
                                        // ... instead of (i, i + pairs)
    int64_t interval, future;  // rows are renewed if their position + 1 is a multiple of `interval`
};

// A step: its records, and the values that change from step to step.
struct KvSequence {
    const KvStep* step;
    const KvSegment* segments;
    const KvSlots* planes;     // planes of the last segment, as for kv_evict
    int64_t plane_count;
    int64_t token, part;       // indices of its first row's token and part in KvTokens
    int64_t position;          // the token's column; a row's position is this less its padding
    int64_t slots;             // slots in use of the last segment
    int64_t drops;             // 1: first free the oldest slot that is not protected
    int64_t evicts;            // slots to free after attention; in a contest, of all heads together
    int64_t recent;            // newest positions that are protected from eviction
    int64_t dense;             // 1: the query sees all slots
    int64_t contest;           // equal for heads of one row that compete for slots; 0: none
    int64_t safe;              // slots that each head of a contest keeps in any case
    const float* given;        // (rows, heads), for KV_ENTER_GIVEN; or null
    const KvSequence* behind;  // the encoded slots behind a plain tail; or null
    int64_t leaves;            // of those behind: 1 if the oldest token of the tail moves to them
    int64_t sinks;             // of those behind: the tail keeps the first positions of a row
    const KvQueries* queries;  // null: the step renews no scores
};

// Slots behind a tail are the last segment but one. Their policy's planes and numbers are those of
// the tail, but for `slots`, `drops`, `evicts`, `contest` and `safe`: the tail frees none itself,
// and they take only the token that leaves the tail. x of their encodings gives the type of the
// tail's keys and values.

enum KvStepResult : int {
    KV_STEP_DONE = 0,
    KV_STEP_FAILED = 1,
    KV_STEP_UNLIKE = 2,
    KV_STEP_RAISED = 3,  // only for a program's step
};

// Makes `count` steps. Each frees a slot if asked to, writes its tokens to the slots after those in
// use, attends, learns, and frees slots. If count > 1, steps have one row each, and their calls the
// same widths, types and scale; threads share the work of all steps, and leading segments that
// several steps share are read once. The last segment's `slots` and the data of all queries are
// ignored.
//
// Returns KV_STEP_FAILED if memory cannot be allocated; slots may then be freed, if a step drops or
// evicts. Returns KV_STEP_UNLIKE, with nothing changed, if positions differ from the expected ones.
KV_PUBLIC int kv_step(const KvSequence* steps, int64_t count, const KvTokens* tokens);

// A linear layer: weights (outputs, inputs) with contiguous rows, and a bias (outputs) or null, of
// one KvType: F32, BF16 or F16. If `scale` is not null, weights are int8 and stand for their
// products with scale[output]; `type` is then that of x, bias and out. Any alignment is allowed,
// but for the scales.
struct KvLinear {
    const void *weight, *bias;
    const float* scale;
    int64_t type, inputs, outputs;
    int64_t weight_row;  // stride in elements
    int64_t threads;
};

// Computes x W^T + b for x (rows, inputs) and `count` layers of the same type, inputs and threads,
// all with scales or all without, with sums in float32. `out` (rows, all outputs) is contiguous, of
// the same type, with the outputs of all layers side by side. `x_row` is a stride in elements. A
// row's result does not depend on other rows. Returns 0, or 1 if memory cannot be allocated.
KV_PUBLIC int kv_linear(const KvLinear* linears, int64_t count, const void* x, int64_t x_row,
                        int64_t rows, void* out);

// -- programs that torch's AOTInductor compiles ---------------------------------------------------
// Programs call the functions of native/program.cpp, which use the same C interface of torch as the
// programs. Its functions are passed in at run time, so that building this library does not need
// torch.

struct KvAtenTensor;  // the target of torch's AtenTensorHandle

// The last argument of each function receives its result. All return 0, or else an error.
struct KvTorch {
    int32_t (*data)(KvAtenTensor*, void**);
    int32_t (*dim)(KvAtenTensor*, int64_t*);
    int32_t (*sizes)(KvAtenTensor*, int64_t**);
    int32_t (*strides)(KvAtenTensor*, int64_t**);
    int32_t (*type)(KvAtenTensor*, int32_t*);
    int32_t (*empty_strided)(int64_t dim, const int64_t* sizes, const int64_t* strides,
                             int32_t type, int32_t device, int32_t index, KvAtenTensor**);
    int32_t (*from_blob)(void* data, int64_t dim, const int64_t* sizes, const int64_t* strides,
                         int64_t offset, int32_t type, int32_t device, int32_t index,
                         KvAtenTensor**);
    int32_t (*drop)(KvAtenTensor*);
    int32_t (*mm_out)(KvAtenTensor* out, KvAtenTensor*, KvAtenTensor*);
    int32_t (*threads)(uint32_t*);
    int32_t (*device)(KvAtenTensor*, int32_t*);
    int32_t (*layout)(KvAtenTensor*, int32_t*);
    int32_t (*offset)(KvAtenTensor*, int64_t*);  // of the first element in its storage, in elements
    int32_t (*held)(KvAtenTensor*, int64_t*);    // bytes of its storage
    int32_t (*step)(const struct KvTracedStep*);  // makes an unprepared step in Python; any result
                                                  // but KV_MADE means that it raised
};

// Not 0: Python returns 0 if an interrupt comes before its first instruction.
constexpr int32_t KV_MADE = 1;

KV_PUBLIC void kv_use_torch(const KvTorch* torch);

// A tensor on the CPU. `type` is torch's ScalarType. Null data: no tensor.
struct KvTensor {
    void* data;
    const int64_t *sizes, *strides;
    int64_t dim, type;
};

// A program that AOTInductor compiled: its library's AOTInductorModelContainerRunSingleThreaded,
// and its container.
struct KvProgram {
    int32_t (*run)(void* container, KvAtenTensor** inputs, size_t, KvAtenTensor** outputs, size_t,
                   void* stream, void* executor);
    void* container;
};

// Runs a program on `count` inputs, whose memory it reads and writes in place. Each of `results`
// describes one of the `made` tensors, which the caller deletes with `kv_drop`. Returns 0, or 1 if
// the program or an allocation failed.
KV_PUBLIC int kv_run_program(const KvProgram* program, const KvTensor* inputs, int64_t count,
                             KvTensor* results, KvAtenTensor** made, int64_t made_count);
KV_PUBLIC void kv_drop(KvAtenTensor** made, int64_t count);

// The arguments of kvkeep::step, and its contiguous output.
struct KvTracedStep {
    int64_t number;
    KvTensor q, k, v, position, sinks, until, bias, out;
    double scale;
    double softcap;  // 0 for none
};

// Strides in elements. `row` is 0 if any row stride is accepted.
struct KvLayout {
    int64_t heads, width, row, head;
};

// The inputs that a prepared step accepts: contiguous along the last axis.
struct KvKind {
    KvLayout q, k, v;
    int64_t type;  // KvType
    double scale, softcap;
};

// The memory of a ticket, a tensor that names a layer in a program.
struct KvTicket {
    const KvTicket* self;         // differs from its own address in copies, which have no step
    int64_t number;               // identifies the layer for KvTorch.step
    int64_t fed;                  // columns
    const KvSequence* sequences;  // of the prepared step
    int64_t count;                // number of sequences; 0: no step is prepared
    int64_t rows;                 // rows of the step; further rows are padding, set to 0
    const KvKind* kind;
    int64_t result;               // result of the prepared step: KvStepResult, or -1 if it was not
                                  // made; KV_STEP_RAISED if an unprepared step raised
};

// The instruction set in use: "amx", "avx512bf16", "avx512vnni", "avx512", "avx2" or "portable".
KV_PUBLIC const char* kv_instructions();

// Switches to instruction set `name`. Returns 0, or 1 if this processor lacks it.
KV_PUBLIC int kv_use_instructions(const char* name);
}
