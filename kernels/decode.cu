// Split-KV paged attention for decode and verify, and the combination of its parts.
//
// One request's queries of one KV head, GROUP * query_len rows (row = query * GROUP + head in the group), are cut into
// tiles of ROWS = 16 * M_TILES rows. An *item* is a range of KV positions for one such tile; a block works through the
// items that the host gave it. Its warps stream 16 positions at a time, each through a ring of its own (no barrier
// between warps), and their results are merged in fixed order at the end of an item. An item that covers everything its
// rows attend to writes the output; others write a part (o, m, l), and attention_combine adds the parts in order.
//
// Macros: HEAD_DIM, GROUP, BLOCK_SIZE (a multiple of 16); M_TILES (1 or 2; 1 if HEAD_DIM > 128), STAGES (default below);
// SINKS (default 0): 1 gives both kernels one more parameter at the end, sinks [kv_heads * GROUP] or null: a logit of each head that
// takes its share of the softmax and has no value. It is added once, where the sum is complete.
// Launch of decode_attention: grid (blocks of the plan, 1, 1), block (32 * WARPS, 1, 1), dynamic shared memory
//   WARPS * STAGES * 32 * ROW_BYTES + (M_TILES * PAD_DIM / 16 <= 8 ? 0 : ROWS * ROW_BYTES) + WARPS * ROWS * 8
// with WARPS = 2 if HEAD_DIM > 128, else 4. STAGES >= 2 and >= M_TILES.
// Launch of attention_combine: grid (combined tiles, ROWS, 1), block (128, 1, 1), no dynamic shared memory.
//
// Under programmatic dependent launch, block tables and lengths, and KV positions before the step's own, must be older than
// the kernel before this one.
//
// The plan. items[i] = two int4: {request, kv_head, m_tile, slot} and {kv_begin, kv_end, 0, 0}; kv_begin is a multiple of
// 16, at or before the first position that the tile's rows attend to; kv_end is at most the KV length, and a multiple of
// 16 unless it is the end. slot < 0: the item is whole. Parts of one tile have consecutive slots in order of position.
// block_items[b] .. block_items[b + 1] are the items of block b, at least one. combines[c] = {request, kv_head, m_tile, 0} and {first_slot, slots, 0, 0}.

#include "common.cuh"

#ifndef M_TILES
#define M_TILES 1
#endif
#ifndef STAGES
#define STAGES (HEAD_DIM > 192 || HEAD_DIM * M_TILES > 192 ? 2 : HEAD_DIM > 64 ? 3 : 4)
#endif
#ifndef SINKS
#define SINKS 0
#endif
#define ROWS (16 * M_TILES)
#define WARPS (HEAD_DIM > 128 ? 2 : 4)
#define THREADS (32 * WARPS)
#define COMBINE_WARPS 4
#define K_STEPS (PAD_DIM / 16)
#define TILE_BYTES (16 * ROW_BYTES)
#define STAGE_BYTES (2 * TILE_BYTES)
#define WARP_BYTES (STAGES * STAGE_BYTES)
// Queries stay in registers where there is room for them.
#define Q_IN_REGISTERS (M_TILES * K_STEPS <= 8)
// Floats a warp's result takes a row: one pad vector keeps rows off each other's banks.
#define O_STRIDE PAD_DIM
#define Q_BYTES (Q_IN_REGISTERS ? 0 : ROWS * ROW_BYTES)

// Where row `row` of a tile lives in a [tokens, heads, HEAD_DIM] buffer, or a negative number past the last row.
DEVICE int row_query(int m_tile, int row, int query_len) {
    int q = (m_tile * ROWS + row) / GROUP;
    return q < query_len ? q : -1;
}
DEVICE int row_head(int m_tile, int row, int kv_head) { return kv_head * GROUP + (m_tile * ROWS + row) % GROUP; }

