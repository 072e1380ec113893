"""The processes of the integration tests."""

from tests.integration.conftest import daemon, start_rank

__all__ = ["daemon", "start_rank"]
