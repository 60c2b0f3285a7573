// The ranking of slots, for calls that rank several heads together.
#pragma once
#include <vector>

#include "abi.h"

// The `count` slots of lowest worth, the oldest first among equals. `order` is scratch memory.
void kv_order(const float* worth, const int32_t* position, int64_t slots, int64_t count,
              std::vector<int32_t>& order, int64_t* out);
