"""The result of capd's codec chains on real tensors: ratio, and MB/s of one thread's CPU time, by dtype and role.

    python benchmarks/store/store_codecs.py [--corpus DIR] [--rounds N] [--json FILE]

Chunks are those that capd would make of each tensor, and every chain ends in crc32c, as in the store. "auto" chooses
by the tensor's first bytes, as for a series' first record. Besides the presets there are "auto block", the default's
codec with blosc's own block size, and plain zstd 1. Speeds are of raw bytes, medians over rounds in which all codecs
take turns.

must, of the default: bf16 activations 1.48, gradients 1.38, weights 1.45, float32 1.16.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.kit.corpus import Entry, ensure
from benchmarks.store.store_runner import Row, options, report, table, verdict
from capd.store.format.codec_choice import codec_name
from capd.store.format.codecs import Chain, chain_for
from capd.store.format.decode import decode
from capd.store.format.encode import whole_chunk
from capd.store.format.geometry import plan_geometry

SHARD_NBYTES = 512 << 20
PRESETS = ("default", "fast", "none", "auto")
OTHERS = {"auto block": "blosc:zstd:1:shuffle", "zstd 1": "zstd:1"}
MUST = {
    ("bfloat16", "activation"): 1.48, ("bfloat16", "gradient"): 1.38, ("bfloat16", "weight_gradient"): 1.38,
    ("bfloat16", "weight"): 1.45, ("float32", "activation"): 1.16, ("float32", "gradient"): 1.16,
    ("float32", "weight_gradient"): 1.16, ("float32", "weight"): 1.16,
}  # fmt: skip

Chunk = NDArray[np.generic]


@dataclass
class Cost:
    """The cost of one codec on one tensor: stored bytes, and CPU seconds of each round."""

    stored: int = 0
    encode_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)


class Subject:
    """One tensor as chunks, and each codec's result on it."""

    def __init__(self, entry: Entry) -> None:
        bits = entry.bits()
        geometry = plan_geometry(bits.shape, bits.itemsize, SHARD_NBYTES)
        self.nbytes = bits.nbytes
        self._chunks = [whole_chunk(bits[slices], geometry) for _, slices in geometry.chunks(bits.shape)]
        sample = bits.tobytes()
        self.codecs = {preset: codec_name(preset, entry.dtype, sample) for preset in PRESETS} | OTHERS
        self._chains = {name: chain_for(name, entry.dtype) for name in self.codecs.values()}
        self.costs = {name: Cost() for name in self._chains}

    def measure(self) -> None:
        """Encode and decode everything once with each codec."""
        for name, chain in self._chains.items():
            cost = self.costs[name]
            started = time.thread_time()
            encoded = [chain.encode(chunk) for chunk in self._chunks]
            cost.encode_s.append(time.thread_time() - started)
            payloads = [b"".join(one.parts) for one in encoded]
            cost.stored = sum(map(len, payloads))
            cost.decode_s.append(self._decode(chain, payloads))

    def _decode(self, chain: Chain, payloads: Sequence[bytes]) -> float:
        started = time.thread_time()
        for payload, chunk in zip(payloads, self._chunks, strict=True):
            decode(chain, payload, chunk.shape)
        return time.thread_time() - started


def measure_group(entries: Sequence[Entry], rounds: int) -> list[Row]:
    """Return one row per codec, over all tensors of one dtype and role."""
    subjects = [Subject(entry) for entry in entries]
    for _ in range(rounds):
        for subject in subjects:
            subject.measure()
    raw = sum(subject.nbytes for subject in subjects)
    rows = []
    for label in (*PRESETS, *OTHERS):
        costs = [subject.costs[subject.codecs[label]] for subject in subjects]
        encode_s, decode_s = (
            sum(statistics.median(seconds) for seconds in column)
            for column in zip(*((cost.encode_s, cost.decode_s) for cost in costs), strict=True)
        )
        rows.append(
            {
                "dtype": entries[0].dtype, "role": entries[0].role, "codec": label, "raw": raw,
                "chosen": sorted({subject.codecs[label] for subject in subjects}),
                "ratio": raw / sum(cost.stored for cost in costs),
                "encode_mb_per_s": raw / 1e6 / encode_s, "decode_mb_per_s": raw / 1e6 / decode_s,
            }
        )  # fmt: skip
    return rows


def show(rows: Sequence[Row]) -> None:
    """Print one line per dtype and role with all codecs side by side: ratio / encode / decode."""
    labels = (*PRESETS, *OTHERS)
    lines: dict[str, list[object]] = {}
    for row in rows:
        name = f"{row['dtype']} {row['role']}"
        line = lines.setdefault(name, [name, row["raw"] / 1e6])
        line.append(f"{row['ratio']:.3f} {row['encode_mb_per_s']:5.0f} {row['decode_mb_per_s']:5.0f}")
    print("ratio, MB/s encode, MB/s decode (one thread, CPU time)")
    table(["tensors", "MB", *labels], list(lines.values()))
    for row in rows:
        if row["codec"] == "auto":
            print(f"auto for {row['dtype']} {row['role']}: {', '.join(row['chosen'])}")


def main() -> None:
    parser = options(__doc__, rounds=3)
    parser.add_argument("--corpus", type=Path, metavar="DIR", help="made there if need be")
    args = parser.parse_args()
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in ensure(args.corpus, quick=args.quick):
        groups.setdefault((entry.dtype, entry.role), []).append(entry)
    rows = [row for key in sorted(groups) for row in measure_group(groups[key], args.rounds)]
    show(rows)
    checks = [
        verdict(f"{row['dtype']} {row['role']}, default", row["ratio"], MUST[row["dtype"], row["role"]])
        for row in rows
        if row["codec"] == "default" and (row["dtype"], row["role"]) in MUST
    ]
    report({"rounds": args.rounds, "rows": rows, "checks": checks}, args.json)


if __name__ == "__main__":
    main()
