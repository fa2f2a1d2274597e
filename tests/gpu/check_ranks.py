"""Checks the kernels of sharded models on one GPU, ranks one after the other: parts of weights, KV and vocabulary against the whole, and
experts that are spread over ranks, with tokens that stay, are gathered, or are sent to their experts, against float32 PyTorch.

    python3 tests/gpu/check_ranks.py [--cubins FOLDER] [--tiny]

What ranks would tell each other is copied between them by PyTorch. Every kernel runs twice and must repeat bit for bit.
"""
import argparse
import os
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from check_kernels import Driver, Judge, compile_one, macros, twice, u32, u64
from check_moe import BLOCK_TOKENS, TINY, Lists, Model, Moe, logits_for, most_tiles, reference_gemm1, reference_gemm2, reference_lists, reference_route, weights_of

LARGE = [Model("Qwen3-30B-A3B, narrow", 128, 8, 512, 96), Model("gpt-oss-20b, narrow", 32, 4, 288, 96, 2, 1, 1, True)]
VARIANT = dict(BM=16)


def models(tiny):
    even = [m for m in TINY if m.route != 3]
    return even[:2] if tiny else even + LARGE


def wanted(args):
    for dtype in ("bf16", "f16"):
        yield "embed", macros(dtype)
        yield "embed", macros(dtype, SHARD=1)
        yield "fill", macros(dtype)
        for model in models(args.tiny):
            yield "moe_route", macros(dtype, **model.router())
            yield "moe_route", macros(dtype, **model.router(), EP=1)
            yield "moe_travel", macros(dtype, TOP_K=model.top_k)
            for kind in (1, 2):
                file, m = model.product(kind, VARIANT)
                yield file, macros(dtype, **m)


class Part(Lists):
    """The lists of a rank that holds `local` experts from `first` on."""

    def __init__(self, tokens, m, rows, first, local):
        import torch
        super().__init__(tokens, dict(m, EP=1), rows)
        self.first, self.local = first, local
        self.max_tiles = most_tiles(tokens * min(self.top_k, local), local, rows)
        self.tiles = torch.full((self.max_tiles + 3, 4), -77, dtype=torch.int32, device="cuda")


