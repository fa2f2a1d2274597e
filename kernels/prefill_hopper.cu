// Paged attention for prefill on Hopper (sm_90a): the same product as prefill.cu's, on the asynchronous tensor cores.
//
// A block stays on its multiprocessor and works through the tiles of BM = 128 rows that the host gave it (row = query *
// GROUP + head in the group). One warpgroup gathers K and V of BN = 128 positions through the block table with cp.async into two
// stages of swizzled shared memory, K of a tile before V of the one before it; two warpgroups of 64 rows each multiply. The
// product with V of one tile runs under the softmax of the next, as in FlashAttention-3 (Shah et al. 2024, section 3.2); its
// second device, turns at the tensor cores, made this kernel 2 % slower.
//
// Macros: HEAD_DIM (64 or 128), GROUP, BLOCK_SIZE (16, 32 or 64); SINKS (default 0): 1 gives one more parameter at the end, as in
// decode.cu. Other architectures compile to nothing.
// Launch: grid (blocks of the plan, 1, 1), block (384, 1, 1), dynamic shared memory
//   2048 + (2 * BM + 4 * BN) * HEAD_DIM * 2
// items[i] = {request, kv_head, m_tile, 0}; block_items[b] .. block_items[b + 1] are those of block b.

#include "common.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

#if HEAD_DIM != 64 && HEAD_DIM != 128
#error "HEAD_DIM must be 64 or 128"
#endif
#ifndef SINKS
#define SINKS 0
#endif
#define BM 128
#define BN 128
#define HALVES (HEAD_DIM / 64) // a tile is stored as slabs of 64 columns, 128 bytes a row, swizzled
#define Q_BYTES (BM * HEAD_DIM * 2)
#define KV_BYTES (BN * HEAD_DIM * 2)
#define S_TILES (BN / 8)
#define O_TILES (HEAD_DIM / 8)

// ---- wgmma -------------------------------------------------------------------------------------------------------

