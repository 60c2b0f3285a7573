// How much each key of a head resembles their mean direction.
#include "cosines.h"

#include <algorithm>
#include <vector>

#include "codes.h"
#include "rotate.h"
#include "spread.h"

namespace {

// Slots of a head: T's elements, `stride` apart. `scales`: null, or the factor of each slot's
// elements. It is above 0 or NaN, so it only decides whether there is a direction.
template <class T>
struct Keys {
    const typename T::Element* first;
    int64_t stride;
    const uint16_t* scales;
    int64_t scale_stride;
    const typename T::Element* at(int64_t slot) const { return first + slot * stride; }
};

// The sums of f over W slots from `first` on; f returns the sums of a slot by lane.
template <class F>
KV_INLINE vf by_slot(int64_t first, int64_t count, F f) {
    vf v[W];
    for (int j = 0; j < W; ++j) v[place(j)] = first + j < count ? f(first + j) : vf{};
    return sums(v);
}

// The centre that the keys of a head lack, and the scales by which they are divided.
class Mean {
    const KvCentre& centre;
    const float *const mean, *const scale;
    const int64_t width, pairs, turns;
    const bool rotated;

    // The two dimensions of a pair.
    int64_t first(int64_t pair) const { return centre.interleaved ? 2 * pair : pair; }
    int64_t second(int64_t pair) const { return centre.interleaved ? 2 * pair + 1 : pair + pairs; }

  public:
    explicit Mean(const KvKeys& keys)
        : centre(*keys.centre),
          mean(centre.mean + keys.row * centre.row + keys.head * centre.head),
          scale(mean + keys.width),
          width(keys.width),
          pairs(centre.pairs),
          turns(kv_turns(centre, width) / 2),
          rotated(keys.slots.rotated) {}

    // The cosines and sines of a position, 2 * turns.
    const float* row(int32_t position) const {
        return centre.table + std::clamp<int64_t>(position, 0, centre.positions - 1) * 2 * turns;
    }

    // Makes the key of a position whole, not rotated.
    void complete(int32_t position, float* key) const {
        const float *cos = row(position), *sin = cos + turns;
        if (rotated) rotate(key, width);
        for (int64_t i = 0; i < pairs; ++i) {
            const float a = mean[first(i)], b = mean[second(i)];
            key[first(i)] += a * cos[i] - b * sin[i];
            key[second(i)] += b * cos[i] + a * sin[i];
        }
        for (int64_t i = 2 * pairs; i < width; ++i) key[i] += mean[i];
        for (int64_t i = 0; i < width; ++i) key[i] *= scale[i];
    }

    // The product of a direction and a whole key is that of `lacking` and the key as it lies, and
    // that of `factors` and the position's row of the table.
    void project(const float* direction, float* lacking, float* factors) const {
        memset(lacking, 0, padded(width) * sizeof *lacking);
        for (int64_t i = 0; i < width; ++i) lacking[i] = direction[i] * scale[i];
        for (int64_t i = 0; i < pairs; ++i) {
            const float a = lacking[first(i)], b = lacking[second(i)];
            const float m = mean[first(i)], n = mean[second(i)];
            factors[i] = a * m + b * n;
            factors[turns + i] = b * m - a * n;
        }
        if (pairs < turns) factors[pairs] = factors[2 * turns - 1] = 0;
        for (int64_t i = 2 * pairs; i < width; ++i) factors[pairs] += lacking[i] * mean[i];
        if (rotated) rotate(lacking, width);
    }

