"""Quantised tensors of other libraries, put together again from the parts that were captured, and dequantised.

`parts` gathers them, `torchao` and `transformer_engine` know the classes, `layouts` how scales and codes lie. All of it
needs numpy alone.
"""
