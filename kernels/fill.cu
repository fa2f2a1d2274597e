// Made-up weights and KV contents. The generator is a counter-based SplitMix64: every element can be made alone.

#include "common.cuh"

#define GOLDEN 0x9E3779B97F4A7C15ull

// These three must match backend::dummy on the host, bit for bit.
DEVICE u64 mix(u64 z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}
DEVICE u64 stream_of(u64 seed, u64 id) { return mix(mix(seed) + GOLDEN * (id + 1)); }
// In [-1, 1), a multiple of 2^-23, exact.
DEVICE float uniform(u64 stream, u64 element) {
    int bits = (int)(mix(stream + GOLDEN * (element + 1)) >> 40);
    return (float)(bits - (1 << 23)) * (1.0f / (float)(1 << 23));
}

// offset + uniform * spread, product and sum rounded separately, as on the host.
DEVICE uint4 eight(u64 stream, u64 first, float spread, float offset) {
    Vec8 r;
#pragma unroll
    for (int i = 0; i < 8; i++) r.v[i] = __fadd_rn(offset, __fmul_rn(uniform(stream, first + i), spread));
    return pack8(r);
}

// One weight: spread 0.02, offset 1 for a norm's scale and 0 for others. stream = stream_of(seed, weight id), from the host.
// Launch: grid (min(ceil(count / 2048), 65535), 1, 1), block (256, 1, 1). count is a multiple of 8.
KERNEL __launch_bounds__(256) fill_weight(elem *__restrict__ out, // [count]
                                          u64 count, u64 stream, float spread, float offset) {
    for (u64 at = ((u64)blockIdx.x * 256 + threadIdx.x) * 8; at < count; at += (u64)gridDim.x * 2048)
        store16(out + at, eight(stream, at, spread, offset));
}

// A rectangle of a weight of which this rank holds a part: its elements have the values that they have in the whole weight.
// Launch: grid (min(ceil(cols / 256), 65535), min(rows, 65535), 1), block (256, 1, 1).
KERNEL __launch_bounds__(256) fill_part(elem *__restrict__ out, // first element of the rectangle, in rows of `width` elements
                                        u64 first,              // index of that element in the whole weight, whose rows have `full_width`
                                        u32 rows, u32 cols, u32 width, u32 full_width, u64 stream, float spread, float offset) {
    for (u32 r = blockIdx.y; r < rows; r += gridDim.y)
        for (u32 c = blockIdx.x * 256 + threadIdx.x; c < cols; c += gridDim.x * 256) {
            float value = uniform(stream, first + (u64)r * full_width + c);
            out[(u64)r * width + c] = from_float(__fadd_rn(offset, __fmul_rn(value, spread)));
        }
}

// Blocks of the KV pool, the same ones in every layer of a KV group: uniform in [-1, 1).
// Launch: grid (blocks, layers, 1), block (256, 1, 1). block_elems is a multiple of 8.
KERNEL __launch_bounds__(256) fill_kv(const u64 *__restrict__ layer_bases, // [layers], device addresses of [blocks, 2, BLOCK_SIZE, kv_heads, HEAD_DIM]
                                      const u32 *__restrict__ layer_ids,   // [layers], index among all KV layers
                                      const u32 *__restrict__ blocks,      // [grid.x]
                                      u32 block_elems, u64 seed) {
    u64 block = blocks[blockIdx.x];
    u64 stream = stream_of(~seed, ((u64)layer_ids[blockIdx.y] << 32) | block);
    elem *out = (elem *)layer_bases[blockIdx.y] + block * block_elems;
    for (u32 at = threadIdx.x * 8; at < block_elems; at += 2048) store16(out + at, eight(stream, at, 1.0f, 0.0f));
}

// The same of a pool that has `row` of the `full_row` elements of a token, from `first` on: some of its heads.
// Launch: as fill_kv. row, full_row and first are multiples of 8.
KERNEL __launch_bounds__(256) fill_kv_part(const u64 *__restrict__ layer_bases, // [layers], device addresses of [blocks, 2, BLOCK_SIZE, row]
                                           const u32 *__restrict__ layer_ids,   // [layers], index among all KV layers
                                           const u32 *__restrict__ blocks,      // [grid.x]
                                           u32 block_elems, u64 seed, u32 row, u32 full_row, u32 first) {
    u64 block = blocks[blockIdx.x];
    u64 stream = stream_of(~seed, ((u64)layer_ids[blockIdx.y] << 32) | block);
    elem *out = (elem *)layer_bases[blockIdx.y] + block * block_elems;
    for (u32 at = threadIdx.x * 8; at < block_elems; at += 2048)
        store16(out + at, eight(stream, (u64)(at / row) * full_row + first + at % row, 1.0f, 0.0f));
}
