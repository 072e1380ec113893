"""The number formats for the analysis: the public names of `capd_client.formats`."""

from __future__ import annotations

from capd_client.formats import FORMATS, Encoded, FormatError, decode, encode, qdq

__all__ = ["FORMATS", "Encoded", "FormatError", "decode", "encode", "qdq"]