    // The product of factors and a position's row, by lane.
    inline __attribute__((always_inline)) vf product(const float* factors, int32_t position) const {
        const float* own = row(position);
        vf a{}, b{};
        int64_t i = 0;
        for (; i + STEP <= 2 * turns; i += STEP) {
            a += load<vf>(own + i) * load<vf>(factors + i);
            b += load<vf>(own + i + W) * load<vf>(factors + i + W);
        }
        for (; i < 2 * turns; ++i) a[0] += own[i] * factors[i];
        return a + b;
    }
};

// Directions are added as multiples of 2^-24: so the sum does not depend on the slots' order, and a
// direction that is subtracted leaves nothing.
constexpr float ONE = 1 << 24;

// Adds `sign` times the directions of at most BLOCK keys.
template <class T>
void add(const Keys<T>& keys, int64_t count, int64_t width, const int32_t* position,
         const KvDirected* of, int64_t sign, KvDirections& known) {
    float inverse[BLOCK];
    int64_t* sums = known.sums();
    for (int64_t j = 0; j < count; ++j) {
        const bool there = position[j] >= 0, finite = of[j].length <= 3.402823466e38f;
        known.live += sign * there;
        inverse[j] = there && finite ? ONE / std::max(of[j].length, 1e-12f) : 0;
    }
    for (int64_t i = 0; i < width; i += STEP) {
        vi a{}, b{};
        for (int64_t j = 0; j < count; ++j) {
            if (inverse[j] == 0) continue;
            const Pair p = T::widen(keys.at(j) + i);
            a += __builtin_convertvector(p.a * inverse[j], vi);
            b += __builtin_convertvector(p.b * inverse[j], vi);
        }
        for (int j = 0; j < W; ++j) {
            sums[i + j] += sign * a[j];
            sums[i + W + j] += sign * b[j];
        }
    }
}

template <class T>
void measure(const Keys<T>& keys, int64_t count, int64_t width, const int32_t* position,
             KvDirected* to, KvDirections& known) {
    for (int64_t first = 0; first < count; first += W) {
        const vf squares = by_slot(first, count, [&](int64_t j) {
            const auto* x = keys.at(j);
            vf a{}, b{};
            for (int64_t i = 0; i < width; i += STEP) {
                const Pair p = T::widen(x + i);
                a += p.a * p.a, b += p.b * p.b;
            }
            return a + b;
        });
        for (int64_t j = first; j < std::min(count, first + W); ++j) {
            to[j].length = std::sqrt(squares[j - first]);
            if (keys.scales) to[j].length += 0 * F16::widen1(keys.scales[j * keys.scale_stride]);
        }
    }
    add(keys, count, width, position, to, 1, known);
}

// The product of a key and a direction, by lane, added to `a`.
template <class T>
KV_INLINE vf product(const typename T::Element* x, const float* direction, int64_t width, vf a) {
    vf b{};
#pragma GCC unroll 4
    for (int64_t i = 0; i < width; i += STEP) {
        const Pair p = T::widen(x + i);
        a += p.a * load<vf>(direction + i), b += p.b * load<vf>(direction + i + W);
    }
    return a + b;
}

// The same for codes whose groups are whole numbers of 8 codes, without decoding them: the sums of
// a group's codes are multiplied by its scale, and the direction's by its zero point.
template <int BITS>
class CodedProduct {
    const KvEncoded& keys;
    const float* direction;
    int64_t row, head, groups, group;
    float offset;              // of zero points, in scales
    v8 sums[MOST_WIDTH / 16];  // of the direction in each group, by lane

    // The index of a slot's first scale or zero point.
    int64_t at(const KvPlane& plane, int64_t slot) const {
        return row * plane.row + head * plane.head + slot * plane.slot;
    }

  public:
    static bool fits(const KvEncoded& keys, int64_t width) {
        const int64_t group = std::min(keys.group, width);
        return keys.block <= 1 && width % 8 == 0 && group % 8 == 0 && group >= 16 &&
               width <= MOST_WIDTH;
    }

    CodedProduct(const KvKeys& all, const float* direction)
        : keys(all.slots), direction(direction), row(all.row), head(all.head),
          groups(group_count(all.width, keys.group)), group(std::min(keys.group, all.width)),
          offset((float)((keys.zero.data ? kv_zero_offset(keys.plane.type) : 0) -
                         Codes<BITS>::MIDDLE)) {
        for (int64_t g = 0; g < groups; ++g) {
            sums[g] = v8{};
            for (int64_t i = g * group; i < std::min((g + 1) * group, all.width); i += 8)
                sums[g] += load<v8>(direction + i);
        }
    }

