// A decode step: one token a row is written, attended to, and settled. In Python the stages of a
// step cost more time than the step itself.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <vector>

#include "machine.h"
#include "simd.h"
#include "step.h"

using namespace kv;

namespace {

// Whether the tokens have the expected positions.
bool expected(const KvSequence& step, const KvTokens& tokens) {
    if (!tokens.positions) return true;
    for (int64_t row = 0; row < step.step->call.rows; ++row) {
        const int64_t index = tokens.position_count == 1 ? 0 : step.token + row;
        if (tokens.positions[index] != kv_position(step, row)) return false;
    }
    return true;
}

// Keys (rows, heads, width) of a step's token, scaled and less their turned centre, as floats.
std::vector<float> centred_keys(const KvSequence& step, const char* keys) {
    const KvEncoding& e = step.step->key;
    const KvCentre& centre = *step.step->call.centre;
    const int64_t pairs = centre.pairs, rest = 2 * pairs < e.width;
    std::vector<float> out(e.rows * e.heads * e.width);
    float* to = out.data();
    for (int64_t row = 0; row < e.rows; ++row) {
        const int64_t place =
            std::clamp<int64_t>(kv_position(step, row), 0, centre.positions - 1);
        const float* cos = centre.table + place * 2 * (pairs + rest);
        const float* sin = cos + pairs + rest;
        for (int64_t head = 0; head < e.heads; ++head, to += e.width) {
            const int64_t from = row * e.x.row + head * e.x.head;
            const float* mean = centre.mean + row * centre.row + head * centre.head;
            const float* scale = mean + e.width;
            for (int64_t i = 0; i < e.width; ++i)
                to[i] = e.x.type == KV_F32    ? ((const float*)keys)[from + i]
                        : e.x.type == KV_BF16 ? BF16::widen1(((const uint16_t*)keys)[from + i])
                                              : F16::widen1(((const uint16_t*)keys)[from + i]);
            for (int64_t i = 0; i < e.width; ++i) to[i] /= scale[i];
            for (int64_t i = 0; i < pairs; ++i) {
                const int64_t a = centre.interleaved ? 2 * i : i;
                const int64_t b = centre.interleaved ? a + 1 : i + pairs;
                const float c = cos[i], s = sin[i];
                to[a] -= mean[a] * c - mean[b] * s;
                to[b] -= mean[b] * c + mean[a] * s;
            }
            for (int64_t i = 2 * pairs; i < e.width; ++i) to[i] -= mean[i];
        }
    }
    return out;
}

bool write(const KvEncoding& written, const char* x, int64_t slot, float* errors);

// Copies or encodes a step's key to slot `slot`.
bool write_key(const KvSequence& step, KvEncoding e, const char* key, int64_t slot, float* errors) {
    if (!step.step->call.centre) return write(e, key, slot, errors);
    std::vector<float> keys = centred_keys(step, key);
    const int64_t type = e.codes.type >= KV_I8 ? (int64_t)KV_F32 : e.x.type;
    auto* narrow = (uint16_t*)keys.data();
    for (size_t i = 0; type != KV_F32 && i < keys.size(); ++i)
        narrow[i] = type == KV_BF16 ? BF16::narrow1(keys[i]) : F16::narrow1(keys[i]);
    e.x = {nullptr, e.heads * e.width, e.width, e.width, type};
    return write(e, (const char*)keys.data(), slot, errors);
}

// Copies or encodes x to slot `slot`. `errors` may be null.
bool write(const KvEncoding& written, const char* x, int64_t slot, float* errors) {
    KvEncoding e = written;
    e.x.data = x;
    if (e.codes.type >= KV_I8) {
        const auto at = [&](KvPlane& plane, int64_t size) {
            if (plane.data) plane.data = (const char*)plane.data + slot * plane.slot * size;
        };
        at(e.codes, 1), at(e.scale, e.scale.type == KV_HIGH_HALF ? 1 : 2), at(e.zero, 2);
        e.errors = errors;
        return !kv_encode(&e);
    }
    const int64_t size = element_bytes(e.x.type), bytes = e.width * size;
    for (int64_t row = 0; row < e.rows; ++row)
        for (int64_t head = 0; head < e.heads; ++head) {
            const int64_t from = row * e.x.row + head * e.x.head;
            const int64_t to = row * e.codes.row + head * e.codes.head + slot * e.codes.slot;
            memcpy((char*)e.codes.data + to * size, x + from * size, bytes);
        }
    return true;
}

// The slots from which a step evicts.
const KvSequence& freed(const KvSequence& step) { return step.behind ? *step.behind : step; }

// Frees the oldest slot that is not protected.
bool drop(const KvSequence& step) {
    KvRanking ranking = step.step->ranking;
    std::vector<int64_t> victims(ranking.rows * ranking.heads), newests(step.step->call.rows);
    for (int64_t row = 0; row < step.step->call.rows; ++row)
        newests[row] = kv_position(step, row) - 1;
    ranking.out = victims.data();
    ranking.newests = newests.data();
    ranking.slots = step.slots;
    ranking.count = 1;
    return !kv_lowest(&ranking) &&
           !kv_evict(step.planes, step.plane_count, step.step->call.rows, victims.data(),
                     ranking.rows, ranking.heads, 1, step.slots, nullptr, 0);
}

// Adds the errors that the codes of a token will have once it leaves the tail, if the policy needs
// them. The free slot to which it is encoded stays free.
bool write_behind(const KvSequence& step, const Token& token, float* errors) {
    const KvStep &s = *step.step, &behind = *step.behind->step;
    const auto* planes = s.rule.planes;
    if (std::none_of(planes, planes + s.rule.count,
                     [](const KvScores& plane) { return plane.enter == KV_ENTER_ERROR; }))
        return true;
    KvEncoding key = behind.key, value = behind.value;
    key.x = s.key.x, value.x = s.value.x;
    const int64_t slot = slots_behind(step);
    return write_key(step, key, token.k, slot, errors) &&
           (!value.rows || write(value, token.v, slot, errors + s.call.rows * s.call.heads));
}

// Frees a slot if asked to, and writes the token. Returns false if memory cannot be allocated.
bool append(const KvSequence& step, const Token& token) {
    const KvStep& s = *step.step;
    const int64_t slot = step.slots - step.drops, count = s.call.rows * s.call.heads;
    std::vector<float> errors(2 * count);
    if (const KvSequence& from = freed(step); from.drops) {
        if (!drop(from)) return false;
        kv_forget(from);
    }
    if (!write_key(step, s.key, token.k, slot, errors.data()) ||
        !write(s.value, token.v, slot, errors.data() + count) ||
        (step.behind && !write_behind(step, token, errors.data())))
        return false;
    const KvPlane& place = s.position;
    for (int64_t row = 0; row < s.call.rows; ++row)
        for (int64_t head = 0; head < s.position_heads; ++head)
            ((int32_t*)place.data)[row * place.row + head * place.head + slot * place.slot] =
                (int32_t)kv_position(step, row);
    kv_enter(step, token.k, token.v, slot, errors.data());
    return true;
}

// The slot of a tail whose token leaves it: the oldest, but for the row's first tokens.
int64_t leaving(const KvSequence& step, int64_t row, int64_t head) {
    const KvPlane& place = step.step->position;
    const auto* at = (const int32_t*)place.data + row * place.row + head * place.head;
    int64_t oldest = 0;
    uint32_t least = UINT32_MAX;
    for (int64_t slot = 0; slot < slots_after(step); ++slot) {
        const int32_t position = at[slot * place.slot];
        const bool sink = position >= 0 && position < step.behind->sinks;
        const uint32_t order = sink ? UINT32_MAX : (uint32_t)(position + 2);  // holes are at -2
        if (order < least) least = order, oldest = slot;
    }
    return oldest;
}

// Encodes the tokens of slots `from`, one for each row and head, to slot `to`.
bool encode_from(const KvEncoding& tail, const KvEncoding& behind, const std::vector<int64_t>& from,
                 int64_t to) {
    const int64_t size = element_bytes(tail.x.type), bytes = tail.width * size;
    std::vector<char> tokens(from.size() * bytes);
    for (int64_t i = 0; i < (int64_t)from.size(); ++i) {
        const KvPlane& plane = tail.codes;
        const int64_t row = i / tail.heads, head = i % tail.heads;
        const int64_t at = row * plane.row + head * plane.head + from[i] * plane.slot;
        memcpy(&tokens[i * bytes], (const char*)plane.data + at * size, bytes);
    }
    KvEncoding e = behind;
    e.x.row = tail.heads * tail.width, e.x.head = tail.width;
    return write(e, tokens.data(), to, nullptr);
}

// Moves a token from the tail, which keeps its order, to the slots behind it. Returns false if
// memory cannot be allocated.
bool leave(const KvSequence& step) {
    const KvStep &tail = *step.step, &behind = *step.behind->step;
    const int64_t rows = tail.call.rows, heads = tail.call.heads, to = slots_behind(step);
    std::vector<int64_t> from;
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t head = 0; head < heads; ++head)
            from.push_back(leaving(step, row, tail.position_heads > 1 ? head : 0));
    if (!encode_from(tail.key, behind.key, from, to) ||
        (behind.value.rows && !encode_from(tail.value, behind.value, from, to)))
        return false;
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t head = 0; head < heads; ++head) {
            const int64_t slot = from[row * heads + head];
            if (head < tail.position_heads) {
                const KvPlane &a = tail.position, &b = behind.position;
                ((int32_t*)b.data)[row * b.row + head * b.head + to * b.slot] =
                    ((const int32_t*)a.data)[row * a.row + head * a.head + slot * a.slot];
            }
            for (int64_t i = 0; i < tail.rule.count; ++i) {
                const KvScores &a = tail.rule.planes[i], &b = behind.rule.planes[i];
                if (head < a.heads)
                    b.data[row * b.row + head * b.head + to] =
                        a.data[row * a.row + head * a.head + slot];
            }
        }
    for (int64_t p = 0; p < step.plane_count; ++p) {
        const KvSlots& plane = step.planes[p];
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t head = 0; head < plane.heads; ++head) {
                const int64_t slot = from[row * heads + head];
                char* gone =
                    (char*)plane.data + row * plane.row + head * plane.head + slot * plane.bytes;
                memmove(gone, gone + plane.bytes, (slots_after(step) - 1 - slot) * plane.bytes);
            }
    }
    return true;
}

