"""The errors of number formats on tensors, for scripts (docs/comparing.md). Imports torch."""

from __future__ import annotations

from capd.analyze.error_sums import Errors, Sums, merged
from capd.analyze.measure import errors_of

__all__ = ["Errors", "Sums", "errors_of", "merged"]
