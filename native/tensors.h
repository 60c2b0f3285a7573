// Tensors of torch, described by its C interface.
#pragma once
#include "abi.h"

extern KvTorch torch;  // set by kv_use_torch

// ScalarTypes and a device type of torch.
constexpr int32_t FLOAT16 = 5, FLOAT32 = 6, FLOAT64 = 7, BFLOAT16 = 15, INT32 = 3, INT64 = 4;
constexpr int32_t CPU = 0;

// The KvType of a ScalarType; -1 if there is none.
int64_t type_of(int64_t type);

// The bytes of an element; 0 for types that no layer has.
int64_t size_of(int64_t type);

bool describe(KvAtenTensor* given, KvTensor& x);
