// Attention over one plain segment of torch's tensors, which are checked and described here: in
// Python that takes longer than a short call.
#include "kernel.h"
#include "tensors.h"

namespace {

constexpr int32_t STRIDED = 0;  // a layout of torch

// Describes a tensor with elements in the CPU's memory; false if it is none, or exceeds its
// storage. `impl`: its implementation, the only member of an at::Tensor.
bool read(void* const& impl, KvTensor& x) {
    KvAtenTensor* const given = (KvAtenTensor*)&impl;
    int32_t device = 0, layout = 0;
    int64_t last = 0, held = 0;
    if (torch.device(given, &device) || device != CPU || torch.layout(given, &layout) ||
        layout != STRIDED || !describe(given, x) || torch.offset(given, &last) ||
        torch.held(given, &held) || !x.data)
        return false;
    for (int64_t i = 0; i < x.dim; ++i) {
        if (x.sizes[i] < 1) return false;
        last += (x.sizes[i] - 1) * x.strides[i];
    }
    const int64_t size = x.type == INT32 ? 4 : size_of(x.type);
    return size && (last + 1) * size <= held;
}

// The same for floats (a, b, c, width) that the kernel reads.
bool read_floats(void* const& impl, KvTensor& x) {
    return read(impl, x) && x.dim == 4 && type_of(x.type) >= 0 &&
           (x.strides[3] == 1 || x.sizes[3] == 1);
}

KvPlane plane_of(const KvTensor& x, bool shared) {
    return {x.data, shared ? 0 : x.strides[0], x.strides[1], x.strides[2], type_of(x.type)};
}

// Whether the three planes of a segment have the same rows and slots, and rows that fit `rows`
// queries.
bool fit(const KvTensor& k, const KvTensor& v, const KvTensor& place, int64_t rows) {
    const int64_t own = k.sizes[0], heads = k.sizes[1];
    return (own == 1 || own == rows) && v.sizes[0] == own && place.sizes[0] == own &&
           v.sizes[1] == heads && (place.sizes[1] == 1 || place.sizes[1] == heads) &&
           v.sizes[2] == k.sizes[2] && place.sizes[2] == k.sizes[2];
}

}  // namespace

int kv_attend_plain(const KvPlainCall* given) {
    KvTensor q, k, v, place, position;
    if (!read_floats(given->q, q) || !read_floats(given->k, k) || !read_floats(given->v, v) ||
        !read(given->place, place) || place.type != INT32 || place.dim != 3 ||
        !read(given->position, position) || position.type != INT32)
        return KV_PLAIN_OTHER;
    const int64_t rows = q.sizes[0], query_heads = q.sizes[1], n = q.sizes[2], heads = k.sizes[1];
    const int64_t slots = given->slots < 0 ? k.sizes[2] : given->slots, width = v.sizes[3];
    const bool placed = (position.dim == 1 || (position.dim == 2 && position.sizes[0] == rows)) &&
                        position.sizes[position.dim - 1] == n;
    if (!placed || !fit(k, v, place, rows) || k.sizes[3] != q.sizes[3] || query_heads % heads ||
        slots < n || slots > k.sizes[2])
        return KV_PLAIN_OTHER;
    uint32_t threads = 1;
    if (torch.threads(&threads)) return KV_PLAIN_OTHER;
    const bool shared = k.sizes[0] != rows;
    KvSegment segment = {};
    segment.k.plane = plane_of(k, shared), segment.v.plane = plane_of(v, shared);
    segment.k.block = segment.v.block = 1;
    segment.queries = plane_of(q, false);
    segment.slots = slots, segment.shared = shared;
    KvCall call = {};
    call.segments = &segment, call.segment_count = 1;
    call.out = given->out, call.out_type = type_of(q.type);
    call.out_row = n * query_heads * width, call.out_head = width;
    call.out_query = query_heads * width;
    call.rows = rows, call.heads = heads, call.group = query_heads / heads, call.queries = n;
    call.key_width = q.sizes[3], call.value_width = width;
    call.dense = 1, call.threads = threads, call.scale = given->scale;
    return kv_attend_call(call) ? KV_PLAIN_FAILED : KV_PLAIN_DONE;
}
