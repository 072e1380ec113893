"""Bytes and names on disk; pure."""
