// Machine resources of the schedulers: the instruction set, threads, and their scratch memory.
#pragma once
#include <chrono>
#include <cstdint>

#include "kernel.h"
#include "linear.h"

struct Instructions {
    const char* name;
    KvKernel* run;
    const KvLinearKernel* linear;
    bool (*here)();
};

// The instruction set in use: the best one of this processor, unless another was chosen.
const Instructions& instructions();

// Uses the instruction set `name` from now on; false if this processor lacks it.
bool use_instructions(const char* name);

// The threads for work that reads so many bytes: at most `most`, and 1 in a forked process, which
// lacks its parent's worker threads and would wait for them forever.
int64_t threads_for(int64_t bytes, int64_t most);

// A thread's scratch memory, in three pieces, which are kept for its next call. Null if there is
// none.
float* scratch(int piece, int64_t floats);

// How a parallel loop went: nanoseconds from its start until this thread had no more to do, and
// from then until the last thread arrived.
struct Shared {
    int64_t own, waited;
};

// Whether the next loop should run on one thread only, because other processes hold the cores.
bool is_crowded();
void note(Shared loop);

// Calls f(0), ..., f(count - 1), distributed over threads.
template <class F>
void share(int64_t threads, int64_t count, F f) {
#if defined(_OPENMP)
    if (threads > 1 && count > 1 && !is_crowded()) {
        typedef std::chrono::steady_clock Clock;
        const auto start = Clock::now();
        auto done = start;
#pragma omp parallel num_threads(threads)
        {
#pragma omp for schedule(dynamic) nowait
            for (int64_t i = 0; i < count; ++i) f(i);
#pragma omp master
            done = Clock::now();
        }
        note({(done - start).count(), (Clock::now() - done).count()});
        return;
    }
#else
    (void)threads;
#endif
    for (int64_t i = 0; i < count; ++i) f(i);
}
