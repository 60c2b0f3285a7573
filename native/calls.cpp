// Makes recorded calls one after the other: those of a decode step. Python between them would take
// longer than many of the calls, because weights displace its objects from the processor's caches.
#include <cstddef>
#include <utility>

#include "abi.h"

namespace {

template <std::size_t>
using Pointer = void*;

template <std::size_t... I>
void call(const KvRecorded& call, std::index_sequence<I...>) {
    ((void (*)(Pointer<I>...))call.function)((void*)call.arguments[I]...);
}

// Calls a function of `call.count` pointers; false if that is more than N to KV_ARGUMENTS.
template <std::size_t N = 0>
bool call_with_pointers(const KvRecorded& recorded) {
    if constexpr (N > KV_ARGUMENTS) {
        return false;
    } else {
        if (recorded.count != (int64_t)N) return call_with_pointers<N + 1>(recorded);
        call(recorded, std::make_index_sequence<N>());
        return true;
    }
}

int made(const KvRecorded& call) {
    const int64_t* x = call.arguments;
    switch (call.kind) {
        case KV_RECORDED_KERNEL: return call_with_pointers(call) ? 0 : KV_STEP_FAILED;
        case KV_RECORDED_LINEAR:
            return kv_linear((const KvLinear*)x[0], x[1], (const void*)x[2], x[3], x[4],
                             (void*)x[5]);
        case KV_RECORDED_STEP:
            return kv_step((const KvSequence*)x[0], x[1], (const KvTokens*)x[2]);
        default: return KV_STEP_UNLIKE;
    }
}

}  // namespace

int64_t kv_repeat(const KvRecorded* calls, int64_t first, int64_t end, int64_t* result) {
    for (int64_t i = first; i < end; ++i) {
        try {
            *result = made(calls[i]);
        } catch (...) {  // from a kernel
            *result = KV_STEP_FAILED;
        }
        if (*result) return i;
    }
    return end;
}
