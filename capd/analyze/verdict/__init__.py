"""The verdict on number formats: the numbers by role of tensor, the best format, the worst tensors, and sentences."""
