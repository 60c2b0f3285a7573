// Scores and sums of values on codes by products of four bytes (AVX-512 VNNI). Codes are unsigned
// bytes; queries and weights are signed bytes, or 16-bit numbers as two bytes each, whose products
// are summed separately. 16 bits are exact to 2e-4 of the largest result. With 4-bit codes queries
// have 8 bits: the error of such codes is far larger.
#pragma once
#include "coded.h"
#include "lanes.h"

#if defined(KV_VNNI)
namespace {

typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x64 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));

// In each 32-bit lane: sum += four bytes of `codes` (unsigned) times the four bytes at `factors`
// (signed), which are the same for all lanes.
KV_INLINE void add_dot4(u32x16& sum, u8x64 codes, const int8_t* factors) {
#if defined(__AVX512VNNI__)
    // In assembly, because GCC 12 copies every sum of the builtin.
    const int32_t& four = *(const int32_t*)factors;
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(four));
#else
    const u32x16 x = (u32x16)codes;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sum += (x >> 8 * i & 255) * (uint32_t)(int32_t)factors[i];
#endif
}

KV_INLINE i8x16 lowest_bytes(vi x) {  // GCC 12 would convert each number separately
#if defined(__AVX512F__)
    return (i8x16)_mm512_cvtepi32_epi8((__m512i)x);
#else
    return __builtin_convertvector(x, i8x16);
#endif
}

// Layout of BITS-bit codes in a piece of 16 bytes, and precision of their factors.
template <int BITS>
struct ByteCodes {
    static constexpr int PARTS = 8 / BITS;             // codes per byte
    static constexpr int64_t PIECE = 16 * PARTS;       // elements per piece
    static constexpr int MIDDLE = BITS == 4 ? 8 : 128; // the unsigned code of 0
    static constexpr int QUERY_BYTES = BITS == 4 ? 1 : 2;

    KV_INLINE u8x64 as_unsigned(u8x64 x) { return BITS == 8 ? x ^ 128 : x; }

    // Elements K, K + PARTS, ... of unsigned codes.
    template <int K>
    KV_INLINE u8x64 part(u8x64 x) {
        if constexpr (BITS == 8) return x;
        return (u8x64)((u16x32)x >> 4 * K) & 15;
    }
};

// The largest 16-bit number with a high byte of at most 127 and a signed low byte.
constexpr float MOST_TWO_BYTES = 32639;

// Whether groups and widths are multiples of the piece size.
bool fits_bytes(const KvEncoded& x, int64_t width) {
    const int64_t type = kv_read_type(x.plane.type);
    if (type < KV_I8 || x.block > 1) return false;
    const int64_t piece = type == KV_I8 ? ByteCodes<8>::PIECE : ByteCodes<4>::PIECE;
    return width % piece == 0 && width <= MOST_WIDTH && (x.group >= width || x.group % piece == 0);
}

// -- scores ----------------------------------------------------------------------------------

// The queries of a tile, in the memory of padded(width) floats each. First the bytes that are
// multiplied by four bytes of a key: four for each query, or four high and four low ones. Then, for
// each query and group: the contribution of the unsigned codes' middle to the sum, the step, and
// the query's sum, which is multiplied by a key's zero point.
template <int BITS>
struct ByteQueries {
    typedef ByteCodes<BITS> C;
    static constexpr int64_t BYTES = 4 * C::QUERY_BYTES;
    int64_t tile, groups;
    int8_t* codes;
    uint32_t* middle;
    float *step, *total;

    ByteQueries(float* memory, int64_t tile, int64_t width, int64_t group)
        : tile(tile), groups(group_count(width, group)), codes((int8_t*)memory),
          middle((uint32_t*)(codes + tile * width * C::QUERY_BYTES)),
          step((float*)(middle + tile * groups)), total(step + tile * groups) {}