    // `codes`: of the slot.
    inline __attribute__((always_inline)) vf operator()(const char* codes, int64_t slot,
                                                        int64_t width, vf a) const {
        const auto* x = (const uint8_t*)codes;
        const int64_t scales = at(keys.scale, slot), zeros = at(keys.zero, slot);
        v8 all{};
        for (int64_t g = 0, i = 0; g < groups; ++g) {
            v8 own{};
            const int64_t end = std::min(i + group, width);
#pragma GCC unroll 4
            for (; i < end; i += 8) own += code8<BITS>(x + i * BITS / 8) * load<v8>(direction + i);
            const float scale = scale1(keys.scale, scales + g);
            const float zero = keys.zero.data ? scale1(keys.zero, zeros + g) : 0;
            all += own * scale;
            if (Codes<BITS>::MIDDLE || keys.zero.data) all += sums[g] * (zero + offset * scale);
        }
        vf b{};
        memcpy(&b, &all, sizeof all);
        return a + b;
    }
};

constexpr float NOISE = 1.0f / 4096;  // more than the rounding errors of scores

// `dot(slot, width, a)` adds the product, by lane, of a slot's key and the mean direction to a, and
// `share(slot)` returns, by lane, the part of it that the slot lacks.
template <class Dot, class Share>
KV_INLINE void scores_of(const Dot& dot, Share share, const int32_t* slots, int64_t count,
                         int64_t width, KvDirected* keys, float* out) {
    for (int64_t first = 0; first < count; first += W) {
        const vf dots = by_slot(first, count, [&](int64_t i) {
            return dot(slots[i], width, share(slots[i]));
        });
        for (int64_t i = first; i < std::min(count, first + W); ++i) {
            KvDirected& key = keys[slots[i]];
            out[i] = -dots[i - first] / std::max(key.length, 1e-8f);
            key.least = out[i] - NOISE;
        }
    }
}

// The memory in which `bound` leaves the numbers that `score` reads.
struct Scratch {
    float *factors, *lacking;  // see Mean; without a centre, `lacking` is not read

