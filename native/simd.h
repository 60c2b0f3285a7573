// Vectors of W floats for one instruction set, selected by compiler flags. The code uses the vector
// extensions of GCC and clang, and intrinsics only for operations that the extensions lack.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

// KV_EMULATE (16, or 17 with products of bfloat16 pairs and of four bytes) compiles the AVX-512
// code for any processor, for tests; KV_TILES adds AMX tiles to 17.
#if defined(__AVX512F__) || defined(KV_EMULATE)
#define KV_LANES 16
#else
#define KV_LANES 8
#endif
#if defined(__AVX512BF16__) || (defined(KV_EMULATE) && KV_EMULATE == 17)
#define KV_BF16_PAIRS
#endif
#if (defined(__AVX512VNNI__) && defined(__AVX512BW__)) || (defined(KV_EMULATE) && KV_EMULATE == 17)
#define KV_VNNI
#endif
#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

// Everything here is in an unnamed namespace: if the copies for different instruction sets shared a
// function, the linker would keep one of them, and an old processor might run a newer set's code.
#define KV_INLINE static inline __attribute__((always_inline))
// For functions that need all registers; inlined, they would have to share them.
#define KV_OUTLINE static __attribute__((noinline))
// For lambdas, after their parameters.
#define KV_LAMBDA __attribute__((always_inline))

namespace {

// Calls f(integral constant i) for i = 0 to N - 1. Unlike a loop, it leaves elements of arrays in
// registers whatever the compiler unrolls.
template <class F, int... I>
KV_INLINE void each_of(F f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
KV_INLINE void each(F f) {
    each_of(f, std::make_integer_sequence<int, N>{});
}

constexpr int W = KV_LANES;
typedef float vf __attribute__((vector_size(4 * KV_LANES)));
typedef int32_t vi __attribute__((vector_size(4 * KV_LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * KV_LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * KV_LANES)));

template <class V>
KV_INLINE V load(const void* from) {
    V v;
    memcpy(&v, from, sizeof v);
    return v;
}

template <class V>
KV_INLINE void store(void* to, V v) {
    memcpy(to, &v, sizeof v);
}

KV_INLINE vf all(float x) { return x - vf{}; }  // not vf{} + x, which would turn -0 into 0

// sum += a * b. In assembly for AVX2: with 16 registers, GCC's choice of instruction moves and
// spills registers.
KV_INLINE void add_product(vf& sum, vf a, vf b) {
#if KV_LANES == 8 && defined(__FMA__)
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#else
    sum += a * b;
#endif
}

#if defined(KV_BF16_PAIRS)
// sum + a * b, where each lane of a and of b is a pair of bfloat16, whose two products are added.
KV_INLINE vf add_pairs(vf sum, vi a, vi b) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    const vi high = vi{} + (int32_t)0xffff0000;
    return sum + (vf)(a << 16) * (vf)(b << 16) + (vf)(a & high) * (vf)(b & high);
#endif
}

// sum += a * b, where each lane of a is a pair, and b is one pair for all lanes.
KV_INLINE void add_pair(vf& sum, vi a, const uint16_t* b) {
#if defined(__AVX512BF16__)
    // In assembly, so that the processor repeats b as it multiplies.
    const int32_t& pair = *(const int32_t*)b;
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(a), "m"(pair));
#else
    sum = add_pairs(sum, a, load<int32_t>(b) - vi{});
#endif
}

// sum += a * b, as add_pairs. In assembly, so that no sum is copied.
KV_INLINE void add_both(vf& sum, vi a, vi b) {
#if defined(__AVX512BF16__)
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#else
    sum = add_pairs(sum, a, b);
#endif
}

