// Mixture of experts: the two grouped products, on any architecture.
//
// moe_gemm1  out[i] = activation(x[token of slot i] · W13[e]ᵀ + b13[e])           slots in the order of moe_align
// moe_gemm2  out[slot i] = (a[i] · W2[e]ᵀ + b2[e]) * weight of slot i              sums in float32, rounded once
//
// A block serves one tile of the list (up to BM slots of one expert) and BN rows of the expert's weights, BK columns at a
// time, through STAGES stages of shared memory. moe_gemm1 takes its weight rows as 8 of the gate, the 8 of the same columns of
// up, and so on: a thread then holds both in neighbouring fragments, and writes BN / 2 columns.
//
// Macros: KIND (1 or 2), TOP_K (for KIND 1), INTERLEAVED (KIND 1: row 2i is gate i, row 2i + 1 up i; else all gates first),
// ACT (KIND 1: 0 silu(gate) * up; 1 with gate <= limit, |up| <= limit: (up + 1) * gate * sigmoid(alpha * gate)); and the shape:
// BM, BN, BK, STAGES, WARPS_M, WARPS_N, MIN_BLOCKS, GROUP_M. A warp has BM / WARPS_M rows, a multiple of 16, and BN / WARPS_N
// weight rows, a multiple of 16.
// Launch: grid (max_tiles * ceil(columns / OUT_N), 1, 1) with OUT_N = BN / 2 for KIND 1, BN for KIND 2; block
// (32 * WARPS_M * WARPS_N, 1, 1); dynamic shared memory STAGES * (BM + BN) * BK * 2. Columns and inner size are multiples of 8.
// BM is the tile_rows of the list. Blocks past the last tile leave at once.
//
// Under programmatic dependent launch, weights and biases must be older than the kernel before; for moe_gemm2 slots, router
// weights and tiles too (moe_gemm1 stands between): it fetches its first weights before it waits.

#include "common.cuh"

#ifndef KIND
#define KIND 1
#endif
#ifndef TOP_K
#define TOP_K 2
#endif
#ifndef INTERLEAVED
#define INTERLEAVED 0
#endif
#ifndef ACT
#define ACT 0
#endif
#ifndef BM
#define BM 16
#endif
#ifndef BN
#define BN (BM <= 32 ? 64 : 128)
#endif
#ifndef BK
#define BK (BM <= 32 ? 128 : 64)
#endif
#ifndef STAGES
#define STAGES (BM == 16 ? 4 : BM <= 32 ? 3 : BM <= 64 ? 4 : 3)
#endif
#ifndef WARPS_M
#define WARPS_M (BM <= 32 ? 1 : 2)
#endif
#ifndef WARPS_N
#define WARPS_N (BM <= 32 ? 4 : 2)
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 2
#endif
#ifndef GROUP_M
#define GROUP_M 8
#endif

#define THREADS (32 * WARPS_M * WARPS_N)
#define WM (BM / WARPS_M)
#define WN (BN / WARPS_N)
#define M_TILES (WM / 16)
#define N_TILES (WN / 8)
#define K_UNITS (BK / 8)
#define K_STEPS (BK / 16)
#define ROW (BK * 2) // bytes of a row of a stage
#define PASS (THREADS / K_UNITS) // rows that the block copies at a time
#define A_PASSES (BM / PASS)
#define B_PASSES (BN / PASS)
#define A_BYTES (BM * ROW)
#define STAGE_BYTES ((BM + BN) * ROW)
#define OUT_N (KIND == 1 ? BN / 2 : BN)
#define OUT_UNITS (OUT_N / 8)
#define OUT_ROW (OUT_N * 2 + 16) // bytes; the odd unit keeps the rows of a store off each other's banks

#if BK % 64 != 0
#error "BK must be a multiple of 64: rows are swizzled 128 bytes at a time"
#endif
static_assert(WM % 16 == 0 && WN % 16 == 0 && BM % WARPS_M == 0 && BN % WARPS_N == 0, "whole fragments");
static_assert(THREADS % K_UNITS == 0 && PASS % 8 == 0 && BM % PASS == 0 && BN % PASS == 0, "whole passes, one swizzle a thread");
static_assert(BM * OUT_ROW <= STAGES * STAGE_BYTES, "the result passes through the stages");
static_assert(STAGES >= 2, "one stage is read while another is filled");

// Past L1, which may hold what an earlier list had at this place.
DEVICE int4 load_tile(const int4 *tile) {
    int4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(tile) : "memory");
    return v;
}

#if KIND == 1
DEVICE float activate(float gate, float up, float alpha, float limit) {
#if ACT == 1
    // Comparisons, not fminf: a NaN must come through.
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return (up + 1.0f) * gate * __fdividef(1.0f, 1.0f + exp2_fast(-1.44269504f * alpha * gate));
#else
    return gate * __fdividef(1.0f, 1.0f + exp2_fast(-1.44269504f * gate)) * up;
#endif
}
#endif

