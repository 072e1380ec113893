"""Writes, reads and damages stores for tests."""
