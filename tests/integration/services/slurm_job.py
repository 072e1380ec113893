"""A rank of a Slurm job: captures numbered tensors, says what is committed, and goes on until it is told or killed.

    python slurm_job.py COUNT [LINGER]

COUNT captures are made and committed. With LINGER the rank then captures until a signal ends it, and appends the
number of committed captures to the file LINGER after each flush.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import capd_client


def capture(number: int) -> None:
    """Capture one tensor whose values tell its number."""
    capd_client.capture(torch.full((256,), float(number)), tensor_name="x", iteration=number)


def main() -> None:
    count = int(sys.argv[1])
    for number in range(count):
        capture(number)
    assert capd_client.flush(timeout_s=60)
    print(f"rank {os.environ['RANK']}: {capd_client.counters()['committed']} committed", flush=True)
    while len(sys.argv) > 2:
        # The test reads every record.
        time.sleep(0.02)
        capture(count)
        count += 1
        if capd_client.flush(timeout_s=1):
            with Path(sys.argv[2]).open("a") as told:
                told.write(f"{count}\n")
    capd_client.close()


if __name__ == "__main__":
    main()
