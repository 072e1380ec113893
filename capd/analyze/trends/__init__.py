"""The metrics that papers on low-precision training plot over steps, as sums that merge."""
