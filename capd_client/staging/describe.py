"""The description of an offered tensor: its definition and descriptor, or the reason why it cannot be a record.

The stager copies described tensors into the arena, and a plan only notes them. So a plan and a capture cannot differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Optional, Union

import msgspec
import torch

from capd_client.errors import ConfigError
from capd_client.inflight.capture import Refused
from capd_client.inflight.definitions import Definition, short_name
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import MAX_METADATA_NBYTES, Descriptor
from capd_client.rules.slices import Slice
from capd_client.tensors.inspect import PLAIN_TYPES, problem_of, unwrap
from capd_client.tensors.subclasses import context_of, inner_tensors

__all__ = ["Described", "Makers", "Offer", "describe", "descriptor_makers", "key_of_part", "unfit"]

Makers = Mapping[Optional[str], Callable[..., Descriptor]]
"""The function that makes a capture's descriptor, by the `store` of the capture."""


class Offer(msgspec.Struct, eq=False):
    """A tensor as a hook or the job offers it. The fields are the arguments of `Border.offer`."""

    tensor: Any
    key: Key
    moment: Moment
    cast_to: Optional[torch.dtype] = None
    attributes: Optional[dict[str, Any]] = None
    metadata: str = ""
    take: Optional[Slice] = None
    immutable: bool = False
    store: Optional[str] = None


class Described(msgspec.Struct, eq=False):
    """A plain tensor to be kept as `dtype`. The descriptor has neither offset nor sequence yet."""

    source: torch.Tensor
    dtype: torch.dtype
    definition: Definition
    descriptor: Descriptor
    immutable: bool


def descriptor_makers(*, payload: bool) -> Makers:
    """Return the makers by `store` (`capd_client.rules.schema.STORES`).

    Args:
        payload: Whether the tensor itself is kept if a capture does not name its store.
    """
    statistics = partial(Descriptor, payload=False)
    return {
        None: Descriptor if payload else statistics,
        "full": Descriptor,
        "stats": statistics,
        "both": partial(Descriptor, statistics=True),
    }


def describe(
    offer: Offer, define: Callable[..., Definition], makers: Makers
) -> list[Union[Described, Refused]]:
    """Describe a tensor, or each of the plain tensors inside it. Nothing is counted or copied.

    Args:
        offer: The tensor with its facts.
        define: Same as `Accounts.define`.
        makers: The makers of descriptors.

    Returns:
        One entry for a plain tensor, or one entry per inner tensor of any other tensor.
    """
    plain = type(offer.tensor) in PLAIN_TYPES
    inner = [] if plain else list(inner_tensors(offer.tensor))
    if not inner:
        return [_one(offer, define, makers, plain=plain)]
    context = {**(offer.attributes or {}), **context_of(offer.tensor)}
    found: list[Union[Described, Refused]] = []
    # Inner tensors are neither cast nor cut.
    for name, part in inner:
        key = key_of_part(offer.key, offer.tensor, name, part)
        own = msgspec.structs.replace(
            offer, tensor=part, key=key, cast_to=None, attributes=context, take=None
        )
        found += describe(own, define, makers)
    return found


def unfit(offer: Offer, problem: str, reason: DropReason = DropReason.UNSUPPORTED) -> Refused:
    """Return the refusal of an offer without a definition."""
    return Refused(
        reason, iteration=offer.moment.iteration, problem=problem, name=str(offer.key.tensor_name)[:80]
    )


def _one(
    offer: Offer, define: Callable[..., Definition], makers: Makers, *, plain: bool
) -> Union[Described, Refused]:
    source, problem = (offer.tensor, "") if plain else unwrap(offer.tensor)
    if source is None:
        return unfit(offer, problem)
    dtype = source.dtype if offer.cast_to is None else offer.cast_to
    try:
        definition = define(offer.key, dtype, offer.attributes)
    except ConfigError as error:
        return unfit(offer, str(error), DropReason.INVALID_KEY)
    iteration = offer.moment.iteration
    problem = problem_of(source)
    if problem or not definition.item_nbytes:
        problem = problem or f"dtype {dtype} is not kept"
        return Refused(DropReason.UNSUPPORTED, definition, iteration=iteration, problem=problem)
    metadata = offer.metadata
    try:
        if offer.take is not None:
            source, metadata = offer.take.apply(source, metadata)
        text = _utf8(metadata) if metadata else b""
    except ConfigError as error:
        return Refused(DropReason.INVALID_KEY, definition, iteration=iteration, problem=str(error))
    descriptor = makers[offer.store](
        sequence=0,
        offset=0,
        nbytes=source.numel() * definition.item_nbytes,
        key_id=definition.id,
        shape=tuple(source.shape),
        moment=offer.moment,
        device="cpu" if source.is_cpu else str(source.device),
        requires_grad=offer.tensor.requires_grad,
        is_leaf=offer.tensor.is_leaf,
        metadata=text,
    )
    return Described(source, dtype, definition, descriptor, offer.immutable)


def key_of_part(key: Key, tensor: torch.Tensor, name: str, part: torch.Tensor) -> Key:
    """Return the key of a tensor inside `tensor`. If the label is the dtype of `tensor`, the part gets its own."""
    label = short_name(part.dtype) if key.quant_type == short_name(tensor.dtype) else key.quant_type
    return msgspec.structs.replace(key, tensor_name=f"{key.tensor_name}{name}", quant_type=label)


def _utf8(metadata: str) -> bytes:
    """Return the metadata as bytes to send. Raises ConfigError above the limit, and for text without UTF-8."""
    with contextlib.suppress(UnicodeEncodeError):
        text = metadata.encode()
        if len(text) <= MAX_METADATA_NBYTES:
            return text
    raise ConfigError(f"metadata above {MAX_METADATA_NBYTES} bytes")
