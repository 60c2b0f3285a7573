// The scheduler: divides a call into runs, distributes them to threads, and merges their results.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "machine.h"
#include "simd.h"

namespace {

// -- the plan --------------------------------------------------------------------------------

constexpr int64_t FEWEST_SLOTS = 256;        // slots per run of a tile that is split
constexpr int64_t FEWEST_TOKENS = 64;         // per tile, in a chunk with as many
constexpr int64_t MANY = 16;                  // queries worth a thread: both are smaller
constexpr int64_t FEWEST_OF_MANY = 128;       // where threads had no tile otherwise
constexpr int64_t MOST_WEIGHTS = 1 << 24;      // stored for the mass, unless one query has more

// The division of a chain into runs.
struct ChainPlan {
    int64_t segment, segments, slots;       // its first segment, number of segments, and slots
    KvRows holders;                         // the rows that have the chain
    int64_t rows, row_tiles, parts, first;  // rows per tile; tiles; parts per tile; its first run
    int64_t end;                            // after its last run
    bool sums;                              // each run sums its own mass: of all slots of its rows
};

constexpr int64_t MOST_HELD = 1 << 20;         // floats of scratch memory kept between calls

// Queries of the chunk that are computed together, and whether their mass is needed.
struct Range {
    int64_t first, end;
    bool mass;
};

int64_t slots_of(const KvCall& call) {
    int64_t slots = 0;
    for (int64_t i = 0; i < call.segment_count; ++i) slots += call.segments[i].slots;
    return slots;
}

// Half of a tile's scores on its own slots are masked, so a tile has few tokens beside the slots
// that a query sees.
int64_t tokens_of_tile(const KvCall& call) {
    const int64_t fair = (2 * slots_of(call) - call.queries) / 8 / 16 * 16;
    const int64_t most = std::min(KV_RECORDS / call.group, std::max(FEWEST_TOKENS, fair));
    return std::clamp<int64_t>(most, 1, call.queries);
}

struct Plan {
    const Range range;
    int64_t tokens, token_tiles, threads;
    std::vector<ChainPlan> chains;
    std::vector<KvRun> runs;
    std::vector<int64_t> chains_of_rows, first_chain;  // the chains of each row, row after row, and
                                                       // the start of each row's chains
    int64_t records = 0;    // most records of a run
    int64_t slots = 0;      // slots of all chains
    bool alone = true;      // each tile is one run, so nothing is merged

    Plan(const KvCall& call, Range range) : range(range) {
        const int64_t queries = range.end - range.first, heads = call.rows * call.heads;
        const int64_t width = (call.key_width + call.value_width) * 2;
        const int64_t tiles = threads_for(heads * slots_of(call) * width, call.threads) / heads;
        tokens = std::min(tokens_of_tile(call), queries);
        if (tiles > 1)
            tokens = std::min(tokens, std::max(MANY, (queries / tiles + 15) / 16 * 16));
        token_tiles = (queries + tokens - 1) / tokens;
        int64_t work = 0;  // slots to read, over all tiles
        for (int64_t i = 0; i < call.segment_count; ++i) {
            const KvSegment& segment = call.segments[i];
            if (!i || !segment.follows) {
                ChainPlan plan{};
                plan.segment = i;
                plan.holders = call.holders ? call.holders[i] : KvRows{0, call.rows};
                const int64_t rows = plan.holders.end - plan.holders.first;
                plan.rows = segment.shared
                                ? std::clamp<int64_t>(KV_RECORDS / (call.group * tokens), 1, rows)
                                : 1;
                plan.row_tiles = (rows + plan.rows - 1) / plan.rows;
                chains.push_back(plan);
            }
            ChainPlan& plan = chains.back();
            ++plan.segments;
            plan.slots += segment.slots;
            slots += segment.slots;
            work += plan.row_tiles * call.heads * token_tiles * segment.slots;
        }
        threads = threads_for(work * width, call.threads);
        const bool many = heads * token_tiles < threads && call.group * tokens >= MANY;
        const int64_t fewest = many ? FEWEST_OF_MANY : FEWEST_SLOTS;
        const int64_t share = threads == 1 ? INT64_MAX : std::max(fewest, work / (8 * threads));
        for (ChainPlan& chain : chains) add_runs(call, chain, share);
        find_chains(call.rows);
        for (ChainPlan& chain : chains) {
            chain.sums = range.mass && can_sum(call, chain);
            alone &= chain.sums || !range.mass;
        }
    }

