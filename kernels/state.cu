// What surrounds a timed forward: state put back, caches flushed, clocks read, and the read-bandwidth ceiling.

#define STREAM_HINT ".L1::no_allocate"
#include "common.cuh"

DEVICE u64 global_nanos() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)::"memory");
    return t;
}
DEVICE u32 multiprocessor() {
    u32 id;
    asm volatile("mov.u32 %0, %smid;" : "=r"(id));
    return id;
}

// Copies segments of memory, all of one size: KV blocks of every layer out to their saved copies, or back.
// Launch: grid (segments, ceil(bytes / 16384), 1), block (256, 1, 1). Addresses and bytes are multiples of 16.
struct Segment {
    u64 pool, saved; // device addresses
};
KERNEL __launch_bounds__(256) copy_segments(const Segment *__restrict__ segments, // [grid.x]
                                            u32 bytes, int restore) {             // restore: 1 = saved to pool, 0 = pool to saved
    pdl_wait();
    pdl_launch();
    Segment s = segments[blockIdx.x];
    const u8 *from = (const u8 *)(restore ? s.saved : s.pool);
    u8 *to = (u8 *)(restore ? s.pool : s.saved);
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 at = blockIdx.y * 16384u + (threadIdx.x + 256u * i) * 16u;
        if (at < bytes) v[i] = load16(from + at);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 at = blockIdx.y * 16384u + (threadIdx.x + 256u * i) * 16u;
        if (at < bytes) store16(to + at, v[i]);
    }
}

// Reads a buffer: the read-bandwidth ceiling (4 GiB), and the flush of an L2 (more than twice its size; reading leaves
// no dirty line whose write-back a timed kernel would pay for).
// Launch: grid (any; 16 * multiprocessors is good), block (512, 1, 1). `bytes` is a multiple of 16.
KERNEL __launch_bounds__(512) read_sum(const uint4 *__restrict__ data, // [bytes / 16]
                                       u64 bytes,
                                       u32 *__restrict__ sums) {        // [grid]
    __shared__ u32 warp_sums[16];
    u64 vectors = bytes / 16, stride = (u64)gridDim.x * 512 * 8;
    u32 sum = 0;
    pdl_wait();
    pdl_launch();
    for (u64 at = (u64)blockIdx.x * 512 * 8 + threadIdx.x; at < vectors; at += stride) {
        uint4 v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = at + i * 512 < vectors ? load16_stream(data + at + i * 512) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < 8; i++) sum += (v[i].x + v[i].y) + (v[i].z + v[i].w);
    }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        sum = 0;
        for (int i = 0; i < 16; i++) sum += warp_sums[i];
        sums[blockIdx.x] = sum;
    }
}

// Stamps every multiprocessor's clock and the global timer. Two launches, side 0 before and side 1 after a forward, fill
// one row of the ring; side 1 moves on to the next.
// Launch: grid (multiprocessors, 1, 1), block (32, 1, 1), dynamic shared memory: the most a block may have, so that each
// multiprocessor holds one block. A multiprocessor that got no block keeps its old stamps: the host tells them by their age.
KERNEL __launch_bounds__(32) clock_probe(ulonglong2 *__restrict__ ring, // [rows, multiprocessors, 2], (clock64, nanoseconds)
                                         u32 *__restrict__ state,       // [2]: rows filled so far, blocks arrived; zero at first
                                         u32 rows, u32 multiprocessors, u32 side) {
    pdl_wait();
    if (threadIdx.x != 0) return;
    u32 filled = *(volatile u32 *)&state[0], sm = multiprocessor();
    ulonglong2 stamp;
    stamp.x = clock64();
    stamp.y = global_nanos();
    if (sm < multiprocessors) ring[((u64)(filled % rows) * multiprocessors + sm) * 2 + side] = stamp;
    __threadfence();
    if (atomicAdd(&state[1], 1u) == gridDim.x - 1) {
        state[1] = 0;
        if (side == 1) state[0] = filled + 1;
    }
}

// Spins for a known time: for tests of timers. Launch: grid (1, 1, 1), block (1, 1, 1).
KERNEL spin_nanos(u64 nanos) {
    pdl_wait();
    u64 start = global_nanos();
    while (global_nanos() - start < nanos) {
    }
}
KERNEL spin_cycles(u64 cycles) {
    pdl_wait();
    i64 start = clock64();
    while ((u64)(clock64() - start) < cycles) {
    }
}
