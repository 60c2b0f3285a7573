// Distributes pieces of work to threads.
#pragma once
#include <cstdint>

typedef void KvPiece(void* context, int64_t piece);

// Calls f(context, 0), ..., f(context, count - 1), on this thread and on up to `threads` - 1 others.
// f must not throw.
void kv_share(int64_t threads, int64_t count, KvPiece* f, void* context);

template <class F>
void share(int64_t threads, int64_t count, F f) {
    kv_share(threads, count, [](void* given, int64_t i) { (*(F*)given)(i); }, &f);
}