    // The chains of a row.
    const int64_t* chains_of(int64_t row) const { return &chains_of_rows[first_chain[row]]; }
    int64_t chain_count(int64_t row) const { return first_chain[row + 1] - first_chain[row]; }

    bool can_sum(const KvCall& call, const ChainPlan& chain) const {
        for (int64_t row = chain.holders.first; row < chain.holders.end; ++row)
            if (chain_count(row) > 1) return false;
        int64_t most = 0;
        for (int64_t i = chain.first; i < chain.end; ++i)
            most = std::max(most, kv_kept(call, runs[i]));
        return chain.parts == 1 && most <= MOST_HELD;
    }

    void find_chains(int64_t rows) {
        first_chain.assign(rows + 1, 0);
        for (const ChainPlan& chain : chains)
            for (int64_t row = chain.holders.first; row < chain.holders.end; ++row)
                ++first_chain[row + 1];
        for (int64_t row = 0; row < rows; ++row) {
            alone &= first_chain[row + 1] == 1;
            first_chain[row + 1] += first_chain[row];
        }
        chains_of_rows.resize(first_chain[rows]);
        std::vector<int64_t> next(first_chain);
        for (const ChainPlan& chain : chains) {
            alone &= chain.parts == 1;
            for (int64_t row = chain.holders.first; row < chain.holders.end; ++row)
                chains_of_rows[next[row]++] = &chain - chains.data();
        }
    }

    void add_runs(const KvCall& call, ChainPlan& plan, int64_t share) {
        const int64_t slots = plan.slots;
        plan.parts = slots > share ? (slots + share - 1) / share : 1;
        plan.first = (int64_t)runs.size();
        const int64_t blocks = (slots + KV_BLOCK - 1) / KV_BLOCK;
        for (int64_t row_tile = 0; row_tile < plan.row_tiles; ++row_tile)
            for (int64_t head = 0; head < call.heads; ++head)
                for (int64_t tile = 0; tile < token_tiles; ++tile)
                    for (int64_t part = 0; part < plan.parts; ++part) {
                        KvRun run{};
                        run.segment = plan.segment;
                        run.segments = plan.segments;
                        run.past = slots - call.queries;
                        run.head = head;
                        run.row0 = plan.holders.first + row_tile * plan.rows;
                        run.row1 = std::min(run.row0 + plan.rows, plan.holders.end);
                        // The newest tokens see the most slots, so they are computed first.
                        run.query0 = range.first + (token_tiles - 1 - tile) * tokens;
                        run.query1 = std::min(run.query0 + tokens, range.end);
                        run.slot0 = blocks * part / plan.parts * KV_BLOCK;
                        run.slot1 = std::min(blocks * (part + 1) / plan.parts * KV_BLOCK, slots);
                        if (call.dense && plan.segment + plan.segments == call.segment_count)
                            run.slot1 = std::min(run.slot1, slots - call.queries + run.query1);
                        run.slot1 = std::max(run.slot0, run.slot1);  // a part that no query sees
                        records = std::max(records, kv_records(call, run));
                        runs.push_back(run);
                    }
        plan.end = (int64_t)runs.size();
    }

