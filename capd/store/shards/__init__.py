"""Shard files and small-record logs while they are written."""
