// Compares the numbers of a native library with their definitions, in double precision. Needs neither Python nor
// torch, so it also runs under an emulator, for processors that are not at hand.
//
// Usage: check LIBRARY. Prints a line for each failed comparison, and at the end the number of comparisons.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <random>
#include <vector>

#include "abi.h"

namespace {

using Numbers = std::vector<double>;
using Bytes = std::vector<char>;

void* library;
int compared = 0, failed = 0;

template <class F>
F* function(const char* name) {
    void* found = dlsym(library, name);
    if (!found) printf("%s is missing\n", name), exit(2);
    return (F*)found;
}

#define CALL(name, ...) function<decltype(name)>(#name)(__VA_ARGS__)

Numbers random_numbers(size_t count, unsigned seed) {
    std::mt19937 draw(seed);
    Numbers x(count);
    for (double& one : x) one = (double)(draw() % 4001) / 1000 - 2;
    return x;
}

int64_t size_of(int64_t type) { return type == KV_F32 ? 4 : type == KV_I8 ? 1 : 2; }

double half(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double size = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
    return bits & 0x8000 ? -size : size;
}

double element(const void* x, int64_t i, int64_t type) {
    if (type == KV_F32) return ((const float*)x)[i];
    if (type == KV_F16) return half(((const uint16_t*)x)[i]);
    const uint32_t bits = (uint32_t)((const uint16_t*)x)[i] << 16;
    float found;
    memcpy(&found, &bits, 4);
    return found;
}

// Numbers as elements of a type, cut off; `x` becomes what they mean.
Bytes stored(Numbers& x, int64_t type) {
    Bytes bytes(x.size() * size_of(type));
    for (size_t i = 0; i < x.size(); ++i) {
        const float number = (float)x[i];
        uint32_t bits;
        memcpy(&bits, &number, 4);
        if (type == KV_F32) memcpy(&bytes[4 * i], &number, 4);
        if (type == KV_BF16) memcpy(&bytes[2 * i], (char*)&bits + 2, 2);
        if (type == KV_F16) {
            const int exponent = (int)(bits >> 23 & 255) - 112;
            const uint16_t short_bits = exponent <= 0 ? 0 : bits >> 16 & 0x8000 | exponent << 10 | bits >> 13 & 1023;
            memcpy(&bytes[2 * i], &short_bits, 2);
        }
        x[i] = element(bytes.data(), (int64_t)i, type);
    }
    return bytes;
}

// Fails if the norm of the difference is more than `tolerance` of the norm.
void require_close(const char* what, const Numbers& found, const Numbers& expected, double tolerance) {
    double difference = 0, size = 0;
    for (size_t i = 0; i < found.size(); ++i) {
        difference += (found[i] - expected[i]) * (found[i] - expected[i]);
        size += expected[i] * expected[i];
    }
    ++compared;
    if (std::sqrt(difference / size) <= tolerance) return;
    ++failed;
    printf("%s: the error is %g of the norm, more than %g\n", what, std::sqrt(difference / size), tolerance);
}

Numbers read(const void* x, size_t count, int64_t type) {
    Numbers found(count);
    for (size_t i = 0; i < count; ++i) found[i] = element(x, (int64_t)i, type);
    return found;
}

// What rounding to a type may change.
double rounding(int64_t type) { return type == KV_F32 ? 2e-6 : type == KV_F16 ? 1e-3 : 6e-3; }

struct Shape {
    int64_t heads, group, queries, slots, width;
};

// Attention of the last `queries` positions to all before them: out (heads * group, queries, width).
Numbers attention(const Shape& s, const Numbers& q, const Numbers& k, const Numbers& v, double scale) {
    Numbers out(q.size());
    for (int64_t row = 0; row < s.heads * s.group * s.queries; ++row) {
        const int64_t head = row / s.queries / s.group, seen = s.slots - s.queries + row % s.queries + 1;
        Numbers weights(seen);
        for (int64_t j = 0; j < seen; ++j)
            for (int64_t d = 0; d < s.width; ++d)
                weights[j] += q[row * s.width + d] * k[(head * s.slots + j) * s.width + d] * scale;
        const double most = *std::max_element(weights.begin(), weights.end());
        double total = 0;
        for (double& w : weights) total += w = std::exp(w - most);
        for (int64_t j = 0; j < seen; ++j)
            for (int64_t d = 0; d < s.width; ++d)
                out[row * s.width + d] += weights[j] / total * v[(head * s.slots + j) * s.width + d];
    }
    return out;
}

KvPlane plane(const void* data, const Shape& s, int64_t tokens, int64_t width, int64_t type) {
    return {data, s.heads * tokens * width, tokens * width, width, type};
}

// The library's attention; returns its output.
Numbers attended(const Shape& s, const Bytes& q, const KvEncoded& k, const KvEncoded& v, int64_t type, double scale) {
    std::vector<int32_t> position(s.slots);
    for (int64_t j = 0; j < s.slots; ++j) position[j] = (int32_t)j;
    KvSegment segment = {k, v, {position.data(), 0, 0, 1, 0}, {}, s.slots, 0, 0};
    segment.queries = {q.data(), 0, s.queries * s.width, s.width, type};
    Bytes out(q.size());
    KvReach all = {INT64_MAX, 0, 0, 0};
    KvCall call = {};
    call.position = position.data() + s.slots - s.queries;
    call.out = out.data(), call.out_type = type;
    call.segment_count = 1, call.reach_count = 1;
    call.out_query = s.width, call.out_head = s.queries * s.width, call.out_row = s.heads * s.group * call.out_head;
    call.rows = 1, call.heads = s.heads, call.group = s.group, call.queries = s.queries;
    call.key_width = call.value_width = s.width, call.threads = 2, call.scale = scale;
    if (CALL(kv_attend, &call, &segment, &all)) printf("kv_attend has no memory\n"), exit(2);
    return read(out.data(), out.size() / size_of(type), type);
}

void check_attention(const Shape& s, int64_t type) {
    Numbers q = random_numbers(s.heads * s.group * s.queries * s.width, 1);
    Numbers k = random_numbers(s.heads * s.slots * s.width, 2), v = random_numbers(k.size(), 3);
    const Bytes query = stored(q, type), key = stored(k, type), value = stored(v, type);
    const double scale = 1 / std::sqrt((double)s.width);
    KvEncoded keys = {}, values = {};
    keys.plane = plane(key.data(), s, s.slots, s.width, type), keys.block = 1;
    values.plane = plane(value.data(), s, s.slots, s.width, type), values.block = 1;
    require_close("attention", attended(s, query, keys, values, type, scale), attention(s, q, k, v, scale),
                  rounding(type));
}

// A tensor encoded by the library to 8-bit codes, with a scale for each group.
struct Codes {
    Bytes codes, scales;
    Numbers decoded;
    KvEncoded encoded = {};

