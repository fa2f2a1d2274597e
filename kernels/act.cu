// Gated activations.
//
// Launch: grid (ceil(intermediate / 8 / 256), min(tokens, 65535), 1), block (256, 1, 1), no dynamic shared memory.
// intermediate is a multiple of 8.

#include "common.cuh"

KERNEL __launch_bounds__(256) silu_mul(const elem *__restrict__ gate_up, // [tokens, 2 * intermediate], gate first
                                       elem *__restrict__ out,           // [tokens, intermediate]
                                       int tokens, int intermediate) {
    pdl_wait();
    pdl_launch();
    int unit = blockIdx.x * 256 + threadIdx.x;
    if (unit * 8 >= intermediate) return;
    for (int t = blockIdx.y; t < tokens; t += gridDim.y) {
        const elem *row = gate_up + (i64)t * 2 * intermediate + unit * 8;
        uint4 g16 = load16(row), u16_ = load16(row + intermediate);
        Vec8 g = unpack8(g16), u = unpack8(u16_);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float x = g.v[i];
            g.v[i] = x * __fdividef(1.0f, 1.0f + exp2_fast(-1.44269504f * x)) * u.v[i];
        }
        store16(out + (i64)t * intermediate + unit * 8, pack8(g));
    }
}
