"""The explicit `capture()`."""
