// Ranks slots for eviction, and moves the remaining slots. A decode step does both in every layer,
// where a chain of tensor operations would take longer than attention itself.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <numeric>
#include <vector>

#include "machine.h"
#include "slots.h"

void kv_order(const float* worth, const int32_t* position, int64_t slots, int64_t count,
              std::vector<int32_t>& order, int64_t* out) {
    if (count == 1) {
        *out = instructions().ranking->least(worth, position, slots);
        return;
    }
    order.resize(slots);
    std::iota(order.begin(), order.end(), 0);
    const auto before = [&](int64_t a, int64_t b) {
        if (worth[a] != worth[b]) return worth[a] < worth[b];
        if (position[a] != position[b]) return position[a] < position[b];
        return a < b;
    };
    if (count < slots) std::nth_element(order.begin(), order.begin() + count, order.end(), before);
    std::sort(order.begin(), order.begin() + count, before);
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
                instructions().ranking->worth(ranking, score, position, (int32_t)newest,
                                              worth.data());
                kv_order(worth.data(), position, ranking.slots, ranking.count, order, out);
            }
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

int kv_evict(const KvSlots* planes, int64_t plane_count, int64_t rows, const int64_t* victims,
             int64_t victim_rows, int64_t victim_heads, int64_t count, int64_t length,
             const KvSlots* behind, int64_t own) {
    const int64_t kept = length - count;
    std::vector<int64_t> sorted;
    try {
        sorted.assign(victims, victims + victim_rows * victim_heads * count);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    // A user's policy may return invalid victims; check them before anything changes.
    for (int64_t* first = sorted.data(); first != sorted.data() + sorted.size(); first += count) {
        std::sort(first, first + count);
        if (first[0] < 0 || first[count - 1] >= length) return 2;
        if (std::adjacent_find(first, first + count) != first + count) return 2;
    }
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t p = 0; p < plane_count; ++p) {
            const int64_t bytes = planes[p].bytes;
            for (int64_t head = 0; head < planes[p].heads; ++head) {
                const int64_t* holes = sorted.data() + ((victim_rows > 1 ? row : 0) * victim_heads +
                                                        (victim_heads > 1 ? head : 0)) * count;
                const int64_t* end = holes + count;
                const int64_t* freed = std::lower_bound(holes, end, kept);  // behind the holes
                const auto at = [&](const KvSlots& plane, int64_t slot) {
                    return (char*)plane.data + row * plane.row + head * plane.head + slot * bytes;
                };
                const auto slot = [&](int64_t i) {
                    return behind && i >= own ? at(behind[p], i - own) : at(planes[p], i);
                };
                if (behind && kept > own)
                    memcpy(at(planes[p], own), at(behind[p], 0), (kept - own) * bytes);
                int64_t mover = kept;
                for (const int64_t* hole = holes, *gone = freed; hole != freed; ++hole, ++mover) {
                    while (gone != end && *gone == mover) ++gone, ++mover;
                    memcpy(at(planes[p], *hole), slot(mover), bytes);
                }
            }
        }
    return 0;
}
