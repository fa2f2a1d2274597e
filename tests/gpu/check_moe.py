"""Checks the mixture-of-experts kernels and attention sinks against float32 PyTorch on a GPU, then times the MoE chain.

    python3 tests/gpu/check_moe.py [--cubins FOLDER] [--out FOLDER] [--no-check] [--no-time] [--models NAME,NAME] [--tokens N,N]

Every kernel is judged by itself, from the rounded inputs that it got, and the chain of all of them too; the measures are those of
check_kernels.py. Outputs start as NaN and end with rows that nobody may write; experts without tokens have NaN for weights. Every
kernel runs twice and must repeat bit for bit, and the chain must give the same bits under programmatic dependent launch.

Times are medians of graph replays over several layers' weights in turn. GB/s count the weights of the experts that are hit,
TFLOP/s the products of the chosen slots; ceilings are measured in the same run. A share is the larger of the two ratios.
"""
import argparse
import os
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import check_kernels
import plan
from check_kernels import Attention, Driver, Judge, Kernels, Table, compile_one, graph_time, macros, twice
from compile_all import MOE_HOPPER, MOE_TRIALS, MOE_VARIANTS, moe_shape

BLOCK_TOKENS = 64


class Model:
    def __init__(self, name, experts, top_k, hidden, inter, route=1, act=0, interleaved=0, bias=False, layers=4):
        self.name, self.experts, self.top_k, self.hidden, self.inter = name, experts, top_k, hidden, inter
        self.route, self.act, self.interleaved, self.bias, self.layers = route, act, interleaved, bias, layers

    def router(self):
        return dict(EXPERTS=self.experts, TOP_K=self.top_k, ROUTE=self.route)

    def product(self, kind, v):
        """(file, macros)"""
        shape = {n: a for n, a in v.items() if n not in ("WGMMA", "BM")} if v.get("WGMMA") else v
        m = dict(KIND=2, **shape) if kind == 2 else dict(KIND=1, TOP_K=self.top_k, ACT=self.act, INTERLEAVED=self.interleaved, **shape)
        return "moe_gemm_hopper" if v.get("WGMMA") else "moe_gemm", m


TINY = [Model("tiny 4x2 32", 4, 2, 64, 32), Model("tiny 8x2 96", 8, 2, 64, 96, route=0), Model("tiny gpt-oss 8x2 32", 8, 2, 64, 32, 2, 1, 1, True),
        Model("tiny gpt-oss 4x2 40", 4, 2, 48, 40, 2, 1, 1, True), Model("tiny 16x6 72", 16, 6, 80, 72, 3, 0, 0, True)]
MIXTRAL = Model("Mixtral-8x7B", 8, 2, 4096, 14336)
QWEN = Model("Qwen3-30B-A3B", 128, 8, 2048, 768, layers=8)
GPT_OSS = Model("gpt-oss-20b", 32, 4, 2880, 2880, 2, 1, 1, True, layers=6)
GPT_OSS_120B = Model("gpt-oss-120b", 128, 4, 2880, 2880, 2, 1, 1, True, layers=2)
ROUTERS = [dict(EXPERTS=e, TOP_K=k, ROUTE=r) for e, k, r in [(4, 2, 1), (8, 2, 0), (32, 4, 2), (128, 8, 1), (128, 8, 0), (256, 8, 3), (100, 5, 2), (40, 8, 2), (1, 1, 1)]]
SINK_CONFIGS = [(64, 8, 16), (16, 2, 16), (128, 4, 16)]  # head_dim, group, block size


def variants(trials=False):
    return MOE_VARIANTS + MOE_HOPPER + (MOE_TRIALS if trials else [])


