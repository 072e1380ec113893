"""What benchmarks share: timing, corpora and clients."""
