"""The rules: which tensors of which modules are captured. No torch."""
