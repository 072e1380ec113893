"""The cost of capturing from a GPU, by a model of its streams, its link and the copy pump that runs capd's own code.

    python benchmarks/model/device_model.py [--constants FILE] [--before TREE] [--json FILE] [--quick]

The training thread and the pump run the code of this tree. With --before they also run the code of another tree,
such as a checkout of an earlier commit. The model keeps the time. The costs of calls and the times of the device
come from --constants (benchmarks/gpu/gpu_constants.py --json) or from estimates. The Python of a capture is measured
here.

goals: a capture costs its thread at most 28 us. A step with captures of half of the link's bytes takes at most 2 %
longer, or 1 % if the tensors are held. The link is busy for at least 0.95 of the time in which bytes wait for it, in
pieces of 1 MiB and more. In this case the pump gets the interpreter 2 ms late after each wait, and 5 ms later still
after 5 % of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.gpu_tables import markdown, size_text
from benchmarks.model.modelled_gpu import GPUS
from benchmarks.store.store_runner import report, verdict
from capd_client.device.holding import MIN_HELD_NBYTES

MIB = 1 << 20
TENSORS = ((16, 64 * MIB), (64, 16 * MIB), (250, 4 * MIB), (1000, MIB))
MAX_HOST_US, MAX_STEP, MAX_STEP_HELD, MIN_BUSY = 28.0, 1.02, 1.01, 0.95
QUIET, LATE = (250.0,), (2000.0, 0.05)
Found = dict[str, float]
Results = dict[tuple[str, int, str], Found]


def questions(measured: Found, raw: bool) -> list[dict[str, Any]]:
    """Return the scenes for each GPU and size: steps at half of the link, with copies or held tensors, and the link.

    For the link the size is that of a copy, of tensors of 64 MiB.
    """
    asked = []
    for gpu, known in GPUS.items():
        constants = {**known, **measured}
        for tensors, nbytes in TENSORS:
            step_us = tensors * nbytes / (constants["d2h_64_mib_gbps"] * 1e3) * 2
            # The host is ahead of the device.
            lead_us = min(20.0, step_us / tensors / 4)
            step = {"tensors": tensors, "nbytes": nbytes, "step_us": step_us, "lead_us": lead_us}
            flood = {"tensors": 64, "nbytes": 64 * MIB, "step_us": 100.0, "steps": 1, "lead_us": 1.0}
            scenes = {
                "step": (step, QUIET),
                "held": ({**step, "held": True}, QUIET),
                "link": ({**flood, "piece_nbytes": nbytes}, LATE),
            }
            asked += [
                {
                    "gpu": gpu, "size": nbytes, "what": what, "scene": scene, "constants": constants,
                    "rounds": rounds, "raw": raw,
                }
                for what, (scene, rounds) in scenes.items()
            ]  # fmt: skip
    return asked


def answers(asked: list[dict[str, Any]], tree: Path) -> tuple[Found, Results]:
    """Run the code of `tree` in the model. Returns µs of its Python, and the results by GPU, size and scene."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "CAPD_ENDPOINT": "unix:/nowhere/capd.sock", "CAPD_POLICY": "block", "CAPD_ARENA_BYTES": str(256 * MIB),
        "CAPD_LOG": "error",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.model.model_runs"], cwd=tree,
        input=json.dumps(asked), env=environment, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    keys = [(one["gpu"], one["size"], one["what"]) for one in asked]
    return found["python"], dict(zip(keys, found["results"], strict=True))


def table(name: str, results: Results) -> None:
    """Print the results of one tree."""
    print(f"**{name}**\n")
    rows = []
    for gpu in GPUS:
        for tensors, nbytes in TENSORS:
            step, held, link = (results[gpu, nbytes, what] for what in ("step", "held", "link"))
            rows.append(
                [
                    gpu, f"{tensors} × {size_text(nbytes)}", step["host_us"], _percent(step["step"]),
                    _percent(held["step"]) if nbytes >= MIN_HELD_NBYTES else "not held", link["link_busy"],
                ]
            )  # fmt: skip
    head = [
        "GPU",
        "tensors a step",
        "host, µs a capture",
        "step",
        "step, tensors held",
        "link busy, late pump",
    ]
    markdown(head, rows)


def _percent(ratio: float) -> str:
    return f"+{(ratio - 1) * 100:.1f} %"


def judge(results: Results) -> list[dict[str, Any]]:
    """Return the verdicts on the goals, each by its worst row."""

    def of(what: str, field: str, least_nbytes: int = 0) -> list[float]:
        return [
            found[field]
            for (_, nbytes, name), found in results.items()
            if name == what and nbytes >= least_nbytes
        ]

    held = of("held", "step", MIN_HELD_NBYTES)
    return [
        verdict("host, us a capture, at most", max(of("step", "host_us")), MAX_HOST_US, at_most=True),
        verdict("step with copies", max(of("step", "step")), MAX_STEP, at_most=True),
        verdict("step with tensors held", max(held), MAX_STEP_HELD, at_most=True),
        verdict("link busy, late pump", min(of("link", "link_busy")), MIN_BUSY, at_most=False),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables and the verdicts on the goals."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--constants", type=Path)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="one GPU and two sizes")
    args = parser.parse_args(arguments)
    if args.quick:
        for name in list(GPUS)[1:]:
            del GPUS[name]
        globals()["TENSORS"] = TENSORS[:2]
    measured: Found = json.loads(args.constants.read_text()) if args.constants else {}
    here = Path(__file__).resolve().parents[2]
    found: dict[str, Any] = {}
    if args.before is not None:
        python, before = answers(questions(measured, raw=False), args.before.resolve())
        table(f"Before; Python of a capture {python['python_us']:.1f} µs", before)
        found["before"] = {" ".join(map(str, key)): value for key, value in before.items()}
    for raw in (False, True):
        python, results = answers(questions(measured, raw=raw), here)
        way = "without torch (the default)" if raw else "by torch, all by the pump"
        table(f"Now, calls to the device {way}; Python of a capture {python['python_us']:.1f} µs", results)
        found["raw" if raw else "torch"] = {" ".join(map(str, key)): value for key, value in results.items()}
    found["checks"] = judge(results)
    report(found, args.json)


if __name__ == "__main__":
    main()