    Scratch(const KvKeys& keys, float* memory)
        : factors(memory), lacking(memory + kv_padded(keys.width + 2)) {}
};

// `dots(direction)` returns the function `dot` of `scores_of`, for keys as they lie.
template <class Dots>
void score(const KvKeys& all, Dots dots, const int32_t* slots, int64_t count, KvDirections& known,
           float* scratch, float* out) {
    const int64_t width = padded(all.width);
    const Scratch memory(all, scratch);
    const auto dot = dots(all.centre ? memory.lacking : known.mean(all.width));
    const auto pass = [&](auto share) __attribute__((always_inline)) {
        const auto of = [&](int64_t width) __attribute__((always_inline)) {
            scores_of(dot, share, slots, count, width, known.keys(all.width), out);
        };
        if (width == 64) of(64);
        else if (width == 128) of(128);
        else of(width);
    };
    if (!all.centre) return pass([](int64_t) { return vf{}; });
    const Mean centre(all);
    pass([&](int64_t slot) { return centre.product(memory.factors, all.position[slot]); });
}

// Sets the mean direction to that of the sum, and returns how far it moved. `next`: scratch memory,
// whose padding is set to 0.
float turn(KvDirections& known, int64_t width, float* next) {
    const int64_t padding = padded(width);
    float *mean = known.mean(width), size = 0, moved = 0;
    for (int64_t i = 0; i < padding; ++i) {
        next[i] = (float)((double)known.sums()[i] / ONE / (double)std::max<int64_t>(1, known.live));
        size += next[i] * next[i];
    }
    const float inverse = 1 / std::max(std::sqrt(size), 1e-8f);
    for (int64_t i = 0; i < padding; ++i) {
        next[i] *= inverse;
        moved += (next[i] - mean[i]) * (next[i] - mean[i]);
        mean[i] = next[i];
    }
    return std::sqrt(moved);
}

// A cosine changes at most by the distance that the mean direction moves. `read` is that of
// `reading`.
template <class T, class Read, class Dots>
void bound(const KvKeys& all, Read read, Dots dots, int64_t slots, KvDirections& known,
           float* scratch, float* out) {
    constexpr int64_t id = 10 * W + sizeof(typename T::Element);
    const int64_t width = padded(all.width);
    const Scratch memory(all, scratch);
    KvDirected* keys = known.keys(all.width);
    if (known.id != id || known.slots > slots) known.slots = 0;
    const int64_t earlier = known.slots;
    if (!earlier) {
        known.live = 0, known.id = id, known.lowest = -1;
        memset(known.sums(), 0, width * sizeof(int64_t));
    }
    for (int64_t block = earlier; block < slots; block += BLOCK) {
        const int64_t count = std::min(BLOCK, slots - block);
        measure<T>(read(block, count, true), count, width, all.position + block,
                   keys + block, known);
    }
    known.slots = slots;
    known.moved = turn(known, all.width, memory.lacking) * 1.0001f + NOISE / 1024;
    for (int64_t i = 0; i < earlier; ++i) {
        const float least = keys[i].least - known.moved;
        out[i] = keys[i].least = least < -1 - NOISE ? -1 - NOISE : least;  // NaN stays NaN
    }
    if (all.centre) Mean(all).project(known.mean(all.width), memory.lacking, memory.factors);
    int32_t some[BLOCK];
    for (int64_t block = earlier; block < slots; block += BLOCK) {
        const int64_t count = std::min(BLOCK, slots - block);
        for (int64_t i = 0; i < count; ++i) some[i] = (int32_t)(block + i);
        score(all, dots, some, count, known, scratch, out + block);
    }
}

// Calls f(type, read, dots), where read(slot, count, whole) returns the Keys of a block: where they
// lie, or decoded to `wide`. If they are to be whole, the centre, if there is one, completes them.
// `dots`: see `score`.
template <class F>
void reading(const KvKeys& all, float* wide, F f) {
    const KvEncoded& keys = all.slots;
    const KvPlane& plane = keys.plane;
    const int64_t width = all.width, row = all.row, head = all.head;
    const int64_t first = row * plane.row + head * plane.head, step = padded(width);
    const bool in_memory = step == width && !all.centre;  // as they lie, they are what to read
    // The products with the Keys that `read` returns.
    const auto with_keys = [&](auto type, auto read) {
        using T = decltype(type);
        f(type, read, [read](const float* mean) {
            return [=](int64_t slot, int64_t width, vf a) KV_LAMBDA {
                return product<T>(read(slot, 1, false).first, mean, width, a);
            };
        });
    };
    const auto in_place = [&](auto type, const uint16_t* scales) {
        using T = decltype(type);
        const auto* x = (const typename T::Element*)plane.data + first;
        with_keys(type, [=](int64_t slot, int64_t, bool) {
            return Keys<T>{x + slot * plane.slot, plane.slot,
                           scales ? scales + slot * keys.scale.slot : nullptr, keys.scale.slot};
        });
    };
    const auto decoded = [&](auto fill) {
        if (step != width) memset(wide, 0, BLOCK * step * sizeof *wide);
        return [=, &all](int64_t slot, int64_t count, bool whole) {
            fill(slot, count);
            if (whole && all.centre) {
                const Mean centre(all);
                for (int64_t j = 0; j < count; ++j)
                    centre.complete(all.position[slot + j], wide + j * step);
            }
            return Keys<F32>{wide, step, nullptr, 0};
        };
    };
    const auto plain = [&](auto type) {
        using T = decltype(type);
        if (in_memory) return in_place(type, nullptr);
        const auto* x = (const typename T::Element*)plane.data + first;
        with_keys(F32{}, decoded([=](int64_t slot, int64_t count) {
            for (int64_t j = 0; j < count; ++j)
                for (int64_t i = 0; i < width; ++i)
                    wide[j * step + i] = T::widen1(x[(slot + j) * plane.slot + i]);
        }));
    };
    const auto coded = [&](auto bits) {
        constexpr int BITS = bits.size;
        std::vector<char> memory(kv_packing(plane.type).spread() ? BLOCK * width : 0);
        const auto codes = [=, &keys, &memory](int64_t slot, int64_t count) {
            const Rows held{(const char*)plane.data + first + slot * plane.slot, plane.slot,
                            kv_packing(plane.type).bytes(width)};
            return readable(keys, held, count, width, memory.data());
        };
        const auto read = decoded([=, &keys](int64_t slot, int64_t count) {
            const Rows rows = codes(slot, count);
            decode<BITS>(keys, row, head, slot, rows, rows, count, width, wide);
        });
        if (!CodedProduct<BITS>::fits(keys, width)) return with_keys(F32{}, read);
        f(F32{}, read, [&](const float* mean) {
            return [product = CodedProduct<BITS>(all, mean), codes](
                       int64_t slot, int64_t width, vf a) KV_LAMBDA {
                return product(codes(slot, 1).first, slot, width, a);
            };
        });
    };
    switch (plane.type) {
        case KV_F32: return plain(F32{});
        case KV_BF16: return plain(BF16{});
        case KV_F16: return plain(F16{});
        case KV_I8:
            if (keys.group < width || !in_memory) return coded(Tile<8>{});
            return in_place(I8{}, (const uint16_t*)keys.scale.data + row * keys.scale.row +
                                      head * keys.scale.head);
        default:
            if (kv_packing(plane.type).wide == 8) return coded(Tile<8>{});
            return coded(Tile<4>{});
    }
}

// Where a block is decoded, behind the scratch memory of `bound`.
float* behind(const KvKeys& keys, float* scratch) {
    return scratch + 2 * kv_padded(keys.width + 2);
}

void bound_head(const KvKeys& keys, int64_t slots, KvDirections& known, float* scratch,
                float* out) {
    reading(keys, behind(keys, scratch), [&](auto type, auto read, auto dots) {
        bound<decltype(type)>(keys, read, dots, slots, known, scratch, out);
    });
}

void score_slots(const KvKeys& keys, const int32_t* slots, int64_t count, KvDirections& known,
                 float* scratch, float* out) {
    reading(keys, behind(keys, scratch), [&](auto, auto, auto dots) {
        score(keys, dots, slots, count, known, scratch, out);
    });
}

void forget(const KvKeys& keys, int64_t slot, KvDirections& known, float* scratch) {
    reading(keys, behind(keys, scratch), [&](auto type, auto read, auto) {
        add<decltype(type)>(read(slot, 1, true), 1, padded(keys.width), keys.position + slot,
                            known.keys(keys.width) + slot, -1, known);
    });
}

float widened(int8_t x, I8) { return x; }

template <class T>
float widened(typename T::Element x, T) {
    return T::widen1(x);
}

void decode_slots(const KvKeys& keys, int64_t slot, int64_t count, float* scratch, float* out) {
    reading(keys, behind(keys, scratch), [&](auto type, auto read, auto) {
        const auto own = read(slot, count, true);
        for (int64_t j = 0; j < count; ++j, out += keys.width) {
            const auto* x = own.at(j);
            const float scale = own.scales ? F16::widen1(own.scales[j * own.scale_stride]) : 1;
            for (int64_t i = 0; i < keys.width; ++i) out[i] = widened(x[i], type) * scale;
            if (keys.slots.rotated && !keys.centre) rotate(out, keys.width);
        }
    });
}

}  // namespace

extern const KvCosineKernel KV_COSINES;
const KvCosineKernel KV_COSINES{bound_head, score_slots, forget, decode_slots};
