"""Whole tensors from the parts that ranks captured: what each part is, where it belongs, and how it is put there."""
