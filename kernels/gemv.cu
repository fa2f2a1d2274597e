// Matrix products of few rows, out[T, N] = x[T, K] · W[N, K]ᵀ (+ bias) with T <= 16, at the speed at which W can be read;
// and the bias of larger products.
//
// A block owns TILE_N = 8 * N_TILES rows of W; its warps share the columns and their sums are added in fixed order.
// W goes from global memory straight into the B fragments of mma.sync (a 16-row product costs what a 1-row one does):
// a thread takes 8 consecutive columns of a row where the fragment's layout would give it 2 + 2 of two fragments, and
// takes the same columns of x, so that the sum over columns is merely done in another order.
//
// Macros: N_TILES, UNROLL (loads of 32 columns in flight a row), WARPS, MIN_BLOCKS (blocks a multiprocessor), all with defaults;
// HIGH_ROWS (1 if T > 8; default 0). Which is best depends on N, K and the device: time the candidates
//   T <= 8: (2, 4, 8, 3) (1, 4, 8, 4) (2, 4, 4, 6) (2, 2, 8, 4) (1, 2, 8, 6);  T > 8: (2, 4, 8, 2) (2, 2, 8, 4)
// in the order of the macros. They add in different orders, so the choice is part of a result's bits.
// Launch of gemv: grid (ceil(N / TILE_N), 1, 1), block (32 * WARPS, 1, 1), no dynamic shared memory. K is a multiple of 8.
// Launch of bias_add: grid (ceil(N / 8 / 128), min(T, 65535), 1), block (128, 1, 1). N is a multiple of 8.
// Under programmatic dependent launch, W and the bias must be older than the kernel before this one.

#include "common.cuh"

#ifndef N_TILES
#define N_TILES 2
#endif
#ifndef UNROLL
#define UNROLL 4
#endif
#ifndef HIGH_ROWS
#define HIGH_ROWS 0
#endif
#ifndef WARPS
#define WARPS 8
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS (HIGH_ROWS ? 2 : 3)
#endif
#define TILE_N (8 * N_TILES)
#define STEP (32 * UNROLL)
#define ROW_HALVES (1 + HIGH_ROWS)

KERNEL __launch_bounds__(32 * WARPS, MIN_BLOCKS) gemv(const elem *__restrict__ x,    // [T, K]
                                          const elem *__restrict__ w,    // [N, K]
                                          const elem *__restrict__ bias, // [N], or null
                                          elem *__restrict__ out,        // [T, N]
                                          int rows, int n, int k) {
    __shared__ float parts[WARPS][N_TILES][8 * ROW_HALVES][8 + 1];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int n0 = blockIdx.x * TILE_N;
    int column = warp * STEP + lane % 4 * 8; // of this thread's first load

    const elem *w_row[N_TILES];
#pragma unroll
    for (int t = 0; t < N_TILES; t++) w_row[t] = w + (i64)min(n0 + t * 8 + lane / 4, n - 1) * k + column;
    const elem *x_row[ROW_HALVES];
    bool x_valid[ROW_HALVES];
#pragma unroll
    for (int h = 0; h < ROW_HALVES; h++) {
        x_valid[h] = lane / 4 + 8 * h < rows;
        x_row[h] = x + (i64)(x_valid[h] ? lane / 4 + 8 * h : 0) * k + column;
    }

    float acc[N_TILES][4];
#pragma unroll
    for (int t = 0; t < N_TILES; t++) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0.0f;

    // Weights are no kernel's output: the first ones are on their way before the wait.
    uint4 b[UNROLL][N_TILES];
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
#pragma unroll
        for (int t = 0; t < N_TILES; t++) b[u][t] = 32 * u < k - column ? load16_stream(w_row[t] + 32 * u) : make_uint4(0, 0, 0, 0);
    pdl_wait();
    pdl_launch();
    // `rest` columns remain from the warp's first one of the step on, `left` from this thread's.
#pragma unroll 1
    for (int rest = k - warp * STEP; rest > 0; rest -= WARPS * STEP) {
        int left = rest - lane % 4 * 8;
#pragma unroll
        for (int t = 0; t < N_TILES; t++) w_row[t] += WARPS * STEP;
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            uint4 a[ROW_HALVES];
#pragma unroll
            for (int h = 0; h < ROW_HALVES; h++) a[h] = x_valid[h] && 32 * u < left ? load16(x_row[h] + 32 * u) : make_uint4(0, 0, 0, 0);
            u32 low[4] = {a[0].x, HIGH_ROWS ? a[ROW_HALVES - 1].x : 0, a[0].y, HIGH_ROWS ? a[ROW_HALVES - 1].y : 0};
            u32 high[4] = {a[0].z, HIGH_ROWS ? a[ROW_HALVES - 1].z : 0, a[0].w, HIGH_ROWS ? a[ROW_HALVES - 1].w : 0};
#pragma unroll
            for (int t = 0; t < N_TILES; t++) {
                mma16816(acc[t], low, b[u][t].x, b[u][t].y);
                mma16816(acc[t], high, b[u][t].z, b[u][t].w);
                // The slot is free: the load that takes its place is of the next step.
                b[u][t] = 32 * u + WARPS * STEP < left ? load16_stream(w_row[t] + 32 * u) : make_uint4(0, 0, 0, 0);
            }
        }
#pragma unroll
        for (int h = 0; h < ROW_HALVES; h++) x_row[h] += WARPS * STEP;
    }

#pragma unroll
    for (int t = 0; t < N_TILES; t++)
#pragma unroll
        for (int e = 0; e < 2 * ROW_HALVES; e++) parts[warp][t][lane / 4 + e / 2 * 8][lane % 4 * 2 + (e & 1)] = acc[t][e];
    __syncthreads();
    for (int i = threadIdx.x; i < rows * TILE_N; i += 32 * WARPS) {
        int row = i / TILE_N, c = i % TILE_N;
        if (n0 + c >= n) continue;
        float sum = 0.0f;
#pragma unroll
        for (int v = 0; v < WARPS; v++) sum += parts[v][c / 8][row][c % 8];
        if (bias) sum += to_float(bias[n0 + c]);
        out[(i64)row * n + n0 + c] = from_float(sum);
    }
}

KERNEL __launch_bounds__(128) bias_add(elem *__restrict__ out,        // [T, N], in and out
                                       const elem *__restrict__ bias, // [N]
                                       int rows, int n) {
    int column = (blockIdx.x * 128 + threadIdx.x) * 8;
    pdl_wait();
    pdl_launch();
    if (column >= n) return;
    Vec8 b = unpack8(load16(bias + column));
    for (int row = blockIdx.y; row < rows; row += gridDim.y) {
        elem *at = out + (i64)row * n + column;
        Vec8 v = unpack8(load16(at));
#pragma unroll
        for (int i = 0; i < 8; i++) v.v[i] += b.v[i];
        store16(at, pack8(v));
    }
}