// Rounds 2 W numbers to bfloat16.
KV_INLINE void narrow_pairs(const float* x, uint16_t* to) {
#if defined(__AVX512BF16__)
    store(to, (vi)_mm512_cvtne2ps_pbh((__m512)load<vf>(x + W), (__m512)load<vf>(x)));
#else
    for (int i = 0; i < 2 * W; ++i) {  // as BF16::narrow1
        uint32_t bits = load<uint32_t>(x + i);
        to[i] =
            (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
#endif
}
#endif

// The same address, opaque to the compiler, which then addresses nearby data by constant offsets
// instead of keeping a register for each.
template <class T>
KV_INLINE const T* opaque(const T* x) {
    asm("" : "+r"(x));
    return x;
}

KV_INLINE vf pick(vi mask, vf yes, vf no) {
    return mask ? yes : no;
}

KV_INLINE vf larger(vf a, vf b) { return pick(a > b, a, b); }

// -- reductions ------------------------------------------------------------------------------

struct Add {
    KV_INLINE vf join(vf a, vf b) { return a + b; }
};
struct AddIntegers {
    KV_INLINE vf join(vf a, vf b) { return (vf)((vu)a + (vu)b); }
};
struct Largest {
    KV_INLINE vf join(vf a, vf b) { return larger(a, b); }
};
struct LargestInteger {
    KV_INLINE vf join(vf a, vf b) { return (vf)((vi)a > (vi)b ? (vi)a : (vi)b); }
};

#if KV_LANES == 16
template <class J>
KV_INLINE vf fold8(vf a, vf b) {  // halves: [a.lo + a.hi, b.lo + b.hi]
    return J::join(
        __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
        __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30,
                                31));
}
template <class J>
KV_INLINE vf fold4(vf a, vf b) {
    return J::join(
        __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
        __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31));
}
template <class J>
KV_INLINE vf fold2(vf a, vf b) {
    return J::join(
        __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
        __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
}
template <class J>
KV_INLINE vf fold1(vf a, vf b) {
    return J::join(
        __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30),
        __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31));
}
#else
template <class J>
KV_INLINE vf fold4(vf a, vf b) {
    return J::join(__builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11),
                   __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15));
}
template <class J>
KV_INLINE vf fold2(vf a, vf b) {
    return J::join(__builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13),
                   __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15));
}
template <class J>
KV_INLINE vf fold1(vf a, vf b) {
    return J::join(__builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14),
                   __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15));
}
#endif

// The index at which the i-th of W sums must be stored so that `sums` returns it in lane i: the
// last fold swaps the two lowest bits.
constexpr int place(int i) { return (i & ~3) | ((i & 1) << 1) | ((i >> 1) & 1); }

// Lane i is the sum (or J's reduction) of the lanes of v[place(i)].
template <class J = Add>
KV_INLINE vf sums(vf (&v)[W]) {
#if KV_LANES == 16
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) v[i] = fold8<J>(v[i], v[i + 8]);
#endif
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) v[i] = fold4<J>(v[i], v[i + 4]);
    v[0] = fold2<J>(v[0], v[2]);
    v[1] = fold2<J>(v[1], v[3]);
    return fold1<J>(v[0], v[1]);
}

// swapN exchanges lanes at a distance of N, to add up the lanes of a vector.
#if KV_LANES == 16
KV_INLINE vf swap8(vf v) {
    return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
}
KV_INLINE vf swap4(vf v) {
    return __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
}
KV_INLINE vf swap2(vf v) {
    return __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
}
KV_INLINE vf swap1(vf v) {
    return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
}
#else
KV_INLINE vf swap8(vf v) { return v; }  // not called
KV_INLINE vf swap4(vf v) { return __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3); }
KV_INLINE vf swap2(vf v) { return __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5); }
KV_INLINE vf swap1(vf v) { return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6); }
#endif

KV_INLINE float sum(vf v) {
    if (W == 16) v += swap8(v);
    v += swap4(v);
    v += swap2(v);
    v += swap1(v);
    return v[0];
}

KV_INLINE int32_t largest(vi v) {
    const auto with = [&](vf other) { v = (vi)other > v ? (vi)other : v; };
    if (W == 16) with(swap8((vf)v));
    with(swap4((vf)v));
    with(swap2((vf)v));
    with(swap1((vf)v));
    return v[0];
}

KV_INLINE int32_t sum(vi x) {
    vu v = (vu)x;  // unsigned: non-finite numbers leave arbitrary bits
    if (W == 16) v += (vu)swap8((vf)v);
    v += (vu)swap4((vf)v);
    v += (vu)swap2((vf)v);
    v += (vu)swap1((vf)v);
    return (int32_t)v[0];
}

