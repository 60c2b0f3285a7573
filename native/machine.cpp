#include "machine.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>

#if defined(KV_X86)
#define KV_TILES
#include <cpuid.h>

#include "tiles.h"
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace {

#if defined(KV_X86)
// Every processor with AVX2 and FMA has F16C.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

[[maybe_unused]] bool has_avx512() {
#if defined(KV_EMULATE)
    return has_avx2();
#else
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
}

[[maybe_unused]] bool has_avx512vnni() {
    return has_avx512() && __builtin_cpu_supports("avx512vnni");
}

bool has_avx512bf16() {
#if defined(KV_EMULATE)
    return has_avx2();
#else
    return has_avx512vnni() && __builtin_cpu_supports("avx512bf16");
#endif
}

// Compares a product on tiles with its definition; all its numbers are exact.
bool tiles_work() {
    uint16_t a[TILE_ROWS][2 * TILE_PAIRS], b[TILE_PAIRS][4 * TILE_PAIRS];  // bfloat16 of 0 to 7
    float found[2 * TILE_ROWS][2 * TILE_PAIRS];
    const auto bits = [](int64_t x) {
        const float value = (float)(x % 8);
        uint32_t all;
        memcpy(&all, &value, sizeof all);
        return (uint16_t)(all >> 16);
    };
    const auto in_a = [](int64_t m, int64_t k) { return (m * 5 + k * 3) % 8; };
    const auto in_b = [](int64_t k, int64_t n) { return (k * 7 + n) % 8; };
    for (int64_t k = 0; k < 2 * TILE_PAIRS; ++k) {
        for (int64_t m = 0; m < TILE_ROWS; ++m) a[m][k] = bits(in_a(m, k));
        for (int64_t n = 0; n < 2 * TILE_PAIRS; ++n) b[k / 2][2 * n + k % 2] = bits(in_b(k, n));
    }
    {
        const Tiles tiles;
        multiply_tiles<true, false>(a, a, sizeof *a, TILE_PAIRS, b, sizeof *b, found[0],
                                    found[TILE_ROWS], 2 * TILE_PAIRS);
    }
    for (int64_t m = 0; m < 2 * TILE_ROWS; ++m)
        for (int64_t n = 0; n < 2 * TILE_PAIRS; ++n) {
            int64_t sum = 0;
            for (int64_t k = 0; k < 2 * TILE_PAIRS; ++k) sum += in_a(m % TILE_ROWS, k) * in_b(k, n);
            if (found[m][n] != (float)sum) return false;
        }
    return true;
}

// Whether tiles are there, this process may use them, and they compute what they should.
[[maybe_unused]] bool has_amx() {
    static const bool works = [] {
        if (!has_avx512bf16()) return false;
#if !defined(KV_EMULATE)
        unsigned a, b, c, d;
        constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24;
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & BF16) || !(d & TILE)) return false;
#endif
        return may_use_tiles() && tiles_work();
    }();
    return works;
}
#endif

bool has_portable() { return true; }

#define KV_SET(name)                                                                              \
    {#name, kv_run_##name, &kv_linear_##name, &kv_cosines_##name, &kv_ranking_##name,            \
     &kv_expected_##name, has_##name}
const Instructions TABLE[] = {KV_SETS};  // CMake lists the sets it compiles, the best first

const Instructions* best() {
    for (const Instructions& one : TABLE)
        if (one.here()) return &one;
    return nullptr;  // not reached: portable is always available
}

std::atomic<const Instructions*> in_use{nullptr};

std::atomic<bool> is_forked{false};

[[maybe_unused]] const bool watching = [] {
#if defined(__unix__) || defined(__APPLE__)
    pthread_atfork(nullptr, nullptr, [] { is_forked = true; });
#endif
    return true;
}();

}  // namespace

#if defined(KV_X86)
const bool kv_bypasses_cache = __builtin_cpu_is("amd");
#else
const bool kv_bypasses_cache = false;
#endif

const Instructions& instructions() {
    const Instructions* one = in_use.load();
    if (!one) in_use = one = best();
    return *one;
}

bool use_instructions(const char* name) {
    for (const Instructions& one : TABLE)
        if (!strcmp(one.name, name) && one.here()) {
            in_use = &one;
            return true;
        }
    return false;
}

int64_t threads_for(int64_t bytes, int64_t most) {
    constexpr int64_t BYTES_PER_THREAD = 1 << 15;  // with fewer bytes, another thread is slower
    if (is_forked) return 1;
    return std::clamp<int64_t>(bytes / BYTES_PER_THREAD, 1, std::max<int64_t>(1, most));
}

float* scratch(int piece, int64_t floats) {
    static thread_local std::unique_ptr<float[]> memory[3];
    static thread_local int64_t held[3] = {0, 0, 0};
    if (floats > held[piece]) {
        memory[piece].reset(new (std::nothrow) float[floats + 16]);
        held[piece] = memory[piece] ? floats : 0;
    }
    if (!memory[piece]) return nullptr;
    return (float*)(((uintptr_t)memory[piece].get() + 63) & ~(uintptr_t)63);
}

const char* kv_instructions() { return instructions().name; }

int kv_use_instructions(const char* name) { return !use_instructions(name); }
