// Mixture of experts: the choice of experts, the order in which the grouped products work, and the sum of their results.
//
// A *slot* is one of a token's TOP_K choices, numbered token * TOP_K + rank. Slots are sorted by expert, in the order of
// their numbers within one (a counting sort without atomics), and cut into *tiles* of at most tile_rows slots of one expert.
//
// Macros: EXPERTS (at most 256), TOP_K (at most 8), ROUTE:
//   0  softmax over all experts, the largest TOP_K of it as they are
//   1  the same, divided by their sum
//   2  the largest TOP_K logits, softmax over these (the same numbers as 1)
//   3  sigmoid of each logit, the largest TOP_K, divided by their sum
// EP: 1 where this rank holds only some of the experts. Ids are then numbers among those, and -1 for the others, whose slots are
// in no list; and moe_combine passes them over. `offsets` go on counting up to EXPERTS, the experts behind the local ones having none.
// Equal scores go to the lower expert first. A NaN is taken for -infinity in the choice, so that no id is ever out of
// range, and still reaches the weights.
//
// Launch of moe_route_few (up to BLOCK_TOKENS = 64 tokens): grid (1, 1, 1), block (512, 1, 1), no dynamic shared memory.
// Launch of moe_route, then moe_align (any number): grid (ceil(tokens / BLOCK_TOKENS), 1, 1), block (512, 1, 1) for both.
// Launch of moe_count, then moe_align, where ids are there already (EP): as moe_route.
// Launch of moe_combine: grid (ceil(hidden / 8 / 128), min(tokens, 65535), 1), block (128, 1, 1). hidden is a multiple of 8.
// max_tiles is at least n + (S - n) / tile_rows, with S = tokens * TOP_K and n = min(EXPERTS, S); EP: S = tokens * min(TOP_K, local)
// and n = min(local, S), with `local` experts on this rank. Entries past the last tile
// get expert -1: the products' blocks leave at once there.

#include "common.cuh"

// Inputs that an earlier kernel wrote are not __restrict__: the compiler must not take them for constants and read them before pdl_wait.

#ifndef EXPERTS
#define EXPERTS 8
#endif
#ifndef TOP_K
#define TOP_K 2
#endif
#ifndef ROUTE
#define ROUTE 1
#endif
#ifndef EP
#define EP 0
#endif
#if EXPERTS > 256 || TOP_K > 8 || TOP_K > EXPERTS || ROUTE > 3
#error "EXPERTS is at most 256, TOP_K at most 8 and at most EXPERTS, ROUTE 0, 1, 2 or 3"
#endif

#define BLOCK_TOKENS 64
#define BLOCK_SLOTS (BLOCK_TOKENS * TOP_K)
#define THREADS 512
#define WARPS (THREADS / 32)
#define PER_LANE ((EXPERTS + 31) / 32)
#define LOG2E 1.44269504f
#define ALL 0xffffffffu

DEVICE u32 redux_max(u32 x) {
    u32 y;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
    return y;
}
DEVICE u32 redux_min(u32 x) {
    u32 y;
    asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
    return y;
}

