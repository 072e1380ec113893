"""Captures one tensor of every dtype through a temporary daemon and store, and compares the stored bits.

Run as `python -m capd.cli.daemon.round_trip`. The last line of its output is one JSON object: dtype → "ok" or the
problem. All parts are real: a daemon process, the arena, the socket, the store on disk.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from capd.cli.jobs.companion import start
from capd.errors import CapdError
from capd_client.protocol.dtypes import ITEM_NBYTES

if TYPE_CHECKING:
    import torch

__all__ = ["main"]

ELEMENTS = 1024
RUN_ID = "doctor"


def main() -> None:
    """Run the round trip and print the results."""
    # The few records must fit on a full disk, too.
    os.environ["CAPD_KEEP_FREE"] = "0"
    with tempfile.TemporaryDirectory(prefix="capd-doctor-") as directory:
        store = Path(directory) / "store"
        try:
            with start(store, RUN_ID, None) as companion:
                sent, problems = _capture(companion.endpoint)
        except typer.Exit as refused:
            raise SystemExit(refused.exit_code) from None
        print(json.dumps({**problems, **_compare(store / f"{RUN_ID}.zarr", sent)}))


def _capture(endpoint: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Capture a tensor of every dtype. Return the captured tensors, and the dtypes that this torch lacks or refuses."""
    os.environ.update(
        CAPD_ENDPOINT=endpoint, CAPD_RUN_ID=RUN_ID, CAPD_POLICY="block", CAPD_ARENA_BYTES=str(16 << 20)
    )
    import torch

    import capd_client

    sent: dict[str, torch.Tensor] = {}
    problems: dict[str, str] = {}
    for name, nbytes in ITEM_NBYTES.items():
        dtype = getattr(torch, name, None)
        if dtype is None:
            # This torch is too old to have such a tensor.
            continue
        pattern = (torch.arange(ELEMENTS * nbytes, dtype=torch.int64) * 131 + 7).to(torch.uint8)
        try:
            tensor = pattern % 2 == 1 if name == "bool" else pattern.view(dtype)
            capd_client.capture(tensor, tensor_name=name)
            sent[name] = tensor
        except (RuntimeError, TypeError) as error:
            problems[name] = f"torch refused: {error}"
    if not capd_client.flush(timeout_s=30):
        problems["flush"] = f"not everything was acknowledged: {capd_client.counters()}"
    capd_client.close()
    return sent, problems


def _compare(run: Path, sent: dict[str, torch.Tensor]) -> dict[str, str]:
    import torch

    from capd.store.read.store import open_store

    store = open_store(run)
    results = {}
    for name, tensor in sent.items():
        try:
            found = store.find(tensor_name=name)
            back = found[0].torch(0) if found else None
        except (CapdError, RuntimeError, TypeError, ValueError) as error:
            results[name] = f"cannot be read back: {error}"
            continue
        if back is None:
            results[name] = "is not in the store"
        elif back.dtype != tensor.dtype or back.shape != tensor.shape:
            results[name] = f"came back as {back.dtype} {tuple(back.shape)}"
        elif not torch.equal(back.view(torch.uint8), tensor.view(torch.uint8)):
            results[name] = "came back with other bits"
        else:
            results[name] = "ok"
    return results


if __name__ == "__main__":
    main()
