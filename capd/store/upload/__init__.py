"""Uploads of runs to an object store: what changed, the transfer of shards, and the manifest that makes it visible."""