// Unsigned numbers in the order of the scores, none of them 0; -0 counts as 0, NaN as -infinity.
DEVICE u32 order_of(float score) {
    u32 bits = __float_as_uint(score != score ? NEG_INF : score + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// One token's choices by one warp: lane j < TOP_K gets the expert and the weight of rank j.
DEVICE void choose(const elem *logits, const elem *bias, float scale, int &expert, float &weight) {
    int lane = threadIdx.x & 31;
    float logit[PER_LANE];
    u32 key[PER_LANE];
#pragma unroll
    for (int v = 0; v < PER_LANE; v++) {
        int e = v * 32 + lane;
        bool exists = e < EXPERTS;
        logit[v] = exists ? to_float(logits[e]) : NEG_INF;
        float score = ROUTE == 3 ? 1.0f / (1.0f + exp2_fast(-LOG2E * logit[v])) : logit[v];
        if (bias && exists) score += to_float(bias[e]);
        key[v] = exists ? order_of(score) : 0;
    }
    expert = 0;
    float own = NEG_INF;
#pragma unroll
    for (int j = 0; j < TOP_K; j++) {
        u32 best = 0, at = ALL;
#pragma unroll
        for (int v = 0; v < PER_LANE; v++)
            if (key[v] > best) {
                best = key[v];
                at = v * 32 + lane;
            }
        u32 top = redux_max(best);
        u32 winner = redux_min(best == top ? at : ALL);
        float value = 0.0f;
#pragma unroll
        for (int v = 0; v < PER_LANE; v++)
            if (v * 32 + lane == winner) {
                value = logit[v];
                key[v] = 0;
            }
        value = __shfl_sync(ALL, value, winner & 31);
        if (lane == j) {
            expert = (int)winner;
            own = value;
        }
    }
    if (ROUTE == 3) {
        float part = lane < TOP_K ? 1.0f / (1.0f + exp2_fast(-LOG2E * own)) : 0.0f;
        weight = part / (warp_sum(part) + 1e-20f) * scale;
        return;
    }
    float top = own;
    if (ROUTE == 0) {
#pragma unroll
        for (int v = 0; v < PER_LANE; v++) top = fmaxf(top, logit[v]);
    }
    top = warp_max(top);
    float part = lane < TOP_K ? exp2_fast((own - top) * LOG2E) : 0.0f, sum = part;
    if (ROUTE == 0) {
        sum = 0.0f;
#pragma unroll
        for (int v = 0; v < PER_LANE; v++) sum += exp2_fast((logit[v] - top) * LOG2E);
    }
    weight = part / warp_sum(sum) * scale;
}

struct Lists {
    int count[EXPERTS];            // slots of this block
    int total[EXPERTS];            // of all blocks
    int before[EXPERTS];           // of the blocks before this one
    int offset[EXPERTS + 1];       // where an expert's slots begin
    int tile[EXPERTS + 1];         // where its tiles begin
    u16 of_warp[WARPS][EXPERTS];   // slots of the warps before one, within the block
};

// Chooses for this block's tokens; the thread's slot gets its expert, or -1 past the end.
DEVICE int route_block(const elem *logits, const elem *bias, int *ids, float *weights, int tokens, float scale, int first_expert, int local, int *seen) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, first = blockIdx.x * BLOCK_TOKENS;
    for (int t = warp; t < BLOCK_TOKENS && first + t < tokens; t += WARPS) {
        int expert;
        float weight;
        choose(logits + (i64)(first + t) * EXPERTS, bias, scale, expert, weight);
        if (EP) expert = (u32)(expert - first_expert) < (u32)local ? expert - first_expert : -1;
        if (lane < TOP_K) {
            i64 slot = (i64)(first + t) * TOP_K + lane;
            ids[slot] = expert;
            weights[slot] = weight;
            seen[t * TOP_K + lane] = expert;
        }
    }
    __syncthreads();
    int here = min(BLOCK_TOKENS, tokens - first) * TOP_K;
    return threadIdx.x < here ? seen[threadIdx.x] : -1;
}

// Counts this block's slots by expert. `rank`: how many slots of the same expert are before this thread's in its warp.
DEVICE void count_block(Lists &l, int expert, int &rank) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int i = threadIdx.x; i < WARPS * EXPERTS; i += THREADS) (&l.of_warp[0][0])[i] = 0;
    __syncthreads();
    u32 same = __match_any_sync(ALL, expert);
    rank = __popc(same & ((1u << lane) - 1));
    if (expert >= 0 && rank == 0) l.of_warp[warp][expert] = (u16)__popc(same);
    __syncthreads();
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) {
        int sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            int n = l.of_warp[w][e];
            l.of_warp[w][e] = (u16)sum;
            sum += n;
        }
        l.count[e] = sum;
    }
    __syncthreads();
}

