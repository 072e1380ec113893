"""Removes series from a run: by tombstone, into the trash, with their catalog rows."""
