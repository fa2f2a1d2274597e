// Norm of the query and key heads, rotary embedding, and the write of K and V to their slots.
//
// LANES threads serve one head of one token, four neighbouring pairs (i, i + HEAD_DIM / 2) each; a warp serves
// HEADS = PASSES * 32 / LANES heads of one token. Two kernels differ in PASSES: qk_norm_rope_kvwrite (4) for throughput and
// qk_norm_rope_kvwrite_few (1) for the least latency with few tokens.
//
// Macros: HEAD_DIM, BLOCK_SIZE.
// Launch: grid (ceil(tokens * groups / 4), 1, 1) with groups = ceil((q_heads + 2 * kv_heads) / HEADS), block (128, 1, 1), no dynamic
// shared memory. LANES is the least power of two that is at least HEAD_DIM / 8.
// Under programmatic dependent launch, positions, slots and the table must be older than the kernel before this one.

#include "common.cuh"

#define LANES (UNITS > 16 ? 32 : UNITS > 8 ? 16 : UNITS > 4 ? 8 : UNITS > 2 ? 4 : UNITS > 1 ? 2 : 1)

struct Four {
    float v[4];
};
DEVICE Four unpack4(uint2 w) {
    float2 a = unpack2(w.x), b = unpack2(w.y);
    return {a.x, a.y, b.x, b.y};
}
DEVICE uint2 pack4(const Four &r) { return make_uint2(pack2(r.v[0], r.v[1]), pack2(r.v[2], r.v[3])); }

template <int PASSES>
DEVICE void rope(elem *__restrict__ qkv, const elem *__restrict__ q_norm, const elem *__restrict__ k_norm, const float2 *__restrict__ table,
                 const int *__restrict__ positions, const i64 *__restrict__ slots, elem *__restrict__ kv, int tokens, int q_heads, int kv_heads, float eps) {
    constexpr int AT_ONCE = 32 / LANES, HEADS = PASSES * AT_ONCE;
    int heads = q_heads + 2 * kv_heads, groups = (heads + HEADS - 1) / HEADS;
    int id = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31, unit = lane % LANES;
    int token = id / groups, first = (id - token * groups) * HEADS + lane / LANES;
    bool live = token < tokens && unit < UNITS;
    i64 slot = -1;
    int position = 0;
    uint2 norms[2][2] = {};
    if (live) {
        slot = slots[token];
        position = positions[token];
        if (q_norm) {
            norms[0][0] = *(const uint2 *)(q_norm + unit * 4);
            norms[0][1] = *(const uint2 *)(q_norm + HEAD_DIM / 2 + unit * 4);
        }
        if (k_norm) {
            norms[1][0] = *(const uint2 *)(k_norm + unit * 4);
            norms[1][1] = *(const uint2 *)(k_norm + HEAD_DIM / 2 + unit * 4);
        }
    }
    pdl_wait();
    pdl_launch();

    elem *row = qkv + (i64)token * heads * HEAD_DIM + unit * 4;
    uint2 lo[PASSES], hi[PASSES];
#pragma unroll
    for (int p = 0; p < PASSES; p++) {
        int head = first + p * AT_ONCE;
        lo[p] = hi[p] = make_uint2(0, 0);
        if (live && head < heads) {
            lo[p] = *(const uint2 *)(row + head * HEAD_DIM);
            hi[p] = *(const uint2 *)(row + head * HEAD_DIM + HEAD_DIM / 2);
        }
    }
    Four c = {}, s = {};
    if (live) {
        const float4 *angles = (const float4 *)(table + (i64)position * (HEAD_DIM / 2) + unit * 4);
        float4 a = angles[0], b = angles[1];
        c = {a.x, a.z, b.x, b.z};
        s = {a.y, a.w, b.y, b.w};
    }
    i64 block = slot / BLOCK_SIZE, in_block = slot - block * BLOCK_SIZE;
#pragma unroll
    for (int p = 0; p < PASSES; p++) {
        int head = first + p * AT_ONCE;
        bool is_q = head < q_heads, is_v = head >= q_heads + kv_heads;
        Four a = unpack4(lo[p]), b = unpack4(hi[p]);
        if (is_q ? q_norm != nullptr : k_norm != nullptr && !is_v) {
            // The heads of a warp may differ in kind; a shuffle names the lanes of its own head only.
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; i++) sum += a.v[i] * a.v[i] + b.v[i] * b.v[i];
            u32 mask = LANES == 32 ? 0xffffffffu : ((1u << (LANES % 32)) - 1u) << (lane / LANES * LANES);
#pragma unroll
            for (int d = LANES / 2; d > 0; d >>= 1) sum += __shfl_xor_sync(mask, sum, d);
            float inv = rsqrtf(sum / (float)HEAD_DIM + eps);
            Four na = unpack4(is_q ? norms[0][0] : norms[1][0]), nb = unpack4(is_q ? norms[0][1] : norms[1][1]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                a.v[i] *= inv * na.v[i];
                b.v[i] *= inv * nb.v[i];
            }
        }
        if (!is_v) {
            Four x, y;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                x.v[i] = a.v[i] * c.v[i] - b.v[i] * s.v[i];
                y.v[i] = b.v[i] * c.v[i] + a.v[i] * s.v[i];
            }
            lo[p] = pack4(x);
            hi[p] = pack4(y);
        }
        elem *to = row + head * HEAD_DIM;
        if (!is_q) to = kv + (((block * 2 + (is_v ? 1 : 0)) * BLOCK_SIZE + in_block) * kv_heads + (head - q_heads - (is_v ? kv_heads : 0))) * HEAD_DIM + unit * 4;
        if (live && head < heads && (is_q || slot >= 0)) {
            *(uint2 *)to = lo[p];
            *(uint2 *)(to + HEAD_DIM / 2) = hi[p];
        }
    }
}

#define ROPE_KERNEL(name, passes)                                                                                                                     \
    KERNEL __launch_bounds__(128) name(elem *__restrict__ qkv,            /* [tokens, (q_heads + 2 * kv_heads) * HEAD_DIM], q rotated in place */     \
                                       const elem *__restrict__ q_norm,   /* [HEAD_DIM], or null */                                                   \
                                       const elem *__restrict__ k_norm,   /* [HEAD_DIM], or null */                                                   \
                                       const float2 *__restrict__ table,  /* [max_positions, HEAD_DIM / 2], (cos, sin) times the rope's factor */     \
                                       const int *__restrict__ positions, /* [tokens] */                                                              \
                                       const i64 *__restrict__ slots,     /* [tokens], block * BLOCK_SIZE + offset; negative: not written */          \
                                       elem *__restrict__ kv,             /* [blocks, 2, BLOCK_SIZE, kv_heads, HEAD_DIM] */                           \
                                       int tokens, int q_heads, int kv_heads, float eps) {                                                            \
        rope<passes>(qkv, q_norm, k_norm, table, positions, slots, kv, tokens, q_heads, kv_heads, eps);                                               \
    }
ROPE_KERNEL(qk_norm_rope_kvwrite, 4)
ROPE_KERNEL(qk_norm_rope_kvwrite_few, 1)