    // Sets query m of the tile to x (width), with elements in the order of `in_quads`.
    void set(int64_t m, const float* x, int64_t width, int64_t group) {
        int16_t rounded[MOST_WIDTH];
        for (int64_t g = 0; g < groups; ++g) {
            const int64_t from = g * group, size = std::min(group, width - from);
            const float most = C::QUERY_BYTES == 2 ? MOST_TWO_BYTES : 127;
            const Rounded all = round16(x + from, size, rounded + from, most);
            middle[m * groups + g] = -(uint32_t)C::MIDDLE * (uint32_t)all.sum;
            step[m * groups + g] = all.step;
            vf added{};
            for (int64_t i = from; i < from + size; i += W) added += load<vf>(x + i);
            total[m * groups + g] = sum(added);
        }
        alignas(64) int8_t high[MOST_WIDTH], low[MOST_WIDTH];
        for (int64_t i = 0; i < width; ++i) {
            high[i] = (int8_t)((rounded[i] + 128) >> 8);
            low[i] = (int8_t)rounded[i];
        }
        interleave(m, high, low, width);
    }

    // Like `set`, in 8 bits, for one group of the whole width. `most`: the bits of the largest
    // magnitude in x; `zeros`: the query's total.
    void set_bytes(int64_t m, const float* x, int64_t width, int32_t most, float zeros) {
        static_assert(C::QUERY_BYTES == 1, "");
        alignas(64) int8_t low[MOST_WIDTH];
        float high;
        memcpy(&high, &most, 4);
        const bool small = high < 1e-30f;  // the inverse of a smaller number would overflow
        const vf inverse = all(small ? 0.0f : 127 / high), magic = all(12582912.0f);
        vu added{};
        for (int64_t d = 0; d < width; d += W) {
            const vu code = (vu)(load<vf>(x + d) * inverse + magic);  // in the low bits
            added += code - (vu)magic;
            store(low + d, lowest_bytes((vi)code));
        }
        middle[m] = -(uint32_t)C::MIDDLE * (uint32_t)sum((vi)added);
        // NaN if a number is not finite.
        step[m] = small ? 0.0f : high * (1.0f / 127) + (high - high);
        total[m] = zeros;
        interleave(m, nullptr, low, width);
    }

  private:
    // Interleaves bytes of a query, the high ones if it has two, with those of the other queries.
    void interleave(int64_t m, const int8_t* high, const int8_t* low, int64_t width) {
        int8_t* to = codes + m * BYTES;
        for (int64_t i = 0; i < width; i += 4, to += tile * BYTES) {
            if (C::QUERY_BYTES == 2) memcpy(to, high + i, 4);
            memcpy(to + BYTES - 4, low + i, 4);
        }
    }
};

