// Chooses how to score keys and sum values: plain or coded, for few or many queries.
#pragma once
#include <type_traits>

#include "chain.h"
#include "channels.h"
#include "channels_vnni.h"
#include "coded.h"
#include "coded_vnni.h"
#include "pairs.h"
#include "scores.h"
#include "spread.h"
#include "values.h"
#include "work.h"

namespace {

// The methods of scoring a run's keys and summing its values. Both are chosen once per run and
// called for each block, so that no code is compiled for each pair of types.
struct KeyMethod {
    void (*load)(const Work&);
    void (*score)(const Work&);
    bool floats = false;  // whether `score` leaves the block's keys as floats, for `float_keys`
};
struct ValueMethod {
    void (*add)(const Work&);
    void (*write_sums)(const Work&);  // writes the sums to the run's records, in element order
    bool narrow = false;              // whether `add` reads weights as bfloat16, at the same places
};

template <class K>
void load_queries(const Work& work) {
    const int64_t stride = padded(work.call.key_width);
    typename K::Query* q = (typename K::Query*)work.queries;
    memset(q, 0, kv_rows(work.records) * stride * sizeof *q);
    each_query(work, [&](int64_t record, auto x) {
        for (int64_t i = 0; i < work.call.key_width; ++i)
            q[record * stride + K::lane(i)] = K::query(x(i));
    });
}

template <class K>
void score(const Work& work) {
    scores<K>(work.key, work.ahead, work.count, work.call.key_width, work.queries, work.records,
              work.s);
}

// Many queries, transposed: see side_by_side.
void load_many(const Work& work) {
    const int64_t stride = padded(work.call.key_width);
    memset(work.queries, 0, kv_rows(work.records) * stride * sizeof *work.queries);
    each_query(work, [&](int64_t record, auto x) {
        const int64_t from = record / STEP * STEP, own = side_by_side(from, work.records);
        float* to = work.queries + from * stride + record - from;
        for (int64_t i = 0; i < work.call.key_width; ++i) to[i * own] = x(i);
    });
}

// The block's keys as floats: where they lie, or widened by `score_many`.
template <class T>
Rows float_keys(const Work& work) {
    const int64_t width = work.call.key_width, stride = apart(width) * sizeof(float);
    if constexpr (std::is_same_v<T, F32>) return work.key;
    else return {(const char*)work.wide_keys, stride, width * (int64_t)sizeof(float)};
}

template <class T>
void score_many(const Work& work) {
    const int64_t width = work.call.key_width;
    if constexpr (!std::is_same_v<T, F32>) widen<T>(work.key, work.count, width, work.wide_keys);
    scores_of_many(float_keys<T>(work), work.ahead, work.count, width, work.queries, work.records,
                   work.s, work.columns);
}

constexpr int64_t COPIED = 128;  // records from which a copy of float32 values, side by side, pays

// Values are widened once for all queries, if not with the keys.
template <class T>
void add_many(const Work& work) {
    const int64_t width = work.call.value_width;
    const Rows values =
        work.within ? float_keys<T>(work) : widen<T>(work.value, work.count, width, work.wide);
    add_floats(values, work.next, work.count, width, work.records, work.s, work.alpha, work.acc);
}

template <class V>
void add(const Work& work) {
    add_values<V>(work.value, work.next, work.count, work.call.value_width, work.records, work.s,
                  work.alpha, work.acc);
}

#if defined(KV_BF16_PAIRS)
void load_lanes(const Work& work) {
    const int64_t stride = padded(work.call.key_width);
    memset(work.queries, 0, work.records * stride * sizeof *work.queries);
    each_query(work, [&](int64_t record, auto x) {
        const TileOf tile(record, work.records, MOST_LANE_SCORES);
        set_lane_query(work.queries + tile.first * stride, tile.size, record - tile.first,
                       work.call.key_width, x);
    });
}

void score_lanes(const Work& work) {
    const Rows keys = even_rows(work.key, work.count, (char*)work.columns);
    for_tiles<MOST_LANE_SCORES>(work.records, [&](int64_t from, auto tile) {
        Lines ahead(work.ahead, work.count, (work.count + 15) / 16 * (keys.bytes / 32));
        if (from) ahead.some = 0;
        lane_scores<tile.size>(keys, ahead, work.count,
                               work.queries + from * padded(work.call.key_width),
                               work.s + from * BLOCK);
    });
}

// The block's keys as rows of pairs, and how many rows there are.
struct PackedKeys {
    vi* rows;
    int64_t pairs;