def wanted(args):
    seen = set()

    def once(file, m):
        key = (file, tuple(sorted(m.items())))
        if key not in seen:
            seen.add(key)
            yield file, m
    for dtype in ("bf16", "f16"):
        for m in ROUTERS + [x.router() for x in TINY + [MIXTRAL, QWEN, GPT_OSS, GPT_OSS_120B]]:
            yield from once("moe_route", macros(dtype, **m))
        for model in TINY + [MIXTRAL, QWEN, GPT_OSS, GPT_OSS_120B]:
            for v in variants(dtype == "bf16" and not args.tiny):
                for kind in (1, 2):
                    file, m = model.product(kind, v)
                    yield from once(file, macros(dtype, **m))
        for d, g, bs in SINK_CONFIGS:
            base = macros(dtype, HEAD_DIM=d, GROUP=g, BLOCK_SIZE=bs, SINKS=1)
            yield from once("prefill", base)
            if plan.wgmma_serves(d, bs):
                yield from once("prefill_hopper", base)
            for m in (1, 2):
                yield from once("decode", {**base, "M_TILES": m})
        yield from once("state", macros(dtype))


def label(v):
    return f"_wgmma BN={v.get('BN', 256)}" if v.get("WGMMA") else f" BM={v['BM']}"


def most_tiles(slots, experts, rows):
    hit = min(experts, slots)
    return hit + (slots - hit) // rows