// Row of an expert's weights behind row r of a stage, given the first output column; `valid` if that column exists.
DEVICE u32 weight_row(int r, int n0, int n, bool &valid) {
#if KIND == 1
    int c = n0 + r / 16 * 8 + r % 8, half = r / 8 & 1;
    valid = c < n;
    c = valid ? c : 0;
    return INTERLEAVED ? 2 * c + half : c + half * n;
#else
    valid = n0 + r < n;
    return valid ? n0 + r : 0;
#endif
}

KERNEL __launch_bounds__(THREADS, MIN_BLOCKS)
#if KIND == 1
    moe_gemm1(const elem *__restrict__ a,     // [tokens, k]
              const elem *__restrict__ w,     // [experts, 2 * n, k]
              const elem *__restrict__ bias,  // [experts, 2 * n], or null
              const int *__restrict__ slots,  // [tokens * TOP_K], sorted by expert
              const int4 *__restrict__ tiles, // [max_tiles]: expert (-1: none), first row, rows, 0
              elem *__restrict__ out,         // [tokens * TOP_K, n], sorted by expert
              int n, int k, int max_tiles, float alpha, float limit) {
#else
    moe_gemm2(const elem *__restrict__ a,               // [tokens * TOP_K, k], sorted by expert
              const elem *__restrict__ w,               // [experts, n, k]
              const elem *__restrict__ bias,            // [experts, n], or null
              const int *__restrict__ slots,            // [tokens * TOP_K], sorted by expert
              const float *__restrict__ router_weights, // [tokens * TOP_K], by slot
              const int4 *__restrict__ tiles,           // [max_tiles]: expert (-1: none), first row, rows, 0
              elem *__restrict__ out,                   // [tokens * TOP_K, n], by slot
              int n, int k, int max_tiles) {
#endif
    extern __shared__ __align__(128) u8 shared[];
    int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    u32 base = shared_addr(shared);

    // GROUP_M tiles of the list share their weights while these are in L2; then come the next columns.
    int n_blocks = (n + OUT_N - 1) / OUT_N;
    int group = blockIdx.x / (GROUP_M * n_blocks), in_group = blockIdx.x % (GROUP_M * n_blocks);
    int height = min(GROUP_M, max_tiles - group * GROUP_M);
    int n0 = in_group / height * OUT_N;
    const int4 *where = tiles + group * GROUP_M + in_group % height;
#if KIND == 1
    pdl_wait();
    pdl_launch();
#endif
    int4 tile = load_tile(where);
    int expert = tile.x, first = tile.y, rows = tile.z;
    if (expert < 0) {
        pdl_wait();
        return;
    }

    // A thread copies unit `unit` of every PASS-th row; PASS is a multiple of 8, so the swizzle is the same for all of them.
    int unit = tid % K_UNITS, row_in = tid / K_UNITS;
    u32 to_in = row_in * ROW + (unit ^ (row_in & 7)) * 16;
    int k_blocks = (k + BK - 1) / BK;
    w += (i64)expert * (KIND == 1 ? 2 * n : n) * k;
    auto fetch_b = [&](int block, int stage) {
        int column = block * BK + unit * 8;
        bool inside = column < k;
        const elem *from = w + (inside ? column : 0);
        u32 to = base + stage * STAGE_BYTES + A_BYTES + to_in;
#pragma unroll
        for (int j = 0; j < B_PASSES; j++) {
            bool valid;
            u32 row = weight_row(row_in + j * PASS, n0, n, valid);
            cp_async16(to + j * PASS * ROW, from + (u64)row * (u32)k, inside && valid);
        }
    };
    u32 a_row[A_PASSES]; // in units of 8 elements
    auto fetch_a = [&](int block, int stage) {
        int column = block * BK + unit * 8;
        bool inside = column < k;
        const elem *from = a + (inside ? column : 0);
        u32 to = base + stage * STAGE_BYTES + to_in;
#pragma unroll
        for (int j = 0; j < A_PASSES; j++) cp_async16(to + j * PASS * ROW, from + (u64)a_row[j] * 8, inside && row_in + j * PASS < rows);
    };
    auto find_rows = [&]() {
#pragma unroll
        for (int j = 0; j < A_PASSES; j++) {
            int row = row_in + j * PASS;
            row = first + (row < rows ? row : 0);
            if (KIND == 1) row = slots[row] / TOP_K;
            a_row[j] = (u32)row * (u32)(k / 8);
        }
    };

#if KIND == 1
    find_rows();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < k_blocks) {
            fetch_a(s, s);
            fetch_b(s, s);
        }
        cp_async_commit();
    }