    explicit PackedKeys(const Work& work) : rows(aligned(work.wide_keys)) {
        const Rows keys = even_rows(work.key, work.count, (char*)work.columns);
        pairs = keys.bytes / 4;
        const Lines ahead(work.ahead, work.count, (work.count + 15) / 16 * (keys.bytes / 32));
        pack_keys(keys, ahead, work.count, rows);
    }
};

void score_packed(const Work& work) {
    const PackedKeys keys(work);
    const int64_t stride = padded(work.call.key_width);
    for_tiles<MOST_PACKED>(work.records, [&](int64_t from, auto tile) {
        packed_scores<tile.size>(keys.rows, keys.pairs, (uint16_t*)work.queries + from * stride,
                                 stride, work.s + from * BLOCK);
    });
}

vi* packed_values_of(const Work& work) {
    vi* const rows = aligned(work.wide);
    pack_values(work.value, work.next, work.count, work.call.value_width, rows);
    return rows;
}

// The records' weights as bfloat16, NARROW_STEP apart.
const uint16_t* narrow_weights_of(const Work& work) { return (const uint16_t*)work.s; }

void add_packed(const Work& work) {
    const vi* const values = packed_values_of(work);
    for_tiles<MOST_PACKED>(work.records, [&](int64_t from, auto tile) {
        packed_values<tile.size>(values, work.count, work.call.value_width,
                                 narrow_weights_of(work) + from * NARROW_STEP,
                                 work.alpha + from, work.acc + from * work.value_stride);
    });
}

#if defined(KV_TILES)
// Whether a run is computed on tiles. As in by_lanes, the number of rows does not matter.
bool on_tiles(const Work& work) { return work.asked >= TILE_ROWS; }

void score_tiles(const Work& work) {
    const PackedKeys keys(work);
    tile_scores(keys.rows, packed_rows(keys.pairs), (uint16_t*)work.queries,
                padded(work.call.key_width), work.records, work.s);
}

void add_tiles(const Work& work) {
    tile_values(packed_values_of(work), work.count, work.call.value_width, narrow_weights_of(work),
                work.alpha, work.records, work.acc);
}
#endif

void add_pairs_of_slots(const Work& work) {
    add_pair_values(work.value, work.next, work.count, work.call.value_width, work.records,
                    narrow_weights_of(work), work.alpha, work.acc);
}
#endif

Rows rows_of_floats(const float* floats, int64_t width) {
    return {(const char*)floats, padded(width) * 4, width * 4};
}

// Writes the sums to the run's records. The sum of element i is at LANE(i), where LANE is the same
// for each 64 elements.
template <int64_t LANE(int64_t)>
void write_sums(const Work& work) {
    const int64_t width = work.call.value_width;
    for (int64_t r = 0; r < work.records; ++r) {
        float* to = work.run.partial + r * (width + 2);
        const float* from = work.acc + r * work.value_stride;
        int64_t d = 0;
        for (; d + 64 <= width; d += 64)
#pragma GCC unroll 64
            for (int64_t i = 0; i < 64; ++i) to[d + i] = from[d + LANE(i)];
        for (; d < width; ++d) to[d] = from[LANE(d)];
    }
}

// -- coded keys and values

template <int BITS>
void decode_block(const Work& work, const KvEncoded& x, Rows codes, Rows next, int64_t width,
                  float* wide) {
    (x.block > 1 ? decode_channels<BITS> : decode<BITS>)(x, work.run.row0, work.run.head, work.at(),
                                                         codes, next, work.count, width, wide);
}

template <int BITS>
Rows decoded_keys(const Work& work) {
    const int64_t width = work.call.key_width;
    decode_block<BITS>(work, work.segment().k, work.key, work.ahead, width, work.wide_keys);
    return rows_of_floats(work.wide_keys, width);
}

template <int BITS>
void decode_and_score(const Work& work) {
    const Rows rows = decoded_keys<BITS>(work);
    scores<Widened<F32>>(rows, rows, work.count, work.call.key_width, work.queries, work.records,
                         work.s);
}

template <int BITS>
void decode_and_score_many(const Work& work) {
    const Rows rows = decoded_keys<BITS>(work);
    scores_of_many(rows, rows, work.count, work.call.key_width, work.queries, work.records, work.s,
                   work.columns);
}

template <int BITS>
void decode_and_add(const Work& work) {
    const int64_t width = work.call.value_width;
    if (!work.within)
        decode_block<BITS>(work, work.segment().v, work.value, work.next, width, work.wide);
    const Rows rows = work.within ? rows_of_floats(work.wide_keys, work.call.key_width)
                                  : rows_of_floats(work.wide, width);
    add_floats(rows, rows, work.count, width, work.records, work.s, work.alpha, work.acc);
}

// Calls f(record, its query as floats) for each query.
template <class F>
void each_float_query(const Work& work, F f) {
    each_query(work, [&](int64_t record, auto x) {
        float query[MOST_WIDTH];
        for (int64_t i = 0; i < work.call.key_width; ++i) query[i] = x(i);
        f(record, query);
    });
}

template <int BITS>
void load_coded(const Work& work) {
    const int64_t width = work.call.key_width, group = work.segment().k.group;
    each_float_query(work, [&](int64_t record, float* query) {
        const CodedQuery<BITS> to(work.queries + record * padded(width), width,
                                  group_count(width, group));
        code_query<BITS>(query, width, group, to);
    });
}

// Loads the block's scales, then its zero points for codes counted from their middle; returns the
// zero points, or null without them.
const float* load_groups(const Work& work, const KvEncoded& x, int64_t groups, float* scale) {
    const KvRun& run = work.run;
    load_scales(x.scale, run.row0, run.head, work.at(), work.count, groups, scale);
    if (!x.zero.data) return nullptr;
    float* zero = scale + groups * BLOCK;
    load_scales(x.zero, run.row0, run.head, work.at(), work.count, groups, zero);
    count_from_middle(x, scale, groups * BLOCK, zero);
    return zero;
}

template <int BITS>
void score_coded(const Work& work) {
    const int64_t width = work.call.key_width, group = work.segment().k.group;
    float* scale = work.columns;
    const float* zero = load_groups(work, work.segment().k, group_count(width, group), scale);
    coded_scores<BITS>(work.key, work.ahead, work.count, width, group, scale, zero, work.queries,
                       work.records, work.s);
}

template <int BITS>
void add_coded(const Work& work) {
    const int64_t width = work.call.value_width, group = work.segment().v.group;
    float* scale = work.wide;
    const float* zero = load_groups(work, work.segment().v, group_count(width, group), scale);
    add_coded_values<BITS>(work.value, work.next, work.count, width, group, scale, zero,
                           work.records, work.s, work.alpha, work.acc);
}

#if defined(KV_VNNI)
template <int BITS>
void load_bytes(const Work& work) {
    const int64_t width = work.call.key_width, group = work.segment().k.group;
    each_float_query(work, [&](int64_t record, float* query) {
        const TileOf tile(record, work.records, MOST_BYTE_SCORES);
        for (int64_t i = 0; i < width; i += W)
            store(query + i, in_quads<BITS>(load<vf>(query + i)));
        ByteQueries<BITS>(work.queries + tile.first * padded(width), tile.size, width, group)
            .set(record - tile.first, query, width, group);
    });
}

// Like load_groups. Also prefetches those of the next block.
const float* load_groups_ahead(const Work& work, const KvEncoded& x, int64_t groups, float* scale) {
    for (const KvPlane* plane : {&x.scale, &x.zero}) {
        if (!plane->data || plane->slot != groups) continue;
        const int64_t from = work.run.row0 * plane->row + work.run.head * plane->head +
                             (work.at() + BLOCK) * groups;
        const int64_t size = element_bytes(*plane);
        prefetch((const char*)plane->data + from * size, BLOCK * groups * size);
    }
    return load_groups(work, x, groups, scale);
}

template <int BITS>
void score_bytes(const Work& work) {
    const int64_t width = work.call.key_width, group = work.segment().k.group;
    float* scale = work.columns;
    const int64_t groups = group_count(width, group);
    const float* zero = load_groups_ahead(work, work.segment().k, groups, scale);
    const Rows keys = even_rows(work.key, work.count, (char*)work.wide_keys);
    for_tiles<MOST_BYTE_SCORES>(work.records, [&](int64_t from, auto tile) {
        Lines ahead(work.ahead, work.count, (work.count + 15) / 16 * (keys.bytes / 32));
        if (from) ahead.some = 0;
        byte_scores<BITS, tile.size>(keys, ahead, work.count, width, group, scale, zero,
                                     work.queries + from * padded(width), work.s + from * BLOCK);
    });
}

template <int BITS>
void add_bytes(const Work& work) {
    const int64_t width = work.call.value_width, group = work.segment().v.group;
    const int64_t groups = group_count(width, group);
    float* scale = work.wide;
    const float* zero = load_groups_ahead(work, work.segment().v, groups, scale);
    const Rows values =
        even_rows(work.value, work.count, (char*)(scale + 2 * groups * BLOCK));
    for_tiles<MOST_BYTE_VALUES>(work.records, [&](int64_t from, auto tile) {
        byte_values<BITS, tile.size>(values, work.next, work.count, width, group, scale, zero,
                                     work.s + from * BLOCK, work.alpha + from,
                                     work.acc + from * work.value_stride);
    });
}
#endif

template <int BITS>
void load_by_channel(const Work& work) {
    const int64_t width = work.call.key_width;
    each_float_query(work, [&](int64_t record, float* query) {
        in_lanes<BITS>(query, width, work.queries + record * padded(width));
    });
}

template <int BITS>
void score_by_channel(const Work& work) {
    channel_scores<BITS>(work.segment().k, work.run.row0, work.run.head, work.at(), work.key,
                         work.ahead, work.count, work.call.key_width, work.queries, work.records,
                         work.s, work.columns, work.wide_keys);
}

#if defined(KV_VNNI)
template <int BITS>
void load_in_quads(const Work& work) {
    const int64_t width = work.call.key_width;
    each_float_query(work, [&](int64_t record, float* query) {
        for (int64_t i = 0; i < width; i += W)
            store(work.queries + record * padded(width) + i, in_quads<BITS>(load<vf>(query + i)));
    });
}

template <int BITS>
void score_by_channel_bytes(const Work& work) {
    const int64_t width = work.call.key_width;
    channel_byte_scores<BITS>(work.segment().k, work.run.row0, work.run.head, work.at(), work.key,
                              work.ahead, work.count, width, work.queries, work.records, work.s,
                              work.columns, (char*)work.wide_keys);
}
#endif

template <int BITS>
KeyMethod coded_key_method(const KvEncoded& x, int64_t width, bool many) {
#if defined(KV_VNNI)
    if (fits_bytes(x, width)) return {load_bytes<BITS>, score_bytes<BITS>};
    if constexpr (BITS == 4)
        if (channels_fit_bytes<BITS>(x, width))
            return {load_in_quads<BITS>, score_by_channel_bytes<BITS>};
#endif
    if (many) return {load_many, decode_and_score_many<BITS>, true};
    if (channels_fit<BITS>(x, width)) return {load_by_channel<BITS>, score_by_channel<BITS>};
    if (fits(x, width)) return {load_coded<BITS>, score_coded<BITS>};
    return {load_queries<Widened<F32>>, decode_and_score<BITS>, true};
}

KeyMethod key_method(const Work& work, bool many) {
    const KvEncoded& x = work.segment().k;
    const int64_t type = kv_read_type(x.plane.type);
    if (type == KV_I8) return coded_key_method<8>(x, work.call.key_width, many);
    if (type == KV_I4) return coded_key_method<4>(x, work.call.key_width, many);
#if defined(KV_BF16_PAIRS)
    if (x.plane.type == KV_BF16 && work.segment().queries.type == KV_BF16) {
#if defined(KV_TILES)
        if (on_tiles(work)) return {load_queries<Dotted>, score_tiles};
#endif
        if (by_lanes(work.call.key_width, work.asked))
            return many ? KeyMethod{load_queries<Dotted>, score_packed}
                        : KeyMethod{load_lanes, score_lanes};
        return {load_queries<Dotted>, score<Dotted>};
    }
#endif
    KeyMethod method{};
    with_type(x.plane.type, [&](auto type) {
        typedef decltype(type) T;
        method = many ? KeyMethod{load_many, score_many<T>, true}
                      : KeyMethod{load_queries<Widened<T>>, score<Widened<T>>};
    });
    return method;
}

template <int BITS>
ValueMethod coded_value_method(const KvEncoded& x, int64_t width, bool many) {
#if defined(KV_VNNI)
    if (fits_bytes(x, width)) return {add_bytes<BITS>, write_sums<byte_lane<BITS>>};
#endif
    if (!many && fits(x, width)) return {add_coded<BITS>, write_sums<coded_lane<BITS>>};
    return {decode_and_add<BITS>, write_sums<Widened<F32>::lane>};
}

// Whether values are the first elements of their keys.
bool in_keys(const KvSegment& segment) {
    const auto same = [](const KvPlane& a, const KvPlane& b) {
        return a.data == b.data && a.type == b.type && a.row == b.row && a.head == b.head &&
               a.slot == b.slot;
    };
    const KvEncoded &k = segment.k, &v = segment.v;
    return same(k.plane, v.plane) && same(k.scale, v.scale) && same(k.zero, v.zero) &&
           k.group == v.group && k.block == v.block;
}

ValueMethod value_method(const Work& work, bool many) {
    const KvEncoded& x = work.segment().v;
    const int64_t type = kv_read_type(x.plane.type);
    if (type == KV_I8) return coded_value_method<8>(x, work.call.value_width, many);
    if (type == KV_I4) return coded_value_method<4>(x, work.call.value_width, many);
#if defined(KV_BF16_PAIRS)
    if (x.plane.type == KV_BF16 && work.segment().queries.type == KV_BF16) {
#if defined(KV_TILES)
        if (on_tiles(work)) return {add_tiles, write_sums<pair_lane>, true};
#endif
        return {many ? add_packed : add_pairs_of_slots, write_sums<pair_lane>, true};
    }
#endif
    ValueMethod method{};
    with_type(x.plane.type, [&](auto type) {
        typedef decltype(type) T;
        const bool copied =
            !std::is_same_v<T, F32> || in_keys(work.segment()) || work.records >= COPIED;
        method = many && copied ? ValueMethod{add_many<T>, write_sums<Widened<F32>::lane>}
                                : ValueMethod{add<T>, write_sums<Widened<T>::lane>};
    });
    return method;
}

}  // namespace
