"""Quantised tensors of other libraries: reassembled from their captured parts and dequantised.

`parts` describes the parts. `torchao` and `transformer_engine` know the classes. `layouts` knows the layouts of scales
and codes. The package needs only numpy.
"""
