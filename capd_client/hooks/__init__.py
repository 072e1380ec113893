"""Taps: hooks on modules and patched functions that capture the tensors of matrix products."""