KERNEL __launch_bounds__(THREADS, 2)
    decode_attention(const elem *__restrict__ qkv,         // [tokens, q_stride], query heads first
                     const elem *__restrict__ kv,          // [blocks, 2, BLOCK_SIZE, kv_heads, HEAD_DIM]
                     const int *__restrict__ block_tables, // [requests, table_stride]
                     const int *__restrict__ query_start,  // [requests + 1]
                     const int *__restrict__ kv_lens,      // [requests]
                     const int4 *__restrict__ items,       // [items, 2]
                     const int *__restrict__ block_items,  // [grid + 1]
                     elem *__restrict__ out,               // [tokens, kv_heads * GROUP * HEAD_DIM]
                     float *__restrict__ part_o,           // [slots, ROWS, HEAD_DIM], not normalised
                     float2 *__restrict__ part_ml,         // [slots, ROWS], (maximum in units of log2, sum)
                     int q_stride, int table_stride, int kv_heads, int window, float scale
#if SINKS
                     , const elem *__restrict__ sinks         // [kv_heads * GROUP], or null
#endif
    ) {
    extern __shared__ __align__(128) u8 shared[];
    int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    u32 ring = shared_addr(shared) + warp * WARP_BYTES;
    u32 q_tile = shared_addr(shared) + WARPS * WARP_BYTES;
    float2 *merge_ml = (float2 *)(shared + WARPS * WARP_BYTES + Q_BYTES); // [WARPS, ROWS]
    float scale_log2 = scale * 1.44269504f;
    i64 token_stride = (i64)kv_heads * HEAD_DIM;

    int first_item = block_items[blockIdx.x], last_item = block_items[blockIdx.x + 1];
    bool waited = false;

    for (int item = first_item; item < last_item; item++) {
        int4 what = items[2 * item], range = items[2 * item + 1];
        int request = what.x, kv_head = what.y, m_tile = what.z, slot = what.w;
        int kv_begin = range.x, kv_end = range.y;
        int q0 = query_start[request], query_len = query_start[request + 1] - q0, kv_len = kv_lens[request];
        const int *table = block_tables + (i64)request * table_stride;
        const elem *head_base = kv + (i64)kv_head * HEAD_DIM;

        // This warp's 16-position chunks: warp, warp + WARPS, …
        int chunks = (kv_end - kv_begin + 15) / 16;
        int mine = chunks > warp ? (chunks - warp + WARPS - 1) / WARPS : 0;

        // Block numbers of 32 chunks at a time, one a lane; the next 32 are fetched long before they are needed.
        int pages, next_pages;
        auto page_of = [&](int i) {
            int token = kv_begin + 16 * (warp + WARPS * i);
            return i < mine ? table[token / BLOCK_SIZE] : 0;
        };
        pages = page_of(lane);
        next_pages = page_of(32 + lane);

        if (PAD_UNITS != UNITS) { // a stage's pad units stay zero over the item: no copy writes them
            for (int r = lane; r < STAGES * 32; r += 32)
                store_shared16(ring + (r / 16) * TILE_BYTES + tile_offset(r % 16, UNITS), make_uint4(0, 0, 0, 0));
        }

        auto fetch = [&](int i) {
            if (i < mine) {
                if (i > 0 && i % 32 == 0) {
                    pages = next_pages;
                    next_pages = page_of(i + 32 + lane);
                }
                i64 page = __shfl_sync(0xffffffffu, pages, i % 32);
                int token = kv_begin + 16 * (warp + WARPS * i), left = kv_end - token;
                const elem *k = head_base + (page * 2 * BLOCK_SIZE + token % BLOCK_SIZE) * token_stride;
                const elem *v = k + BLOCK_SIZE * token_stride;
                u32 stage = ring + (i % STAGES) * STAGE_BYTES;
#pragma unroll (32 % UNITS == 0 ? 16 * UNITS / 32 : 3) // addresses of whole rows fold into constants, others take registers
                for (int j = 0; j < (16 * UNITS + 31) / 32; j++) {
                    int n = j * 32 + lane, row = n / UNITS, unit = n % UNITS;
                    if ((16 * UNITS) % 32 == 0 || n < 16 * UNITS) {
                        i64 from = row * token_stride + unit * 8;
                        u32 to = stage + tile_offset(row, unit);
                        cp_async16(to, k + from, row < left);
                        cp_async16(to + TILE_BYTES, v + from, row < left);
                    }
                }
            }
            cp_async_commit();
        };
        // Positions before this step's queries are written by no kernel of the step: their copies need not wait.
        if (!waited && kv_begin + 16 * (WARPS * (STAGES - 1)) > kv_len - query_len) {
            pdl_wait();
            waited = true;
        }
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) fetch(i);
        if (!waited) {
            pdl_wait();
            waited = true;
        }
        if (item == first_item) pdl_launch();

        // Queries that go to registers pass through the stage that is filled last, each warp for itself.
        u32 q_address = Q_IN_REGISTERS ? ring + (STAGES - 1) * STAGE_BYTES : q_tile;
        for (int n = Q_IN_REGISTERS ? lane : tid; n < ROWS * PAD_UNITS; n += Q_IN_REGISTERS ? 32 : THREADS) {
            int row = n / PAD_UNITS, unit = n % PAD_UNITS, q = row_query(m_tile, row, query_len);
            uint4 v = make_uint4(0, 0, 0, 0);
            if (q >= 0 && unit < UNITS) v = load16(qkv + (i64)(q0 + q) * q_stride + row_head(m_tile, row, kv_head) * HEAD_DIM + unit * 8);
            store_shared16(q_address + tile_offset(row, unit), v);
        }
        if (Q_IN_REGISTERS) __syncwarp();
        else __syncthreads();

        u32 q[Q_IN_REGISTERS ? M_TILES : 1][Q_IN_REGISTERS ? K_STEPS : 1][4];
        if (Q_IN_REGISTERS) {
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
#pragma unroll
                for (int s = 0; s < K_STEPS; s++)
                    ldmatrix4(q[Q_IN_REGISTERS ? m : 0][Q_IN_REGISTERS ? s : 0], q_address + tile_offset(m * 16 + lane % 16, 2 * s + lane / 16));
            __syncwarp();
        }

        // The positions of this thread's rows: m * 16 + lane / 4 and + 8.
        int position[M_TILES][2];
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                position[m][h] = kv_len - query_len + min((m_tile * ROWS + m * 16 + lane / 4 + 8 * h) / GROUP, query_len - 1);
        int least = kv_len - query_len + min(m_tile * ROWS / GROUP, query_len - 1);
        int most = kv_len - query_len + min((m_tile * ROWS + ROWS - 1) / GROUP, query_len - 1);

        float o[M_TILES][2 * K_STEPS][4], top[M_TILES][2], sum[M_TILES][2];
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            top[m][0] = top[m][1] = NEG_INF;
            sum[m][0] = sum[m][1] = 0.0f;
#pragma unroll
            for (int d = 0; d < 2 * K_STEPS; d++) o[m][d][0] = o[m][d][1] = o[m][d][2] = o[m][d][3] = 0.0f;
        }

        for (int i = 0; i < mine; i++) {
            cp_async_wait<STAGES - 2>();
            __syncwarp();
            fetch(i + STAGES - 1);
            u32 k_tile = ring + (i % STAGES) * STAGE_BYTES, v_tile = k_tile + TILE_BYTES;
            int token = kv_begin + 16 * (warp + WARPS * i);

            float s[M_TILES][2][4];
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
#pragma unroll
                for (int e = 0; e < 4; e++) s[m][0][e] = s[m][1][e] = 0.0f;
#pragma unroll
            for (int step = 0; step < K_STEPS; step++) {
                u32 b[4];
                ldmatrix4(b, k_tile + tile_offset(lane % 8 + lane / 16 * 8, 2 * step + (lane / 8 & 1)));
#pragma unroll
                for (int m = 0; m < M_TILES; m++) {
                    u32 a[4];
                    if (Q_IN_REGISTERS) {
#pragma unroll
                        for (int e = 0; e < 4; e++) a[e] = q[Q_IN_REGISTERS ? m : 0][Q_IN_REGISTERS ? step : 0][e];
                    } else {
                        ldmatrix4(a, q_address + tile_offset(m * 16 + lane % 16, 2 * step + lane / 16));
                    }
                    mma16816(s[m][0], a, b[0], b[1]);
                    mma16816(s[m][1], a, b[2], b[3]);
                }
            }

            if (token + 15 > least || token + 16 > kv_end || (window > 0 && token <= most - window)) {
#pragma unroll
                for (int m = 0; m < M_TILES; m++)
#pragma unroll
                    for (int n = 0; n < 2; n++)
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            int at = token + n * 8 + lane % 4 * 2 + (e & 1), p = position[m][e / 2];
                            if (at > p || at >= kv_end || (window > 0 && at <= p - window)) s[m][n][e] = NEG_INF;
                        }
            }

            u32 p[M_TILES][4];
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                float factor[2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float t = fmaxf(fmaxf(s[m][0][2 * h], s[m][0][2 * h + 1]), fmaxf(s[m][1][2 * h], s[m][1][2 * h + 1]));
                    t = fmaxf(t, __shfl_xor_sync(0xffffffffu, t, 1));
                    t = fmaxf(t, __shfl_xor_sync(0xffffffffu, t, 2));
                    t = fmaxf(top[m][h], t * scale_log2);
                    float base = t == NEG_INF ? 0.0f : t;
                    factor[h] = exp2_fast(top[m][h] - base);
                    top[m][h] = t;
                    float part = 0.0f;
#pragma unroll
                    for (int n = 0; n < 2; n++) {
                        float x = exp2_fast(fmaf(s[m][n][2 * h], scale_log2, -base)), y = exp2_fast(fmaf(s[m][n][2 * h + 1], scale_log2, -base));
                        part += x + y;
                        p[m][2 * n + h] = pack2(x, y);
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
            for (int d = 0; d < K_STEPS; d++) {
                u32 b[4];
                ldmatrix4_trans(b, v_tile + tile_offset(lane % 16, 2 * d + lane / 16));
#pragma unroll
                for (int m = 0; m < M_TILES; m++) {
                    mma16816(o[m][2 * d], p[m], b[0], b[1]);
                    mma16816(o[m][2 * d + 1], p[m], b[2], b[3]);
                }
            }
            __syncwarp();
        }

        // Merge the warps, in their order. A warp's result takes the place of its ring.
        cp_async_wait<0>();
        __syncwarp();
        float *mine_o = (float *)(shared + warp * WARP_BYTES);
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float l = sum[m][h];
                l += __shfl_xor_sync(0xffffffffu, l, 1);
                l += __shfl_xor_sync(0xffffffffu, l, 2);
                int row = m * 16 + lane / 4 + 8 * h;
                if (lane % 4 == 0) merge_ml[warp * ROWS + row] = make_float2(top[m][h], l);
#pragma unroll
                for (int d = 0; d < 2 * K_STEPS; d++) {
                    // A rotation by the row keeps the eight rows of a store off each other's banks.
                    int column = (d * 8 + lane % 4 * 2 + (row % 8) * 8) % PAD_DIM;
                    *(float2 *)(mine_o + row * O_STRIDE + column) = make_float2(o[m][d][2 * h], o[m][d][2 * h + 1]);
                }
            }
        __syncthreads();
        for (int n = tid; n < ROWS * (HEAD_DIM / 4); n += THREADS) {
            int row = n / (HEAD_DIM / 4), d = n % (HEAD_DIM / 4) * 4, q_index = row_query(m_tile, row, query_len);
            if (q_index < 0) continue;
            float m = NEG_INF;
#pragma unroll
            for (int w = 0; w < WARPS; w++) m = fmaxf(m, merge_ml[w * ROWS + row].x);
            float base = m == NEG_INF ? 0.0f : m, l = 0.0f;
            float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                float2 ml = merge_ml[w * ROWS + row];
                float f = exp2_fast(ml.x - base);
                float4 x = *(const float4 *)((const float *)(shared + w * WARP_BYTES) + row * O_STRIDE + (d + (row % 8) * 8) % PAD_DIM);
                l = fmaf(ml.y, f, l);
                acc.x = fmaf(x.x, f, acc.x); acc.y = fmaf(x.y, f, acc.y);
                acc.z = fmaf(x.z, f, acc.z); acc.w = fmaf(x.w, f, acc.w);
            }
            if (slot < 0) {
#if SINKS
                if (sinks) l += exp2_fast(fmaf(to_float(sinks[row_head(m_tile, row, kv_head)]), 1.44269504f, -base));
#endif
                float inv = l > 0.0f ? 1.0f / l : 0.0f;
                i64 at = ((i64)(q0 + q_index) * kv_heads * GROUP + row_head(m_tile, row, kv_head)) * HEAD_DIM + d;
                *(uint2 *)(out + at) = make_uint2(pack2(acc.x * inv, acc.y * inv), pack2(acc.z * inv, acc.w * inv));
            } else {
                i64 at = (i64)slot * ROWS + row;
                *(float4 *)(part_o + at * HEAD_DIM + d) = acc;
                if (d == 0) part_ml[at] = make_float2(m, l);
            }
        }
        if (item + 1 < last_item) __syncthreads();
    }
}

