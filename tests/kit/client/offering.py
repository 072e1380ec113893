"""Offers of tensors to a session, and a mode that counts what torch is asked meanwhile."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from capd_client.protocol.key import Key
from capd_client.session.session import Session

KEY = Key(quant_type="q", rank=0, tensor_name="x")


def offer(session: Session, tensor: Any, key: Key = KEY, **options: Any) -> None:
    session.offer(tensor, key, session.context.moment(), **options)


class Counting(TorchDispatchMode):
    """Sees every operation, as flop counters and selective checkpointing do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))
