// Paged attention for prefill, chunks and prefix hits: causal with an offset, optional sliding window.
//
// One request's queries of one KV head, GROUP * query_len rows (row = query * GROUP + head in the group), are cut into
// tiles of BM rows; one block serves one tile and walks over the KV positions that it attends to, BN at a time, through
// two stages in shared memory. Online softmax in float32, as in FlashAttention-2 (Dao 2023, algorithm 1).
//
// Macros: HEAD_DIM, GROUP, BLOCK_SIZE (16, 32 or 64); SINKS (default 0): 1 gives one more parameter at the end, as in decode.cu.
// Launch: grid (items, 1, 1), block (128, 1, 1), dynamic shared memory
//   PREFILL_SHARED = (BM + 4 * BN) * ROW_BYTES,  BM = 128, BN = 64 up to HEAD_DIM 128; BM = 64, BN = 32 above
// items[i] = {request, kv_head, m_tile, 0}; the host puts those with the most KV positions first.

#include "common.cuh"

#if HEAD_DIM <= 128
#define M_TILES 2
#define BN 64
#else
#define M_TILES 1
#define BN 32
#endif
#ifndef SINKS
#define SINKS 0
#endif
#define WARPS 4
#define BM (WARPS * 16 * M_TILES)
#define K_STEPS (PAD_DIM / 16)
#define TILE_BYTES (BN * ROW_BYTES)
#define PAGES ((BN + BLOCK_SIZE - 1) / BLOCK_SIZE)
#define PREFILL_SHARED ((BM + 4 * BN) * ROW_BYTES)

