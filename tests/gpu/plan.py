"""Work lists of the attention kernels: the reference for the planner of the CUDA backend.

decode: every (request, KV head, tile of rows) is a run of units of 64 positions; all runs, one after the other, are cut
into equal shares, one a block. A share may cover the end of one run, whole runs, and the start of another. A run that one
block covers alone is written out directly; the others leave parts for attention_combine, in order of position.
"""

WGMMA_ROWS = 128


def prefill_rows(head_dim):
    return 128 if head_dim <= 128 else 64


def wgmma_serves(head_dim, block_size):
    return head_dim in (64, 128)


class DecodePlan:
    def __init__(self, items, block_items, combines, slots, rows, device):
        import torch
        t = lambda x: torch.tensor(x, dtype=torch.int32, device=device)
        self.items, self.block_items, self.blocks = t(items), t(block_items), len(block_items) - 1
        self.combines = t(combines) if combines else None
        self.slots, self.rows, self.device = slots, rows, device

    def parts(self, head_dim):
        import torch
        n = max(1, self.slots)
        return torch.empty(n, self.rows, head_dim, device=self.device), torch.empty(n, self.rows, 2, device=self.device)


UNIT = 64


def decode(requests, kv_heads, group, rows, window, blocks, device):
    runs = []  # (request, head, tile, begin, end, units)
    for r, (q, k) in enumerate(requests):
        for h in range(kv_heads):
            for tile in range((q * group + rows - 1) // rows):
                first = k - q + tile * rows // group
                last = k - q + min(q - 1, (tile * rows + rows - 1) // group)
                begin = max(0, first - window + 1) // 16 * 16 if window else 0
                end = last + 1
                runs.append((r, h, tile, begin, end, (end - begin + UNIT - 1) // UNIT))
    total = sum(x[5] for x in runs)
    blocks = max(1, min(blocks, total))
    items, block_items, combines, slots = [], [0], [], 0
    cuts = [total * b // blocks for b in range(blocks + 1)]
    at, b = 0, 0  # units placed so far, block
    for r, h, tile, begin, end, units in runs:
        left, pos, pieces = units, begin, []
        while left:
            take = min(left, cuts[b + 1] - at)
            stop = min(end, pos + take * UNIT)
            pieces.append((len(items), pos, stop))
            items.append([r, h, tile, -1, pos, stop, 0, 0])
            pos, left, at = stop, left - take, at + take
            if at == cuts[b + 1]:
                block_items.append(len(items))
                b += 1
        if len(pieces) > 1:
            combines.append([r, h, tile, 0, slots, len(pieces), 0, 0])
            for index, _, _ in pieces:
                items[index][3] = slots
                slots += 1
    return DecodePlan(items, block_items, combines, slots, rows, device)


def _tiles(requests, group, rows, window):
    """(positions, request, tile), those with the most positions first."""
    tiles = []
    for r, (q, k) in enumerate(requests):
        for tile in range((q * group + rows - 1) // rows):
            first = k - q + tile * rows // group
            last = k - q + min(q - 1, (tile * rows + rows - 1) // group)
            tiles.append((last + 1 - (max(0, first - window + 1) if window else 0), r, tile))
    return sorted(tiles, key=lambda x: -x[0])


def prefill(requests, kv_heads, group, rows, window, device):
    """[request, kv_head, tile, 0], those with the most positions first; heads of one tile stay together."""
    import torch
    items = [[r, h, tile, 0] for _, r, tile in _tiles(requests, group, rows, window) for h in range(kv_heads)]
    return torch.tensor(items, dtype=torch.int32, device=device)


WGMMA_SETUP = 96  # what a tile costs beside its positions, in positions


def prefill_shares(requests, kv_heads, group, window, blocks, device):
    """Items of the persistent kernel and where each block's begin: each next item goes to the block with the least so far."""
    import heapq
    import torch
    tiles = [(n, r, h, tile) for n, r, tile in _tiles(requests, group, WGMMA_ROWS, window) for h in range(kv_heads)]
    blocks = max(1, min(blocks, len(tiles)))
    heap, lists = [(0, b) for b in range(blocks)], [[] for _ in range(blocks)]
    for n, r, h, tile in tiles:
        cost, b = heapq.heappop(heap)
        lists[b].append([r, h, tile, 0])
        heapq.heappush(heap, (cost + (n + 127) // 128 * 128 + WGMMA_SETUP, b))
    starts = [0]
    for x in lists:
        starts.append(starts[-1] + len(x))
    t = lambda x: torch.tensor(x, dtype=torch.int32, device=device)
    return t([i for x in lists for i in x]), t(starts), blocks
