"""The errors of number formats on tensors, for scripts (docs/comparing.md). Imports torch."""

from __future__ import annotations

from capd.analyze.error_sums import Errors, ErrorSums, merged
from capd.analyze.measure import errors_of

__all__ = ["ErrorSums", "Errors", "errors_of", "merged"]