#define ACC4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
// d[64, 128] (+)= a[64, 16] * b[128, 16] transposed, both in shared memory.
DEVICE void wgmma_scores(float (&d)[16][4], u64 a, u64 b, int accumulate) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." WGMMA_TYPES
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 0;}"
                 : ACC4(0), ACC4(1), ACC4(2), ACC4(3), ACC4(4), ACC4(5), ACC4(6), ACC4(7), ACC4(8), ACC4(9), ACC4(10), ACC4(11), ACC4(12), ACC4(13), ACC4(14), ACC4(15)
                 : "l"(a), "l"(b), "r"(accumulate));
}
// d[64, HEAD_DIM] += a[64, 16] * b[16, HEAD_DIM], a in registers (the layout of mma.sync's), b's rows in shared memory.
#if HEAD_DIM == 128
DEVICE void wgmma_values(float (&d)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." WGMMA_TYPES " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : ACC4(0), ACC4(1), ACC4(2), ACC4(3), ACC4(4), ACC4(5), ACC4(6), ACC4(7), ACC4(8), ACC4(9), ACC4(10), ACC4(11), ACC4(12), ACC4(13), ACC4(14), ACC4(15)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#else
DEVICE void wgmma_values(float (&d)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." WGMMA_TYPES " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : ACC4(0), ACC4(1), ACC4(2), ACC4(3), ACC4(4), ACC4(5), ACC4(6), ACC4(7)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#endif
#undef ACC4

// ---- the kernel --------------------------------------------------------------------------------------------------

struct Tile {
    int request, kv_head, row0, rows, q0, offset; // offset: position of the request's first query
    int least, most;                              // positions of the first and last row
    int begin, end, first, last;                  // KV positions attended to, and the BN-wide tiles that hold them
};
DEVICE Tile tile_of(int4 item, const int *query_start, const int *kv_lens, int window) {
    Tile t;
    t.request = item.x;
    t.kv_head = item.y;
    t.row0 = item.z * BM;
    t.q0 = query_start[t.request];
    int query_len = query_start[t.request + 1] - t.q0;
    t.rows = min(BM, query_len * GROUP - t.row0);
    t.offset = kv_lens[t.request] - query_len;
    t.least = t.offset + t.row0 / GROUP;
    t.most = t.offset + (t.row0 + t.rows - 1) / GROUP;
    t.begin = window > 0 ? max(0, t.least - window + 1) : 0;
    t.end = t.most + 1;
    t.first = t.begin / BN;
    t.last = (t.end - 1) / BN;
    return t;
}

KERNEL __launch_bounds__(384, 1)
    prefill_wgmma(const elem *__restrict__ qkv,         // [tokens, q_stride], query heads first
                  const elem *__restrict__ kv,          // [blocks, 2, BLOCK_SIZE, kv_heads, HEAD_DIM]
                  const int *__restrict__ block_tables, // [requests, table_stride]
                  const int *__restrict__ query_start,  // [requests + 1]
                  const int *__restrict__ kv_lens,      // [requests]
                  const int4 *__restrict__ items,       // [items]
                  const int *__restrict__ block_items,  // [grid + 1]
                  elem *__restrict__ out,               // [tokens, kv_heads * GROUP * HEAD_DIM]
                  int q_stride, int table_stride, int kv_heads, int window, float scale
#if SINKS
                  , const elem *__restrict__ sinks      // [kv_heads * GROUP], or null
#endif
    ) {
    extern __shared__ __align__(1024) u8 shared[];
    u32 base = (shared_addr(shared) + 1023) & ~1023u;
    u32 q_tile = base, k_tiles = q_tile + Q_BYTES, v_tiles = k_tiles + 2 * KV_BYTES, o_tile = v_tiles + 2 * KV_BYTES;
    u32 bars = o_tile + Q_BYTES;
    // Per stage: K full, V full, K empty, V empty; then: queries empty.
    auto full = [&](int stage, int v) { return bars + (stage * 2 + v) * 8; };
    auto empty = [&](int stage, int v) { return bars + 32 + (stage * 2 + v) * 8; };
    u32 q_empty = bars + 64;
    int tid = threadIdx.x, group = tid / 128;
    if (tid == 0) {
        for (int i = 0; i < 4; i++) {
            barrier_init(bars + i * 8, 128);
            barrier_init(bars + 32 + i * 8, 8);
        }
        barrier_init(q_empty, 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    int first_item = block_items[blockIdx.x], last_item = block_items[blockIdx.x + 1];
    pdl_wait();
    pdl_launch();

    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        // A thread copies unit `unit` of every COPY_ROWS-th row.
        constexpr int COPY_ROWS = 128 / UNITS;
        int row_in = tid / UNITS, unit = tid % UNITS;
        i64 token_stride = (i64)kv_heads * HEAD_DIM;
        // COPY_ROWS is a multiple of 8, so a row's swizzle is its first one's.
        u32 to_in = (unit / 8) * (BN * 128) + row_in * 128 + ((unit % 8) ^ (row_in % 8)) * 16;
        static_assert(BM == BN && COPY_ROWS % 8 == 0, "one offset serves queries, keys and values");
        static_assert(BLOCK_SIZE % COPY_ROWS == 0, "a pass of the copy stays in a block");
        // Copies on their way, oldest first: the barriers to arrive at once they are there.
        u32 waiting[3] = {};
        int count = 0, tiles = 0;
        auto signal = [&]() {
            fence_async();
            barrier_arrive(waiting[0]);
            waiting[0] = waiting[1];
            waiting[1] = waiting[2];
            count--;
        };
        auto flush = [&]() {
            if (count == 2) {
                cp_async_wait<1>();
                signal();
            }
            if (count == 1) {
                cp_async_wait<0>();
                signal();
            }
        };
        for (int item = first_item; item < last_item; item++) {
            Tile t = tile_of(items[item], query_start, kv_lens, window);
            const int *table = block_tables + (i64)t.request * table_stride;
            const elem *head = kv + (i64)t.kv_head * HEAD_DIM + row_in * token_stride + unit * 8;
            // One lane a block of the tile.
            auto look_up = [&](int tile) {
                int token = tile * BN + tid % (BN / BLOCK_SIZE) * BLOCK_SIZE;
                return token < t.end ? table[token / BLOCK_SIZE] : 0;
            };
            int pages = look_up(t.first);
            barrier_wait(q_empty, ((item - first_item) & 1) ^ 1);
#pragma unroll 4
            for (int j = 0; j < BM / COPY_ROWS; j++) {
                int row = j * COPY_ROWS + row_in, at = t.row0 + (row < t.rows ? row : 0);
                const elem *from = qkv + (i64)(t.q0 + at / GROUP) * q_stride + (t.kv_head * GROUP + at % GROUP) * HEAD_DIM + unit * 8;
                cp_async16(q_tile + to_in + j * COPY_ROWS * 128, from, row < t.rows); // in the first K's group
            }
            // The v = 0 (K) or 1 (V) of the item's `n`-th tile.
            auto copy = [&](int n, int v, int blocks) {
                int stage = (tiles + n) & 1, parity = ((tiles + n) / 2 & 1) ^ 1, first = (t.first + n) * BN + row_in - t.begin;
                u32 length = t.end - t.begin;
                // Before this warp sleeps it passes on everything that it has copied.
                if (!__all_sync(0xffffffffu, barrier_test(empty(stage, v), parity))) {
                    flush();
                    barrier_wait(empty(stage, v), parity);
                }
                u32 to = (v ? v_tiles : k_tiles) + stage * KV_BYTES + to_in;
#pragma unroll
                for (int b = 0; b < BN / BLOCK_SIZE; b++) {
                    i64 block = __shfl_sync(0xffffffffu, blocks, b);
                    const elem *from = head + (block * 2 + v) * (BLOCK_SIZE * token_stride);
#pragma unroll
                    for (int r = 0; r < BLOCK_SIZE; r += COPY_ROWS) {
                        int row = b * BLOCK_SIZE + r;
                        cp_async16(to + row * 128, from, (u32)(first + row) < length);
                        from += COPY_ROWS * token_stride;
                    }
                }
                cp_async_commit();
                if (count == 0) waiting[0] = full(stage, v);
                else if (count == 1) waiting[1] = full(stage, v);
                else waiting[2] = full(stage, v);
                if (++count == 3) {
                    cp_async_wait<2>();
                    signal();
                }
            };
            // In the order of use: K of a tile before V of the one before it.
            int length = t.last - t.first + 1, before = 0;
            for (int n = 0; n < length; n++) {
                int next = n + 1 < length ? look_up(t.first + n + 1) : 0;
                copy(n, 0, pages);
                if (n > 0) copy(n - 1, 1, before);
                before = pages;
                pages = next;
            }
            copy(length - 1, 1, before);
            tiles += length;
            // The consumers need the last tiles before they give the queries' place back.
            flush();
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        int wg = group - 1, lane = tid & 31, warp = (tid / 32) & 3;
        float scale_log2 = scale * 1.44269504f;
        int count = 0; // tiles so far
        u64 q_desc = descriptor(q_tile + wg * 64 * 128, 16);
        float s[S_TILES][4], o[O_TILES][4], top[2], sum[2], factor[2];
        u32 p[S_TILES / 2][4];

        auto scores = [&](int stage) {
            u64 k_desc = descriptor(k_tiles + stage * KV_BYTES, 16);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < HEAD_DIM / 16; k++) // 16 columns are 32 bytes
                wgmma_scores(s, q_desc + ((k / 4) * (BM * 128) + (k % 4) * 32 >> 4), k_desc + ((k / 4) * (BN * 128) + (k % 4) * 32 >> 4), k > 0);
            wgmma_commit();
        };
        auto values = [&](int stage) {
            u64 v_desc = descriptor(v_tiles + stage * KV_BYTES, BN * 128);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < BN / 16; k++) wgmma_values(o, p[k], v_desc + (k * 16 * 128 >> 4));
            wgmma_commit();
        };
        auto release = [&](u32 bar) {
            if (lane == 0) barrier_arrive(bar);
        };

        for (int item = first_item; item < last_item; item++) {
            Tile t = tile_of(items[item], query_start, kv_lens, window);
            top[0] = top[1] = NEG_INF;
            sum[0] = sum[1] = 0.0f;
#pragma unroll
            for (int d = 0; d < O_TILES; d++) o[d][0] = o[d][1] = o[d][2] = o[d][3] = 0.0f;

            // Scores to probabilities (still float32, in s), and the factor that earlier sums get.
            auto softmax = [&](int tile) {
                int token = tile * BN;
                if (token + BN - 1 > t.least || (window > 0 && token <= t.most - window)) {
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        int own = t.offset + (t.row0 + min(wg * 64 + warp * 16 + lane / 4 + 8 * h, t.rows - 1)) / GROUP - token - lane % 4 * 2;
                        int start = window > 0 ? own - window : -BN;
#pragma unroll
                        for (int n = 0; n < S_TILES; n++) {
                            if (n * 8 > own || n * 8 <= start) s[n][2 * h] = NEG_INF;
                            if (n * 8 + 1 > own || n * 8 + 1 <= start) s[n][2 * h + 1] = NEG_INF;
                        }
                    }
                }
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float m = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
                    for (int n = 1; n < S_TILES; n++) m = fmaxf(m, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
                    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
                    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
                    m = fmaxf(top[h], m * scale_log2);
                    float start = m == NEG_INF ? 0.0f : m;
                    factor[h] = exp2_fast(top[h] - start);
                    top[h] = m;
                    float even = 0.0f, odd = 0.0f;
#pragma unroll
                    for (int n = 0; n < S_TILES; n++) {
                        s[n][2 * h] = exp2_fast(fmaf(s[n][2 * h], scale_log2, -start));
                        s[n][2 * h + 1] = exp2_fast(fmaf(s[n][2 * h + 1], scale_log2, -start));
                        even += s[n][2 * h];
                        odd += s[n][2 * h + 1];
                    }
                    sum[h] = fmaf(sum[h], factor[h], even + odd);
                }
            };
            auto pack = [&]() {
#pragma unroll
                for (int n = 0; n < S_TILES; n++)
#pragma unroll
                    for (int h = 0; h < 2; h++) p[n / 2][(n & 1) * 2 + h] = pack2(s[n][2 * h], s[n][2 * h + 1]);
            };

            barrier_wait(full(count & 1, 0), count / 2 & 1);
            scores(count & 1);
            wgmma_wait<0>();
            hold(s);
            release(empty(count & 1, 0));
            if (t.first == t.last) release(q_empty);
            softmax(t.first);
            pack();
            for (int tile = t.first + 1; tile <= t.last; tile++) {
                int before = count & 1;
                u32 before_parity = count / 2 & 1;
                count++;
                barrier_wait(full(count & 1, 0), count / 2 & 1);
                scores(count & 1);
                barrier_wait(full(before, 1), before_parity);
                values(before);
                wgmma_wait<1>();
                hold(s);
                release(empty(count & 1, 0));
                if (tile == t.last) release(q_empty);
                softmax(tile);
                // Never true, but ptxas would otherwise sink all of the softmax below the wait that it is to overlap.
if (__any_sync(0xffffffffu, sum[0] < 0.0f || sum[1] < 0.0f)) asm volatile("nanosleep.u32 1;");
                wgmma_wait<0>();
                hold(o);
                release(empty(before, 1));
                if (__any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
                    for (int d = 0; d < O_TILES; d++) {
                        o[d][0] *= factor[0]; o[d][1] *= factor[0];
                        o[d][2] *= factor[1]; o[d][3] *= factor[1];
                    }
                }
                pack();
            }
            barrier_wait(full(count & 1, 1), count / 2 & 1);
            values(count & 1);
            wgmma_wait<0>();
            hold(o);
            release(empty(count & 1, 1));
            count++;

            // Through shared memory (a warp's own rows), to be written 16 bytes at a time.
            u32 mine = o_tile + (wg * 64 + warp * 16) * HEAD_DIM * 2;
            __syncwarp();
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float l = sum[h];
                l += __shfl_xor_sync(0xffffffffu, l, 1);
                l += __shfl_xor_sync(0xffffffffu, l, 2);
                int row = lane / 4 + 8 * h;
#if SINKS
                if (sinks) l += exp2_fast(fmaf(to_float(sinks[t.kv_head * GROUP + (t.row0 + wg * 64 + warp * 16 + row) % GROUP]), 1.44269504f, top[h] == NEG_INF ? 0.0f : -top[h]));
#endif
                float inv = l > 0.0f ? 1.0f / l : 0.0f;
#pragma unroll
                for (int d = 0; d < O_TILES; d++)
                    store_shared4(mine + row * HEAD_DIM * 2 + ((d ^ (row & 7)) * 16) + lane % 4 * 4, pack2(o[d][2 * h] * inv, o[d][2 * h + 1] * inv));
            }
            __syncwarp();
#pragma unroll
            for (int j = 0; j < 16 * UNITS / 32; j++) {
                int n = j * 32 + lane, row = n / UNITS, unit = n % UNITS, in_tile = wg * 64 + warp * 16 + row, at = t.row0 + in_tile;
                if (in_tile < t.rows)
                    store16(out + ((i64)(t.q0 + at / GROUP) * kv_heads * GROUP + t.kv_head * GROUP + at % GROUP) * HEAD_DIM + unit * 8,
                            load_shared16(mine + row * HEAD_DIM * 2 + (unit ^ (row & 7)) * 16));
            }
        }
    }
}

#endif
