"""What capturing from a GPU costs: calls, the link, a training step, device memory, small tensors, others' copies.

    python benchmarks/gpu_capture.py [--rounds N] [--json FILE]

Prints Markdown tables for docs/measurements.md; under eight minutes on one GPU with 64 GiB of host memory. Every
section runs in a process of its own with its own daemon. Without a CUDA device it ends with code 2; `--quick` then
shows on the CPU that all of it runs, and its figures mean nothing.

must: capture() <= 40 us p50 without a synchronisation; captures >= 16 MiB at >= 85 % of a plain pinned copy's
rate; a training step <= +2 % with captures of at most half of the link's bytes and 0 drops under policy block (under
drop they are shown: what the host issues in its lead over the device must fit into the ring); device memory flat.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from store_runner import Row, child, options, report, verdict

KIB, MIB = 1 << 10, 1 << 20
Check = tuple[str, float, float, bool]  # what, its value, the bound, whether that is the most

MUST_CALL_US, MUST_OF_LINK, MUST_STEP = 40.0, 0.85, 1.02
NO_GPU = 2


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table in Markdown; numbers have three digits that matter."""
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print(
            "| " + " | ".join(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row) + " |"
        )
    print()


def size_text(nbytes: int) -> str:
    """4 KiB, 64 MiB."""
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def show_calls(found: Row) -> Iterator[Check]:
    """Host time of the call."""
    print('**Host time of `capture()`**, p50 in µs, under `set_sync_debug_mode("error")`:\n')
    fields = ("plain us", "alone us", "in a row us", "in a row p99 us")
    markdown(
        ["size", "plain copy on the device", "alone", "in a row", "in a row, p99"],
        [[size_text(row["size"]), *(row[field] for field in fields)] for row in found["rows"]],
    )
    for row in found["rows"]:
        for kind in ("alone", "in a row"):
            yield f"capture() of {size_text(row['size'])} {kind}, us", row[f"{kind} us"], MUST_CALL_US, True


def show_transfer(rounds: dict[int, list[Row]]) -> Iterator[Check]:
    """Device to arena."""
    print("**Device to host**, GB/s, medians:\n")
    rows = []
    for size, found in rounds.items():
        plain, capd = (statistics.median(row[f"{kind} GB/s"] for row in found) for kind in ("plain", "capd"))
        rows.append(
            (size_text(size), plain, capd, statistics.median(r["capd GB/s"] / r["plain GB/s"] for r in found))
        )
    markdown(["captures of", "plain pinned copy", "capd", "ratio"], rows)
    for size, _, _, ratio in rows:
        yield f"captures of {size}, of the link", ratio, MUST_OF_LINK, False


def show_step(by_policy: dict[str, Row]) -> Iterator[Check]:
    """A training step."""
    print("**A training step** (24 Linears 4096 wide, 8,192 rows, bf16; Y and dY captured):\n")
    names = ("of link", "none ms", "capd ms", "ratio", "dropped")
    markdown(
        ["policy", "captured per step", "of the link", "none, ms", "capd, ms", "ratio", "drops"],
        [
            [policy, f"{found['nbytes'] / 1e6:.0f} MB", *(found[name] for name in names)]
            for policy, found in by_policy.items()
        ],
    )
    found = by_policy["block"]
    yield "step time, of no capture", found["ratio"], MUST_STEP, True
    yield "bytes of the step, of the link's", found["of link"], 0.5, True
    yield "drops", found["dropped"], 0, True
    yield "captures committed", found["captured"], found["expected"], False


def show_memory(found: Row) -> Iterator[Check]:
    """Device memory."""
    print(f"**Device memory**: the ring of {found['ring MiB']:.0f} MiB, then {found['captures']} captures.\n")
    yield "growth over the captures, bytes", found["growth"], 0, True


def show_small(found: Row) -> None:
    """Small captures."""
    print("**4 KiB captures**:\n")
    names = ("captures", "calls per s", "home per s", "copies")
    markdown(["captures", "calls per s", "in the arena per s", "copies"], [[found[name] for name in names]])


def show_rows(found: list[Row]) -> None:
    """Statistics on the device."""
    print("**Statistics of one bf16 tensor on the device**, µs:\n")
    markdown(
        ["size", "by", "host, for the call", "until it is done"],
        [[size_text(row["size"]), row["way"], row["call us"], row["done us"]] for row in found],
    )


def show_interference(found: list[Row]) -> None:
    """Others' copies."""
    print("**Another's copy of 4 bytes to the host**, µs, while captures keep the link busy:\n")
    names = ("beside", "p50 us", "p90 us", "max us")
    markdown(["beside", "p50", "p90", "max"], [[row[name] for name in names] for row in found])


def main() -> None:
    args = options(__doc__, rounds=3).parse_args()
    if not torch.cuda.is_available() and not args.quick:
        print(
            "no CUDA device was found: nothing was measured. --quick shows on the CPU that it runs",
            file=sys.stderr,
        )
        raise SystemExit(NO_GPU)
    sizes = [64 * KIB] if args.quick else [16 * MIB, 64 * MIB]
    common: dict[str, Any] = {"place": args.directory, "quick": args.quick}
    calls = child("gpu_sections:calls", **common)
    print(f"{calls['device']}, torch {calls['torch']}, arena {'' if calls['pinned'] else 'not '}pinned\n")
    checks = [*show_calls(calls)]
    transfer = {
        size: [child("gpu_sections:transfer", size=size, **common) for _ in range(args.rounds)]
        for size in sizes
    }
    checks += show_transfer(transfer)
    link_gbps = statistics.median(row["plain GB/s"] for row in transfer[sizes[-1]])
    step = {
        policy: child("gpu_sections:step", link_gbps=link_gbps, rounds=rounds, policy=policy, **common)
        for policy, rounds in (("block", 2 * args.rounds), ("drop", 1))
    }
    checks += show_step(step)
    memory = child("gpu_sections:memory", **common)
    checks += show_memory(memory)
    small = child("gpu_sections:small", **common)
    show_small(small)
    rows: list[Row] = child("gpu_sections:rows", **common)
    show_rows(rows)
    others: list[Row] = child("gpu_sections:interference", **common)
    show_interference(others)
    verdicts = [verdict(what, value, bound, at_most=at_most) for what, value, bound, at_most in checks]
    report(
        {
            "calls": calls, "transfer": {str(size): rows for size, rows in transfer.items()}, "step": step,
            "memory": memory, "small": small, "rows": rows, "interference": others, "checks": verdicts,
        },
        args.json,
    )  # fmt: skip


if __name__ == "__main__":
    main()
