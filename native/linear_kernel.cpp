// y = x W^T + b for a few rows x, which costs little more than reading W once.
//
// A tile of weights and rows is multiplied in registers: each loaded weight is used for all rows of
// the tile, and each element of x for all its outputs. Inputs are taken in blocks, so that x stays
// in the first-level cache, and W in the second-level cache while further rows are computed. Every
// output is summed in the same order for any number of rows, so a row of a batch equals the row
// alone.
//
// Compiled once per instruction set, which KV_LINEAR names.
#include <type_traits>

#include "linear.h"

#include "linear_tiles.h"
#include "rows.h"

namespace {

constexpr int64_t INPUTS = 2048;  // inputs per block; a multiple of every STEP
constexpr int64_t OUTPUTS = KV_LINEAR_OUTPUTS;

// Rows of x in a tile, and outputs for each number of rows: their sums, the smaller side and one
// element of the other fit the registers.
constexpr int MOST_ROWS = 4;
constexpr int outputs_at_once(int rows) {
    constexpr int of[2][MOST_ROWS] = {{8, 6, 4, 3}, {8, 8, 8, 6}};
    return of[W == 16][rows - 1];
}

// Whether to prefetch the next `outputs` rows of weights, of `bytes` each, when several are read
// side by side: the hardware prefetcher does not recognise short rows, and reads too little ahead
// if there are few rows.
constexpr bool needs_prefetch(int outputs, int64_t bytes) { return outputs <= 6 || bytes <= 2048; }

// Bytes to prefetch ahead if weights are read in memory order. The hardware prefetcher recognises
// that order, but several rows of x delay the reads. If a block of an output's inputs ends before
// the output does, the next output's block is prefetched.
constexpr int64_t ahead_of(int rows) { return rows == 1 ? 4096 : 8192; }

// Prefetches weights, which are read once.
KV_INLINE void prefetch_once(const char* weight, int64_t bytes) {
    if (kv_bypasses_cache) {
#pragma GCC unroll 16
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(weight + i, 0, 0);
    } else {
        prefetch(weight, bytes);
    }
}

// Whether `count` weights of type K for each output, when first read, are read in memory order, one
// output after the other. An output's sums are then one chain of additions, which takes longer than
// reading unless each addition takes in enough weights, or the chain is short.
template <class K>
constexpr bool in_order(int rows, int64_t count) {
    constexpr int64_t size = sizeof(typename K::T::Element), bytes = STEP / K::PARTS * size;
    constexpr int64_t SHORT = 3072;  // bytes
#if defined(__AVX2__)
    constexpr bool quick = std::is_same_v<typename K::T, BF16>;
#else
    constexpr bool quick = false;
#endif
    return bytes == 64 || (rows == 1 && count * size <= SHORT && (bytes == 32 || quick));
}

// Weights widened to float, a vector of W at a time, with x in the order of their lanes.
template <class T_>
struct Wide {
    typedef T_ T, Input;  // types of weights, and of x, bias and out
    typedef vf Vector;
    typedef float Element;  // element of the copy of x
    static constexpr int PARTS = 2;
    template <int PART>
    KV_INLINE vf part(const typename T::Element* weight) {
        const Pair pair = T::widen(weight);
        return PART ? pair.b : pair.a;
    }
    KV_INLINE void add(vf& sum, vf weight, vf x) { add_product(sum, weight, x); }
    KV_INLINE void load_step(const typename T::Element* from, float* to) {
        store(to, part<0>(from));
        store(to + W, part<1>(from));
    }
};

// int8 widened to float, with x in order.
template <class Input_>
struct Coded {
    typedef I8 T;
    typedef Input_ Input;
    typedef vf Vector;
    typedef float Element;
    static constexpr int PARTS = 2;
    template <int PART>
    KV_INLINE vf part(const int8_t* weight) {
        return I8::widen_bytes(weight + PART * W);
    }
    KV_INLINE void add(vf& sum, vf weight, vf x) { add_product(sum, weight, x); }
    KV_INLINE void load_step(const typename Input::Element* from, float* to) {
        for (int64_t i = 0; i < STEP; ++i) to[i] = Input::widen1(from[i]);
    }
};

#if defined(KV_BF16_PAIRS)
// bfloat16 without widening: the processor multiplies pairs of bfloat16 exactly.
struct Dots {
    typedef BF16 T, Input;
    typedef vi Vector;
    typedef uint16_t Element;
    static constexpr int PARTS = 1;
    template <int>
    KV_INLINE vi part(const uint16_t* weight) {
        return load<vi>(weight);
    }
    KV_INLINE void add(vf& sum, vi weight, vi x) { sum = add_pairs(sum, weight, x); }
    KV_INLINE void load_step(const uint16_t* from, uint16_t* to) { store(to, load<vi>(from)); }
};
#endif

// One part of a tile's step: sum[n * M + m] += weights of output n times elements of row m.
template <class K, int N, int M, int PART>
KV_INLINE void add_part(vf* sum, const typename K::T::Element* const* weight,
                        const typename K::Element* x, int64_t x_row) {
    typedef typename K::Vector V;
    constexpr int AT = PART * (int)(sizeof(V) / sizeof(typename K::Element));
    if constexpr (M < N) {
        V held[M];
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) held[m] = load<V>(x + m * x_row + AT);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            const V own = K::template part<PART>(weight[n]);
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m) K::add(sum[n * M + m], own, held[m]);
        }
    } else {
        V held[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) held[n] = K::template part<PART>(weight[n]);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
            const V own = load<V>(x + m * x_row + AT);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) K::add(sum[n * M + m], held[n], own);
        }
    }
}

