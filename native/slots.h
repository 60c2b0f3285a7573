// The ranking of slots, for calls that rank several heads together.
#pragma once
#include <vector>

#include "abi.h"

// The worth of one head's slots: see KvRanking.
void kv_worth(const KvRanking& ranking, const float* score, const int32_t* position, int32_t newest,
              float* worth);

// The `count` slots of lowest worth, the oldest first among equals. `order` is scratch memory.
void kv_order(const float* worth, const int32_t* position, int64_t slots, int64_t count,
              std::vector<int32_t>& order, int64_t* out);
