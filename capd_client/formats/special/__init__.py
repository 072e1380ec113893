"""Quantisers whose scales depend on more than the largest magnitude of a block, as recipes of papers use them."""