// -- exp and tanh ----------------------------------------------------------------------------

// e^x for x <= 0, to about one unit in the last place; 0 below -87.3, NaN for NaN. The polynomial
// is from Cephes.
KV_INLINE vf exp_down(vf x) {
    const vf magic = all(12582912.0f);
    const vf shifted = x * 1.44269504088896341f + magic;
    const vf n = shifted - magic;
    const vf r = x - n * 0.693359375f - n * -2.12194440e-4f;
    vf p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const vu power = ((vu)shifted - (vu)magic + 127) << 23;  // unsigned: defined for any number
    return pick(x < all(-87.3f), vf{}, p * (vf)power);
}

// 2^t for t <= 0 to 2^-18, for numbers that are rounded to bfloat16; NaN for NaN. The polynomial
// has the least relative error for 2^r, 0 <= r <= 1, of all with p(0) = 1.
KV_INLINE vf exp2_narrow(vf t) {
#if defined(__AVX512DQ__)
    constexpr int FLOOR = 1;  // keeps t - floor(t); 0 for infinity
    const vf r = (vf)_mm512_reduce_ps((__m512)t, FLOOR);
#else
    const vf at_least = pick(t < all(-126.0f), all(-126.0f), t);
    const vi whole = __builtin_convertvector(at_least, vi);  // towards zero
    const vi floor = whole + ((__builtin_convertvector(whole, vf) > at_least) & -1);
    const vf r = at_least - __builtin_convertvector(floor, vf);
#endif
    vf p = all(1.34266880e-2f);
    p = p * r + 5.22424682e-2f;
    p = p * r + 2.41280208e-1f;
    p = p * r + 6.93044845e-1f;
    p = p * r + 1.0f;
#if defined(__AVX512DQ__)
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)t);
#else
    return pick(t < all(-126.0f), vf{}, (vf)((vu)p + ((vu)floor << 23)));
#endif
}

// tanh x; near zero by a polynomial from Cephes, because (1 - e^-2x) / (1 + e^-2x) cancels there.
KV_INLINE vf tanh(vf x) {
    const vf size = (vf)((vi)x & 0x7fffffff);
    const vf s = x * x;
    vf p = all(-5.70498872745e-3f);
    p = p * s + 2.06390887954e-2f;
    p = p * s - 5.37397155531e-2f;
    p = p * s + 1.33314422036e-1f;
    p = p * s - 3.33332819422e-1f;
    p = p * s * x + x;
    const vf down = exp_down(size * -2.0f);
    const vf far = (1.0f - down) / (1.0f + down);
    const vf signed_far = (vf)((vi)far | ((vi)x & (int32_t)0x80000000));
    return pick(size < all(0.625f), p, signed_far);
}

// -- elements --------------------------------------------------------------------------------

// Two vectors from 2 W consecutive elements. Each type defines the lane of each element (`lane`),
// the same for every tensor of the type: dot products and sums over slots do not depend on it, and
// results are reordered before they leave the kernel.
struct Pair {
    vf a, b;
};

struct F32 {
    typedef float Element;
    static constexpr int lane(int i) { return i; }
    KV_INLINE Pair widen(const float* x) { return {load<vf>(x), load<vf>(x + W)}; }
    static float widen1(float x) { return x; }
    static float narrow1(float x) { return x; }
};