    // The run that computes a part for one row, head and token.
    const KvRun& run_of(const KvCall& call, const ChainPlan& plan, int64_t part, int64_t row,
                        int64_t head, int64_t token) const {
        const int64_t tile = token_tiles - 1 - (token - range.first) / tokens;
        const int64_t row_tile = (row - plan.holders.first) / plan.rows;
        return runs[plan.first +
                    ((row_tile * call.heads + head) * token_tiles + tile) * plan.parts + part];
    }
};

int64_t record_of(const KvCall& call, const KvRun& run, int64_t row, int64_t g, int64_t token) {
    return ((row - run.row0) * call.group + g) * (run.query1 - run.query0) + token - run.query0;
}

// -- merging ---------------------------------------------------------------------------------

// Writes `width` elements of an output, from `at` on, in its type.
void write(const KvCall& call, void* out, int64_t at, const float* x, float factor, int64_t width) {
    const auto as = [&](auto type) {
        auto* to = (typename decltype(type)::Element*)out + at;
        for (int64_t d = 0; d < width; ++d) to[d] = type.narrow1(x[d] * factor);
    };
    switch (call.out_type) {
        case KV_F32: as(F32{}); break;
        case KV_BF16: as(BF16{}); break;
        default: as(F16{}); break;
    }
}

// The softmax of one query: score x has the probability exp(x - base) * inverse.
struct Softmax {
    float base, inverse;
};

// Merges `count` partial results of one query into the output.
Softmax merge(const KvCall& call, const float* const* partial, int64_t count, int64_t row,
            int64_t head, int64_t token) {
    const int64_t width = call.value_width;
    const float sink = call.sinks ? call.sinks[head] : -INFINITY;
    float top = sink;
    for (int64_t i = 0; i < count; ++i) top = std::max(top, partial[i][width]);
    const float base = top == -INFINITY ? 0.0f : top;
    float total = std::exp(sink - base);
    for (int64_t i = 0; i < count; ++i)
        total += std::exp(partial[i][width] - base) * partial[i][width + 1];
    void* const out = call.outs ? call.outs[row] : call.out;
    const int64_t at = (call.outs ? 0 : row * call.out_row) + head * call.out_head +
                       token * call.out_query;
    const float inverse = total == 0 ? 0.0f : 1.0f / total;
    if (count == 1) {
        const float weight = std::exp(partial[0][width] - base) * inverse;
        write(call, out, at, partial[0], weight, width);
    } else {
        float* sum = scratch(0, width);
        std::fill(sum, sum + width, 0.0f);
        for (int64_t i = 0; i < count; ++i) {
            const float weight = std::exp(partial[i][width] - base) * inverse;
            for (int64_t d = 0; d < width; ++d) sum[d] += weight * partial[i][d];
        }
        write(call, out, at, sum, 1.0f, width);
    }
    return {base, inverse};
}

// -- a call ----------------------------------------------------------------------------------

struct Job {
    const KvCall& call;
    Plan plan;
    KvKernel* kernel = instructions().run;
    int64_t record_floats = call.value_width + 2;
    std::unique_ptr<float[]> large;  // scratch memory too large to keep between calls
    std::vector<Softmax> softmax;  // (row, query head, token of the range), for the mass
    std::unique_ptr<std::atomic<int64_t>[]> next;  // of each thread's share of the runs
    std::atomic<bool> failed{false};

    Job(const KvCall& call, Range range) : call(call), plan(call, range) {
        next.reset(new std::atomic<int64_t>[plan.threads]);
        for (int64_t i = 0; i < plan.threads; ++i) next[i] = first_of(i);
        if (plan.alone && !range.mass) return;
        if (!plan.alone && range.mass)
            softmax.resize(call.rows * call.heads * call.group * (range.end - range.first));
        int64_t floats = 0;
        for (const ChainPlan& chain : plan.chains)
            for (int64_t i = chain.first; i < chain.end; ++i)
                floats += of_partial(plan.runs[i]) + of_mass(chain, plan.runs[i]);
        float* at = memory(floats);
        for (const ChainPlan& chain : plan.chains)
            for (int64_t i = chain.first; i < chain.end; ++i) {
                KvRun& run = plan.runs[i];
                run.partial = at;
                at += of_partial(run);
                if (chain.sums) run.mass = at;
                else if (range.mass) keep_at(at, run);
                at += of_mass(chain, run);
            }
    }

    // Floats that a run needs until all runs are done.
    int64_t of_partial(const KvRun& run) const {
        return plan.alone ? 0 : kv_records(call, run) * record_floats;
    }

    int64_t of_mass(const ChainPlan& chain, const KvRun& run) const {
        if (chain.sums) return (run.row1 - run.row0) * slots(run);
        return plan.range.mass ? kv_kept(call, run) : 0;
    }

    // Lets a run keep its weights at `memory`.
    void keep_at(float* memory, KvRun& run) const {
        run.tops = memory;
        run.weights = memory + kv_records(call, run) * kv_blocks(run);
    }

