// Attention of decode steps: of each step alone, or of several sequences in one call.
#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <tuple>

#include "kernel.h"
#include "step.h"

using namespace kv;

namespace {

// Attends with the queries of one step, whose token is already written.
int attend_alone(const KvSequence& step, const Token& token, float* mass) {
    const KvStep& s = *step.step;
    std::vector<KvSegment> segments(step.segments, step.segments + s.call.segment_count);
    for (int64_t i = 0; i < s.call.segment_count; ++i) {
        segments[i].queries.data = token.q;
        segments[i].slots = segment_slots(step, i);
    }
    std::vector<int32_t> places, bounds;
    KvCall call = s.call;
    call.out = token.out;
    call.mass = mass;
    call.dense = step.dense;
    KvCentre centre;
    if (call.centre) {
        centre = *call.centre;
        centre.queries.data = token.q;
        call.centre = &centre;
    }
    for (int64_t row = 0; row < call.rows; ++row)
        places.push_back((int32_t)kv_position(step, row));
    call.position = places.data();
    call.position_row = 1;
    if (!step.dense) {
        call.reach_count = s.reach_count;
        if (s.ranking.window && s.ranking.chunked) {
            for (const int32_t place : places) {
                bounds.push_back(place - place % (int32_t)s.ranking.window);
                bounds.push_back(place);
            }
            call.bounds = bounds.data();
            call.bounds_row = 2;
        }
    }
    return kv_attend(&call, segments.data(), s.reaches);
}

// -- several sequences ------------------------------------------------------------------------

constexpr int64_t FEWEST_SHARED = 128;  // slots for which a chain of their own pays

// One call for the rows of several sequences. A leading segment that several sequences share occurs
// once. Every segment names the rows that have it.
class Together {
    const KvTokens& tokens;
    std::vector<const KvSequence*> rows;  // rows with the same segments are adjacent
    std::vector<float*> masses;
    std::vector<int64_t> slots_of;
    std::vector<KvSegment> segments;
    std::vector<KvRows> holders;
    std::vector<void*> outs;
    std::vector<int32_t> places;
    std::vector<char> queries;  // queries of rows that share segments, adjacent
    std::vector<float> means;   // of the rows' centres
    KvCentre centre;
    int64_t query_bytes;        // bytes of one row's query

  public:
    Together(std::vector<const KvSequence*> given, const KvTokens& tokens)
        : tokens(tokens), rows(std::move(given)) {
        const int64_t count = (int64_t)rows.size();
        const KvCall& call = rows[0]->step->call;
        query_bytes = call.heads * call.group * call.key_width *
                      element_bytes(rows[0]->segments[0].queries.type);
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
            const Token token(tokens, *rows[row]);
            outs.push_back(token.out);
            places.push_back((int32_t)kv_position(*rows[row], 0));
            for (int64_t head = 0; head < call.heads * call.group; ++head) {
                const int64_t bytes = query_bytes / (call.heads * call.group);
                const int64_t from = rows[row]->segments->queries.head * bytes / call.key_width;
                memcpy(&queries[row * query_bytes + head * bytes], token.q + head * from, bytes);
            }
        }
        divide(0, count, 0);
        if (call.centre) gather_centres(call);
    }

    // `mass` returns where to write a step's mass; null: not needed.
    template <class Mass>
    int attend(Mass mass) {
        bool some = false;
        for (const KvSequence* row : rows) {
            masses.push_back(mass(row));
            slots_of.push_back(all_slots(*row));
            some |= masses.back() != nullptr;
        }
        KvCall call = rows[0]->step->call;
        call.rows = (int64_t)rows.size();
        call.segment_count = (int64_t)segments.size();
        call.segments = segments.data();
        call.reaches = nullptr;
        if (call.centre) call.centre = &centre;
        call.holders = holders.data();
        call.outs = outs.data();
        call.position = places.data();
        call.position_row = 1;
        call.masses = some ? masses.data() : nullptr;
        call.slots_of = slots_of.data();
        call.dense = 1;
        return kv_attend_call(call);
    }

  private:
    // One centre for all rows. Their tables are the same.
    void gather_centres(const KvCall& call) {
        centre = *call.centre;
        centre.row = call.heads * call.key_width, centre.head = call.key_width;
        for (const KvSequence* row : rows) {
            const KvCentre& own = *row->step->call.centre;
            for (int64_t head = 0; head < call.heads; ++head) {
                const float* mean = own.mean + head * own.head;
                means.insert(means.end(), mean, mean + call.key_width);
            }
        }
        centre.mean = means.data();
        centre.queries = segments[0].queries;
    }

    int64_t count_of(int64_t row) const { return rows[row]->step->call.segment_count; }

    // Whether two rows have the same frozen segment at index `depth`.
    bool alike(int64_t row, int64_t other, int64_t depth) const {
        if (depth + 1 >= count_of(row) || depth + 1 >= count_of(other)) return false;
        const KvSegment &a = rows[row]->segments[depth], &b = rows[other]->segments[depth];
        return a.slots == b.slots && !memcmp(&a.k, &b.k, sizeof a.k) &&
               !memcmp(&a.v, &b.v, sizeof a.v);
    }

    // Adds the segments from `depth` on of rows `first` to `end` - 1, which share the segments
    // before `depth`.
    void divide(int64_t first, int64_t end, int64_t depth) {
        while (first < end) {
            int64_t last = first + 1;  // end of the rows that continue with the same segment
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
            segment.slots = segment_slots(sequence, i);
            segment.follows &= i > from;
            segment.shared = end - first > 1;
            for (KvPlane* plane : {&segment.k.plane, &segment.k.scale, &segment.k.zero,
                                   &segment.v.plane, &segment.v.scale, &segment.v.zero,
                                   &segment.position})
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

}  // namespace

int kv::attend(const KvSequence* steps, int64_t count, const KvTokens& tokens, Masses& masses) {
    std::map<std::tuple<int64_t, const float*, const float*>, std::vector<const KvSequence*>>
        alike;
    for (const KvSequence* step = steps; step < steps + count; ++step) {
        const KvCall& call = step->step->call;
        if (count > 1 && step->dense) {
            const float* table = call.centre ? call.centre->table : nullptr;
            alike[{call.heads, call.slopes, table}].push_back(step);
        }
        else if (attend_alone(*step, Token(tokens, *step), masses.of(step))) return 1;
    }
    for (auto& [kind, some] : alike) {
        Together together(std::move(some), tokens);
        if (together.attend([&](const KvSequence* step) { return masses.of(step); })) return 1;
    }
    return 0;
}
