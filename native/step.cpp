// A decode step of one layer: one token a row is written, and attended to. In Python the parts of
// a step cost more time than the step itself.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <vector>

#include "machine.h"

namespace {

int64_t element_bytes(int64_t type) { return type == KV_F32 ? 4 : 2; }

// Copies or encodes x to slot `slot`.
bool write(const KvEncoding& written, const void* x, int64_t slot) {
    KvEncoding e = written;
    e.x.data = x;
    if (e.bits) {
        const auto at = [&](KvPlane& plane, int64_t size) {
            if (plane.data) plane.data = (const char*)plane.data + slot * plane.slot * size;
        };
        at(e.codes, 1), at(e.scale, 2), at(e.zero, 2);
        return !kv_encode(&e);
    }
    const int64_t size = element_bytes(e.x.type), bytes = e.width * size;
    for (int64_t row = 0; row < e.rows; ++row)
        for (int64_t head = 0; head < e.heads; ++head) {
            const int64_t from = row * e.x.row + head * e.x.head;
            const int64_t to = row * e.codes.row + head * e.codes.head + slot * e.codes.slot;
            memcpy((char*)e.codes.data + to * size, (const char*)x + from * size, bytes);
        }
    return true;
}

// Frees the oldest slot that is not protected.
bool drop(const KvStep& step, const KvToken& token, const KvSlots* planes, int64_t plane_count) {
    KvRanking ranking = step.ranking;
    std::vector<int64_t> victims(ranking.rows * ranking.heads);
    ranking.out = victims.data();
    ranking.newest = token.position - 1;
    ranking.slots = token.slots;
    ranking.count = 1;
    return !kv_lowest(&ranking) &&
           !kv_evict(planes, plane_count, step.call.rows, victims.data(), ranking.rows,
                     ranking.heads, 1, token.slots);
}

// Frees a slot if asked to, and writes the token. Returns false if memory cannot be allocated.
bool append(const KvStep& step, const KvSlots* planes, int64_t plane_count, const KvToken& token) {
    int64_t slot = token.slots;
    if (token.drops) {
        if (!drop(step, token, planes, plane_count)) return false;
        --slot;
    }
    if (!write(step.key, token.k, slot) || !write(step.value, token.v, slot)) return false;
    const KvPlane& place = step.position;
    for (int64_t row = 0; row < step.call.rows; ++row)
        for (int64_t head = 0; head < step.position_heads; ++head)
            ((int32_t*)place.data)[row * place.row + head * place.head + slot * place.slot] =
                (int32_t)token.position;
    return true;
}

int run(const KvStep& step, const KvSegment* given, const KvSlots* planes, int64_t plane_count,
        const KvToken& token) {
    for (int64_t i = 0; i < token.position_count; ++i)
        if (token.positions[i] != token.position) return KV_STEP_UNLIKE;
    // All memory is reserved before anything is changed.
    std::vector<KvSegment> segments(given, given + step.call.segment_count);
    for (KvSegment& segment : segments) segment.queries.data = token.q;
    if (!append(step, planes, plane_count, token)) return KV_STEP_FAILED;
    segments.back().slots = token.slots + !token.drops;
    KvCall call = step.call;
    call.out = token.out;
    return kv_attend(&call, segments.data(), nullptr) ? KV_STEP_FAILED : KV_STEP_DONE;
}

// -- several sequences ------------------------------------------------------------------------

constexpr int64_t FEWEST_SHARED = 128;  // slots that are worth a chain of their own

// One call for the rows of several sequences: their segments, in which those that sequences begin
// with alike occur once. Every segment names the rows whose slots it holds.
class Together {
    const KvTokens& tokens;
    std::vector<const KvSequence*> rows;  // those with the same segments side by side
    std::vector<KvSegment> segments;
    std::vector<KvRows> holders;
    std::vector<void*> outs;
    std::vector<char> queries;  // of rows that share segments, side by side
    int64_t query_bytes;        // of one row

  public:
    Together(const KvSequence* sequences, int64_t count, const KvTokens& tokens) : tokens(tokens) {
        const KvCall& call = sequences[0].step->call;
        query_bytes = call.heads * call.group * call.key_width *
                      element_bytes(sequences[0].segments[0].queries.type);
        for (int64_t i = 0; i < count; ++i) rows.push_back(sequences + i);
        std::stable_sort(rows.begin(), rows.end(), [](const KvSequence* a, const KvSequence* b) {
            const auto end = [](const KvSequence* x) {
                return x->segments + x->step->call.segment_count;
            };
            return std::lexicographical_compare(
                a->segments, end(a), b->segments, end(b),
                [](const KvSegment& x, const KvSegment& y) {
                    return std::less<const void*>()(x.k.plane.data, y.k.plane.data);
                });
        });
        queries.resize(count * query_bytes);
        for (int64_t row = 0; row < count; ++row) {
            outs.push_back(tokens.out + rows[row]->index * tokens.out_stride);
            for (int64_t head = 0; head < call.heads * call.group; ++head) {
                const int64_t bytes = query_bytes / (call.heads * call.group);
                const int64_t from = rows[row]->segments->queries.head * bytes / call.key_width;
                memcpy(&queries[row * query_bytes + head * bytes], q_of(row) + head * from, bytes);
            }
        }
        divide(0, count, 0);
    }