// Writes offsets, slots and tiles once l.total and l.before are there (and a barrier behind them).
DEVICE void place_block(Lists &l, int expert, int rank, int *offsets, int *slots, int4 *tiles, int tile_rows, int max_tiles) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (warp == 0) {
        int rows = 0, cut = 0;
#pragma unroll
        for (int v = 0; v < PER_LANE; v++) {
            int e = lane * PER_LANE + v, n = e < EXPERTS ? l.total[e] : 0;
            rows += n;
            cut += (n + tile_rows - 1) / tile_rows;
        }
        int row = rows, tile = cut; // inclusive sums over the lanes, then exclusive ones
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            int r = __shfl_up_sync(ALL, row, d), t = __shfl_up_sync(ALL, tile, d);
            if (lane >= d) {
                row += r;
                tile += t;
            }
        }
        if (lane == 31) {
            l.offset[EXPERTS] = row;
            l.tile[EXPERTS] = tile;
        }
        row -= rows;
        tile -= cut;
#pragma unroll
        for (int v = 0; v < PER_LANE; v++) {
            int e = lane * PER_LANE + v;
            if (e < EXPERTS) {
                l.offset[e] = row;
                l.tile[e] = tile;
                row += l.total[e];
                tile += (l.total[e] + tile_rows - 1) / tile_rows;
            }
        }
    }
    __syncthreads();
    if (expert >= 0)
        slots[l.offset[expert] + l.before[expert] + l.of_warp[warp][expert] + rank] = blockIdx.x * BLOCK_SLOTS + threadIdx.x;
    if (blockIdx.x == 0)
        for (int e = threadIdx.x; e <= EXPERTS; e += THREADS) offsets[e] = l.offset[e];
    for (int e = blockIdx.x * WARPS + warp; e < EXPERTS; e += gridDim.x * WARPS) {
        int first = l.offset[e], rows = l.total[e];
        for (int t = lane; t * tile_rows < rows; t += 32)
            if (l.tile[e] + t < max_tiles) tiles[l.tile[e] + t] = make_int4(e, first + t * tile_rows, min(tile_rows, rows - t * tile_rows), 0);
    }
    for (int i = l.tile[EXPERTS] + blockIdx.x * THREADS + threadIdx.x; i < max_tiles; i += gridDim.x * THREADS) tiles[i] = make_int4(-1, 0, 0, 0);
}

KERNEL __launch_bounds__(THREADS) moe_route_few(const elem *logits, // [tokens, EXPERTS]
                                                const elem *__restrict__ bias,   // [EXPERTS], added for the choice alone; or null
                                                int *__restrict__ ids,           // [tokens, TOP_K]
                                                float *__restrict__ weights,     // [tokens, TOP_K]
                                                int *__restrict__ offsets,       // [EXPERTS + 1]
                                                int *__restrict__ slots,         // [tokens * TOP_K], sorted by expert
                                                int4 *__restrict__ tiles,        // [max_tiles]: expert, first row, rows, 0
                                                int tokens, int tile_rows, int max_tiles, float scale
#if EP
                                                , int first_expert, int local // this rank's experts
#endif
) {
#if !EP
    constexpr int first_expert = 0, local = EXPERTS;
#endif
    __shared__ Lists l;
    __shared__ int seen[BLOCK_SLOTS];
    pdl_wait();
    pdl_launch();
    int rank, expert = route_block(logits, bias, ids, weights, tokens, scale, first_expert, local, seen);
    count_block(l, expert, rank);
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) {
        l.total[e] = l.count[e];
        l.before[e] = 0;
    }
    __syncthreads();
    place_block(l, expert, rank, offsets, slots, tiles, tile_rows, max_tiles);
}

KERNEL __launch_bounds__(THREADS) moe_route(const elem *logits, // [tokens, EXPERTS]
                                            const elem *__restrict__ bias,   // [EXPERTS], added for the choice alone; or null
                                            int *__restrict__ ids,           // [tokens, TOP_K]
                                            float *__restrict__ weights,     // [tokens, TOP_K]
                                            int *__restrict__ counts,        // [grid, EXPERTS], slots of each block
                                            int tokens, float scale
#if EP
                                            , int first_expert, int local // this rank's experts
#endif
) {
#if !EP
    constexpr int first_expert = 0, local = EXPERTS;
#endif
    __shared__ Lists l;
    __shared__ int seen[BLOCK_SLOTS];
    pdl_wait();
    pdl_launch();
    int rank, expert = route_block(logits, bias, ids, weights, tokens, scale, first_expert, local, seen);
    count_block(l, expert, rank);
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) counts[(i64)blockIdx.x * EXPERTS + e] = l.count[e];
}

