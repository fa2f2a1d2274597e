// What every kernel file shares: the 16-bit element type, conversions, and thin wrappers around PTX.
//
// No toolkit header is included, so NVRTC needs nothing but this file (given to it as the header "common.cuh").
//
// Macros that a compilation sets with -D:
//   DTYPE_BF16 or DTYPE_F16   the element type of weights, activations and KV (exactly one of them)
//
// Every kernel starts with pdl_wait() and calls pdl_launch() once: both do nothing unless the launch carries the
// attribute for programmatic stream serialisation (sm_90 and newer).

#pragma once

#if defined(DTYPE_BF16) == defined(DTYPE_F16)
#error "define exactly one of DTYPE_BF16 and DTYPE_F16"
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// The bits of one bfloat16 or binary16 number.
typedef u16 elem;

#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__ void

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define HAS_PDL 1
#else
#define HAS_PDL 0
#endif

// Until the kernels that this launch depends on have completed and their writes can be seen.
DEVICE void pdl_wait() {
#if HAS_PDL
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream start its blocks; they still wait in their own pdl_wait.
DEVICE void pdl_launch() {
#if HAS_PDL
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- conversions -------------------------------------------------------------------------------------------------

// The two elements of a 32-bit word as floats; .x is the lower half, the element at the lower address.
DEVICE float2 unpack2(u32 w) {
    float2 f;
#ifdef DTYPE_BF16
    f.x = __uint_as_float(w << 16);
    f.y = __uint_as_float(w & 0xffff0000u);
#else
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(f.x), "=f"(f.y) : "r"(w));
#endif
    return f;
}

// Rounds two floats to nearest even; `lo` goes to the lower half.
DEVICE u32 pack2(float lo, float hi) {
    u32 w;
#ifdef DTYPE_BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo));
#endif
    return w;
}

DEVICE float to_float(elem e) { return unpack2(e).x; }
DEVICE elem from_float(float f) { return (elem)(pack2(f, 0.0f) & 0xffffu); }

// Eight elements, the 16 bytes of one vector access.
struct Vec8 {
    float v[8];
};

DEVICE Vec8 unpack8(uint4 w) {
    Vec8 r;
    float2 a = unpack2(w.x), b = unpack2(w.y), c = unpack2(w.z), d = unpack2(w.w);
    r.v[0] = a.x; r.v[1] = a.y; r.v[2] = b.x; r.v[3] = b.y;
    r.v[4] = c.x; r.v[5] = c.y; r.v[6] = d.x; r.v[7] = d.y;
    return r;
}

DEVICE uint4 pack8(const Vec8 &r) {
    return make_uint4(pack2(r.v[0], r.v[1]), pack2(r.v[2], r.v[3]), pack2(r.v[4], r.v[5]), pack2(r.v[6], r.v[7]));
}

// ---- memory ------------------------------------------------------------------------------------------------------

DEVICE uint4 load16(const void *p) { return *(const uint4 *)p; }
DEVICE void store16(void *p, uint4 v) { *(uint4 *)p = v; }

// A read of data that nobody writes while the kernel runs and that is read once: it takes no place in L1.
#ifndef STREAM_HINT
#define STREAM_HINT ".L1::no_allocate.L2::256B" // better than none where a thread walks along a row, worse where a warp reads 512 bytes
#endif
DEVICE uint4 load16_stream(const void *p) {
    uint4 v;
    asm volatile("ld.global.nc" STREAM_HINT ".v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

DEVICE u32 shared_addr(const void *p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes from global to shared memory; zeros if `valid` is false (the address must still be one that exists).
#ifndef COPY_HINT
#define COPY_HINT ".L2::128B"
#endif
DEVICE void cp_async16(u32 dst, const void *src, bool valid) {
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global" COPY_HINT " [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most N of this thread's newest groups are still on their way.
template <int N> DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

DEVICE void store_shared16(u32 dst, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE uint4 load_shared16(u32 src) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(src) : "memory");
    return v;
}
DEVICE void store_shared4(u32 dst, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(dst), "r"(v) : "memory"); }

// ---- matrix fragments --------------------------------------------------------------------------------------------

// Four 8x8 matrices; lane i gives the address of row i % 8 of matrix i / 8.
DEVICE void ldmatrix4(u32 (&r)[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}
DEVICE void ldmatrix4_trans(u32 (&r)[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}

// d[16, 8] += a[16, 16] * b[16, 8], accumulated in float32. With g = lane / 4 and t = lane % 4:
// a0 = (g, 2t), a1 = (g + 8, 2t), a2 = (g, 2t + 8), a3 = (g + 8, 2t + 8); b0 = (2t, g), b1 = (2t + 8, g);
// d0, d1 = (g, 2t), (g, 2t + 1); d2, d3 = (g + 8, 2t), (g + 8, 2t + 1).
DEVICE void mma16816(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#ifdef DTYPE_BF16
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
#endif
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- arithmetic --------------------------------------------------------------------------------------------------

#define NEG_INF __int_as_float(0xff800000)

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float warp_sum(float x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}
DEVICE float warp_max(float x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// ---- barriers and asynchronous tensor cores (sm_90a) -------------------------------------------------------------

#ifdef DTYPE_BF16
#define WGMMA_TYPES "bf16.bf16"
#else
#define WGMMA_TYPES "f16.f16"
#endif

DEVICE void barrier_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
DEVICE void barrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEVICE void barrier_wait(u32 bar, u32 parity) {
    asm volatile("{.reg .pred p;\n"
                 "again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
                 "@p bra done;\n"
                 "bra again;\n"
                 "done:}" ::"r"(bar), "r"(parity) : "memory");
}
DEVICE bool barrier_test(u32 bar, u32 parity) {
    u32 done;
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    return done;
}
// Ordinary writes to shared memory before this can be seen by the tensor cores after it.
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Keeps the compiler from moving accesses of accumulators across a wait.
template <int N> DEVICE void hold(float (&d)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) asm volatile("" : "+f"(d[i][j])::"memory");
}

// Matrix descriptors with the 128-byte swizzle; rows are 128 bytes, groups of 8 rows 1024 bytes apart.
// Columns along the sum (Q, K): the offset between slabs is unused. Columns across it (V): slabs of 64 columns are `slab` bytes apart.
DEVICE u64 descriptor(u32 addr, u32 slab) { return (u64)((addr & 0x3ffff) >> 4) | (u64)(slab >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62; }
#endif

// ---- tiles of head vectors in shared memory ----------------------------------------------------------------------

#ifdef HEAD_DIM
#if HEAD_DIM % 8 != 0 || HEAD_DIM > 256
#error "HEAD_DIM must be a multiple of 8, at most 256"
#endif
// A tile row is one token's head: UNITS vectors of 16 bytes that exist, PAD_UNITS with zeros up to a multiple of 16
// elements. Rows of a multiple of 8 units are swizzled, others get an odd stride, so that the 8 rows of an ldmatrix
// never share a bank.
#define UNITS (HEAD_DIM / 8)
#define PAD_DIM ((HEAD_DIM + 15) / 16 * 16)
#define PAD_UNITS (PAD_DIM / 8)
#define ROW_UNITS (PAD_UNITS % 8 == 0 ? PAD_UNITS : (PAD_UNITS | 1))
#define ROW_BYTES (ROW_UNITS * 16)
DEVICE u32 tile_offset(int row, int unit) {
    return (u32)(row * ROW_UNITS + (PAD_UNITS % 8 == 0 ? (unit ^ (row & 7)) : unit)) * 16u;
}
#endif
