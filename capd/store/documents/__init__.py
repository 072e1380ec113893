"""The zarr.json documents of a run, and the names in its paths."""