    Codes(const Shape& s, const Bytes& x, int64_t type, int64_t group)
        : codes(s.heads * s.slots * s.width), scales(2 * s.heads * s.slots * groups_of(s, group)) {
        const int64_t groups = groups_of(s, group);
        KvEncoding made = {};
        made.x = plane(x.data(), s, s.slots, s.width, type);
        made.codes = encoded.plane = plane(codes.data(), s, s.slots, s.width, KV_I8);
        made.scale = encoded.scale = plane(scales.data(), s, s.slots, groups, KV_F16);
        made.rows = 1, made.heads = s.heads, made.slots = s.slots, made.width = s.width;
        made.group = encoded.group = group, encoded.block = 1;
        if (CALL(kv_encode, &made)) printf("kv_encode has no memory\n"), exit(2);
        for (int64_t i = 0; i < s.heads * s.slots * s.width; ++i) {
            const int64_t own = i / s.width * groups + i % s.width / group;
            decoded.push_back((signed char)codes[i] * half(((const uint16_t*)scales.data())[own]));
        }
    }

    // The last group may be shorter.
    static int64_t groups_of(const Shape& s, int64_t group) { return (s.width + group - 1) / group; }
};

void check_codes(const Shape& s, int64_t type) {
    Numbers q = random_numbers(s.heads * s.group * s.queries * s.width, 4);
    Numbers k = random_numbers(s.heads * s.slots * s.width, 5), v = random_numbers(k.size(), 6);
    const Bytes query = stored(q, type), key = stored(k, type), value = stored(v, type);
    const Codes keys(s, key, type, 32), values(s, value, type, 32);
    require_close("int8 codes", keys.decoded, k, 6e-3);
    const double scale = 1 / std::sqrt((double)s.width);
    // Queries may be rounded to bytes too.
    require_close("attention to int8", attended(s, query, keys.encoded, values.encoded, type, scale),
                  attention(s, q, keys.decoded, values.decoded, scale), 1.5e-2);
}

void check_linear(int64_t rows, int64_t inputs, int64_t outputs, int64_t type) {
    Numbers x = random_numbers(rows * inputs, 7), w = random_numbers(outputs * inputs, 8), b = random_numbers(outputs, 9);
    const Bytes input = stored(x, type), weight = stored(w, type), bias = stored(b, type);
    Bytes out(rows * outputs * size_of(type));
    const KvLinear linear = {weight.data(), bias.data(), nullptr, type, inputs, outputs, inputs, 2};
    if (CALL(kv_linear, &linear, 1, input.data(), inputs, rows, out.data())) exit(2);
    Numbers expected(rows * outputs);
    for (int64_t i = 0; i < rows * outputs; ++i) {
        expected[i] = b[i % outputs];
        for (int64_t d = 0; d < inputs; ++d)
            expected[i] += x[i / outputs * inputs + d] * w[i % outputs * inputs + d];
    }
    require_close("linear layer", read(out.data(), expected.size(), type), expected, rounding(type));
}

void check_ranking() {
    constexpr int64_t SLOTS = 150, COUNT = 20, RECENT = 30;
    std::vector<float> score(SLOTS);
    std::vector<int32_t> position(SLOTS);
    for (int64_t j = 0; j < SLOTS; ++j) score[j] = (float)(j * 37 % SLOTS), position[j] = (int32_t)j;
    std::vector<int64_t> found(COUNT);
    KvRanking ranking = {};
    ranking.score = score.data(), ranking.position = position.data(), ranking.out = found.data();
    ranking.newest = SLOTS - 1, ranking.rows = ranking.heads = 1, ranking.slots = SLOTS, ranking.count = COUNT;
    ranking.recent = RECENT, ranking.sinks = 4;
    if (CALL(kv_lowest, &ranking)) exit(2);
    std::vector<int64_t> expected;
    for (int64_t j = 4; j < SLOTS - RECENT; ++j) expected.push_back(j);
    std::sort(expected.begin(), expected.end(), [&](int64_t a, int64_t b) { return score[a] < score[b]; });
    expected.resize(COUNT);
    std::sort(expected.begin(), expected.end()), std::sort(found.begin(), found.end());
    require_close("lowest slots", {found.begin(), found.end()}, {expected.begin(), expected.end()}, 0);
}

}  // namespace

int main(int, char** argv) {
    library = dlopen(argv[1], RTLD_NOW);
    if (!library) return printf("%s\n", dlerror()), 2;
    if (CALL(kv_abi) != KV_ABI) return printf("version %d, not %d\n", CALL(kv_abi), KV_ABI), 2;
    printf("instructions: %s\n", CALL(kv_instructions));
    for (const int64_t type : {KV_F32, KV_BF16, KV_F16}) {
        for (const Shape& shape : {Shape{2, 3, 1, 301, 64}, {1, 1, 1, 7, 80}, {2, 4, 33, 190, 128}, {1, 8, 5, 64, 96}})
            check_attention(shape, type), check_codes(shape, type);
        for (const int64_t rows : {1, 3, 32}) check_linear(rows, 328, 77, type);
    }
    check_ranking();
    printf("%d comparisons, %d failed\n", compared, failed);
    return failed != 0;
}
