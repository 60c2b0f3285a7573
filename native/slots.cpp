// Ranks slots for eviction, and moves the remaining slots. A decode step does both in every layer,
// where a chain of tensor operations would take longer than attention itself.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <vector>

#include "slots.h"

namespace {

// Bits of a score that are rounded off.
constexpr uint32_t NOISE = 0xFF;

// The largest finite number whose NOISE bits are 0.
float largest() {
    const uint32_t bits = 0x7F7FFFFFu & ~NOISE;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// The nearest number of 16 significant bits, like `rounded` in policy/ranking.py, for numbers up to
// `largest`. Infinities are unchanged.
float rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + (NOISE + 1) / 2) & ~NOISE;
    memcpy(&x, &bits, sizeof bits);
    return x;
}

int64_t least(const float* worth, const int32_t* position, int64_t slots) {
    // Several independent minima, so that a comparison does not wait for the previous one.
    constexpr int64_t LANES = 16;
    float low[LANES];
    std::fill(low, low + LANES, std::numeric_limits<float>::infinity());
    int64_t slot = 0;
    for (; slot + LANES <= slots; slot += LANES)
        for (int64_t i = 0; i < LANES; ++i)
            low[i] = worth[slot + i] < low[i] ? worth[slot + i] : low[i];
    for (; slot < slots; ++slot) low[0] = std::min(low[0], worth[slot]);
    const float lowest = *std::min_element(low, low + LANES);
    int64_t found = -1;
    for (slot = 0; slot < slots; ++slot)
        if (worth[slot] == lowest && (found < 0 || position[slot] < position[found])) found = slot;
    return found;
}

}  // namespace

void kv_worth(const KvRanking& ranking, const float* score, const int32_t* position, int32_t newest,
              float* worth) {
    // Without branches, for vectorisation.
    constexpr float NONE = -std::numeric_limits<float>::infinity();
    const float most = largest();
    constexpr int32_t LAST = std::numeric_limits<int32_t>::max();
    const int32_t recent = ranking.recent ? (int32_t)(newest - ranking.recent) : LAST;
    const int32_t sinks = (int32_t)ranking.sinks;
    const int32_t from = (int32_t)ranking.keep_from, to = (int32_t)ranking.keep_to;
    const int64_t next = (int64_t)newest + 1;
    int64_t behind = ranking.window;
    if (ranking.window && ranking.chunked) behind = next % ranking.window + 1;
    const int32_t out = ranking.window ? (int32_t)(next - behind) : -1;
    for (int64_t slot = 0; slot < ranking.slots; ++slot) {
        const int32_t place = position[slot];
        const float given = score ? score[slot] : 0.0f;
        float own = given > most ? most : given;
        own = rounded(given == given ? own : NONE);
        own = (place > recent) | (place < sinks) | ((place >= from) & (place < to)) ? -NONE : own;
        worth[slot] = (place < 0) | (place <= out) ? NONE : own;
    }
}

void kv_order(const float* worth, const int32_t* position, int64_t slots, int64_t count,
              std::vector<int32_t>& order, int64_t* out) {
    if (count == 1) {
        *out = least(worth, position, slots);
        return;
    }
    order.resize(slots);
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int64_t a, int64_t b) {
        if (worth[a] != worth[b]) return worth[a] < worth[b];
        if (position[a] != position[b]) return position[a] < position[b];
        return a < b;
    });
    std::copy(order.begin(), order.begin() + count, out);
}

int kv_lowest(const KvRanking* given) {
    const KvRanking& ranking = *given;
    try {
        std::vector<float> worth(ranking.slots);
        std::vector<int32_t> order;
        int64_t* out = ranking.out;
        for (int64_t row = 0; row < ranking.rows; ++row)
            for (int64_t head = 0; head < ranking.heads; ++head, out += ranking.count) {
                const int32_t* position =
                    ranking.position + row * ranking.position_row + head * ranking.position_head;
                const float* score = ranking.score;
                if (score) score += row * ranking.score_row + head * ranking.score_head;
                const int64_t newest = ranking.newests ? ranking.newests[row] : ranking.newest;
                kv_worth(ranking, score, position, (int32_t)newest, worth.data());
                kv_order(worth.data(), position, ranking.slots, ranking.count, order, out);
            }
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

int kv_evict(const KvSlots* planes, int64_t plane_count, int64_t rows, const int64_t* victims,
             int64_t victim_rows, int64_t victim_heads, int64_t count, int64_t length) {
    const int64_t kept = length - count;
    try {
        // A user's policy may return invalid victims; check them before anything changes.
        std::vector<int64_t> sorted(count);
        for (int64_t i = 0; i < victim_rows * victim_heads; ++i) {
            std::copy_n(victims + i * count, count, sorted.begin());
            std::sort(sorted.begin(), sorted.end());
            const bool twice = std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end();
            if (twice || (count && (sorted[0] < 0 || sorted[count - 1] >= length))) return 2;
        }
        std::vector<int64_t> holes;
        std::vector<char> freed(count);
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t p = 0; p < plane_count; ++p) {
                const KvSlots& plane = planes[p];
                for (int64_t head = 0; head < plane.heads; ++head) {
                    const int64_t* own = victims + ((victim_rows > 1 ? row : 0) * victim_heads +
                                                    (victim_heads > 1 ? head : 0)) * count;
                    holes.clear();
                    std::fill(freed.begin(), freed.end(), 0);
                    for (int64_t i = 0; i < count; ++i) {
                        if (own[i] < kept) holes.push_back(own[i]);
                        else freed[own[i] - kept] = 1;
                    }
                    std::sort(holes.begin(), holes.end());
                    char* first = (char*)plane.data + row * plane.row + head * plane.head;
                    int64_t mover = 0;
                    for (const int64_t hole : holes) {
                        while (freed[mover]) ++mover;
                        memcpy(first + hole * plane.bytes, first + (kept + mover) * plane.bytes,
                               plane.bytes);
                        ++mover;
                    }
                }
            }
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
