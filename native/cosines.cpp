// How much each key of a head resembles their mean direction.
#include "cosines.h"

#include <algorithm>
#include <vector>

#include "codes.h"
#include "spread.h"

namespace {

// Slots of a head: T's elements, `stride` apart. `scales`: null, or what a slot's elements are to
// be multiplied by. It is above 0 or NaN, so it only decides whether there is a direction.
template <class T>
struct Keys {
    const typename T::Element* first;
    int64_t stride;
    const uint16_t* scales;
    int64_t scale_stride;
    const typename T::Element* at(int64_t slot) const { return first + slot * stride; }
};

// The sums of f over W keys from `first` on; f returns the sums of a key by lane.
template <class T, class F>
KV_INLINE vf by_slot(const Keys<T>& keys, int64_t first, int64_t count, F f) {
    vf v[W];
    for (int j = 0; j < W; ++j) v[place(j)] = first + j < count ? f(keys.at(first + j)) : vf{};
    return sums(v);
}

// Directions are added as multiples of 2^-24: so the sum does not depend on the slots' order, and a
// direction that is subtracted leaves nothing.
constexpr float ONE = 1 << 24;

// Adds `sign` times the directions of at most BLOCK keys.
template <class T>
void add(const Keys<T>& keys, int64_t count, int64_t width, const int32_t* position,
         const float* lengths, int64_t sign, KvDirections& known) {
    float inverse[BLOCK];
    int64_t* sums = known.sums();
    for (int64_t j = 0; j < count; ++j) {
        const bool there = position[j] >= 0, finite = lengths[j] <= 3.402823466e38f;
        known.live += sign * there;
        inverse[j] = there && finite ? ONE / std::max(lengths[j], 1e-12f) : 0;
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
             float* lengths, KvDirections& known) {
    for (int64_t first = 0; first < count; first += W) {
        const vf squares = by_slot(keys, first, count, [&](const auto* x) {
            vf a{}, b{};
            for (int64_t i = 0; i < width; i += STEP) {
                const Pair p = T::widen(x + i);
                a += p.a * p.a, b += p.b * p.b;
            }
            return a + b;
        });
        for (int64_t j = first; j < std::min(count, first + W); ++j) {
            lengths[j] = std::sqrt(squares[j - first]);
            if (keys.scales) lengths[j] += 0 * F16::widen1(keys.scales[j * keys.scale_stride]);
        }
    }
    add(keys, count, width, position, lengths, 1, known);
}

template <class T>
KV_INLINE void cosines(const Keys<T>& keys, int64_t count, int64_t width, const float* mean,
                       float size, const float* lengths, float* out) {
    for (int64_t first = 0; first < count; first += W) {
        const vf dots = by_slot(keys, first, count, [&](const auto* x) {
            vf a{}, b{};
#pragma GCC unroll 4
            for (int64_t i = 0; i < width; i += STEP) {
                const Pair p = T::widen(x + i);
                a += p.a * load<vf>(mean + i), b += p.b * load<vf>(mean + i + W);
            }
            return a + b;
        });
        const vf length = larger(load<vf>(lengths + first), all(1e-8f));
        store(out + first, -dots / (length * size));
    }
}

// `read(slot, count)` returns the Keys of a block.
template <class T, class Read>
void rank(Read read, int64_t width, const int32_t* position, int64_t slots, KvDirections& known,
          float* lengths, float* mean, float* out) {
    constexpr int64_t id = 10 * W + sizeof(typename T::Element);
    if (known.id != id || known.slots > slots) known.slots = 0;
    if (!known.slots) {
        known.live = 0, known.id = id;
        memset(known.sums(), 0, width * sizeof(int64_t));
    }
    for (int64_t block = known.slots; block < slots; block += BLOCK) {
        const int64_t count = std::min(BLOCK, slots - block);
        measure<T>(read(block, count), count, width, position + block, lengths + block, known);
    }
    known.slots = slots;
    float size = 0;
    for (int64_t i = 0; i < width; ++i) {
        mean[i] = (float)((double)known.sums()[i] / ONE / (double)std::max<int64_t>(1, known.live));
        size += mean[i] * mean[i];
    }
    size = std::max(std::sqrt(size), 1e-8f);
    for (int64_t block = 0; block < slots; block += BLOCK) {
        const int64_t count = std::min(BLOCK, slots - block);
        const auto pass = [&](int64_t width) __attribute__((always_inline)) {
            cosines<T>(read(block, count), count, width, mean, size, lengths + block, out + block);
        };
        if (width == 64) pass(64);
        else if (width == 128) pass(128);
        else pass(width);
    }
}

// Calls f(type, read), where read(slot, count) returns the Keys of a block: where they lie, or
// decoded to `wide`.
template <class F>
void reading(const KvEncoded& keys, int64_t width, int64_t row, int64_t head, float* wide, F f) {
    const KvPlane& plane = keys.plane;
    const int64_t first = row * plane.row + head * plane.head, step = padded(width);
    const auto in_place = [&](auto type, const uint16_t* scales) {
        using T = decltype(type);
        const auto* x = (const typename T::Element*)plane.data + first;
        f(type, [=](int64_t slot, int64_t) {
            return Keys<T>{x + slot * plane.slot, plane.slot,
                           scales ? scales + slot * keys.scale.slot : nullptr, keys.scale.slot};
        });
    };
    const auto widened = [&](auto fill) {
        memset(wide, 0, BLOCK * step * sizeof *wide);
        f(F32{}, [=](int64_t slot, int64_t count) {
            fill(slot, count);
            return Keys<F32>{wide, step, nullptr, 0};
        });
    };
    const auto plain = [&](auto type) {
        using T = decltype(type);
        if (step == width) return in_place(type, nullptr);
        const auto* x = (const typename T::Element*)plane.data + first;
        widened([=](int64_t slot, int64_t count) {
            for (int64_t j = 0; j < count; ++j)
                for (int64_t i = 0; i < width; ++i)
                    wide[j * step + i] = T::widen1(x[(slot + j) * plane.slot + i]);
        });
    };
    const auto coded = [&](auto bits) {
        widened([=, &keys](int64_t slot, int64_t count) {
            const Rows held{(const char*)plane.data + first + slot * plane.slot, plane.slot,
                            kv_packing(plane.type).bytes(width)};
            std::vector<char> memory(kv_packing(plane.type).spread() ? BLOCK * width : 0);
            const Rows codes = readable(keys, held, count, width, memory.data());
            decode<bits.size>(keys, row, head, slot, codes, codes, count, width, wide);
        });
    };
    switch (plane.type) {
        case KV_F32: return plain(F32{});
        case KV_BF16: return plain(BF16{});
        case KV_F16: return plain(F16{});
        case KV_I8:
            if (keys.group < width || step != width) return coded(Tile<8>{});
            return in_place(I8{}, (const uint16_t*)keys.scale.data + row * keys.scale.row +
                                      head * keys.scale.head);
        default:
            if (kv_packing(plane.type).wide == 8) return coded(Tile<8>{});
            return coded(Tile<4>{});
    }
}

void rank_head(const KvEncoded& keys, int64_t width, int64_t row, int64_t head,
               const int32_t* position, int64_t slots, KvDirections& known, float* scratch,
               float* out) {
    const int64_t step = padded(width);
    reading(keys, width, row, head, scratch + kv_padded(width), [&](auto type, auto read) {
        rank<decltype(type)>(read, step, position, slots, known, known.lengths(width), scratch, out);
    });
}

void forget(const KvEncoded& keys, int64_t width, int64_t row, int64_t head,
            const int32_t* position, int64_t slot, KvDirections& known, float* scratch) {
    reading(keys, width, row, head, scratch, [&](auto type, auto read) {
        add<decltype(type)>(read(slot, 1), 1, padded(width), position + slot,
                            known.lengths(width) + slot, -1, known);
    });
}

}  // namespace

extern const KvCosineKernel KV_COSINES;
const KvCosineKernel KV_COSINES{rank_head, forget};