KERNEL __launch_bounds__(128, 2)
    prefill_attention(const elem *__restrict__ qkv,         // [tokens, q_stride], query heads first
                      const elem *__restrict__ kv,          // [blocks, 2, BLOCK_SIZE, kv_heads, HEAD_DIM]
                      const int *__restrict__ block_tables, // [requests, table_stride]
                      const int *__restrict__ query_start,  // [requests + 1]
                      const int *__restrict__ kv_lens,      // [requests]
                      const int4 *__restrict__ items,       // [grid]
                      elem *__restrict__ out,               // [tokens, kv_heads * GROUP * HEAD_DIM]
                      int q_stride, int table_stride, int kv_heads, int window, float scale
#if SINKS
                      , const elem *__restrict__ sinks      // [kv_heads * GROUP], or null
#endif
    ) {
    extern __shared__ __align__(128) u8 shared[];
    int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    u32 q_tile = shared_addr(shared), stages = q_tile + BM * ROW_BYTES;
    int4 item = items[blockIdx.x];
    int request = item.x, kv_head = item.y, row0 = item.z * BM;
    int q0 = query_start[request], query_len = query_start[request + 1] - q0, kv_len = kv_lens[request];
    const int *table = block_tables + (i64)request * table_stride;
    i64 token_stride = (i64)kv_heads * HEAD_DIM;
    float scale_log2 = scale * 1.44269504f;
    int rows = min(BM, query_len * GROUP - row0), offset = kv_len - query_len;
    int least = offset + row0 / GROUP, most = offset + (row0 + rows - 1) / GROUP; // positions of the first and last row
    int begin = window > 0 ? max(0, least - window + 1) : 0, end = most + 1;      // KV positions attended to
    int first = begin / BN, last = (end - 1) / BN;
    pdl_wait();
    pdl_launch();

    // Block numbers of a tile, one a lane.
    int pages;
    auto look_up = [&](int tile) {
        int token = tile * BN + lane % PAGES * BLOCK_SIZE;
        pages = token < end ? table[token / BLOCK_SIZE] : 0;
    };
    // One pass of the block copies COPY_ROWS whole rows where UNITS divides 128.
    constexpr bool whole_rows = 128 % UNITS == 0 && BLOCK_SIZE % (128 / UNITS) == 0;
    constexpr int COPY_ROWS = whole_rows ? 128 / UNITS : 1;
    const elem *base = kv + (i64)kv_head * HEAD_DIM;
    if (whole_rows) base += (tid / UNITS) * token_stride + tid % UNITS * 8;
    auto fetch = [&](int tile, int stage) {
        u32 k_tile = stages + stage * 2 * TILE_BYTES;
        if (whole_rows) {
            int token = tile * BN + tid / UNITS;
            k_tile += tile_offset(tid / UNITS, tid % UNITS);
#pragma unroll
            for (int j = 0; j < BN / COPY_ROWS; j++) {
                int row = j * COPY_ROWS; // of the block's first thread; tile_offset's swizzle has the period COPY_ROWS or 8
                u32 to = COPY_ROWS % 8 == 0 || PAD_UNITS % 8 != 0 ? k_tile + row * ROW_BYTES
                                                                  : stages + stage * 2 * TILE_BYTES + tile_offset(row + tid / UNITS, tid % UNITS);
                bool valid = token + row >= begin && token + row < end;
                const elem *k = base + ((i64)__shfl_sync(0xffffffffu, pages, row / BLOCK_SIZE) * (2 * BLOCK_SIZE) + (BN >= BLOCK_SIZE ? row % BLOCK_SIZE : tile * BN % BLOCK_SIZE + row)) * token_stride;
                cp_async16(to, k, valid);
                cp_async16(to + TILE_BYTES, k + BLOCK_SIZE * token_stride, valid);
            }
        } else {
#pragma unroll 4
            for (int j = 0; j < (BN * UNITS + 127) / 128; j++) {
                int n = j * 128 + tid, row = n / UNITS, unit = n % UNITS;
                int page = __shfl_sync(0xffffffffu, pages, row / BLOCK_SIZE % PAGES);
                if ((BN * UNITS) % 128 == 0 || n < BN * UNITS) {
                    int token = tile * BN + row;
                    bool valid = token >= begin && token < end;
                    const elem *k = base + ((i64)page * 2 * BLOCK_SIZE + token % BLOCK_SIZE) * token_stride + unit * 8;
                    u32 to = k_tile + tile_offset(row, unit);
                    cp_async16(to, k, valid);
                    cp_async16(to + TILE_BYTES, k + BLOCK_SIZE * token_stride, valid);
                }
            }
        }
        cp_async_commit();
    };

    if (PAD_UNITS != UNITS)
        for (int r = tid; r < 4 * BN; r += 128) store_shared16(stages + (r / BN) * TILE_BYTES + tile_offset(r % BN, UNITS), make_uint4(0, 0, 0, 0));
    for (int n = tid; n < BM * PAD_UNITS; n += 128) {
        int row = n / PAD_UNITS, unit = n % PAD_UNITS;
        bool valid = row < rows && unit < UNITS;
        int at = valid ? row0 + row : row0;
        cp_async16(q_tile + tile_offset(row, unit), qkv + (i64)(q0 + at / GROUP) * q_stride + (kv_head * GROUP + at % GROUP) * HEAD_DIM + (valid ? unit * 8 : 0), valid);
    }
    look_up(first);
    fetch(first, 0);
    if (first < last) look_up(first + 1);

    float o[M_TILES][2 * K_STEPS][4], top[M_TILES][2], sum[M_TILES][2];
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        top[m][0] = top[m][1] = NEG_INF;
        sum[m][0] = sum[m][1] = 0.0f;
#pragma unroll
        for (int d = 0; d < 2 * K_STEPS; d++) o[m][d][0] = o[m][d][1] = o[m][d][2] = o[m][d][3] = 0.0f;
    }

    for (int tile = first; tile <= last; tile++) {
        int stage = (tile - first) & 1;
        u32 k_tile = stages + stage * 2 * TILE_BYTES, v_tile = k_tile + TILE_BYTES;
        cp_async_wait<0>();
        __syncthreads();
        if (tile < last) {
            fetch(tile + 1, stage ^ 1);
            if (tile + 2 <= last) look_up(tile + 2);
        }

        float s[M_TILES][BN / 8][4];
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int n = 0; n < BN / 8; n++) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.0f;
#pragma unroll (K_STEPS > 12 ? 4 : K_STEPS) // wide heads have no registers for more
        for (int step = 0; step < K_STEPS; step++) {
            u32 a[M_TILES][4];
#pragma unroll
            for (int m = 0; m < M_TILES; m++) ldmatrix4(a[m], q_tile + tile_offset((warp * M_TILES + m) * 16 + lane % 16, 2 * step + lane / 16));
#pragma unroll
            for (int n = 0; n < BN / 16; n++) {
                u32 b[4];
                ldmatrix4(b, k_tile + tile_offset(n * 16 + lane % 8 + lane / 16 * 8, 2 * step + (lane / 8 & 1)));
#pragma unroll
                for (int m = 0; m < M_TILES; m++) {
                    mma16816(s[m][2 * n], a[m], b[0], b[1]);
                    mma16816(s[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }

        int token = tile * BN;
        if (token + BN - 1 > least || (window > 0 && token <= most - window)) {
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    // The column, counted from this thread's first one, of the row's own position and of its window's start.
                    int own = offset + (row0 + min((warp * M_TILES + m) * 16 + lane / 4 + 8 * h, rows - 1)) / GROUP - token - lane % 4 * 2;
                    int start = window > 0 ? own - window : -BN;
#pragma unroll
                    for (int n = 0; n < BN / 8; n++) {
                        if (n * 8 > own || n * 8 <= start) s[m][n][2 * h] = NEG_INF;
                        if (n * 8 + 1 > own || n * 8 + 1 <= start) s[m][n][2 * h + 1] = NEG_INF;
                    }
                }
        }

        u32 p[M_TILES][BN / 16][4];
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            float factor[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float t = NEG_INF;
#pragma unroll
                for (int n = 0; n < BN / 8; n++) t = fmaxf(t, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
                t = fmaxf(t, __shfl_xor_sync(0xffffffffu, t, 1));
                t = fmaxf(t, __shfl_xor_sync(0xffffffffu, t, 2));
                t = fmaxf(top[m][h], t * scale_log2);
                float base = t == NEG_INF ? 0.0f : t;
                factor[h] = exp2_fast(top[m][h] - base);
                top[m][h] = t;
                float part = 0.0f;
#pragma unroll
                for (int n = 0; n < BN / 8; n++) {
                    float x = exp2_fast(fmaf(s[m][n][2 * h], scale_log2, -base)), y = exp2_fast(fmaf(s[m][n][2 * h + 1], scale_log2, -base));
                    part += x + y;
                    p[m][n / 2][2 * (n & 1) + h] = pack2(x, y);
                }
                sum[m][h] = fmaf(sum[m][h], factor[h], part);
            }
            if (__any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
                for (int d = 0; d < 2 * K_STEPS; d++) {
                    o[m][d][0] *= factor[0]; o[m][d][1] *= factor[0];
                    o[m][d][2] *= factor[1]; o[m][d][3] *= factor[1];
                }
            }
        }
#pragma unroll
        for (int n = 0; n < BN / 16; n++)
#pragma unroll
            for (int d = 0; d < K_STEPS; d++) {
                u32 b[4];
                ldmatrix4_trans(b, v_tile + tile_offset(n * 16 + lane % 16, 2 * d + lane / 16));
#pragma unroll
                for (int m = 0; m < M_TILES; m++) {
                    mma16816(o[m][2 * d], p[m][n], b[0], b[1]);
                    mma16816(o[m][2 * d + 1], p[m][n], b[2], b[3]);
                }
            }
    }

    // A warp's rows of the query tile are its own: the result goes through them to be written 16 bytes at a time.
    __syncwarp();
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float l = sum[m][h];
            l += __shfl_xor_sync(0xffffffffu, l, 1);
            l += __shfl_xor_sync(0xffffffffu, l, 2);
#if SINKS
            int head = kv_head * GROUP + (row0 + (warp * M_TILES + m) * 16 + lane / 4 + 8 * h) % GROUP;
            if (sinks) l += exp2_fast(fmaf(to_float(sinks[head]), 1.44269504f, top[m][h] == NEG_INF ? 0.0f : -top[m][h]));
#endif
            float inv = l > 0.0f ? 1.0f / l : 0.0f;
            int row = (warp * M_TILES + m) * 16 + lane / 4 + 8 * h;
#pragma unroll
            for (int d = 0; d < 2 * K_STEPS; d++)
                store_shared4(q_tile + tile_offset(row, d) + lane % 4 * 4, pack2(o[m][d][2 * h] * inv, o[m][d][2 * h + 1] * inv));
        }
    __syncwarp();
    for (int n = lane; n < 16 * M_TILES * UNITS; n += 32) {
        int row = warp * 16 * M_TILES + n / UNITS, unit = n % UNITS, at = row0 + row;
        if (row < rows)
            store16(out + ((i64)(q0 + at / GROUP) * kv_heads * GROUP + kv_head * GROUP + at % GROUP) * HEAD_DIM + unit * 8, load_shared16(q_tile + tile_offset(row, unit)));
    }
}
