// RMS norm, fused with the addition to the residual stream.
//
// Launch: grid (tokens, 1, 1), block (threads, 1, 1), no dynamic shared memory. threads is a multiple of 32, at most 1024, and at
// least hidden / 8 / 4: with few tokens min(1024, round_up(hidden / 8, 32)), which has the least latency; from about 256 tokens on
// max(128, round_up(hidden / 32, 32)), which has more reads in flight. hidden is a multiple of 8, at most 32768.

#include "common.cuh"

#define MAX_VECTORS 4

KERNEL __launch_bounds__(1024) add_rmsnorm(const elem *__restrict__ delta,  // [tokens, hidden], or null: nothing added
                                           elem *__restrict__ residual,     // [tokens, hidden], in and out
                                           const elem *__restrict__ weight, // [hidden]
                                           elem *__restrict__ out,          // [tokens, hidden]
                                           int hidden, float eps) {
    __shared__ float sums[32];
    i64 base = (i64)blockIdx.x * hidden;
    int units = hidden / 8, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    uint4 kept[MAX_VECTORS], added[MAX_VECTORS];
    float sum = 0.0f;
    // The scale does not depend on earlier kernels: the first vector is on its way while this one waits.
    uint4 scale0 = make_uint4(0, 0, 0, 0);
    if (threadIdx.x < units) scale0 = load16(weight + threadIdx.x * 8);
    pdl_wait();
    pdl_launch();
#pragma unroll
    for (int v = 0; v < MAX_VECTORS; v++) {
        int u = threadIdx.x + v * blockDim.x;
        if (u < units) {
            kept[v] = load16(residual + base + u * 8);
            if (delta) added[v] = load16(delta + base + u * 8);
        }
    }
#pragma unroll
    for (int v = 0; v < MAX_VECTORS; v++) {
        int u = threadIdx.x + v * blockDim.x;
        if (u < units) {
            Vec8 r = unpack8(kept[v]);
            if (delta) {
                Vec8 d = unpack8(added[v]);
#pragma unroll
                for (int i = 0; i < 8; i++) r.v[i] += d.v[i];
                kept[v] = pack8(r);
                store16(residual + base + u * 8, kept[v]);
                r = unpack8(kept[v]);
            }
#pragma unroll
            for (int i = 0; i < 8; i++) sum = fmaf(r.v[i], r.v[i], sum);
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    sum = warp_sum(lane < warps ? sums[lane] : 0.0f);
    float inv = rsqrtf(sum / (float)hidden + eps);
#pragma unroll
    for (int v = 0; v < MAX_VECTORS; v++) {
        int u = threadIdx.x + v * blockDim.x;
        if (u < units) {
            Vec8 r = unpack8(kept[v]), w = unpack8(v == 0 ? scale0 : load16(weight + u * 8));
#pragma unroll
            for (int i = 0; i < 8; i++) r.v[i] *= inv * w.v[i];
            store16(out + base + u * 8, pack8(r));
        }
    }
}
