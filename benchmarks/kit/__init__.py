"""The kit of the benchmarks: timing, corpora and clients."""