#if EP
// Of tokens that other ranks sent with their ids.
KERNEL __launch_bounds__(THREADS) moe_count(const int *ids,            // [tokens, TOP_K], local numbers or -1
                                            int *__restrict__ counts,  // [grid, EXPERTS], slots of each block
                                            int tokens) {
    __shared__ Lists l;
    pdl_wait();
    pdl_launch();
    int first = blockIdx.x * BLOCK_SLOTS, here = min(BLOCK_SLOTS, tokens * TOP_K - first);
    int rank, expert = threadIdx.x < here ? ids[first + threadIdx.x] : -1;
    count_block(l, expert, rank);
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) counts[(i64)blockIdx.x * EXPERTS + e] = l.count[e];
}
#endif

KERNEL __launch_bounds__(THREADS) moe_align(const int *ids,    // [tokens, TOP_K]
                                            const int *counts, // [grid, EXPERTS]
                                            int *__restrict__ offsets,      // [EXPERTS + 1]
                                            int *__restrict__ slots,        // [tokens * TOP_K], sorted by expert
                                            int4 *__restrict__ tiles,       // [max_tiles]: expert, first row, rows, 0
                                            int tokens, int tile_rows, int max_tiles) {
    // Several threads share an expert's counts, each those of every PARTS-th block.
    constexpr int PARTS = THREADS / EXPERTS < 16 ? THREADS / EXPERTS : 16;
    __shared__ Lists l;
    __shared__ int part_total[PARTS][EXPERTS], part_before[PARTS][EXPERTS];
    pdl_wait();
    pdl_launch();
    int first = blockIdx.x * BLOCK_SLOTS, here = min(BLOCK_SLOTS, tokens * TOP_K - first);
    int expert = threadIdx.x < here ? ids[first + threadIdx.x] : -1, rank;
    if (threadIdx.x < PARTS * EXPERTS) {
        int part = threadIdx.x / EXPERTS, e = threadIdx.x % EXPERTS, total = 0, before = 0;
#pragma unroll 8
        for (int b = part; b < gridDim.x; b += PARTS) {
            int n = counts[(i64)b * EXPERTS + e];
            total += n;
            before += b < blockIdx.x ? n : 0;
        }
        part_total[part][e] = total;
        part_before[part][e] = before;
    }
    count_block(l, expert, rank);
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) {
        int total = 0, before = 0;
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            total += part_total[p][e];
            before += part_before[p][e];
        }
        l.total[e] = total;
        l.before[e] = before;
    }
    __syncthreads();
    place_block(l, expert, rank, offsets, slots, tiles, tile_rows, max_tiles);
}

KERNEL __launch_bounds__(128) moe_combine(const elem *y, // [tokens * TOP_K, hidden], already weighted
#if EP
                                          const int *ids,             // [tokens, TOP_K], local numbers or -1
#endif
                                          elem *__restrict__ out,     // [tokens, hidden]
                                          int tokens, int hidden) {
    int column = (blockIdx.x * 128 + threadIdx.x) * 8;
    pdl_wait();
    pdl_launch();
    if (column >= hidden) return;
    for (int t = blockIdx.y; t < tokens; t += gridDim.y) {
        const elem *row = y + (i64)t * TOP_K * hidden + column;
        uint4 part[TOP_K];
#pragma unroll
        for (int j = 0; j < TOP_K; j++) {
#if EP
            bool here = ids[(i64)t * TOP_K + j] >= 0;
#else
            constexpr bool here = true;
#endif
            part[j] = here ? load16(row + (i64)j * hidden) : make_uint4(0, 0, 0, 0);
        }
        Vec8 sum = unpack8(part[0]);
#pragma unroll
        for (int j = 1; j < TOP_K; j++) {
            Vec8 v = unpack8(part[j]);
#pragma unroll
            for (int i = 0; i < 8; i++) sum.v[i] += v.v[i];
        }
        store16(out + (i64)t * hidden + column, pack8(sum));
    }
}