    float* memory(int64_t floats) {
        if (floats > MOST_HELD) {
            large.reset(new float[floats]);
            return large.get();
        }
        float* held = scratch(2, floats);
        if (!held) throw std::bad_alloc();
        return held;
    }

    static int64_t slots(const KvRun& run) { return run.slot1 - run.slot0; }

    // The first run of a thread's share.
    int64_t first_of(int64_t thread) const {
        return (int64_t)plan.runs.size() * thread / plan.threads;
    }

    // A thread first takes the runs of its own share: in the next call of the same shape its caches
    // hold some of their slots. Then it takes runs of other shares.
    void work(int64_t thread) {
        for (int64_t i = 0; i < plan.threads && !failed; ++i) work_on((thread + i) % plan.threads);
    }

    void work_on(int64_t share) {
        for (int64_t i; (i = next[share]++) < first_of(share + 1);) {
            KvRun run = plan.runs[i];
            const int64_t records = kv_records(call, run);
            const int64_t own = kv_scratch(call, records);
            const int64_t partial = plan.alone ? records * record_floats : 0;
            float* memory = scratch(0, own + partial + (run.mass ? kv_kept(call, run) : 0));
            if (!memory) {
                failed = true;
                return;
            }
            if (plan.alone) run.partial = memory + own;
            if (run.mass) keep_at(memory + own + partial, run);
            kernel(call, run, memory);
            if (!plan.alone) continue;
            const float* record = run.partial;
            for (int64_t row = run.row0; row < run.row1; ++row)
                for (int64_t g = 0; g < call.group; ++g)
                    for (int64_t token = run.query0; token < run.query1; ++token) {
                        merge(call, &record, 1, row, run.head * call.group + g, token);
                        record += record_floats;
                    }
        }
    }

    // Merges all partial results of one row and query head.
    void finish(int64_t row, int64_t query_head) {
        const int64_t head = query_head / call.group, g = query_head % call.group;
        const int64_t* const chains = plan.chains_of(row);
        const int64_t chain_count = plan.chain_count(row);
        int64_t most = 0;
        for (int64_t i = 0; i < chain_count; ++i) most += plan.chains[chains[i]].parts;
        const float** partial = (const float**)scratch(1, most * 2);
        if (!partial) {
            failed = true;
            return;
        }
        for (int64_t token = plan.range.first; token < plan.range.end; ++token) {
            int64_t count = 0;
            for (int64_t i = 0; i < chain_count; ++i) {
                const ChainPlan& chain = plan.chains[chains[i]];
                for (int64_t part = 0; part < chain.parts; ++part) {
                    const KvRun& run = plan.run_of(call, chain, part, row, head, token);
                    partial[count++] =
                        run.partial + record_of(call, run, row, g, token) * record_floats;
                }
            }
            const Softmax found = merge(call, partial, count, row, query_head, token);
            if (plan.range.mass) softmax_of(row, query_head, token) = found;
        }
    }

    Softmax& softmax_of(int64_t row, int64_t query_head, int64_t token) {
        return softmax[(row * call.heads * call.group + query_head) *
                           (plan.range.end - plan.range.first) +
                       token - plan.range.first];
    }

    // Start of the mass of one row and kv head; null: not needed.
    float* mass_of(int64_t row, int64_t head) const {
        if (!call.masses) return call.mass + (row * call.heads + head) * plan.slots;
        float* const own = call.masses[row];
        return own ? own + head * call.slots_of[row] : nullptr;
    }

    // Computes the mass of each slot over the queries of one row and kv head: the sum, or the
    // largest weight.
    void add_mass(int64_t row, int64_t head) {
        float* const mass = mass_of(row, head);
        if (!mass) return;
        const int64_t* const chains = plan.chains_of(row);
        int64_t before_chain = 0;
        for (int64_t i = 0; i < plan.chain_count(row); ++i) {
            const ChainPlan& chain = plan.chains[chains[i]];
            add_mass_of(chain, row, head, mass + before_chain);
            before_chain += chain.slots;
        }
    }

