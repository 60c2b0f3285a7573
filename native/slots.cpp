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
                instructions().ranking->worth(ranking, score, position, (int32_t)newest, worth.data());
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
