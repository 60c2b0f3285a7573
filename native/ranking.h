// Shared by policy.cpp, slots.cpp and ranking.cpp (one copy per instruction set).
#pragma once
#include "abi.h"

// Loops over the slots of one head.
struct KvRankingKernel {
    // The worth of slots: see KvRanking.
    void (*worth)(const KvRanking& ranking, const float* score, const int32_t* position,
                  int32_t newest, float* worth);
    // The slot of lowest worth, the oldest one among equals.
    int64_t (*least)(const float* worth, const int32_t* position, int64_t slots);
    // The first slot from `first` on whose worth is at most `most`; `slots` if there is none.
    int64_t (*next)(const float* worth, int64_t first, int64_t slots, float most);
    // Stores the slots whose worth is at least `from` and less than `to`, and returns their number.
    // `out`: for slots + 1.
    int64_t (*within)(const float* worth, int64_t slots, float from, float to, int32_t* out);
    // score += mass * other / sum(mass * other): KV_LEARN_WEIGHTED.
    void (*weigh)(float* score, const float* mass, const float* other, int64_t slots);
    // score * kept + mass * added: KV_LEARN_SUM and KV_LEARN_FADE.
    void (*add)(float* score, const float* mass, float kept, float added, int64_t slots);
    // score / (newest + 1 - position): KvRule.by_query.
    void (*divide)(const float* score, const int32_t* position, int32_t newest, int64_t slots,
                   float* out);
    // Scales score and error so that the live slots span 0 to 1, or are 0 if they are equal; NaN
    // stays NaN. Then score = mix * score - (1 - mix) * error: KvRule.mixes.
    void (*mix)(float* score, const float* error, const int32_t* position, float mix,
                int64_t slots);
};
extern const KvRankingKernel kv_ranking_portable, kv_ranking_avx2, kv_ranking_avx512,
    kv_ranking_avx512vnni, kv_ranking_avx512bf16, kv_ranking_amx;
