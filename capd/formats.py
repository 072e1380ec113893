"""Number formats, for the analysis: what `capd_client.formats` defines, handed on."""

from __future__ import annotations

from capd_client.formats import FORMATS, Encoded, FormatError, decode, encode, qdq

__all__ = ["FORMATS", "Encoded", "FormatError", "decode", "encode", "qdq"]
