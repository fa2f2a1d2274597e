"""Checks every kernel of kernels/*.cu against float32 PyTorch on a GPU, then times the ones that matter.

    python3 tests/gpu/check_kernels.py [--cubins FOLDER] [--out FOLDER] [--no-check] [--no-time] [--time NAME,NAME]

Random ragged shapes, fresh inputs every time; outputs start as NaN, so do KV positions that must not be read. Each result is
judged by its relative error ||out - ref|| / ||ref|| and by its worst element, |out - ref| <= 4 u |ref| + 4 u rms(row of ref), where u is
the type's rounding unit (2^-8 or 2^-11): one rounding of the result, and sums whose terms were rounded too. Every kernel
runs twice and must repeat bit for bit. Times are medians of graph replays in ratio to ceilings measured in the same run.
"""
import argparse
import ctypes
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import nvrtc
from compile_all import GEMV_VARIANTS, HIGH_VARIANTS, decode_shared, prefill_shared, wgmma_shared
import plan

ARCH = "sm_90a"


# ---- what is compiled: before torch is imported, in parallel -------------------------------------------------------

def macros(dtype, **more):
    return {"DTYPE_BF16" if dtype == "bf16" else "DTYPE_F16": 1, **more}


CONFIGS = [(128, 4, 16), (128, 8, 32), (64, 3, 16), (16, 2, 16), (256, 2, 64), (80, 7, 64), (24, 1, 32), (192, 4, 16), (96, 16, 16)]
WGMMA_VARIANTS = [dict()]
DECODE_VARIANTS = [dict()]


def wanted():
    for dtype in ("bf16", "f16"):
        for name in ("embed", "act", "norm", "fill", "state"):
            yield name, macros(dtype)
        for high in (0, 1):
            yield "gemv", macros(dtype, HIGH_ROWS=high)
        for d, g, bs in CONFIGS if dtype == "bf16" else CONFIGS[:4]:
            yield "rope", macros(dtype, HEAD_DIM=d, BLOCK_SIZE=bs)
            yield "prefill", macros(dtype, HEAD_DIM=d, GROUP=g, BLOCK_SIZE=bs)
            if plan.wgmma_serves(d, bs):
                yield "prefill_hopper", macros(dtype, HEAD_DIM=d, GROUP=g, BLOCK_SIZE=bs)
            for m in (1, 2) if d <= 128 else (1,):
                yield "decode", macros(dtype, HEAD_DIM=d, GROUP=g, BLOCK_SIZE=bs, M_TILES=m)
    for v in WGMMA_VARIANTS:
        yield "prefill_hopper", macros("bf16", HEAD_DIM=128, GROUP=4, BLOCK_SIZE=16, **v)
    for v in DECODE_VARIANTS:
        yield "decode", macros("bf16", HEAD_DIM=128, GROUP=4, BLOCK_SIZE=16, M_TILES=1, **v)
    for high in (0, 1):
        for v in HIGH_VARIANTS if high else GEMV_VARIANTS:
            yield "gemv", macros("bf16", HIGH_ROWS=high, **v)


def compile_one(job):
    return nvrtc.cached(job[0], ARCH, job[1], job[2])[0] is not None


# ---- the driver ----------------------------------------------------------------------------------------------------

class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_byte * 60)]


class Config(ctypes.Structure):
    _fields_ = [("dims", ctypes.c_uint * 6), ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p), ("attrs", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint)]


class Driver:
    def __init__(self, folder):
        self.cuda, self.folder, self.functions, self.pdl = ctypes.CDLL("libcuda.so.1"), folder, {}, False

    def check(self, status, what):
        if status:
            name = ctypes.c_char_p()
            self.cuda.cuGetErrorName(status, ctypes.byref(name))
            raise RuntimeError(f"{what}: {name.value}")

    def function(self, file, kernel, **m):
        key = (file, kernel, tuple(sorted(m.items())))
        if key not in self.functions:
            cubin, _ = nvrtc.cached(file, ARCH, m, self.folder)
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self.check(self.cuda.cuModuleLoadData(ctypes.byref(module), cubin), f"load {key}")
            self.check(self.cuda.cuModuleGetFunction(ctypes.byref(function), module, kernel.encode()), f"get {key}")
            self.functions[key] = function
        return self.functions[key]

    def launch(self, function, grid, block, shared, *args):
        import torch
        if shared > 48 * 1024:
            self.check(self.cuda.cuFuncSetAttribute(function, 8, shared), "shared memory")
        values = []
        for a in args:
            if a is None:
                values.append(ctypes.c_void_p(0))
            elif isinstance(a, torch.Tensor):
                values.append(ctypes.c_void_p(a.data_ptr()))
            elif isinstance(a, bool) or isinstance(a, int):
                values.append(ctypes.c_int(a))
            elif isinstance(a, float):
                values.append(ctypes.c_float(a))
            else:
                values.append(a)
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.cast(ctypes.pointer(v), ctypes.c_void_p) for v in values])
        grid, block = (tuple(x) + (1, 1, 1) for x in (grid, block))
        attribute = Attribute(6, 0, 1)
        config = Config((ctypes.c_uint * 6)(*grid[:3], *block[:3]), shared, torch.cuda.current_stream().cuda_stream, ctypes.pointer(attribute), 1 if self.pdl else 0)
        self.check(self.cuda.cuLaunchKernelEx(ctypes.byref(config), function, pointers, None), "launch")


u32, u64 = ctypes.c_uint32, ctypes.c_uint64


