// Products of matrices of bfloat16 on AMX tiles, or their emulation in plain C++ for tests.
//
// In assembly: GCC 12's intrinsics do not say which memory they access, and no compiler flag is
// needed this way. Source: Intel's Architecture Instruction Set Extensions, chapter on AMX.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(KV_EMULATE) && defined(KV_TILES)
#define KV_EMULATE_TILES
#elif defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int64_t TILE_ROWS = 16, TILE_BYTES = 64;
constexpr int64_t TILE_PAIRS = TILE_BYTES / 4;  // of bfloat16 in a row

// Bytes in the rows of tiles 0 to 7. Tiles 0 to 3 are results, 4 and 5 the first operand, 6 and 7
// the second, with `left` columns in even tiles and `right` columns in odd tiles.
struct TileColumns {
    int64_t bytes[8];

    TileColumns(int64_t left, int64_t right)
        : bytes{left * 4,   right * 4,  left * 4, right * 4,
                TILE_BYTES, TILE_BYTES, left * 4, right * 4} {}
};

#if defined(KV_EMULATE_TILES)
typedef uint8_t TileData[TILE_ROWS][TILE_BYTES];
thread_local TileData tile_data[8];
thread_local TileColumns tile_columns(0, 0);

template <int T>
void tile_zero() { memset(tile_data[T], 0, sizeof tile_data[T]); }

template <int T>
void tile_load(const void* from, int64_t stride) {
    for (int r = 0; r < TILE_ROWS; ++r)
        memcpy(tile_data[T][r], (const char*)from + r * stride, tile_columns.bytes[T]);
}

template <int T>
void tile_store(void* to, int64_t stride) {
    for (int r = 0; r < TILE_ROWS; ++r)
        memcpy((char*)to + r * stride, tile_data[T][r], tile_columns.bytes[T]);
}

// tile C += tile A . tile B: rows of pairs, times a row of B for each pair.
template <int C, int A, int B>
void tile_multiply() {
    const auto half = [](const uint8_t* from, int i) {
        const uint32_t bits = (uint32_t)((const uint16_t*)from)[i] << 16;
        float x;
        memcpy(&x, &bits, sizeof x);
        return x;
    };
    for (int m = 0; m < TILE_ROWS; ++m)
        for (int k = 0; k < TILE_PAIRS; ++k)
            for (int n = 0; n < tile_columns.bytes[C] / 4; ++n) {
                float& to = ((float*)tile_data[C][m])[n];
                for (int i = 0; i < 2; ++i)
                    to += half(tile_data[A][m], 2 * k + i) * half(tile_data[B][k], 2 * n + i);
            }
}

// While one exists, the thread may use tiles.
struct Tiles {
    explicit Tiles(int64_t left = TILE_PAIRS, int64_t right = TILE_PAIRS) {
        tile_columns = TileColumns(left, right);
    }
};
#else
template <int T>
void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }

template <int T>
void tile_load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}

template <int T>
void tile_store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}

// tile C += tile A . tile B: rows of pairs, times a row of B for each pair.
template <int C, int A, int B>
void tile_multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// While one exists, the thread may use tiles. Torch configures its own in its calls.
struct Tiles {
    explicit Tiles(int64_t left = TILE_PAIRS, int64_t right = TILE_PAIRS) {
        const TileColumns columns(left, right);
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int t = 0; t < 8; ++t)
            if (columns.bytes[t]) config.bytes[t] = columns.bytes[t], config.rows[t] = TILE_ROWS;
        asm volatile("ldtilecfg (%0)" ::"r"(&config) : "memory");
    }
    ~Tiles() { asm volatile("tilerelease"); }
};
#endif

// Products of one or two groups of 16 rows of pairs, `first` and `second` (`stride` bytes apart),
// with rows of B (`step` bytes apart), one for each of `pairs` pairs, of which 32 columns are used.
// The results are written, or added if ADD, to `out` and `other`, whose rows are `width` floats
// apart. A row's results do not depend on its place. `pairs` is a multiple of 16.
template <bool BOTH, bool ADD>
void multiply_tiles(const void* first, const void* second, int64_t stride, int64_t pairs,
                    const void* b, int64_t step, float* out, float* other, int64_t width) {
    const int64_t line = width * 4;
    if constexpr (ADD) {
        tile_load<0>(out, line), tile_load<1>(out + 16, line);
        if constexpr (BOTH) tile_load<2>(other, line), tile_load<3>(other + 16, line);
    } else {
        tile_zero<0>(), tile_zero<1>();
        if constexpr (BOTH) tile_zero<2>(), tile_zero<3>();
    }
    for (int64_t p = 0; p < pairs; p += TILE_PAIRS) {
        const char* rows = (const char*)b + p * step;
        tile_load<4>((const char*)first + p * 4, stride);
        tile_load<6>(rows, step);
        tile_multiply<0, 4, 6>();
        tile_load<7>(rows + TILE_BYTES, step);
        tile_multiply<1, 4, 7>();
        if constexpr (BOTH) {
            tile_load<5>((const char*)second + p * 4, stride);
            tile_multiply<2, 5, 6>(), tile_multiply<3, 5, 7>();
        }
    }
    tile_store<0>(out, line), tile_store<1>(out + 16, line);
    if constexpr (BOTH) tile_store<2>(other, line), tile_store<3>(other + 16, line);
}

// Whether Linux lets this process use tiles, which must be asked for once.
[[maybe_unused]] bool may_use_tiles() {
#if defined(KV_EMULATE_TILES)
    return true;
#elif defined(__linux__) && defined(SYS_arch_prctl)
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
    return !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
#else
    return false;
#endif
}

}  // namespace