// Learns from the mass of a tail and of the slots behind it.
void learn(const KvSequence& step, const float* mass) {
    const KvSequence& behind = *step.behind;
    const KvRule &rule = step.step->rule, &other = behind.step->rule;
    const int64_t first = slots_behind(step), slots = all_slots(step),
                  heads = step.step->call.heads;
    if (rule.learn != KV_LEARN_WEIGHTED) {
        kv_learn(behind, mass, first, slots);
        kv_learn(step, mass + first, slots - first, slots);
        return;
    }
    std::vector<float> planes[2];  // the scores and the weights of all slots
    const int64_t at[] = {0, rule.count - 1};
    const auto each = [&](int64_t row, int64_t head, auto move) {
        for (int i = 0; i < 2; ++i) {
            const KvScores &a = other.planes[at[i]], &b = rule.planes[at[i]];
            planes[i].resize(slots);
            move(a.data + row * a.row + head * a.head, planes[i].data(), first);
            move(b.data + row * b.row + head * b.head, planes[i].data() + first, slots - first);
        }
    };
    for (int64_t row = 0; row < step.step->call.rows; ++row)
        for (int64_t head = 0; head < heads; ++head, mass += slots) {
            each(row, head, [](float* x, float* all, int64_t n) { std::copy_n(x, n, all); });
            instructions().ranking->weigh(planes[0].data(), mass, planes[1].data(), slots);
            each(row, head, [](float* x, float* all, int64_t n) { std::copy_n(all, n, x); });
        }
}