// Numbers in the element order of `byte_scores`.
template <int BITS>
KV_INLINE vf in_quads(vf x) {
    if constexpr (BITS == 8) return x;
    return __builtin_shufflevector(x, x, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
}

// Scores s (MT rows of BLOCK) of MT queries for the keys of a block, 16 keys in the lanes of a
// vector. `scale` and `zero` (groups, BLOCK) belong to codes counted from their middle; `zero` is
// null without zero points.
template <int BITS, int MT>
KV_OUTLINE void byte_scores(Rows keys, Lines ahead, int64_t count, int64_t width, int64_t group,
                            const float* scale, const float* zero, float* queries, float* s) {
    typedef ByteCodes<BITS> C;
    constexpr int BYTES = C::QUERY_BYTES;
    const int64_t pieces = width / C::PIECE, pieces_of_group = group / C::PIECE;
    const ByteQueries<BITS> query(queries, MT, width, group);
    const int64_t stride = query.groups;
    for (int64_t j = 0; j < count; j += 16) {
        const char* at = keys.at(j);
        u32x16 sum[MT][BYTES];
        vf score[MT] = {};
        int64_t g = 0, left = pieces_of_group;
        const auto begin = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 8
            for (int m = 0; m < MT; ++m) {
                sum[m][0] = u32x16{};
                sum[m][BYTES - 1] = query.middle[m * stride + g] - u32x16{};
            }
        };
        const auto end = [&]() __attribute__((always_inline)) {
            const vf own = load<vf>(scale + g * BLOCK + j);
#pragma GCC unroll 8
            for (int m = 0; m < MT; ++m) {
                u32x16 x = sum[m][BYTES - 1];
                if (BYTES == 2) x += sum[m][0] << 8;
                score[m] += __builtin_convertvector((vi)x, vf) * (own * query.step[m * stride + g]);
                if (zero) score[m] += load<vf>(zero + g * BLOCK + j) * query.total[m * stride + g];
            }
            ++g, left = pieces_of_group;
        };
        begin();
        const int8_t* q = query.codes;
        vi next[2][4];
        load_pieces(at, keys.stride, next);
        for (int64_t piece = 0; piece < pieces; piece += 2) {
            // The next pieces are shuffled while the current ones are multiplied.
            vi x[2][4];
            memcpy(x, next, sizeof x);
            Lines::pass(ahead);
            load_pieces(at + (piece + 2 < pieces ? piece + 2 : piece) * 16, keys.stride, next);
#pragma GCC unroll 2
            for (int c = 0; c < 2; ++c) {
                if (c && piece + 1 == pieces) break;
                if (!left) end(), begin();
                transpose_quads(x[c]);
#pragma GCC unroll 4
                for (int n = 0; n < 4; ++n) {
                    const u8x64 four = C::as_unsigned((u8x64)x[c][n]);
                    const auto add = [&](auto index) __attribute__((always_inline)) {
                        constexpr int K = decltype(index)::size;
                        const u8x64 y = C::template part<K>(four);
                        const int8_t* factors = opaque(q);
#pragma GCC unroll 8
                        for (int m = 0; m < MT; ++m)
#pragma GCC unroll 2
                            for (int b = 0; b < BYTES; ++b)
                                add_dot4(sum[m][b], y, factors + (m * BYTES + b) * 4);
                        q += MT * BYTES * 4;
                    };
                    add(Tile<0>{});
                    if constexpr (C::PARTS == 2) add(Tile<1>{});
                }
                --left;
            }
        }
        end();
#pragma GCC unroll 8
        for (int m = 0; m < MT; ++m) store(s + m * BLOCK + j, score[m]);
    }
}

// -- values ----------------------------------------------------------------------------------

// The low bytes of two vectors' 16-bit numbers: in each 128 bits those of a, then those of b.
KV_INLINE u8x64 low_bytes(u16x32 a, u16x32 b) {
#if defined(__AVX512BW__)
    return (u8x64)_mm512_packus_epi16((__m512i)(a & 255), (__m512i)(b & 255));
#else
    u8x64 out;
    for (int i = 0; i < 64; ++i) out[i] = (uint8_t)(i & 8 ? b : a)[i / 16 * 8 + i % 8];
    return out;
#endif
}

// The index where low_bytes puts the four bytes of slots 4 i to 4 i + 3.
constexpr int64_t quad_place(int64_t i) { return i % 8 / 2 * 4 + i / 8 * 2 + i % 2; }

// The weights of a tile's records for the values of a block, for each pair of a group and a record:
// 16-bit numbers as two bytes, in quads of slots; the value of 1; the contribution of the unsigned
// codes' middle to the sum; and the contribution of the zero points to the result.
template <int MT>
struct ByteWeights {
    static constexpr int64_t MOST = MOST_WIDTH / 16 * MT;
    alignas(64) int8_t codes[MOST][2][BLOCK];  // high bytes, low bytes
    float step[MOST], zero[MOST];
    uint32_t middle[MOST];
};

KV_INLINE u16x32 words(vf a, vf b) {  // the low 16 bits of each number
    return __builtin_shufflevector((u16x32)a, (u16x32)b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22,
                                   24, 26, 28, 30, 32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54,
                                   56, 58, 60, 62);
}

