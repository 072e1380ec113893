"""The cost of the lab for a training step and for acknowledgements, while every step is captured.

    python benchmarks/live/lab.py [--rounds 24] [--formats LIST] [--sample 1/8] [--cpu 20%] [--json FILE]

Two jobs take turns (benchmarks/kit/turns.py): the daemon of one has a lab, that of the other has none.

"wall x" is the time of a step, with the lab against without, round by round: the median of the ratios. "ack p99 x" is
the ratio of the 99th percentiles over all rounds.

must: 1.02 for steps, 1.10 for acknowledgements, and no drop.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.kit.common import Daemon, machine, percentile, report, spread
from benchmarks.kit.turns import PATIENCE_S, TurnJob, ack_ratio, serve_blocks, take_turns, wall_ratio
from capd.server.net.daemon_client import connect

STEP_MUST, ACK_MUST = 1.02, 1.10
SETTINGS = '[lab]\nformats = [{formats}]\nsample = "{sample}"\ncpu = "{cpu}"\n'


def settled_lab(running: Daemon) -> dict[str, Any] | None:
    """Wait until nothing waits to be measured, and return the figures of the lab."""
    until = time.monotonic() + PATIENCE_S
    while True:
        with connect(Path(running.endpoint.removeprefix("unix:"))) as tool:
            lab = tool.stats().lab
        if lab is None or not lab.waiting:
            return None if lab is None else lab.model_dump()
        if time.monotonic() > until:
            raise RuntimeError(f"{lab.waiting} records still wait to be measured")
        time.sleep(0.2)


@contextlib.contextmanager
def jobs(args: argparse.Namespace) -> Iterator[tuple[TurnJob, TurnJob]]:
    """The job without a lab, and the one with it."""
    words = ["--steps", str(args.steps), *(["--directory", str(args.directory)] if args.directory else [])]
    with tempfile.NamedTemporaryFile("w", prefix="capd-benchmark-", suffix=".toml") as config:
        formats = ", ".join(f'"{name}"' for name in args.formats.split(","))
        config.write(SETTINGS.format(formats=formats, sample=args.sample, cpu=args.cpu))
        config.flush()
        pair = TurnJob(__file__, words), TurnJob(__file__, [*words, "--config", config.name])
        try:
            yield pair
        finally:
            for job in pair:
                job.close()


def show(result: dict[str, Any], alone: TurnJob, beside: TurnJob) -> None:
    """Print the table and the verdicts."""
    for name, job in (("alone", alone), ("lab", beside)):
        p50, p99 = (1e3 * percentile(job.ack_s["block"], at) for at in (50, 99))
        walls = [one for block in job.wall_s["block"] for one in block]
        print(
            f"{name:6s} wall s per step {spread(walls)}; acknowledged in {p50:.2f} ms p50, {p99:.2f} ms p99"
        )
    records = {outcome: count for outcome, count in result["lab"]["records"].items() if count}
    print(f"lab: {records}, {result['lab']['cpu_s']:.1f} s CPU")
    for name, value, bound in (
        ("lab / alone, wall x", result["wall_ratio"], STEP_MUST),
        ("lab / alone, ack p99 x", result["ack_ratio"], ACK_MUST),
        ("dropped captures", result["dropped"], 0),
    ):
        print(f"{name}: {value:.3f}, bound {bound}: {'met' if value <= bound else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each job in each round")
    parser.add_argument("--formats", default="fp8,mxfp8,nvfp4,hifp8")
    parser.add_argument("--sample", default="1/8")
    parser.add_argument("--cpu", default="20%")
    parser.add_argument(
        "--directory", type=Path, help="where the temporary stores go (default: the system's)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        serve_blocks(args.steps, args.directory, args.config, settled_lab)
        return
    with jobs(args) as (alone, beside):
        for job in (alone, beside):
            job.run_block(counts=False)
        take_turns([alone.run_block, beside.run_block], args.rounds)
    result = {
        "machine": machine(),
        "rounds": args.rounds,
        "steps_per_round": args.steps,
        "formats": args.formats,
        "wall_ratio": statistics.median(wall_ratio(beside.wall_s["block"], alone.wall_s["block"])),
        "ack_ratio": ack_ratio(beside.ack_s["block"], alone.ack_s["block"]),
        "dropped": sum(sum(job.dropped.values()) for job in (alone, beside)),
        "lab": beside.last["settled"],
        "wall_s": {"alone": alone.wall_s["block"], "lab": beside.wall_s["block"]},
        "ack_s": {"alone": alone.ack_s["block"], "lab": beside.ack_s["block"]},
    }
    show(result, alone, beside)
    report(result, args.json)


if __name__ == "__main__":
    main()
