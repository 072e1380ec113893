"""Facts about one tensor from torch, before the tensor is captured."""
