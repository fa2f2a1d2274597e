// Mixture of experts: the two grouped products on Hopper (sm_90a), for many rows an expert; otherwise as moe_gemm.cu, which says
// what they compute and how a list's tiles are cut. Other architectures compile to nothing.
//
// A block stays on its multiprocessor and takes every gridDim.x-th pair of a tile (BM = 128 slots of one expert) and BN weight
// rows. One warpgroup copies both, BK = 64 columns at a time, with cp.async into STAGES stages of swizzled shared memory, and runs
// ahead into the next pair; two warpgroups of 64 rows each multiply. Results leave through a corner of each warp's own.
//
// Macros: KIND, TOP_K, INTERLEAVED, ACT as in moe_gemm.cu; BN (128, 192 or 256), STAGES (at least 3), GROUP_M.
// Launch: grid (min(multiprocessors, max_tiles * ceil(columns / OUT_N)), 1, 1) with OUT_N = BN / 2 for KIND 1, BN for KIND 2; block
// (384, 1, 1); dynamic shared memory 1024 + STAGES * (128 + BN) * 128 + 8 * 16 * 80 + 128. The list's tile_rows is 128.
// Parameters are those of moe_gemm.cu. Under programmatic dependent launch nothing but weights and biases must be older.

#include "common.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

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
#ifndef BN
#define BN 256
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef GROUP_M
#define GROUP_M 8
#endif
#define BM 128
#define BK 64
#define ROW 128 // bytes of a row of a stage
#define PASS 16 // rows that the copying warpgroup takes at a time
#define A_BYTES (BM * ROW)
#define STAGE_BYTES ((BM + BN) * ROW)
#define OUT_N (KIND == 1 ? BN / 2 : BN)
#define CHUNK 32 // output columns that a warp writes at a time
#define CHUNK_ROW (CHUNK * 2 + 16)
#define PENDING (STAGES - 2) // stages whose copies may be on their way: one more would wait for a stage that waits for it
static_assert(STAGES >= 3 && OUT_N % CHUNK == 0 && BN % 64 == 0, "whole chunks");

#define ACC4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
// d[64, BN] (+)= a[64, 16] * b[BN, 16] transposed, both in shared memory.
#if BN == 256
DEVICE void wgmma_tile(float (&d)[32][4], u64 a, u64 b, int accumulate) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %130, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32." WGMMA_TYPES
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, %128, %129, p, 1, 1, 0, 0;}"
                 : ACC4(0), ACC4(1), ACC4(2), ACC4(3), ACC4(4), ACC4(5), ACC4(6), ACC4(7), ACC4(8), ACC4(9), ACC4(10), ACC4(11), ACC4(12), ACC4(13), ACC4(14), ACC4(15), ACC4(16), ACC4(17), ACC4(18), ACC4(19), ACC4(20), ACC4(21), ACC4(22), ACC4(23), ACC4(24), ACC4(25), ACC4(26), ACC4(27), ACC4(28), ACC4(29), ACC4(30), ACC4(31)
                 : "l"(a), "l"(b), "r"(accumulate));
}
#elif BN == 192
DEVICE void wgmma_tile(float (&d)[24][4], u64 a, u64 b, int accumulate) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %98, 0; wgmma.mma_async.sync.aligned.m64n192k16.f32." WGMMA_TYPES
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, %96, %97, p, 1, 1, 0, 0;}"
                 : ACC4(0), ACC4(1), ACC4(2), ACC4(3), ACC4(4), ACC4(5), ACC4(6), ACC4(7), ACC4(8), ACC4(9), ACC4(10), ACC4(11), ACC4(12), ACC4(13), ACC4(14), ACC4(15), ACC4(16), ACC4(17), ACC4(18), ACC4(19), ACC4(20), ACC4(21), ACC4(22), ACC4(23)
                 : "l"(a), "l"(b), "r"(accumulate));
}
#else
DEVICE void wgmma_tile(float (&d)[16][4], u64 a, u64 b, int accumulate) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." WGMMA_TYPES
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 0;}"
                 : ACC4(0), ACC4(1), ACC4(2), ACC4(3), ACC4(4), ACC4(5), ACC4(6), ACC4(7), ACC4(8), ACC4(9), ACC4(10), ACC4(11), ACC4(12), ACC4(13), ACC4(14), ACC4(15)
                 : "l"(a), "l"(b), "r"(accumulate));
}
#endif
#undef ACC4

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

struct Item {
    int expert, first, rows, n0; // expert < 0: nothing to do
};
// GROUP_M tiles of the list share their weights while these are in L2; then come the next columns.
DEVICE Item item_of(int index, const int4 *tiles, int n_blocks, int max_tiles) {
    int group = index / (GROUP_M * n_blocks), in_group = index % (GROUP_M * n_blocks);
    int height = min(GROUP_M, max_tiles - group * GROUP_M);
    int4 tile = tiles[group * GROUP_M + in_group % height];
    Item item = {tile.x, tile.y, tile.z, in_group / height * OUT_N};
    return item;
}

