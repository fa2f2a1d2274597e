// Tokens on their way to the ranks that have their experts, and back: what is laid down for an all-to-all, and the sum of what
// returns.
//
// Rank r has experts [r * local, (r + 1) * local). A token goes to each rank that has an expert that it chose, once, into the next free
// row of that rank's part, in the order of the tokens; a part has as many rows as there are tokens, and those that are left have ids -1.
//
// Macro TOP_K (at most 8). hidden is a multiple of 8.
// Launch of moe_place: grid (ranks, 1, 1), block (1024, 1, 1), no dynamic shared memory.
// Launch of moe_pack: grid (tokens, ranks, 1), block (128, 1, 1).
// Launch of moe_unpack: grid (ceil(hidden / 8 / 128), min(tokens, 65535), 1), block (128, 1, 1).

#include "common.cuh"

#ifndef TOP_K
#define TOP_K 2
#endif
#if TOP_K > 8
#error "TOP_K is at most 8"
#endif

#define THREADS 1024
#define WARPS (THREADS / 32)
#define ALL 0xffffffffu

// Inputs that an earlier kernel wrote are not __restrict__: the compiler must not take them for constants and read them before pdl_wait.

// The rows of rank blockIdx.x.
KERNEL __launch_bounds__(THREADS) moe_place(const int *ids,       // [tokens, TOP_K], numbers among all experts
                                            const float *weights, // [tokens, TOP_K]
                                            int *__restrict__ places,         // [ranks, tokens]: row of each token, or -1
                                            int *__restrict__ sent_ids,       // [ranks, tokens, TOP_K]: numbers at that rank, or -1
                                            float *__restrict__ sent_weights, // [ranks, tokens, TOP_K]
                                            int tokens, int local) {
    __shared__ int of_warp[2][WARPS]; // in turns, so that one barrier a round is enough
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, first_expert = blockIdx.x * local;
    i64 part = (i64)blockIdx.x * tokens;
    pdl_wait();
    pdl_launch();
    int next = 0; // rows that the rounds before took
    for (int round = 0; round * THREADS < tokens; round++) {
        int t = round * THREADS + threadIdx.x;
        int id[TOP_K];
        bool goes = false;
#pragma unroll
        for (int j = 0; j < TOP_K; j++) {
            int e = t < tokens ? ids[(i64)t * TOP_K + j] - first_expert : -1;
            id[j] = (u32)e < (u32)local ? e : -1;
            goes |= id[j] >= 0;
        }
        u32 going = __ballot_sync(ALL, goes);
        if (lane == 0) of_warp[round & 1][warp] = __popc(going);
        __syncthreads();
        int count = of_warp[round & 1][lane], before = count; // WARPS is 32
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            int n = __shfl_up_sync(ALL, before, d);
            if (lane >= d) before += n;
        }
        int total = __shfl_sync(ALL, before, 31);
        before = __shfl_sync(ALL, before - count, warp);
        int row = next + before + __popc(going & ((1u << lane) - 1));
        if (t < tokens) places[part + t] = goes ? row : -1;
        if (goes) {
#pragma unroll
            for (int j = 0; j < TOP_K; j++) {
                sent_ids[(part + row) * TOP_K + j] = id[j];
                sent_weights[(part + row) * TOP_K + j] = weights[(i64)t * TOP_K + j];
            }
        }
        next += total;
    }
    for (int i = next * TOP_K + threadIdx.x; i < tokens * TOP_K; i += THREADS) {
        sent_ids[part * TOP_K + i] = -1;
        sent_weights[part * TOP_K + i] = 0.0f;
    }
}

KERNEL __launch_bounds__(128) moe_pack(const elem *x,     // [tokens, hidden]
                                       const int *places, // [ranks, tokens]
                                       elem *__restrict__ sent, // [ranks, tokens, hidden]; rows that are left keep what they had
                                       int tokens, int hidden) {
    pdl_wait();
    pdl_launch();
    i64 part = (i64)blockIdx.y * tokens;
    int place = places[part + blockIdx.x];
    if (place < 0) return;
    const elem *from = x + (i64)blockIdx.x * hidden;
    elem *to = sent + (part + place) * hidden;
    for (int column = threadIdx.x * 8; column < hidden; column += 128 * 8) store16(to + column, load16(from + column));
}

KERNEL __launch_bounds__(128) moe_unpack(const elem *back,  // [ranks, tokens, hidden]
                                         const int *places, // [ranks, tokens]
                                         elem *__restrict__ out, // [tokens, hidden]
                                         int tokens, int hidden, int ranks) {
    int column = (blockIdx.x * 128 + threadIdx.x) * 8;
    pdl_wait();
    pdl_launch();
    if (column >= hidden) return;
    for (int t = blockIdx.y; t < tokens; t += gridDim.y) {
        Vec8 sum = unpack8(make_uint4(0, 0, 0, 0));
        for (int r = 0; r < ranks; r++) {
            i64 part = (i64)r * tokens;
            int place = places[part + t];
            if (place < 0) continue;
            Vec8 v = unpack8(load16(back + (part + place) * hidden + column));
#pragma unroll
            for (int i = 0; i < 8; i++) sum.v[i] += v.v[i];
        }
        store16(out + (i64)t * hidden + column, pack8(sum));
    }
}
