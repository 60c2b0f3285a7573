// Encodes new keys and values as codes. In a decode step a chain of tensor operations would
// cost more time than the smaller cache saves.
#include <cmath>
#include <cstdint>
#include <limits>
#include <new>
#include <vector>

#include "packings.h"
#include "rotate.h"

namespace {

constexpr float MOST_HALF = 65504.0f;  // the largest float16
constexpr float MOST_E5M2 = 57344.0f;

// Scales of narrow codes are fitted: the scale for the largest element times one of these factors;
// src/kvkeep/codec/ints.py has the same ones.
constexpr int64_t MOST_FITTED = 3;  // most bits
constexpr float FACTORS[] = {1.0f, 1.1f, 0.9f, 0.8f, 0.7f};

template <class T>
void load(const void* from, int64_t offset, int64_t width, float* to) {
    const auto* x = (const typename T::Element*)from + offset;
    for (int64_t i = 0; i < width; ++i) to[i] = T::widen1(x[i]);
}

void load(const KvPlane& x, int64_t offset, int64_t width, float* to) {
    switch (x.type) {
        case KV_F32: return load<F32>(x.data, offset, width, to);
        case KV_BF16: return load<BF16>(x.data, offset, width, to);
        default: return load<F16>(x.data, offset, width, to);
    }
}

// Rounds to float16 and back; a non-finite number becomes NaN, to stay visible.
float rounded_half(float x, uint16_t* out) {
    if (!std::isfinite(x)) x = std::numeric_limits<float>::quiet_NaN();
    x = x > MOST_HALF ? MOST_HALF : x < -MOST_HALF ? -MOST_HALF : x;
    *out = F16::narrow1(x);
    return F16::widen1(*out);
}

// The same to E5M2 if `high`, the higher byte of a float16; ties to even.
float rounded_scale(float x, bool high, uint16_t* out) {
    const float half = rounded_half(x, out);
    if (!high) return half;
    if (half > MOST_E5M2 || half < -MOST_E5M2) *out = half > 0 ? 0x7b00 : 0xfb00;
    else *out = half != half ? 0x7e00 : (*out + 0x7f + (*out >> 8 & 1)) & 0xff00;
    return F16::widen1(*out);
}

// The code nearest to x / scale + shift, ties to even, within bounds. A non-finite x / scale counts
// as 0.
int code(float x, float scale, float shift, float low, float high) {
    float y = x / scale;
    y = (std::isfinite(y) ? y : 0.0f) + shift;
    y = y < low ? low : y > high ? high : y;
    return (int)((y + 12582912.0f) - 12582912.0f);
}

struct Range {
    float low, high;
    bool number = true;
};

Range range(const float* x, int64_t count) {
    Range found{x[0], x[0]};
    for (int64_t i = 0; i < count; ++i) {
        found.number &= x[i] == x[i];
        found.low = x[i] < found.low ? x[i] : found.low;
        found.high = x[i] > found.high ? x[i] : found.high;
    }
    if (!found.number) found.low = found.high = std::numeric_limits<float>::quiet_NaN();
    return found;
}

// The squared error of codes at a scale. Of a last group that is shorter than a vector, zeros
// follow.
float error_at(float scale, const float* x, int64_t count, float middle, float highest) {
    const vf magic = all(12582912.0f);
    vf errors{};
    for (int64_t i = 0; i < count; i += W) {
        const vf given = load<vf>(x + i);
        vf y = given / scale;
        y = (vf)((vi)y & (vi)(y - y == vf{})) + middle;  // a non-finite x / scale counts as 0
        y = y < 0.0f ? vf{} : y;
        y = y > highest ? all(highest) : y;
        const vf error = given - ((y + magic - magic) - middle) * scale;
        errors += error * error;
    }
    return sum(errors);
}

// The scale for the largest element, or a multiple of it with a smaller error.
float fitted_scale(float largest, bool high, const float* x, int64_t count, int middle,
                   uint16_t* out) {
    float least = 0, best = 0;
    for (const float factor : FACTORS) {
        uint16_t bits;
        const float scale = rounded_scale(largest * factor, high, &bits);
        const float error = error_at(scale, x, count, (float)middle, (float)(2 * middle - 1));
        if (factor != FACTORS[0] && !(error < least)) continue;
        least = error, best = scale, *out = bits;
    }
    return best;
}

// The scale at which the product of a group and its decoded form is the group's squared length;
// `scale` if all codes are 0.
void unbias(const float* x, const int* codes, int64_t count, int middle, bool high,
            uint16_t* scale) {
    double squares = 0, products = 0;
    for (int64_t i = 0; i < count; ++i) {
        squares += (double)x[i] * x[i];
        products += (double)x[i] * (codes[i] - middle);
    }
    const float found = (float)(squares / products);
    if (std::isfinite(found)) rounded_scale(found, high, scale);
}

// Codes of a group, unsigned but for those of 8 bits.
void encode_group(int64_t bits, bool high, const float* x, int64_t count, int* codes,
                  uint16_t* scale, uint16_t* zero) {
    const Range found = range(x, count);
    const int highest = (1 << bits) - 1, middle = 1 << (bits - 1);
    if (bits == 8) {
        const float most = found.high > -found.low ? found.high : -found.low;
        const float step = rounded_scale(most / 127, high, scale);
        for (int64_t i = 0; i < count; ++i) codes[i] = code(x[i], step, 0, -127, 127);
    } else if (zero) {
        const float base = rounded_half(found.low, zero);
        const float step = rounded_scale((found.high - base) / (float)highest, high, scale);
        for (int64_t i = 0; i < count; ++i) codes[i] = code(x[i] - base, step, 0, 0, highest);
    } else {
        const float most = found.high > -found.low ? found.high : found.low;
        const float largest = most / -middle;
        const float step = bits > MOST_FITTED
                               ? rounded_scale(largest, high, scale)
                               : fitted_scale(largest, high, x, count, middle, scale);
        for (int64_t i = 0; i < count; ++i) codes[i] = code(x[i], step, middle, 0, highest);
        unbias(x, codes, count, middle, high, scale);
    }
}

// The squared distance of a token to its decoded form; NaN if a scale is NaN.
float squared_error(const KvEncoding& e, const float* x, const int* codes, const uint16_t* scale,
                    const uint16_t* zero) {
    const KvPacking packing = kv_packing(e.codes.type);
    const int64_t middle = packing.bits == 8 || zero ? 0 : packing.middle();
    double sum = 0;
    for (int64_t i = 0; i < e.width; ++i) {
        const int64_t g = i / e.group;
        const float step = F16::widen1(scale[g]);
        const float code = (float)(codes[i] - middle);
        const float decoded = code * step + (zero ? F16::widen1(zero[g]) : 0.0f);
        sum += ((double)x[i] - decoded) * ((double)x[i] - decoded);
    }
    return (float)sum;
}

// Writes codes that fill bytes, the first in the low bits. `first` and `bits`: which bits of a
// code.
void pack(const int* codes, int64_t width, int64_t bits, int64_t first, uint8_t* to) {
    const int64_t each = 8 / bits;
    for (int64_t i = 0; i < width; i += each) {
        int byte = 0;
        for (int64_t k = 0; k < each; ++k)
            byte |= (codes[i + k] >> first & ((1 << bits) - 1)) << k * bits;
        to[i / each] = (uint8_t)byte;
    }
}

// Writes `bits` bits of each code, from bit `first` on, as a plane of folded rows (spread.h).
void fold(const int* codes, int64_t width, int64_t bits, int64_t first, int64_t wide, uint8_t* to) {
    const int64_t parts = wide / bits, size = width * bits / 8, each = 8 / wide;
    for (int64_t i = 0; i < size; ++i) {
        int byte = 0;
        for (int64_t part = 0; part < parts; ++part)
            for (int64_t k = 0; k < each; ++k) {
                const int code = codes[(part * size + i) * each + k] >> first & ((1 << bits) - 1);
                byte |= code << (k * wide + part * bits);
            }
        to[i] = (uint8_t)byte;
    }
}

void write_codes(const KvPacking& packing, const int* codes, int64_t width, uint8_t* to) {
    const int64_t low = packing.low;
    if (!low) return pack(codes, width, packing.bits, 0, to);
    fold(codes, width, low, 0, packing.wide, to);
    fold(codes, width, packing.bits - low, low, packing.wide, to + width * low / 8);
}

}  // namespace