    void add_mass_of(const ChainPlan& chain, int64_t row, int64_t head, float* mass) {
        for (int64_t i = chain.first; i < chain.end; ++i) {
            const KvRun& run = plan.runs[i];
            if (run.head != head || row < run.row0 || row >= run.row1) continue;
            if (chain.sums) {
                add_sums(run.mass + (row - run.row0) * slots(run), mass + run.slot0, slots(run));
                continue;
            }
            for (int64_t g = 0; g < call.group; ++g)
                for (int64_t token = run.query0; token < run.query1; ++token) {
                    if (call.observed && !call.observed[row * call.observed_row + token]) continue;
                    const Softmax found = softmax_of(row, head * call.group + g, token);
                    if (found.inverse == 0) continue;  // the query sees nothing
                    add_weights(run, record_of(call, run, row, g, token), found, mass + run.slot0);
                }
        }
    }

    // Adds the mass of a run.
    void add_sums(const float* own, float* mass, int64_t count) const {
        if (call.peak)
            for (int64_t j = 0; j < count; ++j) mass[j] = std::max(mass[j], own[j]);
        else
            for (int64_t j = 0; j < count; ++j) mass[j] += own[j];
    }

    // The weights of a block are relative to its largest score so far.
    void add_weights(const KvRun& run, int64_t record, Softmax found, float* mass) {
        const float* weight = run.weights + record * slots(run);
        const int64_t records = kv_records(call, run);
        const float* top = run.tops + record;
        float last = NAN, factor = 0;
        const float share = call.peak ? 1.0f : (float)call.group;
        for (int64_t at = 0; at < slots(run); at += KV_BLOCK, top += records) {
            if (*top != last) {
                last = *top;
                factor = std::exp(last - found.base) * found.inverse / share;
            }
            const int64_t end = std::min(at + KV_BLOCK, slots(run));
            if (call.peak)
                for (int64_t j = at; j < end; ++j) mass[j] = std::max(mass[j], weight[j] * factor);
            else
                for (int64_t j = at; j < end; ++j) mass[j] += weight[j] * factor;
        }
    }
};

bool attend(const KvCall& call, Range range) {
    Job job(call, range);
    const int64_t threads = job.plan.threads, heads = call.heads * call.group;
    const int64_t records = call.rows * heads * (range.end - range.first);
    by_threads(threads, [&](int64_t thread) { job.work(thread); });
    // For few elements a parallel loop costs more than it saves.
    if (!job.plan.alone && !job.failed)
        share(records * call.value_width < (1 << 15) ? 1 : threads, call.rows * heads,
              [&](int64_t i) { job.finish(i / heads, i % heads); });
    if (range.mass && !job.failed) {
        const int64_t sums = job.plan.alone ? job.plan.runs.size() : records;
        share(sums * job.plan.slots < (1 << 17) ? 1 : threads, call.rows * call.heads,
              [&](int64_t i) { job.add_mass(i / call.heads, i % call.heads); });
    }
    return !job.failed;
}

// For the mass, all weights of a query are stored until its softmax is known, so queries are
// computed in ranges to limit memory.
bool attend(const KvCall& call) {
    if (!call.mass && !call.masses) return attend(call, {0, call.queries, false});
    int64_t of_query = call.rows * call.heads * call.group;
    of_query *= std::max<int64_t>(1, slots_of(call));
    const int64_t tile = tokens_of_tile(call);
    int64_t most = std::max<int64_t>(1, MOST_WEIGHTS / of_query);
    if (most > tile) most -= most % tile;
    int64_t first = std::min(call.observed ? call.observed_from : 0, call.queries);
    if (first && !attend(call, {0, first, false})) return false;
    for (; first < call.queries; first += most)
        if (!attend(call, {first, std::min(first + most, call.queries), true})) return false;
    return true;
}

}  // namespace

int kv_attend_call(const KvCall& call) {
    try {
        return !attend(call);
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

int kv_attend(const KvCall* given, const KvSegment* segments, const KvReach* reaches) {
    KvCall call = *given;
    call.segments = segments;
    call.reaches = reaches;
    call.holders = nullptr;
    call.outs = nullptr;
    call.masses = nullptr;
    return kv_attend_call(call);
}

int kv_abi() { return KV_ABI; }