struct BF16 {
    typedef uint16_t Element;
    // Even elements first: one shift and one mask widen them, with no shuffle.
    static constexpr int lane(int i) { return (i & 1) * W + i / 2; }
    KV_INLINE Pair widen(const uint16_t* x) {
        const vi both = load<vi>(x);
        return {(vf)(both << 16), (vf)(both & (int32_t)0xffff0000)};
    }
    static float widen1(uint16_t x) {
        const uint32_t bits = (uint32_t)x << 16;
        float f = 0;
        memcpy(&f, &bits, 4);
        return f;
    }
    static uint16_t narrow1(float x) {  // to nearest, ties to even; NaN stays NaN
        uint32_t bits;
        memcpy(&bits, &x, 4);
        if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
        return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
};

struct F16 {
    typedef uint16_t Element;
    static constexpr int lane(int i) { return i; }
    KV_INLINE vf widen_half(const uint16_t* x) {
#if defined(__AVX512F__)
        return (vf)_mm512_maskz_cvtph_ps(0xffff, (__m256i)load<vh>(x));
#elif defined(__F16C__) && KV_LANES == 8
        return (vf)_mm256_cvtph_ps((__m128i)load<vh>(x));
#else
        vf out;
        for (int i = 0; i < W; ++i) out[i] = widen1(x[i]);
        return out;
#endif
    }
    KV_INLINE Pair widen(const uint16_t* x) { return {widen_half(x), widen_half(x + W)}; }
    static float widen1(uint16_t x) {
        const uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = x & 0x7fff;
        uint32_t bits = rest << 13;
        float f = 0;
        if (rest >= 0x7c00) {
            bits |= 0x7f800000;  // infinity and NaN
            memcpy(&f, &bits, 4);
        } else {
            memcpy(&f, &bits, 4);
            f *= 0x1p112f;  // also handles subnormals
        }
        memcpy(&bits, &f, 4);
        bits |= sign;
        memcpy(&f, &bits, 4);
        return f;
    }
    static uint16_t narrow1(float x) {
        uint32_t bits;
        memcpy(&bits, &x, 4);
        const uint16_t sign = (uint16_t)(bits >> 16) & 0x8000;
        bits &= 0x7fffffff;
        if (bits > 0x7f800000) return sign | 0x7e00;
        if (bits >= 0x47800000) return sign | 0x7c00;
        if (bits < 0x38800000) {  // subnormal: adding 0.5 shifts and rounds the bits
            float f = 0;
            memcpy(&f, &bits, 4);
            f += 0.5f;
            memcpy(&bits, &f, 4);
            return sign | (uint16_t)(bits - 0x3f000000);
        }
        const uint32_t odd = (bits >> 13) & 1;
        return sign | (uint16_t)((bits - 0x38000000 + 0xfff + odd) >> 13);
    }
};

struct I8 {
    typedef int8_t Element;
    KV_INLINE vf widen_bytes(const int8_t* x) {
        typedef int8_t Bytes __attribute__((vector_size(W)));
        const Bytes bytes = load<Bytes>(x);
#if defined(__AVX512F__)
        return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#elif defined(__AVX2__) && KV_LANES == 8
        return (vf)_mm256_cvtepi32_ps(
            _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)&bytes)));
#else
        return __builtin_convertvector(bytes, vf);
#endif
    }
    KV_INLINE Pair widen(const int8_t* x) { return {widen_bytes(x), widen_bytes(x + W)}; }
};

// -- transposing -----------------------------------------------------------------------------

typedef float v8 __attribute__((vector_size(32)));
typedef uint32_t u8v __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));

template <class T>
KV_INLINE v8 widen8(const typename T::Element* x) {
    v8 out;
    for (int i = 0; i < 8; ++i) out[i] = T::widen1(x[i]);
    return out;
}
template <>
inline v8 widen8<F32>(const float* x) {
    return load<v8>(x);
}
template <>
inline v8 widen8<BF16>(const uint16_t* x) {
    return (v8)(__builtin_convertvector(load<h8>(x), u8v) << 16);
}

#if defined(__F16C__)
template <>
inline v8 widen8<F16>(const uint16_t* x) {
    return (v8)_mm256_cvtph_ps((__m128i)load<h8>(x));
}
#endif

// Transposes an 8 x 8 matrix.
KV_INLINE void transpose8(v8 (&r)[8]) {
    v8 t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        t[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        r[i] = __builtin_shufflevector(t[i], t[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        r[i + 1] = __builtin_shufflevector(t[i], t[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        r[i + 2] = __builtin_shufflevector(t[i + 1], t[i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
        r[i + 3] = __builtin_shufflevector(t[i + 1], t[i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        t[i] = __builtin_shufflevector(r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        t[i + 4] = __builtin_shufflevector(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
    for (int i = 0; i < 8; ++i) r[i] = t[i];
}

}  // namespace