int kv_encode(const KvEncoding* given) {
    const KvEncoding& e = *given;
    try {
        std::vector<float> token(e.width + W);
        std::vector<int> codes(e.width);
        const bool high = e.scale.type == KV_HIGH_HALF;
        const KvPacking packing = kv_packing(e.codes.type);
        const int64_t groups = (e.width + e.group - 1) / e.group;
        std::vector<uint16_t> scales(groups);
        for (int64_t row = 0; row < e.rows; ++row)
            for (int64_t head = 0; head < e.heads; ++head)
                for (int64_t slot = 0; slot < e.slots; ++slot) {
                    const auto at = [&](const KvPlane& plane) {
                        return row * plane.row + head * plane.head + slot * plane.slot;
                    };
                    load(e.x, at(e.x), e.width, token.data());
                    if (e.hadamard) rotate(token.data(), e.width);
                    uint16_t* scale = scales.data();
                    uint16_t* zero = e.zero.data ? (uint16_t*)e.zero.data + at(e.zero) : nullptr;
                    for (int64_t g = 0; g < groups; ++g) {
                        const int64_t from = g * e.group;
                        const int64_t count = e.width - from < e.group ? e.width - from : e.group;
                        encode_group(packing.bits, high, token.data() + from, count,
                                     codes.data() + from, scale + g, zero ? zero + g : nullptr);
                    }
                    for (int64_t g = 0; g < groups; ++g)
                        if (high) ((uint8_t*)e.scale.data)[at(e.scale) + g] = scale[g] >> 8;
                        else ((uint16_t*)e.scale.data)[at(e.scale) + g] = scale[g];
                    if (e.errors)
                        e.errors[(row * e.heads + head) * e.slots + slot] +=
                            squared_error(e, token.data(), codes.data(), scale, zero);
                    write_codes(packing, codes.data(), e.width,
                                (uint8_t*)e.codes.data + at(e.codes));
                }
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