KERNEL __launch_bounds__(32 * COMBINE_WARPS) attention_combine(const float *__restrict__ part_o,    // [slots, ROWS, HEAD_DIM]
                                                const float2 *__restrict__ part_ml,  // [slots, ROWS]
                                                const int *__restrict__ query_start, // [requests + 1]
                                                const int4 *__restrict__ combines,   // [combined tiles, 2]
                                                elem *__restrict__ out,              // [tokens, kv_heads * GROUP * HEAD_DIM]
                                                int kv_heads
#if SINKS
                                                , const elem *__restrict__ sinks // [kv_heads * GROUP], or null
#endif
) {
    __shared__ float4 warp_o[COMBINE_WARPS][(HEAD_DIM + 3) / 4];
    __shared__ float warp_l[COMBINE_WARPS];
    int4 what = combines[2 * blockIdx.x], slots = combines[2 * blockIdx.x + 1];
    int row = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int q0 = query_start[what.x], q = row_query(what.z, row, query_start[what.x + 1] - q0);
    pdl_wait();
    pdl_launch();
    if (q < 0) return;
    i64 first = (i64)slots.x * ROWS + row;
    float m = NEG_INF;
    for (int s = lane; s < slots.y; s += 32) m = fmaxf(m, part_ml[first + (i64)s * ROWS].x);
    m = warp_max(m);
    float base = m == NEG_INF ? 0.0f : m, l = 0.0f;
    float4 acc[(HEAD_DIM + 127) / 128];
#pragma unroll
    for (int j = 0; j < (HEAD_DIM + 127) / 128; j++) acc[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    // Warp w takes slots w, w + 4, …
#pragma unroll 4
    for (int s = warp; s < slots.y; s += COMBINE_WARPS) {
        i64 at = first + (i64)s * ROWS;
        float2 ml = part_ml[at];
        float f = exp2_fast(ml.x - base);
        l = fmaf(ml.y, f, l);
#pragma unroll
        for (int j = 0; j < (HEAD_DIM + 127) / 128; j++) {
            int d = (lane + 32 * j) * 4;
            if (d < HEAD_DIM) {
                float4 x = *(const float4 *)(part_o + at * HEAD_DIM + d);
                acc[j].x = fmaf(x.x, f, acc[j].x); acc[j].y = fmaf(x.y, f, acc[j].y);
                acc[j].z = fmaf(x.z, f, acc[j].z); acc[j].w = fmaf(x.w, f, acc[j].w);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < (HEAD_DIM + 127) / 128; j++)
        if ((lane + 32 * j) * 4 < HEAD_DIM) warp_o[warp][lane + 32 * j] = acc[j];
    if (lane == 0) warp_l[warp] = l;
    __syncthreads();
    for (int u = threadIdx.x; u < HEAD_DIM / 4; u += 128) {
        float4 a = warp_o[0][u], b = warp_o[1][u], c = warp_o[2][u], d = warp_o[3][u];
        float total = (warp_l[0] + warp_l[1]) + (warp_l[2] + warp_l[3]);
#if SINKS
        if (sinks) total += exp2_fast(fmaf(to_float(sinks[row_head(what.z, row, what.y)]), 1.44269504f, -base));
#endif
        float inv = total > 0.0f ? 1.0f / total : 0.0f;
        i64 at = ((i64)(q0 + q) * kv_heads * GROUP + row_head(what.z, row, what.y)) * HEAD_DIM + u * 4;
        *(uint2 *)(out + at) = make_uint2(pack2(((a.x + b.x) + (c.x + d.x)) * inv, ((a.y + b.y) + (c.y + d.y)) * inv),
                                          pack2(((a.z + b.z) + (c.z + d.z)) * inv, ((a.w + b.w) + (c.w + d.w)) * inv));
    }
}
