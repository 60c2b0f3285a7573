// Machine resources: the instruction set, threads, and their scratch memory.
#pragma once
#include <cstdint>

#include "cosines.h"
#include "expected.h"
#include "kernel.h"
#include "linear.h"
#include "ranking.h"
#if defined(_OPENMP)
#include <omp.h>
#endif

struct Instructions {
    const char* name;
    KvKernel* run;
    const KvLinearKernel* linear;
    const KvCosineKernel* cosines;
    const KvRankingKernel* ranking;
    const KvExpectedKernel* expected;
    bool (*here)();
};

// The instruction set in use: the processor's best, unless another was chosen.
const Instructions& instructions();

// Switches to instruction set `name`; false if this processor lacks it.
bool use_instructions(const char* name);

// Number of threads for work that reads `bytes` bytes: at most `most`; 1 in a forked process, which
// lacks its parent's worker threads and would deadlock waiting for them.
int64_t threads_for(int64_t bytes, int64_t most);

// A thread's scratch memory, in three pieces, kept for its next call. Null if allocation fails.
float* scratch(int piece, int64_t floats);

// Calls f(index of the thread) on each of at most `threads` threads.
template <class F>
void by_threads(int64_t threads, F f) {
#if defined(_OPENMP)
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        f(omp_get_thread_num());
        return;
    }
#else
    (void)threads;
#endif
    f(0);
}

// Calls f(0), ..., f(count - 1), distributed over threads.
template <class F>
void share(int64_t threads, int64_t count, F f) {
#if defined(_OPENMP)
    if (threads > 1) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
        for (int64_t i = 0; i < count; ++i) f(i);
        return;
    }
#else
    (void)threads;
#endif
    for (int64_t i = 0; i < count; ++i) f(i);
}