// Multiplies the records' weights p (MT rows of BLOCK) by the scales of each group (BLOCK). `zero`:
// null without zero points. In several passes over W pairs, so that no pair waits for another's
// reductions and division.
template <int BITS, int MT>
void weigh_bytes(const float* p, const float* scale, const float* zero, int64_t groups,
                 ByteWeights<MT>& to) {
    static_assert(BLOCK == 4 * W, "");
    const int64_t pairs = groups * MT;
    for (int64_t first = 0; first < pairs; first += W) {
        const int some = (int)std::min<int64_t>(W, pairs - first);
        vf lanes[W] = {};
        const auto each = [&](auto f) __attribute__((always_inline)) {
            for (int i = 0; i < some; ++i) {
                const int64_t g = (first + i) / MT, m = (first + i) % MT;
                f(i, p + m * BLOCK, g * BLOCK);
            }
        };
        each([&](int i, const float* weight, int64_t at) __attribute__((always_inline)) {
            vf size[4];
#pragma GCC unroll 4
            for (int t = 0; t < 4; ++t) {
                const vf x = load<vf>(weight + t * W) * load<vf>(scale + at + t * W);
                size[t] = (vf)((vi)x & 0x7fffffff);  // sorts like the magnitude; NaN is the largest
            }
            typedef LargestInteger L;
            lanes[place(i)] = L::join(L::join(size[0], size[1]), L::join(size[2], size[3]));
        });
        const vf high = sums<LargestInteger>(lanes);
        // The inverse of a smaller number would overflow. NaN if a number is not finite.
        const vi small = high < all(1e-30f), finite = (vi)high < 0x7f800000;
        float inverse[W];
        store(inverse, pick(finite & ~small, MOST_TWO_BYTES / high, vf{}));
        store(to.step + first, pick(small, vf{}, high * (1 / MOST_TWO_BYTES)) + (high - high));
        const vf magic = all(12582912.0f);
        each([&](int i, const float* weight, int64_t at) __attribute__((always_inline)) {
            vf x[4];
            u32x16 added = -4 * (u32x16)magic;
#pragma GCC unroll 4
            for (int t = 0; t < 4; ++t) {
                x[t] = load<vf>(weight + t * W) * load<vf>(scale + at + t * W);
                x[t] = x[t] * inverse[i] + magic;  // the low bits are the number
                added += (u32x16)x[t];
            }
            const u16x32 a = words(x[0], x[1]), b = words(x[2], x[3]);
            store(to.codes[first + i][0], low_bytes((a + 128) >> 8, (b + 128) >> 8));
            store(to.codes[first + i][1], low_bytes(a, b));
            lanes[place(i)] = (vf)added;
        });
        store(to.middle + first, sums<AddIntegers>(lanes));
        for (int i = 0; i < some; ++i) to.middle[first + i] *= -(uint32_t)ByteCodes<BITS>::MIDDLE;
        vf zeros{};
        if (zero) {
            each([&](int i, const float* weight, int64_t at) __attribute__((always_inline)) {
                vf added{};
#pragma GCC unroll 4
                for (int t = 0; t < 4; ++t)
                    added += load<vf>(weight + t * W) * load<vf>(zero + at + t * W);
                lanes[place(i)] = added;
            });
            zeros = sums(lanes);
        }
        store(to.zero + first, zeros);
    }
}

// In each 128 bits: four bytes of each of four slots -> for each byte, the four slots.
KV_INLINE u8x64 turn_bytes(vi x) {
    const u8x64 y = (u8x64)x;
    return __builtin_shufflevector(y, y, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 16,
                                   20, 24, 28, 17, 21, 25, 29, 18, 22, 26, 30, 19, 23, 27, 31, 32,
                                   36, 40, 44, 33, 37, 41, 45, 34, 38, 42, 46, 35, 39, 43, 47, 48,
                                   52, 56, 60, 49, 53, 57, 61, 50, 54, 58, 62, 51, 55, 59, 63);
}

// Four slots' codes of piece FIRST of the two at `at`, or of both pieces, as unsigned bytes: byte
// 4 i + n is byte i of slot n.
template <int BITS, int FIRST, int PIECES>
KV_INLINE void load_quad(const char* at, int64_t stride, u8x64 (&x)[PIECES]) {
    const vi a = two_slots(at, at + stride), b = two_slots(at + 2 * stride, at + 3 * stride);
    if constexpr (FIRST == 0)
        x[0] = ByteCodes<BITS>::as_unsigned(turn_bytes(__builtin_shufflevector(
            a, b, 0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27)));
    if constexpr (FIRST + PIECES == 2)
        x[PIECES - 1] = ByteCodes<BITS>::as_unsigned(turn_bytes(__builtin_shufflevector(
            a, b, 4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31)));
}

