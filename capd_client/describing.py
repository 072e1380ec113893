"""What an offered tensor would be as a record: its definition and descriptor, or the reason why it is none.

The stager copies into the arena what is described here, a plan only writes it down: so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Optional

import msgspec
import torch

from capd_client.accounts import Accounts
from capd_client.counter_page import DropReason
from capd_client.definitions import Definition, short_name
from capd_client.errors import ConfigError
from capd_client.inner import context_of, inner_tensors
from capd_client.key import Key, Moment
from capd_client.notices import Notices
from capd_client.protocol import MAX_METADATA_NBYTES, Descriptor
from capd_client.refusing import Refusing
from capd_client.slicing import Slice
from capd_client.tensors import (
    PLAIN_TYPES,
    is_pending,
    modes_active,
    problem_of,
    selectively_checkpointed,
    unwrap,
    without_modes,
)

__all__ = ["Describing", "key_of_part"]

_PENDING = (
    "a collective fills it, in a selectively checkpointed part: waiting for that would upset what torch saved"
)


class Describing:
    """Checks and describes tensors, and puts them where a subclass says.

    payload: whether tensors are kept, or their statistics alone, unless a capture names its store.
    """

    def __init__(self, books: Accounts, notices: Notices, *, payload: bool = True) -> None:
        self._books = books
        self._notices = notices
        self._refuse = Refusing(books, notices).refuse
        usual = Descriptor if payload else partial(Descriptor, payload=False)
        self._describe: dict[Optional[str], Callable[..., Descriptor]] = {
            None: usual,
            "full": Descriptor,
            "stats": partial(Descriptor, payload=False),
            "both": partial(Descriptor, statistics=True),
        }

    def stage(
        self,
        tensor: torch.Tensor,
        key: Key,
        moment: Moment,
        cast_to: Optional[torch.dtype],
        attributes: Optional[dict[str, Any]],
        metadata: str,
        take: Optional[Slice] = None,
        immutable: bool = False,
        store: Optional[str] = None,
    ) -> None:
        """Describe and put the tensor, or what `take` takes of it; what cannot be captured is a counted drop.

        store: one of `capd_client.rule_settings.STORES`, or None.
        """
        if modes_active():
            if is_pending(tensor) and selectively_checkpointed():
                self._refuse(None, DropReason.UNSUPPORTED, moment, _PENDING, name=str(key.tensor_name)[:80])
                return
            with without_modes():
                self._stage(tensor, key, moment, cast_to, attributes, metadata, take, immutable, store)
        else:
            self._stage(tensor, key, moment, cast_to, attributes, metadata, take, immutable, store)

    def _put(
        self,
        source: torch.Tensor,
        dtype: torch.dtype,
        definition: Definition,
        descriptor: Descriptor,
        immutable: bool,
    ) -> None:
        """What becomes of `source`, a plain tensor to be kept as `dtype`. The descriptor has no offset, no sequence."""
        raise NotImplementedError

    def _stage(
        self,
        tensor: torch.Tensor,
        key: Key,
        moment: Moment,
        cast_to: Optional[torch.dtype],
        attributes: Optional[dict[str, Any]],
        metadata: str,
        take: Optional[Slice],
        immutable: bool,
        store: Optional[str],
    ) -> None:
        plain = type(tensor) in PLAIN_TYPES
        inner = [] if plain else list(inner_tensors(tensor))
        if inner:  # each as it is: neither cast nor cut
            context = {**(attributes or {}), **context_of(tensor)}
            for name, part in inner:
                self._stage(
                    part,
                    key_of_part(key, tensor, name, part),
                    moment,
                    None,
                    context,
                    metadata,
                    None,
                    immutable,
                    store,
                )
            return
        source, problem = (tensor, "") if plain else unwrap(tensor)
        if source is None:
            self._refuse(None, DropReason.UNSUPPORTED, moment, problem, name=str(key.tensor_name)[:80])
            return
        dtype = source.dtype if cast_to is None else cast_to
        definition = self._define(key, dtype, attributes, moment)
        if definition is None:
            return
        problem = problem_of(source)
        if problem or not definition.item_nbytes:
            problem = problem or f"dtype {dtype} is not kept"
            self._refuse(definition, DropReason.UNSUPPORTED, moment, problem)
            return
        if take is not None:
            try:
                source, metadata = take.apply(source, metadata)
            except ConfigError as error:
                self._refuse(definition, DropReason.INVALID_KEY, moment, str(error))
                return
        text = _utf8(metadata) if metadata else b""
        if text is None:
            self._refuse(
                definition, DropReason.INVALID_KEY, moment, f"metadata above {MAX_METADATA_NBYTES} bytes"
            )
            return
        descriptor = self._describe[store](
            sequence=0,
            offset=0,
            nbytes=source.numel() * definition.item_nbytes,
            key_id=definition.id,
            shape=tuple(source.shape),
            moment=moment,
            device="cpu" if source.is_cpu else str(source.device),
            requires_grad=tensor.requires_grad,
            is_leaf=tensor.is_leaf,
            metadata=text,
        )
        self._put(source, dtype, definition, descriptor, immutable)

    def _define(
        self, key: Key, dtype: torch.dtype, attributes: Optional[dict[str, Any]], moment: Moment
    ) -> Optional[Definition]:
        try:
            return self._books.define(key, dtype, attributes)
        except ConfigError as error:
            self._refuse(None, DropReason.INVALID_KEY, moment, str(error), name=str(key.tensor_name)[:80])
            return None


def key_of_part(key: Key, tensor: torch.Tensor, name: str, part: torch.Tensor) -> Key:
    """The key of a tensor inside `tensor`, labelled with its own dtype where the key has that of the whole."""
    label = short_name(part.dtype) if key.quant_type == short_name(tensor.dtype) else key.quant_type
    return msgspec.structs.replace(key, tensor_name=f"{key.tensor_name}{name}", quant_type=label)


def _utf8(metadata: str) -> Optional[bytes]:
    """The metadata as it is sent; None where that is above the limit, or where it has no UTF-8."""
    try:
        text = metadata.encode()
    except UnicodeEncodeError:
        return None
    return text if len(text) <= MAX_METADATA_NBYTES else None
