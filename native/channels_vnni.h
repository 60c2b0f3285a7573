// Scores for 4-bit codes with scales by channel, by products of bytes (AVX-512 VNNI).
#pragma once
#include "channels.h"
#include "coded_vnni.h"

#if defined(KV_VNNI)
namespace {

// Sets query m of `to` to a query times the scales of a block. The zero points' contribution to
// each score is the query's total, so keys get scale 1 and zero point 1.
template <int BITS>
KV_INLINE void code_bytes_by_channel(const float* query, const float* scale, const float* zero,
                                     int64_t width, int64_t m, ByteQueries<BITS>& to) {
    alignas(64) float product[MOST_WIDTH];
    vi most{};
    vf added{};
    for (int64_t d = 0; d < width; d += W) {
        const vf q = load<vf>(query + d), x = q * load<vf>(scale + d);
        store(product + d, x);
        const vi size = (vi)x & 0x7fffffff;  // as integers these sort like the magnitudes
        most = size > most ? size : most;
        added += q * load<vf>(zero + d);
    }
    to.set_bytes(m, product, width, largest(most), sum(added));
}

// Whether the width is a multiple of the piece size.
template <int BITS>
bool channels_fit_bytes(const KvEncoded& x, int64_t width) {
    return x.plane.type == KV_I4 && x.block >= FEWEST_TOKENS && width <= MOST_WIDTH &&
           width % ByteCodes<BITS>::PIECE == 0;
}

// Like `channel_scores`; `queries` are in the element order of `byte_scores`, and `coded` has room
// for one tile.
template <int BITS>
void channel_byte_scores(const KvEncoded& x, int64_t row, int64_t head, int64_t slot, Rows keys,
                         Rows values, int64_t count, int64_t width, const float* queries,
                         int64_t records, float* s, float* coded, char* even) {
    const int64_t stride = padded(width);
    float ones[BLOCK], scale[MOST_WIDTH], zero[MOST_WIDTH];
    float some[MOST_BYTE_SCORES * BLOCK];
    for (float& one : ones) one = 1;
    each_channel_block(x.block, slot, count, [&](int64_t block, int64_t from, int64_t to) {
        const uint16_t* zeros = scales_of_block(x.zero, row, head, block);
        const uint16_t* scales = scales_of_block(x.scale, row, head, block);
        for (int64_t d = 0; d < width; d += W) {
            store(scale + d, in_quads<BITS>(F16::widen_half(scales + d)));
            store(zero + d, zeros ? in_quads<BITS>(F16::widen_half(zeros + d)) : vf{});
        }
        if (zeros) count_from_middle(x, scale, width, zero);
        for (const KvPlane* plane : {&x.scale, &x.zero})
            if (plane->data)
                prefetch((const char*)scales_of_block(*plane, row, head, block + 2), width * 2);
        const Rows own = even_rows({keys.at(from), keys.stride, keys.bytes}, to - from, even);
        const Rows next = {values.at(from), values.stride, values.bytes};
        for_tiles<MOST_BYTE_SCORES>(records, [&](int64_t first, auto tile) {
            constexpr int MT = tile.size;
            ByteQueries<BITS> codes(coded, MT, width, width);
            for (int m = 0; m < MT; ++m)
                code_bytes_by_channel(queries + (first + m) * stride, scale, zero, width, m, codes);
            Lines ahead(next, to - from, (to - from + 15) / 16 * (own.bytes / 32));
            if (first) ahead.some = 0;
            byte_scores<BITS, MT>(own, ahead, to - from, width, width, ones, ones, coded, some);
            for (int m = 0; m < MT; ++m)
                memcpy(s + (first + m) * BLOCK + from, some + m * BLOCK,
                       (to - from) * sizeof *some);
        });
    });
}

}  // namespace
#endif