// The index of an element's sum: the parts of a piece are consecutive.
template <int BITS>
int64_t byte_lane(int64_t element) {
    typedef ByteCodes<BITS> C;
    return element / C::PIECE * C::PIECE + element % C::PARTS * 16 + element % C::PIECE / C::PARTS;
}

// acc = acc * alpha + weights . values, for the elements of PIECES pieces, from `piece` on, of MT
// records: piece FIRST of the two at `values`, or both.
template <int BITS, int MT, int FIRST, int PIECES>
KV_INLINE void byte_columns(Rows values, Lines& ahead, int64_t count, int64_t piece,
                            int64_t pieces_of_group, const ByteWeights<MT>& weights,
                            const float* alpha, float* acc, int64_t stride) {
    typedef ByteCodes<BITS> C;
    constexpr int N = PIECES * C::PARTS;
    int64_t pair[PIECES];  // the first of the piece's group
    u32x16 sum[MT][N][2] = {};
#pragma GCC unroll 2
    for (int p = 0; p < PIECES; ++p) pair[p] = (piece + p) / pieces_of_group * MT;
#pragma GCC unroll 8
    for (int m = 0; m < MT; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[m][n][1] += weights.middle[pair[n / C::PARTS] + m];
    const char* from = values.first;
    for (int64_t quad = 0; quad * 4 < count; ++quad, from += 4 * values.stride) {
        const int64_t at = 4 * quad_place(quad);
        u8x64 codes[PIECES];
        load_quad<BITS, FIRST>(from, values.stride, codes);
        Lines::pass(ahead);
#pragma GCC unroll 2
        for (int p = 0; p < PIECES; ++p) {
            const int8_t* w = opaque(weights.codes[pair[p]][0] + at);
            const auto add = [&](auto index) __attribute__((always_inline)) {
                constexpr int K = decltype(index)::size;
                const u8x64 x = C::template part<K>(codes[p]);
#pragma GCC unroll 8
                for (int m = 0; m < MT; ++m)
#pragma GCC unroll 2
                    for (int b = 0; b < 2; ++b)
                        add_dot4(sum[m][p * C::PARTS + K][b], x, w + (2 * m + b) * BLOCK);
            };
            add(Tile<0>{});
            if constexpr (C::PARTS == 2) add(Tile<1>{});
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < MT; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            const int64_t i = pair[n / C::PARTS] + m;
            float* to = acc + m * stride + n * 16;
            const vi x = (vi)(sum[m][n][1] + (sum[m][n][0] << 8));
            store(to, load<vf>(to) * alpha[m] + weights.zero[i] +
                          __builtin_convertvector(x, vf) * weights.step[i]);
        }
}

template <int BITS, int MT>
KV_OUTLINE void byte_values(Rows values, Rows next, int64_t count, int64_t width, int64_t group,
                            const float* scale, const float* zero, const float* p,
                            const float* alpha, float* acc) {
    typedef ByteCodes<BITS> C;
    ByteWeights<MT> weights;
    weigh_bytes<BITS>(p, scale, zero, group_count(width, group), weights);
    const int64_t pieces = width / C::PIECE, stride = padded(width);
    for (int64_t piece = 0; piece < pieces; piece += 2) {
        const Rows at = {values.first + piece * 16, values.stride, values.bytes};
        Lines ahead(next, count, (count + 3) / 4, piece / 2, (pieces + 1) / 2);
        const auto run = [&](auto first, auto size) __attribute__((always_inline)) {
            constexpr int FIRST = decltype(first)::size, PIECES = decltype(size)::size;
            byte_columns<BITS, MT, FIRST, PIECES>(
                at, ahead, count, piece + FIRST, group / C::PIECE, weights, alpha,
                acc + (piece + FIRST) * C::PIECE, stride);
        };
        const bool both = piece + 1 < pieces;
        if (both && MT * C::PARTS <= 6) {  // all sums are in registers
            run(Tile<0>{}, Tile<2>{});
        } else {
            run(Tile<0>{}, Tile<1>{});
            ahead.some = 0;
            if (both) run(Tile<1>{}, Tile<1>{});
        }
    }
}

constexpr int MOST_BYTE_SCORES = 6, MOST_BYTE_VALUES = 6;

}  // namespace
#endif
