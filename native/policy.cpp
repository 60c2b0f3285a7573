#include "policy.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <new>
#include <vector>

#include "machine.h"
#include "simd.h"
#include "slots.h"

namespace {

// The norm of a vector of keys or values.
template <class T>
float norm(const void* from, int64_t offset, int64_t width) {
    const auto* x = (const typename T::Element*)from + offset;
    double sum = 0;
    for (int64_t i = 0; i < width; ++i) {
        const double one = T::widen1(x[i]);
        sum += one * one;
    }
    return (float)std::sqrt(sum);
}

float norm_of(const KvEncoding& e, const char* x, int64_t row, int64_t head) {
    const int64_t offset = row * e.x.row + head * e.x.head;
    switch (e.x.type) {
        case KV_F32: return norm<F32>(x, offset, e.width);
        case KV_BF16: return norm<BF16>(x, offset, e.width);
        default: return norm<F16>(x, offset, e.width);
    }
}

// Source: Wellons' lowbias32.
uint32_t mixed(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

float hash_of(int64_t position, int64_t head, int64_t seed) {
    return (float)(mixed(mixed((uint32_t)(position + (seed << 8))) + (uint32_t)head) >> 8);
}

float* plane_of(const KvScores& plane, int64_t row, int64_t head) {
    return plane.data + row * plane.row + (plane.heads > 1 ? head * plane.head : 0);
}

KvKeys keys_of(const KvSequence& step, int64_t row, int64_t head, const int32_t* position) {
    const KvStep& s = *step.step;
    const KvEncoded& slots = step.segments[s.call.segment_count - 1].k;
    return {slots, s.call.centre, position, s.key.width, row, head};
}

KvDirections& directions(const KvStep& s, int64_t row, int64_t head) {
    return *(KvDirections*)(s.rule.memory + (row * s.call.heads + head) * s.rule.memory_head);
}

float* cosine_scratch(const KvStep& s) {
    float* memory = scratch(0, kv_cosine_scratch(s.key.width));
    if (!memory) throw std::bad_alloc();
    return memory;
}

// The numbers to rank for one head, stored in `made` unless they are the scores themselves. If the
// policy ranks by keys, they are not more than the scores.
const float* ranked(const KvSequence& step, int64_t row, int64_t head, const int32_t* position,
                    int64_t newest, int64_t slots, std::vector<float>& made) {
    const KvStep& s = *step.step;
    const KvRule& rule = s.rule;
    if (rule.by_keys) {
        made.resize(slots);
        instructions().cosines->bound(keys_of(step, row, head, position), slots,
                                      directions(s, row, head), cosine_scratch(s), made.data());
        return made.data();
    }
    if (!rule.count) return nullptr;
    const float* score = plane_of(rule.planes[0], row, head);
    if (!rule.by_query && !rule.mixes) return score;
    made.resize(slots);
    if (rule.by_query)
        instructions().ranking->divide(score, position, (int32_t)newest, slots, made.data());
    else std::copy_n(score, slots, made.data());
    if (rule.mixes)
        instructions().ranking->mix(made.data(), plane_of(rule.planes[1], row, head), position,
                                    (float)rule.mix, slots);
    return made.data();
}

const int32_t* positions_of(const KvRanking& ranking, int64_t row, int64_t head) {
    return ranking.position + row * ranking.position_row + head * ranking.position_head;
}

// The ranking after a step.
KvRanking after(const KvSequence& step, int64_t slots) {
    KvRanking ranking = step.step->ranking;
    ranking.slots = slots;
    ranking.recent = step.recent;
    return ranking;
}

// Replaces the worths of slots ranked by keys, after `ranked`, by those of their scores, until the
// `count` lowest are of scores.
void score_lowest(const KvSequence& step, int64_t row, int64_t head, const KvRanking& ranking,
                  int64_t newest, int64_t count, float* worth) {
    constexpr float MOST = std::numeric_limits<float>::infinity();
    static thread_local std::vector<int32_t> some, places;
    static thread_local std::vector<float> scores, worths;
    const KvStep& s = *step.step;
    const Instructions& kernels = instructions();
    const int32_t* position = positions_of(ranking, row, head);
    const KvKeys keys = keys_of(step, row, head, position);
    KvDirections& known = directions(s, row, head);
    float* memory = cosine_scratch(s);
    for (std::vector<int32_t>* x : {&some, &places}) x->resize(ranking.slots + 1);
    for (std::vector<float>* x : {&scores, &worths}) x->resize(ranking.slots + 1);
    KvRanking few = ranking;
    // Worths change little from step to step, so there is a likely range of the lowest.
    float wider = std::max(known.moved / 4, 1.0f / 4096);
    float from = -MOST, to = known.lowest + wider, lowest = MOST;
    for (int64_t found = 0; found < count && from < 2; from = to, to += wider, wider *= 2) {
        few.slots = kernels.ranking->within(worth, ranking.slots, from, to, some.data());
        for (int64_t i = 0; i < few.slots; ++i) places[i] = position[some[i]];
        kernels.cosines->score(keys, some.data(), few.slots, known, memory, scores.data());
        kernels.ranking->worth(few, scores.data(), places.data(), (int32_t)newest, worths.data());
        for (int64_t i = 0; i < few.slots; ++i) {
            const float own = worth[some[i]] = worths[i];
            found += own < to;
            if (own > -MOST) lowest = std::min(lowest, own);
        }
    }
    known.lowest = std::min(lowest, 1.0f);
}

// Stores the worths of one head's slots in `worth`. The `count` lowest are exact.
void rank(const KvSequence& step, int64_t row, int64_t head, const KvRanking& ranking,
          int64_t count, std::vector<float>& worth) {
    static thread_local std::vector<float> made;
    const int32_t* position = positions_of(ranking, row, head);
    const int64_t newest = kv_position(step, row);
    const float* score = ranked(step, row, head, position, newest, ranking.slots, made);
    worth.resize(ranking.slots);
    instructions().ranking->worth(ranking, score, position, (int32_t)newest, worth.data());
    if (step.step->rule.by_keys)
        score_lowest(step, row, head, ranking, newest, count, worth.data());
}

// Frees `count` of `slots` slots of each row and head.
int evict(const KvSequence& step, const int64_t* victims, int64_t rows, int64_t heads,
          int64_t count, int64_t slots) {
    const KvStep& s = *step.step;
    if (!s.rule.by_keys)
        return kv_evict(step.planes, step.plane_count, rows, victims, rows, heads, count, slots,
                        nullptr, 0);
    const int64_t width = s.key.width, bytes = s.rule.memory_head * 8;
    float* memory = cosine_scratch(s);
    for (int64_t i = 0; i < rows * heads; ++i) {
        const int64_t row = i / heads, head = i % heads;
        const KvKeys keys = keys_of(step, row, head, positions_of(s.ranking, row, head));
        KvDirections& known = directions(s, row, head);
        for (int64_t j = 0; j < count; ++j)
            instructions().cosines->forget(keys, victims[i * count + j], known, memory);
        known.slots -= count;
    }
    std::vector<KvSlots> planes(step.planes, step.planes + step.plane_count);
    planes.push_back({directions(s, 0, 0).keys(width), s.call.heads * bytes, bytes,
                      sizeof(KvDirected), heads});
    return kv_evict(planes.data(), (int64_t)planes.size(), rows, victims, rows, heads, count, slots,
                    nullptr, 0);
}

}  // namespace

void kv_enter(const KvSequence& step, const char* k, const char* v, int64_t slot,
              const float* errors) {
    const KvStep& s = *step.step;
    const int64_t heads = s.call.heads;
    for (int64_t i = 0; i < s.rule.count; ++i) {
        const KvScores& plane = s.rule.planes[i];
        for (int64_t row = 0; row < s.call.rows; ++row)
            for (int64_t head = 0; head < plane.heads; ++head) {
                float x = 0;
                switch (plane.enter) {
                    case KV_ENTER_KEY_NORM: x = -norm_of(s.key, k, row, head); break;
                    case KV_ENTER_VALUE_NORM: x = norm_of(s.value, v, row, head); break;
                    case KV_ENTER_ERROR:
                        x = std::sqrt(errors[row * heads + head]) +
                            std::sqrt(errors[(s.call.rows + row) * heads + head]);
                        break;
                    case KV_ENTER_HASH:
                        x = hash_of(kv_position(step, row), step.part + head, s.rule.seed);
                        break;
                    case KV_ENTER_GIVEN: x = step.given[row * plane.heads + head]; break;
                }
                plane_of(plane, row, head)[slot] = x;
            }
    }
}

void kv_forget(const KvSequence& step) {
    const KvStep& s = *step.step;
    if (!s.rule.by_keys) return;
    for (int64_t row = 0; row < s.call.rows; ++row)
        for (int64_t head = 0; head < s.call.heads; ++head) directions(s, row, head).slots = 0;
}

void kv_learn(const KvSequence& step, const float* mass, int64_t slots, int64_t stride) {
    const KvStep& s = *step.step;
    const KvRule& rule = s.rule;
    const int64_t heads = s.call.heads;
    for (int64_t row = 0; row < s.call.rows; ++row, mass += heads * stride) {
        if (rule.learn == KV_LEARN_MEAN) {
            float* score = plane_of(rule.planes[0], row, 0);
            for (int64_t i = 0; i < slots; ++i) {
                float sum = 0;
                for (int64_t head = 0; head < heads; ++head) sum += mass[head * stride + i];
                score[i] = sum / (float)heads;
            }
            continue;
        }
        for (int64_t head = 0; head < heads; ++head) {
            float* score = plane_of(rule.planes[0], row, head);
            const float* m = mass + head * stride;
            if (rule.learn == KV_LEARN_WEIGHTED) {
                const float* other = plane_of(rule.planes[rule.count - 1], row, head);
                instructions().ranking->weigh(score, m, other, slots);
            } else {
                const bool sums = rule.learn == KV_LEARN_SUM;
                const double kept = sums ? 1 : 1 - rule.fade, added = sums ? 1 : rule.fade;
                instructions().ranking->add(score, m, (float)kept, (float)added, slots);
            }
        }
    }
}

int kv_free(const KvSequence& step, int64_t slots) {
    const KvStep& s = *step.step;
    const KvRanking ranking = after(step, slots);
    const int64_t count = step.evicts, all = ranking.rows * ranking.heads;
    // Reading the keys that are not known yet is worth threads.
    int64_t unknown = 0;
    if (s.rule.by_keys)
        for (int64_t i = 0; i < all; ++i)
            unknown += slots - directions(s, i / ranking.heads, i % ranking.heads).slots;
    std::atomic<bool> failed{false};
    try {
        std::vector<int64_t> victims(all * count);
        share(threads_for(unknown * s.key.width * 2, s.call.threads), all, [&](int64_t i) {
            try {
                static thread_local std::vector<float> worth;
                static thread_local std::vector<int32_t> order;
                const int64_t row = i / ranking.heads, head = i % ranking.heads;
                rank(step, row, head, ranking, count, worth);
                kv_order(worth.data(), positions_of(ranking, row, head), slots, count, order,
                         victims.data() + i * count);
            } catch (const std::bad_alloc&) {
                failed = true;
            }
        });
        if (failed) return 1;
        *s.left = slots - count;
        return evict(step, victims.data(), ranking.rows, ranking.heads, count, slots);
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

int kv_free_contest(const KvSequence* const* steps, int64_t count) {
    struct Slot {
        float worth;
        int32_t position;
        int32_t head, slot;
        bool operator<(const Slot& other) const {
            if (worth != other.worth) return worth < other.worth;
            if (position != other.position) return position < other.position;
            if (head != other.head) return head < other.head;
            return slot < other.slot;
        }
    };
    const int64_t all = steps[0]->evicts;
    const KvRankingKernel& kernel = *instructions().ranking;
    try {
        std::vector<Slot> found, lowest;  // evictable slots of all heads; of one head
        std::vector<float> worth;
        for (int64_t head = 0; head < count; ++head) {
            const KvSequence& step = *steps[head];
            const int64_t slots = *step.step->left;
            const KvRanking ranking = after(step, slots);
            const int32_t* position = positions_of(ranking, 0, 0);
            rank(step, 0, 0, ranking, all, worth);
            const size_t first = found.size();
            constexpr float MOST = std::numeric_limits<float>::infinity();
            const int64_t open = std::max<int64_t>(0, slots - step.safe);
            const auto slot_at = [&](int64_t slot) {
                return Slot{worth[slot], position[slot], (int32_t)head, (int32_t)slot};
            };
            // At most `all` slots are freed, and a head's lowest slots come before its safe ones,
            // unless they are protected.
            if (open > all) {
                lowest.clear();
                const auto next = [&](int64_t slot) {
                    if ((int64_t)lowest.size() < all) return slot;
                    return kernel.next(worth.data(), slot, slots, lowest.front().worth);
                };
                for (int64_t slot = 0; slot < slots; slot = next(slot + 1)) {
                    lowest.push_back(slot_at(slot));
                    std::push_heap(lowest.begin(), lowest.end());
                    if ((int64_t)lowest.size() <= all) continue;
                    std::pop_heap(lowest.begin(), lowest.end());
                    lowest.pop_back();
                }
                if (lowest.front().worth != MOST) {
                    found.insert(found.end(), lowest.begin(), lowest.end());
                    continue;
                }
            }
            for (int64_t slot = 0; slot < slots; ++slot) found.push_back(slot_at(slot));
            // A head's best slots are safe: they are freed only after all others.
            const auto begin = found.begin() + (std::ptrdiff_t)first;
            if (open < slots) std::nth_element(begin, begin + open, found.end());
            for (auto one = begin + open; one != found.end(); ++one)
                if (one->worth != -MOST) one->worth = MOST;
        }
        const auto end =
            found.begin() + std::min<std::ptrdiff_t>(all, (std::ptrdiff_t)found.size());
        std::nth_element(found.begin(), end, found.end());
        std::vector<int64_t> victims;
        for (int64_t head = 0; head < count; ++head) {
            const KvSequence& step = *steps[head];
            victims.clear();
            for (auto one = found.begin(); one != end; ++one)
                if (one->head == head) victims.push_back(one->slot);
            const int64_t slots = *step.step->left;
            *step.step->left = slots - (int64_t)victims.size();
            if (victims.empty()) continue;
            if (evict(step, victims.data(), 1, 1, (int64_t)victims.size(), slots)) return 1;
        }
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
