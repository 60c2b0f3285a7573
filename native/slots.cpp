// Which slots go, and moving what stays: a decode step does both in every layer, where a chain of
// tensor operations would cost more than attention itself.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "abi.h"

namespace {

struct Candidate {
    float worth;
    int32_t position, slot;
    bool operator<(const Candidate& other) const {
        if (worth != other.worth) return worth < other.worth;
        if (position != other.position) return position < other.position;
        return slot < other.slot;
    }
};

Candidate candidate(const KvRanking& ranking, const float* score, const int32_t* position,
                    int64_t newest, int64_t slot) {
    constexpr float NONE = -std::numeric_limits<float>::infinity();
    const int64_t place = position[slot];
    float worth = score ? score[slot] : 0.0f;
    if (std::isnan(worth)) worth = NONE;
    worth = std::min(worth, std::numeric_limits<float>::max());
    if (place > newest - ranking.recent || place < ranking.sinks ||
        (place >= ranking.keep_from && place < ranking.keep_to))
        worth = -NONE;
    if (place < 0 || (ranking.window && place <= newest + 1 - ranking.window)) worth = NONE;
    return {worth, (int32_t)place, (int32_t)slot};
}

}  // namespace

int kv_lowest(const KvRanking* given) {
    const KvRanking& ranking = *given;
    try {
        std::vector<Candidate> all(ranking.count > 1 ? ranking.slots : 0);
        int64_t* out = ranking.out;
        for (int64_t row = 0; row < ranking.rows; ++row)
            for (int64_t head = 0; head < ranking.heads; ++head, out += ranking.count) {
                const float* score =
                    ranking.score ? ranking.score + row * ranking.score_row + head * ranking.score_head
                                  : nullptr;
                const int32_t* position =
                    ranking.position + row * ranking.position_row + head * ranking.position_head;
                const int64_t newest = ranking.newest[row * ranking.newest_row];
                if (ranking.count == 1) {
                    Candidate least = candidate(ranking, score, position, newest, 0);
                    for (int64_t slot = 1; slot < ranking.slots; ++slot)
                        least = std::min(least, candidate(ranking, score, position, newest, slot));
                    *out = least.slot;
                    continue;
                }
                for (int64_t slot = 0; slot < ranking.slots; ++slot)
                    all[slot] = candidate(ranking, score, position, newest, slot);
                std::partial_sort(all.begin(), all.begin() + ranking.count, all.end());
                for (int64_t i = 0; i < ranking.count; ++i) out[i] = all[i].slot;
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
