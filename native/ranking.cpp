// Loops over slots, without branches, so that compilers make vectors of them.
#include "ranking.h"

#include <cstring>
#include <limits>

namespace {

constexpr float MOST = std::numeric_limits<float>::infinity();
constexpr int64_t LANES = 16;  // of sums: results do not depend on the instruction set

// Bits of a score that are rounded off.
constexpr uint32_t NOISE = 0xFF;

// The largest finite number whose NOISE bits are 0.
constexpr uint32_t LARGEST = 0x7F7FFFFFu & ~NOISE;

template <class To, class From>
inline __attribute__((always_inline)) To as(From x) {
    To to;
    memcpy(&to, &x, sizeof to);
    return to;
}

// The nearest number of 16 significant bits, like `rounded` in policy/ranking.py, for numbers up to
// LARGEST. Infinities are unchanged.
inline __attribute__((always_inline)) float rounded(float x) {
    return as<float>((as<uint32_t>(x) + (NOISE + 1) / 2) & ~NOISE);
}

void worth(const KvRanking& ranking, const float* score, const int32_t* position, int32_t newest,
           float* worth) {
    const float most = as<float>(LARGEST);
    constexpr int32_t LAST = std::numeric_limits<int32_t>::max();
    const int32_t recent = ranking.recent ? (int32_t)(newest - ranking.recent) : LAST;
    const int32_t sinks = (int32_t)ranking.sinks;
    const int32_t from = (int32_t)ranking.keep_from, to = (int32_t)ranking.keep_to;
    const int64_t next = (int64_t)newest + 1;
    int64_t behind = ranking.window;
    if (ranking.window && ranking.chunked) behind = next % ranking.window + 1;
    const int32_t out = ranking.window ? (int32_t)(next - behind) : -1;
    const auto pass = [&](auto given) __attribute__((always_inline)) {
        for (int64_t slot = 0; slot < ranking.slots; ++slot) {
            const int32_t place = position[slot];
            float own = given(slot);
            own = own > most ? most : own;
            own = rounded(own == own ? own : -MOST);
            own =
                (place > recent) | (place < sinks) | ((place >= from) & (place < to)) ? MOST : own;
            worth[slot] = (place < 0) | (place <= out) ? -MOST : own;
        }
    };
    if (score) pass([=](int64_t slot) { return score[slot]; });
    else pass([](int64_t) { return 0.0f; });
}

// The lowest and the largest of the numbers that `read` returns for each slot.
template <class Read>
inline __attribute__((always_inline)) void range(int64_t slots, Read read, float& low,
                                                 float& high) {
    float lows[LANES], highs[LANES];
    for (int64_t i = 0; i < LANES; ++i) lows[i] = MOST, highs[i] = -MOST;
    const auto take = [&](int64_t slot, int64_t lane) __attribute__((always_inline)) {
        float x = MOST, y = -MOST;
        read(slot, x, y);
        lows[lane] = x < lows[lane] ? x : lows[lane];
        highs[lane] = y > highs[lane] ? y : highs[lane];
    };
    int64_t slot = 0;
    for (; slot + LANES <= slots; slot += LANES)
        for (int64_t i = 0; i < LANES; ++i) take(slot + i, i);
    for (; slot < slots; ++slot) take(slot, 0);
    low = lows[0], high = highs[0];
    for (int64_t i = 1; i < LANES; ++i) {
        low = lows[i] < low ? lows[i] : low;
        high = highs[i] > high ? highs[i] : high;
    }
}

int64_t next(const float* worth, int64_t first, int64_t slots, float most) {
    int64_t slot = first;
    for (; slot + LANES <= slots; slot += LANES) {
        int32_t some = 0;
        for (int64_t i = 0; i < LANES; ++i) some |= worth[slot + i] <= most;
        if (some) break;
    }
    while (slot < slots && !(worth[slot] <= most)) ++slot;
    return slot;
}

int64_t least(const float* worth, const int32_t* position, int64_t slots) {
    float low, high;
    range(slots, [=](int64_t slot, float& x, float&) { x = worth[slot]; }, low, high);
    int32_t first = std::numeric_limits<int32_t>::max();
    for (int64_t i = 0; i < slots; ++i) {
        const int32_t place = worth[i] == low ? position[i] : first;
        first = place < first ? place : first;
    }
    int64_t slot = next(worth, 0, slots, low);
    while (position[slot] != first) slot = next(worth, slot + 1, slots, low);
    return slot;
}

int64_t within(const float* worth, int64_t slots, float from, float to, int32_t* out) {
    int64_t count = 0;
    for (int64_t slot = 0; slot < slots; ++slot) {
        out[count] = (int32_t)slot;
        count += (worth[slot] >= from) & (worth[slot] < to);
    }
    return count;
}

void weigh(float* score, const float* mass, const float* other, int64_t slots) {
    // A value may be NaN, even in an empty slot.
    const auto moved = [=](int64_t i) __attribute__((always_inline)) {
        const float x = mass[i] * other[i];
        return x > 0 ? x : 0.0f;
    };
    double sums[LANES] = {};
    int64_t slot = 0;
    for (; slot + LANES <= slots; slot += LANES)
        for (int64_t i = 0; i < LANES; ++i) sums[i] += moved(slot + i);
    for (; slot < slots; ++slot) sums[0] += moved(slot);
    for (int64_t i = 1; i < LANES; ++i) sums[0] += sums[i];
    const float total = (float)sums[0];
    if (total > 0)
        for (int64_t i = 0; i < slots; ++i) score[i] += moved(i) / total;
}

void add(float* score, const float* mass, float kept, float added, int64_t slots) {
    for (int64_t i = 0; i < slots; ++i) score[i] = score[i] * kept + mass[i] * added;
}

void divide(const float* score, const int32_t* position, int32_t newest, int64_t slots,
            float* out) {
    for (int64_t i = 0; i < slots; ++i) out[i] = score[i] / (float)(newest + 1 - position[i]);
}

void mix(float* score, const float* error, const int32_t* position, float mix, int64_t slots) {
    const auto span = [&](const float* x, float& low, float& high) __attribute__((always_inline)) {
        range(
            slots,
            [=](int64_t slot, float& lowest, float& largest) __attribute__((always_inline)) {
                const bool counts = (position[slot] >= 0) & (x[slot] == x[slot]);
                lowest = counts ? x[slot] : MOST;
                largest = counts ? x[slot] : -MOST;
            },
            low, high);
        high -= low;
    };
    float low, high, least, most;
    span(score, low, high);
    span(error, least, most);
    const float rest = 1 - mix;
    for (int64_t i = 0; i < slots; ++i) {
        const float a = high > 0 ? (score[i] - low) / high : score[i] * 0;
        const float b = most > 0 ? (error[i] - least) / most : error[i] * 0;
        score[i] = mix * a - rest * b;
    }
}

}  // namespace

extern const KvRankingKernel KV_RANKING;
const KvRankingKernel KV_RANKING{worth, least, next, within, weigh, add, divide, mix};
