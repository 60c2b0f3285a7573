// Logits and scores of slots for queries that are normally distributed.
#include "expected.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "scores.h"

namespace {

// Copies a symmetric matrix x, without the elements below the diagonal, and twice the elements
// above.
void fold(const float* x, int64_t width, int64_t stride, float* to) {
    memset(to, 0, width * stride * sizeof *to);
    for (int64_t i = 0; i < width; ++i) {
        to[i * stride + i] = x[i * width + i];
        for (int64_t j = i + 1; j < width; ++j) to[i * stride + j] = 2 * x[i * width + j];
    }
}

// Turns the keys in `columns` (width, BLOCK) back.
void turn_back(const KvExpected& call, float* columns) {
    const float *cos = call.cosines, *sin = call.sines;
    for (int64_t i = 0; i < call.pairs; ++i) {
        const int64_t first = call.first + (call.interleaved ? 2 * i : i);
        float* a = columns + first * BLOCK;
        float* b = a + (call.interleaved ? 1 : call.pairs) * BLOCK;
        for (int64_t j = 0; j < BLOCK; j += W) {
            const vf x = load<vf>(a + j), y = load<vf>(b + j);
            store(a + j, x * cos[i] + y * sin[i]);
            store(b + j, y * cos[i] - x * sin[i]);
        }
    }
}

// s (MT rows of BLOCK) = rows (MT, width), `stride` apart, times columns (width, BLOCK).
template <int MT>
void multiply(const float* rows, int64_t stride, int64_t width, const float* columns, float* s) {
    const int64_t size = sizeof(float);
    const Rows given{(const char*)rows, stride * size, width * size};
    for (int64_t j = 0; j < BLOCK; j += STEP)
        column_tile<MT, 2>(given, width, columns + j, BLOCK, false, s + j, BLOCK);
}

// The parts of `memory`.
struct Memory {
    float *folded, *sums, *columns, *s;

    Memory(const KvExpected& call, float* memory) {
        const int64_t stride = padded(call.width);
        folded = memory, sums = folded + call.group * stride * stride;
        columns = sums + call.group * stride, s = columns + BLOCK * stride;
    }
};

void load_queries(const KvExpected& call, float* memory) {
    const int64_t width = call.width, stride = padded(width);
    const Memory to(call, memory);
    for (int64_t g = 0; g < call.group; ++g) {
        fold(call.products + g * width * width, width, stride, to.folded + g * stride * stride);
        memcpy(to.sums + g * stride, call.sums + g * width, width * sizeof *to.sums);
    }
}

void logits(const KvExpected& call, const float* keys, int64_t count, float* memory, float* out,
            int64_t out_stride) {
    const int64_t width = call.width, stride = padded(width);
    const Memory own(call, memory);
    const float inverse = 1 / std::max(call.count, 1.0f), scale = call.scale;
    const int64_t bytes = width * (int64_t)sizeof *keys;
    transpose(Rows{(const char*)keys, bytes, bytes}, count, width, own.columns);
    turn_back(call, own.columns);
    for (int64_t g = 0; g < call.group; ++g) {
        vf square[BLOCK / W] = {};
        for_tiles<MOST_SUMS>(width, [&](int64_t from, auto tile) {
            multiply<tile.size>(own.folded + (g * stride + from) * stride + from, stride,
                                width - from, own.columns + from * BLOCK, own.s);
            for (int64_t j = 0; j < BLOCK / W; ++j) {
                vf added{};
#pragma GCC unroll 8
                for (int m = 0; m < tile.size; ++m)
                    added += load<vf>(own.columns + (from + m) * BLOCK + j * W) *
                             load<vf>(own.s + m * BLOCK + j * W);
                square[j] += added;
            }
        });
        multiply<1>(own.sums + g * stride, stride, width, own.columns, own.s);
        for (int64_t j = 0; j < BLOCK / W; ++j) {
            const vf mean = load<vf>(own.s + j * W) * inverse;
            const vf variance = square[j] * inverse - mean * mean;
            store(own.s + j * W, mean * scale + variance * (scale * scale / 2));
        }
        memcpy(out + g * out_stride, own.s, count * sizeof *out);
    }
}

float norm(const float* x, int64_t width) {
    float sums[W] = {};
    int64_t i = 0;
    for (; i + W <= width; i += W)
        for (int j = 0; j < W; ++j) sums[j] += x[i + j] * x[i + j];
    for (; i < width; ++i) sums[0] += x[i] * x[i];
    for (int j = 1; j < W; ++j) sums[0] += sums[j];
    return std::sqrt(sums[0]);
}

void norms(const float* values, int64_t count, int64_t width, float* out) {
    for (int64_t i = 0; i < count; ++i) out[i] = norm(values + i * width, width);
}

void scores(const float* logits, int64_t group, const int32_t* position, int64_t sinks,
            const float* norms, int64_t slots, float* out) {
    constexpr float NONE = -std::numeric_limits<float>::infinity();
    std::vector<float> own(slots + W), sum(slots);
    for (int64_t g = 0; g < group; ++g, logits += slots) {
        float top = NONE, total = 0;
        std::fill(own.begin() + slots, own.end(), NONE);
        for (int64_t i = 0; i < slots; ++i) {
            own[i] = position[i] < sinks ? NONE : logits[i];
            top = own[i] > top ? own[i] : top;
        }
        if (top == NONE) top = 0;
        vf totals{};
        for (int64_t i = 0; i < slots; i += W) {
            const vf weight = exp_down(load<vf>(&own[i]) - top);
            totals += weight;
            store(&own[i], weight);
        }
        for (int j = 0; j < W; ++j) total += totals[j];
        const float share = 1 / (total * (float)group);
        for (int64_t i = 0; i < slots; ++i) sum[i] += own[i] * share;
    }
    for (int64_t i = 0; i < slots; ++i)
        out[i] = position[i] < sinks ? 0 : sum[i] * norms[i];
}

}  // namespace

extern const KvExpectedKernel KV_EXPECTED;
const KvExpectedKernel KV_EXPECTED{load_queries, logits, norms, scores};