#else
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++)
        if (s < k_blocks) fetch_b(s, s); // in the first group
    pdl_wait();
    pdl_launch();
    find_rows();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < k_blocks) fetch_a(s, s);
        cp_async_commit();
    }
#endif

    int row_w = warp % WARPS_M * WM, col_w = warp / WARPS_M * WN; // this warp's part of the tile
    bool busy = row_w < rows;
    float acc[M_TILES][N_TILES][4];
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int i = 0; i < N_TILES; i++) acc[m][i][0] = acc[m][i][1] = acc[m][i][2] = acc[m][i][3] = 0.0f;

    // Rows of one fragment differ by multiples of 8 only, so one swizzle serves all of a lane's addresses.
    u32 a_in = (row_w + lane % 16) * ROW, b_in = A_BYTES + (col_w + lane % 8 + lane / 16 * 8) * ROW;
    u32 a_unit = lane / 16, b_unit = lane / 8 & 1, swizzle = lane & 7;
    u32 fa[2][M_TILES][4], fb[2][N_TILES / 2][4];
    int stage = 0, next_stage = STAGES - 1;
#pragma unroll 1
    for (int block = 0; block < k_blocks; block++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (block + STAGES - 1 < k_blocks) {
            fetch_a(block + STAGES - 1, next_stage);
            fetch_b(block + STAGES - 1, next_stage);
        }
        cp_async_commit();
        if (busy) {
            u32 from = base + stage * STAGE_BYTES;
            auto load = [&](int buffer, int step) {
#pragma unroll
                for (int m = 0; m < M_TILES; m++) ldmatrix4(fa[buffer][m], from + a_in + m * 16 * ROW + ((2 * step + a_unit) ^ swizzle) * 16);
#pragma unroll
                for (int i = 0; i < N_TILES / 2; i++) ldmatrix4(fb[buffer][i], from + b_in + i * 16 * ROW + ((2 * step + b_unit) ^ swizzle) * 16);
            };
            load(0, 0);
#pragma unroll
            for (int step = 0; step < K_STEPS; step++) {
                if (step + 1 < K_STEPS) load((step + 1) & 1, step + 1);
#pragma unroll
                for (int m = 0; m < M_TILES; m++)
#pragma unroll
                    for (int i = 0; i < N_TILES / 2; i++) {
                        mma16816(acc[m][2 * i], fa[step & 1][m], fb[step & 1][i][0], fb[step & 1][i][1]);
                        mma16816(acc[m][2 * i + 1], fa[step & 1][m], fb[step & 1][i][2], fb[step & 1][i][3]);
                    }
            }
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        next_stage = next_stage + 1 == STAGES ? 0 : next_stage + 1;
    }

    // Through shared memory, to be written 16 bytes at a time.
    cp_async_wait<0>();
    __syncthreads();
    if (busy) {
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int row = row_w + m * 16 + lane / 4 + 8 * h;
                u32 to = base + row * OUT_ROW;
#if KIND == 1
#pragma unroll
                for (int i = 0; i < N_TILES / 2; i++) {
                    int c = col_w / 2 + i * 8 + lane % 4 * 2, column = min(n0 + c, n - 2);
                    float gate[2], up[2];
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        gate[e] = acc[m][2 * i][2 * h + e];
                        up[e] = acc[m][2 * i + 1][2 * h + e];
                        if (bias) {
                            const elem *own = bias + (i64)expert * 2 * n;
                            gate[e] += to_float(own[INTERLEAVED ? 2 * (column + e) : column + e]);
                            up[e] += to_float(own[INTERLEAVED ? 2 * (column + e) + 1 : n + column + e]);
                        }
                    }
                    store_shared4(to + c * 2, pack2(activate(gate[0], up[0], alpha, limit), activate(gate[1], up[1], alpha, limit)));
                }
#else
                float factor = row < rows ? router_weights[slots[first + row]] : 0.0f;
#pragma unroll
                for (int i = 0; i < N_TILES; i++) {
                    int c = col_w + i * 8 + lane % 4 * 2, column = min(n0 + c, n - 2);
                    float2 add = make_float2(0.0f, 0.0f);
                    if (bias) add = unpack2(*(const u32 *)(bias + (i64)expert * n + column));
                    store_shared4(to + c * 2, pack2((acc[m][i][2 * h] + add.x) * factor, (acc[m][i][2 * h + 1] + add.y) * factor));
                }
#endif
            }
    }
    __syncthreads();
    for (int i = tid; i < rows * OUT_UNITS; i += THREADS) {
        int row = i / OUT_UNITS, u = i % OUT_UNITS;
        if (n0 + u * 8 >= n) continue;
        i64 to = KIND == 1 ? first + row : slots[first + row];
        store16(out + to * n + n0 + u * 8, load_shared16(base + row * OUT_ROW + u * 16));
    }
}