KERNEL __launch_bounds__(384, 1)
#if KIND == 1
    moe_gemm1_wgmma(const elem *a,                  // [tokens, k]
                    const elem *__restrict__ w,     // [experts, 2 * n, k]
                    const elem *__restrict__ bias,  // [experts, 2 * n], or null
                    const int *slots,               // [tokens * TOP_K], sorted by expert
                    const int4 *tiles,              // [max_tiles]: expert (-1: none), first row, rows, 0
                    elem *__restrict__ out,         // [tokens * TOP_K, n], sorted by expert
                    int n, int k, int max_tiles, float alpha, float limit) {
#else
    moe_gemm2_wgmma(const elem *a,                  // [tokens * TOP_K, k], sorted by expert
                    const elem *__restrict__ w,     // [experts, n, k]
                    const elem *__restrict__ bias,  // [experts, n], or null
                    const int *slots,               // [tokens * TOP_K], sorted by expert
                    const float *router_weights,    // [tokens * TOP_K], by slot
                    const int4 *tiles,              // [max_tiles]: expert (-1: none), first row, rows, 0
                    elem *__restrict__ out,         // [tokens * TOP_K, n], by slot
                    int n, int k, int max_tiles) {
#endif
    extern __shared__ __align__(128) u8 shared[];
    u32 base = (shared_addr(shared) + 1023) & ~1023u;
    u32 corners = base + STAGES * STAGE_BYTES, bars = corners + 8 * 16 * CHUNK_ROW;
    auto full = [&](int stage) { return bars + stage * 8; };
    auto empty = [&](int stage) { return bars + (STAGES + stage) * 8; };
    int tid = threadIdx.x, group = tid / 128;
    if (tid == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full(i), 128);
            barrier_init(empty(i), 8);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    pdl_wait();
    pdl_launch();
    int n_blocks = (n + OUT_N - 1) / OUT_N, items = max_tiles * n_blocks, k_blocks = (k + BK - 1) / BK;

    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        // A thread copies unit `unit` of every 16th row: one swizzle, and one half (gate or up) of the weights, for all of them.
        int unit = tid % 8, row_in = tid / 8;
        u32 to_in = base + row_in * ROW + (unit ^ (row_in & 7)) * 16;
        int stage = 0, parity = 1, signal_stage = 0, waiting = 0;
        auto signal = [&]() {
            fence_async();
            barrier_arrive(full(signal_stage));
            signal_stage = signal_stage + 1 == STAGES ? 0 : signal_stage + 1;
            waiting--;
        };
        for (int index = blockIdx.x; index < items; index += gridDim.x) {
            Item item = item_of(index, tiles, n_blocks, max_tiles);
            if (item.expert < 0) continue;
            u32 a_row[BM / PASS]; // in units of 8 elements
#pragma unroll
            for (int j = 0; j < BM / PASS; j++) {
                int row = row_in + j * PASS;
                row = item.first + (row < item.rows ? row : 0);
                if (KIND == 1) row = slots[row] / TOP_K;
                a_row[j] = (u32)row * (u32)(k / 8);
            }
            // The first weight row of this thread, and how far each next one is; `columns_left` counts its output columns that exist.
#if KIND == 1
            int c = item.n0 + row_in % 8, half = row_in / 8;
            const elem *w_row = w + ((i64)item.expert * 2 * n + (INTERLEAVED ? 2 * c + half : c + half * n)) * k;
            i64 w_step = (i64)(INTERLEAVED ? 16 : 8) * k;
            constexpr int COLUMN_STEP = 8;
#else
            int c = item.n0 + row_in;
            const elem *w_row = w + ((i64)item.expert * n + c) * k;
            i64 w_step = (i64)16 * k;
            constexpr int COLUMN_STEP = 16;
#endif
            int columns_left = n - c;
            for (int block = 0; block < k_blocks; block++) {
                int column = block * BK + unit * 8;
                bool inside = column < k;
                column = inside ? column : 0;
                barrier_wait(empty(stage), parity);
                u32 to = to_in + stage * STAGE_BYTES;
#pragma unroll
                for (int j = 0; j < BM / PASS; j++) cp_async16(to + j * PASS * ROW, a + column + (u64)a_row[j] * 8, inside && row_in + j * PASS < item.rows);
                const elem *from = w_row + column;
#pragma unroll
                for (int j = 0; j < BN / PASS; j++) {
                    bool exists = j * COLUMN_STEP < columns_left;
                    cp_async16(to + A_BYTES + j * PASS * ROW, exists ? from : w, inside && exists);
                    from += w_step;
                }
                cp_async_commit();
                if (++waiting > PENDING) {
                    cp_async_wait<PENDING>();
                    signal();
                }
                if (++stage == STAGES) {
                    stage = 0;
                    parity ^= 1;
                }
            }
        }
        cp_async_wait<0>();
        while (waiting > 0) signal();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        int wg = group - 1, lane = tid & 31, warp = (tid / 32) & 3;
        u32 corner = corners + (wg * 4 + warp) * 16 * CHUNK_ROW;
        int stage = 0, parity = 0;
        float acc[BN / 8][4];
        auto release = [&](int which) {
            if (lane == 0) barrier_arrive(empty(which));
        };
        for (int index = blockIdx.x; index < items; index += gridDim.x) {
            Item item = item_of(index, tiles, n_blocks, max_tiles);
            if (item.expert < 0) continue;
            int before = 0;
#pragma unroll 1
            for (int block = 0; block < k_blocks; block++) {
                barrier_wait(full(stage), parity);
                u64 a_desc = descriptor(base + stage * STAGE_BYTES + wg * 64 * ROW, 16), b_desc = descriptor(base + stage * STAGE_BYTES + A_BYTES, 16);
                wgmma_fence();
#pragma unroll
                for (int s = 0; s < BK / 16; s++) wgmma_tile(acc, a_desc + s * 2, b_desc + s * 2, block > 0 || s > 0); // 16 columns are 32 bytes
                wgmma_commit();
                if (block > 0) {
                    wgmma_wait<1>();
                    release(before);
                }
                before = stage;
                if (++stage == STAGES) {
                    stage = 0;
                    parity ^= 1;
                }
            }
            wgmma_wait<0>();
            hold(acc);
            release(before);

            int row_w = wg * 64 + warp * 16; // this warp's rows of the tile
            if (row_w >= item.rows) continue;
#if KIND == 2
            float factor[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int row = row_w + lane / 4 + 8 * h;
                factor[h] = row < item.rows ? router_weights[slots[item.first + row]] : 0.0f;
            }
            const elem *own = bias ? bias + (i64)item.expert * n : bias;
#else
            const elem *own = bias ? bias + (i64)item.expert * 2 * n : bias;
#endif
            // Where this lane's two rows of a chunk go: lane / 4 and + 8.
            elem *to[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int row = row_w + lane / 4 + 8 * h;
                i64 at = row < item.rows ? item.first + row : -1;
                if (KIND == 2 && at >= 0) at = slots[at];
                to[h] = at < 0 ? (elem *)0 : out + at * n + item.n0 + lane % 4 * 8;
            }
#pragma unroll
            for (int chunk = 0; chunk < OUT_N / CHUNK; chunk++) {
                __syncwarp();
#pragma unroll
                for (int i = 0; i < CHUNK / 8; i++) {
                    int c = i * 8 + lane % 4 * 2, column = min(item.n0 + chunk * CHUNK + c, n - 2);
#if KIND == 1
                    int t = chunk * (CHUNK / 8) + i;
                    float add[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}}; // gate, up
                    if (own)
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            add[0][e] = to_float(own[INTERLEAVED ? 2 * (column + e) : column + e]);
                            add[1][e] = to_float(own[INTERLEAVED ? 2 * (column + e) + 1 : n + column + e]);
                        }
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        float x = activate(acc[2 * t][2 * h] + add[0][0], acc[2 * t + 1][2 * h] + add[1][0], alpha, limit);
                        float y = activate(acc[2 * t][2 * h + 1] + add[0][1], acc[2 * t + 1][2 * h + 1] + add[1][1], alpha, limit);
                        store_shared4(corner + (lane / 4 + 8 * h) * CHUNK_ROW + c * 2, pack2(x, y));
                    }
#else
                    int t = chunk * (CHUNK / 8) + i;
                    float2 add = make_float2(0.0f, 0.0f);
                    if (own) add = unpack2(*(const u32 *)(own + column));
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        store_shared4(corner + (lane / 4 + 8 * h) * CHUNK_ROW + c * 2, pack2((acc[t][2 * h] + add.x) * factor[h], (acc[t][2 * h + 1] + add.y) * factor[h]));
#endif
                }
                __syncwarp();
#pragma unroll
                for (int h = 0; h < 2; h++)
                    if (to[h] && item.n0 + chunk * CHUNK + lane % 4 * 8 < n)
                        store16(to[h] + chunk * CHUNK, load_shared16(corner + (lane / 4 + 8 * h) * CHUNK_ROW + lane % 4 * 16));
            }
        }
    }
}

#endif
