// Norm of the query and key heads, rotary embedding, and the write of K and V to their slots.
//
// Macros: HEAD_DIM, BLOCK_SIZE.
// Launch: grid (ceil(tokens * groups / 8), 1, 1) with groups = ceil((q_heads + 2 * kv_heads) / 4), block (256, 1, 1), no
// dynamic shared memory. One warp serves four heads of one token.

#include "common.cuh"

#define HEADS_PER_WARP 4
#define QUADS (HEAD_DIM / 4)           // units of two neighbouring pairs (i, i + D / 2), (i + 1, i + 1 + D / 2)
#define PER_LANE ((QUADS + 31) / 32)

KERNEL __launch_bounds__(256)
    qk_norm_rope_kvwrite(elem *__restrict__ qkv,            // [tokens, (q_heads + 2 * kv_heads) * HEAD_DIM], q rotated in place
                         const elem *__restrict__ q_norm,   // [HEAD_DIM], or null
                         const elem *__restrict__ k_norm,   // [HEAD_DIM], or null
                         const float2 *__restrict__ table,  // [max_positions, HEAD_DIM / 2], (cos, sin) times the rope's factor
                         const int *__restrict__ positions, // [tokens]
                         const i64 *__restrict__ slots,     // [tokens], block * BLOCK_SIZE + offset; negative: not written
                         elem *__restrict__ kv,             // [blocks, 2, BLOCK_SIZE, kv_heads, HEAD_DIM]
                         int tokens, int q_heads, int kv_heads, float eps) {
    int heads = q_heads + 2 * kv_heads, groups = (heads + HEADS_PER_WARP - 1) / HEADS_PER_WARP;
    int id = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    int token = id / groups, first = (id - token * groups) * HEADS_PER_WARP;
    pdl_wait();
    pdl_launch();
    if (token >= tokens) return;

    elem *row = qkv + (i64)token * heads * HEAD_DIM;
    u32 lo[HEADS_PER_WARP][PER_LANE], hi[HEADS_PER_WARP][PER_LANE];
#pragma unroll
    for (int h = 0; h < HEADS_PER_WARP; h++) {
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) {
            int q = lane + 32 * j;
            lo[h][j] = hi[h][j] = 0;
            if (q < QUADS && first + h < heads) {
                const elem *p = row + (first + h) * HEAD_DIM + 2 * q;
                lo[h][j] = *(const u32 *)p;
                hi[h][j] = *(const u32 *)(p + HEAD_DIM / 2);
            }
        }
    }
    i64 slot = slots[token];
    float4 angle[PER_LANE]; // cos, sin of two neighbouring pairs
    const float2 *angles = table + (i64)positions[token] * (HEAD_DIM / 2);
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        int q = lane + 32 * j;
        angle[j] = q < QUADS ? *(const float4 *)(angles + 2 * q) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    i64 block = slot / BLOCK_SIZE, in_block = slot - block * BLOCK_SIZE;

#pragma unroll
    for (int h = 0; h < HEADS_PER_WARP; h++) {
        int head = first + h;
        if (head >= heads) break;
        bool is_q = head < q_heads, is_v = head >= q_heads + kv_heads;
        const elem *norm = is_q ? q_norm : k_norm;
        elem *dst = row + head * HEAD_DIM;
        if (!is_q) {
            if (slot < 0) continue;
            int kv_head = head - q_heads - (is_v ? kv_heads : 0);
            dst = kv + (((block * 2 + (is_v ? 1 : 0)) * BLOCK_SIZE + in_block) * kv_heads + kv_head) * HEAD_DIM;
        }
        float inv = 1.0f;
        if (norm && !is_v) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < PER_LANE; j++) {
                float2 a = unpack2(lo[h][j]), b = unpack2(hi[h][j]);
                sum += a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y;
            }
            inv = rsqrtf(warp_sum(sum) / (float)HEAD_DIM + eps);
        }
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) {
            int q = lane + 32 * j;
            if (q >= QUADS) continue;
            u32 l = lo[h][j], u = hi[h][j];
            if (!is_v) {
                float2 a = unpack2(l), b = unpack2(u);
                if (norm) {
                    float2 wa = unpack2(*(const u32 *)(norm + 2 * q)), wb = unpack2(*(const u32 *)(norm + HEAD_DIM / 2 + 2 * q));
                    a.x *= inv * wa.x; a.y *= inv * wa.y; b.x *= inv * wb.x; b.y *= inv * wb.y;
                }
                float4 c = angle[j];
                l = pack2(a.x * c.x - b.x * c.y, a.y * c.z - b.y * c.w);
                u = pack2(b.x * c.x + a.x * c.y, b.y * c.z + a.y * c.w);
            }
            *(u32 *)(dst + 2 * q) = l;
            *(u32 *)(dst + HEAD_DIM / 2 + 2 * q) = u;
        }
    }
}
