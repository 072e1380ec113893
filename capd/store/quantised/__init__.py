"""Quantised tensors of other libraries, reassembled from their captured parts and dequantised.

`parts` gathers them, `torchao` and `transformer_engine` know the classes, `layouts` how scales and codes lie. All of it
needs numpy alone.
"""
