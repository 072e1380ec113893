"""One of tensor_saver's calls, and what came of it."""

from __future__ import annotations

from typing import Any

import torch

import capd_client
from capd_client.tensor_saver import save_tensor
from tests.kit.client.peer import Peer

TENSOR = torch.arange(6.0).view(2, 3)


def one(on: Peer) -> Any:
    """The only record that was captured."""
    assert capd_client.flush(10)
    (record,) = on.records
    return record


def save(**arguments: Any) -> str | None:
    """Capture TENSOR."""
    return save_tensor(TENSOR, "linear", "forward", "mxfp8", "output", **arguments)
