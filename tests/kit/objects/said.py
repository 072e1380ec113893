"""A run for the tests of commands on addresses, and the comparison of what they say with the local answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from capd.store.objects.address import Address
from capd_client.protocol.key import Moment
from tests.kit.store.cli import BF16_VALUES, Result, StoreWriter, bf16_bits, linear_key, session_row
from tests.kit.store.scalars import put_scalar

__all__ = ["SERIES", "Capd", "same", "written"]

SERIES = "bf16/rank0/layer0/pre/blocks.0.mlp.fc1.forward.input"
Capd: TypeAlias = Callable[..., Result]


def written(root: Path, run_id: str = "run", scale: float = 1.0, *, started_ns: int = 1) -> Path:
    """A sealed run with a session, a scalar and two series."""
    writer = StoreWriter(root)
    for iteration in range(3):
        for name in ("input", "weight"):
            bits = bf16_bits(BF16_VALUES * scale * (iteration + 1))
            at = Moment(iteration=iteration, time_ns=10**18 + iteration)
            writer.put(run_id, linear_key(tensor_name=name), bits, "bfloat16", at)
        put_scalar(writer, run_id, "loss", 0, 2.5 / (iteration + 1), iteration)
    writer.save_session(
        run_id, session_row(offered=11, committed=9, dropped={"arena_full": 2}, started_ns=started_ns)
    )
    return writer.close() / f"{run_id}.zarr"


def same(capd: Capd, place: Address, run: Path, *arguments: str, code: int = 0) -> Any:
    """Run one command on both, and return the JSON that both print."""
    texts = []
    for where in (str(run), str(place)):
        said: Result = capd(*(where if one == "RUN" else one for one in arguments), "--json")
        assert (said.code, said.err.replace(where, "")) == (code, said.err.replace(where, "")), said.err
        texts.append(said.out.replace(where, "RUN").replace(where.rpartition("/")[0], "ROOT"))
    local, remote = (json.loads(text) for text in texts)
    for document in (local, remote):
        if isinstance(document, dict):
            document.pop("disk_free", None)
    assert remote == local
    return remote
