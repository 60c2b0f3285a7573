// A policy's part of a decode step: its planes of the new token, learning from the mass, and
// freeing slots.
#pragma once
#include "abi.h"

// Sets a policy's planes at the new slot. `errors`: squared distances of keys and values to their
// decoded forms, (2, rows, heads).
void kv_enter(const KvSequence& step, const char* k, const char* v, int64_t slot,
              const float* errors);

// Forgets what `KvRule.memory` holds, because slots were moved.
void kv_forget(const KvSequence& step);

// Learns from the mass (rows, heads, slots) of the step's query. `slots` includes the new token;
// heads are `stride` apart.
void kv_learn(const KvSequence& step, const float* mass, int64_t slots, int64_t stride);

// Frees those of `slots` slots that the policy no longer keeps, and stores how many are left.
// Returns 0, or 1 if memory cannot be allocated.
int kv_free(const KvSequence& step, int64_t slots);

// Like kv_free, for the heads of a contest: `count` steps of one row and one head each, with their
// slots in use in `left`.
int kv_free_contest(const KvSequence* const* steps, int64_t count);

// The position of a row's new token.
static inline int64_t kv_position(const KvSequence& step, int64_t row) {
    return step.position - (step.step->pads ? step.step->pads[row] : 0);
}
