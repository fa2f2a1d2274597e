"""Write numpy-jitter.json: the factors that NumPy draws for the jitter of a case, as the bits of each float64.

Usage: python3 numpy_jitter.py > numpy-jitter.json      (made with numpy 2; the stream is the same since 1.17)
"""
import json
import struct
import zlib

import numpy

SEEDS = [0, 1, 7, 42, 123456789, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 0x123456789ABCDEF0, 2**63, 2**64 - 1]
NAMES = ["decode", "a", "64*1@8192", "prefill 2k", "é", "漢字😀", " ", "x" * 300, "line\nbreak", "mix-1"]
JITTERS = [0.5, 0.1, 0.25, 0.999]

rows = []
for i, seed in enumerate(SEEDS):
    for j, name in enumerate(NAMES):
        key = zlib.crc32(name.encode())
        jitter = JITTERS[(i + j) % len(JITTERS)]
        draws = numpy.random.default_rng([seed, key]).uniform(1 - jitter, 1 + jitter, 6)
        bits = [struct.pack(">d", draw).hex() for draw in draws]
        rows.append({"seed": seed, "name": name, "crc32": key, "jitter": jitter, "uniforms": bits})
print("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]")
