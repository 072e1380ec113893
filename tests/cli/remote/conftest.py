"""A prefix of a real S3 server, for every test of runs in object stores."""

from __future__ import annotations

from tests.kit.objects.uploaded import prefix

__all__ = ["prefix"]
