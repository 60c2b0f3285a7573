// Machine resources of the scheduler: the instruction set, and each thread's scratch memory.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#include "kernel.h"

namespace {

// -- instruction sets ------------------------------------------------------------------------

struct Instructions {
    const char* name;
    KvKernel* run;
    bool (*here)();
};

const Instructions TABLE[] = {
#if defined(KV_X86)
    {"avx512bf16", kv_run_avx512bf16,
     [] {
         return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
     }},
    {"avx512", kv_run_avx512,
     [] {
         return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
     }},
    // Every processor with AVX2 and FMA has F16C.
    {"avx2", kv_run_avx2,
     [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
#endif
    {"portable", kv_run_portable, [] { return true; }},
};

const Instructions* best() {
    for (const Instructions& one : TABLE)
        if (one.here()) return &one;
    return nullptr;  // not reached: portable is always available
}

std::atomic<const Instructions*> in_use{nullptr};

const Instructions& instructions() {
    const Instructions* one = in_use.load();
    if (!one) in_use = one = best();
    return *one;
}

// -- threads ---------------------------------------------------------------------------------

// A forked child does not have its parent's worker threads, and using them would block forever.
std::atomic<bool> forked{false};

[[maybe_unused]] const bool watching = [] {
#if defined(__unix__) || defined(__APPLE__)
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
#endif
    return true;
}();

// A thread's scratch memory, in three pieces, which are kept for its next call.
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

}  // namespace
