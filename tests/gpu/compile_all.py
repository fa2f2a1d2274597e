"""Compiles every kernel for every architecture and preset, without a GPU: `python3 tests/gpu/compile_all.py`.

Prints registers, spilled bytes and shared memory; exits 1 on an error, a warning, a spill, or dynamic shared memory beyond
what a block of that architecture may have. Needs only the wheel nvidia-cuda-nvrtc. `--quick` takes sm_90a and one block size.
"""
import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import nvrtc

ARCHS = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"]
LIMIT = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227, "sm_100": 227, "sm_120": 99}  # KiB
HEADS = [(128, 4), (128, 8), (64, 3), (16, 2), (256, 2), (80, 7)]  # (HEAD_DIM, GROUP)
EXTRA_HEADS = [(24, 1), (96, 16), (192, 4), (64, 8)]
# Shapes of the gemv kernel from which a launcher chooses by timing; the first is the default, HIGH those for more than 8 rows.
GEMV_VARIANTS = [dict(), dict(N_TILES=1, UNROLL=4, MIN_BLOCKS=4), dict(N_TILES=2, UNROLL=4, WARPS=4, MIN_BLOCKS=6), dict(N_TILES=2, UNROLL=2, MIN_BLOCKS=4), dict(N_TILES=1, UNROLL=2, MIN_BLOCKS=6)]
HIGH_VARIANTS = [GEMV_VARIANTS[0], GEMV_VARIANTS[3]]
# Shapes of the grouped products by rows of a tile: what a launcher chooses from (moe_gemm.cu's defaults are the first of each).
MOE_VARIANTS = [dict(BM=16), dict(BM=32), dict(BM=64), dict(BM=128)]
# On sm_90a, for many rows an expert; WGMMA is no macro but the file.
MOE_HOPPER = [dict(BM=128, WGMMA=1), dict(BM=128, WGMMA=1, BN=192)]
# Others, that are timed only.
MOE_TRIALS = [dict(BM=16, BN=64, BK=64, STAGES=6, MIN_BLOCKS=3), dict(BM=16, BN=128, BK=128, STAGES=3, WARPS_N=8), dict(BM=16, BN=32, BK=64, STAGES=8, WARPS_N=2, MIN_BLOCKS=4),
              dict(BM=16, COPY_HINT='".L2::256B"'), dict(BM=64, BN=64, STAGES=6), dict(BM=128, BN=256, STAGES=3, WARPS_N=4, MIN_BLOCKS=1),
              dict(BM=128, WGMMA=1, BN=128, STAGES=6), dict(BM=128, WGMMA=1, GROUP_M=16)]
MOE_MODELS = [dict(EXPERTS=4, TOP_K=2, ROUTE=1), dict(EXPERTS=8, TOP_K=2, ROUTE=1), dict(EXPERTS=128, TOP_K=8, ROUTE=1), dict(EXPERTS=128, TOP_K=8, ROUTE=0),
              dict(EXPERTS=32, TOP_K=4, ROUTE=2), dict(EXPERTS=128, TOP_K=4, ROUTE=2), dict(EXPERTS=256, TOP_K=8, ROUTE=3), dict(EXPERTS=64, TOP_K=6, ROUTE=0)]
PLAIN = ["embed", "act", "norm", "fill", "state"]


def row_bytes(head_dim):
    units = (head_dim + 15) // 16 * 2
    return 16 * (units if units % 8 == 0 else units | 1)