    int attend() {
        KvCall call = rows[0]->step->call;
        call.rows = (int64_t)rows.size();
        call.segment_count = (int64_t)segments.size();
        call.segments = segments.data();
        call.reaches = nullptr;
        call.holders = holders.data();
        call.outs = outs.data();
        return kv_attend_call(call);
    }

  private:
    const char* q_of(int64_t row) const { return tokens.q + rows[row]->index * tokens.q_stride; }

    int64_t count_of(int64_t row) const { return rows[row]->step->call.segment_count; }

    // Whether two rows have the same segment at `depth`, frozen for both.
    bool alike(int64_t row, int64_t other, int64_t depth) const {
        if (depth + 1 >= count_of(row) || depth + 1 >= count_of(other)) return false;
        const KvSegment &a = rows[row]->segments[depth], &b = rows[other]->segments[depth];
        return a.slots == b.slots && !memcmp(&a.k, &b.k, sizeof a.k) &&
               !memcmp(&a.v, &b.v, sizeof a.v);
    }

    // Adds the segments from `depth` on of the rows `first` to `end` - 1, which have those before
    // in common.
    void divide(int64_t first, int64_t end, int64_t depth) {
        while (first < end) {
            int64_t last = first + 1;  // of those that go on with the same segment
            while (last < end && alike(first, last, depth)) ++last;
            int64_t common = depth, slots = 0;
            while (last - first > 1 && all_alike(first, last, common))
                slots += rows[first]->segments[common++].slots;
            if (slots < FEWEST_SHARED) {
                for (int64_t row = first; row < last; ++row) add(row, row + 1, depth, count_of(row));
            } else {
                add(first, last, depth, common);
                divide(first, last, common);
            }
            first = last;
        }
    }

    bool all_alike(int64_t first, int64_t last, int64_t depth) const {
        for (int64_t row = first + 1; row < last; ++row)
            if (!alike(first, row, depth)) return false;
        return true;
    }

    // Adds the segments `from` to `to` - 1 of a row, which all rows up to `end` - 1 read.
    void add(int64_t first, int64_t end, int64_t from, int64_t to) {
        for (int64_t i = from; i < to; ++i) {
            KvSegment segment = rows[first]->segments[i];
            const KvSequence& sequence = *rows[first];
            if (i + 1 == sequence.step->call.segment_count)
                segment.slots = sequence.slots + !sequence.drops;
            segment.follows &= i > from;
            segment.shared = end - first > 1;
            for (KvPlane* plane : {&segment.k.plane, &segment.k.scale, &segment.k.zero,
                                   &segment.v.plane, &segment.v.scale, &segment.v.zero})
                plane->row = 0;
            const int64_t type = segment.queries.type, size = element_bytes(type);
            const int64_t width = query_bytes / size;
            const KvCall& call = sequence.step->call;
            segment.queries = {queries.data(), width, call.key_width, call.key_width, type};
            segments.push_back(segment);
            holders.push_back({first, end});
        }
    }
};

int run_packed(const KvSequence* sequences, int64_t count, const KvTokens& tokens) {
    if (tokens.positions)
        for (int64_t i = 0; i < count; ++i)
            if (tokens.positions[sequences[i].index] != sequences[i].position)
                return KV_STEP_UNLIKE;
    Together together(sequences, count, tokens);
    std::atomic<bool> failed{false};
    // Encoding takes longer than copying, but only many tokens are worth another thread.
    const int64_t threads =
        threads_for(count * tokens.k_stride * (sequences[0].step->key.bits ? 8 : 1),
                    sequences[0].step->call.threads);
    share(threads, count, [&](int64_t i) {
        const KvSequence& one = sequences[i];
        const KvToken token{tokens.q + one.index * tokens.q_stride,
                            tokens.k + one.index * tokens.k_stride,
                            tokens.v + one.index * tokens.v_stride,
                            nullptr,
                            nullptr,
                            0,
                            one.position,
                            one.slots,
                            one.drops};
        try {
            if (!append(*one.step, one.planes, one.plane_count, token)) failed = true;
        } catch (const std::bad_alloc&) {
            failed = true;
        }
    });
    return failed || together.attend() ? KV_STEP_FAILED : KV_STEP_DONE;
}

}  // namespace

int kv_step(const KvStep* step, const KvSegment* segments, const KvSlots* planes,
            int64_t plane_count, const KvToken* token) {
    try {
        return run(*step, segments, planes, plane_count, *token);
    } catch (const std::bad_alloc&) {
        return KV_STEP_FAILED;
    }
}

int kv_step_packed(const KvSequence* sequences, int64_t count, const KvTokens* tokens) {
    try {
        return run_packed(sequences, count, *tokens);
    } catch (const std::bad_alloc&) {
        return KV_STEP_FAILED;
    }
}
