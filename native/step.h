// What writing, attention and settling of a decode step share: its token, and its numbers of slots.
#pragma once
#include <vector>

#include "policy.h"

namespace kv {

inline int64_t element_bytes(int64_t type) { return type == KV_F32 ? 4 : 2; }

// The inputs and the output of a step.
struct Token {
    const char *q, *k, *v;
    char* out;

    Token(const KvTokens& all, const KvSequence& step)
        : q(all.q + step.token * all.q_token + step.part * all.q_part),
          k(all.k + step.token * all.k_token + step.part * all.k_part),
          v(all.v + step.token * all.v_token + step.part * all.v_part),
          out(all.out + step.token * all.out_token + step.part * all.out_part) {}
};

// Slots in use after a step writes, before it evicts.
inline int64_t slots_after(const KvSequence& step) { return step.slots + !step.drops; }

// Slots in use behind a tail after a step writes.
inline int64_t slots_behind(const KvSequence& step) {
    return step.behind->slots - step.behind->drops;
}

inline bool needs_mass(const KvSequence& step) {
    return step.step->rule.learn != KV_LEARN_NOTHING;
}

// Slots of segment i after a step writes.
inline int64_t segment_slots(const KvSequence& step, int64_t i) {
    const int64_t last = step.step->call.segment_count - 1;
    if (i == last) return slots_after(step);
    return step.behind && i + 1 == last ? slots_behind(step) : step.segments[i].slots;
}

// Slots of all segments after a step writes.
inline int64_t all_slots(const KvSequence& step) {
    int64_t slots = 0;
    for (int64_t i = 0; i < step.step->call.segment_count; ++i) slots += segment_slots(step, i);
    return slots;
}

// The mass of each step that needs it, (rows, heads, its slots), zeroed.
class Masses {
    std::vector<float> memory;
    std::vector<int64_t> first;
    const KvSequence* steps;

  public:
    Masses(const KvSequence* steps, int64_t count) : first(count, -1), steps(steps) {
        int64_t floats = 0;
        for (int64_t i = 0; i < count; ++i) {
            if (!needs_mass(steps[i])) continue;
            first[i] = floats;
            const KvCall& call = steps[i].step->call;
            floats += call.rows * call.heads * all_slots(steps[i]);
        }
        memory.resize(floats);
    }

    float* of(const KvSequence* step) {
        const int64_t at = first[step - steps];
        return at < 0 ? nullptr : memory.data() + at;
    }
};

// Attends with the queries of all steps, whose tokens are already written, and stores the masses:
// in one call for the steps whose queries see all slots, and that have as many heads with the same
// slopes and table of a centre. Returns 0, or 1 if memory cannot be allocated.
int attend(const KvSequence* steps, int64_t count, const KvTokens& tokens, Masses& masses);

// Adds a step's queries to `step.queries`, and renews the scores of all slots with them. Returns
// false if memory cannot be allocated.
bool renew_scores(const KvSequence& step, const char* queries);

// Its time, as bytes that are read in it; 0 if the step renews no scores.
int64_t cost_of_renewal(const KvSequence& step);

}  // namespace kv