class Lists:
    """What the routing of one batch leaves for the products, for tiles of `rows`."""

    def __init__(self, tokens, m, rows):
        import torch
        i32 = lambda *s: torch.full(s, -77, dtype=torch.int32, device="cuda")
        self.tokens, self.m, self.rows = tokens, m, rows
        self.experts, self.top_k = m["EXPERTS"], m["TOP_K"]
        self.total = tokens * self.top_k
        self.max_tiles = most_tiles(self.total, self.experts, rows)
        self.blocks = -(-tokens // BLOCK_TOKENS)
        # One row more than is used, to see that nothing writes there.
        self.ids, self.slots, self.tiles = i32(tokens + 1, self.top_k), i32(self.total + 9), i32(self.max_tiles + 3, 4)
        self.offsets, self.counts = i32(self.experts + 5), i32(self.blocks + 1, self.experts)
        self.weights = torch.full((tokens + 1, self.top_k), float("nan"), device="cuda")

    def all(self):
        return [self.ids, self.slots, self.tiles, self.offsets, self.weights]


class Moe(Kernels):
    """The launchers of the MoE kernels."""

    def route(self, logits, bias, l, scale=1.0, few=None):
        few = l.tokens <= BLOCK_TOKENS if few is None else few
        if few:
            self.d.launch(self.get("moe_route", "moe_route_few", **l.m), (1,), (512,), 0, logits, bias, l.ids, l.weights, l.offsets, l.slots, l.tiles, l.tokens, l.rows, l.max_tiles, scale)
            return
        self.d.launch(self.get("moe_route", "moe_route", **l.m), (l.blocks,), (512,), 0, logits, bias, l.ids, l.weights, l.counts, l.tokens, scale)
        self.d.launch(self.get("moe_route", "moe_align", **l.m), (l.blocks,), (512,), 0, l.ids, l.counts, l.offsets, l.slots, l.tiles, l.tokens, l.rows, l.max_tiles)

    def products(self, kind, model, v, columns, l, *args):
        per_block, threads, shared = moe_shape(kind, v)
        file, m = model.product(kind, v)
        grid = l.max_tiles * -(-columns // per_block)
        name = f"moe_gemm{kind}"
        if v.get("WGMMA"):
            name, grid = name + "_wgmma", min(grid, self.sms)
        self.d.launch(self.get(file, name, **m), (grid,), (threads,), shared, *args)

    def gemm1(self, model, v, x, w13, b13, l, out):
        self.products(1, model, v, model.inter, l, x, w13, b13, l.slots, l.tiles, out, model.inter, model.hidden, l.max_tiles, 1.702, 7.0)

    def gemm2(self, model, v, a, w2, b2, l, out):
        self.products(2, model, v, model.hidden, l, a, w2, b2, l.slots, l.weights, l.tiles, out, model.hidden, model.inter, l.max_tiles)

    def combine(self, l, y, out, hidden):
        self.d.launch(self.get("moe_route", "moe_combine", **l.m), (-(-hidden // 1024), min(l.tokens, 65535)), (128,), 0, y, out, l.tokens, hidden)

    def chain(self, model, v, x, logits, weights, l, mid, y, out):
        w13, b13, w2, b2 = weights
        self.route(logits, None, l)
        self.gemm1(model, v, x, w13, b13, l, mid)
        self.gemm2(model, v, mid, w2, b2, l, y)
        self.combine(l, y, out, model.hidden)


# ---- references ----------------------------------------------------------------------------------------------------

def reference_route(logits, bias, m, scale=1.0):
    import torch
    x, k, mode = logits.float(), m["TOP_K"], m["ROUTE"]
    score = torch.sigmoid(x) if mode == 3 else x
    choice = score + bias.float() if bias is not None else score
    ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :k]
    if mode == 0:
        w = torch.softmax(x, -1).gather(1, ids)
    elif mode == 3:
        w = score.gather(1, ids)
        w = w / w.sum(-1, keepdim=True)
    else:
        w = torch.softmax(x.gather(1, ids), -1)
    return ids.int(), w * scale


def reference_lists(ids, experts, rows):
    import torch
    flat = ids.flatten().long()
    slots = torch.sort(flat, stable=True).indices.int()
    load = torch.bincount(flat, minlength=experts).tolist()
    offsets, tiles = [0], []
    for e, n in enumerate(load):
        tiles += [[e, offsets[-1] + i, min(rows, n - i), 0] for i in range(0, n, rows)]
        offsets.append(offsets[-1] + n)
    return slots, offsets, tiles


def reference_gemm1(model, x, w13, b13, slots, offsets):
    import torch
    out = torch.empty(len(slots), model.inter, device="cuda")
    for e in range(model.experts):
        a, b = offsets[e], offsets[e + 1]
        if a == b:
            continue
        h = x[slots[a:b].long() // model.top_k].float() @ w13[e].float().T
        if b13 is not None:
            h += b13[e].float()
        gate, up = (h[:, ::2], h[:, 1::2]) if model.interleaved else (h[:, : model.inter], h[:, model.inter :])
        if model.act:
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            out[a:b] = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        else:
            out[a:b] = torch.nn.functional.silu(gate) * up
    return out


def reference_gemm2(model, a, w2, b2, weights, slots, offsets):
    import torch
    out = torch.empty(len(slots), model.hidden, device="cuda")
    for e in range(model.experts):
        i, j = offsets[e], offsets[e + 1]
        if i == j:
            continue
        y = a[i:j].float() @ w2[e].float().T
        if b2 is not None:
            y += b2[e].float()
        out[slots[i:j].long()] = y * weights.flatten()[slots[i:j].long()][:, None]
    return out


# ---- correctness ---------------------------------------------------------------------------------------------------

def same_bits(a, b):
    import torch
    view = lambda t: t.contiguous().view(torch.int16 if t.element_size() == 2 else torch.int32)
    return torch.equal(view(a), view(b))


def check_route(k, judge, tiny):
    import torch
    dt = k.torch_dtype
    for m in ROUTERS:
        e, top_k = m["EXPERTS"], m["TOP_K"]
        for tokens in (1, 3, 64, 129) if tiny else (1, 2, 3, 7, 17, 63, 64, 65, 129, 1000, 8192, 16384):
            for kind in ("random", "ties", "one", "bias"):
                logits = torch.randn(tokens, e, device="cuda").to(dt)
                bias = None
                if kind == "ties":
                    logits = torch.randint(-1, 2, (tokens, e), device="cuda").to(dt) * torch.where(torch.rand(tokens, e, device="cuda") < 0.5, 1.0, -1.0).to(dt)
                elif kind == "one":
                    logits[:, e - 1] = 20.0
                elif kind == "bias":
                    bias = torch.randn(e, device="cuda").to(dt)
                rows = [16, 32, 64, 128][(tokens + len(kind)) % 4]
                ids, weights = reference_route(logits, bias, m, 2.5)
                slots, offsets, tiles = reference_lists(ids, e, rows)
                first = None
                for few in (True, False) if tokens <= 64 else (False, False):
                    l = Lists(tokens, m, rows)
                    k.route(logits, bias, l, 2.5, few)
                    torch.cuda.synchronize()
                    what = (m, tokens, kind, rows, few)
                    ok = torch.equal(l.ids[:tokens], ids) if m["ROUTE"] != 3 else True
                    if m["ROUTE"] == 3: # sigmoids that differ in their last bit may change places
                        score = torch.sigmoid(logits.float()) + (0 if bias is None else bias.float())
                        got = l.ids[:tokens].long()
                        ok = bool((got >= 0).all() and (got < e).all()) and bool((score.gather(1, got) - score.gather(1, ids.long())).abs().max() < 1e-6)
                        slots, offsets, tiles = reference_lists(l.ids[:tokens], e, rows)
                    judge.exact("moe_route ids", what, ok)
                    judge.exact("moe_route weights", what, bool(((l.weights[:tokens] - weights).abs() < 1e-5).all()) or m["ROUTE"] == 3 and kind == "ties")
                    judge.exact("moe_align slots", what, torch.equal(l.slots[: l.total], slots))
                    judge.exact("moe_align offsets", what, l.offsets[: e + 1].tolist() == offsets)
                    got = l.tiles[: l.max_tiles].tolist()
                    judge.exact("moe_align tiles", what, got[: len(tiles)] == tiles and all(t[0] == -1 for t in got[len(tiles) :]))
                    judge.exact("moe_route writes no more", what, bool((l.ids[tokens:] == -77).all() and (l.slots[l.total :] == -77).all() and (l.tiles[l.max_tiles :] == -77).all()
                                                                       and (l.offsets[e + 1 :] == -77).all() and l.weights[tokens:].isnan().all() and (l.counts[l.blocks :] == -77).all()))
                    judge.exact("moe_route repeats", what, first is None or all(same_bits(a, b) for a, b in zip(first.all(), l.all())))
                    first = l
        # Whatever the logits are, ids are in range and distinct.
        logits = torch.randn(64, e, device="cuda").to(dt)
        for i, bad in enumerate((float("nan"), float("inf"), float("-inf"))):
            logits[8 * i : 8 * i + 8] = bad
            logits[24 + 8 * i : 32 + 8 * i][torch.rand(8, e, device="cuda") < 0.5] = bad
        l = Lists(64, m, 16)
        k.route(logits, None, l)
        ids = l.ids[:64].sort(-1).values
        judge.exact("moe_route of NaN", m, bool((ids >= 0).all() and (ids < e).all() and (ids[:, 1:] > ids[:, :-1]).all()))
        judge.exact("moe_route shows NaN", m, bool(l.weights[:8].isnan().all()))


def weights_of(model, dt, scale=1.0):
    import torch
    r = lambda *s, by: (torch.randn(*s, device="cuda") * by).to(dt)
    e, h, i = model.experts, model.hidden, model.inter
    w13, w2 = r(e, 2 * i, h, by=scale * h ** -0.5), r(e, h, i, by=i ** -0.5)
    return (w13, r(e, 2 * i, by=1.0) if model.bias else None, w2, r(e, h, by=1.0) if model.bias else None)


def logits_for(model, tokens, kind, dt):
    """Logits whose loads are random, all on the same experts, or skewed with some experts out of it."""
    import torch
    logits = torch.randn(tokens, model.experts, device="cuda")
    if kind == "one":
        logits[:, torch.randperm(model.experts, device="cuda")[: model.top_k]] += 30.0
    elif kind == "skewed":
        logits[:, ::2] -= 30.0 if model.experts // 2 >= model.top_k else 0.0
        logits[:, 1] += 2.0
    elif kind == "balanced":
        logits = balanced(model, tokens, 0)
    return logits.to(dt)


def balanced(model, tokens, layer):
    import torch
    logits = torch.rand(tokens, model.experts, device="cuda")
    slot = torch.arange(tokens * model.top_k, device="cuda").view(tokens, -1)
    # Layers shift, so that few tokens do not always read the same experts.
    logits.scatter_(1, (slot + layer * 37) % model.experts, 8.0 + torch.rand(tokens, model.top_k, device="cuda"))
    return logits


def check_products(k, judge, model, tokens, kinds, which, scale=3.0):
    import torch
    dt, name = k.torch_dtype, k.dtype
    given = weights_of(model, dt, scale)
    for t in tokens:
        for kind in kinds:
            x = torch.randn(t, model.hidden, device="cuda").to(dt)
            logits = logits_for(model, t, kind, dt)
            total, (w13, b13, w2, b2) = t * model.top_k, given
            mid = torch.empty(total + 3, model.inter, device="cuda", dtype=dt)
            y = torch.empty(total + 3, model.hidden, device="cuda", dtype=dt)
            out = torch.empty(t + 1, model.hidden, device="cuda", dtype=dt)
            kept = None # of the first shape: what the second product of every shape gets, and the references
            for v in which:
                what = (model.name, t, kind, tuple(v.items()))
                l = Lists(t, model.router(), v["BM"])
                k.route(logits, None, l)
                if kept is None:
                    slots, offsets = l.slots[:total].clone(), l.offsets[: model.experts + 1].tolist()
                    idle = [e for e in range(model.experts) if offsets[e] == offsets[e + 1]]
                    if idle: # weights that must not count
                        w13, w2 = w13.clone(), w2.clone()
                        w13[idle], w2[idle] = float("nan"), float("nan")
                    ref1 = reference_gemm1(model, x, w13, b13, slots, offsets)
                    chain = reference_gemm2(model, ref1, w2, b2, l.weights[:t], slots, offsets).view(t, model.top_k, -1).sum(1)
                got, again = twice(lambda: k.gemm1(model, v, x, w13, b13, l, mid), mid)
                judge.see(f"moe_gemm1{label(v)}", what, got[:total], ref1, name, again[:total])
                judge.exact("moe_gemm1 writes no more", what, bool(got[total:].isnan().all()))
                if kept is None:
                    kept = got
                    ref2 = reference_gemm2(model, kept, w2, b2, l.weights[:t], slots, offsets)
                got, again = twice(lambda: k.gemm2(model, v, kept, w2, b2, l, y), y)
                judge.see(f"moe_gemm2{label(v)}", what, got[:total], ref2, name, again[:total])
                judge.exact("moe_gemm2 writes no more", what, bool(got[total:].isnan().all()))
                got, again = twice(lambda: k.combine(l, y, out, model.hidden), out)
                judge.see("moe_combine", what, got[:t], y[:total].float().view(t, model.top_k, -1).sum(1), name, again[:t])
                judge.exact("moe_combine writes no more", what, bool(got[t:].isnan().all()))
                # All of it, each kernel after the one before it, and then each free to start before that: the same bits.
                results = []
                for pdl in (False, True):
                    fresh = Lists(t, model.router(), v["BM"])
                    for buffer in (mid, y, out):
                        buffer.fill_(float("nan"))
                    k.route(logits, None, fresh)
                    k.d.pdl = pdl
                    k.gemm1(model, v, x, w13, b13, fresh, mid)
                    k.gemm2(model, v, mid, w2, b2, fresh, y)
                    k.combine(fresh, y, out, model.hidden)
                    k.d.pdl = False
                    results.append(out[:t].clone())
                judge.see("moe chain", what, results[0], chain, name, results[1], ops=3)


def check_moe(k, judge, tiny):
    for model in TINY:
        check_products(k, judge, model, (1, 3, 17, 129) if tiny else (1, 2, 3, 7, 17, 64, 129, 1000), ("random", "one", "skewed"), variants())
        if tiny and model is TINY[2]:
            break
    if tiny:
        return
    check_products(k, judge, GPT_OSS, (1, 7, 129, 1000), ("balanced", "random"), variants(), 8.0)
    check_products(k, judge, QWEN, (1, 17, 300), ("balanced", "skewed"), variants())
    check_products(k, judge, MIXTRAL, (3, 200), ("random",), variants())
    if k.dtype == "bf16":
        check_products(k, judge, GPT_OSS, (33, 700), ("one",), variants(True), 8.0)
        check_products(k, judge, QWEN, (2000,), ("random",), variants(True))


def check_sinks(k, judge, tiny):
    import random
    import torch
    rng = random.Random(time.time_ns())
    for d, g, bs in SINK_CONFIGS[:2] if tiny else SINK_CONFIGS:
        for case in range(2 if tiny else 6):
            window, kvh = [0, 128, 7, 0, 128, 100][case], rng.choice([1, 2, 8])
            sinks = (torch.randn(kvh * g, device="cuda") * 3).to(k.torch_dtype)
            if case == 3: # from no share at all to nearly everything
                sinks[:: 2], sinks[1 :: 2] = -30.0, 12.0
            sink = None if case == 5 else sinks
            reqs = [(q, q + rng.choice([0, 1, 17, rng.randint(0, 200 if tiny else 4000)])) for q in (rng.choice([1, 1, 2, 4, 9]) for _ in range(rng.randint(1, 7)))]
            a = Attention(reqs, d, g, kvh, bs, k.torch_dtype, window)
            out = torch.empty(a.tokens, a.q_heads * d, device="cuda", dtype=k.torch_dtype)
            ref = torch.cat([a.reference(r, window, sink) for r in range(len(reqs))])
            for m_tiles in (1, 2):
                for blocks in (1, 5, 2 * k.sms, 10 ** 6):
                    p = plan.decode(reqs, kvh, g, 16 * m_tiles, window, blocks, "cuda")
                    parts = p.parts(d)
                    for x in parts:
                        x.fill_(float("nan"))
                    first, again = twice(lambda: k.decode(a, p, out, parts, window, m_tiles, sinks=sink, SINKS=1), out)
                    judge.see(f"decode, sinks D={d}", (d, g, kvh, reqs, window, m_tiles, blocks, case), first, ref, k.dtype, again)
            reqs = [(q, q + rng.choice([0, 1, 63, rng.randint(0, 200 if tiny else 2000)])) for q in (rng.choice([1, 65, 128, rng.randint(1, 150 if tiny else 600)]) for _ in range(3))]
            a = Attention(reqs, d, g, kvh, bs, k.torch_dtype, window)
            out = torch.empty(a.tokens, a.q_heads * d, device="cuda", dtype=k.torch_dtype)
            ref = torch.cat([a.reference(r, window, sink) for r in range(len(reqs))])
            items = plan.prefill(reqs, kvh, g, plan.prefill_rows(d), window, "cuda")
            first, again = twice(lambda: k.prefill(a, items, out, window, sinks=sink, SINKS=1), out)
            judge.see(f"prefill, sinks D={d}", (d, g, kvh, reqs, window, case), first, ref, k.dtype, again)
            for blocks in (1, k.sms) if plan.wgmma_serves(d, bs) else ():
                items = plan.prefill_shares(reqs, kvh, g, window, blocks, "cuda")
                first, again = twice(lambda: k.prefill_wgmma(a, items, out, window, sinks=sink, SINKS=1), out)
                judge.see(f"prefill_wgmma, sinks D={d}", (d, g, kvh, reqs, window, blocks, case), first, ref, k.dtype, again)


# ---- timing --------------------------------------------------------------------------------------------------------

class Rows(Table):
    """A line may have both bytes and products: its share is of the nearer ceiling."""

    def __call__(self, name, us, bytes=None, flops=None):
        self.rows.append((name, us, bytes, flops))

    def lines(self):
        for name, us, nbytes, flops in self.rows:
            bw, tf = (nbytes or 0) / us / 1e6, (flops or 0) / us / 1e6
            share = max(bw / self.bw, tf / self.tf) if self.bw else 0
            yield f"{name:66} {us:10.2f} us {bw:7.2f} TB/s {tf:8.1f} TFLOP/s {share:6.3f}"


def candidates(model, tokens, brief):
    """The variants worth a try at this load."""
    rows = tokens * model.top_k / min(model.experts, tokens * model.top_k)
    fits = lambda bm: bm / 4 <= max(rows, 16) <= 512 if bm == 64 else rows <= 2.5 * bm if bm <= 32 else rows >= 24
    return [v for v in variants(not brief) if fits(v["BM"])]


def time_model(k, table, model, token_counts, brief):
    import torch
    dt = k.torch_dtype
    layers = []
    for i in range(model.layers):
        e, h, n = model.experts, model.hidden, model.inter
        r = lambda *s, by: torch.empty(*s, device="cuda", dtype=dt).normal_(0, by)
        layers.append((r(e, 2 * n, h, by=h ** -0.5), r(e, 2 * n, by=1.0) if model.bias else None, r(e, h, n, by=n ** -0.5), r(e, h, by=1.0) if model.bias else None))
    for tokens in token_counts:
        total, quick = tokens * model.top_k, dict(repeat=2 if tokens <= 64 else 1, warm=0.04, iters=9)
        hit = min(model.experts, total)
        bytes1, bytes2 = hit * 2 * model.inter * model.hidden * 2, hit * model.inter * model.hidden * 2
        flops1, flops2 = 4 * total * model.inter * model.hidden, 2 * total * model.inter * model.hidden
        logits = [balanced(model, tokens, i).to(dt) for i in range(model.layers)]
        x = torch.randn(tokens, model.hidden, device="cuda").to(dt)
        mid = torch.empty(total, model.inter, device="cuda", dtype=dt)
        y = torch.empty(total, model.hidden, device="cuda", dtype=dt)
        outs = [torch.empty(tokens, model.hidden, device="cuda", dtype=dt) for _ in layers]
        title = f"{model.name} T={tokens}"
        lists = [Lists(tokens, model.router(), 16) for _ in layers]
        table(f"{title} route", graph_time([lambda g=g, l=l: k.route(g, None, l) for g, l in zip(logits, lists)], **quick))
        best = None
        for v in candidates(model, tokens, brief):
            lists = [Lists(tokens, model.router(), v["BM"]) for _ in layers]
            for g, l in zip(logits, lists):
                k.route(g, None, l)
            us1 = graph_time([lambda w=w, l=l: k.gemm1(model, v, x, w[0], w[1], l, mid) for w, l in zip(layers, lists)], **quick)
            us2 = graph_time([lambda w=w, l=l: k.gemm2(model, v, mid, w[2], w[3], l, y) for w, l in zip(layers, lists)], **quick)
            tag = " ".join(f"{n}={a}" for n, a in v.items())
            table(f"{title} gemm1 {{{tag}}}", us1, bytes1, flops1)
            table(f"{title} gemm2 {{{tag}}}", us2, bytes2, flops2)
            best = min(best or (us1 + us2, tag, v), (us1 + us2, tag, v), key=lambda b: b[0])
        v = best[2]
        lists = [Lists(tokens, model.router(), v["BM"]) for _ in layers]
        table(f"{title} combine", graph_time([lambda l=l, o=o: k.combine(l, y, o, model.hidden) for l, o in zip(lists, outs)], **quick), (model.top_k + 1) * tokens * model.hidden * 2)
        run = [lambda g=g, w=w, l=l, o=o: k.chain(model, v, x, g, w, l, mid, y, o) for g, w, l, o in zip(logits, layers, lists, outs)]
        plain = graph_time(run, **quick)
        kept = [o.clone() for o in outs]
        for o in outs:
            o.fill_(float("nan"))
        k.d.pdl = True
        linked = graph_time(run, **quick)
        k.d.pdl = False
        table(f"{title} chain {{{best[1]}}}", plain, bytes1 + bytes2, flops1 + flops2)
        table(f"{title} chain, dependent launch {{{best[1]}}}", linked, bytes1 + bytes2, flops1 + flops2)
        if not all(same_bits(a, b) for a, b in zip(kept, outs)):
            print("FAILED chain under dependent launch", title, flush=True)
            table.failed.append(title)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--cubins", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "target", "kernels"))
    p.add_argument("--out", default=None)
    p.add_argument("--no-time", action="store_true")
    p.add_argument("--no-check", action="store_true")
    p.add_argument("--tiny", action="store_true", help="few small shapes: for compute-sanitizer")
    p.add_argument("--compile-only", action="store_true")
    p.add_argument("--brief", action="store_true", help="time only the shapes that a launcher chooses from")
    p.add_argument("--models", default="Mixtral-8x7B,Qwen3-30B-A3B,gpt-oss-20b")
    p.add_argument("--tokens", default="1,8,64,256,512,2048,8192")
    p.add_argument("--jobs", type=int, default=os.cpu_count())
    args = p.parse_args()
    start = time.time()
    with ProcessPoolExecutor(args.jobs) as pool:
        list(pool.map(compile_one, [(n, m, args.cubins) for n, m in wanted(args)]))
    print(f"compiled in {time.time() - start:.1f} s", flush=True)
    if args.compile_only:
        return 0
    import torch
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.zeros(1, device="cuda")
    torch.manual_seed(time.time_ns() % 2 ** 31)
    driver, judge, table = Driver(args.cubins), Judge(), Rows()
    table.failed = []
    for dtype in () if args.no_check else ("bf16", "f16"):
        k = Moe(driver, dtype)
        for check in (check_route, check_moe, check_sinks):
            t = time.time()
            try:
                check(k, judge, args.tiny)
                torch.cuda.synchronize()
            except Exception:
                traceback.print_exc()
                judge.failed.append("exception")
            print(f"  {dtype} {check.__name__} {time.time() - t:.1f} s", flush=True)
    for name, (rel, worst, n) in sorted(judge.worst.items()):
        print(f"{name:34} {n:4} checks, rel {rel:.2e}, worst element {worst:.3f} of the tolerance")
    print(f"{len(judge.failed)} failed; {time.time() - start:.0f} s so far", flush=True)
    if not args.no_time:
        k = Moe(driver, "bf16")
        try:
            check_kernels.time_ceilings(k, table)
            for model in (MIXTRAL, QWEN, GPT_OSS, GPT_OSS_120B):
                if model.name in args.models.split(","):
                    t = time.time()
                    time_model(k, table, model, [int(t) for t in args.tokens.split(",")], args.brief)
                    torch.cuda.empty_cache()
                    print(f"  timed {model.name} in {time.time() - t:.0f} s", flush=True)
        except Exception:
            traceback.print_exc()
            table.failed.append("exception")
        print("\n".join(table.lines()))
    if args.out:
        with open(os.path.join(args.out, "moe.txt"), "w") as f:
            f.write("\n".join(table.lines()) + "\n" + "\n".join(judge.failed + table.failed) + "\n")
    failed = judge.failed + table.failed
    print(f"{len(failed)} checks failed; {time.time() - start:.0f} s in all")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
