// Attention of decode steps: of each step alone, or of several sequences in one call.
#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <tuple>

#include "kernel.h"
#include "simd.h"
#include "step.h"

using namespace kv;

namespace {

template <class T>
void multiply(const char* from, const float* scale, int64_t width, char* to) {
    const auto* x = (const typename T::Element*)from;
    auto* y = (typename T::Element*)to;
    for (int64_t i = 0; i < width; ++i) y[i] = T::narrow1(T::widen1(x[i]) * scale[i]);
}

// Appends the queries of a sequence's row to `to`, (query heads, width), multiplied by the scales
// of their centre if there is one.
void append_queries(const KvStep& step, const KvPlane& queries, const char* q, int64_t row,
                    std::vector<char>& to) {
    const KvCall& call = step.call;
    const int64_t size = element_bytes(queries.type), width = call.key_width;
    const int64_t heads = call.heads * call.group;
    to.resize(to.size() + heads * width * size);
    char* own = to.data() + to.size() - heads * width * size;
    for (int64_t head = 0; head < heads; ++head, own += width * size) {
        const char* from = q + (row * queries.row + head * queries.head) * size;
        if (!call.centre) {
            memcpy(own, from, width * size);
            continue;
        }
        const KvCentre& centre = *call.centre;
        const float* scale =
            centre.mean + row * centre.row + head / call.group * centre.head + width;
        if (queries.type == KV_F32) multiply<F32>(from, scale, width, own);
        else if (queries.type == KV_BF16) multiply<BF16>(from, scale, width, own);
        else multiply<F16>(from, scale, width, own);
    }
}

// Adjacent queries, (rows, query heads, width).
KvPlane adjacent_queries(const KvCall& call, const char* q, int64_t type) {
    const int64_t width = call.key_width;
    return {q, call.heads * call.group * width, width, width, type};
}

// Attends with the queries of one step, whose token is already written.
int attend_alone(const KvSequence& step, const Token& token, float* mass) {
    const KvStep& s = *step.step;
    std::vector<KvSegment> segments(step.segments, step.segments + s.call.segment_count);
    KvCall call = s.call;
    KvPlane queries = segments[0].queries;
    queries.data = token.q;
    std::vector<char> scaled;
    KvCentre centre;
    if (call.centre) {
        for (int64_t row = 0; row < call.rows; ++row)
            append_queries(s, queries, token.q, row, scaled);
        queries = adjacent_queries(call, scaled.data(), queries.type);
        centre = *call.centre;
        centre.queries = queries;
        call.centre = &centre;
    }
    for (int64_t i = 0; i < s.call.segment_count; ++i) {
        segments[i].queries = queries;
        segments[i].slots = segment_slots(step, i);
    }
    std::vector<int32_t> places, bounds;
    call.out = token.out;
    call.mass = mass;
    call.dense = step.dense;
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
    std::vector<char> queries;  // adjacent, as `append_queries` makes them
    std::vector<float> means;   // and scales of the rows' centres
    KvCentre centre;

  public:
    Together(std::vector<const KvSequence*> given, const KvTokens& tokens)
        : tokens(tokens), rows(std::move(given)) {
        const int64_t count = (int64_t)rows.size();
        const KvCall& call = rows[0]->step->call;
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
        for (int64_t row = 0; row < count; ++row) {
            const Token token(tokens, *rows[row]);
            outs.push_back(token.out);
            places.push_back((int32_t)kv_position(*rows[row], 0));
            append_queries(*rows[row]->step, rows[row]->segments->queries, token.q, 0, queries);
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
        const int64_t size = 2 * call.key_width;  // of a head's mean and scales
        centre.row = call.heads * size, centre.head = size;
        for (const KvSequence* row : rows) {
            const KvCentre& own = *row->step->call.centre;
            for (int64_t head = 0; head < call.heads; ++head) {
                const float* mean = own.mean + head * own.head;
                means.insert(means.end(), mean, mean + size);
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
                for (int64_t row = first; row < last; ++row)
                    add(row, row + 1, depth, count_of(row));
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
            segment.queries =
                adjacent_queries(sequence.step->call, queries.data(), segment.queries.type);
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
