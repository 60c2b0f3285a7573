// The Walsh-Hadamard transform.
#pragma once
#include <cmath>

#include "simd.h"

namespace {

// Sums and differences of the elements of x whose indices differ by 1, by 2, and by 4.
KV_INLINE v8 rotate8(v8 x) {
    x = __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6) + x * v8{1, -1, 1, -1, 1, -1, 1, -1};
    x = __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5) + x * v8{1, 1, -1, -1, 1, 1, -1, -1};
    return __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3) +
           x * v8{1, 1, 1, 1, -1, -1, -1, -1};
}

// Replaces elements `half` apart by their sums and differences; T is one element or several.
template <class T>
KV_INLINE void rotate_pairs(float* x, int64_t width, int64_t half) {
    constexpr int64_t STEP_OF_T = sizeof(T) / sizeof(float);
    for (int64_t at = 0; at < width; at += 2 * half)
        for (int64_t i = at; i < at + half; i += STEP_OF_T) {
            const T a = load<T>(x + i), b = load<T>(x + i + half);
            store(x + i, a + b);
            store(x + i + half, a - b);
        }
}

// Rotates by the orthonormal Walsh-Hadamard matrix, in blocks of the largest power of two that
// divides the width.
[[maybe_unused]] void rotate(float* x, int64_t width) {
    const int64_t block = width & -width;
    int64_t half = 1;
    if (block >= 8) {
        for (int64_t i = 0; i < width; i += 8) store(x + i, rotate8(load<v8>(x + i)));
        for (half = 8; half < block; half *= 2) rotate_pairs<v8>(x, width, half);
    }
    for (; half < block; half *= 2) rotate_pairs<float>(x, width, half);
    const float scale = 1.0f / std::sqrt((float)block);
    for (int64_t i = 0; i < width; ++i) x[i] *= scale;
}

}  // namespace
