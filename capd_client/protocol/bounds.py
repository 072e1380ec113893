"""The types of message fields, with their bounds."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

__all__ = ["MAX_TEXT_CHARS", "U64", "Count", "ShortText", "Text", "Uuid"]

# The limit of one message to a user.
MAX_TEXT_CHARS = 8192

U64 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Uuid = Annotated[bytes, Meta(min_length=16, max_length=16)]
ShortText = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