class Kernels:
    """The launchers, as the Rust side has them."""

    def __init__(self, driver, dtype):
        import torch
        self.d, self.dtype = driver, dtype
        self.torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float16
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count

    def get(self, file, kernel, **m):
        return self.d.function(file, kernel, **macros(self.dtype, **m))

    def embed(self, table, ids, out):
        self.d.launch(self.get("embed", "embed_gather"), (len(ids),), (128,), 0, table, ids, out, table.shape[1])

    def silu_mul(self, gate_up, out):
        t, i = out.shape
        self.d.launch(self.get("act", "silu_mul"), ((i // 8 + 255) // 256, min(t, 65535)), (256,), 0, gate_up, out, t, i)

    def add_rmsnorm(self, delta, residual, weight, eps, out):
        t, h = out.shape
        threads = min(1024, (h // 8 + 31) // 32 * 32) if t < 256 else max(128, (h // 32 + 31) // 32 * 32)
        self.d.launch(self.get("norm", "add_rmsnorm"), (t,), (threads,), 0, delta, residual, weight, out, h, eps)

    def rope(self, qkv, qn, kn, table, positions, slots, kv, q_heads, kv_heads, d, bs, eps):
        t = qkv.shape[0]
        lanes = next(1 << i for i in range(6) if 1 << i >= d // 8)
        few = t <= 64
        groups = -(-(q_heads + 2 * kv_heads) // (32 // lanes * (1 if few else 4)))
        self.d.launch(self.get("rope", "qk_norm_rope_kvwrite" + ("_few" if few else ""), HEAD_DIM=d, BLOCK_SIZE=bs), ((t * groups + 3) // 4,), (128,), 0,
                      qkv, qn, kn, table, positions, slots, kv, t, q_heads, kv_heads, eps)

    def decode(self, a, p, out, parts, window=0, m_tiles=1, sinks=None, **extra):
        d = a.head_dim
        block = 64 if d > 128 else 128
        m = dict(HEAD_DIM=d, GROUP=a.group, BLOCK_SIZE=a.block_size, M_TILES=m_tiles, **extra)
        last = (sinks,) if m.get("SINKS") else ()
        self.d.launch(self.get("decode", "decode_attention", **m), (p.blocks,), (block,), decode_shared(d, m_tiles, extra.get("STAGES")),
                      a.qkv, a.kv, a.tables, a.query_start, a.kv_lens, p.items, p.block_items, out, parts[0], parts[1],
                      a.qkv.shape[1], a.tables.shape[1], a.kv_heads, window, a.scale, *last)
        if p.combines is not None:
            self.d.launch(self.get("decode", "attention_combine", **m), (len(p.combines), 16 * m_tiles), (128,), 0,
                          parts[0], parts[1], a.query_start, p.combines, out, a.kv_heads, *last)

    def prefill(self, a, items, out, window=0, sinks=None, **extra):
        d, last = a.head_dim, (sinks,) if extra.get("SINKS") else ()
        self.d.launch(self.get("prefill", "prefill_attention", HEAD_DIM=d, GROUP=a.group, BLOCK_SIZE=a.block_size, **extra), (len(items),), (128,), prefill_shared(d),
                      a.qkv, a.kv, a.tables, a.query_start, a.kv_lens, items, out, a.qkv.shape[1], a.tables.shape[1], a.kv_heads, window, a.scale, *last)

    def prefill_wgmma(self, a, shares, out, window=0, sinks=None, **extra):
        last = (sinks,) if extra.get("SINKS") else ()
        d, (items, block_items, blocks) = a.head_dim, shares
        self.d.launch(self.get("prefill_hopper", "prefill_wgmma", HEAD_DIM=d, GROUP=a.group, BLOCK_SIZE=a.block_size, **extra), (blocks,), (384,), wgmma_shared(d),
                      a.qkv, a.kv, a.tables, a.query_start, a.kv_lens, items, block_items, out, a.qkv.shape[1], a.tables.shape[1], a.kv_heads, window, a.scale, *last)

    def gemv(self, x, w, bias, out, **extra):
        (t, k), n = x.shape, w.shape[0]
        m = dict(HIGH_ROWS=int(t > 8), **extra)
        self.d.launch(self.get("gemv", "gemv", **m), ((n + 8 * m.get("N_TILES", 2) - 1) // (8 * m.get("N_TILES", 2)),), (32 * m.get("WARPS", 8),), 0, x, w, bias, out, t, n, k)

    def bias_add(self, out, bias):
        t, n = out.shape
        self.d.launch(self.get("gemv", "bias_add", HIGH_ROWS=0), ((n // 8 + 127) // 128, min(t, 65535)), (128,), 0, out, bias, t, n)

    def read_sum(self, data, sums, **extra):
        self.d.launch(self.get("state", "read_sum", **extra), (len(sums),), (512,), 0, data, u64(data.numel() * data.element_size()), sums)


class Attention:
    """A ragged batch over a paged pool whose unused positions are NaN."""

    def __init__(self, requests, head_dim, group, kv_heads, block_size, dtype, window=0, poison=True):
        import torch
        self.requests, self.head_dim, self.group, self.kv_heads, self.block_size, self.dtype = requests, head_dim, group, kv_heads, block_size, dtype
        self.scale = head_dim ** -0.5
        dev = "cuda"
        counts = [(k + block_size - 1) // block_size for _, k in requests]
        total = sum(counts)
        self.kv = torch.empty(total + 1, 2, block_size, kv_heads, head_dim, device=dev, dtype=dtype).normal_()
        perm = (torch.randperm(total).to(dev) + 1).to(torch.int32)
        tables = torch.zeros(len(requests), max(counts), dtype=torch.int32, device=dev)
        at = 0
        for r, ((q, k), n) in enumerate(zip(requests, counts)):
            tables[r, :n] = perm[at : at + n]
            if poison:
                if k % block_size:
                    self.kv[perm[at + n - 1].long(), :, k % block_size :] = float("nan")
                dead = max(0, k - q - window + 1) // block_size if window else 0
                if dead:
                    self.kv[perm[at : at + dead].long()] = float("nan")
                    tables[r, :dead] = 0
            at += n
        if poison:
            self.kv[0] = float("nan")
        self.tables = tables
        starts = [0]
        for q, _ in requests:
            starts.append(starts[-1] + q)
        self.starts, self.tokens = starts, starts[-1]
        self.query_start = torch.tensor(starts, dtype=torch.int32, device=dev)
        self.kv_lens = torch.tensor([k for _, k in requests], dtype=torch.int32, device=dev)
        self.q_heads = kv_heads * group
        self.qkv = torch.empty(self.tokens, (self.q_heads + 2 * kv_heads) * head_dim, device=dev, dtype=dtype).normal_()

    def reference(self, r, window=0, sinks=None):
        import torch
        q_len, kv_len = self.requests[r]
        a, b = self.starts[r], self.starts[r + 1]
        n = (kv_len + self.block_size - 1) // self.block_size
        kv = self.kv[self.tables[r, :n].long()].float().nan_to_num(0.0)
        k = kv[:, 0].reshape(-1, self.kv_heads, self.head_dim)[:kv_len].permute(1, 2, 0)
        v = kv[:, 1].reshape(-1, self.kv_heads, self.head_dim)[:kv_len].permute(1, 0, 2)
        out = torch.empty(q_len, self.q_heads * self.head_dim, device="cuda")
        step = max(1, (1 << 27) // (kv_len * self.q_heads))
        for i in range(0, q_len, step):
            j = min(q_len, i + step)
            q = self.qkv[a + i : a + j, : self.q_heads * self.head_dim].float().view(j - i, self.kv_heads, self.group, self.head_dim).permute(1, 0, 2, 3).reshape(self.kv_heads, -1, self.head_dim)
            s = (q @ k * self.scale).view(self.kv_heads, j - i, self.group, kv_len)
            pos = torch.arange(kv_len - q_len + i, kv_len - q_len + j, device="cuda")[:, None]
            key = torch.arange(kv_len, device="cuda")[None]
            mask = key > pos
            if window:
                mask |= key <= pos - window
            s.masked_fill_(mask[None, :, None], float("-inf"))
            if sinks is None:
                p = torch.softmax(s, -1)
            else: # one more column, without a value
                column = sinks.float().view(self.kv_heads, 1, self.group, 1).expand(-1, j - i, -1, 1)
                p = torch.softmax(torch.cat([s, column], -1), -1)[..., :-1]
            o = p.reshape(self.kv_heads, -1, kv_len) @ v
            out[i:j] = o.view(self.kv_heads, j - i, self.group, self.head_dim).permute(1, 0, 2, 3).reshape(j - i, -1)
        return out


# ---- correctness ---------------------------------------------------------------------------------------------------

class Judge:
    def __init__(self):
        self.worst, self.failed = {}, []

    def see(self, kernel, what, out, ref, dtype, repeat=None, ops=1):
        """`ops` kernels with rounded results follow each other: their roundings add up as their squares do."""
        import torch
        u = 2.0 ** -8 if dtype == "bf16" else 2.0 ** -11
        same = repeat is None or torch.equal(repeat.contiguous().view(torch.int16), out.contiguous().view(torch.int16))
        out, ref = out.float(), ref.float()
        rms = ref.pow(2).mean(-1, keepdim=True).sqrt()
        rel = ((out - ref).pow(2).sum().sqrt() / ref.pow(2).sum().sqrt()).item()
        worst = ((out - ref).abs() / (4 * u * ref.abs() + 4 * u * rms)).max().item()
        good = rel < u * ops ** 0.5 and worst <= ops ** 0.5 and same
        key = f"{kernel} {dtype}"
        old = self.worst.get(key, (0, 0, 0))
        self.worst[key] = (max(old[0], rel) if rel == rel else float("nan"), max(old[1], worst) if worst == worst else float("nan"), old[2] + 1)
        if not good:
            self.failed.append(f"{key} {what}: rel {rel:.3g}, worst {worst:.3g}, repeats {same}")
            print("FAILED", self.failed[-1], flush=True)

    def exact(self, kernel, what, ok):
        old = self.worst.get(kernel, (0, 0, 0))
        self.worst[kernel] = (old[0], old[1], old[2] + 1)
        if not ok:
            self.failed.append(f"{kernel} {what}: not equal")
            print("FAILED", self.failed[-1], flush=True)


def twice(run, out):
    """The kernel's output from a poisoned start, and once more."""
    out.fill_(float("nan"))
    run()
    first = out.clone()
    out.fill_(float("nan"))
    run()
    return first, out


def check_simple(k, judge, tiny):
    import torch
    dev, dt, name = "cuda", k.torch_dtype, k.dtype
    rnd = lambda *s: torch.randn(*s, device=dev).to(dt)
    for t, h in [(3, 576), (257, 64), (2, 16)] if tiny else [(1, 576), (3, 4096), (257, 64), (33, 8192), (2, 16), (5, 5120), (2, 16384), (300, 4096)]:
        table, ids = rnd(1000, h), torch.randint(0, 1000, (t,), device=dev, dtype=torch.int32)
        out, again = twice(lambda: k.embed(table, ids, o), o := torch.empty(t, h, device=dev, dtype=dt))
        judge.exact("embed_gather", (t, h), torch.equal(out, table[ids.long()]) and torch.equal(out, again))
        for with_delta in (True, False):
            delta, res0, w = rnd(t, h), rnd(t, h), 1 + 0.1 * rnd(h)
            res = res0.clone()

            def run():
                res.copy_(res0)
                k.add_rmsnorm(delta if with_delta else None, res, w, 1e-5, o)
            out, again = twice(run, o)
            want = (res0.float() + delta.float()).to(dt) if with_delta else res0
            judge.exact("add_rmsnorm residual", (t, h, with_delta), torch.equal(res, want))
            x = want.float()
            judge.see("add_rmsnorm", (t, h, with_delta), out, x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w.float(), name, again)
        gu = 3 * rnd(t, 2 * h)
        out, again = twice(lambda: k.silu_mul(gu, o), o)
        judge.see("silu_mul", (t, h), out, torch.nn.functional.silu(gu[:, :h].float()) * gu[:, h:].float(), name, again)
        x, bias = rnd(t, h), rnd(h)
        y = x.clone()
        k.bias_add(y, bias)
        judge.exact("bias_add", (t, h), torch.equal(y, (x.float() + bias.float()).to(dt)))
    for t, n, kk in [(2, 576, 576), (9, 100, 1544), (5, 7, 16)] if tiny else [(1, 6144, 4096), (1, 4096, 12288), (2, 576, 576), (3, 100, 1544), (8, 24576, 4096), (9, 1030, 2048), (16, 4096, 12288), (5, 7, 16), (13, 960, 8), (1, 8, 64), (4, 2048, 4104)]:
        for with_bias in (False, True):
            x, w, bias = rnd(t, kk), rnd(n, kk), rnd(n) * 10
            o = torch.empty(t, n, device=dev, dtype=dt)
            if name == "f16":
                x *= 0.1
            out, again = twice(lambda: k.gemv(x, w, bias if with_bias else None, o), o)
            judge.see("gemv", (t, n, kk, with_bias), out, x.float() @ w.float().T + (bias.float() if with_bias else 0), name, again)
            if name == "bf16" and not with_bias:
                for v in (HIGH_VARIANTS if t > 8 else GEMV_VARIANTS)[1:]:
                    out, again = twice(lambda: k.gemv(x, w, None, o, **v), o)
                    judge.see(f"gemv {v}", (t, n, kk), out, x.float() @ w.float().T, name, again)


def check_rope(k, judge, configs):
    import torch
    dev, dt = "cuda", k.torch_dtype
    for d, g, bs in configs:
        for t, kvh, normed, rotate_offset in [(1, 8, True, 7), (37, 3, False, 0), (130, 1, True, 1000)]:
            qh, heads = kvh * g, kvh * (g + 2)
            qkv0 = torch.randn(t, heads, d, device=dev).to(dt)
            qn, kn = ((1 + 0.2 * torch.randn(d, device=dev)).to(dt) for _ in range(2))
            if not normed:
                qn = kn = None
            pos = (torch.randperm(2000).to(dev)[:t] + rotate_offset).to(torch.int32)
            blocks = (t + bs - 1) // bs + 5
            slots = torch.randperm(blocks * bs).to(dev)[:t].to(torch.int64)
            inv = 1.0 / (10000 ** (torch.arange(0, d, 2, device=dev).double() / d))
            angle = torch.arange(3100, device=dev).double()[:, None] * inv
            table = torch.stack([angle.cos(), angle.sin()], -1).float().contiguous()
            kv = torch.full((blocks, 2, bs, kvh, d), float("nan"), device=dev, dtype=dt)
            qkv = qkv0.clone()
            k.rope(qkv, qn, kn, table, pos, slots, kv, qh, kvh, d, bs, 1e-6)
            x = qkv0.float()

            def prepare(y, w):
                if w is not None:
                    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * w.float()
                c, s = table[pos.long()][:, None, :, 0], table[pos.long()][:, None, :, 1]
                a, b = y[..., : d // 2], y[..., d // 2 :]
                return torch.cat([a * c - b * s, b * c + a * s], -1)
            judge.see("rope q", (d, g, t), qkv[:, :qh], prepare(x[:, :qh], qn), k.dtype)
            judge.exact("rope leaves k, v", (d, g, t), torch.equal(qkv[:, qh:], qkv0[:, qh:]))
            flat = kv.permute(1, 0, 2, 3, 4).reshape(2, blocks * bs, kvh, d)
            judge.see("rope k", (d, g, t), flat[0, slots], prepare(x[:, qh : qh + kvh], kn), k.dtype)
            judge.exact("rope v", (d, g, t), torch.equal(flat[1, slots], qkv0[:, qh + kvh :]))
            rest = torch.ones(blocks * bs, dtype=torch.bool, device=dev)
            rest[slots] = False
            judge.exact("rope writes nothing else", (d, g, t), bool(flat[:, rest].isnan().all()))


def check_attention(k, judge, configs, tiny):
    import random
    import torch
    rng = random.Random(time.time_ns())
    for d, g, bs in configs:
        for case in range(3 if tiny else 5):
            window = [0, 0, 100, 7, 1024][case]
            kvh = rng.choice([1, 2, 3, 8])
            # decode and verify
            reqs = []
            for _ in range(rng.randint(1, 9)):
                q = rng.choice([1, 1, 1, 2, 4, 5, 9, 16])
                reqs.append((q, q + rng.choice([0, 1, 15, 16, 17, 64, rng.randint(0, 300), rng.randint(0, 300 if tiny else 5000)])))
            if case == 0:
                reqs = [(1, 1)]
            a = Attention(reqs, d, g, kvh, bs, k.torch_dtype, window)
            out = torch.empty(a.tokens, a.q_heads * d, device="cuda", dtype=k.torch_dtype)
            ref = torch.cat([a.reference(r, window) for r in range(len(reqs))])
            for m_tiles in (1, 2) if d <= 128 else (1,):
                for blocks in (1, 5, 2 * k.sms, 10 ** 6):
                    p = plan.decode(reqs, kvh, g, 16 * m_tiles, window, blocks, "cuda")
                    parts = p.parts(d)
                    for x in parts:
                        x.fill_(float("nan"))
                    first, again = twice(lambda: k.decode(a, p, out, parts, window, m_tiles), out)
                    judge.see(f"decode D={d}", (d, g, bs, kvh, reqs, window, m_tiles, blocks), first, ref, k.dtype, again)
            # prefill
            reqs = []
            for _ in range(rng.randint(1, 4)):
                q = rng.choice([1, 3, 16, 64, 65, 128, rng.randint(1, 150 if tiny else 700)])
                reqs.append((q, q + rng.choice([0, 0, 1, 63, 64, rng.randint(0, 200 if tiny else 2000)])))
            a = Attention(reqs, d, g, kvh, bs, k.torch_dtype, window)
            out = torch.empty(a.tokens, a.q_heads * d, device="cuda", dtype=k.torch_dtype)
            ref = torch.cat([a.reference(r, window) for r in range(len(reqs))])
            items = plan.prefill(reqs, kvh, g, plan.prefill_rows(d), window, "cuda")
            first, again = twice(lambda: k.prefill(a, items, out, window), out)
            judge.see(f"prefill D={d}", (d, g, bs, kvh, reqs, window), first, ref, k.dtype, again)
            for blocks in (1, 3, k.sms) if plan.wgmma_serves(d, bs) else ():
                items = plan.prefill_shares(reqs, kvh, g, window, blocks, "cuda")
                first, again = twice(lambda: k.prefill_wgmma(a, items, out, window), out)
                judge.see(f"prefill_wgmma D={d}", (d, g, bs, kvh, reqs, window), first, ref, k.dtype, again)


def check_state(k, judge, tiny):
    import numpy as np
    import torch
    dev, dt = "cuda", k.torch_dtype
    golden, M = 0x9E3779B97F4A7C15, (1 << 64) - 1

    def mix(z):
        z = np.asarray(z, dtype=np.uint64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    def stream(seed, ident):
        return int(mix((int(mix(seed & M)) + golden * (ident + 1)) & M))

    def uniform(s, n):
        with np.errstate(over="ignore"):
            bits = mix(np.uint64(s) + np.uint64(golden) * (np.arange(n, dtype=np.uint64) + np.uint64(1))) >> np.uint64(40)
        return (bits.astype(np.int64) - (1 << 23)).astype(np.float32) * np.float32(2.0 ** -23)

    with np.errstate(over="ignore"):
        for count, offset in [(8, 0.0), (4096 * 57, 0.0), (4096, 1.0)]:
            s = stream(42, count)
            out = torch.full((count,), float("nan"), device=dev, dtype=dt)
            k.d.launch(k.get("fill", "fill_weight"), (min((count + 2047) // 2048, 65535),), (256,), 0, out, u64(count), u64(s), 0.02, offset)
            want = torch.from_numpy(np.float32(offset) + uniform(s, count) * np.float32(0.02)).to(dt).to(dev)
            judge.exact("fill_weight", count, torch.equal(out, want))
        elems = 2 * 16 * 3 * 24
        pools = [torch.full((9, elems), float("nan"), device=dev, dtype=dt) for _ in range(2)]
        blocks = torch.tensor([4, 1, 7], dtype=torch.int32, device=dev)
        bases = torch.tensor([p.data_ptr() for p in pools], dtype=torch.int64, device=dev)
        layers = torch.tensor([0, 5], dtype=torch.int32, device=dev)
        k.d.launch(k.get("fill", "fill_kv"), (3, 2), (256,), 0, bases, layers, blocks, u32(elems), u64(42))
        for p, layer in zip(pools, (0, 5)):
            for b in range(9):
                if b in (4, 1, 7):
                    want = torch.from_numpy(uniform(stream(~42, layer << 32 | b), elems)).to(dt).to(dev)
                    judge.exact("fill_kv", (layer, b), torch.equal(p[b], want))
                else:
                    judge.exact("fill_kv", (layer, b), bool(p[b].isnan().all()))
    # copies: out and back
    for size in (16, 4096, 65536, 70000 * 16):
        pool, saved = (torch.randint(0, 255, (7, size), dtype=torch.uint8, device=dev) for _ in range(2))
        want = pool.clone()
        segs = torch.tensor([[pool[i].data_ptr(), saved[j].data_ptr()] for j, i in enumerate((5, 2, 6))], dtype=torch.int64, device=dev)
        f, grid = k.get("state", "copy_segments"), (3, (size + 16383) // 16384)
        k.d.launch(f, grid, (256,), 0, segs, u32(size), 0)
        judge.exact("copy_segments", size, torch.equal(saved[:3], pool[[5, 2, 6]]))
        pool[[5, 2, 6]] = 0
        k.d.launch(f, grid, (256,), 0, segs, u32(size), 1)
        judge.exact("copy_segments", size, torch.equal(pool, want))
    data = torch.randint(-2 ** 31, 2 ** 31 - 1, (4 * 12345,), dtype=torch.int32, device=dev)
    sums = torch.zeros(16, dtype=torch.int32, device=dev)
    k.read_sum(data, sums)
    judge.exact("read_sum", 0, (int(sums.long().sum()) - int(data.long().sum())) % 2 ** 32 == 0)
    # probe and spin
    ring, state = torch.zeros(3, k.sms, 2, 2, dtype=torch.int64, device=dev), torch.zeros(2, dtype=torch.int32, device=dev)
    most = 227 * 1024
    e = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(2)]
    probe, spin = k.get("state", "clock_probe"), k.get("state", "spin_nanos")
    for f in (probe, spin):
        k.d.check(k.d.cuda.cuFuncSetAttribute(f, 8, most if f is probe else 0), "shared memory")
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        k.d.launch(probe, (k.sms,), (32,), most, ring, state, u32(3), u32(k.sms), u32(0))
        e[0].record()
        k.d.launch(spin, (1,), (1,), 0, u64(1_000_000))
        e[1].record()
        k.d.launch(probe, (k.sms,), (32,), most, ring, state, u32(3), u32(k.sms), u32(1))
    for i in range(4):
        g.replay()
        torch.cuda.synchronize()
        seen = e[0].elapsed_time(e[1]) * 1000
    judge.exact("spin_nanos", seen, tiny or abs(seen - 1000) < 12)  # a sanitizer stretches it
    r = ring[0].cpu()
    delta = (r[:, 1] - r[:, 0]).double()
    mhz = delta[:, 0] / delta[:, 1] * 1000
    print(f"spin 1000 us seen as {seen:.1f}; probe: {int((r[:, 0, 0] != 0).sum())} of {k.sms} multiprocessors, {mhz.min():.0f}..{mhz.max():.0f} MHz, state {state.tolist()}", flush=True)
    judge.exact("clock_probe", mhz.tolist(), bool((mhz > 200).all() and (mhz < 2500).all()) and state.tolist() == [4, 0])


# ---- timing --------------------------------------------------------------------------------------------------------

def graph_time(runs, repeat=4, warm=0.08, iters=15):
    """Median microseconds of one of `runs`, launched in turn `repeat` times over in one graph."""
    import torch
    s = torch.cuda.Stream()
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        for f in runs:
            f()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, stream=s):
        for _ in range(repeat):
            for f in runs:
                f()
    e = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    end = time.time() + warm
    while time.time() < end:
        g.replay()
        torch.cuda.synchronize()
    v = []
    for _ in range(iters):
        e[0].record()
        g.replay()
        e[1].record()
        torch.cuda.synchronize()
        v.append(e[0].elapsed_time(e[1]) * 1000 / (repeat * len(runs)))
    return sorted(v)[len(v) // 2]


def time_ceilings(k, table):
    import torch
    dev, dt = "cuda", torch.bfloat16
    big = torch.randint(-2 ** 31, 2 ** 31 - 1, (1 << 30,), dtype=torch.int32, device=dev)
    best = None
    for blocks in (8, 16):
        sums = torch.zeros(blocks * k.sms, dtype=torch.int32, device=dev)
        us = graph_time([lambda: k.read_sum(big, sums)], 1, 0.3)
        best = min(best or (us, blocks), (us, blocks))
        table(f"read_sum 4 GiB {{{blocks} blocks/SM}}", us, bytes=4 << 30)
    bw = (4 << 30) / best[0] / 1e6
    us = graph_time([lambda: big.view(torch.float32).sum()], 1, 0.1)
    table("torch sum 4 GiB", us, bytes=4 << 30)
    del big
    a, b = (torch.randn(8192, 8192, device=dev, dtype=dt) for _ in range(2))
    us = graph_time([lambda: a @ b.T], 2, 0.8)
    tf = 2 * 8192 ** 3 / us / 1e6
    table("gemm 8192^3", us, flops=2 * 8192 ** 3)
    del a, b
    table.ceilings(bw, tf)


def time_gemv(k, table):
    import torch
    dev, dt = "cuda", torch.bfloat16
    for pdl in (False, True):
        tag = " pdl" if pdl else ""
        for n, kk in [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]:
            sets = max(2, (400 << 20) // (n * kk * 2))
            ws = [torch.randn(n, kk, device=dev, dtype=dt) * 0.02 for _ in range(sets)]
            for t in (1, 4, 8, 16):
                if pdl and t != 1:
                    continue
                x = torch.randn(t, kk, device=dev, dtype=dt)
                outs = [torch.empty(t, n, device=dev, dtype=dt) for _ in range(2)]
                k.d.pdl = pdl
                for v in HIGH_VARIANTS if t > 8 else GEMV_VARIANTS:
                    us = graph_time([lambda w=w, i=i: k.gemv(x, w, None, outs[i % 2], **v) for i, w in enumerate(ws)], 4, 0.02, 9)
                    table(f"gemv{tag} T={t} {n}x{kk} {v}", us, bytes=n * kk * 2)
                k.d.pdl = False
                if not pdl:
                    us = graph_time([lambda w=w: torch.nn.functional.linear(x, w) for w in ws], 4, 0.02, 9)
                    table(f"cublas T={t} {n}x{kk}", us, bytes=n * kk * 2)
            del ws


def time_decode(k, table):
    import torch
    dev, dt = "cuda", torch.bfloat16
    for name, reqs in {"1x8192": [(1, 8192)], "8x1024": [(1, 1024)] * 8, "8x8192": [(1, 8192)] * 8, "64x8192": [(1, 8192)] * 64, "256x1024": [(1, 1024)] * 256, "32x4@4096": [(4, 4096)] * 32}.items():
        kvb = sum(x[1] for x in reqs) * 4096
        sets = max(1, min(8, (300 << 20) // kvb))
        at = [Attention(reqs, 128, 4, 8, 16, dt, poison=False) for _ in range(sets)]
        out = torch.empty(at[0].tokens, 4096, device=dev, dtype=dt)
        for per_sm in (1, 2):
            p = plan.decode(reqs, 8, 4, 16, 0, per_sm * k.sms, dev)
            parts = p.parts(128)
            for pdl in (False, True):
                for v in DECODE_VARIANTS:
                    k.d.pdl = pdl
                    us = graph_time([lambda a=a: k.decode(a, p, out, parts, **v) for a in at], 4 if len(reqs) < 64 else 1, 0.05)
                    k.d.pdl = False
                    table(f"decode {name}, {per_sm} blocks/SM{' pdl' if pdl else ''} {v}", us, bytes=kvb)
        err = max(((out[at[-1].starts[r] : at[-1].starts[r + 1]].float() - (ref := at[-1].reference(r))).norm() / ref.norm()).item() for r in (0, len(reqs) - 1))
        if not err < 2 ** -8:
            print("FAILED decode", name, err)
        del at


def time_prefill(k, table):
    import torch
    dev, dt = "cuda", torch.bfloat16
    for name, (q, kv) in {"512": (512, 512), "4096": (4096, 4096), "8192": (8192, 8192), "16384": (16384, 16384), "2048@10240": (2048, 10240)}.items():
        a = Attention([(q, kv)], 128, 4, 8, 16, dt, poison=False)
        out = torch.empty(a.tokens, 4096, device=dev, dtype=dt)
        flops = 4 * 32 * 128 * q * (kv - (q - 1) / 2)
        items = plan.prefill(a.requests, 8, 4, plan.prefill_rows(128), 0, dev)
        table(f"prefill {name}", graph_time([lambda: k.prefill(a, items, out)], 2, 0.15), flops=flops)
        items = plan.prefill_shares(a.requests, 8, 4, 0, k.sms, dev)
        out.fill_(float("nan"))
        for v in WGMMA_VARIANTS:
            table(f"prefill_wgmma {name} {v}", graph_time([lambda: k.prefill_wgmma(a, items, out, **v)], 2, 0.15), flops=flops)
        if q <= 8192:
            ref = a.reference(0)
            err = ((out.float() - ref).norm() / ref.norm()).item()
            if not err < 2 ** -8:
                print("FAILED prefill", name, err)
        del a


def time_elementwise(k, table):
    import torch
    dev, dt = "cuda", torch.bfloat16
    for t in (1, 64, 8192):
        sets = 1 if t > 64 else 4
        d, r, w, o = ([torch.randn(t, 4096, device=dev, dtype=dt) for _ in range(sets)] for _ in range(4))
        w1 = torch.ones(4096, device=dev, dtype=dt)
        table(f"add_rmsnorm T={t}", graph_time([lambda i=i: k.add_rmsnorm(d[i], r[i], w1, 1e-6, o[i]) for i in range(sets)], 4), bytes=t * 4096 * 2 * 4)
        gu, o = torch.randn(t, 24576, device=dev, dtype=dt), torch.empty(t, 12288, device=dev, dtype=dt)
        table(f"silu_mul T={t}", graph_time([lambda: k.silu_mul(gu, o)], 4), bytes=t * 12288 * 6)
        qkv = torch.randn(t, 48 * 128, device=dev, dtype=dt)
        kv = torch.zeros((t + 15) // 16 + 1, 2, 16, 8, 128, device=dev, dtype=dt)
        qn = torch.ones(128, device=dev, dtype=dt)
        rt = torch.randn(8192, 64, 2, device=dev)
        pos, slots = torch.arange(t, device=dev, dtype=torch.int32), torch.arange(t, device=dev) + 16
        table(f"rope T={t}", graph_time([lambda: k.rope(qkv, qn, qn, rt, pos, slots, kv, 32, 8, 128, 16, 1e-6)], 4), bytes=t * (48 * 256 + 48 * 256 + 512))
        ids = torch.randint(0, 50000, (t,), device=dev, dtype=torch.int32)
        emb, o = torch.randn(50000, 4096, device=dev, dtype=dt), torch.empty(t, 4096, device=dev, dtype=dt)
        table(f"embed T={t}", graph_time([lambda: k.embed(emb, ids, o)], 4), bytes=t * 4096 * 4)
    n = 1 << 30
    o = torch.empty(n, device=dev, dtype=dt)
    table("fill_weight 1 Gi", graph_time([lambda: k.d.launch(k.get("fill", "fill_weight"), (65535,), (256,), 0, o, u64(n), u64(7), 0.02, 0.0)], 1), bytes=2 * n)


def time_layer(k, table):
    """A whole decoder layer of 4096 / 32 / 8 / 128 / 12288 at one token and 8192 positions, eight sets of weights in turn."""
    import torch
    dev, dt = "cuda", torch.bfloat16
    r = lambda *s: torch.randn(*s, device=dev, dtype=dt) * 0.02
    layers = [dict(qkv=r(6144, 4096), o=r(4096, 4096), gu=r(24576, 4096), down=r(4096, 12288), a=Attention([(1, 8192)], 128, 4, 8, 16, dt, poison=False)) for _ in range(8)]
    one, qn = torch.ones(4096, device=dev, dtype=dt), torch.ones(128, device=dev, dtype=dt)
    x, res, ctx, delta, gu, gated = r(1, 4096), r(1, 4096), r(1, 4096), r(1, 4096), r(1, 24576), r(1, 12288)
    rt = torch.randn(8192, 64, 2, device=dev)
    pos = torch.full((1,), 8191, device=dev, dtype=torch.int32)
    p = plan.decode([(1, 8192)], 8, 4, 16, 0, 2 * k.sms, dev)
    parts = p.parts(128)
    best = dict(qkv=GEMV_VARIANTS[3], o=GEMV_VARIANTS[1], gu=GEMV_VARIANTS[2], down=GEMV_VARIANTS[1])

    def layer(w, use_cublas, skip=()):
        a = w["a"]
        slots = w.setdefault("slots", (a.tables[0, -1].long() * 16 + 15).reshape(1))
        mm = (lambda x, n, out: torch.mm(x, w[n].T, out=out)) if use_cublas else (lambda x, n, out: k.gemv(x, w[n], None, out, **best[n]))
        k.add_rmsnorm(delta, res, one, 1e-6, x)
        mm(x, "qkv", a.qkv)
        k.rope(a.qkv, qn, qn, rt, pos, slots, a.kv, 32, 8, 128, 16, 1e-6)
        k.decode(a, p, ctx, parts)
        mm(ctx, "o", delta)
        k.add_rmsnorm(delta, res, one, 1e-6, x)
        mm(x, "gu", gu)
        k.silu_mul(gu, gated)
        mm(gated, "down", delta)
    weights = sum(layers[0][n].numel() * 2 for n in ("qkv", "o", "gu", "down"))
    for pdl in (False, True):
        for cublas in (True, False):
            if pdl and cublas:
                continue
            k.d.pdl = pdl
            us = graph_time([lambda w=w: layer(w, cublas) for w in layers], 2, 0.1)
            k.d.pdl = False
            table(f"layer 1@8192, {'cublas' if cublas else 'gemv'}{' pdl' if pdl else ''}", us, bytes=weights + 8192 * 4096)


class Table:
    def __init__(self):
        self.rows, self.bw, self.tf = [], None, None

    def ceilings(self, bw, tf):
        self.bw, self.tf = bw, tf

    def __call__(self, name, us, bytes=None, flops=None):
        rate = bytes / us / 1e6 if bytes else flops / us / 1e6
        self.rows.append((name, us, rate, "TB/s" if bytes else "TFLOP/s"))

    def lines(self):
        for name, us, rate, unit in self.rows:
            yield f"{name:64} {us:10.2f} us {rate:8.2f} {unit:8} {rate / (self.bw if unit == 'TB/s' else self.tf) if self.bw else 0:6.3f}"


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--cubins", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "target", "kernels"))
    p.add_argument("--out", default=None)
    p.add_argument("--no-time", action="store_true")
    p.add_argument("--tiny", action="store_true", help="few small shapes: for compute-sanitizer")
    p.add_argument("--no-check", action="store_true")
    p.add_argument("--time", help="only these of gemv, decode, layer, prefill, elementwise")
    p.add_argument("--compile-only", action="store_true")
    p.add_argument("--brief", action="store_true", help="print the best variant of each timing only")
    p.add_argument("--jobs", type=int, default=os.cpu_count())
    args = p.parse_args()
    start = time.time()
    with ProcessPoolExecutor(args.jobs) as pool:
        list(pool.map(compile_one, [(n, m, args.cubins) for n, m in wanted()]))
    print(f"compiled in {time.time() - start:.1f} s", flush=True)
    if args.compile_only:
        return 0
    import torch
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.zeros(1, device="cuda")
    torch.manual_seed(time.time_ns() % 2 ** 31)
    driver, judge, table = Driver(args.cubins), Judge(), Table()
    import traceback
    for dtype in () if args.no_check else ("bf16", "f16"):
        k = Kernels(driver, dtype)
        configs = [CONFIGS[0], CONFIGS[2], CONFIGS[6]][: 3 if dtype == "bf16" else 1] if args.tiny else CONFIGS if dtype == "bf16" else CONFIGS[:4]
        for check in (lambda: check_state(k, judge, args.tiny), lambda: check_simple(k, judge, args.tiny), lambda: check_rope(k, judge, configs), lambda: check_attention(k, judge, configs, args.tiny)):
            t = time.time()
            try:
                check()
                torch.cuda.synchronize()
            except Exception:
                traceback.print_exc()
                judge.failed.append("exception")
            print(f"  {time.time() - t:.1f} s", flush=True)
    for name, (rel, worst, n) in sorted(judge.worst.items()):
        if not name.startswith("gemv {"):
            print(f"{name:28} {n:4} checks, rel {rel:.2e}, worst element {worst:.3f} of the tolerance")
    print(f"{len(judge.failed)} failed; {time.time() - start:.0f} s so far", flush=True)
    if not args.no_time:
        try:
            for part in ("ceilings", "gemv", "decode", "layer", "prefill", "elementwise"):
                if part == "ceilings" or not args.time or part in args.time.split(","):
                    globals()["time_" + part](Kernels(driver, "bf16"), table)
        except Exception:
            traceback.print_exc()
    best = {}
    for line, row in zip(table.lines(), table.rows):
        key = row[0].split(" {")[0]
        if key not in best or row[1] < best[key][1]:
            best[key] = (line, row[1])
    print("\n".join(v[0] for v in best.values()) if args.brief else "\n".join(table.lines()))
    if args.out:
        with open(os.path.join(args.out, "kernels.txt"), "w") as f:
            f.write("\n".join(table.lines()) + "\n" + "\n".join(judge.failed) + "\n" + json.dumps(judge.worst, indent=1))
    print(f"{len(judge.failed)} checks failed; {time.time() - start:.0f} s in all")
    return 1 if judge.failed else 0


if __name__ == "__main__":
    sys.exit(main())
