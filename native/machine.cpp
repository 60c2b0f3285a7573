#include "machine.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace {

#if defined(KV_X86)
// Every processor with AVX2 and FMA has F16C.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
#if defined(KV_EMULATE)
    return has_avx2();
#else
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
}

#if !defined(KV_EMULATE)  // emulation compiles its code as avx512bf16
bool has_avx512vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
#endif

bool has_avx512bf16() {
#if defined(KV_EMULATE)
    return has_avx2();
#else
    return has_avx512vnni() && __builtin_cpu_supports("avx512bf16");
#endif
}
#endif

const Instructions TABLE[] = {
#if defined(KV_X86)
    {"avx512bf16", kv_run_avx512bf16, &kv_linear_avx512bf16, has_avx512bf16},
#if !defined(KV_EMULATE)
    {"avx512vnni", kv_run_avx512vnni, &kv_linear_avx512vnni, has_avx512vnni},
#endif
    {"avx512", kv_run_avx512, &kv_linear_avx512, has_avx512},
    {"avx2", kv_run_avx2, &kv_linear_avx2, has_avx2},
#endif
    {"portable", kv_run_portable, &kv_linear_portable, [] { return true; }},
};

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
