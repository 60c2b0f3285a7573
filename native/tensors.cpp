#include "tensors.h"

KvTorch torch;

void kv_use_torch(const KvTorch* given) { torch = *given; }

int64_t type_of(int64_t type) {
    switch (type) {
        case FLOAT32: return KV_F32;
        case BFLOAT16: return KV_BF16;
        case FLOAT16: return KV_F16;
        default: return -1;
    }
}

int64_t size_of(int64_t type) {
    switch (type) {
        case FLOAT64: return 8;
        case FLOAT32: return 4;
        case BFLOAT16:
        case FLOAT16: return 2;
        default: return 0;
    }
}

bool describe(KvAtenTensor* given, KvTensor& x) {
    int32_t type = 0;
    int64_t *sizes = nullptr, *strides = nullptr;
    if (torch.data(given, &x.data) || torch.dim(given, &x.dim) || torch.sizes(given, &sizes) ||
        torch.strides(given, &strides) || torch.type(given, &type))
        return false;
    x.sizes = sizes, x.strides = strides, x.type = type;
    return true;
}