template <class K, int N, int M>
KV_INLINE void add_step(vf* sum, const typename K::T::Element* const* weight,
                        const typename K::Element* x, int64_t x_row) {
    add_part<K, N, M, 0>(sum, weight, x, x_row);
    if constexpr (K::PARTS == 2) add_part<K, N, M, 1>(sum, weight, x, x_row);
}

// sums_of[m * OUTPUTS + n] += product of row m and output n, over `count` inputs. `cold`: the
// weights have not been read before, for other rows.
template <class K, int N, int M>
KV_OUTLINE void multiply(const typename K::T::Element* weight, int64_t weight_row,
                         const typename K::Element* x, int64_t x_row, int64_t count, bool cold,
                         float* sums_of) {
    typedef typename K::T::Element Weight;
    vf sum[N * M] = {};
    const int64_t whole = count / STEP * STEP;
    const Weight* at[N];
    if (in_order<K>(M, count) && cold) {
        const int64_t ahead = weight_row == count ? ahead_of(M) / sizeof(Weight) : whole;
        for (int n = 0; n < N; ++n) {
            const Weight* from = weight + n * weight_row;
            vf own[M] = {};
            for (int64_t d = 0; d < whole; d += STEP) {
                const Weight* here = from + d;
                const int64_t skip = d + ahead < whole ? 0 : weight_row - count;
                prefetch_once((const char*)(here + ahead + skip), STEP * sizeof(Weight));
                add_step<K, 1, M>(own, &here, x + d, x_row);
            }
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m) sum[n * M + m] = own[m];
        }
    } else {
        const bool fetch = cold && weight_row == count && needs_prefetch(N, count * sizeof(Weight));
        const char* ahead = (const char*)(weight + N * weight_row);
        for (int64_t d = 0; d < whole; d += STEP) {
            if (fetch) prefetch_once(ahead + d * N * sizeof(Weight), N * STEP * sizeof(Weight));
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) at[n] = weight + n * weight_row + d;
            add_step<K, N, M>(sum, at, x + d, x_row);
        }
    }
    if (whole < count) {
        Weight end[N][STEP] = {};
        for (int n = 0; n < N; ++n) {
            memcpy(end[n], weight + n * weight_row + whole, (count - whole) * sizeof(Weight));
            at[n] = end[n];
        }
        add_step<K, N, M>(sum, at, x + whole, x_row);
    }
    for (int first = 0; first < N * M; first += W) {
        vf some[W] = {};
        for (int i = 0; i < W && first + i < N * M; ++i) some[place(i)] = sum[first + i];
        float found[W];
        store(found, sums(some));
        for (int i = 0; i < W && first + i < N * M; ++i)
            sums_of[(first + i) % M * OUTPUTS + (first + i) / M] += found[i];
    }
}

