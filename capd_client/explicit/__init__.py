"""The explicit `capture()` call, eager and inside compiled graphs."""