class Ranks(Moe):
    """The launchers of what only sharded models have."""

    def part_route(self, logits, l, few):
        here = (l.first, l.local)
        if few:
            self.d.launch(self.get("moe_route", "moe_route_few", **l.m), (1,), (512,), 0, logits, None, l.ids, l.weights, l.offsets, l.slots, l.tiles, l.tokens, l.rows, l.max_tiles, 1.0, *here)
            return
        self.d.launch(self.get("moe_route", "moe_route", **l.m), (l.blocks,), (512,), 0, logits, None, l.ids, l.weights, l.counts, l.tokens, 1.0, *here)
        self.align(l)

    def align(self, l):
        self.d.launch(self.get("moe_route", "moe_align", **l.m), (l.blocks,), (512,), 0, l.ids, l.counts, l.offsets, l.slots, l.tiles, l.tokens, l.rows, l.max_tiles)

    def count(self, l):
        self.d.launch(self.get("moe_route", "moe_count", **l.m), (l.blocks,), (512,), 0, l.ids, l.counts, l.tokens)
        self.align(l)

    def part_combine(self, l, y, out, hidden):
        self.d.launch(self.get("moe_route", "moe_combine", **l.m), (-(-hidden // 1024), min(l.tokens, 65535)), (128,), 0, y, l.ids, out, l.tokens, hidden)

    def compute(self, model, weights, l, x):
        """What a rank's experts make of the tokens of its lists."""
        import torch
        w13, b13, w2, b2 = weights
        total = l.tokens * min(l.top_k, l.local)
        mid = torch.full((total + 1, model.inter), float("nan"), device="cuda", dtype=self.torch_dtype)
        y = torch.full((l.total + 1, model.hidden), float("nan"), device="cuda", dtype=self.torch_dtype)
        self.gemm1(model, VARIANT, x, w13, b13, l, mid)
        self.gemm2(model, VARIANT, mid, w2, b2, l, y)
        out = torch.empty(l.tokens, model.hidden, device="cuda", dtype=self.torch_dtype)
        first, again = twice(lambda: self.part_combine(l, y, out, model.hidden), out)
        return first, torch.equal(first, again)


def reference(model, x, weights, logits):
    """The whole block of experts."""
    ids, chosen = reference_route(logits, None, model.router())
    slots, offsets, _ = reference_lists(ids, model.experts, 16)
    w13, b13, w2, b2 = weights
    mid = reference_gemm1(model, x, w13, b13, slots, offsets)
    return reference_gemm2(model, mid, w2, b2, chosen, slots, offsets).view(len(x), model.top_k, -1).sum(1)


def part_of(weights, first, local):
    return [None if w is None else w[first : first + local].contiguous() for w in weights]


def check_lists(k, judge, model, l, logits, what):
    """Ids and lists of a rank against those of the whole."""
    import torch
    ids, weights = reference_route(logits, None, model.router())
    here = (ids >= l.first) & (ids < l.first + l.local)
    mine = torch.where(here, ids - l.first, torch.full_like(ids, -1))
    judge.exact("EP ids", what, torch.equal(l.ids[: l.tokens], mine))
    judge.exact("EP weights", what, bool(((l.weights[: l.tokens] - weights).abs() < 1e-5).all()))
    check_order(judge, l, mine, what)


def check_order(judge, l, mine, what):
    import torch
    flat = mine.flatten().long()
    slots = torch.sort(torch.where(flat < 0, 10 ** 6, flat), stable=True).indices[: int((flat >= 0).sum())].int()
    load = torch.bincount(flat[flat >= 0], minlength=l.experts).tolist()
    offsets, tiles = [0], []
    for e, n in enumerate(load):
        tiles += [[e, offsets[-1] + i, min(l.rows, n - i), 0] for i in range(0, n, l.rows)]
        offsets.append(offsets[-1] + n)
    judge.exact("EP slots", what, torch.equal(l.slots[: len(slots)], slots) and bool((l.slots[len(slots) :] == -77).all()))
    judge.exact("EP offsets", what, l.offsets[: l.experts + 1].tolist() == offsets)
    got = l.tiles[: l.max_tiles].tolist()
    judge.exact("EP tiles", what, got[: len(tiles)] == tiles and all(t[0] == -1 for t in got[len(tiles) :]) and bool((l.tiles[l.max_tiles :] == -77).all()))


def check_experts(k, judge, tiny):
    """Tensor-parallel ranks, and gathered tokens: all tokens are on all ranks."""
    import torch
    dt = k.torch_dtype
    for model in models(tiny):
        weights = weights_of(model, dt, 3.0)
        for ranks in [r for r in (2, 4, 8) if model.experts % r == 0]:
            local = model.experts // ranks
            for tokens in (1, 3, 64, 129) if tiny else (1, 2, 17, 63, 64, 65, 300, 1000):
                for kind in ("random", "one", "skewed"):
                    x, logits = torch.randn(tokens, model.hidden, device="cuda").to(dt), logits_for(model, tokens, kind, dt)
                    for few in (True, False) if tokens <= BLOCK_TOKENS else (False,):
                        total, what = 0, (model.name, ranks, tokens, kind, few)
                        for r in range(ranks):
                            l = Part(tokens, model.router(), VARIANT["BM"], r * local, local)
                            k.part_route(logits, l, few)
                            check_lists(k, judge, model, l, logits, (what, r))
                            out, same = k.compute(model, part_of(weights, l.first, local), l, x)
                            judge.exact("EP combine repeats", (what, r), same)
                            total = total + out.float()
                        judge.see("EP sum over ranks", what, total, reference(model, x, weights, logits), k.dtype, ops=3)


class Sent:
    """What one rank lays down for the others."""

    def __init__(self, k, model, ranks, tokens, x, logits):
        import torch
        dev, top_k, local = "cuda", model.top_k, model.experts // ranks
        self.x, self.logits, self.tokens = x, logits, tokens
        self.l = Lists(tokens, model.router(), 16)
        k.d.launch(k.get("moe_route", "moe_route", **self.l.m), (self.l.blocks,), (512,), 0, logits, None, self.l.ids, self.l.weights, self.l.counts, tokens, 1.0)
        i32 = lambda *s: torch.full(s, -77, dtype=torch.int32, device=dev)
        self.places, self.ids = i32(ranks, tokens), i32(ranks, tokens, top_k)
        self.weights = torch.full((ranks, tokens, top_k), float("nan"), device=dev)
        self.rows = torch.full((ranks, tokens, model.hidden), float("nan"), device=dev, dtype=k.torch_dtype)
        k.d.launch(k.get("moe_travel", "moe_place", TOP_K=top_k), (ranks,), (1024,), 0, self.l.ids, self.l.weights, self.places, self.ids, self.weights, tokens, local)
        k.d.launch(k.get("moe_travel", "moe_pack", TOP_K=top_k), (tokens, ranks), (128,), 0, x, self.places, self.rows, tokens, model.hidden)

    def check(self, judge, model, ranks, what):
        import torch
        local = model.experts // ranks
        ids = self.l.ids[: self.tokens]
        for r in range(ranks):
            here = (ids // local == r)
            goes = here.any(1)
            n = int(goes.sum())
            places = torch.where(goes, goes.cumsum(0).int() - 1, torch.full_like(self.places[r], -1)).int()
            judge.exact("moe_place places", (what, r), torch.equal(self.places[r], places))
            mine = torch.where(here, ids - r * local, torch.full_like(ids, -1))[goes]
            judge.exact("moe_place ids", (what, r), torch.equal(self.ids[r, :n], mine) and bool((self.ids[r, n:] == -1).all()))
            judge.exact("moe_place weights", (what, r), torch.equal(self.weights[r, :n], self.l.weights[: self.tokens][goes]))
            judge.exact("moe_pack", (what, r), torch.equal(self.rows[r, :n], self.x[goes]) and bool(self.rows[r, n:].isnan().all()))


def check_travel(k, judge, tiny):
    """Tokens that are sent to their experts and come back."""
    import torch
    dt = k.torch_dtype
    for model in models(tiny):
        weights = weights_of(model, dt, 3.0)
        for ranks in [r for r in (2, 4, 8) if model.experts % r == 0]:
            local = model.experts // ranks
            for tokens in (1, 3, 129) if tiny else (1, 2, 17, 64, 1023, 1024, 1025, 2500):
                for kind in ("random", "one", "skewed"):
                    what = (model.name, ranks, tokens, kind)
                    sent = [Sent(k, model, ranks, tokens, torch.randn(tokens, model.hidden, device="cuda").to(dt), logits_for(model, tokens, kind, dt)) for _ in range(ranks)]
                    for source in sent[:2]:
                        source.check(judge, model, ranks, what)
                    results = []
                    for r in range(ranks):
                        l = Part(ranks * tokens, model.router(), VARIANT["BM"], r * local, local)
                        l.ids[: l.tokens] = torch.cat([s.ids[r] for s in sent])
                        l.weights[: l.tokens] = torch.cat([s.weights[r] for s in sent])
                        k.count(l)
                        check_order(judge, l, l.ids[: l.tokens], (what, r))
                        out, same = k.compute(model, part_of(weights, l.first, local), l, torch.cat([s.rows[r] for s in sent]))
                        judge.exact("sent combine repeats", (what, r), same)
                        results.append(out.view(ranks, tokens, -1))
                    for r, s in enumerate(sent):
                        back = torch.stack([result[r] for result in results]).contiguous()
                        out = torch.empty(tokens, model.hidden, device="cuda", dtype=dt)
                        grid = (-(-model.hidden // 1024), min(tokens, 65535))
                        unpack = lambda: k.d.launch(k.get("moe_travel", "moe_unpack", TOP_K=model.top_k), grid, (128,), 0, back, s.places, out, tokens, model.hidden, ranks)
                        first, again = twice(unpack, out)
                        kept = torch.stack([torch.where((s.places[d] >= 0)[:, None], back[d][s.places[d].clamp(min=0).long()].float(), 0.0) for d in range(ranks)]).sum(0)
                        judge.see("moe_unpack", (what, r), first, kept, k.dtype, again)
                        exact = reference(model, s.x, weights, s.logits)
                        # Each rank's part is rounded once more than in one rank's sum.
                        off = (first.float() - exact).pow(2).sum().sqrt() / exact.pow(2).sum().sqrt()
                        judge.exact("sent chain", (what, r, off.item()), bool(off < 2 * 2.0 ** (-8 if k.dtype == "bf16" else -11)))


def check_parts(k, judge, tiny):
    """Rows, columns, heads and vocabularies that are parts of whole ones."""
    import torch
    dt, nan = k.torch_dtype, float("nan")
    rows, cols, stream = (40, 72, 12345) if tiny else (1000, 1032, 12345)
    whole = torch.full((rows, cols), nan, device="cuda", dtype=dt)
    count = rows * cols // 8 * 8
    k.d.launch(k.get("fill", "fill_weight"), (min((count + 2047) // 2048, 65535),), (256,), 0, whole, u64(count), u64(stream), 0.02, 0.0)
    for r0, r1, c0, c1, left in [(0, rows, 0, cols, 0), (3, 11, 5, 6, 2), (7, rows, 9, cols, 0), (rows - 1, rows, 0, 33, 1), (0, rows, 8, 16, 3)]:
        width = left + c1 - c0 + 1
        out = torch.full((r1 - r0, width), nan, device="cuda", dtype=dt)
        args = (u64(r0 * cols + c0), u32(r1 - r0), u32(c1 - c0), u32(width), u32(cols), u64(stream), 0.02, 0.0)
        grid = (min(-(-(c1 - c0) // 256), 65535), min(r1 - r0, 65535))
        k.d.launch(k.get("fill", "fill_part"), grid, (256,), 0, u64(out.data_ptr() + 2 * left), *args)
        ok = torch.equal(out[:, left:-1], whole[r0:r1, c0:c1]) and bool(out[:, :left].isnan().all()) and bool(out[:, -1].isnan().all())
        judge.exact("fill_part", (r0, r1, c0, c1), ok)
    heads, dim, block_size = 6, 24, 16
    pool = lambda h: torch.full((5, 2, block_size, h, dim), nan, device="cuda", dtype=dt)
    all_heads, list_of = pool(heads), lambda values, kind: torch.tensor(values, dtype=kind, device="cuda")
    blocks, ids = list_of([3, 1], torch.int32), list_of([7], torch.int32)
    size = lambda h: u32(2 * block_size * h * dim)
    k.d.launch(k.get("fill", "fill_kv"), (2, 1), (256,), 0, list_of([all_heads.data_ptr()], torch.int64), ids, blocks, size(heads), u64(9))
    for first, own in [(0, 3), (3, 3), (5, 1), (2, 2)]:
        part = pool(own)
        row = (u32(own * dim), u32(heads * dim), u32(first * dim))
        k.d.launch(k.get("fill", "fill_kv_part"), (2, 1), (256,), 0, list_of([part.data_ptr()], torch.int64), ids, blocks, size(own), u64(9), *row)
        want = all_heads[:, :, :, first : first + own]
        judge.exact("fill_kv_part", (first, own), torch.equal(part.nan_to_num(5.0), want.nan_to_num(5.0)))
    for t, h in [(3, 64)] if tiny else [(1, 576), (257, 64), (33, 4096)]:
        table, tokens = torch.randn(1000, h, device="cuda").to(dt), torch.randint(0, 1000, (t,), device="cuda", dtype=torch.int32)
        total = torch.zeros(t, h, device="cuda", dtype=dt)
        for first in range(0, 1000, 334):
            rows = table[first : first + 334].contiguous()
            out = torch.full((t, h), nan, device="cuda", dtype=dt)
            k.d.launch(k.get("embed", "embed_gather", SHARD=1), (t,), (128,), 0, rows, tokens, out, h, first, len(rows))
            total += out
        judge.exact("embed_gather of parts", (t, h), torch.equal(total, table[tokens.long()]))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--cubins", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "target", "kernels"))
    p.add_argument("--tiny", action="store_true", help="few small shapes: for compute-sanitizer")
    p.add_argument("--compile-only", action="store_true")
    p.add_argument("--jobs", type=int, default=os.cpu_count())
    args = p.parse_args()
    start = time.time()
    jobs = {(file, tuple(sorted(m.items()))): (file, m, args.cubins) for file, m in wanted(args)}
    with ProcessPoolExecutor(args.jobs) as pool:
        list(pool.map(compile_one, jobs.values()))
    print(f"compiled in {time.time() - start:.1f} s", flush=True)
    if args.compile_only:
        return 0
    import torch
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.zeros(1, device="cuda")
    torch.manual_seed(time.time_ns() % 2 ** 31)
    driver, judge = Driver(args.cubins), Judge()
    for dtype in ("bf16", "f16"):
        k = Ranks(driver, dtype)
        for check in (check_parts, check_experts, check_travel):
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
    print(f"{len(judge.failed)} checks failed; {time.time() - start:.0f} s in all")
    return 1 if judge.failed else 0


if __name__ == "__main__":
    sys.exit(main())