// Learns from the queries or the mass, and frees slots.
bool settle(const KvSequence& step, const Token& token, float* mass) {
    const int64_t slots = slots_after(step);
    *step.step->left = slots;
    if (step.queries && !renew_scores(step, token.q)) return false;
    if (!step.behind) {
        if (mass) kv_learn(step, mass, slots, slots);
        return !step.evicts || step.contest || !kv_free(step, slots);
    }
    const KvSequence& behind = *step.behind;
    if (mass) learn(step, mass);
    if (behind.leaves && !leave(step)) return false;
    const int64_t coded = *behind.step->left = slots_behind(step) + behind.leaves;
    return !behind.evicts || behind.contest || !kv_free(behind, coded);
}

// Frees the slots of the heads of each contest.
bool settle_contests(const KvSequence* steps, int64_t count) {
    std::vector<const KvSequence*> heads;
    for (int64_t i = 0; i < count; ++i) {
        const KvSequence& head = freed(steps[i]);
        if (!head.contest || !head.evicts) continue;
        heads.push_back(&head);
        if (i + 1 < count && freed(steps[i + 1]).contest == head.contest) continue;
        if (kv_free_contest(heads.data(), (int64_t)heads.size())) return false;
        heads.clear();
    }
    return true;
}

int run(const KvSequence* steps, int64_t count, const KvTokens& tokens) {
    for (int64_t i = 0; i < count; ++i)
        if (!expected(steps[i], tokens)) return KV_STEP_UNLIKE;
    Masses masses(steps, count);
    // Encoding takes longer than copying, but only many tokens are worth another thread.
    const KvStep& first = *steps[0].step;
    const int64_t bytes = first.key.width * first.key.heads * element_bytes(first.key.x.type);
    const int64_t cost = first.key.codes.type >= KV_I8 ? 8 : 1;
    const int64_t threads = count == 1 ? 1 : threads_for(count * bytes * cost, first.call.threads);
    std::atomic<bool> failed{false};
    const auto each = [&](int64_t threads, auto f) {
        share(threads, count, [&](int64_t i) {
            try {
                if (!f(steps[i])) failed = true;
            } catch (const std::bad_alloc&) {
                failed = true;
            }
        });
        return !failed;
    };
    if (!each(threads, [&](const KvSequence& x) { return append(x, Token(tokens, x)); }) ||
        attend(steps, count, tokens, masses))
        return KV_STEP_FAILED;
    int64_t ranked = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (steps[i].evicts || needs_mass(steps[i]))
            ranked += all_slots(steps[i]) * first.call.heads * 8;
        ranked += cost_of_renewal(steps[i]);
    }
    const int64_t settling = count == 1 ? 1 : threads_for(ranked, first.call.threads);
    const auto settled = [&](const KvSequence& x) {
        return settle(x, Token(tokens, x), masses.of(&x));
    };
    if (!each(settling, settled) ||
        !settle_contests(steps, count))
        return KV_STEP_FAILED;
    return KV_STEP_DONE;
}

}  // namespace

int kv_step(const KvSequence* steps, int64_t count, const KvTokens* tokens) {
    try {
        return run(steps, count, *tokens);
    } catch (const std::bad_alloc&) {
        return KV_STEP_FAILED;
    }
}