def decode_shared(head_dim, m_tiles=1, stages=None):
    stages = stages or (2 if head_dim > 192 or head_dim * m_tiles > 192 else 3 if head_dim > 64 else 4)
    rows, warps = 16 * m_tiles, 2 if head_dim > 128 else 4
    queries = 0 if m_tiles * ((head_dim + 15) // 16) <= 8 else rows * row_bytes(head_dim)
    return warps * stages * 32 * row_bytes(head_dim) + queries + warps * rows * 8


def prefill_shared(head_dim):
    bm, bn = (128, 64) if head_dim <= 128 else (64, 32)
    return (bm + 4 * bn) * row_bytes(head_dim)


def wgmma_shared(head_dim):
    return 2048 + (2 * 128 + 4 * 128) * head_dim * 2


def moe_shape(kind, v):
    """(output columns, threads, dynamic shared memory) of a block of moe_gemm1 or moe_gemm2, as moe_gemm.cu and moe_gemm_hopper.cu say."""
    bm = v["BM"]
    if v.get("WGMMA"):
        bn = v.get("BN", 256)
        return bn // 2 if kind == 1 else bn, 384, 1024 + v.get("STAGES", 4) * (128 + bn) * 128 + 8 * 16 * 80 + 128
    bn, bk = v.get("BN", 64 if bm <= 32 else 128), v.get("BK", 128 if bm <= 32 else 64)
    stages = v.get("STAGES", {16: 4, 32: 3, 64: 4}.get(bm, 3))
    warps = v.get("WARPS_M", 1 if bm <= 32 else 2) * v.get("WARPS_N", 4 if bm <= 32 else 2)
    return bn // 2 if kind == 1 else bn, 32 * warps, stages * (bm + bn) * bk * 2


def jobs(quick=False):
    """(file, arch, macros, {kernel: dynamic shared memory})"""
    for arch in ["sm_90a"] if quick else ARCHS:
        for dtype in ("DTYPE_BF16", "DTYPE_F16"):
            for name in PLAIN:
                yield name, arch, {dtype: 1}, {}
            yield "embed", arch, {dtype: 1, "SHARD": 1}, {}
            for high in (0, 1):
                for variant in HIGH_VARIANTS if high else GEMV_VARIANTS:
                    yield "gemv", arch, {dtype: 1, "HIGH_ROWS": high, **variant}, {}
            for m in MOE_MODELS:
                yield "moe_route", arch, {dtype: 1, **m}, {}
                yield "moe_route", arch, {dtype: 1, **m, "EP": 1}, {}
                yield "moe_travel", arch, {dtype: 1, "TOP_K": m["TOP_K"]}, {}
            for v in MOE_VARIANTS:
                for k, act in ((8, 0), (4, 1)):
                    yield "moe_gemm", arch, {dtype: 1, "KIND": 1, "TOP_K": k, "ACT": act, "INTERLEAVED": act, **v}, {"moe_gemm1": moe_shape(1, v)[2]}
                yield "moe_gemm", arch, {dtype: 1, "KIND": 2, **v}, {"moe_gemm2": moe_shape(2, v)[2]}
            for v in MOE_HOPPER if arch == "sm_90a" else ():
                shape = {n: a for n, a in v.items() if n not in ("WGMMA", "BM")}
                for k, act in ((8, 0), (4, 1)):
                    yield "moe_gemm_hopper", arch, {dtype: 1, "KIND": 1, "TOP_K": k, "ACT": act, "INTERLEAVED": act, **shape}, {"moe_gemm1_wgmma": moe_shape(1, v)[2]}
                yield "moe_gemm_hopper", arch, {dtype: 1, "KIND": 2, **shape}, {"moe_gemm2_wgmma": moe_shape(2, v)[2]}
            for d, g in HEADS + ([] if quick else EXTRA_HEADS):
                for bs in (16,) if quick else (16, 32, 64):
                    if (d, g) in EXTRA_HEADS and bs != 16:
                        continue
                    yield "rope", arch, {dtype: 1, "HEAD_DIM": d, "BLOCK_SIZE": bs}, {}
                    base = {dtype: 1, "HEAD_DIM": d, "GROUP": g, "BLOCK_SIZE": bs}
                    sunk = [base] + ([{**base, "SINKS": 1}] if d in (16, 64) and bs == 16 else [])
                    for b in sunk:
                        yield "prefill", arch, b, {"prefill_attention": prefill_shared(d)}
                    if arch == "sm_90a" and d in (64, 128):
                        for b in sunk:
                            yield "prefill_hopper", arch, b, {"prefill_wgmma": wgmma_shared(d)}
                    for m in (1, 2) if d <= 128 else (1,):
                        for b in sunk:
                            yield "decode", arch, {**b, "M_TILES": m}, {"decode_attention": decode_shared(d, m)}


def one(job):
    name, arch, macros, shared = job
    try:
        _, log = nvrtc.compile(name, arch, macros)
    except nvrtc.CompileError as e:
        return job, None, [str(e)]
    found, problems = nvrtc.resources(log)
    for kernel, (_, spills, _) in found.items():
        if spills:
            problems.append(f"{kernel}: {spills} bytes spilled")
        if shared.get(kernel, 0) > LIMIT[arch] * 1024:
            problems.append(f"{kernel}: {shared[kernel]} bytes of dynamic shared memory, {LIMIT[arch]} KiB allowed")
    return job, found, problems


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", help="a file name, such as decode")
    args = parser.parse_args()
    bad = n = 0
    todo = [j for j in jobs(args.quick) if not args.only or j[0] == args.only]
    with ProcessPoolExecutor(args.jobs) as pool:
        for (name, arch, macros, shared), found, problems in pool.map(one, todo):
            n += 1
            flags = " ".join(k if v == 1 and k.startswith("DTYPE") else f"{k}={v}" for k, v in macros.items())
            for kernel, (registers, spills, static) in (found or {}).items():
                print(f"{arch:7} {kernel:22} {registers:4} registers {spills:4} spilled {static:6} static {shared.get(kernel, 0):7} dynamic  {flags}")
            for p in problems:
                print(f"  PROBLEM {name} {arch} {flags}: {p}")
            bad += bool(problems)
    print(f"{n} compilations, {bad} with problems")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
