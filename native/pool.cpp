// The library's own threads. Calls are short and come in quick succession, so a thread that has
// nothing to do waits actively for a moment before it sleeps.
//
// The caller computes pieces too, and waits only for pieces that another thread has begun. If a
// thread is not running, because another process holds its core, the caller computes everything: a
// step on a busy machine takes at most as long as on one thread. (An OpenMP region ends only when
// all its threads have arrived, however little they do: beside a busy process each of the hundreds
// of regions of a step may take a scheduler's time slice.)
#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

namespace {

constexpr auto AWAKE = std::chrono::microseconds(200);  // how long a thread waits actively

void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// A call's pieces, as one number: 32 bits of the call's number, 16 of pieces, 16 of pieces begun.
// A thread that takes a piece of call n keeps the caller of n waiting, so what describes the call
// does not change meanwhile.
typedef uint64_t State;
constexpr State ONE = 1, PIECES = 0xffff, CALL = State(1) << 32;
int64_t begun(State state) { return (int64_t)(state & PIECES); }
int64_t pieces(State state) { return (int64_t)(state >> 16 & PIECES); }

struct Pool {
    std::atomic<State> state{0};
    std::atomic<int64_t> finished{0};
    std::atomic<int64_t> helpers{0};  // threads that may take pieces of the call
    KvPiece* piece = nullptr;
    void* context = nullptr;

    std::mutex calling;  // held by the caller
    std::mutex sleeping;
    std::condition_variable waking;
    std::atomic<int64_t> asleep{0};
    int64_t threads = 0;  // started

    // Takes and computes pieces until none is left; whether there was any.
    bool work() {
        bool any = false;
        for (State now = state.load(); begun(now) < pieces(now);) {
            if (!state.compare_exchange_weak(now, now + ONE)) continue;
            piece(context, begun(now));
            finished.fetch_add(1);
            any = true;
            now = state.load();
        }
        return any;
    }

    bool has_work(int64_t thread) const {
        const State now = state.load();
        return begun(now) < pieces(now) && thread < helpers.load();
    }

    // What a thread does from its start to the end of the process.
    void run(int64_t thread) {
        auto until = std::chrono::steady_clock::now() + AWAKE;
        for (int64_t round = 0;; ++round) {
            if (has_work(thread)) {
                work();
                until = std::chrono::steady_clock::now() + AWAKE;
            }
            pause_briefly();
            if (round % 64 || std::chrono::steady_clock::now() < until) continue;
            std::unique_lock<std::mutex> lock(sleeping);
            ++asleep;  // before it looks again: a caller that sees 0 here has already set `state`
            waking.wait(lock, [&] { return has_work(thread); });
            --asleep;
        }
    }

    void start(int64_t wanted) {
        for (; threads < wanted; ++threads) {
            const int64_t thread = threads;
            std::thread([this, thread] { run(thread); }).detach();
        }
    }

    void call(int64_t helping, int64_t count, KvPiece* f, void* with) {
        try {
            start(helping);
        } catch (const std::system_error&) {  // no more threads: those there are, and the caller
        }
        piece = f, context = with;
        finished = 0;
        helpers = helping;
        state = ((state.load() >> 32) + 1) << 32 | State(count) << 16;
        if (asleep) {
            { std::lock_guard<std::mutex> lock(sleeping); }  // nobody is between looking and sleeping
            waking.notify_all();
        }
        work();
        for (int64_t round = 0; finished < count; ++round) {
            pause_briefly();
            if (round > 1000) std::this_thread::yield();
        }
    }
};

Pool* pool() {
    static Pool* one = new (std::nothrow) Pool;  // never freed: its threads run until the end
    return one;
}

}  // namespace

void kv_share(int64_t threads, int64_t count, KvPiece* f, void* context) {
    Pool* shared = threads > 1 && count > 1 ? pool() : nullptr;
    // While one Python thread uses the pool, others compute alone.
    if (shared && shared->calling.try_lock()) {
        std::lock_guard<std::mutex> lock(shared->calling, std::adopt_lock);
        for (int64_t from = 0; from < count; from += PIECES) {
            struct Part {
                KvPiece* f;
                void* context;
                int64_t from;
            } part{f, context, from};
            shared->call(
                threads - 1, std::min<int64_t>(count - from, PIECES),
                [](void* p, int64_t i) { ((Part*)p)->f(((Part*)p)->context, ((Part*)p)->from + i); },
                &part);
        }
        return;
    }
    for (int64_t i = 0; i < count; ++i) f(context, i);
}