// The products of M rows and `outputs` outputs over a block of inputs.
template <class K, int M>
void multiply_rows(const typename K::T::Element* weight, int64_t weight_row, int64_t outputs,
                   const typename K::Element* x, int64_t x_row, int64_t count, bool cold,
                   float* sums_of) {
    constexpr int N = outputs_at_once(M);
    int64_t n = 0;
    for (; n + N <= outputs; n += N)
        multiply<K, N, M>(weight + n * weight_row, weight_row, x, x_row, count, cold, sums_of + n);
    for (; n < outputs; ++n)
        multiply<K, 1, M>(weight + n * weight_row, weight_row, x, x_row, count, cold, sums_of + n);
}

template <class K>
void load(const KvLinear& linear, const void* from, int64_t x_row, int64_t rows, void* to) {
    typedef typename K::Input::Element Element;
    const int64_t stride = kv_linear_stride(linear.inputs), whole = linear.inputs / STEP * STEP;
    for (int64_t m = 0; m < rows; ++m) {
        const Element* x = (const Element*)from + m * x_row;
        typename K::Element* own = (typename K::Element*)to + m * stride;
        for (int64_t i = 0; i < whole; i += STEP) K::load_step(x + i, own + i);
        if (whole == linear.inputs) continue;
        Element end[STEP] = {};
        memcpy(end, x + whole, (linear.inputs - whole) * sizeof(Element));
        K::load_step(end, own + whole);
    }
}

template <class K>
void run(const KvLinear& linear, const void* loaded, int64_t rows, int64_t first, int64_t end,
         void* out, int64_t out_row) {
    typedef typename K::Input Input;
    typedef typename K::T::Element Weight;
    typedef typename Input::Element Element;
    const typename K::Element* x = (const typename K::Element*)loaded;
    const int64_t stride = kv_linear_stride(linear.inputs);
    float sums_of[KV_LINEAR_ROWS * OUTPUTS];
    for (int64_t n = first; n < end; n += OUTPUTS) {
        const int64_t outputs = end - n < OUTPUTS ? end - n : OUTPUTS;
        memset(sums_of, 0, rows * OUTPUTS * sizeof *sums_of);
        for (int64_t i = 0; i < linear.inputs; i += INPUTS) {
            const int64_t count = linear.inputs - i < INPUTS ? linear.inputs - i : INPUTS;
            const Weight* weight = (const Weight*)linear.weight + n * linear.weight_row + i;
            for_tiles<MOST_ROWS>(rows, [&](int64_t m, auto tile) {
                multiply_rows<K, tile.size>(weight, linear.weight_row, outputs, x + m * stride + i,
                                            stride, count, !m, sums_of + m * OUTPUTS);
            });
        }
        const Element* bias = (const Element*)linear.bias;
        for (int64_t m = 0; m < rows; ++m) {
            Element* to = (Element*)out + m * out_row + n;
            const float* own = sums_of + m * OUTPUTS;
            for (int64_t j = 0; j < outputs; ++j) {
                const float product = linear.scale ? own[j] * linear.scale[n + j] : own[j];
                to[j] = Input::narrow1(product + (bias ? Input::widen1(bias[n + j]) : 0.0f));
            }
        }
    }
}

template <class F>
void with_kernel(const KvLinear& linear, F f) {
    if (linear.scale) switch (linear.type) {
        case KV_F32: return f(Coded<F32>{});
        case KV_BF16: return f(Coded<BF16>{});
        default: return f(Coded<F16>{});
    }
    switch (linear.type) {
        case KV_F32: f(Wide<F32>{}); break;
#if defined(KV_BF16_PAIRS)
        case KV_BF16: f(Dots{}); break;
#else
        case KV_BF16: f(Wide<BF16>{}); break;
#endif
        default: f(Wide<F16>{}); break;
    }
}

void load_any(const KvLinear& linear, const void* x, int64_t x_row, int64_t rows, void* loaded) {
#if defined(KV_TILES)
    if (on_tiles(linear)) return load_pairs(linear, x, x_row, rows, loaded);
#endif
    with_kernel(linear,
                [&](auto k) { load<decltype(k)>(linear, x, x_row, rows, loaded); });
}

void run_any(const KvLinear& linear, const void* loaded, int64_t rows, int64_t first, int64_t end,
             void* out, int64_t out_row) {
#if defined(KV_TILES)
    if (on_tiles(linear)) return run_pairs(linear, loaded, rows, first, end, out, out_row);
#endif
    with_kernel(linear,
                [&](auto k) { run<decltype(k)>(linear, loaded, rows, first, end, out, out_row); });
}

}  // namespace

extern const KvLinearKernel KV_LINEAR = {load_any, run_any};
