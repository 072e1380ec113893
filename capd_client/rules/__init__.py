"""Which tensors of which modules are captured; no torch."""
